//! How a run ends when a model call fails finally, or a tool fails because of a fault of the service.

use chrono::{DateTime, Utc};
use serde_json::json;

use super::State;
use crate::event::RunEvent;
use crate::run::TerminationReason;

/// A finally failed model call.
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
    /// Whether the message was written by the provider.
    pub is_reported: bool,
    /// Tries made.
    pub attempts: u32,
    /// The option of the definition that the provider refuses, if its message names one.
    pub option: Option<String>,
}

impl State {
    /// The events after a finally failed model call.
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

    /// The end of the run after a fault of the service in a tool, once the call has its result.
    pub fn tool_fault(&self, tool: &str, now: DateTime<Utc>) -> Vec<RunEvent> {
        let message = format!("The tool {tool} failed because of a fault of the service.");
        let end = self.failed(now, TerminationReason::ToolFailure, message, json!({"tool": tool}));
        self.ended_mid_turn("the run ended", end)
    }
}
