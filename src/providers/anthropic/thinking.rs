//! The `thinking` parameter of a Messages call.
//!
//! Older models take a token budget, newer ones an effort level, and some take both. The requested
//! thinking is translated into what the model accepts. Sources:
//! platform.claude.com, "Extended thinking", "Adaptive thinking", "Effort".

use crate::model::ThinkingStyle;
use crate::run::{Effort, Thinking};

/// The smallest budget that the API accepts, in tokens.
const LEAST_BUDGET: u32 = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Up to this many tokens.
    Enabled(u32),
    /// The model decides, at this level.
    Adaptive(Option<Effort>),
}

/// The parameter; `None` if the model cannot think.
pub(super) fn mode(style: ThinkingStyle, requested: Thinking) -> Option<Mode> {
    Some(match (style, requested.budget_tokens) {
        (ThinkingStyle::None, _) => return None,
        (ThinkingStyle::Budget, budget) => {
            Mode::Enabled(budget.unwrap_or_else(|| budget_of(requested.effort)).max(LEAST_BUDGET))
        }
        (ThinkingStyle::BudgetOrAdaptive, Some(budget)) => Mode::Enabled(budget.max(LEAST_BUDGET)),
        (_, budget) => Mode::Adaptive(requested.effort.or_else(|| budget.map(effort_of))),
    })
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
    fn thinking_is_asked_for_as_the_model_takes_it() {
        use ThinkingStyle::{Adaptive, Budget, BudgetOrAdaptive};
        let table = [
            (Budget, Some(4000), None, Mode::Enabled(4000)),
            (Budget, Some(1), None, Mode::Enabled(1024)),
            (Budget, None, Some(Effort::High), Mode::Enabled(16_384)),
            (Budget, None, None, Mode::Enabled(8192)),
            (BudgetOrAdaptive, Some(4000), Some(Effort::Max), Mode::Enabled(4000)),
            (BudgetOrAdaptive, None, Some(Effort::Max), Mode::Adaptive(Some(Effort::Max))),
            (Adaptive, Some(4000), None, Mode::Adaptive(Some(Effort::Low))),
            (Adaptive, Some(20_000), None, Mode::Adaptive(Some(Effort::High))),
            (Adaptive, None, None, Mode::Adaptive(None)),
        ];
        for (style, budget_tokens, effort, expected) in table {
            let wish = Thinking { budget_tokens, effort };
            assert_eq!(mode(style, wish), Some(expected), "{style:?} {wish:?}");
        }
        assert_eq!(mode(ThinkingStyle::None, Thinking::default()), None);
    }
}
