//! A model request as the body of a Chat Completions call.
//!
//! Serialised from borrowed parts straight into bytes: a long conversation is never copied.
//! Arguments are sent back exactly as the model wrote them; malformed ones only to OpenAI, which
//! takes any string. A model gets its own reasoning back ([`reasoning`](super::reasoning)).

use crate::message::tool_schema::{self, ToolSchema};
use std::borrow::Cow;

use serde::Serialize;
use serde::ser::{SerializeSeq, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::effort::effort;
use super::reasoning::StoredReasoning;
use super::{Arguments, MAX_DESCRIPTION, strict};
use crate::message::{ToolCall, Turn};
use crate::model::OutputCap;
use crate::providers::arguments::ArgumentsObject;
use crate::providers::call_ids::CallIds;
use crate::providers::{ModelRequest, NOTHING, PassedOptions, ToolChoice, ToolOffer, WireNames};

/// Longest id of a call that Chat Completions accepts, in bytes.
const MAX_ID: usize = 40;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: History<'a>,
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
    stop: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    presence_penalty: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frequency_penalty: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<ResponseFormat<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
enum Message<'a> {
    System {
        content: &'a str,
    },
    User {
        content: &'a str,
    },
    Assistant {
        content: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<Cow<'a, str>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning: Option<Cow<'a, str>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        reasoning_details: Vec<&'a RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tool_calls: Option<Calls<'a>>,
    },
    Tool {
        tool_call_id: &'a str,
        content: &'a str,
    },
}

/// `{"type": "function", "function": …}`, the shape of calls, offers and a named choice.
#[derive(Serialize)]
struct OfFunction<'a, F> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    r#type: &'static str,
    function: F,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_content: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct Called<'a> {
    name: Cow<'a, str>,
    arguments: Cow<'a, str>,
}

#[derive(Serialize)]
struct Offered<'a> {
    name: Cow<'a, str>,
    description: Cow<'a, str>,
    parameters: &'a ToolSchema,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

#[derive(Serialize)]
struct Named<'a> {
    name: Cow<'a, str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Choice<'a> {
    Mode(&'static str),
    Tool(OfFunction<'a, Named<'a>>),
}

#[derive(Serialize)]
struct ResponseFormat<'a> {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    json_schema: Option<JsonSchema<'a>>,
}

#[derive(Serialize)]
struct JsonSchema<'a> {
    name: &'static str,
    schema: Cow<'a, Value>,
    strict: bool,
}

/// The conversation of a request, for this provider.
struct History<'a> {
    request: &'a ModelRequest<'a>,
    provider: &'a str,
    arguments: Arguments,
}

struct Calls<'a> {
    made: &'a [ToolCall],
    ids: &'a [Cow<'a, str>],
    names: &'a WireNames,
    arguments: Arguments,
    /// What the server attached to each of them.
    extra_content: Vec<Option<&'a RawValue>>,
}

struct Tools<'a> {
    offers: &'a [ToolOffer],
    names: &'a WireNames,
    may_be_strict: bool,
}

/// The request's JSON text; asks for a stream if deltas are wanted. `provider` gets back what it
/// needs of its own answers.
pub(super) fn body(
    request: &ModelRequest<'_>,
    provider: &str,
    arguments: Arguments,
) -> Result<Vec<u8>, serde_json::Error> {
    let offered = !request.tools.is_empty();
    let streams = request.deltas.are_wanted();
    let (capabilities, options) = (request.capabilities, request.options);
    let cap = |field| request.max_output_tokens.filter(|_| capabilities.output_cap == field);
    serde_json::to_vec(&Body {
        model: request.model,
        messages: History { request, provider, arguments },
        tools: offered.then_some(Tools {
            offers: request.tools,
            names: request.names,
            may_be_strict: capabilities.strict_schemas,
        }),
        tool_choice: offered.then(|| choice(request)),
        parallel_tool_calls: request.parallel_tool_calls.filter(|_| offered),
        temperature: request.temperature.filter(|_| request.thinking.is_none()),
        top_p: options.top_p,
        stop: options.stops(),
        seed: options.seed,
        presence_penalty: options.presence_penalty,
        frequency_penalty: options.frequency_penalty,
        max_completion_tokens: cap(OutputCap::MaxCompletionTokens),
        max_tokens: cap(OutputCap::MaxTokens),
        reasoning_effort: request.thinking.and_then(effort),
        response_format: response_format(request),
        stream: streams.then_some(true),
        stream_options: streams.then_some(StreamOptions { include_usage: true }),
        passed: options.passed,
    })
}

fn response_format<'a>(request: &ModelRequest<'a>) -> Option<ResponseFormat<'a>> {
    let Some(schema) = request.output_schema else {
        return request
            .json_mode
            .then_some(ResponseFormat { r#type: "json_object", json_schema: None });
    };
    let schema = tool_schema::sent(schema);
    let strict = request.capabilities.strict_schemas && strict::qualifies(&schema);
    let json_schema = Some(JsonSchema { name: "output", schema, strict });
    Some(ResponseFormat { r#type: "json_schema", json_schema })
}

/// The ids of calls that the OpenAI API accepts.
pub(in crate::providers) fn call_ids<'a>() -> CallIds<'a> {
    CallIds::new(|id| id.len() <= MAX_ID, "call_")
}

impl Serialize for History<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { request, provider, arguments } = *self;
        let conversation = request.conversation;
        let mut seq = serializer.serialize_seq(None)?;
        if !conversation.system().is_empty() {
            seq.serialize_element(&Message::System { content: conversation.system() })?;
        }
        let mut ids = call_ids();
        for turn in conversation.turns() {
            let turn = match turn {
                Turn::User(content) => {
                    seq.serialize_element(&Message::User { content })?;
                    continue;
                }
                Turn::Assistant(turn) => turn,
            };
            let message = turn.message();
            let calls = message.tool_calls.as_slice();
            let ids = &ids.of(calls);
            let kept = StoredReasoning::of(message, provider, request.model);
            seq.serialize_element(&Message::Assistant {
                content: match message.text.as_str() {
                    blank if blank.trim().is_empty() && calls.is_empty() => Some(NOTHING),
                    text => (!text.is_empty()).then_some(text),
                },
                reasoning_content: kept.reasoning_content,
                reasoning: kept.reasoning,
                reasoning_details: kept.reasoning_details,
                tool_calls: (!calls.is_empty()).then_some(Calls {
                    made: calls,
                    ids,
                    names: request.names,
                    arguments,
                    extra_content: kept.calls,
                }),
            })?;
            for (tool_call_id, result) in ids.iter().zip(turn.results()) {
                let content = &result.as_model_reads_it();
                seq.serialize_element(&Message::Tool { tool_call_id, content })?;
            }
        }
        seq.end()
    }
}

impl Serialize for Calls<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let extra = self.extra_content.iter().copied().chain(std::iter::repeat(None));
        let calls = self.ids.iter().zip(self.made).zip(extra);
        serializer.collect_seq(calls.map(|((id, call), extra_content)| OfFunction {
            id: Some(id),
            r#type: "function",
            function: Called {
                name: self.names.to_wire(&call.name),
                arguments: as_sent(&call.arguments, self.arguments),
            },
            extra_content,
        }))
    }
}

fn as_sent(arguments: &str, how: Arguments) -> Cow<'_, str> {
    match ArgumentsObject::new(arguments) {
        wrapped @ ArgumentsObject::Malformed { .. } if how == Arguments::Readable => {
            serde_json::to_string(&wrapped).map_or(Cow::Borrowed("{}"), Cow::Owned)
        }
        _ if how == Arguments::Readable && arguments.trim().is_empty() => Cow::Borrowed("{}"),
        _ => Cow::Borrowed(arguments),
    }
}

impl Serialize for Tools<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.offers.iter().map(|offer| {
            OfFunction {
                id: None,
                r#type: "function",
                function: Offered {
                    name: self.names.to_wire(&offer.name),
                    description: offer.description_within(MAX_DESCRIPTION),
                    parameters: offer.input_schema.sent(),
                    strict: (self.may_be_strict && strict::qualifies(offer.input_schema.sent()))
                        .then_some(true),
                },
                extra_content: None,
            }
        }))
    }
}

fn choice<'a>(request: &'a ModelRequest<'_>) -> Choice<'a> {
    match &request.tool_choice {
        ToolChoice::Auto => Choice::Mode("auto"),
        ToolChoice::None => Choice::Mode("none"),
        ToolChoice::Required => Choice::Mode("required"),
        ToolChoice::Tool(name) => Choice::Tool(OfFunction {
            id: None,
            r#type: "function",
            function: Named { name: request.names.to_wire(name) },
            extra_content: None,
        }),
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
