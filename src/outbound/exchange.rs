//! One request over one connection to an address that was permitted.
//!
//! Connects, performs the TLS handshake, sends the request, reads the head and the body. The sizes are
//! bounded here, and the time by the caller, which also decides where the connection goes.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::header::LOCATION;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::task::AbortOnDropHandle;
use url::{Host, Url};

use super::body::{Body, Damaged};
use super::{Enough, OutboundError, Wanted};
use crate::bounds::memory::{self, TenantPermit, TenantSemaphore};

/// How long a connection attempt may take before the next address is tried.
const CONNECT: Duration = Duration::from_secs(5);
/// Bytes of an answer's head.
pub(super) const MAX_HEAD: usize = 64 * 1024;
/// A streamed body of more than this many times its bound counts as endless.
const ENDLESS: usize = 16;
/// Headers of an answer.
pub(super) const MAX_HEADERS: usize = 128;

/// Everything that bytes go through.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// The TLS configuration of a connection, and the name that its certificate must be for.
pub(super) struct Secured {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Secured {
    /// None where a certificate cannot name the host.
    pub(super) fn new(config: Arc<ClientConfig>, url: &Url) -> Option<Self> {
        let name = match url.host()? {
            Host::Domain(name) => ServerName::try_from(name.to_owned()).ok()?,
            Host::Ipv4(address) => ServerName::IpAddress(IpAddr::V4(address).into()),
            Host::Ipv6(address) => ServerName::IpAddress(IpAddr::V6(address).into()),
        };
        Some(Self { config, name })
    }
}

/// Bytes of a body that needs no permit, and is read however scarce memory is.
const SMALL: usize = 64 * 1024;
/// Bytes of a body from which on it needs a permit for large bodies.
const LARGE: usize = 1024 * 1024;
/// Permits for bodies of more than [`SMALL`] bytes, which limit how many are in memory.
static BODIES: LazyLock<TenantSemaphore> = LazyLock::new(|| {
    let places = memory::share_of_limit().map_or(u64::MAX, |part| part / LARGE as u64);
    TenantSemaphore::new(usize::try_from(places.clamp(16, 1024)).unwrap_or(1024))
});
/// Bytes of the largest body.
const LARGEST: u64 = 8 << 20;
/// Permits for large bodies. The holder of one waits for nothing but the server, so no deadlock is
/// possible.
static LARGE_BODIES: LazyLock<TenantSemaphore> = LazyLock::new(|| {
    let places = memory::share_of_limit().map_or(16, |part| part / LARGEST);
    TenantSemaphore::new(usize::try_from(places.clamp(4, 16)).unwrap_or(16))
});

/// The permits of a body that is not small, held until the body is used.
#[derive(Debug, Default)]
pub struct BodyPlace {
    any: Option<TenantPermit<'static>>,
    large: Option<TenantPermit<'static>>,
}

impl BodyPlace {
    /// Waits for the permits of a body of this size, and for memory. The server is not read from in the
    /// meantime.
    async fn grow(&mut self, bytes: usize, tenant: &str) {
        if self.any.is_none() && bytes > SMALL {
            self.any = BODIES.acquire(tenant).await;
            memory::wait_while_scarce().await;
        }
        if self.large.is_none() && bytes > LARGE {
            self.large = LARGE_BODIES.acquire(tenant).await;
            memory::wait_while_scarce().await;
        }
    }
}

/// An answer, its body as far as it was read.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    pub(super) is_whole: bool,
    pub(super) place: BodyPlace,
}

impl Answer {
    pub(super) fn is_redirect(&self) -> bool {
        matches!(self.status.as_u16(), 301 | 302 | 303 | 307 | 308)
            && self.headers.contains_key(LOCATION)
    }
}

/// A connection to the first of the addresses that takes one, and to no other.
pub(super) async fn connect(
    addresses: &[SocketAddr],
    secured: Option<Secured>,
    host: &str,
) -> Result<Box<dyn Stream>, OutboundError> {
    let mut why = String::new();
    for address in addresses {
        why = match tokio::time::timeout(CONNECT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return secure(stream, secured, host).await,
            Ok(Err(error)) => phrase(&error),
            Err(_elapsed) => "it takes no connection".to_owned(),
        };
    }
    Err(OutboundError::Unreachable { host: host.to_owned(), why })
}

async fn secure(
    stream: TcpStream,
    secured: Option<Secured>,
    host: &str,
) -> Result<Box<dyn Stream>, OutboundError> {
    // Latency alone: without it small requests wait for a full packet.
    let _ = stream.set_nodelay(true);
    let Some(Secured { config, name }) = secured else { return Ok(Box::new(stream)) };
    let stream = TlsConnector::from(config)
        .connect(name, stream)
        .await
        .map_err(|error| OutboundError::NotSecure { host: host.to_owned(), why: phrase(&error) })?;
    Ok(Box::new(stream))
}

/// What of an answer is read.
#[derive(Clone, Copy)]
pub(super) struct Expected<'a> {
    pub(super) max_body: usize,
    /// The body of a redirect is not read where that is followed.
    pub(super) skips_redirects: bool,
    /// Whose place a large body takes.
    pub(super) tenant: &'a str,
}

/// Sends a request and reads what comes back, until that is enough.
pub(super) async fn exchange(
    stream: Box<dyn Stream>,
    request: http::Request<Bytes>,
    host: &str,
    Expected { max_body, skips_redirects, tenant }: Expected<'_>,
    mut enough: Option<&mut Enough<'_>>,
) -> Result<Answer, OutboundError> {
    let broken_off = || OutboundError::BrokenOff(host.to_owned());
    let malformed = |error: &hyper::Error| {
        if error.is_parse() || error.is_parse_too_large() {
            OutboundError::Malformed { host: host.to_owned(), why: phrase(error) }
        } else {
            broken_off()
        }
    };
    let (mut sender, connection) = http1::Builder::new()
        .max_headers(MAX_HEADERS)
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_HEAD)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| malformed(&error))?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let response =
        sender.send_request(request.map(Full::new)).await.map_err(|error| malformed(&error))?;
    let (head, mut incoming) = response.into_parts();
    let mut answer = Answer {
        status: head.status,
        headers: head.headers,
        body: Vec::new(),
        is_whole: true,
        place: BodyPlace::default(),
    };
    if skips_redirects && answer.is_redirect() {
        return Ok(answer);
    }
    if max_body == 0 {
        answer.is_whole = false;
        return Ok(answer);
    }
    let damaged = |Damaged| OutboundError::Encoding(host.to_owned());
    let mut body = Body::behind(&answer.headers, max_body)
        .ok_or_else(|| OutboundError::Encoding(host.to_owned()))?;
    let (mut seen, mut used) = (0, 0);
    'frames: while let Some(frame) = incoming.frame().await {
        let frame = frame.map_err(|_| broken_off())?;
        let Some(bytes) = frame.data_ref() else { continue };
        for piece in bytes.chunks(body.at_once()) {
            answer.place.grow(body.len(), tenant).await;
            yield_now().await;
            if !body.push(piece).map_err(damaged)? {
                break 'frames;
            }
            if let Some(enough) = &mut enough {
                let more = body.behind_byte(seen);
                seen += more.len();
                match enough(&answer.headers, more) {
                    Wanted::Whole => {}
                    Wanted::Rest(last) if used < ENDLESS * max_body => {
                        used += body.keep_last(last);
                        seen = body.len();
                    }
                    Wanted::Rest(_) => break 'frames,
                    Wanted::Nothing => return Ok(answer),
                }
            }
        }
    }
    let read = body.finish().map_err(damaged)?;
    (answer.body, answer.is_whole) = (read.bytes, read.is_whole);
    Ok(answer)
}

/// What an error says, with its causes and without addresses of ours.
pub(super) fn phrase(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text.truncate(text.floor_char_boundary(200));
    text
}
