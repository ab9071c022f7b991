//! Named schemas for enums and free-form objects that are plain strings and JSON in our own types.
//!
//! With a name, generated clients have one type for each. Nothing is validated here.

use std::borrow::Cow;

use serde_json::{Value, json};
use strum::VariantNames as _;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::event;
use crate::store;

macro_rules! words {
    ($($(#[doc = $about:literal])+ $name:ident = $words:expr;)*) => {$(
        $(#[doc = $about])+
        pub(crate) struct $name;

        impl $name {
            pub(crate) const WORDS: &[&str] = $words;
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
    /// The policy decision on a tool call.
    Decision = &["allowed", "warned", "escalated", "blocked"];
    /// The outcome of a tool call.
    CallOutcome =
        &["succeeded", "failed", "blocked", "cancelled", "timed_out", "not_executed", "unknown"];
    /// The state of a tool call.
    ToolCallState = &["proposed", "denied", "awaiting_approval", "awaiting_client", "dispatched", "succeeded", "failed", "unknown", "cancelled"];
    /// What a parked run waits for: `approval` of a tool call, the result of a `client` tool or the input
    /// that a tool asks the client for, `review` of a call whose outcome is unknown after a crash, or `escalation`, the decision whether to
    /// continue after a stop condition.
    PendingKind = &["approval", "client", "review", "escalation"];
    /// The status of an approval: `answered` by the result of a client tool or by input, `resolved` by a review,
    /// `void` because the run ended first.
    ApprovalStatus = store::ApprovalStatus::VARIANTS;
    /// The status of a webhook delivery: `failed` if it was abandoned, `disabled` if the receiver has
    /// answered 410 to an earlier delivery of the run.
    DeliveryStatus = store::DeliveryStatus::VARIANTS;
    /// What is remembered: the `input` of a run, what the model said or put out (`model_response`), a
    /// `tool_call` with its result, a `decision` against a call or an output, or the `error` of a run.
    ObservationKind = store::OBSERVATION_KINDS;
    /// What an audit record is about: a tool call, or an act of administration.
    AuditAction = event::AuditAction::VARIANTS;
    /// Whether a process is ready to serve requests.
    ReadinessStatus = &["ready", "draining", "unavailable"];
}

macro_rules! open_objects {
    ($($(#[doc = $about:literal])+ $name:ident like $example:expr;)*) => {$(
        $(#[doc = $about])+
        pub(crate) struct $name;

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                open_object(concat!($($about),+).trim(), $example)
            }
        }
    )*};
}

open_objects! {
    /// The inputs of an agent, which match its input schema.
    RunInputs like json!({"task": "What is in here?"});
    /// The data of an event; its fields depend on the event's type.
    EventData like json!({"attempt": 1});
    /// An OpenAPI 3.1 document.
    OpenApiDocument like json!({"openapi": "3.1.0"});
    /// A JSON Schema (2020-12).
    JsonSchema like json!({"type": "object"});
}

fn open_object(about: &str, example: Value) -> RefOr<Schema> {
    let values = AdditionalProperties::FreeForm(true);
    let object = ObjectBuilder::new().schema_type(Type::Object).additional_properties(Some(values));
    object.description(Some(about)).examples([example]).into()
}

/// Labels of a run.
pub(crate) struct RunMetadata;

impl RunMetadata {
    pub(crate) const MOST: usize = 64;
    /// Characters of a key, which has one at least.
    pub(crate) const MAX_KEY: usize = 128;
    /// Characters of a value.
    pub(crate) const MAX_VALUE: usize = 1024;
}

impl ToSchema for RunMetadata {}

impl PartialSchema for RunMetadata {
    fn schema() -> RefOr<Schema> {
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let key = text().min_length(Some(1)).max_length(Some(Self::MAX_KEY));
        let value = text().max_length(Some(Self::MAX_VALUE));
        let object = ObjectBuilder::new().schema_type(Type::Object).property_names(Some(key));
        let about = format!(
            "Labels of a run: at most {}, with keys of 1 to {} and values of at most {} characters.",
            Self::MOST,
            Self::MAX_KEY,
            Self::MAX_VALUE
        );
        let object = object.additional_properties(Some(value)).max_properties(Some(Self::MOST));
        object.description(Some(about)).examples([json!({"ticket": "42"})]).into()
    }
}
