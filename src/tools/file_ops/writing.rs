//! `write`, `append`, `edit`, `mkdir`, `move` and `delete`.
//!
//! Whole files are staged beside their place first. Only the permit allows losing existing content:
//! without it the last step is a system call that fails if something exists at the path, so that a file
//! that appears in between is safe. The last check and the change are atomic for all that take the lock
//! of the file. A file with more than one hard link is not written to.

use std::io::{self, Read, Write};

use cap_fs_ext::{FollowSymlinks, OpenOptionsFollowExt, OpenOptionsSyncExt};
use cap_std::fs::{Dir, File, Metadata, MetadataExt, OpenOptions};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

use super::diff::{Before, MAX_COMPARED, compared};
use super::{Kind, Permit, ToolError, Workspace, refused, special, stopped};
use crate::event::{ChangeKind, FileChange};
use crate::tools::ChangeRecorder;
use crate::tools::file_locks::FileLock;
use crate::tools::quota::{Admitted, Growth};
use crate::tools::staged_file::{StagedFile, rename_without_loss};
use crate::tools::workspace::{DestinationPath, ParentDirectory, open_for_reading};

/// Bytes of a file that is edited.
pub(super) const MAX_EDITED: u64 = 16 * 1024 * 1024;
/// How often the content of a file is in memory while it is changed: as it was and as it will be, and
/// what is made of both to compare them.
pub(super) const COPIES: u64 = 4;

/// How often a text may be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occurrences {
    /// It must occur once.
    One,
    /// It may occur any number of times.
    All,
}

/// Bytes of a file that are read where it is changed: none of one that has more than `most`, or is not there.
pub(super) fn size(workspace: &Workspace, path: &str, most: u64) -> u64 {
    let file = workspace.holder(path).and_then(|(dir, name)| dir.symlink_metadata(name));
    let size = file.ok().filter(Metadata::is_file).map(|file| file.len());
    size.filter(|size| *size <= most).unwrap_or(0)
}

/// Whether a file holds exactly this text: writing it again would lose nothing.
pub(super) fn holds(workspace: &Workspace, path: &str, content: &str) -> bool {
    workspace.open_file(path).is_ok_and(|file| holds_text(file, content))
}

fn holds_text(file: File, content: &str) -> bool {
    let as_long = file.metadata().is_ok_and(|m| m.is_file() && m.len() == content.len() as u64);
    let mut bytes = Vec::new();
    as_long
        && file.take(content.len() as u64 + 1).read_to_end(&mut bytes).is_ok()
        && bytes == content.as_bytes()
}

/// Makes a file or replaces it.
pub(super) fn write(
    workspace: &Workspace,
    path: &str,
    content: &str,
    permit: &Permit,
    stop: &CancellationToken,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    let destination = workspace.destination(path).map_err(|e| refused(path, &e))?;
    let existing = match destination.holder().map(|dir| dir.symlink_metadata(destination.name())) {
        Some(Ok(metadata)) => Some(writable(path, metadata)?),
        Some(Err(e)) if e.kind() != io::ErrorKind::NotFound => return Err(refused(path, &e)),
        Some(Err(_)) | None => None,
    };
    let before = existing.as_ref().map(Metadata::len);
    let growth = Growth::of_file(before, content.len() as u64);
    let (made, _room) = admitted(workspace, destination, growth)?;
    let (dir, name) = (made.dir(), made.name());
    let staged =
        StagedFile::with(dir, content, existing.as_ref()).map_err(|e| refused(path, &e))?;
    if stop.is_cancelled() {
        return Err(stopped());
    }
    let done = format!("Wrote {} bytes to {path}.", content.len());
    let lock = locked(workspace, path, &[(dir, name)], stop)?;
    if permit.allows_destruction() {
        let before = Before::of(dir, name, MAX_EDITED);
        staged.replace(dir, name).map_err(|e| refused(path, &e))?;
        drop(lock);
        changed.add(compared(path, &before, Some(content.as_bytes())));
        made.keep();
        return Ok(done);
    }
    match staged.place(dir, name) {
        Ok(()) => {
            changed.add(compared(path, &Before::Nothing, Some(content.as_bytes())));
            made.keep();
            Ok(done)
        }
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if open_for_reading(dir, name).is_ok_and(|file| holds_text(file, content)) {
                return Ok(format!("{path} holds exactly this text already."));
            }
            Err(ToolError::ForModel(format!(
                "{path:?} was created by another writer in the meantime and was not overwritten; read it first"
            )))
        }
        Err(e) => Err(refused(path, &e)),
    }
}

/// Adds to the end of a file.
pub(super) fn append(
    workspace: &Workspace,
    path: &str,
    content: &str,
    stop: &CancellationToken,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    let destination = workspace.destination(path).map_err(|e| refused(path, &e))?;
    let length = destination.holder().and_then(|dir| dir.symlink_metadata(destination.name()).ok());
    let length = length.map(|metadata| metadata.len());
    let after = length.unwrap_or(0) + content.len() as u64;
    let (made, _room) = admitted(workspace, destination, Growth::of_file(length, after))?;
    let (dir, name) = (made.dir(), made.name());
    let lock = locked(workspace, path, &[(dir, name)], stop)?;
    let earlier = Before::of(dir, name, MAX_COMPARED as u64);
    let mut options = OpenOptions::new();
    options.append(true).create(true).follow(FollowSymlinks::No).nonblock(true);
    let mut file = dir.open_with(name, &options).map_err(|e| match e.raw_os_error() {
        Some(code) if code == Errno::NXIO.raw_os_error() => special(path),
        _ => refused(path, &e),
    })?;
    // Of the open file, so nothing can be swapped between the look and the write.
    let before = file.metadata().map_err(|e| refused(path, &e)).and_then(|m| writable(path, m))?;
    let written = file.write_all(content.as_bytes());
    let length = file.metadata().map_or(before.len(), |now| now.len());
    drop(lock);
    let added = match &written {
        Ok(()) => content.len(),
        Err(_) => content.floor_char_boundary(
            usize::try_from(length.saturating_sub(before.len())).unwrap_or(usize::MAX),
        ),
    };
    if added > 0 || written.is_ok() || matches!(earlier, Before::Nothing) {
        changed.add(appended(path, earlier, &content[..added]));
        made.keep();
    }
    if let Err(error) = written.and_then(|()| file.sync_data()) {
        let ToolError::ForModel(why) = refused(path, &error) else {
            return Err(ToolError::Fatal(error.to_string()));
        };
        let all = content.len();
        return Err(ToolError::ForModel(format!("{why}; {added} of {all} bytes were appended")));
    }
    let length = before.len() + content.len() as u64;
    Ok(format!("Appended {} bytes to {path}, which is {length} bytes long now.", content.len()))
}

fn appended(path: &str, before: Before, content: &str) -> FileChange {
    let Before::Content(text) = before else {
        let change = compared(path, &before, Some(content.as_bytes()));
        let added = Some(content.lines().count() as u64);
        let is_new = change.change == ChangeKind::Created;
        return if is_new { change } else { FileChange { added, removed: Some(0), ..change } };
    };
    let after = [text.as_slice(), content.as_bytes()].concat();
    compared(path, &Before::Content(text), Some(&after))
}

/// How often a text occurs in a file; as good as once where the file cannot be edited.
pub(super) fn occurrences(workspace: &Workspace, path: &str, text: &str) -> usize {
    let mut bytes = Vec::new();
    let read = workspace.open_file(path).ok().filter(|file| {
        file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MAX_EDITED)
    });
    let is_read = read.is_some_and(|file| file.take(MAX_EDITED).read_to_end(&mut bytes).is_ok());
    let content = String::from_utf8(bytes).ok().filter(|_| is_read && !text.is_empty());
    content.map_or(1, |content| content.matches(text).count().max(1))
}

/// Whether there is anything to replace.
pub(super) fn check_edit(old: &str, new: &str) -> Result<(), ToolError> {
    if old == new {
        return Err(ToolError::ForModel("old and new are the same text; nothing to edit".into()));
    }
    Ok(())
}

/// Replaces text in a file.
pub(super) fn edit(
    workspace: &Workspace,
    path: &str,
    old: &str,
    new: &str,
    occurrences: Occurrences,
    stop: &CancellationToken,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    check_edit(old, new)?;
    let (dir, name) = workspace.holder(path).map_err(|e| refused(path, &e))?;
    let file = open_for_reading(&dir, name).map_err(|e| refused(path, &e))?;
    let before = file.metadata().map_err(|e| refused(path, &e)).and_then(|m| writable(path, m))?;
    if before.len() > MAX_EDITED {
        return Err(ToolError::ForModel(format!(
            "{path:?} is larger than {MAX_EDITED} bytes, too large to edit"
        )));
    }
    let mut bytes = Vec::new();
    // While it is open, its inode cannot be reused for another file.
    (&file).take(MAX_EDITED).read_to_end(&mut bytes).map_err(|e| refused(path, &e))?;
    let text = String::from_utf8(bytes).map_err(|_| {
        ToolError::ForModel(format!("{path:?} is a binary file; only text can be edited"))
    })?;
    let count = text.matches(old).count();
    if count == 0 {
        return Err(ToolError::ForModel(format!(
            "the old text occurs 0 times in {path:?}; read the file and copy the text exactly, white space included"
        )));
    }
    if count > 1 && occurrences == Occurrences::One {
        return Err(ToolError::ForModel(format!(
            "the old text occurs {count} times in {path:?}; add lines around it until it occurs once, or set replace_all"
        )));
    }
    let length = (text.len() as u64).saturating_sub(count as u64 * old.len() as u64)
        + count as u64 * new.len() as u64;
    if length > MAX_EDITED {
        return Err(ToolError::ForModel(format!(
            "{path:?} would have {length} bytes after {count} replacements, more than {MAX_EDITED}"
        )));
    }
    let _room = workspace.admit(Growth::of_file(Some(before.len()), length))?;
    let after = text.replace(old, new);
    let staged = StagedFile::with(&dir, &after, Some(&before)).map_err(|e| refused(path, &e))?;
    if stop.is_cancelled() {
        return Err(stopped());
    }
    let lock = locked(workspace, path, &[(&dir, name)], stop)?;
    if !dir.symlink_metadata(name).is_ok_and(|now| same_version(&before, &now)) {
        return Err(ToolError::ForModel(format!(
            "{path:?} was changed by another writer in the meantime; read it again"
        )));
    }
    staged.replace(&dir, name).map_err(|e| refused(path, &e))?;
    drop(lock);
    changed.add(compared(path, &Before::Content(text.into_bytes()), Some(after.as_bytes())));
    Ok(format!(
        "Replaced {count} {} in {path}.",
        if count == 1 { "occurrence" } else { "occurrences" }
    ))
}

/// The directories above a path that are not there.
pub(super) fn missing_above(workspace: &Workspace, path: &str) -> Vec<String> {
    workspace.destination(path).map_or_else(
        |_| Vec::new(),
        |destination| destination.missing().map(str::to_owned).collect(),
    )
}

/// Counts what comes with a change and the directories that it needs, and makes these.
fn admitted<'p>(
    workspace: &Workspace,
    destination: DestinationPath<'p>,
    growth: Growth,
) -> Result<(ParentDirectory<'p>, Option<Admitted>), ToolError> {
    let directories = Growth::of_directories(destination.missing().len());
    let room = workspace.admit_all([growth, directories])?;
    let path = destination.path();
    Ok((destination.make().map_err(|e| refused(path, &e))?, room))
}

/// Makes a directory.
pub(super) fn mkdir(
    workspace: &Workspace,
    path: &str,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    if path != "." {
        let destination = workspace.destination(path).map_err(|e| refused(path, &e))?;
        let there =
            destination.holder().and_then(|dir| dir.symlink_metadata(destination.name()).ok());
        let adds = usize::from(!there.is_some_and(|metadata| metadata.is_dir()));
        let (made, _room) = admitted(workspace, destination, Growth::of_directories(adds))?;
        match made.dir().create_dir(made.name()) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && is_directory(&made) => {}
            done => {
                done.map_err(|e| refused(path, &e))?;
                changed.add(FileChange::plain(path, ChangeKind::Created));
            }
        }
        made.keep();
    }
    Ok(format!("{path} is a directory."))
}

fn is_directory(made: &ParentDirectory<'_>) -> bool {
    made.dir().symlink_metadata(made.name()).is_ok_and(|metadata| metadata.is_dir())
}

/// Moves a file or directory.
pub(super) fn rename(
    workspace: &Workspace,
    from: &str,
    to: &str,
    permit: &Permit,
    stop: &CancellationToken,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    let (from_dir, from_name) = workspace.holder(from).map_err(|e| refused(from, &e))?;
    let metadata = from_dir.symlink_metadata(from_name).map_err(|e| refused(from, &e))?;
    if Kind::of(&metadata) == Kind::Special {
        return Err(special(from));
    }
    if to == from || to.strip_prefix(from).is_some_and(|rest| rest.starts_with('/')) {
        return Err(ToolError::ForModel(format!(
            "{from:?} cannot be moved to {to:?}, which is itself or within it"
        )));
    }
    let destination = workspace.destination(to).map_err(|e| refused(to, &e))?;
    let there = destination.holder().and_then(|dir| dir.symlink_metadata(destination.name()).ok());
    let is_same = |there: &Metadata| (there.dev(), there.ino()) == (metadata.dev(), metadata.ino());
    if metadata.nlink() > 1 && there.as_ref().is_some_and(is_same) {
        // The system would leave both.
        return Err(ToolError::ForModel(format!(
            "{from:?} and {to:?} are hard links of one file; delete one of them"
        )));
    }
    let there = there.map(|metadata| Kind::of(&metadata));
    match there {
        Some(Kind::Directory) => {
            let hint =
                format!("{to:?} is a directory; give the full new path, e.g. {to}/{from_name}");
            return Err(ToolError::ForModel(hint));
        }
        Some(Kind::Special) => return Err(special(to)),
        Some(Kind::File | Kind::Link) | None => {}
    }
    let (made, _room) = admitted(workspace, destination, Growth::default())?;
    let (to_dir, to_name) = (made.dir(), made.name());
    let lock = locked(workspace, to, &[(&from_dir, from_name), (to_dir, to_name)], stop)?;
    let lost = permit.allows_destruction().then(|| content_of(to_dir, to_name, there)).flatten();
    let moved = if permit.allows_destruction() {
        from_dir.rename(from_name, to_dir, to_name)
    } else {
        rename_without_loss(&from_dir, from_name, to_dir, to_name)
    };
    moved.map_err(|e| refused(to, &e))?;
    drop(lock);
    made.keep();
    if let Some(lost) = lost {
        changed.add(deleted(to, &lost));
    }
    let from_path = Some(from.to_owned());
    changed.add(FileChange { from: from_path, ..FileChange::plain(to, ChangeKind::Moved) });
    Ok(format!("Moved {from} to {to}."))
}

/// Deletes a file, a link or an empty directory.
pub(super) fn delete(
    workspace: &Workspace,
    path: &str,
    stop: &CancellationToken,
    changed: &ChangeRecorder,
) -> Result<String, ToolError> {
    let (dir, name) = workspace.holder(path).map_err(|e| refused(path, &e))?;
    let lock = locked(workspace, path, &[(&dir, name)], stop)?;
    let metadata = dir.symlink_metadata(name).map_err(|e| refused(path, &e))?;
    let lost = content_of(&dir, name, Some(Kind::of(&metadata)));
    let done = match Kind::of(&metadata) {
        Kind::Directory => dir.remove_dir(name),
        Kind::File | Kind::Link => dir.remove_file(name),
        Kind::Special => return Err(special(path)),
    };
    done.map_err(|e| refused(path, &e))?;
    drop(lock);
    // Only the bytes of files are counted.
    workspace.freed(if metadata.is_file() { metadata.len() } else { 0 });
    if let Some(lost) = lost {
        changed.add(deleted(path, &lost));
    }
    Ok(format!("Deleted {path}."))
}

/// The loss that a deletion causes.
fn content_of(dir: &Dir, name: &str, kind: Option<Kind>) -> Option<Before> {
    match kind? {
        Kind::File => Some(Before::of(dir, name, MAX_EDITED)),
        Kind::Directory | Kind::Link | Kind::Special => Some(Before::Nothing),
    }
}

fn deleted(path: &str, lost: &Before) -> FileChange {
    match lost {
        Before::Nothing => FileChange::plain(path, ChangeKind::Deleted),
        Before::Content(_) | Before::TooLarge => compared(path, lost, None),
    }
}

/// A regular file with one name, or why it is not written to.
pub(super) fn writable(path: &str, metadata: Metadata) -> Result<Metadata, ToolError> {
    match Kind::of(&metadata) {
        Kind::File if metadata.nlink() > 1 => Err(ToolError::ForModel(format!(
            "{path:?} has {} hard links; writing it would change files elsewhere",
            metadata.nlink()
        ))),
        Kind::File => Ok(metadata),
        Kind::Directory => Err(refused(path, &io::ErrorKind::IsADirectory.into())),
        Kind::Link => Err(refused(path, &Errno::LOOP.into())),
        Kind::Special => Err(special(path)),
    }
}

/// Locks these names in directories. That may take long, so it is checked afterwards whether the call
/// still goes on.
pub(super) fn locked(
    workspace: &Workspace,
    path: &str,
    names: &[(&Dir, &str)],
    stop: &CancellationToken,
) -> Result<FileLock, ToolError> {
    let lock = workspace.lock(names).map_err(|e| refused(path, &e))?;
    if stop.is_cancelled() { Err(stopped()) } else { Ok(lock) }
}

pub(super) fn same_version(before: &Metadata, now: &Metadata) -> bool {
    let place = |m: &Metadata| (m.dev(), m.ino(), m.len());
    let times = |m: &Metadata| (m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec());
    (place(before), times(before)) == (place(now), times(now))
}
