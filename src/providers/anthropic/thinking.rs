//! The `thinking` parameter of a Messages call.
//!
//! Older models take a token budget, newer ones an effort level, and some take both. The requested
//! thinking is translated into what the model accepts. Sources:
//! platform.claude.com, "Extended thinking", "Adaptive thinking", "Effort".

use crate::model::ThinkingStyle;
use crate::run::{Effort, Thinking};

/// The smallest budget that the API accepts, in tokens.
const LEAST_BUDGET: u32 = 1024;
/// The smallest answer that is worth thinking about, in tokens.
const LEAST_ANSWER: u32 = 256;

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

/// The budget and `max_tokens`, which counts both thinking and answer. An output cap that leaves no
/// room for the answer is taken as the cap of the answer alone. If only `left` tokens are left, both
/// shrink; if that leaves too little for thinking, there is none.
pub(super) fn within(budget: u32, cap: u32, left: Option<u32>) -> (Option<u32>, u32) {
    let wanted = if cap > budget { cap } else { cap.saturating_add(budget) };
    let is_short = |left: &u32| *left < wanted || *left == wanted && wanted - budget < LEAST_ANSWER;
    let Some(left) = left.filter(is_short) else { return (Some(budget), wanted) };
    let budget = budget.min((left / 2).max(LEAST_BUDGET));
    if budget.saturating_add(LEAST_ANSWER) <= left {
        (Some(budget), left)
    } else {
        (None, cap.min(left).max(1))
    }
}

/// The tokens that thinking takes in addition to an answer of at most `cap` tokens.
pub(in crate::providers) fn beside(style: ThinkingStyle, requested: Thinking, cap: u32) -> u32 {
    match mode(style, requested) {
        Some(Mode::Enabled(budget)) if cap <= budget => budget,
        _ => 0,
    }
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

    #[test]
    fn thinking_keeps_within_what_is_left() {
        // Budget | cap | left | budget and `max_tokens` that are sent.
        let table = [
            (2000, 4000, None, (Some(2000), 4000)),
            (4000, 4000, None, (Some(4000), 8000)),
            (4000, 4000, Some(8001), (Some(4000), 8000)),
            (4000, 4000, Some(8000), (Some(4000), 8000)),
            (4000, 4000, Some(6000), (Some(3000), 6000)),
            (2000, 4000, Some(5000), (Some(2000), 4000)),
            (2000, 2000, Some(2000), (Some(1024), 2000)),
            (2000, 2001, Some(2001), (Some(1024), 2001)),
            (2000, 2756, Some(2756), (Some(2000), 2756)),
            (2000, 2255, Some(2255), (Some(1127), 2255)),
            (2000, 1280, Some(1280), (Some(1024), 1280)),
            (2000, 1279, Some(1279), (None, 1279)),
            (2000, 256, Some(256), (None, 256)),
            (16_384, 2206, Some(2206), (Some(1103), 2206)),
            (1024, 300, Some(900), (None, 300)),
            (1024, 1, Some(0), (None, 1)),
            (u32::MAX, u32::MAX, None, (Some(u32::MAX), u32::MAX)),
        ];
        for (budget, cap, left, expected) in table {
            assert_eq!(within(budget, cap, left), expected, "{budget} {cap} {left:?}");
        }
    }

    #[test]
    fn thinking_comes_beside_an_answer_that_it_leaves_no_room_for() {
        use ThinkingStyle::{Adaptive, Budget};
        let wish = Thinking { budget_tokens: Some(2000), effort: None };
        for (style, cap, expected) in
            [(Budget, 2000, 2000), (Budget, 2001, 0), (Adaptive, 1, 0), (ThinkingStyle::None, 1, 0)]
        {
            assert_eq!(beside(style, wish, cap), expected, "{style:?} {cap}");
        }
    }
}
