//! A circuit breaker for each model of a provider.
//!
//! It opens after more than five consecutive transient failures, stays open for 30 s and then lets
//! one probe through, whose outcome closes it or opens it again. A short outage of a server fails all
//! calls in progress, each with its retries, so with n calls in progress it takes n times as many
//! failures. Calls that wait for a slot of the provider do not count as in progress. An error of the
//! server may be caused by the request itself, so consecutive errors of one run count only up to the
//! number that opens the breaker when nothing else is in progress. A 429 is neither a failure nor a
//! success: [`super::refusal_gate`] handles it. The router decides where a rejected call goes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::time::Instant;
use uuid::Uuid;

use super::refusal_gate::RefusalGate;
use crate::providers::{Completion, FailureKind, ProviderError};

/// Consecutive failures, for each call in progress, that do not open the breaker yet.
const MAX_FAILURES: usize = 5;
/// Consecutive errors of the server to one run; further ones do not count.
const MAX_OF_ONE_RUN: usize = MAX_FAILURES + 1;
const OPEN_FOR: Duration = Duration::from_secs(30);
/// Breakers of one provider; above this, idle ones are dropped, because callers choose model names.
const MAX_BREAKERS: usize = 1024;

/// The breakers of one provider, by model.
#[derive(Debug, Default)]
pub(super) struct Breakers {
    by_model: RwLock<HashMap<String, Arc<Breaker>>>,
}

#[derive(Debug, Default)]
pub(super) struct Breaker {
    health: Mutex<Health>,
    /// The gate for refusals of this model.
    gate: RefusalGate,
}

#[derive(Debug, Default)]
struct Health {
    /// Calls in progress, pauses between tries included. Calls that wait for a slot of the provider do
    /// not count: an outage does not fail them.
    calls: usize,
    /// Consecutive failures that count.
    failures: usize,
    /// The run that the server answered last, and its consecutive errors to that run.
    of_one_run: Option<(Uuid, usize)>,
    open_until: Option<Instant>,
    probing: bool,
}

/// A call of a model: in progress from the admission of a try until it waits for a slot, or is dropped.
#[derive(Debug)]
pub(super) struct Call {
    breaker: Arc<Breaker>,
    run_id: Option<Uuid>,
    /// Changed under the lock of the breaker's health.
    is_in_progress: AtomicBool,
}

/// The permission to make one try.
#[derive(Debug)]
pub(super) struct Admission<'a> {
    call: &'a Call,
    is_probe: bool,
}

impl Breakers {
    /// A call of a model, by a run.
    pub(super) fn call(&self, model: &str, run_id: Option<Uuid>) -> Call {
        Call { breaker: self.of(model), run_id, is_in_progress: AtomicBool::new(false) }
    }

    fn of(&self, model: &str) -> Arc<Breaker> {
        if let Some(known) = self.by_model.read().get(model) {
            return Arc::clone(known);
        }
        let mut by_model = self.by_model.write();
        if by_model.len() >= MAX_BREAKERS {
            let now = Instant::now();
            by_model.retain(|_, breaker| Arc::strong_count(breaker) > 1 || breaker.is_in_use(now));
        }
        if by_model.len() >= MAX_BREAKERS && !by_model.contains_key(model) {
            return Arc::default(); // of this call alone
        }
        Arc::clone(by_model.entry(model.to_owned()).or_default())
    }

    /// The number of open breakers.
    pub(super) fn open(&self, now: Instant) -> usize {
        self.by_model.read().values().filter(|breaker| breaker.health().is_open(now)).count()
    }
}

impl Breaker {
    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock()
    }

    fn is_in_use(&self, now: Instant) -> bool {
        self.health().is_open(now) || self.gate.is_in_use(now)
    }
}

impl Call {
    pub(super) fn gate(&self) -> &RefusalGate {
        &self.breaker.gate
    }

    /// # Errors
    /// The time for which the breaker stays open.
    pub(super) fn admit(&self, now: Instant) -> Result<Admission<'_>, Duration> {
        let mut health = self.breaker.health();
        let is_probe = match health.open_until {
            None => false,
            Some(until) if until <= now && !health.probing => true,
            Some(until) => return Err(until.saturating_duration_since(now)),
        };
        health.probing |= is_probe;
        if !self.is_in_progress.swap(true, Ordering::Relaxed) {
            health.calls += 1;
        }
        Ok(Admission { call: self, is_probe })
    }

    /// Marks the call as not in progress: it waits for a slot of the provider, or is over.
    pub(super) fn pauses(&self) {
        let mut health = self.breaker.health();
        if self.is_in_progress.swap(false, Ordering::Relaxed) {
            health.calls = health.calls.saturating_sub(1);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.pauses();
    }
}

impl Admission<'_> {
    /// Records the outcome of the try of this model.
    pub(super) fn ended(
        self,
        model: &str,
        outcome: &Result<Completion, ProviderError>,
        now: Instant,
    ) {
        let mut health = self.call.breaker.health();
        match outcome {
            Err(error) if error.kind == FailureKind::Transient => {
                health.failures += usize::from(health.counts(error, self.call.run_id));
                let allowed = MAX_FAILURES * health.calls.max(1);
                if self.is_probe || (health.open_until.is_none() && health.failures > allowed) {
                    health.open_until = Some(now + OPEN_FOR);
                    let (provider, failures) = (&error.provider, health.failures);
                    let (status, seconds) = (error.status, OPEN_FOR.as_secs());
                    tracing::warn!(provider, model, status, failures, seconds, "breaker opened");
                }
            }
            Err(error) if error.kind == FailureKind::RateLimited && !self.is_probe => {}
            _ => {
                if health.open_until.is_some() {
                    tracing::info!(model, "breaker closed");
                }
                (health.failures, health.of_one_run, health.open_until) = (0, None, None);
            }
        }
    }
}

impl Drop for Admission<'_> {
    /// A cancelled probe makes room for another one.
    fn drop(&mut self) {
        if self.is_probe {
            self.call.breaker.health().probing = false;
        }
    }
}

impl Health {
    fn is_open(&self, now: Instant) -> bool {
        self.open_until.is_some_and(|until| until > now)
    }

    /// Whether a failure counts. Failures without an answer always do: no request can be their cause.
    fn counts(&mut self, error: &ProviderError, run_id: Option<Uuid>) -> bool {
        let Some(run_id) = run_id.filter(|_| error.status.is_some()) else { return true };
        let earlier = self.of_one_run.filter(|(by, _)| *by == run_id).map_or(0, |(_, times)| times);
        self.of_one_run = Some((run_id, earlier + 1));
        earlier < MAX_OF_ONE_RUN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::FinishReason;

    fn fault(kind: FailureKind) -> Result<Completion, ProviderError> {
        let (code, message) = (Some("overloaded".to_owned()), "busy".to_owned());
        Err(ProviderError {
            provider: "p".into(),
            kind,
            status: Some(503),
            code,
            message,
            retry_after: None,
            should_retry: None,
            usage: None,
        })
    }

    fn answer() -> Completion {
        let (text, finish_reason) = (String::new(), FinishReason::Stop);
        Completion {
            text,
            thinking: None,
            tool_calls: Vec::new(),
            opaque: None,
            finish_reason,
            usage: None,
        }
    }

    /// One call, with as many tries as there are outcomes; how many were admitted.
    fn tries(call: &Call, now: Instant, outcomes: &[Result<Completion, ProviderError>]) -> usize {
        let admitted = outcomes.iter().filter(|outcome| match call.admit(now) {
            Ok(admission) => {
                admission.ended("m", outcome, now);
                true
            }
            Err(_) => false,
        });
        admitted.count()
    }

    #[test]
    fn the_sixth_fault_in_a_row_opens_it_for_30_seconds() {
        let (breakers, start) = (Breakers::default(), Instant::now());
        let call = breakers.call("m", None);
        let broken = || vec![fault(FailureKind::Transient); 8];
        assert_eq!(tries(&call, start, &broken()), 6);
        let left = call.admit(start + Duration::from_secs(10)).unwrap_err();
        assert_eq!((left, breakers.open(start)), (Duration::from_secs(20), 1));
        assert_eq!(breakers.open(start + OPEN_FOR), 0);
        assert_eq!(
            tries(&breakers.call("other", None), start, &broken()[..1]),
            1,
            "each model has its own"
        );

        let later = start + OPEN_FOR;
        let probe = call.admit(later).unwrap();
        assert!(call.admit(later).is_err(), "one probe at a time");
        drop(probe);
        assert_eq!(
            tries(&call, later, &broken()),
            1,
            "a probe whose caller is gone is made again, and fails"
        );
        let last = later + OPEN_FOR;
        assert_eq!(
            tries(&call, last, &[Ok(answer()), fault(FailureKind::Transient), Ok(answer())]),
            3,
            "a probe closes it"
        );
    }

    #[test]
    fn what_counts_as_a_fault() {
        use FailureKind::{BadRequest, NotFound, RateLimited, TooLarge, Transient, Unauthorized};
        let reset = [BadRequest, Unauthorized, NotFound, TooLarge].map(|kind| (kind, 13));
        let table = [(RateLimited, 8)].into_iter().chain(reset);
        for (kind, admitted) in table {
            let call = Breakers::default().call("m", None);
            let mut outcomes = vec![fault(Transient); 5];
            outcomes.extend([fault(kind), fault(kind)]);
            outcomes.extend(vec![fault(Transient); 6]);
            assert_eq!(tries(&call, Instant::now(), &outcomes), admitted, "{kind:?}");
        }
    }

    #[test]
    fn side_by_side_calls_bear_more() {
        let breakers = Breakers::default();
        let now = Instant::now();
        let calls: Vec<Call> = (0..10).map(|_| breakers.call("m", None)).collect();
        for call in &calls {
            drop(call.admit(now).unwrap());
        }
        let broken = vec![fault(FailureKind::Transient); 60];
        assert_eq!(tries(&calls[0], now, &broken), 50 + 1);
    }

    #[test]
    fn calls_that_wait_for_a_slot_do_not_keep_it_closed() {
        let (breakers, now) = (Breakers::default(), Instant::now());
        let calls: Vec<Call> = (0..10).map(|_| breakers.call("m", None)).collect();
        let broken = vec![fault(FailureKind::Transient); 60];
        for call in &calls[2..] {
            drop(call.admit(now).unwrap());
            call.pauses();
        }
        drop(calls[1].admit(now).unwrap());
        assert_eq!(tries(&calls[0], now, &broken), 10 + 1, "two are in progress");
        drop(calls);
        assert_eq!(breakers.of("m").health().calls, 0);
    }

    #[test]
    fn errors_that_one_run_gets_do_not_open_it_beside_other_calls() {
        let (breakers, now) = (Breakers::default(), Instant::now());
        let run = |id| breakers.call("m", Some(Uuid::from_u128(id)));
        let broken = vec![fault(FailureKind::Transient); 50];
        let beside = run(1);
        drop(beside.admit(now).unwrap());
        assert_eq!(tries(&run(2), now, &broken), 50);
        assert_eq!(tries(&run(2), now, &broken), 50, "its next call");
        assert_eq!(tries(&run(3), now, &broken), 5, "two runs are the server's fault");
        drop(beside);
        let alone = breakers.call("other", Some(Uuid::from_u128(1)));
        assert_eq!(tries(&alone, now, &broken), 6);

        let silent =
            fault(FailureKind::Transient).map_err(|it| ProviderError { status: None, ..it });
        let call = breakers.call("dead", Some(Uuid::from_u128(1)));
        assert_eq!(tries(&call, now, &vec![silent; 50]), 6, "a server that does not answer");

        let [one, other] = [1, 2].map(|id| breakers.call("both", Some(Uuid::from_u128(id))));
        let in_turn =
            (0..20).map(|_| tries(&one, now, &broken[..1]) + tries(&other, now, &broken[..1]));
        assert_eq!(in_turn.sum::<usize>(), 11, "side by side");
    }

    #[test]
    fn made_up_names_are_forgotten() {
        let breakers = Breakers::default();
        for n in 0..3 * MAX_BREAKERS {
            drop(breakers.call(&format!("model-{n}"), None));
        }
        assert!(breakers.by_model.read().len() <= MAX_BREAKERS);
    }
}
