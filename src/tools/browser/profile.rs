//! The profile directory of one Chromium. It is locked while the service lives that created it, so that
//! another service can recognise and remove directories of killed ones.

use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use crate::bounds::off_worker;
use crate::tools::removal::remove_path;

const PREFIX: &str = "toolloop-browser-";
const LOCK: &str = "lock";
/// What Chromium writes, and where the files arrive that pages download: beside the former, so that
/// Chromium cannot put something else in its place.
const OWN: &str = "profile";
const DOWNLOADS: &str = "downloads";
/// The user id under which Chromium runs if the service is the superuser: `nobody`.
pub(super) const NOBODY: u32 = 65_534;

pub(super) struct Profile {
    directory: PathBuf,
    _lock: File,
}

impl Profile {
    /// Makes one that the user may write which Chromium will run as.
    pub(super) fn new() -> io::Result<Self> {
        off_worker(|| Self::within(&std::env::temp_dir())) // much may have to be removed
    }

    fn within(place: &Path) -> io::Result<Self> {
        for left in fs::read_dir(place)?.flatten() {
            let _ = remove_abandoned(&left); // a directory that cannot be removed harms no other
        }
        let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(place)?;
        let unlocked = made.path().join("unlocked");
        let lock = File::create_new(&unlocked)?;
        lock.lock()?;
        fs::rename(unlocked, made.path().join(LOCK))?;
        let profile = Self { directory: made.keep(), _lock: lock };
        let (own, downloads) = (profile.path(), profile.downloads());
        fs::create_dir(&own)?;
        fs::create_dir(&downloads)?;
        if rustix::process::geteuid().is_root() {
            chown(&own, Some(NOBODY), Some(NOBODY))?;
            for passed in [&profile.directory, &downloads] {
                fs::set_permissions(passed, fs::Permissions::from_mode(0o711))?;
            }
        }
        Ok(profile)
    }

    /// What Chromium may write.
    pub(super) fn path(&self) -> PathBuf {
        self.directory.join(OWN)
    }

    /// Where each page has a directory for what it downloads.
    pub(super) fn downloads(&self) -> PathBuf {
        self.directory.join(DOWNLOADS)
    }
}

/// Removes the directory. A page may have made Chromium nest directories deeply.
impl Drop for Profile {
    fn drop(&mut self) {
        let _ = off_worker(|| remove_path(&self.directory)); // the next one finds what is left
    }
}

/// Removes a directory that a service made which has ended.
fn remove_abandoned(entry: &DirEntry) -> io::Result<()> {
    let own = rustix::process::geteuid();
    let metadata = entry.metadata()?; // does not follow links
    let is_ours = metadata.uid() == own.as_raw() || (own.is_root() && metadata.uid() == NOBODY);
    let is_named = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
    if !metadata.is_dir() || !is_ours || !is_named {
        return Ok(());
    }
    File::open(entry.path().join(LOCK))?.try_lock()?;
    remove_path(&entry.path())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn what_a_killed_service_left_is_removed_by_the_next() {
        let place = TempDir::new().unwrap();
        let make = |name: &str, lock: bool| {
            let directory = place.path().join(name);
            fs::create_dir(&directory).unwrap();
            if lock {
                fs::write(directory.join(LOCK), "").unwrap();
            }
        };
        make("toolloop-browser-left", true);
        make("toolloop-browser-just-begun", false);
        make("other", true);
        let first = Profile::within(place.path()).unwrap();
        let second = Profile::within(place.path()).unwrap();
        let mut there: Vec<_> =
            fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        there.sort();
        let named = |profile: &Profile| profile.directory.file_name().unwrap().to_owned();
        let mut expected = vec![
            "other".into(),
            "toolloop-browser-just-begun".into(),
            named(&first),
            named(&second),
        ];
        expected.sort();
        assert_eq!(there, expected);
        drop((first, second));
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }
}
