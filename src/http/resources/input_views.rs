//! Input that a tool asks for in the middle of a call, as the API shows it. What the server says is
//! for a person to read: invisible characters of it are escaped, secrets are left out.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::redaction;
use crate::event::{InputRequest, InputRequired};
use crate::message::visible::{escaped, escaped_json};

/// What a tool asks for in the middle of a call. The answer is given as `responses`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PendingInput)]
pub(crate) struct InputView {
    /// The MCP server that asks.
    #[schema(example = "issues")]
    server: String,
    /// How many times it has asked during this call, including this time.
    #[schema(example = 1)]
    round: u32,
    /// The forms to fill in, by the names that the answers are given under.
    requests: BTreeMap<String, FormView>,
}

/// A form that a tool asks to be filled in.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = InputForm)]
pub(crate) struct FormView {
    /// What the server says to the person who answers; invisible characters are escaped.
    #[schema(example = "Which project is the issue for?")]
    message: String,
    /// JSON Schema of the answer's `content`: a flat object of strings, numbers, booleans and choices.
    #[schema(value_type = Object)]
    requested_schema: Value,
    /// The schema as JSON text for display to a person.
    display: String,
}

impl From<InputRequired> for InputView {
    fn from(asked: InputRequired) -> Self {
        let form = |(name, form): (String, InputRequest)| (name, form.into());
        let requests = asked.requests.into_iter().map(form).collect();
        Self { server: asked.server, round: asked.round, requests }
    }
}

impl From<InputRequest> for FormView {
    fn from(asked: InputRequest) -> Self {
        let requested_schema = redaction::document(asked.requested_schema);
        Self {
            message: redaction::text(escaped(&asked.message).into_owned()),
            display: escaped_json(&format!("{requested_schema:#}")).into_owned(),
            requested_schema,
        }
    }
}
