//! A tool as an agent offers it, and a call of it up to what the call would do.
//!
//! Which arguments count and what is decided on the call is the executor's.

use std::sync::Arc;

use serde_json::Value;

use super::arguments;
use super::audit_arguments::shown;
use super::call_options::CallOptions;
use super::declared_paths::actions_of;
use super::guarded::{Failure, guarded};
use super::results::{FatalToolError, Finished, blocked, blocking, fatal, fault, refused};
use super::run_scope::{RunScope, Slot, effect_key};
use super::{Tool, ToolContext};
use crate::bounds::schema::Schema;
use crate::event::{CallFailure, InputGiven};
use crate::governance::{Action, Allowance, Decision};
use crate::message::{ToolCall, canonical_json};
use crate::run::Effect;

/// What allows a call that no rule names: the tool was offered.
const LISTED: &str = "tools";

/// A tool as an agent offers it.
pub(super) struct Offered {
    pub(super) tool: Arc<dyn Tool>,
    /// Identifies what a model and an approver read about it.
    pub(super) hash: String,
    pub(super) arguments: Schema,
    pub(super) options: CallOptions,
    /// The entry of the definition's list of tools that means it.
    pub(super) entry: Option<String>,
}

impl Offered {
    /// What allows a call of it; where no list names it, that it was offered.
    pub(super) fn allowance(
        &self,
        decision: Decision,
        named: Option<Allowance>,
    ) -> Option<Allowance> {
        let listed = || Allowance { rule: LISTED, pattern: self.entry.clone() };
        (decision == Decision::Allowed).then(|| named.unwrap_or_else(listed))
    }
}

/// A call that is asked for.
pub(super) struct Asked<'a> {
    pub(super) call: &'a ToolCall,
    pub(super) slot: Slot,
    pub(super) scope: &'a RunScope,
    pub(super) offered: &'a Offered,
    /// Of the tool.
    pub(super) place: usize,
    pub(super) has_network: bool,
    pub(super) was_started: bool,
    pub(super) input: Option<&'a InputGiven>,
}

/// What a call would do with its arguments.
pub(super) struct Considered {
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

impl Asked<'_> {
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

    /// These arguments of the call, where the model has written others.
    pub(super) fn unlike_written(&self, arguments: &Value) -> Option<Arc<Value>> {
        let written = arguments::parse(&self.call.arguments);
        (written.as_ref() != Ok(arguments)).then(|| Arc::new(arguments.clone()))
    }

    /// What the call would do with these arguments, which the interceptor of that place may have
    /// changed; or the call's result.
    pub(super) async fn actions(
        &self,
        arguments: &Value,
        changed_by: Option<usize>,
    ) -> Result<Considered, Unprepared> {
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
            Ok(actions) => Ok(Considered { canonical, context, actions }),
            // What a call would do is unknown, so it cannot be judged: a check that cannot
            // decide blocks.
            Err(Failure::Told(CallFailure::ToolError, message)) => {
                if self.are_mistaken(arguments).await {
                    return Err(refused(call, CallFailure::InvalidArguments, &message).into());
                }
                let undecided = blocking("actions", message);
                Err(blocked(call, undecided, shown(arguments, canonical), Arc::default()).into())
            }
            Err(Failure::Told(failure, message)) => Err(refused(call, failure, &message).into()),
            Err(failure) => {
                let (message, fault) = (failure.into_message(), fault(call.id, &call.name));
                Err(Unprepared::Fatal(fatal(&call.name, message, fault, None)))
            }
        }
    }

    /// Whether the tool would refuse the arguments whatever there is to work on: no rule is asked then.
    async fn are_mistaken(&self, arguments: &Value) -> bool {
        let (tool, arguments) = (Arc::clone(&self.offered.tool), arguments.clone());
        let mistakes = tokio::task::spawn_blocking(move || tool.mistakes(&arguments));
        mistakes.await.is_ok_and(|mistakes| !mistakes.is_empty())
    }
}
