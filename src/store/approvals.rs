//! What parked runs wait for: the rows, the answers to them, and what becomes of an answer.
//!
//! No SQL here. A row is written with the event that asks and consumed once; a run whose last row
//! is answered goes back to the queue in the same transaction.

use chrono::{DateTime, Utc};
use serde_json::Value;
use strum::{EnumString, IntoStaticStr, VariantNames};
use uuid::Uuid;

use crate::event::{AuditRecord, Resolution, Resolved, WaitKind};

/// Where something that was asked for stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ApprovalStatus {
    /// Nobody has answered.
    Pending,
    /// The call may be executed, or the run go on.
    Approved,
    /// It may not.
    Denied,
    /// Nobody answered in time.
    Expired,
    /// The caller has executed its tool.
    Answered,
    /// It was found out what became of the call.
    Resolved,
    /// The run ended first.
    Void,
}

impl ApprovalStatus {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Where an answer leads.
    pub fn after(resolution: &Resolution) -> Self {
        match resolution {
            Resolution::Approved { .. } => Self::Approved,
            Resolution::Denied => Self::Denied,
            Resolution::Expired => Self::Expired,
            Resolution::Result { .. } => Self::Answered,
            Resolution::Happened { .. } | Resolution::DidNotHappen => Self::Resolved,
        }
    }
}

/// One thing that a run waits for, or waited for.
#[derive(Debug, Clone, PartialEq)]
pub struct ApprovalRecord {
    /// The run.
    pub run_id: Uuid,
    /// Its agent.
    pub agent: String,
    /// The number of the event that asks.
    pub seq: i64,
    /// The call, or the escalation's own id.
    pub call_id: Uuid,
    /// Who or what is waited for.
    pub kind: WaitKind,
    /// The tool; empty for an escalation.
    pub tool: String,
    /// What a decision is bound to.
    pub arguments: Value,
    /// Why, in words.
    pub reason: String,
    /// When it was asked for.
    pub at: DateTime<Utc>,
    /// When it is not waited for any longer.
    pub expires_at: Option<DateTime<Utc>>,
    /// Where it stands.
    pub status: ApprovalStatus,
    /// When it was answered.
    pub decided_at: Option<DateTime<Utc>>,
    /// Who answered.
    pub decided_by: Option<String>,
    /// Why, in their words.
    pub decision_reason: Option<String>,
    /// The answer.
    pub resolution: Option<Resolution>,
}

impl ApprovalRecord {
    /// The answer as an event, where there is one.
    pub fn resolved(&self) -> Option<Resolved> {
        Some(Resolved {
            call_id: self.call_id,
            kind: self.kind,
            resolution: self.resolution.clone()?,
            decided_by: self.decided_by.clone(),
            reason: self.decision_reason.clone(),
        })
    }
}

/// Which rows to list; absent means any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each field is the filter of that name")]
pub struct ApprovalFilter {
    pub status: Option<ApprovalStatus>,
    pub run_id: Option<Uuid>,
    pub call_id: Option<Uuid>,
}

/// What somebody says to a parked run.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// What it can be an answer to.
    pub kinds: &'static [WaitKind],
    /// The answer itself.
    pub resolution: Resolution,
    /// Who gives it.
    pub decided_by: String,
    /// Why, in their words.
    pub reason: Option<String>,
    /// Written with it, where it is a decision.
    pub audit: Option<AuditRecord>,
}
