//! OpenAI's Chat Completions API, spoken by OpenAI, llama-server, vLLM, Ollama's `/v1` and many
//! more.
//!
//! One call, one HTTP request. The body is [`request`]'s, the meaning of an answer [`response`]'s,
//! how a streamed one is put together [`stream`]'s; the connection, its limits and what its
//! failures are reported as are [`wire`](super::wire)'s. How long a call may take as a whole, and
//! whether it is repeated, is the router's.

pub(super) mod effort;
pub(super) mod ids;
mod request;
mod response;
mod stream;
pub(super) mod strict;

use async_trait::async_trait;

use super::frames::Framing;
use super::wire::{Api, Frames, KeyHeader, Streamed, Wire, WireSettings, WireSettingsError};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError};

const API: Api = Api {
    path: &["chat", "completions"],
    key: KeyHeader::Bearer,
    headers: &[],
    framing: Framing::Sse,
};

/// Ends every stream.
const DONE: &[u8] = b"[DONE]";

/// A server that speaks Chat Completions.
#[derive(Debug)]
pub struct OpenAi {
    wire: Wire,
}

impl OpenAi {
    /// Prepares the connection pool; nothing is sent yet.
    ///
    /// # Errors
    /// [`WireSettingsError`] where the settings cannot be sent.
    pub fn new(settings: WireSettings) -> Result<Self, WireSettingsError> {
        Ok(Self { wire: Wire::new(settings, &API)? })
    }

    /// Follows a stream to its explicit end.
    async fn follow(
        &self,
        mut frames: Frames<'_>,
        request: &ModelRequest<'_>,
    ) -> Result<Completion, ProviderError> {
        let mut answer = stream::Answer::default();
        while let Some(frame) = frames.next().await? {
            if frame.data.trim_ascii() == DONE {
                return answer
                    .finish(request.step)
                    .map_err(|unusable| self.wire.unusable(unusable));
            }
            answer
                .take(&frame.data, request.deltas)
                .map_err(|unusable| self.wire.unusable(unusable))?;
        }
        Err(self.wire.malformed("the stream broke off before [DONE]"))
    }
}

/// The JSON text that a request is sent as.
///
/// # Errors
/// The request cannot be written down as JSON.
pub fn body(request: &ModelRequest<'_>) -> Result<Vec<u8>, serde_json::Error> {
    request::body(request)
}

#[async_trait]
impl Provider for OpenAi {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let body =
            body(request).map_err(|e| self.wire.error(FailureKind::BadRequest, &e.to_string()))?;
        let answer = if request.deltas.are_followed() {
            match self.wire.stream(body, request.trace).await? {
                Streamed::Frames(frames) => return self.follow(frames, request).await,
                Streamed::Whole(answer) => answer,
            }
        } else {
            self.wire.json(body, request.trace).await?
        };
        response::parse(&answer, request.step).map_err(|unusable| self.wire.unusable(unusable))
    }
}
