use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::bounds::pattern::Author;
use crate::bounds::schema::Schema;
use crate::message::tool_schema::ToolSchema;
use crate::message::{ToolResult, Turn};
use crate::providers::{Capabilities, Deltas, WireNames};

/// What requests of an agent with two tools borrow.
struct Agent {
    conversation: Conversation,
    offers: Vec<ToolOffer>,
    names: WireNames,
    structured: bool,
}

const LOOK: &str = r#"{"thought": "t", "type": "call_tool", "tool": "file_ops", "args": {}}"#;

const REACT: React = React { final_via_inference: false, fields: None };
const LATER: React = React { final_via_inference: true, fields: None };

fn agent(structured: bool) -> Agent {
    let offer = |name: &str| ToolOffer {
        name: name.into(),
        description: format!("Does {name}."),
        input_schema: ToolSchema::from(
            json!({"type": "object", "title": format!("schema of {name}")}),
        ),
    };
    let names = if structured {
        vec!["file_ops", "mcp:time/now", "output"]
    } else {
        vec!["file_ops", "mcp:time/now"]
    };
    let mut conversation = Conversation::new("You help.");
    conversation.push_user("{}");
    Agent {
        conversation,
        offers: names.iter().map(|name| offer(name)).collect(),
        names: WireNames::new(names),
        structured,
    }
}

impl Agent {
    fn base(&self) -> ModelRequest<'_> {
        ModelRequest {
            model: "m",
            capabilities: &Capabilities::OPENAI,
            conversation: &self.conversation,
            tools: &self.offers,
            names: &self.names,
            tool_choice: ToolChoice::Required,
            parallel_tool_calls: Some(true),
            temperature: None,
            max_output_tokens: None,
            output_left: None,
            thinking: None,
            prompt_caching: false,
            deltas: Deltas::default(),
            output_schema: None,
            json_mode: false,
            options: crate::providers::Options::default(),
            inputs: &Value::Null,
            step: 1,
            trace: None,
        }
    }

    fn ask(&self, choice: ToolChoice) -> Ask<'_> {
        let place = Place { run_id: Uuid::nil(), attempt: 1, iteration: 1 };
        let output_tool = self.structured.then_some("output");
        Ask { place, choice, output_tool, submit_tool: None, answer_only: false, unfinished: None }
    }

    /// System prompt and turns as the model gets them.
    fn prompt(&self, driver: &React, ask: &Ask<'_>) -> Conversation {
        let mut rewritten = Conversation::default();
        let request = driver.request(self.base(), ask, &mut rewritten);
        assert!(request.tools.is_empty(), "nothing about tools goes over the wire");
        assert_eq!((&request.tool_choice, request.parallel_tool_calls), (&ToolChoice::Auto, None));
        request.conversation.clone()
    }

    fn read(
        &self,
        driver: &React,
        ask: &Ask<'_>,
        text: &str,
        finish_reason: FinishReason,
    ) -> Reading {
        let completion = Completion {
            text: text.into(),
            thinking: None,
            tool_calls: Vec::new(),
            opaque: None,
            finish_reason,
            usage: None,
        };
        let check = |tool: &str, args: &Value| match args.get("bad") {
            Some(_) => Err(format!("{tool} wants something else")),
            None => Ok(()),
        };
        driver.parse(completion, &self.base(), ask, &check)
    }
}

/// What came of an answer, in one line.
fn summary_of(reading: &Reading) -> String {
    let message = &reading.message;
    match (&reading.undecided, message.tool_calls.as_slice()) {
        (Some(Undecided::NotFound(why)), []) => format!("not found: {why}"),
        (Some(Undecided::NotValid(why)), []) => format!("not valid: {why}"),
        (None, []) if message.decision.is_some() => format!("answer {}", message.text),
        (None, []) => format!("text {}", message.text),
        (None, [call]) => format!("{:?} {} {}", call.target, call.name, call.arguments),
        other => panic!("{other:?}"),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn decisions_are_read_and_checked() {
    use FinishReason::{Length, Pause, Refusal, Stop};
    let b = || ToolChoice::Tool("file_ops".into());
    let (auto, required, none) = (ToolChoice::Auto, ToolChoice::Required, ToolChoice::None);
    let call =
        r#"{"thought": "t", "type": "call_tool", "tool": "file_ops", "args": {"path": "."}}"#;
    let answer = r#"{"type": "final_answer", "answer": "done"}"#;
    let object = r#"{"type": "final_answer", "answer": {"n": 1}}"#;
    let table = [
        (false, &auto, Stop, call, r#"Tool file_ops {"path": "."}"#),
        (
            false,
            &auto,
            Stop,
            r#"{"type": "call_tool", "tool": "mcp__time__now"}"#,
            "Tool mcp:time/now {}",
        ),
        (
            false,
            &auto,
            Stop,
            r#"{"type": "call_tool", "tool": "mcp:time/now", "args": null}"#,
            "Tool mcp:time/now {}",
        ),
        (false, &auto, Stop, answer, "answer done"),
        (false, &auto, Stop, object, r#"answer {"n": 1}"#),
        (true, &auto, Stop, object, r#"Output output {"n": 1}"#),
        (
            true,
            &auto,
            Stop,
            r#"{"type": "final_answer", "answer": "{\"n\": 1}"}"#,
            r#"Output output {"n": 1}"#,
        ),
        (true, &auto, Stop, answer, r#"Output output "done""#),
        (false, &auto, Stop, "hello", "not found: it holds no JSON object"),
        (false, &auto, Stop, r#"{"type": "muse"}"#, "not valid: `type` is \"muse\"; it must be"),
        (false, &auto, Stop, r#"{"tool": "file_ops"}"#, "not valid: `type` is missing"),
        (false, &auto, Stop, r#"{"type": "call_tool"}"#, "not valid: `tool` must be the name"),
        (
            false,
            &auto,
            Stop,
            r#"{"type": "call_tool", "tool": "rm\u0000"}"#,
            "not valid: there is no tool \"rm\\0\"; `tool` must be one of: file_ops, mcp:time/now",
        ),
        (
            true,
            &auto,
            Stop,
            r#"{"type": "call_tool", "tool": "output"}"#,
            "not valid: there is no tool",
        ),
        (
            false,
            &auto,
            Stop,
            r#"{"type": "call_tool", "tool": "file_ops", "args": "."}"#,
            "not valid: `args` must be an object",
        ),
        (
            false,
            &auto,
            Stop,
            r#"{"type": "call_tool", "tool": "file_ops", "args": {"bad": 1}}"#,
            "not valid: file_ops wants something else",
        ),
        (
            false,
            &auto,
            Stop,
            r#"{"type": "final_answer", "answer": null}"#,
            "not valid: `answer` is missing",
        ),
        (false, &required, Stop, call, "Tool"),
        (false, &required, Stop, answer, "answer done"),
        (true, &required, Stop, object, "Output output"),
        (false, &none, Stop, call, "not valid: no tool may be called"),
        (false, &none, Stop, answer, "answer done"),
        (false, &b(), Stop, call, "Tool"),
        (false, &b(), Stop, answer, "answer done"),
        (false, &b(), Stop, r#"{"type": "call_tool", "tool": "mcp:time/now"}"#, "Tool"),
        (true, &ToolChoice::Tool("output".into()), Stop, call, "Tool"),
        (true, &ToolChoice::Tool("output".into()), Stop, object, "Output output"),
        // What is cut off is not judged; the loop asks for the rest, or says that it was cut off.
        (false, &auto, Length, &answer[..20], "text {\"type\": \"final_ans"),
        (false, &auto, Length, answer, "text {\"type\": \"final_answer\""),
        (false, &auto, Length, call, "Tool file_ops"),
        (false, &auto, Refusal, "I will not.", "text I will not."),
        (false, &auto, Pause, "…", "text …"),
    ];
    for (structured, choice, finish, text, expected) in table {
        let agent = agent(structured);
        let reading = agent.read(&REACT, &agent.ask(choice.clone()), text, finish);
        let got = summary_of(&reading);
        assert!(got.starts_with(expected), "{text}\n{choice:?}: {got}");
    }
}

#[test]
fn an_error_repeats_little_of_what_the_model_wrote() {
    let agent = agent(false);
    let long = "x".repeat(1 << 20);
    for text in [
        format!(r#"{{"type": "{long}"}}"#),
        format!(r#"{{"type": "call_tool", "tool": "{long}"}}"#),
    ] {
        let reading = agent.read(&REACT, &agent.ask(ToolChoice::Auto), &text, FinishReason::Stop);
        let told = summary_of(&reading);
        assert!(told.starts_with("not valid: ") && told.len() < 400, "{} bytes", told.len());
    }
}

#[test]
fn a_decision_is_kept_as_it_was_written_and_its_thought_as_text() {
    let agent = agent(false);
    let decision =
        r#"{ "thought":"a\u0000b", "type":"call_tool","tool":"file_ops","args":{ "n": 1e400 } }"#;
    let text = format!("Well:\n```json\n{decision}\n```");
    let ask = agent.ask(ToolChoice::Auto);
    let reading = agent.read(&REACT, &ask, &text, FinishReason::Stop);
    assert!(reading.undecided.is_some(), "a number that cannot be read: {reading:?}");

    let decision = decision.replace("1e400", "1.50");
    let text = format!("Well:\n```json\n{decision}\n```");
    let reading = agent.read(&REACT, &ask, &text, FinishReason::Stop);
    assert_eq!(reading.message.text, "ab");
    assert_eq!(reading.message.decision.as_deref(), Some(decision.as_str()));
    assert_eq!(reading.message.tool_calls[0].arguments, r#"{ "n": 1.50 }"#);
    let again = agent.read(&REACT, &ask, &text, FinishReason::Stop);
    assert_eq!(reading, again, "the same place gives the same ids");

    let leaked =
        r#"{"thought": "{\"n\": 1}", "type": "call_tool", "tool": "file_ops", "args": {"n": 1}}"#;
    assert_eq!(agent.read(&REACT, &ask, leaked, FinishReason::Stop).message.text, "");
}

#[test]
fn the_rest_of_a_cut_off_decision_is_read_with_its_beginning() {
    let agent = agent(false);
    let whole = r#"{"type": "final_answer", "answer": "forty-two"}"#;
    let ask = Ask { unfinished: Some(&whole[..30]), ..agent.ask(ToolChoice::Auto) };
    let reading = agent.read(&REACT, &ask, &whole[30..], FinishReason::Stop);
    assert_eq!(
        (reading.message.text.as_str(), reading.message.decision.as_deref()),
        ("forty-two", Some(whole))
    );
}

#[test]
fn an_answer_may_be_written_afterwards() {
    let text = agent(false);
    let object = r#"{"type": "final_answer", "answer": {"n": 1}}"#;
    let structured = agent(true);
    let decided =
        structured.read(&LATER, &structured.ask(ToolChoice::Auto), object, FinishReason::Stop);
    assert_eq!(summary_of(&decided), r#"answer {"n": 1}"#, "nothing is proposed yet");

    let table = [
        (&text, "Forty-two, as {it} was.", "text Forty-two, as {it} was."),
        (&text, r#"{"n": 1}"#, r#"text {"n": 1}"#),
        (&text, r#"{"type": "final_answer", "answer": "all the same"}"#, "answer all the same"),
        (&structured, "```json\n{\"n\": 1}\n```", r#"Output output {"n": 1}"#),
        (&structured, object, r#"Output output {"n": 1}"#),
        (&structured, "one", "text one"),
        (&text, LOOK, "answer "),
        (&text, "I shall look: {\"type\": \"call_tool\", \"tool\": \"file_ops\"}", "answer "),
        (&text, r#"{"type": "final_answer"}"#, "answer "),
        (&structured, LOOK, "answer "),
        (
            &structured,
            r#"{"type": "final_answer", "n": 1}"#,
            r#"Output output {"type": "final_answer", "n": 1}"#,
        ),
    ];
    for (agent, said, expected) in table {
        let ask = Ask { answer_only: true, ..agent.ask(ToolChoice::Auto) };
        assert_eq!(
            summary_of(&agent.read(&LATER, &ask, said, FinishReason::Stop)),
            expected,
            "{said}"
        );
    }
    let ask = Ask { answer_only: true, ..structured.ask(ToolChoice::Auto) };
    let prompt = structured.prompt(&LATER, &ask);
    assert_eq!(prompt.system(), "You help.", "no decisions are described");
    let Some(Turn::User(last)) = prompt.turns().last() else { panic!("{prompt:?}") };
    assert!(last.contains("schema of output"), "{last}");
}

#[test]
fn the_prompt_describes_the_fields_of_the_author() {
    let described = json!({"type": "object", "required": ["confidence"]});
    let schema = Arc::new(Schema::compile(&described, Author::Operator).unwrap());
    let fields = Some(DecisionFields { described, schema });
    let driver = React { final_via_inference: false, fields };
    let (agent, auto) = (agent(false), ToolChoice::Auto);
    let prompt = agent.prompt(&driver, &agent.ask(auto.clone()));
    let line = prompt.system().lines().last().unwrap();
    assert!(line.contains(r#""required":["confidence"]"#), "{line}");
    let read =
        |text| summary_of(&agent.read(&driver, &agent.ask(auto.clone()), text, FinishReason::Stop));
    let with = r#"{"type": "final_answer", "answer": "x", "confidence": 1}"#;
    assert_eq!(read(with), "answer x");
    let without = read(r#"{"type": "final_answer", "answer": "x"}"#);
    assert!(without.contains("\"confidence\" is a required property"), "{without}");
    let deep = format!("{}{}", r#"{"a":"#.repeat(500), "}".repeat(500));
    let nested =
        read(&format!(r#"{{"type": "final_answer", "answer": "x", "confidence": {deep}}}"#));
    assert!(nested.starts_with("not "), "{nested}");
}

#[test]
fn the_prompt_describes_tools_and_decisions() {
    let text = agent(false).prompt(&REACT, &agent(false).ask(ToolChoice::Auto));
    insta::assert_snapshot!(text.system());
    let structured = agent(true);
    let prompt = structured.prompt(&REACT, &structured.ask(ToolChoice::Required));
    assert!(
        prompt
            .system()
            .contains("JSON Schema: {\"type\":\"object\",\"title\":\"schema of output\"}")
    );
    assert!(!prompt.system().contains("- output:"), "the output is no tool");
    assert_eq!(
        prompt.turns(),
        [Turn::User("{}\n\nYour next decision must be a `call_tool`.".into())]
    );
    let none = agent(false).prompt(&REACT, &agent(false).ask(ToolChoice::None));
    assert!(
        !none.system().contains("file_ops") && none.system().contains("final_answer"),
        "{}",
        none.system()
    );
}

#[test]
fn the_prompt_names_the_tools_that_give_a_reflected_output() {
    let agent = agent(true);
    let ask = |choice| Ask { submit_tool: Some("submit"), ..agent.ask(choice) };
    for driver in [REACT, LATER] {
        let prompt = agent.prompt(&driver, &ask(ToolChoice::Auto));
        let system = prompt.system();
        assert!(system.contains("- output:"), "the output is a tool like others: {system}");
        assert!(system.contains("`output`") && system.contains("`submit`"), "{system}");
        assert!(!system.contains("final_answer"), "{system}");
        let wrong = r#"{"type": "muse"}"#;
        let outcome =
            summary_of(&agent.read(&driver, &ask(ToolChoice::Auto), wrong, FinishReason::Stop));
        assert!(outcome.ends_with("it must be \"call_tool\""), "{outcome}");
    }
    let last = agent.prompt(&REACT, &ask(ToolChoice::None));
    assert!(last.system().contains("final_answer"), "at a limit: {}", last.system());
}

#[test]
fn the_conversation_reads_as_decisions_and_observations() {
    let mut agent = agent(false);
    let ask = agent.ask(ToolChoice::Auto);
    let decision = r#"{"type": "call_tool", "tool": "file_ops"}"#;
    let message = agent.read(&REACT, &ask, decision, FinishReason::Stop).message;
    let result = ToolResult::of_service(message.tool_calls[0].id, "notes.txt", false);
    let native = AssistantMessage { decision: None, text: "Again.".into(), ..message.clone() };
    let silent = AssistantMessage { tool_calls: Vec::new(), ..AssistantMessage::default() };
    agent.conversation.push_turn(message, vec![result.clone()]).unwrap();
    agent.conversation.push_user("Go on.");
    agent.conversation.push_turn(silent, Vec::new()).unwrap();
    agent.conversation.push_user("Say something.");
    agent.conversation.push_turn(native, vec![result]).unwrap();
    let prompt = agent.prompt(&REACT, &agent.ask(ToolChoice::Auto));
    let prompt: Vec<String> = prompt
        .turns()
        .iter()
        .map(|turn| match turn {
            Turn::User(text) => format!("user: {text}"),
            Turn::Assistant(turn) => format!("assistant: {}", turn.message().text),
        })
        .collect();
    let expected = [
        "user: {}".to_owned(),
        format!("assistant: {decision}"),
        "user: Observation: notes.txt\n\nGo on.\n\nSay something.".to_owned(),
        r#"assistant: {"thought":"Again.","type":"call_tool","tool":"file_ops","args":{}}"#
            .to_owned(),
        "user: Observation: notes.txt".to_owned(),
    ];
    assert_eq!(prompt, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_model_writes_is_read(
        text in prop_oneof![
            any::<String>(),
            r#"\{"type": ?"(call_tool|final_answer)", ?"(tool|args|answer|thought)": ?("file_ops"|\{\}|\{"a":1\}|null|1|"\\u0000")\}?"#,
        ],
        structured in any::<bool>(),
        answer_only in any::<bool>(),
        cut_off in any::<bool>(),
    ) {
        let agent = agent(structured);
        let ask = Ask { answer_only, ..agent.ask(ToolChoice::Auto) };
        let finish = if cut_off { FinishReason::Length } else { FinishReason::Stop };
        for driver in [REACT, LATER] {
            let Reading { message, undecided } = agent.read(&driver, &ask, &text, finish);
            prop_assert!(message.tool_calls.len() <= 1);
            prop_assert!(undecided.is_none() || message.tool_calls.is_empty() && message.decision.is_none());
            prop_assert!(text.contains('\0') || !message.text.contains('\0'), "{:?}", message);
        }
    }
}
