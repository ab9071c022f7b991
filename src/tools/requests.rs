//! The network requests of one call: admitted and counted, redirects and retries included.
//!
//! Their number is bounded per call, by the rest of the run's own budget, which calls that are executed
//! together share, and by the budget that the run shares with other runs. Requests that were counted when
//! the call started are not counted again. Requests of programs are recorded in the audit log one by one;
//! those of the tool itself are part of its call. The permit decides which requests are permitted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::audit_arguments::shown;
use crate::clock;
use crate::event::{AuditRecord, NetworkUse, SharedRequests};
use crate::governance::{Decision, LaterRuling};
use crate::message::canonical_json;
use crate::outbound::Announce;
use crate::run::{CapExceeded, Labels, Reserved, Target};

/// Requests of one call, refused ones included.
const MAX_REQUESTS: usize = 1_000;
/// Reasons of refusals that are reported.
const MAX_LISTED: usize = 5;
const USED_UP: &str = "the run's budget of requests is used up (network.max_requests)";

/// The requests of one call. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Requests(Arc<Mutex<RequestLog>>);

/// Reserves one request of the budget that the run shares with others; nothing where that cannot be
/// asked.
pub type SharedReserve = Arc<dyn Fn() -> BoxFuture<'static, Option<Reserved>> + Send + Sync>;

/// How many requests a run may still send.
#[derive(Clone, Default)]
pub struct RequestsLeft {
    /// None where the run itself has no limit.
    own: Option<Arc<AtomicU64>>,
    /// None where it shares nothing.
    shared: Option<SharedReserve>,
}

#[derive(Debug, Default)]
struct RequestLog {
    /// The tenant for which they are sent; empty for the service itself.
    tenant: String,
    left: RequestsLeft,
    /// Requests that the start of the call counted and that are not sent yet.
    paid: u64,
    entries: Vec<LogEntry>,
    /// Whether programs have sent requests.
    by_programs: bool,
    totals: NetworkUse,
    /// Reasons of refusals.
    reasons: BTreeSet<String>,
    /// Whether any of the tool's own requests was answered; `None` if the tool does not report it.
    answered: Option<bool>,
    /// The `Retry-After` of the service that answered last.
    pause: Option<Duration>,
}

#[derive(Debug)]
struct LogEntry {
    at: DateTime<Utc>,
    what: What,
    rule: &'static str,
    pattern: Option<String>,
    decision: Decision,
    reason: Option<String>,
    outcome: &'static str,
}

#[derive(Debug)]
enum What {
    Request {
        method: String,
        target: Target,
    },
    /// A file that a request returned, and that was to be written.
    File {
        path: String,
        bytes: u64,
        url: String,
    },
    /// Something that programs have left in the workspace.
    Leftover {
        path: String,
        /// Where it was put, beneath the directory of all workspaces.
        kept: Option<String>,
    },
}

impl What {
    fn shown(self) -> Value {
        match self {
            Self::Request { method, target: Target { scheme, host, port, path, .. } } => json!({
                "request": {"method": method, "scheme": scheme, "host": host, "port": port, "path": path}}),
            Self::File { path, bytes, url } => {
                json!({"download": {"path": path, "bytes": bytes, "url": url}})
            }
            Self::Leftover { path, kept: None } => json!({"left": {"path": path}}),
            Self::Leftover { path, kept } => json!({"left": {"path": path, "kept": kept}}),
        }
    }
}

/// An admitted request, until its outcome is recorded.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdmittedRequest(usize);

impl RequestsLeft {
    pub fn of(left: Option<u64>) -> Self {
        Self { own: left.map(|left| Arc::new(AtomicU64::new(left))), shared: None }
    }

    /// The same with a reservation from a shared budget for each request. A run without a limit of its own
    /// needs none: limits of its parents would apply to it, too, so they have none either.
    #[must_use]
    pub fn shared_by(self, shared: Option<SharedReserve>) -> Self {
        Self { shared: shared.filter(|_| self.own.is_some()), ..self }
    }

    fn take(&self) -> bool {
        let less = |left: u64| left.checked_sub(1);
        let Some(left) = &self.own else { return true };
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

impl std::fmt::Debug for RequestsLeft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_shared = self.shared.is_some();
        f.debug_struct("RequestsLeft").field("own", &self.own).field("shared", &is_shared).finish()
    }
}

impl Requests {
    /// The requests of a call for that tenant, none so far.
    pub(super) fn of(tenant: &str) -> Self {
        let log = RequestLog { tenant: tenant.to_owned(), ..RequestLog::default() };
        Self(Arc::new(Mutex::new(log)))
    }

    /// The tenant for which they are sent.
    pub(super) fn tenant(&self) -> String {
        self.0.lock().tenant.clone()
    }

    /// Sets the requests that the run has left.
    pub(super) fn within(&self, left: RequestsLeft) {
        self.0.lock().left = left;
    }

    /// Notes how many requests the start of the call counted.
    pub(super) fn announced(&self, requests: u64) {
        let mut log = self.0.lock();
        (log.paid, log.totals.announced) = (requests, requests);
    }

    /// Counts a request of the tool itself.
    ///
    /// # Errors
    /// Why it is not sent.
    async fn count(&self) -> Result<(), String> {
        let refused = self.reserve().await.err();
        let mut log = self.0.lock();
        if let Some(why) = refused {
            return Err(log.declined(why));
        }
        if log.totals.requests >= MAX_REQUESTS as u64 {
            return Err(log.declined(format!("this call has sent {MAX_REQUESTS} requests")));
        }
        if !log.pays() {
            log.totals.over_budget = true;
            return Err(log.declined(USED_UP.to_owned()));
        }
        log.totals.requests += 1;
        Ok(())
    }

    /// The same as [`Self::admit`], within what all runs may send that share a budget.
    ///
    /// # Errors
    /// Why it is not sent.
    pub(super) async fn ask(
        &self,
        method: &str,
        target: Target,
        ruling: LaterRuling,
    ) -> Result<AdmittedRequest, String> {
        let is_objected = ruling.decision > Decision::Warned;
        let refused = if is_objected { None } else { self.reserve().await.err() };
        match refused {
            None => self.admit(method, target, ruling),
            Some(why) => {
                let reason = Some(why.clone());
                let refused =
                    LaterRuling { decision: Decision::Blocked, reason, pattern: None, ..ruling };
                self.admit(method, target, refused).and(Err(why))
            }
        }
    }

    /// Reserves what the next request takes of a shared budget.
    async fn reserve(&self) -> Result<(), String> {
        let shared = {
            let log = self.0.lock();
            if log.paid > 0 { None } else { log.left.shared.clone() }
        };
        let Some(shared) = shared else { return Ok(()) };
        match shared().await {
            Some(Reserved::Granted) => Ok(()),
            Some(Reserved::Refused(CapExceeded { used, reserved, max, .. })) => {
                let used = used.saturating_add(reserved);
                let totals = &mut self.0.lock().totals;
                totals.over_budget = true;
                totals.shared = Some(SharedRequests { used, max });
                Err("the budget of requests that the run shares with others is used up \
                    (network.max_requests)"
                    .to_owned())
            }
            None => Err("the budget that the run shares with others could not be read".to_owned()),
        }
    }

    /// The same as [`Self::count`], for a client that is about to send.
    pub(super) fn counting(&self) -> Box<Announce> {
        let requests = self.clone();
        Box::new(move || {
            let requests = requests.clone();
            Box::pin(async move { requests.count().await })
        })
    }

    /// Notes whether a request of the tool itself was answered.
    pub(super) fn came_back(&self, is_answered: bool) {
        let mut log = self.0.lock();
        log.answered = Some(is_answered || log.answered.unwrap_or_default());
    }

    /// Whether nothing was read: no request of the tool was answered.
    pub(super) fn had_no_answer(&self) -> bool {
        let log = self.0.lock();
        log.answered == Some(false) && !log.by_programs
    }

    /// Notes the `Retry-After` of an answer.
    pub(super) fn note_pause(&self, pause: Duration) {
        self.0.lock().pause = Some(pause);
    }

    /// Takes the noted `Retry-After`.
    pub(super) fn take_pause(&self) -> Option<Duration> {
        self.0.lock().pause.take()
    }

    /// Whether the budget has refused a request, so that the run ends with the call.
    pub(super) fn is_over_budget(&self) -> bool {
        self.0.lock().totals.over_budget
    }

    /// Records a request and the decision on it.
    ///
    /// # Errors
    /// Why it is not sent.
    fn admit(
        &self,
        method: &str,
        target: Target,
        LaterRuling { decision, rule, pattern, reason }: LaterRuling,
    ) -> Result<AdmittedRequest, String> {
        let mut log = self.0.lock();
        if log.entries.len() >= MAX_REQUESTS {
            return Err(log.declined(format!("this call has sent {MAX_REQUESTS} requests")));
        }
        let mut entry = LogEntry {
            at: log.next(),
            what: What::Request { method: method.to_owned(), target },
            rule,
            pattern,
            decision,
            reason,
            outcome: "",
        };
        let is_objected = decision > Decision::Warned;
        if !is_objected && !log.pays() {
            log.totals.over_budget = true;
            entry.decision = Decision::Blocked;
            entry.reason = Some(USED_UP.to_owned());
            entry.pattern = None;
        }
        let refused = entry.decision > Decision::Warned;
        entry.outcome = if refused { "blocked" } else { "cancelled" };
        let reason = entry.reason.clone().unwrap_or_default();
        log.entries.push(entry);
        if refused {
            return Err(log.declined(reason));
        }
        log.totals.requests += 1;
        log.by_programs = true;
        Ok(AdmittedRequest(log.entries.len() - 1))
    }

    /// Records the outcome of a request.
    pub(super) fn settle(&self, AdmittedRequest(place): AdmittedRequest, failure: Option<&str>) {
        let mut log = self.0.lock();
        if let Some(entry) = log.entries.get_mut(place) {
            entry.outcome = if failure.is_none() { "succeeded" } else { "failed" };
            entry.reason = failure.map(str::to_owned).or(entry.reason.take());
        }
        if let Some(failure) = failure {
            log.refuses(failure.to_owned());
        }
    }

    /// Records the decision on a file that came with a request. Unless it is blocked, its outcome is
    /// recorded with [`Self::record_written`] or [`Self::settle`].
    pub(super) fn file(
        &self,
        path: &str,
        bytes: u64,
        url: &str,
        ruling: LaterRuling,
    ) -> AdmittedRequest {
        let LaterRuling { decision, rule, pattern, reason } = ruling;
        let mut log = self.0.lock();
        let outcome = if decision > Decision::Warned { "blocked" } else { "failed" };
        let what = What::File { path: path.to_owned(), bytes, url: without_query(url) };
        let at = log.next();
        log.entries.push(LogEntry { at, what, rule, pattern, decision, reason, outcome });
        AdmittedRequest(log.entries.len() - 1)
    }

    /// Records the decision on a file that programs left in the workspace, and its outcome.
    pub(super) fn record_leftover(
        &self,
        path: &str,
        kept: Option<String>,
        ruling: LaterRuling,
        outcome: &'static str,
    ) {
        let LaterRuling { decision, rule, pattern, reason } = ruling;
        let mut log = self.0.lock();
        if log.entries.len() >= MAX_REQUESTS {
            return;
        }
        let at = log.next();
        let what = What::Leftover { path: path.to_owned(), kept };
        log.entries.push(LogEntry { at, what, rule, pattern, decision, reason, outcome });
    }

    /// Records that a file was written.
    pub(super) fn record_written(&self, AdmittedRequest(place): AdmittedRequest) {
        if let Some(entry) = self.0.lock().entries.get_mut(place) {
            entry.outcome = "succeeded";
        }
    }

    /// Why requests were not answered, each reason once, as far as they are reported.
    pub(super) fn refusals(&self) -> Vec<String> {
        self.0.lock().reasons.iter().cloned().collect()
    }

    /// The labels of what programs have read: untrusted, if they sent any request.
    pub(super) fn labels(&self) -> Labels {
        if self.0.lock().by_programs { Labels::UNTRUSTED } else { Labels::default() }
    }

    /// The number of requests; `None` if there were none.
    pub(super) fn totals(&self) -> Option<NetworkUse> {
        let totals = self.0.lock().totals;
        (totals.requests > 0 || totals.refused > 0).then_some(totals)
    }

    /// For the audit log: a record of each request, and after them that of the call.
    pub(super) fn audited(&self, call: AuditRecord) -> (Vec<AuditRecord>, AuditRecord) {
        let mut log = self.0.lock();
        let entries = std::mem::take(&mut log.entries);
        let record = |entry: LogEntry| {
            let LogEntry { at, what, rule, pattern, decision, reason, outcome } = entry;
            let arguments = what.shown();
            let canonical = canonical_json(arguments.clone());
            AuditRecord {
                at,
                rule: rule.to_owned(),
                pattern,
                decision: decision.as_str().to_owned(),
                reason,
                arguments: shown(&arguments, canonical),
                outcome: outcome.to_owned(),
                duration_ms: None,
                result_bytes: None,
                ..call.clone()
            }
        };
        let last = entries.last().map(|entry| entry.at + TimeDelta::microseconds(1));
        let at = last.map_or(call.at, |last| last.max(call.at));
        (entries.into_iter().map(record).collect(), AuditRecord { at, ..call })
    }
}

/// An address as the audit log keeps it, or only its scheme where what follows is no address.
fn without_query(url: &str) -> String {
    let is_address = url.starts_with("http://") || url.starts_with("https://");
    let end = if is_address { &['?', '#'][..] } else { &[':'][..] };
    url.split(end).next().unwrap_or_default().to_owned()
}

impl RequestLog {
    /// Takes one request from those already counted, or else from the budget; false if both are used up.
    fn pays(&mut self) -> bool {
        match self.paid.checked_sub(1) {
            Some(rest) => {
                self.paid = rest;
                true
            }
            None => self.left.take(),
        }
    }

    /// Now, or a little later: no two records of a call have the same time, which identifies them.
    fn next(&self) -> DateTime<Utc> {
        let after = self.entries.last().map(|entry| entry.at + TimeDelta::microseconds(1));
        after.map_or_else(clock::now, |after| after.max(clock::now()))
    }

    /// Counts a request that is not sent.
    fn declined(&mut self, reason: String) -> String {
        self.totals.refused += 1;
        self.refuses(reason)
    }

    fn refuses(&mut self, reason: String) -> String {
        if self.reasons.len() < MAX_LISTED {
            self.reasons.insert(reason.clone());
        }
        reason
    }
}
