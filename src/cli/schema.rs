//! `toolloop schema`: JSON Schemas of agent definitions and of the configuration file.
//!
//! Both are generated from the types that the files are parsed into, so that they have exactly the
//! accepted keys. `toolloop check` finds what a schema cannot express: tools and directories that do
//! not exist, and contradictions between keys.

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
    /// Print the schema of an agent definition, agents/<name>.yaml
    #[command(after_help = AGENT_HELP)]
    Agent,
    /// Print the schema of the configuration file, toolloop.toml
    Config,
}

pub(super) fn schema(what: SchemaCommand) -> Value {
    match what {
        SchemaCommand::Agent => schemars::schema_for!(Definition).to_value(),
        SchemaCommand::Config => config::schema(),
    }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
