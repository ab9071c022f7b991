//! OpenAI's Chat Completions API, spoken by OpenAI, llama-server, vLLM, Ollama's `/v1` and many
//! more.
//!
//! [`request`] writes the body, [`response`] reads a whole answer and [`stream`] a streamed one;
//! [`adapter`](super::adapter) makes the call.

pub(super) mod effort;
mod reasoning;
mod request;
mod response;
mod stream;
pub(super) mod strict;

use url::Url;

pub(super) use self::request::call_ids;
use super::adapter::{Call, Dialect, HttpProvider, StreamedAnswer};
use super::normalization::Unusable;
use super::wire::{Api, KeyHeader, WireSettings, WireSettingsError};
use super::{Completion, ModelRequest};
use crate::bounds::frames::Framing;
use crate::message::Usage;

const API: Api = Api {
    path: &["chat", "completions"],
    key: KeyHeader::Bearer,
    headers: &[],
    framing: Framing::Sse,
};

/// Characters of a tool's description, of which the API refuses more.
pub(super) const MAX_DESCRIPTION: usize = 1024;

/// Ends every stream.
const DONE: &[u8] = b"[DONE]";

struct ChatCompletions(Arguments);

/// How the arguments of earlier calls are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    /// As the model wrote them, even malformed: OpenAI takes any text.
    AsWritten,
    /// Malformed ones within an object: compatible servers read them, and refuse the request if
    /// they cannot.
    Readable,
}

impl Arguments {
    fn of(server: &Url) -> Self {
        let is_openai = |host: &str| host == "openai.com" || host.ends_with(".openai.com");
        if server.host_str().is_some_and(is_openai) { Self::AsWritten } else { Self::Readable }
    }
}

/// A server that speaks Chat Completions.
///
/// # Errors
/// [`WireSettingsError`] if no request can be sent with these settings.
pub fn provider(settings: WireSettings) -> Result<HttpProvider, WireSettingsError> {
    let dialect: &'static ChatCompletions = match Arguments::of(&settings.base_url) {
        Arguments::AsWritten => &ChatCompletions(Arguments::AsWritten),
        Arguments::Readable => &ChatCompletions(Arguments::Readable),
    };
    HttpProvider::new(settings, dialect)
}

/// The JSON text that a request is sent as, for a compatible server that is a provider of this name.
///
/// # Errors
/// The request cannot be serialised.
pub fn body(request: &ModelRequest<'_>, provider: &str) -> Result<Vec<u8>, serde_json::Error> {
    request::body(request, provider, Arguments::Readable)
}

impl Dialect for ChatCompletions {
    fn api(&self) -> &'static Api {
        &API
    }

    fn body(
        &self,
        request: &ModelRequest<'_>,
        provider: &str,
    ) -> Result<Vec<u8>, serde_json::Error> {
        request::body(request, provider, self.0)
    }

    fn parse(&self, answer: &[u8], call: Call<'_>) -> Result<Completion, Unusable> {
        response::parse(answer, call)
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
    is_done: bool,
}

impl StreamedAnswer for Stream {
    fn push(&mut self, frame: &[u8], call: Call<'_>) -> Result<bool, Unusable> {
        self.is_done = frame.trim_ascii() == DONE;
        if !self.is_done {
            self.answer.take(frame, call.deltas)?;
        }
        Ok(self.is_done)
    }

    fn usage(&self) -> Option<Usage> {
        self.answer.usage()
    }

    fn finish(self: Box<Self>, call: Call<'_>) -> Result<Completion, Unusable> {
        if !self.is_done {
            return Err(Unusable::Malformed("the stream broke off before [DONE]".into()));
        }
        self.answer.finish(call)
    }
}
