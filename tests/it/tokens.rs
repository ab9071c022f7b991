//! Short-lived tokens for one run or session: what they open, and nothing else.
//!
//! | together with | test |
//! |---|---|
//! | streaming | `a_browser_follows_a_run_with_a_token_in_the_query`, `a_stream_ends_when_its_token_expires` |
//! | children, sessions | `a_token_reaches_its_run_and_its_children`, `a_token_of_a_session_reaches_its_runs` |
//! | parked runs, approvals, client tools | `a_token_answers_pending_calls_of_its_run` |
//! | cancel, answers of commands | `a_token_that_may_not_read_learns_the_status_alone` |
//! | tenants, scopes, keys | `a_token_is_never_wider_than_its_maker` |
//! | other replicas, restarts | `a_token_outlives_a_restart` |
//! | audit | `a_token_is_never_wider_than_its_maker` |

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{ADMIN_KEY, Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_token_opens_its_run_and_nothing_else,
    a_browser_follows_a_run_with_a_token_in_the_query,
    a_stream_ends_when_its_token_expires,
    a_token_reaches_its_run_and_its_children,
    a_token_of_a_session_reaches_its_runs,
    a_token_answers_pending_calls_of_its_run,
    a_token_that_may_not_read_learns_the_status_alone,
    a_token_is_never_wider_than_its_maker,
    a_token_outlives_a_restart,
}

fn setup() -> Setup {
    let plain = |model: &str| {
        format!("model: scripted/{model}\ninstructions: Work.\nenable_double_confirmation: false\n")
    };
    Setup::new()
        .agent("plain", &plain("plain"))
        .scenario("plain", "steps: [{text: done}]")
        .agent("sleeper", &plain("sleeper"))
        .scenario("sleeper", "steps: [{delay_ms: 120000, text: late}]")
        .agent("asker", &plain("asker"))
        .scenario("asker", "steps: [{tool_calls: [{tool: ask, arguments: {}}]}, {text: done}]")
        .agent("parent", &format!("{}tools: ['agent:plain']\n", plain("parent")))
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: 'agent:plain', arguments: {}}]}, {text: done}]",
        )
}

async fn create(service: &Service, key: &str, body: &Value) -> Answer {
    answer(service.http.post(service.url("/v1/tokens")).bearer_auth(key).json(body)).await
}

async fn token(service: &Service, body: Value) -> String {
    let created = create(service, ADMIN_KEY, &body).await;
    assert_eq!(created.status, 201, "{body}: {:#}", created.body);
    created.body["token"].as_str().unwrap().to_owned()
}

async fn ask(service: &Service, token: &str, method: Method, path: &str) -> (u16, Value) {
    let answer = answer(service.http.request(method, service.url(path)).bearer_auth(token)).await;
    (answer.status.as_u16(), answer.body)
}

async fn status(service: &Service, token: &str, path: &str) -> u16 {
    ask(service, token, Method::GET, path).await.0
}

fn id(run: &Value) -> &str {
    run["run_id"].as_str().unwrap()
}

async fn a_token_opens_its_run_and_nothing_else(db: Db) {
    let service = setup().start(db).await;
    let (own, other) =
        (service.run("plain", &json!({})).await, service.run("plain", &json!({})).await);
    let (own, other) = (id(&own), id(&other));
    let everything = json!(["read", "stream", "cancel", "respond"]);
    let read = token(&service, json!({"run_id": own, "actions": ["read"]})).await;
    let all = token(&service, json!({"run_id": own, "actions": everything})).await;
    for part in ["", "/iterations", "/tool-calls", "/messages", "/events", "/wait", "/changes"] {
        for prefix in ["", "/v1"] {
            let path = format!("{prefix}/runs/{own}{part}");
            assert_eq!(status(&service, &read, &path).await, 200, "{path}");
        }
        let path = format!("/v1/runs/{other}{part}");
        assert_eq!(status(&service, &all, &path).await, 404, "{path}");
        let path = format!("/v1/runs/{}{part}", uuid::Uuid::nil());
        assert_eq!(status(&service, &all, &path).await, 404, "{path}");
    }
    let cancel = format!("/v1/runs/{own}/cancel");
    let (refused, body) = ask(&service, &read, Method::POST, &cancel).await;
    assert_eq!((refused, &body["code"]), (403, &json!("FORBIDDEN")));
    assert!(body["detail"].as_str().unwrap().contains("`cancel`"), "{body:#}");
    assert_eq!(ask(&service, &all, Method::POST, &cancel).await.0, 200);
    let foreign = format!("/v1/runs/{other}/cancel");
    assert_eq!(ask(&service, &all, Method::POST, &foreign).await.0, 404);
    // Every other route refuses tokens, whatever they may do.
    for (method, path) in [
        (Method::GET, "/v1/runs".to_owned()),
        (Method::GET, "/v1/agents".into()),
        (Method::GET, "/v1/keys".into()),
        (Method::GET, "/v1/audit".into()),
        (Method::GET, "/v1/approvals".into()),
        (Method::GET, "/v1/sessions".into()),
        (Method::GET, "/v1/tools".into()),
        (Method::GET, "/v1/stats/usage".into()),
        (Method::GET, format!("/v1/runs/{own}/files")),
        (Method::POST, "/v1/agents/plain/invoke".into()),
        (Method::POST, "/v1/agents/plain/invoke-iterative".into()),
        (Method::POST, "/v1/tokens".into()),
        (Method::POST, "/v1/keys".into()),
    ] {
        assert_eq!(ask(&service, &all, method, &path).await.0, 403, "{path}");
    }
    // A token that was changed, or that this service did not make, is none.
    let (head, signature) = all.rsplit_once('.').unwrap();
    for forged in
        [format!("{head}.{}", "A".repeat(signature.len())), format!("{head}."), "eyJ".into()]
    {
        let (refused, body) = ask(&service, &forged, Method::GET, &format!("/v1/runs/{own}")).await;
        assert_eq!((refused, &body["code"]), (401, &json!("UNAUTHENTICATED")), "{forged}");
    }
}

async fn a_browser_follows_a_run_with_a_token_in_the_query(db: Db) {
    let service = setup().start(db).await;
    let run = service.run("plain", &json!({})).await;
    let run = id(&run);
    let body = json!({"run_id": run, "actions": ["stream"]});
    let token = token(&service, body).await;
    let url = |path: &str| service.url(&format!("{path}?access_token={token}"));
    let events = url(&format!("/v1/runs/{run}/events"));
    let stream = reqwest::get(&events).await.unwrap();
    assert_eq!(stream.status(), 401, "a page of the journal is no stream");
    let stream = || reqwest::Client::new().get(&events).header("accept", "text/event-stream");
    let told = stream().send().await.unwrap();
    assert_eq!(told.status(), 200);
    assert!(told.text().await.unwrap().contains("event: run.completed"));
    assert_eq!(stream().header("last-event-id", "1").send().await.unwrap().status(), 200);
    // One credential in the one place where browsers cannot do otherwise.
    assert_eq!(stream().bearer_auth(ADMIN_KEY).send().await.unwrap().status(), 401);
    for keys in [[ADMIN_KEY, ADMIN_KEY], [ADMIN_KEY, "bogus"], ["bogus", ADMIN_KEY]] {
        let twice = reqwest::Client::new().get(service.url("/v1/runs"));
        let twice = keys
            .into_iter()
            .fold(twice, reqwest::RequestBuilder::bearer_auth)
            .send()
            .await
            .unwrap();
        assert_eq!(twice.status(), 401, "{keys:?}");
    }
    for path in [format!("/v1/runs/{run}"), "/v1/runs".into(), format!("/v1/runs/{run}/wait")] {
        assert_eq!(reqwest::get(url(&path)).await.unwrap().status(), 401, "{path}");
    }
    let key = service.url(&format!("/v1/runs/{run}/events?access_token={ADMIN_KEY}"));
    let key = reqwest::Client::new().get(key).header("accept", "text/event-stream");
    assert_eq!(key.send().await.unwrap().status(), 401, "a key is not for a query");
    assert!(!service.log().contains(&token), "a token is not logged");
    // The same in a header, and the journal's pages need the action `read`.
    let page = format!("/v1/runs/{run}/events");
    assert_eq!(status(&service, &token, &page).await, 403);
}

async fn a_stream_ends_when_its_token_expires(db: Db) {
    let service = setup().start(db).await;
    let path = service.enqueue("sleeper").await;
    let run = path.rsplit('/').next().unwrap();
    let body = json!({"run_id": run, "actions": ["stream", "read"], "ttl_seconds": 6});
    let token = token(&service, body).await;
    let stream = service.http.get(service.url(&format!("/v1/runs/{run}/events")));
    let stream =
        stream.bearer_auth(&token).header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!(stream.status(), 200);
    let text = tokio::time::timeout(Duration::from_mins(1), stream.text()).await.unwrap().unwrap();
    assert!(text.contains(": the API key or token is revoked or has expired"), "{text}");
    assert_eq!(status(&service, &token, &format!("/v1/runs/{run}")).await, 401);
}

async fn a_token_reaches_its_run_and_its_children(db: Db) {
    let service = setup().start(db).await;
    let parent = service.run("parent", &json!({})).await;
    let children = service.get(&format!("/v1/runs?parent_run_id={}", id(&parent))).await.body;
    let child = id(&children["data"][0]).to_owned();
    let down = token(&service, json!({"run_id": id(&parent), "actions": ["read"]})).await;
    assert_eq!(status(&service, &down, &format!("/v1/runs/{child}/messages")).await, 200);
    let up = token(&service, json!({"run_id": child, "actions": ["read"]})).await;
    assert_eq!(status(&service, &up, &format!("/v1/runs/{}", id(&parent))).await, 404);
}

async fn a_token_of_a_session_reaches_its_runs(db: Db) {
    let service = setup().start(db).await;
    let session = "chat/1 ä";
    let run = service.run("plain", &json!({"session_id": session})).await;
    let other = service.run("plain", &json!({"session_id": "other"})).await;
    let body = json!({"session_id": session, "actions": ["read", "stream"]});
    let token = token(&service, body).await;
    let encoded = "chat%2F1%20%C3%A4";
    for path in [
        format!("/v1/sessions/{encoded}"),
        format!("/v1/sessions/{encoded}/messages"),
        format!("/v1/runs/{}", id(&run)),
    ] {
        assert_eq!(status(&service, &token, &path).await, 200, "{path}");
    }
    for path in ["/v1/sessions/other".to_owned(), format!("/v1/runs/{}", id(&other))] {
        assert_eq!(status(&service, &token, &path).await, 404, "{path}");
    }
    let delete = format!("/v1/sessions/{encoded}");
    assert_eq!(ask(&service, &token, Method::DELETE, &delete).await.0, 403);
}

async fn a_token_answers_pending_calls_of_its_run(db: Db) {
    let service = setup().start(db).await;
    let tools = json!({"client_tools": [{"name": "ask", "input_schema": {"type": "object"}}]});
    let run = service.post("/v1/agents/asker/invoke-iterative", &tools).await.body;
    let call = run["pending"][0]["call_id"].as_str().unwrap();
    let path = format!("/v1/runs/{}/tool-calls/{call}/result", id(&run));
    let read = token(&service, json!({"run_id": id(&run), "actions": ["read"]})).await;
    let respond = token(&service, json!({"run_id": id(&run), "actions": ["respond"]})).await;
    let reply = |token: &str| {
        let request = service.http.post(service.url(&path)).bearer_auth(token);
        answer(request.json(&json!({"content": "yes"})))
    };
    assert_eq!(reply(&read).await.status, 403);
    let accepted = reply(&respond).await;
    assert_eq!(accepted.status, 200, "{:#}", accepted.body);
    let told = accepted.body.as_object().unwrap().keys().collect::<Vec<_>>();
    assert_eq!(told, ["run_id", "status"], "it may not read");
    let run = format!("/v1/runs/{}", id(&run));
    service.until(&run, |run| run["status"] == "completed").await;
}

async fn a_token_that_may_not_read_learns_the_status_alone(db: Db) {
    let service = setup().start(db).await;
    let run = service.run("plain", &json!({})).await;
    let cancel = format!("/v1/runs/{}/cancel", id(&run));
    for (actions, reads) in [
        (json!(["cancel"]), false),
        (json!(["cancel", "respond", "stream"]), false),
        (json!(["cancel", "read"]), true),
    ] {
        let token = token(&service, json!({"run_id": id(&run), "actions": actions})).await;
        let (status, told) = ask(&service, &token, Method::POST, &cancel).await;
        assert_eq!((status, &told["status"]), (200, &json!("completed")), "{actions}: {told:#}");
        for field in ["inputs", "output", "raw_response"] {
            assert_eq!(told.get(field).is_some(), reads, "{field}, {actions}: {told:#}");
        }
    }
}

async fn a_token_is_never_wider_than_its_maker(db: Db) {
    let service = setup().start(db).await;
    let run = service.run("plain", &json!({})).await;
    let run = id(&run);
    let key = async |fields: Value| {
        let mut body = json!({"name": "k"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let made = service.post("/v1/keys", &body).await.body;
        (made["id"].as_str().unwrap().to_owned(), made["key"].as_str().unwrap().to_owned())
    };
    let (maker, maker_key) = key(json!({"scopes": ["agents:invoke", "runs:read"]})).await;
    for (body, expected, named) in [
        (json!({"run_id": run, "actions": ["cancel"]}), 403, "runs:cancel"),
        (
            json!({"run_id": run, "actions": ["read", "read", "read", "read", "read"]}),
            422,
            "/actions",
        ),
        (json!({"session_id": "s", "actions": ["read"]}), 403, "sessions:read"),
        (json!({"run_id": run, "actions": []}), 422, "/actions"),
        (json!({"run_id": run, "actions": ["write"]}), 422, "/actions/0"),
        (json!({"actions": ["read"]}), 422, "run_id"),
        (json!({"run_id": run, "session_id": "s", "actions": ["read"]}), 422, "run_id"),
        (json!({"run_id": run, "actions": ["read"], "ttl_seconds": 3601}), 422, "/ttl_seconds"),
        (json!({"run_id": run, "actions": ["read"], "ttl_seconds": 0}), 422, "/ttl_seconds"),
        (json!({"run_id": uuid::Uuid::nil(), "actions": ["read"]}), 404, "run"),
        (json!({"session_id": "s", "actions": ["stream"]}), 404, "session"),
    ] {
        let refused = create(&service, &maker_key, &body).await;
        assert_eq!(refused.status, expected, "{body}: {:#}", refused.body);
        assert!(refused.body.to_string().contains(named), "{body}: {:#}", refused.body);
    }
    let (_, reader) = key(json!({"scopes": ["runs:read"]})).await;
    let body = json!({"run_id": run, "actions": ["read"]});
    assert_eq!(create(&service, &reader, &body).await.status, 403, "needs agents:invoke");
    let (_, foreign) =
        key(json!({"tenant": "acme", "scopes": ["agents:invoke", "runs:read"]})).await;
    assert_eq!(create(&service, &foreign, &body).await.status, 404);

    // A token ends with its key, and its making is in the audit log, without the token.
    let made = create(&service, &maker_key, &body).await.body["token"].clone();
    let made = made.as_str().unwrap();
    assert_eq!(status(&service, made, &format!("/v1/runs/{run}")).await, 200);
    let record = service.get("/v1/audit?action=token.created").await.body;
    let record = &record["data"][0];
    assert_eq!((&record["subject"], &record["run_id"]), (&json!(maker), &json!(run)));
    assert!(!record.to_string().contains(made), "{record:#}");
    assert_eq!(service.delete(&format!("/v1/keys/{maker}")).await.status, 204);
    assert_eq!(status(&service, made, &format!("/v1/runs/{run}")).await, 401);
}

async fn a_token_outlives_a_restart(db: Db) {
    let mut service = setup().start(db).await;
    let run = service.run("plain", &json!({})).await;
    let run = id(&run).to_owned();
    let token = token(&service, json!({"run_id": run, "actions": ["read"]})).await;
    service.kill().await;
    service.expect_reclaims();
    service.restart().await;
    assert_eq!(status(&service, &token, &format!("/v1/runs/{run}")).await, 200);
}
