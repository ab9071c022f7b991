//! OpenAI's Chat Completions API, spoken by OpenAI, llama-server, vLLM, Ollama's `/v1` and many more.
//!
//! One call, one HTTP request. The body is [`request`]'s, the meaning of an answer [`response`]'s; the
//! connection, its limits and what its failures are reported as are [`wire`](super::wire)'s. How long a
//! call may take as a whole, and whether it is repeated, is the router's.

mod request;
mod response;

use async_trait::async_trait;

use super::frames::Framing;
use super::wire::{Api, KeyHeader, Wire, WireSettings, WireSettingsError};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError};

const API: Api = Api { path: &["chat", "completions"], key: KeyHeader::Bearer, headers: &[], framing: Framing::Sse };

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
}

#[async_trait]
impl Provider for OpenAi {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let body = request::body(request).map_err(|e| self.wire.error(FailureKind::BadRequest, &e.to_string()))?;
        let answer = self.wire.json(body).await?;
        response::parse(&answer, request.step).map_err(|unusable| self.wire.unusable(unusable))
    }
}
