//! Where directories and files lie that are being deleted: they are gone from their places in one step,
//! and from the disk later.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use uuid::Uuid;

use super::super::removal;
use super::{Workspace, WorkspaceError, is_absent, plain};

/// No tenant can have its name.
const BIN: &str = ".deleted";

impl Workspace {
    /// Takes a directory of a tenant out of its place in one step, to be deleted by
    /// [`Workspace::empty_bin`]; false where it is not there.
    ///
    /// # Errors
    /// [`WorkspaceError`].
    pub fn throw_away(root: &Path, tenant: &str, directory: &str) -> Result<bool, WorkspaceError> {
        let beneath = plain(tenant, directory)?;
        let thrown = || {
            let root = Dir::open_ambient_dir(root, ambient_authority())?;
            let from = root.open_dir(tenant)?;
            from.symlink_metadata(&beneath)?;
            Self::throw_out(&root, &from, beneath.as_ref())
        };
        match thrown() {
            Ok(()) => Ok(true),
            Err(e) if is_absent(&e) => Ok(false),
            Err(source) => {
                Err(WorkspaceError::Io { path: format!("{tenant}/{directory}"), source })
            }
        }
    }

    /// The same with an entry of a directory beneath the root of all workspaces.
    pub(in crate::tools) fn throw_out(root: &Dir, from: &Dir, name: &OsStr) -> io::Result<()> {
        root.create_dir_all(BIN)?;
        from.rename(name, &root.open_dir(BIN)?, Uuid::new_v4().simple().to_string())
    }

    /// Deletes what was thrown away, now or before a crash; how many directories. May take long.
    ///
    /// # Errors
    /// What the system says; what is left is tried again the next time.
    pub fn empty_bin(root: &Path) -> io::Result<usize> {
        let bin =
            Dir::open_ambient_dir(root, ambient_authority()).and_then(|root| root.open_dir(BIN));
        let bin = match bin {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
            bin => bin?,
        };
        let mut gone = 0;
        for entry in bin.entries()? {
            let entry = entry?;
            match removal::remove(&bin, &entry.file_name()) {
                // Another replica was faster.
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
