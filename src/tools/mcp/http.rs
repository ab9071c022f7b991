//! A server at an address: each message is a POST, answered by JSON or by a stream of events (the
//! streamable HTTP of the protocol, without the stream that a client may open beside).
//!
//! In the old era there are sessions, and a request is cancelled by a notification. In the new one
//! headers repeat parts of the body, and closing the connection cancels a request.
//!
//! Requests go only to the host and port that the operator configured, through the outbound client.
//! The size of an answer is bounded, and a stream is read up to the awaited message. How often the list
//! of tools is requested is decided elsewhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT};
use http::{HeaderMap, Method, StatusCode};
use parking_lot::Mutex;
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use url::Url;

use super::era::{self, DISCOVER, Era};
use super::messages::{self, CALL, Failure, INITIALIZE, MAX_MESSAGE, MAX_WAIT, ServerMessage};
use super::{header_parameters, reading};
use crate::bounds::address;
use crate::bounds::frames::{Framing, Splitter};
use crate::bounds::memory::TenantSemaphore;
use crate::bounds::secrets::without_known_secrets;
use crate::bounds::text::bare_type;
use crate::outbound::{
    AddressPolicy, Client, MAX_REDIRECTS, OutboundError, Request, Terms, Wanted,
};
use crate::tools::requests::Requests;

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const METHOD: HeaderName = HeaderName::from_static("mcp-method");
const NAME: HeaderName = HeaderName::from_static("mcp-name");
/// Bytes of a session's name.
const MAX_SESSION: usize = 1024;
/// For one request; the call has a limit of its own, which is shorter as a rule.
const DEADLINE: Duration = Duration::from_mins(10);
/// Calls that are under way at the same time, those of one tenant and all; further ones wait.
const MAX_CALLS_OF_TENANT: usize = 32;
const MAX_CALLS: usize = 64;
/// Questions of the server's that are answered in one stream.
const MAX_REPLIES: usize = 8;
/// The error of a request in a session that the server no longer knows.
const SESSION_ENDED: &str = "it does not know the session any more";
/// Bytes of a refusal that are reported.
const MAX_SHOWN: usize = 200;

type Answer = Result<Value, Failure>;

/// The client's handle on a server.
#[derive(Clone)]
pub(super) struct Address(Arc<Shared>);

struct Shared {
    url: Url,
    key: Option<SecretString>,
    client: Client,
    addresses: AddressPolicy,
    next: AtomicU64,
    session: Mutex<Session>,
    /// Held while a new session is begun.
    renewing: tokio::sync::Mutex<()>,
    places: TenantSemaphore,
    list_changed: Arc<Notify>,
    /// Notified when the server has lost the session, or does not answer.
    lost: Arc<Notify>,
}

#[derive(Clone, Default)]
struct Session {
    name: Option<HeaderValue>,
    version: Option<HeaderValue>,
}

/// A request to the server.
pub(super) struct Question {
    pub(super) era: Era,
    pub(super) method: &'static str,
    pub(super) params: Value,
    /// Arguments that headers repeat.
    pub(super) parameter_headers: HeaderMap,
}

impl Question {
    fn of_old(method: &'static str, params: Value) -> Self {
        Self { era: Era::Old, method, params, parameter_headers: HeaderMap::new() }
    }

    /// The headers that the new era requires.
    fn headers(&self) -> HeaderMap {
        let mut headers = self.parameter_headers.clone();
        headers.insert(VERSION, HeaderValue::from_static(messages::NEW_VERSION));
        headers.insert(METHOD, HeaderValue::from_static(self.method));
        let name = self.params["name"].as_str().and_then(header_parameters::header_value);
        headers.extend(name.map(|name| (NAME, name)));
        headers
    }
}

/// The state of reading a stream of events.
struct Stream {
    splitter: Splitter,
    id: u64,
    /// Whether requests of the server are answered.
    replies_to_questions: bool,
    answer: Option<Result<Value, messages::Fault>>,
    /// Replies to requests of the server, which it waits for.
    replies: Vec<String>,
    /// How many replies there have been.
    replied: usize,
    list_changed: bool,
    /// Why it is not read further.
    broken: Option<String>,
}

/// A pending request; the server is notified when its answer is no longer needed.
struct PendingRequest {
    address: Address,
    id: u64,
    is_open: bool,
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if self.is_open
            && let Ok(runtime) = Handle::try_current()
        {
            let (address, id) = (self.address.clone(), self.id);
            runtime.spawn(async move {
                address.tell(messages::cancellation(id)).await;
            });
        }
    }
}

impl Stream {
    /// Reads more of the stream; returns whether that is enough.
    fn takes(&mut self, bytes: &[u8]) -> bool {
        if let Err(error) = self.splitter.push(bytes) {
            self.broken = Some(error.to_string());
            return true;
        }
        while let Some(frame) = self.splitter.next() {
            match messages::parse(&frame.data) {
                Ok(ServerMessage::Answer(id, answer)) if id == self.id => {
                    self.answer = Some(answer);
                    return true;
                }
                Ok(ServerMessage::ListChanged) => self.list_changed = true,
                Ok(ServerMessage::Ping(reply) | ServerMessage::Refused(reply))
                    if self.replies_to_questions && self.replied < MAX_REPLIES =>
                {
                    self.replied += 1;
                    self.replies.push(reply);
                }
                Ok(_) => {}
                Err(why) => {
                    self.broken = Some(why);
                    return true;
                }
            }
        }
        false
    }
}

impl Address {
    pub(super) fn new(
        url: Url,
        key: Option<SecretString>,
        client: Client,
        list_changed: Arc<Notify>,
        lost: Arc<Notify>,
    ) -> Self {
        Self(Arc::new(Shared {
            url,
            key,
            client,
            addresses: AddressPolicy::any(),
            next: AtomicU64::new(1),
            session: Mutex::default(),
            renewing: tokio::sync::Mutex::default(),
            places: TenantSemaphore::with_share(MAX_CALLS, MAX_CALLS_OF_TENANT),
            list_changed,
            lost,
        }))
    }

    pub(super) async fn ask(&self, question: &Question, requests: &Requests) -> Answer {
        let closed = || Failure::NotSent("the service is closing".to_owned());
        // Only calls need a permit: health checks must not wait for calls.
        let _place = match question.method {
            CALL => Some(self.0.places.acquire(&requests.tenant()).await.ok_or_else(closed)?),
            _ => None,
        };
        let session = self.session();
        match self.send_request(question, requests).await {
            Err(Failure::NotSent(why)) if why == SESSION_ENDED => {
                self.begin_another(session).await?;
                self.send_request(question, requests).await
            }
            answer => answer,
        }
    }

    async fn send_request(&self, question: &Question, requests: &Requests) -> Answer {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let Question { era, method, params, .. } = question;
        let is_open = *era == Era::Old && *method != INITIALIZE;
        let mut asked = PendingRequest { address: self.clone(), id, is_open };
        let request = messages::request(id, method, params);
        let answer = self.posted(request, id, question, requests).await;
        asked.is_open = false;
        if let Err(Failure::Refused(fault)) = &answer {
            if era::may_have_changed(*era, fault) {
                self.doubt(question);
            } else if fault.code == era::HEADER_MISMATCH {
                self.0.list_changed.notify_one(); // other arguments may be wanted in headers
            }
        }
        answer
    }

    /// Reports that the server may be gone or replaced. A failure of the first request is handled by its
    /// sender instead.
    fn doubt(&self, question: &Question) {
        if question.method != DISCOVER {
            self.0.lost.notify_one();
        }
    }

    fn session(&self) -> Option<HeaderValue> {
        self.0.session.lock().name.clone()
    }

    /// Begins a session in the place of one that has ended, unless that was done in the meantime.
    async fn begin_another(&self, ended: Option<HeaderValue>) -> Result<(), Failure> {
        let _renewing = self.0.renewing.lock().await;
        if self.session() != ended {
            return Ok(());
        }
        let question = Question::of_old(INITIALIZE, messages::initialize_params());
        let unpaid = Requests::default();
        let introduced = tokio::time::timeout(MAX_WAIT, self.send_request(&question, &unpaid));
        let introduced = introduced.await.map_err(|_| Failure::NotSent(SESSION_ENDED.into()))??;
        self.introduced(&introduced).await.map_err(Failure::NotSent)
    }

    /// Completes the handshake with the server's answer to `initialize`.
    ///
    /// # Errors
    /// Why client and server have no common version: a phrase.
    pub(super) async fn introduced(&self, said: &Value) -> Result<(), String> {
        let version = HeaderValue::from_static(messages::version_in(said)?);
        self.0.session.lock().version = Some(version);
        self.tell(messages::initialized()).await;
        Ok(())
    }

    /// Sends a notification.
    pub(super) async fn tell(&self, message: String) {
        let (unpaid, mut nothing) =
            (Requests::default(), |_: &HeaderMap, _: &[u8]| Wanted::Nothing);
        let sent = self.send(message, None, &unpaid, &mut nothing);
        let _ = tokio::time::timeout(MAX_WAIT, sent).await; // what is lost is found out by asking
    }

    async fn posted(
        &self,
        message: String,
        id: u64,
        question: &Question,
        requests: &Requests,
    ) -> Answer {
        let is_old = question.era == Era::Old;
        let mut stream = Stream {
            splitter: Splitter::new(Framing::Sse, MAX_MESSAGE),
            id,
            replies_to_questions: is_old,
            answer: None,
            replies: Vec::new(),
            replied: 0,
            list_changed: false,
            broken: None,
        };
        let mut enough = |headers: &HeaderMap, bytes: &[u8]| {
            if !is_stream(headers) {
                return Wanted::Whole;
            }
            let is_enough = stream.takes(bytes);
            for reply in stream.replies.drain(..) {
                let address = self.clone();
                tokio::spawn(async move { address.tell(reply).await });
            }
            if is_enough { Wanted::Nothing } else { Wanted::Rest(stream.splitter.pending()) }
        };
        let session = self.session().filter(|_| is_old && question.method != INITIALIZE);
        let sent = self.send(message, Some(question), requests, &mut enough).await;
        if stream.list_changed {
            self.0.list_changed.notify_one();
        }
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => {
                self.doubt(question);
                let (why, was_sent) = (error.to_string(), !error.was_not_sent());
                return Err(if was_sent { Failure::Lost(why) } else { Failure::NotSent(why) });
            }
        };
        if session.is_some() && is_of_lost_session(answer.status, &answer.body) {
            return Err(Failure::NotSent(SESSION_ENDED.to_owned()));
        }
        if !answer.status.is_success() {
            let failure = refusal(question.era, answer.status, &answer.body);
            if matches!(failure, Failure::Lost(_)) {
                self.doubt(question);
            }
            return Err(failure);
        }
        let named = answer.headers.get(SESSION).filter(|name| is_old && name.len() <= MAX_SESSION);
        if named.is_some() || question.method == INITIALIZE {
            self.0.session.lock().name = named.cloned();
        }
        let unreadable = |why: &str| Failure::Lost(format!("its answer cannot be read: {why}"));
        if is_stream(&answer.headers) {
            let said = stream.answer.ok_or_else(|| {
                unreadable(stream.broken.as_deref().unwrap_or("the stream ends before it"))
            })?;
            return said.map_err(Failure::Refused);
        }
        if !answer.is_whole {
            return Err(unreadable("it is too large"));
        }
        match reading::read(answer.body, &requests.tenant()).await {
            Ok(ServerMessage::Answer(of, said)) if of == id => said.map_err(Failure::Refused),
            Ok(_) => Err(unreadable("it answers something else")),
            Err(why) => Err(unreadable(&why)),
        }
    }

    async fn send(
        &self,
        message: String,
        question: Option<&Question>,
        requests: &Requests,
        enough: &mut crate::outbound::Enough<'_>,
    ) -> Result<crate::outbound::Response, OutboundError> {
        let Shared { url, client, addresses, .. } = &*self.0;
        let stays = |asked: &Url| {
            if address::is_same_origin(asked, url) {
                return Ok(());
            }
            Err("it redirects to another host, which is not followed".to_owned())
        };
        let tenant = requests.tenant();
        let terms = Terms {
            addresses,
            judge: &stays,
            redirects: MAX_REDIRECTS,
            deadline: DEADLINE,
            max_body: MAX_MESSAGE,
            tenant: &tenant,
        };
        let request = Request {
            method: Method::POST,
            url: url.clone(),
            headers: self.headers(question),
            body: Bytes::from(message),
        };
        client.send_until(request, &terms, &requests.counting(), enough).await
    }

    fn headers(&self, question: Option<&Question>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, HeaderValue::from_static("toolloop"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let accepted = HeaderValue::from_static("application/json, text/event-stream");
        headers.insert(ACCEPT, accepted);
        let key = self.0.key.as_ref().map(|key| format!("Bearer {}", key.expose_secret()));
        if let Some(mut key) = key.and_then(|key| HeaderValue::try_from(key).ok()) {
            key.set_sensitive(true);
            headers.insert(AUTHORIZATION, key);
        }
        if let Some(question) = question.filter(|question| question.era == Era::New) {
            headers.extend(question.headers());
            return headers;
        }
        if question.is_some_and(|question| question.method == INITIALIZE) {
            return headers; // of a session that begins
        }
        let Session { name, version } = self.0.session.lock().clone();
        headers.extend(name.map(|name| (SESSION, name)));
        headers.extend(version.map(|version| (VERSION, version)));
        headers
    }
}

fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    bare_type(kind) == "text/event-stream"
}

/// Whether the server has lost the session, and so has done nothing: 404 by the specification; servers
/// built with the TypeScript SDK answer 400 and say so in words.
fn is_of_lost_session(status: StatusCode, body: &[u8]) -> bool {
    let names_session = || {
        let fault = messages::fault_in(body);
        fault.is_some_and(|fault| fault.message.to_ascii_lowercase().contains("session id"))
    };
    status == StatusCode::NOT_FOUND || status == StatusCode::BAD_REQUEST && names_session()
}

/// The failure that an error status means.
fn refusal(era: Era, status: StatusCode, body: &[u8]) -> Failure {
    let fault = messages::fault_in(body).filter(|_| status.is_client_error());
    if let Some(fault) = fault.filter(|fault| era == Era::New || era::is_of_new_era(fault)) {
        return Failure::Refused(fault);
    }
    if status == StatusCode::NOT_FOUND || status.is_server_error() {
        return Failure::Lost(format!("it answers {status}"));
    }
    let said = String::from_utf8_lossy(body);
    let said = without_known_secrets(&said); // before one of them is cut in two
    let said: String = said.chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect();
    Failure::Refused(messages::Fault {
        code: status.as_u16().into(),
        message: said,
        data: Value::Null,
    })
}
