//! Anthropic's Messages API.
//!
//! [`request`] writes the body and [`messages`] its conversation, [`response`] reads a whole answer
//! and [`stream`] a streamed one; [`adapter`](super::adapter) makes the call. Source:
//! platform.claude.com, "Messages" and "Streaming Messages", version 2023-06-01.

mod messages;
mod property_names;
mod request;
mod response;
mod schema;
mod stream;
mod thinking;

use self::stream::Fold;
use super::adapter::{Call, Dialect, HttpProvider, StreamedAnswer};
use super::normalization::Unusable;
use super::wire::{Api, KeyHeader, WireSettings, WireSettingsError};
use super::{Completion, ModelRequest};
use crate::bounds::frames::Framing;
use crate::message::Usage;

const API: Api = Api {
    path: &["v1", "messages"],
    key: KeyHeader::XApiKey,
    headers: &[("anthropic-version", "2023-06-01")],
    framing: Framing::Sse,
};

struct Messages;

/// A server that speaks Messages.
///
/// # Errors
/// [`WireSettingsError`] if no request can be sent with these settings.
pub fn provider(settings: WireSettings) -> Result<HttpProvider, WireSettingsError> {
    HttpProvider::new(settings, &Messages)
}

pub(super) use self::thinking::beside as thinking_beside;

/// The JSON text that a request is sent as, for a provider of this name.
///
/// # Errors
/// The request cannot be serialised.
pub fn body(request: &ModelRequest<'_>, provider: &str) -> Result<Vec<u8>, serde_json::Error> {
    request::body(request, provider)
}

impl Dialect for Messages {
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
        response::parse(answer, call.provider, call.step)
    }

    fn usage(&self, answer: &[u8]) -> Option<Usage> {
        response::usage_of(answer)
    }

    fn stream(&self) -> Box<dyn StreamedAnswer> {
        Box::<Fold>::default()
    }
}

impl StreamedAnswer for Fold {
    fn push(&mut self, frame: &[u8], call: Call<'_>) -> Result<bool, Unusable> {
        self.event(frame, call.deltas)?;
        Ok(self.is_complete())
    }

    fn usage(&self) -> Option<Usage> {
        self.whole_usage()
    }

    fn finish(self: Box<Self>, call: Call<'_>) -> Result<Completion, Unusable> {
        (*self).completion(call.provider, call.step)
    }
}
