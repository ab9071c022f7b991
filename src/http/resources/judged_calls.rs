//! What an agent's gate would decide on a call, without a run and without executing it.
//!
//! The cases of `toolloop policy test` are judged in the same way, by the runtime.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::redaction;
use crate::http::edge::auth::{AgentsRead, Scoped};
use crate::http::edge::extract::{JsonObject, Name, Params, fields};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::{Label, null_as_default};
use crate::runtime::{CaseDecision, Decision, NotJudged, PolicyCase};

/// A call that is to be judged.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"tool": "file_ops", "arguments": {"operation": "read", "path": "README.md"}}))]
pub(crate) struct CallToJudge {
    /// The tool.
    tool: String,
    /// Its arguments.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    arguments: Option<Value>,
    /// What the run would have read.
    #[serde(default, deserialize_with = "null_as_default")]
    labels: Vec<Label>,
    /// Empty files that the workspace contains; at most 100, each of at most 256
    /// bytes and 16 names.
    #[serde(default, deserialize_with = "null_as_default")]
    #[schema(max_items = 100)]
    files: Vec<String>,
}

const MAX_FILES: usize = 100;
/// Bytes of the path of such a file, and names in it: each directory is made and removed.
const MAX_PATH: usize = 256;
const MAX_NAMES: usize = 16;

/// What the gate would decide.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JudgedCall {
    /// `allowed`, `warned`, `escalated` or `blocked`.
    #[schema(example = "allowed")]
    decision: String,
    /// The rule that decides; `none` where none objects.
    #[schema(example = "none")]
    rule: String,
    /// Its reason.
    #[schema(example = json!(null))]
    reason: Option<String>,
    /// What the call would do, as in `tool_call.started`; empty if unknown.
    #[schema(value_type = Vec<Object>)]
    actions: Value,
}

/// Judge a tool call
///
/// Answers what the agent's gate would decide on a call by this caller, and what the call would do. Nothing is
/// executed: the tool only says what it would do, in a workspace with empty files (`files`) or none.
/// Budgets and rate limits do not count the call. Tools that delegate to other agents are not available here.
/// A call that does not reach the gate, e.g. with invalid arguments, is refused with the reason.
#[utoipa::path(
    post, path = "/agents/{name}/policy/judge", tag = "agents", security(("bearer" = ["agents:read"])),
    params(("name" = String, Path, description = "The agent's name.")),
    request_body = CallToJudge,
    responses((status = 200, description = "What the gate would decide.", body = JudgedCall)),
)]
pub(crate) async fn judge_call(
    State(app): State<App>,
    caller: Scoped<AgentsRead>,
    Name(name): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<JudgedCall>, Problem> {
    params.finish()?;
    let call: CallToJudge =
        fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))?;
    if call.files.len() > MAX_FILES {
        return Err(Problem::at(Code::InvalidInputs, "/files", "must have at most 100 entries"));
    }
    let is_long = |path: &String| path.len() > MAX_PATH || path.split('/').count() > MAX_NAMES;
    if let Some(at) = call.files.iter().position(is_long) {
        let most = format!("must have at most {MAX_PATH} bytes and {MAX_NAMES} path segments");
        return Err(Problem::at(Code::InvalidInputs, format!("/files/{at}"), most));
    }
    let agent = app.catalogue.agent(&name).ok_or_else(|| Problem::not_found("agent"))?;
    let case = PolicyCase {
        name: None,
        tool: call.tool,
        arguments: call.arguments,
        actions: None,
        labels: call.labels.into(),
        scopes: caller.scopes.clone(),
        files: call.files,
        expect: Decision::Allowed,
        rule: None,
    };
    let judged = app.runtime.judge_call(&agent, &case).await;
    let CaseDecision { decision, rule, reason, actions } = judged.map_err(|refused| {
        let (pointer, why) = match refused {
            NotJudged::Tool(why) => ("/tool".to_owned(), why),
            NotJudged::File(at, why) => (format!("/files/{at}"), why),
            NotJudged::Call(why) => ("/arguments".to_owned(), why),
        };
        Problem::at(Code::InvalidInputs, pointer, redaction::text(why))
    })?;
    Ok(Json(JudgedCall {
        decision,
        rule,
        reason: reason.map(redaction::text),
        actions: redaction::document(json!(actions)),
    }))
}
