//! A circuit breaker for each model of a provider.
//!
//! It opens after more than five consecutive transient failures, stays open for 30 s and then lets
//! one probe through, whose outcome closes it or opens it again. A server that is away for a moment
//! fails all calls in progress, and each of them has retries, so with n of them it takes n times as
//! many failures. A 429 is neither a failure nor a success: the [`super::refusal_gate`] is for
//! it. The router decides where a rejected call goes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::time::Instant;

use super::refusal_gate::RefusalGate;
use crate::providers::{Completion, FailureKind, ProviderError};

/// Consecutive failures, for each call in progress, that do not open the breaker yet.
const MAX_FAILURES: usize = 5;
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
    /// What is known of refusals of this model.
    gate: RefusalGate,
}

#[derive(Debug, Default)]
struct Health {
    /// Calls in progress, waits between tries included.
    calls: usize,
    failures: usize,
    last: Option<ProviderError>,
    open_until: Option<Instant>,
    probing: bool,
}

/// A call in progress until it is dropped.
#[derive(Debug)]
pub(super) struct Call(Arc<Breaker>);

/// The permission to make one try.
pub(super) struct Admission<'a> {
    breaker: &'a Breaker,
    is_probe: bool,
}

impl Breakers {
    /// Registers a call of a model.
    pub(super) fn call(&self, model: &str) -> Call {
        let known = self.by_model.read().get(model).cloned();
        let breaker = known.unwrap_or_else(|| {
            let mut by_model = self.by_model.write();
            if by_model.len() >= MAX_BREAKERS {
                let now = Instant::now();
                by_model.retain(|_, breaker| breaker.is_in_use(now));
            }
            if by_model.len() >= MAX_BREAKERS && !by_model.contains_key(model) {
                return Arc::default(); // of this call alone
            }
            Arc::clone(by_model.entry(model.to_owned()).or_default())
        });
        breaker.health().calls += 1;
        Call(breaker)
    }
}

impl Breaker {
    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock()
    }

    fn is_in_use(&self, now: Instant) -> bool {
        let health = self.health();
        let is_open = health.open_until.is_some_and(|until| until > now);
        health.calls > 0 || is_open || self.gate.is_in_use(now)
    }
}

impl Call {
    pub(super) fn gate(&self) -> &RefusalGate {
        &self.0.gate
    }

    /// # Errors
    /// The last failure, if the breaker is open.
    pub(super) fn admit(&self, now: Instant) -> Result<Admission<'_>, ProviderError> {
        let mut health = self.0.health();
        let is_probe = match health.open_until {
            None => false,
            Some(until) if until <= now && !health.probing => true,
            Some(until) => return Err(health.refusal(until.saturating_duration_since(now))),
        };
        health.probing |= is_probe;
        Ok(Admission { breaker: &self.0, is_probe })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut health = self.0.health();
        health.calls = health.calls.saturating_sub(1);
    }
}

impl Admission<'_> {
    /// Records the outcome of the try.
    pub(super) fn ended(self, outcome: &Result<Completion, ProviderError>, now: Instant) {
        let mut health = self.breaker.health();
        match outcome {
            Err(error) if error.kind == FailureKind::Transient => {
                health.failures += 1;
                health.last = Some(error.clone());
                let allowed = MAX_FAILURES * health.calls.max(1);
                if self.is_probe || (health.open_until.is_none() && health.failures > allowed) {
                    health.open_until = Some(now + OPEN_FOR);
                    tracing::warn!(
                        provider = error.provider,
                        failures = health.failures,
                        "breaker opened"
                    );
                }
            }
            Err(error) if error.kind == FailureKind::RateLimited && !self.is_probe => {}
            _ => (health.failures, health.open_until) = (0, None),
        }
    }
}

impl Drop for Admission<'_> {
    /// A cancelled probe makes room for another one.
    fn drop(&mut self) {
        if self.is_probe {
            self.breaker.health().probing = false;
        }
    }
}

impl Health {
    fn refusal(&self, left: Duration) -> ProviderError {
        let (failures, seconds) = (self.failures, left.as_secs().max(1));
        let message = self.last.as_ref().map_or("", |last| last.message.as_str());
        let message = format!(
            "not asked for another {seconds} s after {failures} failures in a row, the last: {message}"
        );
        let last = self.last.clone();
        ProviderError {
            provider: last.as_ref().map(|last| last.provider.clone()).unwrap_or_default(),
            kind: FailureKind::Transient,
            status: last.as_ref().and_then(|last| last.status),
            code: last.and_then(|last| last.code),
            message,
            retry_after: None,
            should_retry: None,
            usage: None,
        }
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
                admission.ended(outcome, now);
                true
            }
            Err(_) => false,
        });
        admitted.count()
    }

    #[test]
    fn the_sixth_fault_in_a_row_opens_it_for_30_seconds() {
        let (breakers, start) = (Breakers::default(), Instant::now());
        let call = breakers.call("m");
        let broken = || vec![fault(FailureKind::Transient); 8];
        assert_eq!(tries(&call, start, &broken()), 6);
        let refused = call.admit(start + Duration::from_secs(10)).err().unwrap();
        assert_eq!(
            (refused.kind, refused.status, refused.code.as_deref()),
            (FailureKind::Transient, Some(503), Some("overloaded"))
        );
        assert_eq!(
            refused.message,
            "not asked for another 20 s after 6 failures in a row, the last: busy"
        );
        assert_eq!(
            tries(&breakers.call("other"), start, &broken()[..1]),
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
            "a probe that nobody waited for is made again, and fails"
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
            let call = Breakers::default().call("m");
            let mut outcomes = vec![fault(Transient); 5];
            outcomes.extend([fault(kind), fault(kind)]);
            outcomes.extend(vec![fault(Transient); 6]);
            assert_eq!(tries(&call, Instant::now(), &outcomes), admitted, "{kind:?}");
        }
    }

    #[test]
    fn side_by_side_calls_bear_more() {
        let breakers = Breakers::default();
        let calls: Vec<Call> = (0..10).map(|_| breakers.call("m")).collect();
        let broken = vec![fault(FailureKind::Transient); 60];
        assert_eq!(tries(&calls[0], Instant::now(), &broken), 50 + 1);
    }

    #[test]
    fn made_up_names_are_forgotten() {
        let breakers = Breakers::default();
        for n in 0..3 * MAX_BREAKERS {
            drop(breakers.call(&format!("model-{n}")));
        }
        assert!(breakers.by_model.read().len() <= MAX_BREAKERS);
    }
}
