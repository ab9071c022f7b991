//! `patch`: changes of several files, all of them or none.
//!
//! Everything is read, checked and written next to its place first. The remaining steps are system
//! calls that hardly ever fail; if one fails, the earlier ones are undone. Only a crash in
//! between leaves some of them.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::sync::Arc;

use cap_std::fs::{Dir, File, Metadata};
use tokio_util::sync::CancellationToken;

use super::diff::{Before, compared};
use super::writing::{MAX_EDITED, locked, same_version, writable};
use super::{
    Permit, ToolError, Workspace, reads, refused, stopped, with_directories, writes_lines,
};
use crate::bounds::Refused;
use crate::bounds::patch::{FilePatch, PatchKind, parse};
use crate::event::FileChange;
use crate::governance::Action;
use crate::run::Effect;
use crate::tools::ChangeRecorder;
use crate::tools::quota::Growth;
use crate::tools::staged_file::StagedFile;
use crate::tools::workspace::{DestinationPath, ParentDirectories, open_for_reading};

/// Bytes of all files of a patch, before it and after it.
const MAX_TOTAL: usize = 64 * 1024 * 1024;

fn for_model(Refused(why): Refused) -> ToolError {
    ToolError::ForModel(why)
}

/// The path that a file of a patch really has.
fn resolved(workspace: &Workspace, file: &FilePatch<'_>) -> Result<String, ToolError> {
    Ok(match file.what {
        PatchKind::Create | PatchKind::Modify => workspace.resolve(file.path)?.path,
        PatchKind::Delete => workspace.resolve_entry(file.path)?.path,
    })
}

/// Whether it is a patch.
pub(super) fn check(patch: &str) -> Result<(), ToolError> {
    parse(patch).map(drop).map_err(for_model)
}

/// What a patch would do.
pub(super) fn actions(workspace: &Workspace, patch: &str) -> Result<Vec<Action>, ToolError> {
    let mut actions = Vec::new();
    let (mut seen, mut made) = (BTreeSet::new(), BTreeSet::new());
    for file in parse(patch).map_err(for_model)? {
        let real = resolved(workspace, &file)?;
        if !seen.insert(real.clone()) {
            return Err(ToolError::ForModel(format!("the patch changes {real:?} twice")));
        }
        let lines = file.added.max(file.removed);
        let destructive = file.what == PatchKind::Delete;
        let write = writes_lines(real.clone(), Effect::Once, destructive, lines);
        actions.push(match file.what {
            PatchKind::Create => {
                let mut create = with_directories(workspace, write);
                create.makes.retain(|directory| made.insert(directory.clone()));
                create
            }
            PatchKind::Modify | PatchKind::Delete => write,
        });
        if file.what != PatchKind::Create {
            actions.push(reads(real));
        }
    }
    Ok(actions)
}

/// A file as it was read. While it is open, its inode cannot be reused for another file.
struct Read {
    metadata: Metadata,
    text: String,
    _file: File,
}

/// One file of the patch.
struct Planned {
    path: String,
    what: PatchKind,
    /// Its directory; `None` if that is not created yet.
    dir: Option<Arc<Dir>>,
    name: String,
    before: Option<Read>,
    after: String,
}

/// Executes it.
pub(super) fn apply(
    workspace: &Workspace,
    patch: &str,
    permit: &Permit,
    stop: &CancellationToken,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    if actions(workspace, patch)? != permit.actions() {
        let message = "files changed while the patch was about to be applied; read them again";
        return Err(ToolError::ForModel(message.into()));
    }
    let files = parse(patch).map_err(for_model)?;
    let mut total = 0;
    let mut planned = Vec::with_capacity(files.len());
    let (new, existing): (Vec<_>, Vec<_>) =
        files.iter().partition(|file| file.what == PatchKind::Create);
    for file in existing.into_iter().chain(new) {
        let one = plan(workspace, file)?;
        total += one.after.len() + one.before.as_ref().map_or(0, |before| before.text.len());
        if total > MAX_TOTAL {
            let message = format!("the files of the patch are larger than {MAX_TOTAL} bytes");
            return Err(ToolError::ForModel(message));
        }
        planned.push(one);
    }
    let makes = permit.actions().iter().flat_map(|action| &action.makes);
    let directories = Growth::of_directories(makes.collect::<BTreeSet<_>>().len());
    let growths = planned.iter().filter_map(Planned::growth).chain([directories]);
    let _room = workspace.admit_all(growths)?;
    let missing: Vec<String> =
        planned.iter().filter(|one| one.dir.is_none()).map(|one| one.path.clone()).collect();
    let mut made = ParentDirectories::default();
    for path in &missing {
        let parent = workspace
            .destination(path)
            .and_then(DestinationPath::make)
            .map_err(|e| refused(path, &e))?;
        if let Some(one) = planned.iter_mut().find(|one| one.path == *path) {
            one.dir = Some(Arc::clone(parent.dir()));
        }
        made.add(parent);
    }
    let staged = planned.iter().map(|one| match one.what {
        PatchKind::Delete => Ok(None),
        PatchKind::Create | PatchKind::Modify => {
            let existing = one.before.as_ref().map(|before| &before.metadata);
            let staged = one.dir().and_then(|dir| StagedFile::with(dir, &one.after, existing));
            staged.map(Some).map_err(|e| refused(&one.path, &e))
        }
    });
    let staged = staged.collect::<Result<Vec<_>, _>>()?;
    if stop.is_cancelled() {
        return Err(stopped());
    }
    let first = planned.first().map_or(".", |one| one.path.as_str());
    let names = planned.iter().map(|one| Ok((&**one.dir()?, one.name.as_str())));
    let names = names.collect::<io::Result<Vec<_>>>();
    let names = names.map_err(|e| refused(first, &e))?;
    let lock = locked(workspace, first, &names, stop)?;
    planned.iter().try_for_each(Planned::is_unchanged)?;
    for (index, (one, staged)) in planned.iter().zip(staged).enumerate() {
        if let Err(error) = one.take_place(staged) {
            let left = planned[..index].iter().rev().filter(|one| one.take_back().is_err());
            let left: Vec<&Planned> = left.collect();
            return Err(failed(one, &error, &left, changed));
        }
    }
    drop(lock);
    for one in &planned {
        changed.add(one.change());
    }
    made.keep();
    let done = planned.iter().map(Planned::summary).collect::<Vec<_>>().join("\n");
    Ok(done)
}

fn plan(workspace: &Workspace, file: &FilePatch<'_>) -> Result<Planned, ToolError> {
    let path = resolved(workspace, file)?;
    let what = file.what;
    let (dir, name) = {
        let destination = workspace.destination(&path).map_err(|e| refused(&path, &e))?;
        (destination.holder().cloned(), destination.name().to_owned())
    };
    let before = match (&dir, what) {
        (Some(dir), PatchKind::Create) if dir.symlink_metadata(&name).is_ok() => {
            let message = format!("{path:?} exists already, and the patch would create it");
            return Err(ToolError::ForModel(message));
        }
        (_, PatchKind::Create) => None,
        (Some(dir), _) => Some(content(&path, dir, &name)?),
        (None, _) => return Err(refused(&path, &io::ErrorKind::NotFound.into())),
    };
    let text = before.as_ref().map_or("", |before| before.text.as_str());
    let after = file.apply(text).map_err(for_model)?;
    if after.len() as u64 > MAX_EDITED {
        let message = format!("{path:?} would have more than {MAX_EDITED} bytes");
        return Err(ToolError::ForModel(message));
    }
    Ok(Planned { path, what, dir, name, before, after })
}

/// The text of a file that may be changed.
fn content(path: &str, dir: &Dir, name: &str) -> Result<Read, ToolError> {
    let file = open_for_reading(dir, name).map_err(|e| refused(path, &e))?;
    let metadata = file.metadata().map_err(|e| refused(path, &e))?;
    let metadata = writable(path, metadata)?;
    if metadata.len() > MAX_EDITED {
        let message = format!("{path:?} is larger than {MAX_EDITED} bytes, too large to patch");
        return Err(ToolError::ForModel(message));
    }
    let mut bytes = Vec::new();
    (&file).take(MAX_EDITED).read_to_end(&mut bytes).map_err(|e| refused(path, &e))?;
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(Read { metadata, text, _file: file }),
        _ => {
            let message = format!("{path:?} is a binary file; only text can be patched");
            Err(ToolError::ForModel(message))
        }
    }
}

impl Planned {
    /// By how much it grows; a deleted file is counted when the workspace is measured.
    fn growth(&self) -> Option<Growth> {
        let before = self.before.as_ref().map(|before| before.metadata.len());
        (self.what != PatchKind::Delete).then(|| Growth::of_file(before, self.after.len() as u64))
    }

    fn dir(&self) -> io::Result<&Arc<Dir>> {
        self.dir.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn is_unchanged(&self) -> Result<(), ToolError> {
        let now = self.dir().and_then(|dir| dir.symlink_metadata(&self.name)).ok();
        let is_same = match (&self.before, now) {
            (None, None) => true,
            (Some(before), Some(now)) => same_version(&before.metadata, &now),
            _ => false,
        };
        let message = || {
            ToolError::ForModel(format!(
                "{:?} was changed by another writer in the meantime; nothing was patched, read it again",
                self.path
            ))
        };
        if is_same { Ok(()) } else { Err(message()) }
    }

    fn take_place(&self, staged: Option<StagedFile>) -> io::Result<()> {
        let dir = self.dir()?;
        match (staged, self.what) {
            (Some(staged), PatchKind::Create) => staged.place(dir, &self.name),
            (Some(staged), _) => staged.replace(dir, &self.name),
            (None, _) => dir.remove_file(&self.name),
        }
    }

    fn take_back(&self) -> io::Result<()> {
        let dir = self.dir()?;
        match &self.before {
            None => dir.remove_file(&self.name),
            Some(Read { metadata, text, .. }) => {
                StagedFile::with(dir, text, Some(metadata))?.replace(dir, &self.name)
            }
        }
    }

    fn change(&self) -> FileChange {
        let before = match &self.before {
            None => Before::Nothing,
            Some(before) => Before::Content(before.text.clone().into_bytes()),
        };
        let after = (self.what != PatchKind::Delete).then_some(self.after.as_bytes());
        compared(&self.path, &before, after)
    }

    fn summary(&self) -> String {
        let done = match self.what {
            PatchKind::Create => "Created",
            PatchKind::Modify => "Changed",
            PatchKind::Delete => "Deleted",
        };
        format!("{done} {}.", self.path)
    }
}

/// The result if not all of the last steps succeeded.
fn failed(
    at: &Planned,
    error: &io::Error,
    left: &[&Planned],
    changed: &ChangeRecorder,
) -> ToolError {
    let ToolError::ForModel(why) = refused(&at.path, error) else {
        return ToolError::Fatal(error.to_string());
    };
    for one in left {
        changed.add(one.change());
    }
    if left.is_empty() {
        return ToolError::ForModel(format!("{why}; nothing is patched"));
    }
    let left = left.iter().map(|one| one.path.as_str()).collect::<Vec<_>>().join(", ");
    ToolError::ForModel(format!("{why}; these are patched nevertheless: {left}"))
}
