//! Which era of the protocol a server speaks: the old revisions begin with `initialize`, in the new
//! ones every request states its version.
//!
//! Pure. A server is asked for `server/discover` first, as the specification advises for clients that
//! speak both. Anything but an answer of the new era means the old era.

use std::time::Duration;

use serde_json::Value;

use super::messages::{Failure, Fault, NEW_VERSION, NOT_OFFERED, VERSIONS};
use crate::bounds::text::shortened;

/// An era: the protocol revisions with `initialize`, or those with `server/discover`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Era {
    Old,
    New,
}

/// The first question, which every server of the new era answers.
pub(super) const DISCOVER: &str = "server/discover";
/// How long a server may be silent before `initialize` of the old era is sent, too.
pub(super) const MAX_WAIT: Duration = Duration::from_millis(500);
/// How long a server that has answered `initialize` may still take to answer `server/discover`.
pub(super) const LATE: Duration = Duration::from_secs(2);
/// The headers of a request are not what its body says.
pub(super) const HEADER_MISMATCH: i64 = -32020;
/// The server needs a client that can do more.
const MISSING_CAPABILITY: i64 = -32021;
/// The server does not speak the version of a request.
const UNSUPPORTED_VERSION: i64 = -32022;
/// Versions of a server that are reported.
const MAX_LISTED: usize = 8;

/// What the first answer says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    New {
        /// Whether it can notify that its list of tools has changed.
        notifies_of_changes: bool,
    },
    Old,
    /// Why it cannot be used: a phrase.
    Neither(String),
}

/// Reads the answer to the first question.
pub(super) fn found(answer: Result<Value, Failure>) -> Found {
    match answer {
        Ok(discovered) if discovered["supportedVersions"].is_array() => {
            let notifies_of_changes = discovered["capabilities"]["tools"]["listChanged"] == true;
            if speaks_new(&discovered) {
                return Found::New { notifies_of_changes };
            }
            older(&discovered["supportedVersions"])
        }
        Err(Failure::NotSent(why)) => Found::Neither(why),
        Err(Failure::Refused(fault)) if fault.code == UNSUPPORTED_VERSION => {
            older(&fault.data["supported"])
        }
        Err(Failure::Refused(fault)) if is_of_new_era(&fault) => {
            Found::Neither(Failure::Refused(fault).to_string())
        }
        Ok(_) | Err(Failure::Lost(_) | Failure::Refused(_)) => Found::Old,
    }
}

/// Whether a server says that it speaks the new era.
pub(super) fn speaks_new(discovered: &Value) -> bool {
    versions(&discovered["supportedVersions"]).any(|version| version == NEW_VERSION)
}

fn versions(listed: &Value) -> impl Iterator<Item = &str> {
    listed.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Of a server that speaks these versions, and not that of the new era.
fn older(listed: &Value) -> Found {
    if versions(listed).any(|version| VERSIONS.contains(&version)) {
        return Found::Old;
    }
    let spoken: Vec<String> = versions(listed).take(MAX_LISTED).map(shortened).collect();
    Found::Neither(format!(
        "it speaks only the protocol versions {spoken:?}, none of which is supported"
    ))
}

/// Whether only a server of the new era refuses like this.
pub(super) fn is_of_new_era(fault: &Fault) -> bool {
    matches!(fault.code, HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION)
}

/// Whether a failure proves that the server has not begun to work on the request: it did not arrive, or
/// was refused with a code that blames the request (JSON-RPC 2.0, section 5.1; RFC 9110, section 15.5).
pub(super) fn was_not_begun(failure: &Failure) -> bool {
    match failure {
        Failure::NotSent(_) => true,
        Failure::Lost(_) => false,
        Failure::Refused(fault) => {
            matches!(fault.code, -32700 | -32602..=-32600 | 400..=407 | 409..=499)
                || is_of_new_era(fault)
        }
    }
}

/// Whether a refusal suggests that the server now speaks another era.
pub(super) fn may_have_changed(era: Era, fault: &Fault) -> bool {
    let is_status = matches!(fault.code, 400 | 404 | 405);
    match era {
        Era::Old => is_status || is_of_new_era(fault),
        Era::New => is_status || matches!(fault.code, UNSUPPORTED_VERSION | NOT_OFFERED),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn eras_are_told_by_the_first_answer() {
        let refused = |code: i64, data: Value| {
            Err(Failure::Refused(Fault { code, message: "no".to_owned(), data }))
        };
        let supported = |versions: Value| json!({"supported": versions, "requested": NEW_VERSION});
        let discovered = |versions: Value, changed: bool| {
            Ok(json!({"resultType": "complete", "supportedVersions": versions,
                "capabilities": {"tools": {"listChanged": changed}}}))
        };
        let neither = |why: &str| Found::Neither(why.to_owned());
        let none =
            "it speaks only the protocol versions [\"2099-01-01\"], none of which is supported";
        for (answer, expected) in [
            (discovered(json!([NEW_VERSION]), true), Found::New { notifies_of_changes: true }),
            (
                discovered(json!(["2025-11-25", NEW_VERSION]), false),
                Found::New { notifies_of_changes: false },
            ),
            (discovered(json!(["2025-11-25"]), true), Found::Old),
            (discovered(json!(["2099-01-01"]), true), neither(none)),
            (Ok(json!({})), Found::Old),
            (Ok(Value::Null), Found::Old),
            (refused(-32601, Value::Null), Found::Old),
            (refused(-32602, Value::Null), Found::Old),
            (refused(400, Value::Null), Found::Old),
            (refused(-32022, supported(json!(["2025-06-18", 7]))), Found::Old),
            (refused(-32022, supported(json!(["2099-01-01"]))), neither(none)),
            (refused(-32020, Value::Null), neither("the server refuses it: no (code -32020)")),
            (refused(-32021, Value::Null), neither("the server refuses it: no (code -32021)")),
            (Err(Failure::Lost("it answers 404".to_owned())), Found::Old),
            (Err(Failure::NotSent("nobody is there".to_owned())), neither("nobody is there")),
        ] {
            assert_eq!(found(answer.clone()), expected, "{answer:?}");
        }
    }
}
