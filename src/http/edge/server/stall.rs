//! Clients that do not take their answer.
//!
//! With HTTP/1.1 the socket is full, and the connection ends when it stays so for `write_timeout`.
//! With HTTP/2 the stream's window is used up while the connection lives on for others: that stream
//! alone is reset. Either way the answer's body is dropped, and what it held with it. A timer
//! exists only while somebody is waited for.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::Executor;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::pace::Pace;

/// How long a closed connection takes what its client still sends, so that the client can read the
/// answer before it hears of the end.
const LINGER: Duration = Duration::from_secs(2);

/// A connection's socket: ends with an error when it takes nothing for too long.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    pace: Arc<Pace>,
    patience: Duration,
    stall: Option<Pin<Box<Sleep>>>,
    /// Ends the wait for a client that still sends; there once the socket lingers.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream, pace: Arc<Pace>, patience: Duration) -> Self {
        Self { stream, pace, patience, stall: None, lingering: None }
    }

    /// Notes what became of a write.
    fn watched<T>(
        &mut self,
        written: Poll<Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<Result<T>> {
        if written.is_ready() {
            if self.stall.take().is_some() {
                self.pace.blocked(false);
            }
            return written;
        }
        let stall = self.stall.get_or_insert_with(|| {
            self.pace.blocked(true);
            Box::pin(tokio::time::sleep(self.patience))
        });
        stall
            .as_mut()
            .poll(context)
            .map(|()| Err(Error::new(ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let heard = &buffer.filled()[before..];
        if !heard.is_empty() {
            self.pace.heard(heard);
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watched(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            if !self.pace.lingers() {
                return Poll::Ready(Ok(()));
            }
        }
        let Self { stream, lingering, .. } = &mut *self;
        let end = lingering.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        let mut scratch = [0; 4096];
        loop {
            if end.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

tokio::task_local! {
    /// Whether an answer has been handed a piece on and was not asked for the next one.
    static UNTAKEN: Cell<bool>;
}

/// Notes, on the task of an HTTP/2 stream, whether it is the client that is waited for.
pub(super) fn untaken(untaken: bool) {
    let _ = UNTAKEN.try_with(|cell| cell.set(untaken)); // with HTTP/1.1 the socket knows
}

/// Runs HTTP/2 streams, and gives up those whose client takes nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    pub(super) write_timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        tokio::spawn(UNTAKEN.scope(Cell::new(false), unless_stalled(stream, self.write_timeout)));
    }
}

async fn unless_stalled(stream: impl Future<Output = ()>, patience: Duration) {
    let mut stream = pin!(stream);
    let mut stall: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|context| {
        let expired = stall.as_mut().is_some_and(|timer| timer.as_mut().poll(context).is_ready());
        if stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        if !UNTAKEN.with(Cell::get) {
            stall = None;
            return Poll::Pending;
        }
        if expired {
            return Poll::Ready(());
        }
        // Every other wake-up means that the window has opened a little.
        let timer = stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        timer.as_mut().reset(Instant::now() + patience);
        timer.as_mut().poll(context)
    })
    .await;
}
