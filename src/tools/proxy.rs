//! The network access of programs in the sandbox: a proxy that serves one call, or one
//! long-running server.
//!
//! Programs can reach nothing else (`sandbox/network.rs`). The proxy accepts CONNECT and `http://`
//! addresses. The permit judges each request as it is written, and the IP address is checked like that of
//! any outbound request (`outbound/`). Requests of a server belong to no call: they are permitted by the
//! operator's list of hosts. The content of tunnels is not inspected. The proxy ends with the call or the
//! server, and so do all its connections.

mod servers;

use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use url::Url;

use super::ToolContext;
use super::credentials::{self, Credential, Credentials};
use super::requests::{AdmittedRequest, Requests};
use super::sandbox::{Sandbox, WayOut};
use crate::bounds::address;
use crate::bounds::memory::TenantSemaphore;
use crate::governance::Permit;
use crate::outbound::relay::{Meter, Passage, RelayedBody};
use crate::outbound::{AddressPolicy, Client, OutboundError};
use crate::run::Target;
pub use servers::{Hosts, ServerRequest, ServerRequests};
use servers::{PendingServerRequest, ServerPolicy};

/// Connections of one call at the same time, and of all, half of them of one tenant; further ones wait.
const CONNECTIONS: usize = 16;
const ALL_CONNECTIONS: usize = 1024;
static PLACES: LazyLock<TenantSemaphore> = LazyLock::new(|| TenantSemaphore::new(ALL_CONNECTIONS));
/// Bytes that one call may send and receive.
const MAX_BYTES: u64 = 1 << 30;
/// How long the head of a request may take.
const HEAD: Duration = Duration::from_secs(10);
/// Bytes and lines of a head.
const MAX_HEAD: usize = 32 * 1024;
const MAX_HEADERS: usize = 100;
/// Bytes of a reason in the first line of an answer, which is what most programs print.
const MAX_PHRASE: usize = 300;
/// Refused requests of one server that are logged.
const MAX_LOGGED: u32 = 100;
/// The pause before a connection is accepted again after a failure.
const PAUSE: Duration = Duration::from_millis(50);

/// Provides network access for programs. Cheap to clone.
#[derive(Clone)]
pub struct Proxy {
    client: Client,
    credentials: Arc<Credentials>,
    of_servers: ServerRequests,
}

type Answer = Response<Either<RelayedBody, Full<Bytes>>>;
/// A permitted tunnel, until the program has read the positive answer.
type Opened = Arc<Mutex<Option<(OnUpgrade, Passage)>>>;

/// The rules and counters for the requests of one call or server.
struct Call {
    client: Client,
    judge: Judge,
    addresses: AddressPolicy,
    credentials: Vec<Credential>,
    meter: Meter,
}

/// What decides which requests pass.
enum Judge {
    Permit(Box<Permit>, Requests),
    Server { policy: ServerPolicy, refusals: AtomicU32 },
}

/// A request that is sent, until its outcome is recorded.
enum Sent<'a> {
    OfCall(&'a Requests, AdmittedRequest),
    OfServer(PendingServerRequest),
}

impl Sent<'_> {
    /// Records its outcome.
    fn settle(self, failure: Option<&str>) {
        match self {
            Self::OfCall(requests, admitted) => requests.settle(admitted, failure),
            Self::OfServer(pending) => pending.settle(failure),
        }
    }
}

impl Judge {
    /// The tenant for which requests are sent; empty for a server.
    fn tenant(&self) -> String {
        match self {
            Self::Permit(_, requests) => requests.tenant(),
            Self::Server { .. } => String::new(),
        }
    }

    /// Whether a request is sent.
    async fn admit(&self, method: &Method, target: Target) -> Result<Sent<'_>, ProxyRefusal> {
        match self {
            Self::Permit(permit, requests) => {
                let ruling = permit.ruling_on(&target);
                let admitted = requests.ask(method.as_str(), target, ruling).await;
                admitted.map(|it| Sent::OfCall(requests, it)).map_err(ProxyRefusal::forbidden)
            }
            Self::Server { policy, refusals } => {
                let (host, port) = (target.host.clone(), target.port);
                policy.admit(target).map(Sent::OfServer).map_err(|why| {
                    if refusals.fetch_add(1, Ordering::Relaxed) < MAX_LOGGED {
                        let server = &policy.server;
                        tracing::warn!(
                            server,
                            host,
                            port,
                            "an MCP server asked for a host that its settings do not list"
                        );
                    }
                    ProxyRefusal::forbidden(why)
                })
            }
        }
    }
}

/// Why a request is not answered by the host that it is for.
struct ProxyRefusal {
    status: StatusCode,
    reason: String,
}

impl ProxyRefusal {
    fn malformed(reason: &str) -> Self {
        Self { status: StatusCode::BAD_REQUEST, reason: reason.to_owned() }
    }

    fn forbidden(reason: String) -> Self {
        Self { status: StatusCode::FORBIDDEN, reason }
    }
}

impl From<OutboundError> for ProxyRefusal {
    fn from(error: OutboundError) -> Self {
        let status = match error {
            OutboundError::NotPublic(_) | OutboundError::Refused(_) => StatusCode::FORBIDDEN,
            _ => StatusCode::BAD_GATEWAY,
        };
        Self { status, reason: error.to_string() }
    }
}

/// Whether the programs of a call have network access: the agent's rules and the kernel must permit it.
pub(super) async fn leads_out(sandbox: &Sandbox, context: &ToolContext) -> bool {
    context.has_network && sandbox.kernel().await.confinement.network
}

impl Proxy {
    pub fn new(client: Client, credentials: Credentials) -> Self {
        Self { client, credentials: Arc::new(credentials), of_servers: ServerRequests::default() }
    }

    /// What a definition may name.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// What servers have asked for.
    pub fn requests_of_servers(&self) -> &ServerRequests {
        &self.of_servers
    }

    /// The credentials of a call, the one for the longest path first.
    fn credentials_of(&self, permit: &Permit) -> Vec<Credential> {
        let named = permit.credentials().iter().filter_map(|name| self.credentials.get(name));
        let mut credentials: Vec<_> = named.filter_map(|it| it.clone().ok()).collect();
        credentials.sort_by_key(|it| std::cmp::Reverse(it.url.path().len()));
        credentials
    }

    /// Variables for the programs of a call.
    pub(super) fn variables(&self, permit: &Permit) -> Vec<(String, String)> {
        credentials::variables(&self.credentials_of(permit))
    }

    /// The network access of a call.
    pub(super) fn way_out(&self, permit: &Permit, context: &ToolContext) -> WayOut {
        let call = Arc::new(Call {
            client: self.client.clone(),
            judge: Judge::Permit(Box::new(permit.clone()), context.requests.clone()),
            addresses: AddressPolicy::public_and(permit.private_networks().iter().copied()),
            credentials: self.credentials_of(permit),
            meter: Meter::new(MAX_BYTES),
        });
        Box::new(move |listener| Box::pin(serve(listener, call)))
    }

    /// The network access of a server, as long as it runs.
    pub(super) fn way_out_of_server(&self, server: &str, hosts: Arc<Hosts>) -> WayOut {
        let call = Arc::new(Call {
            client: self.client.clone(),
            addresses: AddressPolicy::public_and(hosts.private.iter().copied()),
            judge: Judge::Server {
                policy: ServerPolicy {
                    server: server.to_owned(),
                    hosts,
                    noted: self.of_servers.clone(),
                },
                refusals: AtomicU32::new(0),
            },
            credentials: Vec::new(),
            meter: Meter::new(u64::MAX),
        });
        Box::new(move |listener| Box::pin(serve(listener, call)))
    }
}

async fn serve(listener: TcpListener, call: Arc<Call>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            let own = Arc::clone(&places).acquire_owned().await;
            listener.accept().await.map(|(stream, _)| (stream, own))
        };
        tokio::select! {
            accepted = accepted => match accepted {
                Ok((stream, own)) => {
                    // Acquired only now, so that idle programs hold no permit.
                    let of_all = PLACES.acquire(&call.judge.tenant()).await;
                    let call = Arc::clone(&call);
                    connections.spawn(async move {
                        let _places = (own, of_all);
                        serve_one(stream, call).await;
                    });
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// A connection of a program: requests one after another, of which the last may open a tunnel.
async fn serve_one(stream: TcpStream, call: Arc<Call>) {
    let opened = Opened::default();
    let service = service_fn(|request| {
        let (call, opened) = (Arc::clone(&call), Arc::clone(&opened));
        async move { Ok::<_, Infallible>(call.answer(request, &opened).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_headers(MAX_HEADERS)
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    let opened = opened.lock().take();
    if let (Ok(()), Some((upgrade, passage))) = (served, opened)
        && let Ok(upgraded) = upgrade.await
    {
        let _ = passage.tunnel(TokioIo::new(upgraded), &call.meter).await;
    }
}

impl Call {
    async fn answer(&self, request: Request<Incoming>, opened: &Opened) -> Answer {
        match self.passed_on(request, opened).await {
            Ok(answer) => answer,
            Err(refusal) => refused(refusal),
        }
    }

    async fn passed_on(
        &self,
        mut request: Request<Incoming>,
        opened: &Opened,
    ) -> Result<Answer, ProxyRefusal> {
        let asked = address_of(&request)?;
        let credential = self.credentials.iter().find(|credential| credential.covers(&asked));
        let url = credential.map_or_else(|| asked.clone(), |credential| credential.address(&asked));
        let target = Target::of(&url, false);
        let sent = self.judge.admit(request.method(), target).await?;
        let tenant = self.judge.tenant();
        let passed = async {
            if request.method() == Method::CONNECT {
                let passage = self.client.tunnel_end(&url, &self.addresses, &tenant).await?;
                *opened.lock() = Some((hyper::upgrade::on(&mut request), passage));
                return Ok(Response::new(Either::Right(Full::default())));
            }
            let passage = self.client.passage(&url, &self.addresses, &tenant).await?;
            if let Some(credential) = credential {
                credential.add_to(request.headers_mut());
            }
            let mut answer = passage.send(&url, request, &self.meter).await?;
            if let Some(credential) = credential {
                credential.relocate(answer.headers_mut());
            }
            Ok(answer.map(Either::Left))
        };
        let passed: Result<Answer, OutboundError> = passed.await;
        let failure = passed.as_ref().err().map(ToString::to_string);
        sent.settle(failure.as_deref());
        Ok(passed?)
    }
}

/// The address that a request is for, which must be the same however it is read.
fn address_of(request: &Request<Incoming>) -> Result<Url, ProxyRefusal> {
    let uri = request.uri();
    let is_tunnel = request.method() == Method::CONNECT;
    let written = match (uri.scheme_str(), uri.authority()) {
        (None, Some(authority)) if is_tunnel && authority.port_u16().is_some() => {
            format!("https://{authority}/")
        }
        (Some("http"), Some(_)) if !is_tunnel => uri.to_string(),
        (Some("https"), _) => {
            return Err(ProxyRefusal::malformed("https requests must use CONNECT"));
        }
        _ => {
            let usage = "this is a proxy: ask for http://HOST/PATH, or CONNECT HOST:PORT";
            return Err(ProxyRefusal::malformed(usage));
        }
    };
    let url = address::read(&written)
        .map_err(|why| ProxyRefusal::malformed(&format!("the address {why}")))?;
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next();
    let is_named = host.is_none_or(|host| names(host, &url, is_tunnel));
    if !is_named || hosts.next().is_some() {
        return Err(ProxyRefusal::malformed("the Host header names another host than the address"));
    }
    Ok(url)
}

/// Whether a Host header means the host and the port of this address. That of a tunnel may leave
/// out the port.
fn names(host: &HeaderValue, url: &Url, is_tunnel: bool) -> bool {
    let Some(host) = host.to_str().ok().filter(|host| !host.contains(['/', '?', '#'])) else {
        return false;
    };
    let named = address::read(&format!("{}://{host}/", url.scheme()));
    named.is_ok_and(|named| {
        let same_port = named.port_or_known_default() == url.port_or_known_default();
        named.host() == url.host() && (same_port || (is_tunnel && named.port().is_none()))
    })
}

fn refused(ProxyRefusal { status, reason }: ProxyRefusal) -> Answer {
    let mut answer = Response::new(Either::Right(Full::from(format!("{reason}\n"))));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    let mut phrase: String =
        reason.chars().filter(|c| c.is_ascii() && !c.is_ascii_control()).collect();
    phrase.truncate(MAX_PHRASE);
    if let Ok(phrase) = ReasonPhrase::try_from(phrase) {
        answer.extensions_mut().insert(phrase);
    }
    answer
}
