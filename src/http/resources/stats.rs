//! Runs in sums: how calls went by tool, what models took by day.
//!
//! A run counts on the day on which it was accepted, with all that it did since. Nothing is kept
//! for this: it is counted when it is asked for, from the rows of runs that are not deleted yet.

use axum::Json;
use axum::extract::State;
use chrono::{TimeDelta, Utc};
use serde::Serialize;
use utoipa::ToSchema;

use super::page::{LISTS, ListParams, Listing, by_number};
use super::runs::UsageView;
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::extract::Params;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::{Page, StatsFilter, ToolStats, UsageStats};

/// How far back is counted where nobody says.
const WINDOW: TimeDelta = TimeDelta::days(30);

/// How a tool's calls went.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ToolStats)]
pub(crate) struct ToolStatsView {
    /// The tool, or the unknown name that was called.
    #[schema(example = "file_ops")]
    tool: String,
    /// Calls, refused and unknown ones included.
    #[schema(example = 120)]
    calls: u64,
    /// Calls that failed.
    #[schema(example = 3)]
    errors: u64,
    /// Calls that were refused.
    #[schema(example = 1)]
    blocked: u64,
    /// Milliseconds within which half of the executed calls ended; null where none was executed.
    #[schema(example = 2)]
    p50_ms: Option<u64>,
    /// The same for 95 of a hundred.
    #[schema(example = 9)]
    p95_ms: Option<u64>,
    /// The same for 99 of a hundred.
    #[schema(example = 31)]
    p99_ms: Option<u64>,
}

impl From<ToolStats> for ToolStatsView {
    fn from(stats: ToolStats) -> Self {
        let ToolStats { tool, calls, errors, blocked, p50_ms, p95_ms, p99_ms } = stats;
        Self { tool, calls, errors, blocked, p50_ms, p95_ms, p99_ms }
    }
}

/// What one model took for one agent on one day.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = UsageStats)]
pub(crate) struct UsageStatsView {
    /// When the runs were accepted, UTC.
    #[schema(format = Date, example = "2026-01-31")]
    day: String,
    /// The agent.
    #[schema(example = "repo-guide")]
    agent: String,
    /// As `provider/model`.
    #[schema(example = "openai/gpt-4.1-mini")]
    model: String,
    /// Runs in which it answered.
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
    let (since, until) = (params.time("since")?, params.time("until")?);
    let until = until.unwrap_or_else(|| Utc::now() + TimeDelta::days(1)); // another replica's clock may be ahead
    let since =
        since.unwrap_or_else(|| until.min(Utc::now()).checked_sub_signed(WINDOW).unwrap_or(until));
    Ok(StatsFilter { since, until, agent: params.text("agent") })
}

/// Count tool calls
///
/// How calls went, by tool; percentiles are those of executed calls.
#[utoipa::path(
    get, path = "/stats/tools", tag = "stats", security(("bearer" = ["runs:read"])),
    params(
        ("since" = Option<DateTime<Utc>>, Query, description = "Runs accepted at this instant or later; default: 30 days back."),
        ("until" = Option<DateTime<Utc>>, Query, description = "Runs accepted before this instant; default: until now."),
        ("agent" = Option<String>, Query, description = "Runs of this agent."),
    ),
    responses((status = 200, description = "All tools that were called, by name.", body = Listing<ToolStatsView>)),
)]
pub(crate) async fn get_tool_stats(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<ToolStatsView>>, Problem> {
    let filter = filter(&mut params)?;
    params.finish()?;
    let rows = app.store.tool_stats(&caller.tenant, &filter).await?;
    let all = Page { limit: u32::MAX, after: None };
    Ok(Json(Listing::of_all(rows.into_iter().map(ToolStatsView::from).collect(), &all)))
}

/// Count tokens and cost
///
/// What models took by day, agent and model; the newest day first.
#[utoipa::path(
    get, path = "/stats/usage", tag = "stats", security(("bearer" = ["runs:read"])),
    params(
        ("since" = Option<DateTime<Utc>>, Query, description = "Runs accepted at this instant or later; default: 30 days back."),
        ("until" = Option<DateTime<Utc>>, Query, description = "Runs accepted before this instant; default: until now."),
        ("agent" = Option<String>, Query, description = "Runs of this agent."),
        ListParams,
    ),
    responses((status = 200, description = "A page of days, agents and models.", body = Listing<UsageStatsView>)),
)]
pub(crate) async fn get_usage_stats(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<UsageStatsView>>, Problem> {
    let filter = filter(&mut params)?;
    let page = by_number(&mut params, LISTS)?;
    params.finish()?;
    let rows = app.store.usage_stats(&caller.tenant, &filter).await?;
    Ok(Json(Listing::of_all(rows.into_iter().map(UsageStatsView::from).collect(), &page)))
}
