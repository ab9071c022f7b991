//! A model request as the body of an `/api/chat` call.
//!
//! Serialised from borrowed parts. `truncate` and `shift` keep the server from silently dropping
//! the beginning of a conversation: one that does not fit is an error, and the engine compacts it.
//! `num_ctx` requests the context window that we count on, because the server's default is small.
//! Thinking is sent back with the calls that it led to, only to the provider that it came from.

use crate::message::tool_schema::ToolSchema;
use std::borrow::Cow;

use serde::ser::{SerializeSeq, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::message::{AssistantMessage, ToolCall, Turn};
use crate::model::ProviderKind;
use crate::providers::arguments::ArgumentsObject;
use crate::providers::call_ids::CallIds;
use crate::providers::{
    ModelRequest, NOTHING, PassedOptions, ToolChoice, ToolOffer, WireNames, opaque,
};
use crate::run::{Effort, Thinking};

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(serialize_with = "messages")]
    messages: (&'a ModelRequest<'a>, &'a str),
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Tools<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<OutputForm<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    think: Option<Think>,
    options: Options<'a>,
    stream: bool,
    truncate: bool,
    shift: bool,
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum OutputForm<'a> {
    Json(&'static str),
    Schema(&'a Value),
}

#[derive(Serialize)]
struct Options<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    num_ctx: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_predict: Option<u32>,
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
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Think {
    Switch(bool),
    Level(Effort),
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
        content: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        thinking: Option<Cow<'a, str>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tool_calls: Option<Calls<'a>>,
    },
    Tool {
        tool_name: Cow<'a, str>,
        tool_call_id: &'a str,
        content: &'a str,
    },
}

/// `{"type": "function", "function": …}`, the shape of calls and offers.
#[derive(Serialize)]
struct OfFunction<'a, F> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    r#type: &'static str,
    function: F,
}

#[derive(Serialize)]
struct Called<'a> {
    index: usize,
    name: Cow<'a, str>,
    arguments: ArgumentsObject<'a>,
}

#[derive(Serialize)]
struct Offered<'a> {
    name: Cow<'a, str>,
    description: Cow<'a, str>,
    parameters: &'a ToolSchema,
}

struct Calls<'a> {
    made: &'a [ToolCall],
    ids: &'a [Cow<'a, str>],
    names: &'a WireNames,
}

struct Tools<'a> {
    offers: &'a [ToolOffer],
    names: &'a WireNames,
}

/// The stored form of an answer's thinking.
#[derive(Serialize, Deserialize)]
pub(super) struct KeptThinking<'a> {
    #[serde(borrow)]
    pub(super) thinking: Cow<'a, str>,
}

/// The request's JSON text. `provider` gets its own thinking back.
pub(super) fn body(
    request: &ModelRequest<'_>,
    provider: &str,
) -> Result<Vec<u8>, serde_json::Error> {
    let options = request.options;
    let may_call = !request.tools.is_empty() && request.tool_choice != ToolChoice::None;
    serde_json::to_vec(&Body {
        model: request.model,
        messages: (request, provider),
        tools: may_call.then_some(Tools { offers: request.tools, names: request.names }),
        format: request
            .output_schema
            .map(OutputForm::Schema)
            .or_else(|| request.json_mode.then_some(OutputForm::Json("json"))),
        think: request.thinking.map(think),
        options: Options {
            num_ctx: request.capabilities.context_window,
            num_predict: request.max_output_tokens,
            temperature: request.temperature.filter(|_| request.thinking.is_none()),
            top_p: options.top_p,
            stop: options.stops(),
            seed: options.seed,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
            passed: options.passed.within("options"),
        },
        stream: request.deltas.are_wanted(),
        truncate: false,
        shift: false,
        passed: options.passed.beside("options"),
    })
}

fn think(thinking: Thinking) -> Think {
    thinking.effort.map_or(Think::Switch(true), Think::Level)
}

fn messages<S: Serializer>(
    (request, provider): &(&ModelRequest<'_>, &str),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let (conversation, names) = (request.conversation, request.names);
    let mut seq = serializer.serialize_seq(None)?;
    if !conversation.system().is_empty() {
        seq.serialize_element(&Message::System { content: conversation.system() })?;
    }
    let mut ids = CallIds::new(|_| true, "call_");
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
        seq.serialize_element(&Message::Assistant {
            content: match message.text.as_str() {
                blank if blank.trim().is_empty() && calls.is_empty() => NOTHING,
                text => text,
            },
            thinking: thinking(message, provider, request.model),
            tool_calls: (!calls.is_empty()).then_some(Calls { made: calls, ids, names }),
        })?;
        for ((call, tool_call_id), result) in calls.iter().zip(ids).zip(turn.results()) {
            seq.serialize_element(&Message::Tool {
                tool_name: names.to_wire(&call.name),
                tool_call_id,
                content: &result.as_model_reads_it(),
            })?;
        }
    }
    seq.end()
}

fn thinking<'a>(
    message: &'a AssistantMessage,
    provider: &str,
    model: &str,
) -> Option<Cow<'a, str>> {
    let own = opaque::sent_back(message, ProviderKind::Ollama, provider, model)?;
    serde_json::from_str::<KeptThinking>(own).ok().map(|kept| kept.thinking)
}

impl Serialize for Calls<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.made.iter().zip(self.ids).enumerate().map(
            |(index, (call, id))| OfFunction {
                id: Some(id),
                r#type: "function",
                function: Called {
                    index,
                    name: self.names.to_wire(&call.name),
                    arguments: ArgumentsObject::new(&call.arguments),
                },
            },
        ))
    }
}

impl Serialize for Tools<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.offers.iter().map(|offer| OfFunction {
            id: None,
            r#type: "function",
            function: Offered {
                name: self.names.to_wire(&offer.name),
                description: offer.full_description(),
                parameters: offer.input_schema.sent(),
            },
        }))
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
