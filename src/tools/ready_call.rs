//! A call that the gate let pass, up to its execution.

use std::borrow::Cow;

use serde_json::Value;

use super::interrupted_call::{Reconciliation, RecordedCall};
use super::results::{Finished, finished, not_admitted};
use super::subagent;
use super::{ChangeRecorder, ToolContext};
use crate::clock;
use crate::event::{AuditRecord, Circumstances, RunEvent, ToolCallCompleted, ToolCallStarted};
use crate::governance::{Allowance, Permit};
use crate::message::{CallTarget, ToolCall};
use crate::run::{Action, ActionKind, Consumption, Delegation, Effect, Labels};

/// A call that the gate let pass.
#[derive(Debug)]
pub struct ReadyCall {
    pub(super) started: ToolCallStarted,
    /// Index into the executor's tools.
    pub(super) tool: usize,
    pub(super) permit: Permit,
    pub(super) arguments: Value,
    pub(super) context: ToolContext,
    pub(super) rule: &'static str,
    pub(super) pattern: Option<String>,
    /// The entry that allows the call, if no rule objected.
    pub(super) allowance: Option<Allowance>,
    pub(super) is_concurrent: bool,
    /// Whether it was started before.
    pub(super) was_started: bool,
    /// For the audit log.
    pub(super) shown_arguments: String,
    /// Set if its tool is asked about its outcome first.
    pub(super) reconciliation: Option<Box<Reconciliation>>,
}

impl ReadyCall {
    /// Whether it may be executed at the same time as neighbouring calls.
    pub fn is_concurrent(&self) -> bool {
        self.is_concurrent
    }

    /// The call, refused because the caller exceeds its rate limit.
    pub fn not_admitted(self, call: &ToolCall, why: &str) -> Finished {
        not_admitted(call, why, self.shown_arguments, self.started.actions)
    }

    /// The rule that decided; `none` where none objected.
    pub fn rule(&self) -> &'static str {
        self.rule
    }

    /// The event to store before the call is executed.
    pub fn started(&self) -> &ToolCallStarted {
        &self.started
    }

    /// Whether its start names what it does, which may be too much for an event.
    pub fn names_actions(&self) -> bool {
        self.started.actions.len() == self.permit.actions().len()
    }

    /// The call with the arguments with which it is made.
    pub fn made<'a>(&self, call: &'a ToolCall) -> Cow<'a, ToolCall> {
        RecordedCall::of(&self.started).made(call)
    }

    /// The event to record with its start if the call hands the conversation to another agent.
    pub fn handoff(&self) -> Option<RunEvent> {
        let Some(Delegation::Handoff(agent)) = Delegation::of_tool(&self.started.tool) else {
            return None;
        };
        let (call_id, agent, reason) =
            (self.started.call_id, agent.to_owned(), subagent::reason(&self.arguments));
        Some(RunEvent::HandoffStarted { call_id, agent, reason })
    }

    /// Adds the circumstances by which the call was judged.
    pub fn note(&mut self, circumstances: Circumstances) {
        self.started.circumstances = circumstances;
    }

    /// Subtracts what was already counted for the call from its consumption.
    pub fn consume_beyond(&mut self, counted: &Consumption) {
        self.started.consumes = std::mem::take(&mut self.started.consumes).beyond(counted);
    }

    /// The effect of this call.
    pub fn effect(&self) -> Effect {
        self.started.effect
    }

    /// Whether the call itself changes something: it does not only read, and does not delegate to another
    /// run, which is fenced by its own epoch.
    pub fn changes(&self) -> bool {
        self.effect() != Effect::Read && Delegation::of_tool(&self.started.tool).is_none()
    }

    /// Whether it writes files, or runs programs, which may.
    pub fn touches_files(&self) -> bool {
        let touches = |action: &Action| {
            matches!(action.what, ActionKind::Write { .. } | ActionKind::Exec { .. })
        };
        self.permit.actions().iter().any(touches)
    }

    /// The recorder of its changes.
    pub fn changed(&self) -> ChangeRecorder {
        self.context.changed.clone()
    }

    /// The call, answered with the result of an earlier identical one.
    pub fn answered_with(self, content: String) -> Finished {
        let audit = self.audit("succeeded", 0, Some(&content));
        let completed = ToolCallCompleted {
            cached: true,
            ..ToolCallCompleted::new(
                self.started.call_id,
                self.started.tool,
                CallTarget::Tool,
                content,
                None,
            )
        };
        finished(completed, Some(audit))
    }

    pub(super) fn audit(
        &self,
        outcome: &str,
        duration_ms: u64,
        result: Option<&str>,
    ) -> AuditRecord {
        let (rule, pattern) = match &self.allowance {
            Some(allowance) => (allowance.rule, &allowance.pattern),
            None => (self.rule, &self.pattern),
        };
        AuditRecord {
            labels: Labels::default(),
            at: clock::now(),
            call_id: self.started.call_id,
            tool: self.started.tool.clone(),
            rule: rule.to_owned(),
            pattern: pattern.clone(),
            decision: self.started.decision.clone(),
            reason: self.started.reason.clone(),
            arguments: self.shown_arguments.clone(),
            outcome: outcome.to_owned(),
            duration_ms: Some(duration_ms),
            result_bytes: result.map(|result| result.len() as u64),
        }
    }
}
