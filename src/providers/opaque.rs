//! Opaque blocks: who gets them back.
//!
//! They go to the provider that wrote them, as long as it speaks the API that they are written in:
//! the configuration may give its name to a server of another kind. Which API that is, their form
//! says. Blocks that name a model go to that model alone.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::message::AssistantMessage;
use crate::model::ProviderKind;

/// What their form says of blocks.
struct Form<'a> {
    kind: ProviderKind,
    /// The only model that they are for.
    model: Option<Cow<'a, str>>,
}

/// A block or an item of a list.
#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
}

/// The JSON text that a model of a provider of this name and kind gets back with a message.
pub(super) fn sent_back<'a>(
    message: &'a AssistantMessage,
    kind: ProviderKind,
    provider: &str,
    model: &str,
) -> Option<&'a str> {
    let blocks = message.opaque.as_ref().filter(|blocks| blocks.provider == provider)?;
    let form = Form::of(&blocks.json);
    (form.kind == kind && form.is_for(model)).then_some(&blocks.json)
}

impl<'a> Form<'a> {
    fn of(json: &'a str) -> Self {
        if let Ok(blocks) = serde_json::from_str::<Vec<&RawValue>>(json) {
            let is_item = |block: &&RawValue| {
                serde_json::from_str::<Typed<'_>>(block.get())
                    .is_ok_and(|typed| is_response_item(&typed.r#type))
            };
            let is_of_responses = blocks.iter().any(is_item);
            let kind = if is_of_responses {
                ProviderKind::OpenaiResponses
            } else {
                ProviderKind::Anthropic
            };
            return Self { kind, model: None };
        }
        let model = serde_json::from_str::<Object<'_>>(json).ok().and_then(|object| object.model);
        let kind = if model.is_some() { ProviderKind::Openai } else { ProviderKind::Ollama };
        Self { kind, model }
    }

    fn is_for(&self, model: &str) -> bool {
        self.model.as_ref().is_none_or(|only| only == model)
    }
}

/// Whether Responses have output items of this type, and messages of Anthropic no such blocks.
fn is_response_item(kind: &str) -> bool {
    matches!(kind, "message" | "reasoning") || kind.ends_with("_call")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::OpaqueBlocks;

    const BLOCKS: [(&str, ProviderKind); 8] = [
        (r#"[{"type":"thinking"},{"type":"tool_use"}]"#, ProviderKind::Anthropic),
        (
            r#"[{"type":"server_tool_use"},{"type":"web_search_tool_result"}]"#,
            ProviderKind::Anthropic,
        ),
        (r#"[{"type":"reasoning"},{"type":"function_call"}]"#, ProviderKind::OpenaiResponses),
        (r#"[{"type":"web_search_call"}]"#, ProviderKind::OpenaiResponses),
        (r#"[{"type":"a_new_item"},{"type":"message"}]"#, ProviderKind::OpenaiResponses),
        (r#"{"model":"m","reasoning_content":"r"}"#, ProviderKind::Openai),
        (r#"{"model":"m","calls":[null,{"type":"reasoning"}]}"#, ProviderKind::Openai),
        (r#"{"thinking":"t"}"#, ProviderKind::Ollama),
    ];

    fn message(json: &str) -> AssistantMessage {
        let opaque = Some(OpaqueBlocks { provider: "p".into(), json: json.into() });
        AssistantMessage { opaque, ..AssistantMessage::default() }
    }

    #[test]
    fn blocks_go_to_the_api_that_they_are_written_in() {
        use ProviderKind::{Anthropic, Ollama, Openai, OpenaiResponses};
        for (json, written_in) in BLOCKS {
            for kind in [Anthropic, Ollama, Openai, OpenaiResponses] {
                let sent = |provider| sent_back(&message(json), kind, provider, "m").is_some();
                assert_eq!((sent("p"), sent("q")), (kind == written_in, false), "{json} {kind:?}");
            }
        }
    }
}
