//! How a tool of a file is asked what became of a call that a crash interrupted.
//!
//! A request is asked about by another one to the same service, a program by another command in the
//! same sandbox. What counts as an answer is decided here: 404, or `did_not_happen`, says that the
//! call had no effect; everything that is not clearly an answer means that it is not known.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use http::StatusCode;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Wrong;
use super::file::{BodyFormat, Entry};
use super::script_output::failure;
use crate::bounds::json;
use crate::run::Effect;
use crate::tools::CallOutcome;
use crate::tools::ToolContext;
use crate::tools::sandbox::Ran;

/// The section `reconcile` of a tool.
#[derive(Debug, Clone, PartialEq)]
pub enum ReconcileSection {
    /// Of an HTTP tool.
    Request(QuerySection),
    /// Of a program: another one and its arguments.
    Command(Vec<String>),
}

/// A request that asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySection {
    /// `GET` or `POST`.
    #[serde(default = "get")]
    method: String,
    /// Template over `args` and `call`, behind the base URL.
    path: String,
    #[serde(default)]
    query: BTreeMap<String, String>,
    /// In addition to those of the file.
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    body: Option<Value>,
}

impl ReconcileSection {
    /// As it is declared.
    pub(super) fn does(&self) -> Value {
        match self {
            Self::Request(query) => json!(query),
            Self::Command(words) => json!(words),
        }
    }

    /// Checks it against its tool.
    pub(super) fn check(&self, entry: &Entry) -> Result<(), Wrong> {
        let wrong = |message: String| Err(Wrong::at("reconcile", message));
        if entry.effect != Effect::Once {
            let effect = entry.effect.as_str();
            return wrong(format!(
                "has no meaning with `effect: {effect}`: only calls that are `once` are asked about"
            ));
        }
        match (self, entry.command.is_some()) {
            (Self::Request(_), true) => wrong("is a command, as the tool is".to_owned()),
            (Self::Command(_), false) => wrong("is a request, as the tool is".to_owned()),
            (Self::Request(query), false) if query.method != "GET" && query.method != "POST" => {
                Err(Wrong::at("reconcile.method", "is not one of GET and POST"))
            }
            _ => Ok(()),
        }
    }
}

impl QuerySection {
    /// The request as that of a tool.
    pub(super) fn entry(&self, of: &Entry) -> Entry {
        Entry {
            method: Some(self.method.clone()),
            path: Some(self.path.clone()),
            query: self.query.clone(),
            headers: self.headers.clone(),
            body: self.body.clone(),
            body_format: BodyFormat::Json,
            ..of.clone()
        }
    }
}

/// A section of keys is a request, a list a command.
impl<'de> Deserialize<'de> for ReconcileSection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = ReconcileSection;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a section of keys (HTTP) or a list of words (a program)")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                QuerySection::deserialize(MapAccessDeserializer::new(map))
                    .map(ReconcileSection::Request)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(ReconcileSection::Command)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

fn get() -> String {
    "GET".to_owned()
}

/// What templates know of a call as `call`.
pub(super) fn call_variable(context: &ToolContext) -> Value {
    json!({"id": context.call_id, "key": context.effect_key})
}

/// What the status of an answer says; nothing where the call took effect.
pub(super) fn of_status(status: StatusCode) -> Option<CallOutcome> {
    match status {
        StatusCode::NOT_FOUND => Some(CallOutcome::DidNotHappen),
        _ if status.is_success() => None,
        _ => Some(CallOutcome::Unknown(format!("the service answered {status}"))),
    }
}

/// What a program reads that is asked.
pub(super) fn question(arguments: &Value, context: &ToolContext) -> String {
    json!({"call_id": context.call_id, "arguments": arguments}).to_string()
}

/// What a program says of a call.
#[derive(Debug, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case", deny_unknown_fields)]
enum Said {
    Happened {
        #[serde(default)]
        result: Option<Value>,
    },
    DidNotHappen {},
}

/// What the answer of a program says: the result where the call took effect, if there is one.
pub(super) fn of_program(
    ran: &Ran,
    answer: &str,
    timeout: Duration,
) -> Result<Option<Value>, CallOutcome> {
    let unknown = |why: String| Err(CallOutcome::Unknown(why));
    if let Some(failed) = failure(ran, timeout) {
        return unknown(format!("the {failed}"));
    }
    if ran.stdout.omitted > 0 {
        return unknown("the program's answer is too long".to_owned());
    }
    match json::read(answer) {
        Ok(Said::Happened { result }) => Ok(result),
        Ok(Said::DidNotHappen {}) => Err(CallOutcome::DidNotHappen),
        Err(_) => unknown(
            "the program answered neither {\"outcome\": \"happened\", \"result\": …} nor \
             {\"outcome\": \"did_not_happen\"}"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
#[path = "reconcile_tests.rs"]
mod tests;
