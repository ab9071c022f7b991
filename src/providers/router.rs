//! Resolves models to providers; the only place with retries and fallbacks.
//!
//! A try is made when the provider has a free slot, is not known to refuse ([`gate`]), and the
//! model's [`breaker`] is closed, after [`adapt`] removed what the model does not support. Transient
//! failures are retried ([`retry`]), refusals by all calls of a model together;
//! when that does not help, the next fallback model is tried, unless our request or key was
//! rejected. Providers never retry. The caller enforces the run's deadline and cancellation by
//! dropping the future; the engine keeps using a fallback for the rest of a run.

mod adapt;
mod breaker;
mod gate;
mod retry;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout};

use self::breaker::{Breakers, Call};
use self::gate::{Gate, Gates, Held, Hope, Outlook, Passes};
use super::capabilities::{Capabilities, CapabilityTable};
use super::prices::{Price, PriceTable};
use super::received::{self, Unusable};
use super::{
    Completion, Delta, FailureKind, ModelRequest, Provider, ProviderError, ToolChoice, estimate,
};
use crate::bounds::nearest::meant;
use crate::message::Usage;
use crate::model::ProviderKind;
use crate::run::TraceSpan;

/// A provider with its retry settings.
#[derive(Clone)]
pub struct ProviderEntry {
    pub provider: Arc<dyn Provider>,
    pub kind: ProviderKind,
    /// Tries after the first one, per model.
    pub max_retries: u32,
    /// Of one try, from the request to the end of the answer.
    pub timeout: Duration,
    /// Concurrent tries; further ones wait in order. Absent: no limit.
    pub max_concurrency: Option<usize>,
}

impl ProviderEntry {
    /// Chat Completions, two retries, ten minutes per try, no concurrency limit.
    pub fn new(provider: Arc<dyn Provider>) -> Self {
        let (kind, timeout) = (ProviderKind::Openai, Duration::from_mins(10));
        Self { provider, kind, max_retries: 2, timeout, max_concurrency: None }
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
    /// What is known of refusals of the whole account.
    account: Gate,
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

/// A resolved model name.
#[derive(Clone, Copy)]
pub struct Route<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    pub capabilities: Capabilities,
    pub price: Option<Price>,
    state: &'a ProviderState,
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
            account: Gate::default(),
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

    /// What a run that begins now would be told by its providers, where each of its models is known
    /// to be refused. Waits while that is being found out. Cancel-safe.
    pub async fn refusal(&self, models: &[String]) -> Option<ProviderError> {
        let mut first = None;
        for model in models {
            let Ok(route) = self.resolve(model) else { continue };
            let call = route.state.breakers.call(route.model);
            let refusal = loop {
                match route.state.gates(&call).outlook(Instant::now()) {
                    (_, Outlook::Open) => return None,
                    (_, Outlook::Refused(refusal)) => break refusal,
                    (gate, Outlook::Undecided(until)) => gate.changed(until).await,
                }
            };
            first = first.or(Some(refusal));
        }
        first
    }

    /// What a call has taken when its answer broke off after so many bytes, estimated; with the
    /// cost if there is a price.
    pub fn usage_so_far(&self, model: &str, request: &ModelRequest<'_>, received: usize) -> Usage {
        let written = estimate::tokens(received);
        let usage = estimate::with_output(request.conversation, request.tools, written);
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
        let failed_before = call.failed;
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
        match (wait, &fallback) {
            (Some(wait), _) => {
                tracing::warn!(run_id, model, %error, ?wait, "model call is repeated");
                // A wait for others to find out whether the provider still refuses is no retry.
                call.retries += call.failed - failed_before;
            }
            (None, Some(next)) => {
                tracing::warn!(run_id, model, next, %error, "a fallback model takes over");
                call.moves_to(place + 1);
            }
            (None, None) => {
                let attempts = call.failed;
                return Err(ModelFailure { provider, model: name, place, attempts, error });
            }
        }
        request.deltas.send(Delta::Restarted);
        let wait = wait.unwrap_or_default();
        Ok(Tried::Again(Again { provider, model: name, error, wait, fallback }))
    }
}

/// How far a model call has come.
#[derive(Debug)]
pub struct ModelCall {
    /// Index of the model to ask.
    place: usize,
    /// Failed tries of that model.
    retries: u32,
    /// Failed tries so far, of all models.
    failed: u32,
    /// Whether a provider that is known to refuse is asked even so, where there is no other.
    insists: bool,
    started: Instant,
}

impl ModelCall {
    /// With the model at this index.
    pub fn beginning(place: usize) -> Self {
        Self { place, retries: 0, failed: 0, insists: false, started: Instant::now() }
    }

    /// The call asks a provider that is known to refuse, once, where it has no other.
    #[must_use]
    pub fn insisting(self, insists: bool) -> Self {
        Self { insists, ..self }
    }

    /// The model that is asked next, of these.
    pub fn model<'m>(&self, models: &'m [String]) -> &'m str {
        models.get(self.place(models)).map_or("", String::as_str)
    }

    fn place(&self, models: &[String]) -> usize {
        self.place.min(models.len().saturating_sub(1))
    }

    /// The model at this index is asked next.
    pub fn moves_to(&mut self, place: usize) {
        (self.place, self.retries) = (place, 0);
    }
}

/// What came of one try.
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

/// A model call in progress.
struct CallState<'a, 'r> {
    call: &'a mut ModelCall,
    request: &'a ModelRequest<'r>,
    deadline: Option<Instant>,
    on_try: Option<&'a OnTry>,
}

impl CallState<'_, '_> {
    /// Tries one model once. With the error: the delay before it may be tried again, if it may.
    async fn try_model(
        &mut self,
        route: &Route<'_>,
        is_last_model: bool,
    ) -> Result<Completion, (ProviderError, Option<Duration>)> {
        let breaker = route.state.breakers.call(route.model);
        let mut request = adapt::adapted(self.request, route.model, &route.capabilities);
        request.step = self.request.step + self.call.failed;
        let is_final = |error: &ProviderError| is_last_model || !may_fall_back(error.kind);
        if let Some(why) = adapt::too_many_tools(&request) {
            let refusal = route.failure(FailureKind::BadRequest, why);
            self.report(route, Instant::now(), Some(&refusal), true);
            return Err((refusal, None));
        }
        let entered = self.enter(route, &breaker, is_last_model).await;
        let tried = Instant::now();
        let (slot, passes) = match entered {
            Ok(entered) => entered,
            Err((refusal, wait)) => {
                if wait.is_none() {
                    self.report(route, tried, Some(&refusal), is_final(&refusal));
                }
                return Err((refusal, wait));
            }
        };
        let admission = match breaker.admit(tried) {
            Ok(admission) => admission,
            Err(refusal) => {
                self.report(route, tried, Some(&refusal), is_final(&refusal));
                return Err((refusal, None));
            }
        };
        let entry = &route.state.entry;
        let outcome = timeout(entry.timeout, entry.provider.complete(&request)).await;
        let outcome = outcome.unwrap_or_else(|_| Err(route.timed_out()));
        let outcome = outcome.and_then(|completion| route.bounded(completion));
        admission.ended(&outcome, Instant::now());
        let hope = passes.ended(&outcome, entry.max_retries, Instant::now());
        drop(slot);
        let error = match outcome {
            Ok(completion) => {
                self.report(route, tried, None, true);
                return Ok(completion);
            }
            Err(error) => route.charged(error),
        };
        self.call.failed += 1;
        let retries = self.call.retries;
        let wait = match hope {
            Hope::Own => retry::delay(&error, retries, None),
            Hope::After(cool_down) => Some(cool_down),
            Hope::Nothing => None,
        };
        let wait = wait.filter(|wait| retries < entry.max_retries && self.has_time_for(*wait));
        self.report(route, tried, Some(&error), wait.is_none() && is_final(&error));
        if wait.is_none() {
            let (run_id, provider, model) = (run_id(self.request), route.provider, route.model);
            tracing::warn!(run_id, provider, model, %error, tries = retries + 1, "model call failed");
        }
        Err((error, wait))
    }

    /// A slot of the provider, and the permission to ask it: where it is being probed, afterwards.
    /// With the error: the wait before the call may want to enter again, if it may.
    async fn enter<'g>(
        &self,
        route: &Route<'g>,
        breaker: &'g Call,
        is_last_model: bool,
    ) -> Result<(Option<SemaphorePermit<'g>>, Passes<'g>), (ProviderError, Option<Duration>)> {
        let gates = route.state.gates(breaker);
        let mut insists = self.call.insists && is_last_model && self.call.retries == 0;
        loop {
            let slot = match &route.state.slots {
                Some(slots) => slots.acquire().await.ok(),
                None => None,
            };
            match gates.enter(Instant::now(), insists) {
                Ok(passes) => return Ok((slot, passes)),
                Err(Held::IsProbed(gate, until)) => {
                    drop(slot);
                    insists = false; // what the probe finds out holds for this call too
                    gate.settled(until).await;
                }
                Err(Held::CoolsDown(refusal, wait)) => {
                    return Err((refusal, Some(wait).filter(|wait| self.has_time_for(*wait))));
                }
                Err(Held::Refused(refusal)) => return Err((refusal, None)),
            }
        }
    }

    /// Whether the call's time is not up by then.
    fn has_time_for(&self, wait: Duration) -> bool {
        let left = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
        left.is_none_or(|left| wait < left)
    }

    fn report(
        &self,
        route: &Route<'_>,
        tried: Instant,
        error: Option<&ProviderError>,
        is_last: bool,
    ) {
        let Some(on_try) = self.on_try else { return };
        let (provider, model, trace) = (route.provider, route.model, self.request.trace);
        let (took, call_took) = (tried.elapsed(), self.call.started.elapsed());
        on_try(&Try { provider, model, trace, took, call_took, error, is_last });
    }
}

impl ProviderState {
    fn gates<'a>(&'a self, call: &'a Call) -> Gates<'a> {
        Gates { account: &self.account, model: call.gate() }
    }
}

impl Route<'_> {
    fn answer(
        &self,
        mut completion: Completion,
        request: &ModelRequest<'_>,
        call: &ModelCall,
        fallback: bool,
    ) -> Answer {
        let has_more_calls = received::leave_out_calls(&mut completion);
        let reported = completion.usage;
        let usage = reported
            .unwrap_or_else(|| estimate::usage(request.conversation, request.tools, &completion));
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
    fn priced(&self, usage: Usage) -> Usage {
        Usage { cost_micro_usd: self.price.map(|price| price.of(&usage)), ..usage }
    }

    /// The error with the cost of what it took.
    fn charged(&self, error: ProviderError) -> ProviderError {
        let usage = error.usage.map(|usage| Box::new(self.priced(received::capped(*usage))));
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

    fn timed_out(&self) -> ProviderError {
        let seconds = self.state.entry.timeout.as_secs_f64();
        self.transient(format!("no complete answer within {seconds} s"))
    }

    fn bounded(&self, completion: Completion) -> Result<Completion, ProviderError> {
        let usage = completion.usage.map(Box::new);
        received::bounded(completion).map_err(|unusable| match unusable {
            Unusable::Malformed(message) => ProviderError { usage, ..self.transient(message) },
            Unusable::Error(reported) => self.transient(reported.message),
        })
    }

    fn transient(&self, message: String) -> ProviderError {
        self.failure(FailureKind::Transient, message)
    }

    fn failure(&self, kind: FailureKind, message: String) -> ProviderError {
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

fn run_id(request: &ModelRequest<'_>) -> Option<impl tracing::Value + use<>> {
    request.trace.map(|span| tracing::field::display(span.run.run_id))
}

/// Whether a fallback model may succeed: not if our request or key was rejected, nor if a content
/// filter rejected the request.
fn may_fall_back(kind: FailureKind) -> bool {
    match kind {
        FailureKind::Transient
        | FailureKind::RateLimited
        | FailureKind::QuotaExhausted
        | FailureKind::NotFound
        | FailureKind::TooLarge => true,
        FailureKind::Unauthorized
        | FailureKind::BadRequest
        | FailureKind::ContextLength
        | FailureKind::ContentFilter => false,
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
