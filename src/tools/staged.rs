//! Files that are written completely before they are moved into their place, so that a reader sees either
//! the old or the new content.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, DirEntry, File, Metadata, OpenOptions};
use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;
use uuid::Uuid;

use super::own_writes;

/// How the names of such files begin.
const PREFIX: &str = ".toolloop-";
/// A staged file that was not written to for this long was left by a crash.
const LONGEST: Duration = Duration::from_hours(1);

/// A file that is not yet in its place; removed again unless it gets there.
#[derive(Debug)]
pub struct Staged {
    dir: Arc<Dir>,
    name: String,
}

impl Staged {
    /// An empty file beside its place.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(dir: &Arc<Dir>) -> io::Result<(Self, File)> {
        let name = format!("{PREFIX}{}.tmp", Uuid::new_v4().simple());
        own_writes::note(dir, &name);
        let file = dir.open_with(&name, OpenOptions::new().write(true).create_new(true))?;
        Ok((Self { dir: Arc::clone(dir), name }, file))
    }

    /// A file with this text, and with the permissions of the one that it will replace.
    ///
    /// # Errors
    /// What the system says.
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

    /// Deletes staged files that crashes left in the directories of all tenants; returns how many.
    ///
    /// # Errors
    /// What the system says.
    pub fn remove_left(workspaces: &Path) -> io::Result<u64> {
        let workspaces = Dir::open_ambient_dir(workspaces, ambient_authority())?;
        let mut removed = 0;
        for tenant in workspaces.entries()? {
            let tenant = tenant?;
            if tenant.file_name().as_encoded_bytes().starts_with(b".") {
                continue; // no tenant has such a name
            }
            if !tenant.file_type()?.is_dir() {
                continue;
            }
            let Ok(dir) = tenant.open_dir() else { continue };
            for entry in dir.entries()? {
                // What goes away in the meantime has got into its place.
                let Ok(entry) = entry else { continue };
                if was_left(&entry).unwrap_or(false) && entry.remove_file().is_ok() {
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }

    /// Gives it the permissions of the file that it will replace.
    ///
    /// # Errors
    /// What the system says.
    pub fn inherit(&self, existing: &Metadata) -> io::Result<()> {
        self.dir.set_permissions(&self.name, existing.permissions())
    }

    /// Puts it in its place, whatever file is there.
    ///
    /// # Errors
    /// What the system says.
    pub fn replace(&self, dir: &Dir, name: &str) -> io::Result<()> {
        self.dir.rename(&self.name, dir, name)
    }

    /// Puts it in its place, unless something is there.
    ///
    /// # Errors
    /// What the system says.
    pub fn place(&self, dir: &Dir, name: &str) -> io::Result<()> {
        rename_without_loss(&self.dir, &self.name, dir, name)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Gone already where it is in its place.
        let _ = self.dir.remove_file(&self.name);
    }
}

fn was_left(entry: &DirEntry) -> io::Result<bool> {
    let name = entry.file_name();
    let id = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(".tmp"));
    if id.is_none_or(|id| Uuid::try_parse(id).is_err()) || !entry.file_type()?.is_file() {
        return Ok(false);
    }
    let age = SystemTime::now().duration_since(entry.metadata()?.modified()?.into_std());
    Ok(age.is_ok_and(|age| age > LONGEST))
}

/// Renames unless something has the new name, in one step of the system.
///
/// # Errors
/// What the system says.
pub fn rename_without_loss(from_dir: &Dir, from: &str, to_dir: &Dir, to: &str) -> io::Result<()> {
    match renameat_with(from_dir, from, to_dir, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            link_and_unlink(from_dir, from, to_dir, to)
        }
        renamed => renamed.map_err(io::Error::from),
    }
}

/// The same for files on file systems without that step, e.g. NFS: a second name is never an
/// existing one.
pub(super) fn link_and_unlink(
    from_dir: &Dir,
    from: &str,
    to_dir: &Dir,
    to: &str,
) -> io::Result<()> {
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
        let (under_way, _) = Staged::create(&workspace.root()).unwrap();
        let (left, file) = Staged::create(&workspace.root()).unwrap();
        let before = SystemTime::now() - 2 * LONGEST;
        file.into_std().set_modified(before).unwrap();
        let own = root.path().join("t/.toolloop-own.tmp");
        std::fs::File::create(&own).unwrap().set_modified(before).unwrap();
        assert_eq!(Staged::remove_left(root.path()).unwrap(), 1);
        let there = |staged: &Staged| root.path().join("t").join(&staged.name).exists();
        assert_eq!((there(&under_way), there(&left), own.exists()), (true, false, true));
    }
}
