//! Records the tool call that the caller made in the agent's name.

use serde_json::Value;
use uuid::Uuid;

use super::Run;
use crate::engine::state::FoldError;
use crate::event::{CallGiven, RunEvent};
use crate::message::{AssistantMessage, CallTarget, ToolCall};
use crate::run::GivenCall;

impl Run {
    pub(super) fn give_call(&mut self, given: &GivenCall) -> Result<(), FoldError> {
        let id = Uuid::now_v7();
        let call = ToolCall {
            id,
            provider_id: format!("call_{}", id.simple()),
            name: given.tool.clone(),
            arguments: Value::Object(given.arguments.clone()).to_string(),
            target: CallTarget::Tool,
        };
        let message = AssistantMessage { tool_calls: vec![call], ..AssistantMessage::default() };
        let (attempt, iteration) = (self.state.attempt(), self.state.iteration() + 1);
        self.record(RunEvent::CallGiven(CallGiven { attempt, iteration, message }))
    }
}
