//! Remembers which definitions this process has stored recently, so that they are not sent with every run.
//!
//! A definition is stored before the first run that refers to it, and again once an hour while runs
//! are started with it, which shows [`Store::delete_ended`](super::Store::delete_ended) that it is
//! in use. Only what was not stored again for [`KEPT_AFTER_USE`] may be deleted, so what is known here exists.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use parking_lot::Mutex;

use super::{DefinitionSnapshot, RunWrite};

/// How long a definition counts as stored.
const REFRESH_INTERVAL: Duration = Duration::from_hours(1);
/// How long after its last use a definition is kept in any case; well over [`REFRESH_INTERVAL`].
pub(super) const KEPT_AFTER_USE: TimeDelta = TimeDelta::hours(2);

/// Hashes of definitions, and when they were stored.
#[derive(Debug, Default)]
pub(super) struct Definitions {
    stored: Mutex<HashMap<String, Instant>>,
}

impl Definitions {
    /// The definitions that must be stored before this batch: each once, and sorted, so that two replicas that store
    /// the same ones never wait for each other.
    pub(super) fn missing<'b>(&self, batch: &'b [RunWrite]) -> Vec<&'b DefinitionSnapshot> {
        let stored = self.stored.lock();
        let is_known =
            |hash: &str| stored.get(hash).is_some_and(|at| at.elapsed() < REFRESH_INTERVAL);
        let new = batch.iter().filter_map(|write| write.new.as_ref());
        let mut missing: Vec<_> =
            new.map(|new| &*new.definition).filter(|d| !is_known(&d.hash)).collect();
        missing.sort_unstable_by(|a, b| a.hash.cmp(&b.hash));
        missing.dedup_by(|a, b| a.hash == b.hash);
        missing
    }

    /// Notes that these are stored.
    pub(super) fn note(&self, definitions: &[&DefinitionSnapshot]) {
        if !definitions.is_empty() {
            let mut stored = self.stored.lock();
            stored.retain(|_, at| at.elapsed() < REFRESH_INTERVAL);
            stored.extend(
                definitions.iter().map(|definition| (definition.hash.clone(), Instant::now())),
            );
        }
    }
}
