//! The only address in the network namespace of programs: a listening socket that the supervisor opens
//! there and passes to the service, which serves it as a proxy.
//!
//! A socket belongs to the namespace in which it was opened. So only programs of this call can connect to
//! it, the service accepts connections without leaving its own namespace, and programs can reach nothing
//! else. What the proxy permits is decided elsewhere.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;

use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::handles;
use super::plan::PROXY_PORT;
use super::syscalls::raise_loopback;

/// The byte that is sent when the programs begin, with the socket if there is one. A report begins with another
/// one.
pub(super) const BEGINS: &[u8] = b"n";

/// Opens the socket in the network of this process and sends it through standard input.
pub(super) fn send_listener() -> io::Result<()> {
    let any = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )?;
    raise_loopback(&any)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, PROXY_PORT))?;
    handles::send(rustix::stdio::stdin(), BEGINS, &[listener.as_fd()])
}

/// The socket, from the supervisor's other end; `None` where the byte comes without one, or a report in its
/// place.
pub(super) async fn receive_listener(socket: &UnixStream) -> io::Result<Option<TcpListener>> {
    socket.async_io(Interest::READABLE, || received(socket)).await
}

fn received(socket: &UnixStream) -> io::Result<Option<TcpListener>> {
    let mut first = [0; 1];
    let (_, length) = recv(socket, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    if length == 0 || first != BEGINS {
        return Ok(None);
    }
    let handle = handles::receive(socket, &mut first, RecvFlags::DONTWAIT)?;
    Ok(handle.map(TcpListener::from))
}
