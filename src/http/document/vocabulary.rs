//! Names in the API document for what would be nameless in it: closed sets of words and open
//! objects.
//!
//! Rows hold words as texts, and inputs as whatever JSON they are. The document gives each of them
//! a schema of its own, so that generated clients have a type for it, once. Nothing is checked
//! here.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

macro_rules! words {
    ($($(#[doc = $about:literal])+ $name:ident = $($word:literal)|+;)*) => {$(
        $(#[doc = $about])+
        pub(crate) struct $name;

        impl $name {
            /// All there are.
            pub(crate) const WORDS: &[&str] = &[$($word),+];
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let word = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(Self::WORDS.iter().copied()));
                word.description(Some(concat!($($about),+).trim())).into()
            }
        }
    )*};
}

words! {
    /// What the gate decided about a tool call.
    Decision = "allowed" | "warned" | "escalated" | "blocked";
    /// What became of an audited tool call.
    CallOutcome = "succeeded" | "failed" | "cancelled" | "not_executed" | "unknown";
    /// Where a tool call stands.
    ToolCallState = "proposed" | "denied" | "awaiting_approval" | "awaiting_client" | "dispatched" | "succeeded"
        | "failed" | "unknown" | "cancelled";
    /// Whom a parked run waits for: an approver, the caller's own tool, a reviewer of a call whose
    /// outcome a crash left unknown, or somebody who lets it go on after a stop condition.
    PendingKind = "approval" | "client" | "review" | "escalation";
    /// Where something that a run asked for stands: open, decided, given up on, answered by the
    /// caller, found out, or void because the run ended first.
    ApprovalStatus = "pending" | "approved" | "denied" | "expired" | "answered" | "resolved" | "void";
    /// Whether requests should be sent to a process.
    ReadinessStatus = "ready" | "draining" | "unavailable";
    /// What kind of thing happened in a run.
    EventType = "run.queued" | "run.started" | "session.loaded" | "skill.activated" | "run.resumed"
        | "attempt.started" | "iteration.started" | "model.responded" | "tool_call.started" | "tool_call.completed"
        | "tool_call.blocked" | "tool_call.awaiting_client" | "approval.requested" | "approval.resolved"
        | "handoff.started" | "budget.warned" | "output.proposed" | "output.reflected" | "validation.failed"
        | "confirmation.requested" | "decision.extraction_failed" | "decision.validation_failed"
        | "tool_choice.unmet" | "answer.blank" | "context.compacted" | "run.cancel_requested" | "run.completed"
        | "run.failed" | "run.cancelled";
}

macro_rules! open_objects {
    ($($(#[doc = $about:literal])+ $name:ident of $values:expr, like $example:expr;)*) => {$(
        $(#[doc = $about])+
        pub(crate) struct $name;

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                open_object(concat!($($about),+).trim(), $values, $example)
            }
        }
    )*};
}

open_objects! {
    /// What an agent works on; matches the agent's input schema.
    RunInputs of None, like json!({"task": "What is in here?"});
    /// The caller's labels, to find a run by: at most 64, keys of 1 to 128 and values of at most
    /// 1024 characters.
    RunMetadata of Some(Type::String), like json!({"ticket": "42"});
    /// What happened, by the type of the event.
    EventData of None, like json!({"attempt": 1});
    /// An OpenAPI 3.1 document.
    OpenApiDocument of None, like json!({"openapi": "3.1.0"});
    /// A JSON Schema (2020-12).
    JsonSchema of None, like json!({"type": "object"});
}

fn open_object(about: &str, values: Option<Type>, example: Value) -> RefOr<Schema> {
    let values = match values {
        Some(kind) => AdditionalProperties::RefOr(ObjectBuilder::new().schema_type(kind).into()),
        None => AdditionalProperties::FreeForm(true),
    };
    let object = ObjectBuilder::new().schema_type(Type::Object).additional_properties(Some(values));
    object.description(Some(about)).examples([example]).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::RunEvent;

    #[test]
    fn the_event_types_are_those_of_events() {
        let unknown =
            serde_json::from_value::<RunEvent>(json!({"type": "?"})).unwrap_err().to_string();
        let known: Vec<&str> = unknown.split('`').skip(3).step_by(2).collect();
        assert_eq!(EventType::WORDS, known, "{unknown}");
    }
}
