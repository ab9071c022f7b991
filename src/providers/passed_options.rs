//! Provider options that a definition passes on by name.
//!
//! They are written next to the members of the request itself. An object that both have is written
//! once, with the members of both. Duplicate members are refused when a definition is loaded
//! (`run::check_passed`).

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// Names and values, or nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassedOptions<'a> {
    all: Option<&'a Map<String, Value>>,
    but: &'static str,
}

impl<'a> PassedOptions<'a> {
    pub fn new(all: &'a Map<String, Value>) -> Self {
        Self { all: Some(all), but: "" }
    }

    /// Without the object that the request has, too: its members are written by [`Self::within`].
    pub(super) fn beside(self, shared: &'static str) -> Self {
        Self { but: shared, ..self }
    }

    /// What is in that object.
    pub(super) fn within(self, shared: &str) -> Self {
        Self { all: self.all.and_then(|all| all.get(shared)?.as_object()), but: "" }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_none_or(Map::is_empty)
    }
}

impl Serialize for PassedOptions<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let all = self.all.into_iter().flatten();
        serializer.collect_map(all.filter(|(name, _)| *name != self.but))
    }
}
