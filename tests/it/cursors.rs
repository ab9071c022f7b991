//! Cursors: each leads through the list that it is of, and is refused by every other one.

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_cursor_is_of_one_list_with_its_filters,
    a_cursor_is_of_one_tenant,
    no_list_takes_the_cursor_of_another,
}

const WRITER: &str = "
model: scripted/writer
instructions: Write.
tools: [file_ops]
workspace: notes
governance: {autonomy: full, paths: {write: ['./**']}}
enable_double_confirmation: false
memory: {}
";
const WRITING: &str = r#"
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: write, path: a.txt, content: a}}
      - {tool: file_ops, arguments: {operation: write, path: b.txt, content: b}}
  - text: "done with word"
"#;

const OTHER: &str = "belongs to another list or to other filters";

fn writer() -> Setup {
    Setup::new().agent("writer", WRITER).agent("another", WRITER).scenario("writer", WRITING)
}

/// Two runs of one session; the id of the first, which made the files.
async fn two_runs(service: &Service) -> String {
    let body = json!({"session_id": "s", "metadata": {"ticket": "1"}});
    let first = service.run("writer", &body).await;
    assert_eq!(first["status"], "completed", "{first:#}");
    assert_eq!(service.run("writer", &body).await["status"], "completed");
    first["run_id"].as_str().unwrap().to_owned()
}

async fn first_cursor(service: &Service, path: &str) -> String {
    let page = service.get(path).await;
    let cursor = page.body["next_cursor"].as_str();
    cursor.unwrap_or_else(|| panic!("{path}: {:#}", page.body)).to_owned()
}

fn is_refused(refused: &Answer, why: &str) -> bool {
    let said = refused.body["detail"].as_str().is_some_and(|detail| detail.contains(why));
    refused.status == 400 && refused.body["code"] == "INVALID_PARAMETER" && said
}

async fn a_cursor_is_of_one_list_with_its_filters(db: Db) {
    let service = writer().start(db).await;
    let run = two_runs(&service).await;
    for name in ["k1", "k2"] {
        let made = service.post("/v1/keys", &json!({"name": name, "scopes": ["runs:read"]})).await;
        assert_eq!(made.status, 201);
    }
    // Each with other filters of it.
    for (path, others) in [
        ("/v1/runs?status=completed", vec!["status=failed", "", "status=completed&agent=writer"]),
        ("/v1/runs?q=word", vec!["", "q=done"]),
        ("/v1/runs?metadata.ticket=1", vec!["metadata.ticket=2", "metadata.other=1"]),
        ("/v1/audit?agent=writer&action=tool_call", vec!["agent=writer", "action=tool_call"]),
        ("/v1/audit?session_id=s", vec!["session_id=t", "agent=s"]),
        ("/v1/sessions/s/messages?", vec![]),
        ("/v1/memory?agent=writer", vec!["agent=writer&session_id=s", "q=word"]),
        ("/v1/keys?", vec!["tenant=acme"]),
        ("/v1/agents/writer/files?", vec!["prefix=a"]),
        ("/v1/agents?", vec![]),
        (&format!("/v1/runs/{run}/events?"), vec![]),
        (&format!("/v1/runs/{run}/messages?"), vec![]),
        (&format!("/v1/runs/{run}/changes?"), vec![]),
        (&format!("/v1/runs/{run}/iterations?"), vec![]),
        (&format!("/v1/runs/{run}/tool-calls?"), vec![]),
    ] {
        let (list, _) = path.split_once('?').unwrap();
        let whole = service.get(path).await.body["data"].clone();
        let cursor = first_cursor(&service, &format!("{path}&limit=1")).await;
        // The limit may change, and the prefix of the version be left out.
        let rest = service.get(&format!("{}&limit=200&cursor={cursor}", &path[3..])).await.body;
        assert_eq!(rest["next_cursor"], Value::Null, "{path}");
        assert_eq!(rest["data"].as_array().unwrap(), &whole.as_array().unwrap()[1..], "{path}");
        for other in others {
            let refused = service.get(&format!("{list}?{other}&cursor={cursor}")).await;
            assert!(is_refused(&refused, OTHER), "{path} {other}: {:#}", refused.body);
        }
    }
    // Where a list of events began does not matter behind its first page.
    let events = format!("/v1/runs/{run}/events");
    let cursor = first_cursor(&service, &format!("{events}?after=2&limit=1")).await;
    let next = service.get(&format!("{events}?limit=1&cursor={cursor}")).await.body;
    assert_eq!(next["data"][0]["seq"], 4);

    let replay = "/v1/agents/writer/policy/replay";
    let first = service.post(replay, &json!({"limit": 1})).await.body;
    for (path, body, expected) in [
        (replay, json!({"limit": 5}), 200),
        (replay, json!({"since": "2026-01-01T00:00:00Z"}), 422),
        (replay, json!({"definition": "name: writer\nmodel: scripted/writer\n"}), 422),
        ("/v1/agents/another/policy/replay", json!({}), 422),
    ] {
        let mut body = body;
        body["cursor"] = first["next_cursor"].clone();
        let answered = service.post(path, &body).await;
        assert_eq!(answered.status, expected, "{path} {body}: {:#}", answered.body);
        if expected == 422 {
            assert_eq!(answered.body["errors"][0]["pointer"], "/cursor");
            let message = answered.body["errors"][0]["message"].as_str().unwrap();
            assert!(message.starts_with(OTHER), "{message}");
        }
    }
}

async fn a_cursor_is_of_one_tenant(db: Db) {
    let service = writer().start(db).await;
    two_runs(&service).await;
    let cursor = first_cursor(&service, "/v1/runs?limit=1").await;
    let request = json!({"name": "k", "tenant": "acme", "scopes": ["runs:read"]});
    let key = service.post("/v1/keys", &request).await.body["key"].as_str().unwrap().to_owned();
    let path = service.url(&format!("/v1/runs?cursor={cursor}"));
    let refused = answer(service.http.request(Method::GET, path).bearer_auth(key)).await;
    assert!(is_refused(&refused, OTHER), "{:#}", refused.body);
}

async fn no_list_takes_the_cursor_of_another(db: Db) {
    let service = writer().start(db).await;
    let run = two_runs(&service).await;
    let of_agents = first_cursor(&service, "/v1/agents?limit=1").await;
    let of_runs = first_cursor(&service, "/v1/runs?limit=1").await;
    let document: Value = serde_json::from_str(include_str!("../../openapi/openapi.json")).unwrap();
    let mut lists = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let parameters = item["get"]["parameters"].as_array().into_iter().flatten();
        if !parameters.clone().any(|parameter| parameter["name"] == "cursor") {
            continue;
        }
        let id = if path.starts_with("/sessions") { "s" } else { &run };
        let path = format!("/v1{}", path.replace("{id}", id).replace("{name}", "writer"));
        for cursor in [&of_agents, &of_runs] {
            let refused = service.get(&format!("{path}?cursor={cursor}")).await;
            let is_own = (path == "/v1/agents" && cursor == &of_agents)
                || (path == "/v1/runs" && cursor == &of_runs);
            assert_eq!(is_refused(&refused, OTHER), !is_own, "{path}: {:#}", refused.body);
        }
        let unreadable = service.get(&format!("{path}?cursor=x")).await;
        assert!(is_refused(&unreadable, "must be the next_cursor"), "{:#}", unreadable.body);
        lists += 1;
    }
    assert!(lists >= 18, "{lists}");
}
