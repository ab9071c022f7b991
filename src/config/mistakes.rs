//! All that is wrong with settings, for people: reading stops at the first mistake.

use std::path::Path;

use super::{Config, ConfigError, Flags, unset};

/// Mistakes that are reported at most.
const MOST: usize = 20;

impl Config {
    /// All that is wrong with file and environment, each found by what refuses them: what is wrong is
    /// left out, and the rest is read again.
    pub fn mistakes(flags: &Flags) -> Vec<ConfigError> {
        let (mut found, mut left_out) = (Vec::new(), Vec::<String>::new());
        while found.len() < MOST {
            let Err(mistake) = Self::read_with(flags, unset::stand_in, &left_out) else { break };
            let key = mistake.removable_key().map(str::to_owned);
            if !left_out.iter().any(|removed| mistake.misses(removed)) {
                found.push(mistake);
            }
            match key {
                Some(key) if !key.is_empty() && !left_out.contains(&key) => left_out.push(key),
                _ => break,
            }
        }
        found
    }

    /// What is wrong with a file, with the variables of this process.
    pub fn mistake_in(file: &Path) -> Option<ConfigError> {
        let flags = Flags { config: Some(file.to_owned()), ..Flags::default() };
        Self::read(&flags).err()
    }
}
