//! A cache of the files of workspaces, so that a large workspace is not walked twice for each call of
//! programs.
//!
//! The kernel reports (inotify) which names have changed since the last call, and only those are inspected
//! again. That is sound because every change by programs is either reported or detected as not reportable:
//! - Each directory is watched before its names are read, so a change is either read or reported.
//! - A change is reported under the name by which it was made. It can be missed only if a file has a
//!   second name. So a tree is not cached if one of its files has several names, or if a name was created
//!   and removed again, which may have been a second name. A write through a mapping is reported when the
//!   file is closed. The end of a program closes its files before that end is seen (or some microseconds
//!   later if another process is just reading about the program in `/proc`).
//! - Created, removed, moved or changed directories, an overflowing queue and denied names are not tracked.
//! - Mounts in a workspace, and file systems that others may change without this kernel, are not watched.
//! - Programs without mounts of their own could give a file a second name among their temporary files. So a
//!   workspace on the same file system as these is not watched for them.
//!
//! In these cases the whole workspace is walked and compared. The reports may contain too many names:
//! whether a file has changed is decided by its stamp. A tree belongs to one call at a time.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::time::{Duration, Instant};

use cap_std::fs::Dir;
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;
use tokio::runtime::Handle;

use super::walk::{MAX_WALKED, WalkEntry};
use crate::event::ChangeKind;

/// Cached trees, the entries of all of them, and how long a tree is cached.
const MAX_TREES: usize = 32;
const MAX_ENTRIES: usize = 100_000;
const LIFETIME: Duration = Duration::from_mins(1);
/// Directories of a tree that is watched; a user has a limited number of watches.
const MAX_WATCHED: usize = 2_000;
/// Bytes of events that are read at once.
const AT_ONCE: usize = 16 * 1024;
/// File systems that only this kernel changes: ext4, tmpfs, XFS, Btrfs, F2FS, ZFS, bcachefs, overlayfs.
const OWN_FILE_SYSTEMS: [u32; 8] = [
    0xEF53,
    0x0102_1994,
    0x5846_5342,
    0x9123_683E,
    0xF2F5_2010,
    0x2FC1_2FC1,
    0xCA45_1A4E,
    0x794C_7630,
];

static CACHE: Mutex<TreeCache> = Mutex::new(TreeCache { trees: Vec::new(), has_cleaner: false });

/// The metadata of a file by which a change is recognised. Its content is not read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stamp {
    pub inode: u64,
    is_file: bool,
    size: i64,
    /// In seconds, and nanoseconds beyond.
    modified: (i64, u64),
    /// The same of any change, which programs cannot set.
    changed: (i64, u64),
}

impl Stamp {
    pub fn of(found: &Stat) -> Self {
        Self {
            inode: found.st_ino,
            is_file: FileType::from_raw_mode(found.st_mode).is_file(),
            size: found.st_size,
            modified: (found.st_mtime, found.st_mtime_nsec),
            changed: (found.st_ctime, found.st_ctime_nsec),
        }
    }
}

/// How much there is in a workspace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    pub bytes: u64,
    /// With directories.
    pub files: u64,
    /// Bytes of its largest file.
    pub largest: u64,
}

/// The files and directories of a workspace.
#[derive(Debug, Default)]
pub struct Tree {
    /// Everything but directories, by path.
    pub files: HashMap<String, Stamp>,
    pub directories: HashSet<String>,
    /// Denied files and directories, without the contents of the latter.
    pub denied: HashSet<String>,
    /// `None` where changes are not reported.
    watches: Option<Watches>,
}

impl Tree {
    /// An empty tree whose changes are reported, if that is possible.
    pub fn watched(root: &Dir, has_mounts: bool) -> Self {
        let is_apart = has_mounts || !lies_with_temporary_files(root);
        Self { watches: is_apart.then(|| Watches::begin(root)).flatten(), ..Self::default() }
    }

    /// Must be called before the entries of the directory are read.
    pub fn add_directory(&mut self, entry: &WalkEntry<'_>) {
        self.directories.insert(entry.path.to_owned());
        if let Some(watches) = &mut self.watches
            && !watches.add(entry.directory, entry.name, entry.path)
        {
            self.watches = None;
        }
    }

    pub fn add_file(&mut self, path: &str, found: &Stat) {
        self.files.insert(path.to_owned(), Stamp::of(found));
        if found.st_nlink > 1 {
            self.watches = None;
        }
    }

    /// Whether it may be cached; one that is too large may not.
    pub fn is_cacheable(&self) -> bool {
        self.watches.is_some() && self.entries() <= MAX_WALKED
    }

    /// Marks the tree as incomplete: it contains something that it cannot represent.
    pub fn is_incomplete(&mut self) {
        self.watches = None;
    }

    /// What is not denied.
    pub fn size(&self) -> Size {
        let files = (self.files.len() + self.directories.len()) as u64;
        let sizes = self.files.values().filter(|stamp| stamp.is_file);
        sizes.fold(Size { files, ..Size::default() }, |all, stamp| {
            let bytes = stamp.size.unsigned_abs();
            Size { bytes: all.bytes.saturating_add(bytes), largest: all.largest.max(bytes), ..all }
        })
    }

    fn entries(&self) -> usize {
        self.files.len() + self.directories.len() + self.denied.len()
    }

    /// Updates the tree and returns the changes by path. If these are unknown, returns `None` and leaves
    /// the tree as it is.
    pub fn updated(
        &mut self,
        root: &Dir,
        may_visit: impl Fn(&str) -> bool,
    ) -> Option<Vec<(String, ChangeKind)>> {
        let touched = self.watches.as_mut().and_then(Watches::touched);
        let found = touched.and_then(|touched| touched.inspected(root, may_visit));
        let Some(found) = found else {
            self.watches = None;
            return None;
        };
        let mut changes = Vec::new();
        for (path, now) in found {
            let before = match now {
                Some(now) => self.files.insert(path.clone(), now),
                None => self.files.remove(&path),
            };
            match (before, now) {
                (None, Some(_)) => changes.push((path, ChangeKind::Created)),
                (Some(before), Some(now)) if before != now => {
                    changes.push((path, ChangeKind::Modified));
                }
                (Some(_), None) => changes.push((path, ChangeKind::Deleted)),
                _ => {}
            }
        }
        changes.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        Some(changes)
    }
}

/// The watched directories of one tree, and the events in them.
#[derive(Debug)]
struct Watches {
    /// None while this is dropped.
    events: Option<OwnedFd>,
    /// By the numbers that events have.
    directories: HashMap<i32, String>,
}

/// Closes the watches on a thread of its own, because the kernel may take long.
impl Drop for Watches {
    fn drop(&mut self) {
        if let (Some(events), Ok(runtime)) = (self.events.take(), Handle::try_current()) {
            runtime.spawn_blocking(move || drop(events));
        }
    }
}

impl Watches {
    fn begin(root: &Dir) -> Option<Self> {
        let kind = rustix::fs::fstatfs(root).ok()?.f_type;
        if !u32::try_from(kind).is_ok_and(|kind| OWN_FILE_SYSTEMS.contains(&kind)) {
            return None;
        }
        let place = format!("/proc/self/fd/{}", root.as_fd().as_raw_fd());
        if has_mounts(&fs::read_link(place).ok()?) {
            return None;
        }
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
        let mut watches = Self { events: Some(events), directories: HashMap::new() };
        watches.add(root, OsStr::new("."), "").then_some(watches)
    }

    /// Watches a directory; returns whether that is possible.
    fn add(&mut self, parent: &Dir, name: &OsStr, path: &str) -> bool {
        if self.directories.len() >= MAX_WATCHED {
            return false;
        }
        let flags = WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR
            | WatchFlags::DONT_FOLLOW;
        let mut place = format!("/proc/self/fd/{}/", parent.as_fd().as_raw_fd()).into_bytes();
        place.extend(name.as_bytes());
        let number = self.events.as_ref().map(|events| inotify::add_watch(events, place, flags));
        // A directory that has a number already lies in two places.
        matches!(number, Some(Ok(number)) if self.directories.insert(number, path.to_owned()).is_none())
    }

    /// The names that were touched since the last call; `None` if they are not known completely.
    fn touched(&mut self) -> Option<TouchedNames> {
        let mut touched = TouchedNames::default();
        let mut space = Vec::with_capacity(AT_ONCE);
        let mut reader = Reader::new(self.events.as_ref()?, space.spare_capacity_mut());
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(_) => return None,
            };
            let name = event.file_name()?.to_str().ok()?;
            let path = match self.directories.get(&event.wd())?.as_str() {
                "" => name.to_owned(),
                directory => format!("{directory}/{name}"),
            };
            touched.add(path, event.events(), event.cookie())?;
        }
        touched.moves.is_empty().then_some(touched)
    }
}

/// Names of files that were changed.
#[derive(Debug, Default)]
struct TouchedNames {
    names: HashSet<String>,
    /// Created names, which may be second names of files.
    created: HashSet<String>,
    /// Created names that were moved away.
    moved_away: HashSet<String>,
    /// Cookies of their moves that have begun.
    moves: HashSet<u32>,
}

impl TouchedNames {
    fn add(&mut self, path: String, what: ReadFlags, cookie: u32) -> Option<()> {
        let unclear = ReadFlags::ISDIR
            | ReadFlags::QUEUE_OVERFLOW
            | ReadFlags::UNMOUNT
            | ReadFlags::IGNORED
            | ReadFlags::DELETE_SELF
            | ReadFlags::MOVE_SELF;
        if what.intersects(unclear) {
            return None;
        }
        let was_created = self.created.contains(&path);
        if what.intersects(ReadFlags::CREATE | ReadFlags::DELETE | ReadFlags::MOVED_TO)
            && was_created
        {
            return None; // the created file is gone, or something else has its name
        }
        if what.contains(ReadFlags::MOVED_FROM) && was_created {
            self.moves.insert(cookie);
            self.moved_away.insert(path.clone());
        }
        let is_moved_here = what.contains(ReadFlags::MOVED_TO) && self.moves.remove(&cookie);
        if what.contains(ReadFlags::CREATE) || is_moved_here {
            self.created.insert(path.clone());
        }
        self.names.insert(path);
        Some(())
    }

    /// The current state of each name; `None` if one of them is not a file with exactly one name.
    fn inspected(
        self,
        root: &Dir,
        may_visit: impl Fn(&str) -> bool,
    ) -> Option<Vec<(String, Option<Stamp>)>> {
        let Self { names, created, moved_away, .. } = self;
        let look = |path: String| {
            if !may_visit(&path) {
                return None;
            }
            match rustix::fs::statat(root, path.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => {
                    let is_directory = FileType::from_raw_mode(found.st_mode).is_dir();
                    let is_plain = found.st_nlink == 1 && !is_directory;
                    is_plain.then(|| (path, Some(Stamp::of(&found))))
                }
                Err(Errno::NOENT) => {
                    let is_gone = created.contains(&path) && !moved_away.contains(&path);
                    (!is_gone).then_some((path, None))
                }
                Err(_) => None,
            }
        };
        names.into_iter().map(look).collect()
    }
}

/// Whether a directory is on the file system of temporary files. True if that is unknown.
fn lies_with_temporary_files(directory: &Dir) -> bool {
    let own = rustix::fs::fstat(directory).map(|found| found.st_dev);
    let temporary = rustix::fs::stat(std::env::temp_dir()).map(|found| found.st_dev);
    own.is_err() || temporary.is_err() || own == temporary
}

/// Whether something is mounted beneath a directory. True if that is unknown.
fn has_mounts(directory: &Path) -> bool {
    let Ok(mounts) = fs::read("/proc/self/mountinfo") else { return true };
    let places = mounts.split(|byte| *byte == b'\n').filter_map(|line| {
        let written = line.split(|byte| *byte == b' ').nth(4)?;
        Some(std::ffi::OsString::from_vec(unescaped(written)))
    });
    let mut beneath = places
        .filter(|place| Path::new(place).starts_with(directory) && Path::new(place) != directory);
    beneath.next().is_some()
}

/// A name in which the kernel has written some bytes as `\` and three octal digits.
fn unescaped(mut written: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(written.len());
    loop {
        match written {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] => {
                name.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
                written = rest;
            }
            [first, rest @ ..] => {
                name.push(*first);
                written = rest;
            }
            [] => return name,
        }
    }
}

struct TreeCache {
    trees: Vec<CachedTree>,
    /// Whether the task that drops old trees is running.
    has_cleaner: bool,
}

struct CachedTree {
    /// Device and inode of the workspace.
    place: (u64, u64),
    /// What is denied in it.
    rules: String,
    tree: Tree,
    since: Instant,
}

impl TreeCache {
    fn drop_old(&mut self) {
        self.trees.retain(|cached| cached.since.elapsed() < LIFETIME);
    }
}

fn place(root: &Dir) -> Option<(u64, u64)> {
    rustix::fs::fstat(root).ok().map(|found| (found.st_dev, found.st_ino))
}

/// Takes the cached tree of a workspace with these deny rules, and updates it.
pub fn take(root: &Dir, rules: &str, may_visit: impl Fn(&str) -> bool) -> Option<Tree> {
    let place = place(root)?;
    let is_it = |cached: &CachedTree| cached.place == place && cached.rules == rules;
    let mut tree = {
        let trees = &mut CACHE.lock().trees;
        let index = trees.iter().position(is_it)?;
        trees.swap_remove(index).tree
    };
    tree.updated(root, may_visit)?;
    tree.is_cacheable().then_some(tree)
}

/// Caches the tree of a workspace for the next call.
pub fn put(root: &Dir, rules: String, tree: Tree) {
    let Some(place) = place(root) else { return };
    if !tree.is_cacheable() {
        return;
    }
    let mut cache = CACHE.lock();
    cache.drop_old();
    if cache.trees.iter().any(|other| other.place == place && other.rules == rules) {
        return;
    }
    cache.trees.push(CachedTree { place, rules, tree, since: Instant::now() });
    let mut entries: usize = cache.trees.iter().map(|cached| cached.tree.entries()).sum();
    while cache.trees.len() > MAX_TREES || entries > MAX_ENTRIES {
        let oldest = cache.trees.iter().enumerate().min_by_key(|(_, cached)| cached.since);
        let Some((oldest, _)) = oldest else { break };
        entries -= cache.trees.swap_remove(oldest).tree.entries();
    }
    if !cache.has_cleaner
        && let Ok(runtime) = Handle::try_current()
    {
        cache.has_cleaner = true;
        runtime.spawn(drop_unused());
    }
}

/// Drops cached trees that are no longer used.
async fn drop_unused() {
    struct Cleaner;
    impl Drop for Cleaner {
        fn drop(&mut self) {
            CACHE.lock().has_cleaner = false;
        }
    }
    let _cleaner = Cleaner;
    loop {
        tokio::time::sleep(LIFETIME / 2).await;
        let mut cache = CACHE.lock();
        cache.drop_old();
        if cache.trees.is_empty() {
            cache.has_cleaner = false;
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use cap_std::ambient_authority;
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    use super::super::walk::{WalkLimit, walk};
    use super::*;

    fn tree_of(root: &Dir) -> Tree {
        let mut tree = Tree::watched(root, true);
        let refused = |_: WalkLimit| std::io::Error::other("refused");
        let walked = walk(root, (100, None), refused, |entry: &WalkEntry<'_>| {
            if entry.is_directory {
                tree.add_directory(entry);
            } else {
                tree.add_file(entry.path, &entry.stat()?);
            }
            Ok(entry.is_directory)
        });
        walked.unwrap();
        tree
    }

    /// `None`: the change is not reportable.
    #[test]
    fn changes_are_reported_or_detected_as_not_reportable() {
        use ChangeKind::{Created, Deleted, Modified};
        type Change = fn(&Path);
        type Expected = Option<&'static [(&'static str, ChangeKind)]>;
        let table: &[(Change, Expected)] = &[
            (|_| {}, Some(&[])),
            (|at| fs::write(at.join("d/c"), "x").unwrap(), Some(&[("d/c", Modified)])),
            (|at| drop(fs::OpenOptions::new().append(true).open(at.join("a"))), Some(&[])),
            (|at| fs::write(at.join("n"), "x").unwrap(), Some(&[("n", Created)])),
            (|at| fs::remove_file(at.join("a")).unwrap(), Some(&[("a", Deleted)])),
            (
                |at| fs::rename(at.join("a"), at.join("d/n")).unwrap(),
                Some(&[("a", Deleted), ("d/n", Created)]),
            ),
            (
                |at| {
                    fs::write(at.join("t"), "x").unwrap();
                    fs::rename(at.join("t"), at.join("a")).unwrap();
                },
                Some(&[("a", Modified)]),
            ),
            (
                |at| {
                    let flags = RenameFlags::EXCHANGE;
                    renameat_with(CWD, at.join("a"), CWD, at.join("b"), flags).unwrap();
                },
                Some(&[("a", Modified), ("b", Modified)]),
            ),
            (|at| std::os::unix::fs::symlink("a", at.join("l")).unwrap(), Some(&[("l", Created)])),
            (|at| fs::write(at.join("x.lock"), "x").unwrap(), None),
            (|at| fs::hard_link(at.join("a"), at.join("n")).unwrap(), None),
            (
                |at| {
                    fs::write(at.join("t"), "x").unwrap();
                    fs::remove_file(at.join("t")).unwrap();
                },
                None,
            ),
            (
                |at| {
                    fs::hard_link(at.join("a"), at.join("t")).unwrap();
                    let flags = RenameFlags::EXCHANGE;
                    renameat_with(CWD, at.join("t"), CWD, at.join("b"), flags).unwrap();
                    fs::remove_file(at.join("b")).unwrap();
                },
                None,
            ),
            (
                |at| {
                    fs::hard_link(at.join("a"), at.join("t")).unwrap();
                    fs::rename(at.join("b"), at.join("t")).unwrap();
                },
                None,
            ),
            (|at| fs::create_dir(at.join("e")).unwrap(), None),
            (|at| fs::remove_dir_all(at.join("d")).unwrap(), None),
            (|at| fs::rename(at.join("d"), at.join("e")).unwrap(), None),
            (|at| fs::rename(at, at.with_extension("gone")).unwrap(), None),
        ];
        for (index, (change, told)) in table.iter().enumerate() {
            let place = tempfile::tempdir().unwrap();
            let place = place.path().join("w");
            fs::create_dir_all(place.join("d")).unwrap();
            for file in ["a", "b", "d/c"] {
                fs::write(place.join(file), file).unwrap();
            }
            let root = Dir::open_ambient_dir(&place, ambient_authority()).unwrap();
            let mut tree = tree_of(&root);
            assert!(tree.is_cacheable(), "the file system of the temporary files is not watched");
            change(&place);
            let expected = told.map(|told| {
                told.iter().map(|(path, kind)| ((*path).to_owned(), *kind)).collect::<Vec<_>>()
            });
            let updated = tree.updated(&root, |path| !path.contains("lock"));
            assert_eq!(updated, expected, "{index}");
            assert_eq!(tree.is_cacheable(), expected.is_some(), "{index}");
            if expected.is_some() {
                let now = tree_of(&root);
                assert_eq!((tree.files, tree.directories), (now.files, now.directories), "{index}");
            }
        }
    }

    #[test]
    fn a_tree_with_a_file_of_two_names_is_not_cached() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("a"), "a").unwrap();
        fs::hard_link(place.path().join("a"), place.path().join("b")).unwrap();
        let root = Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap();
        assert!(!tree_of(&root).is_cacheable());
    }

    #[test]
    fn a_tree_beside_the_temporary_files_is_watched_only_where_mounts_separate_them() {
        let place = tempfile::tempdir().unwrap();
        let root = Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap();
        assert!(Tree::watched(&root, true).is_cacheable());
        assert!(!Tree::watched(&root, false).is_cacheable());
    }

    #[test]
    fn names_of_mounts_are_read() {
        assert_eq!(unescaped(br"/a\040b\134c\9"), br"/a b\c\9");
        assert!(has_mounts(Path::new("/")), "/proc, at least");
        assert!(!has_mounts(Path::new("/nowhere")));
    }
}
