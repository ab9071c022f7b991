//! Locks of files: a check right before a change stays true until the change is made.
//!
//! A lock is held only for the check and the change, and never while something is computed, staged or
//! waited for. Its key is the directory that holds the file and the file's name there, whichever path
//! leads to it. Keys are hashed to a fixed number of locks, so that no state is kept for each. On a volume
//! that replicas share, locks of the file system are used, too. If the volume does not support them, a
//! lock holds within this process only.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError, create_dir};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cap_std::fs::{Dir, MetadataExt};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

/// The directory of the lock files on a volume; no tenant can have its name.
const DIRECTORY: &str = ".locks";
/// The number of locks, which names share by their hash.
const LOCKS: usize = 256;
/// How long a lock is waited for.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(5);

static HERE: [Mutex<()>; LOCKS] = [const { Mutex::new(()) }; LOCKS];

/// The locks of files, within this process and on the volume that replicas share, if there is one.
#[derive(Debug, Clone, Default)]
pub struct FileLocks(Option<Arc<Volume>>);

#[derive(Debug)]
struct Volume {
    root: PathBuf,
    has_no_locks: AtomicBool,
}

/// Held while files are changed.
#[derive(Debug)]
pub struct FileLock {
    _held: Vec<(Option<File>, MutexGuard<'static, ()>)>,
}

impl FileLocks {
    /// Where replicas share the volume with this directory.
    pub fn on_volume(root: PathBuf) -> Self {
        Self(Some(Arc::new(Volume { root, has_no_locks: AtomicBool::new(false) })))
    }

    /// Whether replicas share the volume.
    pub fn are_shared(&self) -> bool {
        self.0.is_some()
    }

    /// Locks these names in directories; waits until no other task holds one of them. Blocks.
    ///
    /// # Errors
    /// It takes too long, or the volume cannot be used.
    pub fn lock(&self, names: &[(&Dir, &str)]) -> io::Result<FileLock> {
        let numbers = names.iter().map(|(dir, name)| number_of(dir, name));
        let numbers = numbers.collect::<io::Result<BTreeSet<usize>>>()?;
        let until = Instant::now() + MAX_WAIT;
        let mut held = Vec::with_capacity(numbers.len());
        // All tasks lock in this order, so that no deadlock is possible.
        for number in numbers {
            let here = HERE[number].try_lock_until(until).ok_or(ErrorKind::TimedOut)?;
            let there = match &self.0 {
                Some(volume) => volume.lock(number, until)?,
                None => None,
            };
            held.push((there, here));
        }
        Ok(FileLock { _held: held })
    }
}

impl Volume {
    #[expect(clippy::disallowed_methods, reason = "it runs on a thread that may block")]
    fn lock(&self, number: usize, until: Instant) -> io::Result<Option<File>> {
        let file = lock_file(&self.root, &format!(".{number:02x}"))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return Err(ErrorKind::TimedOut.into()),
                Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                    if !self.has_no_locks.swap(true, Ordering::Relaxed) {
                        tracing::warn!(
                            %error,
                            "the workspace volume has no file locks: edits of one file on two replicas \
                             at the same time may be lost"
                        );
                    }
                    return Ok(None);
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }
}

/// The same on every replica.
fn number_of(dir: &Dir, name: &str) -> io::Result<usize> {
    let inode = dir.dir_metadata()?.ino().to_le_bytes();
    let hash = Sha256::new().chain_update(inode).chain_update(name).finalize();
    Ok(usize::from(hash[0]))
}

/// A lock file of a volume.
///
/// # Errors
/// Errors of the file system.
pub fn lock_file(root: &Path, name: &str) -> io::Result<File> {
    let directory = root.join(DIRECTORY);
    let open = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.open(directory.join(name))
    };
    match open() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            match create_dir(&directory) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            open()
        }
        opened => opened,
    }
}

/// Whether a file system has no locks.
pub fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported
        || error.raw_os_error() == Some(Errno::NOLCK.raw_os_error())
}

#[cfg(test)]
mod tests {
    use cap_std::ambient_authority;

    use super::*;

    #[test]
    fn one_at_a_time_changes_a_name_of_a_directory() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("t/d")).unwrap();
        let open = |path: &str| Dir::open_ambient_dir(root.path().join(path), ambient_authority());
        let (tenant, dir) = (open("t").unwrap(), open("t/d").unwrap());
        let same = tenant.open_dir("d").unwrap();
        let number = |dir: &Dir, name: &str| number_of(dir, name).unwrap();
        assert_eq!(number(&dir, "x"), number(&same, "x"));
        assert!((0..100).any(|n| number(&dir, &n.to_string()) != number(&dir, "x")));

        let lock = |locks: &FileLocks| locks.lock(&[(&dir, "x"), (&dir, "x"), (&tenant, "y")]);
        let replica = || FileLocks::on_volume(root.path().to_owned());
        for locks in [FileLocks::default(), replica()] {
            drop(lock(&locks).unwrap());
            let held = lock(&locks).unwrap();
            assert!(HERE[number(&same, "x")].try_lock().is_none());
            drop(held);
            drop(lock(&locks).unwrap());
        }
        // As if another process held it.
        let name = format!(".{:02x}", number(&dir, "x"));
        let other = lock_file(root.path(), &name).unwrap();
        other.lock().unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        let volume = replica().0.unwrap();
        let refused = volume.lock(number(&dir, "x"), soon).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::TimedOut);
        drop(other);
        assert!(volume.lock(number(&dir, "x"), soon).unwrap().is_some());
        assert!(FileLocks::on_volume(root.path().join("missing")).lock(&[(&dir, "x")]).is_err());
    }
}
