//! Why a definition is refused, with line, column and key.
//!
//! Complaints that are made after parsing (a limit out of range) can still be traced to the place of the
//! key.

use serde::de::DeserializeOwned;

use crate::bounds::yaml;

pub use crate::bounds::mistakes::Mistake as DefinitionError;

/// Reads one YAML document.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, DefinitionError> {
    yaml::read(text).map_err(Into::into)
}
