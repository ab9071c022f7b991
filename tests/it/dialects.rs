//! One agent on every API but OpenAI's, whose stories are in `providers.rs`: each against a server
//! that refuses what the real one refuses, in one piece and streamed. And whatever conversation
//! there may be, what is sent of it is valid.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;
use toolloop::message::tool_schema::ToolSchema;

use proptest::prelude::*;
use reqwest::Method;
use secrecy::SecretString;
use serde_json::{Value, json};
use toolloop::message::{
    AssistantMessage, CallTarget, Conversation, FinishReason, OpaqueBlocks, ToolCall, ToolResult,
};
use toolloop::model::ProviderKind;
use toolloop::providers::anthropic;
use toolloop::providers::capabilities::CapabilityTable;
use toolloop::providers::ollama;
use toolloop::providers::wire::WireSettings;
use toolloop::providers::{
    Capabilities, Completion, Delta, Deltas, FailureKind, ModelRequest, Options, Provider,
    ProviderError, ToolChoice, ToolOffer, WireNames,
};
use toolloop::run::{Effort, Thinking};
use uuid::Uuid;

use crate::mock_server::{Api, MockServer, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};
use crate::streaming::Reader;
use crate::{mock_anthropic, mock_ollama};

on_both_stores! {
    an_agent_uses_tools_and_answers_on_every_api,
    a_followed_run_is_streamed_on_every_api,
    a_structured_output_is_proposed_on_every_api,
    a_single_shot_is_held_to_its_schema_on_every_api,
    a_provider_that_is_overloaded_is_asked_again,
}

/// Kind in a configuration, model, rules.
const DIALECTS: [(&str, &str, Api); 2] = [
    ("anthropic", "claude-sonnet-4-5", mock_anthropic::API),
    ("ollama", "qwen3:4b", mock_ollama::API),
];

const READER: &str = "
model: mock/MODEL
instructions: Read the files.
tools: [file_ops]
thinking: {budget_tokens: 2000}
enable_double_confirmation: false
";

const EXTRACTOR: &str = "
model: mock/MODEL
instructions: Extract.
output:
  schema: {type: object, required: [total], properties: {total: {type: integer, minimum: 1}}, additionalProperties: false}
";

async fn service(db: Db, kind: &str, model: &str, mock: &MockServer) -> Service {
    let config = format!(
        "[models.mock]\nkind = \"{kind}\"\nbase_url = \"{}\"\nheaders = {{ x-api-key = \"k\" }}\n",
        mock.base_url
    );
    Setup::new()
        .agent("reader", &READER.replace("MODEL", model))
        .agent("extractor", &EXTRACTOR.replace("MODEL", model))
        .file("notes.txt", "seventeen\n")
        .config(&config)
        .start(db)
        .await
}

fn reading() -> [Reply; 3] {
    [
        Reply::call("file_ops", json!({"operation": "list", "path": "."})),
        Reply::Calls(vec![
            ("file_ops".into(), json!({"operation": "read", "path": "notes.txt"})),
            ("file_ops".into(), json!({"operation": "read", "path": "missing.txt"})),
        ]),
        Reply::text(r#"{"read": "seventeen"}"#),
    ]
}

async fn an_agent_uses_tools_and_answers_on_every_api(db: Db) {
    for (kind, model, api) in DIALECTS {
        let mock = MockServer::start(api, reading()).await;
        let service = service(db, kind, model, &mock).await;
        let run = service.run("reader", &json!({})).await;
        let requests = mock.requests();
        assert_eq!(run["output"], json!({"read": "seventeen"}), "{kind}: {run:#}");
        assert_eq!((&run["iterations"], &run["tool_calls_made"]), (&json!(3), &json!(3)));
        assert!(run["usage"]["input_tokens"].as_u64().unwrap() > 0, "{run:#}");
        assert_eq!(requests.len(), 3);
        assert!(requests.iter().all(|request| request["stream"] == json!(false)), "not followed");
        let sent = requests[2]["messages"].to_string();
        assert!(
            sent.contains("Thinking for the 1. time") && sent.contains("Thinking for the 2. time"),
            "{sent}"
        );
        assert!(sent.contains("seventeen"), "{sent}");
    }
}

async fn a_followed_run_is_streamed_on_every_api(db: Db) {
    for (kind, model, api) in DIALECTS {
        let mock = MockServer::start(api, reading()).await;
        let service = service(db, kind, model, &mock).await;
        let request =
            service.request(Method::POST, "/v1/agents/reader/invoke-iterative").json(&json!({}));
        let response = request.header("accept", "text/event-stream").send().await.unwrap();
        let mut reader = Reader::of(response);
        let mut last = reader.next().await.unwrap();
        while let Some(frame) = reader.next().await {
            last = frame;
        }
        assert!(
            mock.requests().iter().all(|request| request["stream"] == json!(true)),
            "{kind}: a caller follows"
        );
        assert_eq!(
            last.data["data"]["run"]["output"],
            json!({"read": "seventeen"}),
            "{kind}: {last:?}"
        );
        assert!(!reader.deltas.is_empty(), "{kind}: pieces are passed on");
    }
}

async fn a_structured_output_is_proposed_on_every_api(db: Db) {
    for (kind, model, api) in DIALECTS {
        let wrong = Reply::call("output", json!({"total": 0}));
        let right = Reply::call("output", json!({"total": 3}));
        let mock = MockServer::start(api, [wrong, Reply::text("It is 3."), right]).await;
        let service = service(db, kind, model, &mock).await;
        let run = service.run("extractor", &json!({})).await;
        assert_eq!(mock.requests().len(), 3);
        assert_eq!(
            (&run["output"], &run["attempts"]),
            (&json!({"total": 3}), &json!(3)),
            "{kind}: {run:#}"
        );
    }
}

async fn a_single_shot_is_held_to_its_schema_on_every_api(db: Db) {
    for (kind, model, api) in DIALECTS {
        let mock = MockServer::start(api, [Reply::text(r#"{"total": 3}"#)]).await;
        let service = service(db, kind, model, &mock).await;
        let answer = service.post("/v1/agents/extractor/invoke", &json!({})).await;
        let request = mock.requests().remove(0);
        assert_eq!(answer.body["output"], json!({"total": 3}), "{kind}: {:#}", answer.body);
        let schema = if kind == "ollama" {
            &request["format"]
        } else {
            &request["output_config"]["format"]["schema"]
        };
        assert_eq!(schema["required"], json!(["total"]), "{request:#}");
    }
}

async fn a_provider_that_is_overloaded_is_asked_again(db: Db) {
    for (kind, model, api) in DIALECTS {
        let overloaded = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
        let replies =
            [Reply::Raw(529, overloaded.to_string()), Reply::Raw(200, overloaded.to_string())];
        let mock = MockServer::start(api, replies.into_iter().chain(reading())).await;
        let service = service(db, kind, model, &mock).await;
        let run = service.run("reader", &json!({})).await;
        assert_eq!(
            (&run["status"], mock.requests().len()),
            (&json!("completed"), 5),
            "{kind}: {run:#}"
        );
        assert_eq!(run["iterations"], 3, "failed calls burn no iteration");
    }
}

fn settings(base_url: &str) -> WireSettings {
    WireSettings {
        name: "mock".into(),
        base_url: base_url.parse().unwrap(),
        api_key: Some(SecretString::from("sk-do-not-tell-anybody")),
        missing_key: None,
        headers: Vec::new(),
        connect_timeout: Duration::from_mins(1),
        first_byte_timeout: Duration::from_mins(1),
        idle_timeout: Duration::from_mins(1),
    }
}

async fn ask(kind: &str, base_url: &str, deltas: Deltas<'_>) -> Result<Completion, ProviderError> {
    let provider: Arc<dyn Provider> = match kind {
        "ollama" => Arc::new(ollama::provider(settings(base_url)).unwrap()),
        _ => Arc::new(anthropic::provider(settings(base_url)).unwrap()),
    };
    let (names, mut conversation) =
        (WireNames::new(["mcp:time/now"]), Conversation::new("be brief"));
    conversation.push_user("hello");
    let capabilities =
        if kind == "ollama" { Capabilities::OLLAMA } else { Capabilities::ANTHROPIC };
    let thinking = Some(Thinking { budget_tokens: Some(2000), effort: None });
    let request =
        ModelRequest { thinking, deltas, ..request(&conversation, &names, &capabilities) };
    provider.complete(&request).await
}

fn request<'a>(
    conversation: &'a Conversation,
    names: &'a WireNames,
    capabilities: &'a Capabilities,
) -> ModelRequest<'a> {
    ModelRequest {
        model: "m",
        capabilities,
        conversation,
        tools: &[],
        names,
        tool_choice: ToolChoice::Auto,
        parallel_tool_calls: None,
        temperature: None,
        max_output_tokens: None,
        output_left: None,
        thinking: None,
        prompt_caching: false,
        deltas: Deltas::default(),
        output_schema: None,
        json_mode: false,
        options: Options::default(),
        inputs: &Value::Null,
        step: 1,
        trace: None,
    }
}

#[tokio::test]
async fn a_followed_answer_is_the_same_answer() {
    for (kind, _, rules) in DIALECTS {
        let reply = Reply::Calls(vec![("a".into(), json!({"x": "é"})), ("b".into(), json!({}))]);
        let mock = MockServer::start(rules, [reply.clone()]).await;
        let whole = ask(kind, &mock.base_url, Deltas::default()).await.unwrap();
        let mock = MockServer::start(rules, [reply]).await;
        let seen = Mutex::new(Vec::new());
        let listen = |delta: Delta| seen.lock().unwrap().push(delta);
        let followed = ask(kind, &mock.base_url, Deltas(Some(&listen))).await.unwrap();
        assert_eq!(mock.requests()[0]["stream"], json!(true));
        let (mut thinking, mut calls) = (String::new(), vec![(String::new(), String::new()); 2]);
        for delta in seen.into_inner().unwrap() {
            match delta {
                Delta::Text(text) => panic!("the model did not say {text:?}"),
                Delta::Restarted => panic!("an adapter does not repeat"),
                Delta::Thinking(piece) => thinking.push_str(&piece),
                Delta::ToolCall { index, wire_name, arguments } => {
                    calls[index].0.push_str(&wire_name.unwrap_or_default());
                    calls[index].1.push_str(&arguments);
                }
            }
        }
        let told =
            whole.tool_calls.iter().map(|call| (call.wire_name.clone(), call.arguments.clone()));
        assert_eq!((Some(&thinking), calls), (whole.thinking.as_ref(), told.collect()), "{kind}");
        assert_eq!(whole.finish_reason, FinishReason::ToolCalls);
        let tokens = |completion: &Completion| completion.usage.map(|usage| usage.output_tokens);
        assert_eq!(tokens(&followed), tokens(&whole));
        assert_eq!(
            Completion { usage: None, ..followed },
            Completion { usage: None, ..whole },
            "{kind}"
        );
    }
}

#[tokio::test]
async fn errors_have_the_kind_of_their_status() {
    let anthropic =
        |code: &str| json!({"type": "error", "error": {"type": code, "message": "m"}}).to_string();
    let context = "prompt is too long: 210000 tokens > 200000 maximum";
    let too_long =
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": context}});
    let ollama = |message: &str| json!({ "error": message }).to_string();
    let table = [
        ("anthropic", 400, anthropic("invalid_request_error"), FailureKind::BadRequest),
        ("anthropic", 401, anthropic("authentication_error"), FailureKind::Unauthorized),
        ("anthropic", 402, anthropic("billing_error"), FailureKind::QuotaExhausted),
        ("anthropic", 403, anthropic("permission_error"), FailureKind::Unauthorized),
        ("anthropic", 404, anthropic("not_found_error"), FailureKind::NotFound),
        ("anthropic", 413, anthropic("request_too_large"), FailureKind::BadRequest),
        ("anthropic", 429, anthropic("rate_limit_error"), FailureKind::RateLimited),
        ("anthropic", 500, anthropic("api_error"), FailureKind::Transient),
        ("anthropic", 504, anthropic("timeout_error"), FailureKind::Transient),
        ("anthropic", 529, anthropic("overloaded_error"), FailureKind::Transient),
        ("anthropic", 200, anthropic("overloaded_error"), FailureKind::Transient),
        ("anthropic", 200, anthropic("rate_limit_error"), FailureKind::RateLimited),
        ("anthropic", 400, too_long.to_string(), FailureKind::ContextLength),
        ("anthropic", 200, "{\"content\": [".into(), FailureKind::Transient),
        ("ollama", 400, ollama("\"m\" does not support tools"), FailureKind::BadRequest),
        (
            "ollama",
            400,
            ollama("the input length exceeds the context length"),
            FailureKind::ContextLength,
        ),
        ("ollama", 404, ollama("model 'm' not found"), FailureKind::NotFound),
        ("ollama", 500, ollama("llama runner process has terminated"), FailureKind::Transient),
        ("ollama", 200, ollama("model runner has unexpectedly stopped"), FailureKind::Transient),
        ("ollama", 200, "{}".into(), FailureKind::Transient),
    ];
    let follower = |_: Delta| {};
    for (kind, status, body, expected) in table {
        let (_, _, api) = DIALECTS.into_iter().find(|(name, _, _)| *name == kind).unwrap();
        let reply = Reply::Raw(status, body.clone());
        let mock = MockServer::start(api, [reply.clone(), reply]).await;
        for deltas in [Deltas::default(), Deltas(Some(&follower))] {
            let error = ask(kind, &mock.base_url, deltas).await.unwrap_err();
            assert_eq!(error.kind, expected, "{kind} {status} {body}: {error}");
            let said = serde_json::from_str(&body).unwrap_or(Value::Null)["error"].take();
            let said = said.as_str().unwrap_or_default();
            assert!(error.message.contains(said), "{kind} {status} {body}: {error}");
        }
    }
}

#[tokio::test]
async fn a_last_line_of_ollama_may_lack_its_end() {
    let answer = json!({"message": {"content": "hi"}, "done": true, "done_reason": "stop"});
    let whole = answer.to_string();
    let follower = |_: Delta| {};
    for (body, text) in [(whole.as_str(), Some("hi")), (&whole[..whole.len() - 1], None)] {
        let mock = MockServer::start(mock_ollama::API, [Reply::Raw(200, body.to_owned())]).await;
        let answer = ask("ollama", &mock.base_url, Deltas(Some(&follower))).await;
        assert_eq!(answer.ok().map(|answer| answer.text).as_deref(), text, "{body}");
    }
}

/// One call as a provider, any provider, may have asked for it, and what became of it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    id: &'static str,
    name: &'static str,
    arguments: &'static str,
    result: &'static str,
    is_error: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum Said {
    User(&'static str),
    Model {
        text: &'static str,
        calls: Vec<Asked>,
        provider: &'static str,
        blocks: Vec<&'static str>,
    },
}

static CAPABILITIES: LazyLock<CapabilityTable> = LazyLock::new(CapabilityTable::default);

const TOOLS: [&str; 3] = ["file_ops", "mcp:time/now", "agent:fact.checker"];

fn asked() -> impl Strategy<Value = Asked> {
    let id = prop::sample::select(vec![
        "toolu_1",
        "toolu_2",
        "call_1_0",
        "functions.now:0",
        "",
        "a b",
        "日本",
    ]);
    let name = prop::sample::select(vec![
        "file_ops",
        "mcp:time/now",
        "no such tool!",
        "",
        "a_name_that_is_so_long_that_no_provider_would_ever_take_it_as_the_name_of_a_tool",
    ]);
    let arguments =
        vec!["{}", r#"{"a" : [1, 2.50]}"#, "", "  ", "[1]", r#"{"a":"#, "null", "\"x\"", "{} {}"];
    let result = prop::sample::select(vec!["", " ", "fine", "Error: no"]);
    (id, name, prop::sample::select(arguments), result, any::<bool>()).prop_map(
        |(id, name, arguments, result, is_error)| Asked { id, name, arguments, result, is_error },
    )
}

pub(crate) fn said() -> impl Strategy<Value = Said> {
    let text = || {
        prop::sample::select(vec![
            "",
            " \n",
            "hello",
            "ends in white space \n",
            "é日本",
            "{\"a\": 1}",
        ])
    };
    let block = prop::sample::select(vec!["thinking", "redacted_thinking", "server_tool_use"]);
    let provider = prop::sample::select(vec!["home", "home", "elsewhere", ""]);
    let model = (
        text(),
        prop::collection::vec(asked(), 0..4),
        provider,
        prop::collection::vec(block, 0..4),
    );
    prop_oneof![
        1 => text().prop_map(Said::User),
        2 => model.prop_map(|(text, calls, provider, blocks)| Said::Model { text, calls, provider, blocks }),
    ]
}

/// What Anthropic's adapter keeps of an answer that had these blocks before its text and calls.
fn kept_by_anthropic(text: &str, calls: usize, blocks: &[&str]) -> String {
    let block = |(index, kind): (usize, &&str)| match *kind {
        "thinking" => {
            let thinking = format!("thought {index}");
            json!({"type": "thinking", "thinking": thinking, "signature": mock_anthropic::signature(&thinking)})
        }
        "redacted_thinking" => json!({"type": "redacted_thinking", "data": "x"}),
        _ => json!({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}),
    };
    let mut kept: Vec<Value> = blocks.iter().enumerate().map(block).collect();
    if !text.is_empty() {
        kept.push(json!({"type": "text", "text": text}));
    }
    kept.extend(std::iter::repeat_n(json!({"type": "tool_use"}), calls));
    json!(kept).to_string()
}

pub(crate) fn conversation(
    history: &[Said],
    kept: impl Fn(&str, usize, &[&str]) -> String,
) -> Conversation {
    let mut conversation = Conversation::new("be kind");
    conversation.push_user("hello");
    let mut number = 0;
    for said in history {
        match said {
            Said::User(text) => conversation.push_user(*text),
            Said::Model { text, calls, provider, blocks } => {
                let opaque = (!provider.is_empty() && !blocks.is_empty()).then(|| OpaqueBlocks {
                    provider: (*provider).to_owned(),
                    json: kept(text, calls.len(), blocks),
                });
                let (mut tool_calls, mut results) = (Vec::new(), Vec::new());
                for asked in calls {
                    number += 1;
                    let id = Uuid::from_u128(number);
                    tool_calls.push(ToolCall {
                        id,
                        provider_id: asked.id.into(),
                        name: asked.name.into(),
                        arguments: asked.arguments.into(),
                        target: CallTarget::Tool,
                    });
                    let (content, is_error) = (asked.result.to_owned(), asked.is_error);
                    results.push(ToolResult::of_service(id, content, is_error));
                }
                let message = AssistantMessage {
                    text: (*text).to_owned(),
                    thinking: None,
                    tool_calls,
                    opaque,
                    decision: None,
                };
                conversation.push_turn(message, results).unwrap();
            }
        }
    }
    conversation
}

/// Everything else that a request may ask for.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    model: &'static str,
    tools: usize,
    tool_choice: ToolChoice,
    parallel_tool_calls: Option<bool>,
    temperature: Option<f64>,
    max_output_tokens: Option<u32>,
    output_left: Option<u32>,
    thinking: Option<Thinking>,
    prompt_caching: bool,
    has_schema: bool,
    is_followed: bool,
}

pub(crate) fn wish(models: Vec<&'static str>) -> impl Strategy<Value = Wish> {
    let effort = prop::sample::select(vec![Effort::Low, Effort::Medium, Effort::High, Effort::Max]);
    let thinking = (prop::option::of(1..40_000u32), prop::option::of(effort))
        .prop_map(|(budget_tokens, effort)| Thinking { budget_tokens, effort });
    let choice = prop::sample::select(vec![
        ToolChoice::Auto,
        ToolChoice::None,
        ToolChoice::Required,
        ToolChoice::Tool("file_ops".into()),
    ]);
    let asked =
        (prop::sample::select(models), 0..=TOOLS.len(), choice, prop::option::of(any::<bool>()));
    let tokens = || prop::option::of(1..20_000u32);
    let shaped = (prop::option::of(0.0..2.0f64), tokens(), prop::option::of(thinking), tokens());
    (asked, shaped, any::<[bool; 3]>()).prop_map(|(asked, shaped, flags)| Wish {
        model: asked.0,
        tools: asked.1,
        tool_choice: asked.2,
        parallel_tool_calls: asked.3,
        temperature: shaped.0,
        max_output_tokens: shaped.1,
        output_left: shaped.3,
        thinking: shaped.2,
        prompt_caching: flags[0],
        has_schema: flags[1],
        is_followed: flags[2],
    })
}

/// The body of a request with this history and these wishes.
pub(crate) fn body(
    kind: ProviderKind,
    conversation: &Conversation,
    wish: &Wish,
    write: impl Fn(&ModelRequest<'_>, &str) -> Result<Vec<u8>, serde_json::Error>,
) -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}});
    let offer = |name: &&str| ToolOffer {
        name: (*name).to_owned(),
        description: "A tool.".into(),
        input_schema: ToolSchema::from(json!({"type": "object"})),
    };
    let tools: Vec<ToolOffer> = TOOLS[..wish.tools].iter().map(offer).collect();
    let (names, follower) = (WireNames::new(TOOLS), |_: Delta| {});
    let capabilities = CAPABILITIES.of(kind, "home", wish.model);
    let request = ModelRequest {
        model: wish.model,
        tools: &tools,
        tool_choice: wish.tool_choice.clone(),
        parallel_tool_calls: wish.parallel_tool_calls,
        temperature: wish.temperature,
        max_output_tokens: wish.max_output_tokens.into_iter().chain(wish.output_left).min(),
        output_left: wish.output_left,
        thinking: wish.thinking,
        prompt_caching: wish.prompt_caching,
        deltas: Deltas(wish.is_followed.then_some(&follower)),
        output_schema: wish.has_schema.then_some(&schema),
        ..request(conversation, &names, &capabilities)
    };
    serde_json::from_slice(&write(&request, "home").unwrap()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn anthropic_accepts_every_conversation(
        history in prop::collection::vec(said(), 0..8),
        wish in wish(vec!["claude-sonnet-4-5", "claude-opus-4-6", "claude-opus-4-7", "claude-fable-5", "claude-3-5-haiku-latest"]),
    ) {
        let conversation = conversation(&history, kept_by_anthropic);
        let body = body(ProviderKind::Anthropic, &conversation, &wish, anthropic::body);
        prop_assert_eq!(mock_anthropic::check(&body), Ok(()), "{:#}", body);
        let most = wish.output_left.map_or(u64::MAX, u64::from);
        prop_assert!(body["max_tokens"].as_u64().unwrap() <= most, "{wish:?}: {body:#}");
    }

    #[test]
    fn ollama_accepts_every_conversation(
        history in prop::collection::vec(said(), 0..8),
        wish in wish(vec!["qwen3:4b"]),
    ) {
        let kept = |_: &str, _: usize, blocks: &[&str]| json!({"thinking": blocks.join(" ")}).to_string();
        let conversation = conversation(&history, kept);
        let body = body(ProviderKind::Ollama, &conversation, &wish, ollama::body);
        prop_assert_eq!(mock_ollama::check(&body), Ok(()), "{:#}", body);
    }
}
