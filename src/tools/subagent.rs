//! Other agents as tools: `agent:<name>` gives one a task, `transfer_to_<name>` hands it the
//! conversation.
//!
//! A call starts a child run and waits for its end; the output is the result. The id of the child run is
//! derived from the call's effect key, so a call that is repeated after a crash waits for the child that
//! it started. The runtime starts runs: this file only defines the trait for that, and knows neither
//! stores nor definitions. The calls of the child are judged in its own run.

use crate::message::tool_schema::ToolSchema;
use std::fmt::Write as _;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{ChildRun, Defaults, LabelRecorder, Tool, ToolContext, ToolError, ToolInfo};
use crate::governance::{Action, ActionKind, Permit};
use crate::run::{Delegation, Effect};

/// Starts child runs and waits for them.
#[async_trait]
pub trait StartRun: Send + Sync {
    /// The outcome of the call's child run, which is started, or found again if the call is repeated.
    /// Dropping the future cancels the child, unless the parent continues on another replica.
    ///
    /// # Errors
    /// Why there is no output, for the model of the parent.
    async fn start_run(&self, child: ChildCall) -> Result<ChildResult, ChildFailed>;
}

/// The outcome of a child run.
#[derive(Debug, Clone, PartialEq)]
pub enum ChildResult {
    /// It has ended with this output.
    Output(Value),
    /// The child run is parked, and waits for an answer from outside.
    Parked(Uuid),
    /// The budget that it shares with its parent is used up; in words, for the model.
    OverBudget(String),
}

/// A call that starts a child run.
#[derive(Debug, Clone, PartialEq)]
pub struct ChildCall {
    /// The run that calls.
    pub parent: Uuid,
    /// The call.
    pub call_id: Uuid,
    /// The call's key, of which the child's id is a function.
    pub effect_key: String,
    /// The agent that does the work.
    pub agent: String,
    /// What it works on.
    pub task: Task,
    /// Takes the labels of what the child has read.
    pub read_labels: LabelRecorder,
    /// Takes the child's id once it has started.
    pub child_run: ChildRun,
}

/// What a child run works on.
#[derive(Debug, Clone, PartialEq)]
pub enum Task {
    /// Inputs of its own.
    Inputs(Value),
    /// The parent's inputs and conversation.
    Handoff {
        /// Why, in the words of the parent's model.
        reason: Option<String>,
    },
}

/// Why a child run has no output.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ChildFailed(pub String);

/// What is known of an agent that is a tool.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChildAgent {
    /// One line, for the model.
    pub description: String,
    /// JSON Schema of its inputs; absent: any object.
    pub inputs: Option<Value>,
    /// Whether its calls can only read, so that it may work beside others.
    pub only_reads: bool,
}

/// An agent as a tool.
pub struct Subagent {
    info: ToolInfo,
    agent: String,
    is_handoff: bool,
    start: Arc<dyn StartRun>,
}

impl Subagent {
    /// The tool of that name.
    pub fn new(
        name: &str,
        delegation: Delegation<'_>,
        child: ChildAgent,
        start: Arc<dyn StartRun>,
    ) -> Self {
        let (agent, is_handoff) =
            (delegation.agent(), matches!(delegation, Delegation::Handoff(_)));
        let mut description = if is_handoff {
            format!(
                "Hands the conversation over to the agent {agent}, which continues it and returns its answer."
            )
        } else {
            format!("Has the agent {agent} work on a task and gives its output back.")
        };
        if !child.description.is_empty() {
            let _ = write!(description, " {}", child.description);
        }
        let input_schema = if is_handoff { handoff_schema() } else { object_schema(child.inputs) };
        let info = ToolInfo {
            name: name.to_owned(),
            description,
            input_schema: ToolSchema::from(input_schema),
            effect: Effect::Idempotent,
            varies: false,
            concurrent: child.only_reads,
            source: "agent".into(),
            destructive: false,
            defaults: Defaults::default(),
        };
        Self { info, agent: agent.to_owned(), is_handoff, start }
    }
}

#[async_trait]
impl Tool for Subagent {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let what = ActionKind::Delegate { agent: self.agent.clone() };
        Ok(vec![Action::new(what, Effect::Idempotent)])
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let task = if self.is_handoff {
            Task::Handoff { reason: reason(&arguments) }
        } else {
            Task::Inputs(arguments)
        };
        let child = ChildCall {
            parent: context.run_id,
            call_id: context.call_id,
            effect_key: context.effect_key.clone(),
            agent: self.agent.clone(),
            task,
            read_labels: context.read_labels.clone(),
            child_run: context.child_run.clone(),
        };
        match self.start.start_run(child).await.map_err(|why| ToolError::ForModel(why.0))? {
            ChildResult::Output(output) => Ok(as_result(&output)),
            ChildResult::Parked(child) => Err(ToolError::AwaitsChild(child)),
            ChildResult::OverBudget(why) => Err(ToolError::OverBudget(why)),
        }
    }
}

/// Why the conversation is handed over, where the model says so.
pub fn reason(arguments: &Value) -> Option<String> {
    let reason = arguments.get("reason")?.as_str()?.trim();
    (!reason.is_empty()).then(|| reason.to_owned())
}

/// An output as the parent's model reads it: JSON, or the plain text where a text answer is all
/// there is.
fn as_result(output: &Value) -> String {
    match output.as_object().map(|object| (object.len(), object.get("result"))) {
        Some((1, Some(Value::String(text)))) => text.clone(),
        _ => output.to_string(),
    }
}

fn handoff_schema() -> Value {
    let reason = json!({"type": "string", "description": "Why, in a sentence."});
    json!({"type": "object", "properties": {"reason": reason}, "additionalProperties": false})
}

/// Arguments are objects, whether a schema says so or not.
fn object_schema(inputs: Option<Value>) -> Value {
    let mut schema = match inputs {
        Some(Value::Object(schema)) => schema,
        _ => Map::new(),
    };
    schema.entry("type").or_insert_with(|| "object".into());
    Value::Object(schema)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_as_results() {
        let table = [
            (json!({"result": "plain words"}), "plain words"),
            (json!({"result": 4}), r#"{"result":4}"#),
            (json!({"result": "x", "more": 1}), r#"{"result":"x","more":1}"#),
            (json!({}), "{}"),
        ];
        for (output, result) in table {
            assert_eq!(as_result(&output), result);
        }
    }

    #[test]
    fn schemas_are_of_objects() {
        assert_eq!(object_schema(None), json!({"type": "object"}));
        let schema = json!({"required": ["task"]});
        assert_eq!(object_schema(Some(schema)), json!({"required": ["task"], "type": "object"}));
    }

    #[test]
    fn reasons() {
        let table = [
            (json!({"reason": " too hard "}), Some("too hard")),
            (json!({"reason": " "}), None),
            (json!({}), None),
        ];
        for (arguments, expected) in table {
            assert_eq!(reason(&arguments).as_deref(), expected);
        }
    }
}
