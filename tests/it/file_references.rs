//! Files that an invocation names in other workspaces: each run gets a copy before it begins.
//!
//! | | |
//! |---|---|
//! | children, handoffs | of the agent that is invoked; a child has its own workspace |
//! | parked runs, delays | the copy is made when the run is accepted, whatever waits afterwards |
//! | sessions, agents | sources like runs |
//! | cancel | the copy stays, as an uploaded file does |
//! | crash | a file without its run stays; the same request puts it there again |
//! | another replica | files are where the workspace is; the interface does not know |
//! | streaming | the same body |
//! | tenants | another tenant's run, session or workspace is not there |
//! | budgets, skills | of agents; the workspace's quota counts copies |
//! | dry run | refuses the same, and makes nothing |
//! | command line | `a_run_gets_copies_of_files_of_others` |
//! | console | requests of the API |
//! | generated clients | `FileReference` (clients.rs) |

use reqwest::Method;
use serde_json::{Value, json};

use crate::commands::toolloop;
use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_run_gets_copies_of_files_of_others,
    files_that_cannot_be_copied_are_refused_also_by_a_dry_run,
    a_crash_before_the_start_costs_a_repetition,
    copies_outlive_handoffs_and_parks_and_belong_to_sessions,
    a_refused_path_leaves_no_workspace,
}

const SCOPES: [&str; 4] = ["agents:invoke", "agents:read", "files:read", "files:write"];

const WRITING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: out/made.txt, content: made}}]
  - {text: done}
";

const READING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: in/data.csv}}]
  - {text: '{{ results[0] }}'}
";

fn setup() -> Setup {
    let agent = |scenario: &str, workspace: &str| {
        format!(
            "model: scripted/{scenario}\ntools: [file_ops]\nenable_double_confirmation: false\n\
             workspace: '{workspace}'\ngovernance: {{autonomy: full, paths: {{read: ['in/**', 'out/**'], \
             write: ['out/**'], deny: ['**/.env']}}}}\n"
        )
    };
    Setup::new()
        .agent("own", &agent("writer", "own/{run_id}"))
        .agent("talks", &agent("writer", "talks/{session_id}"))
        .agent("shared", &agent("writer", "shared"))
        .agent("reads", &agent("reader", "reads/{run_id}"))
        .agent("remembers", &agent("reader", "remembers/{session_id}"))
        .scenario("writer", WRITING)
        .scenario("reader", READING)
}

/// The id of a run that has made a file.
async fn made(service: &Service, agent: &str, body: &Value) -> String {
    let run = service.run(agent, body).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    run["run_id"].as_str().unwrap().to_owned()
}

fn copy(from: &Value) -> Value {
    json!({"files": [{"path": "in/data.csv", "from": from}]})
}

async fn invoke(service: &Service, agent: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    let mut request = service.request(Method::POST, &path).json(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    answer(request).await
}

async fn put(service: &Service, path: &str, content: &'static str) -> u16 {
    answer(service.request(Method::PUT, path).body(content)).await.status.as_u16()
}

async fn key(service: &Service, tenant: &str, scopes: &[&str]) -> String {
    let wanted = json!({"name": "k", "tenant": tenant, "scopes": scopes});
    service.post("/v1/keys", &wanted).await.body["key"].as_str().unwrap().to_owned()
}

#[expect(clippy::too_many_lines, reason = "one story")]
async fn a_run_gets_copies_of_files_of_others(db: Db) {
    let mut service = setup().start(db).await;
    let run = made(&service, "own", &json!({})).await;
    made(&service, "talks", &json!({"session_id": "s 1"})).await;
    made(&service, "shared", &json!({})).await;
    let of_run = json!({"run_id": run, "path": "out/made.txt"});
    let sources = [
        of_run.clone(),
        json!({"session_id": "s 1", "path": "out/made.txt"}),
        json!({"agent": "shared", "path": "out/../out/made.txt"}),
    ];
    for from in &sources {
        let done = service.run("reads", &copy(from)).await;
        assert!(done["output"].to_string().contains("made"), "{from}: {done:#}");
        let path =
            format!("/v1/audit?action=file.written&run_id={}", done["run_id"].as_str().unwrap());
        let audit = service.get(&path).await.body;
        let act: Value = match &audit["data"][0]["arguments"] {
            Value::String(text) => serde_json::from_str(text).unwrap(),
            details => details.clone(),
        };
        assert_eq!((&act["path"], &act["from"]), (&json!("in/data.csv"), from), "{audit:#}");
    }

    // The same of the command line, where a file is named by its address in the API.
    let address = service.url("");
    let named = async |file: &str| {
        let arguments =
            ["invoke", "reads", "--file", file, "--server", &address, "--key", &service.key];
        toolloop(service.dir.path(), &arguments).await
    };
    for from in [
        format!("in/data.csv=/v1/runs/{run}/files/out%2Fmade.txt"),
        "in/data.csv=sessions/s%201/files/out/made.txt".to_owned(),
        "in/data.csv=agents/shared/files/out/made.txt".to_owned(),
    ] {
        let said = named(&from).await;
        assert!(said.code == Some(0) && said.out.contains("made"), "{from}: {}", said.err);
    }
    let missing = named(&format!("in/data.csv=runs/{run}/files/out/gone.txt")).await;
    assert!(
        missing.code == Some(1) && missing.err.contains("there is no such file"),
        "{}",
        missing.err
    );
    let wrong = named("in/data.csv=out/made.txt").await;
    assert!(wrong.code == Some(2) && wrong.err.contains("PATH=ADDRESS"), "{}", wrong.err);

    // A repeated key finds its run, whatever became of the source; another source is another request.
    let key = &[("idempotency-key", "one"), ("prefer", "respond-async")][..];
    let body = json!({"session_id": "s", "files": copy(&of_run)["files"]});
    let queued = invoke(&service, "remembers", key, &body).await;
    assert_eq!(queued.status, 202, "{:#}", queued.body);
    let path = queued.headers["location"].to_str().unwrap().to_owned();
    let done = service.until(&path, |run| run["status"] == "completed").await;
    assert!(done["output"].to_string().contains("made"), "{done:#}");
    let source = format!("/v1/runs/{run}/files/out/made.txt");
    assert_eq!(put(&service, &source, "changed since").await, 204);
    let copied = "/v1/sessions/s/files/in/data.csv";
    let again = invoke(&service, "remembers", key, &body).await;
    assert_eq!(
        (again.status.as_u16(), &again.headers["idempotency-replayed"]),
        (200, &"true".parse().unwrap())
    );
    assert_eq!(service.get(copied).await.body, "made", "it is no link");
    let other = json!({"session_id": "s", "files": copy(&sources[1])["files"]});
    let other = invoke(&service, "remembers", key, &other).await;
    assert_eq!(other.body["code"], "IDEMPOTENCY_MISMATCH");
    assert_eq!(put(&service, copied, "its own").await, 204);
    assert_eq!(service.get(&source).await.body, "changed since");

    // Beside received files, in the order of the pointers of each.
    let form = format!(
        "--b\r\nContent-Disposition: form-data; name=request\r\n\r\n{}\r\n--b\r\nContent-Disposition: \
         form-data; name=files; filename=\"in/more.csv\"\r\n\r\nmore\r\n--b--\r\n",
        copy(&of_run)
    );
    let both = service.request(Method::POST, "/v1/agents/reads/stream").body(form);
    let both = answer(both.header("content-type", "multipart/form-data; boundary=b")).await;
    let run = both.headers["x-run-id"].to_str().unwrap().to_owned();
    let listed = service.get(&format!("/v1/runs/{run}/files")).await.body;
    let paths: Vec<_> =
        listed["data"].as_array().unwrap().iter().map(|file| &file["path"]).collect();
    assert_eq!(paths, ["in/data.csv", "in/more.csv"]);

    // The scopes of both ends.
    let admin = service.key.clone();
    for (missing, left) in [("files:read", [0, 1, 3]), ("files:write", [0, 1, 2])] {
        let scopes = [&left.map(|i| SCOPES[i])[..], &["tools:execute"]].concat();
        service.key = self::key(&service, "default", &scopes).await;
        for route in ["invoke", "invoke-iterative", "stream", "dry-run"] {
            let refused = service.post(&format!("/v1/agents/reads/{route}"), &copy(&of_run)).await;
            assert_eq!(refused.status, 403, "{route}");
            assert!(
                refused.body["detail"].as_str().unwrap().contains(missing),
                "{:#}",
                refused.body
            );
        }
        service.key.clone_from(&admin);
    }
    // Of other tenants there is nothing.
    service.key = self::key(&service, "other", &["admin"]).await;
    for from in &sources {
        let refused = service.post("/v1/agents/reads/invoke", &copy(from)).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (422, &json!("INVALID_INPUTS")),
            "{from}"
        );
    }
    service.key = admin;
}

async fn files_that_cannot_be_copied_are_refused_also_by_a_dry_run(db: Db) {
    let limits = "[tools.file_ops]\nmax_file = \"1KiB\"\nworkspace_quota = \"2KiB\"\n";
    let service = setup().config(limits).start(db).await;
    let run = made(&service, "own", &json!({})).await;
    let workspace = service.dir.path().join("workspace/default");
    let own = workspace.join(format!("own/r-{run}"));
    std::fs::create_dir_all(own.join("in/dir")).unwrap();
    for (path, size) in [("in/.env", 1), ("plain.txt", 1), ("in/large", 1025), ("in/kib", 1024)] {
        std::fs::write(own.join(path), vec![b'x'; size]).unwrap();
    }
    std::fs::write(workspace.join("outside"), "secret").unwrap();
    std::os::unix::fs::symlink("../../../outside", own.join("in/link")).unwrap();
    let file =
        |path: &str, from: &str| json!({"path": path, "from": {"run_id": run, "path": from}});
    let good = file("in/a", "out/made.txt");
    let unknown = json!({"run_id": uuid::Uuid::now_v7(), "path": "out/made.txt"});
    let of = |from: Value| vec![good.clone(), json!({"path": "in/b", "from": from})];
    let mut refused = vec![
        ("/files/1/from/run_id", of(unknown)),
        ("/files/1/from/session_id", of(json!({"session_id": "none", "path": "out/made.txt"}))),
        ("/files/1/from/agent", of(json!({"agent": "own", "path": "out/made.txt"}))),
        ("/files/1/from/agent", of(json!({"agent": "nobody", "path": "out/made.txt"}))),
        ("/files/1/from", of(json!({"agent": "own", "run_id": run, "path": "out/made.txt"}))),
        ("/files/1/from", of(json!({"path": "out/made.txt"}))),
        ("/files/1/path", vec![good.clone(), file("in/./a", "out/made.txt")]),
        ("/files/1/path", vec![good.clone(), file("in/a/b", "out/made.txt")]),
        ("/files", vec![good.clone(); 65]),
    ];
    for from in
        ["in/.env", "plain.txt", "in/link", "in/dir", "in/none", "../own", "/etc/passwd", "", "."]
    {
        refused.push(("/files/0/from/path", vec![file("in/a", from)]));
    }
    for path in
        ["in/.env", "plain.txt", "in/", "", ".", "../a", "/etc/passwd", "in/.toolloop-x.tmp"]
    {
        refused.push(("/files/0/path", vec![file(path, "out/made.txt")]));
    }
    let kib = |path: &str| file(path, "in/kib");
    let too_much = [json!([file("in/a", "in/large")]), json!([kib("in/b"), kib("in/c"), good])];
    let shapes =
        [json!([{"path": "in/a"}]), json!({}), json!([{"path": "in/a", "from": {}, "x": 1}])];
    for route in ["dry-run", "invoke-iterative"] {
        let ask = async |files: &Value| {
            let path = format!("/v1/agents/reads/{route}");
            service.post(&path, &json!({"files": files})).await
        };
        for (pointer, files) in &refused {
            let said = ask(&json!(files)).await;
            assert_eq!(said.status, 422, "{pointer}: {:#}", said.body);
            assert_eq!(said.body["errors"][0]["pointer"], *pointer, "{:#}", said.body);
        }
        for files in &too_much {
            let said = ask(files).await;
            let told = (said.status.as_u16(), &said.body["code"]);
            assert_eq!(told, (413, &json!("PAYLOAD_TOO_LARGE")), "{:#}", said.body);
        }
        for files in &shapes {
            let said = ask(files).await;
            assert_eq!(said.status, 422, "{:#}", said.body);
            assert!(said.body["errors"][0]["pointer"].as_str().unwrap().starts_with("/files"));
        }
        assert!(!workspace.join("reads").exists(), "{route}: nothing was made");
    }
    let dry = service.post("/v1/agents/reads/dry-run", &json!({"files": [good]})).await;
    assert_eq!(dry.status, 200, "{:#}", dry.body);
    assert!(!workspace.join("reads").exists(), "nor by one that is not refused");

    refused_by_existing_files(&service, &file, &good).await;
    let left = std::fs::read_dir(&workspace).unwrap();
    let mut left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!left.any(|name| name.starts_with(".toolloop-")), "all copies are gone");
}

/// A workspace that is there has something in it.
async fn refused_by_existing_files(
    service: &Service,
    file: &impl Fn(&str, &str) -> Value,
    good: &Value,
) {
    made(service, "shared", &json!({})).await;
    let full = json!({"files": [file("in/a", "in/kib"), file("in/b", "in/kib")]});
    for route in ["dry-run", "invoke-iterative"] {
        let path = format!("/v1/agents/shared/{route}");
        let said = service.post(&path, &full).await;
        assert_eq!(said.status, 413, "{:#}", said.body);
        for in_the_way in ["out/made.txt/x", "out/made.txt/x/y", "out"] {
            let files = json!({"files": [good, file(in_the_way, "out/made.txt")]});
            let said = service.post(&path, &files).await;
            assert_eq!(said.status, 422, "{in_the_way}: {:#}", said.body);
            assert_eq!(said.body["errors"][0]["pointer"], "/files/1/path", "{:#}", said.body);
        }
    }
}

async fn a_crash_before_the_start_costs_a_repetition(db: Db) {
    let mut service = setup().config("[runtime]\nlease = \"2s\"").start(db).await;
    let run = made(&service, "own", &json!({})).await;
    service.kill().await;
    service.restart_to_crash("before_commit:1").await;
    let body = json!({"session_id": "s", "files": copy(&json!({"run_id": run, "path": "out/made.txt"}))["files"]});
    let path = "/v1/agents/remembers/invoke-iterative";
    let request = |service: &Service| {
        service.request(Method::POST, path).json(&body).header("Idempotency-Key", "k")
    };
    assert!(request(&service).send().await.is_err(), "it died on the way");
    let copied = service.dir.path().join("workspace/default/remembers/s-s/in/data.csv");
    assert_eq!(std::fs::read(&copied).unwrap(), b"made", "copied, and no run of it");
    std::fs::remove_file(copied).unwrap();
    service.restart().await;
    assert_eq!(service.get("/v1/sessions/s").await.status, 404);
    let done = answer(request(&service)).await.body;
    assert!(done["output"].to_string().contains("made"), "{done:#}");
}

async fn copies_outlive_handoffs_and_parks_and_belong_to_sessions(db: Db) {
    let agent = |scenario: &str, tools: &str, workspace: &str| {
        format!(
            "model: scripted/{scenario}\ntools: [{tools}]\nenable_double_confirmation: false\n\
             workspace: '{workspace}'\ngovernance: {{autonomy: supervised, paths: {{write: ['**']}}}}\n"
        )
    };
    let handing = "steps: [{tool_calls: [{tool: transfer_to_WHO, arguments: {}}]}, {text: '{{ results[0] }}'}]";
    let deleting = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: delete, path: old.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: in/data.csv}}]
  - {text: '{{ results[0] }}'}
";
    let setup = setup()
        .agent("boss", &agent("to-mate", "transfer_to_mate", "team"))
        .agent("mate", &agent("reader", "file_ops", "team"))
        .agent("far-boss", &agent("to-stranger", "transfer_to_stranger", "far/{run_id}"))
        .agent("stranger", &agent("reader", "file_ops", "strange/{run_id}"))
        .agent("cleans", &agent("deleter", "file_ops", "cleans/{session_id}"))
        .scenario("to-mate", &handing.replace("WHO", "mate"))
        .scenario("to-stranger", &handing.replace("WHO", "stranger"))
        .scenario("deleter", deleting);
    let mut service = setup.start(db).await;
    let run = made(&service, "own", &json!({})).await;
    let from = json!({"run_id": run, "path": "out/made.txt"});

    // A worker reads it where both share a workspace, and nowhere else.
    let done = service.run("boss", &copy(&from)).await;
    assert!(done["output"].to_string().contains("made"), "{done:#}");
    let done = service.run("far-boss", &copy(&from)).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert!(done["output"].to_string().contains("does not exist"), "{done:#}");

    // Parked, with a session whose workspace it is; the source is gone and the replica another one.
    let body = json!({"session_id": "s", "files": [
        {"path": "in/data.csv", "from": from}, {"path": "old.txt", "from": from}]});
    let parked = invoke(&service, "cleans", &[], &body).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let source = format!("/v1/runs/{run}/files/out/made.txt");
    assert_eq!(service.delete(&source).await.status, 204);
    service.kill().await;
    service.restart().await;
    let (path, calls) = crate::approvals::paths(&parked.body);
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
    let done = service.until(&path, |run| run["status"] == "completed").await;
    assert!(done["output"].to_string().contains("made"), "{done:#}");
    assert_eq!(service.get("/v1/sessions/s/files/in/data.csv").await.body, "made");
    assert_eq!(service.get("/v1/sessions/s/files/old.txt").await.status, 404);

    // Another run of the session may bring it from there again, into its own place even.
    let own = json!({"session_id": "s", "path": "in/data.csv"});
    let body = json!({"session_id": "s", "files": [
        {"path": "in/data.csv", "from": own}, {"path": "old.txt", "from": own}]});
    let parked = invoke(&service, "cleans", &[], &body).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let (path, _) = crate::approvals::paths(&parked.body);
    // Neither does a run that never goes on take it along.
    service.post(&format!("{path}/cancel"), &json!({})).await;
    service.until(&path, |run| run["status"] == "cancelled").await;
    assert_eq!(service.get("/v1/sessions/s/files/old.txt").await.body, "made");
}

async fn a_refused_path_leaves_no_workspace(db: Db) {
    let service = setup().start(db).await;
    let run = made(&service, "own", &json!({})).await;
    for path in ["../out.csv", "in/.env", ""] {
        let from = json!({"run_id": run, "path": "out/made.txt"});
        let body = json!({"files": [{"path": path, "from": from}]});
        let refused = invoke(&service, "reads", &[], &body).await;
        assert_eq!(refused.status, 422, "{path}: {:#}", refused.body);
    }
    let made = service.dir.path().join("workspace/default/reads");
    assert!(!made.exists(), "{:?}", std::fs::read_dir(&made).map(Iterator::count));

    // A directory cannot be deleted; null is no body.
    let deleted = service.delete(&format!("/v1/runs/{run}/files/out")).await;
    assert_eq!((deleted.status.as_u16(), &deleted.body["code"]), (409, &json!("FILE_CONFLICT")));
    assert!(
        deleted.body["detail"].as_str().unwrap().contains("is a directory"),
        "{:#}",
        deleted.body
    );
    assert_eq!(service.delete(&format!("/v1/runs/{run}/files/none")).await.status, 404);
    let run = service.post("/v1/agents/reads/invoke-iterative", &Value::Null).await;
    assert_eq!(
        (run.status.as_u16(), &run.body["status"]),
        (200, &json!("completed")),
        "{:#}",
        run.body
    );
}
