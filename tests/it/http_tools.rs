//! Tools that are requests to a service, declared in files.
//!
//! With other features: children have the tools of their own definition, and what their parent denies is
//! denied to them (`network.deny`, below); a parked run keeps its call and repeats nothing
//! (`destructive`, below); sessions, streaming, cancel and budgets see a call like any other; a crash
//! leaves it to the call's effect, as of every tool, with the same `Idempotency-Key`; other replicas
//! and tenants have the same files; a dry run lists the tools and asks no service; the console, the
//! command line and generated clients show calls by their rows.

use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::service::{Db, Service, Setup, command, on_both_stores, on_one_store};

on_both_stores! {
    arguments_and_secrets_stay_in_their_places,
    a_request_is_repeated_as_often_as_the_options_say,
    denied_and_unapproved_requests_are_not_sent,
}

on_one_store! {
    answers_are_followed_and_refused,
    hostile_services_end_in_results,
    an_api_is_imported_and_called,
    bodies_are_sent_as_forms,
    texts_of_json_and_joined_lists_are_sent_as_such,
}

/// In the environment of every test, and long enough to be looked for.
const SECRET: &str = "CARGO_MANIFEST_DIR";

/// A request as it came.
#[derive(Debug, Clone)]
struct Seen {
    line: String,
    headers: HeaderMap,
    body: String,
}

impl Seen {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

type Log = Arc<Mutex<Vec<Seen>>>;

struct Mock {
    url: String,
    log: Log,
    server: JoinHandle<()>,
}

impl Mock {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let log = Log::default();
        let app = Router::new().fallback(respond).with_state(Arc::clone(&log));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, log, server }
    }

    fn seen(&self, path: &str) -> Vec<Seen> {
        let log = self.log.lock().unwrap();
        log.iter().filter(|seen| seen.line.contains(path)).cloned().collect()
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn respond(State(log): State<Log>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let seen = Seen {
        line: format!("{} {}", head.method, head.uri),
        headers: head.headers,
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    let path = head.uri.path().to_owned();
    let before = {
        let mut log = log.lock().unwrap();
        log.push(seen.clone());
        log.iter().filter(|other| other.line == seen.line).count() - 1
    };
    let redirect = |to: &str| (StatusCode::FOUND, [("location", to.to_owned())]).into_response();
    let encoded = |encoding: &'static str, bytes: Vec<u8>| {
        ([("content-type", "application/json"), ("content-encoding", encoding)], bytes)
            .into_response()
    };
    match path.as_str() {
        "/api/inside" => redirect("/api/echo"),
        "/api/outside" => redirect("http://127.0.0.2:1/"),
        "/api/busy" | "/api/busy-post" => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        "/api/busy-once" if before == 0 => {
            (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "0")]).into_response()
        }
        "/api/busy-long" => {
            (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "600")]).into_response()
        }
        "/api/busy-until" => {
            let at = [("retry-after", "Thu, 31 Dec 2099 23:59:59 GMT")];
            (StatusCode::SERVICE_UNAVAILABLE, at).into_response()
        }
        "/api/wrong" => (
            StatusCode::UNPROCESSABLE_ENTITY,
            axum::Json(json!({"error": "q is too short", "token": seen.header("authorization")})),
        )
            .into_response(),
        "/api/hang" => std::future::pending().await,
        "/api/drip" => {
            let drops = stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Some((Ok::<_, std::io::Error>(Bytes::from_static(b" ")), ()))
            });
            Response::new(Body::from_stream(drops))
        }
        "/api/bomb" => {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
            gzip.write_all(&vec![b'x'; 1 << 20]).unwrap();
            encoded("gzip", gzip.finish().unwrap().repeat(500))
        }
        "/api/endless" => {
            let chunk = Bytes::from(vec![b'x'; 1 << 16]);
            let chunks = stream::repeat_with(move || Ok::<_, std::io::Error>(chunk.clone()));
            Response::new(Body::from_stream(chunks))
        }
        "/api/brotli" => encoded("br", vec![1, 2, 3]),
        "/api/image" => ([("content-type", "image/png")], vec![0_u8; 100]).into_response(),
        "/api/not-json" => ([("content-type", "application/json")], "<html>").into_response(),
        "/api/headers" => ([("x-long", "x".repeat(100_000))], "{}").into_response(),
        "/api/deep" => {
            ([("content-type", "application/json")], "[".repeat(500_000)).into_response()
        }
        "/api/wei" => ([("content-type", "application/json")], r#"{"wei": 36893488147419103232}"#)
            .into_response(),
        "/api/nothing" => StatusCode::NO_CONTENT.into_response(),
        _ => axum::Json(json!({
            "line": seen.line,
            "authorization": seen.header("authorization"),
            "body": seen.body,
            "items": [{"id": 1}]
        }))
        .into_response(),
    }
}

/// An agent that makes these calls, one a turn.
fn caller(base: &str, tools: &str, governance: &str, calls: &[(&str, Value)]) -> Setup {
    let steps = calls
        .iter()
        .map(|(tool, arguments)| {
            json!({"tool_calls": [{"tool": format!("http:api/{tool}"), "arguments": arguments}]})
        })
        .chain([json!({"text": "done"})]);
    let set = format!(
        "base_url: {base}/api/\nheaders: {{Authorization: \"Bearer {{{{ env.{SECRET} }}}}\"}}\ntools:\n{tools}"
    );
    let agent = format!(
        "model: scripted/caller\ntools: ['http:api/*']\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 1000, max_iterations: 50}}\n\
         governance: {governance}\n"
    );
    Setup::new()
        .agent("caller", &agent)
        .scenario("caller", &json!({"steps": steps.collect::<Vec<_>>()}).to_string())
        .tools("api", &set)
}

async fn rows(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/tool-calls?limit=200", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

fn result(row: &Value) -> &str {
    row["result"].as_str().unwrap_or_default()
}

/// One tool a line: name and the rest.
fn tools(entries: &[(&str, &str)]) -> String {
    entries
        .iter()
        .map(|(name, rest)| format!("  - {{name: {name}, {rest}}}\n"))
        .collect::<Vec<_>>()
        .concat()
}

async fn arguments_and_secrets_stay_in_their_places(db: Db) {
    let mock = Mock::start().await;
    let secret = std::env::var(SECRET).unwrap();
    let tools = tools(&[
        (
            "item",
            "method: GET, effect: read, path: '/items/{{ args.id }}/{{ args.part }}', query: {q: '{{ args.q }}', list: '{{ args.list }}', key: '{{ env.CARGO_MANIFEST_DIR }}'}, headers: {x-note: 'a {{ args.note }}'}, response: {pointer: /line}",
        ),
        (
            "create",
            "method: POST, path: /items, body: {title: '{{ args.title }}', n: '{{ args.n }}', fixed: [1, 'x-{{ args.title }}'], none: '{{ args.none }}'}",
        ),
        ("text", "method: PUT, effect: idempotent, path: /text, body: 'Hello {{ args.name }}'"),
    ]);
    let hostile = json!({"id": "../../etc?x#y", "part": "a/b%2f\\", "q": "1&key=stolen#", "list": [1, "b&c"], "note": "n"});
    let calls = [
        ("item", hostile),
        ("item", json!({"id": "..", "part": "x", "note": "n"})),
        ("item", json!({"id": "", "part": "x", "note": "n"})),
        ("item", json!({"id": "x", "part": "x", "note": "a\r\nevil: b"})),
        ("item", json!({"part": "x", "note": "n"})),
        ("create", json!({"title": "\"}, {\"evil\": \"", "n": 5})),
        ("text", json!({"name": "{% raw %}{{ env.CARGO_MANIFEST_DIR }}{% endraw %}"})),
    ];
    let service = caller(&mock.url, &tools, "{autonomy: full}", &calls).start(db).await;
    let run = service.run("caller", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let rows = rows(&service, &run).await;
    let line = "GET /api/items/..%2F..%2Fetc%3Fx%23y/a%2Fb%252f%5C?key=[redacted]&list=1&list=b%26c&q=1%26key%3Dstolen%23";
    assert_eq!(result(&rows[0]), line, "{:#}", rows[0]);
    for (row, why) in rows[1..5].iter().zip(["`..`", "empty", "one line", "undefined"]) {
        assert!(result(row).contains(why), "{why}: {row:#}");
    }
    let [item] = &mock.seen("/api/items/")[..] else { panic!("{:?}", mock.log) };
    assert_eq!(item.header("authorization"), format!("Bearer {secret}"));
    assert_eq!(item.header("x-note"), "a n");
    assert_eq!(item.header("idempotency-key"), "");
    let created = &mock.seen("POST /api/items")[0];
    let body: Value = serde_json::from_str(&created.body).unwrap();
    let title = "\"}, {\"evil\": \"";
    assert_eq!(body, json!({"title": title, "n": 5, "fixed": [1, format!("x-{title}")]}));
    assert_eq!(created.header("content-type"), "application/json");
    assert_eq!(created.header("idempotency-key").len(), 64);
    let text = &mock.seen("PUT /api/text")[0];
    assert_eq!(text.body, "Hello {{ env.CARGO_MANIFEST_DIR }}");
    // The service echoes the secret, which is shown to no reader.
    assert!(result(&rows[5]).contains("[redacted]"), "{:#}", rows[5]);
    let run_path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    for path in ["", "/tool-calls?limit=200", "/messages", "/events?limit=500"] {
        let answer = service.get(&format!("{run_path}{path}")).await;
        assert!(!answer.body.to_string().contains(&secret), "{path}: {:#}", answer.body);
    }
    for path in ["/v1/tools", "/v1/audit?limit=200"] {
        let answer = service.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert!(!answer.body.to_string().contains(&secret), "{path}: {:#}", answer.body);
    }
    assert!(!service.log().contains(&secret), "{}", service.log());
}

async fn answers_are_followed_and_refused(db: Db) {
    let mock = Mock::start().await;
    let get = |path: &str| format!("method: GET, effect: read, path: {path}");
    let tools = tools(&[
        ("inside", &get("/inside")),
        ("outside", &get("/outside")),
        ("busy", &get("/busy")),
        ("busy-post", "method: POST, path: /busy-post"),
        ("wrong", &get("/wrong")),
        ("nothing", &get("/nothing")),
        ("short", &format!("{}, response: {{max_bytes: 10}}", get("/echo"))),
        ("items", &format!("{}, response: {{pointer: /items/0}}", get("/echo"))),
        ("wei", &get("/wei")),
        ("lacks", &format!("{}, response: {{pointer: /none}}", get("/echo"))),
        ("drawn", "method: POST, path: /image"),
    ]);
    let names = [
        "inside",
        "outside",
        "busy",
        "busy-post",
        "wrong",
        "nothing",
        "short",
        "items",
        "wei",
        "lacks",
        "drawn",
    ];
    let calls = names.map(|name| (name, json!({})));
    let service = caller(&mock.url, &tools, "{autonomy: full}", &calls).start(db).await;
    let run = service.run("caller", &json!({})).await;
    let rows = rows(&service, &run).await;
    let expected = [
        "GET /api/echo",
        "redirects to another host",
        "503 Service Unavailable. It is at fault itself; try again later.",
        "503 Service Unavailable. It is at fault itself. It is unknown whether the call took effect",
        "q is too short",
        "204 No Content",
        "bytes of",
        "{\"id\":1}",
        "36893488147419103232",
        "nothing at /none",
        "answered 200 OK: it has done what it was asked for. The answer is not text",
    ];
    for ((row, name), expected) in rows.iter().zip(names).zip(expected) {
        assert!(result(row).contains(expected), "{name}: {row:#}");
        assert!(!result(row).contains(&std::env::var(SECRET).unwrap()), "{row:#}");
    }
}

async fn a_request_is_repeated_as_often_as_the_options_say(db: Db) {
    let mock = Mock::start().await;
    let get = |path: &str| format!("method: GET, effect: read, path: {path}");
    let names = ["plain", "none", "two", "once", "long", "until", "post"];
    let tools = tools(&[
        ("plain", &get("/busy, query: {w: plain}")),
        ("none", &get("/busy, query: {w: none}")),
        ("two", &get("/busy, query: {w: two}")),
        ("once", &get("/busy-once")),
        ("long", &get("/busy-long")),
        ("until", &get("/busy-until")),
        ("post", "method: POST, path: /busy-post"),
    ]);
    let options = "{http:api/none: {retries: 0}, http:api/two: {retries: 2}, http:api/once: {retries: 2}, \
                   http:api/long: {retries: 2}, http:api/until: {retries: 2}}";
    let governance = format!("{{autonomy: full}}\ntool_options: {options}");
    let calls = names.map(|name| (name, json!({})));
    let service = caller(&mock.url, &tools, &governance, &calls).start(db).await;
    let run = service.run("caller", &json!({})).await;
    let rows = rows(&service, &run).await;
    let failed = rows.iter().map(|row| row["is_error"].as_bool().unwrap()).collect::<Vec<_>>();
    assert_eq!(failed, [true, true, true, false, true, true, true], "{rows:#?}");
    let seen = ["w=plain", "w=none", "w=two", "busy-once", "busy-long", "busy-until", "busy-post"];
    let seen = seen.map(|part| mock.seen(part).len());
    assert_eq!(seen, [1, 1, 3, 2, 1, 1, 1], "one, and as many again as `retries` says");
}

async fn denied_and_unapproved_requests_are_not_sent(db: Db) {
    let mock = Mock::start().await;
    let tools = tools(&[
        ("look", "method: GET, effect: read, path: /look"),
        ("drop", "method: DELETE, destructive: true, path: /drop"),
    ]);
    let denying = "{autonomy: full, network: {deny: ['127.0.0.1']}}";
    let calls = [("look", json!({}))];
    let service = caller(&mock.url, &tools, denying, &calls).start(db).await;
    let run = service.run("caller", &json!({})).await;
    let blocked = &rows(&service, &run).await[0];
    assert_eq!(blocked["decision"], "blocked", "{blocked:#}");
    assert!(result(blocked).contains("network.deny"), "{blocked:#}");
    assert_eq!(mock.seen("/api").len(), 0);

    let service = caller(&mock.url, &tools, "{}", &[("look", json!({})), ("drop", json!({}))])
        .start(db)
        .await;
    let parked = service.post("/v1/agents/caller/invoke-iterative", &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let pending = &parked.body["pending"][0];
    assert_eq!(pending["tool"], "http:api/drop", "{:#}", parked.body);
    assert_eq!(mock.seen("/api/drop").len(), 0);
    let run = format!("/v1/runs/{}", parked.body["run_id"].as_str().unwrap());
    let call = pending["call_id"].as_str().unwrap();
    service.post(&format!("{run}/tool-calls/{call}/approve"), &json!({})).await;
    service.until(&run, |run| run["status"] == "completed").await;
    assert_eq!((mock.seen("/api/drop").len(), mock.seen("/api/look").len()), (1, 1));
}

async fn hostile_services_end_in_results(db: Db) {
    let mock = Mock::start().await;
    let names =
        ["hang", "drip", "bomb", "endless", "brotli", "image", "not-json", "headers", "deep"];
    let entries: Vec<(&str, String)> = names
        .iter()
        .map(|name| {
            let pointer = if *name == "not-json" || *name == "deep" {
                ", response: {pointer: /a}"
            } else {
                ""
            };
            (*name, format!("method: GET, effect: read, path: /{name}{pointer}"))
        })
        .collect();
    let entries: Vec<(&str, &str)> =
        entries.iter().map(|(name, rest)| (*name, rest.as_str())).collect();
    let calls = names.map(|name| (name, json!({})));
    let governance = "{autonomy: full}\n\
                      tool_options: {http:api/hang: {timeout_seconds: 2}, http:api/drip: {timeout_seconds: 2}}";
    let service = caller(&mock.url, &tools(&entries), governance, &calls).start(db).await;
    let before = service.peak_memory_mib();
    let run = service.run("caller", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let expected = [
        "did not finish within 2 seconds",
        "did not finish within 2 seconds",
        "too large; request less",
        "too large; request less",
        "encoding that was not asked for",
        "not text",
        "not JSON",
        "an invalid HTTP response",
        "not JSON",
    ];
    for ((row, name), expected) in rows(&service, &run).await.iter().zip(names).zip(expected) {
        assert!(result(row).contains(expected), "{name}: {row:#}");
    }
    let grown = service.peak_memory_mib() - before;
    assert!(grown < 128, "{grown} MiB more");
}

/// A document as a large public API has it: many resources, each with the usual operations.
fn large_api(base: &str) -> Value {
    let mut paths = serde_json::Map::new();
    let mut schemas = serde_json::Map::new();
    let reference = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string"}});
    for n in 0..30 {
        let (resource, kind) = (format!("resource{n}"), format!("Kind{n}"));
        let next = reference(&format!("Kind{}", (n + 1) % 30));
        schemas.insert(
            kind.clone(),
            json!({
                "type": "object",
                "required": ["id", "title"],
                "properties": {
                    "id": {"type": "string", "readOnly": true},
                    "title": {"type": "string", "maxLength": 200, "example": "x"},
                    "state": {"type": "string", "enum": ["open", "closed"], "nullable": true},
                    "labels": {"type": "array", "items": {"type": "string"}},
                    "related": {"type": "array", "items": next}
                }
            }),
        );
        let body = json!({"required": true, "content": {"application/json": {"schema": reference(&kind)}}});
        let answer = json!({"200": {"description": "It.", "content": {"application/json": {"schema": reference(&kind)}}}});
        let page = json!([
            {"name": "page", "in": "query", "schema": {"type": "integer", "minimum": 1}},
            {"name": "per-page", "in": "query", "schema": {"type": "integer", "default": 30}},
            {"name": "state", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}}
        ]);
        let of = |verb: &str| format!("{resource}/{verb}");
        paths.insert(format!("/{resource}"), json!({
            "get": {"operationId": of("list"), "summary": format!("Lists {resource}."), "parameters": page, "responses": answer},
            "post": {"operationId": of("create"), "summary": format!("Creates a {resource}."), "requestBody": body, "responses": answer}
        }));
        paths.insert(
            format!("/{resource}/{{id}}"),
            json!({
                "parameters": [id],
                "get": {"operationId": of("get"), "responses": answer},
                "put": {"operationId": of("replace"), "requestBody": body, "responses": answer},
                "delete": {"operationId": of("delete"), "responses": answer}
            }),
        );
    }
    json!({
        "openapi": "3.0.3",
        "info": {"title": "Large", "version": "1"},
        "servers": [{"url": format!("{base}/api")}],
        "paths": paths,
        "components": {"schemas": schemas}
    })
}

/// An operation that cannot be called is named, and keeps no other from being written. Of a server without
/// an address, the path is kept.
async fn left_out(dir: &Path, document: &Value) {
    let mut odd = document.clone();
    odd["servers"] = json!([{"url": "/api/v1/"}]);
    let binary = json!({"required": true, "content": {"application/octet-stream": {}}});
    odd["paths"]["/upload"] = json!({"post": {"operationId": "upload", "requestBody": binary}});
    let filter = |required: bool| json!({"name": "filter", "in": "query", "required": required, "schema": {"type": "object"}});
    for (path, required) in [("/some", false), ("/none", true)] {
        odd["paths"][path] =
            json!({"get": {"operationId": path[1..], "parameters": [filter(required)]}});
    }
    std::fs::write(dir.join("odd.json"), odd.to_string()).unwrap();
    let partly = command(dir)
        .args(["tools", "import", "odd.json", "--operation", "upload"])
        .args(["--operation", "resource7/get", "--operation", "some", "--operation", "none"])
        .output()
        .await
        .unwrap();
    let (told, said) = (String::from_utf8_lossy(&partly.stdout), partly.stderr.as_slice());
    let said = String::from_utf8_lossy(said);
    assert!(partly.status.success() && told.contains("resource7_get"), "{told}{said}");
    let base = "# base_url: https://…/api/v1   # the document names the path alone\n";
    assert!(told.starts_with(base), "{told}");
    let why = "left out: the operation \"upload\" cannot be called: its body is needed, but \
               application/octet-stream cannot be sent";
    assert!(!told.contains("upload") && said.contains(why), "{told}{said}");
    let why =
        "left out: the operation \"none\" cannot be called: the parameter \"filter\" is an object";
    assert!(said.contains(why), "{said}");
    assert!(told.contains("\"some\"") && !told.contains("filter"), "{told}");
    let why = "left out of the operation \"some\": the parameter \"filter\": it is an object";
    assert!(said.contains(why), "{said}");
    assert!(told.contains("description: \"GET /some\""), "{told}");
    let many = ["--operation", "resource7/get"].repeat(4000);
    let refused =
        command(dir).args(["tools", "import", "odd.json"]).args(many).output().await.unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("do not fit in one file of tools, import fewer"), "{said}");
}

async fn an_api_is_imported_and_called(db: Db) {
    let mock = Mock::start().await;
    let document = large_api(&mock.url);
    let ids: Vec<String> = document["paths"]
        .as_object()
        .unwrap()
        .values()
        .flat_map(|path| path.as_object().unwrap().values())
        .filter_map(|operation| Some(operation.get("operationId")?.as_str()?.to_owned()))
        .collect();
    assert_eq!(ids.len(), 150);
    let dir = tempfile::TempDir::new().unwrap();
    std::fs::write(dir.path().join("large.json"), document.to_string()).unwrap();
    let listed =
        command(dir.path()).args(["tools", "import", "large.json"]).output().await.unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(ids.iter().all(|id| listed.contains(id.as_str())), "{listed}");
    let mut import = command(dir.path());
    import.args(["tools", "import", "large.json", "--output", "api.yaml"]);
    for id in &ids {
        import.args(["--operation", id]);
    }
    let imported = import.output().await.unwrap();
    assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
    let written = std::fs::read_to_string(dir.path().join("api.yaml")).unwrap();
    let unknown = command(dir.path())
        .args(["tools", "import", "large.json", "--operation", "nope"])
        .output()
        .await
        .unwrap();
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no such operation: nope"));

    left_out(dir.path(), &document).await;

    let calls = [
        ("resource7_get", json!({"id": "a/b"})),
        ("resource7_list", json!({"page": 2, "state": ["open", "closed"], "per-page": 5})),
        (
            "resource7_create",
            json!({"body": {"title": "T", "state": null, "related": [{"title": "U"}]}}),
        ),
        ("resource7_create", json!({"body": {"state": "open"}})),
        ("resource29_replace", json!({"id": "1", "body": {"title": "T"}})),
    ];
    let service = caller(&mock.url, "[]", "{autonomy: full}", &calls)
        .tools("api", &written)
        .tools("broken", "base_url: nowhere\ntools: [{name: a, method: GET, path: /}]")
        .start(db)
        .await;
    let run = service.run("caller", &json!({})).await;
    let rows = rows(&service, &run).await;
    let lines: Vec<String> = mock.seen("/api/").iter().map(|seen| seen.line.clone()).collect();
    assert_eq!(
        lines,
        [
            "GET /api/resource7/a%2Fb",
            "GET /api/resource7?page=2&per-page=5&state=open&state=closed",
            "POST /api/resource7",
            "PUT /api/resource29/1",
        ],
        "{rows:#?}"
    );
    let body: Value = serde_json::from_str(&mock.seen("POST /api/resource7")[0].body).unwrap();
    assert_eq!(body, json!({"title": "T", "state": null, "related": [{"title": "U"}]}));
    assert!(result(&rows[3]).contains("title"), "{:#}", rows[3]);
    let all = service.get("/v1/tools").await.body;
    let ours = all["data"].as_array().unwrap().iter().filter(|tool| tool["source"] == "http:api");
    assert_eq!(ours.count(), 150);
    let ready = service.get("/readyz").await.body;
    let broken = &ready["definitions"][0];
    assert_eq!(broken["file"], "tools/broken.yaml", "{ready:#}");
    assert!(broken["error"].as_str().unwrap().contains("line 1, column 1: base_url: is not a URL"));
    let checked = command(service.dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(!checked.status.success() && said.contains("tools/broken.yaml: line 1"), "{said}");
}

/// An API whose bodies are forms, as those of older services are.
fn api_of_forms(base: &str) -> Value {
    let text = json!({"type": "string"});
    let form = |members: Value| json!({"content": {"application/x-www-form-urlencoded": {"schema": {"type": "object", "properties": members}}}});
    let send = form(json!({
        "To": text, "Body": text, "MediaUrl": {"type": "array", "items": text},
        "ValidityPeriod": {"type": "integer"}, "Metadata": {"type": "object", "properties": {"a": text}}
    }));
    json!({
        "openapi": "3.0.1",
        "servers": [{"url": base}],
        "paths": {
            "/Messages": {
                "get": {"operationId": "ListMessages"},
                "post": {"operationId": "CreateMessage", "requestBody": send}
            },
            "/Notes": {"post": {"operationId": "AddNote",
                "requestBody": {"content": {"application/xml": {}}}}},
            "/Files": {"post": {"operationId": "AddFile",
                "requestBody": {"required": true, "content": {"multipart/form-data": {}}}}}
        }
    })
}

async fn bodies_are_sent_as_forms(db: Db) {
    let mock = Mock::start().await;
    let dir = tempfile::TempDir::new().unwrap();
    std::fs::write(dir.path().join("api.json"), api_of_forms(&mock.url).to_string()).unwrap();
    let mut import = command(dir.path());
    import.args(["tools", "import", "api.json", "--output", "api.yaml"]);
    for id in ["ListMessages", "CreateMessage", "AddNote", "AddFile"] {
        import.args(["--operation", id]);
    }
    let imported = import.output().await.unwrap();
    let said = String::from_utf8_lossy(&imported.stderr).into_owned();
    assert!(imported.status.success(), "{said}");
    for line in [
        "left out: the operation \"AddFile\" cannot be called: its body is needed, but \
         multipart/form-data cannot be sent",
        "left out of the operation \"AddNote\": its body: application/xml cannot be sent",
        "left out of the operation \"CreateMessage\": the member \"Metadata\" of its form: it is an \
         object",
    ] {
        assert!(said.contains(line), "{line}\n{said}");
    }
    let written = std::fs::read_to_string(dir.path().join("api.yaml")).unwrap();
    let own = format!(
        "base_url: {}\ntools:\n  - {{name: note, method: POST, path: /own, body_format: form, \
         body: {{text: '{{{{ args.text }}}}', by: agent, tags: ['{{{{ args.text }}}}', b]}}, \
         input_schema: {{type: object, properties: {{text: {{type: string}}}}}}}}\n",
        mock.url
    );
    let message =
        json!({"To": "+1 2&3", "Body": "a=ü", "MediaUrl": ["u 1", "u2"], "ValidityPeriod": 5});
    let calls = [
        ("http:api/CreateMessage", json!({"body": message})),
        ("http:api/CreateMessage", json!({})),
        ("http:api/CreateMessage", json!({"body": {"To": "1", "Extra": {"a": 1}}})),
        ("http:api/AddNote", json!({})),
        ("http:own/note", json!({"text": "x y"})),
        ("http:own/note", json!({})),
        ("http:ref/CreateMessage", json!({"body": {"To": "9"}})),
    ];
    let steps = calls
        .iter()
        .map(|(tool, arguments)| json!({"tool_calls": [{"tool": tool, "arguments": arguments}]}));
    let steps = steps.chain([json!({"text": "done"})]).collect::<Vec<_>>();
    let scenario = json!({"steps": steps});
    let agent = "\nmodel: scripted/caller\ninstructions: Call.\n\
                 tools: ['http:api/*', 'http:own/*', 'http:ref/*']\n\
                 enable_double_confirmation: false\ngovernance: {autonomy: full}\n";
    let service = Setup::new()
        .agent("caller", agent)
        .scenario("caller", &scenario.to_string())
        .tools("api", &written)
        .tools("own", &own)
        .tools(
            "ref",
            "openapi: {file: api.json, operations: [ListMessages, CreateMessage, AddNote]}",
        )
        .script("api.json", &api_of_forms(&mock.url).to_string())
        .start(db)
        .await;
    let run = service.run("caller", &json!({})).await;
    let rows = rows(&service, &run).await;
    let sent = |path: &str| {
        let seen = mock.seen(path).into_iter();
        seen.map(|seen| (seen.header("content-type").to_owned(), seen.body)).collect::<Vec<_>>()
    };
    let form = "application/x-www-form-urlencoded".to_owned();
    let whole = "To=%2B1+2%263&Body=a%3D%C3%BC&MediaUrl=u+1&MediaUrl=u2&ValidityPeriod=5";
    assert_eq!(
        sent("POST /Messages"),
        [
            (form.clone(), whole.into()),
            (String::new(), String::new()),
            (form.clone(), "To=9".into())
        ],
        "{rows:#?}"
    );
    assert!(result(&rows[2]).contains("Extra must be a text, a number"), "{:#}", rows[2]);
    assert_eq!(sent("POST /Notes"), [(String::new(), String::new())]);
    let notes = ["text=x+y&by=agent&tags=x+y&tags=b", "by=agent&tags=b"];
    assert_eq!(sent("POST /own"), notes.map(|body| (form.clone(), body.to_owned())));
    let tools = service.get("/v1/tools").await.body;
    for name in ["http:api/ListMessages", "http:ref/ListMessages"] {
        let tool = tools["data"].as_array().unwrap().iter().find(|tool| tool["name"] == name);
        let tool = tool.unwrap_or_else(|| panic!("{name}: {tools:#}"));
        assert_eq!(
            (&tool["effect"], &tool["description"]),
            (&json!("read"), &json!("GET /Messages"))
        );
    }
    let checked = command(service.dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    let left_out =
        "warning: tools/ref.yaml: openapi.operations[2]: left out of \"AddNote\": its body";
    assert!(checked.status.success() && said.contains(left_out), "{said}");
    service.until_logged("lacks a part of its operation").await;
}

async fn texts_of_json_and_joined_lists_are_sent_as_such(db: Db) {
    let mock = Mock::start().await;
    let list = json!({"type": "array", "items": {"type": "integer"}});
    let parameter = |name: &str, place: &str, style: &str, explode: bool| {
        json!({"name": name, "in": place, "required": place == "path", "style": style,
               "explode": explode, "schema": list})
    };
    let document = json!({
        "openapi": "3.1.0",
        "servers": [{"url": mock.url}],
        "paths": {"/lists/{ids}": {"get": {"operationId": "lists", "parameters": [
            parameter("ids", "path", "simple", false),
            parameter("csv", "query", "form", false),
            parameter("each", "query", "form", true),
            parameter("spaced", "query", "spaceDelimited", false),
            parameter("piped", "query", "pipeDelimited", false),
            parameter("odd", "query", "tabDelimited", false),
            parameter("x-ids", "header", "simple", false),
        ]}}}
    });
    let own = format!(
        "base_url: {}\ntools:\n\
         - {{name: made, method: POST, path: /made, body: '{{\"v\": {{{{ args.v | tojson }}}}}}'}}\n\
         - {{name: said, method: POST, path: /said, body: 'It says {{{{ args.v }}}}.'}}\n\
         - {{name: typed, method: POST, path: /typed, headers: {{content-type: text/x}}, body: '[{{{{ args.v | tojson }}}}]'}}\n",
        mock.url
    );
    let all = json!({"ids": [1, 2], "csv": [1, 2], "each": [1, 2], "spaced": [1, 2],
        "piped": [1, 2], "x-ids": [1, 2]});
    let steps = json!({"steps": [
        {"tool_calls": [{"tool": "http:own/made", "arguments": {"v": "a \"b\""}}]},
        {"tool_calls": [{"tool": "http:own/said", "arguments": {"v": "x"}}]},
        {"tool_calls": [{"tool": "http:own/typed", "arguments": {"v": "x"}}]},
        {"tool_calls": [{"tool": "http:ref/lists", "arguments": all}]},
        {"tool_calls": [{"tool": "http:ref/lists", "arguments": {"ids": [3]}}]},
        {"text": "done"}]});
    let agent = "\nmodel: scripted/caller\ninstructions: Call.\n\
                 tools: ['http:own/*', 'http:ref/*']\n\
                 enable_double_confirmation: false\ngovernance: {autonomy: full}\n";
    let service = Setup::new()
        .agent("caller", agent)
        .scenario("caller", &steps.to_string())
        .tools("own", &own)
        .tools("ref", "openapi: {file: api.json, operations: [lists]}")
        .script("api.json", &document.to_string())
        .start(db)
        .await;
    let run = service.run("caller", &json!({})).await;
    let rows = rows(&service, &run).await;
    for (path, kind, body) in [
        ("/made", "application/json", r#"{"v": "a \"b\""}"#),
        ("/said", "text/plain; charset=utf-8", "It says x."),
        ("/typed", "text/x", r#"["x"]"#),
    ] {
        let seen = &mock.seen(path)[0];
        assert_eq!((seen.header("content-type"), seen.body.as_str()), (kind, body), "{rows:#?}");
    }
    let seen = mock.seen("/lists/");
    assert_eq!(
        seen.iter().map(|seen| seen.line.as_str()).collect::<Vec<_>>(),
        ["GET /lists/1%2C2?csv=1%2C2&each=1&each=2&piped=1%7C2&spaced=1+2", "GET /lists/3",],
        "{rows:#?}"
    );
    assert_eq!((seen[0].header("x-ids"), seen[1].header("x-ids")), ("1,2", ""));
    let checked = command(service.dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    let left_out =
        "left out of \"lists\": the parameter \"odd\": the style \"tabDelimited\" cannot be sent";
    assert!(checked.status.success() && said.contains(left_out), "{said}");
}
