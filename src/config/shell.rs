//! `[tools.shell]`: programs that agents run, by the tool `shell` and as tools of their own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

use super::values::{self, count, duration, size};

/// `[tools.shell]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shell {
    /// Directories where programs are looked for, absolute; programs can read them.
    #[serde(deserialize_with = "directories")]
    #[schemars(inner(regex(pattern = "^/")), length(min = 1, max = 32))]
    pub path: Vec<PathBuf>,
    /// Variables of the service that programs see, beside PATH, HOME, LANG and TMPDIR.
    #[serde(deserialize_with = "variables")]
    #[schemars(inner(regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$")), length(max = 64))]
    pub env: Vec<String>,
    /// Whether nothing runs unless the sandbox is enforced.
    pub require_sandbox: bool,
    /// How long one call may take.
    #[serde(deserialize_with = "duration::<100, 86_400, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub timeout: Duration,
    /// Bytes that are kept of each output stream.
    #[serde(deserialize_with = "size::<1024, 1_048_576, _>")]
    #[schemars(schema_with = "values::size_schema::<1024, 1_048_576>")]
    pub max_output: usize,
    /// Bytes of memory of all programs of a call together.
    #[serde(deserialize_with = "size::<16_777_216, 1_099_511_627_776, _>")]
    #[schemars(schema_with = "values::size_schema::<16_777_216, 1_099_511_627_776>")]
    pub memory: usize,
    /// Processor time of one program.
    #[serde(deserialize_with = "count::<1, 86_400, _, _>")]
    #[schemars(schema_with = "values::count_schema::<1, 86_400>")]
    pub cpu_seconds: u64,
    /// Processes and threads of a call.
    #[serde(deserialize_with = "count::<4, 32_768, _, _>")]
    #[schemars(schema_with = "values::count_schema::<4, 32_768>")]
    pub processes: u64,
    /// Bytes of one file that programs write.
    #[serde(deserialize_with = "size::<1024, 1_099_511_627_776, _>")]
    #[schemars(schema_with = "values::size_schema::<1024, 1_099_511_627_776>")]
    pub file_size: usize,
    /// Files that one program has open.
    #[serde(deserialize_with = "count::<16, 1_048_576, _, _>")]
    #[schemars(schema_with = "values::count_schema::<16, 1_048_576>")]
    pub open_files: u64,
}

fn directories<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    let directories = Vec::<PathBuf>::deserialize(deserializer)?;
    if !(1..=32).contains(&directories.len()) {
        return Err(serde::de::Error::custom("has not 1 to 32 directories"));
    }
    match directories
        .iter()
        .find(|directory| !directory.is_absolute() || *directory == Path::new("/"))
    {
        None => Ok(directories),
        Some(odd) => {
            let message = format!("{} is not an absolute path of a directory", odd.display());
            Err(serde::de::Error::custom(message))
        }
    }
}

fn variables<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(deserializer)?;
    let is_name = |name: &String| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    match names.iter().find(|name| !is_name(name)) {
        None if names.len() <= 64 => Ok(names),
        None => Err(serde::de::Error::custom("has more than 64 names")),
        Some(odd) => Err(serde::de::Error::custom(format!(
            "{odd:?} is not the name of an environment variable"
        ))),
    }
}
