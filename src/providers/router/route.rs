//! A resolved model name, and how the answers of its provider are processed.

use super::refusal_gate::Refusal;
use super::{Answer, ModelCall, ProviderState, adapt};
use crate::message::Usage;
use crate::providers::capabilities::Capabilities;
use crate::providers::normalization::{self, Unusable};
use crate::providers::prices::Price;
use crate::providers::{
    Completion, FailureKind, ModelRequest, ProviderError, ToolChoice, estimate,
};

/// A resolved model name.
#[derive(Clone, Copy)]
pub struct Route<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    pub capabilities: Capabilities,
    pub price: Option<Price>,
    pub(super) state: &'a ProviderState,
}

impl Route<'_> {
    pub(super) fn answer(
        &self,
        mut completion: Completion,
        request: &ModelRequest<'_>,
        call: &ModelCall,
        fallback: bool,
    ) -> Answer {
        let has_more_calls = normalization::leave_out_calls(&mut completion);
        let reported = completion.usage;
        let usage = reported.unwrap_or_else(|| {
            let model = format!("{}/{}", self.provider, self.model);
            estimate::usage(request.conversation, request.tools, &completion, model)
        });
        Answer {
            completion,
            usage: self.priced(usage),
            provider: self.provider.to_owned(),
            model: self.model.to_owned(),
            retries: call.failed,
            latency_ms: u64::try_from(call.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            fallback,
            warnings: adapt::loses_choice(request, &self.capabilities)
                .then(|| self.lost_choice(&request.tool_choice))
                .into_iter()
                .chain(has_more_calls)
                .collect(),
        }
    }

    /// The usage with its cost, if there is a price.
    pub(super) fn priced(&self, usage: Usage) -> Usage {
        Usage { cost_micro_usd: self.price.map(|price| price.of(&usage)), ..usage }
    }

    /// The error, its usage with the cost.
    pub(super) fn charged(&self, error: ProviderError) -> ProviderError {
        let usage = error.usage.map(|usage| Box::new(self.priced(normalization::capped(*usage))));
        ProviderError { usage, ..error }
    }

    fn lost_choice(&self, choice: &ToolChoice) -> String {
        let required = match choice {
            ToolChoice::Tool(name) => format!("a call of {name}"),
            _ => "a tool call".to_owned(),
        };
        let (provider, model) = (self.provider, self.model);
        format!(
            "{provider}/{model} cannot be made to answer with {required}: its answer is checked instead."
        )
    }

    pub(super) fn timed_out(&self) -> ProviderError {
        let seconds = self.state.entry.timeout.as_secs_f64();
        self.transient(format!("no complete answer within {seconds} s"))
    }

    pub(super) fn bounded(&self, completion: Completion) -> Result<Completion, ProviderError> {
        let usage = completion.usage.map(Box::new);
        normalization::bounded(completion).map_err(|unusable| match unusable {
            Unusable::Malformed(message) => ProviderError { usage, ..self.transient(message) },
            Unusable::Error(reported) => self.transient(reported.message),
        })
    }

    /// The failure of a call that is not made because others were refused.
    pub(super) fn refused(&self, refusal: Refusal) -> ProviderError {
        self.failure(refusal.kind, refusal.to_string())
    }

    fn transient(&self, message: String) -> ProviderError {
        self.failure(FailureKind::Transient, message)
    }

    pub(super) fn failure(&self, kind: FailureKind, message: String) -> ProviderError {
        ProviderError {
            provider: self.provider.to_owned(),
            kind,
            status: None,
            code: None,
            message,
            retry_after: None,
            should_retry: None,
            usage: None,
        }
    }
}
