//! Statistics of tool calls, counted by the database.

use std::time::Duration;

use tokio::time::Instant;

use super::backend::Work;
use super::sql::Query;
use super::tables::Record;
use super::{StatsFilter, Store, StoreError, ToolStats};

/// How long a request waits for other counts: for one that was already running, and for the next one, which may
/// be the same query. Each takes at most five seconds if the database enforces its statement timeout.
const MAX_WAIT: Duration = Duration::from_secs(11);

/// The last count. Counting is slow, so only one request counts at a time, and other lists keep their connections.
#[derive(Debug)]
pub(super) struct Counted {
    tenant: String,
    filter: StatsFilter,
    begun: Instant,
    stats: Vec<ToolStats>,
}

impl Counted {
    /// Whether this count answers a request: the same query, begun after the request arrived.
    fn answers(&self, tenant: &str, filter: &StatsFilter, asked: Instant) -> bool {
        self.begun >= asked && self.tenant == tenant && self.filter == *filter
    }
}

impl Store {
    /// Statistics of calls, by tool.
    pub async fn tool_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<ToolStats>, StoreError> {
        let asked = Instant::now();
        let mut last =
            tokio::time::timeout(MAX_WAIT, self.counting.lock()).await.map_err(|_| {
                StoreError::Unavailable("calls of tools are being counted for others".to_owned())
            })?;
        if let Some(same) = last.as_ref().filter(|last| last.answers(tenant, filter, asked)) {
            return Ok(same.stats.clone());
        }
        let begun = Instant::now();
        // Groups by duration first: there are many calls, but few different durations.
        let stats = Query::new(
            "WITH calls AS (SELECT t.tool, t.state, CASE WHEN t.started_at IS NOT NULL \
             AND NOT t.cached THEN t.duration_ms END AS ms, count(*) AS calls \
             FROM runs r JOIN tool_calls t ON t.run_id = r.id WHERE t.state <> 'proposed' AND ",
        );
        let stats = counted(stats, tenant, filter).push(
            " GROUP BY 1, 2, 3), timed AS (SELECT tool, ms, \
             sum(calls) OVER (PARTITION BY tool ORDER BY ms) AS place, \
             sum(calls) OVER (PARTITION BY tool) AS total FROM calls WHERE ms IS NOT NULL), \
             quantiles AS (SELECT tool, \
             min(ms) FILTER (WHERE place * 100 >= 50 * total) AS p50_ms, \
             min(ms) FILTER (WHERE place * 100 >= 95 * total) AS p95_ms, \
             min(ms) FILTER (WHERE place * 100 >= 99 * total) AS p99_ms \
             FROM timed GROUP BY tool) \
             SELECT c.tool, CAST(sum(c.calls) AS bigint) AS calls, CAST(COALESCE(sum(c.calls) \
             FILTER (WHERE c.state IN ('failed', 'unknown')), 0) AS bigint) AS errors, \
             CAST(COALESCE(sum(c.calls) FILTER (WHERE c.state = 'denied'), 0) AS bigint) \
             AS blocked, q.p50_ms, q.p95_ms, q.p99_ms \
             FROM calls c LEFT JOIN quantiles q ON q.tool = c.tool \
             GROUP BY c.tool, q.p50_ms, q.p95_ms, q.p99_ms ORDER BY c.tool",
        );
        let rows = self.backend.read(Work::Lists, stats).await?;
        let stats = rows.iter().map(Record::read).collect::<Result<Vec<ToolStats>, _>>()?;
        let (tenant, filter) = (tenant.to_owned(), filter.clone());
        *last = Some(Counted { tenant, filter, begun, stats: stats.clone() });
        Ok(stats)
    }
}

/// Adds the condition that selects the runs `r` that are counted.
fn counted(query: Query, tenant: &str, filter: &StatsFilter) -> Query {
    query
        .push("r.tenant = :tenant AND r.created_at >= :since AND r.created_at < :until")
        .bind("tenant", tenant)
        .bind("since", filter.since)
        .bind("until", filter.until)
        .and("r.agent = :agent", "agent", filter.agent.as_deref())
}
