//! The provider's own function calling.

use super::{Driver, Place, call_id};
use crate::message::{AssistantMessage, CallTarget, ToolCall};
use crate::providers::{Completion, ModelRequest, ToolChoice};

/// Tool calls as the provider's API has them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

impl Driver for Native {
    fn request<'a>(&self, base: ModelRequest<'a>, choice: ToolChoice) -> ModelRequest<'a> {
        ModelRequest { tool_choice: choice, ..base }
    }

    fn parse(
        &self,
        completion: Completion,
        base: &ModelRequest<'_>,
        place: Place,
        output_tool: Option<&str>,
    ) -> AssistantMessage {
        let calls = completion.tool_calls.into_iter().enumerate().map(|(index, call)| {
            let name = base.names.to_ours(&call.wire_name);
            let target = if output_tool == Some(name.as_str()) { CallTarget::Output } else { CallTarget::Tool };
            ToolCall { id: call_id(place, index), provider_id: call.id, name, arguments: call.arguments, target }
        });
        AssistantMessage {
            text: completion.text,
            thinking: completion.thinking,
            tool_calls: calls.collect(),
            opaque: completion.opaque,
        }
    }
}
