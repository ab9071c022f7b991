//! What the service says about itself: the metrics, the traces and the log, and that those who
//! read them can neither hold a run up nor learn a secret.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::{TcpListener, TcpSocket};
use tokio::process::Child;
use tokio::sync::watch;

use crate::mock_model::{MockModel, Reply};
use crate::postgres_cluster;
use crate::service::{ADMIN_KEY, Db, Setup, answer, command, on_both_stores};

on_both_stores! {
    metrics_count_the_work_of_runs,
    tools_that_callers_bring_along_share_one_label,
    a_run_that_ends_in_the_queue_is_counted,
    waiting_work_is_measured,
}

const READER: &str = "
version: 2.1.0
model: mock/any
instructions: Read the files.
tools: [file_ops]
limits: {error_threshold: 9}
enable_double_confirmation: false
";

/// More than any step of a test may take.
const PATIENCE: Duration = Duration::from_secs(90);

fn with_model(mock: &MockModel) -> Setup {
    let models = format!(
        "[prices.\"mock/any\"]\ninput = 1000\noutput = 2000\n[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 1",
        mock.base_url()
    );
    Setup::new().agent("reader", READER).file("notes.txt", "seventeen\n").config(&models)
}

fn reading(path: &str) -> Reply {
    Reply::call("file_ops", &json!({"operation": "read", "path": path}))
}

fn assert_all_are_explained(metrics: &str) {
    for family in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = family.split(' ').next().unwrap();
        assert!(metrics.contains(&format!("# HELP {name} ")), "{name} is not explained");
    }
}

#[expect(clippy::too_many_lines, reason = "one story")]
async fn metrics_count_the_work_of_runs(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock).start(db).await;
    mock.script([
        Reply::error(503, "overloaded", Some(1)),
        reading("notes.txt"),
        reading("missing.txt"),
        Reply::call("made_up_by_the_model", &json!({})),
        reading("../../etc/passwd"),
        Reply::text("17"),
    ]);
    let run = service.run("reader", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    mock.always(Reply::error(401, "invalid_api_key", None));
    assert_eq!(service.run("reader", &json!({})).await["status"], "failed");
    service.get("/v1/runs/not-a-run").await;
    service.get("/never/heard/of").await;

    // An answer can be here before it is counted, and before its run has left its place.
    let is_counted = |body: &Value| {
        let text = body.as_str().unwrap();
        [
            "toolloop_runs_in_flight 0\n",
            r#"{route="/v1/agents/{name}/invoke-iterative",method="POST",status="200"} 2"#,
            r#"{route="/v1/runs/{id}",method="GET",status="404"} 1"#,
            r#"{route="unmatched",method="GET",status="404"} 1"#,
        ]
        .iter()
        .all(|counted| text.contains(counted))
    };
    service.until("/metrics", is_counted).await;
    let scraped = answer(service.http.get(service.url("/metrics"))).await;
    assert_eq!(scraped.status, StatusCode::OK);
    assert_eq!(scraped.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = scraped.body.as_str().unwrap();
    let value = |series: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in\n{text}")).to_owned()
    };
    let tokens = |kind: &str| {
        let labels = format!(r#"provider="mock",model="any",agent="reader",kind="{kind}""#);
        format!("toolloop_tokens_total{{{labels}}}")
    };
    let input = run["usage"]["input_tokens"].to_string();
    let cost = run["usage"]["cost_usd"].to_string();
    for (series, expected) in [
        (r#"toolloop_runs_total{agent="reader",status="completed",reason="completed"}"#, "1"),
        (r#"toolloop_runs_total{agent="reader",status="failed",reason="model_error"}"#, "1"),
        ("toolloop_runs_in_flight", "0"),
        (r#"toolloop_run_duration_seconds_count{agent="reader"}"#, "2"),
        ("toolloop_iterations_total", "5"),
        (r#"toolloop_tool_calls_total{tool="file_ops",outcome="succeeded"}"#, "1"),
        (r#"toolloop_tool_calls_total{tool="other",outcome="failed"}"#, "1"),
        (r#"toolloop_model_calls_total{provider="mock",model="any",outcome="transient"}"#, "1"),
        (r#"toolloop_model_calls_total{provider="mock",model="any",outcome="unauthorized"}"#, "1"),
        (r#"toolloop_model_calls_total{provider="mock",model="any",outcome="succeeded"}"#, "5"),
        (r#"toolloop_model_call_duration_seconds_count{provider="mock",model="any"}"#, "7"),
        (&tokens("input"), input.as_str()),
        (&tokens("reasoning"), "0"),
        (r#"toolloop_cost_usd_total{agent="reader",model="mock/any"}"#, cost.as_str()),
        ("toolloop_queue_depth", "0"),
        ("toolloop_queue_oldest_seconds", "0"),
        ("toolloop_approvals_pending", "0"),
        ("toolloop_streams_open", "0"),
        (
            r#"toolloop_http_request_duration_seconds_count{route="/v1/runs/{id}",method="GET"}"#,
            "1",
        ),
        (
            r#"toolloop_http_requests_total{route="/v1/agents/{name}/invoke-iterative",method="POST",status="200"}"#,
            "2",
        ),
        (r#"toolloop_http_requests_total{route="/v1/runs/{id}",method="GET",status="404"}"#, "1"),
        (r#"toolloop_http_requests_total{route="unmatched",method="GET",status="404"}"#, "1"),
    ] {
        assert_eq!(value(series), expected, "{series}\n{text}");
    }
    assert_ne!(value("toolloop_store_commit_duration_seconds_count"), "0");
    assert_ne!(value(r#"toolloop_gate_decisions_total{rule="path",decision="allowed"}"#), "0");
    for state in ["used", "idle"] {
        let connections = value(&format!("toolloop_store_connections{{state=\"{state}\"}}"));
        assert!(connections.parse::<u32>().unwrap() <= 16, "{state}: {connections}");
    }
    let version = env!("CARGO_PKG_VERSION");
    let build = format!("toolloop_build_info{{version=\"{version}\",revision=\"");
    assert!(text.contains(&build), "{text}");
    for figure in ["process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"]
    {
        assert!(value(figure).parse::<f64>().unwrap() > 0.0, "{figure}");
    }
    assert_all_are_explained(text);
    assert!(!text.contains("made_up"), "a model cannot make up labels");
    assert!(!text.contains("/never"), "a caller cannot make up labels");
}

async fn tools_that_callers_bring_along_share_one_label(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock).start(db).await;
    mock.script([Reply::call("named_by_the_caller", &json!({})), Reply::text("17")]);
    let tool = json!({"name": "named_by_the_caller", "description": "Asks.",
        "input_schema": {"type": "object", "required": ["question"]}});
    let run = service.run("reader", &json!({"client_tools": [tool]})).await;
    assert_eq!(
        (&run["status"], &run["tool_calls_made"]),
        (&json!("completed"), &json!(1)),
        "{run:#}"
    );
    let counted = r#"toolloop_tool_calls_total{tool="other",outcome="failed"} 1"#;
    let is_counted = |body: &Value| body.as_str().unwrap().contains(counted);
    let text = service.until("/metrics", is_counted).await.to_string();
    assert!(!text.contains("named_by_the_caller"), "a caller cannot make up labels");
}

async fn a_run_that_ends_in_the_queue_is_counted(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock).config("[runtime]\nqueue_workers = 1").start(db).await;
    mock.always(Reply::Hang);
    let enqueue = async || {
        let invoke = service.request(reqwest::Method::POST, "/v1/agents/reader/invoke");
        let accepted = answer(invoke.header("prefer", "respond-async").json(&json!({}))).await;
        assert_eq!(accepted.status, StatusCode::ACCEPTED, "{:#}", accepted.body);
        accepted.body["run_id"].as_str().unwrap().to_owned()
    };
    enqueue().await;
    mock.wait_for_requests(1).await;
    let waiting = enqueue().await;
    let scraped = |line: &'static str| {
        move |body: &Value| body.as_str().unwrap().lines().any(|known| known == line)
    };
    service.until("/metrics", scraped("toolloop_runs_in_flight 1")).await;
    service.until("/metrics", scraped("toolloop_queue_depth 1")).await;
    service.post(&format!("/v1/runs/{waiting}/cancel"), &json!({})).await;
    let ended = r#"toolloop_runs_total{agent="reader",status="cancelled",reason="cancelled"} 1"#;
    service.until("/metrics", scraped(ended)).await;
    service.until_logged(&format!(r#""message":"run ended","run_id":"{waiting}""#)).await;
}

async fn waiting_work_is_measured(db: Db) {
    let mock = MockModel::start().await;
    let asks = format!("{READER}governance: {{tool_policies: {{file_ops: ask}}}}\n");
    let setup = with_model(&mock).agent("asks", &asks).config("[runtime]\nqueue_workers = 1");
    let service = setup.start(db).await;
    mock.script([reading("notes.txt")]);
    let parked = service.post("/v1/agents/asks/invoke-iterative", &json!({})).await;
    assert_eq!(parked.status, StatusCode::ACCEPTED, "{:#}", parked.body);
    mock.always(Reply::Hang);
    service.enqueue("reader").await;
    mock.wait_for_requests(2).await;
    let first = service.enqueue("reader").await;
    let stream = service.request(reqwest::Method::GET, &format!("{first}/events"));
    let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!(stream.status(), StatusCode::OK);
    let measured = |name: &'static str, is_right: fn(f64) -> bool| {
        move |body: &Value| {
            let mut lines = body.as_str().unwrap().lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.is_some_and(|value| is_right(value.parse().unwrap()))
        }
    };
    let one = |value: f64| (value - 1.0).abs() < f64::EPSILON;
    service.until("/metrics", measured("toolloop_approvals_pending", one)).await;
    service.until("/metrics", measured("toolloop_queue_oldest_seconds", |age| age > 0.0)).await;
    service.until("/metrics", measured("toolloop_streams_open", one)).await;
    drop(stream);
    service.until("/metrics", measured("toolloop_streams_open", |open| open == 0.0)).await;
    let run = parked.body["run_id"].as_str().unwrap();
    service.post(&format!("/v1/runs/{run}/cancel"), &json!({})).await;
    service.until("/metrics", measured("toolloop_approvals_pending", |left| left == 0.0)).await;
}

#[tokio::test]
async fn metrics_that_are_not_exposed_are_answered_404() {
    let service = Setup::new().config("[server]\nexpose = [\"docs\"]").start(Db::Sqlite).await;
    let hidden = service.get("/metrics").await;
    assert_eq!((hidden.status, &hidden.body["code"]), (StatusCode::NOT_FOUND, &json!("NOT_FOUND")));
}

/// A collector that keeps what it is sent.
struct Collector {
    endpoint: String,
    spans: Arc<watch::Sender<Vec<Span>>>,
}

impl Collector {
    async fn start() -> Self {
        let spans = Arc::new(watch::Sender::new(Vec::new()));
        let take = |State(spans): State<Arc<watch::Sender<Vec<Span>>>>, body: Bytes| async move {
            let export = ExportTraceServiceRequest::decode(body).unwrap();
            for resource in export.resource_spans {
                assert_eq!(text(&resource.resource.unwrap().attributes, "service.name"), "a-test");
                let sent = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
                spans.send_modify(|known| known.extend(sent));
            }
        };
        let app = Router::new().route("/v1/traces", post(take)).with_state(Arc::clone(&spans));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { endpoint, spans }
    }

    fn config(&self) -> String {
        format!("[telemetry]\notlp_endpoint = \"{}\"\nservice_name = \"a-test\"", self.endpoint)
    }

    /// The spans of a run as soon as its last one has come.
    async fn spans_of(&self, run: &Value) -> Vec<Span> {
        let of_run = |span: &&Span| {
            text(&span.attributes, "toolloop.run_id") == run["run_id"].as_str().unwrap()
        };
        let has_ended = |spans: &Vec<Span>| {
            spans.iter().filter(of_run).any(|s| s.name.starts_with("invoke_agent"))
        };
        let mut spans = self.spans.subscribe();
        let spans = tokio::time::timeout(PATIENCE, spans.wait_for(has_ended))
            .await
            .expect("no spans")
            .unwrap();
        spans.iter().filter(of_run).cloned().collect()
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Any> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref().and_then(|AnyValue { value }| value.as_ref())
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    match value(attributes, key) {
        Some(Any::StringValue(text)) => text.clone(),
        Some(Any::IntValue(number)) => number.to_string(),
        Some(Any::ArrayValue(array)) => {
            format!("{:?}", array.values.iter().map(|v| &v.value).collect::<Vec<_>>())
        }
        _ => String::new(),
    }
}

fn hex(id: &[u8]) -> String {
    use std::fmt::Write as _;
    id.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[tokio::test]
async fn the_trace_of_a_run_continues_the_callers_and_reaches_the_model_server() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";
    let (mock, collector) = (MockModel::start().await, Collector::start().await);
    let service = with_model(&mock).config(&collector.config()).start(Db::Sqlite).await;
    mock.script([reading("notes.txt"), reading("missing.txt"), Reply::text("17")]);
    let invoke = service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative");
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let body = json!({"inputs": {"secret": "do not trace"}});
    let run = answer(invoke.header("traceparent", parent).json(&body)).await.body;
    assert_eq!(run["status"], "completed", "{run:#}");

    let spans = collector.spans_of(&run).await;
    let mut names = BTreeMap::<&str, usize>::new();
    for span in &spans {
        *names.entry(&span.name).or_default() += 1;
    }
    assert_eq!(
        names,
        [("chat any", 3), ("execute_tool file_ops", 2), ("invoke_agent reader", 1)].into()
    );
    let agent = spans.iter().find(|span| span.name == "invoke_agent reader").unwrap();
    assert_eq!((hex(&agent.trace_id), hex(&agent.parent_span_id)), (TRACE.into(), PARENT.into()));
    for span in spans.iter().filter(|span| span.name != agent.name) {
        assert_eq!(
            (&span.trace_id, &span.parent_span_id),
            (&agent.trace_id, &agent.span_id),
            "{}",
            span.name
        );
        assert!(agent.start_time_unix_nano <= span.start_time_unix_nano, "{span:#?}\n{agent:#?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        assert!(span.end_time_unix_nano <= agent.end_time_unix_nano);
    }

    let mut told: Vec<String> = mock
        .requests()
        .iter()
        .map(|seen| seen.headers["traceparent"].to_str().unwrap().to_owned())
        .collect();
    let chats = spans.iter().filter(|span| span.name == "chat any");
    let mut sent: Vec<String> =
        chats.clone().map(|span| format!("00-{TRACE}-{}-01", hex(&span.span_id))).collect();
    told.sort_unstable();
    sent.sort_unstable();
    assert_eq!(told, sent, "the model server hears of the span of its call");

    let first = chats.min_by_key(|span| span.start_time_unix_nano).unwrap();
    for (key, expected) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "mock"),
        ("gen_ai.request.model", "any"),
        ("gen_ai.response.model", "any"),
    ] {
        assert_eq!(text(&first.attributes, key), expected);
    }
    assert!(text(&first.attributes, "gen_ai.response.finish_reasons").contains("tool_calls"));
    assert_ne!(text(&first.attributes, "gen_ai.usage.input_tokens"), "");
    assert_eq!(text(&agent.attributes, "gen_ai.agent.name"), "reader");
    assert_eq!(text(&agent.attributes, "gen_ai.agent.version"), "2.1.0");
    let calls =
        service.get(&format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap())).await.body;
    for call in calls["data"].as_array().unwrap() {
        let is_call = |span: &&Span| {
            text(&span.attributes, "gen_ai.tool.call.id") == call["id"].as_str().unwrap()
        };
        let span = spans.iter().find(is_call).unwrap();
        let error = if call["is_error"] == true { "tool_error" } else { "" };
        assert_eq!(text(&span.attributes, "error.type"), error, "{call:#}");
        assert_eq!(text(&span.attributes, "gen_ai.tool.name"), "file_ops");
    }
    let everything = format!("{spans:?}");
    assert!(
        !everything.contains("do not trace") && !everything.contains("seventeen"),
        "no contents"
    );
}

#[tokio::test]
async fn without_traceparent_the_trace_id_is_the_run_id_and_failures_are_recorded() {
    let (mock, collector) = (MockModel::start().await, Collector::start().await);
    let service = with_model(&mock).config(&collector.config()).start(Db::Sqlite).await;
    mock.script([Reply::text("unheard")]);
    let unsampled = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
    let invoke = service.request(reqwest::Method::POST, "/v1/agents/reader/invoke");
    let unsampled_run = answer(invoke.header("traceparent", unsampled).json(&json!({}))).await.body;
    mock.always(Reply::error(500, "server_error", Some(1)));
    let run = service.run("reader", &json!({"session_id": "s-1"})).await;
    assert_eq!(run["status"], "failed", "{run:#}");

    let spans = collector.spans_of(&run).await;
    let id = run["run_id"].as_str().unwrap().replace('-', "");
    assert!(spans.iter().all(|span| hex(&span.trace_id) == id), "{spans:#?}");
    let errors: BTreeMap<&str, String> = spans
        .iter()
        .map(|span| (span.name.as_str(), text(&span.attributes, "error.type")))
        .collect();
    let expected =
        [("chat any", "transient".to_owned()), ("invoke_agent reader", "MODEL_ERROR".to_owned())];
    assert_eq!(errors, expected.into());
    let agent = spans.iter().find(|span| span.name == "invoke_agent reader").unwrap();
    assert_eq!(text(&agent.attributes, "gen_ai.conversation.id"), "s-1");
    assert_eq!(text(&agent.attributes, "gen_ai.provider.name"), "mock", "it was asked");
    assert_eq!(text(&agent.attributes, "gen_ai.request.model"), "any");
    assert_eq!(agent.parent_span_id, Vec::<u8>::new());

    let told: Vec<String> = mock
        .requests()
        .iter()
        .map(|seen| seen.headers["traceparent"].to_str().unwrap().to_owned())
        .collect();
    assert!(told[0].starts_with(&unsampled[..36]) && told[0].ends_with("-00"), "{told:?}");
    assert_eq!(told[1], told[2], "both tries belong to one call");
    let unsampled_id = unsampled_run["run_id"].as_str().unwrap();
    let known = collector.spans.borrow();
    assert!(!known.iter().any(|span| text(&span.attributes, "toolloop.run_id") == unsampled_id));
}

/// A service whose standard error the test holds itself.
struct Watched {
    child: Child,
    port: u16,
    http: reqwest::Client,
    _dir: TempDir,
}

impl Watched {
    async fn start(setup: Setup, database_url: &str, environment: &[(&str, &str)]) -> Self {
        let dir = setup.write_directory();
        let port = postgres_cluster::free_port();
        let listen = format!("127.0.0.1:{port}");
        let child = command(dir.path())
            .args([
                "serve",
                "--listen",
                &listen,
                "--log-format",
                "json",
                "--database-url",
                database_url,
            ])
            .envs(environment.iter().copied())
            .env("TOOLLOOP_ADMIN_KEY", ADMIN_KEY)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let http = reqwest::Client::builder().timeout(PATIENCE).build().unwrap();
        let service = Self { child, port, http, _dir: dir };
        let up = async {
            while service.http.get(service.url("/healthz")).send().await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, up).await.expect("the service did not start");
        service
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    async fn post(&self, path: &str, key: &str, body: &Value) -> Value {
        let request = self.http.post(self.url(path)).bearer_auth(key).json(body);
        tokio::time::timeout(PATIENCE, answer(request)).await.expect("the service hangs").body
    }

    async fn run(&self, agent: &str) {
        let run =
            self.post(&format!("/v1/agents/{agent}/invoke-iterative"), ADMIN_KEY, &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }

    /// SIGTERM; the process must end well.
    async fn stop(&mut self) {
        crate::service::send_signal(&self.child, crate::service::Signal::TERM);
        let ended = tokio::time::timeout(PATIENCE, self.child.wait())
            .await
            .expect("the service does not stop");
        assert_eq!(ended.unwrap().code(), Some(0));
    }
}

/// An embedded database in the service's own directory.
const EMBEDDED: &str = "sqlite://toolloop.db";

fn talkative() -> Setup {
    let agent = "model: scripted/chat\ninstructions: Say hello.\ntools: [file_ops]\nenable_double_confirmation: false";
    let read = "{tool: file_ops, arguments: {operation: list, path: .}}";
    let scenario = format!("steps:\n  - tool_calls: [{read}]\n  - text: hello\n");
    Setup::new().agent("chatty", agent).scenario("chat", &scenario)
}

#[tokio::test]
async fn an_unreachable_collector_does_not_affect_runs() {
    // The port is taken, so that no other test listens there.
    let closed = TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let endpoint = format!("http://{}", closed.local_addr().unwrap());
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str())];
    let mut service = Watched::start(talkative(), EMBEDDED, &environment).await;
    let mut log = BufReader::new(service.child.stderr.take().unwrap()).lines();
    for _ in 0..5 {
        service.run("chatty").await;
    }
    let warned = async {
        while let Some(line) = log.next_line().await.unwrap() {
            if line.contains("traces are lost") {
                return;
            }
        }
        panic!("the log ended without a warning");
    };
    tokio::time::timeout(PATIENCE, warned).await.expect("no warning was logged");
    service.run("chatty").await;
    service.stop().await;
}

#[tokio::test]
async fn a_collector_on_this_machine_is_reached_without_a_proxy() {
    let collector = Collector::start().await;
    let setup =
        talkative().config(&collector.config()).variable("http_proxy", "http://127.0.0.1:1");
    let service = setup.start(Db::Sqlite).await;
    let run = service.run("chatty", &json!({})).await;
    assert!(!collector.spans_of(&run).await.is_empty());
}

#[tokio::test]
async fn a_blocked_log_reader_does_not_block_runs() {
    let mut service = Watched::start(talkative(), EMBEDDED, &[("TOOLLOOP_LOG", "trace")]).await;
    for _ in 0..500 {
        service.http.get(service.url("/healthz")).send().await.unwrap();
    }
    for _ in 0..5 {
        service.run("chatty").await;
    }
    service.stop().await;
    let mut unread = Vec::new();
    service.child.stderr.take().unwrap().read_to_end(&mut unread).await.unwrap();
    // A full pipe holds 64 KiB, less what lines leave free at the ends of its pages.
    assert!(unread.len() >= 50_000, "only {} bytes: the pipe was never full", unread.len());
}

#[tokio::test]
async fn a_closed_log_does_not_stop_the_service() {
    let mut service = Watched::start(talkative(), EMBEDDED, &[("TOOLLOOP_LOG", "trace")]).await;
    drop(service.child.stderr.take());
    for _ in 0..5 {
        service.run("chatty").await;
    }
    service.stop().await;
}

fn names_its_owner(line: &Value) {
    let trace = line["run_id"].as_str().unwrap().replace('-', "");
    assert_eq!(
        (&line["tenant"], &line["subject"], &line["trace_id"]),
        (&json!("default"), &json!("testadmin"), &json!(trace)),
        "{line:#}"
    );
}

#[tokio::test]
async fn the_log_has_a_line_per_run_and_no_secrets() {
    const CANARY: &str = "canary5ecret";
    let mock = MockModel::start().await;
    let models = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"MODEL_KEY\"\nmax_retries = 1\n\
         headers = {{ x-team = \"{CANARY}-header\" }}",
        mock.base_url()
    );
    let setup = Setup::new().agent("reader", READER).config(&models);
    let database = postgres_cluster::fresh_database()
        .await
        .replace("postgres@", &format!("postgres:{CANARY}-db@"));
    let (model_key, collector_key) =
        (format!("{CANARY}-model"), format!("authorization=Bearer {CANARY}-otlp"));
    let environment = [
        ("TOOLLOOP_LOG", "trace"),
        ("MODEL_KEY", model_key.as_str()),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", collector_key.as_str()),
    ];
    let mut service = Watched::start(setup, &database, &environment).await;
    let mut stderr = service.child.stderr.take().unwrap();
    let reading = tokio::spawn(async move {
        let mut log = String::new();
        stderr.read_to_string(&mut log).await.map(|_| log)
    });

    mock.script([
        Reply::error(429, "slow_down", Some(1)),
        Reply::text("done"),
        Reply::error(401, &format!("wrong key {CANARY}-model"), None),
    ]);
    let invoke = "/v1/agents/reader/invoke";
    let run = service.post(invoke, ADMIN_KEY, &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    assert_eq!(service.post(invoke, ADMIN_KEY, &json!({})).await["status"], "failed");
    let made =
        service.post("/v1/keys", ADMIN_KEY, &json!({"name": "k", "scopes": ["runs:read"]})).await;
    let made = made["key"].as_str().unwrap().to_owned();
    for (path, key) in [
        (invoke, made.as_str()),
        (invoke, "tl_nobody_canary5ecret0000000000000000000000000000000000000000"),
        (invoke, CANARY),
        ("/v1/keys", &made),
        ("/v1/nowhere", ADMIN_KEY),
    ] {
        service.post(path, key, &json!({"inputs": {}, "nonsense": 1})).await;
    }
    service.stop().await;

    let log = reading.await.unwrap().unwrap();
    let lines: Vec<Value> =
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(lines.len() > 15, "the log is too short to hold anything:\n{log}");
    let ours = |message: &str| {
        lines.iter().filter(move |line| line["message"] == message).collect::<Vec<_>>()
    };
    let ended = ours("run ended");
    assert_eq!(
        (ended.len(), &ended[0]["run_id"], &ended[0]["level"]),
        (2, &run["run_id"], &json!("INFO"))
    );
    assert_eq!(
        (&ended[1]["status"], &ended[1]["reason"]),
        (&json!("failed"), &json!("model_error"))
    );
    names_its_owner(ended[0]);
    assert_eq!(ours("model call is repeated")[0]["run_id"], run["run_id"]);
    let answered = ours("answered");
    assert!(
        answered
            .iter()
            .any(|line| line["route"] == "/v1/agents/{name}/invoke"
                && line["run_id"] == run["run_id"])
    );

    let admin_secret = ADMIN_KEY.splitn(3, '_').nth(2).unwrap();
    let made_secret = made.splitn(3, '_').nth(2).unwrap();
    for secret in [CANARY, admin_secret, made_secret] {
        let leaks: Vec<&str> = log.lines().filter(|line| line.contains(secret)).collect();
        assert!(leaks.is_empty(), "{secret} is in the log:\n{}", leaks.join("\n"));
    }
}
