//! What an output must satisfy beyond its schema, and what is done to calls on the way to their
//! tools.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::post;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::service::{Db, Service, Setup, command, on_both_stores};

on_both_stores! {
    a_broken_rule_is_told_and_the_next_attempt_passes,
    the_last_errors_of_all_attempts_are_in_the_error,
    a_validator_is_asked_last_and_its_errors_are_told,
    a_run_is_cancelled_while_its_output_is_validated,
    an_output_is_shown_before_it_is_submitted,
    calls_are_intercepted,
    stop_conditions_stop_and_warn,
    stop_conditions_know_the_cost,
}

/// An operator's endpoint, and the bodies that it was sent.
struct Endpoint {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Value>>>,
}

impl Endpoint {
    async fn start() -> Self {
        let asked = Arc::<Mutex<Vec<Value>>>::default();
        let router = Router::new()
            .route("/fussy", post(fussy))
            .route("/silent", post(|| async { tokio::time::sleep(Duration::from_hours(1)).await }))
            .route(
                "/moved",
                post(|| async { Redirect::temporary("http://169.254.169.254/latest/meta-data") }),
            )
            .route("/large", post(|| async { vec![b'1'; 10 * 1024 * 1024] }))
            .route(
                "/broken",
                post(|| async { (StatusCode::INTERNAL_SERVER_ERROR, "panic at 10.1.2.3") }),
            )
            .route("/garbage", post(|| async { "yes, very good" }))
            .route("/shown", post(shown))
            .route("/plain", post(|| async { "just text" }))
            .route("/reasonless", post(|| async { axum::Json(json!({"valid": false})) }))
            .with_state(Arc::clone(&asked));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, asked }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    fn asked(&self) -> Vec<Value> {
        self.asked.lock().unwrap().clone()
    }
}

/// Accepts outputs whose `n` is even.
async fn fussy(
    State(asked): State<Arc<Mutex<Vec<Value>>>>,
    axum::Json(body): axum::Json<Value>,
) -> Response {
    let n = body["output"]["n"].as_i64().unwrap();
    asked.lock().unwrap().push(body);
    let errors = json!(["not like this", {"pointer": "/n", "message": format!("{n} is odd")}]);
    axum::Json(json!({"valid": n % 2 == 0, "errors": if n % 2 == 0 { json!([]) } else { errors }}))
        .into_response()
}

async fn shown(axum::Json(body): axum::Json<Value>) -> Response {
    let content = format!("{} of {}", body["output"]["n"], body["inputs"]["who"]);
    axum::Json(json!({"content": content, "more": true})).into_response()
}

fn contract(model: &str, more: &str) -> String {
    format!(
        "model: scripted/{model}\noutput:\n  schema: {{type: object, required: [n], properties: {{n: {{type: integer}}, \
         said: {{}}}}}}\n{more}"
    )
}

/// A model that proposes these numbers, one an attempt, and repeats what it was told about the last
/// one.
fn proposing(numbers: &[i64]) -> String {
    let step = |n: &i64| {
        format!(
            "{{tool_calls: [{{tool: output, arguments: '{{{{ {{\"n\": {n}, \"said\": results | last | default(none)}} | \
             tojson }}}}'}}]}}"
        )
    };
    format!("steps: [{}]", numbers.iter().map(step).collect::<Vec<_>>().join(", "))
}

async fn of_type(service: &Service, run: &Value, event: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let events = service.get(&path).await.body;
    let found = events["data"].as_array().unwrap().iter().filter(|e| e["type"] == event);
    found.map(|e| e["data"].clone()).collect()
}

async fn a_broken_rule_is_told_and_the_next_attempt_passes(db: Db) {
    let rules = "  rules:\n  - {rule: 'output.n > inputs.least', message: Aim higher., match: [], no_match: [{n: 0}]}\n  \
                 - {rule: 'output.n % 2 == 1', message: Be odd., match: [{n: 3}], no_match: [{n: 2}]}\n";
    let service = Setup::new()
        .agent("counter", &contract("counter", rules))
        .scenario("counter", &proposing(&[2, 7]))
        .start(db)
        .await;
    let run = service.run("counter", &json!({"inputs": {"least": 4}})).await;
    assert_eq!(
        (&run["status"], &run["attempts"], &run["output"]["n"]),
        (&json!("completed"), &json!(2), &json!(7))
    );
    let told = run["output"]["said"].as_str().unwrap();
    assert!(told.contains("Aim higher.") && told.contains("Be odd."), "{run:#}");
    let failed = of_type(&service, &run, "validation.failed").await;
    let messages: Vec<_> =
        failed[0]["errors"].as_array().unwrap().iter().map(|e| e["message"].clone()).collect();
    assert_eq!(messages, ["Aim higher.", "Be odd."]);
    let path = format!("/v1/runs/{}/messages", run["run_id"].as_str().unwrap());
    let messages = service.get(&path).await.body["data"].as_array().unwrap().clone();
    let prompt = messages.iter().rfind(|message| message["role"] == "user").unwrap();
    assert!(
        prompt["content"].as_str().unwrap().contains("Be odd."),
        "the errors are also a prompt: {messages:#?}"
    );
    let unknown = service.run("counter", &json!({"max_attempts": 1})).await;
    let message = unknown["error"]["context"]["errors"][0]["message"].as_str().unwrap();
    assert_eq!(
        message,
        "Aim higher. (The rule output.n > inputs.least fails: there is no key \"least\".)"
    );
}

async fn the_last_errors_of_all_attempts_are_in_the_error(db: Db) {
    let rules = "  rules:\n  - {rule: 'output.n > 10', message: More than ten.}\n  - {rule: 'output.n < 3', message: Less \
                 than three.}\nlimits: {max_attempts: 2}\n";
    let service = Setup::new()
        .agent("counter", &contract("counter", rules))
        .scenario("counter", &proposing(&[1, 12]))
        .start(db)
        .await;
    let run = service.run("counter", &json!({})).await;
    assert_eq!(
        (&run["status"], &run["error"]["code"]),
        (&json!("failed"), &json!("VALIDATION_FAILED"))
    );
    assert_eq!(run["termination_reason"], "validation_failed");
    let errors = &run["error"]["context"]["errors"];
    assert_eq!(
        *errors,
        json!([{"pointer": "", "message": "Less than three."}]),
        "those of the last attempt"
    );
}

async fn a_validator_is_asked_last_and_its_errors_are_told(db: Db) {
    let endpoint = Endpoint::start().await;
    let more = format!(
        "  rules: [{{rule: 'output.n > 2', message: More.}}]\n  validator: {{url: '{}'}}\n",
        endpoint.url("fussy")
    );
    let service = Setup::new()
        .agent("counter", &contract("counter", &more))
        .scenario("counter", &proposing(&[1, 3, 4]))
        .start(db)
        .await;
    let run = service.run("counter", &json!({"inputs": {"a": "b"}})).await;
    assert_eq!((&run["status"], &run["attempts"]), (&json!("completed"), &json!(3)), "{run:#}");
    let told = run["output"]["said"].as_str().unwrap();
    assert!(told.contains("not like this") && told.contains("3 is odd"), "{told}");
    let asked = endpoint.asked();
    let numbers: Vec<_> = asked.iter().map(|body| body["output"]["n"].clone()).collect();
    assert_eq!(numbers, [3, 4], "an output that the rules refuse is not sent");
    assert_eq!((&asked[0]["inputs"], &asked[0]["run_id"]), (&json!({"a": "b"}), &run["run_id"]));
    let failed = of_type(&service, &run, "validation.failed").await;
    let pointers: Vec<_> =
        failed[1]["errors"].as_array().unwrap().iter().map(|e| e["pointer"].clone()).collect();
    assert_eq!(pointers, ["", "/n"]);
}

#[tokio::test]
async fn a_validator_that_does_not_judge_ends_the_run_and_burns_no_attempt() {
    let endpoint = Endpoint::start().await;
    let mut setup = Setup::new().scenario("counter", &proposing(&[2]));
    let cases = [
        ("silent", "the validator did not answer within 1 seconds"),
        ("moved", "the validator answered with the status 307"),
        ("large", "the validator sent an answer of more than 1048576 bytes"),
        ("broken", "the validator answered with the status 500"),
        ("garbage", "the validator sent an answer that is not the JSON that is expected"),
        ("unreachable", "the validator could not be reached"),
        ("reasonless", "gave no reason"),
    ];
    for (path, _) in cases {
        let url = match path {
            "unreachable" => "http://127.0.0.1:1/".to_owned(),
            path => endpoint.url(path),
        };
        let timeout = if path == "silent" { 1 } else { 60 };
        let more = format!(
            "  validator: {{url: '{url}', timeout_seconds: {timeout}}}\nlimits: {{max_attempts: 1}}\n"
        );
        setup = setup.agent(path, &contract("counter", &more));
    }
    let service = setup.start(Db::Sqlite).await;
    for (path, words) in cases {
        let run = service.run(path, &json!({})).await;
        let code = if path == "reasonless" { "VALIDATION_FAILED" } else { "VALIDATOR_UNAVAILABLE" };
        assert_eq!(run["error"]["code"], code, "{run:#}");
        if path != "reasonless" {
            let ended = (&run["status"], &run["termination_reason"]);
            assert_eq!(ended, (&json!("failed"), &json!("error")), "{run:#}");
            assert!(of_type(&service, &run, "validation.failed").await.is_empty());
        }
        let errors = run["error"].to_string();
        assert!(errors.contains(words), "{path}: {errors}");
        assert!(
            !errors.contains("127.0.0.1")
                && !errors.contains("10.1.2.3")
                && !errors.contains("169.254"),
            "{errors}"
        );
    }
    service.until_logged("the endpoint's answer is too large").await;
}

async fn a_run_is_cancelled_while_its_output_is_validated(db: Db) {
    let endpoint = Endpoint::start().await;
    let more =
        format!("  validator: {{url: '{}', timeout_seconds: 600}}\n", endpoint.url("silent"));
    let service = Setup::new()
        .agent("counter", &contract("counter", &more))
        .scenario("counter", &proposing(&[2]))
        .start(db)
        .await;
    let start = service.request(Method::POST, "/v1/agents/counter/invoke-iterative");
    let accepted =
        crate::service::answer(start.header("Prefer", "respond-async").json(&json!({}))).await;
    let run = format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap());
    let events = format!("{run}/events");
    let proposed = |page: &Value| {
        page["data"].as_array().unwrap().iter().any(|e| e["type"] == "output.proposed")
    };
    service.until(&events, proposed).await;
    service.post(&format!("{run}/cancel"), &json!({})).await;
    let ended = service.until(&run, |run| run["status"] == "cancelled").await;
    assert_eq!(ended["error"]["context"]["phase"], "validation", "{ended:#}");

    let short = json!({"budget": {"max_duration_seconds": 1}});
    let late = service.run("counter", &short).await;
    assert_eq!(late["error"]["code"], "DURATION_EXCEEDED", "{late:#}");
}

async fn an_output_is_shown_before_it_is_submitted(db: Db) {
    let endpoint = Endpoint::start().await;
    let submit = "{tool_calls: [{tool: submit, arguments: {}}]}";
    let script = proposing(&[1, 2]).replace("steps: [", "").trim_end_matches(']').to_owned();
    let mut setup = Setup::new().scenario("counter", &format!("steps: [{script}, {submit}]"));
    let cases = [
        (
            "by-template",
            "template: 'n is {{ output.n }} of {{ inputs.who }}'".to_owned(),
            "n is 1 of me",
        ),
        ("by-endpoint", format!("url: '{}'", endpoint.url("shown")), "1 of \"me\""),
        ("by-text", format!("url: '{}'", endpoint.url("plain")), "just text"),
        (
            "unfitting",
            "template: '{{ output.none }}'".to_owned(),
            "Error: The output cannot be shown",
        ),
        (
            "silent",
            format!("url: '{}', timeout_seconds: 1", endpoint.url("silent")),
            "did not answer within 1 seconds",
        ),
        ("moved", format!("url: '{}'", endpoint.url("moved")), "answered with the status 307"),
        ("large", format!("url: '{}'", endpoint.url("large")), "of more than 1048576 bytes"),
    ];
    for (agent, reflection, _) in &cases {
        setup =
            setup.agent(agent, &contract("counter", &format!("  reflection: {{{reflection}}}\n")));
    }
    let service = setup.start(db).await;
    for (agent, _, words) in &cases {
        let run = service.run(agent, &json!({"inputs": {"who": "me"}})).await;
        assert_eq!(
            (&run["status"], &run["output"]["n"]),
            (&json!("completed"), &json!(2)),
            "{run:#}"
        );
        let told = run["output"]["said"].as_str().unwrap();
        assert!(told.contains(words), "{agent}: {told}");
        let reflected = of_type(&service, &run, "output.reflected").await;
        let are_errors = ["unfitting", "silent", "moved", "large"].contains(agent);
        assert_eq!(
            (reflected.len(), &reflected[0]["is_error"]),
            (2, &json!(are_errors)),
            "{reflected:#?}"
        );
    }
}

async fn stop_conditions_stop_and_warn(db: Db) {
    let agent = "
model: scripted/reader
tools: [file_ops]
governance: {budget: {stop_conditions: [
  {when: 'counters.iterations >= 1', action: warn},
  {when: 'counters.tool_calls >= 2 && usage.total_tokens > 0 && elapsed < 1000'}]}}
";
    let read = "{tool_calls: [{tool: file_ops, arguments: {operation: list}}]}";
    let service = Setup::new()
        .agent("reader", agent)
        .scenario("reader", &format!("steps: [{}]", [read; 5].join(", ")))
        .start(db)
        .await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["error"]["code"], &run["iterations"]),
        (&json!("STOP_CONDITION"), &json!(2)),
        "{run:#}"
    );
    assert_eq!(run["termination_reason"], "budget_exceeded");
    assert!(run["warnings"].to_string().contains("counters.iterations >= 1"), "{run:#}");
}

async fn stop_conditions_know_the_cost(db: Db) {
    let agent = "
model: scripted/reader
tools: [file_ops]
governance: {budget: {stop_conditions: [{when: 'usage.cost_usd > 0.025'}]}}
";
    let read = "{tool_calls: [{tool: file_ops, arguments: {operation: list}}], usage: {input_tokens: 1000, output_tokens: 1}}";
    let service = Setup::new()
        .config("[prices.\"scripted/*\"]\ninput = 10.0\noutput = 0.0\n")
        .agent("reader", agent)
        .scenario("reader", &format!("steps: [{}]", [read; 5].join(", ")))
        .start(db)
        .await;
    let run = service.run("reader", &json!({})).await;
    let (code, spent) = (&run["error"]["code"], &run["usage"]["cost_usd"]);
    assert_eq!((code, spent), (&json!("STOP_CONDITION"), &json!(0.03)), "{run:#}");
    assert!(!run["error"].to_string().contains("cannot be decided"), "{run:#}");
}

#[tokio::test]
async fn broken_contracts_are_reported_and_serve_no_run() {
    let broken = contract(
        "x",
        "  rules: [{rule: 'output.n > 1', message: More., match: [{n: 2}, {n: 1}]}]\n",
    );
    let cached = "model: scripted/x\ntools: [file_ops]\ntool_options: {shel: {retries: 1}}\n";
    let unguarded = "model: scripted/x\ntools: [file_ops]\ninterceptors: {before: [{tool: shell, block: No.}]}\n";
    let setup = Setup::new()
        .agent("broken", &broken)
        .agent("options", cached)
        .agent("unguarded", unguarded);
    let dir = setup.write_directory();
    let check = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&check.stdout).into_owned()
        + &String::from_utf8_lossy(&check.stderr);
    assert!(!check.status.success(), "{said}");
    let service = setup.start(Db::Sqlite).await;
    let ready = service.get("/readyz").await.body["definitions"].to_string();
    for words in [
        "output.rules[0].match[1]: the rule does not accept this example",
        "tool_options.shel: ",
        "interceptors.before[0].tool: ",
    ] {
        assert!(said.contains(words), "{words}: {said}");
        assert!(ready.contains(words), "{words}: {ready}");
    }
    assert_eq!(service.post("/v1/agents/broken/invoke-iterative", &json!({})).await.status, 404);
}

async fn calls_are_intercepted(db: Db) {
    let agent = "
model: scripted/reader
tools: [file_ops]
enable_double_confirmation: false
limits: {error_threshold: 9}
interceptors:
  before:
  - {tool: file_ops, when: \"args.path.contains('secret')\", block: Secrets stay where they are.}
  - {tool: 'file_*', when: \"!args.path.startsWith(inputs.root)\", rewrite: {/path: \"inputs.root + args.path\"}}
  - {tool: file_ops, when: \"args.path == 'base/odd'\", rewrite: {/limit: \"'many'\"}}
  after: [{tool: '*', redact: '\\b\\d{16}\\b', with: '<card>'}]
";
    let read =
        |path: &str| format!("{{tool: file_ops, arguments: {{operation: read, path: {path}}}}}");
    let calls =
        [read("card.txt"), read("secret.txt"), read("odd"), read("'1234567890123456'")].join(", ");
    let service = Setup::new()
        .agent("reader", agent)
        .scenario(
            "reader",
            &format!(
                "steps: [{{tool_calls: [{calls}]}}, {{text: \"{{{{ results | join('|') }}}}\"}}]"
            ),
        )
        .file("base/card.txt", "card 1234567890123456 of Bob\n")
        .start(db)
        .await;
    let run = service.run("reader", &json!({"inputs": {"root": "base/"}})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let results: Vec<&str> = run["output"]["result"].as_str().unwrap().split('|').collect();
    assert!(results[0].contains("card <card> of Bob"), "{run:#}");
    assert_eq!(results[1], "Error: Blocked by an interceptor: Secrets stay where they are.");
    assert!(
        results[2].contains("Interceptor 3 changed the arguments") && results[2].contains("/limit"),
        "{results:?}"
    );
    assert!(
        results[3].contains("<card>") && !results[3].contains("1234567890123456"),
        "{results:?}"
    );
    let blocked = of_type(&service, &run, "tool_call.blocked").await;
    assert_eq!(
        (&blocked[0]["rule"], &blocked[0]["decision"]),
        (&json!("interceptor"), &json!("blocked"))
    );
    assert_eq!(blocked.len(), 1);
}
