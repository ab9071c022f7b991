//! Answers to parked runs: who may give them, how they are checked, and how the run gets them.
//!
//! The store accepts one answer per request, and queues the run. The replica that claims the run records the
//! answers that the journal does not have yet as events.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use super::Runtime;
use crate::bounds::secrets;
use crate::engine::State;
use crate::event::{AuditRecord, Resolution, ValidationError, WaitKind};
use crate::message::visible::escaped;
use crate::run::{Caller, Labels, RunStatus};
use crate::store::{
    Answer, ApprovalFilter, ApprovalRecord, ApprovalStatus, Page, RunRecord, StoreError,
};
use crate::tools::approval::{LAPSED, decision_record, executed_by_caller};
use crate::tools::results::capped;

/// Requests that are read of one run; it has at most one per call.
const MAX_ROWS: u32 = 10_000;

/// Bytes of arguments, as JSON, that are shown of the requests of a run and its descendants. Beyond that,
/// only arguments of at most [`SMALL_ARGUMENT_BYTES`] are shown.
const MAX_ARGUMENT_BYTES: u64 = 4 << 20;
const SMALL_ARGUMENT_BYTES: u64 = 4096;

/// The outcome of a call that a crash left unknown, as a reviewer found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReviewFinding {
    /// It took effect.
    Happened {
        /// Its result, if known.
        result: Option<String>,
    },
    /// It did not, and may be executed now.
    DidNotHappen,
}

/// Why an answer was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// No such run of this tenant.
    #[error("there is no such run")]
    UnknownRun,
    /// The run has no such call.
    #[error("there is no such tool call")]
    UnknownCall,
    /// There is no pending request of this kind, or no longer.
    #[error("{0}")]
    NotPending(String),
    /// The edited arguments do not match the tool's schema; pointers are into the request body.
    #[error("the arguments do not match the tool's schema")]
    InvalidArguments(Vec<ValidationError>),
    /// The caller lacks this scope.
    #[error("this requires the scope `{0}`")]
    MissingScope(String),
    /// `governance.approver` requires another key than the one that started the run.
    #[error(
        "the key that started a run, and keys that it created, may not approve its calls, nor say \
         what became of them; they may deny them (governance.approver)"
    )]
    OwnApproval,
    /// This replica cannot reach the run's files now.
    #[error("the run's files cannot be reached: {0}")]
    NoWorkspace(String),
    /// The run's definition cannot be loaded.
    #[error("the run's definition cannot be used: {0}")]
    Broken(String),
    /// The check of the answer failed.
    #[error("the answer could not be checked")]
    Unchecked,
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Who may approve a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Approver {
    /// Every key with the scope.
    Any,
    /// Every key with the scope, except the one that started the run and all keys created with it. Otherwise, a
    /// caller that may create keys could approve its own calls.
    NotTheCaller,
}

/// The pending requests of a run and its descendants.
#[derive(Debug, Clone, PartialEq)]
pub struct OutstandingRequests {
    /// The status of the run; that of its child runs, if it waits for them.
    pub status: RunStatus,
    /// The calls that wait for an answer, its own and those of its descendants.
    pub pending: Vec<ApprovalRecord>,
}

/// The known pending requests of runs, and the limits for reading further ones.
#[derive(Debug)]
pub struct KnownRequests {
    /// Bytes beyond which arguments are left out.
    most_bytes: u64,
    /// Bytes of arguments that are still read whatever their size, at least those of one run.
    whole: u64,
    known: HashMap<Uuid, Vec<ApprovalRecord>>,
}

impl KnownRequests {
    fn whole() -> Self {
        Self { most_bytes: SMALL_ARGUMENT_BYTES, whole: MAX_ARGUMENT_BYTES, known: HashMap::new() }
    }

    fn none() -> Self {
        Self { most_bytes: 0, whole: 0, known: HashMap::new() }
    }
}

/// What may wait for something.
enum Open {
    Run(Uuid),
    Call(Box<ApprovalRecord>),
}

/// The call that an answer is for.
#[derive(Debug, Clone, Copy)]
pub struct CallRef {
    /// The run.
    pub run: Uuid,
    /// The call, or an escalation's own id.
    pub call: Uuid,
    /// The event with the request, if the answer names it: a call can be requested again with other content.
    pub seq: Option<i64>,
}

impl CallRef {
    /// Checks that the answer is for the open request, among all requests of the call.
    fn check(self, open: &ApprovalRecord, asked: &[ApprovalRecord]) -> Result<(), AnswerError> {
        let Some(seen) = self.seq.filter(|seen| *seen != open.seq) else { return Ok(()) };
        let (now, reason) = (open.seq, escaped(&open.reason));
        Err(AnswerError::NotPending(if asked.iter().any(|asked| asked.seq == seen) {
            let why = reason.rfind(LAPSED).map_or(&*reason, |at| &reason[at..]);
            format!("This call was asked about anew, by event {now} after event {seen}. {why}")
        } else {
            format!("Event {seen} does not ask about this call, event {now} does: {reason}")
        }))
    }
}

/// The call was answered or expired, or its run ended.
pub(super) fn no_longer_pending() -> AnswerError {
    let why = "This call no longer waits: it was answered in the meantime, or its time was over.";
    AnswerError::NotPending(why.to_owned())
}

/// What a call waits for instead, or how it was answered; `None` if it never waited.
fn why_not_pending(asked: &[ApprovalRecord]) -> Option<String> {
    if let Some(open) = asked.iter().find(|asked| asked.status == ApprovalStatus::Pending) {
        let what = match open.kind {
            WaitKind::Approval | WaitKind::Escalation => "a decision: `/approve` or `/deny`",
            WaitKind::Client => "its result: `/result`",
            WaitKind::Review => "a review: `/resolve`",
            WaitKind::Child => "the end of a child run",
        };
        return Some(format!("This call waits for another kind of answer, {what}."));
    }
    let last = asked.iter().max_by_key(|asked| asked.seq)?;
    let by = last.decided_by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default();
    let at = last.decided_at.map(|at| format!(" at {}", at.format("%Y-%m-%dT%H:%M:%SZ")));
    let at = at.unwrap_or_default();
    Some(match last.status {
        ApprovalStatus::Approved => format!("This call was already approved{by}{at}."),
        ApprovalStatus::Denied => format!("This call was already denied{by}{at}."),
        ApprovalStatus::Expired => format!("There was no answer in time; the request expired{at}."),
        ApprovalStatus::Answered => format!("This call already has its result{by}{at}."),
        ApprovalStatus::Resolved => format!("This call was already resolved{by}{at}."),
        ApprovalStatus::Void => "The run ended first; the call was not executed.".to_owned(),
        ApprovalStatus::Pending => return None,
    })
}

impl Runtime {
    /// Approves a call, perhaps with edited arguments, or lets the run continue; removes labels from the run.
    /// Returns the updated run.
    ///
    /// # Errors
    /// [`AnswerError`]; nothing was taken then.
    pub async fn approve(
        &self,
        caller: &Caller,
        call_ref: CallRef,
        reason: Option<String>,
        arguments: Option<Value>,
        clears: Labels,
    ) -> Result<RunRecord, AnswerError> {
        let (run, asked) =
            self.pending_request(&caller.tenant, call_ref, WaitKind::DECISIONS).await?;
        self.check_approver(caller, &run).await?;
        let arguments = arguments.map(|edited| secrets::restored(edited, &asked.arguments));
        let actions = match &arguments {
            Some(arguments) => self.check_edited(caller, &run, &asked, arguments).await?,
            None => Arc::default(),
        };
        let shown = arguments.as_ref().unwrap_or(&asked.arguments).clone();
        let edited =
            if arguments.is_some() { "Approved with edited arguments" } else { "Approved" };
        let mut why = sentence(edited, caller, &run, reason.as_deref());
        if !clears.are_none() {
            let _ = write!(why, " (clears {})", clears.names().join(" and "));
        }
        let audit =
            decision_record(call_ref.call, &asked.tool, &shown, asked.kind.as_str(), true, why);
        let resolution = Resolution::Approved { arguments, clears, actions };
        let answer = Answer { reason, ..Answer::to(asked.seq, resolution, caller, audit) };
        self.store_answer(&run, call_ref.call, answer).await
    }

    /// Denies a call, or the continuation of the run. Returns the updated run.
    ///
    /// # Errors
    /// [`AnswerError`]; nothing was taken then.
    pub async fn deny(
        &self,
        caller: &Caller,
        call_ref: CallRef,
        reason: Option<String>,
    ) -> Result<RunRecord, AnswerError> {
        let (run, asked) =
            self.pending_request(&caller.tenant, call_ref, WaitKind::DECISIONS).await?;
        let reason = reason.map(|reason| secrets::without_known_secrets(&reason).into_owned());
        let why = sentence("Denied", caller, &run, reason.as_deref());
        let audit = decision_record(
            call_ref.call,
            &asked.tool,
            &asked.arguments,
            asked.kind.as_str(),
            false,
            why,
        );
        let answer = Answer { reason, ..Answer::to(asked.seq, Resolution::Denied, caller, audit) };
        self.store_answer(&run, call_ref.call, answer).await
    }

    /// Stores the result of a call that the caller has executed. Returns the updated run.
    ///
    /// # Errors
    /// [`AnswerError`]; nothing was taken then.
    pub async fn give_result(
        &self,
        caller: &Caller,
        call_ref: CallRef,
        content: String,
        is_error: bool,
    ) -> Result<RunRecord, AnswerError> {
        let (run, asked) =
            self.pending_request(&caller.tenant, call_ref, WaitKind::RESULTS).await?;
        check_answerer(caller, &run)?;
        if asked.input.is_some() {
            let message = "must be absent: the tool of this call asks for `responses`".to_owned();
            let error = ValidationError { pointer: "/content".to_owned(), message };
            return Err(AnswerError::InvalidArguments(vec![error]));
        }
        let why = format!("Executed by {}.", caller.subject);
        let (call, tool, arguments) = (call_ref.call, &asked.tool, &asked.arguments);
        let audit = executed_by_caller(call, tool, arguments, &content, is_error, why);
        let content = capped(secrets::without_known_secrets(&content).into_owned());
        let resolution = Resolution::Result { content, is_error };
        self.store_answer(&run, call_ref.call, Answer::to(asked.seq, resolution, caller, audit))
            .await
    }

    /// Stores the outcome of a call that a crash left unknown. Returns the updated run.
    ///
    /// # Errors
    /// [`AnswerError`]; nothing was taken then.
    pub async fn review(
        &self,
        caller: &Caller,
        call_ref: CallRef,
        finding: ReviewFinding,
    ) -> Result<RunRecord, AnswerError> {
        let (run, asked) =
            self.pending_request(&caller.tenant, call_ref, WaitKind::REVIEWS).await?;
        self.check_approver(caller, &run).await?;
        let (resolution, what, outcome) = match finding {
            ReviewFinding::Happened { result } => (
                Resolution::Happened {
                    result: result
                        .map(|it| capped(secrets::without_known_secrets(&it).into_owned())),
                },
                "Reported as succeeded",
                "succeeded",
            ),
            ReviewFinding::DidNotHappen => (
                Resolution::DidNotHappen,
                "Reported as not executed, and executed now,",
                "not_executed", // the execution has a record of its own
            ),
        };
        let why = format!("{what} by {}{}.", caller.subject, own_run_remark(caller, &run));
        let audit = decision_record(
            call_ref.call,
            &asked.tool,
            &asked.arguments,
            asked.kind.as_str(),
            true,
            why,
        );
        let audit = AuditRecord { outcome: outcome.to_owned(), ..audit };
        self.store_answer(&run, call_ref.call, Answer::to(asked.seq, resolution, caller, audit))
            .await
    }

    /// Checks that the caller may approve and review calls of this run.
    async fn check_approver(&self, caller: &Caller, run: &RunRecord) -> Result<(), AnswerError> {
        let is_own = match self.inner.settings.approver {
            Approver::Any => false,
            Approver::NotTheCaller if caller.subject == run.subject => true,
            Approver::NotTheCaller => {
                self.inner.store.key_descends_from(&caller.subject, &run.subject).await?
            }
        };
        if is_own { Err(AnswerError::OwnApproval) } else { Ok(()) }
    }

    pub(super) async fn store_answer(
        &self,
        run: &RunRecord,
        call: Uuid,
        mut answer: Answer,
    ) -> Result<RunRecord, AnswerError> {
        let labels = Labels::named(&run.labels);
        answer.audit = answer.audit.map(|audit| AuditRecord { labels, ..audit });
        let taken = self.inner.store.answer(&run.tenant, run.id, call, &answer).await?;
        self.inner.queue.changed.notify_one();
        taken.ok_or_else(no_longer_pending)
    }

    /// The pending request of these kinds.
    pub(super) async fn pending_request(
        &self,
        tenant: &str,
        call_ref: CallRef,
        kinds: &[WaitKind],
    ) -> Result<(RunRecord, ApprovalRecord), AnswerError> {
        let store = &self.inner.store;
        let run = store.run(tenant, call_ref.run).await?.ok_or(AnswerError::UnknownRun)?;
        let filter = ApprovalFilter {
            run_id: Some(call_ref.run),
            call_id: Some(call_ref.call),
            ..ApprovalFilter::default()
        };
        let asked =
            store.approvals(tenant, &filter, &Page { limit: MAX_ROWS, after: None }).await?;
        let waits = |asked: &&ApprovalRecord| {
            asked.status == ApprovalStatus::Pending && kinds.contains(&asked.kind)
        };
        if let Some(open) = asked.iter().find(waits) {
            call_ref.check(open, &asked)?;
            return Ok((run, open.clone()));
        }
        if let Some(why) = why_not_pending(&asked) {
            return Err(AnswerError::NotPending(why));
        }
        if !store.has_tool_call(tenant, call_ref.run, call_ref.call).await? {
            return Err(AnswerError::UnknownCall);
        }
        Err(AnswerError::NotPending("This call does not wait for an answer.".to_owned()))
    }

    /// The pending requests of a run, in the order of its events, and its status. A call that waits for a child
    /// run is replaced by the requests of the child. Requests of children are included even if the run itself is
    /// not parked. Arguments are omitted if they are too large.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be read.
    pub async fn outstanding(&self, run: &RunRecord) -> Result<OutstandingRequests, StoreError> {
        self.outstanding_with(run, &mut KnownRequests::whole()).await
    }

    /// Reads the pending requests of several runs of a tenant in one query, for [`Runtime::outstanding_with`],
    /// without arguments of more than `most_bytes`.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be read.
    pub async fn pending_requests_of(
        &self,
        tenant: &str,
        runs: &[RunRecord],
        most_bytes: u64,
    ) -> Result<KnownRequests, StoreError> {
        let parked = runs.iter().filter(|run| run.status.is_parked());
        let parked: Vec<Uuid> = parked.map(|run| run.id).collect();
        let mut known: HashMap<Uuid, Vec<ApprovalRecord>> = HashMap::new();
        if !parked.is_empty() {
            known.extend(parked.iter().map(|run| (*run, Vec::new())));
            for asked in self.inner.store.pending(tenant, &parked, most_bytes).await? {
                known.entry(asked.run_id).or_default().push(asked);
            }
        }
        Ok(KnownRequests { most_bytes, whole: 0, known })
    }

    /// Like [`Runtime::outstanding`], using the requests that are known already.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be read.
    pub async fn outstanding_with(
        &self,
        run: &RunRecord,
        known: &mut KnownRequests,
    ) -> Result<OutstandingRequests, StoreError> {
        let is_parked = run.status.is_parked();
        let may_have_children = run.status == RunStatus::Running && run.has_delegated();
        let waits = is_parked
            || (may_have_children && self.inner.store.waits_below(&run.tenant, run.id).await?);
        if !waits {
            return Ok(OutstandingRequests { status: run.status, pending: Vec::new() });
        }
        let (mut open, mut found) = (vec![(Open::Run(run.id), is_parked)], Vec::new());
        let mut seen = HashSet::new(); // in damaged rows, parents can be a circle
        while let Some((next, holds)) = open.pop()
            && found.len() < MAX_ROWS as usize
        {
            let id = match next {
                Open::Run(id) => id,
                Open::Call(asked) => {
                    let Some(child) = asked.child_run_id else {
                        found.push((*asked, holds));
                        continue;
                    };
                    child
                }
            };
            if !seen.insert(id) {
                continue;
            }
            let asked = self.pending_requests(&run.tenant, id, known).await?;
            if asked.is_empty() {
                let children = self.inner.store.live_children(&run.tenant, id).await?;
                open.extend(children.into_iter().map(|child| (Open::Run(child), false)));
            } else {
                let calls = asked.into_iter().map(|asked| (Open::Call(Box::new(asked)), holds));
                open.extend(calls);
            }
        }
        let holding: Vec<WaitKind> =
            found.iter().filter(|(_, holds)| *holds).map(|(asked, _)| asked.kind).collect();
        let status = if is_parked { status_of_parked(&holding) } else { run.status };
        Ok(OutstandingRequests {
            status,
            pending: found.into_iter().map(|(asked, _)| asked).collect(),
        })
    }

    /// The status of a run.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be read.
    pub async fn status_of(&self, run: &RunRecord) -> Result<RunStatus, StoreError> {
        if !run.status.is_parked() {
            return Ok(run.status);
        }
        Ok(self.outstanding_with(run, &mut KnownRequests::none()).await?.status)
    }

    /// The requests of a run of this tenant, the newest first.
    async fn pending_requests(
        &self,
        tenant: &str,
        run: Uuid,
        known: &mut KnownRequests,
    ) -> Result<Vec<ApprovalRecord>, StoreError> {
        if let Some(asked) = known.known.remove(&run) {
            return Ok(asked);
        }
        let most = if known.whole > 0 { u64::MAX } else { known.most_bytes };
        let asked = self.inner.store.pending(tenant, &[run], most).await?;
        if known.whole > 0 {
            let bytes = asked.iter().map(|asked| asked.arguments.to_string().len() as u64);
            known.whole = known.whole.saturating_sub(bytes.sum());
        }
        Ok(asked)
    }

    /// The answers to the requests of a run, in the order of the requests.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if a request is missing or cannot be read: parked again, the run would be queued at
    /// once, because the store knows of nothing that it waits for.
    pub(super) async fn answers_to(
        &self,
        run: &RunRecord,
        state: &State,
    ) -> Result<Vec<ApprovalRecord>, StoreError> {
        let filter = ApprovalFilter { run_id: Some(run.id), ..ApprovalFilter::default() };
        let page = Page { limit: MAX_ROWS, after: None };
        let mut asked = self.inner.store.approvals(&run.tenant, &filter, &page).await?;
        asked.retain(|asked| state.awaits(asked.seq));
        if asked.len() < state.waiting().count() && run.cancel_requested_at.is_none() {
            let why = "a request that the run waits for is missing or cannot be read";
            return Err(StoreError::Failed(why.to_owned()));
        }
        asked.retain(|asked| asked.resolution.is_some());
        asked.sort_by_key(|asked| asked.seq);
        Ok(asked)
    }
}

/// Checks that the caller may answer requests to the client: the caller that started the run may, and callers
/// that may approve its calls.
pub(super) fn check_answerer(caller: &Caller, run: &RunRecord) -> Result<(), AnswerError> {
    if run.subject == caller.subject || caller.has("runs:approve") {
        return Ok(());
    }
    Err(AnswerError::MissingScope("runs:approve".to_owned()))
}

/// The status of a parked run with these pending requests, its own or its children's. Without any, it counts
/// as running, because its children are.
fn status_of_parked(waits_for: &[WaitKind]) -> RunStatus {
    match waits_for {
        [] => RunStatus::Running,
        kinds if kinds.contains(&WaitKind::Review) => RunStatus::NeedsReview,
        kinds if kinds.contains(&WaitKind::Approval) || kinds.contains(&WaitKind::Escalation) => {
            RunStatus::AwaitingApproval
        }
        _ => RunStatus::AwaitingToolResults,
    }
}

/// The audit record of an expired request: of a decision, or of a call of a caller's tool.
pub(super) fn expiry_record(answer: &ApprovalRecord) -> Option<AuditRecord> {
    if answer.status != ApprovalStatus::Expired {
        return None;
    }
    let record = |passes: bool, why: &str| {
        let (tool, arguments, kind) = (&answer.tool, &answer.arguments, answer.kind.as_str());
        decision_record(answer.call_id, tool, arguments, kind, passes, why.to_owned())
    };
    match answer.kind {
        WaitKind::Approval | WaitKind::Escalation => {
            Some(record(false, "No decision was made in time."))
        }
        WaitKind::Client if answer.input.is_none() => {
            let expired = record(true, "The caller gave no result in time.");
            Some(AuditRecord { outcome: "timed_out".to_owned(), ..expired })
        }
        WaitKind::Client | WaitKind::Review | WaitKind::Child => None,
    }
}

/// A decision in words, for the audit log.
fn sentence(decision: &str, caller: &Caller, run: &RunRecord, reason: Option<&str>) -> String {
    let why = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    format!("{decision} by {}{}{why}", caller.subject, own_run_remark(caller, run))
}

/// The remark that the deciding key is the one that started the run.
fn own_run_remark(caller: &Caller, run: &RunRecord) -> &'static str {
    if caller.subject == run.subject { ", who started the run" } else { "" }
}
