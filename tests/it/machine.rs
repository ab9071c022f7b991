//! The loop's state machine, without tokio: one table row per situation, and the properties that
//! hold for every script of model behaviour.

mod context;
mod crashes;
mod whole;

use std::collections::BTreeSet;
use std::sync::Arc;

use chrono::{DateTime, TimeDelta, Utc};
use proptest::prelude::*;
use serde_json::json;
use toolloop::agents::definition::ReactSection;
use toolloop::drivers::Undecided;
use toolloop::engine::context::{Compaction, WrittenSummary};
use toolloop::engine::state::{ModelFault, PendingCall, Step};
use toolloop::engine::{Contract, Rules, State, Window};
use toolloop::event::{
    ApprovalBasis, Awaited, CallFailure, Circumstances, Event, ModelResponded, Resolution,
    Resolved, RunEvent, SummaryCall, ToolCallBlocked, ToolCallCompleted, ToolCallStarted,
    ValidationError, WaitKind,
};
use toolloop::message::{
    AssistantMessage, CallTarget, Conversation, FinishReason, ToolCall, Turn, Usage,
};
use toolloop::providers::ToolChoice;
use toolloop::providers::prices::Price;
use toolloop::run::ToolChoicePolicy::{self, FirstRequired, Required};
use toolloop::run::{
    Budget, Consumption, Descendants, Effect, Labels, Limits, OnLimit, OnUnknownOutcome, Period,
    RunStatus, StopAction, StopCondition, TerminationReason, Totals, Usd,
};
use uuid::Uuid;

/// What a model does next.
#[derive(Debug, Clone)]
enum Say {
    Text(&'static str),
    /// Names of tools: `bad` fails, `blocked` is blocked, `ask` needs an approval, `client` is the
    /// caller's, `change` changes something, `same` says the same every time, `long` says much,
    /// `output:…` proposes the text after the colon, `submit` submits.
    Calls(Vec<&'static str>),
    /// Something of which no decision can be made, where decisions are asked for.
    Nonsense,
    /// A text cut off by the output limit.
    CutText(&'static str),
    /// Calls cut off by the output limit.
    CutCalls(Vec<&'static str>),
    Refuse,
    /// A refusal with calls beside it.
    RefuseCalls(Vec<&'static str>),
    Pause,
    Fail,
    /// The conversation does not fit.
    TooLong,
}
use Say::{Calls, CutCalls, CutText, Fail, Nonsense, Pause, Refuse, RefuseCalls, Text, TooLong};

/// What every model call takes.
const USAGE: Usage = Usage {
    input_tokens: 10,
    output_tokens: 5,
    cached_input_tokens: 0,
    cache_write_tokens: 0,
    reasoning_tokens: 0,
    cost_micro_usd: Some(100),
    estimated: false,
};

/// A machine with a clock and a journal, driven by a script; the last line repeats.
struct Bench {
    state: State,
    rules: Rules,
    now: DateTime<Utc>,
    journal: Vec<Event>,
    script: Vec<Say>,
    said: usize,
    choices: Vec<ToolChoice>,
    /// What the model writes when it is asked for a summary.
    summary: &'static str,
    /// Whether the model is asked for decisions.
    decides: bool,
    /// The event number after which cancelling is asked for.
    cancel_after: Option<i64>,
    /// What becomes of what the run waits for, in turn; the last answer repeats.
    answers: Vec<Resolution>,
    /// Seconds between the parking and the answer.
    patience: i64,
    parked: usize,
    /// How many answers come at once.
    answers_at_once: usize,
    /// Calls that were executed at the same time.
    together: usize,
}

impl Bench {
    fn new(rules: Rules, script: Vec<Say>) -> Self {
        let now = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        Self {
            decides: rules.react.is_some(),
            state: State::new(rules.clone()),
            rules,
            now,
            journal: Vec::new(),
            script,
            said: 0,
            choices: vec![],
            summary: "all fine",
            cancel_after: None,
            answers: vec![Resolution::Approved {
                arguments: None,
                clears: Labels::default(),
                actions: [].into(),
            }],
            patience: 1,
            parked: 0,
            answers_at_once: usize::MAX,
            together: 0,
        }
    }

    fn record(&mut self, what: RunEvent) {
        let event =
            Event { seq: self.state.last_seq() + 1, at: self.now, run_id: Uuid::nil(), what };
        self.state.apply(&event).unwrap();
        self.journal.push(event);
    }

    fn run(&mut self, single_shot: bool) {
        for _ in 0..10_000 {
            self.now += TimeDelta::milliseconds(1);
            let asked = self.cancel_after.is_some_and(|seq| self.state.last_seq() >= seq);
            if asked && !self.state.is_cancel_requested() && self.state.ending().is_none() {
                self.record(RunEvent::RunCancelRequested { reason: None });
            }
            match self.state.next(self.now) {
                Step::Open => {
                    let turns = vec![Turn::User("{}".into())];
                    self.record(RunEvent::RunStarted {
                        system: "s".into(),
                        turns,
                        single_shot,
                        history: 0,
                        warnings: vec![],
                    });
                }
                Step::Record(events) => events.into_iter().for_each(|event| self.record(event)),
                Step::Compact(compaction) => _ = self.compact(compaction),
                Step::GiveCall(given) => panic!("a call that was not given: {given:?}"),
                Step::CallModel(choice) => {
                    self.choices.push(choice);
                    self.model();
                }
                Step::Suspend(status) => self.answer(status),
                Step::Reflect(proposal) => self.record(RunEvent::OutputReflected {
                    call_id: proposal.call_id.unwrap(),
                    attempt: self.state.attempt(),
                    content: format!("It looks like {}", proposal.output),
                    is_error: proposal.malformed.is_some(),
                }),
                Step::EvaluateStopConditions => self.evaluate_stop_conditions(),
                Step::CallTools(pending) => {
                    self.together = self.together.max(pending.len());
                    for pending in &pending {
                        self.tool(pending);
                    }
                }
                Step::Check(proposal) => {
                    let valid = proposal.malformed.is_none() && proposal.output.get("ok").is_some();
                    let error =
                        ValidationError { pointer: "/ok".into(), message: "is missing".into() };
                    let errors = if valid { vec![] } else { vec![error] };
                    self.state
                        .judged(&proposal, errors, self.now)
                        .into_iter()
                        .for_each(|event| self.record(event));
                }
                Step::Done => return,
            }
        }
        panic!("the machine does not end");
    }

    fn model(&mut self) {
        let say = self.script[self.said.min(self.script.len() - 1)].clone();
        self.said += 1;
        let must_decide = self.decides && !self.state.is_answer_only();
        let is_nonsense = matches!(say, Nonsense);
        let (text, names, finish_reason) = match say {
            Text(text) => (text, vec![], FinishReason::Stop),
            Nonsense => ("Let me think.", vec![], FinishReason::Stop),
            CutText(text) => (text, vec![], FinishReason::Length),
            Calls(names) => ("", names, FinishReason::ToolCalls),
            CutCalls(names) => ("", names, FinishReason::Length),
            Refuse => ("I will not.", vec![], FinishReason::Refusal),
            RefuseCalls(names) => ("I will not.", names, FinishReason::Refusal),
            Pause => ("…", vec![], FinishReason::Pause),
            Fail => return self.fail(TerminationReason::ModelError),
            TooLong => {
                let recovery = self.state.recovery("mock/m", 1);
                let shrank = recovery.is_some_and(|compaction| self.compact(compaction));
                if !shrank {
                    self.fail(TerminationReason::ContextOverflow);
                }
                return;
            }
        };
        let is_whole = matches!(finish_reason, FinishReason::Stop | FinishReason::ToolCalls)
            || !names.is_empty();
        let decision = (must_decide && !is_nonsense && is_whole).then(|| "{}".to_owned());
        let tool_calls =
            names.iter().enumerate().map(|(index, name)| call(self.said, index, name)).collect();
        self.record(RunEvent::ModelResponded(ModelResponded {
            attempt: self.state.attempt(),
            iteration: self.state.iteration(),
            provider: "mock".into(),
            model: "m".into(),
            message: AssistantMessage {
                text: text.into(),
                tool_calls,
                decision,
                ..AssistantMessage::default()
            },
            finish_reason,
            usage: USAGE,
            latency_ms: 1,
            retries: 0,
            fallback: false,
            window: None,
            repeated: false,
            warnings: vec![],
        }));
        if must_decide && is_nonsense {
            let failed =
                self.state.decision_failed(&Undecided::NotFound("it holds no JSON object".into()));
            self.record(failed);
        }
    }

    fn fail(&mut self, reason: TerminationReason) {
        let fault = ModelFault {
            reason,
            provider: "mock".into(),
            status: Some(503),
            code: None,
            message: "no".into(),
            is_reported: true,
            attempts: 3,
            option: None,
        };
        self.state.model_failed(&fault, self.now).into_iter().for_each(|event| self.record(event));
    }

    /// Whether that gained anything.
    fn compact(&mut self, compaction: Compaction) -> bool {
        let call =
            SummaryCall { provider: "mock".into(), model: "m".into(), usage: USAGE, latency_ms: 1 };
        let written =
            (compaction.summarised > 0).then(|| WrittenSummary { text: self.summary.into(), call });
        let place = (self.state.attempt(), self.state.iteration());
        let compacted = compaction.into_event(self.state.conversation(), place, written);
        let shrank = compacted.shrank();
        self.record(RunEvent::ContextCompacted(compacted));
        shrank
    }

    /// A condition is met when there were so many iterations as it says.
    fn evaluate_stop_conditions(&mut self) {
        let facts = self.state.facts(&Descendants::default(), self.now);
        let iterations = facts["counters"]["iterations"].as_u64().unwrap();
        let conditions = self.rules.budget.stop_conditions.iter().enumerate();
        let met = conditions
            .filter(|(place, _)| !self.state.conditions_met().contains(place))
            .find(|(_, condition)| {
                condition.when.parse::<u64>().map_or(true, |least| iterations >= least)
            })
            .map(|(place, condition)| {
                (place, condition.when.parse::<u64>().err().map(|error| error.to_string()))
            });
        let id = Uuid::from_u128(1_000_000 + self.journal.len() as u128);
        let events =
            self.state.stop_conditions_evaluated(met, facts, id, Period::seconds(60), self.now);
        for event in events {
            self.record(event);
        }
    }

    /// Answers what the parked run waits for.
    fn answer(&mut self, _: RunStatus) {
        let answer = self.answers[self.parked.min(self.answers.len() - 1)].clone();
        self.parked += 1;
        self.now += TimeDelta::seconds(self.patience);
        let waiting: Vec<Awaited> =
            self.state.waiting().take(self.answers_at_once).cloned().collect();
        for Awaited { call_id, kind, .. } in waiting {
            let resolution = match kind {
                WaitKind::Client if !matches!(answer, Resolution::Expired) => {
                    Resolution::Result { content: "from the caller".into(), is_error: false }
                }
                _ => answer.clone(),
            };
            let decided_by = Some("tester".to_owned());
            self.record(RunEvent::ApprovalResolved(Resolved {
                child_duration_ms: None,
                decided_at: None,
                call_id,
                kind,
                resolution,
                decided_by,
                reason: None,
            }));
        }
    }

    /// Asks for this call, and for those after it that need a person or the caller, too.
    fn wait_for(&mut self, pending: &PendingCall) {
        for PendingCall { call, .. } in self.state.open_calls(pending.index) {
            let (kind, event): (_, fn(Awaited) -> RunEvent) = match call.name.as_str() {
                "ask" => (WaitKind::Approval, RunEvent::ApprovalRequested),
                "client" => (WaitKind::Client, RunEvent::ToolCallAwaitingClient),
                _ => continue,
            };
            let expires_at = Some(self.now + TimeDelta::seconds(60));
            let (call_id, tool) = (call.id, call.name);
            let awaited = Awaited {
                basis: ApprovalBasis::default(),
                circumstances: Circumstances::default(),
                decision: None,
                escalation_target: None,
                actions: Arc::default(),
                call_id,
                kind,
                tool,
                arguments: json!({}),
                reason: "so".into(),
                expires_at,
                condition: None,
                child_run_id: None,
                input: None,
            };
            self.record(event(awaited));
        }
    }

    fn tool(&mut self, pending: &PendingCall) {
        let call = &pending.call;
        if matches!(call.name.as_str(), "ask" | "client") && pending.approval.is_none() {
            return self.wait_for(pending);
        }
        if let Some(known) = self.state.cached_result(call).map(str::to_owned) {
            return self.record(completed(call, known, None, true));
        }
        if call.name == "blocked" {
            return self.record(RunEvent::ToolCallBlocked(ToolCallBlocked {
                actions: Arc::default(),
                circumstances: Circumstances::default(),
                call_id: call.id,
                tool: call.name.clone(),
                rule: "autonomy".into(),
                decision: "blocked".into(),
                reason: "no".into(),
                content: "Error: no".into(),
            }));
        }
        let effect = if call.name == "change" { Effect::Idempotent } else { Effect::Read };
        let mut consumes = Consumption::default();
        if call.name == "change" {
            consumes.files_modified.insert(format!("file {}", call.id));
            consumes.lines_changed = 10;
            if let Some(events) = self.state.over_budget_with(&consumes, self.now) {
                return events.into_iter().for_each(|event| self.record(event));
            }
        }
        let failure = (call.name == "bad").then_some(CallFailure::ToolError);
        if call.name != "unknown" {
            self.record(RunEvent::ToolCallStarted(ToolCallStarted {
                actions: Arc::default(),
                call_id: call.id,
                tool: call.name.clone(),
                effect,
                effect_key: "k".into(),
                decision: "allowed".into(),
                reason: None,
                consumes,
                on_unknown_outcome: OnUnknownOutcome::Review,
                sandbox: None,
                circumstances: Circumstances::default(),
                reconcilable_by: None,
                arguments: None,
            }));
        }
        let content = match call.name.as_str() {
            "bad" => "Error: no".into(),
            "long" => format!("{:<5}{}", self.journal.len(), "fine ".repeat(79)),
            "same" => "fine".into(),
            _ => format!("fine at {}", self.journal.len()),
        };
        let mut done = completed(call, content, failure, false);
        if let RunEvent::ToolCallCompleted(done) = &mut done {
            done.note = self.state.stuck_note(call.id, &done.content);
        }
        self.record(done);
    }

    fn reason(&self) -> &'static str {
        self.state.ending().expect("ended").0.outcome.reason().as_str()
    }
}

fn completed(
    call: &ToolCall,
    content: String,
    failure: Option<CallFailure>,
    cached: bool,
) -> RunEvent {
    RunEvent::ToolCallCompleted(ToolCallCompleted {
        call_id: call.id,
        tool: call.name.clone(),
        target: call.target,
        content,
        failure,
        duration_ms: 1,
        cached,
        note: None,
        changes: None,
        changes_omitted: 0,
        sandbox: None,
        network: None,
        replaced: None,
        child_run_id: None,
        reconciled: None,
        found_out: false,
    })
}

fn call(response: usize, index: usize, name: &str) -> ToolCall {
    let (name, arguments, target) = match name.split_once(':') {
        Some((name, arguments)) => (name, arguments, CallTarget::Output),
        None if name == "submit" => (name, "{}", CallTarget::Submit),
        None => (name, "{}", CallTarget::Tool),
    };
    ToolCall {
        id: Uuid::from_u128((response * 1000 + index) as u128),
        provider_id: format!("call_{response}_{index}"),
        name: name.into(),
        arguments: arguments.into(),
        target,
    }
}

fn text() -> Rules {
    Rules { contract: Contract::Text { confirm: false }, ..Rules::default() }
}

fn confirming() -> Rules {
    Rules { contract: Contract::Text { confirm: true }, ..Rules::default() }
}

fn structured() -> Rules {
    Rules {
        contract: Contract::Structured { tool: "output".into(), submit: None, checks: vec![] },
        ..Rules::default()
    }
}

fn limited(mut rules: Rules, change: impl FnOnce(&mut Limits, &mut Budget)) -> Rules {
    change(&mut rules.limits, &mut rules.budget);
    rules
}

const OK: &str = r#"output:{"ok":true}"#;
const BAD: &str = r#"output:{"no":true}"#;

/// What happens | rules | script | reason | attempts, iterations, tool calls.
type Row = (&'static str, Rules, Vec<Say>, &'static str, (u32, u32, u32));

#[expect(clippy::too_many_lines, reason = "one story or table")]
fn text_contract() -> Vec<Row> {
    vec![
        ("a text ends the loop", text(), vec![Text("done")], "completed", (1, 1, 0)),
        (
            "tool calls go on until a text",
            text(),
            vec![Calls(vec!["a"]), Text("done")],
            "completed",
            (1, 2, 1),
        ),
        (
            "calls win over nothing else to do",
            text(),
            vec![Calls(vec!["a", "b"]), Text("x")],
            "completed",
            (1, 2, 2),
        ),
        (
            "the first text is confirmed",
            confirming(),
            vec![Text("one"), Text("two")],
            "completed",
            (1, 2, 0),
        ),
        (
            "tool calls after the confirmation re-arm nothing",
            confirming(),
            vec![Text("one"), Calls(vec!["a"]), Text("two")],
            "completed",
            (1, 3, 1),
        ),
        (
            "a cut-off answer is continued once",
            text(),
            vec![CutText("first "), Text("second")],
            "completed",
            (1, 2, 0),
        ),
        (
            "cut off twice is invalid",
            text(),
            vec![CutText("a"), CutText("b")],
            "invalid_response",
            (1, 2, 0),
        ),
        (
            "cut off, calls, cut off may continue again",
            text(),
            vec![CutText("a"), Calls(vec!["a"]), CutText("b"), Text("c")],
            "completed",
            (1, 4, 1),
        ),
        ("a pause is sent back", text(), vec![Pause, Text("done")], "completed", (1, 2, 0)),
        ("a refusal ends the run", text(), vec![Refuse], "model_refused", (1, 1, 0)),
        (
            "calls beside a refusal are not executed",
            text(),
            vec![RefuseCalls(vec!["a", "b"])],
            "model_refused",
            (1, 1, 0),
        ),
        (
            "a blank answer is asked for again",
            text(),
            vec![Text(" \n"), Text("done")],
            "completed",
            (1, 2, 0),
        ),
        (
            "then the attempt fails",
            text(),
            vec![Text(""), Text(" "), Text("done")],
            "completed",
            (2, 3, 0),
        ),
        ("nothing but blank answers", text(), vec![Text("")], "invalid_response", (3, 6, 0)),
        (
            "a blank answer is not confirmed",
            confirming(),
            vec![Text(""), Text("a"), Text(""), Text("b")],
            "completed",
            (1, 4, 0),
        ),
        (
            "calls may come between blank answers",
            text(),
            vec![Text(""), Calls(vec!["a"]), Text(""), Text("b")],
            "completed",
            (1, 4, 1),
        ),
        (
            "the rest of an answer may be blank",
            text(),
            vec![CutText("done"), Text("")],
            "completed",
            (1, 2, 0),
        ),
        (
            "a cut-off answer without text is continued, and asked for again",
            text(),
            vec![CutText(""), Text(""), Text("b")],
            "completed",
            (1, 3, 0),
        ),
        (
            "a model error ends the run",
            text(),
            vec![Calls(vec!["a"]), Fail],
            "model_error",
            (1, 1, 1),
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "one story or table")]
fn structured_contract() -> Vec<Row> {
    vec![
        (
            "a valid output ends the run",
            structured(),
            vec![Calls(vec![OK])],
            "completed",
            (1, 1, 0),
        ),
        (
            "tools first, then output",
            structured(),
            vec![Calls(vec!["a"]), Calls(vec![OK])],
            "completed",
            (1, 2, 1),
        ),
        (
            "all calls of the proposing response are processed",
            structured(),
            vec![Calls(vec!["a", OK, "b"])],
            "completed",
            (1, 1, 2),
        ),
        (
            "the last proposal counts: good after bad",
            structured(),
            vec![Calls(vec![BAD, OK])],
            "completed",
            (1, 1, 0),
        ),
        (
            "the last proposal counts: bad after good",
            structured(),
            vec![Calls(vec![OK, BAD]), Calls(vec![OK])],
            "completed",
            (2, 2, 0),
        ),
        (
            "an invalid output is tried again",
            structured(),
            vec![Calls(vec![BAD]), Calls(vec![OK])],
            "completed",
            (2, 2, 0),
        ),
        ("attempts run out", structured(), vec![Calls(vec![BAD])], "validation_failed", (3, 3, 0)),
        (
            "text is a failed attempt",
            structured(),
            vec![Text("hm"), Calls(vec![OK])],
            "completed",
            (2, 2, 0),
        ),
        (
            "a blank answer is asked for again before the attempt fails",
            structured(),
            vec![Text(""), Calls(vec![OK])],
            "completed",
            (1, 2, 0),
        ),
        ("only blank answers", structured(), vec![Text("")], "invalid_response", (3, 6, 0)),
        (
            "a call is an answer to the request for one: the next blank answer is another",
            structured(),
            vec![Text(""), Calls(vec!["a"]), Text(""), Calls(vec!["a"]), Text(""), Calls(vec![OK])],
            "completed",
            (1, 6, 2),
        ),
        (
            "only text is an invalid response",
            structured(),
            vec![Text("hm")],
            "invalid_response",
            (3, 3, 0),
        ),
        (
            "the last attempt's error counts",
            structured(),
            vec![Text("hm"), Calls(vec![BAD])],
            "validation_failed",
            (3, 3, 0),
        ),
        (
            "malformed output is an invalid output",
            structured(),
            vec![Calls(vec!["output:{nope"])],
            "validation_failed",
            (3, 3, 0),
        ),
        (
            "empty output arguments are an empty object",
            structured(),
            vec![Calls(vec!["output:"])],
            "validation_failed",
            (3, 3, 0),
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "one story or table")]
fn limits() -> Vec<Row> {
    let iterations = |n| limited(text(), |l, _| l.max_iterations = n);
    let per_attempt = |n| limited(text(), |l, _| l.max_iterations_per_attempt = n);
    vec![
        (
            "the run's iterations",
            iterations(3),
            vec![Calls(vec!["a"])],
            "max_iterations",
            (1, 3, 3),
        ),
        (
            "the attempt's iterations",
            per_attempt(2),
            vec![Calls(vec!["a"])],
            "max_iterations",
            (1, 2, 2),
        ),
        (
            "an answer in the last iteration counts",
            iterations(2),
            vec![Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "the budget's iterations",
            limited(text(), |_, b| b.max_iterations = 2),
            vec![Calls(vec!["a"])],
            "budget_exceeded",
            (1, 2, 2),
        ),
        (
            "tokens",
            limited(text(), |_, b| b.max_total_tokens = Some(300)),
            vec![Calls(vec!["a"])],
            "budget_exceeded",
            (1, 2, 2),
        ),
        (
            "tokens: what the model would read counts before it is read",
            limited(text(), |_, b| b.max_total_tokens = Some(370)),
            vec![Calls(vec!["long"])],
            "budget_exceeded",
            (1, 1, 1),
        ),
        ("dollars", in_dollars(Some(PRICE)), vec![Calls(vec!["a"])], "budget_exceeded", (1, 8, 8)),
        (
            "dollars without a price",
            in_dollars(None),
            vec![Calls(vec!["a"])],
            "budget_exceeded",
            (1, 0, 0),
        ),
        (
            "tool calls, in the middle of a response",
            limited(text(), |_, b| b.max_tool_calls = 3),
            vec![Calls(vec!["a", "b"])],
            "budget_exceeded",
            (1, 2, 3),
        ),
        (
            "calls beyond the cap are answered, not executed",
            limited(text(), |l, _| l.max_tool_calls_per_iteration = 2),
            vec![Calls(vec!["a", "b", "c", "d"]), Text("x")],
            "completed",
            (1, 2, 4),
        ),
        ("three failures in a row", text(), vec![Calls(vec!["bad"])], "error", (1, 3, 3)),
        (
            "failures within one response",
            text(),
            vec![Calls(vec!["bad", "bad", "bad", "a"])],
            "error",
            (1, 1, 3),
        ),
        (
            "a success resets the count",
            text(),
            vec![Calls(vec!["bad", "bad"]), Calls(vec!["a"]), Calls(vec!["bad", "bad"]), Text("x")],
            "completed",
            (1, 4, 5),
        ),
        (
            "calls in a cut-off response are not executed",
            text(),
            vec![CutCalls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "a model that is always cut off stops",
            text(),
            vec![CutCalls(vec!["a"])],
            "error",
            (1, 3, 3),
        ),
        (
            "an output that is always cut off stops",
            structured(),
            vec![CutCalls(vec![OK])],
            "error",
            (1, 3, 0),
        ),
        (
            "a whole output is a success",
            structured(),
            vec![
                CutCalls(vec![OK]),
                CutCalls(vec![OK]),
                Calls(vec![BAD]),
                CutCalls(vec![OK]),
                CutCalls(vec![OK]),
                Calls(vec![OK]),
            ],
            "completed",
            (2, 6, 0),
        ),
        (
            "a cut-off output is no failure of a tool",
            Rules { throw_on_tool_failure: true, ..structured() },
            vec![CutCalls(vec![OK]), Calls(vec![OK])],
            "completed",
            (1, 2, 0),
        ),
        (
            "the threshold wins over a proposal",
            limited(structured(), |l, _| l.error_threshold = 1),
            vec![Calls(vec!["bad", OK])],
            "error",
            (1, 1, 1),
        ),
    ]
}

/// A millionth of a dollar a token.
const PRICE: Price =
    Price { input: 1_000_000, cached_input: 1_000_000, cache_write: 1_000_000, output: 1_000_000 };

/// 1000 millionths: seven calls of 100 leave enough for 256 tokens and the input of an eighth.
fn in_dollars(price: Option<Price>) -> Rules {
    let rules = limited(text(), |_, budget| budget.max_cost_usd = Some(Usd::from_micro(1000)));
    Rules { price, ..rules }
}

fn demanding(rules: Rules, tool_choice: ToolChoicePolicy) -> Rules {
    Rules { tool_choice, ..rules }
}

fn strictly(rules: Rules, tool_choice: ToolChoicePolicy) -> Rules {
    Rules { tool_choice, strict_tool_choice: true, ..rules }
}

fn deciding(rules: Rules) -> Rules {
    Rules { react: Some(ReactSection::default()), ..rules }
}

fn answering_later(rules: Rules) -> Rules {
    Rules {
        react: Some(ReactSection { final_via_inference: true, ..ReactSection::default() }),
        ..rules
    }
}

#[expect(clippy::too_many_lines, reason = "one story or table")]
fn decisions() -> Vec<Row> {
    let never_again =
        Rules { react: Some(ReactSection { max_retries: 0, ..ReactSection::default() }), ..text() };
    vec![
        (
            "a final answer ends the loop",
            deciding(text()),
            vec![Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "it is confirmed",
            deciding(confirming()),
            vec![Text("x"), Nonsense, Text("y")],
            "completed",
            (1, 3, 0),
        ),
        (
            "a decision is asked for again",
            deciding(text()),
            vec![Nonsense, Nonsense, Text("x")],
            "completed",
            (1, 3, 0),
        ),
        ("not for ever", deciding(text()), vec![Nonsense], "invalid_response", (1, 3, 0)),
        ("not at all", never_again, vec![Nonsense], "invalid_response", (1, 1, 0)),
        (
            "every decision may be asked for again",
            deciding(text()),
            vec![Nonsense, Nonsense, Calls(vec!["a"]), Nonsense, Nonsense, Text("x")],
            "completed",
            (1, 6, 1),
        ),
        (
            "a retry is an iteration",
            limited(deciding(text()), |limits, _| limits.max_iterations = 2),
            vec![Nonsense],
            "max_iterations",
            (1, 2, 0),
        ),
        (
            "outputs are tried again, and so are decisions",
            deciding(structured()),
            vec![Calls(vec![BAD]), Nonsense, Calls(vec![OK])],
            "completed",
            (2, 3, 0),
        ),
        (
            "a cut-off decision is continued",
            deciding(text()),
            vec![CutText("{"), Text("x")],
            "completed",
            (1, 2, 0),
        ),
        (
            "one that stays nonsense is asked for again",
            deciding(text()),
            vec![CutText("{"), Nonsense, Text("x")],
            "completed",
            (1, 3, 0),
        ),
        (
            "a call in a cut-off decision is not executed",
            deciding(text()),
            vec![CutCalls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "an answer is written later",
            answering_later(text()),
            vec![Text("x"), Text("y")],
            "completed",
            (1, 2, 0),
        ),
        (
            "once it is confirmed",
            answering_later(confirming()),
            vec![Text("x")],
            "completed",
            (1, 3, 0),
        ),
        (
            "within the limits",
            limited(answering_later(text()), |limits, _| limits.max_iterations = 1),
            vec![Text("x")],
            "max_iterations",
            (1, 1, 0),
        ),
        (
            "it is continued where it is cut off",
            answering_later(text()),
            vec![Text("x"), CutText("y"), Text("z")],
            "completed",
            (1, 3, 0),
        ),
        (
            "a blank final answer is asked for again",
            deciding(text()),
            vec![Text(""), Text("x")],
            "completed",
            (1, 2, 0),
        ),
        (
            "a decision on an answer may be blank, the answer not",
            answering_later(text()),
            vec![Text(""), Text(""), Text("x")],
            "completed",
            (1, 3, 0),
        ),
        (
            "an output is written later",
            answering_later(structured()),
            vec![Text("x"), Calls(vec![BAD]), Text("x"), Calls(vec![OK])],
            "completed",
            (2, 4, 0),
        ),
        (
            "an output that is no object fails the attempt",
            answering_later(structured()),
            vec![Text("x")],
            "invalid_response",
            (3, 6, 0),
        ),
    ]
}

#[test]
fn a_decision_that_failed_is_the_models_to_mend() {
    let mut bench = Bench::new(deciding(text()), vec![Nonsense]);
    bench.run(false);
    let kinds = bench.journal.iter().map(|event| event.what.type_name());
    assert_eq!(kinds.filter(|kind| *kind == "decision.extraction_failed").count(), 3);
    let (ending, _) = bench.state.ending().unwrap();
    let error = ending.outcome.error().unwrap();
    assert_eq!(error.context, json!({"attempt": 1, "errors": vec!["it holds no JSON object"; 3]}));
    let turns = bench.state.conversation().turns();
    let [_, Turn::Assistant(said), Turn::User(told), ..] = turns else { panic!("{turns:#?}") };
    assert_eq!(said.message().text, "Let me think.");
    assert!(told.contains("it holds no JSON object"), "{told}");
}

#[test]
fn the_answer_that_was_written_counts() {
    let mut bench = Bench::new(
        answering_later(text()),
        vec![Text("short"), CutText("long "), Text("and full")],
    );
    bench.run(false);
    let (ending, _) = bench.state.ending().unwrap();
    assert_eq!(ending.outcome.output(), Some(&json!({"result": "long and full"})));
}

#[expect(clippy::too_many_lines, reason = "one story or table")]
fn demanded_calls() -> Vec<Row> {
    let first = || demanding(text(), FirstRequired);
    let b = || ToolChoicePolicy::Tool("b".into());
    vec![
        (
            "a demanded call comes",
            first(),
            vec![Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "one that does not come is asked for once more",
            first(),
            vec![Text("x"), Calls(vec!["a"]), Text("y")],
            "completed",
            (1, 3, 1),
        ),
        ("then the answer is accepted", first(), vec![Text("x")], "completed", (1, 2, 0)),
        (
            "the confirmation comes after that",
            demanding(confirming(), FirstRequired),
            vec![Text("x")],
            "completed",
            (1, 3, 0),
        ),
        (
            "a cut-off answer is continued instead",
            first(),
            vec![CutText("x"), Text("y")],
            "completed",
            (1, 2, 0),
        ),
        ("a refusal stays one", first(), vec![Refuse], "model_refused", (1, 1, 0)),
        (
            "another tool than the named one will do",
            demanding(text(), b()),
            vec![Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "every attempt begins anew",
            demanding(structured(), FirstRequired),
            vec![Calls(vec![BAD]), Text("x"), Calls(vec![OK])],
            "completed",
            (2, 3, 0),
        ),
        (
            "required: asked once more, then the contract's feedback",
            demanding(structured(), Required),
            vec![Text("x"), Text("y"), Calls(vec![OK])],
            "completed",
            (2, 3, 0),
        ),
        (
            "none: calls that come all the same are not executed",
            limited(demanding(text(), ToolChoicePolicy::None), |l, _| l.error_threshold = 5),
            vec![Calls(vec!["a", "ask", "client", "change"]), Text("x")],
            "completed",
            (1, 2, 0),
        ),
        (
            "none: not for ever",
            demanding(text(), ToolChoicePolicy::None),
            vec![Calls(vec!["a"])],
            "error",
            (1, 3, 0),
        ),
        (
            "calls behind a block that are not executed have not failed",
            Rules { stop_on_tool_block: true, ..text() },
            vec![Calls(vec!["blocked", "a", "b", "a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "a blank answer is one before a demand is looked at",
            strictly(text(), FirstRequired),
            vec![Text(""), Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 3, 1),
        ),
        (
            "strict: the attempt fails",
            strictly(text(), FirstRequired),
            vec![Text("x")],
            "invalid_response",
            (3, 3, 0),
        ),
        (
            "strict: another attempt may do it",
            strictly(text(), FirstRequired),
            vec![Text("x"), Calls(vec!["a"]), Text("y")],
            "completed",
            (2, 3, 1),
        ),
        (
            "strict: another tool is not executed",
            strictly(text(), b()),
            vec![Calls(vec!["a", "a"]), Calls(vec!["a", "b"]), Text("y")],
            "completed",
            (2, 3, 2),
        ),
        (
            "strict: an output instead of the named tool",
            strictly(structured(), b()),
            vec![Calls(vec![OK])],
            "invalid_response",
            (3, 3, 0),
        ),
    ]
}

#[test]
fn a_tool_choice_demands_calls_until_one_comes() {
    let choices = |rules: Rules, script: Vec<Say>| {
        let mut bench = Bench::new(rules, script);
        bench.run(false);
        (bench.choices, bench.state.totals().warnings.len())
    };
    let (required, auto) = (ToolChoice::Required, ToolChoice::Auto);
    let b = ToolChoice::Tool("b".into());
    let called = vec![Calls(vec!["b"]), Text("x")];
    assert_eq!(
        choices(demanding(text(), FirstRequired), called.clone()),
        (vec![required.clone(), auto.clone()], 0)
    );
    assert_eq!(
        choices(demanding(text(), ToolChoicePolicy::Tool("b".into())), called),
        (vec![b, auto.clone()], 0)
    );
    let late = vec![Text("x"), Calls(vec!["a"]), Text("y")];
    let repeated = vec![required.clone(), required.clone(), auto.clone()];
    let nonsense = vec![Nonsense, Calls(vec!["a"]), Text("y")];
    assert_eq!(
        choices(deciding(demanding(text(), FirstRequired)), nonsense),
        (repeated.clone(), 0)
    );
    assert_eq!(
        choices(deciding(demanding(structured(), Required)), vec![Calls(vec![OK])]),
        (vec![auto], 0)
    );
    assert_eq!(choices(demanding(text(), FirstRequired), late), (repeated, 0));
    let (twice, warnings) = choices(demanding(text(), FirstRequired), vec![Text("x")]);
    assert_eq!((twice, warnings), (vec![required.clone(), required.clone()], 1));
    let mut bench = Bench::new(demanding(structured(), Required), vec![Text("x")]);
    bench.run(false);
    let warnings = &bench.state.totals().warnings;
    assert!(
        !warnings.is_empty() && warnings.iter().all(|it| !it.contains("accepted")),
        "{warnings:?}"
    );
    let (all, _) = choices(
        demanding(structured(), Required),
        vec![Calls(vec!["a"]), Calls(vec!["a"]), Calls(vec![OK])],
    );
    assert_eq!(all, vec![required; 3]);
}

#[test]
fn a_run_goes_on_with_the_model_that_answered_last() {
    let mut bench = Bench::new(text(), vec![Calls(vec!["a"]), Text("x")]);
    let models = |names: [&str; 2]| names.map(str::to_owned);
    assert_eq!(bench.state.model_index(&models(["other/m", "mock/m"])), 0);
    bench.run(false);
    assert_eq!(bench.state.model_index(&models(["other/m", "mock/m"])), 1);
    assert_eq!(bench.state.model_index(&models(["other/m", "gone/m"])), 0);
}

#[test]
fn situations() {
    let rows = [
        text_contract(),
        structured_contract(),
        limits(),
        demanded_calls(),
        decisions(),
        whole::rows(),
    ]
    .concat();
    assert!(rows.len() >= 120, "{} rows", rows.len());
    for (what, rules, script, reason, counts) in rows {
        let mut bench = Bench::new(rules, script);
        bench.run(false);
        let totals = bench.state.totals();
        assert_eq!(bench.reason(), reason, "{what}");
        assert_eq!((totals.attempts, totals.iterations, totals.tool_calls_made), counts, "{what}");
        check_journal(&bench, what);
    }
}

#[test]
fn calls_that_may_not_be_executed_are_answered_so() {
    let refused = (text(), vec![RefuseCalls(vec!["a", "b"])], 2);
    let none =
        (demanding(text(), ToolChoicePolicy::None), vec![Calls(vec!["a", "b"]), Text("x")], 2);
    let last = limited(text(), |limits, _| limits.max_iterations = 1);
    let last = (Rules { on_limit: OnLimit::Answer, ..last }, vec![Calls(vec!["a", "b"])], 2);
    for (rules, script, expected) in [refused, none, last] {
        let what = format!("{:?} {script:?}", rules.tool_choice);
        let mut bench = Bench::new(rules, script);
        bench.run(false);
        check_journal(&bench, &what);
        let unexecuted = bench.journal.iter().filter(|event| match &event.what {
            RunEvent::ToolCallCompleted(call) => {
                call.failure == Some(CallFailure::NotExecuted)
                    && call.content.contains("not executed")
            }
            _ => false,
        });
        assert_eq!(unexecuted.count(), expected, "{what}");
        let turns = bench.state.conversation().turns().iter();
        let told = turns.filter_map(|turn| match turn {
            Turn::Assistant(turn) => Some(turn.results()),
            Turn::User(_) => None,
        });
        let told = told.flatten().filter(|result| result.content.contains("not executed"));
        assert_eq!(told.count(), expected, "{what}");
    }
}

#[test]
fn answers_are_kept_where_a_run_ends_before_all_are_there() {
    let denied = Resolution::Denied;
    let approved =
        Resolution::Approved { arguments: None, clears: Labels::default(), actions: [].into() };
    let result = (None, "from the caller");
    let cancelled = (Some(CallFailure::NotExecuted), "not executed, the run was cancelled");
    let table = [
        (vec!["client", "client"], &approved, vec![result, cancelled]),
        (vec!["ask", "client"], &approved, vec![cancelled, cancelled]),
        (vec!["client", "ask", "a"], &denied, vec![result, cancelled, cancelled]),
        (vec!["ask", "client"], &denied, vec![cancelled]),
    ];
    for (calls, answer, expected) in table {
        let what = format!("{calls:?} {answer:?}");
        let mut benches = [(); 2].map(|()| Bench::new(text(), vec![Calls(calls.clone())]));
        for bench in &mut benches {
            bench.answers = vec![answer.clone()];
            bench.answers_at_once = 1;
        }
        let [mut first, mut bench] = benches;
        first.cancel_after = Some(40);
        first.run(false);
        let answered = |event: &&Event| matches!(event.what, RunEvent::ApprovalResolved(_));
        bench.cancel_after = first.journal.iter().find(answered).map(|event| event.seq);
        bench.run(false);
        assert_eq!(bench.reason(), "cancelled", "{what}");
        check_journal(&bench, &what);
        let results: Vec<_> = bench
            .journal
            .iter()
            .filter_map(|event| match &event.what {
                RunEvent::ToolCallCompleted(done) => Some((done.failure, done.content.clone())),
                _ => None,
            })
            .collect();
        assert_eq!(results.len(), expected.len(), "{what}: {results:?}");
        for ((failure, content), (expected, says)) in results.iter().zip(&expected) {
            assert_eq!(failure, expected, "{what}");
            assert!(content.contains(says), "{what}: {content}");
        }
        let blocked =
            bench.journal.iter().filter(|e| matches!(e.what, RunEvent::ToolCallBlocked(_)));
        assert_eq!(blocked.count(), calls.len() - expected.len(), "{what}: what was denied");
    }
}

#[test]
fn a_model_is_told_that_its_answer_was_blank() {
    let mut bench = Bench::new(text(), vec![Text("\t"), Text("x")]);
    bench.run(false);
    let turns = bench.state.conversation().turns();
    let Turn::User(told) = &turns[2] else { panic!("{turns:#?}") };
    assert!(told.contains("empty"), "{told}");
    let kinds: Vec<_> = bench.journal.iter().map(|event| event.what.type_name()).collect();
    assert!(kinds.contains(&"answer.blank"), "{kinds:?}");

    let mut bench = Bench::new(text(), vec![Text("")]);
    bench.run(false);
    let error = bench.state.ending().unwrap().0.outcome.error().unwrap().clone();
    assert_eq!(error.code, "INVALID_RESPONSE");
    assert!(error.message.contains("empty"), "{}", error.message);
}

#[test]
fn single_shots() {
    let table = [
        ("text", text(), Text("hello"), "completed"),
        ("calls that were not offered are no answer", text(), Calls(vec!["a"]), "invalid_response"),
        ("no confirmation", confirming(), Text("hello"), "completed"),
        ("blank", text(), Text(" \n"), "invalid_response"),
        ("a refusal with calls", text(), RefuseCalls(vec!["a"]), "model_refused"),
        ("cut off", text(), CutText("hel"), "invalid_response"),
        ("refused", text(), Refuse, "model_refused"),
        ("failed", text(), Fail, "model_error"),
        ("structured", structured(), Text(r#"{"ok": 1}"#), "completed"),
        ("structured in a fence", structured(), Text("```json\n{\"ok\": 1}\n```"), "completed"),
        ("structured, not an object", structured(), Text("hello"), "invalid_response"),
        ("structured, not valid", structured(), Text(r#"{"no": 1}"#), "validation_failed"),
    ];
    for (what, rules, say, reason) in table {
        let mut bench = Bench::new(Rules { single_shot: true, ..rules }, vec![say]);
        bench.run(true);
        assert_eq!(bench.reason(), reason, "{what}");
        assert_eq!(bench.said, 1, "{what}: exactly one model call");
        check_journal(&bench, what);
    }
}

#[test]
fn time_is_up_before_and_between_calls() {
    let rules = limited(text(), |_, budget| budget.max_duration_seconds = 1);
    let mut bench = Bench::new(rules, vec![Calls(vec!["a"])]);
    bench.record(RunEvent::RunStarted {
        system: "s".into(),
        turns: vec![Turn::User("x".into())],
        single_shot: false,
        history: 0,
        warnings: vec![],
    });
    bench.now += TimeDelta::seconds(2);
    bench.run(false);
    assert_eq!(bench.reason(), "duration_exceeded");
    assert_eq!(bench.said, 0);
}

#[test]
fn a_cut_off_answer_is_joined() {
    let mut bench = Bench::new(text(), vec![CutText("first "), Text("second")]);
    bench.run(false);
    let (ending, _) = bench.state.ending().unwrap();
    assert_eq!(ending.outcome.output(), Some(&json!({"result": "first second"})));
    assert_eq!(ending.outcome.raw_response(), "first second");
}

#[test]
fn feedback_is_the_result_of_the_proposing_call_and_the_next_user_message() {
    let mut bench = Bench::new(structured(), vec![Calls(vec!["a", BAD]), Calls(vec![OK])]);
    bench.run(false);
    let turns = bench.state.conversation().turns();
    let Turn::Assistant(first) = &turns[1] else { panic!("{turns:#?}") };
    assert_eq!(first.results().len(), 2);
    assert!(first.results()[1].is_error && first.results()[1].content.contains("/ok: is missing"));
    let Turn::User(feedback) = &turns[2] else { panic!("{turns:#?}") };
    assert!(feedback.contains("/ok: is missing") && feedback.contains("`output`"), "{feedback}");
}

#[test]
fn a_blank_answer_before_the_confirmation_is_not_the_response() {
    let contract = Contract::Structured {
        tool: "output".into(),
        submit: Some("submit".into()),
        checks: vec![],
    };
    let rules = Rules { contract, ..Rules::default() };
    let script = vec![Calls(vec![OK]), Text(" "), Calls(vec!["submit"])];
    let mut bench = Bench::new(rules, script);
    bench.run(false);
    let RunEvent::RunCompleted(end) = &bench.journal.last().unwrap().what else {
        panic!("{:#?}", bench.journal.last())
    };
    assert_eq!(end.outcome.raw_response(), r#"{"ok":true}"#);
    check_journal(&bench, "a blank answer in between");
}

#[test]
fn a_journal_with_a_gap_is_refused() {
    let mut state = State::new(text());
    let event = Event { seq: 2, at: Utc::now(), run_id: Uuid::nil(), what: RunEvent::RunQueued {} };
    assert!(state.apply(&event).is_err());
}

/// What holds of every ended run.
fn check_journal(bench: &Bench, what: &str) {
    let terminal = bench.journal.iter().filter(|e| e.what.ending().is_some()).count();
    assert_eq!(terminal, 1, "{what}: exactly one terminal event");
    assert!(
        bench.journal.last().unwrap().what.ending().is_some(),
        "{what}: nothing follows the terminal event"
    );
    assert_valid(bench.state.conversation(), what);
    every_call_has_one_result(bench, what);
    assert!(
        !matches!(&bench.journal.last().unwrap().what, RunEvent::RunCompleted(end)
            if end.outcome.raw_response().trim().is_empty()),
        "{what}: a blank answer is none"
    );

    let mut totals = Totals::default();
    bench.journal.iter().for_each(|event| totals.apply(&event.what));
    // Waiting is measured by the times of events, not by what they say.
    (totals.waited_ms, totals.waiting_since) =
        (bench.state.totals().waited_ms, bench.state.totals().waiting_since);
    assert_eq!(&totals, bench.state.totals(), "{what}: totals are the sum of the events");
    let summaries = bench
        .journal
        .iter()
        .filter(|e| matches!(&e.what, RunEvent::ContextCompacted(c) if c.call.is_some()));
    let calls = u64::from(totals.iterations) + summaries.count() as u64;
    assert_eq!(totals.usage.total_tokens(), calls * 15, "{what}");

    let mut again = State::new(Rules { single_shot: false, ..Rules::default() });
    for event in &bench.journal {
        let stored = serde_json::to_string(event).unwrap();
        again.apply(&serde_json::from_str(&stored).unwrap()).unwrap();
    }
    assert_eq!(
        again.conversation(),
        bench.state.conversation(),
        "{what}: the journal alone gives the conversation"
    );
    nothing_said_is_lost(bench, what);
}

/// A reader of the journal sees every turn, and which of them the model still reads.
fn nothing_said_is_lost(bench: &Bench, what: &str) {
    let transcript = toolloop::runtime::transcript(&bench.journal).unwrap();
    let still_read = transcript.turns.iter().filter(|kept| !kept.is_summarised);
    let still_read: Vec<&Turn> = still_read.map(|kept| &kept.turn).collect();
    let turns = bench.state.conversation().turns();
    assert_eq!(still_read.len(), turns.len(), "{what}");
    for (kept, read) in still_read.iter().zip(turns) {
        match (kept, read) {
            (Turn::Assistant(kept), Turn::Assistant(read)) => {
                assert_eq!(kept.message(), read.message(), "{what}");
                for (kept, read) in kept.results().iter().zip(read.results()) {
                    let is_cleared = read.content.starts_with("[result cleared");
                    assert!(kept == read || is_cleared, "{what}: {kept:?} {read:?}");
                    assert!(
                        !is_cleared || transcript.cleared.contains(&kept.call_id),
                        "{what}: {kept:?}"
                    );
                }
            }
            (kept, read) => assert_eq!(*kept, read, "{what}"),
        }
    }
    assert!(transcript.open.is_none(), "{what}: it has ended");
}

/// What rows are made of: each call of a tool is answered by one event, and by none before it was
/// made.
fn every_call_has_one_result(bench: &Bench, what: &str) {
    let mut open = BTreeSet::new();
    for event in &bench.journal {
        match &event.what {
            RunEvent::ModelResponded(response) => {
                let calls = response.message.tool_calls.iter();
                open.extend(calls.filter(|c| c.target == CallTarget::Tool).map(|call| call.id));
            }
            RunEvent::ToolCallCompleted(call) if call.target == CallTarget::Tool => {
                assert!(open.remove(&call.call_id), "{what}: {call:?}");
            }
            RunEvent::ToolCallBlocked(call) => {
                assert!(open.remove(&call.call_id), "{what}: {call:?}");
            }
            _ => {}
        }
    }
    assert_eq!(open, BTreeSet::new(), "{what}: calls without a result");
}

/// Every call has its result, and two assistant turns never meet unless the first was a pause or
/// cut off.
fn assert_valid(conversation: &Conversation, what: &str) {
    for turn in conversation.turns() {
        if let Turn::Assistant(turn) = turn {
            let calls: Vec<_> = turn.message().tool_calls.iter().map(|c| c.id).collect();
            let results: Vec<_> = turn.results().iter().map(|r| r.call_id).collect();
            assert_eq!(calls, results, "{what}");
        }
    }
    assert!(matches!(conversation.turns().first(), None | Some(Turn::User(_))), "{what}");
}

fn anything() -> impl Strategy<Value = Say> {
    let name = prop::sample::select(vec![
        "a",
        "b",
        "same",
        "long",
        "bad",
        "blocked",
        "change",
        "ask",
        "client",
        "unknown",
        "submit",
        OK,
        BAD,
        "output:{nope",
        "output:",
    ]);
    let names = prop::collection::vec(name, 1..8);
    prop_oneof![
        4 => names.clone().prop_map(Calls),
        2 => prop::sample::select(vec!["done", "", " \n", r#"{"ok":1}"#]).prop_map(Text),
        1 => names.clone().prop_map(CutCalls),
        1 => names.prop_map(RefuseCalls),
        1 => Just(CutText("cut")),
        1 => Just(Nonsense),
        1 => Just(Pause),
        1 => Just(Refuse),
        1 => Just(Fail),
        1 => Just(TooLong),
    ]
}

fn any_answer() -> impl Strategy<Value = Resolution> {
    prop_oneof![
        Just(Resolution::Approved {
            arguments: None,
            clears: Labels::default(),
            actions: [].into()
        }),
        Just(Resolution::Denied),
        Just(Resolution::Expired),
    ]
}

fn any_rules() -> impl Strategy<Value = Rules> {
    let contract = prop_oneof![
        Just(Contract::Text { confirm: true }),
        Just(Contract::Text { confirm: false }),
        Just(Contract::Structured { tool: "output".into(), submit: None, checks: vec![] }),
        Just(Contract::Structured {
            tool: "output".into(),
            submit: Some("submit".into()),
            checks: vec![]
        }),
    ];
    let action =
        prop::sample::select(vec![StopAction::Stop, StopAction::Escalate, StopAction::Warn]);
    let when = prop::sample::select(vec!["0", "2", "5", "?"]);
    let conditions = prop::collection::vec(
        (when, action).prop_map(|(when, action)| StopCondition { when: when.into(), action }),
        0..3,
    );
    let behaviour = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), conditions);
    let choice = prop_oneof![
        Just(ToolChoicePolicy::Auto),
        Just(FirstRequired),
        Just(Required),
        Just(ToolChoicePolicy::None),
        Just(ToolChoicePolicy::Tool("a".into())),
    ];
    let react = |max_retries, final_via_inference| ReactSection {
        max_retries,
        final_via_inference,
        ..ReactSection::default()
    };
    let react = prop::option::of(
        (0..3u32, any::<bool>()).prop_map(move |(retries, later)| react(retries, later)),
    );
    let choice = (choice, any::<bool>(), react, prop::option::of(10..200u64));
    (contract, behaviour, choice, 1..6u32, 1..12u32, 1..8u32, 1..4u32, 1..4u32, 0..20u64).prop_map(
        |(
            contract,
            (answers, throws, stops, together, stop_conditions),
            (tool_choice, strict_tool_choice, react, window),
            attempts,
            iterations,
            per_attempt,
            calls,
            threshold,
            budget,
        )| {
            Rules {
                contract,
                tool_choice,
                strict_tool_choice,
                react,
                limits: Limits {
                    max_attempts: attempts,
                    max_iterations: iterations,
                    max_iterations_per_attempt: per_attempt,
                    max_tool_calls_per_iteration: calls,
                    error_threshold: threshold,
                    ..Limits::default()
                },
                budget: Budget {
                    max_tool_calls: budget,
                    max_files_modified: Some(budget / 2),
                    stop_conditions,
                    ..Budget::default()
                },
                on_limit: if answers { OnLimit::Answer } else { OnLimit::Fail },
                throw_on_tool_failure: throws,
                stop_on_tool_block: stops,
                concurrent: if together {
                    ["a", "b", "same"].map(str::to_owned).into()
                } else {
                    BTreeSet::new()
                },
                cached: if together { ["a".to_owned()].into() } else { BTreeSet::new() },
                client_tools: ["client".to_owned()].into(),
                windows: vec![Window { model: "mock/m".into(), tokens: window }],
                ..Rules::default()
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_always_ends_within_its_limits(
        rules in any_rules(),
        script in prop::collection::vec(anything(), 1..10),
        cancel_after in prop::option::of(1..40i64),
        answers in prop::collection::vec(any_answer(), 1..4),
    ) {
        let mut bench = Bench::new(rules.clone(), script);
        bench.cancel_after = cancel_after;
        bench.answers = answers;
        bench.run(false);
        check_journal(&bench, "property");
        let totals = bench.state.totals();
        let last_answer = bench.journal.iter().any(|e| matches!(e.what, RunEvent::IterationStarted { limit: Some(_), .. }));
        prop_assert!(totals.iterations <= rules.limits.max_iterations + u32::from(last_answer));
        prop_assert!(!last_answer || rules.on_limit == OnLimit::Answer);
        prop_assert!(totals.attempts <= rules.limits.max_attempts);
        context::at_most_two_compactions_an_iteration(&bench);
        let started = bench.journal.iter().filter(|e| matches!(e.what, RunEvent::ToolCallStarted(_))).count();
        prop_assert!(started as u64 <= rules.budget.max_tool_calls);
        prop_assert!(started == 0 || rules.tool_choice != ToolChoicePolicy::None);
    }
}
