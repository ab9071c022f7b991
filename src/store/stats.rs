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
        let stats = stats.push(counted(filter)).push(
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
        let stats = bound(stats, tenant, filter);
        self.backend.read(Work::Data, stats).await?.iter().map(Record::read).collect()
    }

    /// What models took, the newest day first, then by agent and model. A cost is known where that
    /// of every answer is. What deleted runs took counts at the beginning of the hour in which they
    /// were accepted.
    pub async fn usage_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<UsageStats>, StoreError> {
        let live = "SELECT {day} AS day, r.agent, i.provider || '/' || i.model AS model, \
             count(DISTINCT r.id) AS runs, CAST(sum(i.input_tokens) AS bigint) AS input_tokens, \
             CAST(sum(i.output_tokens) AS bigint) AS output_tokens, \
             CAST(sum(i.cached_input_tokens) AS bigint) AS cached_input_tokens, \
             CAST(sum(i.cache_write_tokens) AS bigint) AS cache_write_tokens, \
             CAST(sum(i.reasoning_tokens) AS bigint) AS reasoning_tokens, \
             CASE WHEN count(*) = count(i.cost_micro_usd) \
             THEN CAST(sum(i.cost_micro_usd) AS bigint) END AS cost_micro_usd, \
             count(*) FILTER (WHERE i.estimated) > 0 AS estimated \
             FROM runs r JOIN iterations i ON i.run_id = r.id WHERE ";
        let past = " GROUP BY 1, 2, 3 UNION ALL SELECT {day}, r.agent, r.model, r.runs, \
             r.input_tokens, r.output_tokens, r.cached_input_tokens, r.cache_write_tokens, \
             r.reasoning_tokens, r.cost_micro_usd, r.estimated \
             FROM (SELECT p.*, p.hour AS created_at FROM past_usage p) r WHERE ";
        let sums = "SELECT day, agent, model, CAST(sum(runs) AS bigint) AS runs, \
             CAST(sum(input_tokens) AS bigint) AS input_tokens, \
             CAST(sum(output_tokens) AS bigint) AS output_tokens, \
             CAST(sum(cached_input_tokens) AS bigint) AS cached_input_tokens, \
             CAST(sum(cache_write_tokens) AS bigint) AS cache_write_tokens, \
             CAST(sum(reasoning_tokens) AS bigint) AS reasoning_tokens, \
             CASE WHEN count(*) = count(cost_micro_usd) \
             THEN CAST(sum(cost_micro_usd) AS bigint) END AS cost_micro_usd, \
             count(*) FILTER (WHERE estimated) > 0 AS estimated FROM (";
        let stats = Query::new(sums).push(live).push(counted(filter)).push(past);
        let stats =
            stats.push(counted(filter)).push(") AS usage GROUP BY 1, 2, 3 ORDER BY 1 DESC, 2, 3");
        let stats = bound(stats, tenant, filter);
        self.backend.read(Work::Data, stats).await?.iter().map(Record::read).collect()
    }
}

/// Which runs `r` are counted.
fn counted(filter: &StatsFilter) -> &'static str {
    match filter.agent {
        None => "r.tenant = :tenant AND r.created_at >= :since AND r.created_at < :until",
        Some(_) => {
            "r.tenant = :tenant AND r.created_at >= :since AND r.created_at < :until \
             AND r.agent = :agent"
        }
    }
}

fn bound(query: Query, tenant: &str, filter: &StatsFilter) -> Query {
    let query = query.bind("tenant", tenant);
    let query = query.bind("since", filter.since).bind("until", filter.until);
    match &filter.agent {
        Some(agent) => query.bind("agent", agent),
        None => query,
    }
}
