//! Tool use for models without function calling (ReAct): each response is one JSON decision, and
//! the result of a call is sent as an observation.
//!
//! The provider's tool parameters are not used. [`prompt`] describes the tools to the model,
//! [`extraction`] finds its decision, and this file validates it. The engine decides what an
//! invalid decision means for the run and how often another one is requested.

mod extraction;
mod fields;
mod prompt;

use std::borrow::Cow;

use serde_json::Value;
use serde_json::value::RawValue;

use self::extraction::{Decision, first_decision, first_object};
pub use self::fields::DecisionFields;
use super::{Ask, Check, Driver, Place, Reading, Undecided, call_id, text_beside};
use crate::bounds::json;
use crate::bounds::text::quoted;
use crate::message::{AssistantMessage, CallTarget, Conversation, FinishReason, ToolCall};
use crate::providers::{Completion, ModelRequest, ToolChoice, ToolOffer};

#[derive(Debug, Clone)]
pub struct React {
    /// Whether a final decision only ends the work and the answer is written in a separate model
    /// call.
    pub final_via_inference: bool,
    /// What decisions have in addition to the usual fields.
    pub fields: Option<DecisionFields>,
}

impl Driver for React {
    fn request<'a>(
        &self,
        base: ModelRequest<'a>,
        ask: &Ask<'a>,
        rewritten: &'a mut Conversation,
    ) -> ModelRequest<'a> {
        *rewritten = prompt::rewritten(&base, ask, self);
        ModelRequest {
            conversation: rewritten,
            output_schema: output_schema(&base, ask).filter(|_| ask.answer_only),
            json_mode: may_only_write_json(&base, ask),
            tools: &[],
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: None,
            ..base
        }
    }

    fn parse(
        &self,
        completion: Completion,
        base: &ModelRequest<'_>,
        ask: &Ask<'_>,
        check: Check<'_>,
    ) -> Reading {
        let text = match ask.unfinished {
            Some(beginning) => Cow::Owned([beginning, &completion.text].concat()),
            None => Cow::Borrowed(completion.text.as_str()),
        };
        if ask.answer_only {
            let message = answer(&text, ask, &completion);
            return Reading {
                message: message.unwrap_or_else(|| plain(completion)),
                undecided: None,
            };
        }
        let decided = first_decision(&text).map_err(Undecided::NotFound).and_then(|decision| {
            let act = self.act(&decision, base, ask, check).map_err(Undecided::NotValid)?;
            Ok((decision, act))
        });
        match decided {
            // The engine asks for the rest and parses both together.
            Ok((_, Act::Answer(_))) if completion.finish_reason == FinishReason::Length => {
                Reading { message: plain(completion), undecided: None }
            }
            Ok((decision, act)) => {
                let message = self.message(&decision, act, ask, completion.thinking.clone());
                Reading { message, undecided: None }
            }
            Err(undecided) => {
                let is_whole = !matches!(
                    completion.finish_reason,
                    FinishReason::Length | FinishReason::Pause | FinishReason::Refusal
                );
                Reading {
                    message: plain(completion),
                    undecided: is_whole.then(|| undecided.without_nul()),
                }
            }
        }
    }
}

/// A valid decision.
enum Act {
    Call {
        tool: String,
        args: String,
    },
    /// The JSON text of the answer.
    Answer(String),
}

impl React {
    /// Validates a decision.
    fn act(
        &self,
        decision: &Decision<'_>,
        base: &ModelRequest<'_>,
        ask: &Ask<'_>,
        check: Check<'_>,
    ) -> Result<Act, String> {
        let types = match ask.reflected() {
            Some(_) => "\"call_tool\"",
            None => "\"call_tool\" or \"final_answer\"",
        };
        let act = match decision.r#type.as_str() {
            Some("call_tool") => tool_call(decision, base, ask, check),
            Some("final_answer") => final_answer(decision),
            Some(other) => Err(format!("`type` is {}; it must be {types}", quoted(other))),
            None => Err(format!("`type` is missing; it must be {types}")),
        }?;
        self.fields.as_ref().map_or(Ok(()), |fields| fields.check(decision))?;
        Ok(act)
    }

    fn message(
        &self,
        decision: &Decision<'_>,
        act: Act,
        ask: &Ask<'_>,
        thinking: Option<String>,
    ) -> AssistantMessage {
        let thought = without_nul(decision.thought.as_str().unwrap_or_default());
        let decided = Some(decision.text.to_owned());
        let call = match (act, ask.final_output()) {
            (Act::Call { tool, args }, _) => {
                let target = ask.target(&tool);
                call(ask.place, tool, args, target)
            }
            (Act::Answer(answer), Some(tool)) if !self.final_via_inference => {
                call(ask.place, tool.to_owned(), object_in(answer), CallTarget::Output)
            }
            (Act::Answer(answer), _) => {
                let thinking =
                    thinking.or_else(|| Some(thought).filter(|thought| !thought.is_empty()));
                return AssistantMessage {
                    text: text_of(answer),
                    thinking,
                    decision: decided,
                    ..AssistantMessage::default()
                };
            }
        };
        let tool_calls = vec![call];
        let text = text_beside(thought, &tool_calls);
        AssistantMessage { text, thinking, tool_calls, opaque: None, decision: decided }
    }
}

impl Undecided {
    /// Error messages quote the model, so they may hold NUL.
    fn without_nul(self) -> Self {
        match self {
            Self::NotFound(why) => Self::NotFound(without_nul(&why)),
            Self::NotValid(why) => Self::NotValid(without_nul(&why)),
        }
    }
}

/// The tools that a decision can call: all but the output tool.
fn callable<'a>(base: &ModelRequest<'a>, ask: &Ask<'_>) -> impl Iterator<Item = &'a ToolOffer> {
    base.tools.iter().filter(move |tool| ask.final_output() != Some(tool.name.as_str()))
}

/// Whether the answer must be one JSON text: a decision or an output. The rest of a truncated answer is not.
fn may_only_write_json(base: &ModelRequest<'_>, ask: &Ask<'_>) -> bool {
    ask.unfinished.is_none() && (!ask.answer_only || output_schema(base, ask).is_some())
}

/// The schema of the final answer, if the contract has one.
fn output_schema<'a>(base: &ModelRequest<'a>, ask: &Ask<'_>) -> Option<&'a Value> {
    let output = base.tools.iter().find(|tool| ask.final_output() == Some(tool.name.as_str()))?;
    Some(&output.input_schema)
}

fn tool_call(
    decision: &Decision<'_>,
    base: &ModelRequest<'_>,
    ask: &Ask<'_>,
    check: Check<'_>,
) -> Result<Act, String> {
    if ask.choice == ToolChoice::None {
        return Err("no tool may be called; give a `final_answer`".to_owned());
    }
    let Some(named) = decision.tool.as_str() else {
        return Err("`tool` must be the name of a tool".to_owned());
    };
    let on_the_wire = base.names.to_ours(named);
    let tool = callable(base, ask).map(|tool| tool.name.as_str()).find(|name| *name == named);
    let tool = tool.or_else(|| {
        callable(base, ask).map(|tool| tool.name.as_str()).find(|name| *name == on_the_wire)
    });
    // A tool that a skill has removed is not offered; the gate blocks its calls.
    let is_final = |name: &&str| ask.final_output() == Some(*name);
    let tool = tool.or_else(|| base.names.known(named).filter(|name| !is_final(name)));
    let Some(tool) = tool else {
        let all: Vec<&str> = callable(base, ask).map(|tool| tool.name.as_str()).collect();
        return Err(match all.as_slice() {
            [] => "there are no tools; give a `final_answer`".to_owned(),
            all => {
                let (named, all) = (quoted(named), all.join(", "));
                format!("there is no tool {named}; `tool` must be one of: {all}")
            }
        });
    };
    let args = decision.args.map_or("{}", RawValue::get);
    let value: Value =
        json::read_exactly(args).map_err(|error| format!("`args` cannot be read: {error}"))?;
    if !value.is_object() {
        return Err("`args` must be an object".to_owned());
    }
    check(tool, &value)?;
    Ok(Act::Call { tool: tool.to_owned(), args: args.to_owned() })
}

fn final_answer(decision: &Decision<'_>) -> Result<Act, String> {
    match decision.answer {
        Some(answer) => Ok(Act::Answer(answer.get().to_owned())),
        None => Err("`answer` is missing".to_owned()),
    }
}

/// Reads a text in which the model may only give its answer: an output, or the answer in a decision
/// that it wrote nevertheless; `None` for plain text. A decision without an answer counts as blank.
fn answer(text: &str, ask: &Ask<'_>, completion: &Completion) -> Option<AssistantMessage> {
    if completion.finish_reason == FinishReason::Length
        || completion.finish_reason == FinishReason::Refusal
    {
        return None;
    }
    let decision = first_decision(text).ok();
    let says_nothing = |decision: &Decision<'_>| match decision.r#type.as_str() {
        Some("call_tool") => true,
        Some("final_answer") => decision.answer.is_none() && ask.final_output().is_none(),
        _ => false,
    };
    if let Some(decision) = decision.as_ref().filter(|decision| says_nothing(decision)) {
        return Some(AssistantMessage {
            thinking: completion.thinking.clone(),
            decision: Some(decision.text.to_owned()),
            ..AssistantMessage::default()
        });
    }
    let decision = decision.filter(|decision| decision.r#type == "final_answer");
    let answer = decision.as_ref().and_then(|decision| decision.answer);
    let (said, output) = (answer.map_or(text, RawValue::get), ask.final_output());
    let written = decision.as_ref().map_or(said, |decision| decision.text);
    let thinking = completion.thinking.clone();
    let Some(tool) = output else {
        let text = text_of(answer?.get().to_owned());
        return Some(AssistantMessage {
            text,
            thinking,
            decision: Some(written.to_owned()),
            ..Default::default()
        });
    };
    let object = object_in(said.to_owned());
    let object = first_object(&object)?;
    let call = call(ask.place, tool.to_owned(), object.to_owned(), CallTarget::Output);
    let decision = Some(written.to_owned());
    Some(AssistantMessage {
        text: String::new(),
        thinking,
        tool_calls: vec![call],
        opaque: None,
        decision,
    })
}

/// The answer without a decision. Opaque blocks are kept only for a pause, which is sent back
/// verbatim.
fn plain(completion: Completion) -> AssistantMessage {
    AssistantMessage {
        opaque: completion.opaque.filter(|_| completion.finish_reason == FinishReason::Pause),
        text: completion.text,
        thinking: completion.thinking,
        ..AssistantMessage::default()
    }
}

fn call(place: Place, name: String, arguments: String, target: CallTarget) -> ToolCall {
    let id = call_id(place, 0);
    ToolCall { id, provider_id: format!("call_{}", id.simple()), name, arguments, target }
}

/// An answer as text: the content of a JSON string, other JSON unchanged.
fn text_of(answer: String) -> String {
    json::read::<String>(&answer).map_or(answer, |text| without_nul(&text))
}

/// An answer as the arguments of the output tool; some models write the object as a string.
fn object_in(answer: String) -> String {
    match json::read::<String>(&answer) {
        Ok(text) if json::read::<Value>(&text).is_ok_and(|value| value.is_object()) => text,
        _ => answer,
    }
}

/// JSON can escape NUL, which PostgreSQL does not store.
fn without_nul(text: &str) -> String {
    text.replace('\0', "")
}

#[cfg(test)]
#[path = "react_tests.rs"]
mod tests;
