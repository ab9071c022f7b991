//! A tool as an agent offers it, and the preparation of a call up to its actions.
//!
//! The executor decides which arguments count, and whether the call is executed.

use std::sync::Arc;

use serde_json::Value;

use super::arguments;
use super::audit_arguments::shown;
use super::call_options::CallOptions;
use super::declared_paths::actions_of;
use super::guarded_work::{Failure, guarded};
use super::results::{FatalToolError, Finished, blocked, blocking, fatal, fault, refused};
use super::run_scope::{RunScope, Slot, effect_key};
use super::{Tool, ToolContext};
use crate::bounds::schema::Schema;
use crate::event::{CallFailure, InputAnswer};
use crate::governance::{Action, Allowance, Decision};
use crate::message::{ToolCall, canonical_json};
use crate::run::Effect;

/// The rule that the audit log names for a call that only the agent's list of tools allows.
const LISTED: &str = "tools";

/// A tool as an agent offers it.
pub(super) struct OfferedTool {
    pub(super) tool: Arc<dyn Tool>,
    /// Identifies what a model and an approver read about it.
    pub(super) hash: String,
    pub(super) arguments: Schema,
    pub(super) options: CallOptions,
    /// The entry of the definition's list of tools that names it.
    pub(super) entry: Option<String>,
}

impl OfferedTool {
    /// The entry that allows a call of it: that of a list of the policy, or else that of the list of
    /// tools.
    pub(super) fn allowance(
        &self,
        decision: Decision,
        named: Option<Allowance>,
    ) -> Option<Allowance> {
        let listed = || Allowance { rule: LISTED, pattern: self.entry.clone() };
        (decision == Decision::Allowed).then(|| named.unwrap_or_else(listed))
    }
}

/// A call that a model asks for, with the tool and the scope of its run.
pub(super) struct CallRequest<'a> {
    pub(super) call: &'a ToolCall,
    pub(super) slot: Slot,
    pub(super) scope: &'a RunScope,
    pub(super) offered: &'a OfferedTool,
    /// Of the tool.
    pub(super) place: usize,
    pub(super) has_network: bool,
    pub(super) was_started: bool,
    pub(super) input: Option<&'a InputAnswer>,
}

/// A call with its final arguments, and the actions that it would perform.
pub(super) struct PlannedCall {
    /// The arguments as canonical JSON.
    pub(super) canonical: String,
    pub(super) context: ToolContext,
    pub(super) actions: Vec<Action>,
}

/// A call that cannot be prepared.
pub(super) enum Unprepared {
    Answered(Box<Finished>),
    Fatal(FatalToolError),
}

impl From<Finished> for Unprepared {
    fn from(finished: Finished) -> Self {
        Self::Answered(Box::new(finished))
    }
}

impl CallRequest<'_> {
    fn context(&self, canonical_arguments: &str) -> ToolContext {
        let Self { call, slot, scope, .. } = self;
        let key = effect_key(scope.run_id, *slot, &call.name, canonical_arguments);
        let context = scope.context_of(call.id, key);
        let input = self.input.cloned().map(Arc::new);
        ToolContext { has_network: self.has_network, input, ..context }
    }

    /// Whether arguments match the tool's schema, which may be another one than when the call was
    /// started.
    fn check(&self, arguments: &Value) -> Result<(), String> {
        if self.was_started { Ok(()) } else { arguments::check(&self.offered.arguments, arguments) }
    }

    /// The arguments that match the tool's schema, or the call's result.
    pub(super) fn arguments(&self, edited: Option<&Value>) -> Result<Value, Box<Finished>> {
        let call = self.call;
        let arguments =
            edited.map_or_else(|| arguments::parse(&call.arguments), |edited| Ok(edited.clone()));
        let checked = arguments.and_then(|arguments| self.check(&arguments).map(|()| arguments));
        checked.map_err(|message| Box::new(refused(call, CallFailure::InvalidArguments, &message)))
    }

    /// These arguments, if they differ from those that the model wrote.
    pub(super) fn if_rewritten(&self, arguments: &Value) -> Option<Arc<Value>> {
        let written = arguments::parse(&self.call.arguments);
        (written.as_ref() != Ok(arguments)).then(|| Arc::new(arguments.clone()))
    }

    /// The call with these arguments and its actions, or the call's result. `changed_by` is the place of
    /// the interceptor that changed the arguments.
    pub(super) async fn actions(
        &self,
        arguments: &Value,
        changed_by: Option<usize>,
    ) -> Result<PlannedCall, Unprepared> {
        let Self { call, scope, offered, .. } = self;
        if let Some(place) = changed_by {
            self.check(arguments).map_err(|message| {
                let message = format!("Interceptor {place} changed the arguments. {message}");
                refused(call, CallFailure::InvalidArguments, &message)
            })?;
        }
        let canonical = canonical_json(arguments.clone());
        let context = self.context(&canonical);
        let acts = actions_of(&*offered.tool, &offered.options.paths, arguments, &context);
        match guarded(scope.timeout, Effect::Read, acts).await {
            Ok(actions) => Ok(PlannedCall { canonical, context, actions }),
            // What a call would do is unknown, so it cannot be judged: a check that cannot
            // decide blocks.
            Err(Failure::ForModel(CallFailure::ToolError, message)) => {
                if self.are_mistaken(arguments).await {
                    return Err(refused(call, CallFailure::InvalidArguments, &message).into());
                }
                let undecided = blocking("actions", message);
                Err(blocked(call, undecided, shown(arguments, canonical), Arc::default()).into())
            }
            Err(Failure::ForModel(failure, message)) => {
                Err(refused(call, failure, &message).into())
            }
            Err(failure) => {
                let (message, fault) = (failure.into_message(), fault(call.id, &call.name));
                Err(Unprepared::Fatal(fatal(&call.name, message, fault, None)))
            }
        }
    }

    /// Whether the tool refuses the arguments in any case: then no rule is evaluated.
    async fn are_mistaken(&self, arguments: &Value) -> bool {
        let (tool, arguments) = (Arc::clone(&self.offered.tool), arguments.clone());
        let mistakes = tokio::task::spawn_blocking(move || tool.mistakes(&arguments));
        mistakes.await.is_ok_and(|mistakes| !mistakes.is_empty())
    }
}
