//! The HTTP client for all addresses that are not the operator's own: pages that a model requests,
//! webhooks that a caller names, tools that a file declares.
//!
//! Every hop is checked, redirects included: first the address as written, by the sender, then the IP
//! address that its name resolves to, by [`AddressPolicy`]. A name is resolved once, and the connection
//! goes to exactly the address that was checked, so that a second DNS answer cannot differ (DNS
//! rebinding). Connections are not reused, so none outlives its check. Nothing is taken from the
//! environment: no proxy, no netrc, no cookies. The deadline, the decompressed size and the size of the
//! head of an answer are bounded.
//!
//! What may be requested is decided elsewhere (`governance/network.rs` for tool calls), as is what an
//! answer means.

mod body;
mod exchange;
pub mod relay;

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT,
    HOST, LOCATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, USER_AGENT,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use tokio_rustls::rustls::ClientConfig;
use url::{Host, Url};

use crate::bounds::address;
use crate::bounds::memory::TenantSemaphore;
pub use crate::bounds::networks::AddressPolicy;
use crate::tls;
pub use exchange::BodyPlace;
use exchange::Secured;

/// Redirects that are followed at most, whatever [`Terms::redirects`] says.
pub const MAX_REDIRECTS: u32 = 5;
/// Concurrent DNS look-ups, half of them for one tenant: each blocks a thread until its name servers answer, and a
/// tenant may ask for names of its own servers, which never do.
const MAX_LOOKUPS: usize = 64;
static LOOKUPS: LazyLock<TenantSemaphore> = LazyLock::new(|| TenantSemaphore::new(MAX_LOOKUPS));
/// Addresses of a name that are tried.
const MAX_TRIED: usize = 4;
/// Headers that are also sent to another host after a redirect.
const CROSS_ORIGIN_HEADERS: [HeaderName; 4] = [ACCEPT, ACCEPT_LANGUAGE, CONTENT_TYPE, USER_AGENT];
/// Headers about the connection, which this client sets itself.
const CONNECTION_HEADERS: [HeaderName; 9] = [
    HOST,
    CONNECTION,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    TE,
    TRAILER,
    UPGRADE,
    EXPECT,
    ACCEPT_ENCODING,
];

/// The IP addresses that a name stands for, looked up for the tenant that is given second.
pub type LookUp =
    Arc<dyn Fn(String, String) -> BoxFuture<'static, io::Result<Vec<IpAddr>>> + Send + Sync>;

/// Is called before every hop is sent; an error, in words, prevents it.
pub type Announce = dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync;

/// Which part of a streamed body is still wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// All of it.
    Whole,
    /// The rest, and this many of the last bytes; earlier bytes may be dropped.
    Rest(usize),
    Nothing,
}

/// Reads the body of an answer while it arrives, with the answer's head, and says what is still wanted.
pub type Enough<'a> = dyn FnMut(&HeaderMap, &[u8]) -> Wanted + Send + 'a;

/// Sends requests. Cheap to clone; what it holds is shared.
#[derive(Clone)]
pub struct Client {
    look_up: LookUp,
    tls: Arc<OnceLock<Option<Arc<ClientConfig>>>>,
}

/// A request. Headers about the connection are ignored: this client sets them.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    /// From [`address::read`].
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// How far a request may go.
pub struct Terms<'a> {
    /// The IP addresses that may be connected to.
    pub addresses: &'a AddressPolicy,
    /// Is called before every hop, the first one included, with the address as written. An error, in
    /// words for the caller, refuses the hop.
    pub judge: &'a (dyn Fn(&Url) -> Result<(), String> + Send + Sync),
    /// Redirects that are followed, 5 at most; with 0 a redirect is the answer.
    pub redirects: u32,
    /// For everything from the first look at a name to the last byte of the body.
    pub deadline: Duration,
    /// Bytes of the body, decompressed. What is beyond is not read.
    pub max_body: usize,
    /// For whom it is sent; look-ups of names and large bodies are shared out between tenants.
    pub tenant: &'a str,
}

/// An answer.
#[derive(Debug)]
pub struct Response {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Where it came from, behind all redirects.
    pub url: Url,
    /// Decompressed.
    pub body: Vec<u8>,
    /// Whether that is all of it.
    pub is_whole: bool,
    /// The number of requests that were sent, redirects included.
    pub requests: u32,
    /// The memory permits of the body, held for as long as the body is used.
    pub place: BodyPlace,
}

/// Why there is no answer. None of the texts repeats more of an address than its host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutboundError {
    /// A redirect leads to something that is no address.
    #[error("a redirect leads to an address that {0}")]
    Redirect(String),
    /// The sender objects to this address.
    #[error("{0}")]
    Refused(String),
    /// None of its IP addresses may be connected to.
    #[error("{0} is at an address that is not public")]
    NotPublic(String),
    #[error("the name {0} cannot be resolved")]
    Unresolved(String),
    #[error("{host} cannot be reached: {why}")]
    Unreachable { host: String, why: String },
    /// The TLS handshake fails, e.g. because of the certificate.
    #[error("no secure connection to {host}: {why}")]
    NotSecure { host: String, why: String },
    #[error("{host} sent an invalid HTTP response: {why}")]
    Malformed { host: String, why: String },
    #[error("the answer of {0} broke off")]
    BrokenOff(String),
    #[error("the answer of {0} is in an encoding that was not asked for")]
    Encoding(String),
    #[error("there was no complete answer within {} seconds", .0.as_secs_f64())]
    Late(Duration),
    #[error("there are more than {0} redirects")]
    TooManyRedirects(u32),
    /// A failure after a redirect: its text may contain words of the server.
    #[error(transparent)]
    Redirected(Box<OutboundError>),
}

impl OutboundError {
    /// Whether the request certainly had no effect: it was never sent.
    pub fn was_not_sent(&self) -> bool {
        matches!(
            self,
            Self::Refused(_)
                | Self::NotPublic(_)
                | Self::Unresolved(_)
                | Self::Unreachable { .. }
                | Self::NotSecure { .. }
        )
    }

    fn after(self, requests: u32) -> Self {
        if requests == 0 { self } else { Self::Redirected(Box::new(self)) }
    }
}

impl Client {
    /// A client that resolves names with the machine's resolver.
    pub fn new() -> Self {
        let look_up = |host: String, tenant: String| -> BoxFuture<'static, _> {
            Box::pin(async move { look_up(host, &tenant).await })
        };
        Self::resolving_with(Arc::new(look_up))
    }

    /// A client that resolves names with this function.
    pub fn resolving_with(look_up: LookUp) -> Self {
        Self { look_up, tls: Arc::default() }
    }

    /// Sends a request and follows redirects. Dropping the future closes the connection.
    ///
    /// # Errors
    /// [`OutboundError`].
    pub async fn send(
        &self,
        request: Request,
        terms: &Terms<'_>,
    ) -> Result<Response, OutboundError> {
        self.send_each(request, terms, &|| Box::pin(async { Ok(()) })).await
    }

    /// As [`Self::send`], but calls `announce` before each hop, after all other checks. Its error, in
    /// words for the caller, prevents the hop.
    ///
    /// # Errors
    /// [`OutboundError`].
    pub async fn send_each(
        &self,
        request: Request,
        terms: &Terms<'_>,
        announce: &Announce,
    ) -> Result<Response, OutboundError> {
        tokio::time::timeout(terms.deadline, self.follow(request, terms, announce, None))
            .await
            .unwrap_or(Err(OutboundError::Late(terms.deadline)))
    }

    /// As [`Self::send_each`], but for a body that may never end: it is read until `enough` wants no
    /// more, and is not part of the returned answer.
    ///
    /// # Errors
    /// [`OutboundError`].
    pub async fn send_until(
        &self,
        request: Request,
        terms: &Terms<'_>,
        announce: &Announce,
        enough: &mut Enough<'_>,
    ) -> Result<Response, OutboundError> {
        tokio::time::timeout(terms.deadline, self.follow(request, terms, announce, Some(enough)))
            .await
            .unwrap_or(Err(OutboundError::Late(terms.deadline)))
    }

    async fn follow(
        &self,
        mut request: Request,
        terms: &Terms<'_>,
        announce: &Announce,
        mut enough: Option<&mut Enough<'_>>,
    ) -> Result<Response, OutboundError> {
        let allowed = terms.redirects.min(MAX_REDIRECTS);
        let mut requests = 0;
        loop {
            let refused = |why| OutboundError::Refused(why).after(requests);
            (terms.judge)(&request.url).map_err(refused)?;
            announce().await.map_err(refused)?;
            let answer = self.once(&request, terms, allowed > 0, enough.as_deref_mut()).await;
            let answer = answer.map_err(|error| error.after(requests))?;
            requests += 1;
            if allowed == 0 || !answer.is_redirect() {
                return Ok(Response {
                    status: answer.status,
                    headers: answer.headers,
                    url: request.url,
                    body: answer.body,
                    is_whole: answer.is_whole,
                    requests,
                    place: answer.place,
                });
            }
            if requests > allowed {
                return Err(OutboundError::TooManyRedirects(allowed).after(requests));
            }
            request = redirected(request, &answer).map_err(|error| error.after(requests))?;
        }
    }

    /// One request to one address.
    async fn once(
        &self,
        request: &Request,
        terms: &Terms<'_>,
        skips_redirects: bool,
        enough: Option<&mut Enough<'_>>,
    ) -> Result<exchange::Answer, OutboundError> {
        let host = address::shown_host(&request.url);
        let addresses = self.resolved(&request.url, &host, terms.addresses, terms.tenant).await?;
        let secured = match request.url.scheme() {
            "https" => Some(self.secured(&request.url, &host)?),
            _ => None,
        };
        let stream = exchange::connect(&addresses, secured, &host).await?;
        let sent = wire_request(request, &host)?;
        let Terms { max_body, tenant, .. } = *terms;
        let expected = exchange::Expected { max_body, skips_redirects, tenant };
        exchange::exchange(stream, sent, &host, expected, enough).await
    }

    /// The addresses of a URL's host that may be connected to, of which there is at least one.
    async fn resolved(
        &self,
        url: &Url,
        host: &str,
        policy: &AddressPolicy,
        tenant: &str,
    ) -> Result<Vec<SocketAddr>, OutboundError> {
        let port = url.port_or_known_default().unwrap_or(443);
        let unresolved = || OutboundError::Unresolved(host.to_owned());
        let found = match url.host().ok_or_else(unresolved)? {
            Host::Ipv4(address) => vec![IpAddr::V4(address)],
            Host::Ipv6(address) => vec![IpAddr::V6(address)],
            Host::Domain(name) => {
                let found = (self.look_up)(name.to_owned(), tenant.to_owned()).await;
                found.map_err(|_| unresolved())?
            }
        };
        if found.is_empty() {
            return Err(unresolved());
        }
        let judged = found.into_iter().filter_map(|address| policy.connectable(address));
        let addresses: Vec<SocketAddr> =
            judged.take(MAX_TRIED).map(|address| SocketAddr::new(address, port)).collect();
        if addresses.is_empty() {
            return Err(OutboundError::NotPublic(host.to_owned()));
        }
        Ok(addresses)
    }

    fn secured(&self, url: &Url, host: &str) -> Result<Secured, OutboundError> {
        let tls = self.tls.get_or_init(|| {
            tls::client_config()
                .map(Arc::new)
                .inspect_err(|error| tracing::error!(%error, "TLS cannot be set up"))
                .ok()
        });
        let not_secure =
            |why: &str| OutboundError::NotSecure { host: host.to_owned(), why: why.to_owned() };
        let config = tls.clone().ok_or_else(|| not_secure("TLS is not available here"))?;
        Secured::new(config, url).ok_or_else(|| not_secure("its name cannot be certified"))
    }
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

/// Calls the machine's resolver on a blocking thread, which holds its permit until the look-up ends.
async fn look_up(host: String, tenant: &str) -> io::Result<Vec<IpAddr>> {
    let place = LOOKUPS.acquire(tenant).await; // never closed
    let looking = tokio::task::spawn_blocking(move || {
        let found = (host.as_str(), 0).to_socket_addrs();
        drop(place);
        found.map(|found| found.map(|address| address.ip()).collect())
    });
    looking.await.map_err(io::Error::other)?
}

/// The request as it goes over the wire.
fn wire_request(request: &Request, host: &str) -> Result<http::Request<Bytes>, OutboundError> {
    let target = &request.url[url::Position::BeforePath..url::Position::AfterQuery];
    let malformed =
        || OutboundError::Refused(format!("the request to {host} cannot be written in HTTP"));
    let mut headers = request.headers.clone();
    for name in &CONNECTION_HEADERS {
        headers.remove(name);
    }
    let authority = &request.url[url::Position::BeforeHost..url::Position::AfterPort];
    headers.insert(HOST, HeaderValue::from_str(authority).map_err(|_| malformed())?);
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    let mut sent = http::Request::new(request.body.clone());
    *sent.method_mut() = request.method.clone();
    *sent.uri_mut() = target.parse().map_err(|_| malformed())?;
    *sent.headers_mut() = headers;
    Ok(sent)
}

/// The request that follows a redirect. To another origin no header that could hold a secret is sent,
/// and no body.
fn redirected(request: Request, answer: &exchange::Answer) -> Result<Request, OutboundError> {
    let wrong = |why: &str| OutboundError::Redirect(why.to_owned());
    let location = answer.headers.get(LOCATION).ok_or_else(|| wrong("is not there"))?;
    let location = std::str::from_utf8(location.as_bytes()).map_err(|_| wrong("is not text"))?;
    let Request { method, url: from, mut headers, body } = request;
    let url = address::read_relative(&from, location)
        .map_err(|why| OutboundError::Redirect(why.to_string()))?;
    if from.scheme() == "https" && url.scheme() == "http" {
        return Err(wrong("leaves https"));
    }
    let keeps_method =
        matches!(answer.status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
            || method == Method::GET
            || method == Method::HEAD;
    let (method, body) = if keeps_method { (method, body) } else { (Method::GET, Bytes::new()) };
    if !keeps_method {
        headers.remove(CONTENT_TYPE);
    }
    if !address::is_same_origin(&from, &url) {
        if !body.is_empty() {
            return Err(wrong("would take the request's body to another host"));
        }
        headers = CROSS_ORIGIN_HEADERS
            .iter()
            .filter_map(|name| Some((name.clone(), headers.get(name)?.clone())))
            .filter(|(_, value)| !value.is_sensitive())
            .collect();
    }
    Ok(Request { method, url, headers, body })
}

#[cfg(test)]
mod outbound_tests;
