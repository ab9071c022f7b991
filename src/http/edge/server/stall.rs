//! Write timeouts, for clients that do not read their response.
//!
//! With HTTP/1.1 the socket's buffer stays full: after `write_timeout` the connection is closed. With
//! HTTP/2 the stream's flow control window stays exhausted: only that stream is reset. Either way the
//! response body is dropped, which releases its resources. While large answers wait for the memory of
//! others, a second without progress ends a large one. A timer exists only while a write is blocked.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BufMut as _;
use hyper::rt::Executor;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_util::io::poll_read_buf;

use super::timing::{Answer, ConnectionTiming};
use crate::http::edge::large_answers;

/// How long a large answer may make no progress while others wait for its memory.
const CONTENDED: Duration = Duration::from_secs(1);

/// How long a closed connection still reads, so that the client gets the response before a reset.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes that are read at once. So many of the next request, at most, are in memory while one is answered.
const MAX_READ: usize = 16 << 10;

/// A connection's socket, whose writes fail if they are blocked for `write_timeout`.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    client: IpAddr,
    timing: Arc<ConnectionTiming>,
    write_timeout: Duration,
    stall: Option<Stall>,
    /// Bounds lingering; set once the socket lingers.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub(super) fn new(
        stream: TcpStream,
        client: IpAddr,
        timing: Arc<ConnectionTiming>,
        write_timeout: Duration,
    ) -> Self {
        Self { stream, client, timing, write_timeout, stall: None, lingering: None }
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
            Stall::begin()
        });
        stall
            .poll(context, self.write_timeout, self.timing.answer())
            .map(|()| Err(Error::new(ErrorKind::TimedOut, "the client does not read its response")))
    }
}

/// A period in which the client reads nothing.
#[derive(Debug)]
struct Stall {
    since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Stall {
    fn begin() -> Self {
        Self { since: Instant::now(), timer: Box::pin(tokio::time::sleep(Duration::ZERO)) }
    }

    fn timer_elapsed(&mut self, context: &mut Context<'_>) -> bool {
        self.timer.as_mut().poll(context).is_ready()
    }

    /// Ready once the timeout of such an answer has passed.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        write_timeout: Duration,
        answer: Answer,
    ) -> Poll<()> {
        let is_large = answer == Answer::Large;
        let short = write_timeout.min(CONTENDED);
        loop {
            let allowed =
                if is_large && large_answers::others_wait() { short } else { write_timeout };
            let now = Instant::now();
            if now >= self.since + allowed {
                return Poll::Ready(());
            }
            let look = self.since + write_timeout;
            self.timer.as_mut().reset(if is_large { look.min(now + short) } else { look });
            ready!(self.timer.as_mut().poll(context));
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let mut part = (&mut *buffer).limit(MAX_READ);
        let read = poll_read_buf(Pin::new(&mut self.stream), context, &mut part);
        let received = &mut buffer.filled_mut()[before..];
        if !received.is_empty() {
            self.timing.bytes_received(received);
            if !self.timing.has_memory(received.len(), self.client) {
                return Poll::Ready(Err(Error::other("there is no memory for its request head")));
            }
        }
        read.map_ok(|_| ())
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
    /// The answer whose body has produced a frame and was not polled for the next one.
    static WAITING_FOR_CLIENT: Cell<Option<Answer>>;
}

/// Records, on the task of an HTTP/2 stream, with which answer the client is being waited for. With HTTP/1.1
/// there is no such task: the socket detects it.
pub(super) fn set_waiting_for_client(waiting: Option<Answer>) {
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
        tokio::spawn(WAITING_FOR_CLIENT.scope(Cell::new(None), stream));
    }
}

async fn with_write_timeout(stream: impl Future<Output = ()>, write_timeout: Duration) {
    let mut stream = pin!(stream);
    let mut stall: Option<Stall> = None;
    poll_fn(|context| {
        let has_timed_out = stall.as_mut().is_some_and(|stall| stall.timer_elapsed(context));
        if stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        let Some(answer) = WAITING_FOR_CLIENT.with(Cell::get) else {
            stall = None;
            return Poll::Pending;
        };
        // Every other wake-up means that the window was enlarged, which is progress.
        if !has_timed_out {
            stall = None;
        }
        stall.get_or_insert_with(Stall::begin).poll(context, write_timeout, answer)
    })
    .await;
}
