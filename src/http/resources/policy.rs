//! Replay of an agent's policy over its recorded tool calls.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::agents::Agent;
use crate::bounds::json;
use crate::bounds::memory::{TenantPermit, TenantSemaphore};
use crate::event::ValidationError;
use crate::fairness;
use crate::http::edge::auth::{AgentsRead, Scoped, forbidden};
use crate::http::edge::cursor::{Filters, ListId};
use crate::http::edge::extract::{JsonObject, Name, Params, fields, optional_time};
use crate::http::edge::problem::{Code, Problem};
use crate::http::resources::page::{run_position, time_position};
use crate::http::resources::redaction;
use crate::http::state::App;
use crate::runtime::{self, Change, Replay, ReplayError, ReplayQuery};

/// Runs that are looked at where the request says nothing.
const DEFAULT_RUNS: u32 = 10_000;
/// Runs that one request may look at.
const MAX_RUNS: u32 = 1_000_000;
/// Bytes of a definition.
const MAX_DEFINITION: usize = 64 * 1024;
/// Entries of all lists of a definition: each may be a glob, of some KiB when compiled.
const MAX_ENTRIES: usize = 1000;
/// Definitions that are read at the same time; the largest takes a good part of a second.
static READING: Semaphore = Semaphore::const_new(1);
/// Replays at the same time, one of each tenant.
static REPLAYS: LazyLock<TenantSemaphore> = LazyLock::new(|| TenantSemaphore::with_share(4, 1));
/// How long a replay waits for the others.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Which calls are judged again, and by what.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(example = json!({"since": "2026-01-01T00:00:00Z", "limit": 1000}))]
pub(crate) struct PolicyReplayRequest {
    /// The definition to judge by, as the text of its file or as an object; default: the agent's own.
    /// At most 64 KiB, with 1000 entries in all of its lists.
    definition: Option<PolicyDefinition>,
    /// Runs created after this time.
    #[serde(deserialize_with = "optional_time")]
    since: Option<DateTime<Utc>>,
    /// Runs created before this time.
    #[serde(deserialize_with = "optional_time")]
    until: Option<DateTime<Utc>>,
    /// Runs at most, the newest; default: 10000.
    #[schema(minimum = 1, maximum = 1_000_000, required = false)]
    limit: Option<u32>,
    /// The `next_cursor` of an answer: the runs behind those are looked at.
    cursor: Option<String>,
}

/// A definition as YAML, or as the same in JSON.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged, expecting = "must be the text of a definition, or an object")]
#[schema(example = "name: repo-guide\nmodel: scripted/repo-guide\n")]
enum PolicyDefinition {
    Text(String),
    #[schema(value_type = Object)]
    Object(Map<String, Value>),
}

impl PolicyDefinition {
    /// As the text of a file.
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Object(fields) => Value::Object(fields).to_string(),
        }
    }
}

/// What a definition would have decided on recorded tool calls.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PolicyReplay {
    /// Runs that were looked at.
    #[schema(example = 120)]
    runs: u64,
    /// Tool calls that were decided on in them.
    #[schema(example = 640)]
    calls: u64,
    /// Calls on which the decision stays the same.
    #[schema(example = 600)]
    unchanged: u64,
    /// Calls that cannot be judged: those after the first changed decision of a run, since the
    /// model would have gone on differently, those whose actions were not recorded, and those that
    /// depend on interceptors, tool options or stop conditions that differ from the run's.
    #[schema(example = 30)]
    unknown: u64,
    /// Calls on which the decision changes.
    newly: NewDecisions,
    /// Runs in which a decision changes.
    #[schema(example = 8)]
    changed_runs: u64,
    /// What those runs cost, in US dollars.
    #[schema(example = 0.42)]
    cost_usd: f64,
    /// Hours that calls waited for an approval that they would not need.
    #[schema(example = 3.5)]
    waiting_hours: f64,
    /// The first changes, at most 100.
    examples: Vec<PolicyChange>,
    /// Whether there are more runs than were looked at: than `limit`, or than fit into 20 s.
    has_more: bool,
    /// The `cursor` for them; null where there are none.
    #[schema(example = json!(null))]
    next_cursor: Option<String>,
}

/// Calls by their new decision.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct NewDecisions {
    /// Would be blocked.
    #[schema(example = 6)]
    blocked: u64,
    /// Would need an approval.
    #[schema(example = 3)]
    escalated: u64,
    /// Would be executed with a warning.
    #[schema(example = 0)]
    warned: u64,
    /// Would be executed.
    #[schema(example = 1)]
    allowed: u64,
}

/// A tool call that would be decided on differently.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PolicyChange {
    /// The run.
    run_id: Uuid,
    /// The call.
    call_id: Uuid,
    /// Its tool.
    #[schema(example = "file_ops")]
    tool: String,
    /// The recorded decision.
    #[schema(example = "allowed")]
    was: String,
    /// The decision by the definition.
    #[schema(example = "blocked")]
    would_be: &'static str,
    /// The rule that decides; `none` where none objects.
    #[schema(example = "path")]
    rule: &'static str,
    /// The reason for it; null if no rule objects.
    reason: Option<String>,
}

impl From<Change> for PolicyChange {
    fn from(change: Change) -> Self {
        let Change { run_id, call_id, tool, was, would_be, rule, reason } = change;
        let (tool, reason) = (redaction::text(tool), reason.map(redaction::text));
        Self { run_id, call_id, tool, was, would_be, rule, reason }
    }
}

impl PolicyReplay {
    fn of(replay: Replay, list: ListId) -> Self {
        let runtime::NewDecisions { blocked, escalated, warned, allowed } = replay.newly;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 for any sum of runs")]
        let cost_usd = replay.micro_usd as f64 / 1e6;
        Self {
            newly: NewDecisions { blocked, escalated, warned, allowed },
            runs: replay.runs,
            calls: replay.calls,
            unchanged: replay.unchanged,
            unknown: replay.unknown,
            changed_runs: replay.changed_runs,
            cost_usd,
            waiting_hours: replay.waited.as_secs_f64() / 3600.0,
            examples: replay.examples.into_iter().map(Into::into).collect(),
            has_more: replay.more_after.is_some(),
            next_cursor: replay.more_after.map(|run| time_position(run.at, &run.id).in_list(list)),
        }
    }
}

/// Replay a policy
///
/// Judges the recorded tool calls of an agent's runs by its current definition, or by another one:
/// which calls would newly be blocked, need an approval or be allowed. Nothing is executed. One request
/// looks at the newest 10,000 runs unless `limit` says otherwise, and ends after 20 s with those that it has
/// judged; `next_cursor` leads to the others. A tenant has one replay in progress; others wait.
#[utoipa::path(
    post, path = "/agents/{name}/policy/replay", tag = "agents",
    security(("bearer" = ["agents:read", "runs:read"])),
    params(("name" = String, Path, description = "The agent's name.")),
    request_body(content = Option<PolicyReplayRequest>, description = "Everything is optional."),
    responses((status = 200, description = "What the definition would have decided.", body = PolicyReplay)),
)]
pub(crate) async fn replay_policy(
    State(app): State<App>,
    caller: Scoped<AgentsRead>,
    Name(name): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<PolicyReplay>, Problem> {
    params.finish()?;
    if !caller.has("runs:read") {
        return Err(forbidden("runs:read"));
    }
    let list = filters_of(&name, &body).of(&caller.tenant);
    let request: PolicyReplayRequest =
        fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))?;
    let turn = permit(&caller.tenant).await?;
    let query = query(&app, &name, request, list).await?;
    let replay = app.runtime.policy_replay(turn).judge(&caller.tenant, &query).await;
    replay.map(|replay| Json(PolicyReplay::of(replay, list))).map_err(|error| match error {
        ReplayError::Policy(error) => wrong("/definition", error.to_string()),
        ReplayError::Definition(message) => wrong("/definition", message),
        ReplayError::Store(error) => error.into(),
    })
}

/// Waits for the tenant's other replays.
async fn permit(tenant: &str) -> Result<TenantPermit<'static>, Problem> {
    let permit = tokio::time::timeout(MAX_WAIT, REPLAYS.acquire(tenant)).await.ok().flatten();
    permit.ok_or_else(|| {
        Problem::new(Code::Overloaded, "Other policy replays are in progress; retry later.")
    })
}

/// The identity of the list of runs that a request looks through, for its cursors.
fn filters_of(agent: &str, body: &Map<String, Value>) -> Filters {
    let fields: Vec<_> = body.iter().map(|(name, value)| (name, value.to_string())).collect();
    let fields = fields.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    Filters::new(&format!("policy/replay/{agent}"), fields)
}

async fn query(
    app: &App,
    name: &str,
    request: PolicyReplayRequest,
    list: ListId,
) -> Result<ReplayQuery, Problem> {
    let max_runs = request.limit.unwrap_or(DEFAULT_RUNS);
    if !(1..=MAX_RUNS).contains(&max_runs) {
        return Err(wrong("/limit", format!("must be from 1 to {MAX_RUNS}")));
    }
    let agent = match request.definition {
        None => app.catalogue.agent(name).ok_or_else(|| Problem::not_found("agent"))?,
        Some(written) => Arc::new(read(name.to_owned(), written.into_text()).await?),
    };
    let after = request.cursor.map(|cursor| list.position(&cursor, run_position)).transpose();
    let after = after.map_err(|refused| wrong("/cursor", refused.why().to_owned()))?;
    Ok(ReplayQuery { agent, since: request.since, until: request.until, max_runs, after })
}

/// The agent of a definition that a caller wrote.
async fn read(name: String, text: String) -> Result<Agent, Problem> {
    if text.len() > MAX_DEFINITION {
        return Err(wrong("/definition", format!("is longer than {MAX_DEFINITION} bytes")));
    }
    let internal = |error: &dyn std::fmt::Display| Problem::internal(error.to_string());
    let turn = READING.acquire().await.map_err(|error| internal(&error))?;
    let reading = fairness::blocking(move || {
        let _turn = turn;
        Agent::from_yaml(&name, &text).map_err(|error| error.to_string())
    });
    let read = reading.await.map_err(|error| internal(&error))?;
    let agent = read.map_err(|error| wrong("/definition", error))?;
    let written = json::read(agent.json.as_bytes()).map_err(|error| internal(&error))?;
    if entries(&written) > MAX_ENTRIES {
        return Err(wrong(
            "/definition",
            format!("has more than {MAX_ENTRIES} entries in its lists"),
        ));
    }
    Ok(agent)
}

fn entries(document: &Value) -> usize {
    match document {
        Value::Array(items) => items.len() + items.iter().map(entries).sum::<usize>(),
        Value::Object(fields) => fields.values().map(entries).sum(),
        _ => 0,
    }
}

fn wrong(pointer: &str, message: String) -> Problem {
    let error = ValidationError { pointer: pointer.to_owned(), message };
    Problem::invalid(Code::InvalidInputs, vec![error])
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_change_shows_no_secrets() {
        let secret = "ghp_hunter2hunter2hunter2hunter2";
        let change = Change {
            run_id: Uuid::nil(),
            call_id: Uuid::nil(),
            tool: format!("x {secret}"),
            was: "allowed".into(),
            would_be: "blocked",
            rule: "path",
            reason: Some(format!("\"out/{secret}.txt\" matches no entry")),
        };
        let answered = serde_json::to_value(PolicyChange::from(change)).unwrap();
        assert_eq!(answered["tool"], "x [redacted]");
        assert_eq!(answered["reason"], "\"out/[redacted].txt\" matches no entry");
    }

    #[tokio::test]
    async fn a_tenant_has_one_replay_in_progress() {
        let waits = |tenant: &'static str| permit(tenant).now_or_never().is_none();
        let first = permit("replaying").await.unwrap();
        assert!(waits("replaying") && !waits("another"));
        drop(first);
        assert!(!waits("replaying"));
    }

    #[test]
    fn a_change_without_an_objection_has_its_reason() {
        let change = Change {
            run_id: Uuid::nil(),
            call_id: Uuid::nil(),
            tool: "file_ops".into(),
            was: "blocked".into(),
            would_be: "allowed",
            rule: "none",
            reason: None,
        };
        let answered = serde_json::to_value(PolicyChange::from(change)).unwrap();
        assert_eq!(
            answered.get("reason"),
            Some(&serde_json::Value::Null),
            "the document requires it"
        );
    }
}
