//! The input schema of a tool, serialised once for all requests that offer the tool.

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
}

impl ToolSchema {
    fn text(&self) -> Option<&RawValue> {
        let Cached { schema, text } = &*self.0;
        text.get_or_init(|| to_raw_value(schema).ok()).as_deref()
    }

    /// Its length as JSON, in bytes.
    pub fn json_len(&self) -> usize {
        self.text().map_or(0, |text| text.get().len())
    }
}

impl From<Arc<Value>> for ToolSchema {
    fn from(schema: Arc<Value>) -> Self {
        Self(Arc::new(Cached { schema, text: OnceLock::new() }))
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
    }
}
