//! What programs have left in the workspace, looked at when they have ended, however that came about:
//! which files they made, changed and deleted, and whether they made what `paths.deny` forbids.
//!
//! Such a thing is removed, since a rule by glob cannot be held while programs run: only what is there
//! before they start is hidden from them. What others do in the workspace meanwhile cannot be told
//! from what the programs do.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use cap_fs_ext::DirExt;
use cap_std::fs::{Dir, MetadataExt};
use rustix::fs::{Mode, OFlags};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use uuid::Uuid;

use crate::bounds::text::quoted;
use crate::event::{ChangeKind, FileChange};
use crate::governance::{Decision, Permit};
use crate::tools::ToolContext;
use crate::tools::sandbox::reach::{Before, MAX_WALKED, Stamp};
use crate::tools::sandbox::walk::{Beyond, Met, walk};

/// Entries that are looked at after programs have ended, and that are removed for one rule. The
/// programs may have made more than there may be before the next ones.
const MAX_AFTERWARDS: usize = 10 * MAX_WALKED;
/// Removed things that a model is told of.
const MAX_TOLD: usize = 20;

/// Looks the workspace through when this is dropped and the programs have ended.
pub(super) struct LooksThrough(Option<Work>);

struct Work {
    permit: Permit,
    context: ToolContext,
    before: Before,
    ended: oneshot::Receiver<()>,
    until: watch::Sender<()>,
}

impl LooksThrough {
    /// With what is to be dropped when the programs have ended.
    pub(super) fn after(
        permit: Permit,
        context: &ToolContext,
        before: Before,
    ) -> (oneshot::Sender<()>, Self) {
        let (held, ended) = oneshot::channel();
        let (until, looking) = watch::channel(());
        context.changed.looked_through(looking);
        let context = context.clone();
        (held, Self(Some(Work { permit, context, before, ended, until })))
    }
}

impl Drop for LooksThrough {
    fn drop(&mut self) {
        let (Some(work), Ok(runtime)) = (self.0.take(), Handle::try_current()) else { return };
        runtime.spawn(async move {
            let Work { permit, context, before, ended, until } = work;
            let _ = ended.await; // the other side is dropped, nothing is sent
            let looking = move || look_through(&permit, &context, &before);
            if let Err(error) = tokio::task::spawn_blocking(looking).await {
                tracing::error!(%error, "what programs have left was not looked through");
            }
            drop(until);
        });
    }
}

/// Something denied that was not there before.
struct Made {
    path: String,
    /// The path that the same file had before.
    was: Option<String>,
    removed: io::Result<()>,
}

#[derive(Default)]
struct Found {
    /// None where they are not known.
    changes: Option<Vec<(String, ChangeKind)>>,
    made: Vec<Made>,
}

fn look_through(permit: &Permit, context: &ToolContext, before: &Before) {
    match found(permit, context, before) {
        Ok(found) => tell(found, permit, context),
        Err(error) => context
            .changed
            .object(format!("What the programs have left cannot be looked through: {error}.")),
    }
}

fn tell(found: Found, permit: &Permit, context: &ToolContext) {
    let Found { changes, made } = found;
    for (path, kind) in changes.iter().flatten() {
        let ruling = permit.ruling_on_made(path);
        // Without a pattern it is no rule about this file that objects, and the kernel holds it.
        if ruling.decision == Decision::Warned && ruling.pattern.is_some() {
            context.requests.left(path, ruling, "succeeded");
        }
        context.changed.add(FileChange::of_program(path, *kind));
    }
    if changes.is_some() {
        context.changed.complete();
    }
    let mut told = Vec::new();
    for Made { path, was, removed } in made {
        let ruling = permit.ruling_on_made(&path);
        let pattern = ruling.pattern.clone().unwrap_or_default();
        let was = was.map(|was| format!(" (it was {} before)", quoted(&was)));
        let was = was.unwrap_or_default();
        let (failed, outcome) = match &removed {
            Ok(()) => (String::new(), "blocked"),
            Err(error) => (format!(", but cannot be removed: {}", error.kind()), "failed"),
        };
        told.push(format!("{}{was}, which is denied by {pattern}{failed}", quoted(&path)));
        context.requests.left(&path, ruling, outcome);
    }
    if told.is_empty() {
        return;
    }
    let more = told.len().saturating_sub(MAX_TOLD);
    told.truncate(MAX_TOLD);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    context.changed.object(format!(
        "Blocked by the path rule: the programs made what they may not, and it was removed with its \
         content: {}{more}. What else they did stays.",
        told.join("; ")
    ));
}

fn found(permit: &Permit, context: &ToolContext, before: &Before) -> io::Result<Found> {
    let denied = permit.denied();
    if before.stamps.is_none() && !denied.by_glob {
        let made = denied.trees.iter().filter_map(|tree| made_tree(tree, context, before));
        return Ok(Found { changes: None, made: made.collect() });
    }
    let root = context.workspace.root();
    let mut found = Found::default();
    let mut changes = Vec::new();
    let mut kept: HashSet<String> = HashSet::new();
    let refused = |beyond| match beyond {
        Beyond::Entries => {
            io::Error::other(format!("there are more than {MAX_AFTERWARDS} entries"))
        }
        Beyond::Depth => io::Error::other("directories lie too deep in one another"),
    };
    walk(&root, MAX_AFTERWARDS, refused, |met: &Met<'_>| {
        if !permit.may_enter(met.path) {
            if !before.denied.contains(met.path) && !is_observed(permit, met.path) {
                found.made.push(removed(met, before));
            }
            return Ok(false);
        }
        if met.is_directory {
            make_accessible(met.directory, met.name);
            return Ok(true);
        }
        let Some(stamps) = &before.stamps else { return Ok(false) };
        let Ok(metadata) = met.entry.metadata() else { return Ok(false) };
        match stamps.get(met.path) {
            None => changes.push((met.path.to_owned(), ChangeKind::Created)),
            Some(stamp) => {
                kept.insert(met.path.to_owned());
                if *stamp != Stamp::of(&metadata) {
                    changes.push((met.path.to_owned(), ChangeKind::Modified));
                }
            }
        }
        Ok(false)
    })?;
    found.changes = before.stamps.as_ref().map(|stamps| {
        let gone = stamps.keys().filter(|path| !kept.contains(*path));
        changes.extend(gone.map(|path| (path.clone(), ChangeKind::Deleted)));
        changes.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        changes
    });
    Ok(found)
}

/// Whether what the definition denies is only noted.
fn is_observed(permit: &Permit, path: &str) -> bool {
    permit.ruling_on_made(path).decision <= Decision::Warned
}

/// A denied directory, or file, where the workspace is too large to look it through.
fn made_tree(tree: &str, context: &ToolContext, before: &Before) -> Option<Made> {
    if before.denied.contains(tree) {
        return None;
    }
    let (directory, name) = context.workspace.holder(tree).ok()?;
    directory.symlink_metadata(name).ok()?;
    let removed = remove(&directory, OsStr::new(name));
    Some(Made { path: tree.to_owned(), was: None, removed })
}

fn removed(met: &Met<'_>, before: &Before) -> Made {
    let inode = met.entry.metadata().ok().filter(|it| !it.is_dir()).map(|it| it.ino());
    let was = before.stamps.iter().flatten().find(|(_, stamp)| Some(stamp.inode) == inode);
    Made {
        path: met.path.to_owned(),
        was: was.map(|(path, _)| path.clone()),
        removed: remove(met.directory, met.name),
    }
}

/// Removes an entry of a directory with all that is in it, and follows no link. What lies deeper is
/// moved up before it is removed, so that no depth takes more than two open directories.
fn remove(directory: &Dir, name: &OsStr) -> io::Result<()> {
    let kind = directory.symlink_metadata(name)?.file_type();
    if !kind.is_dir() {
        return directory.remove_file(name).or_else(|_| {
            make_own(directory.as_fd());
            directory.remove_file(name)
        });
    }
    make_accessible(directory, name);
    let top = directory.open_dir_nofollow(name)?;
    let mut left = MAX_AFTERWARDS;
    loop {
        let mut has_directories = false;
        for (name, is_directory) in listed(&top, &mut left)? {
            if is_directory {
                has_directories = true;
                remove_shallow(&top, &name, &mut left)?;
            } else {
                top.remove_file(&name)?;
            }
        }
        if !has_directories {
            break;
        }
    }
    directory.remove_dir(name).or_else(|_| {
        make_own(directory.as_fd());
        directory.remove_dir(name)
    })
}

/// Removes a directory; those in it are moved beside it.
fn remove_shallow(top: &Dir, name: &OsStr, left: &mut usize) -> io::Result<()> {
    make_accessible(top, name);
    let inner = top.open_dir_nofollow(name)?;
    for (name, is_directory) in listed(&inner, left)? {
        if is_directory {
            make_accessible(&inner, &name); // a directory that moves is written to
            inner.rename(&name, top, format!(".{}", Uuid::new_v4().simple()))?;
        } else {
            inner.remove_file(&name)?;
        }
    }
    top.remove_dir(name)
}

/// What is in a directory, with whether it is one itself.
fn listed(directory: &Dir, left: &mut usize) -> io::Result<Vec<(OsString, bool)>> {
    let mut all = Vec::new();
    for entry in directory.entries()? {
        let entry = entry?;
        *left = left.checked_sub(1).ok_or(io::ErrorKind::QuotaExceeded)?;
        all.push((entry.file_name(), entry.file_type()?.is_dir()));
    }
    Ok(all)
}

/// Gives the service its permissions back on a directory whose programs took them away.
fn make_accessible(directory: &Dir, name: &OsStr) {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(directory, name, flags, Mode::empty());
    if let Ok(opened) = opened {
        make_own(opened.as_fd());
    }
}

fn make_own(directory: impl AsFd) {
    let Ok(found) = rustix::fs::fstat(&directory) else { return };
    let mode = Mode::from_raw_mode(found.st_mode);
    if !mode.contains(Mode::RWXU) {
        let place = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
        let _ = rustix::fs::chmod(place.as_str(), mode | Mode::RWXU); // opening it fails if this has
    }
}
