//! Finds the provider of a model, and is the one place that repeats a failed call or goes to
//! another model.
//!
//! A try goes out when the provider has a free slot and the model's [`breaker`] lets it; what the
//! model cannot do is taken out first ([`fit`]). Passing faults are repeated ([`patience`]); when
//! that does not help, the next fallback model is asked, unless our own request or key was refused.
//! Providers never retry. The run's deadline and cancellation are the caller's, who drops the
//! future; that a fallback stays for the rest of a run is the engine's.

mod breaker;
mod fit;
mod patience;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use self::breaker::Breakers;
use super::capabilities::{Capabilities, CapabilityTable, ProviderKind};
use super::prices::{Price, PriceTable};
use super::received::{self, Unusable};
use super::{
    Completion, Delta, FailureKind, ModelRequest, Provider, ProviderError, ToolChoice, estimate,
};
use crate::message::Usage;
use crate::run::TraceSpan;

/// A provider and how patient we are with it.
#[derive(Clone)]
pub struct ProviderEntry {
    /// Who answers.
    pub provider: Arc<dyn Provider>,
    /// What it speaks.
    pub kind: ProviderKind,
    /// Tries after the first one.
    pub max_retries: u32,
    /// For one try, from the request to the end of the answer.
    pub timeout: Duration,
    /// Tries at once; more wait their turn. Absent: no limit.
    pub max_concurrency: Option<usize>,
}

impl ProviderEntry {
    /// Chat Completions, two retries, ten minutes a try, any number of tries at once.
    pub fn new(provider: Arc<dyn Provider>) -> Self {
        let (kind, timeout) = (ProviderKind::Openai, Duration::from_mins(10));
        Self { provider, kind, max_retries: 2, timeout, max_concurrency: None }
    }
}

/// All configured providers, by name, and what is known of their models.
#[derive(Default)]
pub struct Router {
    providers: BTreeMap<String, Lane>,
    capabilities: CapabilityTable,
    prices: PriceTable,
    on_try: Option<OnTry>,
}

/// One try of a model call, as it ended.
#[derive(Debug, Clone, Copy)]
pub struct Try<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    /// The call's place in a trace.
    pub trace: Option<TraceSpan>,
    /// How long the try took; nothing where the breaker refused it.
    pub took: Duration,
    /// How long the call has taken so far, earlier tries and waits included.
    pub call_took: Duration,
    /// Why it failed, if it did.
    pub error: Option<&'a ProviderError>,
    /// Whether the call is over.
    pub is_last: bool,
}

/// Told of every try. Must not block.
pub type OnTry = Arc<dyn Fn(&Try<'_>) + Send + Sync>;

/// A provider and what goes on there.
struct Lane {
    entry: ProviderEntry,
    /// First come, first served.
    slots: Option<Semaphore>,
    breakers: Breakers,
}

/// A model name that leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownModel {
    /// Not of the form `provider/model`.
    #[error("{0:?} is not a model name of the form provider/model")]
    Malformed(String),
    /// No such provider.
    #[error("there is no provider {provider:?}; configured: {}", .configured.join(", "))]
    Provider {
        /// The part before the slash.
        provider: String,
        /// The names there are.
        configured: Vec<String>,
    },
}

/// A resolved model name.
#[derive(Clone, Copy)]
pub struct Route<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    /// What it can be asked for.
    pub capabilities: Capabilities,
    /// What it costs, where that is known.
    pub price: Option<Price>,
    lane: &'a Lane,
}

/// What a model call brought.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The model's answer.
    pub completion: Completion,
    /// What it took, estimated where the provider did not say, with the cost where there is a
    /// price.
    pub usage: Usage,
    /// Who answered.
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Failed tries before it, of all models.
    pub retries: u32,
    /// Milliseconds from the first try to the answer, waits included.
    pub latency_ms: u64,
    /// Whether a fallback model answered.
    pub fallback: bool,
    /// What the caller should know: a tool choice that could not be sent.
    pub warnings: Vec<String>,
}

/// A model call that failed for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{provider}/{model} failed after {attempts} attempt(s): {}", .error.message)]
pub struct ModelFailure {
    /// The provider that was asked last.
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Its place among the models that were given.
    pub place: usize,
    /// Tries made, of all models; 0 where nobody could be asked.
    pub attempts: u32,
    /// The last try's error.
    pub error: ProviderError,
}

impl Router {
    /// A router over these providers, with the shipped capabilities and without prices.
    pub fn new(providers: BTreeMap<String, ProviderEntry>) -> Self {
        let lane = |entry: ProviderEntry| Lane {
            slots: entry
                .max_concurrency
                .map(|slots| Semaphore::new(slots.clamp(1, Semaphore::MAX_PERMITS))),
            breakers: Breakers::default(),
            entry,
        };
        let providers = providers.into_iter().map(|(name, entry)| (name, lane(entry))).collect();
        Self { providers, ..Self::default() }
    }

    /// The same with what the operator knows of the models.
    #[must_use]
    pub fn with_tables(self, capabilities: CapabilityTable, prices: PriceTable) -> Self {
        Self { capabilities, prices, ..self }
    }

    /// Tells somebody of every try.
    #[must_use]
    pub fn observed_by(self, on_try: OnTry) -> Self {
        Self { on_try: Some(on_try), ..self }
    }

    /// Finds the provider of a `provider/model`. Whether the provider has the model shows only when
    /// it is called.
    ///
    /// # Errors
    /// [`UnknownModel`] where the name is malformed or names no configured provider.
    pub fn resolve<'a>(&'a self, model: &'a str) -> Result<Route<'a>, UnknownModel> {
        let (provider, model) = match model.split_once('/') {
            Some((provider, name)) if !provider.is_empty() && !name.is_empty() => (provider, name),
            _ => return Err(UnknownModel::Malformed(model.to_owned())),
        };
        let Some(lane) = self.providers.get(provider) else {
            let configured = self.providers.keys().cloned().collect();
            return Err(UnknownModel::Provider { provider: provider.to_owned(), configured });
        };
        let capabilities = self.capabilities.of(lane.entry.kind, provider, model);
        Ok(Route { provider, model, capabilities, price: self.prices.of(provider, model), lane })
    }

    /// Makes one model call, repeated where that may help. The models are asked in order, beginning
    /// with the one at `first`; any other than the one at 0 is a fallback. `request.model` and
    /// `request.capabilities` are filled in; `request.step` counts up with every try. No wait
    /// reaches past `deadline`, but a try that is under way is not cut short by it. Dropping the
    /// future closes the connection.
    ///
    /// # Errors
    /// [`ModelFailure`] with the last error, when neither repeating nor another model helps.
    pub async fn complete(
        &self,
        models: &[String],
        first: usize,
        request: &ModelRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<Answer, ModelFailure> {
        let mut ask = Ask {
            request,
            deadline,
            on_try: self.on_try.as_ref(),
            started: Instant::now(),
            failed: 0,
        };
        let mut place = first.min(models.len().saturating_sub(1));
        loop {
            let model = models.get(place).map_or("", String::as_str);
            let next = models.get(place + 1);
            let error = match self.resolve(model) {
                Ok(route) => match ask.of(&route, next.is_none()).await {
                    Ok(completion) => return Ok(route.answer(completion, &ask, place > 0)),
                    Err(error) => error,
                },
                Err(unknown) => unresolved(model, &unknown),
            };
            let Some(next) = next.filter(|_| leaves_hope_elsewhere(error.kind)) else {
                let (provider, model) = model.split_once('/').unwrap_or(("", model));
                let (provider, model) = (provider.to_owned(), model.to_owned());
                return Err(ModelFailure { provider, model, place, attempts: ask.failed, error });
            };
            tracing::warn!(run_id = ask.run_id(), model, next, %error, "a fallback model takes over");
            request.deltas.send(Delta::Restarted);
            place += 1;
        }
    }
}

/// One model call under way.
struct Ask<'a, 'r> {
    request: &'a ModelRequest<'r>,
    deadline: Option<Instant>,
    on_try: Option<&'a OnTry>,
    started: Instant,
    /// Failed tries so far, of all models.
    failed: u32,
}

impl Ask<'_, '_> {
    /// Asks one model, again and again where that may help. After the last model nobody is asked.
    async fn of(
        &mut self,
        route: &Route<'_>,
        is_last_model: bool,
    ) -> Result<Completion, ProviderError> {
        let call = route.lane.breakers.call(route.model);
        let mut request = fit::fitted(self.request, route.model, &route.capabilities);
        let mut retries = 0;
        loop {
            request.step = self.request.step + self.failed;
            let slot = match &route.lane.slots {
                Some(slots) => slots.acquire().await.ok(),
                None => None,
            };
            let tried = Instant::now();
            let over = |error: &ProviderError| is_last_model || !leaves_hope_elsewhere(error.kind);
            let admission = match call.admit(tried) {
                Ok(admission) => admission,
                Err(refusal) => {
                    self.tell(route, tried, Some(&refusal), over(&refusal));
                    return Err(refusal);
                }
            };
            let entry = &route.lane.entry;
            let outcome = timeout(entry.timeout, entry.provider.complete(&request)).await;
            let outcome = outcome.unwrap_or_else(|_| Err(route.timed_out()));
            let outcome = outcome.and_then(|completion| route.bounded(completion));
            admission.ended(&outcome, Instant::now());
            drop(slot);
            let error = match outcome {
                Ok(completion) => {
                    self.tell(route, tried, None, true);
                    return Ok(completion);
                }
                Err(error) => error,
            };
            self.failed += 1;
            let left =
                self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let may_repeat = retries < entry.max_retries;
            let wait =
                may_repeat.then(|| patience::wait_before_retry(&error, retries, left)).flatten();
            self.tell(route, tried, Some(&error), wait.is_none() && over(&error));
            let (run_id, provider, model) = (self.run_id(), route.provider, route.model);
            let Some(wait) = wait else {
                tracing::warn!(run_id, provider, model, %error, tries = retries + 1, "model call failed");
                return Err(error);
            };
            tracing::warn!(run_id, provider, model, %error, ?wait, "model call is repeated");
            request.deltas.send(Delta::Restarted);
            sleep(wait).await;
            retries += 1;
        }
    }

    fn tell(
        &self,
        route: &Route<'_>,
        tried: Instant,
        error: Option<&ProviderError>,
        is_last: bool,
    ) {
        let Some(on_try) = self.on_try else { return };
        let (provider, model, trace) = (route.provider, route.model, self.request.trace);
        let (took, call_took) = (tried.elapsed(), self.started.elapsed());
        on_try(&Try { provider, model, trace, took, call_took, error, is_last });
    }

    fn run_id(&self) -> Option<impl tracing::Value + use<>> {
        self.request.trace.map(|span| tracing::field::display(span.run.run_id))
    }
}

impl Route<'_> {
    fn answer(&self, completion: Completion, ask: &Ask<'_, '_>, fallback: bool) -> Answer {
        let request = ask.request;
        let reported = completion.usage;
        let usage = reported
            .unwrap_or_else(|| estimate::usage(request.conversation, request.tools, &completion));
        let cost_micro_usd = self.price.map(|price| price.of(&usage));
        Answer {
            completion,
            usage: Usage { cost_micro_usd, ..usage },
            provider: self.provider.to_owned(),
            model: self.model.to_owned(),
            retries: ask.failed,
            latency_ms: u64::try_from(ask.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            fallback,
            warnings: fit::loses_choice(request, &self.capabilities)
                .then(|| self.lost_choice(&request.tool_choice))
                .into_iter()
                .collect(),
        }
    }

    fn lost_choice(&self, choice: &ToolChoice) -> String {
        let wish = match choice {
            ToolChoice::Tool(name) => format!("a call of {name}"),
            _ => "a tool call".to_owned(),
        };
        let (provider, model) = (self.provider, self.model);
        format!(
            "{provider}/{model} cannot be made to answer with {wish}: its answer is checked instead."
        )
    }

    fn timed_out(&self) -> ProviderError {
        let seconds = self.lane.entry.timeout.as_secs_f64();
        self.passing(format!("no complete answer within {seconds} s"))
    }

    fn bounded(&self, completion: Completion) -> Result<Completion, ProviderError> {
        received::bounded(completion).map_err(|unusable| match unusable {
            Unusable::Malformed(message) => self.passing(message),
            Unusable::Error(reported) => self.passing(reported.message),
        })
    }

    fn passing(&self, message: String) -> ProviderError {
        ProviderError {
            provider: self.provider.to_owned(),
            kind: FailureKind::Transient,
            status: None,
            code: None,
            message,
            retry_after: None,
            should_retry: None,
        }
    }
}

/// Whether another model may answer what this one did not: not where our own request or key was
/// refused, nor where the request was refused for what it says.
fn leaves_hope_elsewhere(kind: FailureKind) -> bool {
    match kind {
        FailureKind::Transient
        | FailureKind::RateLimited
        | FailureKind::QuotaExhausted
        | FailureKind::NotFound => true,
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
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;
