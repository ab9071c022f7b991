//! `toolloop schema`: JSON Schemas of the files that people write.
//!
//! Both are made from the types that the files are parsed into, so they cannot name a key that does
//! not exist or miss one that does. What a schema cannot say (whether a tool or a directory exists,
//! contradictions between keys) is said by `toolloop check`.

use clap::Subcommand;
use serde_json::Value;

use crate::agents::Definition;
use crate::config;

const AGENT_HELP: &str = "\
With the YAML extension of an editor:
  toolloop schema agent > agent.schema.json
and as the first line of agents/<name>.yaml:
  # yaml-language-server: $schema=../agent.schema.json";

#[derive(Debug, Clone, Copy, Subcommand)]
pub(super) enum SchemaCommand {
    /// Of an agent definition, agents/<name>.yaml
    #[command(after_help = AGENT_HELP)]
    Agent,
    /// Of the configuration file, toolloop.toml
    Config,
}

/// The JSON Schema (2020-12).
pub(super) fn schema(what: SchemaCommand) -> Value {
    match what {
        SchemaCommand::Agent => schemars::schema_for!(Definition).to_value(),
        SchemaCommand::Config => config::schema(),
    }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
