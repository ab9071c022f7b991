//! The bin for directories and files that are being deleted: they are moved there in one step, and deleted
//! from the disk later.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use chrono::TimeDelta;
use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;
use uuid::Uuid;

use super::super::quarantine::{new_id, put_at};
use super::super::removal;
use super::{Workspace, WorkspaceError, is_absent, open_or_make, plain, split};
use crate::clock;

/// No tenant can have its name.
const BIN: &str = ".deleted";

/// The prefix of the names of directories in the bin that may be restored.
const ASIDE: &str = "aside-";
/// A directory that has been aside for longer was left by a crash.
const LONGEST: TimeDelta = TimeDelta::hours(1);

/// A directory that was moved to the bin before its deletion is certain. [`Workspace::empty_bin`] does not
/// delete it within the next hour.
#[derive(Debug)]
pub struct Aside {
    root: Dir,
    tenant: String,
    directory: String,
    name: String,
}

impl Aside {
    /// Leaves it to the next [`Workspace::empty_bin`].
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn delete(self) -> io::Result<()> {
        let bin = self.root.open_dir(BIN)?;
        bin.rename(&self.name, &bin, new_name())
    }

    /// Moves it back to its path, unless something was created there.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn put_back(self) -> io::Result<()> {
        let bin = self.root.open_dir(BIN)?;
        let tenant = self.root.open_dir(&self.tenant)?;
        let (above, name) = split(&self.directory);
        let holder = open_or_make(&tenant, above)?;
        match renameat_with(&bin, self.name.as_str(), &holder, name, RenameFlags::NOREPLACE) {
            // The file system has no such step.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                if holder.symlink_metadata(name).is_ok() {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                bin.rename(&self.name, &holder, name)
            }
            renamed => renamed.map_err(io::Error::from),
        }
    }
}

impl Workspace {
    /// Moves a directory of a tenant to the bin in one step, to be deleted by
    /// [`Workspace::empty_bin`]; false where it is not there.
    ///
    /// # Errors
    /// [`WorkspaceError`].
    pub fn move_to_trash(
        root: &Path,
        tenant: &str,
        directory: &str,
    ) -> Result<bool, WorkspaceError> {
        Ok(moved(root, tenant, directory, new_name())?.is_some())
    }

    /// The same for a directory that may be restored; `None` if it does not exist.
    ///
    /// # Errors
    /// [`WorkspaceError`].
    pub fn move_aside(
        root: &Path,
        tenant: &str,
        directory: &str,
    ) -> Result<Option<Aside>, WorkspaceError> {
        moved(root, tenant, directory, format!("{ASIDE}{}", new_id()))
    }

    /// The same with an entry of a directory beneath the root of all workspaces.
    pub(in crate::tools) fn move_entry_to_trash(
        root: &Dir,
        from: &Dir,
        name: &OsStr,
    ) -> io::Result<()> {
        move_entry(root, from, name, &new_name())
    }

    /// Deletes the contents of the bin, those left by a crash included, except for what may be restored.
    /// Returns the number of directories. May take long.
    ///
    /// # Errors
    /// Errors of the file system; the rest is tried again the next time.
    pub fn empty_bin(root: &Path) -> io::Result<usize> {
        let bin =
            Dir::open_ambient_dir(root, ambient_authority()).and_then(|root| root.open_dir(BIN));
        let bin = match bin {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
            bin => bin?,
        };
        let mut gone = 0;
        for entry in bin.entries()? {
            let name = entry?.file_name();
            if may_get_back(&name) {
                continue;
            }
            match removal::remove(&bin, &name) {
                // Another replica has already removed it.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                removed => {
                    removed?;
                    gone += 1;
                }
            }
        }
        Ok(gone)
    }
}

fn new_name() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Whether it was moved to the bin within the last hour, and may be restored.
fn may_get_back(name: &OsStr) -> bool {
    let id = name.to_str().and_then(|name| name.strip_prefix(ASIDE));
    let since = id.and_then(|id| put_at(OsStr::new(id)));
    since.is_some_and(|since| clock::now() - since < LONGEST)
}

fn move_entry(root: &Dir, from: &Dir, entry: &OsStr, name: &str) -> io::Result<()> {
    root.create_dir_all(BIN)?;
    from.rename(entry, &root.open_dir(BIN)?, name)
}

/// Moves a directory into the bin; `None` where it is not there.
fn moved(
    root: &Path,
    tenant: &str,
    directory: &str,
    name: String,
) -> Result<Option<Aside>, WorkspaceError> {
    let beneath = plain(tenant, directory)?;
    let thrown = || -> io::Result<Dir> {
        let root = Dir::open_ambient_dir(root, ambient_authority())?;
        let from = root.open_dir(tenant)?;
        from.symlink_metadata(&beneath)?;
        move_entry(&root, &from, beneath.as_ref(), &name)?;
        Ok(root)
    };
    match thrown() {
        Ok(root) => Ok(Some(Aside { root, tenant: tenant.to_owned(), directory: beneath, name })),
        Err(e) if is_absent(&e) => Ok(None),
        Err(source) => Err(WorkspaceError::Io { path: format!("{tenant}/{directory}"), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(root: &Path, content: &str) {
        let session = root.join("t/chats/s");
        std::fs::create_dir_all(&session).unwrap();
        std::fs::write(session.join("file"), content).unwrap();
    }

    fn content(root: &Path) -> String {
        std::fs::read_to_string(root.join("t/chats/s/file")).unwrap_or_default()
    }

    fn aside(root: &Path) -> Option<Aside> {
        Workspace::move_aside(root, "t", "chats/s").unwrap()
    }

    #[test]
    fn what_is_aside_gets_back_into_its_place_and_replaces_nothing_there() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert!(aside(root).is_none(), "there is none");
        made(root, "old");
        let old = aside(root).unwrap();
        assert_eq!(content(root), "");
        assert_eq!(Workspace::empty_bin(root).unwrap(), 0, "others do not delete it");
        std::fs::remove_dir(root.join("t/chats")).unwrap();
        old.put_back().unwrap();
        assert_eq!(content(root), "old");

        let old = aside(root).unwrap();
        made(root, "new");
        assert!(old.put_back().is_err());
        assert_eq!(content(root), "new");
    }

    #[test]
    fn what_is_to_be_deleted_or_was_left_by_a_crash_is_deleted() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        made(root, "old");
        aside(root).unwrap().delete().unwrap();
        made(root, "left");
        let left = aside(root).unwrap();
        let before = "aside-019273a0-0000-7000-8000-000000000000";
        std::fs::rename(root.join(BIN).join(&left.name), root.join(BIN).join(before)).unwrap();
        assert_eq!(Workspace::empty_bin(root).unwrap(), 2);
        assert_eq!(std::fs::read_dir(root.join(BIN)).unwrap().count(), 0);
    }
}
