//! The quarantine for files that may not stay in a workspace. It is not certain who created them, so they
//! are moved and not deleted, and an operator can restore them.
//!
//! `<workspaces>/.quarantine/<tenant>/<id>/<path>` is what lay at that path beneath the tenant's
//! directory. It is on the same volume, next to the tenants' directories, out of reach of workspaces and
//! programs. Entries are deleted only by age.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cap_fs_ext::DirExt;
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use chrono::{DateTime, TimeDelta, Utc};
use rustix::fs::Mode;
use uuid::{NoContext, Timestamp, Uuid};

use super::removal::{listed, make_accessible, make_own, remove};
use crate::clock;

/// Its name beneath the directory of all workspaces; no tenant can have it.
pub const NAME: &str = ".quarantine";

/// The quarantine of one tenant. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Quarantine {
    workspaces: Arc<Path>,
    tenant: Arc<str>,
}

impl Quarantine {
    pub(super) fn of(workspaces: &Path, tenant: &str) -> Self {
        Self { workspaces: workspaces.into(), tenant: tenant.into() }
    }

    /// The directory; `None` where nothing was ever put there.
    pub(super) fn opened(&self) -> Option<Dir> {
        let workspaces = Dir::open_ambient_dir(&self.workspaces, ambient_authority()).ok()?;
        workspaces.open_dir_nofollow(NAME).ok()?.open_dir_nofollow(&*self.tenant).ok()
    }

    /// Moves an entry of a directory there with all that is in it; `path` is where it lies beneath the
    /// tenant's directory. Answers where it lies now, beneath the directory of all workspaces.
    ///
    /// # Errors
    /// Errors of the file system; the entry then stays at its path.
    pub(super) fn take(&self, directory: &Dir, name: &OsStr, path: &str) -> io::Result<String> {
        let workspaces = Dir::open_ambient_dir(&self.workspaces, ambient_authority())?;
        let tenant = made(&made(&workspaces, NAME)?, &self.tenant)?;
        let id = new_id().to_string();
        let own = made(&tenant, &id)?;
        let above = path.rsplit_once('/').map_or("", |(above, _)| above);
        let holder = if above.is_empty() || own.create_dir_all(above).is_err() {
            own
        } else {
            own.open_dir(above)?
        };
        let moved = directory.rename(name, &holder, name).or_else(|_| {
            make_accessible(directory, name); // a directory that moves is written to
            make_own(directory.as_fd());
            directory.rename(name, &holder, name)
        });
        if moved.is_err() {
            let _ = remove(&tenant, OsStr::new(&id)); // nothing is in there
        }
        moved.map(|()| format!("{NAME}/{}/{id}", self.tenant))
    }
}

/// Deletes what has been in the quarantine of any tenant for longer than this, and says how many
/// things that were.
///
/// # Errors
/// Errors of the file system if it cannot be read at all.
pub fn forget(workspaces: &Path, kept: Duration) -> io::Result<u64> {
    let kept = TimeDelta::from_std(kept).unwrap_or(TimeDelta::MAX);
    let Some(before) = clock::now().checked_sub_signed(kept) else { return Ok(0) };
    let workspaces = Dir::open_ambient_dir(workspaces, ambient_authority())?;
    let all = match workspaces.open_dir_nofollow(NAME) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        opened => opened?,
    };
    let mut deleted = 0;
    for (name, _) in listed(&all)? {
        let Ok(tenant) = all.open_dir_nofollow(&name) else { continue };
        for (id, _) in listed(&tenant)? {
            if put_at(&id).is_none_or(|at| at >= before) {
                continue;
            }
            match remove(&tenant, &id) {
                Ok(()) => deleted += 1,
                Err(error) => {
                    tracing::warn!(%error, ?id, "expired entries could not be deleted from the quarantine");
                }
            }
        }
    }
    Ok(deleted)
}

/// An id that says when it was made.
pub(super) fn new_id() -> Uuid {
    let now = clock::now();
    let seconds = u64::try_from(now.timestamp()).unwrap_or_default();
    Uuid::new_v7(Timestamp::from_unix(NoContext, seconds, now.timestamp_subsec_nanos()))
}

/// When something got its id; `None` where it is not of our making.
pub(super) fn put_at(id: &OsStr) -> Option<DateTime<Utc>> {
    let (seconds, nanoseconds) = Uuid::parse_str(id.to_str()?).ok()?.get_timestamp()?.to_unix();
    DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanoseconds)
}

/// A directory of the service's user alone.
fn made(directory: &Dir, name: &str) -> io::Result<Dir> {
    match rustix::fs::mkdirat(directory, name, Mode::RWXU) {
        Err(error) if error != rustix::io::Errno::EXIST => return Err(error.into()),
        _ => {}
    }
    directory.open_dir_nofollow(name)
}
