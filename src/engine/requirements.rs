//! Whether the models of an agent can do what it requires of them, before anything is started.
//!
//! Checked when a definition loads and when a request arrives. A run that has begun is not checked again.
//! Preferences are not checked either: a model that lacks them works without.

use std::borrow::Cow;

use super::answer_call::AnswerCall;
use crate::agents::Definition;
use crate::agents::definition::DriverKind;
use crate::providers::router::Router;
use crate::run::{Budget, Sampling, Thinking, ToolChoicePolicy};

/// What a definition or a request requires of its models.
#[derive(Debug, Clone, Copy)]
pub struct Requirements<'a> {
    /// The model, then its fallback models.
    pub models: &'a [String],
    /// How they choose their words.
    pub sampling: &'a Sampling,
    /// Whether and how much they think.
    pub thinking: Option<Thinking>,
    /// When they must call a tool.
    pub tool_choice: &'a ToolChoicePolicy,
    /// Whether that must be enforced.
    pub strict_tool_choice: bool,
    /// The setting that requires prices, if any.
    pub needs_price: Option<&'static str>,
    /// How many tools they are offered, where that is known.
    pub tools: usize,
    /// Whether they are asked for the final answer alone, and the first one perhaps only for it.
    pub writes_answer: bool,
}

/// A requirement that a model cannot meet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {reason}")]
pub struct Unsupported {
    /// `model`, `fallback_models`, `models`, `strict_tool_choice`, `max_cost_usd`, `stop_conditions`, `tools`
    /// or an option of `sampling`.
    pub setting: Cow<'static, str>,
    /// The index of the model, if the setting is a list.
    pub index: Option<usize>,
    /// The reason, as a clause.
    pub reason: String,
}

impl Unsupported {
    /// The key in the definition.
    pub fn key(&self) -> String {
        let setting = &*self.setting;
        match (setting, self.index) {
            ("max_cost_usd" | "stop_conditions", _) => format!("governance.budget.{setting}"),
            (_, Some(index)) => format!("{setting}[{index}]"),
            _ => setting.to_owned(),
        }
    }
}

/// Checks a definition's requirements.
///
/// # Errors
/// The first one that cannot be met.
pub fn check_definition(definition: &Definition, router: &Router) -> Result<(), Unsupported> {
    let models: Vec<String> =
        std::iter::once(&definition.model).chain(&definition.fallback_models).cloned().collect();
    let is_name = |provider: &str| !provider.contains(['*', '?', '[', '{']);
    let of_one_provider = |glob: &str| glob.split_once('/').is_some_and(|(it, _)| is_name(it));
    for (index, glob) in definition.models.iter().enumerate() {
        if of_one_provider(glob)
            && let Err(unknown) = router.resolve(glob)
        {
            let (setting, reason) = ("models".into(), unknown.to_string());
            return Err(Unsupported { setting, index: Some(index), reason });
        }
    }
    let demands = Requirements {
        models: &models,
        sampling: &definition.sampling,
        thinking: definition.thinking,
        tool_choice: &definition.tool_choice,
        strict_tool_choice: definition.strict_tool_choice
            && definition.driver == DriverKind::Native,
        needs_price: needs_price(&definition.governance.budget),
        tools: 0,
        writes_answer: false,
    };
    check(demands, router)?;
    let answer = AnswerCall::of(&definition.react, &models, &definition.sampling);
    answer.map_or(Ok(()), |AnswerCall { models, sampling, .. }| {
        let (models, sampling) = (&models, &sampling);
        let tool_choice = &ToolChoicePolicy::Auto;
        check(
            Requirements { models, sampling, tool_choice, writes_answer: true, ..demands },
            router,
        )
    })
}

/// The setting of a budget that requires prices of models, if any.
pub fn needs_price(budget: &Budget) -> Option<&'static str> {
    let weighs_cost =
        || budget.stop_conditions.iter().any(|condition| condition.when.contains("cost_usd"));
    match budget.max_cost_usd {
        Some(_) => Some("max_cost_usd"),
        None => weighs_cost().then_some("stop_conditions"),
    }
}

/// Why a model without a price cannot be used with a setting that requires prices.
pub(super) fn without_price(model: &str) -> String {
    format!("{model} has no price, so a budget in dollars cannot be kept; add [prices.\"{model}\"]")
}

/// Checks requirements.
///
/// # Errors
/// The first one that cannot be met.
pub fn check(requirements: Requirements<'_>, router: &Router) -> Result<(), Unsupported> {
    let demands_call = match requirements.tool_choice {
        ToolChoicePolicy::Auto | ToolChoicePolicy::None => false,
        ToolChoicePolicy::Required
        | ToolChoicePolicy::FirstRequired
        | ToolChoicePolicy::Tool(_) => true,
    };
    for (place, model) in requirements.models.iter().enumerate() {
        let setting = match place {
            0 if requirements.writes_answer => "react.final_model",
            0 => "model",
            _ => "fallback_models",
        };
        let index = place.checked_sub(1);
        let route = router.resolve(model).map_err(|unknown| Unsupported {
            setting: setting.into(),
            index,
            reason: unknown.to_string(),
        })?;
        if requirements.strict_tool_choice
            && demands_call
            && !route.capabilities.can_force(requirements.thinking)
        {
            let so = if route.capabilities.can_force(None) {
                " while it thinks within a budget"
            } else {
                ""
            };
            let reason =
                format!("{model} cannot be made to call a tool{so}; see `toolloop models`");
            return Err(Unsupported { setting: "strict_tool_choice".into(), index: None, reason });
        }
        let most = route.capabilities.max_tools.unwrap_or(u32::MAX);
        if u32::try_from(requirements.tools).unwrap_or(u32::MAX) > most {
            let count = requirements.tools;
            let reason = format!(
                "{count} tools are offered, those of the agent and of the request together, and {model} \
                 takes at most {most}"
            );
            return Err(Unsupported { setting: "tools".into(), index: None, reason });
        }
        let refused = route.capabilities.refuses(requirements.sampling, requirements.thinking);
        if let Some((option, why)) = refused {
            let of_answer = if requirements.writes_answer { "react.final_" } else { "" };
            let setting = format!("{of_answer}sampling.{option}").into();
            let reason = format!("{model} {why}; see `toolloop models`");
            return Err(Unsupported { setting, index: None, reason });
        }
        if let Some(setting) = requirements.needs_price.filter(|_| route.price.is_none()) {
            let reason = without_price(model);
            return Err(Unsupported { setting: setting.into(), index: None, reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::model::ProviderKind;
    use crate::providers::capabilities::{CapabilityTable, ModelPattern};
    use crate::providers::prices::{Price, PriceTable};
    use crate::providers::router::ProviderEntry;
    use crate::providers::scripted::Scripted;

    fn router() -> Router {
        let entry = |kind| ProviderEntry {
            kind,
            ..ProviderEntry::new(Arc::new(Scripted::new("nowhere".into())))
        };
        let providers = [
            ("gpt", ProviderKind::Openai),
            ("claude", ProviderKind::Anthropic),
            ("llama", ProviderKind::Ollama),
        ];
        let providers: BTreeMap<String, ProviderEntry> =
            providers.into_iter().map(|(name, kind)| (name.to_owned(), entry(kind))).collect();
        let priced = ModelPattern::parse("gpt/*").map(|pattern| (pattern, Price::default()));
        Router::new(providers)
            .with_tables(CapabilityTable::default(), PriceTable::new(priced.into_iter().collect()))
    }

    #[test]
    fn demands() {
        let router = router();
        let (forced, auto) = (ToolChoicePolicy::FirstRequired, ToolChoicePolicy::Auto);
        let table = [
            ("gpt/x", &forced, true, None, None),
            ("gpt/x claude/claude-haiku-4-5", &forced, true, None, None),
            ("claude/claude-haiku-4-5", &forced, true, Some(2048), Some("strict_tool_choice")),
            ("claude/claude-haiku-4-5", &forced, false, Some(2048), None),
            ("claude/claude-fable-5", &forced, true, None, Some("strict_tool_choice")),
            ("gpt/x llama/y", &forced, true, None, Some("strict_tool_choice")),
            ("llama/y", &auto, true, None, None),
            ("gpt/x nobody/y", &auto, false, None, Some("fallback_models")),
            ("nobody/y", &auto, false, None, Some("model")),
        ];
        for (models, tool_choice, strict_tool_choice, budget, expected) in table {
            let names: Vec<String> = models.split(' ').map(str::to_owned).collect();
            let thinking =
                budget.map(|tokens| Thinking { budget_tokens: Some(tokens), effort: None });
            let requirements = Requirements {
                models: &names,
                sampling: &Sampling::default(),
                thinking,
                tool_choice,
                strict_tool_choice,
                needs_price: None,
                tools: 0,
                writes_answer: false,
            };
            let found = check(requirements, &router)
                .err()
                .map(|unsupported| unsupported.setting.into_owned());
            assert_eq!(found.as_deref(), expected, "{models} {tool_choice:?} {budget:?}");
        }
        for (models, expected) in [
            ("gpt/x", None),
            ("llama/y", Some("max_cost_usd")),
            ("gpt/x llama/y", Some("max_cost_usd")),
        ] {
            let names: Vec<String> = models.split(' ').map(str::to_owned).collect();
            let needs_price = Some("max_cost_usd");
            let requirements = Requirements {
                models: &names,
                sampling: &Sampling::default(),
                thinking: None,
                tool_choice: &auto,
                strict_tool_choice: false,
                needs_price,
                tools: 0,
                writes_answer: false,
            };
            assert_eq!(
                check(requirements, &router).err().map(|unsupported| unsupported.key()),
                expected.map(|setting| format!("governance.budget.{setting}")),
                "{models}"
            );
        }
    }
}
