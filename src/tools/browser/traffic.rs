//! The requests of a page: the browser holds each request; it is judged by the permit of the current
//! call, sent by the outbound client and counted, and its answer is handed to the page.
//!
//! There is no network between calls, nor for connections that the browser cannot hold (sockets,
//! requests of service workers).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH,
    CONTENT_TYPE, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use http::{HeaderMap, Method};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::chromium::Chromium;
use crate::bounds::address;
use crate::bounds::memory::TenantSemaphore;
use crate::governance::{Decision, LaterRuling, Permit};
use crate::outbound::{AddressPolicy, Client, Request, Response, Terms};
use crate::run::Target;
use crate::tools::requests::Requests;

/// Requests of one page, of the pages of one tenant, and of all pages, that are sent at the same time;
/// further ones wait.
const CONNECTIONS: usize = 6;
const CONNECTIONS_OF_TENANT: usize = 24;
const ALL_CONNECTIONS: usize = 32;
static PLACES: LazyLock<TenantSemaphore> =
    LazyLock::new(|| TenantSemaphore::with_share(ALL_CONNECTIONS, CONNECTIONS_OF_TENANT));
/// Answers that are handed to the browser at the same time: each is in memory three times then.
static HANDED_OVER: Semaphore = Semaphore::const_new(2);
/// Bytes of an answer, decompressed.
const MAX_BODY: usize = 5 * 1024 * 1024;
/// Bytes of all answers to one call.
const MAX_BYTES: usize = 64 * 1024 * 1024;
/// Bytes of a request's body.
const MAX_SENT: usize = 1024 * 1024;
/// Bytes of the bodies of all requests of a page that are not answered.
const MAX_SENT_AT_ONCE: usize = 8 * MAX_SENT;
/// Headers about the connection, or about an encoding that is undone here.
const CONNECTION_HEADERS: [HeaderName; 4] =
    [CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION];
/// Why a request is not sent whose body is not there as it would be sent.
const NO_BODY: &str = "a request with a file, or with a body of more than 1 MiB, is not sent";
/// The same where other requests of its page have large bodies.
const TOO_MANY_BODIES: &str = "the page sends more than 8 MiB at once";

/// The permit and the counters for the requests of a page during a call.
#[derive(Clone)]
pub(super) struct NetworkAccess {
    permit: Permit,
    requests: Requests,
    received: Arc<AtomicUsize>,
    ended: CancellationToken,
}

impl NetworkAccess {
    pub(super) fn new(permit: Permit, requests: Requests) -> Self {
        Self { permit, requests, received: Arc::default(), ended: CancellationToken::new() }
    }
}

/// The traffic of one page.
pub(super) struct Traffic {
    client: Client,
    timeout: Duration,
    connections: Semaphore,
    /// Bytes that further bodies may have.
    sent_at_once: Semaphore,
    access: Mutex<Option<NetworkAccess>>,
    under_way: AtomicUsize,
    /// Answers of the call under way that the browser stores and does not show.
    files: AtomicUsize,
    last: Mutex<Latest>,
}

/// When the last request was made, and when anything was made or answered.
#[derive(Clone, Copy)]
struct Latest {
    request: Instant,
    anything: Instant,
}

impl Latest {
    fn now() -> Self {
        Self { request: Instant::now(), anything: Instant::now() }
    }
}

/// Ends the network access of a page with the call, and drops requests in progress.
pub(super) struct OpenAccess<'a>(&'a Traffic);

impl Drop for OpenAccess<'_> {
    fn drop(&mut self) {
        if let Some(access) = self.0.access.lock().take() {
            access.ended.cancel();
        }
    }
}

/// Counts a request until it is answered.
struct UnderWay<'a>(&'a Traffic);

impl<'a> UnderWay<'a> {
    fn new(traffic: &'a Traffic) -> Self {
        traffic.under_way.fetch_add(1, Ordering::AcqRel);
        *traffic.last.lock() = Latest::now();
        Self(traffic)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.last.lock().anything = Instant::now();
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Traffic {
    pub(super) fn new(client: Client, timeout: Duration) -> Self {
        Self {
            client,
            timeout,
            connections: Semaphore::new(CONNECTIONS),
            sent_at_once: Semaphore::new(MAX_SENT_AT_ONCE),
            access: Mutex::default(),
            under_way: AtomicUsize::new(0),
            files: AtomicUsize::new(0),
            last: Latest::now().into(),
        }
    }

    /// Gives the page the network access of this call, until the returned guard is dropped.
    pub(super) fn open(&self, access: NetworkAccess) -> OpenAccess<'_> {
        *self.access.lock() = Some(access);
        self.files.store(0, Ordering::Relaxed);
        *self.last.lock() = Latest::now();
        OpenAccess(self)
    }

    /// Whether no request is in progress, and none was for that long.
    pub(super) fn is_quiet(&self, pause: Duration) -> bool {
        self.under_way.load(Ordering::Acquire) == 0 && self.last.lock().anything.elapsed() >= pause
    }

    /// Whether no request was made for that long, although some are not answered.
    pub(super) fn is_stalled_for(&self, pause: Duration) -> bool {
        self.last.lock().request.elapsed() >= pause
    }

    /// How many answers to the call under way the browser stores and does not show.
    pub(super) fn files(&self) -> usize {
        self.files.load(Ordering::Relaxed)
    }

    /// Answers a request that the browser holds.
    pub(super) async fn answer(&self, chromium: &Chromium, session: &str, mut paused: Value) {
        let _counted = UnderWay::new(self);
        let held = paused.get_mut("request").map(Value::take).unwrap_or_default();
        let id = &paused["requestId"];
        let response = self.fetched(held).await;
        let Some(response) = response else {
            let failure = json!({"requestId": id, "errorReason": "BlockedByClient"});
            let _ = chromium.call(Some(session), "Fetch.failRequest", failure).await; // the page may be gone
            return;
        };
        let Ok(_place) = HANDED_OVER.acquire().await else { return };
        if paused["resourceType"] == "Document" && is_file(&response.headers) {
            self.files.fetch_add(1, Ordering::Relaxed);
        }
        let fulfilled = fulfilled(id, &response);
        drop(response);
        let _ = chromium.call(Some(session), "Fetch.fulfillRequest", fulfilled).await; // the same
    }

    /// The answer to a request; `None` where it is refused or failed, which is noted.
    async fn fetched(&self, held: Value) -> Option<Response> {
        let access = self.access.lock().clone()?;
        let url = address::read(held["url"].as_str()?).ok()?;
        let method = Method::from_bytes(held["method"].as_str()?.as_bytes()).ok()?;
        let target = Target::of(&url, false);
        let headers = headers_of(&held)?;
        let body = self.admitted_body(&held);
        drop(held); // it has the body twice, and the request may wait for its turn
        let ruling = match &body {
            Ok(_) => access.permit.ruling_on(&target),
            Err(why) => LaterRuling {
                decision: Decision::Blocked,
                rule: "network",
                pattern: None,
                reason: Some((*why).to_owned()),
            },
        };
        let admitted = access.requests.ask(method.as_str(), target, ruling).await.ok()?;
        let (body, _room) = body.ok()?;
        let request = Request { method, url, headers, body };
        let sent = access.ended.run_until_cancelled(self.send(request, &access)).await?;
        access.requests.settle(admitted, sent.as_ref().err().map(String::as_str));
        sent.ok()
    }

    /// The body of a request, with the permit that it holds until the request is answered; or why the
    /// request is not sent.
    fn admitted_body(&self, held: &Value) -> Result<(Bytes, SemaphorePermit<'_>), &'static str> {
        let body = body_of(held).ok_or(NO_BODY)?;
        let bytes = u32::try_from(body.len()).map_err(|_| NO_BODY)?;
        let room = self.sent_at_once.try_acquire_many(bytes);
        room.map(|room| (body, room)).map_err(|_| TOO_MANY_BODIES)
    }

    async fn send(&self, request: Request, access: &NetworkAccess) -> Result<Response, String> {
        let closing = |_| "the service is closing".to_owned();
        let tenant = access.requests.tenant();
        let _connection = self.connections.acquire().await.map_err(closing)?;
        let _place = PLACES.acquire(&tenant).await; // never closed
        let left = MAX_BYTES.saturating_sub(access.received.load(Ordering::Relaxed));
        if left == 0 {
            return Err(format!("the page has read {MAX_BYTES} bytes in this call"));
        }
        let host = address::shown_host(&request.url);
        let private = access.permit.private_networks().iter().copied();
        let addresses = AddressPolicy::public_and(private);
        let terms = Terms {
            addresses: &addresses,
            judge: &|_: &Url| Ok(()), // was judged, and redirects are the browser's to follow
            redirects: 0,
            deadline: self.timeout,
            max_body: MAX_BODY.min(left),
            tenant: &tenant,
        };
        let response =
            self.client.send(request, &terms).await.map_err(|error| error.to_string())?;
        access.received.fetch_add(response.body.len(), Ordering::Relaxed);
        if !response.is_whole {
            return Err(format!("an answer of {host} has more than {} bytes", terms.max_body));
        }
        Ok(response)
    }
}

/// The headers of a request as the browser would send them.
fn headers_of(held: &Value) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in held["headers"].as_object()? {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        headers.append(name, HeaderValue::from_str(value.as_str()?).ok()?);
    }
    headers.remove(ACCEPT_ENCODING);
    Some(headers)
}

/// The body of a request; `None` where the browser does not report all of it, or where it is too long.
fn body_of(held: &Value) -> Option<Bytes> {
    let entries = held["postDataEntries"].as_array();
    if held["hasPostData"] == true && entries.is_none_or(Vec::is_empty) {
        return None;
    }
    let mut body = Vec::new();
    for entry in entries.into_iter().flatten() {
        body.extend(BASE64_STANDARD.decode(entry["bytes"].as_str()?).ok()?);
    }
    (body.len() <= MAX_SENT).then(|| Bytes::from(body))
}

/// Whether the browser stores an answer instead of showing it, as far as its headers show.
fn is_file(headers: &HeaderMap) -> bool {
    let value = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let disposition = value(CONTENT_DISPOSITION).trim_start().to_ascii_lowercase();
    let kind = value(CONTENT_TYPE).trim_start().to_ascii_lowercase();
    let is_stored = |kind: &str| {
        ["application/octet-stream", "application/zip", "application/gzip"]
            .iter()
            .any(|stored| kind.starts_with(stored))
    };
    disposition.starts_with("attachment") || is_stored(&kind)
}

fn fulfilled(id: &Value, response: &Response) -> Value {
    let headers = response.headers.iter().filter(|(name, _)| !CONNECTION_HEADERS.contains(name));
    let headers = headers.map(|(name, value)| {
        json!({"name": name.as_str(), "value": String::from_utf8_lossy(value.as_bytes())})
    });
    json!({
        "requestId": id,
        "responseCode": response.status.as_u16(),
        "responseHeaders": headers.collect::<Vec<_>>(),
        "body": BASE64_STANDARD.encode(&response.body),
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn no_tenant_sends_all_requests_of_pages() {
        let take = |tenant| PLACES.acquire(tenant).now_or_never().flatten();
        let of_one: Vec<_> = std::iter::from_fn(|| take("one")).collect();
        assert_eq!(of_one.len(), CONNECTIONS_OF_TENANT);
        assert!(take("other").is_some());
    }

    #[test]
    fn the_bodies_that_a_page_sends_at_once_are_bounded() {
        let traffic = Traffic::new(Client::new(), Duration::ZERO);
        let large = BASE64_STANDARD.encode("x".repeat(MAX_SENT));
        let held = json!({"hasPostData": true, "postDataEntries": [{"bytes": large}]});
        let take = || traffic.admitted_body(&held);
        let bodies: Vec<_> = std::iter::from_fn(|| take().ok()).collect();
        assert_eq!(bodies.len(), MAX_SENT_AT_ONCE / MAX_SENT);
        assert_eq!(take().err(), Some(TOO_MANY_BODIES));
        assert!(traffic.admitted_body(&json!({})).is_ok());
        drop(bodies);
        assert!(take().is_ok());
    }

    #[test]
    fn only_whole_bodies_are_sent() {
        let entry = |text: &str| json!({"bytes": BASE64_STANDARD.encode(text)});
        let body =
            |held: Value| body_of(&held).map(|body| String::from_utf8_lossy(&body).into_owned());
        assert_eq!(body(json!({})).as_deref(), Some(""));
        let whole = json!({"hasPostData": true, "postDataEntries": [entry("a="), entry("b")]});
        assert_eq!(body(whole).as_deref(), Some("a=b"));
        assert_eq!(body(json!({"hasPostData": true})), None);
        assert_eq!(body(json!({"hasPostData": true, "postDataEntries": []})), None);
        assert_eq!(body(json!({"hasPostData": true, "postDataEntries": [entry("a"), {}]})), None);
        let long = "x".repeat(MAX_SENT + 1);
        assert_eq!(body(json!({"hasPostData": true, "postDataEntries": [entry(&long)]})), None);
    }
}
