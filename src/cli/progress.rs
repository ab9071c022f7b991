//! The progress of a run on standard error.
//!
//! On a terminal that can redraw a line, a status line that is updated in place, and a permanent line
//! for each tool call and each error; otherwise plain lines. Unknown events are ignored, so that an
//! older command line can watch a newer service.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::output::{one_line, print_notice};
use crate::event::{
    Awaited, CallFailure, ContextCompacted, Event, ModelInterrupted, ModelResponded, ModelRetried,
    Resolution, Resolved, RunEvent, ToolCallCompleted, stored,
};
use crate::message::Usage;
use crate::message::visible::escaped;

/// How often the status line is redrawn.
const TICK: Duration = Duration::from_millis(100);
/// Maximum length of a reason or message on one line, in characters.
const REASON: usize = 300;

/// Shows a run on standard error.
pub(super) enum Progress {
    Lines,
    Live(ProgressBar, StatusLine),
}

impl Progress {
    /// A status line if standard error is a terminal that can redraw it, else plain lines.
    pub(super) fn start() -> Self {
        let bar = ProgressBar::new_spinner();
        if bar.is_hidden() {
            return Self::Lines; // a hidden bar drops the lines that it is given
        }
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK);
        Self::Live(bar, StatusLine::default())
    }

    pub(super) fn show(&mut self, event: &Value) {
        let Some(event) = parse_event(event) else { return };
        match self {
            Self::Lines => {
                if let Some(line) = describe(&event) {
                    print_notice(&line);
                }
            }
            Self::Live(bar, status) => {
                status.apply(&event.what);
                bar.set_message(status.line());
                if let Some(line) = describe(&event).filter(|_| is_permanent(&event.what)) {
                    bar.println(line);
                }
            }
        }
    }

    pub(super) fn print(&self, text: &str) {
        match self {
            Self::Lines => print_notice(text),
            Self::Live(bar, _) => bar.println(text),
        }
    }

    /// Removes the status line.
    pub(super) fn finish(&self) {
        if let Self::Live(bar, _) = self {
            bar.finish_and_clear();
        }
    }
}

/// `None` if this version does not know the event's type.
pub(super) fn parse_event(event: &Value) -> Option<Event> {
    serde_json::from_value(stored(event.clone())).ok()
}

/// Whether an event gets a permanent line on a terminal.
fn is_permanent(what: &RunEvent) -> bool {
    !matches!(what, RunEvent::IterationStarted { .. } | RunEvent::ModelResponded(_))
}

/// The content of the status line.
#[derive(Debug, Default)]
pub(super) struct StatusLine {
    attempt: u32,
    iteration: u32,
    tool: Option<String>,
    tokens: u64,
    cost_micro_usd: Option<i64>,
}

impl StatusLine {
    fn apply(&mut self, what: &RunEvent) {
        match what {
            RunEvent::IterationStarted { attempt, iteration, .. } => {
                (self.attempt, self.iteration) = (*attempt, *iteration);
            }
            RunEvent::ModelResponded(ModelResponded { usage, .. })
            | RunEvent::ModelRetried(ModelRetried { usage: Some(usage), .. })
            | RunEvent::ModelInterrupted(ModelInterrupted { usage, .. }) => self.add_usage(usage),
            RunEvent::ContextCompacted(compacted) => {
                compacted.call.iter().for_each(|call| self.add_usage(&call.usage));
            }
            RunEvent::ToolCallStarted(call) => self.tool = Some(one_line(&call.tool, 60)),
            RunEvent::ToolCallCompleted(_) | RunEvent::ToolCallBlocked(_) => self.tool = None,
            RunEvent::RunQueued {}
            | RunEvent::RunStarted { .. }
            | RunEvent::SessionLoaded { .. }
            | RunEvent::SkillActivated(_)
            | RunEvent::RunResumed { .. }
            | RunEvent::AttemptStarted { .. }
            | RunEvent::CallGiven(_)
            | RunEvent::ToolCallAwaitingClient(_)
            | RunEvent::ToolCallAwaitingChild(_)
            | RunEvent::ApprovalRequested(_)
            | RunEvent::ApprovalResolved(_)
            | RunEvent::HandoffStarted { .. }
            | RunEvent::ScanWarned(_)
            | RunEvent::LabelsChanged(_)
            | RunEvent::BudgetWarned { .. }
            | RunEvent::OutputProposed { .. }
            | RunEvent::OutputReflected { .. }
            | RunEvent::ValidationFailed { .. }
            | RunEvent::ConfirmationRequested { .. }
            | RunEvent::DecisionExtractionFailed(_)
            | RunEvent::DecisionValidationFailed(_)
            | RunEvent::ToolChoiceUnmet { .. }
            | RunEvent::AnswerBlank { .. }
            | RunEvent::ModelRetried(_)
            | RunEvent::RunCancelRequested { .. }
            | RunEvent::RunCompleted(_)
            | RunEvent::RunFailed(_)
            | RunEvent::RunCancelled(_) => {}
        }
    }

    fn add_usage(&mut self, usage: &Usage) {
        self.tokens += usage.total_tokens();
        if let Some(cost) = usage.cost_micro_usd {
            *self.cost_micro_usd.get_or_insert(0) += cost;
        }
    }

    /// E.g. `attempt 1, iteration 3 · file_ops · 1311 tokens · $0.0005`.
    fn line(&self) -> String {
        if self.iteration == 0 {
            return "starting".to_owned();
        }
        let mut parts = vec![format!("attempt {}, iteration {}", self.attempt, self.iteration)];
        parts.push(self.tool.clone().unwrap_or_else(|| "model".to_owned()));
        parts.push(format!("{} tokens", self.tokens));
        parts.extend(self.cost_micro_usd.map(usd));
        parts.join(" · ")
    }
}

/// Formats millionths of a dollar.
fn usd(micro: i64) -> String {
    format!("${}.{:06}", micro / 1_000_000, micro % 1_000_000)
}

/// A description of an event for people, with control characters escaped; `None` if the event is of
/// no interest.
pub(super) fn describe(event: &Event) -> Option<String> {
    Some(match &event.what {
        RunEvent::RunStarted { warnings, .. } => {
            let mut lines = vec![format!("run {}", event.run_id)];
            lines.extend(warnings.iter().map(|why| warning(why)));
            lines.join("\n")
        }
        RunEvent::RunResumed { .. } => "resumed".to_owned(),
        RunEvent::IterationStarted { attempt, iteration, .. } => {
            format!("attempt {attempt}, iteration {iteration}")
        }
        RunEvent::ModelResponded(response) => answered(response),
        RunEvent::CallGiven(given) => {
            let calls = given.message.tool_calls.iter();
            let lines = calls.map(|call| format!("  calls {}", escaped(&call.name)));
            lines.collect::<Vec<_>>().join("\n")
        }
        RunEvent::ModelRetried(tried) => retried(tried),
        RunEvent::ModelInterrupted(call) => format!(
            "  {}/{}: interrupted after about {} tokens",
            escaped(&call.provider),
            escaped(&call.model),
            call.usage.total_tokens()
        ),
        RunEvent::AnswerBlank { .. } => "  empty answer: the model is prompted again".to_owned(),
        RunEvent::ToolChoiceUnmet { prompt, warning: why, .. } => match (prompt, why) {
            (Some(_), _) => "  no tool call: the model is prompted again".to_owned(),
            (None, Some(why)) => warning(why),
            (None, None) => return None,
        },
        RunEvent::ToolCallCompleted(call) => ended(call),
        RunEvent::ToolCallBlocked(c) => {
            format!("  {}: {}, {}", one_line(&c.tool, 60), c.decision, one_line(&c.reason, REASON))
        }
        RunEvent::ApprovalRequested(asked)
        | RunEvent::ToolCallAwaitingClient(asked)
        | RunEvent::ToolCallAwaitingChild(asked) => waits(asked),
        RunEvent::ApprovalResolved(resolved) => answer(resolved),
        RunEvent::ValidationFailed { attempt, errors, .. } => {
            let mut lines = vec![format!("attempt {attempt}: output rejected")];
            lines.extend(errors.iter().map(|e| {
                format!("  {}", one_line(&format!("{} {}", e.pointer, e.message), REASON))
            }));
            lines.join("\n")
        }
        RunEvent::ScanWarned(warned) => warning(&warned.in_words()),
        RunEvent::LabelsChanged(changed) => {
            format!("  the run has read {} data", changed.labels.names().join(" and "))
        }
        RunEvent::ContextCompacted(compacted) => shrunk(compacted),
        RunEvent::DecisionExtractionFailed(failed) | RunEvent::DecisionValidationFailed(failed) => {
            format!("  no usable decision: {}", one_line(&failed.error, REASON))
        }
        RunEvent::RunCancelRequested { reason } => {
            format!("cancel requested{}", because(reason.as_deref()))
        }
        RunEvent::RunCompleted(end) | RunEvent::RunFailed(end) | RunEvent::RunCancelled(end) => {
            let why = because(end.outcome.error().map(|error| error.message.as_str()));
            format!("{} after {} ms{why}", end.outcome.status().as_str(), end.latency_ms)
        }
        RunEvent::RunQueued {}
        | RunEvent::SessionLoaded { .. }
        | RunEvent::SkillActivated(_)
        | RunEvent::AttemptStarted { .. }
        | RunEvent::ToolCallStarted(_)
        | RunEvent::HandoffStarted { .. }
        | RunEvent::BudgetWarned { .. }
        | RunEvent::OutputProposed { .. }
        | RunEvent::OutputReflected { .. }
        | RunEvent::ConfirmationRequested { .. } => return None,
    })
}

fn ended(call: &ToolCallCompleted) -> String {
    let outcome = match call.failure {
        None => "ok",
        Some(CallFailure::Cancelled) => "cancelled",
        Some(_) => "failed",
    };
    let tool = one_line(&call.tool, 60);
    if was_executed(call) {
        format!("  {tool}: {outcome}, {} ms", call.duration_ms)
    } else {
        format!("  {tool}: not executed")
    }
}

/// Whether a call began before the run ended.
fn was_executed(call: &ToolCallCompleted) -> bool {
    let is_over = matches!(
        call.failure,
        Some(CallFailure::Cancelled | CallFailure::NotExecuted | CallFailure::Excess)
    );
    call.duration_ms > 0 || !is_over
}

/// What a call waits for, and until when.
fn waits(asked: &Awaited) -> String {
    let (tool, kind) = (one_line(&asked.tool, 60), asked.kind.as_str());
    let until = asked.expires_at.map(|at| format!(" until {}", at.format("%Y-%m-%dT%H:%M:%SZ")));
    let (until, reason) = (until.unwrap_or_default(), one_line(&asked.reason, usize::MAX));
    let mut lines =
        vec![format!("  {tool} ({}): waits for {kind}{until}, {reason}", asked.call_id)];
    let requests = asked.input.iter().flat_map(|input| input.requests.values());
    lines.extend(requests.map(|form| format!("    asks: {}", one_line(&form.message, usize::MAX))));
    lines.join("\n")
}

/// What was answered to a call, and by whom.
fn answer(resolved: &Resolved) -> String {
    let what = match &resolved.resolution {
        Resolution::Approved { arguments: None, .. } => "approved",
        Resolution::Approved { arguments: Some(_), .. } => "approved with other arguments",
        Resolution::Denied => "denied",
        Resolution::Expired => "not answered in time",
        Resolution::Result { is_error: false, .. } => "result submitted",
        Resolution::Result { is_error: true, .. } => "error submitted",
        Resolution::Input { .. } => "input submitted",
        Resolution::Happened { .. } => "it took effect",
        Resolution::DidNotHappen => "it took no effect",
        Resolution::ChildEnded => "the child run has ended",
    };
    let by = resolved.decided_by.as_deref().map(|by| format!(", by {}", one_line(by, 60)));
    let (by, why) = (by.unwrap_or_default(), because(resolved.reason.as_deref()));
    format!("  {} of {}: {what}{by}{why}", resolved.kind.as_str(), resolved.call_id)
}

fn retried(tried: &ModelRetried) -> String {
    let (provider, model) = (escaped(&tried.provider), escaped(&tried.model));
    let status = tried.status.map(|status| format!(" {status}")).unwrap_or_default();
    let next = match &tried.fallback {
        Some(fallback) => format!("{} takes over", escaped(fallback)),
        None => format!("again in {} ms", tried.wait_ms),
    };
    format!("  {provider}/{model} failed ({}{status}): {next}", tried.reason)
}

fn answered(response: &ModelResponded) -> String {
    let usage = &response.usage;
    let cost = usage.cost_micro_usd.map(|cost| format!(", {}", usd(cost))).unwrap_or_default();
    let mut line = format!(
        "  {}/{}{}{}: {} tokens{cost}, {} ms, {} tool call(s)",
        escaped(&response.provider),
        escaped(&response.model),
        if response.fallback { " (fallback)" } else { "" },
        if response.repeated { " (repeated)" } else { "" },
        usage.total_tokens(),
        response.latency_ms,
        response.message.tool_calls.len()
    );
    line.extend(response.warnings.iter().map(|why| format!("\n{}", warning(why))));
    line
}

fn shrunk(compacted: &ContextCompacted) -> String {
    let turns = compacted.summary.as_ref().map_or(0, |summary| summary.turns);
    let (before, after) = (compacted.tokens_before, compacted.tokens_after);
    let results = compacted.cleared.len();
    format!(
        "  context: {before} to {after} tokens, {results} result(s) cleared, {turns} turn(s) summarised"
    )
}

fn warning(text: &str) -> String {
    format!("  warning: {}", one_line(text, REASON))
}

fn because(reason: Option<&str>) -> String {
    reason.map(|reason| format!(": {}", one_line(reason, REASON))).unwrap_or_default()
}

#[cfg(test)]
#[path = "progress_tests.rs"]
mod tests;
