//! Recalls observations of earlier runs: when a run is opened, and when its model asks.
//!
//! The store finds the observations for a text, always those of the same tenant and agent.

use std::sync::Arc;

use serde_json::Value;

use super::Runtime;
use crate::agents::definition::RecallSection;
use crate::run::{Caller, Labels};
use crate::store::{NewRun, Observation, Store, StoreError};
use crate::tools::recall::{RecallFn, RecallQuery, Recalled};

impl Runtime {
    /// The observations for the inputs of a run, the most relevant first.
    pub(super) async fn memories(
        &self,
        recall: RecallSection,
        caller: &Caller,
        new: &NewRun,
    ) -> Result<Recalled, StoreError> {
        let mut text = String::new();
        collect_texts(&new.inputs, &mut text);
        let found = self
            .inner
            .store
            .recall(&caller.tenant, &new.agent, new.id, &text, recall.top_k)
            .await?;
        Ok(noted(&found))
    }
}

/// Observations in words, with the labels of the runs that left them.
fn noted(found: &[Observation]) -> Recalled {
    let labels = found.iter().map(|observation| Labels::named(&observation.labels));
    (found.iter().map(note).collect(), labels.fold(Labels::default(), Labels::and))
}

/// The function that the tool `recall` calls.
pub fn recollection(store: Arc<Store>) -> RecallFn {
    Arc::new(move |RecallQuery { tenant, agent, run_id, query, top_k }| {
        let store = Arc::clone(&store);
        Box::pin(async move {
            let found =
                store.recall(&tenant, &agent, run_id, &query, top_k).await.map_err(|error| {
                    tracing::warn!(%run_id, %error, "the memory could not be read");
                    "the memory could not be read; try again later".to_owned()
                })?;
            Ok(noted(&found))
        })
    })
}

/// The texts in a value, without the names of its fields.
fn collect_texts(value: &Value, text: &mut String) {
    match value {
        Value::String(said) => {
            text.push_str(said);
            text.push(' ');
        }
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, text)),
        Value::Object(fields) => fields.values().for_each(|field| collect_texts(field, text)),
        Value::Number(number) => {
            text.push_str(&number.to_string());
            text.push(' ');
        }
        Value::Null | Value::Bool(_) => {}
    }
}

fn note(observation: &Observation) -> String {
    let Observation { at, kind, content, .. } = observation;
    format!("[{} {kind}] {}", at.format("%Y-%m-%d"), content.replace('\n', "\n  "))
}
