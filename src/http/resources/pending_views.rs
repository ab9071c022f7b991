//! What parked runs wait for, as the API shows it.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::input_views::InputView;
use super::redacted;
use crate::event::WaitKind;
use crate::http::document::vocabulary::PendingKind;
use crate::message::visible::{escaped, escaped_json};
use crate::store::ApprovalRecord;

/// Bytes of a call's arguments that a list of runs shows.
const MAX_LISTED: usize = 4096;

/// Something that a parked run waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PendingCall, example = json!({"arguments": {"operation": "write", "path": "notes.md"}}))]
pub(crate) struct Pending {
    /// The run that waits, where the answer is given: the parked run itself, or a run that it
    /// delegated to.
    run_id: Uuid,
    /// The tool call's id; for an escalation, the escalation's own id.
    call_id: Uuid,
    /// What kind of answer the run waits for.
    #[schema(value_type = PendingKind, example = "approval")]
    kind: &'static str,
    /// The tool; empty for an escalation.
    #[schema(example = "file_ops")]
    tool: String,
    /// The call's arguments; a string if they are not valid JSON. Null in lists where they are large:
    /// the run itself shows them.
    arguments: Value,
    /// The arguments as JSON text for display to a person: invisible characters, and those that
    /// change how others are displayed, are escaped.
    #[schema(example = "{\n  \"path\": \"invoice\\u202efdp.exe\"\n}")]
    display: String,
    /// Why the run waits.
    #[schema(
        example = "The autonomy rule asks for an approval: to write notes.md would lose what exists there."
    )]
    reason: String,
    /// When the run stops waiting without an answer; null if it waits indefinitely.
    expires_at: Option<DateTime<Utc>>,
    /// What the tool asks for, if it is no tool of the caller; null otherwise.
    #[schema(value_type = Option<InputView>, example = json!(null))]
    input: Option<Box<InputView>>,
}

impl Pending {
    /// As a row of a list has it.
    pub(super) fn shorten(&mut self) {
        if self.display.len() > MAX_LISTED {
            self.arguments = Value::Null;
            self.display.clear();
        }
    }
}

impl From<ApprovalRecord> for Pending {
    fn from(mut asked: ApprovalRecord) -> Self {
        if asked.kind != WaitKind::Client || asked.input.is_some() {
            asked.arguments = redacted::document(asked.arguments);
        }
        Self {
            run_id: asked.run_id,
            call_id: asked.call_id,
            kind: asked.kind.as_str(),
            tool: asked.tool,
            display: escaped_json(&format!("{:#}", asked.arguments)).into_owned(),
            arguments: asked.arguments,
            reason: redacted::text(escaped(&asked.reason).into_owned()),
            expires_at: asked.expires_at,
            input: asked.input.map(|asked| Box::new(asked.into())),
        }
    }
}
