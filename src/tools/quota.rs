//! How much a workspace may hold, and how large one file of it may be.
//!
//! The size is measured by a walk when a workspace is first written to, and updated with every change
//! made through the service. Programs change files as well, so it is measured again when the figure is
//! old, and before a change is refused because of it. If other replicas write to the same volume, a
//! figure older than a second is trusted only for a small share of the remaining room. Nested workspaces
//! are measured separately. A measurement may miss the files of changes in progress, so it adds what these
//! were admitted for.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cap_std::fs::{Dir, MetadataExt};
use parking_lot::Mutex;

use super::entries::{self, Space};

/// How long a figure is updated before it is measured again.
const FRESH: Duration = Duration::from_mins(1);
/// A figure that is younger than this, and exact, is not measured again before a refusal; on a shared
/// volume, each is.
const NEW: Duration = Duration::from_secs(1);
/// On a shared volume, one of so many parts of the remaining room may be used before it is measured again.
const SHARE: u64 = 8;
/// On a shared volume, at most this part of the time is spent on measuring while there is room.
const PAUSE: u32 = 20;
/// Measuring stops at this many times the quota: far enough to notice growth beyond the quota.
const COUNTED: u64 = 4;
/// Workspaces whose figures are kept.
const KEPT: usize = 4096;
/// Levels of directories that are measured; no path of a tool has more names.
const MAX_LEVELS: usize = 2_048;

/// `[tools.file_ops]`: the bounds of each workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Bytes of one file.
    pub max_file: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Files and directories.
    pub files: u64,
}

impl Default for QuotaLimits {
    fn default() -> Self {
        Self { max_file: 16 << 20, bytes: 1 << 30, files: 100_000 }
    }
}

/// What a change adds to a workspace, before it is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Growth {
    before: u64,
    after: u64,
    /// Files and directories.
    adds: u64,
}

impl Growth {
    /// A file that has so many bytes afterwards; `before` is `None` where it is new.
    pub fn of_file(before: Option<u64>, after: u64) -> Self {
        Self { before: before.unwrap_or(0), after, adds: u64::from(before.is_none()) }
    }

    /// Directories.
    pub fn of_directories(count: usize) -> Self {
        Self { adds: count as u64, ..Self::default() }
    }
}

/// Why a change is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverQuota {
    #[error("the file would have {0} bytes; at most {1} are possible")]
    File(u64, u64),
    #[error(
        "the workspace would hold {0} bytes; at most {1} are possible: delete what is not needed"
    )]
    Bytes(u64, u64),
    #[error(
        "the workspace would hold {0} files and directories; at most {1} are possible: delete what \
         is not needed"
    )]
    Files(u64, u64),
}

impl OverQuota {
    /// Whether it exceeds the limit by more than an eighth.
    pub fn is_far(self) -> bool {
        let (Self::File(amount, most) | Self::Bytes(amount, most) | Self::Files(amount, most)) =
            self;
        amount > most.saturating_add(most / 8)
    }

    /// The bytes or the files, whichever limit is exceeded.
    pub fn amount_of(self, bytes: u64, files: u64) -> u64 {
        if matches!(self, Self::Files(..)) { files } else { bytes }
    }

    /// The bytes or files that there would be.
    pub fn amount(self) -> u64 {
        let (Self::File(amount, _) | Self::Bytes(amount, _) | Self::Files(amount, _)) = self;
        amount
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Used {
    bytes: u64,
    files: u64,
}

impl Used {
    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            files: self.files.saturating_add(other.files),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            files: self.files.saturating_sub(other.files),
        }
    }
}

/// Device and inode of a workspace's directory.
type Key = (u64, u64);

fn key_of(root: &Dir) -> io::Result<Key> {
    root.dir_metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

#[derive(Debug, Clone, Copy)]
struct Figure {
    used: Used,
    measured: Used,
    at: Instant,
    /// How long it took to measure.
    took: Duration,
    /// Whether nothing was added since its measurement began.
    is_exact: bool,
}

/// What changes were admitted for in a workspace, as long as some of them, or measurements, are in progress.
#[derive(Debug, Default)]
struct Changes {
    in_progress: usize,
    begun: Used,
    ended: Used,
}

#[derive(Debug, Default)]
struct Known {
    figures: HashMap<Key, Figure>,
    changes: HashMap<Key, Changes>,
}

impl Known {
    /// Begins a change, or a measurement; returns what all changes that have ended were admitted for.
    fn begin(&mut self, key: Key, added: Used) -> Used {
        let changes = self.changes.entry(key).or_default();
        changes.in_progress += 1;
        changes.begun = changes.begun.plus(added);
        changes.ended
    }

    fn end(&mut self, key: Key, added: Used) {
        let Some(changes) = self.changes.get_mut(&key) else { return };
        changes.in_progress -= 1;
        changes.ended = changes.ended.plus(added);
        if changes.in_progress == 0 {
            self.changes.remove(&key);
        }
    }
}

/// A change that was admitted, until it is dropped: its files are in their places then, or it has failed.
#[derive(Debug)]
pub struct Admitted {
    quota: Arc<Quota>,
    key: Key,
    added: Used,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.quota.known.lock().end(self.key, self.added);
    }
}

/// The bounds, and what is known of each workspace.
#[derive(Debug, Default)]
pub struct Quota {
    limits: QuotaLimits,
    /// Whether other replicas write to the same directories.
    is_shared: bool,
    known: Mutex<Known>,
}

impl Quota {
    pub fn new(limits: QuotaLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// For a volume that other replicas write to.
    pub fn shared(limits: QuotaLimits) -> Self {
        Self { limits, is_shared: true, ..Self::default() }
    }

    pub fn max_file(&self) -> u64 {
        self.limits.max_file
    }

    /// Bytes, and files and directories, of one workspace.
    pub fn bounds(&self) -> [u64; 2] {
        [self.limits.bytes, self.limits.files]
    }

    /// Counts changes if there is room for all of them. `None` if the directory cannot be inspected, and so not
    /// written either. May walk the workspace, so it belongs on the blocking pool.
    ///
    /// # Errors
    /// [`OverQuota`]; a change that makes nothing larger is never refused.
    pub fn admit(
        self: &Arc<Self>,
        root: &Dir,
        growths: impl IntoIterator<Item = Growth>,
    ) -> Result<Option<Admitted>, OverQuota> {
        let change = self.together(growths)?;
        let Ok(key) = key_of(root) else { return Ok(None) };
        self.measure_if_needed(key, root, change);
        let Growth { before, after, adds } = change;
        let mut known = self.known.lock();
        if let Some(figure) = known.figures.get_mut(&key) {
            if let Some(over) = self.over(figure.used, change) {
                return Err(over);
            }
            figure.used.bytes = figure.used.bytes.saturating_sub(before).saturating_add(after);
            figure.used.files = figure.used.files.saturating_add(adds);
            figure.is_exact &= adds == 0;
        }
        let added = Used { bytes: after.saturating_sub(before), files: adds };
        known.begin(key, added);
        Ok(Some(Admitted { quota: Arc::clone(self), key, added }))
    }

    /// Measures a workspace unless its figure is good enough to judge a change.
    fn measure_if_needed(&self, key: Key, root: &Dir, change: Growth) {
        let known = self.known.lock().figures.get(&key).copied();
        let known = known.filter(|figure| figure.at.elapsed() < FRESH);
        let is_enough = known.is_some_and(|figure| match self.over(figure.used, change) {
            Some(_) => !self.is_shared && figure.is_exact && figure.at.elapsed() < NEW,
            None => !self.is_shared || self.holds_for_all(&figure, change),
        });
        if !is_enough {
            self.measure(key, root);
        }
    }

    /// Whether there is room for changes, without counting them; none is there where the workspace is
    /// not made yet. May walk the workspace, so it belongs on the blocking pool.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn has_room(
        &self,
        root: Option<&Dir>,
        growths: impl IntoIterator<Item = Growth>,
    ) -> Result<(), OverQuota> {
        let change = self.together(growths)?;
        let mut used = Used::default();
        if let Some((root, key)) = root.and_then(|root| Some((root, key_of(root).ok()?))) {
            self.measure_if_needed(key, root, change);
            used = self.known.lock().figures.get(&key).map_or(used, |figure| figure.used);
        }
        self.over(used, change).map_or(Ok(()), Err)
    }

    /// Whether a workspace holds more than it may, programs' files included. Walks the workspace, so it
    /// belongs on the blocking pool.
    pub fn excess(&self, root: &Dir) -> Option<OverQuota> {
        let [bytes, files] = self.bounds().map(|most| most.saturating_mul(COUNTED));
        self.exceeded(measured(root, Used { bytes, files }))
    }

    /// The same by a figure that may be a minute old.
    pub fn known_excess(&self, root: &Dir) -> Option<OverQuota> {
        let key = key_of(root).ok()?;
        let known = self.known.lock().figures.get(&key).copied();
        let known = known.filter(|figure| figure.at.elapsed() < FRESH);
        self.exceeded(known.unwrap_or_else(|| self.measure(key, root)).used)
    }

    /// Discards the figure of a workspace.
    pub fn forget(&self, root: &Dir) {
        if let Ok(key) = key_of(root) {
            self.known.lock().figures.remove(&key);
        }
    }

    /// Whether a change fits by a figure although other replicas have written since.
    fn holds_for_all(&self, figure: &Figure, change: Growth) -> bool {
        let Figure { used, measured, took, .. } = *figure;
        let Growth { before, after, adds } = change;
        if after <= before && adds == 0 {
            return true;
        }
        let share = |limit: u64, measured: u64| limit.saturating_sub(measured) / SHARE;
        let bytes = used.bytes.saturating_sub(before).saturating_add(after);
        let is_small = bytes.saturating_sub(measured.bytes)
            <= share(self.limits.bytes, measured.bytes)
            && (used.files + adds).saturating_sub(measured.files)
                <= share(self.limits.files, measured.files);
        let age = figure.at.elapsed();
        age < took || is_small && age < (took * PAUSE).clamp(NEW, FRESH)
    }

    fn measure(&self, key: Key, root: &Dir) -> Figure {
        let most = Used { bytes: u64::MAX, files: self.limits.files };
        let ended = self.known.lock().begin(key, Used::default());
        let since = Instant::now();
        let measured = measured(root, most);
        let (at, took) = (Instant::now(), since.elapsed());
        let mut known = self.known.lock();
        let begun = known.changes.get(&key).map_or(ended, |changes| changes.begun);
        let missed = begun.minus(ended);
        let is_exact = missed.bytes == 0 && missed.files == 0;
        let figure = Figure { used: measured.plus(missed), measured, at, took, is_exact };
        if known.figures.len() >= KEPT {
            known.figures.clear();
        }
        known.figures.insert(key, figure);
        known.end(key, Used::default());
        figure
    }

    fn exceeded(&self, used: Used) -> Option<OverQuota> {
        let QuotaLimits { bytes, files, .. } = self.limits;
        if used.bytes > bytes {
            return Some(OverQuota::Bytes(used.bytes, bytes));
        }
        (used.files > files).then_some(OverQuota::Files(used.files, files))
    }

    /// Subtracts a deleted file.
    pub fn freed(&self, root: &Dir, bytes: u64) {
        let Ok(key) = key_of(root) else { return };
        if let Some(figure) = self.known.lock().figures.get_mut(&key) {
            figure.used.bytes = figure.used.bytes.saturating_sub(bytes);
            figure.used.files = figure.used.files.saturating_sub(1);
        }
    }

    /// The sum of changes, none of which makes a file too large.
    fn together(&self, growths: impl IntoIterator<Item = Growth>) -> Result<Growth, OverQuota> {
        let mut change = Growth::default();
        for Growth { before, after, adds } in growths {
            if after > before && after > self.limits.max_file {
                return Err(OverQuota::File(after, self.limits.max_file));
            }
            change.before = change.before.saturating_add(before);
            change.after = change.after.saturating_add(after);
            change.adds += adds;
        }
        Ok(change)
    }

    fn over(&self, used: Used, change: Growth) -> Option<OverQuota> {
        let Growth { before, after, adds } = change;
        let bytes = used.bytes.saturating_sub(before).saturating_add(after);
        let files = used.files.saturating_add(adds);
        if after > before && bytes > self.limits.bytes {
            return Some(OverQuota::Bytes(bytes, self.limits.bytes));
        }
        (adds > 0 && files > self.limits.files)
            .then_some(OverQuota::Files(files, self.limits.files))
    }
}

/// Counts the content of a directory and beneath, up to a little above a maximum. Links are not followed, and
/// unreadable directories count as empty. One directory of each level may be open, so directories that programs have
/// nested too deeply count as more files than the maximum.
fn measured(root: &Dir, most: Used) -> Used {
    let mut used = Used::default();
    let mut space = Space::new();
    let mut waiting: Vec<(Rc<OwnedFd>, OsString, usize)> = Vec::new();
    let mut next = entries::opened(root, OsStr::new(".")).ok();
    let mut level = 0;
    loop {
        if let Some(directory) = next.map(Rc::new) {
            // A directory that cannot be read to its end counts as far as it was read.
            let _ = entries::each(&*directory, &mut space, |name, kind| {
                if used.files > most.files || used.bytes > most.bytes {
                    return Ok(false);
                }
                used.files += 1;
                if kind.is_file() {
                    let bytes = entries::stat(&*directory, name).map_or(0, |found| found.st_size);
                    used.bytes = used.bytes.saturating_add(bytes.unsigned_abs());
                } else if kind.is_dir() {
                    waiting.push((Rc::clone(&directory), name.to_owned(), level + 1));
                }
                io::Result::Ok(true)
            });
        }
        if used.files > most.files || used.bytes > most.bytes {
            return used;
        }
        let Some((parent, name, deeper)) = waiting.pop() else { return used };
        if deeper > MAX_LEVELS {
            return Used { files: most.files.saturating_add(1), ..used };
        }
        level = deeper;
        next = entries::opened(&*parent, &name).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Workspace;
    use crate::tools::removal::remove_path;

    fn workspace(limits: QuotaLimits) -> (tempfile::TempDir, Workspace) {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(root.path(), "t", ".").unwrap();
        (root, workspace.within(&Arc::new(Quota::new(limits))))
    }

    fn new(bytes: u64) -> Growth {
        Growth::of_file(None, bytes)
    }

    /// A change that is made at once.
    fn admit(workspace: &Workspace, growth: Growth) -> Result<(), OverQuota> {
        workspace.admit(growth).map(drop)
    }

    #[test]
    fn what_is_there_and_what_is_added_count() {
        let (root, workspace) = workspace(QuotaLimits { max_file: 50, bytes: 100, files: 5 });
        std::fs::create_dir(root.path().join("t/d")).unwrap();
        std::fs::write(root.path().join("t/d/there"), [0; 60]).unwrap();
        std::os::unix::fs::symlink("/", root.path().join("t/link")).unwrap();
        assert_eq!(admit(&workspace, new(51)), Err(OverQuota::File(51, 50)));
        assert_eq!(admit(&workspace, new(41)), Err(OverQuota::Bytes(101, 100)));
        let both = workspace.admit_all([new(21), new(20)]).map(drop);
        assert_eq!(both, Err(OverQuota::Bytes(101, 100)));
        assert_eq!(admit(&workspace, new(30)), Ok(()));
        std::fs::write(root.path().join("t/new"), [0; 30]).unwrap();
        assert_eq!(admit(&workspace, new(11)), Err(OverQuota::Bytes(101, 100)));
        assert_eq!(admit(&workspace, Growth::of_file(None, 0)), Ok(()), "the fifth");
        std::fs::write(root.path().join("t/d/e"), "").unwrap();
        assert_eq!(admit(&workspace, new(0)), Err(OverQuota::Files(6, 5)));
        assert_eq!(admit(&workspace, Growth::of_file(Some(60), 55)), Ok(()), "it becomes smaller");
        workspace.freed(55);
        assert_eq!(admit(&workspace, new(50)), Ok(()));
    }

    #[test]
    fn a_measurement_counts_files_that_are_still_being_written() {
        let (_root, workspace) = workspace(QuotaLimits { max_file: 90, bytes: 100, files: 2 });
        let first = workspace.admit(new(60)).unwrap();
        assert_eq!(admit(&workspace, new(60)), Err(OverQuota::Bytes(120, 100)));
        let second = workspace.admit(new(0)).unwrap();
        assert_eq!(admit(&workspace, new(0)), Err(OverQuota::Files(3, 2)));
        drop((first, second));
        assert_eq!(admit(&workspace, new(60)), Ok(()), "both have failed");
    }

    #[test]
    fn replicas_count_what_the_others_have_written() {
        let limits = QuotaLimits { max_file: 2000, bytes: 1000, files: 20 };
        for (bytes, most) in [(200, 5), (0, 20)] {
            let root = tempfile::tempdir().unwrap();
            let replica = || {
                let workspace = Workspace::open(root.path(), "t", ".").unwrap();
                workspace.within(&Arc::new(Quota::shared(limits)))
            };
            let replicas = [replica(), replica(), replica()];
            let mut admitted = 0;
            for (number, replica) in replicas.iter().cycle().take(60).enumerate() {
                if admit(replica, new(bytes)).is_ok() {
                    admitted += 1;
                    let path = root.path().join(format!("t/{number}"));
                    std::fs::write(path, vec![0; usize::try_from(bytes).unwrap()]).unwrap();
                }
            }
            // A figure counts for as long as it took to measure, which may be long on a busy machine.
            assert!((most..2 * most).contains(&admitted), "{admitted} of {most}");
            // A deletion makes room for all at once.
            let full = replicas.iter().filter(|replica| admit(replica, new(bytes)).is_err());
            assert_eq!(full.count(), replicas.len());
            for entry in std::fs::read_dir(root.path().join("t")).unwrap() {
                std::fs::remove_file(entry.unwrap().path()).unwrap();
            }
            assert!(replicas.iter().all(|replica| admit(replica, new(bytes)).is_ok()));
        }
    }

    #[test]
    fn directories_that_no_path_reaches_count_as_too_many() {
        let (root, workspace) = workspace(QuotaLimits::default());
        let mut dir = workspace.root().try_clone().unwrap();
        for _ in 0..MAX_LEVELS {
            dir.create_dir("d").unwrap();
            dir = dir.open_dir("d").unwrap();
        }
        let most = Used { bytes: u64::MAX, files: 100_000 };
        assert_eq!(measured(&workspace.root(), most).files, MAX_LEVELS as u64);
        dir.create_dir("d").unwrap();
        assert_eq!(measured(&workspace.root(), most).files, 100_001);
        assert_eq!(admit(&workspace, new(1)), Err(OverQuota::Files(100_002, 100_000)));
        remove_path(&root.path().join("t")).unwrap();
    }

    #[test]
    fn a_count_ends_above_the_limit() {
        let (root, workspace) = workspace(QuotaLimits { files: 10, ..QuotaLimits::default() });
        for number in 0..30 {
            std::fs::write(root.path().join(format!("t/{number}")), "x").unwrap();
        }
        let most = Used { bytes: u64::MAX, files: 10 };
        assert_eq!(measured(&workspace.root(), most).files, 11);
        assert_eq!(admit(&workspace, new(1)), Err(OverQuota::Files(12, 10)));
        assert_eq!(admit(&workspace, Growth::of_file(Some(1), 2)), Ok(()), "a file that is there");
    }
}
