//! The progress of a model call, and one try of one model.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::breaker::Call;
use super::refusal_gate::{CoolDown, Held, Passes, Patience, RetryDecision};
use super::route::Route;
use super::{OnTry, Try, adapt, large_requests, retry};
use crate::providers::{Completion, FailureKind, ModelRequest, ProviderError};

/// The progress of a model call.
#[derive(Debug)]
pub struct ModelCall {
    /// Index of the model to ask.
    place: usize,
    /// Failed tries of that model, without the refusals that all calls wait out together.
    retries: u32,
    /// Failed tries so far, of all models.
    pub(super) failed: u32,
    /// Whether a provider that is known to refuse is still called once, if there is no fallback.
    insists: bool,
    pub(super) started: Instant,
    /// The breaker's record of this call, from the first try of the current model on.
    in_progress: Option<Arc<Call>>,
    /// The last error that the provider returned to this call.
    last: Option<ProviderError>,
    /// Cancelled when its first request is sent.
    sent: CancellationToken,
}

impl ModelCall {
    /// A call that begins with the model at this index.
    pub fn beginning(place: usize) -> Self {
        Self {
            place,
            retries: 0,
            failed: 0,
            insists: false,
            started: Instant::now(),
            in_progress: None,
            last: None,
            sent: CancellationToken::new(),
        }
    }

    /// Is cancelled when the first request of the call is sent.
    pub fn sent(&self) -> CancellationToken {
        self.sent.clone()
    }

    /// If `insists`, a provider that is known to refuse is still called once if there is no fallback.
    #[must_use]
    pub fn insisting(self, insists: bool) -> Self {
        Self { insists, ..self }
    }

    /// The model that is asked next, of these.
    pub fn model<'m>(&self, models: &'m [String]) -> &'m str {
        models.get(self.place(models)).map_or("", String::as_str)
    }

    pub(super) fn place(&self, models: &[String]) -> usize {
        self.place.min(models.len().saturating_sub(1))
    }

    /// The breaker's record of this call, which also counts during the waits between tries.
    fn in_progress(&mut self, route: &Route<'_>, run_id: Option<Uuid>) -> Arc<Call> {
        let begin = || Arc::new(route.state.breakers.call(route.model, run_id));
        Arc::clone(self.in_progress.get_or_insert_with(begin))
    }

    /// The model at this index is asked next.
    pub fn moves_to(&mut self, place: usize) {
        (self.place, self.retries) = (place, 0);
        (self.in_progress, self.last) = (None, None);
    }
}

/// A model call in progress.
pub(super) struct CallState<'a, 'r> {
    pub(super) call: &'a mut ModelCall,
    pub(super) request: &'a ModelRequest<'r>,
    pub(super) deadline: Option<Instant>,
    pub(super) on_try: Option<&'a OnTry>,
}

impl CallState<'_, '_> {
    /// Tries one model once. With the error: the delay before it may be tried again, if it may.
    pub(super) async fn try_model(
        &mut self,
        route: &Route<'_>,
        is_last_model: bool,
    ) -> Result<Completion, (ProviderError, Option<Duration>)> {
        let by = self.request.trace.map(|span| span.run.run_id);
        let breaker = self.call.in_progress(route, by);
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
        let _place = large_requests::place(&request).await;
        let tried = Instant::now();
        let admission = match breaker.admit(tried) {
            Ok(admission) => admission,
            Err(left) => {
                let refusal = self.not_asked(route, left);
                self.report(route, tried, Some(&refusal), is_final(&refusal));
                return Err((refusal, None));
            }
        };
        let entry = &route.state.entry;
        self.call.sent.cancel();
        let outcome = timeout(entry.timeout, entry.provider.complete(&request)).await;
        let outcome = outcome.unwrap_or_else(|_| Err(route.timed_out()));
        let outcome = outcome.and_then(|completion| route.bounded(completion));
        admission.ended(route.model, &outcome, Instant::now());
        let patience = Patience { retries: entry.max_retries, time: entry.rate_limit_patience };
        let hope = passes.ended(&outcome, patience, Instant::now());
        drop(slot);
        let error = match outcome {
            Ok(completion) => {
                self.report(route, tried, None, true);
                return Ok(completion);
            }
            Err(error) => route.charged(error),
        };
        self.call.failed += 1;
        self.call.last = Some(ProviderError { usage: None, ..error.clone() });
        let retries = self.call.retries;
        let wait = match hope {
            RetryDecision::Own => {
                self.call.retries += 1;
                retry::delay(&error, retries, None).filter(|_| retries < entry.max_retries)
            }
            RetryDecision::After(cool_down) => outlived(route, cool_down, is_last_model),
            RetryDecision::Nothing => None,
        };
        let wait = wait.filter(|wait| self.has_time_for(*wait));
        self.report(route, tried, Some(&error), wait.is_none() && is_final(&error));
        if wait.is_none() {
            let (run_id, provider, model) = (run_id(self.request), route.provider, route.model);
            let (failed, status) = (self.call.failed, error.status);
            tracing::warn!(
                run_id, provider, model, status, %error, tries = failed, "model call failed"
            );
        }
        Err((error, wait))
    }

    /// Waits for a slot of the provider and the permission to call it, if necessary until a probe by
    /// another call has ended. With the error: the wait before the call may enter again, if it may.
    async fn enter<'g>(
        &mut self,
        route: &Route<'g>,
        breaker: &'g Call,
        is_last_model: bool,
    ) -> Result<(Option<SemaphorePermit<'g>>, Passes<'g>), (ProviderError, Option<Duration>)> {
        let gates = route.state.gates(breaker);
        loop {
            let slot = match &route.state.slots {
                Some(slots) => {
                    breaker.pauses();
                    slots.acquire().await.ok()
                }
                None => None,
            };
            // The outcome of the calls that it waits for holds for this call, too.
            let insists = is_last_model && std::mem::take(&mut self.call.insists);
            match gates.enter(Instant::now(), insists) {
                Ok(passes) => return Ok((slot, passes)),
                Err(Held::IsProbed(gate, until)) => {
                    drop(slot);
                    gate.settled(until).await;
                }
                Err(Held::CoolsDown(refusal, cool_down)) => {
                    let wait = outlived(route, cool_down, is_last_model);
                    let wait = wait.filter(|wait| self.has_time_for(*wait));
                    let own = self.call.last.clone().filter(|_| wait.is_none());
                    return Err((own.unwrap_or_else(|| route.refused(refusal)), wait));
                }
                Err(Held::Refused(refusal)) => {
                    let own = self.call.last.take();
                    return Err((own.unwrap_or_else(|| route.refused(refusal)), None));
                }
            }
        }
    }

    /// The failure of a call that the breaker rejects: the last error of its provider, if there is one.
    fn not_asked(&mut self, route: &Route<'_>, left: Duration) -> ProviderError {
        self.call.last.take().unwrap_or_else(|| {
            let seconds = left.as_secs().max(1);
            let message =
                format!("no calls are made for another {seconds} s: its last calls failed");
            route.failure(FailureKind::Transient, message)
        })
    }

    /// Whether the call's deadline is later than this wait.
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

/// The wait for a provider that refuses; `None` if the call gives up. If there is a fallback model, the
/// number of refusals is limited like that of retries.
fn outlived(route: &Route<'_>, cool_down: CoolDown, is_last_model: bool) -> Option<Duration> {
    let is_waited_for = is_last_model || cool_down.refused <= route.state.entry.max_retries;
    is_waited_for.then_some(cool_down.wait)
}

/// Whether a fallback model may succeed: not if our request or key was rejected, nor if a content
/// filter rejected the request.
pub(super) fn may_fall_back(kind: FailureKind) -> bool {
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

pub(super) fn run_id(request: &ModelRequest<'_>) -> Option<impl tracing::Value + use<>> {
    request.trace.map(|span| tracing::field::display(span.run.run_id))
}
