//! The part that all adapters for HTTP APIs share: one model call is one HTTP request.
//!
//! A [`Dialect`] writes the body and reads the answer, whole or frame by frame; the connection, its
//! limits and how its failures are reported belong to [`wire`](super::wire). The timeout of the
//! whole call and retries are the router's.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;

use super::normalization::{self, Unusable};
use super::wire::{Api, Frames, MAX_ANSWER, Streamed, Wire, WireSettings, WireSettingsError};
use super::{
    Completion, Delta, Deltas, FailureKind, ModelRequest, Provider, ProviderError, estimate,
};
use crate::message::Usage;

/// One API: how a request is written and how an answer is read. Pure.
pub(super) trait Dialect: Sync {
    fn api(&self) -> &'static Api;

    fn body(
        &self,
        request: &ModelRequest<'_>,
        provider: &str,
    ) -> Result<Vec<u8>, serde_json::Error>;

    /// Reads an answer that came in one piece.
    fn parse(&self, answer: &[u8], call: Call<'_>) -> Result<Completion, Unusable>;

    /// The usage that an unusable answer reports.
    fn usage(&self, answer: &[u8]) -> Option<Usage>;

    /// An empty answer, to be filled from a stream.
    fn stream(&self) -> Box<dyn StreamedAnswer>;
}

/// An answer that is put together from the frames of a stream.
pub(super) trait StreamedAnswer: Send {
    /// Adds the data of one frame and sends its deltas; true once the answer is complete.
    fn push(&mut self, frame: &[u8], call: Call<'_>) -> Result<bool, Unusable>;

    /// The usage of the answer, as far as it was reported.
    fn usage(&self) -> Option<Usage>;

    /// The completion, or an error if the stream ended before the answer was complete.
    fn finish(self: Box<Self>, call: Call<'_>) -> Result<Completion, Unusable>;
}

/// The call that an answer belongs to.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    /// The provider's name in our configuration.
    pub(super) provider: &'a str,
    /// Without the provider.
    pub(super) model: &'a str,
    /// Part of the ids that are generated for tool calls without one.
    pub(super) step: u32,
    pub(super) deltas: Deltas<'a>,
}

/// A model server that is called over HTTP.
pub struct HttpProvider {
    wire: Wire,
    dialect: &'static dyn Dialect,
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.wire.fmt(f)
    }
}

impl HttpProvider {
    /// Prepares the connection pool; nothing is sent yet.
    pub(super) fn new(
        settings: WireSettings,
        dialect: &'static dyn Dialect,
    ) -> Result<Self, WireSettingsError> {
        Ok(Self { wire: Wire::new(settings, dialect.api())?, dialect })
    }

    fn read(&self, answer: &[u8], call: Call<'_>) -> Result<Completion, ProviderError> {
        let parsed = self.dialect.parse(answer, call);
        parsed.map_err(|unusable| self.unusable(unusable, self.dialect.usage(answer)))
    }

    /// An unusable answer still has a usage, because the provider charges for it.
    fn unusable(&self, unusable: Unusable, usage: Option<Usage>) -> ProviderError {
        charged(self.wire.unusable(unusable), usage)
    }

    async fn read_stream(
        &self,
        mut frames: Frames<'_>,
        call: Call<'_>,
    ) -> Result<Completion, ProviderError> {
        let mut answer = self.dialect.stream();
        loop {
            let next = frames.next().await.map_err(|error| charged(error, answer.usage()))?;
            let Some(frame) = next else { break };
            let pushed = answer.push(&frame.data, call);
            if pushed.map_err(|unusable| self.unusable(unusable, answer.usage()))? {
                break;
            }
        }
        let usage = answer.usage();
        answer.finish(call).map_err(|unusable| self.unusable(unusable, usage))
    }

    /// The error for an answer that is too large, with its estimated usage: it is charged, and has at least as many
    /// bytes as the limit.
    fn estimated(&self, error: ProviderError, request: &ModelRequest<'_>) -> ProviderError {
        let model = format!("{}/{}", self.wire.name(), request.model);
        let written = estimate::tokens(MAX_ANSWER);
        let usage = estimate::with_output(request.conversation, request.tools, written, model);
        charged(error, Some(usage))
    }

    async fn complete_with(
        &self,
        request: &ModelRequest<'_>,
        deltas: Deltas<'_>,
    ) -> Result<Completion, ProviderError> {
        let provider = self.wire.name();
        let call = Call { provider, model: request.model, step: request.step, deltas };
        let body = self.dialect.body(request, provider);
        let body = body.map_err(|e| self.wire.error(FailureKind::BadRequest, &e.to_string()))?;
        let mut completion = if deltas.are_wanted() {
            match self.wire.stream(body, request.trace).await? {
                Streamed::Frames(frames) => self.read_stream(frames, call).await?,
                Streamed::Whole(answer) => self.read(&answer, call)?,
            }
        } else {
            self.read(&self.wire.json(body, request.trace).await?, call)?
        };
        if completion.bytes() > 0 {
            completion.usage = completion.usage.filter(normalization::is_believable);
        }
        if completion.bytes() > MAX_ANSWER {
            let usage = completion.usage.map(Box::new);
            return Err(ProviderError { usage, ..self.wire.too_large() });
        }
        Ok(completion)
    }
}

/// The error for an answer with this usage, which the provider charges although the answer is lost.
fn charged(error: ProviderError, usage: Option<Usage>) -> ProviderError {
    let usage = usage.filter(normalization::is_believable).map(Box::new);
    ProviderError { usage, ..error }
}

#[async_trait]
impl Provider for HttpProvider {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let has_begun = AtomicBool::new(false);
        let pass_on = |delta: Delta| {
            has_begun.fetch_or(delta.bytes() > 0, Ordering::Relaxed);
            request.deltas.send(delta);
        };
        let receiver: &(dyn Fn(Delta) + Send + Sync) = &pass_on;
        let deltas = Deltas(request.deltas.are_wanted().then_some(receiver));
        let completed = self.complete_with(request, deltas).await;
        completed.map_err(|error| match error.kind {
            // The receiver of its pieces knows the size of an answer that has begun.
            FailureKind::TooLarge
                if error.usage.is_none() && !has_begun.load(Ordering::Relaxed) =>
            {
                self.estimated(error, request)
            }
            _ => error,
        })
    }
}
