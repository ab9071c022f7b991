//! The runner's view of the file system in its mount namespace: everything is read-only, writable paths
//! are mounted again as writable, denied paths are masked, and the programs have a temporary directory in
//! memory of their own.
//!
//! The plan says which paths these are. Landlock applies in addition; mounts also protect what Landlock
//! does not check: modes, owners and times of files.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change,
    move_mount, open_tree,
};

use super::confinement::{ReachablePath, open_path};
use super::plan::{GrantKind, Plan};
use super::syscalls::set_mount_attributes;

/// Files in the temporary directory.
const TEMPORARY_FILES: u64 = 65_536;
/// Single files that are made writable one by one; with more of them their attributes stay
/// read-only.
const SINGLE_FILES: usize = 256;

/// Sets it up. Where the workspace itself may be written, the working directory moves along.
pub(super) fn set_up(plan: &Plan, reached: &[ReachablePath]) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let writable = reached.iter().filter(|it| it.access.write && it.kind != GrantKind::Names);
    let devices = |it: &&ReachablePath| {
        let kind = rustix::fs::fstat(&it.handle).map(|stat| FileType::from_raw_mode(stat.st_mode));
        matches!(kind, Ok(FileType::Directory | FileType::RegularFile))
    };
    let mut again = Vec::new();
    for ReachablePath { handle, .. } in writable.filter(devices).take(SINGLE_FILES) {
        again.push(mounted_again(handle)?);
    }
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    set_mount_attributes(&root, libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID, 0, true)?;
    for mount in &again {
        set_mount_attributes(mount, 0, libc::MOUNT_ATTR_RDONLY, false)?;
    }
    let here = rustix::fs::open(".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let here = identity(&here)?;
    for mount in &again {
        if identity(mount)? == here {
            rustix::process::fchdir(mount)?;
        }
    }
    let options = format!(
        "size={},nr_inodes={TEMPORARY_FILES},mode=700\0",
        plan.limits.file_size.max(1024 * 1024)
    );
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).ok();
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("tmpfs", plan.temporary.as_str(), "tmpfs", flags, options)?;
    hold_above(&plan.reach.masked)?;
    plan.reach.masked.iter().try_for_each(|path| cover(path))
}

/// Makes the directories above what is denied mount points, which cannot be renamed: a cover would
/// move along, and the path that is denied would be free.
fn hold_above(masked: &[String]) -> io::Result<()> {
    let above = masked.iter().flat_map(|path| {
        path.match_indices('/').filter_map(|(at, _)| path.get(..at)).collect::<Vec<_>>()
    });
    // A directory comes before what lies in it.
    let above: BTreeSet<&str> = above.filter(|path| !path.is_empty() && *path != ".").collect();
    for path in above {
        match open_path(path) {
            Ok(directory) => drop(mounted_again(&directory)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(io::Error::new(e.kind(), format!("{path}: {e}"))),
        }
    }
    Ok(())
}

fn identity(of: &impl AsFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(of)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Mounts a file or directory onto itself, so that it has attributes of its own.
fn mounted_again(handle: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(handle, "", flags)?;
    onto(&tree, handle)?;
    Ok(tree)
}

fn onto(tree: &OwnedFd, place: &OwnedFd) -> io::Result<()> {
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(tree, "", place, "", both)?)
}

/// Covers what is denied: a directory by one without permissions, a file by one that cannot be
/// opened. What is not there needs no cover.
fn cover(path: &str) -> io::Result<()> {
    let place = match open_path(path) {
        Ok(place) => place,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(io::Error::new(e.kind(), format!("{path}: {e}"))),
    };
    if FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode) == FileType::Directory {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&place));
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        let closed = Some(c"size=4k,nr_inodes=2,mode=000");
        return Ok(mount("tmpfs", path.as_str(), "tmpfs", flags, closed)?);
    }
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let nothing = open_tree(CWD, "/dev/null", clone)?;
    let closed = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    set_mount_attributes(&nothing, closed, 0, false)?;
    onto(&nothing, &place)
}
