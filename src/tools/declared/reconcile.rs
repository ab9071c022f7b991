//! The section `reconcile` of a tool: how the tool is asked about a call that a crash interrupted.
//!
//! An HTTP tool is asked by another request to the same service, and a script by another command in the
//! same sandbox. The answers are interpreted in `outcome`.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Wrong;
use crate::run::Effect;

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
    pub(super) method: String,
    /// Template over `args` and `call`, behind the base URL.
    pub(super) path: String,
    #[serde(default)]
    pub(super) query: BTreeMap<String, String>,
    /// In addition to those of the file.
    #[serde(default)]
    pub(super) headers: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) body: Option<Value>,
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
    pub(super) fn check(&self, effect: Effect, is_program: bool) -> Result<(), Wrong> {
        let wrong = |message: String| Err(Wrong::at("reconcile", message));
        if effect != Effect::Once {
            let effect = effect.as_str();
            return wrong(format!(
                "has no meaning with `effect: {effect}`: only calls that are `once` are asked about"
            ));
        }
        match (self, is_program) {
            (Self::Request(_), true) => wrong("is a command, as the tool is".to_owned()),
            (Self::Command(_), false) => wrong("is a request, as the tool is".to_owned()),
            (Self::Request(query), false) if query.method != "GET" && query.method != "POST" => {
                Err(Wrong::at("reconcile.method", "is not one of GET and POST"))
            }
            _ => Ok(()),
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
