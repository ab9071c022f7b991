//! The conversation of a session, page by page: each message with its run, and the number and time
//! of the event that brought it.
//!
//! Messages are read from the journals of the session's runs, in the order in which the runs had their
//! turns. A cursor is a place in one run, so that a page costs the journals that it shows, however long
//! the session is. A page of large messages has fewer of them.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListPage, ListParams, Listing, MAX_PAGE, by_time_and, time_position};
use super::run_parts::{Message, messages_of};
use crate::event::Event;
use crate::http::edge::auth::{Scoped, SessionsRead};
use crate::http::edge::extract::{Name, Params};
use crate::http::edge::problem::Problem;
use crate::http::state::{App, Shared};
use crate::runtime::{TurnSource, journals, own_turns, turn_sources};
use crate::store::RunCursor;

/// How many runs are looked at in one query.
const CHUNK: u32 = 8;

/// A message of a session.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionMessage {
    /// The run that it belongs to.
    run_id: Uuid,
    /// The sequence number of the event that brought it.
    #[schema(example = 1, minimum = 1)]
    seq: i64,
    /// When that event happened.
    at: DateTime<Utc>,
    #[serde(flatten)]
    message: Message,
}

/// List a session's messages
///
/// The conversation of the session's runs, oldest first, without system prompts.
#[utoipa::path(
    get, path = "/sessions/{id}/messages", tag = "sessions", security(("bearer" = ["sessions:read"])),
    params(("id" = String, Path, description = "The session's id."), ListParams),
    responses((status = 200, description = "A page of messages, in order.", body = Listing<SessionMessage>)),
)]
pub(crate) async fn list_session_messages(
    State(app): State<App>,
    caller: Scoped<SessionsRead>,
    Name(id): Name,
    mut params: Params,
) -> Result<Json<Listing<SessionMessage>>, Problem> {
    let page =
        by_time_and(&mut params, &caller.tenant, LISTS, |place| Place::read(place).is_some())?;
    params.finish()?;
    if app.store.session(&caller.tenant, &id, 0).await?.is_none() {
        return Err(Problem::not_found("session"));
    }
    Ok(Json(messages_from(&app, &caller.tenant, &id, &page).await?))
}

/// A message of a run, by its number.
#[derive(Clone, Copy)]
struct Place {
    /// Of the run in its session.
    turn: i64,
    run: Uuid,
    index: usize,
}

impl Place {
    fn read(text: &str) -> Option<Self> {
        let (turn, rest) = text.split_once('.')?;
        let (run, index) = rest.split_once('.')?;
        Some(Self {
            turn: turn.parse().ok()?,
            run: Uuid::try_parse(run).ok()?,
            index: index.parse().ok()?,
        })
    }
}

/// As many messages after the cursor as fit on the page.
async fn messages_from(
    app: &Shared,
    tenant: &str,
    session: &str,
    page: &ListPage<RunCursor>,
) -> Result<Listing<SessionMessage>, Problem> {
    let size = page.limit as usize - 1;
    let place = page.after.as_ref().and_then(|after| Place::read(&after.id));
    let mut next = place.map_or(0, |place| place.turn);
    let (mut data, mut bytes, mut last) = (Vec::new(), 0, None);
    loop {
        let mut runs = app.store.session_runs(tenant, session, next, CHUNK).await?;
        let is_end = runs.len() < CHUNK as usize;
        let ids: Vec<Uuid> = runs.iter().map(|run| run.id).collect();
        let sizes = app.store.journal_sizes(tenant, &ids).await?;
        let (read, bytes_read) = journals::piece(&ids, &sizes);
        let is_end = is_end && read >= runs.len();
        runs.truncate(read);
        let ids: Vec<Uuid> = runs.iter().map(|run| run.id).collect();
        let _permit = journals::permit(bytes_read).await;
        let events = app.store.journals(tenant, &ids).await?;
        let by_run = journals::by_run(&events);
        for run in &runs {
            // Where the run of the cursor was deleted, the next run begins with its first message.
            let skipped = place.filter(|place| place.run == run.id).map_or(0, |place| place.index);
            let messages =
                messages_of_run(run.id, by_run.get(&run.id).copied().unwrap_or_default())?;
            for (index, message) in messages.into_iter().enumerate().skip(skipped) {
                bytes += message.message.size();
                if data.len() == size || (bytes > MAX_PAGE && !data.is_empty()) {
                    return Ok(Listing::until(data, page.list, last));
                }
                let place = format!("{}.{}.{}", run.turn, run.id, index + 1);
                last = Some(time_position(run.created_at, &place));
                data.push(message);
            }
        }
        let Some(seen) = runs.last().filter(|_| !is_end) else {
            return Ok(Listing::whole(data));
        };
        next = seen.turn + 1;
    }
}

/// The messages of one run, each with its event.
fn messages_of_run(run_id: Uuid, journal: &[Event]) -> Result<Vec<SessionMessage>, Problem> {
    let own = own_turns(journal)?;
    let sources = turn_sources(journal)?;
    // A summary replaces the oldest turns, so the turns are matched with the newest sources.
    let first = sources.len().saturating_sub(own.turns.len());
    let mut all = Vec::new();
    for (turn, source) in own.turns.iter().zip(sources.into_iter().skip(first)) {
        let TurnSource { said, results } = source;
        for message in messages_of(std::slice::from_ref(turn)) {
            let call = message.result_of();
            let (seq, at) = call.and_then(|call| results.get(&call).copied()).unwrap_or(said);
            all.push(SessionMessage { run_id, seq, at, message });
        }
    }
    Ok(all)
}
