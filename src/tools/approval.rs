//! Calls that need an approval: the question, the approval, and the audit records of decisions.
//!
//! An approval is bound to the arguments that were shown, or to those with which the approver replaced
//! them. It only satisfies the gate's demand for an approval: the arguments are checked and judged like
//! any others.

use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use super::audit_arguments::shown;
use super::interrupted_call::InterruptedCall;
use crate::clock;
use crate::event::{ApprovalBasis, AuditRecord, InputAnswer};
use crate::governance::{Call, Decision, Gate};
use crate::message::canonical_json;
use crate::run::{Action, Labels};

/// Begins the last sentence of the reason when an approval is requested again.
pub const LAPSED: &str = "An earlier approval lapsed: ";

/// A person's approval of a call.
#[derive(Debug, Clone, Copy)]
pub struct GrantedApproval<'a> {
    /// Who approved.
    pub by: &'a str,
    /// Arguments that replace the model's.
    pub arguments: Option<&'a Value>,
    /// What the approver was shown.
    pub basis: &'a ApprovalBasis,
    /// The actions of the call at that time, with these arguments; empty if they were not recorded.
    pub actions: &'a [Action],
}

/// Earlier decisions on a call that is prepared again.
#[derive(Debug, Clone, Copy, Default)]
pub struct EarlierDecisions<'a> {
    pub approval: Option<GrantedApproval<'a>>,
    /// Whether the call was started before and is repeated: its arguments were checked, and the gate let
    /// it pass, under the declarations of that time.
    pub was_started: bool,
    /// The answer to the tool's question in an earlier execution of the call.
    pub input: Option<&'a InputAnswer>,
    /// The recorded start of the call, if a crash interrupted it and its tool can be asked about it.
    pub interrupted: Option<&'a InterruptedCall>,
}

impl<'a> From<Option<GrantedApproval<'a>>> for EarlierDecisions<'a> {
    fn from(approval: Option<GrantedApproval<'a>>) -> Self {
        Self { approval, ..Self::default() }
    }
}

impl GrantedApproval<'_> {
    /// Why the approval does not hold for the tool as it is declared now, as a sentence for the
    /// person who is asked again.
    pub(super) fn outdated(&self, tool_hash: Option<&str>) -> Option<String> {
        let approved = self.basis.tool_hash.as_deref();
        (approved.is_some() && approved != tool_hash)
            .then(|| format!("{LAPSED}the tool's declaration has changed."))
    }

    /// Why the approval lapsed: the call would now do something else than was approved, or the run has
    /// read more since, and its rules judge the call differently because of that.
    pub(super) fn lapsed(&self, gate: &Gate, scopes: &[String], call: &Call<'_>) -> Option<String> {
        let (actions, approved) = (&*call.actions, self.actions);
        let is_other = if approved.is_empty() {
            // The hash is of the call with the arguments that were shown.
            let hash = self.basis.actions_hash.as_ref().filter(|_| self.arguments.is_none());
            hash.is_some_and(|hash| *hash != Action::hash_of(actions))
        } else {
            actions.len() != approved.len()
                || actions.iter().zip(approved).any(|(now, approved)| now.goes_beyond(approved))
        };
        if is_other {
            return Some(format!("{LAPSED}the call would now do something else."));
        }
        let new = call.labels.without(self.basis.labels);
        (!new.are_none() && gate.decides_differently(scopes, call, self.basis.labels)).then(|| {
            let read = new.names().join(" and ");
            format!("{LAPSED}the run has since read {read} data.")
        })
    }

    /// The note on a call that passes without the approval.
    pub(super) fn not_needed(&self) -> String {
        let why = match self.arguments {
            Some(_) => "with arguments that need no approval",
            None => "which the call does not need any more",
        };
        format!("Approved by {}, {why}.", self.by)
    }
}

/// A call that needs an approval first.
#[derive(Debug)]
pub struct Escalated {
    /// The arguments that a decision is bound to.
    pub arguments: Value,
    /// What the gate judged; empty if it is too large for an event.
    pub actions: Arc<[Action]>,
    /// Its hash in that case.
    pub actions_hash: Option<String>,
    /// Why, in words.
    pub reason: String,
    /// Identifies the tool's declaration; `None` for a tool of the caller.
    pub tool_hash: Option<String>,
    /// For the audit log.
    pub audit: AuditRecord,
}

/// The audit record of a call that the caller executed.
pub fn executed_by_caller(
    call_id: Uuid,
    tool: &str,
    arguments: &Value,
    content: &str,
    is_error: bool,
    reason: String,
) -> AuditRecord {
    let outcome = if is_error { "failed" } else { "succeeded" }.to_owned();
    let decided = decision_record(call_id, tool, arguments, "client", true, reason);
    AuditRecord { outcome, result_bytes: Some(content.len() as u64), ..decided }
}

/// The audit record of a decision on a call, or of a decision that was not made in time.
pub fn decision_record(
    call_id: Uuid,
    tool: &str,
    arguments: &Value,
    rule: &str,
    passes: bool,
    reason: String,
) -> AuditRecord {
    let decision = if passes { Decision::Allowed } else { Decision::Blocked };
    AuditRecord {
        labels: Labels::default(),
        at: clock::now(),
        call_id,
        tool: tool.to_owned(),
        rule: rule.to_owned(),
        pattern: None,
        decision: decision.as_str().to_owned(),
        reason: Some(reason),
        arguments: shown(arguments, canonical_json(arguments.clone())),
        outcome: if passes { "not_executed" } else { "blocked" }.into(),
        duration_ms: None,
        result_bytes: None,
    }
}
