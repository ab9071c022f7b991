//! What the programs of one call ask the network: admitted, counted and kept for the audit log.
//!
//! How many a call may send is bounded here, and by what is left of the run's budget, which calls
//! that are executed together share. Whether a request is permitted is the permit's to say.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chrono::{DateTime, TimeDelta, Utc};
use parking_lot::Mutex;
use serde_json::json;

use super::audit_arguments::shown;
use crate::clock;
use crate::event::{AuditRecord, NetworkUse};
use crate::governance::Decision;
use crate::message::canonical_json;
use crate::run::{Labels, Target};

/// Requests of one call, refused ones included.
const MAX_REQUESTS: usize = 1_000;
/// Reasons of refusals that are told.
const TOLD: usize = 5;

/// The requests of one call. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Requests(Arc<Mutex<Told>>);

/// How many requests a run may still send; none where that is not limited.
#[derive(Debug, Clone, Default)]
pub struct RequestsLeft(Option<Arc<AtomicU64>>);

#[derive(Debug, Default)]
struct Told {
    left: RequestsLeft,
    asked: Vec<Asked>,
    totals: NetworkUse,
    /// Reasons of refusals.
    reasons: BTreeSet<String>,
}

#[derive(Debug)]
struct Asked {
    at: DateTime<Utc>,
    method: String,
    target: Target,
    decision: Decision,
    reason: Option<String>,
    outcome: &'static str,
}

/// An admitted request, until it is known what became of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Admitted(usize);

impl RequestsLeft {
    pub fn of(left: Option<u64>) -> Self {
        Self(left.map(|left| Arc::new(AtomicU64::new(left))))
    }

    fn take(&self) -> bool {
        let less = |left: u64| left.checked_sub(1);
        let Some(left) = &self.0 else { return true };
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

impl Requests {
    /// Counts on what the run has left.
    pub(super) fn within(&self, left: RequestsLeft) {
        self.0.lock().left = left;
    }

    /// Takes note of a request and of what the rules say to it.
    ///
    /// # Errors
    /// Why it is not sent.
    pub(super) fn admit(
        &self,
        method: &str,
        target: Target,
        (decision, reason): (Decision, Option<String>),
    ) -> Result<Admitted, String> {
        let mut told = self.0.lock();
        if told.asked.len() >= MAX_REQUESTS {
            told.totals.refused += 1;
            return Err(told.refuses(format!("this call has sent {MAX_REQUESTS} requests")));
        }
        let mut asked = Asked {
            at: told.next(),
            method: method.to_owned(),
            target,
            decision,
            reason,
            outcome: "",
        };
        let is_objected = decision > Decision::Warned;
        if !is_objected && !told.left.take() {
            told.totals.over_budget = true;
            asked.decision = Decision::Blocked;
            asked.reason =
                Some("the run's budget of requests is used up (network.max_requests)".to_owned());
        }
        let refused = asked.decision > Decision::Warned;
        asked.outcome = if refused { "blocked" } else { "cancelled" };
        let reason = asked.reason.clone().unwrap_or_default();
        told.asked.push(asked);
        if refused {
            told.totals.refused += 1;
            return Err(told.refuses(reason));
        }
        told.totals.requests += 1;
        Ok(Admitted(told.asked.len() - 1))
    }

    /// What became of a request.
    pub(super) fn settle(&self, Admitted(place): Admitted, failure: Option<&str>) {
        let mut told = self.0.lock();
        if let Some(asked) = told.asked.get_mut(place) {
            asked.outcome = if failure.is_none() { "succeeded" } else { "failed" };
            asked.reason = failure.map(str::to_owned).or(asked.reason.take());
        }
        if let Some(failure) = failure {
            told.refuses(failure.to_owned());
        }
    }

    /// Why requests were not answered, each reason once, as far as they are told.
    pub(super) fn refusals(&self) -> Vec<String> {
        self.0.lock().reasons.iter().cloned().collect()
    }

    /// What the call has read: what an outsider can write, if anything was answered.
    pub(super) fn labels(&self) -> Labels {
        if self.0.lock().totals.requests > 0 { Labels::UNTRUSTED } else { Labels::default() }
    }

    /// How much was asked; none where nothing was.
    pub(super) fn totals(&self) -> Option<NetworkUse> {
        let totals = self.0.lock().totals;
        (totals != NetworkUse::default()).then_some(totals)
    }

    /// For the audit log: a record of each request, and after them that of the call.
    pub(super) fn audited(&self, call: AuditRecord) -> (Vec<AuditRecord>, AuditRecord) {
        let mut told = self.0.lock();
        let asked = std::mem::take(&mut told.asked);
        let record = |asked: Asked| {
            let Asked { at, method, target, decision, reason, outcome } = asked;
            let Target { scheme, host, port, path, .. } = target;
            let arguments = json!({"request": {"method": method, "scheme": scheme, "host": host,
                "port": port, "path": path}});
            let canonical = canonical_json(arguments.clone());
            let objects = decision != Decision::Allowed;
            AuditRecord {
                at,
                rule: if objects { "network" } else { "none" }.to_owned(),
                pattern: None,
                decision: decision.as_str().to_owned(),
                reason,
                arguments: shown(&arguments, canonical),
                outcome: outcome.to_owned(),
                duration_ms: None,
                ..call.clone()
            }
        };
        let last = asked.last().map(|asked| asked.at + TimeDelta::microseconds(1));
        let at = last.map_or(call.at, |last| last.max(call.at));
        (asked.into_iter().map(record).collect(), AuditRecord { at, ..call })
    }
}

impl Told {
    /// Now, or a little later: no two records of a call have the same time, which identifies them.
    fn next(&self) -> DateTime<Utc> {
        let after = self.asked.last().map(|asked| asked.at + TimeDelta::microseconds(1));
        after.map_or_else(clock::now, |after| after.max(clock::now()))
    }

    fn refuses(&mut self, reason: String) -> String {
        if self.reasons.len() < TOLD {
            self.reasons.insert(reason.clone());
        }
        reason
    }
}
