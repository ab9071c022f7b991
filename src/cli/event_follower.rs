//! Follows one run to its end over its event stream, across broken connections.
//!
//! After a disconnect it resumes after the last event that it returned, so that no event is repeated
//! or lost. How events are shown, and what an interrupt does, is decided by the commands.

use std::time::{Duration, Instant};

use axum::body::{Body, BodyDataStream};
use futures::StreamExt as _;
use http::Method;
use serde_json::Value;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::client::{Client, ClientError, READ_TIMEOUT};
use super::kinds::EVENT;
use crate::bounds::frames::{Frame, Framing, Splitter};

/// Largest event that is read, in bytes.
const MAX_EVENT: usize = 64 << 20;
/// How long the service may be unreachable before this gives up.
pub(super) const RECONNECT_TIMEOUT: Duration = Duration::from_mins(1);
/// Minimum and maximum delay before reconnecting.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(100);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(3);

pub(super) struct EventFollower<'c> {
    client: &'c Client,
    run_id: Uuid,
    /// The sequence number of the last event returned; 0 before the first.
    seen: i64,
    stream: Option<(BodyDataStream, Splitter)>,
    /// The delay before the next try.
    pause: Duration,
    /// Since when connecting has failed.
    unreachable_since: Option<Instant>,
}

/// An event as it was received: `{seq, type, at, run_id, data}`.
pub(super) struct Entry(pub(super) Value);

impl Entry {
    /// The JSON response of the invocation, if this is the last event.
    pub(super) fn answer(&self) -> Option<&Value> {
        self.0.pointer("/data/run")
    }

    /// What the run is after this event, if it is parked then. A child waits for an approval as a rule.
    pub(super) fn parked_as(&self) -> Option<&'static str> {
        let of = |path: &str| self.0.pointer(path).and_then(Value::as_str);
        match (of("/type")?, of("/data/kind")) {
            ("approval.requested", Some("review")) => Some("needs_review"),
            ("approval.requested" | "tool_call.awaiting_child", _) => Some("awaiting_approval"),
            ("tool_call.awaiting_client", _) => Some("awaiting_tool_results"),
            _ => None,
        }
    }
}

impl<'c> EventFollower<'c> {
    /// Follows an existing run from its first event.
    pub(super) fn existing(client: &'c Client, run_id: Uuid) -> Self {
        Self {
            client,
            run_id,
            seen: 0,
            stream: None,
            pause: Duration::ZERO,
            unreachable_since: None,
        }
    }

    /// Starts a run with this request, whose body contains `run_id`, and follows it. The service must
    /// begin to answer within [`READ_TIMEOUT`], however long the run takes.
    pub(super) async fn started(
        client: &'c Client,
        run_id: Uuid,
        path: &str,
        body: &Value,
    ) -> Result<Self, ClientError> {
        let until = tokio::time::Instant::now() + READ_TIMEOUT;
        let mut following = Self::existing(client, run_id);
        match client.stream(Method::POST, path, Some(body), None).await {
            Ok(stream) => following.attach(stream),
            // The request may have arrived; in that case the run exists.
            Err(lost @ ClientError::Unreachable { sent: true, .. }) => {
                match timeout_at(until, following.connect()).await {
                    Err(_) => return Err(lost),
                    Ok(Err(ClientError::Refused(refusal))) if refusal.status == 404 => {
                        return Err(lost);
                    }
                    Ok(connected) => connected?,
                }
            }
            Err(refused) => return Err(refused),
        }
        Ok(following)
    }

    /// The next event; cancel-safe. Must not be called after the run's last event.
    pub(super) async fn next(&mut self) -> Result<Entry, ClientError> {
        loop {
            let Some((stream, splitter)) = &mut self.stream else {
                self.reconnect().await?;
                continue;
            };
            if let Some(frame) = splitter.next() {
                if let Some(entry) = self.take(&frame)? {
                    return Ok(entry);
                }
                continue;
            }
            match stream.next().await {
                Some(Ok(bytes)) => {
                    splitter
                        .push(&bytes)
                        .map_err(|e| ClientError::UnexpectedResponse(e.to_string()))?;
                }
                Some(Err(_)) | None => self.stream = None,
            }
        }
    }

    /// Parses a message; `None` if its event was returned before.
    fn take(&mut self, frame: &Frame) -> Result<Option<Entry>, ClientError> {
        let Ok(seq) = frame.id.parse::<i64>() else { return Ok(None) };
        if seq <= self.seen {
            return Ok(None);
        }
        let event = serde_json::from_slice(&frame.data).map_err(|e| e.to_string());
        let event = event.and_then(|it| EVENT.of(it)).map_err(ClientError::UnexpectedResponse)?;
        self.seen = seq;
        self.pause = FIRST_PAUSE;
        self.unreachable_since = None;
        Ok(Some(Entry(event)))
    }

    /// Tries to connect once, after a delay unless it is the first time. Transient errors are ignored
    /// for [`RECONNECT_TIMEOUT`] once a connection has succeeded, and so are streams without an event
    /// before the first event.
    async fn reconnect(&mut self) -> Result<(), ClientError> {
        tokio::time::sleep(self.pause).await;
        let was_there = !self.pause.is_zero();
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        let since = *self.unreachable_since.get_or_insert_with(Instant::now);
        let connected = self.connect().await;
        let is_away = since.elapsed() > RECONNECT_TIMEOUT;
        match connected {
            Ok(()) if self.seen > 0 => self.unreachable_since = None,
            Ok(()) if is_away => {
                let what = "event streams without an event".to_owned();
                return Err(ClientError::UnexpectedResponse(what));
            }
            Err(error) if !was_there || !error.is_transient() || is_away => return Err(error),
            Ok(()) | Err(_) => {}
        }
        Ok(())
    }

    async fn connect(&mut self) -> Result<(), ClientError> {
        let path = format!("/runs/{}/events", self.run_id);
        let last = (self.seen > 0).then_some(self.seen);
        let stream = self.client.stream(Method::GET, &path, None, last).await?;
        self.attach(stream);
        Ok(())
    }

    fn attach(&mut self, stream: Body) {
        self.pause = self.pause.max(FIRST_PAUSE);
        self.stream = Some((stream.into_data_stream(), Splitter::new(Framing::Sse, MAX_EVENT)));
    }
}
