//! What an invocation answers, for the API document: both invocations answer the same.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::header::Header;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};

/// The answers of an invocation whose run was accepted.
pub(crate) struct Answers;

impl IntoResponses for Answers {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let ended = ResponseBuilder::new()
            .description(
                "The run has ended; or, as an event stream, what happens until it has. Of a dry run: what would be.",
            )
            .content("application/json", Content::new(Some(run_or_dry_run())))
            .content("text/event-stream", events())
            .header("x-run-id", text("The run."))
            .header("idempotency-replayed", text("`true` where the key stood for an earlier request."));
        let accepted = ResponseBuilder::new()
            .description("The run is queued, goes on without this connection, or is parked.")
            .content("application/json", Content::new(Some(Ref::from_schema_name("RunDetail"))))
            .header("x-run-id", text("The run."))
            .header("location", text("Where to ask for the run."))
            .header(
                "preference-applied",
                text("`respond-async`, where that is why there is no end to tell."),
            )
            .header(
                "idempotency-replayed",
                text("`true` where the key stood for an earlier request."),
            );
        BTreeMap::from([
            ("200".to_owned(), RefOr::T(ended.build())),
            ("202".to_owned(), RefOr::T(accepted.build())),
        ])
    }
}

fn run_or_dry_run() -> Schema {
    let of = |name| RefOr::Ref(Ref::from_schema_name(name));
    Schema::OneOf(OneOfBuilder::new().item(of("Run")).item(of("DryRun")).build())
}

/// One event of a stream.
pub(crate) const EXAMPLE_FRAME: &str = "event: attempt.started\nid: 2\n\
    data: {\"seq\":2,\"type\":\"attempt.started\",\"at\":\"2026-01-31T12:00:00Z\",\
    \"run_id\":\"01970000-0000-7000-8000-000000000000\",\"data\":{\"attempt\":1}}\n\n";

fn events() -> Content {
    let text = "Server-Sent Events: `id` is the number of the event, `event` its type, `data` the whole event as \
                JSON. The last event's `data.run` is the answer as JSON.";
    let mut content =
        Content::new(Some(ObjectBuilder::new().schema_type(Type::String).description(Some(text))));
    content.example = Some(EXAMPLE_FRAME.into());
    content
}

fn text(description: &str) -> Header {
    let mut header = Header::new(ObjectBuilder::new().schema_type(Type::String));
    header.description = Some(description.to_owned());
    header
}
