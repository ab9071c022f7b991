//! The words of models: which API a provider speaks, what a model can be asked for, and what an
//! operator corrects about it.
//!
//! The configuration reads these words and `providers` acts on them. What ships for which model is
//! the table of `providers::capabilities`.

use schemars::JsonSchema;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// Which API a provider speaks.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum ProviderKind {
    /// OpenAI's Chat Completions, at OpenAI or elsewhere.
    Openai,
    /// OpenAI's Responses.
    OpenaiResponses,
    /// Anthropic's Messages.
    Anthropic,
    /// Ollama's `/api/chat`.
    Ollama,
    /// No server: scenarios in YAML files.
    Scripted,
}

impl ProviderKind {
    /// The name used in configurations.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Whether a model accepts a `tool_choice` that requires a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ForcedToolChoice {
    /// It rejects or ignores one.
    No,
    /// Unless it thinks within a fixed budget.
    WithoutThinking,
    Yes,
}

/// How thinking is requested from a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingStyle {
    /// The model cannot think.
    None,
    /// `reasoning_effort`: a level.
    Effort,
    /// Anthropic's `enabled`: a budget in tokens.
    Budget,
    /// Anthropic's `enabled` if a budget is given, else `adaptive`.
    BudgetOrAdaptive,
    /// Anthropic's `adaptive`, with a level; never a budget.
    Adaptive,
    /// Ollama's `think`: on, or a level.
    Switch,
}

/// Whether a model accepts `top_p`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TopP {
    No,
    /// Unless a temperature is set, too.
    WithoutTemperature,
    Yes,
}

/// The request field that limits the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputCap {
    MaxTokens,
    MaxCompletionTokens,
}

/// An operator's corrections of the shipped capabilities; an absent field keeps what ships.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CapabilityOverrides {
    /// Whether a tool call can be required.
    #[serde(deserialize_with = "forced")]
    #[schemars(with = "Option<ForcedOrSwitch>")]
    pub forced_tool_choice: Option<ForcedToolChoice>,
    /// Whether a call of one certain tool can be required.
    pub named_tool_choice: Option<bool>,
    /// Whether several calls in one answer can be switched off.
    pub parallel_switch: Option<bool>,
    /// Whether arguments can be constrained to a schema.
    pub strict_schemas: Option<bool>,
    /// Whether parts of a request can be marked for a cache.
    pub prompt_caching: Option<bool>,
    /// Whether an answer can be constrained to a JSON Schema.
    pub structured_output: Option<bool>,
    /// Tokens of input and output together.
    #[serde(deserialize_with = "window")]
    #[schemars(range(min = MIN_WINDOW, max = MAX_WINDOW))]
    pub context_window: Option<u64>,
    /// Tools that one request may offer.
    pub max_tools: Option<u32>,
    /// The field that limits the output.
    pub output_cap: Option<OutputCap>,
    /// Whether a temperature may be set.
    pub temperature: Option<bool>,
    /// Whether `top_p` may be set.
    #[serde(deserialize_with = "top_p")]
    #[schemars(with = "Option<TopPOrSwitch>")]
    pub top_p: Option<TopP>,
    /// Whether texts may be given that end an answer.
    pub stop: Option<bool>,
    /// Whether a seed may be set.
    pub seed: Option<bool>,
    /// Whether a presence and a frequency penalty may be set.
    pub penalties: Option<bool>,
    /// Whether an answer can be constrained to JSON of any form.
    pub json_mode: Option<bool>,
    /// How thinking is requested.
    pub thinking: Option<ThinkingStyle>,
}

/// Bounds of a context window in tokens.
const MIN_WINDOW: u64 = 256;
const MAX_WINDOW: u64 = 1_000_000_000;

/// `true`, `false` or a word.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum ForcedOrSwitch {
    Switch(bool),
    Word(ForcedToolChoice),
}

fn forced<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<ForcedToolChoice>, D::Error> {
    Ok(Some(match ForcedOrSwitch::deserialize(deserializer)? {
        ForcedOrSwitch::Switch(false) => ForcedToolChoice::No,
        ForcedOrSwitch::Switch(true) => ForcedToolChoice::Yes,
        ForcedOrSwitch::Word(word) => word,
    }))
}

/// `true`, `false` or a word.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum TopPOrSwitch {
    Switch(bool),
    Word(TopP),
}

fn top_p<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TopP>, D::Error> {
    Ok(Some(match TopPOrSwitch::deserialize(deserializer)? {
        TopPOrSwitch::Switch(false) => TopP::No,
        TopPOrSwitch::Switch(true) => TopP::Yes,
        TopPOrSwitch::Word(word) => word,
    }))
}

fn window<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let tokens = u64::deserialize(deserializer)?;
    if (MIN_WINDOW..=MAX_WINDOW).contains(&tokens) {
        return Ok(Some(tokens));
    }
    Err(D::Error::custom(format!("{tokens} is not between {MIN_WINDOW} and {MAX_WINDOW}")))
}
