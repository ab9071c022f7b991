//! What runs took, counted by the database.

use super::backend::Work;
use super::sql::Query;
use super::tables::Record;
use super::{StatsFilter, Store, StoreError, ToolStats, UsageStats};

impl Store {
    /// How calls went, by tool.
    pub async fn tool_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<ToolStats>, StoreError> {
        let stats = Query::new(
            "WITH calls AS (SELECT t.* FROM runs r JOIN tool_calls t ON t.run_id = r.id \
             WHERE t.state <> 'proposed' AND ",
        );
        let stats = counted(stats, tenant, filter).push(
            "), timed AS (SELECT tool, duration_ms, \
             row_number() OVER (PARTITION BY tool ORDER BY duration_ms) AS place, \
             count(*) OVER (PARTITION BY tool) AS total FROM calls \
             WHERE started_at IS NOT NULL AND duration_ms IS NOT NULL AND NOT cached), \
             quantiles AS (SELECT tool, \
             min(duration_ms) FILTER (WHERE place * 100 >= 50 * total) AS p50_ms, \
             min(duration_ms) FILTER (WHERE place * 100 >= 95 * total) AS p95_ms, \
             min(duration_ms) FILTER (WHERE place * 100 >= 99 * total) AS p99_ms \
             FROM timed GROUP BY tool) \
             SELECT c.tool, count(*) AS calls, \
             count(*) FILTER (WHERE c.state IN ('failed', 'unknown')) AS errors, \
             count(*) FILTER (WHERE c.state = 'denied') AS blocked, q.p50_ms, q.p95_ms, q.p99_ms \
             FROM calls c LEFT JOIN quantiles q ON q.tool = c.tool \
             GROUP BY c.tool, q.p50_ms, q.p95_ms, q.p99_ms ORDER BY c.tool",
        );
        self.backend.read(Work::Data, stats).await?.iter().map(Record::read).collect()
    }

    /// What models took, the newest day first, then by agent and model. A cost is known where that
    /// of every answer is.
    pub async fn usage_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<UsageStats>, StoreError> {
        let stats = Query::new(
            "SELECT {day} AS day, r.agent, i.provider || '/' || i.model AS model, \
             count(DISTINCT r.id) AS runs, CAST(sum(i.input_tokens) AS bigint) AS input_tokens, \
             CAST(sum(i.output_tokens) AS bigint) AS output_tokens, \
             CAST(sum(i.cached_input_tokens) AS bigint) AS cached_input_tokens, \
             CAST(sum(i.cache_write_tokens) AS bigint) AS cache_write_tokens, \
             CAST(sum(i.reasoning_tokens) AS bigint) AS reasoning_tokens, \
             CASE WHEN count(*) = count(i.cost_micro_usd) \
             THEN CAST(sum(i.cost_micro_usd) AS bigint) END AS cost_micro_usd, \
             count(*) FILTER (WHERE i.estimated) > 0 AS estimated \
             FROM runs r JOIN iterations i ON i.run_id = r.id WHERE ",
        );
        let stats = counted(stats, tenant, filter).push(" GROUP BY 1, 2, 3 ORDER BY 1 DESC, 2, 3");
        self.backend.read(Work::Data, stats).await?.iter().map(Record::read).collect()
    }
}

/// Adds which runs `r` are counted.
fn counted(query: Query, tenant: &str, filter: &StatsFilter) -> Query {
    query
        .push("r.tenant = :tenant AND r.created_at >= :since AND r.created_at < :until")
        .bind("tenant", tenant)
        .bind("since", filter.since)
        .bind("until", filter.until)
        .and("r.agent = :agent", "agent", filter.agent.as_deref())
}
