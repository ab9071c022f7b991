//! Open files that pass through the socket between the service and a supervisor.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Sends a few bytes, and with them an open file.
pub(super) fn send(socket: impl AsFd, text: &[u8], handle: impl AsFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    let handles = [handle.as_fd()];
    if !message.push(SendAncillaryMessage::ScmRights(&handles)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(text)], &mut message, SendFlags::NOSIGNAL)?;
    if sent < text.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
}

/// Receives so many bytes, and the open file that came with them.
pub(super) fn receive(
    socket: impl AsFd,
    into: &mut [u8],
    flags: RecvFlags,
) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let length = into.len();
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut message, flags)?;
    if received.bytes < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(message.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut handles) => handles.next(),
        _ => None,
    }))
}
