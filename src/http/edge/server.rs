//! The HTTP server: accepts connections, bounds their number, size and time, and closes them.
//!
//! HTTP/1.1 and HTTP/2 without TLS, detected from the first bytes. Beyond `max_connections`, a few
//! connections are reserved for probes; other requests on them are refused at once, and a silent client
//! loses its connection to the next one ([`reserve`]). When the process has no file descriptors left,
//! clients wait in the kernel's accept queue. A client that is too slow to send a request head or to read
//! its response loses its connection ([`timing`], [`stall`]), and so does one whose large head finds no memory
//! ([`head_memory`]); the time to send a body is bounded by [`super::extract`]. The
//! limits on a request head are enforced by [`super::layer`], which can explain the error.

mod frames;
mod head_memory;
mod reserve;
mod response_body;
mod stall;
mod timing;
mod unread;

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::Service;

use self::reserve::{Eviction, Reserve, ReservedPlace};
use self::response_body::ResponseBody;
use self::stall::{Socket, Streams};
use self::timing::{ConnectionTiming, OpenRequest};
use super::large_answers::LargeAnswer;

/// HTTP/1.1 buffer for a request head or an unsent response, in bytes. Larger than the limit in
/// [`super::layer`], which answers with a problem document; beyond this the response is a bare 431.
const BUFFER: usize = 128 << 10;
/// Bytes that the kernel keeps for a client which does not read: it would take megabytes.
const UNSENT: u32 = 128 << 10;
/// Maximum number of parsed headers; higher than the limit in [`super::layer`] for the same reason.
const PARSED_HEADERS: usize = 256;
/// Concurrent streams on one HTTP/2 connection.
const STREAMS: u32 = 200;
/// `SETTINGS_MAX_HEADER_LIST_SIZE`, in bytes, of which each header takes 32 besides; higher than the limit in
/// [`super::layer`] for the same reason.
const HEADER_LIST: u32 = 128 << 10;
/// Flow control windows of one HTTP/2 stream and connection, in bytes.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// Interval and timeout of HTTP/2 keep-alive pings.
const PING: Duration = Duration::from_secs(20);
/// Pause after a failed accept, e.g. without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Minimum interval between two warnings about the same shortage.
const REMINDER: Duration = Duration::from_mins(1);
/// File descriptors that are reserved for the store, files and model calls.
const RESERVED_FILES: u64 = 256;

/// Time to send the head of a request on a reserved connection, and until the next one.
const RESERVED_PAUSE: Duration = Duration::from_secs(1);
/// How long each of them is open at most.
const RESERVED_TIME: Duration = Duration::from_secs(5);

/// The address of a request's client.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) IpAddr);

/// Marks requests on a connection that is reserved for probes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reserved;

/// A connection's right to be open.
enum Slot {
    Regular(OwnedSemaphorePermit),
    Reserved(ReservedPlace),
}

/// Timeouts and the connection limit.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From connecting to the first byte, and from the first byte of a request head to its end.
    pub header_timeout: Duration,
    /// Between two requests of a connection.
    pub idle_timeout: Duration,
    /// Without progress in sending a response.
    pub write_timeout: Duration,
    /// Concurrent connections.
    pub max_connections: usize,
}

struct Server {
    router: Router,
    limits: Limits,
    protocols: auto::Builder<Streams>,
    closing: CancellationToken,
}

/// Serves until `closing` completes, then stops accepting, closes idle connections and waits for
/// responses in progress, without a timeout.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    closing: impl Future<Output = ()>,
) {
    let most = affordable_connections(limits.max_connections);
    if most < limits.max_connections {
        tracing::info!(
            connections = most,
            "the limit on open files is lower than server.max_connections"
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
    // `timing` bounds request heads: hyper's timeout would also close idle connections.
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
    let reserve = Reserve::new();
    loop {
        match listener.accept().await {
            Ok((stream, client)) => {
                let slot = if let Ok(permit) = Arc::clone(slots).try_acquire_owned() {
                    Slot::Regular(permit)
                } else {
                    if full.is_due() {
                        tracing::warn!(
                            "server.max_connections is reached; new connections serve only probes"
                        );
                    }
                    Slot::Reserved(reserve.place().await)
                };
                let peer = Peer(client.ip().to_canonical());
                drop(tokio::spawn(connection(Arc::clone(server), stream, peer, slot)));
            }
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

/// The client disconnected before it was accepted.
fn gave_up(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn connection(server: Arc<Server>, stream: TcpStream, peer: Peer, slot: Slot) {
    let place = match slot {
        Slot::Regular(_permit) => {
            return serve_connection(&server, stream, peer, server.limits, None).await;
        }
        Slot::Reserved(place) => place,
    };
    let limits = Limits {
        header_timeout: server.limits.header_timeout.min(RESERVED_PAUSE),
        idle_timeout: server.limits.idle_timeout.min(RESERVED_PAUSE),
        ..server.limits
    };
    let eviction = &*place.eviction;
    tokio::select! {
        biased;
        () = eviction.now.cancelled() => {}
        () = serve_connection(&server, stream, peer, limits, Some(eviction)) => {}
        () = tokio::time::sleep(RESERVED_TIME) => {}
    }
}

/// Serves a connection until it ends; one that is reserved for probes, until it has to make room.
async fn serve_connection(
    server: &Server,
    stream: TcpStream,
    peer: Peer,
    limits: Limits,
    eviction: Option<&Eviction>,
) {
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT);
    let is_reserved = eviction.is_some();
    let timing =
        eviction.map_or_else(|| Arc::new(ConnectionTiming::new()), |own| Arc::clone(&own.timing));
    let socket =
        TokioIo::new(Socket::new(stream, peer.0, Arc::clone(&timing), server.limits.write_timeout));
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        if is_reserved {
            request.extensions_mut().insert(Reserved);
        }
        let mut open = OpenRequest::new(&timing);
        let (request, unread) = unread::track(request);
        let answer = server.router.clone().call(request.map(Body::new));
        let timing = Arc::clone(&timing);
        async move {
            let mut response = answer.await?;
            if response.status() == StatusCode::NOT_MODIFIED {
                // The length of an omitted body is not that of the content (RFC 9110, section 8.6).
                response.headers_mut().remove(CONTENT_LENGTH);
            }
            if is_reserved {
                unread.close(&mut response, &timing);
            } else {
                unread.drain_or_close(&mut response, &timing).await;
            }
            if response.extensions().get::<LargeAnswer>().is_some() {
                open.set_large();
            }
            Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, open)))
        }
    });
    let mut protocol = pin!(server.protocols.serve_connection(socket, service));
    let mut closing = pin!(server.closing.cancelled());
    let mut evicted = pin!(async {
        match eviction {
            Some(eviction) => eviction.when_idle.cancelled().await,
            None => pending().await,
        }
    });
    let mut timer = pin!(tokio::time::sleep(limits.header_timeout));
    let (mut is_closing, mut is_evicted) = (false, false);
    let ended = poll_fn(|context| {
        if !is_closing && closing.as_mut().poll(context).is_ready() {
            is_closing = true;
            protocol.as_mut().graceful_shutdown();
        }
        loop {
            if let Poll::Ready(ended) = protocol.as_mut().poll(context) {
                return Poll::Ready(ended.map_err(|error| error.to_string()));
            }
            is_evicted = is_evicted || evicted.as_mut().poll(context).is_ready();
            if is_evicted && !timing.is_answering() {
                return Poll::Ready(Err("it made room for another one".to_owned()));
            }
            // Reset the timer only if it fires too late; otherwise when it has fired.
            let deadline = timing.deadline(&limits);
            if deadline < timer.deadline() || timer.is_elapsed() {
                timer.as_mut().reset(deadline);
            }
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            if timing.deadline(&limits) > Instant::now() {
                continue;
            }
            if is_closing || timing.awaits_request_head() {
                return Poll::Ready(Err("the client sent nothing within the timeout".to_owned()));
            }
            is_closing = true;
            timing.restart();
            protocol.as_mut().graceful_shutdown();
        }
    });
    if let Err(reason) = ended.await {
        tracing::debug!(reason, "connection ended");
    }
}

/// Raises the soft limit on open files to the hard limit, and returns how many of these connections
/// it allows beside [`RESERVED_FILES`], at least one.
pub fn affordable_connections(most: usize) -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let files = if raised { maximum } else { current };
    let affordable = files.map_or(Semaphore::MAX_PERMITS, |files| {
        usize::try_from(files.saturating_sub(RESERVED_FILES).max(1))
            .unwrap_or(Semaphore::MAX_PERMITS)
    });
    most.min(affordable)
}

/// Limits how often a warning is repeated.
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
