//! Adapts a request to the capabilities of a model, which would otherwise answer 400.
//!
//! A tool choice that cannot be sent becomes `auto` with only the required tool offered; the engine
//! checks whether the model called it. Everything else is a preference and silently dropped.

use crate::model::{ThinkingStyle, TopP};
use crate::providers::{Capabilities, ModelRequest, Options, ToolChoice, ToolOffer};

/// The request without what this model does not support.
pub(super) fn adapted<'a>(
    request: &ModelRequest<'a>,
    model: &'a str,
    capabilities: &'a Capabilities,
) -> ModelRequest<'a> {
    let thinking = request.thinking.filter(|_| capabilities.thinking != ThinkingStyle::None);
    let (tools, tool_choice) = choice(request, capabilities);
    ModelRequest {
        model,
        capabilities,
        tools,
        tool_choice,
        parallel_tool_calls: request.parallel_tool_calls.filter(|_| capabilities.parallel_switch),
        temperature: request.temperature.filter(|_| capabilities.temperature && thinking.is_none()),
        thinking,
        prompt_caching: request.prompt_caching && capabilities.prompt_caching,
        output_schema: request.output_schema.filter(|_| capabilities.structured_output),
        json_mode: request.json_mode && capabilities.json_mode,
        options: options(request, capabilities),
        ..request.clone()
    }
}

/// The options that the model supports. Unsupported options are refused when a definition is loaded; a
/// run that has already started drops them.
fn options<'a>(request: &ModelRequest<'a>, capabilities: &Capabilities) -> Options<'a> {
    let options = request.options;
    let top_p = options.top_p.filter(|_| match capabilities.top_p {
        TopP::Yes => true,
        TopP::No => false,
        TopP::WithoutTemperature => request.temperature.is_none(),
    });
    Options {
        top_p,
        stop: if capabilities.stop { options.stop } else { &[] },
        seed: options.seed.filter(|_| capabilities.seed),
        presence_penalty: options.presence_penalty.filter(|_| capabilities.penalties),
        frequency_penalty: options.frequency_penalty.filter(|_| capabilities.penalties),
        passed: options.passed,
    }
}

/// Whether the request requires a call that cannot be required of this model.
pub(super) fn loses_choice(request: &ModelRequest<'_>, capabilities: &Capabilities) -> bool {
    matches!(request.tool_choice, ToolChoice::Required | ToolChoice::Tool(_))
        && !capabilities.can_force(request.thinking)
}

/// The error if the model does not accept this many tools.
pub(super) fn too_many_tools(request: &ModelRequest<'_>) -> Option<String> {
    let (most, count) = (request.capabilities.max_tools?, request.tools.len());
    let model = request.model;
    (u32::try_from(count).unwrap_or(u32::MAX) > most)
        .then(|| format!("{count} tools are offered, and {model} takes at most {most}"))
}

/// The tools to offer and the choice to send. Only the required tool is offered if it cannot be
/// named in the choice.
fn choice<'a>(
    request: &ModelRequest<'a>,
    capabilities: &Capabilities,
) -> (&'a [ToolOffer], ToolChoice) {
    let can_force = capabilities.can_force(request.thinking);
    match &request.tool_choice {
        ToolChoice::Required if !can_force => (request.tools, ToolChoice::Auto),
        ToolChoice::Tool(name) if !(can_force && capabilities.named_tool_choice) => {
            let wanted = request.tools.iter().position(|offer| offer.name == *name);
            let tools = wanted.map_or(request.tools, |at| &request.tools[at..=at]);
            (tools, if can_force { ToolChoice::Required } else { ToolChoice::Auto })
        }
        other => (request.tools, other.clone()),
    }
}

#[cfg(test)]
mod tests {

    use serde_json::{Value, json};

    use super::*;
    use crate::message::Conversation;
    use crate::model::ForcedToolChoice;
    use crate::providers::{Deltas, WireNames};
    use crate::run::Thinking;

    fn offers() -> Vec<ToolOffer> {
        let offer = |name: &str| ToolOffer {
            name: name.into(),
            description: String::new(),
            input_schema: json!({"type": "object"}).into(),
        };
        vec![offer("a"), offer("b"), offer("output")]
    }

    fn with<T>(
        capabilities: Capabilities,
        choice: ToolChoice,
        thinks: bool,
        look: impl Fn(&ModelRequest<'_>, bool) -> T,
    ) -> T {
        let (conversation, names, tools) =
            (Conversation::default(), WireNames::default(), offers());
        let schema = json!({});
        let request = ModelRequest {
            model: "",
            capabilities: &Capabilities::OPENAI,
            conversation: &conversation,
            tools: &tools,
            names: &names,
            tool_choice: choice,
            parallel_tool_calls: Some(false),
            temperature: Some(0.5),
            max_output_tokens: None,
            output_left: None,
            thinking: thinks.then_some(Thinking { budget_tokens: Some(2048), effort: None }),
            prompt_caching: true,
            deltas: Deltas::default(),
            output_schema: Some(&schema),
            json_mode: false,
            options: Options::default(),
            inputs: &Value::Null,
            step: 1,
            trace: None,
        };
        look(&adapted(&request, "m", &capabilities), loses_choice(&request, &capabilities))
    }

    #[test]
    fn tools_are_counted_as_they_are_sent() {
        let two =
            Capabilities { max_tools: Some(2), named_tool_choice: false, ..Capabilities::OPENAI };
        let count = |request: &ModelRequest<'_>, _| too_many_tools(request);
        let found = with(two, ToolChoice::Auto, false, count).unwrap();
        assert_eq!(found, "3 tools are offered, and m takes at most 2");
        assert_eq!(with(two, ToolChoice::Tool("b".into()), false, count), None, "one is sent");
        assert_eq!(with(Capabilities::OPENAI, ToolChoice::Auto, false, count), None);
    }

    #[test]
    fn a_choice_is_sent_as_far_as_it_can_be() {
        let unnamed = Capabilities { named_tool_choice: false, ..Capabilities::OPENAI };
        let never =
            Capabilities { forced_tool_choice: ForcedToolChoice::No, ..Capabilities::ANTHROPIC };
        let (claude, gpt, ollama) =
            (Capabilities::ANTHROPIC, Capabilities::OPENAI, Capabilities::OLLAMA);
        let required = || ToolChoice::Required;
        let b = || ToolChoice::Tool("b".into());
        let table = [
            (gpt, required(), false, required(), 3, false),
            (gpt, b(), true, b(), 3, false),
            (unnamed, b(), false, required(), 1, false),
            (claude, b(), false, b(), 3, false),
            (claude, b(), true, ToolChoice::Auto, 1, true),
            (claude, required(), true, ToolChoice::Auto, 3, true),
            (never, required(), false, ToolChoice::Auto, 3, true),
            (ollama, b(), false, ToolChoice::Auto, 1, true),
            (ollama, ToolChoice::None, false, ToolChoice::None, 3, false),
            (ollama, ToolChoice::Auto, false, ToolChoice::Auto, 3, false),
        ];
        for (capabilities, wish, thinks, sent, offered, lost) in table {
            let what = format!("{wish:?} of {capabilities:?}, thinking: {thinks}");
            let found = with(capabilities, wish, thinks, |request, is_lost| {
                let b_is_there = request.tools.iter().any(|offer| offer.name == "b");
                (request.tool_choice.clone(), request.tools.len(), is_lost, b_is_there)
            });
            assert_eq!(found, (sent, offered, lost, true), "{what}");
        }
    }

    #[test]
    fn what_a_model_does_not_take_is_left_out() {
        type Sent = (Option<bool>, Option<f64>, bool, bool, bool);
        let sent = |request: &ModelRequest<'_>, _| -> Sent {
            let (thinks, caches) = (request.thinking.is_some(), request.prompt_caching);
            (
                request.parallel_tool_calls,
                request.temperature,
                thinks,
                caches,
                request.output_schema.is_some(),
            )
        };
        let cold = Capabilities {
            temperature: false,
            thinking: ThinkingStyle::None,
            ..Capabilities::OPENAI
        };
        let table = [
            (Capabilities::OPENAI, false, (Some(false), Some(0.5), false, false, true)),
            (Capabilities::OPENAI, true, (Some(false), None, true, false, true)),
            (Capabilities::ANTHROPIC, false, (Some(false), Some(0.5), false, true, false)),
            (Capabilities::OLLAMA, false, (None, Some(0.5), false, false, true)),
            (cold, true, (Some(false), None, false, false, true)),
        ];
        for (capabilities, thinks, expected) in table {
            assert_eq!(
                with(capabilities, ToolChoice::Auto, thinks, sent),
                expected,
                "{capabilities:?}"
            );
        }
    }
}
