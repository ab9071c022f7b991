//! The parts of a run: model responses, tool calls and messages.
//!
//! The messages are derived from the journal by the runtime. Providers' own call ids and opaque
//! blocks are shown only in the journal.

use std::collections::HashMap;
use std::ops::ControlFlow;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::consumption_views::UsageView;
use super::journal;
use super::page::{Listing, MAX_PAGE, PARTS, PartParams, by_number, fitting, number_position};
use super::redaction;
use super::runs::existing;
use crate::bounds::json;
use crate::event::{CompactionCause, ContextCompacted, Reconciled, RunEvent};
use crate::http::document::vocabulary::{Decision, ToolCallState};
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::extract::{Params, RunId};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::message::{AssistantMessage, Conversation, FinishReason, ToolResult, Turn};
use crate::run::Effect;
use crate::runtime::{Transcript, journals, transcript};
use crate::store::{IterationRecord, RunRecord, ToolCallRecord};

/// One model response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Iteration {
    /// The run's id.
    run_id: Uuid,
    /// The attempt, starting at 1.
    #[schema(example = 1)]
    attempt: u32,
    /// The number of the iteration within the attempt, starting at 1.
    #[schema(example = 1)]
    number: u32,
    /// The provider that responded.
    #[schema(example = "openai")]
    provider: String,
    /// The model that responded, without the provider.
    #[schema(example = "gpt-4.1-mini")]
    model: String,
    /// Why the model stopped.
    #[schema(value_type = FinishReason, example = "tool_calls")]
    finish_reason: String,
    /// Tokens and cost of the model call.
    usage: UsageView,
    /// Milliseconds from the first try to the response.
    #[schema(example = 320)]
    latency_ms: u64,
    /// Failed tries before the response.
    retries: u32,
    /// Whether a fallback model responded.
    fallback: bool,
    /// Whether the model was called before and its response was lost in a crash; `usage` includes that call, estimated
    /// to be as much.
    repeated: bool,
    /// When the iteration began.
    started_at: DateTime<Utc>,
    /// Compactions of the conversation in this iteration.
    compactions: Vec<Compaction>,
    /// Runs started by the response's calls.
    children: Vec<Uuid>,
}

/// A reduction of the conversation to fit the model's context window.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = IterationCompaction)]
pub(crate) struct Compaction {
    /// Why the conversation was compacted.
    cause: CompactionCause,
    /// Number of tool results replaced by a note of their size.
    cleared_results: usize,
    /// Number of turns replaced by a summary.
    summarised_turns: usize,
    /// Estimated tokens of the conversation before.
    tokens_before: u64,
    /// Estimated tokens of the conversation after.
    tokens_after: u64,
    /// Tokens and cost of the model call that wrote the summary; null if there was none.
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

/// The events of an iteration that its stored row does not have.
#[derive(Default)]
struct IterationEvents {
    started_at: Option<DateTime<Utc>>,
    compactions: Vec<Compaction>,
    children: Vec<Uuid>,
}

/// Those of all iterations of a run, by attempt and number.
async fn iteration_events(
    app: &App,
    run: &RunRecord,
) -> Result<HashMap<(u32, u32), IterationEvents>, Problem> {
    let mut all: HashMap<(u32, u32), IterationEvents> = HashMap::new();
    let mut place = (0, 0);
    journal::read(app, &run.tenant, run.id, |event| {
        if let RunEvent::IterationStarted { attempt, iteration, .. } = &event.what {
            place = (*attempt, *iteration);
            all.entry(place).or_default().started_at.get_or_insert(event.at);
        }
        if let RunEvent::ContextCompacted(compacted) = &event.what {
            all.entry(place).or_default().compactions.push(compacted.into());
        }
        if let RunEvent::ToolCallStarted(call) = &event.what
            && let Some(child) = app.runtime.child_of(&call.tool, &call.effect_key)
        {
            let children = &mut all.entry(place).or_default().children;
            if !children.contains(&child) {
                children.push(child);
            }
        }
        ControlFlow::Continue(())
    })
    .await?;
    Ok(all)
}

impl Iteration {
    /// Bytes as JSON, about.
    fn size(&self) -> usize {
        1024 + 512 * self.compactions.len() + 40 * self.children.len()
    }
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
            repeated: row.repeated,
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
    /// The id used in events and URLs; not the provider's own call id.
    id: Uuid,
    /// The run's id.
    run_id: Uuid,
    /// The attempt, starting at 1.
    #[schema(example = 1)]
    attempt: u32,
    /// The iteration within the attempt, starting at 1.
    #[schema(example = 1)]
    iteration: u32,
    /// Position among the calls of the response, starting at 1.
    ordinal: u32,
    /// The tool's name, also if no such tool exists.
    #[schema(example = "file_ops")]
    tool: String,
    /// The arguments given by the model, or those by which an approver replaced them; a string if they
    /// are not valid JSON.
    arguments: Value,
    /// Whether an approver replaced the model's arguments, which are in its message.
    edited: bool,
    /// The effect of the call; null if there is no such tool.
    #[schema(value_type = Option<Effect>)]
    effect: Option<String>,
    /// The policy decision; null if none was needed.
    #[schema(value_type = Option<Decision>, example = "allowed")]
    decision: Option<String>,
    /// The reason for the decision, if there is one.
    reason: Option<String>,
    /// The state of the call.
    #[schema(value_type = ToolCallState, example = "succeeded")]
    state: String,
    /// The result that the model got.
    #[schema(example = "README.md")]
    result: Option<String>,
    /// The run that the call of another agent started; null until it has ended, and for other calls.
    child_run_id: Option<Uuid>,
    /// Whether the call took effect, as its tool answered after a crash; null if the tool
    /// was not asked or did not know.
    #[schema(value_type = Option<Reconciled>)]
    reconciled: Option<Reconciled>,
    /// Whether the result is an error.
    is_error: bool,
    /// Whether the result of an earlier identical call was reused.
    cached: bool,
    /// When the execution began.
    started_at: Option<DateTime<Utc>>,
    /// When the result was available.
    finished_at: Option<DateTime<Utc>>,
    /// Duration of the execution in milliseconds; null if it is unknown.
    #[schema(example = 2)]
    duration_ms: Option<u64>,
}

impl From<ToolCallRecord> for ToolCallView {
    fn from(row: ToolCallRecord) -> Self {
        Self {
            id: row.call_id,
            run_id: row.run_id,
            attempt: row.attempt,
            iteration: row.iteration,
            ordinal: row.ordinal,
            tool: redaction::text(row.tool),
            arguments: redaction::document(row.arguments),
            edited: row.edited,
            effect: row.effect,
            decision: row.decision,
            reason: row.reason.map(redaction::text),
            state: row.state,
            result: row.result.map(redaction::text),
            child_run_id: row.child_run_id,
            reconciled: row.reconciled,
            is_error: row.is_error,
            cached: row.cached,
            started_at: row.started_at,
            finished_at: row.finished_at,
            duration_ms: row.duration_ms,
        }
    }
}

/// The author of a message.
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
    /// The author of the message.
    role: Role,
    /// The text of the message.
    #[schema(example = "Let me look.")]
    content: String,
    /// The tool calls of an assistant message; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    tool_calls: Vec<MessageCall>,
    /// The call whose result this is; only in tool messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    tool_call_id: Option<Uuid>,
    /// The tool whose result this is; only in tool messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "file_ops")]
    name: Option<String>,
    /// Whether the model no longer gets this message, because a summary or a note of its size has
    /// replaced it; absent if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    compacted: bool,
}

impl Message {
    /// The call whose result this is.
    pub(crate) fn result_of(&self) -> Option<Uuid> {
        self.tool_call_id
    }

    /// Bytes, about.
    pub(crate) fn size(&self) -> usize {
        let arguments = self.tool_calls.iter().map(|call| call.arguments.to_string().len());
        self.content.len() + arguments.sum::<usize>()
    }
}

/// A tool call in a message.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = MessageToolCall, example = json!({"arguments": {"operation": "list", "path": "."}}))]
pub(crate) struct MessageCall {
    /// The call's id.
    id: Uuid,
    /// The tool's name.
    #[schema(example = "file_ops")]
    name: String,
    /// The arguments given by the model; a string if they are not valid JSON.
    arguments: Value,
}

/// The system prompt and the messages of all turns.
pub(crate) fn messages(conversation: &Conversation) -> Vec<Message> {
    let system = Some(conversation.system()).filter(|system| !system.is_empty());
    let system = system.map(|system| message(Role::System, system));
    system.into_iter().chain(messages_of(conversation.turns())).collect()
}

fn message(role: Role, content: &str) -> Message {
    Message {
        role,
        content: redaction::text(content.to_owned()),
        tool_calls: Vec::new(),
        tool_call_id: None,
        name: None,
        compacted: false,
    }
}

/// All messages in order, including compacted ones, which the model no longer gets.
fn all_messages(transcript: &Transcript) -> Vec<Message> {
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

/// A model response and the available results of its calls.
fn exchange(said: &AssistantMessage, results: &[ToolResult]) -> Vec<Message> {
    let tool_calls = said.tool_calls.iter().map(|call| MessageCall {
        id: call.id,
        name: redaction::text(call.name.clone()),
        arguments: redaction::document(json_or_text(&call.arguments)),
    });
    let said_so =
        Message { tool_calls: tool_calls.collect(), ..message(Role::Assistant, &said.text) };
    let name = |id: Uuid| said.tool_calls.iter().find(|call| call.id == id);
    let answers = results.iter().map(|result| Message {
        tool_call_id: Some(result.call_id),
        name: name(result.call_id).map(|call| redaction::text(call.name.clone())),
        ..message(Role::Tool, &result.content)
    });
    std::iter::once(said_so).chain(answers).collect()
}

/// Parses JSON; other text becomes a string.
pub(crate) fn json_or_text(text: &str) -> Value {
    json::read(text).unwrap_or_else(|_| Value::from(text))
}

/// List a run's model responses
///
/// A page has at most 4 MiB, so it can have fewer responses than `limit`.
#[utoipa::path(
    get, path = "/runs/{id}/iterations", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run's id."), PartParams),
    responses((status = 200, description = "A page of model responses, in order.", body = Listing<Iteration>)),
)]
pub(crate) async fn list_iterations(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Json<Listing<Iteration>>, Problem> {
    let page = by_number(&mut params, &caller.tenant, PARTS)?;
    params.finish()?;
    let run = existing(&app, &caller.tenant, id).await?;
    let rows = app.store.iterations(&caller.tenant, id, &page).await?;
    let mut events = iteration_events(&app, &run).await?;
    let iteration = |row: IterationRecord| {
        let IterationEvents { started_at, compactions, children } =
            events.remove(&(row.attempt, row.number)).unwrap_or_default();
        let started_at = started_at.unwrap_or(row.started_at);
        Iteration { started_at, compactions, children, ..Iteration::from(row) }
    };
    let size = page.limit as usize - 1;
    let has_more = rows.len() > size;
    let mut all: Vec<Iteration> = rows.into_iter().take(size).map(iteration).collect();
    let fits = fitting(all.iter().map(Iteration::size), MAX_PAGE);
    let has_more = has_more || fits < all.len();
    all.truncate(fits);
    let next = page.after.unwrap_or(0) + i64::try_from(fits).unwrap_or(i64::MAX / 4);
    Ok(Json(Listing::until(all, page.list, has_more.then(|| number_position(next)))))
}

/// List a run's tool calls
///
/// A page has at most 4 MiB of arguments and results, or one call, so it can have fewer than `limit`.
#[utoipa::path(
    get, path = "/runs/{id}/tool-calls", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run's id."), PartParams),
    responses((status = 200, description = "A page of tool calls, in order.", body = Listing<ToolCallView>)),
)]
pub(crate) async fn list_tool_calls(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Response, Problem> {
    let page = by_number(&mut params, &caller.tenant, PARTS)?;
    params.finish()?;
    existing(&app, &caller.tenant, id).await?;
    let bytes = MAX_PAGE as u64;
    let piece = app.store.tool_call_piece(&caller.tenant, id, &page, bytes).await?;
    let permit = journals::permit(piece.bytes).await;
    let (shown, has_more) = page.fitted(piece);
    let rows = app.store.tool_calls(&caller.tenant, id, &shown).await?;
    let listing = move || {
        let _permit = permit;
        let next = shown.after.unwrap_or(0) + i64::from(shown.limit);
        let next = has_more.then(|| number_position(next));
        Ok(Listing::until(rows.into_iter().map(ToolCallView::from).collect(), page.list, next))
    };
    redaction::respond(piece.bytes, listing).await
}

/// List a run's messages
///
/// The whole conversation. Messages that the model no longer gets are marked as `compacted`; a
/// response whose calls are pending comes last. A page has at most 4 MiB, or one message, so it can
/// have fewer than `limit`.
#[utoipa::path(
    get, path = "/runs/{id}/messages", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run's id."), PartParams),
    responses((status = 200, description = "A page of messages, in order.", body = Listing<Message>)),
)]
pub(crate) async fn list_messages(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Response, Problem> {
    let page = by_number(&mut params, &caller.tenant, PARTS)?;
    params.finish()?;
    let run = existing(&app, &caller.tenant, id).await?;
    let journal = journal::load(&app, &run).await?;
    let listing = move || {
        let run_transcript = transcript(&journal.events)?;
        let all = all_messages(&run_transcript);
        Ok(Listing::of_large(all, &page, MAX_PAGE, Message::size))
    };
    redaction::respond(u64::MAX, listing).await
}

#[cfg(test)]
#[path = "run_parts_tests.rs"]
mod tests;
