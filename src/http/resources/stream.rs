//! Events of a run as Server-Sent Events (WHATWG HTML, section 9.2).
//!
//! `id` is the event's sequence number, `event` its type, `data` the whole event on one line
//! (Unicode line separators are escaped, too); the last event's `data.run` is the JSON answer of the
//! invocation. Parts of a model's response
//! (`model.delta`) and progress of calls (`tool_call.progress`) have no `id`. A frame is serialized once
//! for all readers. A stream that ends early
//! says where to resume. [`crate::runtime::Follower`] guarantees order and completeness.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use futures::{StreamExt, stream};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::redaction;
use super::run_views::Run;
use crate::event::{Event, ModelDelta, ToolProgress};
use crate::fairness::{CpuAccount, FairTask};
use crate::http::edge::auth::{Credential, credential_lost};
use crate::http::state::App;
use crate::message::visible::on_one_line;
use crate::run::Caller;
use crate::runtime::{FollowEnd, Follower, PagePermit, Published, Runtime, StreamItem};
use crate::store::{Store, StoreError};

/// Interval of keep-alive comments.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How long, and how often, a store that does not answer is asked before the stream ends: with many
/// streams at once its connections may be busy for a while.
const MAX_WAIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(250);

/// Frames that wait for a client to read them.
const BUFFERED_FRAMES: usize = 1;

/// Streams the events with a sequence number above `after`, until the run ends.
///
/// A task of its own reads them. A body is only polled while its client reads: one that asked the
/// store itself would keep its connection from all others for as long as its client does not read.
pub(crate) fn response(
    app: &App,
    viewer: Viewer<'_>,
    run: Uuid,
    after: i64,
    follower: Follower,
    cancel: Option<CancelOnDrop>,
) -> Response {
    let (watched, credential) = (app.clone(), viewer.credential.clone());
    let lost = tokio::spawn(async move { credential_lost(&watched, &credential).await });
    let reader = Reader {
        app: app.clone(),
        credential_lost: AbortOnDropHandle::new(lost),
        tenant: viewer.tenant.to_owned(),
        run,
        follower: follower.for_client(),
        seen: after,
        is_over: false,
        cancel,
        _open: OpenStream::new(),
    };
    let (frames, mut read) = mpsc::channel::<Frame>(BUFFERED_FRAMES);
    let payer = CpuAccount::tenant(&reader.tenant);
    tokio::spawn(FairTask::new(payer, reader.read(frames)));
    let mut unsent = None;
    let frames = stream::poll_fn(move |context| {
        drop(unsent.take()); // the connection asks for more when little of it is left
        let frame = ready!(read.poll_recv(context));
        Poll::Ready(frame.map(|Frame { text, page }| {
            unsent = page;
            text
        }))
    });
    let body = Body::from_stream(frames.map(Ok::<_, Infallible>));
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, [("x-accel-buffering", "no")], body).into_response()
}

/// Who reads a stream.
#[derive(Clone, Copy)]
pub(crate) struct Viewer<'a> {
    pub(crate) tenant: &'a str,
    /// It must stay valid.
    pub(crate) credential: &'a Credential,
}

/// What is sent at once, with the memory of what it was made of.
struct Frame {
    text: Bytes,
    page: Option<PagePermit>,
}

struct Reader {
    app: App,
    /// Ends when the credential is not valid any more.
    credential_lost: AbortOnDropHandle<()>,
    tenant: String,
    run: Uuid,
    follower: Follower,
    /// The sequence number of the last event that was sent.
    seen: i64,
    is_over: bool,
    cancel: Option<CancelOnDrop>,
    _open: OpenStream,
}

/// Counts the streams that are open.
struct OpenStream(metrics::Gauge);

impl OpenStream {
    fn new() -> Self {
        let open = metrics::gauge!("toolloop_streams_open");
        open.increment(1.0);
        Self(open)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

impl Reader {
    /// Reads until the run ends or the client goes away.
    async fn read(mut self, frames: mpsc::Sender<Frame>) {
        while !self.is_over {
            let text = tokio::select! {
                () = frames.closed() => return,
                text = self.next(&frames) => text,
            };
            let page = self.follower.page();
            if frames.send(Frame { text, page }).await.is_err() {
                return;
            }
        }
    }

    /// The next frame. The follower is never interrupted: a read of the journal that
    /// is given up costs a connection.
    async fn next(&mut self, frames: &mpsc::Sender<Frame>) -> Bytes {
        let news = {
            let mut news = std::pin::pin!(next_published(&mut self.follower));
            loop {
                tokio::select! {
                    biased;
                    _ = &mut self.credential_lost => break None,
                    news = &mut news => break Some(news),
                    () = tokio::time::sleep(KEEP_ALIVE) => {
                        // Where there is no room, a frame is waiting to be sent.
                        let text = Bytes::from_static(b": keep-alive\n\n");
                        let _ = frames.try_send(Frame { text, page: None });
                    }
                }
            }
        };
        match news {
            None => self.interrupted("the API key or token is revoked or has expired"),
            Some(Ok(Some(published))) => self.framed(&published).await,
            Some(Ok(None)) => match self.follower.end() {
                Some(FollowEnd::Deleted) => self.ended_with(": the run was deleted\n\n"),
                Some(FollowEnd::Unread) => {
                    self.ended_with(": the run has ended; its last event cannot be read\n\n")
                }
                _ => self.interrupted("the service is shutting down"),
            },
            Some(Err(StoreError::UnreadableEvent { seq, .. })) => {
                self.seen = seq;
                format!(": event {seq} cannot be read\n\n").into()
            }
            Some(Err(_)) => self.interrupted("the store is unavailable"),
        }
    }

    async fn framed(&mut self, published: &Published) -> Bytes {
        let Ok(frame) = frame(&self.app, &self.tenant, self.run, published).await else {
            return self.interrupted("the store is unavailable");
        };
        if let StreamItem::Event(event) = &published.item {
            self.seen = event.seq;
        }
        if published.item.is_the_end() {
            self.is_over = true;
            CancelOnDrop::disarm(self.cancel.take());
        }
        frame
    }

    /// The last comment of a stream that ends before its run.
    fn interrupted(&mut self, why: &str) -> Bytes {
        self.ended_with(&format!(": {why}; resume with Last-Event-ID: {}\n\n", self.seen))
    }

    fn ended_with(&mut self, comment: &str) -> Bytes {
        self.is_over = true;
        CancelOnDrop::disarm(self.cancel.take());
        comment.to_owned().into()
    }
}

/// The next item of a follower; `None` at the end of the run.
async fn next_published(follower: &mut Follower) -> Result<Option<Arc<Published>>, StoreError> {
    let until = Instant::now() + MAX_WAIT;
    loop {
        match follower.next().await {
            Err(error) if wait_to_retry(&error, until).await => {}
            answer => return answer,
        }
    }
}

/// Waits before a retry and returns true; false if a retry is useless or too late.
async fn wait_to_retry(error: &StoreError, until: Instant) -> bool {
    let may_answer = error.is_transient() && Instant::now() < until;
    if may_answer {
        tokio::time::sleep(PAUSE).await;
    }
    may_answer
}

async fn frame(
    app: &App,
    tenant: &str,
    run: Uuid,
    published: &Published,
) -> Result<Bytes, StoreError> {
    let make = async || match &published.item {
        StreamItem::Event(event) => event_frame(app.store.as_ref(), tenant, event).await,
        StreamItem::Large(_) => Ok(Bytes::new()), // its readers get the event from the journal
        StreamItem::Delta(_, at, delta) => Ok(live_frame(run, *at, ModelDelta::TYPE_NAME, delta)),
        StreamItem::Progress(at, said) => Ok(live_frame(run, *at, ToolProgress::TYPE_NAME, said)),
    };
    let until = Instant::now() + MAX_WAIT;
    loop {
        match published.frame.get_or_try_init(make).await {
            Err(error) if wait_to_retry(&error, until).await => {}
            answer => return answer.cloned(),
        }
    }
}

async fn event_frame(store: &Store, tenant: &str, event: &Event) -> Result<Bytes, StoreError> {
    let unwritable = |error: serde_json::Error| StoreError::Failed(error.to_string());
    let mut data = redaction::event_text(event).await?;
    if event.what.ending().is_some()
        && let Some(run) = store.run(tenant, event.run_id).await?
    {
        let mut whole: Value = serde_json::from_str(&data).map_err(unwritable)?;
        let run = Run::of(store, run).await?;
        whole["data"]["run"] = serde_json::to_value(run).map_err(unwritable)?;
        data = whole.to_string();
    }
    let data = on_one_line(&data);
    Ok(format!("event: {}\nid: {}\ndata: {data}\n\n", event.what.type_name(), event.seq).into())
}

/// Without an `id`, because it is not stored and cannot be replayed.
fn live_frame(run_id: Uuid, at: DateTime<Utc>, kind: &str, data: &impl Serialize) -> Bytes {
    let data = json!({"type": kind, "at": at, "run_id": run_id, "data": data}).to_string();
    format!("event: {kind}\ndata: {}\n\n", on_one_line(&data)).into()
}

/// Cancels the run when dropped, unless disarmed (`X-Cancel-On-Disconnect`).
pub(crate) struct CancelOnDrop {
    armed: Option<(Runtime, Arc<Caller>, Uuid)>,
}

impl CancelOnDrop {
    pub(crate) fn new(runtime: Runtime, caller: &Arc<Caller>, run: Uuid) -> Self {
        Self { armed: Some((runtime, Arc::clone(caller), run)) }
    }

    pub(crate) fn disarm(guard: Option<Self>) {
        if let Some(mut guard) = guard {
            guard.armed = None;
        }
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some((runtime, caller, run)) = self.armed.take() {
            tokio::spawn(async move {
                let (Caller { tenant, subject, .. }, reason) =
                    (caller.as_ref(), Some("The client disconnected."));
                if let Err(error) = runtime.cancel(tenant, run, subject, reason).await {
                    tracing::warn!(run_id = %run, %error, "a run could not be cancelled after its client disconnected");
                }
            });
        }
    }
}
