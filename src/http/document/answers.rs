//! The responses of the routes that invoke an agent, for the API document.
//!
//! Of what an invocation can answer, the 200 has one type, which generated clients return: the run's
//! outcome. Streams and dry runs have operations of their own.

use std::collections::BTreeMap;

use serde_json::json;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::header::Header;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, PartialSchema, ToSchema};

use super::openapi::CONTENT_SCHEMA;

/// The responses to an invocation that was accepted.
pub(crate) struct Answers;

impl IntoResponses for Answers {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let ended = ResponseBuilder::new()
            .description(
                "The outcome of the run. With `Accept: text/event-stream`, its events instead, as \
                 `stream_agent` answers them; with `dry_run: true` in the body, what \
                 `dry_run_agent` answers.",
            )
            .content("application/json", Content::new(Some(Ref::from_schema_name("Run"))))
            .header("x-run-id", text("The run's id."))
            .header(
                "idempotency-replayed",
                text("`true` if the run was started by an earlier request with the same key."),
            );
        let accepted = ResponseBuilder::new()
            .description("The run has not ended: it is queued, running or parked.")
            .content("application/json", Content::new(Some(Ref::from_schema_name("RunDetail"))))
            .header("x-run-id", text("The run's id."))
            .header("location", text("The URL of the run."))
            .header("preference-applied", text("`respond-async`, if the preference was applied."))
            .header(
                "idempotency-replayed",
                text("`true` if the run was started by an earlier request with the same key."),
            );
        BTreeMap::from([
            ("200".to_owned(), RefOr::T(ended.build())),
            ("202".to_owned(), RefOr::T(accepted.build())),
        ])
    }
}

/// The response to an invocation that is always a stream.
pub(crate) struct Streamed;

impl IntoResponses for Streamed {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let events = ResponseBuilder::new()
            .description("The events of the run until it ends.")
            .content("text/event-stream", events())
            .header("x-run-id", text("The run's id."))
            .header("preference-applied", text("`respond-async`, if the run was queued."))
            .header(
                "idempotency-replayed",
                text("`true` if the run was started by an earlier request with the same key."),
            );
        BTreeMap::from([("200".to_owned(), RefOr::T(events.build()))])
    }
}

/// An event of a stream, as an example.
pub(crate) const EXAMPLE_FRAME: &str = "event: attempt.started\nid: 2\n\
    data: {\"seq\":2,\"type\":\"attempt.started\",\"at\":\"2026-01-31T12:00:00Z\",\
    \"run_id\":\"01970000-0000-7000-8000-000000000000\",\"data\":{\"attempt\":1}}\n\n";

/// The text of a stream of a run's events.
pub(crate) struct EventStream;

impl PartialSchema for EventStream {
    fn schema() -> RefOr<Schema> {
        let text = "Server-Sent Events: `id` is the event's sequence number, `event` its type, `data` the whole \
                    event as JSON, a `StreamEvent`. The last event's `data.run` is the outcome of the run.";
        let each = json!({"$ref": "#/components/schemas/StreamEvent"});
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(text))
            .content_media_type("text/event-stream")
            .extensions(Some(ExtensionsBuilder::new().add(CONTENT_SCHEMA, each).build()))
            .into()
    }
}

impl ToSchema for EventStream {}

fn events() -> Content {
    let mut content = Content::new(Some(EventStream::schema()));
    content.example = Some(EXAMPLE_FRAME.into());
    content
}

fn text(description: &str) -> Header {
    let mut header = Header::new(ObjectBuilder::new().schema_type(Type::String));
    header.description = Some(description.to_owned());
    header
}
