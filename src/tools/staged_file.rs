//! Files that are written completely before they are moved into their place, so that a reader sees either
//! the old or the new content.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cap_fs_ext::DirExt;
use cap_std::ambient_authority;
use cap_std::fs::{Dir, DirEntry, File, Metadata, OpenOptions};
use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::own_writes::StagedName;
use super::staged_bytes::{HeldBytes, TooManyStaged};
use crate::bounds::off_worker;

/// How the names of such files begin.
const PREFIX: &str = ".toolloop-";
/// A staged file that was not written to for this long was left by a crash.
const LONGEST: Duration = Duration::from_hours(1);
/// Levels of directories in which such files are looked for at most: one directory of each is open.
const MAX_LEVELS: usize = 512;

/// A file that is not yet in its place; removed again unless it gets there.
#[derive(Debug)]
pub struct StagedFile {
    dir: Arc<Dir>,
    name: String,
    held: Option<HeldBytes>,
    /// Dropped after the file is removed.
    _own: StagedName,
}

impl StagedFile {
    /// An empty file beside its place.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create(dir: &Arc<Dir>) -> io::Result<(Self, File)> {
        let name = format!("{PREFIX}{}.tmp", Uuid::new_v4().simple());
        let own = StagedName::at(dir, &name);
        let file = dir.open_with(&name, OpenOptions::new().write(true).create_new(true))?;
        Ok((Self { dir: Arc::clone(dir), name, held: None, _own: own }, file))
    }

    /// A file with this text, and with the permissions of the one that it will replace.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn with(dir: &Arc<Dir>, content: &str, existing: Option<&Metadata>) -> io::Result<Self> {
        let (staged, mut file) = Self::create(dir)?;
        if let Some(existing) = existing {
            file.set_permissions(existing.permissions())?;
        }
        file.write_all(content.as_bytes())?;
        file.sync_data()?;
        Ok(staged)
    }

    /// Whether a file of this name may be one that is not in its place.
    pub fn is_name(name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    /// Whether a file of this name is one that is not in its place, or was left by a crash.
    pub fn is_own_name(name: &str) -> bool {
        let id = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(".tmp"));
        id.is_some_and(|id| Uuid::try_parse(id).is_ok())
    }

    /// Deletes staged files that crashes left in the directories of all tenants, and in those beneath them if
    /// it is to look deep, until it is stopped; returns how many.
    ///
    /// # Errors
    /// The directory of all workspaces cannot be read.
    pub fn remove_abandoned(
        workspaces: &Path,
        is_deep: bool,
        stop: &CancellationToken,
    ) -> io::Result<u64> {
        let workspaces = Arc::new(Dir::open_ambient_dir(workspaces, ambient_authority())?);
        let mut waiting = Vec::new();
        for tenant in workspaces.entries()? {
            let tenant = tenant?;
            let name = tenant.file_name();
            // No tenant has such a name.
            let is_other = name.as_encoded_bytes().starts_with(b".");
            if !is_other && tenant.file_type()?.is_dir() {
                waiting.push((Arc::clone(&workspaces), name, 1));
            }
        }
        let levels = if is_deep { MAX_LEVELS } else { 1 };
        let mut removed = 0;
        while let Some((above, name, level)) = waiting.pop()
            && !stop.is_cancelled()
        {
            let Ok(dir) = above.open_dir_nofollow(&name).map(Arc::new) else { continue };
            let Ok(entries) = dir.entries() else { continue };
            // What goes away in the meantime has got into its place.
            for entry in entries.flatten() {
                if was_left(&entry).unwrap_or(false) {
                    removed += u64::from(entry.remove_file().is_ok());
                } else if level < levels && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    waiting.push((Arc::clone(&dir), entry.file_name(), level + 1));
                }
            }
        }
        Ok(removed)
    }

    /// Counts what it grows by from now on.
    pub fn count(&mut self, held: HeldBytes) {
        self.held = Some(held);
    }

    /// Counts bytes that are about to be written to it.
    ///
    /// # Errors
    /// [`TooManyStaged`]
    pub fn grow(&mut self, bytes: u64) -> Result<(), TooManyStaged> {
        self.held.as_mut().map_or(Ok(()), |held| held.add(bytes))
    }

    /// Gives it the permissions of the file that it will replace.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn inherit(&self, existing: &Metadata) -> io::Result<()> {
        self.dir.set_permissions(&self.name, existing.permissions())
    }

    /// Puts it in its place, whatever file is there.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn replace(&self, dir: &Dir, name: &str) -> io::Result<()> {
        self.dir.rename(&self.name, dir, name)
    }

    /// Changes places with the file that is there, so that a second exchange undoes the first. Where the
    /// file system has neither that step nor second names, the other file is lost.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn exchange(&self, dir: &Dir, name: &str) -> io::Result<()> {
        let staged = self.name.as_str();
        let exchange = || renameat_with(&*self.dir, staged, dir, name, RenameFlags::EXCHANGE);
        match exchange() {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => self.link_and_replace(dir, name),
            exchanged => {
                exchanged?;
                if self.dir.symlink_metadata(staged)?.is_dir() {
                    exchange()?;
                    return Err(io::ErrorKind::IsADirectory.into());
                }
                Ok(())
            }
        }
    }

    /// The same for files on file systems without that step.
    fn link_and_replace(&self, dir: &Dir, name: &str) -> io::Result<()> {
        let other = format!("{PREFIX}{}.tmp", Uuid::new_v4().simple());
        let _own = StagedName::at(&self.dir, &other);
        let is_linked = dir.hard_link(name, &self.dir, &other).is_ok();
        let replaced = self.dir.rename(&self.name, dir, name);
        if is_linked {
            match replaced {
                Ok(()) => self.dir.rename(&other, &self.dir, &self.name)?,
                Err(_) => self.dir.remove_file(&other)?,
            }
        }
        replaced
    }

    /// Puts it in its place, unless something is there.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn place(&self, dir: &Dir, name: &str) -> io::Result<()> {
        rename_without_loss(&self.dir, &self.name, dir, name)
    }

    /// Takes it out of its place again.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn take_back(&self, dir: &Dir, name: &str) -> io::Result<()> {
        dir.rename(name, &self.dir, &self.name)
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        // Gone already where it is in its place. The volume may hang.
        let _ = off_worker(|| self.dir.remove_file(&self.name));
    }
}

fn was_left(entry: &DirEntry) -> io::Result<bool> {
    let name = entry.file_name();
    let is_other = name.to_str().is_none_or(|name| !StagedFile::is_own_name(name));
    if is_other || !entry.file_type()?.is_file() {
        return Ok(false);
    }
    let age = SystemTime::now().duration_since(entry.metadata()?.modified()?.into_std());
    Ok(age.is_ok_and(|age| age > LONGEST))
}

/// Renames unless something has the new name, in one step of the system.
///
/// # Errors
/// Errors of the file system.
pub fn rename_without_loss(from_dir: &Dir, from: &str, to_dir: &Dir, to: &str) -> io::Result<()> {
    match renameat_with(from_dir, from, to_dir, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            link_and_unlink(from_dir, from, to_dir, to)
        }
        renamed => renamed.map_err(io::Error::from),
    }
}

/// The same on file systems without that step, e.g. NFS. The second name of a file is never an existing one. A
/// directory can have no second name; the rename of one replaces an empty directory at most.
pub(super) fn link_and_unlink(
    from_dir: &Dir,
    from: &str,
    to_dir: &Dir,
    to: &str,
) -> io::Result<()> {
    if from_dir.symlink_metadata(from)?.is_dir() {
        if to_dir.symlink_metadata(to).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        return from_dir.rename(from, to_dir, to);
    }
    from_dir.hard_link(from, to_dir, to)?;
    from_dir.remove_file(from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Workspace;

    #[test]
    fn what_a_crash_has_left_goes_and_what_is_under_way_stays() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(root.path(), "t", ".").unwrap();
        let (under_way, _) = StagedFile::create(&workspace.root()).unwrap();
        let (left, file) = StagedFile::create(&workspace.root()).unwrap();
        let before = SystemTime::now() - 2 * LONGEST;
        file.into_std().set_modified(before).unwrap();
        let own = root.path().join("t/.toolloop-own.tmp");
        std::fs::File::create(&own).unwrap().set_modified(before).unwrap();
        workspace.root().create_dir_all("a/b").unwrap();
        let inner = Arc::new(workspace.root().open_dir("a/b").unwrap());
        let (inner_under_way, _) = StagedFile::create(&inner).unwrap();
        let (inner_left, file) = StagedFile::create(&inner).unwrap();
        file.into_std().set_modified(before).unwrap();
        let stop = CancellationToken::new();
        let remove = |is_deep| StagedFile::remove_abandoned(root.path(), is_deep, &stop).unwrap();
        assert_eq!(remove(false), 1);
        let there = |staged: &StagedFile| root.path().join("t").join(&staged.name).exists();
        assert_eq!((there(&under_way), there(&left), own.exists()), (true, false, true));
        let there = |staged: &StagedFile| inner.exists(&staged.name);
        assert_eq!((there(&inner_under_way), there(&inner_left)), (true, true));
        assert_eq!((remove(true), remove(true)), (1, 0));
        assert_eq!((there(&inner_under_way), there(&inner_left)), (true, false));
    }
}
