//! Drivers: how a loop's step becomes a model request, and a completion an assistant message.
//!
//! Pure translation. A driver calls nobody, decides nothing about the run and keeps no state, so
//! replaying a journal through it gives the same messages, call ids included.

mod native;
mod react;

use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::message::{AssistantMessage, CallTarget, Conversation, ToolCall};
use crate::providers::{Completion, ModelRequest, ToolChoice};

pub use native::Native;
pub use react::React;

/// The place of a model response within everything; call ids are made from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The run.
    pub run_id: Uuid,
    /// 1-based.
    pub attempt: u32,
    /// 1-based, within the attempt.
    pub iteration: u32,
}

/// What the loop wants of one model call.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// Where the answer will stand.
    pub place: Place,
    /// Whether and which tool must be called.
    pub choice: ToolChoice,
    /// Our name of the output tool, where the contract has one.
    pub output_tool: Option<&'a str>,
    /// Our name of the submit tool, where outputs are reflected before they are submitted.
    pub submit_tool: Option<&'a str>,
    /// Whether nothing but the final answer is wanted.
    pub answer_only: bool,
    /// The beginning of an answer that was cut off, where its rest is wanted.
    pub unfinished: Option<&'a str>,
}

impl Ask<'_> {
    /// What a call of that name is addressed to.
    fn target(&self, name: &str) -> CallTarget {
        match name {
            name if self.output_tool == Some(name) => CallTarget::Output,
            name if self.submit_tool == Some(name) => CallTarget::Submit,
            _ => CallTarget::Tool,
        }
    }

    /// The output tool where one call of it is the end, so that a final answer can stand for it.
    fn final_output(&self) -> Option<&str> {
        self.output_tool.filter(|_| self.submit_tool.is_none())
    }
}

/// Says what is wrong with the arguments of a tool, by our name of it.
pub type Check<'a> = &'a dyn Fn(&str, &Value) -> Result<(), String>;

/// What a model said, in our words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Its message; without calls where no decision could be made of it.
    pub message: AssistantMessage,
    /// Why there is no decision, where there had to be one.
    pub undecided: Option<Undecided>,
}

/// Why an answer holds no decision, in a clause for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undecided {
    /// None was found.
    NotFound(String),
    /// One was found, and may not be.
    NotValid(String),
}

/// One way of letting a model act.
pub trait Driver: Send + Sync {
    /// Completes a request whose conversation, offers and sampling are set. A conversation that has
    /// to be told in other words is written into `retold`.
    fn request<'a>(
        &self,
        base: ModelRequest<'a>,
        ask: &Ask<'a>,
        retold: &'a mut Conversation,
    ) -> ModelRequest<'a>;

    /// What the model said to the request that was made of `base`.
    fn parse(
        &self,
        completion: Completion,
        base: &ModelRequest<'_>,
        ask: &Ask<'_>,
        check: Check<'_>,
    ) -> Reading;
}

/// Our id of a call: the same for the same place, so that recovery makes no new ones.
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

/// The text beside calls; empty where it only repeats the arguments of one of them, as some models
/// do.
fn beside(text: String, calls: &[ToolCall]) -> String {
    if calls.is_empty() || !text.trim_start().starts_with('{') {
        return text;
    }
    let Ok(said) = serde_json::from_str::<Value>(&text) else { return text };
    let is_said = |call: &ToolCall| {
        let arguments = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
        serde_json::from_str::<Value>(arguments).is_ok_and(|arguments| arguments == said)
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
            assert_eq!(beside(text.to_owned(), &calls), kept, "{text}");
        }
        assert_eq!(beside("{}".to_owned(), &[]), "{}", "a text answer is an answer");
    }
}
