//! Consumption of tool calls: files, commands, network requests, lines.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Consumption of one call or of a whole run. Counted when a call is dispatched, whatever its
/// outcome.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Consumption {
    /// Files read, directories listed and searched.
    #[serde(skip_serializing_if = "is_zero")]
    pub files_read: u64,
    /// Writes of files and directories.
    #[serde(skip_serializing_if = "is_zero")]
    pub files_written: u64,
    /// Commands.
    #[serde(skip_serializing_if = "is_zero")]
    pub commands: u64,
    /// Requests to the network.
    #[serde(skip_serializing_if = "is_zero")]
    pub network_requests: u64,
    /// Files created, changed, moved or deleted, each once.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub files_modified: BTreeSet<String>,
    /// The changed files that are counted but not listed, because one call changed too many.
    #[serde(skip_serializing_if = "is_zero")]
    pub files_unlisted: u64,
    /// How many of these programs changed, which is known only afterwards.
    #[serde(skip_serializing_if = "is_zero")]
    pub files_of_programs: u64,
    /// Lines written or replaced.
    #[serde(skip_serializing_if = "is_zero")]
    pub lines_changed: u64,
}

impl Consumption {
    pub const NOTHING: Self = Self {
        files_read: 0,
        files_written: 0,
        commands: 0,
        network_requests: 0,
        files_modified: BTreeSet::new(),
        files_unlisted: 0,
        files_of_programs: 0,
        lines_changed: 0,
    };

    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// What there is more than in another one. Files are those of this one: each counts once.
    #[must_use]
    pub fn beyond(self, other: &Self) -> Self {
        Self {
            files_read: self.files_read.saturating_sub(other.files_read),
            files_written: self.files_written.saturating_sub(other.files_written),
            commands: self.commands.saturating_sub(other.commands),
            network_requests: self.network_requests.saturating_sub(other.network_requests),
            lines_changed: self.lines_changed.saturating_sub(other.lines_changed),
            files_modified: self.files_modified,
            files_unlisted: self.files_unlisted,
            files_of_programs: self.files_of_programs,
        }
    }

    /// How many files were modified.
    pub fn files(&self) -> u64 {
        self.files_unlisted.saturating_add(self.files_modified.len() as u64)
    }

    /// How many of them tools modified that say beforehand what they do.
    pub fn files_of_tools(&self) -> u64 {
        self.files().saturating_sub(self.files_of_programs)
    }

    pub fn add(&mut self, other: &Self) {
        self.files_read = self.files_read.saturating_add(other.files_read);
        self.files_written = self.files_written.saturating_add(other.files_written);
        self.commands = self.commands.saturating_add(other.commands);
        self.network_requests = self.network_requests.saturating_add(other.network_requests);
        self.lines_changed = self.lines_changed.saturating_add(other.lines_changed);
        self.files_modified.extend(other.files_modified.iter().cloned());
        self.files_unlisted = self.files_unlisted.saturating_add(other.files_unlisted);
        self.files_of_programs = self.files_of_programs.saturating_add(other.files_of_programs);
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}
