//! The parts of a run: its model responses, tool calls, conversation and journal.
//!
//! Rows come from the store as they are; the conversation is folded from the journal by the
//! runtime. Providers' own call ids and opaque blocks are shown in the journal only.

use std::collections::HashMap;

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{Listing, PARTS, PartParams, by_number, next_offset};
use super::runs::{UsageView, existing};
use crate::event::{CompactionCause, ContextCompacted, Event, RunEvent};
use crate::http::document::vocabulary::{Decision, ToolCallState};
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::extract::{Params, RunId};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::message::{AssistantMessage, Conversation, FinishReason, ToolResult, Turn};
use crate::run::Effect;
use crate::runtime::{Transcript, child_of, transcript};
use crate::store::{IterationRecord, RunRecord, ToolCallRecord};

/// How many journal entries are read at a time when all of them are needed.
const JOURNAL_CHUNK: u32 = 1000;

/// One model response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Iteration {
    /// The run.
    run_id: Uuid,
    /// 1-based.
    #[schema(example = 1)]
    attempt: u32,
    /// Within the attempt, 1-based.
    #[schema(example = 1)]
    number: u32,
    /// The provider that answered.
    #[schema(example = "openai")]
    provider: String,
    /// The model, without the provider.
    #[schema(example = "gpt-4.1-mini")]
    model: String,
    /// Why the model stopped.
    #[schema(value_type = FinishReason, example = "tool_calls")]
    finish_reason: String,
    /// Tokens and cost of the response.
    usage: UsageView,
    /// Milliseconds from the first try to the answer.
    #[schema(example = 320)]
    latency_ms: u64,
    /// Failed tries before it.
    retries: u32,
    /// Whether a fallback model answered.
    fallback: bool,
    /// When the model was asked.
    started_at: DateTime<Utc>,
    /// How the conversation was made smaller in this iteration.
    compactions: Vec<Compaction>,
    /// The runs that calls of the response started.
    children: Vec<Uuid>,
}

/// What was taken from the conversation so that it fits the model's window.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = IterationCompaction)]
pub(crate) struct Compaction {
    /// Why.
    cause: CompactionCause,
    /// How many results gave way to a note of their size.
    cleared_results: usize,
    /// How many turns gave way to a summary.
    summarised_turns: usize,
    /// Tokens that the model would have read, estimated.
    tokens_before: u64,
    /// Tokens that it read then, estimated.
    tokens_after: u64,
    /// What the model call took that wrote the summary; null where none was made.
    usage: Option<UsageView>,
}

impl From<&ContextCompacted> for Compaction {
    fn from(compacted: &ContextCompacted) -> Self {
        Self {
            cause: compacted.cause,
            cleared_results: compacted.cleared.len(),
            summarised_turns: compacted.summary.as_ref().map_or(0, |summary| summary.turns),
            tokens_before: compacted.tokens_before,
            tokens_after: compacted.tokens_after,
            usage: compacted.call.as_ref().map(|call| (&call.usage).into()),
        }
    }
}

/// What the journal says of an iteration beside its model response.
#[derive(Default)]
struct Beside {
    compactions: Vec<Compaction>,
    children: Vec<Uuid>,
}

/// The same of all iterations, by attempt and number.
fn beside(journal: &[Event]) -> HashMap<(u32, u32), Beside> {
    let mut all: HashMap<(u32, u32), Beside> = HashMap::new();
    let mut place = (0, 0);
    for event in journal {
        if let RunEvent::IterationStarted { attempt, iteration, .. } = &event.what {
            place = (*attempt, *iteration);
        }
        if let RunEvent::ContextCompacted(compacted) = &event.what {
            all.entry(place).or_default().compactions.push(compacted.into());
        }
        if let RunEvent::ToolCallStarted(call) = &event.what
            && let Some(child) = child_of(&call.tool, &call.effect_key)
        {
            let children = &mut all.entry(place).or_default().children;
            if !children.contains(&child) {
                children.push(child);
            }
        }
    }
    all
}

impl From<IterationRecord> for Iteration {
    fn from(row: IterationRecord) -> Self {
        Self {
            run_id: row.run_id,
            attempt: row.attempt,
            number: row.number,
            provider: row.provider,
            model: row.model,
            finish_reason: row.finish_reason,
            usage: (&row.usage).into(),
            latency_ms: row.latency_ms,
            retries: row.retries,
            fallback: row.fallback,
            started_at: row.started_at,
            compactions: Vec::new(),
            children: Vec::new(),
        }
    }
}

/// One tool call.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ToolCall, example = json!({"arguments": {"operation": "list", "path": "."}}))]
pub(crate) struct ToolCallView {
    /// Used in events and URLs; not the provider's.
    id: Uuid,
    /// The run.
    run_id: Uuid,
    /// 1-based.
    #[schema(example = 1)]
    attempt: u32,
    /// Within the attempt, 1-based.
    #[schema(example = 1)]
    iteration: u32,
    /// Place among the calls of its response.
    ordinal: u32,
    /// The tool, or the unknown name.
    #[schema(example = "file_ops")]
    tool: String,
    /// As the model gave them; a text where they are no JSON.
    arguments: Value,
    /// What the tool does to the world; null where there is no such tool.
    #[schema(value_type = Option<Effect>)]
    effect: Option<String>,
    /// What the gate decided; null where it was not asked.
    #[schema(value_type = Option<Decision>, example = "allowed")]
    decision: Option<String>,
    /// Why it decided so, where it says.
    reason: Option<String>,
    /// Where it stands.
    #[schema(value_type = ToolCallState, example = "succeeded")]
    state: String,
    /// What the model read.
    #[schema(example = "README.md")]
    result: Option<String>,
    /// Whether that tells of a failure.
    is_error: bool,
    /// Whether an earlier identical call's result was used.
    cached: bool,
    /// When its execution began.
    started_at: Option<DateTime<Utc>>,
    /// When it had its result.
    finished_at: Option<DateTime<Utc>>,
    /// Milliseconds of execution.
    #[schema(example = 2)]
    duration_ms: Option<u64>,
}

impl From<ToolCallRecord> for ToolCallView {
    fn from(row: ToolCallRecord) -> Self {
        Self {
            id: row.id,
            run_id: row.run_id,
            attempt: row.attempt,
            iteration: row.iteration,
            ordinal: row.ordinal,
            tool: row.tool,
            arguments: row.arguments,
            effect: row.effect,
            decision: row.decision,
            reason: row.reason,
            state: row.state,
            result: row.result,
            is_error: row.is_error,
            cached: row.cached,
            started_at: row.started_at,
            finished_at: row.finished_at,
            duration_ms: row.duration_ms,
        }
    }
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

/// One message of the conversation.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[schema(example = json!({"role": "assistant"}))]
pub(crate) struct Message {
    /// Who speaks.
    role: Role,
    /// The text.
    #[schema(example = "Let me look.")]
    content: String,
    /// What an assistant asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    tool_calls: Vec<MessageCall>,
    /// The call that a tool's message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    tool_call_id: Option<Uuid>,
    /// The tool that answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "file_ops")]
    name: Option<String>,
    /// The model does not read this any more: a summary stands for it, or a note of its size.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    compacted: bool,
}

/// A tool call in a message.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = MessageToolCall, example = json!({"arguments": {"operation": "list", "path": "."}}))]
pub(crate) struct MessageCall {
    /// The call.
    id: Uuid,
    /// The tool.
    #[schema(example = "file_ops")]
    name: String,
    /// As the model gave them; a text where they are no JSON.
    arguments: Value,
}

/// Messages in the order in which the model reads them.
pub(crate) fn messages(conversation: &Conversation) -> Vec<Message> {
    let system = Some(conversation.system()).filter(|system| !system.is_empty());
    let system = system.map(|system| message(Role::System, system));
    system.into_iter().chain(messages_of(conversation.turns())).collect()
}

fn message(role: Role, content: &str) -> Message {
    Message {
        role,
        content: content.to_owned(),
        tool_calls: Vec::new(),
        tool_call_id: None,
        name: None,
        compacted: false,
    }
}

/// Messages in the order in which they came, also those that the model does not read any more.
fn messages_ever(transcript: &Transcript) -> Vec<Message> {
    let system = Some(transcript.system.as_str()).filter(|system| !system.is_empty());
    let mut all: Vec<Message> =
        system.map(|system| message(Role::System, system)).into_iter().collect();
    for kept in &transcript.turns {
        all.extend(messages_of(std::slice::from_ref(&kept.turn)).into_iter().map(|said| {
            let is_cleared = said.tool_call_id.is_some_and(|id| transcript.cleared.contains(&id));
            Message { compacted: kept.is_summarised || is_cleared, ..said }
        }));
    }
    if let Some((said, results)) = &transcript.open {
        all.extend(exchange(said, results));
    }
    all
}

/// The messages of turns.
pub(crate) fn messages_of(turns: &[Turn]) -> Vec<Message> {
    let mut messages = Vec::new();
    for turn in turns {
        let turn = match turn {
            Turn::User(text) => {
                messages.push(message(Role::User, text));
                continue;
            }
            Turn::Assistant(turn) => turn,
        };
        messages.extend(exchange(turn.message(), turn.results()));
    }
    messages
}

/// A response, and the results of its calls that there are.
fn exchange(said: &AssistantMessage, results: &[ToolResult]) -> Vec<Message> {
    let tool_calls = said.tool_calls.iter().map(|call| MessageCall {
        id: call.id,
        name: call.name.clone(),
        arguments: json_or_text(&call.arguments),
    });
    let said_so =
        Message { tool_calls: tool_calls.collect(), ..message(Role::Assistant, &said.text) };
    let name = |id: Uuid| said.tool_calls.iter().find(|call| call.id == id);
    let answers = results.iter().map(|result| Message {
        tool_call_id: Some(result.call_id),
        name: name(result.call_id).map(|call| call.name.clone()),
        ..message(Role::Tool, &result.content)
    });
    std::iter::once(said_so).chain(answers).collect()
}

/// JSON text as JSON, any other text as a string.
pub(crate) fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

/// List a run's model responses
#[utoipa::path(
    get, path = "/runs/{id}/iterations", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run."), PartParams),
    responses((status = 200, description = "A page of model responses, in order.", body = Listing<Iteration>)),
)]
pub(crate) async fn list_iterations(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Json<Listing<Iteration>>, Problem> {
    let page = by_number(&mut params, PARTS)?;
    params.finish()?;
    let run = existing(&app, &caller.tenant, id).await?;
    let rows = app.store.iterations(&caller.tenant, id, &page).await?;
    let mut beside = beside(&journal(&app, &run).await?);
    let iteration = |row: IterationRecord| {
        let told = beside.remove(&(row.attempt, row.number)).unwrap_or_default();
        let Beside { compactions, children } = told;
        Iteration { compactions, children, ..Iteration::from(row) }
    };
    Ok(Json(Listing::of(rows, &page, |_| next_offset(&page), iteration)))
}

/// List a run's tool calls
#[utoipa::path(
    get, path = "/runs/{id}/tool-calls", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run."), PartParams),
    responses((status = 200, description = "A page of tool calls, in order.", body = Listing<ToolCallView>)),
)]
pub(crate) async fn list_tool_calls(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Json<Listing<ToolCallView>>, Problem> {
    let page = by_number(&mut params, PARTS)?;
    params.finish()?;
    existing(&app, &caller.tenant, id).await?;
    let rows = app.store.tool_calls(&caller.tenant, id, &page).await?;
    Ok(Json(Listing::of(rows, &page, |_| next_offset(&page), ToolCallView::from)))
}

/// List a run's messages
///
/// The conversation with everything that was ever in it: what the model does not read any more is
/// marked, and a response whose calls wait stands at the end.
#[utoipa::path(
    get, path = "/runs/{id}/messages", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run."), PartParams),
    responses((status = 200, description = "A page of messages, in order.", body = Listing<Message>)),
)]
pub(crate) async fn list_messages(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Json<Listing<Message>>, Problem> {
    let page = by_number(&mut params, PARTS)?;
    params.finish()?;
    let run = existing(&app, &caller.tenant, id).await?;
    let journal = journal(&app, &run).await?;
    let transcript = transcript(&journal).map_err(|e| Problem::internal(e.to_string()))?;
    Ok(Json(Listing::of_all(messages_ever(&transcript), &page)))
}

async fn journal(app: &App, run: &RunRecord) -> Result<Vec<Event>, Problem> {
    let mut journal: Vec<Event> = Vec::new();
    loop {
        let after = journal.last().map_or(0, |event| event.seq);
        let chunk = app.store.events(&run.tenant, run.id, after, JOURNAL_CHUNK).await?;
        let last = chunk.len() < JOURNAL_CHUNK as usize;
        journal.extend(chunk);
        if last {
            return Ok(journal);
        }
    }
}

#[cfg(test)]
#[path = "run_parts_tests.rs"]
mod tests;
