//! What the audit log keeps of a call.

use chrono::{DateTime, Utc};
use uuid::Uuid;

/// Parts of names of arguments whose values are neither audited nor remembered.
pub const SECRET_NAMES: [&str; 11] = [
    "token",
    "password",
    "passwd",
    "secret",
    "api_key",
    "apikey",
    "api-key",
    "authorization",
    "private_key",
    "privatekey",
    "private-key",
];

/// An entry of the audit log: a decision and, if the call was executed, its outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRecord {
    pub at: DateTime<Utc>,
    pub call_id: Uuid,
    pub tool: String,
    /// The rule that decided; `none` if no rule objected.
    pub rule: String,
    /// `allowed`, `warned`, `escalated` or `blocked`.
    pub decision: String,
    /// Why, in words.
    pub reason: Option<String>,
    /// The arguments as JSON text, capped.
    pub arguments: String,
    /// `succeeded`, `failed`, `cancelled`, `not_executed` or `unknown`.
    pub outcome: String,
    /// Milliseconds of execution.
    pub duration_ms: Option<u64>,
}
