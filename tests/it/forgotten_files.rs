//! Files of runs and sessions that are forgotten, and who changed those that are there.
//!
//! | | |
//! |---|---|
//! | children | their own directories go with the session of their parent |
//! | parked, queued runs | keep their session, and so its files (409) |
//! | cancel | makes them ended runs |
//! | crash | the bin is emptied by the next deletion (workspace.rs); a file is never half there |
//! | replicas | one file system, or each deletes what it has |
//! | tenants | a session of another tenant is not there |
//! | streaming, budgets, dry run | leave no files |
//! | generated clients | fields of `File` |

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_session_takes_its_files_along,
    a_session_whose_deletion_fails_keeps_its_files,
    a_run_takes_its_own_files_along_when_it_was_kept_for_long_enough,
    lists_say_which_run_or_caller_changed_a_file,
}

const WRITING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: made.txt, content: 'made {{ inputs.n | default(0) }}'}}]
  - {text: done}
";

const LEADING: &str = "
steps:
  - tool_calls: [{tool: 'agent:own', arguments: {}}]
  - {text: done}
";

fn setup() -> Setup {
    let agent = |scenario: &str, workspace: &str, tools: &str| {
        format!(
            "model: scripted/{scenario}\ntools: [{tools}]\nenable_double_confirmation: false\n\
             workspace: '{workspace}'\n\
             governance: {{autonomy: full, paths: {{read: ['**'], write: ['**']}}}}\n"
        )
    };
    Setup::new()
        .agent("own", &agent("writer", "own/{run_id}", "file_ops"))
        .agent("talks", &agent("writer", "chats/{session_id}/files", "file_ops"))
        .agent("shared", &agent("writer", "shared", "file_ops"))
        .agent("leads", &agent("lead", "leads/{session_id}", "'agent:own'"))
        .scenario("writer", WRITING)
        .scenario("lead", LEADING)
}

async fn run(service: &Service, agent: &str, body: &Value) -> Value {
    let run = service.run(agent, body).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    run["run_id"].clone()
}

fn entries(service: &Service, directory: &str) -> Vec<String> {
    let directory = service.dir.path().join("workspace").join(directory);
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

async fn a_session_takes_its_files_along(db: Db) {
    let service = setup().start(db).await;
    for session in ["one", "two", "a/b ../c"] {
        run(&service, "talks", &json!({"session_id": session, "inputs": {"n": 1}})).await;
    }
    run(&service, "leads", &json!({"session_id": "lead"})).await;
    run(&service, "shared", &json!({"session_id": "shares"})).await;
    assert_eq!(
        (entries(&service, "default/chats").len(), entries(&service, "default/own").len()),
        (3, 1)
    );

    let path = "/v1/agents/talks/invoke-iterative";
    let soon = chrono::Utc::now() + chrono::TimeDelta::days(1);
    let later = json!({"session_id": "one", "available_at": soon});
    let waiting =
        service.request(Method::POST, path).header("prefer", "respond-async").json(&later);
    let waiting = answer(waiting).await;
    assert_eq!(waiting.status, 202, "{:#}", waiting.body);
    let busy = service.delete("/v1/sessions/one").await;
    assert_eq!((busy.status.as_u16(), &busy.body["code"]), (409, &json!("SESSION_BUSY")));
    assert_eq!(service.get("/v1/sessions/one/files/made.txt").await.body, "made 1", "they stay");
    let waiting = waiting.headers["location"].to_str().unwrap().to_owned();
    service.post(&format!("{waiting}/cancel"), &json!({})).await;
    service.until(&waiting, |run| run["status"] == "cancelled").await;

    for (session, left) in [("one", 2), ("a%2Fb%20..%2Fc", 1)] {
        assert_eq!(service.delete(&format!("/v1/sessions/{session}")).await.status, 204);
        assert_eq!(entries(&service, "default/chats").len(), left, "{session}");
    }
    assert_eq!(
        service.get("/v1/sessions/two/files/made.txt").await.body,
        "made 1",
        "of another one"
    );
    for session in ["lead", "shares"] {
        assert_eq!(service.delete(&format!("/v1/sessions/{session}")).await.status, 204);
    }
    assert_eq!(entries(&service, "default/own"), Vec::<String>::new(), "of the child");
    assert_eq!(entries(&service, "default/leads"), Vec::<String>::new());
    assert_eq!(entries(&service, "default/shared"), ["made.txt"], "of all runs of the agent");
    assert_eq!(entries(&service, ".deleted"), Vec::<String>::new(), "and nowhere else");
    let audit = service.get("/v1/audit?action=session.deleted").await.body;
    let told = |at: usize| match &audit["data"][at]["arguments"] {
        Value::String(text) => serde_json::from_str(text).unwrap(),
        details => details.clone(),
    };
    assert_eq!(
        (&told(0)["workspaces"], &told(1)["workspaces"]),
        (&json!(0), &json!(2)),
        "{audit:#}"
    );

    run(&service, "talks", &json!({"session_id": "one", "inputs": {"n": 2}})).await;
    assert_eq!(service.get("/v1/sessions/one/files/made.txt").await.body, "made 2", "anew");
}

async fn a_session_whose_deletion_fails_keeps_its_files(db: Db) {
    let service = setup().start(db).await;
    run(&service, "talks", &json!({"session_id": "s", "inputs": {"n": 1}})).await;
    run(&service, "talks", &json!({"session_id": "other"})).await;
    let (refuse, allow) = if service.database_url.starts_with("postgres") {
        (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             RAISE EXCEPTION 'refused'; END $$; \
             CREATE TRIGGER refuse BEFORE INSERT ON audit_log FOR EACH ROW \
             WHEN (NEW.action = 'session.deleted') EXECUTE FUNCTION refuse()",
            "DROP TRIGGER refuse ON audit_log",
        )
    } else {
        (
            "CREATE TRIGGER refuse BEFORE INSERT ON audit_log \
             WHEN NEW.action = 'session.deleted' BEGIN SELECT RAISE(ABORT, 'refused'); END",
            "DROP TRIGGER refuse",
        )
    };
    crate::claims::change(&service, refuse).await;
    let refused = service.delete("/v1/sessions/s").await;
    assert!(refused.status.is_server_error(), "{:#}", refused.body);
    assert_eq!(service.get("/v1/sessions/s/files/made.txt").await.body, "made 1");
    crate::claims::change(&service, allow).await;
    assert_eq!(service.delete("/v1/sessions/other").await.status, 204);
    assert_eq!(service.get("/v1/sessions/s/files/made.txt").await.body, "made 1");
    assert_eq!(service.delete("/v1/sessions/s").await.status, 204);
    assert_eq!(entries(&service, "default/chats"), Vec::<String>::new());
    assert_eq!(entries(&service, ".deleted"), Vec::<String>::new());
}

async fn a_run_takes_its_own_files_along_when_it_was_kept_for_long_enough(db: Db) {
    let service = setup().config("[runtime]\nretention = \"1s\"").start(db).await;
    let own = run(&service, "own", &json!({})).await;
    run(&service, "talks", &json!({"session_id": "s"})).await;
    let last = run(&service, "shared", &json!({})).await;
    for run in [own, last] {
        let path = format!("/v1/runs/{}", run.as_str().unwrap());
        service.until(&path, |answer| answer["code"] == "NOT_FOUND").await;
    }
    service.until("/v1/sessions/s", |answer| answer["code"] == "NOT_FOUND").await;
    let audit = service.get("/v1/audit?action=runs.deleted").await.body;
    assert!(audit.to_string().contains("workspaces"), "{audit:#}");
    assert_eq!(entries(&service, "default/own"), Vec::<String>::new());
    assert_eq!(entries(&service, "default/chats"), Vec::<String>::new());
    assert_eq!(entries(&service, "default/shared"), ["made.txt"]);
}

async fn lists_say_which_run_or_caller_changed_a_file(db: Db) {
    let service = setup().start(db).await;
    let first = run(&service, "talks", &json!({"session_id": "s", "inputs": {"n": 1}})).await;
    let of_session = "/v1/sessions/s/files";
    let who = async |list: &str, path: &str| {
        let listed = service.get(list).await.body;
        let files = listed["data"].as_array().unwrap().clone();
        let file = files.into_iter().find(|file| file["path"] == path);
        let file = file.unwrap_or_else(|| panic!("{path} is not in {listed:#}"));
        [
            file["changed_by"].clone(),
            file["changed_by_run"].clone(),
            file["changed_by_subject"].clone(),
        ]
    };
    let call_of = async |run: &Value| {
        let calls =
            service.get(&format!("/v1/runs/{}/tool-calls", run.as_str().unwrap())).await.body;
        calls["data"][0]["id"].clone()
    };
    let list_of = |run: &Value| format!("/v1/runs/{}/files", run.as_str().unwrap());
    let by_first = [call_of(&first).await, first.clone(), Value::Null];
    assert_eq!(who(of_session, "made.txt").await, by_first);
    let second = run(&service, "talks", &json!({"session_id": "s", "inputs": {"n": 2}})).await;
    let by_second = [call_of(&second).await, second.clone(), Value::Null];
    for list in [of_session, &list_of(&second), &list_of(&first)] {
        assert_eq!(who(list, "made.txt").await, by_second, "{list}");
    }

    let shared = run(&service, "shared", &json!({})).await;
    let of_agent = "/v1/agents/shared/files";
    let by_run = [call_of(&shared).await, shared.clone(), Value::Null];
    assert_eq!(who(of_agent, "made.txt").await, by_run);
    let put = service.request(Method::PUT, &format!("{of_agent}/made.txt")).body("put there");
    assert_eq!(answer(put).await.status, 204);
    let audit = service.get("/v1/audit?action=file.written").await.body;
    let subject = audit["data"][0]["subject"].clone();
    assert!(subject.is_string(), "{audit:#}");
    let by_caller = [Value::Null, Value::Null, subject];
    for list in [of_agent, &list_of(&shared)] {
        assert_eq!(who(list, "made.txt").await, by_caller, "{list}");
    }
    let form = "--b\r\nContent-Disposition: form-data; name=files; filename=\"in.csv\"\r\n\r\nx\r\n--b--\r\n";
    let came = service.request(Method::POST, "/v1/agents/own/invoke-iterative").body(form);
    let came = answer(came.header("content-type", "multipart/form-data; boundary=b")).await.body;
    assert_eq!(who(&list_of(&came["run_id"]), "in.csv").await, by_caller);
    let copy = json!({"files": [{"path": "copy.csv", "from": {"run_id": came["run_id"], "path": "in.csv"}}]});
    let copied = run(&service, "own", &copy).await;
    assert_eq!(who(&list_of(&copied), "copy.csv").await, by_caller);

    // A writer that the service does not know.
    let path = service.dir.path().join("workspace/default/shared/made.txt");
    std::fs::write(path, "by a stranger").unwrap();
    assert_eq!(who(of_agent, "made.txt").await, [Value::Null, Value::Null, Value::Null]);
}
