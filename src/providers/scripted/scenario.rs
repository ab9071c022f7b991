//! The format of a scenario file, and the choice of the step for a call.
//!
//! A file is validated when it is parsed, with line and key: unknown keys, templates and conditions
//! that do not compile, steps that are empty or contradict themselves.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::render;
use crate::bounds::expression::{Expression, ExpressionError};
use crate::bounds::mistakes::Mistake;
use crate::bounds::yaml;
use crate::message::{Conversation, FinishReason, Turn, Usage};
use crate::providers::ModelRequest;

/// What conditions may use.
const VARIABLES: [&str; 3] = ["inputs", "messages", "step"];

/// A checked scenario.
#[derive(Debug)]
pub(super) enum Scenario {
    /// The same steps for every conversation.
    Steps(Vec<Step>),
    /// The first branch whose condition holds.
    Match(Vec<Branch>),
}

/// Steps for the conversations that match a condition.
#[derive(Debug)]
pub(super) struct Branch {
    when: Expression,
    steps: Vec<Step>,
}

/// One answer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    /// A template.
    pub(super) text: Option<String>,
    #[serde(default)]
    pub(super) tool_calls: Vec<Call>,
    /// Instead of an answer.
    pub(super) error: Option<ErrorStep>,
    /// Milliseconds before the answer or the error.
    #[serde(default)]
    pub(super) delay_ms: u64,
    #[serde(default, deserialize_with = "finish_reason")]
    pub(super) finish_reason: Option<FinishReason>,
    /// Estimated if absent.
    pub(super) usage: Option<StepUsage>,
}

/// One tool call, under our name of the tool.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Call {
    pub(super) tool: String,
    /// A map whose strings are templates, or one template that gives the whole text.
    #[serde(default)]
    pub(super) arguments: Value,
}

/// A failure as a server would report it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ErrorStep {
    /// 400..=599.
    pub(super) status: u16,
    /// A template.
    #[serde(default = "default_message")]
    pub(super) message: String,
    /// The provider's code, e.g. `insufficient_quota`.
    pub(super) code: Option<String>,
    /// Seconds.
    #[serde(default, deserialize_with = "seconds")]
    pub(super) retry_after: Option<Duration>,
}

/// Tokens that the model reports.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "these are the names in `Usage`")]
pub(super) struct StepUsage {
    input_tokens: u64,
    output_tokens: u64,
    #[serde(default)]
    cached_input_tokens: u64,
    #[serde(default)]
    cache_write_tokens: u64,
    #[serde(default)]
    reasoning_tokens: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    steps: Option<Vec<Step>>,
    r#match: Option<Vec<FileBranch>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileBranch {
    when: String,
    steps: Vec<Step>,
}

impl Scenario {
    /// Reads and checks a file's text. The error names line and key.
    pub(super) fn parse(text: &str) -> Result<Self, Mistake> {
        Self::read(text).map_err(|mistake| mistake.located_in(text))
    }

    fn read(text: &str) -> Result<Self, Mistake> {
        let file: File = yaml::read(text)?;
        match (file.steps, file.r#match) {
            (Some(steps), None) => Ok(Self::Steps(checked("steps", steps)?)),
            (None, Some(branches)) => {
                let branches = branches.into_iter().enumerate().map(|(index, branch)| {
                    let when = Expression::compile(&branch.when, &VARIABLES).map_err(|error| {
                        Mistake::at(format!("match[{index}].when"), error.to_string())
                    })?;
                    Ok(Branch {
                        when,
                        steps: checked(&format!("match[{index}].steps"), branch.steps)?,
                    })
                });
                Ok(Self::Match(branches.collect::<Result<_, Mistake>>()?))
            }
            (Some(_), Some(_)) => {
                Err(Mistake::at("", "it has both `steps` and `match`; choose one"))
            }
            (None, None) => Err(Mistake::at("", "it has neither `steps` nor `match`")),
        }
    }

    /// The step of a call, and its key; the last one repeats.
    pub(super) fn step(&self, request: &ModelRequest<'_>) -> Result<(String, &Step), String> {
        let (key, steps) = match self {
            Self::Steps(steps) => ("steps".to_owned(), steps),
            Self::Match(branches) => {
                let index = matching(branches, request)?;
                (format!("match[{index}].steps"), &branches[index].steps)
            }
        };
        let wanted = usize::try_from(request.step.saturating_sub(1)).unwrap_or(usize::MAX);
        let index = wanted.min(steps.len().saturating_sub(1));
        let step = steps.get(index).ok_or_else(|| format!("{key} is empty"))?;
        Ok((format!("{key}[{index}]"), step))
    }
}

fn matching(branches: &[Branch], request: &ModelRequest<'_>) -> Result<usize, String> {
    let (messages, step) = (messages(request.conversation), i64::from(request.step).into());
    let variables = [("inputs", request.inputs), ("messages", &messages), ("step", &step)];
    for (index, branch) in branches.iter().enumerate() {
        match branch.when.is_true(&variables) {
            Ok(true) => return Ok(index),
            Ok(false) => {}
            Err(ExpressionError::NotBoolean(other)) => {
                return Err(format!("match[{index}].when gives {other}, not true or false"));
            }
            Err(error) => return Err(format!("match[{index}].when: {error}")),
        }
    }
    Err(format!("no branch of `match` fits step {}", request.step))
}

/// The conversation as conditions read it: `{role, content, tool_calls?, tool_call_id?, name?}`.
fn messages(conversation: &Conversation) -> Value {
    let mut messages = vec![json!({"role": "system", "content": conversation.system()})];
    for turn in conversation.turns() {
        let turn = match turn {
            Turn::User(text) => {
                messages.push(json!({"role": "user", "content": text}));
                continue;
            }
            Turn::Assistant(turn) => turn,
        };
        let calls = &turn.message().tool_calls;
        let written = calls
            .iter()
            .map(|call| json!({"id": call.id, "name": call.name, "arguments": call.arguments}));
        let written: Vec<Value> = written.collect();
        messages.push(
            json!({"role": "assistant", "content": turn.message().text, "tool_calls": written}),
        );
        messages.extend(calls.iter().zip(turn.results()).map(|(call, result)| {
            json!({"role": "tool", "content": result.content, "tool_call_id": call.id, "name": call.name})
        }));
    }
    Value::Array(messages)
}

fn checked(key: &str, steps: Vec<Step>) -> Result<Vec<Step>, Mistake> {
    if steps.is_empty() {
        return Err(Mistake::at(key, "is empty"));
    }
    for (index, step) in steps.iter().enumerate() {
        check(step).map_err(|(within, why)| Mistake::at(format!("{key}[{index}]{within}"), why))?;
    }
    Ok(steps)
}

/// The key within the step, and what is wrong with it.
fn check(step: &Step) -> Result<(), (String, String)> {
    let wrong = |within: &str, why: String| (within.to_owned(), why);
    let answers = step.text.is_some() || !step.tool_calls.is_empty();
    match &step.error {
        Some(_) if answers => return Err(wrong("", "it has both an error and an answer".into())),
        Some(error) if !(400..600).contains(&error.status) => {
            let why = format!("{} is not within 400..=599", error.status);
            return Err(wrong(".error.status", why));
        }
        Some(error) => {
            render::check(&error.message).map_err(|why| wrong(".error.message", why))?;
        }
        None if !answers && step.finish_reason.is_none() => {
            let why = "it needs text, tool_calls, error or finish_reason";
            return Err(wrong("", why.into()));
        }
        None => {}
    }
    if let Some(text) = &step.text {
        render::check(text).map_err(|why| wrong(".text", why))?;
    }
    for (index, call) in step.tool_calls.iter().enumerate() {
        check_arguments(&call.arguments)
            .map_err(|(pointer, why)| (format!(".tool_calls[{index}].arguments{pointer}"), why))?;
    }
    Ok(())
}

fn check_arguments(arguments: &Value) -> Result<(), (String, String)> {
    match arguments {
        Value::String(template) => {
            render::check(template).map_err(|problem| (String::new(), problem))
        }
        Value::Array(items) => items.iter().enumerate().try_for_each(|(index, item)| {
            check_arguments(item)
                .map_err(|(pointer, problem)| (format!("/{index}{pointer}"), problem))
        }),
        Value::Object(members) => members.iter().try_for_each(|(name, member)| {
            check_arguments(member)
                .map_err(|(pointer, problem)| (format!("/{name}{pointer}"), problem))
        }),
        _ => Ok(()),
    }
}

impl From<StepUsage> for Usage {
    fn from(said: StepUsage) -> Self {
        Self {
            input_tokens: said.input_tokens,
            output_tokens: said.output_tokens,
            cached_input_tokens: said.cached_input_tokens,
            cache_write_tokens: said.cache_write_tokens,
            reasoning_tokens: said.reasoning_tokens,
            ..Self::default()
        }
    }
}

fn default_message() -> String {
    "the scenario says so".into()
}

/// Our names, and OpenAI's `content_filter` for `refusal`.
fn finish_reason<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<FinishReason>, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Word {
        Stop,
        ToolCalls,
        Length,
        #[serde(alias = "content_filter")]
        Refusal,
        Pause,
        Other,
    }
    Ok(Some(match Word::deserialize(deserializer)? {
        Word::Stop => FinishReason::Stop,
        Word::ToolCalls => FinishReason::ToolCalls,
        Word::Length => FinishReason::Length,
        Word::Refusal => FinishReason::Refusal,
        Word::Pause => FinishReason::Pause,
        Word::Other => FinishReason::Other,
    }))
}

fn seconds<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let seconds = f64::deserialize(deserializer)?;
    Duration::try_from_secs_f64(seconds).map(Some).map_err(serde::de::Error::custom)
}
