//! The provider's own function calling.

use super::{Ask, Check, Driver, Reading, call_id, text_beside};
use crate::message::{AssistantMessage, Conversation, ToolCall};
use crate::providers::{Completion, ModelRequest};

/// Tool calls through the provider's API.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

impl Driver for Native {
    fn request<'a>(
        &self,
        base: ModelRequest<'a>,
        ask: &Ask<'a>,
        _: &'a mut Conversation,
    ) -> ModelRequest<'a> {
        ModelRequest { tool_choice: ask.choice.clone(), ..base }
    }

    fn parse(
        &self,
        completion: Completion,
        base: &ModelRequest<'_>,
        ask: &Ask<'_>,
        _: Check<'_>,
    ) -> Reading {
        let calls = completion.tool_calls.into_iter().enumerate().map(|(index, call)| {
            let name = base.names.to_ours(&call.wire_name);
            let target = ask.target(&name);
            ToolCall {
                id: call_id(ask.place, index),
                provider_id: call.id,
                name,
                arguments: call.arguments,
                target,
            }
        });
        let tool_calls: Vec<ToolCall> = calls.collect();
        let message = AssistantMessage {
            text: text_beside(completion.text, &tool_calls),
            thinking: completion.thinking,
            tool_calls,
            opaque: completion.opaque,
            decision: None,
        };
        Reading { message, undecided: None }
    }
}
