//! Relays the traffic of programs: tunnels, and requests whose bodies are streamed.
//!
//! The address of a connection is checked like that of any other request, and every connection serves
//! one request or one tunnel. All bytes are counted. Which requests are permitted is decided elsewhere.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONNECTION, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{Request, Response, Version};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::task::AbortOnDropHandle;
use url::{Position, Url};

use super::exchange::{MAX_HEAD, MAX_HEADERS, Stream, connect, phrase};
use super::{AddressPolicy, Client, OutboundError};
use crate::bounds::address;

/// How long a tunnel may carry nothing.
const IDLE: Duration = Duration::from_mins(2);
/// Bytes of a tunnel that are read at once.
const PIECE: usize = 16 * 1024;
/// Hop-by-hop headers, which are not forwarded.
const HOP_BY_HOP_HEADERS: [HeaderName; 9] = [
    CONNECTION,
    EXPECT,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HOST,
];
/// The same, without a constant of their own.
const MORE_HOP_BY_HOP_HEADERS: [&str; 2] = ["keep-alive", "proxy-connection"];

/// How many bytes may still be relayed. Clones share one count.
#[derive(Debug, Clone)]
pub struct Meter(Arc<AtomicU64>);

impl Meter {
    pub fn new(bytes: u64) -> Self {
        Self(Arc::new(AtomicU64::new(bytes)))
    }

    fn take(&self, bytes: usize) -> io::Result<()> {
        let less = |left: u64| left.checked_sub(bytes as u64);
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => Ok(()),
            Err(_) => Err(io::Error::other("more bytes than one call may move")),
        }
    }
}

/// A connection to a host, over which traffic of a program is relayed.
pub struct Passage {
    stream: Box<dyn Stream>,
    host: String,
}

impl Client {
    /// Connects to the host of an address for this tenant, with TLS where its scheme says so.
    ///
    /// # Errors
    /// [`OutboundError`] where it may not be connected to, or cannot.
    pub async fn passage(
        &self,
        url: &Url,
        addresses: &AddressPolicy,
        tenant: &str,
    ) -> Result<Passage, OutboundError> {
        self.connected(url, addresses, tenant, url.scheme() == "https").await
    }

    /// The same without TLS, for what is encrypted already.
    ///
    /// # Errors
    /// [`OutboundError`] where it may not be connected to, or cannot.
    pub async fn tunnel_end(
        &self,
        url: &Url,
        addresses: &AddressPolicy,
        tenant: &str,
    ) -> Result<Passage, OutboundError> {
        self.connected(url, addresses, tenant, false).await
    }

    async fn connected(
        &self,
        url: &Url,
        addresses: &AddressPolicy,
        tenant: &str,
        with_tls: bool,
    ) -> Result<Passage, OutboundError> {
        let host = address::shown_host(url);
        let resolved = self.resolved(url, &host, addresses, tenant).await?;
        let secured = with_tls.then(|| self.secured(url, &host)).transpose()?;
        let stream = connect(&resolved, secured, &host).await?;
        Ok(Passage { stream, host })
    }
}

impl Passage {
    /// Relays bytes in both directions until both have ended.
    ///
    /// # Errors
    /// Either side fails, nothing comes for too long, or the meter has run out.
    pub async fn tunnel(
        self,
        with: impl AsyncRead + AsyncWrite + Unpin,
        meter: &Meter,
    ) -> io::Result<()> {
        let (mut near_reads, mut near_writes) = tokio::io::split(with);
        let (mut far_reads, mut far_writes) = tokio::io::split(self.stream);
        let pieces = AtomicU64::new(0);
        let out = piped(&mut near_reads, &mut far_writes, meter, &pieces);
        let back = piped(&mut far_reads, &mut near_writes, meter, &pieces);
        tokio::try_join!(out, back).map(|_| ())
    }

    /// Sends a request to this address and answers what comes back, its body still to come.
    ///
    /// # Errors
    /// [`OutboundError`] where there is no answer in proper HTTP.
    pub async fn send(
        self,
        url: &Url,
        request: Request<Incoming>,
        meter: &Meter,
    ) -> Result<Response<RelayedBody>, OutboundError> {
        let Self { stream, host } = self;
        let malformed = |why: String| OutboundError::Malformed { host: host.clone(), why };
        let (mut parts, body) = request.into_parts();
        parts.version = Version::HTTP_11;
        parts.uri = url[Position::BeforePath..Position::AfterQuery]
            .parse()
            .map_err(|_| malformed("its path cannot be written".to_owned()))?;
        strip(&mut parts.headers);
        let authority = &url[Position::BeforeHost..Position::AfterPort];
        let authority = HeaderValue::from_str(authority)
            .map_err(|_| malformed("its name cannot be written".to_owned()))?;
        parts.headers.insert(HOST, authority);
        parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        let body = RelayedBody { body, meter: meter.clone(), connection: None };
        let (mut sender, connection) = http1::Builder::new()
            .max_headers(MAX_HEADERS)
            .max_header_size(MAX_HEAD)
            .max_buf_size(MAX_HEAD)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| malformed(phrase(&error)))?;
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let sent = sender.send_request(Request::from_parts(parts, body)).await;
        let (mut parts, body) = sent.map_err(|error| malformed(phrase(&error)))?.into_parts();
        if parts.status.is_informational() {
            return Err(malformed("it wants to speak something else".to_owned()));
        }
        strip(&mut parts.headers);
        parts.version = Version::HTTP_11;
        parts.extensions = http::Extensions::new();
        let body = RelayedBody { body, meter: meter.clone(), connection: Some(connection) };
        Ok(Response::from_parts(parts, body))
    }
}

async fn piped(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    meter: &Meter,
    pieces: &AtomicU64,
) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let seen = pieces.load(Ordering::Relaxed);
        let read = match tokio::time::timeout(IDLE, from.read(&mut piece)).await {
            Ok(read) => read?,
            // The other direction may be busy.
            Err(_) if pieces.load(Ordering::Relaxed) != seen => continue,
            Err(elapsed) => return Err(elapsed.into()),
        };
        pieces.fetch_add(1, Ordering::Relaxed);
        if read == 0 {
            return to.shutdown().await;
        }
        meter.take(read)?;
        to.write_all(&piece[..read]).await?;
    }
}

/// Removes the headers about the connection on which a message arrived.
fn strip(headers: &mut HeaderMap) {
    let listed = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let listed: Vec<HeaderName> = listed
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed.iter().chain(&HOP_BY_HOP_HEADERS) {
        headers.remove(name);
    }
    for name in MORE_HOP_BY_HOP_HEADERS {
        headers.remove(name);
    }
}

/// A body that is relayed, and the connection on which it arrives.
pub struct RelayedBody {
    body: Incoming,
    meter: Meter,
    connection: Option<AbortOnDropHandle<hyper::Result<()>>>,
}

impl Body for RelayedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        polled.map(|frame| {
            let frame = frame?.map_err(io::Error::other);
            let metered = frame.and_then(|frame| {
                self.meter.take(frame.data_ref().map_or(0, Bytes::len))?;
                Ok(frame)
            });
            if metered.is_err() {
                self.connection = None;
            }
            Some(metered)
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
