//! `recall`: searches the memories of earlier runs of the same agent by words.
//!
//! What is kept, and how it is looked up, is not known here: the service gives a function for it.
//! The tenant and the agent come from the run and never from the model.

use crate::message::tool_schema::ToolSchema;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use uuid::Uuid;

use super::arguments::whole_number;
use super::{Defaults, Tool, ToolContext, ToolError, ToolInfo};
use crate::governance::{Action, ActionKind, Permit};
use crate::run::{Effect, Labels};

/// The tool's name.
pub const NAME: &str = "recall";

/// Results where the model does not say how many, and at most.
const TOP_K: u64 = 5;
const MOST: u64 = 50;

/// A query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecallQuery {
    /// Whose runs.
    pub tenant: String,
    /// Of which agent.
    pub agent: String,
    /// The run that asks; its own observations are left out.
    pub run_id: Uuid,
    /// The words to search for.
    pub query: String,
    /// Results; 1 to 50.
    pub top_k: u32,
}

/// The memories that were found, and the labels of the runs that they are of.
pub type Recalled = (Vec<String>, Labels);

/// Answers with what is remembered, the most relevant first, or why it is unavailable.
pub type RecallFn =
    Arc<dyn Fn(RecallQuery) -> BoxFuture<'static, Result<Recalled, String>> + Send + Sync>;

/// The tool.
pub struct Recall {
    info: ToolInfo,
    recollect: RecallFn,
}

impl Recall {
    /// The tool, which searches with this function.
    pub fn new(recollect: RecallFn) -> Self {
        let input_schema = json!({
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1, "description": "What to look for, in a few words."},
                "top_k": {"type": "integer", "minimum": 1, "maximum": MOST, "description": "How many notes; default 5."}
            },
            "required": ["query"],
            "additionalProperties": false
        });
        let info = ToolInfo {
            name: NAME.into(),
            description: "Looks up notes of your earlier runs: what you said, which tools you called and what they \
                          returned, what was refused and what failed."
                .into(),
            input_schema: ToolSchema::from(input_schema),
            effect: Effect::Read,
            varies: false,
            concurrent: false,
            source: "builtin".into(),
            destructive: false,
            defaults: Defaults::default(),
        };
        Self { info, recollect }
    }
}

#[async_trait]
impl Tool for Recall {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let what = ActionKind::Call { tool: NAME.to_owned() };
        Ok(vec![Action::new(what, Effect::Read)])
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        let top_k = whole_number(&arguments["top_k"]).unwrap_or(TOP_K).clamp(1, MOST);
        let question = RecallQuery {
            tenant: context.caller.tenant.clone(),
            agent: context.agent.to_string(),
            run_id: context.run_id,
            query: arguments["query"].as_str().unwrap_or_default().to_owned(),
            top_k: u32::try_from(top_k).unwrap_or(u32::MAX),
        };
        let (notes, labels) = (self.recollect)(question).await.map_err(ToolError::ForModel)?;
        context.read_labels.add(labels);
        if notes.is_empty() {
            return Ok("Nothing that fits is remembered.".to_owned());
        }
        Ok(notes.iter().map(|note| format!("- {note}\n")).collect::<Vec<_>>().concat())
    }
}
