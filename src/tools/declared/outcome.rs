//! The answer of a declared tool about a call that a crash interrupted.
//!
//! 404, or `did_not_happen`, means that the call had no effect. Everything that is not clearly an answer
//! means that the outcome is unknown.

use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::bounds::json;
use crate::tools::{CallOutcome, ToolContext};

/// The variable `call` of templates.
pub(super) fn call_variable(context: &ToolContext) -> Value {
    json!({"id": context.call_id, "key": context.effect_key})
}

/// The outcome that the status of an answer means; `None` if the call took effect.
pub(super) fn of_status(status: StatusCode) -> Option<CallOutcome> {
    match status {
        StatusCode::NOT_FOUND => Some(CallOutcome::DidNotHappen),
        _ if status.is_success() => None,
        _ => Some(CallOutcome::Unknown(format!("the service answered {status}"))),
    }
}

/// The standard input of a program that is asked about a call.
pub(super) fn question(arguments: &Value, context: &ToolContext) -> String {
    json!({"call_id": context.call_id, "arguments": arguments}).to_string()
}

/// The answer of a program about a call.
#[derive(Debug, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case", deny_unknown_fields)]
enum OutcomeAnswer {
    Happened {
        #[serde(default)]
        result: Option<Value>,
    },
    DidNotHappen {},
}

/// What the answer of a program says: the result where the call took effect, if there is one.
pub(super) fn of_program(answer: &str) -> Result<Option<Value>, CallOutcome> {
    match json::read(answer) {
        Ok(OutcomeAnswer::Happened { result }) => Ok(result),
        Ok(OutcomeAnswer::DidNotHappen {}) => Err(CallOutcome::DidNotHappen),
        Err(_) => Err(CallOutcome::Unknown(
            "the program answered neither {\"outcome\": \"happened\", \"result\": …} nor \
             {\"outcome\": \"did_not_happen\"}"
                .to_owned(),
        )),
    }
}

#[cfg(test)]
#[path = "outcome_tests.rs"]
mod tests;
