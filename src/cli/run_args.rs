//! Arguments that name a run, and the service that has it.

use clap::Args;
use uuid::Uuid;

use super::JsonArg;
use super::client::TargetArgs;

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The run's id
    #[arg(value_parser = id)]
    pub(super) id: Uuid,
    #[command(flatten)]
    pub(super) target: TargetArgs,
    #[command(flatten)]
    pub(super) output: JsonArg,
}

/// Parses the id of a run or a call.
pub(super) fn id(text: &str) -> Result<Uuid, String> {
    let is_none = |_| "an id is a UUID, e.g. 01970000-0000-7000-8000-000000000000".to_owned();
    Uuid::parse_str(text).map_err(is_none)
}
