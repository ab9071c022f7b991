//! The input schema of a tool, serialised once for all requests that offer the tool.

mod sendable;

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

/// A JSON Schema; cheap to clone.
#[derive(Clone)]
pub struct ToolSchema(Arc<Cached>);

struct Cached {
    schema: Arc<Value>,
    text: OnceLock<Option<Box<RawValue>>>,
    /// Another schema, where this one is not sent as it is; and what that one leaves out in words.
    sent: OnceLock<(Option<ToolSchema>, String)>,
}

/// A schema as every provider takes it.
pub fn sent(schema: &Value) -> Cow<'_, Value> {
    sendable::sendable(schema).map_or(Cow::Borrowed(schema), |(sent, _)| Cow::Owned(sent))
}

impl ToolSchema {
    fn text(&self) -> Option<&RawValue> {
        let Cached { schema, text, .. } = &*self.0;
        text.get_or_init(|| to_raw_value(schema).ok()).as_deref()
    }

    fn sendable(&self) -> &(Option<Self>, String) {
        self.0.sent.get_or_init(|| match sendable::sendable(self) {
            Some((sent, words)) => (Some(sent.into()), words),
            None => (None, String::new()),
        })
    }

    /// The schema as every provider takes it.
    pub fn sent(&self) -> &Self {
        self.sendable().0.as_ref().unwrap_or(self)
    }

    /// What a description must say, because [`Self::sent`] does not.
    pub fn left_to_say(&self) -> &str {
        &self.sendable().1
    }

    /// Its length as JSON, in bytes.
    pub fn json_len(&self) -> usize {
        self.text().map_or(0, |text| text.get().len())
    }
}

impl From<Arc<Value>> for ToolSchema {
    fn from(schema: Arc<Value>) -> Self {
        Self(Arc::new(Cached { schema, text: OnceLock::new(), sent: OnceLock::new() }))
    }
}

impl From<Value> for ToolSchema {
    fn from(schema: Value) -> Self {
        Arc::new(schema).into()
    }
}

impl Deref for ToolSchema {
    type Target = Value;

    fn deref(&self) -> &Value {
        &self.0.schema
    }
}

impl Serialize for ToolSchema {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.text() {
            Some(text) => text.serialize(serializer),
            None => Value::serialize(self, serializer),
        }
    }
}

impl PartialEq for ToolSchema {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl std::fmt::Debug for ToolSchema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Value::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_serialised_as_the_schema_that_it_is() {
        let schema = json!({"type": "object", "properties": {"é\"": {"maximum": 1e3}}});
        let tool = ToolSchema::from(schema.clone());
        assert_eq!(serde_json::to_string(&tool).unwrap(), schema.to_string());
        assert_eq!(serde_json::to_value(&tool).unwrap(), schema);
        assert_eq!(tool.json_len(), schema.to_string().len());
        assert_eq!((&tool["type"], &tool.clone()), (&json!("object"), &tool));
        assert_eq!((tool.sent(), tool.left_to_say()), (&tool, ""));
    }
}
