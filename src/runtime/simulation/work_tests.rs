//! What the runs of a simulation do: a model that calls a tool step by step, and a tool whose effects
//! are counted.

use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::drawn::Drawn;
use crate::governance::{Action, ActionKind, Permit};
use crate::message::tool_schema::ToolSchema;
use crate::message::{FinishReason, Turn, Usage};
use crate::providers::{Completion, ModelRequest, Provider, ProviderError, RawToolCall};
use crate::run::Effect;
use crate::tools::{Defaults, Tool, ToolContext, ToolError, ToolInfo};

/// The agent whose runs kill the process that drives them.
pub(super) const POISON: &str = "poison";

/// Runs that call the tool, and those that start another run too.
pub(super) const AGENTS: [(&str, &str); 4] = [
    ("writer", "tools: [ledger]"),
    ("lead", "tools: [ledger, 'agent:writer']"),
    (POISON, "tools: [ledger]"),
    ("victim", "tools: [ledger, 'agent:poison']"),
];

/// All effects, in their order: of which run, of which step, by which process.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<Vec<(Uuid, i64, usize)>>);

impl Ledger {
    pub(super) fn has(&self, run: Uuid, step: i64) -> bool {
        self.0.lock().iter().any(|(of, at, _)| (*of, *at) == (run, step))
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    /// The processes that have done it.
    pub(super) fn done(&self, run: Uuid, step: i64) -> Vec<usize> {
        let entries = self.0.lock();
        let done = entries.iter().filter(|(of, at, _)| (*of, *at) == (run, step));
        done.map(|(_, _, by)| *by).collect()
    }
}

/// Calls the tool as often as the inputs say, then another agent where it may, then ends; or kills
/// the process.
pub(super) struct Model {
    pub(super) drawn: Drawn,
    pub(super) dies: Arc<Notify>,
}

#[async_trait]
impl Provider for Model {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let results = |turn: &Turn| match turn {
            Turn::Assistant(turn) => turn.results().len(),
            Turn::User(_) => 0,
        };
        let done = request.conversation.turns().iter().map(results).sum::<usize>();
        let steps = request.inputs["steps"].as_u64().unwrap_or_default();
        let step = done as u64 + 1;
        if request.model == POISON && step == steps {
            tokio::time::sleep(self.drawn.millis(1, 60)).await;
            self.dies.notify_one();
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(self.drawn.millis(5, 400)).await;
        let call = match request.model {
            _ if step <= steps => Some(("ledger", json!({"step": step}))),
            "lead" if step == steps + 1 => Some(("agent:writer", json!({"steps": 1}))),
            "victim" if step == steps + 1 => Some(("agent:poison", json!({"steps": 1}))),
            _ => None,
        };
        let tool_calls = call.map(|(tool, arguments)| RawToolCall {
            id: format!("call_{step}"),
            wire_name: request.names.to_wire(tool).into_owned(),
            arguments: arguments.to_string(),
        });
        let tool_calls: Vec<RawToolCall> = tool_calls.into_iter().collect();
        let is_done = tool_calls.is_empty();
        Ok(Completion {
            text: if is_done { "done".to_owned() } else { String::new() },
            thinking: None,
            tool_calls,
            opaque: None,
            finish_reason: if is_done { FinishReason::Stop } else { FinishReason::ToolCalls },
            usage: Some(Usage { input_tokens: 10, output_tokens: 5, ..Usage::default() }),
        })
    }
}

/// Writes a line, in a thread for which it may have to wait: that goes on where the caller stops waiting for it.
pub(super) struct Writing {
    pub(super) info: ToolInfo,
    pub(super) ledger: Arc<Ledger>,
    pub(super) drawn: Drawn,
    pub(super) process: usize,
    pub(super) looks: bool,
}

pub(super) fn info() -> ToolInfo {
    ToolInfo {
        name: "ledger".into(),
        description: "Writes a line.".into(),
        input_schema: ToolSchema::from(json!({
            "type": "object",
            "properties": {"step": {"type": "integer"}},
            "required": ["step"],
            "additionalProperties": false
        })),
        effect: Effect::Once,
        varies: false,
        concurrent: false,
        source: "builtin".into(),
        destructive: false,
        defaults: Defaults::default(),
    }
}

#[async_trait]
impl Tool for Writing {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        Ok(vec![Action::new(ActionKind::Call { tool: "ledger".into() }, Effect::Once)])
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let step = arguments["step"].as_i64().unwrap_or_default();
        let ended = CancellationToken::new();
        let _ended_when_dropped = ended.clone().drop_guard();
        loop {
            let waits = self.drawn.millis(0, 400);
            let (standing, ended) = (context.standing.clone(), ended.clone());
            let (ledger, looks) = (Arc::clone(&self.ledger), self.looks);
            let (run, process) = (context.run_id, self.process);
            let thread = tokio::spawn(async move {
                tokio::time::sleep(waits).await;
                let may = !looks || (standing.holds() && !ended.is_cancelled());
                if may {
                    ledger.0.lock().push((run, step, process));
                }
                may
            });
            if thread.await.unwrap_or_default() {
                break;
            }
            context.standing.until_valid().await;
        }
        tokio::time::sleep(self.drawn.millis(0, 100)).await;
        Ok("written".to_owned())
    }
}
