//! What a run has consumed, as the sum of its events.

use super::{
    CallFailure, ModelInterrupted, ModelResponded, ModelRetried, RunEvent, ToolCallCompleted,
};
use crate::message::{CallTarget, Usage};
use crate::run::Totals;

impl Totals {
    /// Adds one event. The same sum is used during a run, after a crash and when rows are rebuilt.
    pub fn apply(&mut self, event: &RunEvent) {
        self.labels = event.labels_after(self.labels);
        if let Some((model, usage)) = event.took() {
            self.usage.add(usage);
            self.mixed_usage |= self.model.as_ref().is_some_and(|known| *known != model);
            self.model = Some(model);
        }
        match event {
            RunEvent::RunStarted { warnings, .. } => self.warn(warnings),
            RunEvent::AttemptStarted { attempt } => self.attempts = *attempt,
            RunEvent::ModelResponded(r) => {
                self.iterations += 1;
                self.retries += r.retries;
                *self.responses.entry(format!("{}/{}", r.provider, r.model)).or_default() += 1;
                self.warn(&r.warnings);
            }
            RunEvent::ToolChoiceUnmet { warning, .. } => self.warn(warning.as_slice()),
            RunEvent::ContextCompacted(c) => {
                self.retries += c.failed_tries;
                self.mixed_usage |= c.call.is_some();
            }
            RunEvent::RunCompleted(ending) => {
                self.warn(ending.outcome.unchecked().as_slice());
            }
            RunEvent::ScanWarned(warned) => self.warn(&[warned.in_words()]),
            RunEvent::BudgetWarned { warning, .. } => self.warn(std::slice::from_ref(warning)),
            RunEvent::ToolCallStarted(c) => {
                self.tools_used.insert(c.tool.clone());
                self.consumption.add(&c.consumes);
            }
            RunEvent::ToolCallCompleted(c) if c.failure == Some(CallFailure::NotExecuted) => {}
            RunEvent::ToolCallCompleted(c) if c.target == CallTarget::Tool => {
                self.tool_calls_made += 1;
                if c.has_result() {
                    self.tools_used.insert(c.tool.clone()); // also where the caller executed it
                }
                let requests = c.network.map_or(0, |asked| asked.uncounted());
                let asked = &mut self.consumption.network_requests;
                *asked = asked.saturating_add(requests);
                self.count_changes(c);
            }
            RunEvent::ToolCallBlocked(_) => self.tool_calls_made += 1,
            RunEvent::ToolCallAwaitingClient(awaited) => {
                let uncounted = awaited.input.as_ref().map_or(0, |asked| asked.requests_uncounted);
                let asked = &mut self.consumption.network_requests;
                *asked = asked.saturating_add(uncounted);
            }
            RunEvent::RunQueued {}
            | RunEvent::AnswerBlank { .. }
            | RunEvent::ModelRetried(_)
            | RunEvent::ModelInterrupted(_)
            | RunEvent::SessionLoaded { .. }
            | RunEvent::SkillActivated(_)
            | RunEvent::RunResumed { .. }
            | RunEvent::IterationStarted { .. }
            | RunEvent::CallGiven(_)
            | RunEvent::ToolCallCompleted(_)
            | RunEvent::ToolCallAwaitingChild(_)
            | RunEvent::ApprovalRequested(_)
            | RunEvent::ApprovalResolved(_)
            | RunEvent::HandoffStarted { .. }
            | RunEvent::LabelsChanged(_)
            | RunEvent::OutputProposed { .. }
            | RunEvent::OutputReflected { .. }
            | RunEvent::ValidationFailed { .. }
            | RunEvent::ConfirmationRequested { .. }
            | RunEvent::DecisionExtractionFailed(_)
            | RunEvent::DecisionValidationFailed(_)
            | RunEvent::RunCancelRequested { .. }
            | RunEvent::RunFailed(_)
            | RunEvent::RunCancelled(_) => {}
        }
    }

    /// Counts the changes of files by a call that are not known at its start: downloads of pages, and changes by
    /// programs.
    fn count_changes(&mut self, call: &ToolCallCompleted) {
        let (is_of_programs, omitted) = (call.sandbox.is_some(), call.changes_omitted);
        let consumed = &mut self.consumption;
        for change in call.changes.iter().flatten() {
            if consumed.files_modified.insert(change.path.clone()) {
                consumed.files_written += 1;
                consumed.files_of_programs += u64::from(is_of_programs);
            }
        }
        consumed.files_unlisted = consumed.files_unlisted.saturating_add(omitted);
        consumed.files_written = consumed.files_written.saturating_add(omitted);
        let of_programs = if is_of_programs { omitted } else { 0 };
        consumed.files_of_programs = consumed.files_of_programs.saturating_add(of_programs);
    }

    /// Adds warnings that are not reported yet.
    fn warn(&mut self, warnings: &[String]) {
        for warning in warnings {
            if !self.warnings.contains(warning) {
                self.warnings.push(warning.clone());
            }
        }
    }
}

impl RunEvent {
    /// The model that was asked, as `provider/model`, and the usage.
    pub fn took(&self) -> Option<(String, &Usage)> {
        let (provider, model, usage) = match self {
            Self::ModelResponded(ModelResponded { provider, model, usage, .. })
            | Self::ModelRetried(ModelRetried { provider, model, usage: Some(usage), .. })
            | Self::ModelInterrupted(ModelInterrupted { provider, model, usage, .. }) => {
                (provider, model, usage)
            }
            Self::ContextCompacted(compacted) => {
                let call = compacted.call.as_ref()?;
                (&call.provider, &call.model, &call.usage)
            }
            Self::RunQueued {}
            | Self::RunStarted { .. }
            | Self::AttemptStarted { .. }
            | Self::AnswerBlank { .. }
            | Self::ModelRetried(_)
            | Self::SessionLoaded { .. }
            | Self::SkillActivated(_)
            | Self::RunResumed { .. }
            | Self::IterationStarted { .. }
            | Self::CallGiven(_)
            | Self::ToolChoiceUnmet { .. }
            | Self::ScanWarned(_)
            | Self::BudgetWarned { .. }
            | Self::ToolCallStarted(_)
            | Self::ToolCallBlocked(_)
            | Self::ToolCallCompleted(_)
            | Self::ToolCallAwaitingClient(_)
            | Self::ToolCallAwaitingChild(_)
            | Self::ApprovalRequested(_)
            | Self::ApprovalResolved(_)
            | Self::HandoffStarted { .. }
            | Self::LabelsChanged(_)
            | Self::OutputProposed { .. }
            | Self::OutputReflected { .. }
            | Self::ValidationFailed { .. }
            | Self::ConfirmationRequested { .. }
            | Self::DecisionExtractionFailed(_)
            | Self::DecisionValidationFailed(_)
            | Self::RunCancelRequested { .. }
            | Self::RunCompleted(_)
            | Self::RunFailed(_)
            | Self::RunCancelled(_) => return None,
        };
        Some((format!("{provider}/{model}"), usage))
    }
}
