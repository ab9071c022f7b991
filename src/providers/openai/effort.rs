//! The reasoning effort for models that take a level and no budget.

use crate::run::{Effort, Thinking};

/// The value for the API; `None` leaves the level to the model. A budget without a level becomes
/// the level that usually stays below it.
pub(in crate::providers) fn effort(thinking: Thinking) -> Option<&'static str> {
    match (thinking.effort, thinking.budget_tokens) {
        (None, None) => None,
        (Some(Effort::Low), _) | (None, Some(..=4095)) => Some("low"),
        (Some(Effort::Medium), _) | (None, Some(4096..=16_383)) => Some("medium"),
        (Some(Effort::High), _) | (None, Some(16_384..)) => Some("high"),
        (Some(Effort::Max), _) => Some("max"),
    }
}
