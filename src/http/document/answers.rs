//! The responses of both invocation routes, for the API document.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::header::Header;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};

/// The responses to an invocation that was accepted.
pub(crate) struct Answers;

impl IntoResponses for Answers {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let ended = ResponseBuilder::new()
            .description(
                "The outcome of the run; with `Accept: text/event-stream`, its events until it ends; \
                 with `dry_run`, the prompt, tools and limits that the run would have.",
            )
            .content("application/json", Content::new(Some(run_or_dry_run())))
            .content("text/event-stream", events())
            .header("x-run-id", text("The run's id."))
            .header("idempotency-replayed", text("`true` if the run was started by an earlier request with the same key."));
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

fn run_or_dry_run() -> Schema {
    let of = |name| RefOr::Ref(Ref::from_schema_name(name));
    Schema::OneOf(OneOfBuilder::new().item(of("Run")).item(of("DryRun")).build())
}

/// An event of a stream, as an example.
pub(crate) const EXAMPLE_FRAME: &str = "event: attempt.started\nid: 2\n\
    data: {\"seq\":2,\"type\":\"attempt.started\",\"at\":\"2026-01-31T12:00:00Z\",\
    \"run_id\":\"01970000-0000-7000-8000-000000000000\",\"data\":{\"attempt\":1}}\n\n";

fn events() -> Content {
    let text = "Server-Sent Events: `id` is the event's sequence number, `event` its type, `data` the whole \
                event as JSON. The last event's `data.run` is the JSON response of the invocation.";
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
