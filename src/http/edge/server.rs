//! The server beneath the routes: connections are accepted, bounded in number, size and time, and
//! closed.
//!
//! HTTP/1.1 and HTTP/2 without TLS, told apart by the first bytes. Beyond `max_connections`, or
//! when the process has no file descriptors left, clients wait in the kernel's queue: nobody is
//! turned away who would be served a moment later. A client that does not send what it began, or
//! does not take its answer, loses its connection ([`pace`], [`stall`]); bodies have a limit of
//! their own where they are read ([`super::extract`]). What a request means, also that it is too
//! long, is decided above.

mod answer;
mod pace;
mod stall;
mod unread;

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::Service;

use self::answer::Answer;
use self::pace::{OpenRequest, Pace};
use self::stall::{Socket, Streams};

/// What HTTP/1.1 holds in memory of a head or of an answer that is not yet taken, in bytes. Larger
/// than what [`super::layer`] lets pass, which refuses with an explanation; beyond this the answer
/// is a bare 431.
const BUFFER: usize = 128 << 10;
/// Header lines that are parsed, for the same reason more than are let pass.
const PARSED_HEADERS: usize = 256;
/// Requests at once on one HTTP/2 connection.
const STREAMS: u32 = 200;
/// Bytes of an HTTP/2 header list, by that protocol's way of counting.
const HEADER_LIST: u32 = 64 << 10;
/// Bytes that a client may send unread, on one stream and on one HTTP/2 connection.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// How often an HTTP/2 client is asked whether it lives, and how long it may take to answer.
const PING: Duration = Duration::from_secs(20);
/// How long nothing is accepted after that failed, e.g. for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often the operator is told about the same shortage.
const REMINDER: Duration = Duration::from_mins(1);
/// File descriptors that are kept for everything but connections: store, files, model calls.
const RESERVED_FILES: u64 = 256;

/// What clients may take of time and connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From connecting to the first byte, and from the first byte of a head to its end.
    pub header_timeout: Duration,
    /// Between requests.
    pub idle_timeout: Duration,
    /// Without any progress in taking an answer.
    pub write_timeout: Duration,
    /// Connections at once.
    pub max_connections: usize,
}

struct Server {
    router: Router,
    limits: Limits,
    protocols: auto::Builder<Streams>,
    closing: CancellationToken,
}

/// Serves until `closing` is done, then takes no more connections, ends those that are idle and
/// waits for the answers in progress, however long they take.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    closing: impl Future<Output = ()>,
) {
    let most = limits.max_connections.min(affordable_connections());
    if most < limits.max_connections {
        tracing::info!(
            connections = most,
            "the limit on open files allows fewer than server.max_connections"
        );
    }
    let slots = Arc::new(Semaphore::new(most));
    let server = Arc::new(Server {
        router,
        limits,
        protocols: protocols(&limits),
        closing: CancellationToken::new(),
    });
    tokio::select! {
        never = accept(listener, &server, &slots) => match never {},
        () = closing => {}
    }
    server.closing.cancel();
    let all = u32::try_from(most).unwrap_or(u32::MAX);
    let _ = slots.acquire_many(all).await;
}

fn protocols(limits: &Limits) -> auto::Builder<Streams> {
    let mut protocols = auto::Builder::new(Streams { write_timeout: limits.write_timeout });
    // Heads are timed by `pace`, which tells a slow one from a connection that rests.
    protocols.http1().timer(TokioTimer::new()).header_read_timeout(None);
    protocols.http1().max_buf_size(BUFFER).max_headers(PARSED_HEADERS);
    protocols
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADER_LIST)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(BUFFER);
    protocols
}

async fn accept(listener: TcpListener, server: &Arc<Server>, slots: &Arc<Semaphore>) -> Infallible {
    let (mut full, mut failing) = (Reminder::default(), Reminder::default());
    loop {
        if slots.available_permits() == 0 && full.is_due() {
            tracing::warn!("server.max_connections is reached; more clients wait until one leaves");
        }
        let Ok(slot) = Arc::clone(slots).acquire_owned().await else { return pending().await };
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(connection(Arc::clone(server), stream, slot))),
            Err(error) if gave_up(&error) => {}
            Err(error) => {
                if failing.is_due() {
                    tracing::warn!(%error, "connections cannot be accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The client went away while it waited to be accepted.
fn gave_up(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// One connection, from the first byte to the last.
async fn connection(server: Arc<Server>, stream: TcpStream, slot: OwnedSemaphorePermit) {
    let _ = stream.set_nodelay(true);
    let pace = Arc::new(Pace::new());
    let socket = TokioIo::new(Socket::new(stream, Arc::clone(&pace), server.limits.write_timeout));
    let service = service_fn(|request: Request<Incoming>| {
        let open = OpenRequest::new(&pace);
        let (request, unread) = unread::lend(request);
        let answer = server.router.clone().call(request.map(Body::new));
        let pace = Arc::clone(&pace);
        async move {
            let mut response = answer.await?;
            unread.settle(&mut response, &pace).await;
            Ok::<_, Infallible>(response.map(|body| Answer::new(body, open)))
        }
    });
    let mut protocol = pin!(server.protocols.serve_connection(socket, service));
    let mut closing = pin!(server.closing.cancelled());
    let mut timer = pin!(tokio::time::sleep(server.limits.header_timeout));
    let mut leaving = false;
    let ended = poll_fn(|context| {
        if !leaving && closing.as_mut().poll(context).is_ready() {
            leaving = true;
            protocol.as_mut().graceful_shutdown();
        }
        loop {
            if let Poll::Ready(ended) = protocol.as_mut().poll(context) {
                return Poll::Ready(ended.map_err(|error| error.to_string()));
            }
            // The timer is moved when it must ring earlier, and otherwise rings to be set again.
            let deadline = pace.deadline(&server.limits);
            if deadline < timer.deadline() || timer.is_elapsed() {
                timer.as_mut().reset(deadline);
            }
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            if pace.deadline(&server.limits) > Instant::now() {
                continue;
            }
            if leaving || pace.owes_a_head() {
                return Poll::Ready(Err("the client was silent for too long".to_owned()));
            }
            leaving = true;
            pace.restart();
            protocol.as_mut().graceful_shutdown();
        }
    });
    if let Err(reason) = ended.await {
        tracing::debug!(reason, "connection ended");
    }
    drop(slot);
}

/// Raises the soft limit on open files to the hard one. What remains of it are connections, at
/// least one.
fn affordable_connections() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let files = if raised { maximum } else { current };
    files.map_or(Semaphore::MAX_PERMITS, |files| {
        usize::try_from(files.saturating_sub(RESERVED_FILES).max(1))
            .unwrap_or(Semaphore::MAX_PERMITS)
    })
}

/// Says when it is time to repeat a warning.
#[derive(Default)]
struct Reminder(Option<Instant>);

impl Reminder {
    fn is_due(&mut self) -> bool {
        let due = self.0.is_none_or(|last| last.elapsed() >= REMINDER);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}
