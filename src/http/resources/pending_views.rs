//! What parked runs wait for, as the API shows it.

use std::fmt::{self, Write as _};

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::input_views::InputView;
use super::redaction;
use crate::event::WaitKind;
use crate::http::document::vocabulary::PendingKind;
use crate::message::visible::{escaped, escaped_json};
use crate::store::ApprovalRecord;

/// Bytes of a call's arguments that a list of runs shows.
pub(super) const MAX_LISTED: u64 = 4096;

/// Bytes that indented arguments may have beside twice those that they have on one line.
const MAX_INDENTED: usize = 16 << 10;

/// Something that a parked run waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PendingCall, example = json!({"arguments": {"operation": "write", "path": "notes.md"}}))]
pub(crate) struct Pending {
    /// The run to which the answer is given: the parked run itself, or a run that it
    /// delegated to.
    run_id: Uuid,
    /// The tool call's id; for an escalation, the escalation's own id.
    call_id: Uuid,
    /// The number of the event of that run that asks. It changes when the call is asked about again, so
    /// an approval, a denial and a review can say which request they answer.
    #[schema(minimum = 1, example = 7)]
    seq: i64,
    /// What kind of answer the run waits for.
    #[schema(value_type = PendingKind, example = "approval")]
    kind: &'static str,
    /// The tool; empty for an escalation.
    #[schema(example = "file_ops")]
    tool: String,
    /// The call's arguments; a string if they are not valid JSON. Null in lists where they are large,
    /// which the run itself shows; and of calls of child runs where all have more than 4 MiB together,
    /// which the child run shows.
    arguments: Value,
    /// The arguments as JSON text for display to a person: invisible characters, and those that
    /// change how others are displayed, are escaped. Empty where the arguments are left out.
    #[schema(example = "{\n  \"path\": \"invoice\\u202efdp.exe\"\n}")]
    display: String,
    /// Why the run waits.
    #[schema(
        example = "The autonomy rule asks for an approval: to write notes.md would lose what exists there."
    )]
    reason: String,
    /// When the run stops waiting without an answer; null if it waits indefinitely.
    expires_at: Option<DateTime<Utc>>,
    /// The input that the tool asks for, if it is not a tool of the caller; null otherwise.
    #[schema(value_type = Option<InputView>, example = json!(null))]
    input: Option<Box<InputView>>,
}

impl Pending {
    /// The form for a list.
    pub(super) fn shorten(&mut self) {
        if self.display.len() as u64 > MAX_LISTED {
            self.arguments = Value::Null;
            self.display.clear();
        }
    }
}

/// Arguments for people: indented, unless that makes them much longer. Empty if they were
/// left out.
fn displayed(arguments: &Value) -> String {
    if arguments.is_null() {
        return String::new();
    }
    let compact = arguments.to_string();
    let mut indented = Bounded { text: String::new(), most: 2 * compact.len() + MAX_INDENTED };
    let text = match write!(indented, "{arguments:#}") {
        Ok(()) => indented.text,
        Err(_) => compact,
    };
    escaped_json(&text).into_owned()
}

/// A text of at most this many bytes.
struct Bounded {
    text: String,
    most: usize,
}

impl fmt::Write for Bounded {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        if self.text.len() + more.len() > self.most {
            return Err(fmt::Error);
        }
        self.text.push_str(more);
        Ok(())
    }
}

impl From<ApprovalRecord> for Pending {
    fn from(mut asked: ApprovalRecord) -> Self {
        if asked.kind != WaitKind::Client || asked.input.is_some() {
            asked.arguments = redaction::document(asked.arguments);
        }
        Self {
            run_id: asked.run_id,
            call_id: asked.call_id,
            seq: asked.seq,
            kind: asked.kind.as_str(),
            tool: asked.tool,
            display: displayed(&asked.arguments),
            arguments: asked.arguments,
            reason: redaction::text(escaped(&asked.reason).into_owned()),
            expires_at: asked.expires_at,
            input: asked.input.map(|asked| Box::new(asked.into())),
        }
    }
}
