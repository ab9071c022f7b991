//! The lists with filters: one place composes their conditions for both dialects.
//!
//! Only fragments written here become SQL; every value of a caller is bound. Pages are keysets, so
//! that rows which arrive while somebody pages neither repeat nor hide a row.

use chrono::{DateTime, Utc};
use sqlx::{Database, Encode, QueryBuilder, Type};
use uuid::Uuid;

use super::{ApprovalFilter, ApprovalStatus, AuditFilter, Page, RunCursor, RunFilter};

/// How a dialect writes what the other writes differently: text around a bound value.
pub(super) struct Dialect {
    /// `SELECT … FROM runs`.
    pub(super) runs: &'static str,
    /// `SELECT … FROM audit_log`.
    pub(super) audit: &'static str,
    /// `SELECT … FROM approvals`, each call's id as `id`.
    pub(super) approvals: &'static str,
    /// `SELECT … FROM api_keys`.
    pub(super) keys: &'static str,
    /// Around microseconds, to make a time.
    pub(super) time: (&'static str, &'static str),
    /// Around text, to make an id.
    pub(super) uuid: (&'static str, &'static str),
    /// Before, between and after key and value of a label that must be there.
    pub(super) label: (&'static str, &'static str, &'static str),
}

/// A query under construction; its first condition is the tenant.
struct List<'d, DB: Database> {
    dialect: &'d Dialect,
    query: QueryBuilder<DB>,
}

impl<DB: Database> List<'_, DB>
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    DB::Arguments: Default,
{
    fn of<'d>(dialect: &'d Dialect, select: &'static str, tenant: &str) -> List<'d, DB> {
        let mut query = QueryBuilder::new(select);
        query.push(" WHERE tenant = ").push_bind(tenant.to_owned());
        List { dialect, query }
    }

    fn text(&mut self, column: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.query.push(" AND ").push(column).push(" = ").push_bind(value.to_owned());
        }
    }

    fn uuid(&mut self, column: &str, value: Option<Uuid>) {
        if let Some(value) = value {
            let (before, after) = self.dialect.uuid;
            self.query.push(" AND ").push(column).push(" = ").push(before);
            self.query.push_bind(value.to_string()).push(after);
        }
    }

    fn time(&mut self, condition: &str, value: Option<DateTime<Utc>>) {
        if let Some(value) = value {
            let (before, after) = self.dialect.time;
            self.query.push(" AND ").push(condition).push(before);
            self.query.push_bind(value.timestamp_micros()).push(after);
        }
    }

    /// Ids in a cursor come from callers: one that is no UUID stands at the end of its instant.
    fn page(mut self, time: &str, id_is_uuid: bool, page: &Page<RunCursor>) -> QueryBuilder<DB> {
        if let Some(RunCursor { at, id }) = &page.after {
            let (before, after) = self.dialect.time;
            self.query.push(" AND (").push(time).push(", id) < (").push(before);
            self.query.push_bind(at.timestamp_micros()).push(after).push(", ");
            if id_is_uuid {
                let (before, after) = self.dialect.uuid;
                let id = Uuid::parse_str(id).unwrap_or_default();
                self.query.push(before).push_bind(id.to_string()).push(after);
            } else {
                self.query.push_bind(id.clone());
            }
            self.query.push(")");
        }
        self.query
            .push(" ORDER BY ")
            .push(time)
            .push(" DESC, id DESC LIMIT ")
            .push_bind(i64::from(page.limit));
        self.query
    }
}

pub(super) fn runs<DB: Database>(
    dialect: &Dialect,
    tenant: &str,
    filter: &RunFilter,
    page: &Page<RunCursor>,
) -> QueryBuilder<DB>
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    DB::Arguments: Default,
{
    let mut list = List::<DB>::of(dialect, dialect.runs, tenant);
    if let Some(status) = filter.status {
        // A constant, so that the planner can see which partial index it implies.
        list.query.push(" AND status = '").push(status.as_str()).push("'");
    }
    if let Some(reason) = &filter.termination_reason
        && reason != "completed"
    {
        list.query.push(" AND termination_reason <> 'completed'");
    }
    list.text("termination_reason", filter.termination_reason.as_deref());
    list.text("agent", filter.agent.as_deref());
    list.text("session_id", filter.session_id.as_deref());
    list.uuid("parent_run_id", filter.parent_run_id);
    list.time("created_at > ", filter.created_after);
    list.time("created_at < ", filter.created_before);
    for (key, value) in &filter.metadata {
        let (before, between, after) = dialect.label;
        list.query.push(" AND ").push(before).push_bind(key.clone()).push(between);
        list.query.push_bind(value.clone()).push(after);
    }
    list.page("created_at", true, page)
}

pub(super) fn audit<DB: Database>(
    dialect: &Dialect,
    tenant: &str,
    filter: &AuditFilter,
    page: &Page<RunCursor>,
) -> QueryBuilder<DB>
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    DB::Arguments: Default,
{
    let mut list = List::<DB>::of(dialect, dialect.audit, tenant);
    if filter.decision.as_ref().is_some_and(|decision| decision != "allowed") {
        list.query.push(" AND decision <> 'allowed'");
    }
    list.uuid("run_id", filter.run_id);
    list.text("tool", filter.tool.as_deref());
    list.text("decision", filter.decision.as_deref());
    list.text("subject", filter.subject.as_deref());
    list.text("outcome", filter.outcome.as_deref());
    list.time("at > ", filter.created_after);
    list.time("at < ", filter.created_before);
    list.page("at", true, page)
}

pub(super) fn approvals<DB: Database>(
    dialect: &Dialect,
    tenant: &str,
    filter: &ApprovalFilter,
    page: &Page<RunCursor>,
) -> QueryBuilder<DB>
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    DB::Arguments: Default,
{
    let mut list = List::<DB>::of(dialect, dialect.approvals, tenant);
    list.text("status", filter.status.map(ApprovalStatus::as_str));
    list.uuid("run_id", filter.run_id);
    list.uuid("call_id", filter.call_id);
    list.page("at", true, page)
}

pub(super) fn keys<DB: Database>(
    dialect: &Dialect,
    tenant: &str,
    page: &Page<RunCursor>,
) -> QueryBuilder<DB>
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    DB::Arguments: Default,
{
    List::<DB>::of(dialect, dialect.keys, tenant).page("created_at", false, page)
}
