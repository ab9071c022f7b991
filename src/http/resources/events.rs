//! The journal of a run, as pages or as an event stream that ends with the run.

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::page::{ListPage, Listing, MAX_PAGE, PARTS, PartParams, by_number, number_position};
use super::redaction;
use super::runs::existing;
use super::stream::{self, Viewer};
use crate::http::document::answers::{EXAMPLE_FRAME, EventStream};
use crate::http::document::vocabulary::EventData;
use crate::http::edge::accept::MediaType;
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::extract::{Params, RunId};
use crate::http::edge::problem::{Code, Problem};
use crate::http::edge::tokens;
use crate::http::state::App;
use crate::runtime::journals;
use crate::store::RunRecord;

/// One entry of the journal, without secrets.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct JournalEntry(Box<RawValue>);

impl ToSchema for JournalEntry {
    fn name() -> std::borrow::Cow<'static, str> {
        "Event".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((EventData::name().into(), EventData::schema()));
    }
}

/// Its common fields, of which the example is made; the schema of the document is
/// [`crate::http::document`]'s union of all types.
impl PartialSchema for JournalEntry {
    fn schema() -> RefOr<Schema> {
        let format = |format| Some(SchemaFormat::KnownFormat(format));
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let number = ObjectBuilder::new().schema_type(Type::Integer).examples([json!(1)]);
        ObjectBuilder::new()
            .description(Some("An event of a run."))
            .property(
                "seq",
                number.description(Some(
                    "Sequence number within the run, starting at 1, without gaps.",
                )),
            )
            .property(
                "at",
                text()
                    .format(format(KnownFormat::DateTime))
                    .description(Some("When the event happened.")),
            )
            .property(
                "run_id",
                text().format(format(KnownFormat::Uuid)).description(Some("The run's id.")),
            )
            .property("type", text())
            .property("data", Ref::from_schema_name("EventData"))
            .required("seq")
            .required("at")
            .required("run_id")
            .required("type")
            .required("data")
            .examples([json!({"type": "attempt.started"})])
            .into()
    }
}

/// List a run's events
///
/// The run's journal, in order. A page has at most 4 MiB, or one event, so it can have fewer than
/// `limit`. `after` is where the first page begins; with `cursor` it has no effect. With
/// `Accept: text/event-stream`, a stream that replays the events after `Last-Event-ID` (or `after`)
/// and continues until the run has ended.
#[utoipa::path(
    get, path = "/runs/{id}/events", tag = "runs", security(("bearer" = ["runs:read"])),
    params(
        ("id" = Uuid, Path, description = "The run's id."),
        ("after" = Option<i64>, Query, description = "Only events with a greater sequence number.", minimum = 0),
        ("access_token" = Option<String>, Query, description = "A short-lived token, for event streams of browsers, which cannot send headers."),
        ("Last-Event-ID" = Option<i64>, Header, description = "The sequence number of the last event that the client received, to resume a stream.", minimum = 0),
        PartParams,
    ),
    responses(
        (status = 200, description = "A page of events, in order; or an event stream.", content(
            (Listing<JournalEntry> = "application/json", example = json!({"data": [{
                "seq": 2, "type": "attempt.started", "at": "2026-01-31T12:00:00Z",
                "run_id": "01970000-0000-7000-8000-000000000000", "data": {"attempt": 1}}], "next_cursor": null})), (inline(EventStream) = "text/event-stream", example = json!(EXAMPLE_FRAME)),
        )),
        (status = 204, description = "The run has ended and the client has received all events."),
    ),
)]
pub(crate) async fn list_events(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    media_type: MediaType,
    LastEventId(seen): LastEventId,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Response, Problem> {
    let after = params.value("after", "the sequence number of an event", event_number)?;
    if media_type == MediaType::EventStream {
        params.text(tokens::PARAMETER); // was read by authentication
        params.finish()?;
        let after = seen.or(after).unwrap_or(0);
        let run = existing(&app, &caller.tenant, id).await?;
        if run.status.is_terminal() && after >= run.last_seq() {
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        // An event that has not happened yet cannot have been received.
        let after = after.min(run.last_seq());
        let follower = app.runtime.follow(&caller.tenant, id, after);
        let viewer = Viewer { tenant: &caller.tenant, credential: caller.credential() };
        return Ok(stream::response(&app, viewer, id, after, follower, None));
    }
    let page = by_number(&mut params, &caller.tenant, PARTS)?;
    params.finish()?;
    let run = existing(&app, &caller.tenant, id).await?;
    events_from(&app, &run, page.after.or(after).unwrap_or(0), &page).await
}

/// The page of events behind `after`.
async fn events_from(
    app: &App,
    run: &RunRecord,
    after: i64,
    page: &ListPage<i64>,
) -> Result<Response, Problem> {
    let (size, of_list, newest) = (page.limit as usize - 1, page.list, run.last_seq());
    let (rows, bytes) = (page.limit - 1, MAX_PAGE as u64);
    let next = app.store.journal_piece(&run.tenant, run.id, after, rows, bytes).await?;
    let Some(next) = next else {
        return Ok(Json(Listing::<JournalEntry>::whole(Vec::new())).into_response());
    };
    let permit = journals::permit(next.bytes).await;
    let events = app.store.readable_until(&run.tenant, run.id, after, next.until).await?;
    let listing = move || {
        let _permit = permit;
        let unwritable = |error: serde_json::Error| Problem::internal(error.to_string());
        let (mut entries, mut bytes, mut last) = (Vec::new(), 0, after);
        let is_truncated = events.len() > size;
        for event in events.into_iter().take(size) {
            let text = redaction::event(&event).map_err(unwritable)?;
            bytes += text.len();
            if bytes > MAX_PAGE && !entries.is_empty() {
                break;
            }
            last = event.seq;
            entries.push(JournalEntry(RawValue::from_string(text).map_err(unwritable)?));
        }
        let has_more = is_truncated || last < newest.max(next.until);
        Ok(Listing::until(entries, of_list, has_more.then(|| number_position(last))))
    };
    redaction::respond(next.bytes, listing).await
}

fn event_number(text: &str) -> Option<i64> {
    text.trim().parse().ok().filter(|seq| *seq >= 0)
}

/// The header `Last-Event-ID`.
pub(crate) struct LastEventId(Option<i64>);

impl FromRequestParts<App> for LastEventId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let Some(given) = parts.headers.get("last-event-id") else { return Ok(Self(None)) };
        match given.to_str().ok().and_then(event_number) {
            Some(seq) => Ok(Self(Some(seq))),
            None => Err(Problem::new(
                Code::InvalidParameter,
                "The header Last-Event-ID must be the sequence number of an event.",
            )),
        }
    }
}
