//! What other programs build on: an invocation that is always a stream, a dry run of its own, lists
//! of sessions and their messages, and pages of other origins.
//!
//! | | streams | dry run | sessions | other origins |
//! |---|---|---|---|---|
//! | children, handoffs | as any run (delegation.rs) | shown as a tool | not listed: they are no turns | – |
//! | parked runs | the stream stays (streaming.rs) | never parks | listed from the start | – |
//! | a key twice | the same run, replayed | nothing to replay | – | the header is allowed |
//! | tenants, scopes | as invocations (api.rs) | also `agents:read` | others' are 404 or absent | the key decides |
//! | budgets, skills | as invocations | shown | – | – |
//! | compaction | – | – | the summary has its event | – |
//! | crash, replica | as any run | stores nothing | read from the store | no state |
//! | console, command line | – | – | – | same origin, no key kept |

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    the_stream_operation_answers_events_for_every_accept_header,
    the_dry_run_operation_answers_what_the_field_answers,
    sessions_are_listed_newest_first,
    the_messages_of_a_session_are_paged,
}

const CHAT: &str = "
model: scripted/chat
tools: [file_ops]
enable_double_confirmation: false
";

const SCENARIO: &str = "
steps:
  - {text: Looking., tool_calls: [{tool: file_ops, arguments: {operation: list}}]}
  - {text: 'heard {{ inputs.say }}'}
";

fn setup() -> Setup {
    Setup::new().agent("chat", CHAT).agent("other", CHAT).scenario("chat", SCENARIO)
}

async fn key(service: &Service, body: &Value) -> String {
    let made = service.post("/v1/keys", body).await;
    assert_eq!(made.status, 201, "{:#}", made.body);
    made.body["key"].as_str().unwrap().to_owned()
}

/// The frames of a stream: id (where there is one), type and data.
fn frames(stream: &str) -> Vec<(Option<i64>, String, Value)> {
    let field = |frame: &str, name: &str| {
        let line = frame.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim_start_matches(": ").to_owned())
    };
    let frames = stream.split("\n\n").filter(|frame| frame.contains("data: "));
    frames
        .map(|frame| {
            let data = serde_json::from_str(&field(frame, "data").unwrap()).unwrap();
            let id = field(frame, "id").map(|id| id.parse().unwrap());
            (id, field(frame, "event").unwrap(), data)
        })
        .collect()
}

async fn the_stream_operation_answers_events_for_every_accept_header(db: Db) {
    let service = setup().start(db).await;
    let body = json!({"inputs": {"say": "hello"}});
    for accept in ["application/json", "*/*", "text/event-stream", "image/png"] {
        let request = service.request(Method::POST, "/v1/agents/chat/stream").json(&body);
        let response = request.header("accept", accept).send().await.unwrap();
        assert_eq!(response.status(), 200, "{accept}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let run = response.headers()["x-run-id"].to_str().unwrap().to_owned();
        let frames = frames(&response.text().await.unwrap());
        let numbers: Vec<i64> = frames.iter().filter_map(|(id, ..)| *id).collect();
        assert_eq!(numbers, (1..=i64::try_from(numbers.len()).unwrap()).collect::<Vec<_>>());
        let (_, kind, last) = frames.last().unwrap();
        assert_eq!((kind.as_str(), &last["run_id"]), ("run.completed", &json!(run)));
        assert_eq!(last["data"]["run"]["output"], json!({"result": "heard hello"}));
        assert_eq!(last["data"]["termination_reason"], "completed");
        let responded = frames.iter().find(|(_, kind, _)| kind == "model.responded").unwrap();
        let usage = responded.2["data"]["usage"].as_object().unwrap();
        assert!(usage.contains_key("cost_usd") && usage.contains_key("total_tokens"), "{usage:?}");
        let listed = service.get(&format!("/v1/runs/{run}/events")).await.body;
        assert_eq!(listed["data"][0], frames[0].2, "a page says the same");
    }
    let dry = service.post("/v1/agents/chat/stream", &json!({"dry_run": true})).await;
    assert_eq!((dry.status.as_u16(), &dry.body["code"]), (422, &json!("INVALID_OVERRIDE")));
    assert_eq!(dry.body["errors"][0]["pointer"], "/dry_run");
    let keyed = |path: &str, body: &Value| {
        let request = service.request(Method::POST, path).header("idempotency-key", "one");
        request.json(body).send()
    };
    let first = keyed("/v1/agents/chat/stream", &body).await.unwrap();
    let again = keyed("/v1/agents/chat/stream", &body).await.unwrap();
    assert_eq!(again.headers()["idempotency-replayed"], "true");
    assert_eq!(first.headers()["x-run-id"], again.headers()["x-run-id"]);
    let elsewhere = keyed("/v1/agents/chat/invoke-iterative", &body).await.unwrap();
    assert_eq!(elsewhere.status(), 422, "another route is another request");
}

async fn the_dry_run_operation_answers_what_the_field_answers(db: Db) {
    let service = setup().start(db).await;
    let body = json!({"inputs": {"say": "hello"}, "max_iterations": 2});
    let own = service.post("/v1/agents/chat/dry-run", &body).await;
    assert_eq!(own.status, 200, "{:#}", own.body);
    let mut with = body.clone();
    with["dry_run"] = true.into();
    let field = service.post("/v1/agents/chat/invoke-iterative", &with).await;
    assert_eq!(own.body, field.body);
    assert_eq!(
        (&own.body["dry_run"], &own.body["limits"]["max_iterations"]),
        (&json!(true), &json!(2))
    );
    let runs = service.get("/v1/runs").await.body;
    assert_eq!(runs["data"], json!([]), "nothing is stored");
    let refused = service.post("/v1/agents/chat/dry-run", &json!({"max_iterations": 0})).await;
    assert_eq!(refused.status, 422);
    let unknown = service.post("/v1/agents/nobody/dry-run", &json!({})).await;
    assert_eq!(unknown.status, 404);
    let invoker = key(&service, &json!({"name": "k", "scopes": ["agents:invoke"]})).await;
    let url = service.url("/v1/agents/chat/dry-run");
    let refused = answer(service.http.post(url).bearer_auth(invoker).json(&body)).await;
    assert_eq!(refused.status, 403, "it shows the definition");
}

async fn say(service: &Service, agent: &str, what: &str, session: &str) -> Value {
    service.run(agent, &json!({"inputs": {"say": what}, "session_id": session})).await
}

fn ids(answer: &Answer) -> Vec<&str> {
    let rows = answer.body["data"].as_array().unwrap();
    rows.iter().map(|row| row["session_id"].as_str().unwrap()).collect()
}

async fn sessions_are_listed_newest_first(db: Db) {
    let mut service = setup().start(db).await;
    assert_eq!(service.get("/v1/sessions").await.body, json!({"data": [], "next_cursor": null}));
    for (agent, session) in [("chat", "a"), ("chat", "b"), ("other", "c"), ("chat", "a")] {
        say(&service, agent, "x", session).await;
    }
    service.run("chat", &json!({"inputs": {"say": "alone"}})).await;
    let all = service.get("/v1/sessions").await;
    assert_eq!(ids(&all), ["a", "c", "b"]);
    let newest = &all.body["data"][0];
    assert_eq!((&newest["agent"], &newest["run_count"]), (&json!("chat"), &json!(2)));
    let one = service.get("/v1/sessions/a").await.body;
    for field in ["session_id", "agent", "run_count", "runs", "created_at", "last_run_at"] {
        assert_eq!(newest[field], one[field], "{field}");
    }
    assert_eq!(newest["runs"].as_array().unwrap().len(), 2, "{newest}");
    assert!(newest.get("messages").is_none(), "{newest}");
    for run in 1..=11 {
        say(&service, "chat", &run.to_string(), "b").await;
    }
    let all = service.get("/v1/sessions").await;
    let (many, one) = (&all.body["data"][0], service.get("/v1/sessions/b").await.body);
    let (newest, of_one) = (many["runs"].as_array().unwrap(), one["runs"].as_array().unwrap());
    assert_eq!((&many["run_count"], &one["run_count"]), (&json!(12), &json!(12)));
    assert_eq!((&newest[..], of_one.len()), (&of_one[2..], 12), "the newest ten");
    assert_eq!(all.body["data"][1]["runs"].as_array().unwrap().len(), 2);
    say(&service, "chat", "x", "a").await;
    say(&service, "other", "x", "c").await;
    say(&service, "chat", "x", "a").await;
    assert_eq!(ids(&service.get("/v1/sessions?agent=chat").await), ["a", "b"]);
    assert_eq!(ids(&service.get("/v1/sessions?agent=nobody").await), [""; 0]);
    let mut path = "/v1/sessions?limit=1".to_owned();
    let mut paged = Vec::new();
    loop {
        let page = service.get(&path).await;
        paged.extend(ids(&page).into_iter().map(str::to_owned));
        let Some(cursor) = page.body["next_cursor"].as_str() else { break };
        path = format!("/v1/sessions?limit=1&cursor={cursor}");
    }
    assert_eq!(paged, ["a", "c", "b"]);
    let other = json!({"name": "k", "tenant": "other", "scopes": ["sessions:read"]});
    service.key = key(&service, &other).await;
    assert_eq!(ids(&service.get("/v1/sessions").await), [""; 0]);
    assert_eq!(service.get("/v1/sessions/a/messages").await.status, 404);
}

async fn the_messages_of_a_session_are_paged(db: Db) {
    let service = setup().start(db).await;
    let mut runs = Vec::new();
    for turn in 0..10 {
        runs.push(say(&service, "chat", &turn.to_string(), "s").await["run_id"].clone());
    }
    let whole = service.get("/v1/sessions/s").await.body["messages"].as_array().unwrap().clone();
    let mut path = "/v1/sessions/s/messages?limit=7".to_owned();
    let mut paged = Vec::new();
    loop {
        let page = service.get(&path).await;
        assert_eq!(page.status, 200, "{:#}", page.body);
        paged.extend(page.body["data"].as_array().unwrap().clone());
        let Some(cursor) = page.body["next_cursor"].as_str() else { break };
        path = format!("/v1/sessions/s/messages?limit=7&cursor={cursor}");
    }
    let places: Vec<(&Value, i64)> = paged
        .iter()
        .map(|message| (&message["run_id"], message["seq"].as_i64().unwrap()))
        .collect();
    for (number, message) in paged.iter().enumerate() {
        let seq = message["seq"].as_i64().unwrap();
        let run = message["run_id"].as_str().unwrap();
        let event =
            &service.get(&format!("/v1/runs/{run}/events?after={}", seq - 1)).await.body["data"][0];
        assert_eq!((&event["seq"], &event["at"]), (&message["seq"], &message["at"]), "{number}");
        let kind = match message["role"].as_str().unwrap() {
            "user" => "run.started",
            "assistant" => "model.responded",
            "tool" => "tool_call.completed",
            role => panic!("a message of {role}"),
        };
        assert_eq!(event["type"], kind, "{message:#}");
    }
    assert_eq!(places.len(), 40, "user, call, result and answer of each run");
    assert!(places.chunks(4).zip(&runs).all(|(four, run)| four.iter().all(|(of, _)| *of == run)));
    let bare: Vec<Value> = paged
        .iter()
        .map(|message| {
            let mut message = message.as_object().unwrap().clone();
            message.retain(|name, _| !["run_id", "seq", "at"].contains(&name.as_str()));
            Value::Object(message)
        })
        .collect();
    assert_eq!(bare, whole);
    for wrong in ["bm90IGE", "dDEuMDE"] {
        let refused = service.get(&format!("/v1/sessions/s/messages?cursor={wrong}")).await;
        assert_eq!(refused.status, 400);
    }
}

const PAGE: &str = "https://app.example.com";

#[tokio::test]
async fn pages_of_listed_origins_use_the_api() {
    let listed = format!("[server]\ncors_origins = [\"{PAGE}\", \"http://localhost:3000\"]\n");
    let service = setup().config(&listed).start(Db::Sqlite).await;
    let preflight = |origin: &'static str| {
        let request = service.http.request(Method::OPTIONS, service.url("/v1/agents/chat/stream"));
        let request =
            request.header("origin", origin).header("access-control-request-method", "POST");
        request.header("access-control-request-headers", "authorization,content-type").send()
    };
    let allowed = preflight(PAGE).await.unwrap();
    assert_eq!(allowed.status(), 204);
    let header = |name: &str| allowed.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(header("access-control-allow-origin"), PAGE);
    assert!(header("access-control-allow-methods").contains("POST"));
    let may_send = header("access-control-allow-headers");
    assert!(["authorization", "if-range"].iter().all(|name| may_send.contains(name)), "{may_send}");
    assert!(!allowed.headers().contains_key("access-control-allow-credentials"));
    assert_eq!(allowed.headers()["vary"], "origin");
    for foreign in ["https://evil.example.com", "https://app.example.com.evil.example", "null"] {
        let refused = preflight(foreign).await.unwrap();
        assert_eq!(refused.status(), 405, "{foreign}");
        assert!(!refused.headers().contains_key("access-control-allow-origin"));
    }
    let request = service.request(Method::POST, "/v1/agents/chat/invoke-iterative");
    let request = request.header("origin", PAGE).json(&json!({"inputs": {"say": "x"}}));
    let answered = request.send().await.unwrap();
    assert_eq!(
        (answered.status().as_u16(), &answered.headers()["access-control-allow-origin"]),
        (200, &PAGE.parse().unwrap())
    );
    let exposed = answered.headers()["access-control-expose-headers"].to_str().unwrap();
    for name in ["x-run-id", "location", "etag", "retry-after"] {
        assert!(exposed.split(", ").any(|known| known == name), "{exposed}");
    }
    let keyless =
        service.http.get(service.url("/v1/runs")).header("origin", PAGE).send().await.unwrap();
    assert_eq!(keyless.status(), 401, "the key decides");
    assert_eq!(keyless.headers()["access-control-allow-origin"], PAGE, "and the page can read why");
}

#[tokio::test]
async fn no_origin_is_listed_unless_the_operator_does() {
    let service = setup().start(Db::Sqlite).await;
    let request = service.request(Method::GET, "/v1/runs").header("origin", PAGE);
    let answered = request.send().await.unwrap();
    assert_eq!(answered.status(), 200);
    assert!(!answered.headers().contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn without_keys_only_listed_origins_are_let_in() {
    let config = format!("[server]\ncors_origins = [\"{PAGE}\"]\n[auth]\nmode = \"none\"\n");
    let service = setup().config(&config).start(Db::Sqlite).await;
    let from = |origin: &'static str| {
        let request = service.http.get(service.url("/v1/runs")).header("origin", origin);
        request.header("sec-fetch-site", "cross-site").send()
    };
    assert_eq!(from(PAGE).await.unwrap().status(), 200);
    assert_eq!(from("https://evil.example.com").await.unwrap().status(), 403);
}
