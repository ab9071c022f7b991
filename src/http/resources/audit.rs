//! The audit log, read only: what was decided about tool calls, and what became of them.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time, time_cursor};
use super::run_parts::json_or_text;
use crate::http::document::vocabulary::{CallOutcome, Decision};
use crate::http::edge::auth::{AuditRead, Scoped};
use crate::http::edge::extract::Params;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::{AuditFilter, AuditRow};

/// One audit record.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditRecord, example = json!({"arguments": {"operation": "read", "path": "secret/token"}}))]
pub(crate) struct AuditView {
    /// The record.
    id: Uuid,
    /// When it was decided.
    at: DateTime<Utc>,
    /// Key id or token subject on whose behalf the call was made.
    #[schema(example = "5f2a9c01d3e47b68")]
    subject: String,
    /// The run that the call belongs to.
    run_id: Uuid,
    /// The tool that was called.
    #[schema(example = "file_ops")]
    tool: String,
    /// The rule that decided.
    #[schema(example = "path")]
    rule: String,
    /// What was decided.
    #[schema(value_type = Decision, example = "blocked")]
    decision: String,
    /// Why, in words.
    #[schema(example = "`secret/token` may not be read.")]
    reason: Option<String>,
    /// What it was called with; a text where that is no JSON or was cut.
    arguments: Value,
    /// What became of the call.
    #[schema(value_type = CallOutcome, example = "not_executed")]
    outcome: String,
    /// Milliseconds of execution.
    #[schema(example = json!(null))]
    duration_ms: Option<u64>,
}

impl From<AuditRow> for AuditView {
    fn from(AuditRow { id, subject, run_id, record, .. }: AuditRow) -> Self {
        Self {
            id,
            at: record.at,
            subject,
            run_id,
            tool: record.tool,
            rule: record.rule,
            decision: record.decision,
            reason: record.reason,
            arguments: json_or_text(&record.arguments),
            outcome: record.outcome,
            duration_ms: record.duration_ms,
        }
    }
}

/// List audit records
///
/// Newest first.
#[utoipa::path(
    get, path = "/audit", tag = "audit", security(("bearer" = ["audit:read"])),
    params(
        ("run_id" = Option<Uuid>, Query, description = "Calls of this run."),
        ("tool" = Option<String>, Query, description = "Calls of this tool."),
        ("decision" = Option<Decision>, Query, description = "Calls about which this was decided."),
        ("subject" = Option<String>, Query, description = "Calls on behalf of this key or subject."),
        ("outcome" = Option<CallOutcome>, Query, description = "Calls of which this became."),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "Records after this instant."),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "Records before this instant."),
        ListParams,
    ),
    responses((status = 200, description = "A page of audit records.", body = Listing<AuditView>)),
)]
pub(crate) async fn list_audit(
    State(app): State<App>,
    caller: Scoped<AuditRead>,
    mut params: Params,
) -> Result<Json<Listing<AuditView>>, Problem> {
    let one_of =
        |names: &'static [&str]| move |text: &str| names.contains(&text).then(|| text.to_owned());
    let filter = AuditFilter {
        run_id: params.uuid("run_id")?,
        tool: params.text("tool"),
        decision: params.value("decision", "a decision", one_of(Decision::WORDS))?,
        subject: params.text("subject"),
        outcome: params.value("outcome", "an outcome", one_of(CallOutcome::WORDS))?,
        created_after: params.time("created_after")?,
        created_before: params.time("created_before")?,
    };
    let page = by_time(&mut params, LISTS)?;
    params.finish()?;
    let rows = app.store.audit(&caller.tenant, &filter, &page).await?;
    let cursor = |row: &AuditRow| time_cursor(row.record.at, &row.id.to_string());
    Ok(Json(Listing::of(rows, &page, cursor, AuditView::from)))
}
