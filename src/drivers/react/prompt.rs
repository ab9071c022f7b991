//! The prompt and the conversation for a model without function calling.
//!
//! Tools and the format of a decision are appended to the system prompt, which is the same in every
//! call so that providers can cache it; instructions for one decision go to the end of the last
//! message. Calls and results become text, and the roles alternate.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{React, callable, output_schema};
use crate::bounds::json;
use crate::drivers::Ask;
use crate::message::{AssistantMessage, CallTarget, Conversation, ToolCall, Turn};
use crate::providers::{ModelRequest, ToolChoice};

/// The conversation of a request as decisions and observations.
pub(super) fn rewritten(base: &ModelRequest<'_>, ask: &Ask<'_>, driver: &React) -> Conversation {
    let mut system = base.conversation.system().to_owned();
    if !ask.answer_only {
        describe_decisions(&mut system, base, ask, driver);
    }
    let mut rewritten = Conversation::new(system);
    let mut user = String::new();
    for turn in base.conversation.turns() {
        match turn {
            Turn::User(text) => append(&mut user, text),
            Turn::Assistant(turn) => {
                push_turn(&mut rewritten, &mut user, turn.message());
                turn.results().iter().for_each(|result| {
                    append(&mut user, &format!("Observation: {}", result.as_model_reads_it()));
                });
            }
        }
    }
    if let Some(note) = note(base, ask) {
        append(&mut user, &note);
    }
    if !user.is_empty() {
        rewritten.push_user(user);
    }
    rewritten
}

/// Appends to the next user message.
fn append(user: &mut String, text: &str) {
    if !user.is_empty() {
        user.push_str("\n\n");
    }
    user.push_str(text);
}

/// Pushes the pending user message and the assistant's message; providers reject blank messages.
fn push_turn(rewritten: &mut Conversation, user: &mut String, message: &AssistantMessage) {
    let text = as_decisions(message);
    let opaque = message
        .opaque
        .clone()
        .filter(|_| message.decision.is_none() && message.tool_calls.is_empty());
    if text.trim().is_empty() && opaque.is_none() {
        return;
    }
    if !user.is_empty() {
        rewritten.push_user(std::mem::take(user));
    }
    let pushed = rewritten
        .push_turn(AssistantMessage { text, opaque, ..AssistantMessage::default() }, Vec::new());
    debug_assert!(pushed.is_ok(), "there is no call that lacks a result");
}

/// The decision as the model wrote it. Native function calls, of an earlier run of the
/// conversation, are written as decisions.
fn as_decisions(message: &AssistantMessage) -> String {
    if let Some(decision) = &message.decision {
        return decision.clone();
    }
    if message.tool_calls.is_empty() {
        return message.text.clone();
    }
    let decision = |call: &ToolCall| {
        let given =
            json::read(&call.arguments).unwrap_or_else(|_| Value::from(call.arguments.as_str()));
        match call.target {
            CallTarget::Output => {
                json!({"thought": message.text, "type": "final_answer", "answer": given})
            }
            CallTarget::Tool | CallTarget::Submit => {
                json!({"thought": message.text, "type": "call_tool", "tool": call.name, "args": given})
            }
        }
    };
    message.tool_calls.iter().map(|call| decision(call).to_string()).collect::<Vec<_>>().join("\n")
}

fn describe_decisions(system: &mut String, base: &ModelRequest<'_>, ask: &Ask<'_>, driver: &React) {
    let may_call = ask.choice != ToolChoice::None && callable(base, ask).next().is_some();
    if may_call {
        system.push_str("\n\n## Tools");
        for tool in callable(base, ask) {
            let (name, description, schema) =
                (&tool.name, tool.description.trim(), &*tool.input_schema);
            let _ = write!(
                system,
                "\n- {name}: {description}\n  Arguments, as a JSON Schema: {schema}"
            );
        }
    }
    system.push_str("\n\n## Decisions\nEvery message of yours is one decision: one JSON object, and nothing else.\n");
    if may_call {
        system.push_str(
            "To call a tool:\n{\"thought\": \"why this comes next\", \"type\": \"call_tool\", \"tool\": \"its name\", \
             \"args\": {}}\n`args` holds its arguments. One tool is called at a time. The next message gives its \
             result, after the word `Observation:`; never write an observation yourself.\n",
        );
    }
    describe_end(system, base, ask, driver);
    if let Some(fields) = &driver.fields {
        let _ = write!(
            system,
            "\nEvery decision has further fields, at its top level, which match this JSON Schema: {}",
            fields.described
        );
    }
}

/// How the model gives its result.
fn describe_end(system: &mut String, base: &ModelRequest<'_>, ask: &Ask<'_>, driver: &React) {
    if let Some((output, submit)) = ask.reflected() {
        let _ = write!(
            system,
            "To finish, call the tool `{output}` with the result as `args`. The observation shows what it looks like; \
             call `{output}` again to change it, and `{submit}` once it is right.",
        );
        return;
    }
    system.push_str(
        "To finish:\n{\"thought\": \"why the task is done\", \"type\": \"final_answer\", \"answer\": \"…\"}\n",
    );
    match output_schema(base, ask) {
        _ if driver.final_via_inference => {
            system.push_str(
                "`answer` says in one sentence what was found; you will be asked to write it out.",
            );
        }
        None => system.push_str(
            "`answer` is the whole answer: a string, or an object where the task asks for one.",
        ),
        Some(schema) => {
            let _ = write!(system, "`answer` is an object that matches this JSON Schema: {schema}");
        }
    }
}

/// Instructions for this call only.
fn note(base: &ModelRequest<'_>, ask: &Ask<'_>) -> Option<String> {
    if ask.answer_only {
        let schema = output_schema(base, ask)?;
        return Some(format!("Write one JSON object that matches this JSON Schema: {schema}"));
    }
    match &ask.choice {
        _ if ask.unfinished.is_some() => None,
        ToolChoice::Tool(name) if ask.final_output() == Some(name.as_str()) => {
            Some("Decide on your `final_answer` now.".to_owned())
        }
        ToolChoice::Tool(name) => {
            Some(format!("Your next decision must be a `call_tool` of `{name}`."))
        }
        ToolChoice::Required if callable(base, ask).next().is_some() => {
            Some("Your next decision must be a `call_tool`.".to_owned())
        }
        ToolChoice::Auto | ToolChoice::None | ToolChoice::Required => None,
    }
}
