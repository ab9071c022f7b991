//! A model request as the body of a Messages call.
//!
//! Serialised from borrowed parts. Combinations that the API rejects are not sent: temperature with
//! thinking, a forced choice with a thinking budget, a budget above the output cap, tool blocks
//! without tools. Tools come before the system prompt and that before the messages, each with a
//! cache mark at its end: the most stable part of a call comes first.

use crate::message::tool_schema::ToolSchema;
use std::borrow::Cow;

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::messages::{self, Block, CacheControl, EPHEMERAL, Message};
use super::thinking::{self, Mode};
use super::{property_names, schema};
use crate::message::Turn;
use crate::providers::{ModelRequest, PassedOptions, ToolChoice, ToolOffer, WireNames};
use crate::run::Effort;

/// Output cap in tokens if the definition has none: the API requires one.
const OUTPUT_CAP: u32 = 8192;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<System<'a>>,
    messages: Vec<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<Thinking>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputConfig<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_sequences: Option<&'a [String]>,
    stream: bool,
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
struct Tool<'a> {
    name: Cow<'a, str>,
    description: Cow<'a, str>,
    input_schema: InputSchema<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheControl>,
}

enum InputSchema<'a> {
    Offered(&'a ToolSchema),
    /// Without properties that the API refuses.
    Less(Value),
    /// For a tool that is no longer offered.
    Anything,
}

impl Serialize for InputSchema<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Offered(schema) => schema.serialize(serializer),
            Self::Less(schema) => schema.serialize(serializer),
            Self::Anything => serializer.collect_map([("type", "object")]),
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Choice<'a> {
    Auto {
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        disable_parallel_tool_use: bool,
    },
    Any {
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        disable_parallel_tool_use: bool,
    },
    Tool {
        name: Cow<'a, str>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        disable_parallel_tool_use: bool,
    },
    None,
}

#[derive(Serialize)]
#[serde(untagged)]
enum System<'a> {
    Text(&'a str),
    Cached([Block<'a>; 1]),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Thinking {
    Enabled { budget_tokens: u32 },
    Adaptive,
}

#[derive(Serialize)]
struct OutputConfig<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    effort: Option<Effort>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<Format>,
    #[serde(flatten)]
    passed: PassedOptions<'a>,
}

#[derive(Serialize)]
struct Format {
    r#type: &'static str,
    schema: Value,
}

/// The request's JSON text. `provider` gets its own opaque blocks back.
pub(super) fn body(
    request: &ModelRequest<'_>,
    provider: &str,
) -> Result<Vec<u8>, serde_json::Error> {
    let capabilities = request.capabilities;
    let mut messages = messages::messages(request, provider);
    let mode = request.thinking.and_then(|wish| thinking::mode(capabilities.thinking, wish));
    let mode = mode.filter(|mode| {
        matches!(mode, Mode::Adaptive(_)) || messages::allow_enabled_thinking(&messages)
    });
    let cap = request.max_output_tokens.unwrap_or(OUTPUT_CAP).max(1);
    let (thinking, effort, max_tokens) = match mode {
        Some(Mode::Enabled(budget)) => {
            let (budget, max_tokens) = thinking::within(budget, cap, request.output_left);
            (budget.map(|budget_tokens| Thinking::Enabled { budget_tokens }), None, max_tokens)
        }
        Some(Mode::Adaptive(effort)) => (Some(Thinking::Adaptive), effort, cap),
        None => (None, None, cap),
    };
    let mut tools = tools(request);
    let mut system =
        Some(request.conversation.system()).filter(|s| !s.trim().is_empty()).map(System::Text);
    if request.prompt_caching && capabilities.prompt_caching {
        if let Some(tool) = tools.last_mut() {
            tool.cache_control = Some(EPHEMERAL);
        }
        if let Some(System::Text(text)) = system {
            system = Some(System::Cached([Block::Text {
                text: text.into(),
                cache_control: Some(EPHEMERAL),
            }]));
        }
        if let Some(mark) =
            messages.last_mut().and_then(|last| last.content.last_mut()?.cache_control())
        {
            *mark = Some(EPHEMERAL);
        }
    }
    let format = request.output_schema.filter(|_| capabilities.structured_output);
    let format =
        format.and_then(schema::constrained).map(|schema| Format { r#type: "json_schema", schema });
    let configured = request.options.passed.within("output_config");
    let may_set_temperature = thinking.is_none() && capabilities.temperature;
    serde_json::to_vec(&Body {
        model: request.model,
        max_tokens,
        tool_choice: (!tools.is_empty()).then(|| choice(request)),
        tools,
        system,
        messages,
        output_config: (effort.is_some() || format.is_some() || !configured.is_empty())
            .then_some(OutputConfig { effort, format, passed: configured }),
        temperature: request.temperature.filter(|_| may_set_temperature).map(|t| t.clamp(0.0, 1.0)),
        thinking,
        top_p: request.options.top_p,
        stop_sequences: request.options.stops(),
        stream: request.deltas.are_wanted(),
        passed: request.options.passed.beside("output_config"),
    })
}

/// The offered tools; if there are none, those of earlier calls, which must be declared but may not
/// be called.
fn tools<'a>(request: &ModelRequest<'a>) -> Vec<Tool<'a>> {
    if !request.tools.is_empty() {
        return request.tools.iter().map(|offer| offered(offer, request.names)).collect();
    }
    let mut called: Vec<Tool<'a>> = Vec::new();
    for turn in request.conversation.turns() {
        let Turn::Assistant(turn) = turn else { continue };
        for call in &turn.message().tool_calls {
            let name = request.names.to_wire(&call.name);
            if !called.iter().any(|tool| tool.name == name) {
                let input_schema = InputSchema::Anything;
                called.push(Tool {
                    name,
                    description: "Not available.".into(),
                    input_schema,
                    cache_control: None,
                });
            }
        }
    }
    called
}

fn offered<'a>(offer: &'a ToolOffer, names: &'a WireNames) -> Tool<'a> {
    let (name, full_description, schema) =
        (names.to_wire(&offer.name), offer.full_description(), offer.input_schema.sent());
    let (description, input_schema) = match property_names::left_out(schema) {
        None => (full_description, InputSchema::Offered(schema)),
        Some((schema, words)) => (
            format!("{full_description}\n{words}").trim_start().to_owned().into(),
            InputSchema::Less(schema),
        ),
    };
    Tool { name, description, input_schema, cache_control: None }
}

fn choice<'a>(request: &ModelRequest<'a>) -> Choice<'a> {
    let disable_parallel_tool_use = request.parallel_tool_calls == Some(false);
    let may_force = request.capabilities.can_force(request.thinking);
    match &request.tool_choice {
        ToolChoice::None => Choice::None,
        _ if request.tools.is_empty() => Choice::None,
        ToolChoice::Required if may_force => Choice::Any { disable_parallel_tool_use },
        ToolChoice::Tool(name) if may_force => Choice::Tool {
            name: Cow::Owned(request.names.to_wire(name).into_owned()),
            disable_parallel_tool_use,
        },
        ToolChoice::Auto | ToolChoice::Required | ToolChoice::Tool(_) => {
            Choice::Auto { disable_parallel_tool_use }
        }
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
