//! What the audit log keeps of a call and of an act of administration.

use chrono::{DateTime, Utc};
use serde_json::Value;
use strum::{EnumString, IntoStaticStr, VariantNames};
use uuid::Uuid;

use crate::run::Labels;

/// What an entry of the audit log is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr, EnumString, VariantNames)]
pub enum AuditAction {
    /// A decision on a tool call, and its outcome.
    #[strum(serialize = "tool_call")]
    ToolCall,
    /// An API key was created.
    #[strum(serialize = "key.created")]
    KeyCreated,
    /// An API key was revoked.
    #[strum(serialize = "key.revoked")]
    KeyRevoked,
    /// A short-lived token for a run or session was created.
    #[strum(serialize = "token.created")]
    TokenCreated,
    /// A person signed in to the console with an API key.
    #[strum(serialize = "console.signed_in")]
    ConsoleSignedIn,
    /// A session of the console was ended before it expired.
    #[strum(serialize = "console.signed_out")]
    ConsoleSignedOut,
    /// API keys were refused; one entry counts several attempts.
    #[strum(serialize = "login.refused")]
    LoginRefused,
    /// It was requested that a run be cancelled.
    #[strum(serialize = "run.cancel_requested")]
    RunCancelRequested,
    /// A session was deleted, with the content of its runs.
    #[strum(serialize = "session.deleted")]
    SessionDeleted,
    /// Something that later runs could recall was deleted.
    #[strum(serialize = "memory.deleted")]
    MemoryDeleted,
    /// A caller put a file into a workspace.
    #[strum(serialize = "file.written")]
    FileWritten,
    /// A caller deleted a file of a workspace.
    #[strum(serialize = "file.deleted")]
    FileDeleted,
    /// An MCP server that is a program sent requests; one entry counts several.
    #[strum(serialize = "mcp.requested")]
    McpRequested,
    /// Requests of an MCP server that is a program were refused; one entry counts several.
    #[strum(serialize = "mcp.refused")]
    McpRefused,
    /// The definition of an agent was changed, or is gone.
    #[strum(serialize = "definition.changed")]
    DefinitionChanged,
    /// The content of runs was deleted after `runtime.retention`.
    #[strum(serialize = "runs.deleted")]
    RunsDeleted,
    /// Entries of the audit log were deleted after `audit.retention`.
    #[strum(serialize = "audit.deleted")]
    AuditDeleted,
    /// What is closed of the audit log is signed from here on, or no more.
    #[strum(serialize = "audit.signing_changed")]
    SigningChanged,
    /// A stretch that was closed is gone, or another one: nothing more is closed of the tenant by
    /// the process that knew it.
    #[strum(serialize = "audit.chain_replaced")]
    ChainReplaced,
}

impl AuditAction {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An act of administration.
#[derive(Debug, Clone, PartialEq)]
pub struct Act {
    pub tenant: String,
    /// The API key that did it, or `service`.
    pub subject: String,
    pub action: AuditAction,
    pub run_id: Option<Uuid>,
    /// Why, in words.
    pub reason: Option<String>,
    /// What it was done to; an object.
    pub details: Value,
}

/// The subject of what the service does by itself.
pub const SERVICE: &str = "service";

/// An entry of the audit log: a decision and, if the call was executed, its outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRecord {
    /// The run's labels at that time.
    pub labels: Labels,
    pub at: DateTime<Utc>,
    pub call_id: Uuid,
    pub tool: String,
    /// The rule that decided; of what was allowed, the one whose entry allows it, `tools` where it was
    /// only offered.
    pub rule: String,
    /// The pattern of that rule which decided, or the entry, if it was one.
    pub pattern: Option<String>,
    /// `allowed`, `warned`, `escalated` or `blocked`.
    pub decision: String,
    /// Why, in words.
    pub reason: Option<String>,
    /// The arguments as JSON text, capped.
    pub arguments: String,
    /// `succeeded`, `failed`, `blocked`, `cancelled`, `timed_out`, `not_executed` or `unknown`.
    pub outcome: String,
    /// Milliseconds of execution.
    pub duration_ms: Option<u64>,
    /// Bytes of what the tool returned, before anything in it was replaced or withheld.
    pub result_bytes: Option<u64>,
}
