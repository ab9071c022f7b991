//! Finds the provider of a model, and is the one place that repeats a failed call.
//!
//! Waits grow from 0.5 s to 8 s with full jitter; a wait that the provider asks for is kept exactly, or
//! not at all: one beyond two minutes or beyond the run's deadline ends the call at once. Providers
//! never retry. The run's deadline and cancellation are the caller's, who drops the future.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{Completion, Delta, FailureKind, ModelRequest, Provider, ProviderError};
use crate::run::TraceSpan;

/// Upper end of the first wait.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Upper end of any wait that we choose.
const LONGEST_WAIT: Duration = Duration::from_secs(8);
/// Longest wait that a provider may ask for.
const LONGEST_WISH: Duration = Duration::from_mins(2);

/// A provider and how patient we are with it.
#[derive(Clone)]
pub struct ProviderEntry {
    /// Who answers.
    pub provider: Arc<dyn Provider>,
    /// Tries after the first one.
    pub max_retries: u32,
    /// For one try, from the request to the end of the answer.
    pub timeout: Duration,
}

impl ProviderEntry {
    /// Two retries, ten minutes a try.
    pub fn new(provider: Arc<dyn Provider>) -> Self {
        Self { provider, max_retries: 2, timeout: Duration::from_mins(10) }
    }
}

/// All configured providers, by name.
#[derive(Clone, Default)]
pub struct Router {
    providers: BTreeMap<String, ProviderEntry>,
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
    /// How long the try took.
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
    entry: &'a ProviderEntry,
}

/// What a model call brought.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The model's answer.
    pub completion: Completion,
    /// Who answered.
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Failed tries before it.
    pub retries: u32,
    /// Milliseconds from the first try to the answer, waits included.
    pub latency_ms: u64,
    /// Whether a fallback model answered.
    pub fallback: bool,
}

/// A model call that failed for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{provider}/{model} failed after {attempts} attempt(s): {}", .error.message)]
pub struct ModelFailure {
    /// The provider that was asked.
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Tries made, the first included; 0 where the model is unknown.
    pub attempts: u32,
    /// The last try's error.
    pub error: ProviderError,
}

impl Router {
    /// A router over these providers.
    pub fn new(providers: BTreeMap<String, ProviderEntry>) -> Self {
        Self { providers, on_try: None }
    }

    /// Tells somebody of every try.
    #[must_use]
    pub fn observed_by(self, on_try: OnTry) -> Self {
        Self { on_try: Some(on_try), ..self }
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
        match self.providers.get(provider) {
            Some(entry) => Ok(Route { provider, model, entry }),
            None => Err(UnknownModel::Provider {
                provider: provider.to_owned(),
                configured: self.providers.keys().cloned().collect(),
            }),
        }
    }

    /// Makes one model call, repeated where that may help. `request.model` is filled in from `model`;
    /// `request.step` counts up with every try. No wait reaches past `deadline`, but a try that is under
    /// way is not cut short by it. Dropping the future closes the connection.
    ///
    /// # Errors
    /// [`ModelFailure`] with the last error, when repeating does not or cannot help.
    pub async fn complete<'a>(
        &'a self,
        model: &'a str,
        mut request: ModelRequest<'a>,
        deadline: Option<Instant>,
    ) -> Result<Answer, ModelFailure> {
        let route = self.resolve(model).map_err(|unknown| unresolved(model, &unknown))?;
        request.model = route.model;
        let started = Instant::now();
        let mut retries = 0;
        loop {
            let tried = Instant::now();
            let tell = |error: Option<&ProviderError>, is_last| {
                let Some(on_try) = &self.on_try else { return };
                let (provider, model, trace) = (route.provider, route.model, request.trace);
                let (took, call_took) = (tried.elapsed(), started.elapsed());
                on_try(&Try { provider, model, trace, took, call_took, error, is_last });
            };
            let error = match timeout(route.entry.timeout, route.entry.provider.complete(&request)).await {
                Ok(Ok(completion)) => {
                    tell(None, true);
                    return Ok(Answer {
                        completion,
                        provider: route.provider.to_owned(),
                        model: route.model.to_owned(),
                        retries,
                        latency_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
                        fallback: false,
                    });
                }
                Ok(Err(error)) => error,
                Err(_) => timed_out(route),
            };
            let patience = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let wait =
                if retries < route.entry.max_retries { wait_before_retry(&error, retries, patience) } else { None };
            tell(Some(&error), wait.is_none());
            let Some(wait) = wait else {
                let attempts = retries + 1;
                return Err(ModelFailure {
                    provider: route.provider.to_owned(),
                    model: route.model.to_owned(),
                    attempts,
                    error,
                });
            };
            let run_id = request.trace.map(|span| tracing::field::display(span.run.run_id));
            let (provider, model) = (route.provider, route.model);
            tracing::warn!(run_id, provider, model, %error, ?wait, "model call is repeated");
            request.deltas.send(Delta::Restarted);
            sleep(wait).await;
            retries += 1;
            request.step += 1;
        }
    }
}

/// How long to wait before the retry after `retries` earlier ones; `None`: repeating is of no use.
/// `patience` is the time to the deadline.
fn wait_before_retry(error: &ProviderError, retries: u32, patience: Option<Duration>) -> Option<Duration> {
    if !error.is_retryable() {
        return None;
    }
    let wait = match error.retry_after {
        Some(wish) if wish > LONGEST_WISH => return None,
        Some(wish) => wish,
        None => {
            let ceiling = FIRST_WAIT.saturating_mul(1 << retries.min(8)).min(LONGEST_WAIT);
            ceiling.mul_f64(unit_interval(getrandom::u32().unwrap_or(u32::MAX)))
        }
    };
    patience.is_none_or(|patience| wait < patience).then_some(wait)
}

fn unit_interval(random: u32) -> f64 {
    f64::from(random) / f64::from(u32::MAX)
}

fn timed_out(route: Route<'_>) -> ProviderError {
    ProviderError {
        provider: route.provider.to_owned(),
        kind: FailureKind::Transient,
        status: None,
        code: None,
        message: format!("no complete answer within {} s", route.entry.timeout.as_secs_f64()),
        retry_after: None,
    }
}

fn unresolved(model: &str, unknown: &UnknownModel) -> ModelFailure {
    let (provider, model) = model.split_once('/').unwrap_or(("", model));
    ModelFailure {
        provider: provider.to_owned(),
        model: model.to_owned(),
        attempts: 0,
        error: ProviderError {
            provider: provider.to_owned(),
            kind: FailureKind::NotFound,
            status: None,
            code: None,
            message: unknown.to_string(),
            retry_after: None,
        },
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;
