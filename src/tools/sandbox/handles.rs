//! Open files that pass through the sockets between the service, the fork server and supervisors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Open files in one message, at most.
const MAX_HANDLES: usize = 3;

/// Sends a few bytes together with open files.
pub(super) fn send(socket: impl AsFd, text: &[u8], handles: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_HANDLES))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    if !message.push(SendAncillaryMessage::ScmRights(handles)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(text)], &mut message, SendFlags::NOSIGNAL)?;
    if sent < text.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
}

/// Receives this many bytes, and the open file that was sent with them.
pub(super) fn receive(
    socket: impl AsFd,
    into: &mut [u8],
    flags: RecvFlags,
) -> io::Result<Option<OwnedFd>> {
    Ok(receive_several(socket, into, flags)?.into_iter().next())
}

/// Receives this many bytes, and the open files that were sent with them.
pub(super) fn receive_several(
    socket: impl AsFd,
    into: &mut [u8],
    flags: RecvFlags,
) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_HANDLES))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let length = into.len();
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut message, flags)?;
    if received.bytes < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let rights = message.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(handles) => Some(handles),
        _ => None,
    });
    Ok(rights.flatten().collect())
}
