//! Write timeouts, for clients that do not read their response.
//!
//! With HTTP/1.1 the socket's buffer stays full: after `write_timeout` the connection is closed. With
//! HTTP/2 the stream's flow control window stays exhausted: only that stream is reset. Either way the
//! response body is dropped, which releases its resources. A timer exists only while a write is
//! blocked.

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

use super::timing::ConnectionTiming;

/// How long a closed connection still reads, so that the client gets the response before a reset.
const LINGER: Duration = Duration::from_secs(2);

/// A connection's socket, whose writes fail if they are blocked for `write_timeout`.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    timing: Arc<ConnectionTiming>,
    write_timeout: Duration,
    stall: Option<Pin<Box<Sleep>>>,
    /// Bounds lingering; set once the socket lingers.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub(super) fn new(
        stream: TcpStream,
        timing: Arc<ConnectionTiming>,
        write_timeout: Duration,
    ) -> Self {
        Self { stream, timing, write_timeout, stall: None, lingering: None }
    }

    /// Starts the timeout of a blocked write, and ends it when the write succeeds.
    fn with_timeout<T>(
        &mut self,
        written: Poll<Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<Result<T>> {
        if written.is_ready() {
            if self.stall.take().is_some() {
                self.timing.set_write_blocked(false);
            }
            return written;
        }
        let stall = self.stall.get_or_insert_with(|| {
            self.timing.set_write_blocked(true);
            Box::pin(tokio::time::sleep(self.write_timeout))
        });
        stall
            .as_mut()
            .poll(context)
            .map(|()| Err(Error::new(ErrorKind::TimedOut, "the client does not read its response")))
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
        let received = &mut buffer.filled_mut()[before..];
        if !received.is_empty() {
            self.timing.bytes_received(received);
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
        self.with_timeout(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.with_timeout(written, context)
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
            if !self.timing.lingers() {
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
    /// Whether the response body has produced a frame and was not polled for the next one.
    static WAITING_FOR_CLIENT: Cell<bool>;
}

/// Records, on the task of an HTTP/2 stream, whether the client is being waited for. With HTTP/1.1
/// there is no such task: the socket detects it.
pub(super) fn set_waiting_for_client(waiting: bool) {
    let _ = WAITING_FOR_CLIENT.try_with(|cell| cell.set(waiting));
}

/// Runs HTTP/2 streams, and resets those whose client does not read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    pub(super) write_timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let stream = with_write_timeout(stream, self.write_timeout);
        tokio::spawn(WAITING_FOR_CLIENT.scope(Cell::new(false), stream));
    }
}

async fn with_write_timeout(stream: impl Future<Output = ()>, write_timeout: Duration) {
    let mut stream = pin!(stream);
    let mut stall: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|context| {
        let expired = stall.as_mut().is_some_and(|timer| timer.as_mut().poll(context).is_ready());
        if stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        if !WAITING_FOR_CLIENT.with(Cell::get) {
            stall = None;
            return Poll::Pending;
        }
        if expired {
            return Poll::Ready(());
        }
        // Every other wake-up means that the window was enlarged, which is progress.
        let timer = stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(write_timeout)));
        timer.as_mut().reset(Instant::now() + write_timeout);
        timer.as_mut().poll(context)
    })
    .await;
}
