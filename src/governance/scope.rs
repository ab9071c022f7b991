//! Rule 4: whether the caller who started the run may execute tools.
//!
//! The scopes are those that the run was started with; they hold for the whole run.

use super::Decision;
use super::gate::{Question, Ruling};

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let tool = question.call.tool;
    let grants = |scope: &String| {
        scope == "tools:execute"
            || scope == "admin"
            || scope.strip_prefix("tools:").is_some_and(|name| name == tool)
    };
    if question.scopes.iter().any(grants) {
        return Ruling::NoObjection;
    }
    Ruling::Objection(
        Decision::Blocked,
        format!(
            "the caller who started this run has neither the scope tools:execute nor tools:{tool}; answer without this tool"
        ),
    )
}
