//! The audit log, read only: what was decided about tool calls, and what became of them.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::App;
use super::auth::{AuditRead, Scoped};
use super::extract::Params;
use super::page::{LISTS, ListParams, Listing, by_time, time_cursor};
use super::problem::Problem;
use super::run_parts::json_or_text;
use crate::store::{AuditFilter, AuditRow};

const DECISIONS: [&str; 4] = ["allowed", "warned", "escalated", "blocked"];
const OUTCOMES: [&str; 4] = ["succeeded", "failed", "cancelled", "not_executed"];

/// One audit record.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditRecord, example = json!({"arguments": {"operation": "read", "path": "secret/token"}}))]
pub(crate) struct AuditView {
    id: Uuid,
    at: DateTime<Utc>,
    /// Key id or token subject on whose behalf the call was made.
    #[schema(example = "5f2a9c01d3e47b68")]
    subject: String,
    run_id: Uuid,
    #[schema(example = "file_ops")]
    tool: String,
    /// The rule that decided.
    #[schema(example = "path")]
    rule: String,
    /// `allowed`, `warned`, `escalated` or `blocked`.
    #[schema(example = "blocked")]
    decision: String,
    #[schema(example = "`secret/token` may not be read.")]
    reason: Option<String>,
    /// A text where they are no JSON or were cut.
    arguments: Value,
    /// `succeeded`, `failed`, `cancelled` or `not_executed`.
    #[schema(example = "not_executed")]
    outcome: String,
    #[schema(example = json!(null))]
    duration_ms: Option<u64>,
}

impl From<AuditRow> for AuditView {
    fn from(AuditRow { id, subject, run_id, record }: AuditRow) -> Self {
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
        ("decision" = Option<String>, Query, description = "`allowed`, `warned`, `escalated` or `blocked`."),
        ("subject" = Option<String>, Query, description = "Calls on behalf of this key or subject."),
        ("outcome" = Option<String>, Query, description = "`succeeded`, `failed`, `cancelled` or `not_executed`."),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "Exclusive."),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "Exclusive."),
        ListParams,
    ),
    responses((status = 200, description = "A page of audit records.", body = Listing<AuditView>)),
)]
pub(crate) async fn list_audit(
    State(app): State<App>,
    caller: Scoped<AuditRead>,
    mut params: Params,
) -> Result<Json<Listing<AuditView>>, Problem> {
    let one_of = |names: [&'static str; 4]| move |text: &str| names.contains(&text).then(|| text.to_owned());
    let filter = AuditFilter {
        run_id: params.uuid("run_id")?,
        tool: params.text("tool"),
        decision: params.value("decision", "a decision", one_of(DECISIONS))?,
        subject: params.text("subject"),
        outcome: params.value("outcome", "an outcome", one_of(OUTCOMES))?,
        created_after: params.time("created_after")?,
        created_before: params.time("created_before")?,
    };
    let page = by_time(&mut params, LISTS)?;
    params.finish()?;
    let rows = app.store.audit(&caller.tenant, &filter, &page).await?;
    let cursor = |row: &AuditRow| time_cursor(row.record.at, &row.id.to_string());
    Ok(Json(Listing::of(rows, &page, cursor, AuditView::from)))
}
