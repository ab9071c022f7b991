//! OpenAI's Responses API, for models that reason between tool calls and for those that speak
//! nothing else.
//!
//! Stateless: nothing is stored at the provider; encrypted reasoning, which it needs to see again,
//! is sent back with the conversation, byte for byte. [`request`] writes the body, [`response`]
//! reads a whole answer and [`stream`] a streamed one; [`adapter`](super::adapter) makes the call.
//!
//! The API: <https://platform.openai.com/docs/api-reference/responses>.

mod request;
mod response;
mod stream;

use super::adapter::{Call, Dialect, HttpProvider, StreamedAnswer};
use super::normalization::Unusable;
use super::wire::{Api, KeyHeader, WireSettings, WireSettingsError};
use super::{Completion, ModelRequest};
use crate::bounds::frames::Framing;
use crate::message::Usage;

const API: Api =
    Api { path: &["responses"], key: KeyHeader::Bearer, headers: &[], framing: Framing::Sse };

struct Responses;

/// A server that speaks Responses.
///
/// # Errors
/// [`WireSettingsError`] if no request can be sent with these settings.
pub fn provider(settings: WireSettings) -> Result<HttpProvider, WireSettingsError> {
    HttpProvider::new(settings, &Responses)
}

/// The JSON text that a request is sent as, for a provider of this name.
///
/// # Errors
/// The request cannot be serialised.
pub fn body(request: &ModelRequest<'_>, provider: &str) -> Result<Vec<u8>, serde_json::Error> {
    request::body(request, provider)
}

impl Dialect for Responses {
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
        Box::<Stream>::default()
    }
}

#[derive(Default)]
struct Stream {
    answer: stream::Answer,
    completion: Option<Completion>,
}

impl StreamedAnswer for Stream {
    fn push(&mut self, frame: &[u8], call: Call<'_>) -> Result<bool, Unusable> {
        self.completion = self.answer.take(frame, call.deltas, call.provider, call.step)?;
        Ok(self.completion.is_some())
    }

    fn usage(&self) -> Option<Usage> {
        self.answer.usage()
    }

    fn finish(self: Box<Self>, _: Call<'_>) -> Result<Completion, Unusable> {
        self.completion.ok_or_else(|| {
            Unusable::Malformed("the stream broke off before the response was complete".into())
        })
    }
}
