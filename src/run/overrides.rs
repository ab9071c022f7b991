//! What a request narrows of its run. The bounds in the schemas are enforced by `engine::plan`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Budget, ClientTool, GivenCall, OnLimit, OnSessionBusy, ToolChoicePolicy, Usd};

/// Settings of a request that override those of the definition. They can only narrow: the smaller
/// of two limits wins, tools are intersected. Stored with the run, so that recovery makes the same
/// plan.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = RunOverrides)]
#[serde(default, deny_unknown_fields)]
pub struct Overrides {
    /// `provider/model`: the agent's own, or another one that its definition allows (`models`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256)]
    pub model: Option<String>,
    /// 0 to 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f64>,
    /// Model responses in the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_iterations: Option<u32>,
    /// Model responses in one attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_iterations_per_attempt: Option<u32>,
    /// Attempts at a valid output.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_attempts: Option<u32>,
    /// Calls executed of one response.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_tool_calls_per_iteration: Option<u32>,
    /// Seconds that one tool call may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub tool_call_timeout_seconds: Option<u64>,
    /// Consecutive failing calls that end the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub error_threshold: Option<u32>,
    /// Whether the model is asked to verify its first text answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_double_confirmation: Option<bool>,
    /// When the model must call a tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_choice: Option<ToolChoicePolicy>,
    /// Whether a tool choice that cannot be sent, or is ignored, is an error instead of a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict_tool_choice: Option<bool>,
    /// Whether one response may call several tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel_tool_calls: Option<bool>,
    /// Tools to offer, a subset of the definition's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 64)]
    pub tools: Option<Vec<String>>,
    /// Consumption caps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetOverrides>,
    /// What happens at a limit of iterations, calls, tokens or dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_limit: Option<OnLimit>,
    /// What happens if the session has another unfinished run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_session_busy: Option<OnSessionBusy>,
    /// Whether the first failing call ends the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throw_on_tool_failure: Option<bool>,
    /// Whether the calls after a blocked one are not executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_on_tool_block: Option<bool>,
    /// Skills that are active from the start, a subset of the definition's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_skills: Option<Vec<String>>,
    /// Whether the run is hidden from `recall`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub private: Option<bool>,
    /// Tools that the caller executes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 128)]
    pub client_tools: Option<Vec<ClientTool>>,
    /// The tool call of a run of the kind `call`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call: Option<GivenCall>,
}

/// Consumption caps of a request; the smaller of two wins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({"max_tool_calls": 20, "max_duration_seconds": 600}))]
#[serde(default, deny_unknown_fields)]
pub struct BudgetOverrides {
    /// Model responses in the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_iterations: Option<u64>,
    /// Wall-clock seconds from the run's start.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_duration_seconds: Option<u64>,
    /// Calls of real tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tool_calls: Option<u64>,
    /// Input plus output tokens of all model calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_total_tokens: Option<u64>,
    /// US dollars for all model calls; refused for a model without a price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd: Option<Usd>,
    /// Different files that tools create, change, move or delete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_files_modified: Option<u64>,
    /// Lines that tools write or replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_lines_changed: Option<u64>,
}

impl BudgetOverrides {
    /// Those that are less than a budget allows.
    #[must_use]
    pub fn below(self, budget: &Budget) -> Self {
        fn less<T: PartialOrd + Copy>(wanted: Option<T>, defined: Option<T>) -> Option<T> {
            wanted.filter(|wanted| defined.is_none_or(|defined| *wanted < defined))
        }
        Self {
            max_iterations: less(self.max_iterations, Some(budget.max_iterations)),
            max_duration_seconds: less(
                self.max_duration_seconds,
                Some(budget.max_duration_seconds),
            ),
            max_tool_calls: less(self.max_tool_calls, Some(budget.max_tool_calls)),
            max_total_tokens: less(self.max_total_tokens, budget.max_total_tokens),
            max_cost_usd: less(self.max_cost_usd, budget.max_cost_usd),
            max_files_modified: less(self.max_files_modified, budget.max_files_modified),
            max_lines_changed: less(self.max_lines_changed, Some(budget.max_lines_changed)),
        }
    }
}
