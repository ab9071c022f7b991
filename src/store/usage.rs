//! The usage of models, in sums that every commit adds to.
//!
//! A commit adds new rows to `usage_added`, so that commits do not wait for each other. Any replica moves each
//! row to the sums of its hour and day in `usage_sums`. Both tables are read together, so the sums are always
//! exact. They remain when runs are deleted.
//!
//! A range is split into whole days, the whole hours before and after them, and partial hours at both ends. For
//! partial hours, the stored runs are added up. The sums of deleted runs are in `past_usage` and count at the
//! beginning of the hour in which the runs were accepted.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::backend::Work;
use super::sql::Query;
use super::tables::{Record, UsageSum};
use super::{Page, StatsFilter, Store, StoreError, UsageCursor, UsageStats};
use crate::clock::beginning;

const HOUR: TimeDelta = TimeDelta::hours(1);
const DAY: TimeDelta = TimeDelta::days(1);

/// The columns of usage.
const USAGE: &str = "input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, \
    reasoning_tokens, cost_micro_usd, estimated";

/// The usage of runs `r` in addition to the answers of their iterations: summaries, and interrupted answers. It is
/// attributed to the run's last model, whichever model it was.
const USAGE_BEYOND_ITERATIONS: &str = "r.input_tokens - CAST(COALESCE(sum(i.input_tokens), 0) AS bigint) \
    AS input_tokens, r.output_tokens - CAST(COALESCE(sum(i.output_tokens), 0) AS bigint) \
    AS output_tokens, r.cached_input_tokens - CAST(COALESCE(sum(i.cached_input_tokens), 0) AS bigint) \
    AS cached_input_tokens, r.cache_write_tokens - CAST(COALESCE(sum(i.cache_write_tokens), 0) \
    AS bigint) AS cache_write_tokens, r.reasoning_tokens - CAST(COALESCE(sum(i.reasoning_tokens), 0) \
    AS bigint) AS reasoning_tokens, r.cost_micro_usd - CAST(COALESCE(sum(i.cost_micro_usd), 0) \
    AS bigint) AS cost_micro_usd, r.estimated \
    FROM runs r LEFT JOIN iterations i ON i.run_id = r.id WHERE ";

/// Restricts [`USAGE_BEYOND_ITERATIONS`] to runs that have such usage.
const HAS_USAGE_BEYOND_ITERATIONS: &str = " GROUP BY r.id HAVING r.input_tokens + r.output_tokens \
    > COALESCE(sum(i.input_tokens + i.output_tokens), 0)";

/// From the first time (inclusive) to the second (exclusive).
type Range = (DateTime<Utc>, DateTime<Utc>);

impl Store {
    /// The usage of models, newest day first, then by agent and model. A cost is known if the cost of every answer
    /// is.
    pub async fn usage_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
        page: &Page<UsageCursor>,
    ) -> Result<Vec<UsageStats>, StoreError> {
        let mut parts = Parts { tenant, agent: filter.agent.as_deref(), queries: Vec::new() };
        let (hours, ends) = split_by_unit((filter.since, filter.until), HOUR);
        if let Some(hours) = hours {
            let added = "(SELECT a.*, a.hour AS created_at FROM usage_added a)";
            parts.sums(added, hours);
            let of = |span| {
                format!(
                    "(SELECT s.*, s.at AS created_at FROM usage_sums s WHERE s.span = '{span}')"
                )
            };
            let (days, ends) = split_by_unit(hours, DAY);
            if let Some(days) = days {
                parts.sums(&of("day"), days);
            }
            for hours in ends {
                parts.sums(&of("hour"), hours);
            }
        }
        for range in ends {
            parts.runs(range);
        }
        let Some(parts) = parts.all() else { return Ok(Vec::new()) };
        let mut stats = parts
            .prefixed_with(&format!(
                "SELECT {{day_name}} AS day, u.agent, u.model, \
                 CAST(sum(u.runs) AS bigint) AS runs, {} FROM (",
                sums("u"),
            ))
            .push(") u");
        if let Some(UsageCursor { day, agent, model }) = &page.after {
            let after = " WHERE ({day_name} < :after_day OR ({day_name} = :after_day \
                AND (u.agent, u.model) > (:after_agent, :after_model)))";
            stats = stats.push(after).bind("after_day", day);
            stats = stats.bind("after_agent", agent).bind("after_model", model);
        }
        let stats = stats
            .push(" GROUP BY u.day, u.agent, u.model ORDER BY u.day DESC, u.agent, u.model")
            .push(" LIMIT :limit")
            .bind("limit", page.limit);
        self.backend.read(Work::Lists, stats).await?.iter().map(Record::read).collect()
    }

    /// Moves up to `limit` rows of `usage_added` to the sums; returns their number.
    pub async fn add_up_usage(&self, limit: u32) -> Result<u32, StoreError> {
        let any = Query::new("SELECT id FROM usage_added LIMIT 1");
        if self.backend.read(Work::Data, any).await?.is_empty() {
            return Ok(0);
        }
        let mut tx = self.backend.begin(Work::Data).await?;
        // Skip rows that another replica is moving.
        let some = Query::new("SELECT id FROM usage_added ORDER BY id LIMIT :limit{skip_locked}");
        let some = tx.run(some.bind("limit", limit)).await?;
        let some = some.iter().map(|row| row.read("id")).collect::<Result<Vec<i64>, _>>()?;
        for (span, at) in [("hour", "u.hour"), ("day", "{day_of_hour}")] {
            let add = Query::new(format!(
                "INSERT INTO usage_sums (tenant, span, at, agent, model, runs, {USAGE}) \
                 SELECT u.tenant, '{span}', {at}, u.agent, u.model, CAST(sum(u.runs) AS bigint), {} \
                 FROM usage_added u WHERE u.id IN :some GROUP BY 1, 3, 4, 5 ORDER BY 1, 3, 4, 5 \
                 ON CONFLICT (tenant, span, at, agent, model) DO UPDATE SET {}",
                sums("u"),
                add_assignments("usage_sums"),
            ));
            tx.run(add.bind("some", &*some)).await?;
        }
        let moved = Query::new("DELETE FROM usage_added WHERE id IN :some");
        tx.run(moved.bind("some", &*some)).await?;
        tx.commit().await?;
        Ok(u32::try_from(some.len()).unwrap_or(limit))
    }
}

/// The statements whose rows are summed to answer a request.
struct Parts<'a> {
    tenant: &'a str,
    agent: Option<&'a str>,
    queries: Vec<Query>,
}

impl Parts<'_> {
    /// Adds the sums of a table, whose times are whole hours.
    fn sums(&mut self, table: &str, range: Range) {
        let sums =
            format!("SELECT {{day}} AS day, agent, model, runs, {USAGE} FROM {table} r WHERE ");
        self.add(sums, range, "");
    }

    /// Adds stored runs, and the sums of deleted runs.
    fn runs(&mut self, range: Range) {
        // Most runs have answers of one model and their sums in their rows.
        let plain = format!(
            "SELECT {{day}} AS day, agent, model, CASE WHEN iterations > 0 THEN 1 ELSE 0 END \
             AS runs, {USAGE} FROM runs r WHERE model IS NOT NULL AND NOT mixed_usage AND "
        );
        self.add(plain, range, "");
        let mixed = format!(
            "SELECT {{day}} AS day, r.agent, i.provider || '/' || i.model AS model, 1 AS runs, {} \
             FROM runs r JOIN iterations i ON i.run_id = r.id WHERE r.mixed_usage AND ",
            sums("i"),
        );
        self.add(mixed, range, " GROUP BY r.id, i.provider, i.model");
        let rest = format!(
            "SELECT {{day}} AS day, r.agent, r.model, 0 AS runs, {USAGE_BEYOND_ITERATIONS} r.mixed_usage AND "
        );
        self.add(rest, range, HAS_USAGE_BEYOND_ITERATIONS);
        self.sums("(SELECT p.*, p.hour AS created_at FROM past_usage p)", range);
    }

    fn add(&mut self, rows: String, (from, to): Range, grouped: &str) {
        let number = self.queries.len();
        let part = Query::new(rows)
            .push(&format!("r.tenant = :tenant AND r.created_at >= :from{number}"))
            .push(&format!(" AND r.created_at < :to{number}"))
            .bind("tenant", self.tenant)
            .bind(format!("from{number}"), from)
            .bind(format!("to{number}"), to)
            .and("r.agent = :agent", "agent", self.agent)
            .push(grouped);
        self.queries.push(part);
    }

    fn all(self) -> Option<Query> {
        self.queries.into_iter().reduce(|all, part| all.push(" UNION ALL ").followed_by(part))
    }
}

/// Splits a range into the whole units in it, if there are any, and the parts before and after them.
fn split_by_unit(range: Range, unit: TimeDelta) -> (Option<Range>, Vec<Range>) {
    let (from, to) = range;
    let first = beginning(from, unit);
    let first = if first < from { first.checked_add_signed(unit).unwrap_or(to) } else { first };
    let last = beginning(to, unit);
    let is_some = |(from, to): &Range| from < to;
    if first < last {
        let ends = [(from, first), (last, to)];
        (Some((first, last)), ends.into_iter().filter(is_some).collect())
    } else {
        (None, Some(range).into_iter().filter(is_some).collect())
    }
}

impl UsageSum {
    /// One sum for each hour, agent and model.
    pub(super) fn merged<'a>(sums: impl Iterator<Item = &'a Self>) -> Vec<Self> {
        let mut added = BTreeMap::<_, Self>::new();
        for sum in sums {
            let UsageSum { tenant, hour, agent, model, runs, usage } = sum;
            match added.entry((tenant, hour, agent, model)) {
                Entry::Vacant(entry) => {
                    entry.insert(sum.clone());
                }
                Entry::Occupied(mut entry) => {
                    let sum = entry.get_mut();
                    sum.runs += runs;
                    sum.usage.add(usage);
                }
            }
        }
        added.into_values().collect()
    }
}

/// Adds the usage of runs that are about to be deleted to the sums of deleted runs.
pub(super) fn keep_usage(runs: &[Uuid]) -> Query {
    Query::new(format!(
        "INSERT INTO past_usage (tenant, hour, agent, model, runs, {USAGE}) \
         SELECT u.tenant, u.hour, u.agent, u.model, count(DISTINCT u.run_id), {} FROM (\
         SELECT r.tenant, {{hour}} AS hour, r.agent, i.provider || '/' || i.model AS model, \
         r.id AS run_id, i.input_tokens, i.output_tokens, i.cached_input_tokens, \
         i.cache_write_tokens, i.reasoning_tokens, i.cost_micro_usd, i.estimated \
         FROM runs r JOIN iterations i ON i.run_id = r.id WHERE r.id IN :runs UNION ALL \
         SELECT r.tenant, {{hour}}, r.agent, r.model, NULL, {USAGE_BEYOND_ITERATIONS} r.model IS NOT NULL \
         AND r.id IN :runs{HAS_USAGE_BEYOND_ITERATIONS}) u \
         GROUP BY u.tenant, u.hour, u.agent, u.model ORDER BY 1, 2, 3, 4 \
         ON CONFLICT (tenant, hour, agent, model) DO UPDATE SET {}",
        sums("u"),
        add_assignments("past_usage"),
    ))
    .bind("runs", runs)
}

/// The sums of the usage columns of a table. A cost is known if the cost of every row with tokens is.
fn sums(table: &str) -> String {
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
        "{tokens}CASE WHEN count(*) FILTER (WHERE {cost} IS NULL \
         AND {table}.input_tokens + {table}.output_tokens > 0) = 0 \
         THEN CAST(COALESCE(sum({cost}), 0) AS bigint) END AS cost_micro_usd, \
         count(*) FILTER (WHERE {table}.estimated) > 0 AS estimated"
    )
}

/// The assignments of an upsert that adds new sums to the stored ones.
fn add_assignments(table: &str) -> String {
    let numbers = USAGE.split(", ").filter(|column| *column != "estimated");
    let add = |column| format!("{column} = {table}.{column} + excluded.{column}, ");
    let numbers: String = std::iter::once("runs").chain(numbers).map(add).collect();
    format!("{numbers}estimated = {table}.estimated OR excluded.estimated")
}
