//! What a parked run waits for, and what became of it.
//!
//! A parked run has no owner. Whoever answers writes the answer beside the run; the replica that
//! takes the run over turns it into events.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{EnumString, IntoStaticStr, VariantNames};
use utoipa::ToSchema;
use uuid::Uuid;

/// Who or what a parked run waits for.
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
    /// Somebody who may approve a call.
    Approval,
    /// The caller, who executes the tool.
    Client,
    /// Somebody who finds out what became of a call that a crash left open.
    Review,
    /// Somebody who lets the run go on after a stop condition was met.
    Escalation,
}

impl WaitKind {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// One thing that a parked run waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Awaited {
    /// The call, or the escalation's own id.
    pub call_id: Uuid,
    /// Who or what is waited for.
    pub kind: WaitKind,
    /// The tool; empty for an escalation.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tool: String,
    /// The arguments that a decision is bound to.
    pub arguments: Value,
    /// Why, in words.
    pub reason: String,
    /// When it is not waited for any longer; a review is waited for until it comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<DateTime<Utc>>,
    /// The place of the stop condition in the definition, for an escalation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condition: Option<usize>,
}

/// What became of something that was waited for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resolved {
    /// The call, or the escalation's own id.
    pub call_id: Uuid,
    /// Who or what was waited for.
    pub kind: WaitKind,
    /// The answer.
    #[serde(flatten)]
    pub resolution: Resolution,
    /// Who answered: API key id or token subject; none where nobody did.
    pub decided_by: Option<String>,
    /// Why, in their words.
    pub reason: Option<String>,
}

/// An answer to a parked run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "resolution", rename_all = "snake_case")]
pub enum Resolution {
    /// The call may be executed, or the run go on.
    Approved {
        /// Other arguments than those that were shown.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        arguments: Option<Value>,
    },
    /// It may not.
    Denied,
    /// Nobody answered in time.
    Expired,
    /// The caller has executed its tool.
    Result {
        /// What the model reads.
        content: String,
        /// Whether the call failed.
        is_error: bool,
    },
    /// The call that a crash left open took effect.
    Happened {
        /// What it brought, where that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        result: Option<String>,
    },
    /// It did not, and is executed now.
    DidNotHappen,
}
