//! The paths to which the service itself writes while programs run in a workspace: uploads, files of
//! other runs, downloads. Files there are not attributed to the programs.
//!
//! A name is identified by its directory's inode, so that it does not matter through which workspace it
//! was written. Names are kept while programs run that began before the write; those of staged files also
//! while these exist.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::LazyLock;

use cap_std::fs::{Dir, MetadataExt};
use parking_lot::Mutex;

/// Names that are kept; further ones are not recorded.
const KEPT: usize = 100_000;

static NOTED: LazyLock<Mutex<WrittenNames>> = LazyLock::new(Mutex::default);

/// A directory's device and inode, and a name in it.
type Key = (u64, u64, OsString);

#[derive(Debug, Default)]
struct WrittenNames {
    /// The number of the next event: the start of a watch, or a write.
    next: u64,
    watches: BTreeSet<u64>,
    names: HashMap<Key, u64>,
    /// The names of staged files that exist.
    staged: HashSet<Key>,
}

impl WrittenNames {
    fn note(&mut self, key: Key) {
        let at = self.next;
        if self.names.len() < KEPT || self.names.contains_key(&key) {
            self.next += 1;
            self.names.insert(key, at);
        }
    }
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
        let noted = NOTED.lock();
        noted.staged.contains(&key) || noted.names.get(&key).is_some_and(|at| *at > self.0)
    }

    /// Whether what is at that name is a file that the service has staged, or nothing is there any more
    /// and such a file was there since this watch began.
    pub fn is_staged(&self, directory: &Dir, name: &OsStr) -> bool {
        let Some(key) = key(directory, name) else { return false };
        let is_known = {
            let noted = NOTED.lock();
            if noted.staged.contains(&key) {
                return true;
            }
            noted.names.get(&key).is_some_and(|at| *at > self.0)
        };
        is_known && directory.symlink_metadata(name).is_err()
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
    NOTED.lock().note(key);
}

/// The name of a staged file. It is dropped after the file has left it.
#[derive(Debug)]
pub(super) struct StagedName(Option<Key>);

impl StagedName {
    /// Records that the service is about to stage a file at that name.
    pub(super) fn at(directory: &Dir, name: &str) -> Self {
        let key = key(directory, OsStr::new(name));
        NOTED.lock().staged.extend(key.clone());
        Self(key)
    }
}

impl Drop for StagedName {
    fn drop(&mut self) {
        let Some(key) = self.0.take() else { return };
        let mut noted = NOTED.lock();
        noted.staged.remove(&key);
        if !noted.watches.is_empty() {
            noted.note(key);
        }
    }
}

fn key(directory: &Dir, name: &OsStr) -> Option<Key> {
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

    #[test]
    fn a_staged_file_is_known_while_it_exists_and_its_absence_afterwards() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap();
        let staged = StagedName::at(&dir, "s");
        dir.write("s", "").unwrap();
        let watch = Watch::default();
        let is_staged = |watch: &Watch| watch.is_staged(&dir, OsStr::new("s"));
        assert!(is_staged(&watch) && watch.knows(&dir, OsStr::new("s")));
        assert!(!watch.is_staged(&dir, OsStr::new("other")));
        dir.remove_file("s").unwrap();
        drop(staged);
        assert!(is_staged(&watch));
        assert!(!is_staged(&Watch::default()), "it was gone before");
        dir.write("s", "of a program").unwrap();
        assert!(!is_staged(&watch));
    }
}
