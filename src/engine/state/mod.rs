//! The loop as a state machine without I/O.
//!
//! It makes every decision ([`State::next`], in `decide.rs`) and applies every event ([`State::apply`], in
//! `fold.rs`). It is plain data: no clock (the time is passed in), no random numbers, no channels. The
//! same fold builds it during a run, after a crash and for a reader of the journal. So recovery uses the
//! same code as a normal run.

mod circumstances;
mod crashes;
mod decide;
mod faults;
mod fold;
mod given_call;
pub(super) mod limits;
mod streak;
mod verdicts;
mod waiting;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::context::Compaction;
use super::plan::Rules;
use crate::agents::definition::ReactSection;
use crate::bounds::json;
use crate::event::{
    ApprovalBasis, Awaited, CompactionCause, Ending, InputAnswer, LimitReached, NetworkUse,
    Resolved, RunEvent, SkillActivated, ToolCallCompleted, ToolCallStarted, WaitKind,
};
use crate::message::{
    AssistantMessage, CallTarget, Conversation, FinishReason, ToolCall, ToolResult, Usage,
};
use crate::providers::ToolChoice;
use crate::run::{
    Action, Consumption, Effect, GivenCall, Labels, OnUnknownOutcome, RunStatus, Totals,
};
use crate::tools::approval::{EarlierDecisions, GrantedApproval};
use crate::tools::executor::Slot;
use crate::tools::interrupted_call::{InterruptedCall, RecordedCall};

use crashes::Blame;
use streak::{Streak, same_call};
use window::Fruitless;

pub use crashes::Disposal;
pub use faults::ModelFault;
pub use fold::FoldError;

/// What the shell has to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Journal the opening: system prompt and first messages.
    Open,
    /// Journal these events, then ask again.
    Record(Vec<RunEvent>),
    /// Make the conversation smaller, then journal [`Compaction::into_event`].
    Compact(Compaction),
    /// Journal the call that the caller made in the agent's name.
    GiveCall(GivenCall),
    /// Call the model, then journal its answer or [`State::model_failed`].
    CallModel(ToolChoice),
    /// Execute these tool calls concurrently, then journal their results in this order.
    CallTools(Vec<PendingCall>),
    /// Show the model what this proposal looks like, then journal [`RunEvent::OutputReflected`].
    Reflect(Proposal),
    /// Evaluate the stop conditions that were not met yet, then journal [`State::stop_conditions_evaluated`].
    EvaluateStopConditions,
    /// Validate a proposed output, then journal [`State::judged`].
    Check(Proposal),
    /// Park the run in this status and give it back.
    Suspend(RunStatus),
    /// The run has ended.
    Done,
}

/// A tool call that waits for its execution.
#[derive(Debug, Clone, PartialEq)]
pub struct PendingCall {
    /// The call.
    pub call: ToolCall,
    /// 1-based.
    pub attempt: u32,
    /// 1-based, within the attempt.
    pub iteration: u32,
    /// 0-based, within the response.
    pub index: u32,
    /// The approval, where it was asked for.
    pub approval: Option<Approval>,
    /// Whether it was started before, and is repeated after a crash or a wait.
    pub was_started: bool,
    /// The answers to what the tool asked for before.
    pub input: Option<InputAnswer>,
    /// Set if a crash interrupted the call and its tool can be asked for the outcome.
    pub interrupted: Option<InterruptedCall>,
}

impl PendingCall {
    /// Its position in the run.
    pub fn slot(&self) -> Slot {
        Slot { attempt: self.attempt, iteration: self.iteration, index: self.index }
    }

    /// The earlier decisions on the call, for its execution.
    pub fn earlier_decisions(&self) -> EarlierDecisions<'_> {
        EarlierDecisions {
            approval: self.granted_approval(),
            was_started: self.was_started,
            input: self.input.as_ref(),
            interrupted: self.interrupted.as_ref(),
        }
    }

    /// The approval, for the execution of the call.
    pub fn granted_approval(&self) -> Option<GrantedApproval<'_>> {
        let approval = self.approval.as_ref()?;
        Some(GrantedApproval {
            by: approval.by.as_deref().unwrap_or("an approver"),
            arguments: approval.arguments.as_ref(),
            basis: &approval.basis,
            actions: &approval.actions,
        })
    }
}

/// A person's approval of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Approval {
    /// Other arguments than the model's.
    pub arguments: Option<Value>,
    /// Who approved.
    pub by: Option<String>,
    /// What the approval is valid for.
    pub basis: ApprovalBasis,
    /// The actions that the approver was shown.
    pub actions: Arc<[Action]>,
}

/// A proposed output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// The proposing call; `None` where a single shot's text is the proposal.
    pub call_id: Option<Uuid>,
    /// What was proposed; the raw text where it is not JSON.
    pub output: Arc<Value>,
    /// Why the proposal is not JSON, if it is not.
    pub malformed: Option<String>,
}

/// What the run waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Waiting {
    /// The number and the time of the event with the request.
    seq: i64,
    since: DateTime<Utc>,
    awaited: Awaited,
}

/// An answer, with the request that it answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Answered {
    resolved: Resolved,
    basis: ApprovalBasis,
    #[serde(default)]
    actions: Arc<[Action]>,
    /// The arguments that were shown with the request.
    #[serde(default)]
    arguments: Value,
    /// Milliseconds until it was given.
    took_ms: u64,
    /// Whether a tool had asked for input.
    #[serde(default)]
    for_input: bool,
}

/// A response whose calls are being answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct OpenTurn {
    message: AssistantMessage,
    cut_off: bool,
    /// Why the model stopped, if the response counts as an answer and none of its calls is executed.
    answered: Option<FinishReason>,
    answers: BTreeMap<Uuid, ToolResult>,
    /// Dispatched calls. Between two steps, only a crash leaves one without an answer.
    dispatched: BTreeMap<Uuid, Dispatched>,
    /// What was counted for each call that was dispatched.
    counted: BTreeMap<Uuid, Consumption>,
    /// How long the run had been under way when each call was first dispatched, in milliseconds.
    #[serde(default)]
    begun_after: BTreeMap<Uuid, i64>,
    /// Whether a call was blocked.
    is_blocked: bool,
    /// Answers to requests for calls of this response.
    resolved: BTreeMap<Uuid, Answered>,
    /// Calls that waited for a child run that has ended, with its id if known.
    #[serde(default)]
    children_ended: BTreeMap<Uuid, Option<Uuid>>,
    /// Input that tools asked for, by call.
    #[serde(default)]
    inputs: BTreeMap<Uuid, InputAnswer>,
    proposal: Option<Proposal>,
}

impl OpenTurn {
    /// A response without any answered call.
    fn of(message: AssistantMessage) -> Self {
        Self {
            message,
            cut_off: false,
            answered: None,
            answers: BTreeMap::new(),
            dispatched: BTreeMap::new(),
            counted: BTreeMap::new(),
            begun_after: BTreeMap::new(),
            is_blocked: false,
            resolved: BTreeMap::new(),
            children_ended: BTreeMap::new(),
            inputs: BTreeMap::new(),
            proposal: None,
        }
    }

    /// The calls without a result, with their positions.
    fn open_calls(&self) -> impl Iterator<Item = (usize, &ToolCall)> {
        self.message.tool_calls.iter().enumerate().filter(|(_, call)| !self.is_answered(call))
    }

    fn was_dispatched(&self, call_id: Uuid) -> bool {
        let effect = self.dispatched.get(&call_id).map(|call| call.effect);
        effect.is_some_and(|effect| effect != Effect::Read) && !self.answers.contains_key(&call_id)
    }

    /// Whether the call is in progress, or was until it had to wait.
    fn was_started(&self, call_id: Uuid) -> bool {
        self.dispatched.contains_key(&call_id)
            || self.children_ended.contains_key(&call_id)
            || self.inputs.contains_key(&call_id)
    }

    fn is_answered(&self, call: &ToolCall) -> bool {
        self.answers.contains_key(&call.id)
    }
}

/// A dispatched call, whose outcome may be unknown after a crash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Dispatched {
    effect: Effect,
    on_unknown_outcome: OnUnknownOutcome,
    /// Set if its tool can be asked for the outcome.
    #[serde(default)]
    reconcilable: Option<InterruptedCall>,
    /// Whether it was dispatched before, and no result came.
    #[serde(default)]
    is_repeated: bool,
    #[serde(default)]
    made_with: RecordedCall,
}

impl Dispatched {
    /// Whether it must not be repeated.
    fn is_final(&self) -> bool {
        self.effect == Effect::Once && self.on_unknown_outcome != OnUnknownOutcome::Retry
    }

    /// Whether a person has to find out its outcome, unless its tool knows it.
    fn is_reviewed(&self) -> bool {
        self.effect == Effect::Once && self.on_unknown_outcome == OnUnknownOutcome::Review
    }
}

/// The call that failed last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FailedCall {
    tool: String,
    call_id: Uuid,
    content: String,
}

/// A request to cancel the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct CancelRequest {
    reason: Option<String>,
    /// What the run was doing.
    phase: String,
}

/// The state of the tool call that tool choice requires at the beginning of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RequiredCall {
    /// Not made yet.
    Open,
    /// Not made, and requested once more.
    Repeated,
    /// Made, or no longer required.
    Settled,
}

/// Where the run stands between two events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one a run, and most of the time it is this"
)]
enum Phase {
    /// Nothing happened yet.
    Opening,
    /// The next attempt is due.
    BetweenAttempts,
    /// The next iteration is due.
    BetweenIterations,
    /// A model call is due or in progress; repeated if a crash interrupted it.
    Calling { is_repeated: bool },
    /// Tool calls are being answered, or the proposal among them validated.
    Acting(OpenTurn),
    /// The model answered in text.
    Answered { message: AssistantMessage, finish_reason: FinishReason },
    /// The run has ended.
    Ended { ending: Ending, at: DateTime<Utc> },
}

/// Everything that the loop knows of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    rules: Rules,
    conversation: Conversation,
    totals: Totals,
    last_seq: i64,
    started_at: Option<DateTime<Utc>>,
    /// The number of turns of earlier runs at the beginning of the conversation.
    taken_over: usize,
    single_shot: bool,
    attempt: u32,
    iteration: u32,
    required_call: RequiredCall,
    /// Tokens of the last model call, input and output, or what a compaction left of them.
    last_tokens: u64,
    /// Turns that `last_tokens` counts; of the one after them, what the model wrote is counted too.
    counted_turns: usize,
    /// Recorded bytes of models' answers and tools' results.
    recorded_bytes: usize,
    /// Why the conversation was made smaller since the iteration began.
    compactions: Vec<CompactionCause>,
    /// Model calls that wrote summaries.
    summaries: u32,
    #[serde(default)]
    fruitless: Fruitless,
    failures_in_a_row: u32,
    failed_call: Option<FailedCall>,
    streak: Streak,
    /// Results of read-only calls since the attempt began or something was changed.
    cache: BTreeMap<String, String>,
    /// The attempt's last proposal.
    proposal: Option<Proposal>,
    /// What was wrong with the latest answers that held no valid decision.
    undecided: Vec<String>,
    /// Whether the model is asked for nothing but the final answer.
    answer_only: bool,
    /// The model that answered last, as `provider/model`.
    answered_last: Option<String>,
    confirmed: bool,
    /// Blank answers in a row.
    blank_answers: u32,
    /// The beginning of an answer that was cut off, while its rest is asked for.
    unfinished: Option<String>,
    cancel: Option<CancelRequest>,
    /// What the run waits for.
    waiting: BTreeMap<Uuid, Waiting>,
    /// Stop conditions that were met and dealt with.
    conditions_met: BTreeSet<usize>,
    /// The stop condition that parked the run and was answered by ending it.
    not_continued: Option<usize>,
    /// The network use of a call that would have exceeded the run's limit of requests.
    over_requests: Option<NetworkUse>,
    /// The last call whose result looked like a prompt injection.
    suspicious: Option<Uuid>,
    /// The active skills.
    skills: Vec<SkillActivated>,
    /// The limit that leaves one model call.
    limit: Option<LimitReached>,
    raw_response: String,
    /// When the model call is retried, if the last try failed.
    #[serde(default)]
    asks_again_at: Option<DateTime<Utc>>,
    /// What the runs below a child run have taken; known while the child is driven.
    #[serde(skip)]
    below: Usage,
    blame: Blame,
    phase: Phase,
}

impl State {
    /// A run without events.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            conversation: Conversation::default(),
            totals: Totals::default(),
            last_seq: 0,
            started_at: None,
            taken_over: 0,
            single_shot: false,
            attempt: 0,
            iteration: 0,
            required_call: RequiredCall::Open,
            last_tokens: 0,
            counted_turns: 0,
            recorded_bytes: 0,
            compactions: Vec::new(),
            summaries: 0,
            fruitless: Fruitless::default(),
            failures_in_a_row: 0,
            failed_call: None,
            streak: Streak::default(),
            cache: BTreeMap::new(),
            proposal: None,
            undecided: Vec::new(),
            answer_only: false,
            answered_last: None,
            confirmed: false,
            blank_answers: 0,
            unfinished: None,
            cancel: None,
            waiting: BTreeMap::new(),
            conditions_met: BTreeSet::new(),
            not_continued: None,
            over_requests: None,
            suspicious: None,
            skills: Vec::new(),
            limit: None,
            raw_response: String::new(),
            asks_again_at: None,
            below: Usage::default(),
            blame: Blame::default(),
            phase: Phase::Opening,
        }
    }

    /// What the model has seen and said; complete turns only.
    pub fn conversation(&self) -> &Conversation {
        &self.conversation
    }

    /// About how many bytes of memory the conversation and the last proposal take.
    pub fn bytes(&self) -> usize {
        let values =
            self.proposal.as_ref().map_or(0, |_| self.raw_response.len() * json::IN_MEMORY);
        self.conversation.bytes() + values
    }

    /// The call with an unknown outcome after a crash that this event settles: it is repeated, reviewed by a
    /// person, or answered with what is known. Only calls that may have changed something count.
    pub fn settles(&self, what: &RunEvent) -> Option<&ToolCall> {
        let (RunEvent::ToolCallStarted(ToolCallStarted { call_id, .. })
        | RunEvent::ToolCallCompleted(ToolCallCompleted { call_id, .. })
        | RunEvent::ApprovalResolved(Resolved { call_id, kind: WaitKind::Review, .. })) = what
        else {
            return None;
        };
        let Phase::Acting(turn) = &self.phase else { return None };
        let is_told = matches!(what, RunEvent::ApprovalResolved(_))
            && turn.dispatched.get(call_id).is_some_and(|call| call.is_repeated);
        (turn.was_dispatched(*call_id) && !is_told).then(|| self.call(*call_id)).flatten()
    }

    /// The model's last response, while calls of it are open, with the results so far.
    pub fn open_turn(&self) -> Option<(&AssistantMessage, impl Iterator<Item = &ToolResult>)> {
        let Phase::Acting(turn) = &self.phase else { return None };
        let calls = turn.message.tool_calls.iter();
        Some((&turn.message, calls.filter_map(|call| turn.answers.get(&call.id))))
    }

    /// How many turns of earlier runs the conversation began with.
    pub fn taken_over(&self) -> usize {
        self.taken_over
    }

    /// Calls that were dispatched and have no result yet.
    pub fn calls_under_way(&self) -> usize {
        let Phase::Acting(turn) = &self.phase else { return 0 };
        turn.open_calls().filter(|(_, call)| turn.dispatched.contains_key(&call.id)).count()
    }

    /// What the run has consumed so far.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// The number of the last event; 0 before the first.
    pub fn last_seq(&self) -> i64 {
        self.last_seq
    }

    /// When `run.started` happened.
    pub fn started_at(&self) -> Option<DateTime<Utc>> {
        self.started_at
    }

    /// The attempt under way, 1-based; 0 before the first.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The iteration within the attempt, 1-based; 0 before the first.
    pub fn iteration(&self) -> u32 {
        self.iteration
    }

    /// The number of the next model call within the run, summaries and failed tries included.
    pub fn model_step(&self) -> u32 {
        self.totals.iterations + self.totals.retries + self.summaries + 1
    }

    /// Whether the model is asked for the final answer alone, as the driver `react` may do.
    pub fn writes_answer(&self) -> bool {
        let is_asked_alone = |react: &ReactSection| react.final_via_inference;
        self.answer_only && self.rules.react.as_ref().is_some_and(is_asked_alone)
    }

    /// The index of the model to ask: the one that answered last, else the first. A model that only writes
    /// the final answer does not count.
    pub fn model_index(&self, models: &[String]) -> usize {
        let last = self.answered_last.as_ref();
        last.and_then(|last| models.iter().position(|model| model == last)).unwrap_or(0)
    }

    /// Whether the model is asked for nothing but the final answer that it has decided on.
    pub fn is_answer_only(&self) -> bool {
        self.answer_only
    }

    /// The beginning of an answer that was cut off, while its rest is asked for.
    pub fn unfinished(&self) -> Option<&str> {
        self.unfinished.as_deref()
    }

    /// Whether cancelling has been asked for.
    pub fn is_cancel_requested(&self) -> bool {
        self.cancel.is_some()
    }

    /// How and when it ended, once it has.
    pub fn ending(&self) -> Option<(&Ending, DateTime<Utc>)> {
        match &self.phase {
            Phase::Ended { ending, at } => Some((ending, *at)),
            _ => None,
        }
    }

    /// When the wall-clock limit strikes; `None` while the run waits, which costs it no time.
    pub fn deadline(&self) -> Option<DateTime<Utc>> {
        if self.totals.waiting_since.is_some() {
            return None;
        }
        let seconds = i64::try_from(self.rules.budget.max_duration_seconds).ok()?;
        let waited = chrono::TimeDelta::try_milliseconds(self.totals.waited_ms)?;
        self.started_at?
            .checked_add_signed(chrono::TimeDelta::try_seconds(seconds)?)?
            .checked_add_signed(waited)
    }

    /// Milliseconds that the run may still be under way; negative once the limit has struck.
    pub fn milliseconds_left(&self, now: DateTime<Utc>) -> Option<i64> {
        let seconds = i64::try_from(self.rules.budget.max_duration_seconds).ok()?;
        self.started_at?;
        seconds.checked_mul(1000)?.checked_sub(self.active_ms(now))
    }

    /// Milliseconds from the start, without those in which it waited.
    fn active_ms(&self, now: DateTime<Utc>) -> i64 {
        let until = self.totals.waiting_since.unwrap_or(now);
        let since = self.started_at.map_or(0, |start| (until - start).num_milliseconds());
        since - self.totals.waited_ms
    }

    /// Milliseconds from the start.
    pub fn elapsed_ms(&self, now: DateTime<Utc>) -> u64 {
        self.started_at
            .map_or(0, |start| u64::try_from((now - start).num_milliseconds()).unwrap_or(0))
    }

    /// The labels of what it has read.
    pub fn labels(&self) -> Labels {
        self.totals.labels
    }

    /// The active skills.
    pub fn skills(&self) -> &[SkillActivated] {
        &self.skills
    }

    fn pending(&self, index: usize, call: &ToolCall, approval: Option<Approval>) -> PendingCall {
        let turn = if let Phase::Acting(turn) = &self.phase { Some(turn) } else { None };
        PendingCall {
            call: call.clone(),
            attempt: self.attempt,
            iteration: self.iteration,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            approval,
            was_started: turn.is_some_and(|turn| turn.was_started(call.id)),
            input: turn.and_then(|turn| turn.inputs.get(&call.id)).cloned(),
            interrupted: turn.and_then(|turn| turn.dispatched.get(&call.id)?.reconcilable.clone()),
        }
    }

    /// The cached result of the same call, made before in this attempt.
    pub fn cached_result(&self, call: &ToolCall) -> Option<&str> {
        if self.cache.is_empty() {
            return None; // always so for agents that cache nothing
        }
        self.cache.get(&same_call(call)).map(String::as_str)
    }

    pub(super) fn submit_tool(&self) -> Option<&str> {
        match &self.rules.contract {
            super::Contract::Structured { submit, .. } => submit.as_deref(),
            super::Contract::Text { .. } => None,
        }
    }

    pub(super) fn output_tool(&self) -> &str {
        match &self.rules.contract {
            super::Contract::Structured { tool, .. } => tool,
            super::Contract::Text { .. } => "",
        }
    }

    fn has_tool_calls_left(&self, turn: &OpenTurn, index: usize) -> bool {
        let earlier = turn.message.tool_calls[..index]
            .iter()
            .filter(|c| c.target == CallTarget::Tool)
            .count();
        earlier < self.rules.limits.max_tool_calls_per_iteration as usize
    }
}
