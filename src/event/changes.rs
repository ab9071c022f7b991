//! What a tool call did to a file.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bytes of a diff.
pub const MAX_DIFF: usize = 64 * 1024;

/// A change of one file, or of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ToolFileChange)]
pub struct FileChange {
    /// The path, relative to the run's workspace.
    pub path: String,
    /// What happened to it.
    pub change: ChangeKind,
    /// The earlier path of a moved file; absent unless it was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub from: Option<String>,
    /// Lines that were added; null: unknown, or the file is not text.
    pub added: Option<u64>,
    /// Lines that were removed; null: unknown, or the file is not text.
    pub removed: Option<u64>,
    /// The change as a unified diff, at most 64 KiB; null: not text, too large, or unknown.
    pub diff: Option<String>,
    /// Whether the diff is cut, or left out because of its size or because the change is unknown.
    pub truncated: bool,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Created,
    Modified,
    Deleted,
    Moved,
}

impl FileChange {
    /// A change without lines: of a directory or a link, or a move.
    pub fn plain(path: &str, change: ChangeKind) -> Self {
        Self {
            path: path.to_owned(),
            change,
            from: None,
            added: Some(0),
            removed: Some(0),
            diff: None,
            truncated: false,
        }
    }

    /// A change by a program, whose lines are not counted.
    pub fn of_program(path: &str, change: ChangeKind) -> Self {
        Self { change, ..Self::unknown(path) }
    }

    /// A change that may have happened, of unknown extent.
    pub fn unknown(path: &str) -> Self {
        let (path, change) = (path.to_owned(), ChangeKind::Modified);
        Self { path, change, from: None, added: None, removed: None, diff: None, truncated: true }
    }
}
