//! The fields that commands need of an answer, so that the answer of another server is recognised as such.
//!
//! Everything else may be missing or new: an older command line can work with a newer service.

use serde_json::Value;

/// A kind of answer, or of an item of a list.
pub(super) struct Kind {
    name: &'static str,
    /// The fields that it must have, as paths, each with its type.
    fields: &'static [(&'static str, IsOfType)],
}

type IsOfType = fn(&Value) -> bool;

pub(super) const LIST: Kind = Kind {
    name: "a list",
    fields: &[("data", Value::is_array), ("next_cursor", |it| it.is_null() || it.is_string())],
};
pub(super) const RUN: Kind =
    Kind { name: "a run", fields: &[("run_id", Value::is_string), ("status", Value::is_string)] };
pub(super) const ITERATION: Kind =
    Kind { name: "an iteration", fields: &[("attempt", Value::is_u64), ("number", Value::is_u64)] };
pub(super) const TOOL_CALL: Kind =
    Kind { name: "a tool call", fields: &[("id", Value::is_string), ("tool", Value::is_string)] };
pub(super) const EVENT: Kind =
    Kind { name: "an event", fields: &[("seq", Value::is_i64), ("type", Value::is_string)] };
pub(super) const DRY_RUN: Kind =
    Kind { name: "a dry run", fields: &[("agent", Value::is_string), ("models", Value::is_array)] };
pub(super) const AGENT: Kind = Kind { name: "an agent", fields: &[("name", Value::is_string)] };
pub(super) const FILE: Kind =
    Kind { name: "a file", fields: &[("path", Value::is_string), ("size", Value::is_u64)] };
pub(super) const KEY: Kind =
    Kind { name: "a key", fields: &[("id", Value::is_string), ("name", Value::is_string)] };
pub(super) const NEW_KEY: Kind =
    Kind { name: "a new key", fields: &[("id", Value::is_string), ("key", Value::is_string)] };
pub(super) const AUDIT_RECORD: Kind = Kind {
    name: "an audit record",
    fields: &[("id", Value::is_string), ("at", Value::is_string), ("action", Value::is_string)],
};
pub(super) const AUDIT_STRETCH: Kind = Kind {
    name: "a stretch of the audit log",
    fields: &[
        ("number", Value::is_i64),
        ("records", Value::is_u64),
        ("previous", Value::is_string),
        ("hash", Value::is_string),
        ("faults", Value::is_array),
    ],
};
pub(super) const REPLAY: Kind = Kind {
    name: "a replay of a policy",
    fields: &[
        ("runs", Value::is_u64),
        ("calls", Value::is_u64),
        ("unchanged", Value::is_u64),
        ("unknown", Value::is_u64),
        ("newly/blocked", Value::is_u64),
        ("newly/escalated", Value::is_u64),
        ("newly/warned", Value::is_u64),
        ("newly/allowed", Value::is_u64),
        ("changed_runs", Value::is_u64),
        ("cost_usd", Value::is_number),
        ("waiting_hours", Value::is_number),
    ],
};

impl Kind {
    /// The answer, if it is of this kind; else what it lacks.
    pub(super) fn of(&self, answer: Value) -> Result<Value, String> {
        match self.missing_in(&answer) {
            Some(field) => Err(format!("{} without {field}", self.name)),
            None => Ok(answer),
        }
    }

    fn missing_in(&self, answer: &Value) -> Option<&'static str> {
        let is_there = |field: &str, is_of_type: IsOfType| {
            answer.pointer(&format!("/{field}")).is_some_and(is_of_type)
        };
        let mut fields = self.fields.iter();
        fields.find(|(field, is_of_type)| !is_there(field, *is_of_type)).map(|(field, _)| *field)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_lacks_a_field_is_not_taken_for_the_service_s_answer() {
        let nothing = [json!(null), json!({}), json!([]), json!("x")];
        for kind in [&LIST, &RUN, &EVENT, &DRY_RUN, &NEW_KEY, &AUDIT_STRETCH, &REPLAY] {
            for answer in &nothing {
                let lacking = kind.of(answer.clone()).unwrap_err();
                assert!(lacking.starts_with(kind.name), "{lacking}");
            }
        }
        let lacking = |kind: &Kind, answer| kind.of(answer).unwrap_err();
        assert_eq!(lacking(&LIST, json!({"data": []})), "a list without next_cursor");
        assert_eq!(lacking(&RUN, json!({"run_id": "r", "status": 1})), "a run without status");
        let new = json!({"run_id": "r", "status": "hibernating", "new": 1});
        assert_eq!(RUN.of(new.clone()), Ok(new));
    }
}
