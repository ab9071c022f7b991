//! Inspects the files that programs left in the workspace, once they have ended for whatever reason:
//! which files they created, changed and deleted, and whether they created what `paths.deny` forbids.
//!
//! Denied files are moved to the quarantine, because globs cannot be enforced while programs run: only
//! files that exist before they start are hidden from them. Changes that others make in the meantime
//! cannot be distinguished from those of the programs, except for writes of the service itself; so
//! nothing is deleted.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use super::redirection_targets::delete_unopened;
use crate::bounds::text::quoted;
use crate::event::{ChangeKind, FileChange};
use crate::governance::{Decision, Permit};
use crate::tools::own_writes::Watch;
use crate::tools::removal::make_accessible;
use crate::tools::sandbox::reach::Before;
use crate::tools::sandbox::tree_cache::{self, Stamp, Tree};
use crate::tools::sandbox::walk::{MAX_WALKED, WalkEntry, WalkLimit, walk};
use crate::tools::staged_file::StagedFile;
use crate::tools::{ToolContext, Workspace};

/// Entries that are inspected after programs have ended. Programs may have created more than there may be before
/// the next call.
const MAX_AFTERWARDS: usize = 10 * MAX_WALKED;
/// Such files that are listed to a model.
const MAX_LISTED: usize = 20;

/// Inspects the workspace when this is dropped and the programs have ended.
pub(super) struct InspectOnDrop(Option<Inspection>);

struct Inspection {
    permit: Permit,
    context: ToolContext,
    before: Before,
    /// The files that redirections may have created.
    missing: Arc<BTreeSet<String>>,
    ended: oneshot::Receiver<()>,
    until: watch::Sender<()>,
}

impl InspectOnDrop {
    /// Returns a sender, too, which must be dropped when the programs have ended.
    pub(super) fn after(
        permit: Permit,
        context: &ToolContext,
        before: Before,
        missing: Arc<BTreeSet<String>>,
    ) -> (oneshot::Sender<()>, Self) {
        let (held, ended) = oneshot::channel();
        let (until, inspection) = watch::channel(());
        context.changed.inspected_until(inspection);
        let context = context.clone();
        (held, Self(Some(Inspection { permit, context, before, missing, ended, until })))
    }
}

impl Drop for InspectOnDrop {
    fn drop(&mut self) {
        let (Some(work), Ok(runtime)) = (self.0.take(), Handle::try_current()) else { return };
        runtime.spawn(async move {
            let Inspection { permit, context, before, missing, ended, until } = work;
            let _ = ended.await; // the other side is dropped, nothing is sent
            let inspect = move || {
                delete_unopened(&missing, &context.workspace);
                inspect_files(&permit, &context, before);
            };
            if let Err(error) = tokio::task::spawn_blocking(inspect).await {
                tracing::error!(%error, "the files that programs left could not be inspected");
            }
            drop(until);
        });
    }
}

/// A denied file or directory that was not there before.
struct DeniedFile {
    path: String,
    /// The path that the same file had before.
    was: Option<String>,
    /// Where it is now, beneath the directory of all workspaces.
    kept: io::Result<String>,
}

#[derive(Default)]
struct Found {
    /// None where they are not known.
    changes: Option<Vec<(String, ChangeKind)>>,
    denied_files: Vec<DeniedFile>,
}

fn inspect_files(permit: &Permit, context: &ToolContext, mut before: Before) {
    match detect_changes(permit, context, &mut before) {
        Ok(found) => record_changes(found, permit, context, &before.own),
        Err(error) => context
            .changed
            .object(format!("The files that the programs left could not be inspected: {error}.")),
    }
}

fn record_changes(found: Found, permit: &Permit, context: &ToolContext, own: &Watch) {
    let Found { changes, denied_files } = found;
    let of_programs =
        changes.iter().flat_map(|changes| by_programs(changes, &context.workspace, own));
    for (path, kind) in of_programs {
        let ruling = permit.ruling_on_program_file(path);
        // Without a pattern the objection is not about this file; the kernel enforces the rule.
        if ruling.decision == Decision::Warned && ruling.pattern.is_some() {
            context.requests.record_leftover(path, None, ruling, "succeeded");
        }
        context.changed.add(FileChange::of_program(path, *kind));
    }
    if changes.is_some() {
        context.changed.complete();
    }
    let mut denied = Vec::new();
    for DeniedFile { path, was, kept } in denied_files {
        let ruling = permit.ruling_on_program_file(&path);
        let pattern = ruling.pattern.clone().unwrap_or_default();
        let was = was.map(|was| format!(" (it was {} before)", quoted(&was)));
        let was = was.unwrap_or_default();
        let (failed, kept, outcome) = match kept {
            Ok(kept) => (String::new(), Some(kept), "blocked"),
            Err(error) => {
                let failed = format!(", but cannot be moved out: {}", error.kind());
                (failed, None, "failed")
            }
        };
        let (tenant, run, call) = (&context.caller.tenant, context.run_id, context.call_id);
        tracing::warn!(path, pattern, kept, tenant, %run, %call, "programs created denied files");
        denied.push(format!("{}{was}, which is denied by {pattern}{failed}", quoted(&path)));
        context.requests.record_leftover(&path, kept, ruling, outcome);
    }
    if denied.is_empty() {
        return;
    }
    let more = denied.len().saturating_sub(MAX_LISTED);
    denied.truncate(MAX_LISTED);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    context.changed.object(format!(
        "Blocked by the path rule: the programs created denied files, which were moved out of the \
         workspace: {}{more}. Their other changes remain.",
        denied.join("; ")
    ));
}

/// The changes without those of files that the service itself writes and that are not in their places yet.
fn by_programs<'a>(
    changes: &'a [(String, ChangeKind)],
    workspace: &'a Workspace,
    own: &'a Watch,
) -> impl Iterator<Item = &'a (String, ChangeKind)> {
    let is_staged = move |path: &str| {
        path.rsplit('/').next().is_some_and(StagedFile::is_own_name)
            && workspace
                .holder(path)
                .is_ok_and(|(directory, name)| own.is_staged(&directory, OsStr::new(name)))
    };
    changes.iter().filter(move |(path, _)| !is_staged(path))
}

/// Finds the changes: from the kernel's reports if these are complete, else by a walk.
fn detect_changes(
    permit: &Permit,
    context: &ToolContext,
    before: &mut Before,
) -> io::Result<Found> {
    let root = context.workspace.root();
    let changes =
        before.tree.as_mut().and_then(|tree| tree.updated(&root, |path| permit.may_visit(path)));
    let Some(changes) = changes else { return found(permit, context, before) };
    if let Some(tree) = before.tree.take() {
        tree_cache::put(&root, permit.denied_as_written(), tree);
    }
    Ok(Found { changes: Some(changes), denied_files: Vec::new() })
}

fn found(permit: &Permit, context: &ToolContext, before: &Before) -> io::Result<Found> {
    let denied = permit.denied();
    if before.tree.is_none() && !denied.by_glob {
        let denied_files =
            denied.trees.iter().filter_map(|tree| denied_tree(tree, context, before));
        return Ok(Found { changes: None, denied_files: denied_files.collect() });
    }
    let root = context.workspace.root();
    let mut found = Found::default();
    let mut changes = Vec::new();
    let mut kept: HashSet<&String> = HashSet::new();
    let refused = |beyond| match beyond {
        WalkLimit::Entries => {
            io::Error::other(format!("there are more than {MAX_AFTERWARDS} entries"))
        }
        WalkLimit::Time => io::ErrorKind::TimedOut.into(),
        WalkLimit::Depth => io::Error::other("directories are nested too deeply"),
    };
    let mut is_beneath_denied = false;
    let mut next = if before.tree.is_some() {
        Tree::watched(&root, before.has_mounts)
    } else {
        Tree::default()
    };
    walk(&root, (MAX_AFTERWARDS, None), refused, |entry: &WalkEntry<'_>| {
        // Deny patterns of parent directories matter only within a denied directory.
        let may = if is_beneath_denied {
            permit.may_enter(entry.path)
        } else {
            permit.may_visit(entry.path)
        };
        if !may {
            if before.denied.contains(entry.path) || is_observed(permit, entry.path) {
                next.denied.insert(entry.path.to_owned());
                return Ok(false);
            }
            next.is_incomplete();
            if before.own.knows(entry.directory, entry.name) {
                is_beneath_denied |= entry.is_directory;
                return Ok(entry.is_directory); // what lies in it may be the programs' all the same
            }
            found.denied_files.push(put_aside(entry, context, before));
            return Ok(false);
        }
        if entry.name.to_str().is_none() {
            next.is_incomplete();
        }
        if entry.is_directory {
            make_accessible(entry.directory, entry.name);
            if next.is_cacheable() {
                next.add_directory(entry);
            }
            return Ok(true);
        }
        let Some(Tree { files, .. }) = &before.tree else { return Ok(false) };
        let Ok(now) = entry.stat() else { return Ok(false) };
        if next.is_cacheable() {
            next.add_file(entry.path, &now);
        }
        match files.get_key_value(entry.path) {
            None => changes.push((entry.path.to_owned(), ChangeKind::Created)),
            Some((path, stamp)) => {
                kept.insert(path);
                if *stamp != Stamp::of(&now) {
                    changes.push((entry.path.to_owned(), ChangeKind::Modified));
                }
            }
        }
        Ok(false)
    })?;
    tree_cache::put(&root, permit.denied_as_written(), next);
    found.changes = before.tree.as_ref().map(|Tree { files, .. }| {
        let gone = files.keys().filter(|path| !kept.contains(*path));
        changes.extend(gone.map(|path| (path.clone(), ChangeKind::Deleted)));
        changes.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        changes
    });
    Ok(found)
}

/// Whether what the definition denies is only noted.
fn is_observed(permit: &Permit, path: &str) -> bool {
    permit.ruling_on_program_file(path).decision <= Decision::Warned
}

/// A denied directory or file, if the workspace is too large to be walked.
fn denied_tree(tree: &str, context: &ToolContext, before: &Before) -> Option<DeniedFile> {
    if before.denied.contains(tree) {
        return None;
    }
    let (directory, name) = context.workspace.holder(tree).ok()?;
    directory.symlink_metadata(name).ok()?;
    let name = OsStr::new(name);
    if before.own.knows(&directory, name) {
        return None;
    }
    let kept = context.workspace.put_aside(&directory, name, tree);
    Some(DeniedFile { path: tree.to_owned(), was: None, kept })
}

fn put_aside(entry: &WalkEntry<'_>, context: &ToolContext, before: &Before) -> DeniedFile {
    let inode = entry.stat().ok().filter(|_| !entry.is_directory).map(|found| found.st_ino);
    let was = before
        .tree
        .iter()
        .flat_map(|tree| &tree.files)
        .find(|(_, stamp)| Some(stamp.inode) == inode);
    DeniedFile {
        path: entry.path.to_owned(),
        was: was.map(|(path, _)| path.clone()),
        kept: context.workspace.put_aside(entry.directory, entry.name, entry.path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_on_their_way_into_the_workspace_are_no_changes_of_programs() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(root.path(), "t", ".").unwrap();
        workspace.root().create_dir("a").unwrap();
        let inner = Arc::new(workspace.root().open_dir("a").unwrap());
        let staged = [workspace.root(), inner].map(|dir| StagedFile::create(&dir).unwrap().0);
        let mut paths = Vec::new();
        for above in ["", "a/"] {
            let dir = root.path().join("t").join(above);
            for entry in std::fs::read_dir(dir).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                if name != "a" {
                    paths.push(format!("{above}{name}"));
                }
            }
        }
        assert_eq!(paths.len(), 2);
        let own = Watch::default();
        let by_programs_only = [
            ".toolloop-0123456789abcdef0123456789abcdef.tmp",
            "a/.toolloop-0123456789abcdef0123456789abcdef.tmp",
            "a/.toolloop-own.tmp",
            "a/b",
        ];
        for path in by_programs_only {
            workspace.root().write(path, "").unwrap();
        }
        paths.extend(by_programs_only.map(str::to_owned));
        let changes: Vec<_> = paths.into_iter().map(|path| (path, ChangeKind::Created)).collect();
        let left = || by_programs(&changes, &workspace, &own).map(|(path, _)| path.as_str());
        assert!(left().eq(by_programs_only));
        drop(staged);
        assert!(left().eq(by_programs_only), "those that went away since are none either");
    }
}
