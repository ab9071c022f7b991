//! Resolves models to providers; the only place with retries and fallbacks.
//!
//! A try is made when the provider has a free slot, is not known to refuse ([`refusal_gate`]), and the
//! model's [`breaker`] is closed, after [`adapt`] removed what the model does not support. Transient
//! failures are retried ([`retry`]), refusals by all calls of a model together;
//! when that does not help, the next fallback model is tried, unless our request or key was
//! rejected. Providers never retry. The caller enforces the run's deadline and cancellation by
//! dropping the future; the engine keeps using a fallback for the rest of a run.

mod adapt;
mod breaker;
mod call;
mod large_requests;
mod refusal_gate;
mod retry;
mod route;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use self::breaker::{Breakers, Call};
pub use self::call::ModelCall;
use self::call::{CallState, may_fall_back, run_id};
use self::refusal_gate::{Gates, Outlook, RefusalGate};
pub use self::route::Route;
use super::capabilities::CapabilityTable;
use super::prices::PriceTable;
use super::{
    Completion, Delta, FailureKind, ModelRequest, Provider, ProviderError, anthropic, estimate,
};
use crate::bounds::nearest::meant;
use crate::message::Usage;
use crate::model::ProviderKind;
use crate::run::{Thinking, TraceSpan};

/// A provider with its retry settings.
#[derive(Clone)]
pub struct ProviderEntry {
    pub provider: Arc<dyn Provider>,
    pub kind: ProviderKind,
    /// Retries per model after transient failures; also after refusals if there is a fallback model.
    pub max_retries: u32,
    /// For how long calls wait out a series of refusals (429) without an answer in between.
    pub rate_limit_patience: Duration,
    /// The timeout of one try, from the request to the end of the answer.
    pub timeout: Duration,
    /// Concurrent tries; further ones wait in order. Absent: no limit.
    pub max_concurrency: Option<usize>,
}

impl ProviderEntry {
    /// Chat Completions, two retries, a minute of refusals, ten minutes per try, no concurrency limit.
    pub fn new(provider: Arc<dyn Provider>) -> Self {
        Self {
            provider,
            kind: ProviderKind::Openai,
            max_retries: 2,
            rate_limit_patience: Duration::from_mins(1),
            timeout: Duration::from_mins(10),
            max_concurrency: None,
        }
    }
}

/// All configured providers by name, with the tables of their models.
#[derive(Default)]
pub struct Router {
    providers: BTreeMap<String, ProviderState>,
    capabilities: CapabilityTable,
    prices: PriceTable,
    on_try: Option<OnTry>,
}

/// One finished try of a model call.
#[derive(Debug, Clone, Copy)]
pub struct Try<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    /// The call's place in a trace.
    pub trace: Option<TraceSpan>,
    /// Duration of the try; zero if the breaker rejected it.
    pub took: Duration,
    /// Duration of the call so far, earlier tries and delays included.
    pub call_took: Duration,
    pub error: Option<&'a ProviderError>,
    /// Whether no further try follows.
    pub is_last: bool,
}

/// Called after every try. Must not block.
pub type OnTry = Arc<dyn Fn(&Try<'_>) + Send + Sync>;

/// A provider with its concurrency slots and breakers.
struct ProviderState {
    entry: ProviderEntry,
    /// Fair: first come, first served.
    slots: Option<Semaphore>,
    breakers: Breakers,
    /// The gate for refusals that concern the whole account.
    account: RefusalGate,
}

/// A model name that cannot be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownModel {
    #[error("{0:?} is not a model name of the form provider/model")]
    Malformed(String),
    #[error(
        "there is no provider {provider:?}{}; configured: {}",
        meant(provider, .configured.iter().map(String::as_str)),
        .configured.join(", ")
    )]
    Provider { provider: String, configured: Vec<String> },
}

/// The result of a model call.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub completion: Completion,
    /// Estimated if the provider reported none; with the cost if there is a price.
    pub usage: Usage,
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Failed tries before the answer, of all models.
    pub retries: u32,
    /// Milliseconds from the first try to the answer, delays included.
    pub latency_ms: u64,
    /// Whether a fallback model answered.
    pub fallback: bool,
    /// For the caller: a tool choice that could not be sent.
    pub warnings: Vec<String>,
}

/// A model call that failed for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{provider}/{model} failed after {attempts} attempt(s): {}", .error.message)]
pub struct ModelFailure {
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Index of the last model among the given ones.
    pub place: usize,
    /// Tries made, of all models; 0 if none was possible.
    pub attempts: u32,
    /// Of the last try.
    pub error: ProviderError,
}

impl Router {
    /// With the shipped capabilities and without prices.
    pub fn new(providers: BTreeMap<String, ProviderEntry>) -> Self {
        let state = |entry: ProviderEntry| ProviderState {
            slots: entry
                .max_concurrency
                .map(|slots| Semaphore::new(slots.clamp(1, Semaphore::MAX_PERMITS))),
            breakers: Breakers::default(),
            account: RefusalGate::default(),
            entry,
        };
        let providers = providers.into_iter().map(|(name, entry)| (name, state(entry))).collect();
        Self { providers, ..Self::default() }
    }

    #[must_use]
    pub fn with_tables(self, capabilities: CapabilityTable, prices: PriceTable) -> Self {
        Self { capabilities, prices, ..self }
    }

    #[must_use]
    pub fn observed_by(self, on_try: OnTry) -> Self {
        Self { on_try: Some(on_try), ..self }
    }

    /// Finds the provider of a `provider/model`. Whether the provider has the model is not known
    /// before a call.
    ///
    /// # Errors
    /// [`UnknownModel`] if the name is malformed or the provider not configured.
    pub fn resolve<'a>(&'a self, model: &'a str) -> Result<Route<'a>, UnknownModel> {
        let (provider, model) = match model.split_once('/') {
            Some((provider, name)) if !provider.is_empty() && !name.is_empty() => (provider, name),
            _ => return Err(UnknownModel::Malformed(model.to_owned())),
        };
        let Some(state) = self.providers.get(provider) else {
            let configured = self.providers.keys().cloned().collect();
            return Err(UnknownModel::Provider { provider: provider.to_owned(), configured });
        };
        let capabilities = self.capabilities.of(state.entry.kind, provider, model);
        Ok(Route { provider, model, capabilities, price: self.prices.of(provider, model), state })
    }

    /// The tokens that thinking takes in addition to an answer of `answer` tokens: the maximum over these
    /// models.
    pub fn thinking_beside(&self, models: &[String], thinking: Thinking, answer: u32) -> u32 {
        let routes = models.iter().filter_map(|model| self.resolve(model).ok());
        let beside = routes
            .map(|route| anthropic::thinking_beside(route.capabilities.thinking, thinking, answer));
        beside.max().unwrap_or(0)
    }

    /// The failure that a run would get if it began now, because the providers are known to refuse each
    /// of its models. Waits while a probe is still finding out. Cancel-safe.
    pub async fn refusal(&self, models: &[String]) -> Option<ProviderError> {
        let mut first = None;
        for model in models {
            let Ok(route) = self.resolve(model) else { continue };
            let call = route.state.breakers.call(route.model, None);
            let refusal = loop {
                match route.state.gates(&call).outlook(Instant::now()) {
                    (_, Outlook::Open) => return None,
                    (_, Outlook::Refused(refusal)) => break refusal,
                    (gate, Outlook::Undecided(until)) => gate.changed(until).await,
                }
            };
            first = first.or_else(|| Some(route.refused(refusal)));
        }
        first
    }

    /// The number of models of each provider whose breakers are open.
    pub fn open_breakers(&self) -> impl Iterator<Item = (&str, usize)> {
        let now = Instant::now();
        self.providers.iter().map(move |(name, state)| (name.as_str(), state.breakers.open(now)))
    }

    /// The estimated usage of a call whose answer broke off after `received` bytes; with the cost if there
    /// is a price.
    pub fn usage_so_far(&self, model: &str, request: &ModelRequest<'_>, received: usize) -> Usage {
        let written = estimate::tokens(received);
        let (conversation, tools) = (request.conversation, request.tools);
        let usage = estimate::with_output(conversation, tools, written, model.to_owned());
        self.resolve(model).map_or(usage, |route| route.priced(usage))
    }

    /// Makes one model call, with retries and fallbacks. The models are tried in order from the one
    /// of `call`; any but the one at 0 is a fallback. Sets `request.model` and
    /// `request.capabilities`; `request.step` increases with every try. No delay reaches past
    /// `deadline`, but a running try is not aborted by it. Cancel-safe: dropping the future closes
    /// the connection.
    ///
    /// # Errors
    /// [`ModelFailure`] with the last error, when retries and fallbacks are exhausted.
    pub async fn complete(
        &self,
        models: &[String],
        mut call: ModelCall,
        request: &ModelRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<Answer, ModelFailure> {
        loop {
            match self.try_once(models, &mut call, request, deadline).await? {
                Tried::Answered(answer) => return Ok(*answer),
                Tried::Again(again) => sleep(again.wait).await,
            }
        }
    }

    /// Makes one try of a model call. After [`Tried::Again`] the caller waits, and calls this again.
    ///
    /// # Errors
    /// As of [`Router::complete`].
    pub async fn try_once(
        &self,
        models: &[String],
        call: &mut ModelCall,
        request: &ModelRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<Tried, ModelFailure> {
        let place = call.place(models);
        let model = call.model(models);
        let next = models.get(place + 1);
        let on_try = self.on_try.as_ref();
        let (error, wait) = match self.resolve(model) {
            Ok(route) => {
                let mut state = CallState { call, request, deadline, on_try };
                match state.try_model(&route, next.is_none()).await {
                    Ok(completion) => {
                        let answer = route.answer(completion, request, call, place > 0);
                        return Ok(Tried::Answered(Box::new(answer)));
                    }
                    Err(failed) => failed,
                }
            }
            Err(unknown) => (unresolved(model, &unknown), None),
        };
        let run_id = run_id(request);
        let fallback = next.filter(|_| wait.is_none() && may_fall_back(error.kind)).cloned();
        let (provider, name) = model.split_once('/').unwrap_or(("", model));
        let (provider, name) = (provider.to_owned(), name.to_owned());
        let status = error.status;
        match (wait, &fallback) {
            (Some(wait), _) => {
                tracing::warn!(run_id, model, status, %error, ?wait, "model call is repeated");
            }
            (None, Some(next)) => {
                tracing::warn!(run_id, model, next, status, %error, "a fallback model takes over");
                call.moves_to(place + 1);
            }
            (None, None) => {
                let attempts = call.failed;
                if error.kind == FailureKind::ContextLength {
                    // The caller may ask again, with a shorter conversation or another model.
                    request.deltas.send(Delta::Restarted);
                }
                return Err(ModelFailure { provider, model: name, place, attempts, error });
            }
        }
        request.deltas.send(Delta::Restarted);
        let wait = wait.unwrap_or_default();
        Ok(Tried::Again(Again { provider, model: name, error, wait, fallback }))
    }
}

/// The outcome of one try.
#[derive(Debug)]
pub enum Tried {
    Answered(Box<Answer>),
    /// It failed; another one may succeed.
    Again(Again),
}

/// A failed try that is not the last one.
#[derive(Debug)]
pub struct Again {
    /// The provider that was asked.
    pub provider: String,
    /// The model that was asked, without the provider.
    pub model: String,
    pub error: ProviderError,
    /// Until the next try.
    pub wait: Duration,
    /// The model that takes over, as `provider/model`.
    pub fallback: Option<String>,
}

impl ProviderState {
    fn gates<'a>(&'a self, call: &'a Call) -> Gates<'a> {
        Gates { account: &self.account, model: call.gate() }
    }
}

fn unresolved(model: &str, unknown: &UnknownModel) -> ProviderError {
    ProviderError {
        provider: model.split_once('/').map_or("", |(provider, _)| provider).to_owned(),
        kind: FailureKind::NotFound,
        status: None,
        code: None,
        message: unknown.to_string(),
        retry_after: None,
        should_retry: None,
        usage: None,
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;
