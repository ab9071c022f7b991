//! All that is wrong with settings, for people: reading stops at the first mistake.

use super::{Config, ConfigError, Flags, unset_variables};

/// Mistakes that are reported at most.
const MAX_MISTAKES: usize = 20;

impl Config {
    /// All mistakes in file and environment. Each is found by loading: the wrong value is
    /// left out, and the rest is loaded again.
    pub fn mistakes(flags: &Flags) -> Vec<ConfigError> {
        let (mut found, mut left_out) = (Vec::new(), Vec::<String>::new());
        while found.len() < MAX_MISTAKES {
            let Err(mistake) = Self::read_with(flags, unset_variables::add_placeholders, &left_out)
            else {
                break;
            };
            let key = mistake.removable_key().and_then(|key| next_to_leave_out(key, &left_out));
            let is_made_by_us = left_out.iter().any(|removed| mistake.misses(removed));
            if !is_made_by_us && !found.contains(&mistake) {
                found.push(mistake);
            }
            match key {
                Some(key) => left_out.push(key),
                None => break,
            }
        }
        found
    }
}

/// The next key to leave out: this key, or the nearest section around it that is not left out yet. If a
/// value is missing, its whole section has to go.
fn next_to_leave_out(key: &str, left_out: &[String]) -> Option<String> {
    let mut key = key;
    while !key.is_empty() && left_out.iter().any(|removed| removed == key) {
        key = key.rfind(['.', '[']).map_or("", |end| &key[..end]);
    }
    (!key.is_empty()).then(|| key.to_owned())
}
