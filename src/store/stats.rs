//! What runs took, counted by the database.

use super::backend::Work;
use super::sql::Query;
use super::tables::Record;
use super::{StatsFilter, Store, StoreError, ToolStats, UsageStats};

/// What runs `r` took besides the answers of their iterations: summaries, and answers that broke
/// off. Their last model stands for whichever it was.
pub(super) const REST: &str = "r.input_tokens - CAST(COALESCE(sum(i.input_tokens), 0) AS bigint) \
    AS input_tokens, r.output_tokens - CAST(COALESCE(sum(i.output_tokens), 0) AS bigint) \
    AS output_tokens, r.cached_input_tokens - CAST(COALESCE(sum(i.cached_input_tokens), 0) AS bigint) \
    AS cached_input_tokens, r.cache_write_tokens - CAST(COALESCE(sum(i.cache_write_tokens), 0) \
    AS bigint) AS cache_write_tokens, r.reasoning_tokens - CAST(COALESCE(sum(i.reasoning_tokens), 0) \
    AS bigint) AS reasoning_tokens, r.cost_micro_usd - CAST(COALESCE(sum(i.cost_micro_usd), 0) \
    AS bigint) AS cost_micro_usd, r.estimated \
    FROM runs r LEFT JOIN iterations i ON i.run_id = r.id WHERE ";

/// The runs of [`REST`] that took something.
pub(super) const HAS_REST: &str = " GROUP BY r.id HAVING r.input_tokens + r.output_tokens \
    > COALESCE(sum(i.input_tokens + i.output_tokens), 0)";

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
        self.backend.read(Work::Lists, stats).await?.iter().map(Record::read).collect()
    }

    /// What models took, the newest day first, then by agent and model. A cost is known where that
    /// of every answer is. What deleted runs took counts at the beginning of the hour in which they
    /// were accepted.
    pub async fn usage_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<UsageStats>, StoreError> {
        // Most runs have answers of one model and their sums in their rows.
        let plain = "SELECT {day} AS day, r.agent, r.model, 1 AS runs, r.input_tokens, \
             r.output_tokens, r.cached_input_tokens, r.cache_write_tokens, r.reasoning_tokens, \
             r.cost_micro_usd, r.estimated FROM runs r \
             WHERE r.model IS NOT NULL AND NOT r.mixed_usage AND ";
        let mixed = format!(
            "SELECT {{day}} AS day, r.agent, i.provider || '/' || i.model AS model, 1 AS runs, {} \
             FROM runs r JOIN iterations i ON i.run_id = r.id WHERE r.mixed_usage AND ",
            sums("i"),
        );
        let rest = format!(
            "SELECT {{day}} AS day, r.agent, r.model, 0 AS runs, {REST} r.mixed_usage AND "
        );
        let past = "SELECT {day}, r.agent, r.model, r.runs, r.input_tokens, r.output_tokens, \
             r.cached_input_tokens, r.cache_write_tokens, r.reasoning_tokens, r.cost_micro_usd, \
             r.estimated FROM (SELECT p.*, p.hour AS created_at FROM past_usage p) r WHERE ";
        let stats = Query::new(format!(
            "SELECT {{day_name}} AS day, u.agent, u.model, CAST(sum(u.runs) AS bigint) AS runs, {} \
             FROM ({plain}",
            sums("u"),
        ));
        let stats = counted(stats, tenant, filter).push(" UNION ALL ").push(&mixed);
        let stats = counted(stats, tenant, filter)
            .push(" GROUP BY r.id, i.provider, i.model UNION ALL ")
            .push(&rest);
        let stats = counted(stats, tenant, filter).push(HAS_REST).push(" UNION ALL ").push(past);
        let stats = counted(stats, tenant, filter)
            .push(") u GROUP BY u.day, u.agent, u.model ORDER BY u.day DESC, u.agent, u.model");
        self.backend.read(Work::Lists, stats).await?.iter().map(Record::read).collect()
    }
}

/// The sums of the usage columns of a table.
pub(super) fn sums(table: &str) -> String {
    let tokens = [
        "input_tokens",
        "output_tokens",
        "cached_input_tokens",
        "cache_write_tokens",
        "reasoning_tokens",
    ];
    let sum = |column: &str| format!("CAST(sum({table}.{column}) AS bigint) AS {column}, ");
    let tokens: String = tokens.map(sum).concat();
    let cost = format!("{table}.cost_micro_usd");
    format!(
        "{tokens}CASE WHEN count(*) = count({cost}) THEN CAST(sum({cost}) AS bigint) END \
         AS cost_micro_usd, count(*) FILTER (WHERE {table}.estimated) > 0 AS estimated"
    )
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
