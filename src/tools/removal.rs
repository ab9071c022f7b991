//! Removes files that programs created, at any depth and with any permissions.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use cap_fs_ext::DirExt;
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use rustix::fs::{Mode, OFlags};
use uuid::Uuid;

/// Entries of a directory that are listed at once.
const LISTED: usize = 10_000;

/// Removes an entry of a directory with all that is in it, and follows no link. What lies deeper is
/// moved up before it is removed, so that no depth takes more than two open directories.
pub(super) fn remove(directory: &Dir, name: &OsStr) -> io::Result<()> {
    if !directory.symlink_metadata(name)?.is_dir() {
        return directory.remove_file(name);
    }
    emptied_and_removed(directory, name, |top, name| {
        emptied_and_removed(top, name, |inner, name| {
            make_accessible(inner, name); // a directory that moves is written to
            inner.rename(name, top, format!(".{}", Uuid::new_v4().simple()))
        })
    })
}

/// The same by a path whose directories are the service's own.
pub(super) fn remove_path(path: &Path) -> io::Result<()> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    remove(&Dir::open_ambient_dir(above, ambient_authority())?, name)
}

/// Removes a directory; `take` takes each directory in it away.
fn emptied_and_removed(
    directory: &Dir,
    name: &OsStr,
    take: impl Fn(&Dir, &OsStr) -> io::Result<()>,
) -> io::Result<()> {
    make_accessible(directory, name);
    let opened = directory.open_dir_nofollow(name)?;
    loop {
        let some = listed(&opened)?;
        if some.is_empty() {
            return directory.remove_dir(name);
        }
        for (name, is_directory) in some {
            if is_directory {
                take(&opened, &name)?;
            } else {
                opened.remove_file(&name)?;
            }
        }
    }
}

/// Some entries of a directory, each with whether it is a directory.
pub(super) fn listed(directory: &Dir) -> io::Result<Vec<(OsString, bool)>> {
    let entries = directory.entries()?.take(LISTED);
    entries.map(|entry| entry.and_then(|e| Ok((e.file_name(), e.file_type()?.is_dir())))).collect()
}

/// Restores the permissions of the service on a directory from which programs removed them.
pub(super) fn make_accessible(directory: &Dir, name: &OsStr) {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(directory, name, flags, Mode::empty());
    if let Ok(opened) = opened {
        make_own(opened.as_fd());
    }
}

pub(super) fn make_own(directory: impl AsFd) {
    let Ok(found) = rustix::fs::fstat(&directory) else { return };
    let mode = Mode::from_raw_mode(found.st_mode);
    if !mode.contains(Mode::RWXU) {
        let place = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
        let _ = rustix::fs::chmod(place.as_str(), mode | Mode::RWXU); // opening it fails if this has
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::fs::{Mode, OFlags, mkdirat, openat};

    use super::*;
    use crate::tools::Workspace;

    #[test]
    fn directories_without_permissions_are_removed_by_their_paths() {
        let root = tempfile::tempdir().unwrap();
        let top = root.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let mut dir = openat(rustix::fs::CWD, &top, flags, Mode::empty()).unwrap();
        for _ in 0..3000 {
            mkdirat(&dir, "d", Mode::RWXU).unwrap();
            let next = openat(&dir, "d", flags, Mode::empty()).unwrap();
            make_closed(&dir);
            dir = next;
        }
        std::os::unix::fs::symlink("/", root.path().join("link")).unwrap();
        for name in ["top", "link"] {
            remove_path(&root.path().join(name)).unwrap();
        }
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
        assert!(remove_path(&top).is_err());
        assert!(remove_path(Path::new("/")).is_err());
    }

    fn make_closed(directory: impl AsFd) {
        let place = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
        rustix::fs::chmod(place.as_str(), Mode::empty()).unwrap();
    }

    #[test]
    fn what_lies_very_deep_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(root.path(), "t", "s-1").unwrap();
        let mut dir = workspace.root().try_clone().unwrap();
        for _ in 0..5000 {
            dir.create_dir("d").unwrap();
            dir = dir.open_dir("d").unwrap();
        }
        dir.write("file", "x").unwrap();
        assert!(Workspace::move_to_trash(root.path(), "t", "s-1").unwrap());
        assert_eq!(Workspace::empty_bin(root.path()).unwrap(), 1);
        let left = |place: &Path| std::fs::read_dir(place).unwrap().count();
        assert_eq!((left(&root.path().join("t")), left(&root.path().join(".deleted"))), (0, 0));
    }
}
