//! The OpenAI adapter and the router against a server that checks every request.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use secrecy::SecretString;
use serde_json::{Value, json};
use tokio::net::TcpSocket;
use toolloop::message::{
    AssistantMessage, CallTarget, Conversation, FinishReason, ToolCall, ToolResult,
};
use toolloop::providers::adapter::HttpProvider;
use toolloop::providers::openai;
use toolloop::providers::router::{Answer, ModelCall, ModelFailure, ProviderEntry, Router};
use toolloop::providers::wire::WireSettings;
use toolloop::providers::{
    Capabilities, Deltas, FailureKind, ModelRequest, Options, ToolChoice, ToolOffer, WireNames,
};
use uuid::Uuid;

use crate::mock_model::{MockModel, Reply};

const KEY: &str = "sk-do-not-tell-anybody";

fn settings(base_url: &str) -> WireSettings {
    WireSettings {
        name: "mock".into(),
        base_url: base_url.parse().unwrap(),
        api_key: Some(SecretString::from(KEY)),
        missing_key: None,
        headers: vec![("x-team".into(), "platform".into())],
        connect_timeout: Duration::from_secs(30),
        first_byte_timeout: Duration::from_secs(30),
        idle_timeout: Duration::from_secs(30),
    }
}

fn openai(base_url: &str) -> HttpProvider {
    openai::provider(settings(base_url)).unwrap()
}

/// One provider behind a router, and everything a request borrows.
struct Client {
    router: Router,
    conversation: Conversation,
    tools: Vec<ToolOffer>,
    names: WireNames,
}

impl Client {
    fn new(base_url: &str) -> Self {
        Self::with(ProviderEntry::new(Arc::new(openai(base_url))))
    }

    fn with(entry: ProviderEntry) -> Self {
        Self {
            router: Router::new(BTreeMap::from([("mock".to_owned(), entry)])),
            conversation: conversation("be brief", "hello"),
            tools: Vec::new(),
            names: WireNames::new(["mcp:time/now"]),
        }
    }

    async fn ask(&self, deadline: Option<Duration>) -> Result<Answer, ModelFailure> {
        let request = ModelRequest {
            model: "",
            capabilities: &Capabilities::OPENAI,
            conversation: &self.conversation,
            tools: &self.tools,
            names: &self.names,
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: None,
            temperature: Some(0.0),
            max_output_tokens: Some(100),
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
        };
        let deadline = deadline.map(|left| tokio::time::Instant::now() + left);
        let call = ModelCall::beginning(0).insisting(true);
        self.router.complete(&["mock/gpt".to_owned()], call, &request, deadline).await
    }
}

#[tokio::test]
async fn a_question_is_answered() {
    let mock = MockModel::start().await;
    mock.script([Reply::text("hi")]);
    let answer = Client::new(mock.base_url()).ask(None).await.unwrap();
    assert_eq!(
        (answer.completion.text.as_str(), answer.completion.finish_reason),
        ("hi", FinishReason::Stop)
    );
    assert_eq!(
        (answer.provider.as_str(), answer.model.as_str(), answer.retries),
        ("mock", "gpt", 0)
    );
    assert!(
        answer.completion.usage.is_some_and(|usage| usage.input_tokens > 0 && !usage.estimated)
    );
    let seen = mock.requests().remove(0);
    assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}").as_str());
    assert_eq!(seen.headers["x-team"], "platform");
    assert_eq!(seen.headers["content-type"], "application/json");
    assert_eq!(seen.body["model"], json!("gpt"));
}

#[tokio::test]
async fn a_history_with_calls_is_accepted() {
    let mock = MockModel::start().await;
    let weather = r#"{"place": "#.to_owned();
    mock.script([Reply::ToolCalls(vec![
        ("mcp__time__now".into(), "{}".into()),
        ("no such".into(), weather),
    ])]);
    mock.script([Reply::text("done")]);
    let mut client = Client::new(mock.base_url());
    let schema = Arc::new(json!({"type": "object"}));
    client.tools = vec![ToolOffer {
        name: "mcp:time/now".into(),
        description: "Now.".into(),
        input_schema: schema.into(),
    }];
    let first = client.ask(None).await.unwrap().completion;
    assert_eq!(first.finish_reason, FinishReason::ToolCalls);
    let calls: Vec<ToolCall> = (first.tool_calls.into_iter())
        .map(|call| ToolCall {
            id: Uuid::now_v7(),
            provider_id: call.id,
            name: client.names.to_ours(&call.wire_name),
            arguments: call.arguments,
            target: CallTarget::Tool,
        })
        .collect();
    assert_eq!(
        (calls[0].name.as_str(), calls[1].arguments.as_str()),
        ("mcp:time/now", "{\"place\": ")
    );
    let result = |call: &ToolCall| ToolResult::of_service(call.id, "ok", false);
    let results = calls.iter().map(result).collect();
    let message = AssistantMessage { tool_calls: calls, ..AssistantMessage::default() };
    client.conversation.push_turn(message, results).unwrap();
    assert_eq!(client.ask(None).await.unwrap().completion.text, "done");
    assert_eq!(mock.refusals(), Vec::<String>::new());
    assert_eq!(mock.requests()[1].messages().len(), 5);
}

#[tokio::test]
async fn passing_faults_are_outlived() {
    let mock = MockModel::start().await;
    let client = Client::new(mock.base_url());
    let passing = [
        Reply::error(408, "timeout", Some(1)),
        Reply::error(409, "conflict", Some(1)),
        Reply::error(425, "early", Some(1)),
        Reply::error(429, "rate_limit_exceeded", Some(1)),
        Reply::error(500, "server_error", Some(1)),
        Reply::error(529, "overloaded", Some(1)),
        Reply::Reset,
        Reply::Garbage,
        Reply::NoChoices,
        Reply::Raw("{\"choices\": ".to_owned() + &"[".repeat(10_000)),
        Reply::Raw(r#"{"error": {"message": "upstream", "code": 502}}"#.into()),
    ];
    for reply in passing {
        mock.script([reply.clone(), Reply::text("hi")]);
        let answer = client.ask(None).await;
        assert!(answer.as_ref().is_ok_and(|answer| answer.retries == 1), "{reply:?}: {answer:?}");
    }
}

#[tokio::test]
async fn lasting_faults_are_reported_at_once() {
    let mock = MockModel::start().await;
    let client = Client::new(mock.base_url());
    let lasting = [
        (400, "invalid_request_error", FailureKind::BadRequest),
        (400, "context_length_exceeded", FailureKind::ContextLength),
        (400, "content_filter", FailureKind::ContentFilter),
        (401, "invalid_api_key", FailureKind::Unauthorized),
        (403, "forbidden", FailureKind::Unauthorized),
        (404, "model_not_found", FailureKind::NotFound),
        (413, "too_large", FailureKind::BadRequest),
        (429, "insufficient_quota", FailureKind::QuotaExhausted),
        (302, "moved", FailureKind::BadRequest),
    ];
    for (status, code, kind) in lasting {
        mock.script([Reply::error(status, code, None)]);
        let failure = client.ask(None).await.unwrap_err();
        let error = &failure.error;
        assert_eq!(
            (failure.attempts, error.kind, error.status),
            (1, kind, Some(status)),
            "{error}"
        );
        assert_eq!(
            (error.code.as_deref(), error.message.as_str()),
            (Some(code), format!("{code} happened").as_str())
        );
    }
    assert_eq!(mock.requests().len(), lasting.len());
}

#[tokio::test]
async fn retries_run_out() {
    let mock = MockModel::start().await;
    mock.always(Reply::error(503, "overloaded", Some(1)));
    let failure = Client::new(mock.base_url()).ask(None).await.unwrap_err();
    assert_eq!((failure.attempts, failure.error.kind), (3, FailureKind::Transient));
    assert_eq!(mock.requests().len(), 3);
}

#[tokio::test]
async fn retry_after_is_kept_exactly_or_not_at_all() {
    let mock = MockModel::start().await;
    let client = Client::new(mock.base_url());
    mock.script([Reply::error(429, "rate_limit_exceeded", Some(300)), Reply::text("hi")]);
    let started = Instant::now();
    let answer = client.ask(Some(Duration::from_mins(1))).await.unwrap();
    assert!(started.elapsed() >= Duration::from_millis(300), "{:?}", started.elapsed());
    assert!(answer.latency_ms >= 300);

    for (wish, deadline) in [("600", None), ("90", Some(Duration::from_mins(1)))] {
        let headers = vec![("retry-after", wish.to_owned())];
        mock.script([Reply::Status { status: 429, headers, body: json!({"error": "slow down"}) }]);
        let started = Instant::now();
        let failure = client.ask(deadline).await.unwrap_err();
        assert_eq!((failure.attempts, failure.error.kind), (1, FailureKind::RateLimited));
        assert!(started.elapsed() < Duration::from_secs(50));
    }
}

#[tokio::test]
async fn dropping_the_call_closes_the_connection() {
    let mock = MockModel::start().await;
    mock.script([Reply::Hang]);
    let client = Client::new(mock.base_url());
    tokio::select! {
        outcome = client.ask(None) => panic!("a hanging server answered: {outcome:?}"),
        () = mock.wait_for_requests(1) => {}
    }
    mock.wait_for_abort().await;
    assert_eq!(mock.counts().open, 0);
}

#[tokio::test]
async fn a_hanging_try_is_given_up_and_repeated() {
    let mock = MockModel::start().await;
    mock.script([Reply::Hang, Reply::text("hi")]);
    let entry = ProviderEntry::new(Arc::new(openai(mock.base_url())));
    let client = Client::with(ProviderEntry { timeout: Duration::from_secs(10), ..entry });
    assert_eq!(client.ask(None).await.unwrap().retries, 1);
    mock.wait_for_abort().await;
}

#[tokio::test]
async fn a_dead_server_is_a_passing_fault() {
    // The port is taken, so that no other test listens there.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let base_url = format!("http://{}/v1", silent.local_addr().unwrap());
    let entry = ProviderEntry { max_retries: 0, ..ProviderEntry::new(Arc::new(openai(&base_url))) };
    let failure = Client::with(entry).ask(None).await.unwrap_err();
    assert_eq!((failure.error.kind, failure.error.status), (FailureKind::Transient, None));
    assert!(failure.error.message.contains("refused"), "{}", failure.error.message);
}

#[tokio::test]
async fn an_endless_answer_is_cut_off() {
    let mock = MockModel::start().await;
    mock.always(Reply::Raw(" ".repeat((2 << 20) + 1)));
    let failure = Client::new(mock.base_url()).ask(None).await.unwrap_err();
    assert_eq!(failure.error.message, "the answer is larger than 2 MiB");
    assert_eq!(failure.attempts, 1, "the next one would be as large, and paid for");
    let usage = failure.error.usage.unwrap();
    assert!(usage.estimated && usage.input_tokens > 0, "{usage:?}");
    assert_eq!(usage.output_tokens, (2 << 20) / 4, "at least as much is paid for");
}

#[tokio::test]
async fn an_answer_without_content_is_told_by_its_status() {
    let mock = MockModel::start().await;
    mock.always(Reply::Status { status: 204, headers: Vec::new(), body: Value::Null });
    let failure = Client::new(mock.base_url()).ask(None).await.unwrap_err();
    let told = (failure.error.status, failure.error.message.as_str());
    assert_eq!(told, (Some(204), "the answer has no content"));
    assert!(failure.attempts > 1, "it may pass");
}

#[tokio::test]
async fn no_key_is_told() {
    let mock = MockModel::start().await;
    let echo = format!("{}{KEY} of platform", "x".repeat(1010));
    let body = json!({"error": {"message": echo, "code": KEY}});
    mock.script([Reply::Status { status: 401, headers: Vec::new(), body }]);
    let client = Client::new(mock.base_url());
    let failure = client.ask(None).await.unwrap_err();
    let told = format!("{failure} {failure:?} {:?}", openai(mock.base_url()));
    assert!(
        told.contains("[redacted]") && !told.contains("sk-do") && !told.contains("platform"),
        "{told}"
    );
}

#[test]
fn settings_that_cannot_be_sent_are_refused() {
    let with = |base_url: &str, key: &str, header: &str| {
        let settings = WireSettings {
            api_key: Some(SecretString::from(key)),
            missing_key: None,
            headers: vec![(header.into(), "v".into())],
            ..settings(base_url)
        };
        openai::provider(settings)
    };
    let table = [
        ("ftp://host/v1", "k", "a", "base_url is not an http or https URL"),
        ("mailto:me", "k", "a", "base_url is not an http or https URL"),
        ("http://host/v1", "k\n", "a", "the API key holds characters that cannot be sent"),
        ("http://host/v1", "k", "a b", "the header \"a b\" cannot be sent"),
    ];
    for (base_url, key, header, message) in table {
        assert_eq!(with(base_url, key, header).unwrap_err().to_string(), message);
    }
    assert!(with("https://host/v1/?api-version=1", "", "a").is_ok());
}

fn conversation(system: &str, user: &str) -> Conversation {
    let mut conversation = Conversation::new(system);
    conversation.push_user(user);
    conversation
}
