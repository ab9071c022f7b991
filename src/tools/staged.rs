//! Files that are complete before they get into their place, so that a reader sees the old or the
//! new content and never a half.

use std::io::{self, Write};
use std::sync::Arc;

use cap_std::fs::{Dir, File, Metadata, OpenOptions};
use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;
use uuid::Uuid;

use super::own_writes;

/// How the names of such files begin.
const PREFIX: &str = ".toolloop-";

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
