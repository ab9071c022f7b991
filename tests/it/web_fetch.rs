//! Pages of the network, for agents that are allowed their hosts.
//!
//! With other features: a child fetches what its own definition allows and its parent's does not deny (below);
//! parked runs, sessions, cancel, a crash, other replicas, streaming, budgets and tenants see a call
//! that only reads, like any other; skills and tool policies bound it by its name; a dry run offers it
//! and asks no host; the console, the command line and generated clients show calls by their rows.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::documents;
use crate::service::{Db, Service, Setup, on_both_stores, on_one_store};

on_both_stores! {
    a_host_that_one_agent_may_not_reach_stays_open_to_others,
    a_child_is_denied_the_hosts_denied_to_its_parent,
}

on_one_store! {
    pages_of_allowed_hosts_are_read,
    robots_are_asked_where_the_operator_says_so,
    a_literal_address_that_is_not_public_is_blocked,
}

/// A site that counts what it is asked.
pub(crate) struct Site {
    pub(crate) port: u16,
    requests: Arc<AtomicUsize>,
    server: JoinHandle<()>,
}

impl Site {
    pub(crate) async fn start(address: &str) -> Self {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&requests);
        let app = Router::new().fallback(move |request: Request| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move { respond(&request) }
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { port, requests, server }
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn respond(request: &Request) -> Response {
    let page = |kind: &'static str, body: Vec<u8>| ([("content-type", kind)], body).into_response();
    let sentence =
        "The tide turns twice a day, and nobody has ever asked it why it does. ".repeat(12);
    match request.uri().path() {
        "/article" => page(
            "text/html; charset=windows-1252",
            format!(
                "<html><head><title>Tides</title><script>var x = '</div>';</script></head><body><nav>Menu</nav>\
                 <article><h1>On tides</h1><p>{sentence}</p><p>More in <a href='/next'>the next one</a>. {sentence}</p>\
                 </article><footer>Imprint</footer></body></html>"
            )
            .replace("tide", "t\u{ef}de")
            .chars()
            .map(|c| u8::try_from(u32::from(c)).unwrap())
            .collect(),
        ),
        "/data" => page("application/json; charset=utf-8", b"{\"high\": \"04:12\"}".to_vec()),
        "/deep" => page("text/html", "<div>".repeat(200_000).into_bytes()),
        "/tables" => page("application/pdf", documents::pdf(&[&["Low at six"], &["High at twelve"]])),
        "/endless" => {
            let begun = futures::stream::iter([Ok::<_, std::io::Error>("%PDF-1.4\n")]);
            let body = Body::from_stream(begun.chain(futures::stream::pending()));
            ([("content-type", "application/pdf")], body).into_response()
        }
        "/broken" => page("application/pdf", b"%PDF-1.7\nnothing of it".to_vec()),
        "/zip" => page("application/zip", b"PK".to_vec()),
        "/large" => page("text/plain", vec![b'x'; 100_000]),
        "/robots.txt" => page("text/plain", b"User-agent: *\nDisallow: /data".to_vec()),
        "/inward" => (StatusCode::FOUND, [("location", "http://127.0.0.1:1/")]).into_response(),
        "/away" => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            (StatusCode::FOUND, [("location", query)]).into_response()
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn agent(urls: &[Value], governance: &str) -> (String, String) {
    let calls = urls
        .iter()
        .map(|arguments| json!({"tool_calls": [{"tool": "web_fetch", "arguments": arguments}]}));
    let steps: Vec<Value> = calls.chain([json!({"text": "done"})]).collect();
    let agent = format!(
        "model: scripted/reader\ntools: [web_fetch]\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 1000, max_iterations: 100, max_iterations_per_attempt: 100}}\ngovernance: {governance}\n"
    );
    (agent, json!({"steps": steps}).to_string())
}

async fn rows(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/tool-calls?limit=200", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

fn result(row: &Value) -> &str {
    row["result"].as_str().unwrap_or_default()
}

async fn pages_of_allowed_hosts_are_read(db: Db) {
    let site = Site::start("127.0.0.2").await;
    let sink = Site::start("127.0.0.1").await;
    let (port, private) = (site.port, sink.port);
    let at = |path: &str| format!("http://127.0.0.2:{port}{path}");
    let table = [
        (json!({"url": at("/article")}), "The tïde turns twice a day"),
        (json!({"url": at("/article"), "raw": true}), "<nav>Menu</nav>"),
        (json!({"url": at("/data")}), "{\"high\": \"04:12\"}"),
        (json!({"url": at("/deep")}), "has no text"),
        (json!({"url": at("/tables")}), "[Page 2]\nHigh at twelve"),
        (json!({"url": at("/tables"), "raw": true}), "[Page 1]\nLow at six"),
        (json!({"url": at("/broken")}), "it is a damaged PDF document"),
        (json!({"url": at("/zip")}), "it is application/zip, which is not read here"),
        (json!({"url": at("/large")}), "more than 65536 bytes"),
        (json!({"url": at("/none")}), "answered 404"),
        (json!({"url": at("/inward")}), "127.0.0.1:1 is not allowed"),
        (json!({"url": at(&format!("/away?http://127.0.0.1:{private}/"))}), "is not allowed"),
        (json!({"url": at(&format!("/away?http://0x7f.1:{private}/"))}), "is not allowed"),
        (json!({"url": at(&format!("/away?http://localhost:{private}/"))}), "not public"),
        (json!({"url": at("/away?/data")}), "04:12"),
        (json!({"url": format!("http://127.0.0.1:{private}/")}), "Blocked by the network rule"),
        (
            json!({"url": format!("http://[::ffff:127.0.0.1]:{private}/")}),
            "Blocked by the network rule",
        ),
        (json!({"url": format!("http://localhost:{private}/")}), "not public"),
        (json!({"url": "http://example.com/"}), "Blocked by the network rule"),
        (json!({"url": "http://denied.example.org/"}), "network.deny"),
        (json!({"url": "file:///etc/passwd"}), "neither http nor https"),
        (json!({"url": "http://a:b@127.0.0.2/"}), "contains credentials"),
    ];
    let governance = format!(
        "{{network: {{allow: ['127.0.0.2:{port}', 'localhost:{private}', '*.example.org'], deny: [denied.example.org], allow_private: [127.0.0.2/32]}}}}"
    );
    let urls: Vec<Value> = table.iter().map(|(url, _)| url.clone()).collect();
    let (yaml, scenario) = agent(&urls, &governance);
    let service = Setup::new()
        .agent("reader", &yaml)
        .scenario("reader", &scenario)
        .config("[tools.web_fetch]\nmax_body = \"64KiB\"\n")
        .start(db)
        .await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let rows = rows(&service, &run).await;
    assert_eq!(rows.len(), table.len(), "{rows:#?}");
    for (row, (url, expected)) in rows.iter().zip(&table) {
        // A megabyte of nested elements is over this service's bound.
        let expected =
            if url["url"].as_str().unwrap().ends_with("/deep") { "more than" } else { expected };
        assert!(result(row).contains(expected), "{url}: {row:#}");
    }
    let article = result(&rows[0]);
    assert!(
        article.contains(&format!("[the next one](http://127.0.0.2:{port}/next)")),
        "{article}"
    );
    assert!(!article.contains("Imprint") && !article.contains("var x"), "{article}");
    assert_eq!(sink.requests(), 0);
}

async fn robots_are_asked_where_the_operator_says_so(db: Db) {
    let site = Site::start("127.0.0.2").await;
    let at = |path: &str| json!({"url": format!("http://127.0.0.2:{}{path}", site.port)});
    let urls = [at("/data"), at("/deep"), at("/large")];
    let governance =
        format!("{{network: {{allow: ['127.0.0.2:{}'], allow_private: [127.0.0.2]}}}}", site.port);
    let (yaml, scenario) = agent(&urls, &governance);
    let service = Setup::new()
        .agent("reader", &yaml)
        .scenario("reader", &scenario)
        .config("[tools.web_fetch]\nrobots = true\n")
        .start(db)
        .await;
    let run = service.run("reader", &json!({})).await;
    let rows = rows(&service, &run).await;
    assert_eq!(rows.len(), 3, "{rows:#?}");
    let expected = ["asks robots to stay away", "has no text", "xxxxxxxx"];
    for (row, expected) in rows.iter().zip(expected) {
        assert!(result(row).contains(expected), "{expected}: {row:#}");
    }
    assert_eq!(site.requests(), 3);
}

async fn a_host_that_one_agent_may_not_reach_stays_open_to_others(db: Db) {
    let site = Site::start("127.0.0.1").await;
    let url = || json!({"url": format!("http://localhost:{}/large", site.port)});
    let allowed = |more: &str| format!("{{network: {{allow: ['localhost:{}']{more}}}}}", site.port);
    let (outsider, scenario) = agent(&[url()], &allowed(""));
    let (insider, _) = agent(&[url()], &allowed(", allow_private: [127.0.0.0/8, '::1/128']"));
    let service = Setup::new()
        .agent("outsider", &outsider)
        .agent("insider", &insider)
        .scenario("reader", &scenario)
        .config("[tools.web_fetch]\nrobots = true\nmax_body = \"200KiB\"\n")
        .start(db)
        .await;
    let run = service.run("outsider", &json!({})).await;
    let told = rows(&service, &run).await;
    assert!(result(&told[0]).contains("robots.txt cannot be read"), "{told:#?}");
    let run = service.run("insider", &json!({})).await;
    let told = rows(&service, &run).await;
    assert!(result(&told[0]).contains("xxxxxxxx"), "{told:#?}");
}

async fn a_child_is_denied_the_hosts_denied_to_its_parent(db: Db) {
    let site = Site::start("127.0.0.2").await;
    let url = json!({"url": format!("http://127.0.0.2:{}/data", site.port)});
    let allowed = format!("allow: ['127.0.0.2:{}'], allow_private: [127.0.0.2]", site.port);
    let (child, scenario) = agent(&[url], &format!("{{network: {{{allowed}}}}}"));
    let parent = "model: scripted/parent\ntools: ['agent:child']\nenable_double_confirmation: false\n\
                  governance: {network: {deny: ['127.0.0.2']}}\n";
    let ask = json!({"steps": [
        {"tool_calls": [{"tool": "agent:child", "arguments": {}}]},
        {"text": "done"}
    ]});
    let service = Setup::new()
        .agent("child", &child)
        .agent("parent", parent)
        .scenario("reader", &scenario)
        .scenario("parent", &ask.to_string())
        .start(db)
        .await;
    let run = service.run("child", &json!({})).await;
    assert!(result(&rows(&service, &run).await[0]).contains("04:12"));
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let path = format!("/v1/runs?parent_run_id={}", run["run_id"].as_str().unwrap());
    let children = service.get(&path).await.body;
    let child = &children["data"][0];
    let row = &rows(&service, child).await[0];
    assert!(result(row).contains("network.deny"), "{row:#}");
    assert_eq!(site.requests(), 1);
}

async fn a_literal_address_that_is_not_public_is_blocked(db: Db) {
    let site = Site::start("127.0.0.2").await;
    let port = site.port;
    let urls: Vec<Value> = [
        "http://169.254.169.254/latest/meta-data/".to_owned(),
        format!("http://[::1]:{port}/"),
        format!("http://localhost:{port}/"),
    ]
    .map(|url| json!({ "url": url }))
    .to_vec();
    let governance = format!(
        "{{network: {{allow: ['169.254.169.254', '[::1]:{port}', 'localhost:{port}', '127.0.0.2:{port}'], allow_private: [127.0.0.2/32]}}}}"
    );
    let (yaml, scenario) = agent(&urls, &governance);
    let (_, read) = agent(&[json!({"url": format!("http://127.0.0.2:{port}/none")})], &governance);
    let (_, led) = agent(&[json!({"url": format!("http://127.0.0.2:{port}/inward")})], &governance);
    let service = Setup::new()
        .agent("reader", &yaml)
        .agent("other", &yaml.replace("scripted/reader", "scripted/other"))
        .scenario("reader", &scenario)
        .scenario("other", &read)
        .agent("led", &yaml.replace("scripted/reader", "scripted/led"))
        .scenario("led", &led)
        .start(db)
        .await;
    let run = service.run("reader", &json!({})).await;
    let calls = rows(&service, &run).await;
    for call in &calls[..2] {
        assert_eq!(
            (&call["decision"], &call["state"]),
            (&json!("blocked"), &json!("denied")),
            "{call:#}"
        );
        assert!(result(call).contains("network.allow_private"), "{call:#}");
    }
    assert_eq!(
        calls[2]["decision"], "allowed",
        "what a name stands for is not known before: {:#}",
        calls[2]
    );
    assert!(result(&calls[2]).contains("not public"), "{:#}", calls[2]);
    let labels = async |run: &Value| {
        let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
        service.get(&path).await.body["labels"].clone()
    };
    assert_eq!(labels(&run).await, json!([]), "nothing was read");
    let run = service.run("other", &json!({})).await;
    assert_eq!(labels(&run).await, json!(["untrusted"]), "an answer of 404 was read");
    let run = service.run("led", &json!({})).await;
    let said = result(&rows(&service, &run).await[0]).to_owned();
    assert!(said.contains("127.0.0.1:1"), "{said}");
    assert_eq!(labels(&run).await, json!(["untrusted"]), "where it leads is the server's word");
}
