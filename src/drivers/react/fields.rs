//! The fields that an author's decisions have in addition to those of every decision
//! (`react.decision_schema`).

use std::sync::Arc;

use serde_json::Value;

use super::extraction::Decision;
use crate::bounds::json;
use crate::bounds::schema::Schema;
use crate::message::DECISION_FIELDS;

/// Faults in one message to the model.
const MAX_FAULTS: usize = 8;

/// What a decision must have in addition to the fields of every decision.
#[derive(Debug, Clone)]
pub struct DecisionFields {
    /// The JSON Schema, as the author wrote it.
    pub described: Value,
    /// The same, compiled.
    pub schema: Arc<Schema>,
}

impl DecisionFields {
    /// Checks the further fields of a decision.
    ///
    /// # Errors
    /// A clause that says what is wrong, without the values.
    pub(super) fn check(&self, decision: &Decision<'_>) -> Result<(), String> {
        let mut fields: Value = json::read(decision.text)
            .map_err(|error| format!("its fields cannot be read: {error}"))?;
        if let Some(fields) = fields.as_object_mut() {
            fields.retain(|name, _| !DECISION_FIELDS.contains(&name.as_str()));
        }
        self.schema.check(&fields, MAX_FAULTS).map_err(|rejected| {
            let faults = rejected.faults().into_iter().map(|fault| match fault.pointer.as_str() {
                "" => fault.masked,
                pointer => format!("at {pointer}: {}", fault.masked),
            });
            format!(
                "its further fields do not match their schema: {}",
                faults.collect::<Vec<_>>().join("; ")
            )
        })
    }
}
