//! Statistics: tool calls by tool; tokens and cost by day, agent and model.
//!
//! A run counts on the day on which it was accepted, with everything it did since. Calls are counted on
//! request, of the runs that are still stored; tokens and cost are kept as sums, which stay when runs
//! are deleted.

use axum::Json;
use axum::extract::State;
use chrono::TimeDelta;
use serde::Serialize;
use utoipa::ToSchema;

use super::consumption_views::UsageView;
use super::page::{LISTS, ListParams, Listing, by_usage, usage_position};
use super::redaction;
use crate::clock;
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::extract::Params;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::{StatsFilter, ToolStats, UsageStats};

/// The default time range; it begins with a day.
const WINDOW: TimeDelta = TimeDelta::days(30);
const DAY: TimeDelta = TimeDelta::days(1);

/// Counts and latencies of a tool's calls.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ToolStats)]
pub(crate) struct ToolStatsView {
    /// The tool's name, also if no such tool exists.
    #[schema(example = "file_ops")]
    tool: String,
    /// All calls, including blocked ones and calls of unknown tools.
    #[schema(example = 120)]
    calls: u64,
    /// Failed calls.
    #[schema(example = 3)]
    errors: u64,
    /// Calls that the policy blocked.
    #[schema(example = 1)]
    blocked: u64,
    /// Median duration of executed calls in milliseconds; null if none was executed.
    #[schema(example = 2)]
    p50_ms: Option<u64>,
    /// 95th percentile of the duration in milliseconds.
    #[schema(example = 9)]
    p95_ms: Option<u64>,
    /// 99th percentile of the duration in milliseconds.
    #[schema(example = 31)]
    p99_ms: Option<u64>,
}

impl From<ToolStats> for ToolStatsView {
    fn from(stats: ToolStats) -> Self {
        let ToolStats { tool, calls, errors, blocked, p50_ms, p95_ms, p99_ms } = stats;
        Self { tool: redaction::text(tool), calls, errors, blocked, p50_ms, p95_ms, p99_ms }
    }
}

/// Tokens and cost of one model for one agent on one day.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = UsageStats)]
pub(crate) struct UsageStatsView {
    /// The day in UTC on which the runs were accepted.
    #[schema(format = Date, example = "2026-01-31")]
    day: String,
    /// The agent's name.
    #[schema(example = "repo-guide")]
    agent: String,
    /// The model, as `provider/model`.
    #[schema(example = "openai/gpt-4.1-mini")]
    model: String,
    /// Runs in which the model responded.
    #[schema(example = 17)]
    runs: u64,
    #[serde(flatten)]
    usage: UsageView,
}

impl From<UsageStats> for UsageStatsView {
    fn from(stats: UsageStats) -> Self {
        let UsageStats { day, agent, model, runs, usage } = stats;
        Self { day, agent, model, runs, usage: (&usage).into() }
    }
}

fn filter(params: &mut Params) -> Result<StatsFilter, Problem> {
    let (since, until) = (params.bound("since")?, params.bound("until")?);
    let now = clock::now();
    let until = until.unwrap_or_else(|| clock::beginning(now + TimeDelta::days(2), DAY)); // another replica's clock may be ahead
    let since = since.unwrap_or_else(|| {
        until.min(now).checked_sub_signed(WINDOW).map_or(until, |at| clock::beginning(at, DAY))
    });
    Ok(StatsFilter { since, until, agent: params.text("agent") })
}

/// Count tool calls
///
/// Counts and latencies of calls by tool; percentiles are of executed calls.
#[utoipa::path(
    get, path = "/stats/tools", tag = "stats", security(("bearer" = ["runs:read"])),
    params(
        ("since" = Option<DateTime<Utc>>, Query, description = "Runs accepted at this time or later; default: the beginning of the day 30 days ago, in UTC."),
        ("until" = Option<DateTime<Utc>>, Query, description = "Runs accepted before this time; default: now."),
        ("agent" = Option<String>, Query, description = "Runs of this agent."),
    ),
    responses((status = 200, description = "All tools that were called, sorted by name.", body = Listing<ToolStatsView>)),
)]
pub(crate) async fn get_tool_stats(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<ToolStatsView>>, Problem> {
    let filter = filter(&mut params)?;
    params.finish()?;
    let rows = app.store.tool_stats(&caller.tenant, &filter).await?;
    Ok(Json(Listing::whole(rows.into_iter().map(ToolStatsView::from).collect())))
}

/// Count tokens and cost
///
/// Tokens and cost by day, agent and model; the newest day first. Deleted runs count, too, at the beginning of the
/// hour in which they were accepted.
#[utoipa::path(
    get, path = "/stats/usage", tag = "stats", security(("bearer" = ["runs:read"])),
    params(
        ("since" = Option<DateTime<Utc>>, Query, description = "Runs accepted at this time or later; default: the beginning of the day 30 days ago, in UTC."),
        ("until" = Option<DateTime<Utc>>, Query, description = "Runs accepted before this time; default: now."),
        ("agent" = Option<String>, Query, description = "Runs of this agent."),
        ListParams,
    ),
    responses((status = 200, description = "A page of usage by day, agent and model.", body = Listing<UsageStatsView>)),
)]
pub(crate) async fn get_usage_stats(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<UsageStatsView>>, Problem> {
    let filter = filter(&mut params)?;
    let page = by_usage(&mut params, &caller.tenant, LISTS)?;
    params.finish()?;
    let rows = app.store.usage_stats(&caller.tenant, &filter, &page).await?;
    Ok(Json(Listing::of(rows, &page, usage_position, UsageStatsView::from)))
}
