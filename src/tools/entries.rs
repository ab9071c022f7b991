//! Reads the entries of a directory with few system calls: programs may have created very many entries,
//! and each of them is inspected before and after a call.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;

/// Bytes of entries that the system returns at once.
const AT_ONCE: usize = 32 * 1024;

/// Space for them, used for one directory after another.
pub(super) struct Space(Vec<MaybeUninit<u8>>);

impl Space {
    pub(super) fn new() -> Self {
        Self(vec![MaybeUninit::uninit(); AT_ONCE])
    }
}

/// An entry of a directory, opened as a directory to be read from its beginning; a link is refused.
pub(super) fn opened(directory: impl AsFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?)
}

/// What is known of an entry, no link followed.
pub(super) fn stat(directory: impl AsFd, name: &OsStr) -> io::Result<Stat> {
    Ok(rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Shows the entries of a directory that was opened for this, until the visitor has seen enough.
///
/// # Errors
/// Errors of the file system or of the visitor. Entries that disappear in the meantime are skipped.
pub(super) fn each<E: From<io::Error>>(
    directory: impl AsFd,
    space: &mut Space,
    mut visit: impl FnMut(&OsStr, FileType) -> Result<bool, E>,
) -> Result<(), E> {
    let directory = directory.as_fd();
    let mut entries = RawDir::new(directory, &mut space.0);
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(io::Error::from)?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(found) => FileType::from_raw_mode(found.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(io::Error::from(error).into()),
                }
            }
            kind => kind,
        };
        if !visit(OsStr::from_bytes(name.to_bytes()), kind)? {
            break;
        }
    }
    Ok(())
}
