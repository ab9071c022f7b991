//! Pending requests of a parked run and their answers.
//!
//! A parked run has no owner. An answer is stored next to the run; the replica that claims the run
//! turns it into events.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{EnumString, IntoStaticStr, VariantNames};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Circumstances, InputRequired, InputResponse, InputResponses};
use crate::run::{Action, Label, Labels};

/// What a parked run waits for.
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
pub enum WaitKind {
    /// Approval of a call.
    Approval,
    /// The result of a tool that the caller executes, or input that a tool asks for.
    Client,
    /// A review of a call whose outcome is unknown after a crash.
    Review,
    /// Permission to continue after a stop condition was met.
    Escalation,
    /// The end of a child run that is parked itself.
    Child,
}

impl WaitKind {
    /// What a decision can be about.
    pub const DECISIONS: &[Self] = &[Self::Approval, Self::Escalation];
    /// What a caller executes.
    pub const RESULTS: &[Self] = &[Self::Client];
    /// Outcomes found by review.
    pub const REVIEWS: &[Self] = &[Self::Review];

    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A pending request of a parked run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Awaited {
    /// The call, or the escalation's own id.
    pub call_id: Uuid,
    /// What is waited for.
    pub kind: WaitKind,
    /// Its tool; absent for an escalation.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tool: String,
    /// A decision only applies to these arguments.
    pub arguments: Value,
    /// For the person who answers.
    pub reason: String,
    /// What a decision applies to, in addition to the arguments.
    #[serde(default, skip_serializing_if = "ApprovalBasis::is_empty")]
    pub basis: ApprovalBasis,
    /// Who is to be asked, by the definition's `owner.escalation_target`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub escalation_target: Option<String>,
    /// What the gate judged, for an approval and, as far as it was recorded, for a review.
    #[serde(default, skip_serializing_if = "super::is_unknown")]
    #[schema(value_type = Vec<Action>)]
    pub actions: Arc<[Action]>,
    /// What else the call was judged by.
    #[serde(default, skip_serializing_if = "Circumstances::are_none")]
    pub circumstances: Circumstances,
    /// What the gate decided, for a call that the caller executes: `allowed`, `warned`, or
    /// `escalated` after an approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub decision: Option<String>,
    /// Absent for a review, which does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub expires_at: Option<DateTime<Utc>>,
    /// Index of the stop condition in the definition, for an escalation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub condition: Option<usize>,
    /// The child run, for a call that waits for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub child_run_id: Option<Uuid>,
    /// What the tool asks for, for a call of a tool that is not the caller's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub input: Option<Box<InputRequired>>,
}

/// What a decision was based on, in addition to the arguments. If it has changed, the call is judged, and
/// if need be asked about, again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApprovalBasis {
    /// SHA-256 of the tool's declaration; absent for a tool of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub tool_hash: Option<String>,
    /// SHA-256 of what the call would do, if that is too much to be recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub actions_hash: Option<String>,
    /// What the run had read.
    #[serde(default, skip_serializing_if = "Labels::are_none")]
    #[schema(value_type = Vec<Label>)]
    pub labels: Labels,
}

impl ApprovalBasis {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A resolved request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Resolved {
    /// The call, or the escalation's own id.
    pub call_id: Uuid,
    /// What is waited for.
    pub kind: WaitKind,
    #[serde(flatten)]
    pub resolution: Resolution,
    /// API key id or token subject; null if the request expired.
    pub decided_by: Option<String>,
    /// Given with the answer.
    pub reason: Option<String>,
    /// When the answer was given or the request expired; the run may continue later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub decided_at: Option<DateTime<Utc>>,
    /// How long the child run that the call waited for was in progress, without its own waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub child_duration_ms: Option<u64>,
}

/// An answer to a parked run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "resolution", rename_all = "snake_case")]
pub enum Resolution {
    /// The call may be executed, or the run continue.
    Approved {
        /// Replace the requested arguments.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        arguments: Option<Value>,
        /// Labels that the run no longer has.
        #[serde(default, skip_serializing_if = "Labels::are_none")]
        #[schema(value_type = Vec<Label>)]
        clears: Labels,
        /// What the call does with the replaced arguments, as the gate judged it then.
        #[serde(default, skip_serializing_if = "super::is_unknown")]
        #[schema(value_type = Vec<Action>)]
        actions: Arc<[Action]>,
    },
    Denied,
    /// Not answered in time.
    Expired,
    /// The caller has executed its tool.
    Result {
        /// What the model reads.
        content: String,
        /// Whether the call failed.
        is_error: bool,
    },
    /// The call with the unknown outcome took effect.
    Happened {
        /// Its result, if known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        result: Option<String>,
    },
    /// The call did not take effect and is executed now.
    DidNotHappen,
    /// The child run has ended; its output is the call's result.
    ChildEnded,
    /// The input that the tool asked for; the call is made again with it.
    Input {
        /// The answers, by the names of the requests.
        #[schema(value_type = BTreeMap<String, InputResponse>)]
        responses: InputResponses,
    },
}

impl Resolution {
    /// The kinds of wait that it can answer; empty where it happens by itself.
    pub fn answers(&self) -> &'static [WaitKind] {
        match self {
            Self::Approved { .. } | Self::Denied => WaitKind::DECISIONS,
            Self::Result { .. } | Self::Input { .. } => WaitKind::RESULTS,
            Self::Happened { .. } | Self::DidNotHappen => WaitKind::REVIEWS,
            Self::Expired | Self::ChildEnded => &[],
        }
    }

    /// Whether the call is made again, under the decision that it was made with before.
    pub fn repeats(&self) -> bool {
        matches!(self, Self::DidNotHappen | Self::ChildEnded | Self::Input { .. })
    }

    /// The arguments that an approver has put in the place of the requested ones.
    pub fn edited(&self) -> Option<&Value> {
        match self {
            Self::Approved { arguments, .. } => arguments.as_ref(),
            Self::Denied
            | Self::Expired
            | Self::Result { .. }
            | Self::Happened { .. }
            | Self::DidNotHappen
            | Self::ChildEnded
            | Self::Input { .. } => None,
        }
    }
}
