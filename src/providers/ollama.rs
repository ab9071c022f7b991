//! Ollama's `/api/chat`.
//!
//! One call, one HTTP request. The body is [`request`]'s, the meaning of an answer, whole or a line
//! at a time, [`response`]'s. The connection, its limits and what its failures are reported as are
//! [`wire`](super::wire)'s; how long a call may take as a whole, and whether it is repeated, is the
//! router's. The API has no `tool_choice` and no switch for parallel calls: what cannot be asked
//! for is left out here, and made up for by whoever asks. Source: docs/api.md and api/types.go of
//! Ollama, 2026.

mod request;
mod response;

use async_trait::async_trait;

use self::response::Fold;
use super::frames::Framing;
use super::received::Unusable;
use super::wire::{Api, Frames, KeyHeader, Streamed, Wire, WireSettings, WireSettingsError};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError};

const API: Api =
    Api { path: &["api", "chat"], key: KeyHeader::Bearer, headers: &[], framing: Framing::Lines };

/// A server that speaks Ollama's own API.
#[derive(Debug)]
pub struct Ollama {
    wire: Wire,
}

impl Ollama {
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
            fold.line(&frame.data, request.step, request.deltas).map_err(unusable)?;
        }
        fold.finish(self.wire.name()).map_err(unusable)
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
impl Provider for Ollama {
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
        let mut fold = Fold::default();
        let read = fold.line(&answer, request.step, request.deltas);
        read.and_then(|()| fold.finish(self.wire.name()))
            .map_err(|unusable| self.wire.unusable(unusable))
    }
}
