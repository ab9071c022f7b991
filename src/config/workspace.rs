//! `[tools.workspace]`: where the runs' files lie, and how they reach other replicas. A string in
//! place of the table is `dir` alone.

use std::path::PathBuf;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::values;

/// `[tools.workspace]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workspace {
    /// Directory of the runs' files, which are below `<dir>/<tenant>/`.
    pub dir: PathBuf,
    /// Where the files are kept.
    pub store: WorkspaceStore,
    /// How long what was taken out of a workspace is kept in `<dir>/.quarantine`; `never` deletes none.
    #[serde(deserialize_with = "values::retention::<1_000, 3_153_600_000, _>")]
    #[schemars(schema_with = "values::retention_schema")]
    pub quarantine_retention: Option<Duration>,
}

/// Where the runs' files are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceStore {
    /// In the directory of this machine alone.
    Local,
    /// In the directory, which is the same on all replicas; they check that.
    Shared,
}

/// The table, or the directory as a string.
pub(super) fn schema(generator: &mut SchemaGenerator) -> Schema {
    let table = generator.subschema_for::<Workspace>();
    json_schema!({"anyOf": [{"type": "string"}, table]})
}
