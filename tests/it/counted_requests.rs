//! Requests to the network: every one that is sent counts for `network.max_requests`, whichever run of
//! a tree sends it.
//!
//! With other features: crashes see what is journaled (`machine.rs`); programs are in `way_out.rs`; shared
//! budgets of other things in `shared_budgets.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    redirects_retries_and_robots_count,
    http_tools_count_their_retries,
    a_tree_shares_its_requests,
    calls_before_one_too_many_keep_their_results,
}

/// A site that counts what it is asked.
struct Site {
    port: u16,
    requests: Arc<AtomicUsize>,
    server: JoinHandle<()>,
}

impl Site {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&requests);
        let app = Router::new().fallback(move |request: Request| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move {
                match request.uri().path() {
                    "/r1" => (StatusCode::FOUND, [("location", "/r2")]).into_response(),
                    "/r2" => (StatusCode::FOUND, [("location", "/r3")]).into_response(),
                    "/r3" => ([("content-type", "text/plain")], "there").into_response(),
                    "/busy" => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                    "/robots.txt" => ([("content-type", "text/plain")], "").into_response(),
                    _ => StatusCode::NOT_FOUND.into_response(),
                }
            }
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { port, requests, server }
    }

    fn network(&self, max: usize) -> String {
        format!(
            "network: {{allow: ['127.0.0.2:{}'], allow_private: [127.0.0.2], max_requests: {max}}}",
            self.port
        )
    }

    fn taken(&self) -> usize {
        self.requests.swap(0, Ordering::SeqCst)
    }

    fn fetch(&self, path: &str) -> Value {
        let url = format!("http://127.0.0.2:{}{path}", self.port);
        json!({"tool": "web_fetch", "arguments": {"url": url}})
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn agent(model: &str, tools: &str, governance: &str) -> String {
    format!(
        "model: scripted/{model}\ntools: {tools}\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 1000}}\ngovernance: {{autonomy: full, {governance}}}\n"
    )
}

fn steps(calls: &[Value]) -> String {
    let calls = calls.iter().map(|call| json!({"tool_calls": [call]}));
    json!({"steps": calls.chain([json!({"text": "done"})]).collect::<Vec<_>>()}).to_string()
}

async fn shown(service: &Service, run: &Value) -> Value {
    service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body
}

async fn events(service: &Service, run: &Value, kind: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let events = service.get(&path).await.body;
    let all = events["data"].as_array().unwrap().iter();
    all.filter(|event| event["type"] == kind).map(|event| event["data"].clone()).collect()
}

fn is_over(run: &Value) -> bool {
    run["error"]["code"] == "BUDGET_EXCEEDED"
        && run["error"]["context"]["limit"] == "network.max_requests"
}

async fn redirects_retries_and_robots_count(db: Db) {
    let site = Site::start().await;
    let retries = "tool_options: {web_fetch: {retries: 3}}\n";
    let service = Setup::new()
        .config("[tools.web_fetch]\nrobots = true\n")
        .agent("hops", &agent("hops", "[web_fetch]", &site.network(5)))
        .scenario("hops", &steps(&[site.fetch("/r1"), site.fetch("/r1"), site.fetch("/r3")]))
        .agent("again", &(agent("again", "[web_fetch]", &site.network(2)) + retries))
        .scenario("again", &steps(&[site.fetch("/none")]))
        .agent("enough", &agent("enough", "[web_fetch]", &site.network(3)))
        .scenario("enough", &steps(&[site.fetch("/r1")]))
        .start(db)
        .await;
    // Of the first page robots.txt is asked as well; the redirect to the third is not followed.
    let run = service.run("hops", &json!({})).await;
    assert!(is_over(&run), "{run:#}");
    assert_eq!(site.taken(), 5);
    let row = shown(&service, &run).await;
    assert_eq!(row["budget"]["used"]["network_requests"], 5, "{row:#}");
    let network = events(&service, &run, "tool_call.completed").await;
    assert_eq!(network[0]["network"], json!({"requests": 4, "refused": 0, "announced": 1}));
    assert_eq!(
        network[1]["network"],
        json!({"requests": 1, "refused": 1, "announced": 1, "over_budget": true})
    );
    // The journal and the audit log tell what each call was judged by.
    let started = events(&service, &run, "tool_call.started").await;
    let [first, second] = [0, 1].map(|call| &started[call]["circumstances"]);
    assert_eq!((&first["labels"], &first["used"]), (&Value::Null, &json!({"iterations": 1})));
    assert!(first["rate"]["remaining"].as_u64() < first["rate"]["limit"].as_u64(), "{first:#}");
    assert_eq!(
        (&second["labels"], &second["used"]),
        (&json!(["untrusted"]), &json!({"iterations": 2, "tool_calls": 1, "network_requests": 4})),
    );
    let audit = format!("/v1/audit?run_id={}", run["run_id"].as_str().unwrap());
    let audit = service.get(&audit).await.body;
    let labels: Vec<_> =
        audit["data"].as_array().unwrap().iter().map(|record| &record["labels"]).collect();
    assert_eq!(labels, [&json!(["untrusted"]), &json!([])], "the newest first: {audit:#}");
    // What the host said of robots is known by now.
    let run = service.run("again", &json!({})).await;
    assert!(is_over(&run), "{run:#}");
    assert_eq!(site.taken(), 2);
    assert_eq!(shown(&service, &run).await["budget"]["used"]["network_requests"], 2);

    let run = service.run("enough", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    assert_eq!(site.taken(), 3);
}

async fn http_tools_count_their_retries(db: Db) {
    let site = Site::start().await;
    let set = format!(
        "base_url: http://127.0.0.2:{}\ntools:\n\
         \x20 - {{name: busy, description: d, method: GET, path: /busy, effect: read}}\n",
        site.port
    );
    let call = json!({"tool": "http:api/busy", "arguments": {}});
    let network = |max| format!("network: {{max_requests: {max}}}");
    let repeated = "tool_options: {http:api/busy: {retries: 2}}\n";
    let service = Setup::new()
        .tools("api", &set)
        .agent("few", &(agent("few", "['http:api/*']", &network(2)) + repeated))
        .scenario("few", &steps(std::slice::from_ref(&call)))
        .agent("more", &(agent("more", "['http:api/*']", &network(3)) + repeated))
        .scenario("more", &steps(&[call]))
        .start(db)
        .await;
    let run = service.run("few", &json!({})).await;
    assert!(is_over(&run), "{run:#}");
    assert_eq!(site.taken(), 2);
    let run = service.run("more", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let row = shown(&service, &run).await;
    assert_eq!(row["budget"]["used"]["network_requests"], site.taken(), "{row:#}");
}

async fn a_tree_shares_its_requests(db: Db) {
    let site = Site::start().await;
    let ask = json!({"tool": "agent:child", "arguments": {}});
    let service = Setup::new()
        .agent("child", &agent("child", "[web_fetch]", &site.network(100)))
        .scenario("child", &steps(&[site.fetch("/r1")]))
        .agent("parent", &agent("parent", "['agent:child', web_fetch]", &site.network(5)))
        .scenario("parent", &steps(&[site.fetch("/r3"), ask.clone(), ask, site.fetch("/r3")]))
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(site.taken(), 5, "one of the parent, three and one of its children");
    assert!(is_over(&run), "{run:#}");
    assert_eq!(run["error"]["context"]["shared"], true, "{run:#}");
    let row = shown(&service, &run).await;
    assert_eq!(row["budget"]["tree"]["network_requests"], 5, "{row:#}");
    let path = format!("/v1/runs?parent_run_id={}", run["run_id"].as_str().unwrap());
    let children = service.get(&path).await.body;
    let children = children["data"].as_array().unwrap();
    assert_eq!(children.len(), 2);
    let over: Vec<_> = children.iter().filter(|child| is_over(child)).collect();
    assert_eq!(over.len(), 1, "{children:#?}");
    assert_eq!(over[0]["error"]["context"]["shared"], true, "{over:#?}");
    assert_eq!(over[0]["error"]["context"]["max"], 5, "{over:#?}");
}

async fn calls_before_one_too_many_keep_their_results(db: Db) {
    let site = Site::start().await;
    let denied = json!({"tool": "web_fetch", "arguments": {"url": "http://127.0.0.3:1/"}});
    let calls = [denied, site.fetch("/r3"), site.fetch("/r3")];
    let together = "parallel_tool_calls: true\n";
    let service = Setup::new()
        .config("[governance]\nrate_limit_per_minute = 1\nrate_limit_burst = 4\n")
        .agent("together", &(agent("together", "[web_fetch]", &site.network(1)) + together))
        .scenario("together", &json!({"steps": [{"tool_calls": calls}]}).to_string())
        .start(db)
        .await;
    let run = service.run("together", &json!({})).await;
    assert!(is_over(&run), "{run:#}");
    assert_eq!(site.taken(), 1);
    assert_eq!(events(&service, &run, "tool_call.blocked").await.len(), 1, "{run:#}");
    let completed = events(&service, &run, "tool_call.completed").await;
    let told: Vec<&str> = completed.iter().map(|it| it["content"].as_str().unwrap()).collect();
    assert!(told[0].contains("there") && told[1].contains("not executed"), "{told:?}");
    let audit = format!("/v1/audit?run_id={}&outcome=blocked", run["run_id"].as_str().unwrap());
    let audit = service.get(&audit).await.body;
    assert_eq!(audit["data"].as_array().unwrap().len(), 1, "{audit:#}");
    // The call that was one too many took nothing of the caller's rate limit.
    let again = service.run("together", &json!({})).await;
    let blocked = events(&service, &again, "tool_call.blocked").await;
    assert_eq!(blocked[0]["circumstances"]["rate"]["remaining"], 1, "{blocked:#?}");
}
