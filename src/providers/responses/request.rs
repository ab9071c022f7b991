//! A model request as the body of a Responses call.
//!
//! Serialised from borrowed parts straight into bytes. A turn is sent back as the provider's own
//! items, if it needs any of them back, else as items built from the turn. A model that cannot
//! reason refuses reasoning, and is never sent such items. Every call is followed by its output.

use crate::message::tool_schema::{self, ToolSchema};
use std::borrow::Cow;

use serde::Serialize;
use serde::ser::{SerializeSeq, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::response;
use crate::message::{AssistantTurn, Turn};
use crate::model::{ProviderKind, ThinkingStyle};
use crate::providers::call_ids::CallIds;
use crate::providers::openai::{MAX_DESCRIPTION, call_ids, effort, strict};
use crate::providers::{ModelRequest, PassedOptions, ToolChoice, ToolOffer, WireNames, opaque};

/// Needed to send back the reasoning of a response that is not stored.
const ENCRYPTED_REASONING: [&str; 1] = ["reasoning.encrypted_content"];

/// The API refuses a smaller limit of the output, in tokens.
const LEAST_OUTPUT: u32 = 16;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    instructions: &'a str,
    input: Input<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Tools<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parallel_tool_calls: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Reasoning>,
    #[serde(skip_serializing_if = "Option::is_none")]
    include: Option<[&'static str; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<Text<'a>>,
    store: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Item<'a> {
    Message { role: &'static str, content: &'a str },
    Call { r#type: &'static str, call_id: &'a str, name: Cow<'a, str>, arguments: &'a str },
    Output { r#type: &'static str, call_id: &'a str, output: &'a str },
}

#[derive(Serialize)]
struct Offered<'a> {
    r#type: &'static str,
    name: Cow<'a, str>,
    description: Cow<'a, str>,
    parameters: &'a ToolSchema,
    /// Always sent: the default is true.
    strict: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Choice<'a> {
    Mode(&'static str),
    Tool { r#type: &'static str, name: Cow<'a, str> },
}

#[derive(Serialize)]
struct Reasoning {
    #[serde(skip_serializing_if = "Option::is_none")]
    effort: Option<&'static str>,
    summary: &'static str,
}

#[derive(Serialize)]
struct Text<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<Format<'a>>,
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
struct Format<'a> {
    r#type: &'static str,
    #[serde(flatten)]
    constraint: Option<Constraint<'a>>,
}

#[derive(Serialize)]
struct Constraint<'a> {
    name: &'static str,
    schema: Cow<'a, Value>,
    strict: bool,
}

struct Input<'a> {
    request: &'a ModelRequest<'a>,
    provider: &'a str,
}

struct Tools<'a> {
    offers: &'a [ToolOffer],
    names: &'a WireNames,
    may_be_strict: bool,
}

/// The request's JSON text; asks for a stream if deltas are wanted. `provider` gets its own opaque
/// blocks back.
pub(super) fn body(
    request: &ModelRequest<'_>,
    provider: &str,
) -> Result<Vec<u8>, serde_json::Error> {
    let offered = !request.tools.is_empty();
    let may_be_strict = request.capabilities.strict_schemas;
    let reasons = request.capabilities.thinking != ThinkingStyle::None;
    serde_json::to_vec(&Body {
        model: request.model,
        instructions: request.conversation.system(),
        input: Input { request, provider },
        tools: offered.then_some(Tools {
            offers: request.tools,
            names: request.names,
            may_be_strict,
        }),
        tool_choice: offered.then(|| choice(request)),
        parallel_tool_calls: request.parallel_tool_calls.filter(|_| offered),
        temperature: request.temperature.filter(|_| request.thinking.is_none()),
        top_p: request.options.top_p,
        max_output_tokens: request.max_output_tokens.map(|cap| cap.max(LEAST_OUTPUT)),
        reasoning: request
            .thinking
            .map(|thinking| Reasoning { effort: effort::effort(thinking), summary: "auto" }),
        include: reasons.then_some(ENCRYPTED_REASONING),
        text: text(request),
        store: false,
        stream: request.deltas.are_wanted().then_some(true),
        passed: request.options.passed.beside("text"),
    })
}

fn text<'a>(request: &ModelRequest<'a>) -> Option<Text<'a>> {
    let constrained = |schema: &'a Value| {
        let schema = tool_schema::sent(schema);
        let strict = request.capabilities.strict_schemas && strict::qualifies(&schema);
        Format {
            r#type: "json_schema",
            constraint: Some(Constraint { name: "output", schema, strict }),
        }
    };
    let format = request.output_schema.map(constrained);
    let any = || Format { r#type: "json_object", constraint: None };
    let format = format.or_else(|| request.json_mode.then(any));
    let passed = request.options.passed.within("text");
    (format.is_some() || !passed.is_empty()).then_some(Text { format, passed })
}

impl Serialize for Input<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut items = serializer.serialize_seq(None)?;
        let mut ids = call_ids();
        for turn in self.request.conversation.turns() {
            match turn {
                Turn::User(content) => {
                    items.serialize_element(&Item::Message { role: "user", content })?;
                }
                Turn::Assistant(turn) => self.assistant(turn, &mut ids, &mut items)?,
            }
        }
        items.end()
    }
}

impl Input<'_> {
    fn assistant<'a, S: SerializeSeq>(
        &self,
        turn: &'a AssistantTurn,
        ids: &mut CallIds<'a>,
        items: &mut S,
    ) -> Result<(), S::Error> {
        let message = turn.message();
        let calls = message.tool_calls.as_slice();
        let reasons = self.request.capabilities.thinking != ThinkingStyle::None;
        let kind = ProviderKind::OpenaiResponses;
        let own = opaque::sent_back(message, kind, self.provider, self.request.model);
        let own = own.filter(|_| reasons);
        let own: Option<Vec<&RawValue>> = own.and_then(|json| serde_json::from_str(json).ok());
        let own = own.filter(|_| ids.are_new(calls));
        let call_ids: Vec<Cow<'_, str>> = match &own {
            Some(_) => calls.iter().map(|call| Cow::Borrowed(&*call.provider_id)).collect(),
            None => ids.of(calls),
        };
        if let Some(mut own) = own {
            // The API refuses reasoning without the item that it led to.
            while own.last().is_some_and(|item| response::is_reasoning(item)) {
                own.pop();
            }
            own.into_iter().try_for_each(|item| items.serialize_element(item))?;
        } else {
            if !message.text.is_empty() {
                items.serialize_element(&Item::Message {
                    role: "assistant",
                    content: &message.text,
                })?;
            }
            for (call, call_id) in calls.iter().zip(&call_ids) {
                items.serialize_element(&Item::Call {
                    r#type: "function_call",
                    call_id,
                    name: self.request.names.to_wire(&call.name),
                    arguments: &call.arguments,
                })?;
            }
        }
        for (call_id, result) in call_ids.iter().zip(turn.results()) {
            let output = &result.as_model_reads_it();
            items.serialize_element(&Item::Output {
                r#type: "function_call_output",
                call_id,
                output,
            })?;
        }
        Ok(())
    }
}

impl Serialize for Tools<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.offers.iter().map(|offer| Offered {
            r#type: "function",
            name: self.names.to_wire(&offer.name),
            description: offer.description_within(MAX_DESCRIPTION),
            parameters: offer.input_schema.sent(),
            strict: self.may_be_strict && strict::qualifies(offer.input_schema.sent()),
        }))
    }
}

fn choice<'a>(request: &'a ModelRequest<'_>) -> Choice<'a> {
    match &request.tool_choice {
        ToolChoice::Auto => Choice::Mode("auto"),
        ToolChoice::None => Choice::Mode("none"),
        ToolChoice::Required => Choice::Mode("required"),
        ToolChoice::Tool(name) => {
            Choice::Tool { r#type: "function", name: request.names.to_wire(name) }
        }
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
