//! Anthropic's Messages API.
//!
//! One call, one HTTP request. The body is [`request`]'s and its history [`messages`]'s, the
//! meaning of an answer [`response`]'s, and of one that comes in pieces [`stream`]'s. The
//! connection, its limits and what its failures are reported as are [`wire`](super::wire)'s; how
//! long a call may take as a whole, and whether it is repeated, is the router's. Source:
//! platform.claude.com, "Messages" and "Streaming Messages", version 2023-06-01.

mod messages;
mod request;
mod response;
mod schema;
mod stream;
mod thinking;

use async_trait::async_trait;

use self::stream::Fold;
use super::frames::Framing;
use super::received::Unusable;
use super::wire::{Api, Frames, KeyHeader, Streamed, Wire, WireSettings, WireSettingsError};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError};

const API: Api = Api {
    path: &["v1", "messages"],
    key: KeyHeader::XApiKey,
    headers: &[("anthropic-version", "2023-06-01")],
    framing: Framing::Sse,
};

/// A server that speaks Messages.
#[derive(Debug)]
pub struct Anthropic {
    wire: Wire,
}

impl Anthropic {
    /// Prepares the connection pool; nothing is sent yet.
    ///
    /// # Errors
    /// [`WireSettingsError`] where the settings cannot be sent.
    pub fn new(settings: WireSettings) -> Result<Self, WireSettingsError> {
        Ok(Self { wire: Wire::new(settings, &API)? })
    }

    async fn followed(
        &self,
        mut frames: Frames<'_>,
        request: &ModelRequest<'_>,
    ) -> Result<Completion, ProviderError> {
        let unusable = |unusable: Unusable| self.wire.unusable(unusable);
        let mut fold = Fold::default();
        while !fold.is_complete() {
            let Some(frame) = frames.next().await? else { break };
            fold.event(&frame.data, request.deltas).map_err(unusable)?;
        }
        fold.finish(self.wire.name(), request.step).map_err(unusable)
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
impl Provider for Anthropic {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let body = body(request, self.wire.name());
        let body = body.map_err(|e| self.wire.error(FailureKind::BadRequest, &e.to_string()))?;
        let answer = if request.deltas.are_followed() {
            match self.wire.stream(body, request.trace).await? {
                Streamed::Frames(frames) => return self.followed(frames, request).await,
                Streamed::Whole(answer) => answer,
            }
        } else {
            self.wire.json(body, request.trace).await?
        };
        response::parse(&answer, self.wire.name(), request.step)
            .map_err(|unusable| self.wire.unusable(unusable))
    }
}
