//! Converts the configured prices and capabilities to the types of `providers`.
//!
//! `config` and `providers` do not import each other. Keys were validated with the configuration.

use crate::config::tables::{
    ForcedToolChoice, ForcedToolChoiceWord, ModelCapabilities, ModelPrice, OutputCapField,
    ThinkingStyleName,
};
use crate::config::{Config, Model, ModelApi, ModelServer};
use crate::providers::capabilities::{
    CapabilityTable, Corrections, Forcing, ModelPattern, OutputCap, ThinkingStyle,
};
use crate::providers::prices::{Price, PriceTable};

/// The shipped table with corrections. A context window in `[prices]`, or Ollama's `num_ctx`, is a
/// correction, too; one in `[capabilities]` has precedence.
pub(super) fn capabilities(config: &Config) -> CapabilityTable {
    let window = |key: &str, window: u64| {
        let context_window = Some(window);
        Some((ModelPattern::parse(key)?, Corrections { context_window, ..Corrections::default() }))
    };
    let loaded = config.models.iter().filter_map(|(name, model)| match model {
        Model::Server(ModelServer { api: ModelApi::Ollama { num_ctx }, .. }) => {
            window(&format!("{name}/*"), u64::from(*num_ctx))
        }
        _ => None,
    });
    let priced = config.prices.iter().filter_map(|(key, price)| window(key, price.context_window?));
    let rows = config
        .capabilities
        .iter()
        .filter_map(|(key, row)| Some((ModelPattern::parse(key)?, corrections(row))));
    CapabilityTable::new(loaded.chain(priced).chain(rows).collect())
}

pub(super) fn prices(config: &Config) -> PriceTable {
    let rows =
        config.prices.iter().filter_map(|(key, row)| Some((ModelPattern::parse(key)?, price(row))));
    PriceTable::new(rows.collect())
}

fn price(row: &ModelPrice) -> Price {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to 10^6 dollars, checked"
    )]
    let micro = |dollars: f64| (dollars * 1e6).round() as u64;
    Price {
        input: micro(row.input),
        cached_input: micro(row.cached_input.unwrap_or(row.input)),
        cache_write: micro(row.cache_write.unwrap_or(row.input)),
        output: micro(row.output),
    }
}

fn corrections(row: &ModelCapabilities) -> Corrections {
    Corrections {
        forced_tool_choice: row.forced_tool_choice.map(|forced| match forced {
            ForcedToolChoice::Switch(false) | ForcedToolChoice::Word(ForcedToolChoiceWord::No) => {
                Forcing::No
            }
            ForcedToolChoice::Switch(true) | ForcedToolChoice::Word(ForcedToolChoiceWord::Yes) => {
                Forcing::Yes
            }
            ForcedToolChoice::Word(ForcedToolChoiceWord::WithoutThinking) => {
                Forcing::WithoutThinking
            }
        }),
        named_tool_choice: row.named_tool_choice,
        parallel_switch: row.parallel_switch,
        strict_schemas: row.strict_schemas,
        prompt_caching: row.prompt_caching,
        structured_output: row.structured_output,
        context_window: row.context_window,
        output_cap: row.output_cap.map(|field| match field {
            OutputCapField::MaxTokens => OutputCap::MaxTokens,
            OutputCapField::MaxCompletionTokens => OutputCap::MaxCompletionTokens,
        }),
        temperature: row.temperature,
        thinking: row.thinking.map(|style| match style {
            ThinkingStyleName::None => ThinkingStyle::None,
            ThinkingStyleName::Effort => ThinkingStyle::Effort,
            ThinkingStyleName::Budget => ThinkingStyle::Budget,
            ThinkingStyleName::BudgetOrAdaptive => ThinkingStyle::BudgetOrAdaptive,
            ThinkingStyleName::Adaptive => ThinkingStyle::Adaptive,
            ThinkingStyleName::Switch => ThinkingStyle::Switch,
        }),
    }
}
