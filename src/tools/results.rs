//! The results of calls, and their audit records.
//!
//! All results are built here, whether a call was executed, refused or blocked, and capped before
//! anything stores or reads them. The executor decides which result a call gets.

use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use super::approval::Escalated;
use super::arguments;
use super::audit_arguments::shown;
use crate::bounds::secrets;
use crate::bounds::text::quoted;
use crate::clock;
use crate::event::{
    ApprovalBasis, AuditRecord, Awaited, CallFailure, Circumstances, InputRequired, NetworkUse,
    RunEvent, SkillActivated, Suspicion, ToolCallBlocked, ToolCallCompleted, ToolCallStarted,
    WaitKind,
};
use crate::governance::{Decision, Objection};
use crate::message::{CallTarget, ToolCall, canonical_json};
use crate::run::{Action, Labels};

/// Bytes of a result; of a longer one head and tail are kept.
pub const MAX_RESULT: usize = 64 * 1024;
/// Paths that are listed to a model.
const MAX_LISTED: usize = 20;
/// A call with its result.
#[derive(Debug)]
pub struct Finished {
    /// `tool_call.completed` or `tool_call.blocked`, or `tool_call.awaiting_child` or
    /// `tool_call.awaiting_client` where the result comes later.
    pub event: RunEvent,
    /// For the audit log; `None` where nothing was decided or executed.
    pub audit: Option<AuditRecord>,
    /// The same for the network requests of its programs.
    pub requests: Vec<AuditRecord>,
    /// The skill that the call made active.
    pub activates: Option<SkillActivated>,
    /// The labels that the result gives to the run.
    pub yields: Labels,
}

impl Finished {
    /// A call of which nothing else is known.
    pub(super) fn of(event: RunEvent) -> Self {
        let (requests, yields) = (Vec::new(), Labels::default());
        Self { event, audit: None, requests, activates: None, yields }
    }

    /// Bytes of its result, with the differences of the files that it changed.
    pub fn bytes(&self) -> usize {
        let RunEvent::ToolCallCompleted(call) = &self.event else { return 0 };
        let changes = call.changes.iter().flatten();
        let diffs = changes.filter_map(|change| change.diff.as_ref()).map(String::len);
        call.content.len() + diffs.sum::<usize>()
    }

    /// Why it was not executed.
    pub(super) fn reason(&self) -> String {
        if let RunEvent::ToolCallBlocked(call) = &self.event {
            return call.reason.clone();
        }
        let RunEvent::ToolCallCompleted(call) = &self.event else { return String::new() };
        call.content.trim_start_matches("Error: ").to_owned()
    }

    /// The same with a note that the changes of some paths were not stored.
    #[must_use]
    pub fn without_change_of(mut self, paths: &[String]) -> Self {
        if let RunEvent::ToolCallCompleted(call) = &mut self.event {
            let shown = paths
                .iter()
                .take(MAX_LISTED)
                .map(|path| quoted(path))
                .collect::<Vec<_>>()
                .join(", ");
            let more = paths.len().saturating_sub(MAX_LISTED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let answer = &call.content;
            call.content = error_text(&format!(
                "The change to {shown}{more} was not saved: another run changed it in the meantime, or it is not \
                 a regular file. The workspace has the version that was last saved; read it again. \
                 The call returned: {answer}"
            ));
            call.failure = call.failure.or(Some(CallFailure::ToolError));
            if let Some(changes) = &mut call.changes {
                changes.retain(|change| !paths.contains(&change.path));
            }
        }
        self
    }
}

/// The beginning of the reason for a review.
pub const UNKNOWN_OUTCOME: &str =
    "The service stopped while this call was executed: it is unknown whether it took effect";
/// The same, where the tool was asked about it, or could have been.
pub(super) const ASKED_IN_VAIN: &str = "The service stopped while this call was executed, and its tool, asked whether it took effect, \
     gave no answer";
pub(super) const CANNOT_BE_ASKED: &str = "The service stopped while this call was executed: it is unknown whether it took effect, and its \
     tool cannot be asked";

/// The service failed, not the call: the run ends. The call has its result nevertheless.
#[derive(Debug, thiserror::Error)]
#[error("{tool}: {message}")]
pub struct FatalToolError {
    /// The tool.
    pub tool: String,
    /// The private cause, for the log.
    pub message: String,
    /// The result of the call.
    pub finished: Box<Finished>,
}

/// A result as it may be stored and read: without NUL characters, which no store takes, and of 64
/// KiB at most, of which head and tail are kept, without parts of secrets at the cut.
pub fn capped(mut text: String) -> String {
    if text.contains('\0') {
        text.retain(|c| c != '\0');
    }
    if text.len() <= MAX_RESULT {
        return text;
    }
    // The note about the middle is shorter than the room kept for it.
    let half = (MAX_RESULT - 256) / 2;
    let (head, tail) = (secrets::head(&text, half), secrets::tail(&text, half));
    let middle = &text[head.len()..text.len() - tail.len()];
    let first = 1 + head.matches('\n').count();
    let last = first + middle.matches('\n').count();
    format!(
        "{head}\n[… {} bytes of this result are left out here, in its lines {first} to {last}; ask for less at a time …]\n{tail}",
        middle.len()
    )
}

pub(super) fn error_text(message: &str) -> String {
    capped(format!("Error: {message}"))
}

pub(super) fn finished(completed: ToolCallCompleted, audit: Option<AuditRecord>) -> Finished {
    Finished { audit, ..Finished::of(RunEvent::ToolCallCompleted(completed)) }
}

/// A call whose result is the reason why it is invalid.
pub fn refused(call: &ToolCall, failure: CallFailure, message: &str) -> Finished {
    let completed = ToolCallCompleted::new(
        call.id,
        capped(call.name.clone()),
        call.target,
        error_text(message),
        Some(failure),
    );
    finished(completed, None)
}

/// A call whose child run is parked.
pub(super) fn awaiting_child(
    call_id: Uuid,
    tool: String,
    arguments: Value,
    child: Uuid,
) -> Finished {
    let awaited = Awaited {
        basis: ApprovalBasis::default(),
        circumstances: Circumstances::default(),
        decision: None,
        escalation_target: None,
        actions: Arc::default(),
        call_id,
        kind: WaitKind::Child,
        reason: format!("The child run {child} is parked."),
        tool,
        arguments,
        expires_at: None,
        condition: None,
        child_run_id: Some(child),
        input: None,
    };
    Finished::of(RunEvent::ToolCallAwaitingChild(awaited))
}

/// A call whose tool asks for input before it completes it.
pub(super) fn awaiting_input(
    started: ToolCallStarted,
    arguments: Value,
    asked: InputRequired,
    network: Option<NetworkUse>,
) -> Finished {
    let awaited = Awaited {
        basis: ApprovalBasis::default(),
        circumstances: Circumstances::default(),
        decision: Some(started.decision),
        escalation_target: None,
        actions: started.actions,
        call_id: started.call_id,
        kind: WaitKind::Client,
        reason: format!("The MCP server {} asks for input.", asked.server),
        tool: started.tool,
        arguments,
        expires_at: None,
        condition: None,
        child_run_id: None,
        input: Some(Box::new(InputRequired {
            requests_uncounted: network.map_or(0, |asked| asked.uncounted()),
            ..asked
        })),
    };
    Finished::of(RunEvent::ToolCallAwaitingClient(awaited))
}

/// Asks a person for the outcome of a call that a crash interrupted, with its arguments and actions.
pub fn review(
    call_id: Uuid,
    tool: String,
    (arguments, actions): (Value, Arc<[Action]>),
    reason: &str,
) -> RunEvent {
    RunEvent::ApprovalRequested(Awaited {
        basis: ApprovalBasis::default(),
        circumstances: Circumstances::default(),
        decision: None,
        escalation_target: None,
        actions,
        call_id,
        kind: WaitKind::Review,
        tool,
        arguments,
        reason: reason.to_owned(),
        expires_at: None,
        condition: None,
        child_run_id: None,
        input: None,
    })
}

/// The result of a call that a crash interrupted and that must not be repeated.
pub fn unknown_outcome(call_id: Uuid, tool: String) -> RunEvent {
    let content = "Error: the service restarted while this call was running; whether it took effect is unknown. Check \
                   before you repeat it."
        .to_owned();
    let failure = Some(CallFailure::UnknownOutcome);
    let completed = ToolCallCompleted::new(call_id, tool, CallTarget::Tool, content, failure);
    RunEvent::ToolCallCompleted(completed)
}

/// An objection that blocks a call, of a check that is not one of the gate's rules.
pub(super) fn blocking(rule: &'static str, reason: String) -> Objection {
    Objection { decision: Decision::Blocked, rule, pattern: None, reason }
}

/// A call that an interceptor does not let pass.
pub(super) fn intercepted(
    call: &ToolCall,
    reason: &str,
    arguments: &Value,
    actions: Arc<[Action]>,
) -> Finished {
    let objection = blocking("interceptor", format!("Blocked by an interceptor: {reason}"));
    blocked(call, objection, shown(arguments, canonical_json(arguments.clone())), actions)
}

/// A call beyond the rate limit.
pub(super) fn not_admitted(
    call: &ToolCall,
    why: &str,
    shown_arguments: String,
    actions: Arc<[Action]>,
) -> Finished {
    let reason = format!("Blocked by the rate_limit rule: {why}.");
    blocked(call, blocking(ToolCallBlocked::RATE_LIMIT, reason), shown_arguments, actions)
}

/// A call that may not be executed.
pub(super) fn blocked(
    call: &ToolCall,
    objection: Objection,
    shown_arguments: String,
    actions: Arc<[Action]>,
) -> Finished {
    let blocked = ToolCallBlocked {
        call_id: call.id,
        tool: call.name.clone(),
        rule: objection.rule.to_owned(),
        decision: objection.decision.as_str().to_owned(),
        reason: objection.reason.clone(),
        content: error_text(&objection.reason),
        actions,
        circumstances: Circumstances::default(),
    };
    let audit = not_executed(call, objection, shown_arguments);
    Finished { audit: Some(audit), ..Finished::of(RunEvent::ToolCallBlocked(blocked)) }
}

/// A call that waits for an approval.
pub(super) fn escalated(
    call: &ToolCall,
    objection: Objection,
    arguments: Value,
    shown_arguments: String,
    actions: Arc<[Action]>,
) -> Escalated {
    let reason = objection.reason.clone();
    let audit = not_executed(call, objection, shown_arguments);
    Escalated { arguments, actions, actions_hash: None, reason, tool_hash: None, audit }
}

/// The audit record of a call that is not executed, at least not now.
pub(super) fn not_executed(
    call: &ToolCall,
    objection: Objection,
    shown_arguments: String,
) -> AuditRecord {
    let is_blocked = objection.decision == Decision::Blocked;
    AuditRecord {
        labels: Labels::default(),
        at: clock::now(),
        call_id: call.id,
        tool: call.name.clone(),
        rule: objection.rule.to_owned(),
        pattern: objection.pattern,
        decision: objection.decision.as_str().to_owned(),
        reason: Some(objection.reason),
        arguments: shown_arguments,
        outcome: if is_blocked { "blocked" } else { "not_executed" }.into(),
        duration_ms: None,
        result_bytes: None,
    }
}

/// The audit record of a call that was started and whose end the service did not see.
pub fn audit_of_unfinished_call(call: &ToolCall, labels: Labels) -> AuditRecord {
    let arguments = arguments::parse(&call.arguments).unwrap_or_default();
    audit_of_unfinished_row(call.id, &call.name, &arguments, labels)
}

/// The same for a call of which only its row is known.
pub fn audit_of_unfinished_row(
    call_id: Uuid,
    tool: &str,
    arguments: &Value,
    labels: Labels,
) -> AuditRecord {
    let canonical = canonical_json(arguments.clone());
    AuditRecord {
        labels,
        at: clock::now(),
        call_id,
        tool: tool.to_owned(),
        rule: "recovery".to_owned(),
        pattern: None,
        decision: Decision::Allowed.as_str().to_owned(),
        reason: Some(
            "The run ended, or the service stopped, while this call was under way.".to_owned(),
        ),
        arguments: shown(arguments, canonical),
        outcome: "unknown".to_owned(),
        duration_ms: None,
        result_bytes: None,
    }
}

/// Puts an error in the place of a result that looks like a prompt injection.
pub(super) fn withheld(call: &mut ToolCallCompleted, suspicion: &Suspicion) {
    call.content = error_text(&format!(
        "The result looks like a prompt injection and was withheld: {}. Go on without it.",
        suspicion.in_words()
    ));
    call.failure = Some(CallFailure::Withheld);
}

/// The result of a call on which the service failed; the cause goes to the log only.
pub(super) fn fault(call_id: Uuid, tool: &str) -> ToolCallCompleted {
    ToolCallCompleted::new(
        call_id,
        tool.to_owned(),
        CallTarget::Tool,
        error_text(
            "The tool failed because of an internal error; the arguments were not the cause.",
        ),
        Some(CallFailure::ToolError),
    )
}

pub(super) fn fatal(
    tool: &str,
    message: String,
    completed: ToolCallCompleted,
    audit: Option<AuditRecord>,
) -> FatalToolError {
    FatalToolError {
        tool: tool.to_owned(),
        message,
        finished: Box::new(finished(completed, audit)),
    }
}
