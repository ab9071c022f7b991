//! Arguments that an approver has edited: checked before the approval is stored, in the same way as the resumed
//! run will check them.

use std::sync::Arc;

use serde_json::Value;

use super::Runtime;
use super::answers::{AnswerError, no_longer_pending};
use super::claimed_run::ResumeError;
use super::identity::RunIdentity;
use super::loaded_agents::LoadedAgent;
use super::worker::run_scope;
use super::workspaces::{OpenError, User};
use crate::clock;
use crate::engine::{Plan, RunControl, State};
use crate::event::{RunEvent, ValidationError, WaitKind};
use crate::run::{Action, Caller};
use crate::store::{ApprovalRecord, ClaimedRun, RunRecord, StoreError};
use crate::tools::approval::GrantedApproval;
use crate::tools::client_calls::ClientCall;
use crate::tools::executor::Prepared;
use crate::tools::results::Finished;

impl Runtime {
    /// A run's agent, plan and state, from its journal.
    async fn folded(&self, run: &ClaimedRun) -> Result<(LoadedAgent, Plan, State), AnswerError> {
        let _permit = self.journal_permit(&run.run).await?;
        let journal = self.journal_of(&run.run.tenant, run.run.id).await?;
        let (loaded, plan) = self.plan_of(run, &journal)?;
        let mut state = State::new(plan.rules.clone());
        journal.iter().try_for_each(|event| state.apply(event)).map_err(ResumeError::from)?;
        Ok((loaded, plan, state))
    }

    /// Checks edited arguments: the approver may execute the tool, and the tool, the interceptors, the gate and
    /// the budget allow the call. Returns the actions of the call, as the journal keeps them.
    ///
    /// # Errors
    /// [`AnswerError`], with the reason for the approver.
    pub(super) async fn check_edited(
        &self,
        approver: &Caller,
        run: &RunRecord,
        asked: &ApprovalRecord,
        arguments: &Value,
    ) -> Result<Arc<[Action]>, AnswerError> {
        if asked.kind == WaitKind::Escalation {
            return Err(refused("an escalation has no arguments".to_owned()));
        }
        if !approver.may_execute(&asked.tool) {
            return Err(AnswerError::MissingScope(format!("tools:{}", asked.tool)));
        }
        if !arguments.is_object() {
            return Err(refused("must be an object".to_owned()));
        }
        let definition = self.inner.store.definition(&run.definition_hash).await?;
        let definition =
            definition.ok_or_else(|| AnswerError::Broken("it is no longer stored".into()))?;
        let claimed = ClaimedRun { definition, run: run.clone() };
        let (loaded, plan, state) = self.folded(&claimed).await?;
        let of_caller = plan.client_tools.tool(&asked.tool);
        let wrong = plan.client_tools.errors(&asked.tool, arguments);
        let errors = if let Some(errors) = wrong {
            errors
        } else {
            let executor = Arc::clone(&loaded.executor);
            let (tool, arguments) = (asked.tool.clone(), arguments.clone());
            let look = move || executor.argument_errors(&tool, &arguments);
            let looked = tokio::task::spawn_blocking(look).await;
            looked.map_err(|_| AnswerError::Unchecked)?
        };
        if !errors.is_empty() {
            let in_body = |error: ValidationError| ValidationError {
                pointer: format!("/arguments{}", error.pointer),
                ..error
            };
            return Err(AnswerError::InvalidArguments(errors.into_iter().map(in_body).collect()));
        }
        let pending = state.open_call(asked.call_id).ok_or_else(no_longer_pending)?;
        let directory = loaded.agent.workspace_of(run.id, run.session_id.as_deref());
        let workspace = self.inner.workspaces.open(&run.tenant, &directory, User::Caller).await;
        let workspace = workspace.map_err(ResumeError::from)?;
        let standing = RunControl::default().standing(Arc::clone(&self.inner.replica.lease));
        let scope =
            run_scope(&RunIdentity::of_claimed(&claimed, 0.0), &plan, workspace, &state, standing);
        let shown = state.waiting().find(|awaited| awaited.call_id == asked.call_id);
        let basis = shown.map(|awaited| awaited.basis.clone()).unwrap_or_default();
        let granted = GrantedApproval {
            by: &approver.subject,
            arguments: Some(arguments),
            basis: &basis,
            actions: &[],
        };
        if let Some(tool) = of_caller {
            let judged = loaded.executor.judge_client_call(
                &pending.call,
                (tool, arguments.clone()),
                &scope,
                Some(granted),
                None, // nothing rewrites them
            );
            return match judged {
                ClientCall::Permitted(permit) => Ok(Arc::clone(&permit.actions)),
                ClientCall::Escalated(escalated) => Err(refused(escalated.reason)),
                ClientCall::Answered(finished) => Err(refused(reason(*finished))),
            };
        }
        let prepared =
            loaded.executor.prepare(&pending.call, pending.slot(), &scope, Some(granted)).await;
        match prepared {
            Ok(Prepared::Ready(ready)) if !ready.names_actions() => {
                Err(refused("the call would do too much for the approval to name".to_owned()))
            }
            Ok(Prepared::Ready(ready)) => {
                match state.over_budget_with(&ready.started().consumes, clock::now()) {
                    None => Ok(Arc::clone(&ready.started().actions)),
                    Some(_) => Err(refused("the call would exceed the run's budget".to_owned())),
                }
            }
            Ok(Prepared::Escalated(escalated)) => Err(refused(escalated.reason)),
            Ok(Prepared::Answered(finished)) => Err(refused(reason(finished))),
            Err(fault) => Err(AnswerError::Broken(fault.to_string())),
        }
    }
}

impl From<ResumeError> for AnswerError {
    fn from(error: ResumeError) -> Self {
        match error {
            ResumeError::Store(error) => Self::Store(error),
            ResumeError::Workspace(OpenError::NotHere(why)) => Self::NoWorkspace(why.to_string()),
            error => Self::Store(StoreError::Failed(error.to_string())),
        }
    }
}

fn refused(message: String) -> AnswerError {
    let pointer = "/arguments".to_owned();
    AnswerError::InvalidArguments(vec![ValidationError { pointer, message }])
}

/// Why a call was answered instead of being executed.
fn reason(finished: Finished) -> String {
    if let RunEvent::ToolCallBlocked(blocked) = finished.event {
        return blocked.reason;
    }
    if let RunEvent::ToolCallCompleted(completed) = finished.event {
        return completed.content;
    }
    "the call cannot be executed".to_owned()
}
