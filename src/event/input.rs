//! Input that an MCP server asks for in the middle of a call, and the client's answer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// What a server asks for before it completes a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = InputRequired)]
pub struct InputRequired {
    /// The MCP server that asks.
    pub server: String,
    /// How many times it has asked during this call, including this time.
    pub round: u32,
    /// The forms to fill in, by the names under which they are answered.
    pub requests: BTreeMap<String, InputRequest>,
    /// Opaque state that is returned to the server with the answers; not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub request_state: Option<String>,
    /// Requests to the network that the start of the call did not count; not served.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schema(ignore)]
    pub requests_uncounted: u64,
}

/// A form that is to be filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InputRequest {
    /// For the person who answers, in the words of the server.
    pub message: String,
    /// A flat object of strings, numbers, booleans and choices.
    #[schema(value_type = Object)]
    pub requested_schema: Value,
}

/// The answer to one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InputResponse {
    pub action: InputAction,
    /// What was filled in, for `accept`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub content: Option<Value>,
}

/// What the person did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputAction {
    Accept,
    Decline,
    /// Neither of the two.
    Cancel,
}

impl InputAction {
    /// The name used in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Decline => "decline",
            Self::Cancel => "cancel",
        }
    }
}

/// The answers, by the names of the requests.
pub type InputResponses = BTreeMap<String, InputResponse>;

/// The answer to a request for input, with which the call is repeated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputAnswer {
    /// How many times the server has asked.
    pub round: u32,
    pub request_state: Option<String>,
    pub responses: InputResponses,
}

impl InputRequired {
    /// Without the fields that only the service and the server use.
    #[must_use]
    pub fn shown(&self) -> Self {
        Self { request_state: None, requests_uncounted: 0, ..self.clone() }
    }

    /// The same with answers.
    pub fn answered(&self, responses: InputResponses) -> InputAnswer {
        InputAnswer { round: self.round, request_state: self.request_state.clone(), responses }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}
