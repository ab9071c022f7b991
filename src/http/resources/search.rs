//! Searches the newest runs, within bounds, for words in what the caller may read.
//!
//! There is no index of words, because it would make every commit of a run more expensive. A request searches
//! at most [`RUNS`] runs, or for [`MAX_WAIT`], and its cursor continues from there. The database
//! finds candidates in the stored form. The match is decided here, in the served form, so that
//! no secret can be found out by searching for it.
//!
//! A search holds a connection to the database for long, so that few are made at the same time, and
//! no tenant makes all of them.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;
use uuid::Uuid;

use super::page::{ListPage, time_position};
use super::redaction;
use crate::bounds::memory::{TenantPermit, TenantSemaphore};
use crate::fairness;
use crate::http::edge::extract::invalid_parameter;
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::RunStatus;
use crate::store::{Page, RunCursor, RunFilter, RunRecord, SearchCandidate, StoreError};

/// Runs that one request looks at.
pub(crate) const RUNS: u32 = 10_000;
/// Runs that one query searches.
const CHUNK: u32 = 250;
/// After this time a request stops searching.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// The longest words, for which the database searches; the others are searched for in its results.
const WORDS_IN_DATABASE: usize = 4;
/// Words that are looked for.
const MAX_WORDS: usize = 64;

/// Searches at the same time; with SQLite, one of its four connections that read is left for others.
const PLACES: usize = 3;
/// Those of one tenant.
const PLACES_OF_TENANT: usize = 2;
/// How long a search waits for its turn.
const MAX_TURN_WAIT: Duration = Duration::from_secs(5);

/// The permits to search.
static SEARCHES: LazyLock<TenantSemaphore> =
    LazyLock::new(|| TenantSemaphore::with_share(PLACES, PLACES_OF_TENANT));

/// Waits for a permit, those of the same tenant first among themselves.
async fn turn(tenant: &str) -> Result<TenantPermit<'static>, Problem> {
    let turn = tokio::time::timeout(MAX_TURN_WAIT, SEARCHES.acquire(tenant)).await.ok().flatten();
    turn.ok_or_else(|| Problem::new(Code::Overloaded, "Too many searches of runs are in progress."))
}

/// What a search found.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) runs: Vec<RunRecord>,
    pub(crate) next_cursor: Option<String>,
    /// Runs that were looked at.
    pub(crate) searched: u32,
}

/// Looks for runs that have all words of `text`, whatever the case of A to Z. Beside the runs of the filter,
/// it looks at those that wait for child runs with one of the statuses `above`.
pub(crate) async fn search(
    app: &App,
    tenant: &str,
    filter: &RunFilter,
    above: &[RunStatus],
    text: &str,
    page: ListPage<RunCursor>,
) -> Result<Found, Problem> {
    let mut words: Vec<String> = text.split_whitespace().map(str::to_ascii_lowercase).collect();
    words.sort_unstable();
    words.dedup();
    if words.len() > MAX_WORDS {
        return Err(invalid_parameter("q", &format!("has more than {MAX_WORDS} words")));
    }
    let _turn = turn(tenant).await?;
    let words: Arc<[String]> = words.into();
    let mut longest: Vec<&str> = words.iter().map(String::as_str).collect();
    longest.sort_by_key(|word| std::cmp::Reverse(word.len()));
    longest.truncate(WORDS_IN_DATABASE);
    let size = page.limit as usize - 1;
    let ListPage { page, list } = page;
    let (mut found, mut after) = (Found::default(), page.after);
    let cursor = |at, id: Uuid| time_position(at, &id.to_string()).in_list(list);
    let until = Instant::now() + MAX_WAIT;
    let parents = RunFilter { status: None, ..filter.clone() };
    while found.searched < RUNS {
        let chunk = Page { limit: CHUNK, after: after.take() };
        let mut candidates = app.store.search_runs(tenant, filter, &longest, &chunk).await?;
        if !above.is_empty() {
            let waiting = app.store.runs_above(tenant, above, &parents, &chunk).await?;
            add_waiting(&mut candidates, waiting);
        }
        for run in &candidates {
            found.searched += 1;
            let record = if run.may_match { readable(app, tenant, run.id).await? } else { None };
            if let Some(record) = record {
                found.runs.extend(matching(&words, record).await?);
            }
            if found.runs.len() >= size || (run.may_match && Instant::now() > until) {
                found.next_cursor = Some(cursor(run.created_at, run.id));
                return Ok(found);
            }
        }
        let Some(last) = candidates.last().filter(|_| candidates.len() >= CHUNK as usize) else {
            return Ok(found);
        };
        found.next_cursor = Some(cursor(last.created_at, last.id));
        if Instant::now() > until {
            return Ok(found);
        }
        found.next_cursor.take_if(|_| found.searched < RUNS);
        after = Some(RunCursor { at: last.created_at, id: last.id.to_string() });
    }
    Ok(found)
}

/// Adds runs to a piece of the newest ones, which keeps its size.
fn add_waiting(candidates: &mut Vec<SearchCandidate>, waiting: Vec<RunRecord>) {
    candidates.extend(waiting.into_iter().map(|run| SearchCandidate {
        id: run.id,
        created_at: run.created_at,
        may_match: true,
    }));
    candidates.sort_by_key(|run| std::cmp::Reverse((run.created_at, run.id)));
    candidates.dedup_by_key(|run| run.id);
    candidates.truncate(CHUNK as usize);
}

/// The run; `None` if it was deleted, or if its last event cannot be read.
async fn readable(app: &App, tenant: &str, run: Uuid) -> Result<Option<RunRecord>, StoreError> {
    match app.store.run(tenant, run).await {
        Err(StoreError::UnreadableEvent { .. }) => Ok(None),
        read => read,
    }
}

/// The run, without inputs and output, if it has all words.
async fn matching(
    words: &Arc<[String]>,
    mut record: RunRecord,
) -> Result<Option<RunRecord>, Problem> {
    let words = Arc::clone(words);
    // The size of a document is known only once it is written; most documents are small.
    fairness::blocking(move || has_all(&words, &mut record).then_some(record))
        .await
        .map_err(|error| Problem::internal(error.to_string()))
}

/// Whether each word occurs in the served form of the run.
fn has_all(words: &[String], record: &mut RunRecord) -> bool {
    let mut texts = vec![record.agent.clone(), record.id.to_string()];
    collect(&redaction::document(record.inputs.take()), &mut texts);
    collect(&redaction::document(record.metadata.0.clone()), &mut texts);
    if let Some(output) = record.output.take() {
        collect(&redaction::output(output), &mut texts);
    }
    for text in &mut texts {
        text.make_ascii_lowercase();
    }
    words.iter().all(|word| texts.iter().any(|text| text.contains(word)))
}

/// The texts and numbers of a document; names of fields are left out.
fn collect(document: &Value, texts: &mut Vec<String>) {
    match document {
        Value::String(text) => texts.push(text.clone()),
        Value::Number(number) => texts.push(number.to_string()),
        Value::Array(items) => items.iter().for_each(|item| collect(item, texts)),
        Value::Object(fields) => fields.values().for_each(|value| collect(value, texts)),
        Value::Null | Value::Bool(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_tenant_takes_all_places_and_a_search_that_waits_too_long_is_refused() {
        let (first, second) = (turn("a").await.unwrap(), turn("a").await.unwrap());
        let refused = turn("a").await.err().unwrap();
        assert_eq!(refused.code(), Code::Overloaded);
        let other = turn("b").await.unwrap();
        assert!(turn("c").await.is_err());
        drop(first);
        let third = turn("c").await.unwrap();
        assert!(turn("a").await.is_err());
        drop((second, third, other));
        drop(turn("a").await.unwrap());
    }

    #[test]
    fn texts_and_numbers_are_searched_and_names_are_not() {
        let mut texts = Vec::new();
        collect(&json!({"name": ["a b", {"deep": 42}], "c": null, "d": true}), &mut texts);
        assert_eq!(texts, ["a b", "42"]);
    }
}
