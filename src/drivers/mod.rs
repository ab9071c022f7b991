//! Drivers turn a step of the loop into a model request, and a completion into an assistant
//! message.
//!
//! Pure translation: no I/O, no decisions about the run, no state. Replaying a journal through a
//! driver gives the same messages, call ids included.

mod native;
mod react;

use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::bounds::json;
use crate::message::{AssistantMessage, CallTarget, Conversation, ToolCall};
use crate::providers::{Completion, ModelRequest, ToolChoice};

pub use native::Native;
pub use react::{DecisionFields, React};

/// Identifies a model response; call ids are derived from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The run.
    pub run_id: Uuid,
    /// 1-based.
    pub attempt: u32,
    /// 1-based, within the attempt.
    pub iteration: u32,
}

/// What the loop requires of one model call.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// The place of the response.
    pub place: Place,
    /// Whether and which tool must be called.
    pub choice: ToolChoice,
    /// Our name of the output tool, if the contract has one.
    pub output_tool: Option<&'a str>,
    /// Our name of the submit tool, if outputs are reflected before they are submitted.
    pub submit_tool: Option<&'a str>,
    /// Whether the model may only give its final answer.
    pub answer_only: bool,
    /// The beginning of a truncated answer, if the model is to continue it.
    pub unfinished: Option<&'a str>,
}

impl Ask<'_> {
    fn target(&self, name: &str) -> CallTarget {
        match name {
            name if self.output_tool == Some(name) => CallTarget::Output,
            name if self.submit_tool == Some(name) => CallTarget::Submit,
            _ => CallTarget::Tool,
        }
    }

    /// The output tool and the submit tool, if only calls of them give a result.
    fn reflected(&self) -> Option<(&str, &str)> {
        self.output_tool.zip(self.submit_tool).filter(|_| self.choice != ToolChoice::None)
    }

    /// The output tool, if a call of it ends the attempt: then a final answer is equivalent.
    fn final_output(&self) -> Option<&str> {
        self.output_tool.filter(|_| self.submit_tool.is_none())
    }
}

/// Validates the arguments of a tool, given by our name.
pub type Check<'a> = &'a dyn Fn(&str, &Value) -> Result<(), String>;

/// A model's answer as the loop reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Without calls if the answer holds no valid decision.
    pub message: AssistantMessage,
    /// Why the answer holds no valid decision, if the driver needs one.
    pub undecided: Option<Undecided>,
}

/// Why an answer holds no valid decision, as a clause for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undecided {
    NotFound(String),
    NotValid(String),
}

/// A protocol by which a model calls tools.
pub trait Driver: Send + Sync {
    /// Completes a request whose conversation, offers and sampling are set. A rewritten
    /// conversation is stored in `rewritten`.
    fn request<'a>(
        &self,
        base: ModelRequest<'a>,
        ask: &Ask<'a>,
        rewritten: &'a mut Conversation,
    ) -> ModelRequest<'a>;

    /// Reads the answer to the request that was built from `base`.
    fn parse(
        &self,
        completion: Completion,
        base: &ModelRequest<'_>,
        ask: &Ask<'_>,
        check: Check<'_>,
    ) -> Reading;
}

/// Our id of a call, a function of its place, so that recovery gives the same ids.
fn call_id(place: Place, index: usize) -> Uuid {
    let mut hash = Sha256::new();
    hash.update(place.run_id.as_bytes());
    hash.update(place.attempt.to_be_bytes());
    hash.update(place.iteration.to_be_bytes());
    hash.update((index as u64).to_be_bytes());
    let digest = hash.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

/// The text next to calls; empty if it only repeats the arguments of one of them, as some models
/// do.
fn text_beside(text: String, calls: &[ToolCall]) -> String {
    if calls.is_empty() || !text.trim_start().starts_with('{') {
        return text;
    }
    let Ok(said) = json::read::<Value>(&text) else { return text };
    let is_said = |call: &ToolCall| {
        let arguments = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
        json::read::<Value>(arguments).is_ok_and(|arguments| arguments == said)
    };
    if calls.iter().any(is_said) { String::new() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_repeats_arguments_is_dropped() {
        let call = |arguments: &str| ToolCall {
            id: Uuid::nil(),
            provider_id: "p".into(),
            name: "t".into(),
            arguments: arguments.into(),
            target: CallTarget::Tool,
        };
        let calls = [call(r#"{"path": ".", "deep": [1, 2]}"#), call("{oops"), call("")];
        let table = [
            (r#"{"deep":[1,2],"path":"."}"#, ""),
            (" {\"path\": \".\", \"deep\": [1, 2]}\n", ""),
            ("{}", ""),
            (r#"{"path": "."}"#, r#"{"path": "."}"#),
            (
                r#"I call it with {"path": ".", "deep": [1, 2]}"#,
                r#"I call it with {"path": ".", "deep": [1, 2]}"#,
            ),
            ("{oops", "{oops"),
            ("", ""),
        ];
        for (text, kept) in table {
            assert_eq!(text_beside(text.to_owned(), &calls), kept, "{text}");
        }
        assert_eq!(text_beside("{}".to_owned(), &[]), "{}", "a text answer is an answer");
    }
}
