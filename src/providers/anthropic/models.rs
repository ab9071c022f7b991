//! What Anthropic's models take, told from their names.
//!
//! Thinking changed twice: models before 4.6 know only a budget, those from 4.7 on only `adaptive` with
//! an effort and no sampling parameters; 4.6 takes both. Schema-bound answers came with 4.5. Sources:
//! platform.claude.com, "Extended thinking", "Adaptive thinking", "Structured outputs", autumn 2026.
//! A model of another name (others speak this API, too) is asked for exactly what the definition says.

use crate::run::{Effort, Thinking};

/// The least budget that the API takes, in tokens.
const LEAST_BUDGET: u32 = 1024;

/// How a model is asked to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// With this many tokens.
    Enabled(u32),
    /// As much as it finds right.
    Adaptive(Option<Effort>),
}

/// Major and minor number in a name like `claude-sonnet-4-5-20250929` or `claude-3-7-sonnet-latest`;
/// a Claude without numbers is newer than all that we know. `None`: not a Claude.
fn generation(model: &str) -> Option<(u32, u32)> {
    let name = &model[model.find("claude")?..];
    let numbers = name.split('-').filter(|part| part.len() <= 2).filter_map(|part| part.parse().ok());
    let mut numbers = numbers.take(2);
    Some(numbers.next().map_or((u32::MAX, 0), |major| (major, numbers.next().unwrap_or(0))))
}

/// What to ask this model for.
pub(super) fn mode(model: &str, thinking: Thinking) -> Mode {
    let generation = generation(model);
    match (thinking.budget_tokens, thinking.effort) {
        (budget, effort) if generation.is_some_and(|generation| generation < (4, 6)) => {
            Mode::Enabled(budget.unwrap_or_else(|| budget_of(effort)).max(LEAST_BUDGET))
        }
        (budget, effort) if generation.is_some_and(|generation| generation > (4, 6)) => {
            Mode::Adaptive(effort.or_else(|| budget.map(effort_of)))
        }
        (Some(budget), _) => Mode::Enabled(budget.max(LEAST_BUDGET)),
        (None, effort) => Mode::Adaptive(effort),
    }
}

/// Whether the model can be held to a schema by `output_config.format`.
pub(super) fn has_structured_output(model: &str) -> bool {
    generation(model).is_some_and(|generation| generation >= (4, 5))
}

/// Whether `temperature` may be sent.
pub(super) fn has_temperature(model: &str) -> bool {
    generation(model).is_none_or(|generation| generation <= (4, 6))
}

fn budget_of(effort: Option<Effort>) -> u32 {
    match effort {
        Some(Effort::Low) => 2048,
        None | Some(Effort::Medium) => 8192,
        Some(Effort::High) => 16_384,
        Some(Effort::Max) => 32_768,
    }
}

fn effort_of(budget: u32) -> Effort {
    match budget {
        ..4096 => Effort::Low,
        4096..16_384 => Effort::Medium,
        _ => Effort::High,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_generation() {
        let table = [
            ("claude-3-7-sonnet-20250219", Some((3, 7))),
            ("claude-3-haiku-20240307", Some((3, 0))),
            ("claude-opus-4-20250514", Some((4, 0))),
            ("claude-sonnet-4-5-20250929", Some((4, 5))),
            ("claude-opus-4-7", Some((4, 7))),
            ("claude-fable-5", Some((5, 0))),
            ("claude-fable-5-1", Some((5, 1))),
            ("claude-mythos-preview", Some((u32::MAX, 0))),
            ("anthropic.claude-haiku-4-5-v1", Some((4, 5))),
            ("deepseek-chat", None),
        ];
        for (model, expected) in table {
            assert_eq!(generation(model), expected, "{model}");
        }
    }

    #[test]
    fn thinking_is_asked_for_as_the_model_takes_it() {
        let ask = |budget_tokens, effort| Thinking { budget_tokens, effort };
        let table = [
            ("claude-sonnet-4-5", ask(Some(4000), None), Mode::Enabled(4000)),
            ("claude-sonnet-4-5", ask(Some(1), None), Mode::Enabled(1024)),
            ("claude-sonnet-4-5", ask(None, Some(Effort::High)), Mode::Enabled(16_384)),
            ("claude-sonnet-4-5", ask(None, None), Mode::Enabled(8192)),
            ("claude-opus-4-6", ask(Some(4000), Some(Effort::Max)), Mode::Enabled(4000)),
            ("claude-opus-4-6", ask(None, Some(Effort::Max)), Mode::Adaptive(Some(Effort::Max))),
            ("claude-opus-4-7", ask(Some(4000), None), Mode::Adaptive(Some(Effort::Low))),
            ("claude-fable-5", ask(None, None), Mode::Adaptive(None)),
            ("claude-fable-5", ask(Some(20_000), None), Mode::Adaptive(Some(Effort::High))),
            ("MiniMax-M2", ask(Some(4000), None), Mode::Enabled(4000)),
            ("MiniMax-M2", ask(None, None), Mode::Adaptive(None)),
        ];
        for (model, thinking, expected) in table {
            assert_eq!(mode(model, thinking), expected, "{model} {thinking:?}");
        }
    }
}
