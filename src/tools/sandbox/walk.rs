//! A walk through a workspace: bounded, by directory handles, through no link.
//!
//! The visitor decides what to look for. A directory is opened when its turn comes, so that no more
//! directories are open than the workspace has levels.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cap_std::fs::Dir;
use rustix::fs::Stat;

use crate::tools::entries::{self, Space};

/// Entries of a workspace that are looked at for one call.
pub const MAX_WALKED: usize = 20_000;
/// Levels of nested directories.
const MAX_DEPTH: usize = 512;

/// One entry of a directory, as a visitor sees it.
pub struct WalkEntry<'a> {
    pub directory: &'a Dir,
    pub name: &'a OsStr,
    /// Beneath the workspace; what is not UTF-8 in it is replaced.
    pub path: &'a str,
    /// The path of the directory; empty for the workspace.
    pub above: &'a str,
    pub is_directory: bool,
}

impl WalkEntry<'_> {
    /// Its metadata; each call is a system call.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn stat(&self) -> io::Result<Stat> {
        entries::stat(self.directory, self.name)
    }
}

/// A directory that is still to be visited.
struct Waiting {
    parent: Arc<Dir>,
    name: OsString,
    path: String,
    depth: usize,
}

/// Why a walk ends before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WalkLimit {
    /// There are too many entries.
    Entries,
    Depth,
    /// It takes too long.
    Time,
}

/// Shows each entry to the visitor, a directory before its contents; the visitor returns whether to enter it.
/// Entries that disappear before their turn are skipped.
///
/// # Errors
/// There are too many entries, they are nested too deeply, it takes too long, or the visitor refuses.
pub fn walk<E: From<io::Error>>(
    root: &Dir,
    (most, within): (usize, Option<Duration>),
    refused: impl Fn(WalkLimit) -> E,
    mut visit: impl FnMut(&WalkEntry<'_>) -> Result<bool, E>,
) -> Result<(), E> {
    let mut space = Space::new();
    let first = Waiting {
        parent: Arc::new(root.try_clone()?),
        name: ".".into(),
        path: String::new(),
        depth: 0,
    };
    let mut waiting = vec![first];
    let (mut seen, since) = (0_usize, Instant::now());
    while let Some(Waiting { parent, name, path: above, depth }) = waiting.pop() {
        let directory = match entries::opened(&*parent, &name) {
            Ok(directory) => Arc::new(Dir::from_std_file(File::from(directory))),
            Err(e) if e.kind() == io::ErrorKind::NotFound && depth > 0 => continue,
            Err(e) => return Err(e.into()),
        };
        if depth > MAX_DEPTH {
            return Err(refused(WalkLimit::Depth));
        }
        let mut path = above.clone();
        if depth > 0 {
            path.push('/');
        }
        let length = path.len();
        entries::each(&*directory, &mut space, |name, kind| {
            seen += 1;
            if seen > most {
                return Err(refused(WalkLimit::Entries));
            }
            if seen.is_multiple_of(100) && within.is_some_and(|within| since.elapsed() > within) {
                return Err(refused(WalkLimit::Time));
            }
            path.truncate(length);
            path.push_str(&name.to_string_lossy());
            let is_directory = kind.is_dir();
            let entry =
                WalkEntry { directory: &directory, name, path: &path, above: &above, is_directory };
            if visit(&entry)? && is_directory {
                let (parent, path) = (Arc::clone(&directory), path.clone());
                waiting.push(Waiting { parent, name: name.to_owned(), path, depth: depth + 1 });
            }
            Ok(true)
        })?;
    }
    Ok(())
}
