//! OpenAI's Responses API, for models that reason between tool calls and for those that speak
//! nothing else.
//!
//! Stateless: nothing is stored at the provider, and what it wants to see again (encrypted
//! reasoning) goes back with the conversation, byte for byte. The body is [`request`]'s, the
//! meaning of an answer [`response`]'s, how a streamed one is followed [`stream`]'s; the connection
//! is [`wire`](super::wire)'s, repeating is the router's.
//!
//! The API: <https://platform.openai.com/docs/api-reference/responses>.

mod request;
mod response;
mod stream;

use async_trait::async_trait;

use super::frames::Framing;
use super::wire::{Api, Frames, KeyHeader, Streamed, Wire, WireSettings, WireSettingsError};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError};

const API: Api =
    Api { path: &["responses"], key: KeyHeader::Bearer, headers: &[], framing: Framing::Sse };

/// A server that speaks Responses.
#[derive(Debug)]
pub struct Responses {
    wire: Wire,
}

impl Responses {
    /// Prepares the connection pool; nothing is sent yet.
    ///
    /// # Errors
    /// [`WireSettingsError`] where the settings cannot be sent.
    pub fn new(settings: WireSettings) -> Result<Self, WireSettingsError> {
        Ok(Self { wire: Wire::new(settings, &API)? })
    }

    /// Follows a stream to the event that ends it.
    async fn follow(
        &self,
        mut frames: Frames<'_>,
        request: &ModelRequest<'_>,
    ) -> Result<Completion, ProviderError> {
        let mut answer = stream::Answer::default();
        while let Some(frame) = frames.next().await? {
            let whole = answer.take(&frame.data, request.deltas, self.wire.name(), request.step);
            if let Some(completion) = whole.map_err(|unusable| self.wire.unusable(unusable))? {
                return Ok(completion);
            }
        }
        Err(self.wire.malformed("the stream broke off before the response was complete"))
    }
}

/// The JSON text that a request is sent as, for a provider of this name.
///
/// # Errors
/// The request cannot be written down as JSON.
pub fn body(request: &ModelRequest<'_>, provider: &str) -> Result<Vec<u8>, serde_json::Error> {
    request::body(request, provider)
}

#[async_trait]
impl Provider for Responses {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let body = body(request, self.wire.name());
        let body = body.map_err(|e| self.wire.error(FailureKind::BadRequest, &e.to_string()))?;
        let answer = if request.deltas.are_followed() {
            match self.wire.stream(body, request.trace).await? {
                Streamed::Frames(frames) => return self.follow(frames, request).await,
                Streamed::Whole(answer) => answer,
            }
        } else {
            self.wire.json(body, request.trace).await?
        };
        response::parse(&answer, self.wire.name(), request.step)
            .map_err(|unusable| self.wire.unusable(unusable))
    }
}
