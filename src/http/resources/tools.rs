//! The registered tools, and whether the caller's runs may execute them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::page::{Listing, MAX_PAGE, PARTS, PartParams, by_number};
use super::redaction;
use crate::http::document::vocabulary::JsonSchema;
use crate::http::edge::auth::{Scoped, ToolsRead};
use crate::http::edge::extract::{Name, Params};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::run::{Caller, Effect};
use crate::tools::ToolNow;
use crate::tools::sandbox::plan::Confinement;

/// A tool that agents can use.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"effect": "once", "input_schema": {"type": "object"}}))]
pub(crate) struct Tool {
    /// The name that agents and scopes use.
    #[schema(example = "file_ops")]
    name: String,
    /// The description that the model gets.
    #[schema(example = "Reads and writes files of the workspace.")]
    description: String,
    /// The JSON Schema of the arguments.
    #[schema(value_type = JsonSchema)]
    input_schema: Value,
    /// The strongest effect that a call can have.
    effect: Effect,
    /// Whether a call can lose what exists.
    #[schema(example = false)]
    destructive: bool,
    /// Where the tool comes from.
    #[schema(example = "builtin")]
    source: String,
    /// How well the programs that it runs are confined: `enforced`, `partial` or `unavailable`;
    /// null: it runs none.
    #[schema(value_type = Option<String>, example = "enforced")]
    sandbox: Option<&'static str>,
    /// Whether this machine can give them access to the hosts that an agent's `governance.network` allows, or, for a
    /// tool of an MCP server, to those that its settings name; null: it runs none.
    #[schema(example = true)]
    network: Option<bool>,
    /// Why its calls fail now; null if they need not. An MCP server is not available, the sandbox is weaker
    /// than the operator requires, or there is no Chromium.
    #[schema(example = "The MCP server time is not available: it has ended.")]
    unavailable: Option<String>,
    /// Whether the caller's scopes allow its runs to execute the tool.
    #[schema(example = true)]
    allowed: bool,
}

impl Tool {
    fn of(now: &ToolNow, sandbox: Option<&Confinement>, caller: &Caller) -> Self {
        let ToolNow { info, runs_programs, may_lead_out, unavailable } = now;
        let sandbox = sandbox.filter(|_| *runs_programs);
        Self {
            name: info.name.clone(),
            description: redaction::text(info.description.clone()),
            input_schema: redaction::described(Value::clone(&info.input_schema)),
            effect: info.effect,
            destructive: info.destructive,
            source: info.source.clone(),
            sandbox: sandbox.map(|confinement| confinement.level().into()),
            network: sandbox.map(|confinement| confinement.network && *may_lead_out),
            unavailable: unavailable.clone().map(redaction::text),
            allowed: caller.may_execute(&info.name),
        }
    }
}

/// List tools
#[utoipa::path(
    get, path = "/tools", tag = "tools", security(("bearer" = ["tools:read"])),
    params(PartParams),
    responses((status = 200, description = "A page of tools, sorted by name.", body = Listing<Tool>)),
)]
pub(crate) async fn list_tools(
    State(app): State<App>,
    caller: Scoped<ToolsRead>,
    mut params: Params,
) -> Result<Response, Problem> {
    let page = by_number(&mut params, &caller.tenant, PARTS)?;
    params.finish()?;
    let all = Arc::clone(&app.tools);
    let pick = move || Listing::of_large(all(), &page, MAX_PAGE, size);
    let tools = redaction::run_by_size(MAX_PAGE, pick).await?;
    let bytes = tools.data.iter().map(size).sum();
    let listing = move || tools.map(|tool| Tool::of(&tool, app.sandbox.as_ref(), &caller));
    redaction::respond_in_turn(bytes, listing).await
}

/// About how many bytes a tool has in a page.
fn size(tool: &ToolNow) -> usize {
    tool.info.bytes()
}

/// Get a tool
#[utoipa::path(
    get, path = "/tools/{name}", tag = "tools", security(("bearer" = ["tools:read"])),
    params(("name" = String, Path, description = "The tool's name, percent-encoded: `mcp%3Atime%2Fnow`.")),
    responses((status = 200, description = "The tool.", body = Tool)),
)]
pub(crate) async fn get_tool(
    State(app): State<App>,
    caller: Scoped<ToolsRead>,
    Name(name): Name,
    params: Params,
) -> Result<Json<Tool>, Problem> {
    params.finish()?;
    let tools = (app.tools)();
    let tool = tools.iter().find(|tool| tool.info.name == name);
    let tool = tool.ok_or_else(|| Problem::not_found("tool"))?;
    Ok(Json(Tool::of(tool, app.sandbox.as_ref(), &caller)))
}
