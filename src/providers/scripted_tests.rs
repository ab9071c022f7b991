//! Scenarios as test authors write them, and what they are told when one is wrong.

use crate::message::tool_schema::ToolSchema;
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::message::{AssistantMessage, CallTarget, ToolCall, ToolResult};
use crate::providers::{Capabilities, Deltas, ToolOffer, WireNames};

/// A conversation in which the last turn's calls gave `results`.
fn conversation(results: &[&str]) -> Conversation {
    let mut conversation = Conversation::new("system");
    conversation.push_user("hello");
    let ids = |n: usize| Uuid::from_u128(n as u128);
    let call = |n| ToolCall {
        id: ids(n),
        provider_id: n.to_string(),
        name: "file_ops".into(),
        arguments: "{}".into(),
        target: CallTarget::Tool,
    };
    let message = AssistantMessage {
        tool_calls: (0..results.len()).map(call).collect(),
        ..Default::default()
    };
    let results = results.iter().enumerate();
    let results = results.map(|(n, text)| ToolResult::of_service(ids(n), *text, false));
    conversation.push_turn(message, results.collect()).unwrap();
    conversation.push_user("go on");
    conversation
}

struct Stage {
    dir: TempDir,
    scripted: Scripted,
    conversation: Conversation,
    inputs: Value,
    tools: Vec<ToolOffer>,
    choice: ToolChoice,
}

impl Stage {
    fn new(yaml: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("s.yaml"), yaml).unwrap();
        let tool = |name: &str| ToolOffer {
            name: name.into(),
            description: String::new(),
            input_schema: ToolSchema::from(json!({"type": "object"})),
        };
        Self {
            scripted: Scripted::new(dir.path().to_owned()),
            dir,
            conversation: conversation(&["first", r#"{"entries": [{"path": "a.md", "size": 3}]}"#]),
            inputs: json!({"n": 3, "name": "Ada", "tags": ["x"]}),
            tools: vec![tool("file_ops"), tool("mcp:time/now")],
            choice: ToolChoice::Auto,
        }
    }

    async fn play(&self, model: &str, step: u32) -> Result<Completion, ProviderError> {
        let names = WireNames::new(self.tools.iter().map(|tool| tool.name.as_str()));
        let request = ModelRequest {
            model,
            capabilities: &Capabilities::SCRIPTED,
            conversation: &self.conversation,
            tools: &self.tools,
            names: &names,
            tool_choice: self.choice.clone(),
            parallel_tool_calls: None,
            temperature: None,
            max_output_tokens: None,
            output_left: None,
            thinking: None,
            prompt_caching: false,
            deltas: Deltas::default(),
            output_schema: None,
            json_mode: false,
            options: crate::providers::Options::default(),
            inputs: &self.inputs,
            step,
            trace: None,
        };
        self.scripted.complete(&request).await
    }

    async fn error(&self, step: u32) -> String {
        let error = self.play("s", step).await.unwrap_err();
        assert_eq!((error.kind, error.status), (FailureKind::BadRequest, Some(400)), "{error}");
        error.message
    }
}

#[tokio::test]
async fn steps_are_played_in_order_and_the_last_repeats() {
    let stage = Stage::new(
        r#"
steps:
  - text: "Hello {{ inputs.name }}, step {{ step }}: {{ results[0] }} {{ (results[1] | fromjson).entries[0].path }}"
  - tool_calls:
      - {tool: "mcp:time/now", arguments: {n: "{{ inputs.n + 1 }}", all: "{{ inputs.tags }}", text: "no {{ step }}", deep: [{x: true}]}}
      - {tool: file_ops}
    usage: {input_tokens: 10, output_tokens: 2, cached_input_tokens: 4}
  - {text: cut, finish_reason: length}
"#,
    );
    let first = stage.play("s", 1).await.unwrap();
    assert_eq!(first.text, "Hello Ada, step 1: first a.md");
    assert_eq!(first.finish_reason, FinishReason::Stop);
    let usage = first.usage.unwrap();
    assert!(usage.estimated && usage.input_tokens > 0 && usage.output_tokens == 8, "{usage:?}");

    let second = stage.play("s", 2).await.unwrap();
    let call = |index, wire: &str, arguments: &str| RawToolCall {
        id: format!("call_2_{index}"),
        wire_name: wire.into(),
        arguments: arguments.into(),
    };
    let arguments = r#"{"n":4,"all":["x"],"text":"no 2","deep":[{"x":true}]}"#;
    let expected = Completion {
        text: String::new(),
        thinking: None,
        tool_calls: vec![call(0, "mcp__time__now", arguments), call(1, "file_ops", "{}")],
        opaque: None,
        finish_reason: FinishReason::ToolCalls,
        usage: Some(Usage {
            input_tokens: 10,
            output_tokens: 2,
            cached_input_tokens: 4,
            ..Usage::default()
        }),
    };
    assert_eq!(second, expected);
    for step in [3, 4, 1000] {
        let completion = stage.play("s", step).await.unwrap();
        assert_eq!(
            (completion.text.as_str(), completion.finish_reason),
            ("cut", FinishReason::Length)
        );
    }
}

#[tokio::test]
async fn arguments_may_be_any_text() {
    let table = [
        (r#"'{"path": '"#, r#"{"path": "#),
        (r#"'{"n": {{ inputs.n }}}'"#, r#"{"n": 3}"#),
        (r#""{{ inputs }}""#, r#"{"n":3,"name":"Ada","tags":["x"]}"#),
        (r#""{{ inputs.name }}""#, "Ada"),
        (r#""{{ inputs.n }} and {{ step }}""#, "3 and 1"),
        ("[1, 2]", "[1,2]"),
        ("{yes: no}", r#"{"yes":"no"}"#),
    ];
    for (written, expected) in table {
        let stage = Stage::new(&format!(
            "steps: [{{tool_calls: [{{tool: file_ops, arguments: {written}}}]}}]"
        ));
        let completion = stage.play("s", 1).await.unwrap();
        assert_eq!(completion.tool_calls[0].arguments, expected, "{written}");
    }
}

#[tokio::test]
async fn errors_are_those_of_a_real_server() {
    let stage = Stage::new(
        r#"
steps:
  - error: {status: 429, message: "slow down, {{ inputs.name }}", retry_after: 1.5}
  - error: {status: 429, code: insufficient_quota}
  - error: {status: 503}
"#,
    );
    let limited = stage.play("s", 1).await.unwrap_err();
    let expected = ProviderError {
        provider: "scripted".into(),
        kind: FailureKind::RateLimited,
        status: Some(429),
        code: None,
        message: "slow down, Ada".into(),
        retry_after: Some(Duration::from_millis(1500)),
        should_retry: None,
        usage: None,
    };
    assert_eq!(limited, expected);
    assert_eq!(stage.play("s", 2).await.unwrap_err().kind, FailureKind::QuotaExhausted);
    assert_eq!(stage.play("s", 3).await.unwrap_err().kind, FailureKind::Transient);
}

#[tokio::test]
async fn match_takes_the_first_branch_that_fits() {
    let yaml = r#"
match:
  - {when: "step > 1 && messages[size(messages) - 1].role == 'user'", steps: [{text: late}]}
  - {when: "inputs.n == 3 && messages.exists(m, m.role == 'tool' && m.content == 'first')", steps: [{text: three}]}
  - {when: "inputs.n == 4", steps: [{text: four}]}
  - {when: "inputs.n == 5", steps: [{text: five}]}
"#;
    let mut stage = Stage::new(yaml);
    assert_eq!(stage.play("s", 1).await.unwrap().text, "three");
    assert_eq!(stage.play("s", 2).await.unwrap().text, "late");
    stage.inputs = json!({"n": 4});
    assert_eq!(stage.play("s", 1).await.unwrap().text, "four");
    stage.inputs = json!({"n": 6});
    assert_eq!(stage.error(1).await, "s.yaml: no branch of `match` fits step 1");
}

#[tokio::test]
async fn tool_choice_is_honoured() {
    let mut stage =
        Stage::new("steps: [{text: hi, tool_calls: [{tool: file_ops}]}, {text: only text}]");
    stage.choice = ToolChoice::None;
    let silent = stage.play("s", 1).await.unwrap();
    assert_eq!(
        (silent.text.as_str(), silent.tool_calls.len(), silent.finish_reason),
        ("hi", 0, FinishReason::Stop)
    );
    stage.choice = ToolChoice::Required;
    assert_eq!(stage.play("s", 1).await.unwrap().tool_calls.len(), 1);
    assert_eq!(
        stage.error(2).await,
        "s.yaml: steps[1]: it has no tool call, but tool_choice demands one"
    );
    stage.choice = ToolChoice::Tool("mcp:time/now".into());
    assert_eq!(
        stage.error(1).await,
        "s.yaml: steps[0]: it does not call mcp:time/now, but tool_choice demands that"
    );
    stage.tools.clear();
    assert_eq!(stage.play("s", 1).await.unwrap().tool_calls, []);
}

#[tokio::test]
async fn mistakes_are_told_with_file_line_and_key() {
    let table: &[(&str, &[&str])] = &[
        ("steps:\n  - text: a\n    tool_cals: []\n", &["line 3", "tool_cals"]),
        ("steps:\n  - text: a\n  - text: '{{ x'\n", &["line 3, column ", ": steps[1].text: "]),
        (
            "steps:\n  - tool_calls:\n      - {tool: t, arguments: {a: ['{% if %}']}}\n",
            &["line 3, column ", ": steps[0].tool_calls[0].arguments/a/0: "],
        ),
        ("steps:\n  - {delay_ms: 5}\n", &["line 2, column ", ": steps[0]: it needs text"]),
        (
            "steps:\n  - {text: a, error: {status: 500}}\n",
            &["line 2, column ", ": steps[0]: it has both an error"],
        ),
        (
            "steps:\n  - error: {status: 200}\n",
            &["line 2, column ", ": steps[0].error.status: 200"],
        ),
        (
            "steps:\n  - error: {status: 500, retry_after: -1}\n",
            &["steps[0].error.retry_after: ", "line 2"],
        ),
        (
            "steps:\n  - {text: a, finish_reason: bored}\n",
            &["s.yaml: line 2, column ", ": steps[0].finish_reason: ", "expected one of stop"],
        ),
        (
            "match:\n  - {when: 'inputs.', steps: [{text: a}]}\n",
            &["line 2, column ", ": match[0].when: "],
        ),
        ("steps: []\n", &["steps: is empty"]),
        ("steps: [{text: a}]\nmatch: []\n", &["both `steps` and `match`"]),
        ("{}\n", &["neither"]),
        ("steps: [", &["line 1"]),
        ("steps: [{text: '{{ inputs.nobody }}'}]\n", &["steps[0]", "undefined"]),
        (
            "steps: [{text: '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'}]\n",
            &["steps[0]", "fuel"],
        ),
        ("match: [{when: '1', steps: [{text: a}]}]\n", &["match[0].when gives"]),
    ];
    for (yaml, fragments) in table {
        let message = Stage::new(yaml).error(1).await;
        for fragment in fragments.iter().chain([&"s.yaml: "]) {
            assert!(message.contains(fragment), "{yaml}\n{message}\nlacks {fragment}");
        }
    }
}

#[tokio::test]
async fn an_edited_file_is_read_again_and_strange_names_are_not_found() {
    let stage = Stage::new("steps: [{text: before}]");
    assert_eq!(stage.play("s", 1).await.unwrap().text, "before");
    std::fs::write(stage.dir.path().join("s.yaml"), "steps: [{text: and after}]").unwrap();
    assert_eq!(stage.play("s", 1).await.unwrap().text, "and after");
    for name in ["absent", "../s", "/etc/passwd", ".s", "a\0b"] {
        let error = stage.play(name, 1).await.unwrap_err();
        assert_eq!((error.kind, error.status), (FailureKind::NotFound, Some(404)), "{name}");
    }
}

/// Plays the shipped scenario on what `file_ops` would answer.
async fn guide(inputs: Value, list: &str, read: &str, headings: &str) -> [Completion; 3] {
    let mut stage = Stage::new("steps: [{text: unused}]");
    stage.scripted = Scripted::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios").into());
    stage.tools[1].name = "output".into();
    stage.inputs = inputs;
    stage.conversation = Conversation::new("system");
    stage.conversation.push_user("hello");
    let first = stage.play("repo-guide", 1).await.unwrap();
    stage.conversation = conversation(&[list]);
    let second = stage.play("repo-guide", 2).await.unwrap();
    stage.conversation = conversation(&[list, read, headings]);
    [first, second, stage.play("repo-guide", 3).await.unwrap()]
}

fn arguments(completion: &Completion, index: usize) -> Value {
    serde_json::from_str(&completion.tool_calls[index].arguments).unwrap()
}

#[tokio::test]
async fn the_guide_tells_what_it_has_read() {
    let readme = "# Tidewater\n\nPredicts <tides> & \"more\".\n\n## Use\n";
    let headings = "docs/README.md:1: # Tidewater\ndocs/README.md:5: ## Use\n[1 file was skipped.]";
    let list = "README.md\na link (symbolic link)\nnotes/\nx.txt\n[2 more entries]";
    let [first, second, third] = guide(json!({"path": "docs"}), list, readme, headings).await;
    assert_eq!(arguments(&first, 0), json!({"operation": "list", "path": "docs"}));
    assert_eq!(arguments(&second, 1), json!({"operation": "read", "path": "docs/README.md"}));
    assert_eq!(arguments(&second, 2)["pattern"], json!("^#{1,3} "));
    let expected = json!({
        "title": "Tidewater",
        "summary": "Tidewater: Predicts <tides> & \"more\".",
        "read": "README.md",
        "files": ["README.md", "a link (symbolic link)", "x.txt"],
        "directories": ["notes/"],
        "headings": ["docs/README.md:1: # Tidewater", "docs/README.md:5: ## Use"],
    });
    assert_eq!(
        (third.tool_calls[0].wire_name.as_str(), arguments(&third, 0)),
        ("output", expected)
    );
}

#[tokio::test]
async fn the_guide_makes_do_with_any_file_or_none() {
    let [_, second, third] = guide(json!({}), "b.txt", "just a line", "[Nothing matches.]").await;
    assert_eq!(arguments(&second, 1), json!({"operation": "read", "path": "./b.txt"}));
    assert_eq!(arguments(&third, 0)["summary"], json!("b.txt: just a line"));

    let [_, second, third] =
        guide(json!({}), "[The directory is empty.]", "{}", "[Nothing matches.]").await;
    assert_eq!(arguments(&second, 1), json!({"operation": "stat", "path": "."}));
    let expected = json!({
        "title": "Nothing to read in .",
        "summary": "There is no file in this directory that could introduce it.",
        "read": null,
        "files": [],
        "directories": [],
        "headings": [],
    });
    assert_eq!(arguments(&third, 0), expected);
}
