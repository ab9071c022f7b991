//! Calls of tools that the caller executes: they are judged like others, and then left to the caller.
//!
//! Nothing is executed here. Such a call does what the caller declared, and must pass the rules on
//! names, autonomy, skills and flow. The caller needs no scope for its own tools.

use std::sync::Arc;

use serde_json::Value;

use super::approval::{Escalated, GrantedApproval};
use super::arguments;
use super::audit_arguments::shown;
use super::executor::Executor;
use super::interceptors::{CallView, Intercepted, Returned};
use super::results::{
    Finished, blocked, error_text, escalated, intercepted, not_admitted, not_executed, refused,
};
use super::run_scope::RunScope;
use crate::bounds::schema::Schema;
use crate::event::{AuditRecord, CallFailure, ToolCallCompleted};
use crate::governance::{Action, Call, Decision, Objection, Verdict};
use crate::message::{ToolCall, canonical_json};
use crate::run::{ClientTool, Effect};

/// The decision on such a call.
#[derive(Debug)]
pub enum ClientCall {
    /// The caller executes it.
    Permitted(Box<ClientPermit>),
    /// It needs an approval first.
    Escalated(Box<Escalated>),
    /// It has its result.
    Answered(Box<Finished>),
}

/// A call that the caller may execute.
#[derive(Debug)]
pub struct ClientPermit {
    /// With these arguments.
    pub arguments: Value,
    /// What the gate judged.
    pub actions: Arc<[Action]>,
    /// Why it may be executed, in words.
    pub reason: String,
    /// What the audit log keeps of the decision.
    pub audit: AuditRecord,
}

impl ClientPermit {
    /// The call, refused because the caller exceeds its rate limit.
    pub fn not_admitted(self, call: &ToolCall, why: &str) -> Finished {
        not_admitted(call, why, self.audit.arguments, self.actions)
    }
}

impl Executor {
    /// The arguments as the interceptors leave them, where they still match their schema; or the call's
    /// result.
    fn rewritten_for_caller(
        &self,
        call: &ToolCall,
        (mut arguments, is_edited): (Value, bool),
        actions: &Arc<[Action]>,
        scope: &RunScope,
        schema: Option<&Schema>,
    ) -> Result<Value, Box<Finished>> {
        let (tool, inputs) = (call.name.as_str(), &*scope.inputs);
        let directory = scope.workspace.directory();
        let mut changed_by = None;
        for interceptor in self.interceptors.before(tool, is_edited) {
            let seen = CallView {
                tool,
                arguments: &arguments,
                inputs,
                actions: Some(actions),
                directory: &directory,
            };
            match interceptor.judge(&seen) {
                Intercepted::Untouched => {}
                Intercepted::Rewritten(rewritten) => {
                    (arguments, changed_by) = (rewritten, Some(interceptor.place()));
                }
                Intercepted::Blocked(reason) => {
                    let actions = Arc::clone(actions);
                    return Err(Box::new(intercepted(call, &reason, &arguments, actions)));
                }
            }
        }
        if let (Some(place), Some(schema)) = (changed_by, schema)
            && let Err(message) = arguments::check(schema, &arguments)
        {
            let message = format!("Interceptor {place} changed the arguments. {message}");
            return Err(Box::new(refused(call, CallFailure::InvalidArguments, &message)));
        }
        Ok(arguments)
    }

    /// Judges a call of a tool whose arguments match its schema. Those of an approval replace them; those
    /// that an interceptor changes must match it again.
    pub fn judge_client_call(
        &self,
        call: &ToolCall,
        (tool, arguments): (&ClientTool, Value),
        scope: &RunScope,
        approval: Option<GrantedApproval<'_>>,
        schema: Option<&Schema>,
    ) -> ClientCall {
        let actions: Arc<[Action]> = [tool.action()].into();
        let question = Call {
            tool: &call.name,
            effect: tool.effect.unwrap_or(Effect::Once),
            is_undeclared: false,
            actions: Arc::clone(&actions),
            approved_by: None,
            labels: scope.labels,
            skills: &scope.skills,
            directory: scope.workspace.directory(),
        };
        let own_tools = [format!("tools:{}", call.name)];
        let lapsed = approval.and_then(|granted| {
            let outdated = granted.outdated(None);
            outdated.or_else(|| granted.lapsed(&self.gate, &own_tools, &question))
        });
        let held = approval.filter(|_| lapsed.is_none());
        let approval =
            held.or(approval.map(|granted| GrantedApproval { arguments: None, ..granted }));
        let edited = approval.and_then(|granted| granted.arguments).cloned();
        let is_edited = edited.is_some();
        let arguments = edited.unwrap_or(arguments);
        let arguments = (arguments, is_edited);
        let arguments = match self.rewritten_for_caller(call, arguments, &actions, scope, schema) {
            Ok(arguments) => arguments,
            Err(answered) => return ClientCall::Answered(answered),
        };
        let question = Call { approved_by: held.map(|granted| granted.by), ..question };
        let shown_arguments = shown(&arguments, canonical_json(arguments.clone()));
        match self.judge(&own_tools, question) {
            Verdict::Pass { decision, rule, pattern, reason, allowance, .. } => {
                let (rule, pattern) = match (decision, allowance) {
                    (Decision::Allowed, Some(allowance)) => (allowance.rule, allowance.pattern),
                    (Decision::Allowed, None) => ("client_tools", None),
                    _ => (rule, pattern),
                };
                let reason = reason
                    .or_else(|| approval.map(|granted| granted.not_needed()))
                    .unwrap_or_else(|| "The caller executes this tool.".to_owned());
                let why = Objection { decision, rule, pattern, reason };
                let reason = why.reason.clone();
                let audit = not_executed(call, why, shown_arguments);
                ClientCall::Permitted(Box::new(ClientPermit { arguments, actions, reason, audit }))
            }
            Verdict::Stop(objection) if objection.decision == Decision::Escalated => {
                let objection = objection.with(lapsed);
                let escalated = escalated(call, objection, arguments, shown_arguments, actions);
                ClientCall::Escalated(Box::new(escalated))
            }
            Verdict::Stop(objection) => {
                let refused = blocked(call, objection, shown_arguments, actions);
                ClientCall::Answered(Box::new(refused))
            }
        }
    }

    /// Applies the interceptors to a result that the caller or a reviewer gave.
    pub fn revise(&self, result: &mut ToolCallCompleted, arguments: &Value, inputs: &Value) {
        let is_error = result.failure.is_some();
        let returned = Returned { tool: &result.tool, arguments, inputs, is_error };
        match self.interceptors.readable(&returned, &result.content) {
            Ok((text, replaced)) => (result.content, result.replaced) = (text, replaced),
            Err(why) => {
                result.content = error_text(&why);
                result.failure = result.failure.or(Some(CallFailure::Withheld));
            }
        }
    }
}
