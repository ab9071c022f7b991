//! The parts of an answer with tool calls that compatible servers need back: its reasoning, and the
//! data that they attached to its calls.
//!
//! They are kept verbatim from a whole answer, and assembled from a streamed one. They are sent back
//! only to the model that wrote them: others refuse or ignore them.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::bounds::json::AtMost;
use crate::message::{AssistantMessage, OpaqueBlocks};
use crate::model::ProviderKind;
use crate::providers::normalization::{self, MAX_PARTS};
use crate::providers::opaque;

/// The stored form, for one model.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct StoredReasoning<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Vec::is_empty")]
    pub(super) reasoning_details: Vec<&'a RawValue>,
    /// The `extra_content` of each call.
    #[serde(borrow, skip_serializing_if = "Vec::is_empty")]
    pub(super) calls: Vec<Option<&'a RawValue>>,
}

impl<'a> StoredReasoning<'a> {
    /// The parts that this model of this provider gets back with a message.
    pub(super) fn of(message: &'a AssistantMessage, provider: &str, model: &str) -> Self {
        let kept = opaque::sent_back(message, ProviderKind::Openai, provider, model);
        kept.and_then(|json| serde_json::from_str(json).ok()).unwrap_or_default()
    }

    fn is_empty(&self) -> bool {
        self.reasoning_content.is_none()
            && self.reasoning.is_none()
            && self.reasoning_details.is_empty()
            && self.calls.iter().all(Option::is_none)
    }
}

/// The reasoning that has been read so far.
#[derive(Debug, Default)]
pub(super) struct Reasoning {
    content: Option<String>,
    plain: Option<String>,
    details: Vec<Box<RawValue>>,
    /// The last one, while further pieces of it may come.
    open: Option<Map<String, Value>>,
}

impl Reasoning {
    /// Adds reasoning text, which some servers send under one name, some under the other and some under
    /// both. Returns the text to show.
    pub(super) fn add(
        &mut self,
        content: Option<&RawValue>,
        plain: Option<&RawValue>,
    ) -> Option<String> {
        let [content, plain] = [content, plain].map(|raw| raw.and_then(normalization::string));
        for (piece, whole) in [(&content, &mut self.content), (&plain, &mut self.plain)] {
            if let Some(piece) = piece {
                whole.get_or_insert_default().push_str(piece);
            }
        }
        content.or(plain)
    }

    /// Takes the details of a whole answer.
    pub(super) fn take_details(&mut self, details: Option<&RawValue>) {
        self.details = entries(details).into_iter().map(ToOwned::to_owned).collect();
    }

    /// Adds the details of a piece of an answer: texts come in pieces, everything else whole.
    pub(super) fn add_details(&mut self, details: Option<&RawValue>) {
        for raw in entries(details) {
            let Ok(piece) = serde_json::from_str::<Map<String, Value>>(raw.get()) else { continue };
            match &mut self.open {
                Some(open) if continues(open, &piece) => append(open, piece),
                _ => {
                    self.close();
                    self.open = Some(piece);
                }
            }
        }
    }

    fn close(&mut self) {
        let open = self.open.take().and_then(|open| to_raw_value(&open).ok());
        self.details.extend(open.filter(|_| self.details.len() < MAX_PARTS));
    }

    /// What is stored of an answer with these calls; `None` without calls.
    pub(super) fn blocks(
        mut self,
        calls: &[Option<Box<RawValue>>],
        provider: &str,
        model: &str,
    ) -> Option<OpaqueBlocks> {
        self.close();
        let calls: Vec<_> = calls.iter().map(Option::as_deref).collect();
        if calls.is_empty() {
            return None;
        }
        let is_told = self.content.is_some() || !self.details.is_empty();
        let kept = StoredReasoning {
            model: model.into(),
            reasoning_content: self.content.as_deref().map(Cow::Borrowed),
            reasoning: self.plain.as_deref().filter(|_| !is_told).map(Cow::Borrowed),
            reasoning_details: self.details.iter().map(AsRef::as_ref).collect(),
            calls: if calls.iter().any(Option::is_some) { calls } else { Vec::new() },
        };
        let json = serde_json::to_string(&kept).ok().filter(|_| !kept.is_empty())?;
        Some(OpaqueBlocks { provider: provider.to_owned(), json })
    }
}

/// The entries of a list; none of anything else.
fn entries(list: Option<&RawValue>) -> Vec<&RawValue> {
    let read = list.and_then(|list| serde_json::from_str(list.get()).ok());
    read.map_or_else(Vec::new, |AtMost::<&RawValue, MAX_PARTS>(entries)| entries)
}

/// The member of a detail that comes in pieces.
fn text_of(detail: &Map<String, Value>) -> Option<&'static str> {
    match detail.get("type")?.as_str()? {
        "reasoning.text" => Some("text"),
        "reasoning.summary" => Some("summary"),
        _ => None,
    }
}

fn continues(open: &Map<String, Value>, piece: &Map<String, Value>) -> bool {
    text_of(open).is_some()
        && ["type", "index"].into_iter().all(|name| open.get(name) == piece.get(name))
}

/// Texts are concatenated; of any other member the last value counts.
fn append(open: &mut Map<String, Value>, piece: Map<String, Value>) {
    let text = text_of(open);
    for (name, value) in piece {
        match (open.get_mut(&name), value) {
            (_, Value::Null) => {}
            (Some(Value::String(whole)), Value::String(piece)) if text == Some(name.as_str()) => {
                whole.push_str(&piece);
            }
            (_, value) => {
                open.insert(name, value);
            }
        }
    }
}
