//! Calls that must not be repeated and that a crash interrupted, of tools that can be asked about
//! them.
//!
//! The query is judged by the rules for the call, and is about the arguments with which the call was
//! made. It is sent only if the tool's declaration has not changed since. The call is executed again
//! only if the tool says that it had no effect. If the tool does not know, the option decides with
//! which the call was started. The engine decides when a call is reconciled.

use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    EARLIER_DECISION, EarlierDecisions, Executor, OfferedTool, Prepared, ReadyCall, RunScope, Slot,
    gone,
};
use crate::event::{AuditRecord, CallFailure, Reconciled, RunEvent, ToolCallStarted};
use crate::governance::{Call, Verdict};
use crate::message::ToolCall;
use crate::run::{Effect, Labels, OnUnknownOutcome};
use crate::tools::CallOutcome;
use crate::tools::guarded_work::{Failure, guarded};
use crate::tools::interrupted_call::{InterruptedCall, Reconciliation, sentence};
use crate::tools::results::{
    ASKED_IN_VAIN, CANNOT_BE_ASKED, FatalToolError, Finished, review, unknown_outcome,
};

/// Why a tool is not asked whose declaration has changed.
const CHANGED_TOOL: &str = "the tool's declaration has changed since";
const CHANGED_CALL: &str = "the call would be made with other arguments now";
const BROKEN: &str = "what the call would do cannot be determined";

impl OfferedTool {
    /// Its hash, where it can be asked about a call of this effect after a crash.
    pub(super) fn reconcilable_by(&self, effect: Effect) -> Option<String> {
        (effect == Effect::Once && self.tool.can_reconcile()).then(|| self.hash.clone())
    }
}

impl ReadyCall {
    /// The answer of the tool about the call, if it knew the outcome.
    pub(super) fn reconciled(&self) -> Option<Reconciled> {
        self.reconciliation.as_deref().and_then(Reconciliation::reconciled)
    }

    /// The audit records of the call, with that of the answer.
    pub(super) fn records(
        &self,
        result: &Result<String, Failure>,
        requests: Vec<AuditRecord>,
        call: AuditRecord,
    ) -> (Vec<AuditRecord>, AuditRecord) {
        match &self.reconciliation {
            Some(reconciliation) => reconciliation.records(result, requests, call),
            None => (requests, call),
        }
    }
}

impl Executor {
    /// Takes a call up to the point where it may be executed, or answers it. An approval replaces
    /// the question for one, and no other check; of a call that was started only the rules are asked
    /// again, and no person for an approval. One that a crash interrupted goes on only where its tool
    /// can be asked about it.
    ///
    /// # Errors
    /// [`FatalToolError`] where the tool cannot even look at what the call would do.
    pub async fn prepare(
        &self,
        call: &ToolCall,
        slot: Slot,
        scope: &RunScope,
        decided: impl Into<EarlierDecisions<'_>>,
    ) -> Result<Prepared, FatalToolError> {
        let decided = decided.into();
        let prepared = self.judged(call, slot, scope, decided).await;
        let Some(interrupted) = decided.interrupted else { return prepared };
        let why = match &prepared {
            Ok(Prepared::Ready(ready)) => self.change_since(ready, interrupted),
            Ok(Prepared::Answered(finished)) => Some(finished.reason()),
            Ok(Prepared::Escalated(escalated)) => Some(escalated.reason.clone()),
            Err(_) => Some(BROKEN.to_owned()),
        };
        let Some(why) = why else {
            let with = |prepared| match prepared {
                Prepared::Ready(ready) => {
                    let reconciliation = Some(Box::new(Reconciliation::of(interrupted.clone())));
                    Prepared::Ready(ReadyCall { reconciliation, ..ready })
                }
                other => other,
            };
            return prepared.map(with);
        };
        let event = match interrupted.on_unknown_outcome {
            OnUnknownOutcome::Retry => return prepared,
            OnUnknownOutcome::Report => unknown_outcome(call.id, call.name.clone()),
            OnUnknownOutcome::Review => {
                let edited = decided.approval.and_then(|granted| granted.arguments);
                let recorded = interrupted.made_with.shown(call, edited);
                let reason = format!("{CANNOT_BE_ASKED}: {}", sentence(&why));
                review(call.id, call.name.clone(), recorded, &reason)
            }
        };
        Ok(Prepared::Answered(Finished::of(event)))
    }

    /// Why the tool cannot be asked about the call any more.
    fn change_since(&self, ready: &ReadyCall, interrupted: &InterruptedCall) -> Option<String> {
        let now = self.tools.get(ready.tool).map(|offered| &offered.hash);
        if now != Some(&interrupted.tool_hash) {
            return Some(CHANGED_TOOL.to_owned());
        }
        let is_same = ready.started.effect_key == interrupted.effect_key;
        (!is_same).then(|| CHANGED_CALL.to_owned())
    }

    /// Executes a call, unless a crash interrupted it and its tool does not say that it had no effect.
    pub(super) async fn attempted(
        &self,
        ready: &ReadyCall,
        scope: &RunScope,
        cancel: &CancellationToken,
    ) -> Result<String, Failure> {
        let reconciliation = ready.reconciliation.as_deref();
        if cancel.is_cancelled() && reconciliation.is_none() {
            return Err(Failure::not_begun());
        }
        let work = async {
            if let Some(reconciliation) = reconciliation {
                self.reconciled(ready, scope, reconciliation).await
            } else {
                let done = self.tried(ready, scope).await;
                done.map_err(|failure| self.failure_of_missing_tool(ready, failure))
            }
        };
        let done = cancel.run_until_cancelled(work).await;
        done.unwrap_or_else(|| {
            let is_asked = reconciliation.is_some_and(|asked| !asked.is_answered());
            Err(if is_asked {
                Failure::cancelled_before_answer()
            } else {
                Failure::cancelled(ready.effect())
            })
        })
    }

    /// The failure of a call, which may have taken effect before where its tool is not there any more.
    fn failure_of_missing_tool(&self, ready: &ReadyCall, failure: Failure) -> Failure {
        let Some(OfferedTool { tool, .. }) = self.tools.get(ready.tool) else { return failure };
        let only_reads = ready.effect() == Effect::Read && tool.info().may_only_read();
        match failure {
            Failure::ForModel(kind @ CallFailure::ToolError, why)
                if ready.was_started && !only_reads && tool.unavailable().is_some() =>
            {
                Failure::ForModel(kind, gone(&why))
            }
            failure => failure,
        }
    }

    async fn reconciled(
        &self,
        ready: &ReadyCall,
        scope: &RunScope,
        reconciliation: &Reconciliation,
    ) -> Result<String, Failure> {
        let since = Instant::now();
        let outcome = self.ask_outcome(ready, scope).await;
        reconciliation.answered(&outcome, since.elapsed(), ready.audit("", 0, None));
        match outcome {
            CallOutcome::Happened(Ok(text)) => Ok(text),
            CallOutcome::Happened(Err(why)) => Err(Failure::ForModel(
                CallFailure::ToolError,
                format!("After a crash it was found that this call took effect. {why}"),
            )),
            CallOutcome::DidNotHappen => self.tried(ready, scope).await,
            CallOutcome::Unknown(why) => match reconciliation.on_unknown_outcome() {
                OnUnknownOutcome::Retry => self.tried(ready, scope).await,
                OnUnknownOutcome::Report | OnUnknownOutcome::Review => Err(Failure::Unsettled(why)),
            },
        }
    }

    async fn ask_outcome(&self, ready: &ReadyCall, scope: &RunScope) -> CallOutcome {
        let Some(OfferedTool { tool, options, .. }) = self.tools.get(ready.tool) else {
            return CallOutcome::not_asked();
        };
        let work = async {
            let (arguments, context) = (&ready.arguments, &ready.context);
            let actions = tool.reconcile_actions(arguments, context).await?;
            let question = Call {
                tool: &ready.started.tool,
                effect: Effect::Read,
                actions: actions.into(),
                approved_by: Some(EARLIER_DECISION),
                is_undeclared: false,
                skills: &scope.skills,
                labels: scope.labels,
                directory: scope.workspace.directory(),
            };
            match self.gate.judge(&scope.caller.scopes, question) {
                Verdict::Pass { permit, .. } => {
                    let answer = tool.reconcile(permit.clone(), arguments, context).await;
                    if permit.reads_private() {
                        context.read_labels.add(Labels::PRIVATE);
                    }
                    answer
                }
                Verdict::Stop(objection) => Ok(CallOutcome::Unknown(objection.reason)),
            }
        };
        let limit = Self::limit(ready, scope, options);
        guarded(limit, Effect::Read, work).await.unwrap_or_else(|failure| {
            CallOutcome::Unknown(match failure {
                Failure::ForModel(CallFailure::Timeout, _) => {
                    format!("no answer came within {} seconds", limit.as_secs_f64())
                }
                Failure::ForModel(CallFailure::Panicked, _) => "the tool crashed".to_owned(),
                failure => failure.into_message(),
            })
        })
    }
}

/// The result of a call whose outcome is unknown: a review by a person, or an error.
pub(super) fn unsettled(
    started: ToolCallStarted,
    arguments: Value,
    reconciliation: Option<&Reconciliation>,
    why: &str,
) -> RunEvent {
    let ToolCallStarted { call_id, tool, actions, .. } = started;
    let on_unknown = reconciliation.map(Reconciliation::on_unknown_outcome);
    if on_unknown == Some(OnUnknownOutcome::Report) {
        return unknown_outcome(call_id, tool);
    }
    let reason = format!("{ASKED_IN_VAIN}: {}", sentence(why));
    review(call_id, tool, (arguments, actions), &reason)
}

#[cfg(test)]
#[path = "reconciliation_tests.rs"]
mod tests;
