//! What lies in a workspace, and is still known when the next call comes: a large workspace is then not looked
//! through twice for each call of programs.
//!
//! The kernel reports (inotify) which names have changed since; only those are looked at again. That is sound since
//! it reports every way in which programs can change a file, or stop being exact in a way that is seen:
//! - Each directory is watched before its names are read, so a change meets the reading or the watch.
//! - A change is reported under the name that it was made by. It can be missed only where a file has a second
//!   name, so a tree with a file of several names is not kept, and a name that was made and is gone again,
//!   which may have been such a name, is not reported. Writing through a mapping is reported when the file is closed,
//!   which a program's end does before that end is seen (or some microseconds later, where just then another process reads
//!   of the program in `/proc`).
//! - Directories that come, go, move or change, a queue that overflows, and denied names are not followed.
//! - What is mounted in a workspace, and file systems that others may change past this kernel, are not watched.
//!
//! In these cases the whole workspace is compared. What is reported need only be
//! a superset: whether a file has changed is judged by its stamp. A tree belongs to one call at a time.

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

use super::walk::{MAX_WALKED, Met};
use crate::event::ChangeKind;

/// Trees that are kept, entries of all of them, and for how long.
const MAX_KEPT: usize = 32;
const MAX_ENTRIES: usize = 100_000;
const KEPT_FOR: Duration = Duration::from_mins(1);
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

static KEPT: Mutex<KeptTrees> = Mutex::new(KeptTrees { trees: Vec::new(), is_watched: false });

/// How a file was when it was looked at. Its content is not read.
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

/// What lies in a workspace.
#[derive(Debug, Default)]
pub struct Tree {
    /// What is no directory, by path.
    pub files: HashMap<String, Stamp>,
    pub directories: HashSet<String>,
    /// What is denied, without what lies in it.
    pub denied: HashSet<String>,
    /// `None` where changes are not reported.
    watches: Option<Watches>,
}

impl Tree {
    /// An empty one, whose changes are reported if that is possible.
    pub fn watched(root: &Dir) -> Self {
        Self { watches: Watches::begin(root), ..Self::default() }
    }

    /// To be called before what lies in it is read.
    pub fn add_directory(&mut self, met: &Met<'_>) {
        self.directories.insert(met.path.to_owned());
        if let Some(watches) = &mut self.watches
            && !watches.add(met.directory, met.name, met.path)
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

    /// Whether it may be kept; one that is too large may not.
    pub fn may_be_kept(&self) -> bool {
        self.watches.is_some() && self.entries() <= MAX_WALKED
    }

    /// Something lies in it that has no place here.
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

    /// Brings it up to date and answers what has changed, by path; nothing, and it stays as it is, where
    /// that cannot be told.
    pub fn updated(
        &mut self,
        root: &Dir,
        may_meet: impl Fn(&str) -> bool,
    ) -> Option<Vec<(String, ChangeKind)>> {
        let touched = self.watches.as_mut().and_then(Watches::touched);
        let found = touched.and_then(|touched| touched.looked_at(root, may_meet));
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

/// The directories of one tree, and what happens in them.
#[derive(Debug)]
struct Watches {
    /// None while this is dropped.
    events: Option<OwnedFd>,
    /// By the numbers that events have.
    directories: HashMap<i32, String>,
}

/// The kernel takes its time to end watches.
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

    /// Whether it is possible.
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

    /// What was touched since this was last asked; nothing where that is not known by names.
    fn touched(&mut self) -> Option<Touched> {
        let mut touched = Touched::default();
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
        touched.leaving.is_empty().then_some(touched)
    }
}

/// Names of files that something has happened to.
#[derive(Debug, Default)]
struct Touched {
    names: HashSet<String>,
    /// Those that were made, and so may be further names of files.
    made: HashSet<String>,
    /// Those of them that were moved away.
    left: HashSet<String>,
    /// Moves of them that have begun.
    leaving: HashSet<u32>,
}

impl Touched {
    fn add(&mut self, path: String, what: ReadFlags, cookie: u32) -> Option<()> {
        let untold = ReadFlags::ISDIR
            | ReadFlags::QUEUE_OVERFLOW
            | ReadFlags::UNMOUNT
            | ReadFlags::IGNORED
            | ReadFlags::DELETE_SELF
            | ReadFlags::MOVE_SELF;
        if what.intersects(untold) {
            return None;
        }
        let was_made = self.made.contains(&path);
        if what.intersects(ReadFlags::CREATE | ReadFlags::DELETE | ReadFlags::MOVED_TO) && was_made
        {
            return None; // what was made is gone, or something else has its name
        }
        if what.contains(ReadFlags::MOVED_FROM) && was_made {
            self.leaving.insert(cookie);
            self.left.insert(path.clone());
        }
        let comes = what.contains(ReadFlags::MOVED_TO) && self.leaving.remove(&cookie);
        if what.contains(ReadFlags::CREATE) || comes {
            self.made.insert(path.clone());
        }
        self.names.insert(path);
        Some(())
    }

    /// How each of them is now; nothing where one is more than a file by one name.
    fn looked_at(
        self,
        root: &Dir,
        may_meet: impl Fn(&str) -> bool,
    ) -> Option<Vec<(String, Option<Stamp>)>> {
        let Self { names, made, left, .. } = self;
        let look = |path: String| {
            if !may_meet(&path) {
                return None;
            }
            match rustix::fs::statat(root, path.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => {
                    let is_directory = FileType::from_raw_mode(found.st_mode).is_dir();
                    let is_plain = found.st_nlink == 1 && !is_directory;
                    is_plain.then(|| (path, Some(Stamp::of(&found))))
                }
                Err(Errno::NOENT) => {
                    let is_lost = made.contains(&path) && !left.contains(&path);
                    (!is_lost).then_some((path, None))
                }
                Err(_) => None,
            }
        };
        names.into_iter().map(look).collect()
    }
}

/// Whether something is mounted beneath a directory, or that is not known.
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

struct KeptTrees {
    trees: Vec<KeptTree>,
    /// Whether a task is under way that forgets them.
    is_watched: bool,
}

struct KeptTree {
    /// Device and inode of the workspace.
    place: (u64, u64),
    /// What is denied in it.
    rules: String,
    tree: Tree,
    since: Instant,
}

impl KeptTrees {
    fn forget_old(&mut self) {
        self.trees.retain(|kept| kept.since.elapsed() < KEPT_FOR);
    }
}

fn place(root: &Dir) -> Option<(u64, u64)> {
    rustix::fs::fstat(root).ok().map(|found| (found.st_dev, found.st_ino))
}

/// What is known of a workspace in which that is denied, brought up to date.
pub fn taken(root: &Dir, rules: &str, may_meet: impl Fn(&str) -> bool) -> Option<Tree> {
    let place = place(root)?;
    let is_it = |kept: &KeptTree| kept.place == place && kept.rules == rules;
    let mut tree = {
        let trees = &mut KEPT.lock().trees;
        let index = trees.iter().position(is_it)?;
        trees.swap_remove(index).tree
    };
    tree.updated(root, may_meet)?;
    tree.may_be_kept().then_some(tree)
}

/// Keeps what is known of a workspace for the next call.
pub fn keep(root: &Dir, rules: String, tree: Tree) {
    let Some(place) = place(root) else { return };
    if !tree.may_be_kept() {
        return;
    }
    let mut kept = KEPT.lock();
    kept.forget_old();
    if kept.trees.iter().any(|other| other.place == place && other.rules == rules) {
        return;
    }
    kept.trees.push(KeptTree { place, rules, tree, since: Instant::now() });
    let mut entries: usize = kept.trees.iter().map(|kept| kept.tree.entries()).sum();
    while kept.trees.len() > MAX_KEPT || entries > MAX_ENTRIES {
        let oldest = kept.trees.iter().enumerate().min_by_key(|(_, kept)| kept.since);
        let Some((oldest, _)) = oldest else { break };
        entries -= kept.trees.swap_remove(oldest).tree.entries();
    }
    if !kept.is_watched
        && let Ok(runtime) = Handle::try_current()
    {
        kept.is_watched = true;
        runtime.spawn(forgetting());
    }
}

/// Forgets trees that are not used any more.
async fn forgetting() {
    struct Watching;
    impl Drop for Watching {
        fn drop(&mut self) {
            KEPT.lock().is_watched = false;
        }
    }
    let _watching = Watching;
    loop {
        tokio::time::sleep(KEPT_FOR / 2).await;
        let mut kept = KEPT.lock();
        kept.forget_old();
        if kept.trees.is_empty() {
            kept.is_watched = false;
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use cap_std::ambient_authority;
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    use super::super::walk::{Beyond, walk};
    use super::*;

    fn looked(root: &Dir) -> Tree {
        let mut tree = Tree::watched(root);
        let refused = |_: Beyond| std::io::Error::other("refused");
        let walked = walk(root, (100, None), refused, |met: &Met<'_>| {
            if met.is_directory {
                tree.add_directory(met);
            } else {
                tree.add_file(met.path, &met.stat()?);
            }
            Ok(met.is_directory)
        });
        walked.unwrap();
        tree
    }

    /// `None` where it is not known by names.
    #[test]
    fn what_happens_is_told_or_looked_for() {
        use ChangeKind::{Created, Deleted, Modified};
        type Happens = fn(&Path);
        type Told = Option<&'static [(&'static str, ChangeKind)]>;
        let table: &[(Happens, Told)] = &[
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
        for (index, (happens, told)) in table.iter().enumerate() {
            let place = tempfile::tempdir().unwrap();
            let place = place.path().join("w");
            fs::create_dir_all(place.join("d")).unwrap();
            for file in ["a", "b", "d/c"] {
                fs::write(place.join(file), file).unwrap();
            }
            let root = Dir::open_ambient_dir(&place, ambient_authority()).unwrap();
            let mut tree = looked(&root);
            assert!(tree.may_be_kept(), "the file system of the temporary files is not watched");
            happens(&place);
            let expected = told.map(|told| {
                told.iter().map(|(path, kind)| ((*path).to_owned(), *kind)).collect::<Vec<_>>()
            });
            let updated = tree.updated(&root, |path| !path.contains("lock"));
            assert_eq!(updated, expected, "{index}");
            assert_eq!(tree.may_be_kept(), expected.is_some(), "{index}");
            if expected.is_some() {
                let now = looked(&root);
                assert_eq!((tree.files, tree.directories), (now.files, now.directories), "{index}");
            }
        }
    }

    #[test]
    fn a_file_with_two_names_is_not_kept() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("a"), "a").unwrap();
        fs::hard_link(place.path().join("a"), place.path().join("b")).unwrap();
        let root = Dir::open_ambient_dir(place.path(), ambient_authority()).unwrap();
        assert!(!looked(&root).may_be_kept());
    }

    #[test]
    fn names_of_mounts_are_read() {
        assert_eq!(unescaped(br"/a\040b\134c\9"), br"/a b\c\9");
        assert!(has_mounts(Path::new("/")), "/proc, at least");
        assert!(!has_mounts(Path::new("/nowhere")));
    }
}
