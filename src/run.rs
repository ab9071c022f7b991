//! Types of a run: kind, status, limits, outcome and totals.
//!
//! An [`Outcome`] holds the terminal status with its evidence: a completed run has an output, a
//! failed one an error. Limits can only be narrowed ([`Budget::narrowed_by`]).

mod action;
mod amounts;
mod consumption;
mod delegation;
mod given_call;
mod labels;
mod money;
mod outcome;
mod overrides;
mod period;
mod policies;
mod sampling;
mod trace;

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantNames};
use utoipa::ToSchema;

use crate::bounds::name;
use crate::message::Usage;

pub use action::{Action, ActionKind, Target};
pub use amounts::{Amounts, CapExceeded, Caps, Reserved};
pub use consumption::Consumption;
pub use delegation::Delegation;
pub use given_call::GivenCall;
pub use labels::{FlowDecision, FlowRule, Label, Labels, Yield};
pub use money::Usd;
pub use outcome::{Outcome, RunError, text_of};
pub use overrides::{BudgetOverrides, Overrides};
pub use period::Period;
pub use policies::{
    ClientTool, GovernanceMode, OF_CALLS, OF_RESULTS, OnInjection, OnLimit, OnSessionBusy,
    OnUnknownOutcome, SandboxLevel, StopAction, StopCondition, null_as_default,
};
pub use sampling::{Sampling, check_passed, named_option};
pub use trace::{RunOrigin, SpanPlace, TraceContext, TraceSpan, is_traceparent};

/// Single model call, the loop, or one tool call.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    IntoStaticStr,
    EnumString,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum RunKind {
    /// Exactly one model call, no tools.
    Single,
    /// Iterations until an output is accepted or a limit is reached.
    Iterative,
    /// One tool call that the caller gave; no model is asked.
    Call,
}

impl RunKind {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The kind of that name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Single, Self::Iterative, Self::Call].into_iter().find(|kind| kind.as_str() == name)
    }
}

/// How much a model thinks before it answers. Without a budget and an effort the model decides.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(default, deny_unknown_fields)]
pub struct Thinking {
    /// Tokens; providers want at least 1024.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_tokens: Option<u32>,
    /// For models that take a level instead of a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effort: Option<Effort>,
}

/// A level of thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    Low,
    Medium,
    High,
    Max,
}

/// The status of a run. The last three are terminal.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    IntoStaticStr,
    EnumString,
    VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum RunStatus {
    /// Waiting for a replica.
    Queued,
    /// Owned and driven by one replica.
    Running,
    /// Parked until an escalated call is approved or denied.
    AwaitingApproval,
    /// Parked until the caller posts the results of its own tools.
    AwaitingToolResults,
    /// Parked for a review: a crash left the outcome of a call unknown.
    NeedsReview,
    /// Ended with an output.
    Completed,
    /// Ended with an error.
    Failed,
    /// Ended by a request to cancel.
    Cancelled,
}

impl RunStatus {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether the run waits for an answer from outside, without an owner.
    pub fn is_parked(self) -> bool {
        matches!(self, Self::AwaitingApproval | Self::AwaitingToolResults | Self::NeedsReview)
    }

    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// Why a run ended.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    IntoStaticStr,
    EnumString,
    VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum TerminationReason {
    Completed,
    MaxIterations,
    ValidationFailed,
    InvalidResponse,
    SubmitBeforeOutput,
    Error,
    ToolFailure,
    Stuck,
    BudgetExceeded,
    DurationExceeded,
    ModelError,
    ModelRefused,
    ContextOverflow,
    Cancelled,
    Interrupted,
}

impl TerminationReason {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The stable `error.code` of the reason; `None` for `completed`.
    pub fn code(self) -> Option<&'static str> {
        Some(match self {
            Self::Completed => return None,
            Self::MaxIterations => "MAX_ITERATIONS",
            Self::ValidationFailed => "VALIDATION_FAILED",
            Self::InvalidResponse => "INVALID_RESPONSE",
            Self::SubmitBeforeOutput => "SUBMIT_BEFORE_OUTPUT",
            Self::Error => "TOOL_ERRORS",
            Self::ToolFailure => "TOOL_FAILURE",
            Self::Stuck => "STUCK",
            Self::BudgetExceeded => "BUDGET_EXCEEDED",
            Self::DurationExceeded => "DURATION_EXCEEDED",
            Self::ModelError => "MODEL_ERROR",
            Self::ModelRefused => "MODEL_REFUSED",
            Self::ContextOverflow => "CONTEXT_OVERFLOW",
            Self::Cancelled => "EXECUTION_CANCELLED",
            Self::Interrupted => "INTERRUPTED",
        })
    }
}

/// The effect of a tool call, which decides whether it may be repeated after a crash.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    JsonSchema,
    IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Effect {
    /// Changes nothing.
    Read,
    /// Repeating it with the same key changes nothing more.
    Idempotent,
    /// Must not be repeated without an explicit decision.
    Once,
}

impl Effect {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// How much an agent may do without approval, from the least.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
    JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Autonomy {
    /// Only calls that change nothing.
    ReadOnly,
    /// Destructive calls need approval.
    #[default]
    Supervised,
    /// Everything that the other rules allow.
    Full,
}

/// Limits of the loop; counts unless a unit is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = RunLimits)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Attempts at a valid output; 1 to 100.
    #[schemars(range(min = 1, max = 100))]
    pub max_attempts: u32,
    /// Model responses in a run; 1 to 10000.
    #[schemars(range(min = 1, max = 10_000))]
    pub max_iterations: u32,
    /// Model responses in one attempt; 1 to 10000.
    #[schemars(range(min = 1, max = 10_000))]
    pub max_iterations_per_attempt: u32,
    /// Calls executed of one response; 1 to 128.
    #[schemars(range(min = 1, max = 128))]
    pub max_tool_calls_per_iteration: u32,
    /// Seconds that one tool call may take; 1 to 86400. Default: 60, and for calls that delegate to
    /// another agent the rest of the run.
    #[schemars(range(min = 1, max = 86_400))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_timeout_seconds: Option<u64>,
    /// Consecutive failing calls that end the run; 1 to 1000.
    #[schemars(range(min = 1, max = 1_000))]
    pub error_threshold: u32,
}

impl Limits {
    /// The smaller of these and what a request asks for. Its own bound on the time of calls applies to
    /// each of them beside these.
    #[must_use]
    pub fn narrowed_by(self, wanted: &Overrides) -> Self {
        fn least<T: Ord>(defined: T, wanted: Option<T>) -> T {
            wanted.into_iter().fold(defined, Ord::min)
        }
        Self {
            max_attempts: least(self.max_attempts, wanted.max_attempts),
            max_iterations: least(self.max_iterations, wanted.max_iterations),
            max_iterations_per_attempt: least(
                self.max_iterations_per_attempt,
                wanted.max_iterations_per_attempt,
            ),
            max_tool_calls_per_iteration: least(
                self.max_tool_calls_per_iteration,
                wanted.max_tool_calls_per_iteration,
            ),
            tool_call_timeout_seconds: self
                .tool_call_timeout_seconds
                .map(|defined| least(defined, wanted.tool_call_timeout_seconds)),
            error_threshold: least(self.error_threshold, wanted.error_threshold),
        }
    }

    /// The limits as they are shown, with the default timeout of calls filled in.
    #[must_use]
    pub fn shown(self, longest_call_seconds: Option<u64>) -> Self {
        let seconds = self.call_seconds().min(longest_call_seconds.unwrap_or(u64::MAX));
        Self { tool_call_timeout_seconds: Some(seconds), ..self }
    }

    /// Seconds that one tool call may take, where it leaves no work to another agent.
    pub fn call_seconds(&self) -> u64 {
        self.tool_call_timeout_seconds.unwrap_or(60)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            max_iterations: 20,
            max_iterations_per_attempt: 15,
            max_tool_calls_per_iteration: 5,
            tool_call_timeout_seconds: None,
            error_threshold: 3,
        }
    }
}

/// Consumption caps of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = BudgetLimits)]
#[serde(default, deny_unknown_fields)]
pub struct Budget {
    /// Model responses in the run.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_iterations: u64,
    /// Wall-clock seconds from the run's start.
    #[schemars(range(min = 1, max = 31_536_000))]
    pub max_duration_seconds: u64,
    /// Calls of real tools.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_tool_calls: u64,
    /// Input plus output tokens of all model calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000_u64))]
    pub max_total_tokens: Option<u64>,
    /// US dollars for all model calls; needs a price for every model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd: Option<Usd>,
    /// Different files that tools create, change, move or delete; those of programs only where this is
    /// written.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000), extend("default" = 50))]
    #[schema(example = 50)]
    pub max_files_modified: Option<u64>,
    /// Lines that tools write or replace.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub max_lines_changed: u64,
    /// Stop conditions: expressions that end or pause the run, or emit a warning.
    #[schemars(length(max = 32))]
    pub stop_conditions: Vec<StopCondition>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            max_iterations: 100,
            max_duration_seconds: 3600,
            max_tool_calls: 200,
            max_total_tokens: None,
            max_cost_usd: None,
            max_files_modified: None,
            max_lines_changed: 5000,
            stop_conditions: Vec::new(),
        }
    }
}

/// Files that a run may modify, where nothing else is written.
const MAX_FILES: u64 = 50;

impl Budget {
    /// How many files may be modified.
    pub fn files(&self) -> u64 {
        self.max_files_modified.unwrap_or(MAX_FILES)
    }

    /// How many of the files that were modified count: what a build or a checkout makes is known only
    /// afterwards, and is bounded where a bound is written.
    pub fn counted_files(&self, used: &Consumption) -> u64 {
        if self.max_files_modified.is_some() { used.files() } else { used.files_of_tools() }
    }

    /// As it is shown, with what holds where nothing is written.
    #[must_use]
    pub fn shown(self) -> Self {
        Self { max_files_modified: Some(self.files()), ..self }
    }

    /// Takes the smaller of each two caps.
    #[must_use]
    pub fn narrowed_by(self, wanted: &BudgetOverrides) -> Self {
        let least = |defined: u64, wanted: Option<u64>| {
            wanted.map_or(defined, |wanted| wanted.min(defined))
        };
        Self {
            max_iterations: least(self.max_iterations, wanted.max_iterations),
            max_duration_seconds: least(self.max_duration_seconds, wanted.max_duration_seconds),
            max_tool_calls: least(self.max_tool_calls, wanted.max_tool_calls),
            max_total_tokens: self
                .max_total_tokens
                .into_iter()
                .chain(wanted.max_total_tokens)
                .min(),
            max_cost_usd: self.max_cost_usd.into_iter().chain(wanted.max_cost_usd).min(),
            max_files_modified: wanted
                .max_files_modified
                .map(|wanted| wanted.min(self.files()))
                .or(self.max_files_modified),
            max_lines_changed: least(self.max_lines_changed, wanted.max_lines_changed),
            stop_conditions: self.stop_conditions,
        }
    }
}

/// What a run has consumed, updated by every event ([`Totals::apply`]; the fold of the run adds how
/// long it waited).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Attempts started.
    pub attempts: u32,
    /// Model responses received.
    pub iterations: u32,
    /// The same by model, as `provider/model`.
    pub responses: BTreeMap<String, u32>,
    /// Tool calls, including blocked ones and those of unknown tools, but not those that a limit or
    /// a cancellation prevented.
    pub tool_calls_made: u32,
    /// Names of the executed tools.
    pub tools_used: BTreeSet<String>,
    /// Tokens and cost of everything, retries included.
    pub usage: Usage,
    /// Failed provider calls that were repeated.
    pub retries: u32,
    /// For the caller; they did not end the run.
    pub warnings: Vec<String>,
    /// The model that answered last, as `provider/model`.
    pub model: Option<String>,
    /// Whether the usage is more than that of one model's responses: of several models, or of
    /// summaries too.
    pub mixed_usage: bool,
    /// Use of files, commands and networks by tools.
    pub consumption: Consumption,
    /// What it has read.
    pub labels: Labels,
    /// How long it has waited for people, callers and children, which is not part of its duration.
    pub waited_ms: i64,
    /// Since when it waits, if it does.
    pub waiting_since: Option<DateTime<Utc>>,
}

/// What the runs have taken that one run started, and those that they started.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Descendants {
    pub usage: Usage,
    pub attempts: u64,
    pub iterations: u64,
    pub tool_calls: u64,
    /// Files modified. Each run counts its own.
    pub files_modified: u64,
    /// The rest of what their calls consumed.
    pub consumption: Consumption,
}

/// When the model must call a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = ToolChoice)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoicePolicy {
    /// The model decides.
    #[default]
    Auto,
    /// Never.
    None,
    /// In every model call.
    Required,
    /// In the first model call of each attempt.
    FirstRequired,
    /// This tool in the first model call of each attempt.
    Tool(String),
}

/// The caller who started a run; its scopes apply to the whole run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// API key id or token subject.
    pub subject: String,
    /// Every row belongs to one tenant; `^[a-z0-9][a-z0-9_-]{0,63}$`.
    pub tenant: String,
    /// Granted scopes, e.g. `agents:invoke`, `tools:execute`, `admin`.
    pub scopes: Vec<String>,
}

impl Caller {
    /// The local user, when authentication is off: administrator of the tenant `default`.
    pub fn local() -> Self {
        Self { subject: "local".into(), tenant: "default".into(), scopes: vec!["admin".into()] }
    }

    /// Whether the scopes allow executing a tool.
    pub fn may_execute(&self, tool: &str) -> bool {
        may_execute(&self.scopes, tool)
    }

    /// Whether a scope is granted; `admin` includes every scope.
    pub fn has(&self, scope: &str) -> bool {
        self.scopes.iter().any(|s| s == scope || s == "admin")
    }
}

/// Whether scopes allow executing a tool: `tools:execute`, `admin`, or `tools:` and its name, or
/// names with `*` in them. Of a scope's own names, whether they allow all of those.
pub fn may_execute(scopes: &[String], tool: &str) -> bool {
    scopes.iter().any(|scope| {
        scope == "tools:execute"
            || scope == "admin"
            || scope.strip_prefix("tools:").is_some_and(|names| name::means(names, tool))
    })
}
