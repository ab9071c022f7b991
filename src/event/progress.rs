//! Progress of a call while it is executed; published and not stored.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

/// What a tool says of a call that it is executing, for followers of the run; not numbered and not
/// stored.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ToolProgress {
    /// The call.
    pub call_id: Uuid,
    /// Its tool.
    pub tool: String,
    /// As the tool wrote it.
    pub progress: Value,
}

impl ToolProgress {
    /// The name in SSE.
    pub const TYPE_NAME: &'static str = "tool_call.progress";
}
