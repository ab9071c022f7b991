//! What the gate, the budget and the rate limits knew of a run when one of its calls was judged.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::run::{Label, Labels, Usd};

/// What else a call was judged by, in addition to its actions. What is zero or unknown is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Circumstances {
    /// What the run had read.
    #[serde(skip_serializing_if = "Labels::are_none")]
    #[schema(value_type = Vec<Label>)]
    pub labels: Labels,
    /// What the run had used of each budget that is limited, without this call.
    #[serde(skip_serializing_if = "BudgetSpent::is_nothing")]
    pub used: BudgetSpent,
    /// The state of the caller's limit of calls a minute, this call included.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub rate: Option<CallRate>,
}

/// What a run had used of its budget.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct BudgetSpent {
    /// Model responses.
    #[serde(skip_serializing_if = "is_zero")]
    pub iterations: u64,
    /// Calls of tools.
    #[serde(skip_serializing_if = "is_zero")]
    pub tool_calls: u64,
    /// Input plus output tokens.
    #[serde(skip_serializing_if = "is_zero")]
    pub total_tokens: u64,
    /// US dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub cost_usd: Option<Usd>,
    /// Different files modified.
    #[serde(skip_serializing_if = "is_zero")]
    pub files_modified: u64,
    /// Lines written or replaced.
    #[serde(skip_serializing_if = "is_zero")]
    pub lines_changed: u64,
    /// Requests to the network.
    #[serde(skip_serializing_if = "is_zero")]
    pub network_requests: u64,
}

/// The state of a limit of calls a minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallRate {
    /// Calls a minute.
    pub limit: u32,
    /// Calls that could be made at once, at least.
    pub remaining: u32,
}

impl Circumstances {
    /// Whether all of it is absent.
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

impl BudgetSpent {
    fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}
