//! A walk through a workspace: bounded, by directory handles, through no link.
//!
//! What is looked for on the way is the visitor's. A directory is opened when its turn comes, so that
//! no more are open than the workspace has levels.

use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cap_fs_ext::DirExt;
use cap_std::fs::{Dir, DirEntry};

/// Directories in one another.
const MAX_DEPTH: usize = 512;

/// One entry of a directory, as a visitor sees it.
pub struct Met<'a> {
    pub directory: &'a Dir,
    pub entry: &'a DirEntry,
    pub name: &'a OsString,
    /// Beneath the workspace; what is not UTF-8 in it is replaced.
    pub path: &'a str,
    /// The path of the directory; empty for the workspace.
    pub above: &'a str,
    pub is_directory: bool,
}

/// A directory whose turn comes.
struct Waiting {
    parent: Arc<Dir>,
    /// None for the workspace itself.
    name: Option<OsString>,
    path: String,
    depth: usize,
}

/// Why a walk ends before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beyond {
    /// There are more entries than it may look at.
    Entries,
    Depth,
    /// It takes longer than it may.
    Time,
}

/// Shows each entry to the visitor, a directory before what lies in it; it says whether to enter it.
/// What is gone before its turn comes is passed over.
///
/// # Errors
/// There are more entries than that, they lie too deep, it takes too long, or the visitor refuses.
pub fn walk<E: From<io::Error>>(
    root: &Dir,
    (most, within): (usize, Option<Duration>),
    refused: impl Fn(Beyond) -> E,
    mut visit: impl FnMut(&Met<'_>) -> Result<bool, E>,
) -> Result<(), E> {
    let first =
        Waiting { parent: Arc::new(root.try_clone()?), name: None, path: String::new(), depth: 0 };
    let mut waiting = vec![first];
    let (mut seen, since) = (0_usize, Instant::now());
    while let Some(Waiting { parent, name, path: above, depth }) = waiting.pop() {
        let directory = match name.map(|name| parent.open_dir_nofollow(name)) {
            None => parent,
            Some(Ok(directory)) => Arc::new(directory),
            Some(Err(e)) if e.kind() == io::ErrorKind::NotFound => continue,
            Some(Err(e)) => return Err(e.into()),
        };
        if depth > MAX_DEPTH {
            return Err(refused(Beyond::Depth));
        }
        for entry in directory.entries()? {
            let entry = entry?;
            seen += 1;
            if seen > most {
                return Err(refused(Beyond::Entries));
            }
            if seen.is_multiple_of(100) && within.is_some_and(|within| since.elapsed() > within) {
                return Err(refused(Beyond::Time));
            }
            let name = entry.file_name();
            let text = name.to_string_lossy();
            let path = if above.is_empty() { text.into_owned() } else { format!("{above}/{text}") };
            let is_directory = match entry.file_type() {
                Ok(kind) => kind.is_dir(),
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e.into()),
            };
            let met = Met {
                directory: &directory,
                entry: &entry,
                name: &name,
                path: &path,
                above: &above,
                is_directory,
            };
            if visit(&met)? && is_directory {
                let parent = Arc::clone(&directory);
                waiting.push(Waiting { parent, name: Some(name), path, depth: depth + 1 });
            }
        }
    }
    Ok(())
}
