//! The scope rule: whether the caller who started the run may execute tools.
//!
//! The scopes are those that the run was started with; they hold for the whole run.

use super::Decision;
use super::gate::{Question, Ruling};
use crate::run::may_execute;

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let tool = question.call.tool;
    if may_execute(question.scopes, tool) {
        return Ruling::NoObjection;
    }
    Ruling::Objection(
        Decision::Blocked,
        format!(
            "the caller who started this run has neither the scope tools:execute nor tools:{tool}; answer without this tool"
        ),
    )
}
