//! Capabilities of models: one table for all providers, shipped here and overridable in the
//! configuration.
//!
//! A row holds what a provider's API accepts for the models whose names match a pattern; the first
//! match wins, and the last row of each kind matches all. A wrong entry is a 400 from the provider,
//! so the table errs on the side of what works everywhere. [`super::router`] and the engine decide
//! what happens when a model lacks a capability.
//!
//! Sources: the models' pages on platform.claude.com and developers.openai.com, Ollama's API
//! document.

use serde::Serialize;

use crate::bounds::glob::Glob;
use crate::model::{
    CapabilityOverrides, ForcedToolChoice, OutputCap, ProviderKind, ThinkingStyle, TopP,
};
use crate::run::{Sampling, Thinking};

/// What a model supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "a row of a table of yes and no")]
pub struct Capabilities {
    /// Whether a tool call can be required.
    pub forced_tool_choice: ForcedToolChoice,
    /// Whether a call of a specific tool can be required.
    pub named_tool_choice: bool,
    /// Whether several calls in one answer can be switched off.
    pub parallel_switch: bool,
    /// Whether arguments can be constrained to a schema (`strict`).
    pub strict_schemas: bool,
    /// Whether parts of the request can be marked for a cache; false if the provider caches on its
    /// own.
    pub prompt_caching: bool,
    /// Whether an answer can be constrained to a JSON Schema.
    pub structured_output: bool,
    /// Tokens of input and output together, if known.
    pub context_window: Option<u64>,
    /// Tools that one request may offer, if that is bounded.
    pub max_tools: Option<u32>,
    pub output_cap: OutputCap,
    /// Whether a temperature may be set while the model does not think.
    pub temperature: bool,
    pub top_p: TopP,
    /// Whether texts may be given that end an answer.
    pub stop: bool,
    pub seed: bool,
    /// Whether a presence and a frequency penalty may be set.
    pub penalties: bool,
    /// Whether an answer can be constrained to JSON of any form.
    pub json_mode: bool,
    pub thinking: ThinkingStyle,
}

impl Capabilities {
    /// The common denominator of Chat Completions servers, for unknown models.
    pub const OPENAI: Self = Self {
        forced_tool_choice: ForcedToolChoice::Yes,
        named_tool_choice: true,
        parallel_switch: true,
        strict_schemas: false,
        prompt_caching: false,
        structured_output: true,
        context_window: None,
        max_tools: Some(128),
        output_cap: OutputCap::MaxCompletionTokens,
        temperature: true,
        top_p: TopP::Yes,
        stop: true,
        seed: true,
        penalties: true,
        json_mode: true,
        thinking: ThinkingStyle::Effort,
    };
    /// OpenAI's models without reasoning.
    const GPT: Self = Self {
        strict_schemas: true,
        context_window: Some(128_000),
        thinking: ThinkingStyle::None,
        ..Self::OPENAI
    };
    /// OpenAI's reasoning models, which accept no temperature but 1.
    const REASONING: Self = Self {
        context_window: Some(400_000),
        temperature: false,
        top_p: TopP::No,
        stop: false,
        penalties: false,
        thinking: ThinkingStyle::Effort,
        ..Self::GPT
    };
    /// Claude models with a thinking budget.
    pub const ANTHROPIC: Self = Self {
        forced_tool_choice: ForcedToolChoice::WithoutThinking,
        named_tool_choice: true,
        parallel_switch: true,
        strict_schemas: false,
        prompt_caching: true,
        structured_output: false,
        context_window: Some(200_000),
        max_tools: None,
        output_cap: OutputCap::MaxTokens,
        temperature: true,
        top_p: TopP::WithoutTemperature,
        stop: true,
        seed: false,
        penalties: false,
        json_mode: false,
        thinking: ThinkingStyle::Budget,
    };
    /// Claude models with adaptive thinking; they accept no sampling parameters.
    const ADAPTIVE: Self = Self {
        strict_schemas: true,
        structured_output: true,
        context_window: Some(1_000_000),
        temperature: false,
        top_p: TopP::No,
        thinking: ThinkingStyle::Adaptive,
        ..Self::ANTHROPIC
    };
    /// Models behind Ollama; the window is the `num_ctx` that we request.
    pub const OLLAMA: Self = Self {
        forced_tool_choice: ForcedToolChoice::No,
        named_tool_choice: false,
        parallel_switch: false,
        strict_schemas: false,
        prompt_caching: false,
        structured_output: true,
        context_window: Some(16_384),
        max_tools: None,
        output_cap: OutputCap::MaxTokens,
        temperature: true,
        top_p: TopP::Yes,
        stop: true,
        seed: true,
        penalties: true,
        json_mode: true,
        thinking: ThinkingStyle::Switch,
    };
    pub const SCRIPTED: Self =
        Self { strict_schemas: true, prompt_caching: true, max_tools: None, ..Self::OPENAI };

    fn overridden_by(self, row: &CapabilityOverrides) -> Self {
        Self {
            forced_tool_choice: row.forced_tool_choice.unwrap_or(self.forced_tool_choice),
            named_tool_choice: row.named_tool_choice.unwrap_or(self.named_tool_choice),
            parallel_switch: row.parallel_switch.unwrap_or(self.parallel_switch),
            strict_schemas: row.strict_schemas.unwrap_or(self.strict_schemas),
            prompt_caching: row.prompt_caching.unwrap_or(self.prompt_caching),
            structured_output: row.structured_output.unwrap_or(self.structured_output),
            context_window: row.context_window.or(self.context_window),
            max_tools: row.max_tools.or(self.max_tools),
            output_cap: row.output_cap.unwrap_or(self.output_cap),
            temperature: row.temperature.unwrap_or(self.temperature),
            top_p: row.top_p.unwrap_or(self.top_p),
            stop: row.stop.unwrap_or(self.stop),
            seed: row.seed.unwrap_or(self.seed),
            penalties: row.penalties.unwrap_or(self.penalties),
            json_mode: row.json_mode.unwrap_or(self.json_mode),
            thinking: row.thinking.unwrap_or(self.thinking),
        }
    }

    /// The first option that is set and that the model does not take, with what is wrong with it.
    pub fn refuses(
        &self,
        sampling: &Sampling,
        thinking: Option<Thinking>,
    ) -> Option<(&'static str, &'static str)> {
        const LEAST_TOP_P: f64 = 0.95;
        let thinks = thinking.is_some() && self.thinking != ThinkingStyle::None;
        let has = |option: &str| match option {
            "top_p" => self.top_p != TopP::No,
            "stop" => self.stop,
            "seed" => self.seed,
            "presence_penalty" | "frequency_penalty" => self.penalties,
            _ => true, // a temperature is a preference
        };
        if let Some(option) = sampling.set().find(|option| !has(option)) {
            return Some((option, "does not take it"));
        }
        let top_p = sampling.top_p.filter(|_| self.top_p == TopP::WithoutTemperature)?;
        if sampling.temperature.is_some() {
            return Some(("top_p", "takes either a temperature or top_p"));
        }
        (thinks && top_p < LEAST_TOP_P)
            .then_some(("top_p", "takes no top_p below 0.95 while it thinks"))
    }

    /// Whether a call can be required of a model with this thinking.
    pub fn can_force(&self, thinking: Option<Thinking>) -> bool {
        let has_budget = |thinking: Thinking| match self.thinking {
            ThinkingStyle::None | ThinkingStyle::Adaptive => false,
            ThinkingStyle::BudgetOrAdaptive => thinking.budget_tokens.is_some(),
            ThinkingStyle::Budget | ThinkingStyle::Effort | ThinkingStyle::Switch => true,
        };
        match self.forced_tool_choice {
            ForcedToolChoice::No => false,
            ForcedToolChoice::Yes => true,
            ForcedToolChoice::WithoutThinking => !thinking.is_some_and(has_budget),
        }
    }
}

const SHIPPED: &[(ProviderKind, &str, Capabilities)] = {
    use ProviderKind::{Anthropic, Ollama, Openai, OpenaiResponses, Scripted};
    const GPT: Capabilities = Capabilities::GPT;
    const REASONING: Capabilities = Capabilities::REASONING;
    const ADAPTIVE: Capabilities = Capabilities::ADAPTIVE;
    const ANTHROPIC: Capabilities = Capabilities::ANTHROPIC;
    const EITHER: Capabilities = Capabilities {
        temperature: true,
        top_p: TopP::WithoutTemperature,
        thinking: ThinkingStyle::BudgetOrAdaptive,
        ..ADAPTIVE
    };
    const UNFORCED: Capabilities =
        Capabilities { forced_tool_choice: ForcedToolChoice::No, ..ADAPTIVE };
    const PLAIN: Capabilities = Capabilities { thinking: ThinkingStyle::None, ..ANTHROPIC };
    const WITH_STRICT: Capabilities =
        Capabilities { strict_schemas: true, structured_output: true, ..ANTHROPIC };
    /// Responses has neither stops nor a seed nor penalties.
    const fn responses(row: Capabilities) -> Capabilities {
        Capabilities { stop: false, seed: false, penalties: false, ..row }
    }
    /// The o series rejects a parallel switch.
    const O_SERIES: Capabilities =
        Capabilities { parallel_switch: false, context_window: Some(200_000), ..REASONING };
    &[
        (Openai, "gpt-4.1*", Capabilities { context_window: Some(1_047_576), ..GPT }),
        (Openai, "gpt-4o*", GPT),
        (Openai, "chatgpt-4o*", GPT),
        (
            Openai,
            "gpt-4-turbo*",
            Capabilities { strict_schemas: false, structured_output: false, ..GPT },
        ),
        (
            Openai,
            "gpt-3.5*",
            Capabilities {
                strict_schemas: false,
                structured_output: false,
                context_window: Some(16_385),
                ..GPT
            },
        ),
        (Openai, "gpt-5-chat*", GPT),
        // Chat Completions refuses these models' tools together with an effort; Responses takes
        // both.
        (Openai, "gpt-5.6*", Capabilities { thinking: ThinkingStyle::None, ..REASONING }),
        (Openai, "gpt-5*", REASONING),
        (Openai, "o[134]*", O_SERIES),
        (Openai, "*", Capabilities::OPENAI),
        (
            OpenaiResponses,
            "gpt-4.1*",
            responses(Capabilities { context_window: Some(1_047_576), ..GPT }),
        ),
        (OpenaiResponses, "gpt-4o*", responses(GPT)),
        (OpenaiResponses, "gpt-5*", responses(REASONING)),
        (OpenaiResponses, "codex-*", responses(REASONING)),
        (OpenaiResponses, "o[134]*", responses(O_SERIES)),
        (OpenaiResponses, "*", responses(Capabilities::OPENAI)),
        (Anthropic, "claude-fable-*", UNFORCED),
        (Anthropic, "claude-mythos-*", UNFORCED),
        (Anthropic, "claude-opus-4-[78]*", ADAPTIVE),
        (Anthropic, "claude-opus-4-6*", EITHER),
        (Anthropic, "claude-sonnet-4-6*", EITHER),
        (Anthropic, "claude-{opus,sonnet,haiku}-[5-9]*", ADAPTIVE),
        (Anthropic, "claude-opus-4-[15]*", WITH_STRICT),
        (Anthropic, "claude-sonnet-4-5*", WITH_STRICT),
        (Anthropic, "claude-haiku-4-5*", WITH_STRICT),
        (Anthropic, "claude-3-7-*", ANTHROPIC),
        (Anthropic, "claude-3-*", PLAIN),
        (Anthropic, "*", ANTHROPIC),
        (Ollama, "*", Capabilities::OLLAMA),
        (Scripted, "*", Capabilities::SCRIPTED),
    ]
};

/// The shipped capabilities with the operator's overrides.
#[derive(Debug, Clone)]
pub struct CapabilityTable {
    shipped: Vec<(ProviderKind, Glob, Capabilities)>,
    /// Sorted by length of the pattern, so that more specific ones come later.
    overrides: Vec<(ModelPattern, CapabilityOverrides)>,
}

impl Default for CapabilityTable {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl CapabilityTable {
    /// If several patterns match a model, the longest one wins, field by field.
    pub fn new(mut overrides: Vec<(ModelPattern, CapabilityOverrides)>) -> Self {
        overrides.sort_by_key(|(pattern, _)| pattern.length());
        let compiled = |row: &(ProviderKind, &str, Capabilities)| {
            let (kind, pattern, capabilities) = *row;
            Some((kind, Glob::of_names(pattern).ok()?, capabilities))
        };
        Self { shipped: SHIPPED.iter().filter_map(compiled).collect(), overrides }
    }

    pub fn of(&self, kind: ProviderKind, provider: &str, model: &str) -> Capabilities {
        let row =
            self.shipped.iter().find(|(of, pattern, _)| *of == kind && pattern.is_match(model));
        let shipped = row.map_or(Capabilities::OPENAI, |(_, _, capabilities)| *capabilities);
        let overrides =
            self.overrides.iter().filter(|(pattern, _)| pattern.matches(provider, model));
        overrides.fold(shipped, |capabilities, (_, row)| capabilities.overridden_by(row))
    }
}

/// The shipped rows: kind, pattern, capabilities.
pub fn shipped() -> impl Iterator<Item = (ProviderKind, &'static str, Capabilities)> {
    SHIPPED.iter().copied()
}

/// A provider's name and a glob over the names of its models.
#[derive(Debug, Clone)]
pub struct ModelPattern {
    provider: String,
    model: Glob,
}

impl ModelPattern {
    /// Reads `provider/pattern`; `None` if it has no slash or the pattern is not a glob.
    pub fn parse(text: &str) -> Option<Self> {
        let (provider, model) = text.split_once('/')?;
        Some(Self { provider: provider.to_owned(), model: Glob::of_names(model).ok()? })
    }

    pub fn matches(&self, provider: &str, model: &str) -> bool {
        self.provider == provider && (self.model.written() == model || self.model.is_match(model))
    }

    /// A longer pattern is more specific.
    pub(super) fn length(&self) -> usize {
        self.model.written().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: ProviderKind, model: &str) -> Capabilities {
        CapabilityTable::default().of(kind, "p", model)
    }

    #[test]
    fn every_shipped_pattern_compiles_and_every_kind_ends_with_all() {
        assert_eq!(CapabilityTable::default().shipped.len(), SHIPPED.len());
        for (kind, _, _) in SHIPPED {
            let last =
                SHIPPED.iter().rfind(|(of, _, _)| of == kind).map(|(_, pattern, _)| *pattern);
            assert_eq!(last, Some("*"), "{kind:?}");
        }
    }

    #[test]
    fn capabilities_of_model_families() {
        use ProviderKind::{Anthropic, Ollama, Openai, OpenaiResponses};
        use ThinkingStyle::{Adaptive, Budget, BudgetOrAdaptive, Effort, None, Switch};
        let table = [
            (Openai, "gpt-4.1-mini", ForcedToolChoice::Yes, true, None, Some(1_047_576)),
            (Openai, "gpt-4o-2024-08-06", ForcedToolChoice::Yes, true, None, Some(128_000)),
            (Openai, "gpt-5.2", ForcedToolChoice::Yes, false, Effort, Some(400_000)),
            (Openai, "gpt-5.6-luna", ForcedToolChoice::Yes, false, None, Some(400_000)),
            (OpenaiResponses, "gpt-5.6-luna", ForcedToolChoice::Yes, false, Effort, Some(400_000)),
            (Openai, "o4-mini", ForcedToolChoice::Yes, false, Effort, Some(200_000)),
            (Openai, "meta-llama/llama-4", ForcedToolChoice::Yes, true, Effort, Option::None),
            (Anthropic, "claude-fable-5", ForcedToolChoice::No, false, Adaptive, Some(1_000_000)),
            (
                Anthropic,
                "claude-mythos-preview",
                ForcedToolChoice::No,
                false,
                Adaptive,
                Some(1_000_000),
            ),
            (
                Anthropic,
                "claude-opus-4-8",
                ForcedToolChoice::WithoutThinking,
                false,
                Adaptive,
                Some(1_000_000),
            ),
            (
                Anthropic,
                "claude-opus-5-5",
                ForcedToolChoice::WithoutThinking,
                false,
                Adaptive,
                Some(1_000_000),
            ),
            (
                Anthropic,
                "claude-sonnet-4-6",
                ForcedToolChoice::WithoutThinking,
                true,
                BudgetOrAdaptive,
                Some(1_000_000),
            ),
            (
                Anthropic,
                "claude-haiku-4-5-20251001",
                ForcedToolChoice::WithoutThinking,
                true,
                Budget,
                Some(200_000),
            ),
            (
                Anthropic,
                "claude-3-5-haiku-latest",
                ForcedToolChoice::WithoutThinking,
                true,
                None,
                Some(200_000),
            ),
            (Ollama, "qwen3:4b", ForcedToolChoice::No, true, Switch, Some(16_384)),
        ];
        for (kind, model, forcing, temperature, thinking, window) in table {
            let found = of(kind, model);
            let found =
                (found.forced_tool_choice, found.temperature, found.thinking, found.context_window);
            assert_eq!(found, (forcing, temperature, thinking, window), "{model}");
        }
        assert!(!of(Openai, "o3-mini").parallel_switch && of(Openai, "gpt-5").parallel_switch);
    }

    #[test]
    fn thinking_within_a_budget_forbids_forcing() {
        let budget = Some(Thinking { budget_tokens: Some(2048), effort: None });
        let (freely, not_at_all) = (Some(Thinking::default()), None);
        let table = [
            ("claude-haiku-4-5", budget, false),
            ("claude-haiku-4-5", freely, false),
            ("claude-haiku-4-5", not_at_all, true),
            ("claude-sonnet-4-6", budget, false),
            ("claude-sonnet-4-6", freely, true),
            ("claude-opus-4-7", budget, true),
            ("claude-fable-5", not_at_all, false),
        ];
        for (model, thinking, expected) in table {
            assert_eq!(
                of(ProviderKind::Anthropic, model).can_force(thinking),
                expected,
                "{model} {thinking:?}"
            );
        }
        assert!(of(ProviderKind::Openai, "gpt-5").can_force(budget));
    }

    #[test]
    fn the_longest_pattern_wins_field_by_field() {
        let window = |tokens| CapabilityOverrides {
            context_window: Some(tokens),
            ..CapabilityOverrides::default()
        };
        let unforced =
            CapabilityOverrides { forced_tool_choice: Some(ForcedToolChoice::No), ..window(1) };
        let rows = [
            ("p/my-model", window(3)),
            ("p/*", unforced),
            ("p/my-*", window(2)),
            ("q/*", window(9)),
        ];
        let rows = rows.map(|(pattern, row)| (ModelPattern::parse(pattern).unwrap(), row));
        let table = CapabilityTable::new(rows.into());
        for (model, tokens) in [("my-model", 3), ("my-other", 2), ("gpt-4.1", 1)] {
            let found = table.of(ProviderKind::Openai, "p", model);
            assert_eq!(
                (found.context_window, found.forced_tool_choice),
                (Some(tokens), ForcedToolChoice::No),
                "{model}"
            );
        }
        assert!(ModelPattern::parse("no-slash").is_none() && ModelPattern::parse("p/[").is_none());
    }
}
