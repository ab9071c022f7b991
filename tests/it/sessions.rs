//! Runs that share a conversation: what they remember, and that one of them goes on at a time.

use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::mock_server::{self, MockServer};
use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};
use crate::streaming::Reader;
use crate::{mock_anthropic, service};

on_both_stores! {
    a_later_run_knows_what_was_said_on_openai,
    a_later_run_knows_what_was_said_on_anthropic,
    a_conversation_goes_back_as_far_as_its_bounds,
    a_history_that_fills_the_window_is_summarised_once,
    a_busy_session_is_refused,
    those_that_wait_run_in_their_turn,
    an_interruption_takes_the_place_of_the_other,
    a_lost_interruption_is_made_up_for,
    of_many_in_the_same_millisecond_one_runs_at_a_time,
    a_crash_keeps_the_session,
    the_same_request_is_no_rival_of_itself,
    a_session_belongs_to_its_agent_and_its_tenant,
    a_session_is_shown_and_deleted,
    a_run_that_starts_while_its_session_is_deleted_knows_nothing_of_it,
    a_session_of_large_messages_is_shown_within_bounds,
}

const CHAT: &str = "
model: scripted/chat
tools: [file_ops]
enable_double_confirmation: false
";

/// Says what it heard, at once or as slowly as it is asked.
const SCENARIO: &str = "
match:
  - when: inputs.say == 'for ever'
    steps: [{text: never, delay_ms: 600000}]
  - when: inputs.say == 'slowly'
    steps: [{text: slowly, delay_ms: 500}]
  - when: inputs.say == 'crash'
    steps: [{text: recovered, delay_ms: 600000}]
  - when: 'true'
    steps: [{text: 'heard {{ inputs.say }}'}]
";

fn setup() -> Setup {
    Setup::new().agent("chat", CHAT).scenario("chat", SCENARIO)
}

fn said(say: &str, session: &str) -> Value {
    json!({"inputs": {"say": say}, "session_id": session})
}

fn with(mut body: Value, field: &str, value: impl Into<Value>) -> Value {
    body[field] = value.into();
    body
}

const INVOKE: &str = "/v1/agents/chat/invoke-iterative";

async fn post(service: &Service, body: &Value) -> Answer {
    service.post(INVOKE, body).await
}

/// Queues a run; its id.
async fn start(service: &Service, body: &Value) -> String {
    let request =
        service.request(Method::POST, INVOKE).header("prefer", "respond-async").json(body);
    let accepted = answer(request).await;
    assert_eq!(accepted.status, 202, "{:#}", accepted.body);
    accepted.body["run_id"].as_str().unwrap().to_owned()
}

async fn until_status(service: &Service, run: &str, status: &str) -> Value {
    service.until(&format!("/v1/runs/{run}"), |run| run["status"] == status).await
}

async fn part(service: &Service, run: &Value, part: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/{part}?limit=200", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

fn roles(messages: &[Value]) -> Vec<&str> {
    messages.iter().map(|message| message["role"].as_str().unwrap()).collect()
}

/// What `session.loaded` says, where it happened.
async fn loaded(service: &Service, run: &Value) -> Option<Value> {
    let events = part(service, run, "events").await;
    let loaded = events.iter().position(|event| event["type"] == "session.loaded")?;
    assert_eq!(events[loaded + 1]["type"], "run.started");
    Some(events[loaded]["data"].clone())
}

const READER: &str = "
model: mock/claude-sonnet-4-5
tools: [file_ops]
enable_double_confirmation: false
";

/// Two runs of the loop and a single shot, in one session.
async fn three_runs(service: &Service) -> [Value; 3] {
    let body = |say: &str| said(say, "ticket/42 ü");
    let first = service.run("chat", &body("read it")).await;
    assert_eq!(first["output"], json!({"result": "it says seventeen"}), "{first:#}");
    assert_eq!(loaded(service, &first).await, None);
    let second = service.run("chat", &body("read it again")).await;
    assert_eq!(second["output"], json!({"result": "still seventeen"}), "{second:#}");
    let known = loaded(service, &second).await.unwrap();
    assert_eq!(
        (&known["session_id"], &known["runs"], &known["turns"]),
        (&json!("ticket/42 ü"), &json!(1), &json!(3))
    );
    assert!(known["tokens"].as_u64().unwrap() > 0);
    let third = service.post("/v1/agents/chat/invoke", &body("and in a word?")).await.body;
    assert_eq!(third["output"], json!({"result": "seventeen"}), "{third:#}");
    assert_eq!(loaded(service, &third).await.unwrap()["runs"], 2);
    let messages = part(service, &third, "messages").await;
    let run = ["user", "assistant", "tool", "assistant"];
    assert_eq!(
        roles(&messages),
        [&["system"], &run[..], &run[..], &["user", "assistant"]].concat()
    );
    [first, second, third]
}

async fn a_later_run_knows_what_was_said_on_openai(db: Db) {
    let mock = MockModel::start().await;
    let models = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"PATH\"\nmax_retries = 0",
        mock.base_url()
    );
    let setup = Setup::new().agent("chat", READER).file("notes.txt", "seventeen\n").config(&models);
    let service = setup.start(db).await;
    let read = || Reply::call("file_ops", &json!({"operation": "read", "path": "notes.txt"}));
    let texts = ["it says seventeen", "still seventeen", "seventeen"].map(Reply::text);
    let [it, still, word] = texts;
    mock.script([read(), it, read(), still, word]);
    three_runs(&service).await;
    assert_eq!(mock.refusals(), Vec::<String>::new(), "every request was a valid one");
    let requests = mock.requests();
    assert_eq!(
        roles(requests[2].messages()),
        ["system", "user", "assistant", "tool", "assistant", "user"]
    );
    assert!(requests[2].messages()[3]["content"].as_str().unwrap().contains("seventeen"));
    assert_eq!(requests[2].messages()[5]["content"], r#"{"say":"read it again"}"#);
}

async fn a_later_run_knows_what_was_said_on_anthropic(db: Db) {
    let read =
        || mock_server::Reply::call("file_ops", json!({"operation": "read", "path": "notes.txt"}));
    let [it, still, word] =
        ["it says seventeen", "still seventeen", "seventeen"].map(mock_server::Reply::text);
    let mock = MockServer::start(mock_anthropic::API, [read(), it, read(), still, word]).await;
    let models = format!(
        "[models.mock]\nkind = \"anthropic\"\nbase_url = \"{}\"\nheaders = {{ x-api-key = \"k\" }}\nmax_retries = 0",
        mock.base_url
    );
    let agent = format!("{READER}thinking: {{budget_tokens: 2000}}\n");
    let setup = Setup::new().agent("chat", &agent).file("notes.txt", "seventeen\n").config(&models);
    three_runs(&setup.start(db).await).await;
    assert_eq!(mock.requests().len(), 5);
}

async fn a_conversation_goes_back_as_far_as_its_bounds(db: Db) {
    let setup = setup().agent("short", &format!("{CHAT}history: {{max_runs: 2}}\n"));
    let service =
        setup.agent("forgetful", &format!("{CHAT}history: {{max_tokens: 0}}\n")).start(db).await;
    for (agent, remembered) in [("short", vec!["2", "3"]), ("forgetful", vec![])] {
        let mut run = Value::Null;
        for say in ["1", "2", "3", "4"] {
            run = service.run(agent, &said(say, agent)).await;
        }
        let messages = part(&service, &run, "messages").await;
        let asked = messages.iter().filter(|message| message["role"] == "user");
        let asked: Vec<_> =
            asked.map(|message| message["content"].as_str().unwrap().to_owned()).collect();
        let expected = remembered.iter().chain(&["4"]).map(|say| format!("{{\"say\":\"{say}\"}}"));
        assert_eq!(asked, expected.collect::<Vec<_>>());
        let runs = loaded(&service, &run).await.map(|loaded| loaded["runs"].clone());
        assert_eq!(runs, (!remembered.is_empty()).then(|| json!(remembered.len())));
    }
}

async fn a_history_that_fills_the_window_is_summarised_once(db: Db) {
    let scenario = "
match:
  - when: inputs.say == 'long'
    steps: [{text: 'LONG'}]
  - when: inputs.say == 'much'
    steps: [{text: they were long}, {text: much}]
  - when: 'true'
    steps: [{text: done}]
"
    .replace("LONG", &"l".repeat(12_000));
    let window = "[capabilities.\"scripted/*\"]\ncontext_window = 10000";
    let service =
        Setup::new().agent("chat", CHAT).scenario("chat", &scenario).config(window).start(db).await;
    for _ in 0..3 {
        service.run("chat", &said("long", "s")).await;
    }
    let much = service.run("chat", &said("much", "s")).await;
    assert_eq!(much["output"], json!({"result": "much"}), "{much:#}");
    assert_eq!(loaded(&service, &much).await.unwrap()["runs"], 3);
    let mut messages = part(&service, &much, "messages").await;
    messages.retain(|message| message["compacted"] != true);
    let summary = messages
        .iter()
        .position(|m| m["content"].as_str().unwrap().ends_with("they were long"))
        .unwrap();
    let asked = messages.iter().position(|m| m["content"] == r#"{"say":"much"}"#).unwrap();
    assert_eq!(
        (summary, messages.len()),
        (1, asked + 2),
        "the summary stands for the oldest: {messages:#?}"
    );
    // The runs before say what they said, and nothing comes twice.
    let last = service.get("/v1/sessions/s").await.body;
    let asked =
        last["messages"].as_array().unwrap().iter().filter(|message| message["role"] == "user");
    assert_eq!(asked.count(), 4);
}

async fn a_busy_session_is_refused(db: Db) {
    let service = setup().start(db).await;
    let running = start(&service, &said("for ever", "s")).await;
    until_status(&service, &running, "running").await;
    for (path, prefer) in
        [(INVOKE, "wait=5"), (INVOKE, "respond-async"), ("/v1/agents/chat/invoke", "wait=5")]
    {
        let request =
            service.request(Method::POST, path).header("prefer", prefer).json(&said("x", "s"));
        let refused = answer(request).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (409, &json!("SESSION_BUSY")),
            "{path} {prefer}"
        );
    }
    assert_eq!(post(&service, &said("x", "t")).await.status, 200, "another session");
    service.post(&format!("/v1/runs/{running}/cancel"), &json!({})).await;
    until_status(&service, &running, "cancelled").await;
    let run = service.run("chat", &said("x", "s")).await;
    assert_eq!(loaded(&service, &run).await, None, "there was no answer");
    let refused = post(&service, &with(said("x", "s"), "on_session_busy", "sometimes")).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (422, &json!("INVALID_OVERRIDE")));
}

fn time(value: &Value) -> DateTime<Utc> {
    value.as_str().unwrap().parse().unwrap()
}

/// Each began after the one before it had ended.
fn assert_in_turn(runs: &[Value]) {
    for pair in runs.windows(2) {
        let (ended, began) = (time(&pair[0]["finished_at"]), time(&pair[1]["started_at"]));
        assert!(ended <= began, "{began} is before {ended}: {runs:#?}");
    }
}

async fn those_that_wait_run_in_their_turn(db: Db) {
    let service =
        setup().agent("patient", &format!("{CHAT}on_session_busy: enqueue\n")).start(db).await;
    let path = "/v1/agents/patient/invoke-iterative";
    let invoke = |say: &str| service.request(Method::POST, path).json(&said(say, "s"));
    let mut ids = Vec::new();
    for say in ["slowly", "2", "3"] {
        let accepted = answer(invoke(say).header("prefer", "respond-async")).await;
        assert_eq!(accepted.status, 202, "{:#}", accepted.body);
        ids.push(accepted.body["run_id"].as_str().unwrap().to_owned());
    }
    let followed = invoke("4").header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!(followed.status(), 200);
    ids.push(followed.headers()["x-run-id"].to_str().unwrap().to_owned());
    let waited = answer(invoke("5")).await;
    assert_eq!(
        (waited.status.as_u16(), &waited.body["status"]),
        (200, &json!("completed")),
        "{:#}",
        waited.body
    );
    ids.push(waited.body["run_id"].as_str().unwrap().to_owned());
    let mut reader = Reader::of(followed);
    let mut last = reader.next().await.unwrap();
    while let Some(frame) = reader.next().await {
        last = frame;
    }
    assert_eq!(last.data["data"]["run"]["output"], json!({"result": "heard 4"}));
    let mut runs = Vec::new();
    for id in &ids {
        runs.push(until_status(&service, id, "completed").await);
    }
    assert_in_turn(&runs);
    assert_eq!(loaded(&service, &runs[4]).await.unwrap()["runs"], 4);
    let rejected = post(&service, &with(said("6", "s"), "on_session_busy", "reject")).await;
    assert_eq!(rejected.body["code"], "SESSION_OF_OTHER_AGENT", "busy or not");
}

async fn an_interruption_takes_the_place_of_the_other(db: Db) {
    let service = setup().start(db).await;
    let first = start(&service, &said("for ever", "s")).await;
    until_status(&service, &first, "running").await;
    let waiting = start(&service, &with(said("patient", "s"), "on_session_busy", "enqueue")).await;
    let urgent =
        service.run("chat", &with(said("urgent", "s"), "on_session_busy", "interrupt")).await;
    assert_eq!(
        (&urgent["status"], &urgent["output"]),
        (&json!("completed"), &json!({"result": "heard urgent"}))
    );
    let first = until_status(&service, &first, "cancelled").await;
    let reason = first["error"]["context"]["reason"].as_str().unwrap();
    assert!(reason.contains(urgent["run_id"].as_str().unwrap()), "{first:#}");
    let waiting = until_status(&service, &waiting, "completed").await;
    let urgent =
        service.get(&format!("/v1/runs/{}", urgent["run_id"].as_str().unwrap())).await.body;
    assert_in_turn(&[first.clone(), urgent.clone(), waiting.clone()]);
    // The conversation is told in the order in which the runs had it, page by page, too.
    let session = service.get("/v1/sessions/s").await.body;
    let ids = |runs: &Value, id: &str| -> Vec<Value> {
        runs.as_array().unwrap().iter().map(|run| run[id].clone()).collect()
    };
    let in_turn = [&first, &urgent, &waiting].map(|run| run["run_id"].clone());
    assert_eq!(ids(&session["runs"], "run_id"), in_turn);
    let mut told = Vec::new();
    let mut next = "/v1/sessions/s/messages?limit=1".to_owned();
    loop {
        let page = service.get(&next).await.body;
        told.extend(ids(&page["data"], "run_id"));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        next = format!("/v1/sessions/s/messages?limit=1&cursor={cursor}");
    }
    told.dedup();
    assert_eq!(told, in_turn[1..], "the first was not answered");
    // There is nothing to interrupt.
    let alone =
        service.run("chat", &with(said("alone", "s"), "on_session_busy", "interrupt")).await;
    assert_eq!(alone["output"], json!({"result": "heard alone"}));
}

/// As after a crash between the commit of the new run and the cancellation of the other.
async fn a_lost_interruption_is_made_up_for(db: Db) {
    let service = setup().start(db).await;
    let first = start(&service, &said("for ever", "s")).await;
    until_status(&service, &first, "running").await;
    let urgent = start(&service, &with(said("urgent", "s"), "on_session_busy", "enqueue")).await;
    let id = urgent.rsplit('/').next().unwrap();
    crate::claims::change(
        &service,
        &format!("UPDATE runs SET session_place = 'next' WHERE id = '{id}'"),
    )
    .await;
    let first = until_status(&service, &first, "cancelled").await;
    let reason = first["error"]["context"]["reason"].as_str().unwrap();
    assert!(reason.contains(id), "{first:#}");
    let urgent = until_status(&service, &urgent, "completed").await;
    assert_in_turn(&[first, urgent]);
}

async fn of_many_in_the_same_millisecond_one_runs_at_a_time(db: Db) {
    let one = setup().start(db).await;
    let other = match db {
        Db::Postgres => Some(setup().start_on(one.database_url.clone()).await),
        Db::Sqlite => None,
    };
    let services = [&one, other.as_ref().unwrap_or(&one)];
    let (mut refused, mut completed) = (0, 0);
    for round in 0..25 {
        let session = format!("s{round}");
        let policy = ["reject", "enqueue", "reject", "interrupt"][round % 4];
        let body = with(said("now", &session), "on_session_busy", policy);
        let answers = join_all((0..4).map(|number| post(services[number % 2], &body))).await;
        let codes: Vec<u16> = answers.iter().map(|answer| answer.status.as_u16()).collect();
        assert!(
            codes.contains(&200) && codes.iter().all(|code| [200, 409].contains(code)),
            "{answers:#?}"
        );
        refused += codes.iter().filter(|code| **code == 409).count();
        let mut runs = one.get(&format!("/v1/runs?session_id={session}")).await.body["data"]
            .as_array()
            .unwrap()
            .clone();
        runs.retain(|run| run["started_at"].is_string());
        runs.sort_by_key(|run| (time(&run["started_at"]), time(&run["finished_at"])));
        assert_in_turn(&runs);
        if policy == "enqueue" {
            assert_eq!(codes, [200; 4]);
            let known = loaded(&one, &runs[3]).await.unwrap();
            assert_eq!(known["runs"], 3, "none was forgotten");
        }
        completed += runs.iter().filter(|run| run["status"] == "completed").count();
    }
    assert!(refused > 0, "no two ever met");
    assert!(completed >= 25);
}

async fn a_crash_keeps_the_session(db: Db) {
    let mut service = setup().config("[runtime]\nlease = \"2s\"").start(db).await;
    service.run("chat", &said("before", "s")).await;
    let crashed = start(&service, &said("crash", "s")).await;
    let waiting = start(&service, &with(said("after", "s"), "on_session_busy", "enqueue")).await;
    service
        .until(&format!("/v1/runs/{crashed}/events"), |page| {
            page["data"].as_array().unwrap().len() > 2
        })
        .await;
    service.kill().await;
    let soon = SCENARIO.replace("recovered, delay_ms: 600000", "recovered, delay_ms: 8000");
    service.write("scenarios/chat.yaml", &soon);
    service.restart().await;
    let refused = post(&service, &said("x", "s")).await;
    assert_eq!(refused.body["code"], "SESSION_BUSY", "{:#}", refused.body);
    let crashed = until_status(&service, &crashed, "completed").await;
    let waiting = until_status(&service, &waiting, "completed").await;
    assert_in_turn(&[crashed.clone(), waiting.clone()]);
    let messages = part(&service, &waiting, "messages").await;
    let words: Vec<&str> =
        messages.iter().filter_map(|message| message["content"].as_str()).skip(1).collect();
    let said = |say: &str| format!("{{\"say\":\"{say}\"}}");
    let expected =
        [said("before"), "heard before".into(), said("crash"), "recovered".into(), said("after")];
    assert_eq!(words[..5], expected);
    assert_eq!(loaded(&service, &crashed).await.unwrap()["runs"], 1);
}

async fn the_same_request_is_no_rival_of_itself(db: Db) {
    let service = setup().start(db).await;
    for (round, policy) in ["reject", "enqueue", "interrupt", "reject"].iter().enumerate() {
        let body = with(said("slowly", &format!("s{round}")), "on_session_busy", *policy);
        let request = || {
            let request = service
                .request(Method::POST, INVOKE)
                .header("idempotency-key", format!("k{round}"));
            answer(request.json(&body))
        };
        let answers = join_all([request(), request(), request()]).await;
        for answer in &answers {
            assert_eq!(answer.status, 200, "{policy}: {:#}", answer.body);
            assert_eq!(answer.body["run_id"], answers[0].body["run_id"]);
            assert_eq!(answer.body["status"], "completed");
        }
        let runs = service.get(&format!("/v1/runs?session_id=s{round}")).await.body;
        assert_eq!(runs["data"].as_array().unwrap().len(), 1);
    }
    for policy in ["reject", "enqueue", "interrupt"] {
        let id = uuid::Uuid::now_v7().to_string();
        let body =
            with(with(said("slowly", policy), "on_session_busy", policy), "run_id", id.as_str());
        assert_eq!(start(&service, &body).await, id);
        let again = post(&service, &body).await;
        assert_eq!(
            (again.status.as_u16(), &again.body["code"]),
            (409, &json!("RUN_ID_TAKEN")),
            "{policy}"
        );
        until_status(&service, &id, "completed").await;
        let again = post(&service, &body).await;
        assert_eq!(
            (again.status.as_u16(), &again.body["code"]),
            (409, &json!("RUN_ID_TAKEN")),
            "{policy}, free"
        );
    }
}

async fn a_session_belongs_to_its_agent_and_its_tenant(db: Db) {
    let mut service = setup().agent("other", CHAT).start(db).await;
    service.run("chat", &said("1", "s")).await;
    let refused = service.post("/v1/agents/other/invoke-iterative", &said("2", "s")).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (409, &json!("SESSION_OF_OTHER_AGENT"))
    );
    let scopes =
        json!(["agents:invoke", "runs:read", "sessions:read", "sessions:write", "tools:execute"]);
    let key =
        service.post("/v1/keys", &json!({"name": "k", "tenant": "acme", "scopes": scopes})).await;
    assert_eq!(key.status, 201, "{:#}", key.body);
    service.key = key.body["key"].as_str().unwrap().to_owned();
    assert_eq!(service.get("/v1/sessions/s").await.status, 404);
    assert_eq!(service.delete("/v1/sessions/s").await.status, 404);
    let run = service.run("other", &said("3", "s")).await;
    assert_eq!(loaded(&service, &run).await, None);
    assert_eq!(service.get("/v1/sessions/s").await.body["agent"], "other");
    assert_eq!(service.delete("/v1/sessions/s").await.status, 204);
    service::ADMIN_KEY.clone_into(&mut service.key);
    assert_eq!(service.get("/v1/sessions/s").await.body["agent"], "chat");
    let key = service
        .post("/v1/keys", &json!({"name": "k", "scopes": ["runs:read", "sessions:read"]}))
        .await;
    service.key = key.body["key"].as_str().unwrap().to_owned();
    assert_eq!(service.get("/v1/sessions/s").await.status, 200);
    let refused = service.delete("/v1/sessions/s").await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (403, &json!("FORBIDDEN")));
}

async fn a_session_is_shown_and_deleted(db: Db) {
    let service = setup().start(db).await;
    let path = "/v1/sessions/ticket%2F42%20%C3%BC";
    assert_eq!(service.get(path).await.status, 404);
    let first = service.run("chat", &said("1", "ticket/42 ü")).await;
    let second = service.run("chat", &said("2", "ticket/42 ü")).await;
    let running = start(&service, &said("for ever", "ticket/42 ü")).await;
    until_status(&service, &running, "running").await;
    let session = service.get(path).await.body;
    assert_eq!(
        (&session["session_id"], &session["agent"]),
        (&json!("ticket/42 ü"), &json!("chat"))
    );
    let runs: Vec<&Value> = session["runs"].as_array().unwrap().iter().collect();
    let ids: Vec<&Value> = runs.iter().map(|run| &run["run_id"]).collect();
    assert_eq!(ids, [&first["run_id"], &second["run_id"], &json!(running)]);
    assert_eq!(
        (&runs[0]["status"], &runs[0]["termination_reason"]),
        (&json!("completed"), &json!("completed"))
    );
    assert_eq!((&runs[2]["status"], &runs[2]["finished_at"]), (&json!("running"), &Value::Null));
    assert_eq!(
        (&session["created_at"], &session["last_run_at"]),
        (&runs[0]["created_at"], &runs[2]["created_at"])
    );
    let messages = session["messages"].as_array().unwrap();
    assert_eq!(roles(messages), ["user", "assistant", "user", "assistant"]);
    assert_eq!(messages[3]["content"], "heard 2");
    let busy = service.delete(path).await;
    assert_eq!((busy.status.as_u16(), &busy.body["code"]), (409, &json!("SESSION_BUSY")));
    service.post(&format!("/v1/runs/{running}/cancel"), &json!({})).await;
    until_status(&service, &running, "cancelled").await;
    assert_eq!(service.delete(path).await.status, 204);
    for path in [path.to_owned(), format!("/v1/runs/{running}")] {
        assert_eq!(service.get(&path).await.status, 404, "{path}");
    }
    let run = service.run("chat", &said("3", "ticket/42 ü")).await;
    assert_eq!(loaded(&service, &run).await, None);
}

async fn a_session_of_large_messages_is_shown_within_bounds(db: Db) {
    const RUNS: usize = 16;
    let steps = "steps: [{text: \"{{ 'y' * 600000 }}\"}]";
    let look = |n| {
        format!(
            "  - {{text: \"{{{{ 'y' * 600000 }}}}\", tool_calls: [{{tool: file_ops, arguments: \
             {{operation: glob, pattern: n{n}.txt}}}}]}}\n"
        )
    };
    let talk: String = (0..9).map(look).collect();
    let talk = format!("steps:\n{talk}  - text: done\n");
    let service = setup()
        .agent("loud", &CHAT.replace("chat", "loud"))
        .scenario("loud", steps)
        .agent("talker", &CHAT.replace("chat", "talker"))
        .scenario("talker", &talk)
        .start(db)
        .await;
    for number in 0..RUNS {
        let body = said(&number.to_string(), "large");
        let run = service.run("loud", &with(body, "inputs", json!({"say": number}))).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }
    let session = service.get("/v1/sessions/large").await.body;
    assert_eq!(session["runs"].as_array().unwrap().len(), RUNS);
    let shown = session["messages"].as_array().unwrap();
    let left_out = usize::try_from(session["runs_without_messages"].as_u64().unwrap()).unwrap();
    assert!((2..RUNS).contains(&left_out), "{left_out}");
    assert_eq!(shown.len(), (RUNS - left_out) * 2, "the newest are shown");
    assert_eq!(shown[shown.len() - 2]["content"], format!("{{\"say\":{}}}", RUNS - 1));

    let (mut all, mut cursor, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = format!("/v1/sessions/large/messages?limit=200{cursor}");
        let page = service.get(&page).await.body;
        pages += 1;
        for message in page["data"].as_array().unwrap() {
            all.push((message["run_id"].clone(), message["role"].clone()));
        }
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert!(pages > 1, "{pages}");
    let runs = session["runs"].as_array().unwrap().iter();
    let expected: Vec<(Value, Value)> = runs
        .flat_map(|run| ["user", "assistant"].map(|role| (run["run_id"].clone(), json!(role))))
        .collect();
    assert_eq!(all, expected, "each once and in order");

    let run = service.run("talker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let path = format!("/v1/runs/{}/messages?limit=1000", run["run_id"].as_str().unwrap());
    let large = |page: &Value| {
        let messages = page["data"].as_array().unwrap().iter();
        let length = |message: &Value| message["content"].as_str().unwrap().len();
        messages.filter(|message| length(message) == 600_000).count()
    };
    let first = service.get(&path).await.body;
    assert_eq!(large(&first), 6);
    let next = first["next_cursor"].as_str().unwrap();
    let second = service.get(&format!("{path}&cursor={next}")).await.body;
    assert_eq!((large(&second), &second["next_cursor"]), (3, &Value::Null));
}

async fn a_run_that_starts_while_its_session_is_deleted_knows_nothing_of_it(db: Db) {
    let service = setup().start(db).await;
    for round in 0..40 {
        let session = format!("s{round}");
        let path = format!("/v1/sessions/{session}");
        assert_eq!(post(&service, &said("a secret", &session)).await.status, 200);
        let delayed = async {
            tokio::time::sleep(Duration::from_micros(round * 150)).await;
            post(&service, &said("hello", &session)).await
        };
        let (deleted, begun) = tokio::join!(service.delete(&path), delayed);
        assert_eq!(begun.status, 200, "{:#}", begun.body);
        let left = service.get(&path).await;
        match deleted.status.as_u16() {
            204 if left.status == 404 => {} // the run had ended before
            204 => {
                assert_eq!(loaded(&service, &begun.body).await, None, "{round}");
                assert_eq!(left.body["run_count"], 1, "{round}: {:#}", left.body);
            }
            status => {
                assert_eq!((status, &deleted.body["code"]), (409, &json!("SESSION_BUSY")));
                assert_eq!(loaded(&service, &begun.body).await.unwrap()["runs"], 1, "{round}");
                assert_eq!(left.body["run_count"], 2, "{round}: {:#}", left.body);
            }
        }
    }
}
