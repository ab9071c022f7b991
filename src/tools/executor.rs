//! One tool call, from the arguments that a model wrote to the result that it reads.
//!
//! Before the write-ahead event ([`Executor::prepare`]): resolve, parse, check against the schema,
//! ask the tool what the call would do, ask the gate. After it ([`Executor::execute`]): run under a
//! timeout and cancellation, cap the result, note it for the audit log. Whatever goes wrong in a
//! call becomes its result; only a fault of the service itself ends the run. Appending events, and
//! deciding what happens next, is the engine's.

mod reconciliation;

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::approval::{EarlierDecisions, Escalated, GrantedApproval};
use super::arguments;
use super::audit_arguments::shown;
pub use super::call_options::CallOptions;
use super::change_recorder::Changes;
use super::guarded_work::{Failure, audited, guarded};
use super::interceptors::{CallView, Intercepted, Interceptors, Returned};
use super::mcp::Unlisted;
use super::offered_tool::{CallRequest, OfferedTool, PlannedCall, Unprepared};
pub use super::ready_call::ReadyCall;
use super::results::{
    FatalToolError, Finished, awaiting_child, awaiting_input, blocked, error_text, escalated,
    fatal, fault, finished, intercepted, refused,
};
pub use super::run_scope::{RunScope, Slot};
use super::{Tool, ToolInfo};
use crate::bounds::schema::Schema;
use crate::bounds::text::shortened;
use crate::event::{
    CallFailure, Circumstances, ToolCallCompleted, ToolCallStarted, ValidationError,
};
use crate::governance::{Action, Call, Decision, Gate, Verdict};
use crate::message::{CallTarget, ToolCall};
use crate::run::{Consumption, Delegation, Effect, Labels};
use reconciliation::unsettled;

/// The wait before a failed call is repeated; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest such wait.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Named as the approver of a call that is repeated.
const EARLIER_DECISION: &str = "the decision with which it was started";
/// Added to the result of a call that cannot be repeated.
const GONE_MEANWHILE: &str =
    "; the call was started before, and it is unknown whether it took effect";
/// The longest wait that a service may ask for; where it asks for more, its answer is the result.
const LONGEST_ASKED: Duration = Duration::from_secs(10);

/// The tools of an agent behind its gate. Made once for a definition, shared by all its runs.
pub struct Executor {
    tools: Vec<OfferedTool>,
    pub(super) gate: Gate,
    pub(super) interceptors: Interceptors,
    unlisted: Vec<Unlisted>,
    left_out: Option<String>,
}

/// A tool's input schema is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the input schema of {tool} is invalid: {message}")]
pub struct SchemaError {
    /// The tool.
    pub tool: String,
    /// Why.
    pub message: String,
}

/// A call that has been looked at.
#[derive(Debug)]
pub enum Prepared {
    /// It has its result, and is not executed.
    Answered(Finished),
    /// It needs an approval.
    Escalated(Escalated),
    /// It may be executed, once its start is stored.
    Ready(ReadyCall),
}

/// A call that has been judged.
struct Judged {
    prepared: Prepared,
    /// Why its approval has lapsed.
    lapsed: Option<String>,
}

impl Executor {
    /// Compiles the tools' schemas.
    ///
    /// # Errors
    /// The first schema that is invalid or has external references.
    pub fn new(
        tools: Vec<Arc<dyn Tool>>,
        gate: Gate,
        options: impl Fn(&str) -> CallOptions,
    ) -> Result<Self, SchemaError> {
        let offer = |tool: Arc<dyn Tool>| match Schema::of_tool(&tool.info().input_schema) {
            Ok(arguments) => {
                let hash = tool.info().hash(&tool.does());
                Ok(OfferedTool {
                    arguments,
                    hash,
                    options: options(&tool.info().name),
                    entry: None,
                    tool,
                })
            }
            Err(e) => Err(SchemaError { tool: tool.info().name.clone(), message: e.to_string() }),
        };
        Ok(Self {
            tools: tools.into_iter().map(offer).collect::<Result<_, _>>()?,
            gate,
            interceptors: Interceptors::default(),
            unlisted: Vec::new(),
            left_out: None,
        })
    }

    /// The same, with interceptors around its calls.
    #[must_use]
    pub fn intercepted(self, interceptors: Interceptors) -> Self {
        Self { interceptors, ..self }
    }

    /// The same, where each tool knows the entry of the definition's list of tools that names it.
    #[must_use]
    pub fn listed(mut self, entry: impl Fn(&str) -> Option<String>) -> Self {
        for offered in &mut self.tools {
            offered.entry = entry(&offered.tool.info().name);
        }
        self
    }

    /// The same, with servers whose tools are unknown.
    #[must_use]
    pub fn beside(self, unlisted: Vec<Unlisted>) -> Self {
        Self { unlisted, ..self }
    }

    /// The same, with a note about tools that are left out.
    #[must_use]
    pub fn without(self, left_out: Option<String>) -> Self {
        Self { left_out, ..self }
    }

    /// The note about tools that are left out.
    pub fn left_out(&self) -> Option<&str> {
        self.left_out.as_deref()
    }

    /// The servers whose tools are not known.
    pub fn unlisted(&self) -> &[Unlisted] {
        &self.unlisted
    }

    /// Judges a call, which is not executed.
    pub fn judge(&self, scopes: &[String], call: Call<'_>) -> Verdict {
        self.gate.judge(scopes, call)
    }

    /// Whether any call could read or write a path of the workspace in that directory of the tenant.
    pub fn may_reach(&self, directory: &str, path: &str) -> bool {
        self.gate.reaches(directory, path)
    }

    /// The tools, in the order they were given.
    pub fn infos(&self) -> impl Iterator<Item = &ToolInfo> {
        self.tools.iter().map(|offered| offered.tool.info())
    }

    /// The tools whose results are used again.
    pub fn cached(&self) -> impl Iterator<Item = &str> {
        self.tools
            .iter()
            .filter(|offered| offered.options.cache)
            .map(|offered| offered.tool.info().name.as_str())
    }

    /// How many calls of a tool all runs of the caller may make in a minute, where that is limited
    /// and the tool is not the caller's own.
    pub fn per_minute(&self, tool: &str) -> Option<u32> {
        self.named(tool).and_then(|offered| offered.options.per_minute)
    }

    /// The labels that the result of a call gives to a run that did not see the call end.
    pub fn yields_of_reported(&self, tool: &str) -> Labels {
        let Some(OfferedTool { options, .. }) = self.named(tool) else { return Labels::UNTRUSTED };
        options.yields.without(options.sanitizes)
    }

    /// Checks arguments against a tool's schema. Arguments of an unknown tool pass.
    ///
    /// # Errors
    /// What is wrong, for the model.
    pub fn check_arguments(&self, tool: &str, arguments: &Value) -> Result<(), String> {
        self.named(tool).map_or(Ok(()), |offered| arguments::check(&offered.arguments, arguments))
    }

    /// What is wrong with arguments, for their schema and for the tool, with JSON pointers into them.
    /// Those of an unknown tool are not judged. May take its time, so it belongs on the blocking pool.
    pub fn argument_errors(&self, tool: &str, arguments: &Value) -> Vec<ValidationError> {
        let Some(offered) = self.named(tool) else { return Vec::new() };
        let errors = arguments::errors(&offered.arguments, arguments);
        if errors.is_empty() { offered.tool.mistakes(arguments) } else { errors }
    }

    async fn judged(
        &self,
        call: &ToolCall,
        slot: Slot,
        scope: &RunScope,
        EarlierDecisions { approval, was_started, input, .. }: EarlierDecisions<'_>,
    ) -> Result<Prepared, FatalToolError> {
        let Some((place, offered)) = self.offered(&call.name, scope) else {
            return Ok(Prepared::Answered(self.unknown(call, was_started)));
        };
        let has_network = self.gate.has_network();
        let asked =
            CallRequest { call, slot, scope, offered, place, has_network, was_started, input };
        let may_lapse = approval.filter(|_| !was_started);
        let outdated = may_lapse.and_then(|it| it.outdated(Some(&offered.hash)));
        let judged = match self.judge_with(&asked, approval, outdated).await {
            // The approver's edited arguments lapse with the approval.
            Ok(Judged { lapsed: Some(why), .. })
                if approval.is_some_and(|it| it.arguments.is_some()) =>
            {
                self.judge_with(&asked, approval, Some(why)).await
            }
            judged => judged,
        };
        match judged {
            Ok(judged) => Ok(judged.prepared),
            Err(Unprepared::Answered(finished)) => Ok(Prepared::Answered(*finished)),
            Err(Unprepared::Fatal(error)) => Err(error),
        }
    }

    /// Judges a call, with the arguments of an approval unless that is outdated.
    async fn judge_with(
        &self,
        asked: &CallRequest<'_>,
        approval: Option<GrantedApproval<'_>>,
        outdated: Option<String>,
    ) -> Result<Judged, Unprepared> {
        let (call, scope, offered) = (asked.call, asked.scope, asked.offered);
        let held = approval.filter(|_| outdated.is_none());
        let edited = held.and_then(|granted| granted.arguments);
        let is_edited = edited.is_some();
        let arguments = asked.arguments(edited).map_err(Unprepared::Answered)?;
        let (arguments, planned) = self.intercept(asked, arguments, is_edited).await?;
        let is_as_written = !is_edited && !self.interceptors.may_rewrite(&call.name);
        let rewritten = if is_as_written { None } else { asked.if_rewritten(&arguments) };
        let PlannedCall { canonical, context, actions } = planned;
        let (tool, options) = (&offered.tool, &offered.options);
        let declared = tool.info().effect;
        let effect = actions.iter().map(|action| action.effect).max().unwrap_or(declared);
        let (consumes, shown_arguments) = (Consumption::of(&actions), shown(&arguments, canonical));
        let actions: Arc<[Action]> = actions.into();
        let (judged, recorded) = (Arc::clone(&actions), Action::recorded(&actions));
        let scopes = &scope.caller.scopes;
        let question = Call {
            tool: &call.name,
            effect: declared,
            is_undeclared: tool.is_undeclared(),
            actions,
            approved_by: None,
            skills: &scope.skills,
            labels: scope.labels,
            directory: scope.workspace.directory(),
        };
        let may_lapse = held.filter(|_| !asked.was_started);
        let lapsed = may_lapse.and_then(|it| it.lapsed(&self.gate, scopes, &question));
        let held = held.filter(|_| lapsed.is_none());
        let earlier = asked.was_started.then_some(EARLIER_DECISION);
        let approved_by = held.map(|granted| granted.by).or(earlier);
        let approval =
            held.or(approval.map(|granted| GrantedApproval { arguments: None, ..granted }));
        let prepared = match self.gate.judge(scopes, Call { approved_by, ..question }) {
            Verdict::Pass { permit, decision, rule, pattern, reason, allowance } => {
                let started = ToolCallStarted {
                    call_id: call.id,
                    tool: call.name.clone(),
                    effect,
                    effect_key: context.effect_key.clone(),
                    decision: decision.as_str().to_owned(),
                    reason: reason.or_else(|| approval.map(|granted| granted.not_needed())),
                    actions: recorded,
                    consumes,
                    on_unknown_outcome: options.on_unknown_outcome,
                    sandbox: tool.sandbox_level(),
                    circumstances: Circumstances::default(),
                    reconcilable_by: offered.reconcilable_by(effect),
                    arguments: rewritten,
                };
                let is_concurrent = effect == Effect::Read || tool.info().concurrent;
                Prepared::Ready(ReadyCall {
                    started,
                    tool: asked.place,
                    permit,
                    arguments,
                    context,
                    rule,
                    pattern,
                    allowance: offered.allowance(decision, allowance),
                    is_concurrent,
                    was_started: asked.was_started,
                    shown_arguments,
                    reconciliation: None,
                })
            }
            Verdict::Stop(objection) if objection.decision == Decision::Escalated => {
                let objection = objection.with(outdated.or_else(|| lapsed.clone()));
                let actions_hash = Action::hash_of_unrecorded(&judged, &recorded);
                let escalated = escalated(call, objection, arguments, shown_arguments, recorded);
                let tool_hash = Some(offered.hash.clone());
                Prepared::Escalated(Escalated { actions_hash, tool_hash, ..escalated })
            }
            Verdict::Stop(objection) => {
                Prepared::Answered(blocked(call, objection, shown_arguments, recorded))
            }
        };
        Ok(Judged { prepared, lapsed })
    }

    fn named(&self, tool: &str) -> Option<&OfferedTool> {
        self.tools.iter().find(|offered| offered.tool.info().name == tool)
    }

    /// The result of a call of a tool that is not offered; that of a server of which nothing is known
    /// may exist nevertheless.
    fn unknown(&self, call: &ToolCall, was_started: bool) -> Finished {
        let unlisted = self.unlisted.iter().find(|server| server.has(&call.name));
        let message = unlisted
            .map_or_else(|| format!("Unknown tool {}", shortened(&call.name)), Unlisted::why);
        let message = if was_started { gone(&message) } else { message };
        refused(call, CallFailure::UnknownTool, &message)
    }

    /// A tool that the run may use, and its place.
    fn offered(&self, name: &str, scope: &RunScope) -> Option<(usize, &OfferedTool)> {
        let mut tools = self.tools.iter().enumerate();
        tools.find(|(_, offered)| offered.tool.info().name == name && scope.tools.contains(name))
    }

    /// The arguments as the interceptors leave them, and what the call would do with them; or the
    /// call's result. An interceptor that looks at paths sees the paths of the arguments as the
    /// interceptors before it left them. Arguments that an approver has edited may be blocked, and are
    /// never changed.
    async fn intercept(
        &self,
        asked: &CallRequest<'_>,
        mut arguments: Value,
        is_edited: bool,
    ) -> Result<(Value, PlannedCall), Unprepared> {
        let tool = &asked.call.name;
        let directory = asked.scope.workspace.directory();
        // Until the arguments are changed.
        let mut planned: Option<PlannedCall> = None;
        let mut changed_by = None;
        for interceptor in self.interceptors.before(tool, is_edited) {
            if planned.is_none() && interceptor.looks_at_paths() {
                planned = Some(asked.actions(&arguments, changed_by.take()).await?);
            }
            let inputs = &asked.scope.inputs;
            let actions = planned.as_ref().map(|planned| planned.actions.as_slice());
            let view =
                CallView { tool, arguments: &arguments, inputs, actions, directory: &directory };
            match interceptor.judge(&view) {
                Intercepted::Untouched => {}
                Intercepted::Rewritten(rewritten) => {
                    (arguments, planned) = (rewritten, None);
                    changed_by = Some(interceptor.place());
                }
                Intercepted::Blocked(reason) => {
                    let planned = match planned {
                        None => asked.actions(&arguments, changed_by).await.ok(),
                        known => known,
                    };
                    let actions = planned.map(|it| Action::recorded(&it.actions.into()));
                    let actions = actions.unwrap_or_default();
                    return Err(intercepted(asked.call, &reason, &arguments, actions).into());
                }
            }
        }
        let planned = match planned {
            Some(planned) => planned,
            None => asked.actions(&arguments, changed_by).await?,
        };
        Ok((arguments, planned))
    }

    /// Executes a call whose start is stored. A timeout, a panic, a cancellation and the tool's own
    /// errors are results. A call that may be repeated is repeated as often as its tool's options say.
    ///
    /// # Errors
    /// [`FatalToolError`] where the tool says that the service is at fault.
    pub async fn execute(
        &self,
        mut ready: ReadyCall,
        scope: &RunScope,
        cancel: &CancellationToken,
    ) -> Result<Finished, FatalToolError> {
        let since = Instant::now();
        ready.context.listener = scope.listener.clone();
        ready.context.requests.within(scope.requests_left.clone());
        ready.context.changed.within(scope.files_left);
        let announced = Consumption::of(ready.permit.actions()).network_requests;
        ready.context.requests.announced(announced);
        let result = self.attempted(&ready, scope, cancel).await;
        let result = ready.context.changed.with_objections(result).await;
        let duration_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (outcome, text) = audited(&result);
        let audit = ready.audit(outcome, duration_ms, text);
        let network = ready.context.requests.totals();
        let (requests, audit) = ready.context.requests.audited(audit);
        let (requests, audit) = ready.records(&result, requests, audit);
        let yields = self.yields_of(&ready, result.is_err());
        let Changes { listed: changes, omitted: changes_omitted } = ready.context.changed.take();
        let sandbox = self.tools.get(ready.tool).and_then(|offered| offered.tool.sandbox_level());
        let used = self.tools.get(ready.tool).filter(|_| result.is_ok());
        let activates = used.and_then(|offered| offered.tool.activates(&ready.arguments));
        let reconciled = ready.reconciled();
        let started = ready.started;
        let completed = |text: String, failure: Option<CallFailure>| {
            let returned = Returned {
                tool: &started.tool,
                arguments: &ready.arguments,
                inputs: &scope.inputs,
                is_error: failure.is_some(),
            };
            let (text, replaced, failure) = match self.interceptors.readable(&returned, &text) {
                Ok((text, replaced)) => (text, replaced, failure),
                Err(why) => (why, None, failure.or(Some(CallFailure::Withheld))),
            };
            ToolCallCompleted {
                call_id: started.call_id,
                tool: started.tool.clone(),
                target: CallTarget::Tool,
                content: if failure.is_some() { error_text(&text) } else { text },
                failure,
                duration_ms,
                cached: false,
                note: None,
                changes,
                changes_omitted,
                sandbox,
                network,
                replaced,
                child_run_id: ready.context.child_run.id(),
                reconciled,
                found_out: false,
            }
        };
        match result {
            Ok(text) => {
                let completed = completed(text, None);
                Ok(Finished { requests, activates, yields, ..finished(completed, Some(audit)) })
            }
            Err(Failure::ForModel(failure, message)) => {
                let completed = completed(message, Some(failure));
                Ok(Finished { requests, yields, ..finished(completed, Some(audit)) })
            }
            Err(Failure::AwaitsChild(child)) => {
                Ok(awaiting_child(started.call_id, started.tool, ready.arguments, child))
            }
            Err(Failure::AwaitsInput(asked)) => {
                let awaiting = awaiting_input(started, ready.arguments, *asked, network);
                Ok(Finished { requests, audit: Some(audit), ..awaiting })
            }
            Err(Failure::Unsettled(why)) => {
                let event =
                    unsettled(started, ready.arguments, ready.reconciliation.as_deref(), &why);
                Ok(Finished { requests, audit: Some(audit), ..Finished::of(event) })
            }
            Err(Failure::Fatal(message)) => {
                let completed =
                    ToolCallCompleted { duration_ms, ..fault(started.call_id, &started.tool) };
                Err(fatal(&started.tool, message, completed, Some(audit)))
            }
        }
    }

    /// The labels that the result of an executed call gives to the run.
    fn yields_of(&self, ready: &ReadyCall, has_failed: bool) -> Labels {
        let Some(OfferedTool { options, .. }) = self.tools.get(ready.tool) else {
            return Labels::default();
        };
        let private =
            if ready.permit.reads_private() { Labels::PRIVATE } else { Labels::default() };
        let read = ready.context.read_labels.labels().and(private);
        let in_vain = has_failed && ready.context.requests.had_no_answer();
        let own = if in_vain { Labels::default() } else { options.yields };
        let asked = ready.context.requests.labels();
        let asked = if options.declares_yields { Labels::default() } else { asked };
        own.and(read).and(asked).without(options.sanitizes)
    }

    /// How long one try of a call may take.
    fn limit(ready: &ReadyCall, scope: &RunScope, options: &CallOptions) -> Duration {
        let usual = match Delegation::of_tool(&ready.started.tool) {
            Some(_) => scope.delegation_timeout,
            None => scope.timeout,
        };
        options.timeout.unwrap_or(usual).min(scope.longest.unwrap_or(Duration::MAX))
    }

    async fn tried(&self, ready: &ReadyCall, scope: &RunScope) -> Result<String, Failure> {
        let Some(OfferedTool { tool, options, .. }) = self.tools.get(ready.tool) else {
            return Err(Failure::Fatal("the call was prepared by another executor".into()));
        };
        let limit = Self::limit(ready, scope, options);
        let retries = if ready.effect() == Effect::Once { 0 } else { options.retries };
        let mut pause = FIRST_PAUSE;
        for _ in 0..retries {
            if ready.effect() != Effect::Read {
                scope.standing.until_valid().await;
            }
            let work = tool.execute(ready.permit.clone(), ready.arguments.clone(), &ready.context);
            let done = guarded(limit, ready.effect(), work).await;
            let requests = &ready.context.requests;
            let asked = requests.take_pause().unwrap_or_default();
            let may_repeat = matches!(done, Err(Failure::ForModel(..)));
            if !may_repeat || requests.is_over_budget() || asked > LONGEST_ASKED {
                return done;
            }
            tokio::time::sleep(pause.max(asked)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        if ready.effect() != Effect::Read {
            scope.standing.until_valid().await;
        }
        let work = tool.execute(ready.permit.clone(), ready.arguments.clone(), &ready.context);
        guarded(limit, ready.effect(), work).await
    }
}

/// Why a call cannot be made again.
fn gone(why: &str) -> String {
    format!("{}{GONE_MEANWHILE}", why.trim_end_matches('.'))
}

#[cfg(test)]
#[path = "executor_tests.rs"]
mod executor_tests;
