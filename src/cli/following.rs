//! Following one run to its end over its event stream, across broken connections.
//!
//! After a break it goes on behind the last event that it has handed out, so nothing is shown twice
//! and nothing is missed. What is shown of an event, and what an interrupt does, is the commands'.

use std::time::{Duration, Instant};

use axum::body::{Body, BodyDataStream};
use futures::StreamExt as _;
use http::Method;
use serde_json::Value;
use uuid::Uuid;

use super::client::{Client, ClientError};
use crate::bounds::frames::{Frame, Framing, Splitter};

/// Largest event that is read, in bytes.
const MAX_EVENT: usize = 64 << 20;
/// How long a service may be away before its follower gives up.
const PATIENCE: Duration = Duration::from_mins(1);
/// The pause before a new try: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// A run that is followed.
pub(super) struct Following<'c> {
    client: &'c Client,
    run_id: Uuid,
    /// The last event that was handed out; 0 before the first.
    seen: i64,
    stream: Option<(BodyDataStream, Splitter)>,
    /// The pause before the next try.
    pause: Duration,
    /// Since when the service has not let itself be reached.
    away: Option<Instant>,
}

/// One event as it was sent: `{seq, type, at, run_id, data}`.
pub(super) struct Entry(pub(super) Value);

impl Entry {
    /// The answer of the run, if this is its last event.
    pub(super) fn answer(&self) -> Option<&Value> {
        self.0.pointer("/data/run")
    }

    /// Whether the run may wait for somebody now.
    pub(super) fn asks(&self) -> bool {
        let kind = self.0.get("type").and_then(Value::as_str);
        matches!(kind, Some("approval.requested" | "tool_call.awaiting_client"))
    }
}

impl<'c> Following<'c> {
    /// Follows an existing run from its first event.
    pub(super) fn existing(client: &'c Client, run_id: Uuid) -> Self {
        Self { client, run_id, seen: 0, stream: None, pause: Duration::ZERO, away: None }
    }

    /// Follows a run that is started by this request, whose body names its id.
    pub(super) async fn started(
        client: &'c Client,
        run_id: Uuid,
        path: &str,
        body: &Value,
    ) -> Result<Self, ClientError> {
        let mut following = Self::existing(client, run_id);
        match client.stream(Method::POST, path, Some(body), None).await {
            Ok(stream) => following.attach(stream),
            // It may have arrived; if it has, the run is there.
            Err(lost @ ClientError::Unreachable { sent: true, .. }) => match following
                .connect()
                .await
            {
                Err(ClientError::Refused(refusal)) if refusal.status == 404 => return Err(lost),
                other => other?,
            },
            Err(refused) => return Err(refused),
        }
        Ok(following)
    }

    /// The next event. May be dropped and called again. Nothing follows the run's last event.
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
                    splitter.push(&bytes).map_err(|e| ClientError::Strange(e.to_string()))?;
                }
                Some(Err(_)) | None => self.stream = None,
            }
        }
    }

    /// An event that was not handed out before.
    fn take(&mut self, frame: &Frame) -> Result<Option<Entry>, ClientError> {
        let Ok(seq) = frame.id.parse::<i64>() else { return Ok(None) };
        if seq <= self.seen {
            return Ok(None);
        }
        let event =
            serde_json::from_slice(&frame.data).map_err(|e| ClientError::Strange(e.to_string()))?;
        self.seen = seq;
        self.pause = FIRST_PAUSE;
        Ok(Some(Entry(event)))
    }

    /// Tries once, after a pause unless it is the first time. A service that was there before may
    /// be away for a while.
    async fn reconnect(&mut self) -> Result<(), ClientError> {
        tokio::time::sleep(self.pause).await;
        let was_there = !self.pause.is_zero();
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        match self.connect().await {
            Ok(()) => self.away = None,
            Err(error) => {
                let away = self.away.get_or_insert_with(Instant::now).elapsed();
                if !was_there || !error.may_pass() || away > PATIENCE {
                    return Err(error);
                }
            }
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
