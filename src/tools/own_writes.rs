//! The paths to which the service itself writes while programs run in a workspace: uploads, files of
//! other runs, downloads. Files there are not attributed to the programs.
//!
//! A name is identified by its directory's inode, so that it does not matter through which workspace it
//! was written. Names are kept while programs run that began before the write.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::sync::LazyLock;

use cap_std::fs::{Dir, MetadataExt};
use parking_lot::Mutex;

/// Names that are kept; further ones are not recorded.
const KEPT: usize = 100_000;

static NOTED: LazyLock<Mutex<WrittenNames>> = LazyLock::new(Mutex::default);

#[derive(Debug, Default)]
struct WrittenNames {
    /// The number of the next event: the start of a watch, or a write.
    next: u64,
    watches: BTreeSet<u64>,
    /// By device and inode of the directory.
    names: HashMap<(u64, u64, OsString), u64>,
}

/// While it exists, names are kept that are written after its creation.
#[derive(Debug)]
pub struct Watch(u64);

impl Default for Watch {
    fn default() -> Self {
        let mut noted = NOTED.lock();
        let begun = noted.next;
        noted.next += 1;
        noted.watches.insert(begun);
        Self(begun)
    }
}

impl Watch {
    /// Whether the service has written to that name since this watch began.
    pub fn knows(&self, directory: &Dir, name: &OsStr) -> bool {
        let Some(key) = key(directory, name) else { return false };
        NOTED.lock().names.get(&key).is_some_and(|at| *at > self.0)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut noted = NOTED.lock();
        noted.watches.remove(&self.0);
        match noted.watches.first().copied() {
            Some(first) if self.0 < first => noted.names.retain(|_, at| *at > first),
            Some(_) => {}
            None => noted.names = HashMap::new(),
        }
    }
}

/// Records that the service is about to write to that name.
pub(super) fn note(directory: &Dir, name: &str) {
    if NOTED.lock().watches.is_empty() {
        return;
    }
    let Some(key) = key(directory, OsStr::new(name)) else { return };
    let mut noted = NOTED.lock();
    let at = noted.next;
    if noted.names.len() < KEPT || noted.names.contains_key(&key) {
        noted.next += 1;
        noted.names.insert(key, at);
    }
}

fn key(directory: &Dir, name: &OsStr) -> Option<(u64, u64, OsString)> {
    let metadata = directory.dir_metadata().ok()?;
    Some((metadata.dev(), metadata.ino(), name.to_owned()))
}

#[cfg(test)]
mod tests {
    use cap_std::ambient_authority;

    use super::*;

    #[test]
    fn names_are_known_to_watches_that_began_before() {
        let place = tempfile::tempdir().unwrap();
        let open = || Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap();
        let (one, other) = (open(), open());
        note(&one, "early");
        let first = Watch::default();
        note(&one, "a");
        let second = Watch::default();
        note(&other, "b");
        let known =
            |watch: &Watch| ["early", "a", "b"].map(|name| watch.knows(&one, OsStr::new(name)));
        assert_eq!(known(&first), [false, true, true]);
        assert_eq!(known(&second), [false, false, true]);
        drop(first);
        assert_eq!(known(&second), [false, false, true]);
    }
}
