//! Lists with filters. Pages are keysets, so that rows that are added between two pages neither repeat nor hide a row.
//!
//! Only constant text becomes SQL; every value of a caller is bound as a parameter.

use std::sync::LazyLock;

use uuid::Uuid;

use super::backend::Work;
use super::journal::Piece;
use super::sql::{Dialect, Query, Row};
use super::tables::{ApprovalRequest, Group, Record, RunOpening, RunProgress};
use super::{
    ApiKeyRecord, ApprovalFilter, ApprovalRecord, AuditFilter, AuditRow, Delivery, DeliveryFilter,
    DeliveryStatus, Page, RunCursor, RunFilter, RunRecord, SearchCandidate, Store, StoreError,
};
use crate::event::{AuditAction, WaitKind};
use crate::run::RunStatus;

/// The sort order of a list, newest first: the columns of an index.
struct Order {
    time: &'static str,
    id: &'static str,
    id_is_uuid: bool,
}

/// The columns of runs in lists, without values that callers may make large: inputs are empty objects.
static LIST_COLUMNS: LazyLock<String> = LazyLock::new(|| {
    let columns = RunOpening::columns().into_iter().chain(RunProgress::columns());
    let written = columns.map(|column| column.name);
    let all = written.chain(["crash_count", "cancel_requested_at", "cancel_reason"]);
    let column = |name: &str| match name {
        "inputs" => "'{}' AS inputs".to_owned(),
        "overrides" => "{short_overrides} AS overrides".to_owned(),
        name => format!("runs.{name}"),
    };
    all.map(column).collect::<Vec<_>>().join(", ")
});

/// Bytes of arguments, as JSON, that a list of approvals shows, at most.
pub(super) const MAX_ARGUMENTS: usize = 64 * 1024;

/// The newest runs that are searched for a label before its index is used. A label of more runs is common.
const NEWEST: u32 = 1000;

impl Order {
    /// Adds the condition that rows come after the cursor of the page.
    fn after(&self, query: Query, page: &Page<RunCursor>) -> Query {
        let Self { time, id, id_is_uuid } = self;
        let Some(cursor) = &page.after else { return query };
        let query = query.push(&format!(" AND ({time}, {id}) < (:after, :after_id)"));
        let query = query.bind("after", cursor.at);
        // Cursors come from callers: an id that is not a UUID sorts last among rows of the same time.
        if *id_is_uuid {
            query.bind("after_id", Uuid::parse_str(&cursor.id).unwrap_or_default())
        } else {
            query.bind("after_id", &cursor.id)
        }
    }

    fn order(&self, query: Query) -> Query {
        query.push(&format!(" ORDER BY {} DESC, {} DESC", self.time, self.id))
    }
}

const RUNS: Order = Order { time: "runs.created_at", id: "runs.id", id_is_uuid: true };
/// Runs with a label, as SQLite finds them.
const LABELLED: Order = Order { time: "l.created_at", id: "l.run_id", id_is_uuid: true };
const AUDIT: Order = Order { time: "audit_log.at", id: "audit_log.id", id_is_uuid: true };
const APPROVALS: Order = Order { time: "approvals.at", id: "approvals.call_id", id_is_uuid: true };
/// The address of a delivery's run.
pub(super) const DELIVERY_URL: &str =
    "COALESCE((SELECT webhook FROM runs WHERE runs.id = webhook_outbox.run_id), '') AS url";

const DELIVERIES: Order =
    Order { time: "webhook_outbox.at", id: "webhook_outbox.id", id_is_uuid: true };
const KEYS: Order = Order { time: "api_keys.created_at", id: "api_keys.id", id_is_uuid: false };

impl Store {
    /// Runs, newest first.
    pub async fn runs(
        &self,
        tenant: &str,
        filter: &RunFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<RunRecord>, StoreError> {
        let query = filtered(&LIST_COLUMNS, tenant, filter);
        if filter.metadata.is_empty() {
            return self.list(query, &RUNS, page).await;
        }
        if self.backend.dialect() == Dialect::Postgres {
            // The index finds what has a label and knows no order, which is fine for a rare label.
            // A common one is found among the newest.
            let newest = RUNS.order(RUNS.after(query, page)).push(" LIMIT :newest");
            let newest = newest.prefixed_with("SELECT * FROM (").push(") AS runs WHERE true");
            let newest = RUNS.order(self.with_labels(newest.bind("newest", NEWEST), filter));
            let newest = newest.push(" LIMIT :limit").bind("limit", page.limit);
            let rows = self.backend.read(Work::Lists, newest).await?;
            let records: Vec<RunRecord> = readable(&rows).collect();
            if records.len() >= page.limit as usize {
                return Ok(records);
            }
        }
        let (query, order) = self.labelled(&LIST_COLUMNS, tenant, filter).await?;
        self.list(query, order, page).await
    }

    /// The existing ones of these runs, with the columns of a list, in no particular order.
    pub async fn runs_of_ids(
        &self,
        tenant: &str,
        ids: &[Uuid],
    ) -> Result<Vec<RunRecord>, StoreError> {
        let these = filtered(&LIST_COLUMNS, tenant, &RunFilter::default());
        let these = these.push(" AND runs.id IN :ids").bind("ids", ids);
        let rows = self.backend.read(Work::Lists, these).await?;
        Ok(readable(&rows).collect())
    }

    /// The newest runs of a session, newest first, with the columns of a list.
    pub async fn newest_runs_of_session(
        &self,
        tenant: &str,
        session: &str,
        limit: u32,
    ) -> Result<Vec<RunRecord>, StoreError> {
        let filter = RunFilter { session_id: Some(session.to_owned()), ..RunFilter::default() };
        let query = filtered(&LIST_COLUMNS, tenant, &filter);
        // Not a list that may be out of date: the session is shown with the runs that it has.
        self.list_as(Work::Data, query, &RUNS, &Page { limit, after: None }).await
    }

    /// Runs that wait, directly or indirectly, for a child run with one of these statuses; newest first.
    pub async fn runs_above(
        &self,
        tenant: &str,
        children: &[RunStatus],
        filter: &RunFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<RunRecord>, StoreError> {
        let children: Vec<String> = children.iter().map(|it| it.as_str().to_owned()).collect();
        // The join begins with those that wait, who are few beside all runs.
        let above = Query::new(format!(
            "WITH RECURSIVE above (id) AS (SELECT a.run_id FROM approvals a \
             JOIN runs c ON c.id = a.child_run_id WHERE a.status = 'pending' \
             AND a.child_run_id IS NOT NULL AND a.tenant = :tenant AND c.status IN :children \
             UNION SELECT a.run_id FROM above JOIN approvals a ON a.child_run_id = above.id \
             WHERE a.status = 'pending' AND a.child_run_id IS NOT NULL) \
             SELECT {} FROM above CROSS JOIN runs WHERE runs.id = above.id",
            *LIST_COLUMNS
        ));
        let above = self.with_labels(with_conditions(above, tenant, filter), filter);
        self.list(above.bind("children", &*children), &RUNS, page).await
    }

    /// A page of the newest runs, and for each whether its row or its last write contains all words, ignoring the case
    /// of ASCII letters. The caller has to find the exact positions.
    pub async fn search_runs(
        &self,
        tenant: &str,
        filter: &RunFilter,
        words: &[&str],
        page: &Page<RunCursor>,
    ) -> Result<Vec<SearchCandidate>, StoreError> {
        let (newest, order) = self.labelled("runs.*", tenant, filter).await?;
        let newest = order.order(order.after(newest, page)).push(" LIMIT :limit");
        let newest = newest.bind("limit", page.limit);
        let (is_in, c) = match self.backend.dialect() {
            Dialect::Postgres => ("strpos", " COLLATE \"C\""),
            Dialect::Sqlite => ("instr", ""),
        };
        let has = |column: &str, word: &str| format!("{is_in}(lower({column}{c}), :{word}) > 0");
        let found = (0..words.len()).map(|number| {
            let (word, json) = (format!("word{number}"), format!("json{number}"));
            let places = [
                has("newest.agent", &word),
                has("CAST(newest.id AS text)", &word),
                has("newest.inputs", &json),
                has("CAST(newest.metadata AS text)", &json),
                has("COALESCE(e.events, '')", &json),
            ];
            format!("({})", places.join(" OR "))
        });
        let found: Vec<String> = std::iter::once("true".to_owned()).chain(found).collect();
        let found = found.join(" AND ");
        let mut search = newest.prefixed_with(&format!(
            "SELECT newest.id, newest.created_at, ({found}) AS may_match FROM ("
        ));
        search = search.push(
            ") AS newest LEFT JOIN run_events e ON e.run_id = newest.id \
             AND e.seq = newest.next_seq - 1 AND newest.finished_at IS NOT NULL",
        );
        for (number, word) in words.iter().enumerate() {
            let word = word.to_ascii_lowercase();
            let json = serde_json::Value::from(&*word).to_string();
            search = search
                .bind(format!("json{number}"), &json[1..json.len() - 1])
                .bind(format!("word{number}"), &*word);
        }
        let rows = self.backend.read(Work::Lists, search).await?;
        let mut candidates =
            rows.iter().map(Record::read).collect::<Result<Vec<SearchCandidate>, StoreError>>()?;
        candidates.sort_by_key(|run| std::cmp::Reverse((run.created_at, run.id)));
        Ok(candidates)
    }

    /// A query for the runs that match a filter, and their order. SQLite finds runs with a label in the table of
    /// labels, unless many runs have the label and another filter has an index.
    async fn labelled(
        &self,
        columns: &str,
        tenant: &str,
        filter: &RunFilter,
    ) -> Result<(Query, &'static Order), StoreError> {
        let label = match self.backend.dialect() {
            Dialect::Postgres => None,
            Dialect::Sqlite => self.label_to_search(tenant, filter).await?,
        };
        let Some((key, value)) = label else {
            return Ok((self.with_labels(filtered(columns, tenant, filter), filter), &RUNS));
        };
        let query = Query::new(format!(
            "SELECT {columns} FROM run_labels l CROSS JOIN runs WHERE runs.id = l.run_id \
             AND l.tenant = :tenant AND l.key = :key AND l.value = :value"
        ));
        let query = query.bind("key", key).bind("value", value);
        let mut query = with_conditions(query, tenant, filter);
        if filter.created_after.is_some() {
            query = query.push(" AND l.created_at > :since");
        }
        if filter.created_before.is_some() {
            query = query.push(" AND l.created_at < :until");
        }
        Ok((self.with_labels(query, filter), &LABELLED))
    }

    /// The first label of a filter that few runs have; otherwise the first label, unless another filter has an index.
    async fn label_to_search<'f>(
        &self,
        tenant: &str,
        filter: &'f RunFilter,
    ) -> Result<Option<&'f (String, String)>, StoreError> {
        for label in &filter.metadata {
            let many = Query::new(
                "SELECT 1 FROM run_labels WHERE tenant = :tenant AND key = :key AND value = :value \
                 LIMIT 1 OFFSET :newest",
            );
            let many = many.bind("tenant", tenant).bind("key", &label.0).bind("value", &label.1);
            let many = self.backend.read(Work::Lists, many.bind("newest", NEWEST)).await?;
            if many.is_empty() {
                return Ok(Some(label));
            }
        }
        let has_index = filter.agent.is_some()
            || filter.session_id.is_some()
            || filter.parent_run_id.is_some()
            || filter.status.is_some_and(|status| status != RunStatus::Completed)
            || filter.termination_reason.as_ref().is_some_and(|reason| reason != "completed");
        Ok(filter.metadata.first().filter(|_| !has_index))
    }

    /// Adds the conditions for the labels of a filter.
    fn with_labels(&self, mut query: Query, filter: &RunFilter) -> Query {
        for (number, (key, value)) in filter.metadata.iter().enumerate() {
            let (key_name, value_name) = (format!("key{number}"), format!("label{number}"));
            query = query.push(" AND ").push(&match self.backend.dialect() {
                Dialect::Postgres => format!(
                    "metadata <> '{{}}' AND metadata @> jsonb_build_object(:{key_name}::text, :{value_name}::text)"
                ),
                Dialect::Sqlite => format!(
                    "EXISTS (SELECT 1 FROM json_each(metadata) AS m \
                     WHERE m.key = :{key_name} AND m.value = :{value_name})"
                ),
            });
            query = query.bind(key_name, key).bind(value_name, value);
        }
        query
    }

    /// Audit records, newest first.
    pub async fn audit(
        &self,
        tenant: &str,
        filter: &AuditFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<AuditRow>, StoreError> {
        let mut query = Query::new("SELECT * FROM audit_log WHERE audit_log.tenant = :tenant");
        query = query.bind("tenant", tenant);
        if filter.decision.as_ref().is_some_and(|decision| decision != "allowed") {
            query = query.push(" AND decision <> 'allowed'");
        }
        if filter.outcome.as_ref().is_some_and(|outcome| outcome != "succeeded") {
            query = query.push(" AND outcome <> 'succeeded'");
        }
        if filter.action.is_some_and(|action| action != AuditAction::ToolCall) {
            query = query.push(" AND action <> 'tool_call'");
        }
        if filter.rule.as_ref().is_some_and(|rule| rule != "none") {
            query = query.push(" AND rule <> 'none'");
        }
        query = query
            .and("action = :action", "action", filter.action)
            .and("run_id = :run", "run", filter.run_id)
            .and("agent = :agent", "agent", filter.agent.as_deref())
            .and("session_id = :session", "session", filter.session_id.as_deref())
            .and("tool = :tool", "tool", filter.tool.as_deref())
            .and("rule = :rule", "rule", filter.rule.as_deref())
            .and("decision = :decision", "decision", filter.decision.as_deref())
            .and("subject = :subject", "subject", filter.subject.as_deref())
            .and("outcome = :outcome", "outcome", filter.outcome.as_deref())
            .and("at > :since", "since", filter.created_after)
            .and("at < :until", "until", filter.created_before);
        self.list(query, &AUDIT, page).await
    }

    /// Requests of a tenant's runs, pending and answered, newest first.
    pub async fn approvals(
        &self,
        tenant: &str,
        filter: &ApprovalFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApprovalRecord>, StoreError> {
        let of_one_run = filter.run_id.is_some(); // of which they are shown whole
        let most = if of_one_run { u64::MAX } else { MAX_ARGUMENTS as u64 };
        let query = approvals_where(&approval_columns(), tenant, filter).bind("most", most);
        let mut rows: Vec<ApprovalRecord> =
            self.list_as(Work::Data, query, &APPROVALS, page).await?; // to be answered
        if !of_one_run {
            rows.iter_mut().for_each(ApprovalRecord::leave_out_large_edits);
        }
        Ok(rows)
    }

    /// How many rows of a page of [`Store::approvals`] have at most `most_bytes` as they are shown; at least one,
    /// however large it is.
    pub async fn approval_piece(
        &self,
        tenant: &str,
        filter: &ApprovalFilter,
        page: &Page<RunCursor>,
        most_bytes: u64,
    ) -> Result<Piece, StoreError> {
        let sizes = approvals_where(APPROVAL_SIZES, tenant, filter);
        let sizes = APPROVALS.order(APPROVALS.after(sizes, page)).push(" LIMIT :limit");
        let rows = self.backend.read(Work::Data, sizes.bind("limit", page.limit)).await?;
        let most = if filter.run_id.is_some() { u64::MAX } else { MAX_ARGUMENTS as u64 };
        let size = |row: &Row| {
            let arguments = Some(row.read::<u64>("arguments")?).filter(|bytes| *bytes <= most);
            // Arguments are shown twice: as a document and for people.
            Ok(APPROVAL + 3 * arguments.unwrap_or(0) + row.read::<u64>("others")?)
        };
        let sizes: Vec<u64> = rows.iter().map(size).collect::<Result<_, StoreError>>()?;
        Ok(Piece::of(sizes.into_iter(), most_bytes))
    }

    /// The pending requests of these runs, by run, newest first; arguments of more than `most_bytes` are null.
    pub async fn pending(
        &self,
        tenant: &str,
        runs: &[Uuid],
        most_bytes: u64,
    ) -> Result<Vec<ApprovalRecord>, StoreError> {
        let columns = approval_columns();
        let pending = Query::new(format!(
            "SELECT {columns} FROM approvals WHERE approvals.run_id IN :runs \
             AND approvals.status = 'pending' AND EXISTS (SELECT 1 FROM runs \
             WHERE runs.id = approvals.run_id AND runs.tenant = :tenant) \
             ORDER BY approvals.run_id, approvals.seq DESC"
        ));
        let pending = pending.bind("tenant", tenant).bind("runs", runs).bind("most", most_bytes);
        Ok(readable(&self.backend.read(Work::Data, pending).await?).collect())
    }

    /// A tenant's webhook deliveries, newest event first.
    pub async fn deliveries(
        &self,
        tenant: &str,
        filter: &DeliveryFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<Delivery>, StoreError> {
        let mut query = Query::new("SELECT webhook_outbox.*, ").push(DELIVERY_URL);
        query = query.push(" FROM webhook_outbox WHERE webhook_outbox.tenant = :tenant");
        query = query.bind("tenant", tenant);
        if filter.status.is_some_and(|status| status != DeliveryStatus::Delivered) {
            query = query.push(" AND status <> 'delivered'");
        }
        query = query.and("run_id = :run", "run", filter.run_id).and(
            "status = :status",
            "status",
            filter.status,
        );
        self.list(query, &DELIVERIES, page).await
    }

    /// A tenant's keys, newest first.
    pub async fn keys(
        &self,
        tenant: &str,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApiKeyRecord>, StoreError> {
        let query = Query::new("SELECT * FROM api_keys WHERE api_keys.tenant = :tenant");
        self.list_as(Work::Data, query.bind("tenant", tenant), &KEYS, page).await
    }

    /// One page. Unreadable rows are skipped, and further rows are read in their place.
    async fn list<T: Record>(
        &self,
        query: Query,
        order: &Order,
        page: &Page<RunCursor>,
    ) -> Result<Vec<T>, StoreError> {
        self.list_as(Work::Lists, query, order, page).await
    }

    async fn list_as<T: Record>(
        &self,
        work: Work,
        mut query: Query,
        order: &Order,
        page: &Page<RunCursor>,
    ) -> Result<Vec<T>, StoreError> {
        query = order.order(order.after(query, page)).push(" LIMIT :limit");
        let mut limit = page.limit;
        loop {
            let rows = self.backend.read(work, query.clone().bind("limit", limit)).await?;
            let mut records: Vec<T> = readable(&rows).collect();
            if records.len() >= page.limit as usize || rows.len() < limit as usize {
                records.truncate(page.limit as usize);
                return Ok(records);
            }
            limit = next_limit(limit, records.len());
        }
    }
}

/// How many rows are read next if so many of `limit` rows can be read. It grows by those that cannot, so that many in
/// a row are not read again for each page of them.
fn next_limit(limit: u32, readable: usize) -> u32 {
    limit.saturating_add(limit.saturating_sub(u32::try_from(readable).unwrap_or(limit)))
}

/// The columns of requests; arguments of more than `:most` bytes are null.
fn approval_columns() -> String {
    let written = ApprovalRequest::columns().into_iter().map(|column| column.name);
    let all = written.chain(["decided_at", "decided_by", "decision_reason", "resolution"]);
    let column = |name: &str| match name {
        "arguments" => "CASE WHEN octet_length(approvals.arguments) > :most THEN 'null' \
                        ELSE approvals.arguments END AS arguments"
            .to_owned(),
        name => format!("approvals.{name}"),
    };
    let columns = all.map(column).collect::<Vec<_>>().join(", ");
    format!("{columns}, (SELECT agent FROM runs WHERE runs.id = approvals.run_id) AS agent")
}

/// The approximate size of a request without its texts, in bytes.
const APPROVAL: u64 = 1024;

/// The sizes of the texts of a request that can be large.
const APPROVAL_SIZES: &str = "CAST(octet_length(approvals.arguments) AS bigint) AS arguments, \
     CAST(octet_length(approvals.reason) + octet_length(COALESCE(approvals.input, '')) \
     + octet_length(COALESCE(approvals.resolution, '')) AS bigint) AS others";

/// A query for the requests that match a filter.
fn approvals_where(columns: &str, tenant: &str, filter: &ApprovalFilter) -> Query {
    let query = Query::new(format!("SELECT {columns} FROM approvals WHERE "));
    // Those of one run are found by the run, whatever else is asked for.
    let query = if filter.run_id.is_some() {
        query.push(
            "EXISTS (SELECT 1 FROM runs WHERE runs.id = approvals.run_id \
                    AND runs.tenant = :tenant)",
        )
    } else {
        query.push("approvals.tenant = :tenant")
    };
    query
        .bind("tenant", tenant)
        .and("approvals.status = :status", "status", filter.status)
        .and("approvals.run_id = :run", "run", filter.run_id)
        .and("approvals.call_id = :call", "call", filter.call_id)
        .and("approvals.kind <> :child", "child", filter.from_outside.then_some(WaitKind::Child))
}

/// A query for the runs that match a filter, without its labels.
fn filtered(columns: &str, tenant: &str, filter: &RunFilter) -> Query {
    with_conditions(Query::new(format!("SELECT {columns} FROM runs WHERE true")), tenant, filter)
}

/// The condition of the index `runs_by_status`: SQLite uses a partial index only for queries that repeat its
/// condition.
const IN_STATUS_INDEX: &str = " AND status IN \
    ('queued', 'awaiting_approval', 'awaiting_tool_results', 'needs_review', 'failed', 'cancelled')";

/// Adds the conditions of a filter, without its labels.
fn with_conditions(query: Query, tenant: &str, filter: &RunFilter) -> Query {
    // Running runs are few, in the index `runs_owned`; SQLite would look through all runs of the tenant instead.
    let is_running = filter.status == Some(RunStatus::Running);
    let mut query = query.push(" AND ").push(if is_running { "{not_indexed}" } else { "" });
    query = query.push("runs.tenant = :tenant").bind("tenant", tenant);
    if let Some(status) = filter.status {
        // A constant, so that the planner can see which partial index it implies.
        query = query.push(" AND status = '").push(status.as_str()).push("'");
        if !matches!(status, RunStatus::Running | RunStatus::Completed) {
            query = query.push(IN_STATUS_INDEX);
        }
    }
    if filter.termination_reason.as_ref().is_some_and(|reason| reason != "completed") {
        query = query.push(" AND termination_reason <> 'completed'");
    }
    let reason = filter.termination_reason.as_deref();
    query
        .and("termination_reason = :reason", "reason", reason)
        .and("agent = :agent", "agent", filter.agent.as_deref())
        .and("session_id = :session", "session", filter.session_id.as_deref())
        .and("parent_run_id = :parent", "parent", filter.parent_run_id)
        .and("runs.created_at > :since", "since", filter.created_after)
        .and("runs.created_at < :until", "until", filter.created_before)
}

/// The readable rows; unreadable ones are logged.
pub(super) fn readable<T: Record>(rows: &[Row]) -> impl Iterator<Item = T> {
    rows.iter().filter_map(|row| match T::read(row) {
        Ok(record) => Some(record),
        Err(error) => {
            tracing::error!(%error, "skipped an unreadable row");
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_unreadable_rows_take_few_reads() {
        let (page, unreadable) = (50_u32, 10_000);
        let (mut limit, mut read) = (page, 0);
        while limit < unreadable + page {
            read += limit;
            limit = next_limit(limit, limit.saturating_sub(unreadable) as usize);
        }
        assert!(read < 3 * unreadable, "{read} rows were read");
        assert_eq!(next_limit(page, 49), 51, "one row in place of the one that cannot be read");
    }
}
