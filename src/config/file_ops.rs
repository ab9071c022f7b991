//! `[tools.file_ops]`: how much the files of a workspace may take.

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{self, count, size};

/// `[tools.file_ops]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileOps {
    /// Maximum size of a file that is written.
    #[serde(deserialize_with = "size::<1_024, 1_099_511_627_776, _>")]
    #[schemars(schema_with = "values::size_schema::<1_024, 1_099_511_627_776>")]
    pub max_file: usize,
    /// Maximum size of all files of a workspace together.
    #[serde(deserialize_with = "size::<1_024, 1_099_511_627_776, _>")]
    #[schemars(schema_with = "values::size_schema::<1_024, 1_099_511_627_776>")]
    pub workspace_quota: usize,
    /// Maximum number of files and directories of a workspace.
    #[serde(deserialize_with = "count::<1, 10_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 10_000_000>")]
    pub workspace_files: u64,
}
