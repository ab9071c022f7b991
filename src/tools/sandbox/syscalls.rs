//! The few system calls that have no safe form. Nothing else in the service is unsafe but settings of
//! memory in `main.rs`.
//!
//! All of them are made by the supervisor and its descendants, which have one thread: what forbids
//! most things between `fork` and `exec` in a program with threads does not hold there.
#![allow(unsafe_code)] // each block says why it is sound

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::process::Pid;

/// The process in which a fork returns.
pub(super) enum Forked {
    Parent(Pid),
    Child,
}

/// Makes a copy of this process, which must have one thread.
pub(super) fn fork() -> io::Result<Forked> {
    // SAFETY: the process has one thread (the supervisor starts none), so no lock is held by a
    // thread that the copy would lack.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        pid => match Pid::from_raw(pid) {
            Some(pid) => Ok(Forked::Parent(pid)),
            None => Err(io::Error::other("fork answered no process")),
        },
    }
}

/// Ends this process at once, without what libraries would do at exit.
pub(super) fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process; nothing can be observed afterwards.
    unsafe { libc::_exit(code) }
}

/// Becomes another program; answers only where that failed.
pub(super) fn exec(program: &CStr, arguments: &[CString], environment: &[CString]) -> io::Error {
    let list = |texts: &[CString]| -> Vec<*const libc::c_char> {
        texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (arguments, environment) = (list(arguments), list(environment));
    // SAFETY: both lists end with a null pointer, and all texts end with a zero byte and outlive
    // the call.
    unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}

/// Moves this process into its own namespaces of users, mounts and IPC, with `network` also of the network,
/// and its children, from the next one on, into one of processes.
pub(super) fn enter_namespaces(network: bool) -> io::Result<()> {
    let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;
    let flags = if network { flags | libc::CLONE_NEWNET } else { flags };
    // SAFETY: changes what the kernel shows to this process of one thread, and none of its memory.
    check(unsafe { libc::unshare(flags) })
}

/// Makes the loopback interface work in the network that this socket belongs to.
pub(super) fn raise_loopback(socket: impl AsFd) -> io::Result<()> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: libc::c_short::try_from(libc::IFF_UP).map_err(io::Error::other)?,
        },
    };
    for (place, byte) in request.ifr_name.iter_mut().zip(*b"lo") {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    // SAFETY: the request is as large as the kernel expects, its name ends with a zero byte, and it
    // outlives the call.
    check(unsafe {
        libc::ioctl(socket.as_fd().as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
    })
}

/// Closes every descriptor but the three standard ones.
pub(super) fn close_others() -> io::Result<()> {
    // SAFETY: called first thing in a process, before anything in it owns a descriptor above 2.
    check(unsafe { libc::close_range(3, libc::c_uint::MAX, 0) })
}

/// Restores the default action of a signal.
pub(super) fn reset_signal(signal: libc::c_int) {
    // SAFETY: installs no handler of ours.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Children of this process are reaped automatically when they end.
pub(super) fn ignore_ends_of_children() {
    // SAFETY: installs no handler of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Sets and clears attributes of a mount.
pub(super) fn set_mount_attributes(
    mount: impl AsFd,
    set: u64,
    clear: u64,
    with_those_beneath: bool,
) -> io::Result<()> {
    let attributes =
        libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd: 0 };
    let recursive = if with_those_beneath { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the empty path ends with a zero byte, the attributes are as large as is said, and
    // both outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    })
}

fn check<T: Into<i64>>(answer: T) -> io::Result<()> {
    if answer.into() == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
