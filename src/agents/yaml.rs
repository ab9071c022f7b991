//! Why a definition is refused, with line, column and key.
//!
//! Complaints that are made after parsing (a limit out of range) can still be traced to where the
//! key stands.

use std::fmt;

use serde::de::DeserializeOwned;

use crate::bounds::yaml::{self, YamlError};

/// Why a definition is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionError {
    /// Line and column, 1-based, where they are known.
    pub place: Option<(u64, u64)>,
    /// The path of keys, e.g. `limits.max_attempts`; empty for the file as a whole.
    pub key: String,
    /// What is wrong.
    pub message: String,
}

impl DefinitionError {
    /// A complaint about a key.
    pub fn at(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: None, key: key.into(), message: message.into() }
    }

    /// The same complaint with the place of its key, or of the nearest section around it.
    #[must_use]
    pub fn located_in(mut self, text: &str) -> Self {
        if self.place.is_none() {
            self.place = yaml::place_of(text, &self.key);
        }
        self
    }
}

impl fmt::Display for DefinitionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.place {
            write!(f, "line {line}, column {column}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for DefinitionError {}

/// Reads one YAML document.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, DefinitionError> {
    yaml::read(text).map_err(|YamlError { place, key, message, .. }| DefinitionError {
        place,
        key,
        message,
    })
}
