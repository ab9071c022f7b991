//! Opaque blocks: who gets them back.
//!
//! They are sent to the provider that wrote them, as long as it speaks the API of the blocks: the
//! configuration may have given its name to a server of another kind. The form of the blocks tells
//! their API. Blocks that name a model are sent to that model alone.

use std::borrow::Cow;

use serde::Deserialize;

use crate::message::{AssistantMessage, OpaqueBlocks};
use crate::model::ProviderKind;

/// What the form of opaque blocks tells about them.
struct Form<'a> {
    kind: ProviderKind,
    /// The only model that they are for.
    model: Option<Cow<'a, str>>,
}

/// A block or an item of a list.
#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow)]
    r#type: Option<Cow<'a, str>>,
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

/// The API of blocks that one of these models, each as `provider/model`, may get back; where there
/// are none, any model may.
pub(super) fn may_be_sent(blocks: &OpaqueBlocks, readers: &[String]) -> Option<ProviderKind> {
    let models = readers.iter().filter_map(|reader| reader.split_once('/'));
    let mut of_provider = models
        .filter(|(provider, _)| *provider == blocks.provider)
        .map(|(_, model)| model)
        .peekable();
    if !readers.is_empty() && of_provider.peek().is_none() {
        return None;
    }
    let form = Form::of(&blocks.json);
    let is_read = readers.is_empty() || of_provider.any(|model| form.is_for(model));
    is_read.then_some(form.kind)
}

impl<'a> Form<'a> {
    fn of(json: &'a str) -> Self {
        if let Ok(blocks) = serde_json::from_str::<Vec<Typed<'_>>>(json) {
            let is_item = |block: &Typed<'_>| block.r#type.as_deref().is_some_and(is_response_item);
            let kind = if blocks.iter().any(is_item) {
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

    #[test]
    fn blocks_count_for_those_who_may_get_them() {
        let (chat, list) = (r#"{"model":"a/b","reasoning":"r"}"#, r#"[{"type":"thinking"}]"#);
        for (json, readers, counts) in [
            (chat, vec![], true),
            (chat, vec!["p/a/b"], true),
            (chat, vec!["p/c"], false),
            (chat, vec!["p/c", "q/a/b"], false),
            (chat, vec!["q/c", "p/a/b"], true),
            (list, vec![], true),
            (list, vec!["p/c"], true),
            (list, vec!["q/c"], false),
        ] {
            let names: Vec<String> = readers.iter().map(ToString::to_string).collect();
            let blocks = message(json).opaque.unwrap();
            assert_eq!(may_be_sent(&blocks, &names).is_some(), counts, "{json} {readers:?}");
        }
    }
}
