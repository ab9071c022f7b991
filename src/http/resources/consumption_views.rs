//! What runs have consumed, as the API shows it: tokens and cost, and amounts beside their limits.

use serde::Serialize;
use utoipa::ToSchema;

use crate::message::Usage;
use crate::run::{Budget, Usd};
use crate::store::{RunRecord, SharedBudget};

/// Token counts and cost. Cached and cache-write tokens are part of the input tokens, reasoning
/// tokens are part of the output tokens.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Usage)]
pub(crate) struct UsageView {
    /// All input tokens.
    #[schema(example = 1000)]
    input_tokens: u64,
    /// All output tokens.
    #[schema(example = 234)]
    output_tokens: u64,
    /// Input tokens that were read from the provider's cache.
    cached_input_tokens: u64,
    /// Input tokens that were written to the provider's cache.
    cache_write_tokens: u64,
    /// Output tokens that were spent on reasoning.
    reasoning_tokens: u64,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    total_tokens: u64,
    /// Cost in US dollars; null if a model has no configured price.
    #[schema(example = 0.00054)]
    cost_usd: Option<f64>,
}

/// Consumption of a run and its limits.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RunBudget)]
pub(crate) struct BudgetView {
    /// What the run has consumed.
    pub(super) used: BudgetUsed,
    /// What the run may consume.
    pub(super) limits: Option<Budget>,
    /// What the run and all its descendants have consumed together; null if it delegated nothing
    /// or was itself delegated.
    pub(super) tree: Option<TreeUsed>,
}

/// What a run and all its descendants have consumed together.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RunTreeUsed)]
pub(crate) struct TreeUsed {
    /// Model responses.
    #[schema(example = 9)]
    iterations: u64,
    /// Tool calls.
    #[schema(example = 5)]
    tool_calls: u64,
    /// Input plus output tokens.
    #[schema(example = 4321)]
    total_tokens: u64,
    /// Cost in US dollars; null if a model has no configured price.
    #[schema(example = 0.00123)]
    cost_usd: Option<f64>,
    /// Files modified; a file that two of the runs modified counts for both.
    #[schema(example = 2)]
    files_modified: u64,
    /// Lines written or replaced.
    #[schema(example = 40)]
    lines_changed: u64,
    /// Requests to the network; absent where `governance.network.max_requests` is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    network_requests: Option<u64>,
}

/// What a run has consumed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BudgetUsed {
    /// Model responses.
    #[schema(example = 4)]
    iterations: u32,
    /// Seconds since the start of the run, up to its end, without the time in which it waited for
    /// people, callers or children.
    #[schema(example = 0.812)]
    duration_seconds: f64,
    /// Tool calls.
    #[schema(example = 3)]
    tool_calls: u32,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    total_tokens: u64,
    /// Cost in US dollars; null if a model has no configured price.
    #[schema(example = 0.00054)]
    cost_usd: Option<f64>,
    /// Files read, directories listed and searched.
    #[schema(example = 2)]
    files_read: u64,
    /// Write operations on files and directories.
    #[schema(example = 1)]
    files_written: u64,
    /// Distinct files created, changed, moved or deleted.
    #[schema(example = 1)]
    files_modified: u64,
    /// Lines written or replaced.
    #[schema(example = 12)]
    lines_changed: u64,
    /// Commands executed.
    #[schema(example = 0)]
    commands: u64,
    /// Network requests made by tools.
    #[schema(example = 0)]
    network_requests: u64,
}

impl From<&Usage> for UsageView {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.input_tokens,
            output_tokens: usage.output_tokens,
            cached_input_tokens: usage.cached_input_tokens,
            cache_write_tokens: usage.cache_write_tokens,
            reasoning_tokens: usage.reasoning_tokens,
            total_tokens: usage.total_tokens(),
            cost_usd: usage.cost_micro_usd.map(dollars),
        }
    }
}

impl From<&RunRecord> for BudgetUsed {
    fn from(record: &RunRecord) -> Self {
        let seconds = record.active().as_seconds_f64();
        Self {
            iterations: record.iterations,
            duration_seconds: (seconds * 1000.0).round() / 1000.0,
            tool_calls: record.tool_calls_made,
            total_tokens: record.usage.total_tokens(),
            cost_usd: record.usage.cost_micro_usd.map(dollars),
            files_read: record.consumption.files_read,
            files_written: record.consumption.files_written,
            files_modified: record.consumption.files(),
            lines_changed: record.consumption.lines_changed,
            commands: record.consumption.commands,
            network_requests: record.consumption.network_requests,
        }
    }
}

impl TreeUsed {
    /// Of a root run that has delegated.
    pub(super) fn of(record: &RunRecord, budget: &SharedBudget) -> Self {
        Self {
            iterations: budget.spent.iterations,
            tool_calls: budget.spent.tool_calls,
            total_tokens: budget.spent.tokens,
            cost_usd: record
                .usage
                .cost_micro_usd
                .map(|_| dollars(i64::try_from(budget.spent.micro_usd).unwrap_or(i64::MAX))),
            files_modified: budget.spent.files,
            lines_changed: budget.spent.lines,
            network_requests: budget.caps.requests.map(|_| budget.spent.requests),
        }
    }
}

fn dollars(micro: i64) -> f64 {
    Usd::from_micro(micro).dollars()
}
