//! Recalls observations of earlier runs: when a run is opened, and when its model asks.
//!
//! The store finds the observations for a text, always those of the same tenant and agent.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::Runtime;
use crate::agents::definition::RecallSection;
use crate::run::{Caller, Labels};
use crate::store::{NewRun, Observation, Store, StoreError};
use crate::tools::recall::{RecallFn, RecallQuery, Recalled};

/// A search that fails after this time was cancelled by the database because it takes too long.
const TOO_LONG: Duration = Duration::from_secs(4);

impl Runtime {
    /// The observations for the inputs of a run, the most relevant first; `None` if the search takes too long.
    pub(super) async fn memories(
        &self,
        recall: RecallSection,
        caller: &Caller,
        new: &NewRun,
    ) -> Result<Option<Recalled>, StoreError> {
        let mut text = String::new();
        collect_texts(&new.inputs, &mut text);
        let store = &self.inner.store;
        let search = store.recall(&caller.tenant, &new.agent, new.id, &text, recall.top_k);
        let found = unless_too_long(search, async { store.now().await.is_ok() }).await?;
        if found.is_none() {
            tracing::warn!(run_id = %new.id, agent = new.agent, "a run begins without its memories");
        }
        Ok(found.as_deref().map(noted))
    }
}

/// What a search has found; `None` if it takes too long for a store that answers otherwise. As an error, that would look
/// like a store that is unavailable, and the run would wait for ever.
async fn unless_too_long<T>(
    search: impl Future<Output = Result<T, StoreError>>,
    store_answers: impl Future<Output = bool>,
) -> Result<Option<T>, StoreError> {
    let begun = Instant::now();
    let found = search.await;
    let may_be_too_long = found.as_ref().is_err_and(StoreError::is_transient);
    if may_be_too_long && begun.elapsed() >= TOO_LONG && store_answers.await {
        return Ok(None);
    }
    found.map(Some)
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

#[cfg(test)]
mod tests {
    use std::future::ready;

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_a_search_that_takes_too_long_is_given_up() {
        let search = async |seconds: u64, found: Result<u8, StoreError>| {
            sleep(Duration::from_secs(seconds)).await;
            found
        };
        let away = || Err(StoreError::Unavailable("cancelled".to_owned()));
        let broken = || Err(StoreError::Failed("no such column".to_owned()));
        for (seconds, found, answers, expected) in [
            (5, away(), true, Ok(None)),
            (5, away(), false, Err(true)),
            (1, away(), true, Err(true)),
            (5, broken(), true, Err(false)),
            (5, Ok(7), true, Ok(Some(7))),
        ] {
            let outcome = unless_too_long(search(seconds, found), ready(answers)).await;
            assert_eq!(outcome.map_err(|error| error.is_transient()), expected);
        }
    }
}
