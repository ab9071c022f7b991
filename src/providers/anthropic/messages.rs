//! A conversation as the `messages` of a Messages call.
//!
//! Roles alternate: consecutive turns of one role become one message. The results of a turn open
//! the next user message. Opaque blocks of this provider are sent back byte for byte in their
//! places. Those of other providers are not sent, and neither is thinking to a model that cannot think.
//! Blank texts, which the API rejects, are left out or replaced by a placeholder. Ids that it rejects,
//! and repeated ids, are replaced by generated ones.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::message::{AssistantTurn, Turn};
use crate::model::{ProviderKind, ThinkingStyle};
use crate::providers::arguments::ArgumentsObject;
use crate::providers::call_ids::CallIds;
use crate::providers::{ModelRequest, NOTHING, opaque};

#[derive(Serialize)]
pub(super) struct Message<'a> {
    pub(super) role: Role,
    pub(super) content: Vec<Block<'a>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    User,
    Assistant,
}

/// Marks the end of a prefix that the server may cache.
#[derive(Clone, Copy, Serialize)]
pub(super) struct CacheControl {
    r#type: &'static str,
}

pub(super) const EPHEMERAL: CacheControl = CacheControl { r#type: "ephemeral" };

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block<'a> {
    Text {
        text: Cow<'a, str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    ToolUse {
        id: Cow<'a, str>,
        name: Cow<'a, str>,
        input: ArgumentsObject<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    ToolResult {
        tool_use_id: Cow<'a, str>,
        content: Cow<'a, str>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        is_error: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    /// Thinking, shown or redacted, verbatim.
    #[serde(untagged)]
    Thinking(&'a RawValue),
    /// Any other block, verbatim.
    #[serde(untagged)]
    Verbatim(&'a RawValue),
}

impl<'a> Block<'a> {
    /// `None` for a blank text.
    fn text(text: impl Into<Cow<'a, str>>) -> Option<Self> {
        let text = text.into();
        (!text.trim().is_empty()).then_some(Self::Text { text, cache_control: None })
    }

    /// Where a cache mark goes; verbatim blocks take none.
    pub(super) fn cache_control(&mut self) -> Option<&mut Option<CacheControl>> {
        match self {
            Self::Text { cache_control, .. }
            | Self::ToolUse { cache_control, .. }
            | Self::ToolResult { cache_control, .. } => Some(cache_control),
            Self::Thinking(_) | Self::Verbatim(_) => None,
        }
    }
}

/// The messages of a request's conversation. `provider` gets its own opaque blocks back.
pub(super) fn messages<'a>(request: &ModelRequest<'a>, provider: &str) -> Vec<Message<'a>> {
    let conversation = request.conversation;
    let mut messages: Vec<Message<'a>> = Vec::with_capacity(conversation.turns().len() * 2);
    let mut ids = CallIds::new(accepts, "toolu_");
    for turn in conversation.turns() {
        match turn {
            Turn::User(text) => say(&mut messages, Role::User, Block::text(or_nothing(text))),
            Turn::Assistant(turn) => {
                let ids = ids.of(&turn.message().tool_calls);
                say(
                    &mut messages,
                    Role::Assistant,
                    assistant_blocks(turn, &ids, request, provider),
                );
                say(&mut messages, Role::User, results(turn, &ids));
            }
        }
    }
    if let Some(Message { role: Role::Assistant, content }) = messages.last_mut()
        && let Some(Block::Text { text, .. }) = content.last_mut()
    {
        // The API rejects a final assistant text with trailing white space.
        *text = text.trim_end().to_owned().into();
    }
    messages
}

/// Whether the last assistant message begins with thinking, or there is none. The API requires this
/// if `thinking` is `enabled` and tools were called.
pub(super) fn allow_enabled_thinking(messages: &[Message<'_>]) -> bool {
    let last = messages.iter().rev().find(|message| message.role == Role::Assistant);
    last.is_none_or(|message| {
        let has_calls = message.content.iter().any(|block| matches!(block, Block::ToolUse { .. }));
        let is_last = messages.last().is_some_and(|last| last.role == Role::Assistant);
        !(has_calls || is_last) || matches!(message.content.first(), Some(Block::Thinking(_)))
    })
}

fn say<'a>(
    messages: &mut Vec<Message<'a>>,
    role: Role,
    blocks: impl IntoIterator<Item = Block<'a>>,
) {
    let mut blocks = blocks.into_iter().peekable();
    if blocks.peek().is_none() {
        return;
    }
    match messages.last_mut() {
        Some(last) if last.role == role => last.content.extend(blocks),
        _ => messages.push(Message { role, content: blocks.collect() }),
    }
}

fn or_nothing(text: &str) -> &str {
    if text.trim().is_empty() { NOTHING } else { text }
}

/// The blocks of an assistant message; empty without text and calls, because thinking must not come
/// last.
fn assistant_blocks<'a>(
    turn: &'a AssistantTurn,
    ids: &[Cow<'a, str>],
    request: &ModelRequest<'a>,
    provider: &str,
) -> Vec<Block<'a>> {
    let message = turn.message();
    let (names, thinks) = (request.names, request.capabilities.thinking != ThinkingStyle::None);
    let mut calls = message.tool_calls.iter().zip(ids).map(|(call, id)| Block::ToolUse {
        id: id.clone(),
        name: names.to_wire(&call.name),
        input: ArgumentsObject::new(&call.arguments),
        cache_control: None,
    });
    let own = opaque::sent_back(message, ProviderKind::Anthropic, provider, request.model);
    let Some(stored) = own.and_then(opaque_blocks) else {
        return Block::text(&message.text).into_iter().chain(calls).collect();
    };
    let mut blocks = Vec::with_capacity(stored.len());
    for (kind, raw) in stored {
        match kind.as_ref() {
            "text" if message.text.is_empty() => {}
            "text" => blocks.extend(
                serde_json::from_str(raw.get())
                    .ok()
                    .and_then(|TextBlock { text }| Block::text(text)),
            ),
            "tool_use" => blocks.extend(calls.next()),
            "thinking" | "redacted_thinking" if thinks => blocks.push(Block::Thinking(raw)),
            "thinking" | "redacted_thinking" => {}
            _ => blocks.push(Block::Verbatim(raw)),
        }
    }
    blocks.extend(calls);
    while let Some(Block::Thinking(_)) = blocks.last() {
        blocks.pop();
    }
    blocks
}

#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
}

#[derive(Deserialize)]
struct TextBlock<'a> {
    #[serde(borrow)]
    text: Cow<'a, str>,
}

/// Opaque blocks with their types.
fn opaque_blocks(json: &str) -> Option<Vec<(Cow<'_, str>, &RawValue)>> {
    let blocks: Vec<&RawValue> = serde_json::from_str(json).ok()?;
    let typed = blocks
        .into_iter()
        .map(|raw| Some((serde_json::from_str::<Typed>(raw.get()).ok()?.r#type, raw)));
    typed.collect()
}

fn results<'a>(turn: &'a AssistantTurn, ids: &[Cow<'a, str>]) -> Vec<Block<'a>> {
    let results = turn.results().iter().zip(ids).map(|(result, id)| Block::ToolResult {
        tool_use_id: id.clone(),
        content: match result.as_model_reads_it() {
            content if result.is_error && content.trim().is_empty() => Cow::Borrowed(NOTHING),
            content => content,
        },
        is_error: result.is_error,
        cache_control: None,
    });
    results.collect()
}

/// Whether the API takes this id of a call.
fn accepts(id: &str) -> bool {
    id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}
