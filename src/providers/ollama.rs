//! Ollama's `/api/chat`.
//!
//! [`request`] writes the body, [`response`] reads an answer, whole or line by line;
//! [`adapter`](super::adapter) makes the call. The API has no `tool_choice` and no switch for
//! parallel calls: what it cannot express is left out here, and the engine checks the answer
//! instead. Source: docs/api.md and api/types.go of Ollama, 2026.

mod request;
mod response;

use self::response::Fold;
use super::adapter::{Call, Dialect, HttpProvider, StreamedAnswer};
use super::normalization::Unusable;
use super::wire::{Api, KeyHeader, WireSettings, WireSettingsError};
use super::{Completion, Deltas, ModelRequest};
use crate::bounds::frames::Framing;
use crate::message::Usage;

const API: Api =
    Api { path: &["api", "chat"], key: KeyHeader::Bearer, headers: &[], framing: Framing::Lines };

struct Chat;

/// A server that speaks Ollama's own API.
///
/// # Errors
/// [`WireSettingsError`] if no request can be sent with these settings.
pub fn provider(settings: WireSettings) -> Result<HttpProvider, WireSettingsError> {
    HttpProvider::new(settings, &Chat)
}

/// The JSON text that a request is sent as, for a provider of this name.
///
/// # Errors
/// The request cannot be serialised.
pub fn body(request: &ModelRequest<'_>, provider: &str) -> Result<Vec<u8>, serde_json::Error> {
    request::body(request, provider)
}

impl Dialect for Chat {
    fn api(&self) -> &'static Api {
        &API
    }

    fn body(
        &self,
        request: &ModelRequest<'_>,
        provider: &str,
    ) -> Result<Vec<u8>, serde_json::Error> {
        body(request, provider)
    }

    fn parse(&self, answer: &[u8], call: Call<'_>) -> Result<Completion, Unusable> {
        let mut fold = Fold::default();
        fold.line(answer, call.step, call.deltas)?;
        fold.completion(call.provider)
    }

    fn usage(&self, answer: &[u8]) -> Option<Usage> {
        let mut fold = Fold::default();
        fold.line(answer, 0, Deltas::default()).ok()?;
        fold.usage()
    }

    fn stream(&self) -> Box<dyn StreamedAnswer> {
        Box::<Fold>::default()
    }
}

impl StreamedAnswer for Fold {
    fn push(&mut self, frame: &[u8], call: Call<'_>) -> Result<bool, Unusable> {
        self.line(frame, call.step, call.deltas)?;
        Ok(self.is_complete())
    }

    fn usage(&self) -> Option<Usage> {
        self.usage()
    }

    fn finish(self: Box<Self>, call: Call<'_>) -> Result<Completion, Unusable> {
        (*self).completion(call.provider)
    }
}
