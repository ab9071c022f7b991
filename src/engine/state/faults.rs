//! What it means for a run that a model call failed for good, or that the service failed in a tool.

use chrono::{DateTime, Utc};
use serde_json::json;

use super::State;
use crate::event::RunEvent;
use crate::run::TerminationReason;

/// A model call that failed for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFault {
    /// [`TerminationReason::ModelError`], `ModelRefused` or `ContextOverflow`.
    pub reason: TerminationReason,
    /// The provider.
    pub provider: String,
    /// HTTP status, where there was an answer.
    pub status: Option<u16>,
    /// The provider's own error code.
    pub code: Option<String>,
    pub message: String,
    /// Whether the message is the provider's own.
    pub is_reported: bool,
    /// Tries made.
    pub attempts: u32,
    /// The key of the definition's option that it refuses by name.
    pub option: Option<String>,
}

impl State {
    /// What a model call that failed for good means.
    pub fn model_failed(&self, fault: &ModelFault, now: DateTime<Utc>) -> Vec<RunEvent> {
        if let Some(limit) = &self.limit {
            return vec![self.ended_at(limit, now)];
        }
        let mut context = json!({"provider": fault.provider, "status": fault.status, "attempts": fault.attempts,
            "provider_code": fault.code, "provider_message": fault.is_reported.then_some(&fault.message)});
        if let Some(option) = &fault.option {
            context["option"] = option.as_str().into();
        }
        let status = fault.status.map(|s| format!(" with status {s}")).unwrap_or_default();
        let option = fault.option.iter().map(|option| format!(" (see `{option}`)"));
        let option: String = option.collect();
        let message = format!(
            "The model call failed{status} after {} {}{option}: {}",
            fault.attempts,
            if fault.attempts == 1 { "try" } else { "tries" },
            fault.message
        );
        vec![self.failed(now, fault.reason, message, context)]
    }

    /// What a fault of the service in a tool means, once its call is answered.
    pub fn tool_fault(&self, tool: &str, now: DateTime<Utc>) -> Vec<RunEvent> {
        let message = format!("The tool {tool} failed because of a fault of the service.");
        let end = self.failed(now, TerminationReason::ToolFailure, message, json!({"tool": tool}));
        self.ended_mid_turn("the run ended", end)
    }
}
