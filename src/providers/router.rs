//! Finds the provider of a model, and is the one place that repeats a failed call or goes to another model.
//!
//! A try goes out when the provider has a free slot and the model's [`breaker`] lets it; what the model
//! cannot do is taken out first ([`fit`]). Passing faults are repeated ([`patience`]); when that does not
//! help, the next fallback model is asked, unless our own request or key was refused. Providers never retry.
//! The run's deadline and cancellation are the caller's, who drops the future; that a fallback stays for the
//! rest of a run is the engine's.

mod breaker;
mod fit;
mod patience;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use self::breaker::{Breakers, Call};
use super::capabilities::{Capabilities, CapabilityTable, ProviderKind};
use super::prices::{Price, PriceTable};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError, ToolChoice, estimate};
use crate::message::Usage;

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
}

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
    /// What it took, estimated where the provider did not say, with the cost where there is a price.
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
            slots: entry.max_concurrency.map(|slots| Semaphore::new(slots.clamp(1, Semaphore::MAX_PERMITS))),
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

    /// Finds the provider of a `provider/model`. Whether the provider has the model shows only when it
    /// is called.
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

    /// Makes one model call, repeated where that may help. The models are asked in order, beginning with
    /// the one at `first`; any other than the one at 0 is a fallback. `request.model` and
    /// `request.capabilities` are filled in; `request.step` counts up with every try. No wait reaches past
    /// `deadline`, but a try that is under way is not cut short by it. Dropping the future closes the
    /// connection.
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
        let started = Instant::now();
        let mut failed = 0;
        let mut place = first.min(models.len().saturating_sub(1));
        loop {
            let model = models.get(place).map_or("", String::as_str);
            let error = match self.resolve(model) {
                Ok(route) => match route.ask(request, &mut failed, deadline).await {
                    Ok(completion) => return Ok(route.answer(completion, request, place > 0, failed, started)),
                    Err(error) => error,
                },
                Err(unknown) => unresolved(model, &unknown),
            };
            let Some(next) = models.get(place + 1).filter(|_| leaves_hope_elsewhere(error.kind)) else {
                let (provider, model) = model.split_once('/').unwrap_or(("", model));
                let (provider, model) = (provider.to_owned(), model.to_owned());
                return Err(ModelFailure { provider, model, place, attempts: failed, error });
            };
            tracing::warn!(model, next, %error, "a fallback model takes over");
            place += 1;
        }
    }
}

/// Why a try brought no answer.
enum Missed {
    /// Nobody was asked.
    Refused(ProviderError),
    /// It failed.
    Failed(ProviderError),
}

impl Route<'_> {
    /// Asks this one model, again and again where that may help.
    async fn ask(
        &self,
        request: &ModelRequest<'_>,
        failed: &mut u32,
        deadline: Option<Instant>,
    ) -> Result<Completion, ProviderError> {
        let call = self.lane.breakers.call(self.model);
        let mut request = fit::fitted(request, self.model, &self.capabilities);
        let first_step = request.step;
        let mut retries = 0;
        loop {
            request.step = first_step + *failed;
            let error = match self.attempt(&request, &call).await {
                Ok(completion) => return Ok(completion),
                Err(Missed::Refused(error)) => return Err(error),
                Err(Missed::Failed(error)) => error,
            };
            *failed += 1;
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let may_repeat = retries < self.lane.entry.max_retries;
            let wait = may_repeat.then(|| patience::wait_before_retry(&error, retries, left)).flatten();
            let (provider, model) = (self.provider, self.model);
            let Some(wait) = wait else {
                tracing::warn!(provider, model, %error, tries = retries + 1, "model call failed");
                return Err(error);
            };
            tracing::warn!(provider, model, %error, ?wait, "model call is repeated");
            sleep(wait).await;
            retries += 1;
        }
    }

    async fn attempt(&self, request: &ModelRequest<'_>, call: &Call) -> Result<Completion, Missed> {
        let entry = &self.lane.entry;
        let _slot = match &self.lane.slots {
            Some(slots) => slots.acquire().await.ok(),
            None => None,
        };
        let admission = call.admit(Instant::now()).map_err(Missed::Refused)?;
        let outcome = match timeout(entry.timeout, entry.provider.complete(request)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.timed_out()),
        };
        admission.ended(&outcome, Instant::now());
        outcome.map_err(Missed::Failed)
    }

    fn answer(
        &self,
        completion: Completion,
        request: &ModelRequest<'_>,
        fallback: bool,
        retries: u32,
        started: Instant,
    ) -> Answer {
        let reported = completion.usage;
        let usage = reported.unwrap_or_else(|| estimate::usage(request.conversation, request.tools, &completion));
        let cost_micro_usd = self.price.map(|price| price.of(&usage));
        Answer {
            completion,
            usage: Usage { cost_micro_usd, ..usage },
            provider: self.provider.to_owned(),
            model: self.model.to_owned(),
            retries,
            latency_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
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
        format!("{provider}/{model} cannot be made to answer with {wish}: its answer is checked instead.")
    }

    fn timed_out(&self) -> ProviderError {
        ProviderError {
            provider: self.provider.to_owned(),
            kind: FailureKind::Transient,
            status: None,
            code: None,
            message: format!("no complete answer within {} s", self.lane.entry.timeout.as_secs_f64()),
            retry_after: None,
        }
    }
}

/// Whether another model may answer what this one did not: not where our own request or key was refused,
/// nor where the request was refused for what it says.
fn leaves_hope_elsewhere(kind: FailureKind) -> bool {
    match kind {
        FailureKind::Transient | FailureKind::RateLimited | FailureKind::QuotaExhausted | FailureKind::NotFound => true,
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
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;
