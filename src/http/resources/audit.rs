//! The audit log, read only: decisions on tool calls and their outcomes, and acts of administration.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time, time_position};
use super::redaction;
use super::run_parts::json_or_text;
use crate::http::document::vocabulary::{AuditAction as AuditActionWord, CallOutcome, Decision};
use crate::http::edge::auth::{AuditRead, Scoped};
use crate::http::edge::extract::Params;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::run::Label;
use crate::store::{AuditFilter, AuditRow};

/// The decision on a tool call and its outcome, or an act of administration.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditRecord, example = json!({"arguments": {"operation": "read", "path": "secret/token"}}))]
pub(crate) struct AuditView {
    /// The record's id.
    id: Uuid,
    /// When the decision was made, or, if it was written late, when it was written.
    at: DateTime<Utc>,
    /// When the decision was made, if it was written more than two minutes later.
    #[schema(example = json!(null))]
    decided_at: Option<DateTime<Utc>>,
    /// What the record is about.
    #[schema(value_type = AuditActionWord, example = "tool_call")]
    action: &'static str,
    /// The id of the API key, or the subject of the token, on whose behalf the call was made or that
    /// acted; `service` for the service itself, `unknown` for a refused login that names no key.
    #[schema(example = "5f2a9c01d3e47b68")]
    subject: String,
    /// The run that the call belongs to, or that was to be cancelled.
    run_id: Option<Uuid>,
    /// The agent of the run, or that the act was done to.
    #[schema(example = "assistant")]
    agent: Option<String>,
    /// The session of the run, or that the act was done to.
    #[schema(example = json!(null))]
    session_id: Option<String>,
    /// The tool's name; null without a call.
    #[schema(example = "file_ops")]
    tool: Option<String>,
    /// The policy rule that decided; null without a call. Of what was allowed, the rule with the entry
    /// that allows it: `command`, `network`, `path` or `tool_policy`, else `tools` (or `client_tools`),
    /// which offered the tool.
    #[schema(example = "path")]
    rule: Option<String>,
    /// The pattern or entry of that rule which decided, if it was one.
    #[schema(example = "secret/**")]
    pattern: Option<String>,
    /// The hash of the definition that the run executes; null without a run.
    #[schema(example = json!(null))]
    definition_hash: Option<String>,
    /// The decision.
    #[schema(value_type = Decision, example = "blocked")]
    decision: String,
    /// The reason for the decision.
    #[schema(example = "`secret/token` may not be read.")]
    reason: Option<String>,
    /// The call's arguments; a string if they are not valid JSON or were cut. What an act was done to,
    /// e.g. a key's id; refused logins have their `source` and `count`.
    arguments: Value,
    /// The run's labels when the decision was made.
    #[schema(value_type = Vec<Label>)]
    labels: Vec<String>,
    /// The outcome of the call or act.
    #[schema(value_type = CallOutcome, example = "not_executed")]
    outcome: String,
    /// Duration of the execution in milliseconds; null if nothing was executed.
    #[schema(example = json!(null))]
    duration_ms: Option<u64>,
    /// Bytes of what the tool returned, before anything in it was replaced or withheld; null if
    /// nothing was executed.
    #[schema(example = json!(null))]
    result_bytes: Option<u64>,
}

impl From<AuditRow> for AuditView {
    fn from(row: AuditRow) -> Self {
        Self {
            id: row.id,
            at: row.at,
            decided_at: row.decided_at,
            action: row.action.as_str(),
            subject: row.subject,
            run_id: row.run_id,
            agent: row.agent,
            session_id: row.session_id,
            tool: row.tool.map(redaction::text),
            rule: row.rule,
            pattern: row.pattern,
            definition_hash: row.definition_hash,
            decision: row.decision,
            reason: row.reason.map(redaction::text),
            arguments: redaction::output(json_or_text(&row.arguments)),
            labels: row.labels,
            outcome: row.outcome,
            duration_ms: row.duration_ms,
            result_bytes: row.result_bytes,
        }
    }
}

/// List audit records
///
/// Newest first. Records are kept when the runs that they name are deleted.
#[utoipa::path(
    get, path = "/audit", tag = "audit", security(("bearer" = ["audit:read"])),
    params(
        ("action" = Option<AuditActionWord>, Query, description = "Records of this kind."),
        ("run_id" = Option<Uuid>, Query, description = "Records of this run."),
        ("agent" = Option<String>, Query, description = "Records of this agent's runs, and acts on this agent."),
        ("session_id" = Option<String>, Query, description = "Records of this session's runs, and acts on this session."),
        ("tool" = Option<String>, Query, description = "Calls of this tool."),
        ("rule" = Option<String>, Query, description = "Calls on which this rule decided, those that it allowed included.", example = "path"),
        ("decision" = Option<Decision>, Query, description = "Records with this decision."),
        ("subject" = Option<String>, Query, description = "Records of this key id or token subject."),
        ("outcome" = Option<CallOutcome>, Query, description = "Records with this outcome."),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "Records after this time."),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "Records before this time."),
        ListParams,
    ),
    responses((status = 200, description = "A page of audit records.", body = Listing<AuditView>)),
)]
pub(crate) async fn list_audit(
    State(app): State<App>,
    caller: Scoped<AuditRead>,
    mut params: Params,
) -> Result<Json<Listing<AuditView>>, Problem> {
    let filter = AuditFilter {
        action: params.one_of("action")?,
        run_id: params.uuid("run_id")?,
        agent: params.text("agent"),
        session_id: params.text("session_id"),
        tool: params.text("tool"),
        rule: params.text("rule"),
        decision: params.word("decision", Decision::WORDS)?,
        subject: params.text("subject"),
        outcome: params.word("outcome", CallOutcome::WORDS)?,
        created_after: params.time("created_after")?,
        created_before: params.bound("created_before")?,
    };
    let page = by_time(&mut params, &caller.tenant, LISTS)?;
    params.finish()?;
    let rows = app.store.audit(&caller.tenant, &filter, &page).await?;
    let cursor = |row: &AuditRow| time_position(row.at, &row.id.to_string());
    Ok(Json(Listing::of(rows, &page, cursor, AuditView::from)))
}
