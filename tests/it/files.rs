//! Files of runs, sessions and agents, over HTTP and on the command line.
//!
//! | | |
//! |---|---|
//! | children, handoffs | a child has the workspace of its own definition, under its own rules |
//! | parked, queued runs | their files are reached like others'; what came with a queued run is there |
//! | sessions | one directory of theirs, or none (404) |
//! | cancel, crash | a file is in its place or not: it is staged beside, and renamed |
//! | another replica | the file system decides; the interface does not know |
//! | streaming | contents stream in both directions, and are not compressed |
//! | tenants | a run, a session and a workspace of another tenant are not there |
//! | budgets, skills, gate | of agents; callers have scopes, the agent's paths and the quota |
//! | the same request twice | a repeated idempotency key, and a taken id, replace no file |
//! | dry run | nothing is put anywhere; what would be refused is |
//! | events | what callers change is in the audit log, and in no run's `/changes` |
//! | generated clients | operations of the document (api.rs) |

use std::os::unix::fs::symlink;
use std::process::Stdio;

use chrono::{DateTime, TimeDelta, Utc};
use futures::{StreamExt as _, stream};
use reqwest::header::HeaderMap;
use reqwest::{Method, StatusCode};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::{Connection as _, PgConnection};
use tokio::io::AsyncWriteExt as _;

use crate::service::{Db, Service, Setup, command, on_both_stores, pause};

on_both_stores! {
    a_file_is_put_read_replaced_and_deleted,
    lists_are_sorted_and_paged,
    rules_and_tenants_hide_files,
    files_come_with_an_invocation,
    a_repeated_or_refused_invocation_replaces_no_file,
    of_two_invocations_at_once_the_refused_one_leaves_no_file,
    broken_bodies_are_refused,
}

const RULES: &str = "governance: {autonomy: full, paths: {read: ['in/**', 'out/**'], write: ['out/**'], deny: ['**/.env']}}\n";

fn agent(workspace: &str) -> String {
    format!(
        "model: scripted/writer\ntools: [file_ops]\nenable_double_confirmation: false\n\
         workspace: '{workspace}'\n{RULES}"
    )
}

const WRITING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: out/made.txt, content: made}}]
  - {text: done}
";

fn setup() -> Setup {
    Setup::new()
        .agent("own", &agent("own/{run_id}"))
        .agent("talks", &agent("talks/{session_id}"))
        .agent("shared", &agent("shared"))
        .scenario("writer", WRITING)
}

fn etag(content: &[u8]) -> String {
    format!("\"{}\"", hex::encode(Sha256::digest(content)))
}

struct Said {
    status: u16,
    headers: HeaderMap,
    bytes: Vec<u8>,
}

impl Said {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap()
    }
}

async fn ask(
    service: &Service,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Said {
    let mut request = service.request(method, path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.body(body.to_vec()).send().await.unwrap();
    let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
    Said { status, headers, bytes: answer.bytes().await.unwrap().to_vec() }
}

async fn get(service: &Service, path: &str) -> Said {
    ask(service, Method::GET, path, &[], b"").await
}

async fn put(service: &Service, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Said {
    ask(service, Method::PUT, path, headers, body).await
}

async fn run(service: &Service, agent: &str) -> String {
    let run = service.run(agent, &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    format!("/v1/runs/{}/files", run["run_id"].as_str().unwrap())
}

async fn key(service: &Service, body: &Value) -> String {
    let made = service.post("/v1/keys", body).await;
    assert_eq!(made.status, 201, "{:#}", made.body);
    made.body["key"].as_str().unwrap().to_owned()
}

async fn a_file_is_put_read_replaced_and_deleted(db: Db) {
    let service = setup().start(db).await;
    let files = run(&service, "own").await;
    let made = get(&service, &format!("{files}/out/made.txt")).await;
    assert_eq!((made.status, made.bytes.as_slice()), (200, b"made".as_slice()));
    assert_eq!(made.header("etag"), etag(b"made"));
    assert_eq!(made.header("content-type"), "text/plain; charset=utf-8");
    assert_eq!(made.header("x-content-type-options"), "nosniff");

    let listed = service.get(&files).await.body;
    let calls = service.get(&files.replace("/files", "/tool-calls")).await.body;
    assert_eq!(listed["data"][0]["changed_by"], calls["data"][0]["id"], "{listed:#}");

    let path = format!("{files}/in/data%20one.html");
    let new = put(&service, &path, &[("if-none-match", "*")], b"<b>0123456789</b>").await;
    assert_eq!((new.status, new.header("etag")), (201, &*etag(b"<b>0123456789</b>")));
    let location = new.header("location").to_owned();
    let read = get(&service, &location).await;
    assert_eq!((read.status, read.bytes.as_slice()), (200, b"<b>0123456789</b>".as_slice()));
    assert!(read.header("content-disposition").starts_with("attachment;"), "{:?}", read.headers);
    assert_eq!(read.header("content-length"), "17");
    assert_eq!(put(&service, &path, &[("if-none-match", "*")], b"x").await.status, 412);
    assert_eq!(put(&service, &path, &[("if-match", "\"other\"")], b"x").await.status, 412);

    let head = ask(&service, Method::HEAD, &path, &[], b"").await;
    assert_eq!((head.status, head.bytes.len(), head.header("content-length")), (200, 0, "17"));
    for range in ["bytes=3-5", "bytes=17-"] {
        let head = ask(&service, Method::HEAD, &path, &[("range", range)], b"").await;
        assert_eq!((head.status, head.header("content-length")), (200, "17"), "{range}");
        assert!(!head.headers.contains_key("content-range"), "{range}");
    }
    for (range, status, content) in [
        ("bytes=3-5", 206, b"012".as_slice()),
        ("bytes=-4", 206, b"</b>"),
        ("bytes=13-99", 206, b"</b>"),
        ("bytes=17-", 416, b""),
        ("bytes=0-1,3-4", 200, b"<b>0123456789</b>"),
    ] {
        let part = ask(&service, Method::GET, &path, &[("range", range)], b"").await;
        let of = if status == 416 { "bytes */17" } else { part.header("content-range") };
        assert_eq!(part.header("content-range"), of);
        assert_eq!(part.status, status, "{range}");
        if status == 416 {
            assert_eq!(part.json()["code"], "RANGE_NOT_SATISFIABLE");
        } else {
            assert_eq!(part.bytes, content, "{range}");
        }
    }
    let part = ask(&service, Method::GET, &path, &[("range", "bytes=3-5")], b"").await;
    assert_eq!(part.header("content-range"), "bytes 3-5/17");
    let tag = etag(b"<b>0123456789</b>");
    a_condition_is_looked_at(&service, &path, &tag).await;

    let large = vec![b'z'; 3 << 20];
    let replaced = put(&service, &path, &[("if-match", &tag)], &large).await;
    assert_eq!((replaced.status, replaced.header("etag")), (204, &*etag(&large)));
    assert_eq!(get(&service, &path).await.bytes, large);
    assert_eq!(ask(&service, Method::DELETE, &path, &[("if-match", &tag)], b"").await.status, 412);
    assert_eq!(ask(&service, Method::DELETE, &path, &[], b"").await.status, 204);
    assert_eq!(get(&service, &path).await.status, 404);
    assert_eq!(ask(&service, Method::DELETE, &path, &[], b"").await.status, 404);

    let audit = service.get("/v1/audit?action=file.written").await.body;
    let newest = &audit["data"][0];
    assert_eq!(audit["data"].as_array().unwrap().len(), 2, "{audit:#}");
    assert_eq!(newest["subject"], "testadmin");
    assert_eq!(newest["arguments"]["path"], "in/data one.html", "{newest:#}");
    let deleted = service.get("/v1/audit?action=file.deleted").await.body;
    assert_eq!(deleted["data"].as_array().unwrap().len(), 1);
}

/// Of a file of 17 bytes with this tag.
async fn a_condition_is_looked_at(service: &Service, path: &str, tag: &str) {
    for (name, tag, status) in [
        ("if-none-match", tag, 304),
        ("if-none-match", "\"other\"", 200),
        ("if-match", "\"other\"", 412),
        ("if-match", tag, 200),
    ] {
        for method in [Method::GET, Method::HEAD] {
            let known = ask(service, method.clone(), path, &[(name, tag)], b"").await;
            assert_eq!(known.status, status, "{method}: {name}: {tag}");
            let length = known.headers.get("content-length").map(|it| it.to_str().unwrap());
            match status {
                200 => assert_eq!(length, Some("17"), "{method}: {name}: {tag}"),
                304 => assert_eq!(length, None, "{method}: it is not that of the file"),
                _ => {}
            }
        }
    }
}

async fn lists_are_sorted_and_paged(db: Db) {
    let service = setup().start(db).await;
    let files = "/v1/agents/shared/files";
    for path in ["in/b.json", "in/a.txt", "out/c.bin", "in/deep/er/d.md"] {
        assert_eq!(
            put(&service, &format!("{files}/{path}"), &[], path.as_bytes()).await.status,
            201
        );
    }
    symlink("in/a.txt", service.dir.path().join("workspace/default/shared/link")).unwrap();
    let listed = service.get(files).await.body;
    let paths: Vec<&str> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["path"].as_str().unwrap())
        .collect();
    assert_eq!(paths, ["in/a.txt", "in/b.json", "in/deep/er/d.md", "out/c.bin"]);
    let first = &listed["data"][0];
    assert_eq!(first.as_object().unwrap().len(), 8, "{first:#}");
    assert_eq!(
        (&first["size"], &first["etag"], &first["media_type"], &first["changed_by"]),
        (&json!(8), &json!(etag(b"in/a.txt")), &json!("text/plain; charset=utf-8"), &Value::Null)
    );
    assert!(DateTime::parse_from_rfc3339(first["modified_at"].as_str().unwrap()).is_ok());
    for (prefix, count) in
        [("in/", 3), ("in/de", 1), ("in", 3), ("out/c.bin", 1), ("no", 0), ("", 4)]
    {
        let some = service.get(&format!("{files}?prefix={prefix}")).await.body;
        assert_eq!(some["data"].as_array().unwrap().len(), count, "{prefix}");
    }
    assert_eq!(listed_in_pages(&service, files, 3).await, 4);

    let body = json!({"session_id": "s 1"});
    service.run("talks", &body).await;
    let of_session = service.get("/v1/sessions/s%201/files").await.body;
    assert_eq!(of_session["data"][0]["path"], "out/made.txt", "{of_session:#}");
    assert_eq!(get(&service, "/v1/sessions/s%201/files/out/made.txt").await.bytes, b"made");
    for (path, what) in [
        ("/v1/agents/own/files", "each run has its own"),
        ("/v1/agents/talks/files", "each session has its own"),
        ("/v1/agents/nobody/files", "no such agent"),
        ("/v1/sessions/unknown/files", "no such session"),
        ("/v1/runs/01970000-0000-7000-8000-000000000000/files", "no such run"),
        ("/v1/runs/x/files", "no id"),
    ] {
        assert_eq!(service.get(path).await.status, 404, "{what}");
    }
    service.run("shared", &json!({"session_id": "t"})).await;
    assert_eq!(service.get("/v1/sessions/t/files").await.status, 404, "shared by all sessions");
    nothing_comes_late_into_a_session(&service, "talks", "s 1", "out/late.txt").await;
    an_emptied_directory_is_gone(&service, &service, "/v1/agents/shared/files/in").await;
}

/// How many files all pages of a list have.
async fn listed_in_pages(service: &Service, files: &str, limit: u32) -> usize {
    let mut path = format!("{files}?limit={limit}");
    let mut seen = 0;
    loop {
        let page = service.get(&path).await.body;
        seen += page["data"].as_array().unwrap().len();
        let Some(cursor) = page["next_cursor"].as_str() else { return seen };
        path = format!("{files}?limit={limit}&cursor={cursor}");
    }
}

#[tokio::test]
async fn a_list_opens_few_of_many_directories_at_the_same_time() {
    let service = setup().start(Db::Sqlite).await;
    let files = "/v1/agents/shared/files";
    assert_eq!(put(&service, &format!("{files}/in/a"), &[], b"x").await.status, 201);
    let root = service.dir.path().join("workspace/default/shared/in");
    for number in 0..600 {
        let directory = root.join(number.to_string());
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("a"), "x").unwrap();
    }
    let few = Rlimit { current: Some(256), maximum: Some(256) };
    prlimit(Pid::from_raw(service.pid()), Resource::Nofile, few).unwrap();
    assert_eq!(listed_in_pages(&service, files, 200).await, 601);
}

/// Where a file is being sent while its session is deleted.
pub(crate) async fn nothing_comes_late_into_a_session(
    service: &Service,
    agent: &str,
    session: &str,
    path: &str,
) {
    let owner = format!("/v1/sessions/{}", session.replace(' ', "%20"));
    for begins_anew in [false, true] {
        let (more, rest) = tokio::sync::oneshot::channel::<&str>();
        let pieces = stream::once(async { Ok("first ") })
            .chain(stream::once(async move { rest.await.map_err(std::io::Error::other) }));
        let put = service.request(Method::PUT, &format!("{owner}/files/{path}"));
        let put = tokio::spawn(put.body(reqwest::Body::wrap_stream(pieces)).send());
        let staged = service.dir.path().join("workspace/default");
        while !std::fs::read_dir(&staged)
            .unwrap()
            .any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with(".toolloop-"))
        {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(service.delete(&owner).await.status, 204);
        let body = json!({"session_id": session, "inputs": {"line": "new"}});
        if begins_anew {
            service.run(agent, &body).await;
        }
        more.send("last").unwrap();
        assert_eq!(put.await.unwrap().unwrap().status(), 404, "{begins_anew}");
        service.run(agent, &body).await;
        assert_eq!(service.get(&format!("{owner}/files/{path}")).await.status, 404);
    }
}

/// A file can be put where a directory was whose last file was deleted on another replica.
pub(crate) async fn an_emptied_directory_is_gone(one: &Service, other: &Service, files: &str) {
    let directory = format!("{files}/dir");
    for path in ["dir/a/b", "dir/c"] {
        assert_eq!(put(one, &format!("{files}/{path}"), &[], b"x").await.status, 201, "{path}");
    }
    assert_eq!(other.delete(&format!("{directory}/a/b")).await.status, 204);
    assert_eq!(put(one, &directory, &[], b"x").await.json()["code"], "FILE_CONFLICT");
    assert_eq!(put(one, &format!("{directory}/a"), &[], b"x").await.status, 201);
    for path in ["dir/a", "dir/c"] {
        assert_eq!(other.delete(&format!("{files}/{path}")).await.status, 204, "{path}");
    }
    assert_eq!(put(one, &directory, &[], b"x").await.status, 201);
    assert_eq!(other.delete(&directory).await.status, 204);
}

async fn rules_and_tenants_hide_files(db: Db) {
    let mut service = setup().start(db).await;
    let files = run(&service, "shared").await;
    let root = service.dir.path().join("workspace/default/shared");
    std::fs::create_dir_all(root.join("out/.git")).unwrap();
    for path in [".env", "out/.env", "plain.txt"] {
        std::fs::write(root.join(path), "secret").unwrap();
    }
    std::fs::write(service.dir.path().join("workspace/outside.txt"), "secret").unwrap();
    symlink("../../outside.txt", root.join("out/escape")).unwrap();
    symlink("made.txt", root.join("out/within")).unwrap();
    symlink(".env", root.join("out/to-env")).unwrap();
    let listed = service.get(&files).await.body;
    assert!(!listed.to_string().contains("env"), "{listed:#}");
    for path in [
        ".env",
        "out/.env",
        "out/escape",
        "out/to-env",
        "..%2Foutside.txt",
        "%2e%2e/outside.txt",
        "out/..%2F.env",
        "%2Fetc%2Fpasswd",
        "out",
        "out/",
        "out/made.txt/x",
        "a%00b",
        "no-such",
        "a%0Ab",
    ] {
        let path = format!("{files}/{path}");
        assert_eq!(get(&service, &path).await.status, 404, "GET {path}");
        if !path.ends_with("no-such")
            && !path.ends_with("made.txt/x")
            && !path.ends_with("/out")
            && !path.ends_with("/out/")
        {
            let refused = put(&service, &path, &[], b"x").await.status;
            assert_eq!(refused, 404, "PUT {path}");
        }
    }
    assert_eq!(get(&service, &format!("{files}/out/within")).await.bytes, b"made", "within it");
    for method in [Method::GET, Method::PUT, Method::DELETE] {
        let neither_read_nor_written = format!("{files}/plain.txt");
        assert_eq!(ask(&service, method, &neither_read_nor_written, &[], b"x").await.status, 404);
    }
    for directory in ["out", "out/", "out/.git"] {
        let there = put(&service, &format!("{files}/{directory}"), &[], b"x").await;
        assert_eq!(
            (there.status, &there.json()["code"]),
            (409, &json!("FILE_CONFLICT")),
            "{directory}"
        );
    }
    let through = put(&service, &format!("{files}/out/made.txt/x"), &[], b"x").await;
    assert_eq!((through.status, &through.json()["code"]), (409, &json!("FILE_CONFLICT")));
    std::fs::hard_link(root.join("out/made.txt"), root.join("out/twin.txt")).unwrap();
    assert_eq!(put(&service, &format!("{files}/out/made.txt"), &[], b"x").await.status, 409);
    assert_eq!(std::fs::read(root.join("out/twin.txt")).unwrap(), b"made");

    let other = key(&service, &json!({"name": "o", "tenant": "other", "scopes": ["admin"]})).await;
    let reader = key(&service, &json!({"name": "r", "scopes": ["files:read"]})).await;
    let own = std::mem::replace(&mut service.key, reader);
    assert_eq!(get(&service, &format!("{files}/out/made.txt")).await.status, 200);
    assert_eq!(put(&service, &format!("{files}/out/x"), &[], b"x").await.status, 403);
    service.key = other;
    assert_eq!(service.get(&files).await.status, 404);
    assert_eq!(get(&service, &format!("{files}/out/made.txt")).await.status, 404);
    assert_eq!(put(&service, &format!("{files}/out/x"), &[], b"x").await.status, 404);
    assert_eq!(service.get("/v1/agents/shared/files").await.body["data"], json!([]), "its own");
    assert_eq!(get(&service, "/v1/agents/shared/files/out/made.txt").await.status, 404);
    service.key = own;
}

const READING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: in/data.csv}}]
  - {text: '{{ results[0] }}'}
";

const BOUNDARY: &str = "boundary";

/// A multipart body.
fn form(request: &Value, files: &[(&str, &[u8])]) -> Vec<u8> {
    let head = |name: &str| format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name={name}");
    let mut body = format!("{}\r\n\r\n{request}\r\n", head("request")).into_bytes();
    for (path, content) in files {
        let head = format!("{}; filename=\"{path}\"\r\n\r\n", head("files"));
        body.extend([head.as_bytes(), content, b"\r\n"].concat());
    }
    body.extend(format!("--{BOUNDARY}--\r\n").bytes());
    body
}

async fn invoke(service: &Service, agent: &str, headers: &[(&str, &str)], body: &[u8]) -> Said {
    let kind = format!("multipart/form-data; boundary={BOUNDARY}");
    let headers = [&[("content-type", kind.as_str())], headers].concat();
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    ask(service, Method::POST, &path, &headers, body).await
}

fn reading() -> Setup {
    let agent = |workspace: &str| agent(workspace).replace("scripted/writer", "scripted/reader");
    setup()
        .agent("reads", &agent("reads/{run_id}"))
        .agent("remembers", &agent("remembers/{session_id}"))
        .scenario("reader", READING)
}

async fn files_come_with_an_invocation(db: Db) {
    let service = reading().start(db).await;
    let in_the_way: &[(&str, &[u8])] = &[("in/a", b"x"), ("in/a/b", b"y")];
    let refused = invoke(&service, "reads", &[], &form(&json!({}), in_the_way)).await;
    assert_eq!(
        (refused.status, &refused.json()["errors"][0]["pointer"]),
        (422, &json!("/files/1"))
    );
    let files: &[(&str, &[u8])] = &[("in/data.csv", b"a,b"), ("in/deep/raw.bin", b"\0\xff\r\n--")];
    let done = invoke(&service, "reads", &[], &form(&json!({}), files)).await;
    assert_eq!(done.status, 200, "{:?}", done.bytes);
    assert!(done.json()["output"].to_string().contains("a,b"), "{:#}", done.json());
    let run = done.json()["run_id"].as_str().unwrap().to_owned();
    let raw = get(&service, &format!("/v1/runs/{run}/files/in/deep/raw.bin")).await;
    assert_eq!(raw.bytes, b"\0\xff\r\n--");
    let audit = service.get(&format!("/v1/audit?action=file.written&run_id={run}")).await.body;
    assert_eq!(audit["data"].as_array().unwrap().len(), 2, "{audit:#}");
    let changes = service.get(&format!("/v1/runs/{run}/changes")).await.body;
    assert_eq!(changes["data"], json!([]), "no call of the run");

    let body = form(&json!({"session_id": "s"}), files);
    let queued = invoke(&service, "remembers", &[("prefer", "respond-async")], &body).await;
    assert_eq!(queued.status, 202, "{:?}", queued.bytes);
    let path = queued.header("location").to_owned();
    let done = service.until(&path, |run| run["status"] == "completed").await;
    assert!(done["output"].to_string().contains("a,b"), "{done:#}");
    let of_session = service.get("/v1/sessions/s/files").await.body;
    assert_eq!(of_session["data"].as_array().unwrap().len(), 2, "{of_session:#}");

    let streaming = [("accept", "text/event-stream")];
    let streamed = invoke(&service, "reads", &streaming, &form(&json!({}), files)).await;
    let streamed = String::from_utf8(streamed.bytes).unwrap();
    assert!(streamed.contains("run.completed") && streamed.contains("a,b"), "{streamed}");
    let dry = invoke(&service, "shared", &[], &form(&json!({"dry_run": true}), files)).await;
    assert_eq!(dry.status, 200);
    assert_eq!(service.get("/v1/agents/shared/files").await.body["data"], json!([]));
}

async fn a_repeated_or_refused_invocation_replaces_no_file(db: Db) {
    let topical = format!("{}instructions: 'About {{{{ inputs.topic }}}}.'\n", agent("shared"));
    let mut service = reading().agent("topical", &topical).start(db).await;
    let sent = |content: &'static [u8], request: &Value| form(request, &[("in/data.csv", content)]);
    let key = &[("idempotency-key", "one")][..];
    let request = json!({"session_id": "s"});
    let first = invoke(&service, "remembers", key, &sent(b"first", &request)).await;
    assert_eq!(first.status, 200, "{:?}", first.bytes);
    let file = "/v1/sessions/s/files/in/data.csv";
    let part = put(&service, file, &[("content-range", "bytes 0-3/9")], b"part").await;
    assert_eq!((part.status, &part.json()["code"]), (400, &json!("INVALID_PARAMETER")));
    assert_eq!(put(&service, file, &[], b"changed since").await.status, 204);
    let again = invoke(&service, "remembers", key, &sent(b"first", &request)).await;
    assert_eq!((again.status, again.header("idempotency-replayed")), (200, "true"));
    let other = invoke(&service, "remembers", key, &sent(b"other", &request)).await;
    assert_eq!(other.json()["code"], "IDEMPOTENCY_MISMATCH", "the files are part of the request");
    let taken = json!({"session_id": "s", "run_id": first.json()["run_id"]});
    let taken = invoke(&service, "remembers", &[], &sent(b"taken", &taken)).await;
    assert_eq!(taken.json()["code"], "RUN_ID_TAKEN");
    let outsider = json!({"name": "outsider", "tenant": "other", "scopes": ["admin"]});
    let outsider = service.post("/v1/keys", &outsider).await.body["key"].clone();
    let own = std::mem::replace(&mut service.key, outsider.as_str().unwrap().to_owned());
    let elsewhere = json!({"session_id": "s"});
    let foreign = service.post("/v1/agents/remembers/invoke", &elsewhere).await.body;
    service.key = own;
    let taken = json!({"session_id": "s", "run_id": foreign["run_id"]});
    let taken = invoke(&service, "remembers", &[], &sent(b"taken", &taken)).await;
    assert_eq!(taken.json()["code"], "RUN_ID_TAKEN");
    let unknown = json!({"session_id": "s", "max_iterations": -1});
    assert_eq!(invoke(&service, "remembers", &[], &sent(b"bad", &unknown)).await.status, 422);
    assert_eq!(get(&service, file).await.bytes, b"changed since");
    let file = "/v1/agents/topical/files/in/data.csv";
    assert_eq!(put(&service, file, &[], b"kept").await.status, 201);
    let ways: [&[(&str, &str)]; 3] =
        [&[], &[("prefer", "respond-async")], &[("accept", "text/event-stream")]];
    for headers in ways {
        let lacking = invoke(&service, "topical", headers, &sent(b"lost", &json!({}))).await;
        assert_eq!((lacking.status, &lacking.json()["code"]), (422, &json!("INVALID_INPUTS")));
    }
    assert_eq!(get(&service, file).await.bytes, b"kept");

    let scopes = json!(["agents:invoke", "tools:execute"]);
    let mut own = self::key(&service, &json!({"name": "k", "scopes": scopes})).await;
    std::mem::swap(&mut own, &mut service.key);
    let refused = invoke(&service, "remembers", &[], &sent(b"x", &json!({}))).await;
    assert_eq!(refused.status, 403);
    assert!(refused.json()["detail"].as_str().unwrap().contains("files:write"));
    service.key = own;
    let left = std::fs::read_dir(service.dir.path().join("workspace/default")).unwrap();
    let mut left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!left.any(|name| name.starts_with(".toolloop-")), "all are gone");
}

async fn of_two_invocations_at_once_the_refused_one_leaves_no_file(db: Db) {
    let asks =
        agent("asks/{session_id}").replace("autonomy: full", "tool_policies: {file_ops: ask}");
    let service = setup().agent("asks", &asks).start(db).await;
    for round in 0..20 {
        let session = format!("s{round}");
        let sent = async |content: &'static [u8]| {
            let body = form(&json!({"session_id": session}), &[("in/a", content)]);
            (invoke(&service, "asks", &[], &body).await.status, content)
        };
        let (one, other) = tokio::join!(sent(b"one"), sent(b"other"));
        let mut both = [one, other];
        both.sort_unstable();
        assert_eq!(both.map(|(status, _)| status), [202, 409]);
        let kept = get(&service, &format!("/v1/sessions/{session}/files/in/a")).await;
        assert_eq!(kept.bytes, both[0].1, "{round}");
    }
}

#[tokio::test]
async fn of_two_invocations_on_two_replicas_the_refused_one_leaves_no_file() {
    let volume = tempfile::TempDir::new().unwrap();
    let asks =
        agent("asks/{session_id}").replace("autonomy: full", "tool_policies: {file_ops: ask}");
    let on_volume = || {
        let dir = volume.path().display();
        let shared = format!("[tools.workspace]\nstore = \"shared\"\ndir = \"{dir}\"");
        setup().agent("asks", &asks).config(&shared)
    };
    let first = on_volume().start(Db::Postgres).await;
    let second = on_volume().start_on(first.database_url.clone()).await;
    for round in 0..20 {
        let session = format!("s{round}");
        let sent = async |service: &Service, own: &'static str| {
            let files: &[(&str, &[u8])] = &[(own, b"own"), ("in/same", own.as_bytes())];
            let body = form(&json!({"session_id": session}), files);
            (invoke(service, "asks", &[], &body).await.status, own)
        };
        let (one, other) = tokio::join!(sent(&first, "in/one"), sent(&second, "in/other"));
        let mut both = [one, other];
        both.sort_unstable();
        assert_eq!(both.map(|(status, _)| status), [202, 409]);
        let (files, own) = (format!("/v1/sessions/{session}/files"), both[0].1);
        let listed = first.get(&files).await.body["data"].clone();
        let listed = listed.as_array().unwrap().iter().map(|file| file["path"].clone());
        assert_eq!(listed.collect::<Vec<Value>>(), [own, "in/same"], "{round}");
        let kept = get(&first, &format!("{files}/in/same")).await;
        assert_eq!(kept.bytes, own.as_bytes(), "{round}");
    }
}

/// The times of files are those of the machine.
#[tokio::test]
async fn it_is_known_which_call_changed_a_file_where_the_clock_is_wrong() {
    for seconds in [3600, -3600] {
        let service = setup().clock_ahead_by(seconds).start(Db::Postgres).await;
        let run = service.run("shared", &json!({})).await;
        let made = service.dir.path().join("workspace/default/shared/out/made.txt");
        let made = std::fs::File::options().write(true).open(made).unwrap();
        let time = made.metadata().unwrap().modified().unwrap();
        // A busy database has told its time less exactly.
        let wrong_by = TimeDelta::seconds(seconds) - TimeDelta::milliseconds(700);
        let time = DateTime::<Utc>::from(time) + wrong_by;
        made.set_modified(time.into()).unwrap();
        let listed = service.get("/v1/agents/shared/files").await.body;
        assert_eq!(listed["data"][0]["changed_by_run"], run["run_id"], "{seconds}: {listed:#}");
    }
}

#[tokio::test]
async fn files_of_a_client_that_goes_away_are_recorded() {
    let service = reading().start(Db::Postgres).await;
    let mut other = PgConnection::connect(&service.database_url).await.unwrap();
    let lock = "BEGIN; LOCK TABLE audit_log IN EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(&mut other).await.unwrap();
    let body = form(&json!({}), &[("in/a", b"x"), ("in/b", b"y")]);
    let mut watcher = PgConnection::connect(&service.database_url).await.unwrap();
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
        AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO audit_log%')";
    let recording = async {
        while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut watcher).await.unwrap() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        said = invoke(&service, "shared", &[], &body) => panic!("answered with {}", said.status),
        () = recording => {}
    }
    let placed = service.dir.path().join("workspace/default/shared/in/b");
    assert!(!placed.exists(), "it is recorded first");
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    let are_two = |list: &Value| list["data"].as_array().is_some_and(|acts| acts.len() == 2);
    service.until("/v1/audit?action=file.written", are_two).await;
    for looks in 0..3000 {
        if placed.exists() {
            return;
        }
        pause(looks).await;
    }
    panic!("{} is not there", placed.display());
}

#[tokio::test]
async fn files_that_go_with_a_deleted_session_are_asked_for_again() {
    let service = reading().start(Db::Postgres).await;
    let sent =
        |content: &'static [u8]| form(&json!({"session_id": "s"}), &[("in/data.csv", content)]);
    assert_eq!(invoke(&service, "remembers", &[], &sent(b"first")).await.status, 200);
    let mut other = PgConnection::connect(&service.database_url).await.unwrap();
    let delete = "BEGIN; DELETE FROM runs WHERE session_id = 's'";
    sqlx::raw_sql(delete).execute(&mut other).await.unwrap();
    let file = service.dir.path().join("workspace/default/remembers/s-s/in/data.csv");
    let deleted = async {
        while std::fs::read(&file).unwrap() != b"second" {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    };
    let second = sent(b"second");
    let (said, ()) = tokio::join!(invoke(&service, "remembers", &[], &second), deleted);
    assert_eq!((said.status, &said.json()["code"]), (503, &json!("OVERLOADED")));
}

async fn broken_bodies_are_refused(db: Db) {
    let service = reading().start(db).await;
    let named = |name: &str| form(&json!({}), &[(name, b"x")]);
    for name in
        ["/etc/passwd", "../x", "in/../../x", "", ".", "in/", ".env", "in/.env", "plain.txt"]
    {
        let refused = invoke(&service, "reads", &[], &named(name)).await;
        assert_eq!(
            (refused.status, &refused.json()["errors"][0]["pointer"]),
            (422, &json!("/files/0")),
            "{name:?}"
        );
    }
    let twice = form(&json!({}), &[("in/a", b"x"), ("in/./a", b"y")]);
    let twice = invoke(&service, "reads", &[], &twice).await.json();
    assert_eq!(twice["errors"][0]["pointer"], "/files/1", "{twice:#}");
    let no_name = String::from_utf8(named("NAME")).unwrap().replace("; filename=\"NAME\"", "");
    assert_eq!(invoke(&service, "reads", &[], no_name.as_bytes()).await.status, 422);
    let many: Vec<String> = (0..65).map(|number| format!("in/{number}")).collect();
    let many: Vec<(&str, &[u8])> = many.iter().map(|name| (name.as_str(), &b"x"[..])).collect();
    assert_eq!(invoke(&service, "reads", &[], &form(&json!({}), &many)).await.status, 413);
    let whole = form(&json!({}), &[("in/a", b"x")]);
    let text = String::from_utf8(whole.clone()).unwrap();
    let endless = format!("--{BOUNDARY}\r\nX-Long: {}", "x".repeat(8 << 20));
    let preamble = "y".repeat(8 << 20);
    for (what, body) in [
        ("cut off", &whole[..whole.len() - 20]),
        ("no boundary", b"in/a"),
        ("nothing", b""),
        ("another part", text.replace("name=files", "name=other").as_bytes()),
        ("two requests", text.replace("name=files", "name=request").as_bytes()),
        ("no JSON", text.replace("{}", "{").as_bytes()),
        ("endless headers", endless.as_bytes()),
        ("an endless preamble", preamble.as_bytes()),
    ] {
        let refused = invoke(&service, "reads", &[], body).await;
        assert_eq!(
            (refused.status, &refused.json()["code"]),
            (400, &json!("MALFORMED_JSON")),
            "{what}"
        );
    }
    let path = "/v1/agents/reads/invoke-iterative";
    let no_boundary = [("content-type", "multipart/form-data")];
    assert_eq!(ask(&service, Method::POST, path, &no_boundary, &whole).await.status, 400);
    let only_files = text.split_once("{}\r\n").unwrap().1.as_bytes();
    assert_eq!(
        invoke(&service, "reads", &[], only_files).await.status,
        200,
        "no request is an empty one"
    );
    let encoded = [("content-encoding", "gzip")];
    assert_eq!(put(&service, "/v1/agents/shared/files/in/x", &encoded, b"x").await.status, 415);
}

/// Hashing it would take minutes.
#[tokio::test]
async fn a_large_file_has_a_weak_tag() {
    let service = setup().start(Db::Sqlite).await;
    let url = "/v1/agents/shared/files/in/large";
    assert_eq!(put(&service, url, &[], b"abc").await.status, 201);
    let path = service.dir.path().join("workspace/default/shared/in/large");
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(100 << 30).unwrap();
    let looked = tokio::time::timeout(std::time::Duration::from_mins(1), async {
        let head = ask(&service, Method::HEAD, url, &[], b"").await;
        assert_eq!(head.status, 200);
        let tag = head.headers["etag"].to_str().unwrap().to_owned();
        assert!(tag.starts_with("W/\""), "{tag}");
        let known = [("if-none-match", tag.as_str())];
        assert_eq!(ask(&service, Method::GET, url, &known, b"").await.status, 304);
        let part = ask(&service, Method::GET, url, &[("range", "bytes=0-3")], b"").await;
        assert_eq!((part.status, &part.bytes[..]), (206, &b"abc\0"[..]));
        let known = [("if-match", tag.as_str())];
        assert_eq!(ask(&service, Method::DELETE, url, &known, b"").await.status, 412);
        let listed = get(&service, "/v1/agents/shared/files?prefix=in/large").await.json();
        assert_eq!(listed["data"][0]["etag"], Value::Null, "{listed:#}");
        file.set_len(101 << 30).unwrap();
        let head = ask(&service, Method::HEAD, url, &[], b"").await;
        assert_ne!(head.headers["etag"], tag.as_str());
        file.set_len(3).unwrap();
        let small = ask(&service, Method::HEAD, url, &[], b"").await;
        assert!(!small.headers["etag"].to_str().unwrap().starts_with("W/"));
    });
    looked.await.expect("the file is hashed");
}

#[tokio::test]
async fn a_workspace_holds_no_more_than_its_quota() {
    let limits =
        "[tools.file_ops]\nmax_file = \"2KiB\"\nworkspace_quota = \"3KiB\"\nworkspace_files = 6\n";
    let too_much = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: out/made.txt, content: '{{ inputs.text }}'}}]
  - {text: '{{ results[0] }}'}
";
    let service = setup()
        .agent("adds", &agent("shared").replace("scripted/writer", "scripted/adds"))
        .scenario("adds", too_much)
        .config(limits)
        .start(Db::Sqlite)
        .await;
    let files = "/v1/agents/shared/files";
    let kib = vec![b'x'; 1024];
    assert_eq!(
        put(&service, &format!("{files}/in/a"), &[], &[kib.clone(), kib.clone()].concat())
            .await
            .status,
        201
    );
    let large = put(&service, &format!("{files}/in/b"), &[], &vec![b'x'; 2049]).await;
    assert_eq!((large.status, &large.json()["code"]), (413, &json!("PAYLOAD_TOO_LARGE")));
    assert_eq!(put(&service, &format!("{files}/in/b"), &[], &kib).await.status, 201);
    let full = put(&service, &format!("{files}/in/c"), &[], b"x").await;
    assert_eq!(full.status, 413);
    assert!(full.json()["detail"].as_str().unwrap().contains("3072"), "{:#}", full.json());
    let told = service.run("adds", &json!({"inputs": {"text": "yy"}})).await;
    assert!(told["output"].to_string().contains("at most 3072 are possible"), "{told:#}");
    assert_eq!(ask(&service, Method::DELETE, &format!("{files}/in/b"), &[], b"").await.status, 204);
    let told = service.run("adds", &json!({"inputs": {"text": "yy"}})).await;
    assert!(told["output"].to_string().contains("Appended 2 bytes"), "{told:#}");
    for name in ["d", "e"] {
        put(&service, &format!("{files}/in/{name}"), &[], b"").await;
    }
    let came = form(&json!({}), &[("in/f", b"")]);
    assert_eq!(invoke(&service, "shared", &[], &came).await.json()["code"], "PAYLOAD_TOO_LARGE");
    let many = put(&service, &format!("{files}/in/f"), &[], b"").await;
    assert_eq!(many.status, 413);
    assert!(many.json()["detail"].as_str().unwrap().contains("files"), "{:#}", many.json());
    let written = service.get("/v1/audit?action=file.written").await.body;
    let written = written["data"].as_array().unwrap().iter().map(|act| &act["arguments"]["path"]);
    assert_eq!(written.collect::<Vec<_>>(), ["in/e", "in/d", "in/b", "in/a"]);
    let left = std::fs::read_dir(service.dir.path().join("workspace/default/shared")).unwrap();
    let staged = left.filter(|entry| {
        entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with(".toolloop-")
    });
    assert_eq!(staged.count(), 0, "nothing of what was refused is left");
}

#[tokio::test]
async fn the_command_line_lists_gets_and_puts() {
    let service = setup().start(Db::Sqlite).await;
    let files = run(&service, "own").await;
    let run = files.split('/').nth(3).unwrap().to_owned();
    let (url, key) = (service.url(""), service.key.clone());
    let toolloop = async |arguments: &[&str]| {
        let mut command = command(service.dir.path());
        command.args(["files"]).args(arguments).args(["--server", &url, "--key", &key]);
        let done = command.output().await.unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        done.stdout
    };
    std::fs::write(service.dir.path().join("local.txt"), "from here").unwrap();
    let said = toolloop(&["put", &run, "in/new file.txt", "local.txt"]).await;
    assert_eq!(String::from_utf8(said).unwrap(), "Created in/new file.txt, 9 bytes.\n");
    assert_eq!(toolloop(&["get", &run, "in/new file.txt"]).await, b"from here");
    let mut piped = command(service.dir.path());
    piped.args(["files", "put", &run, "in/piped", "-", "--server", &url, "--key", &key]);
    let mut piped = piped.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    piped.stdin.take().unwrap().write_all(b"from a pipe").await.unwrap();
    assert!(piped.wait().await.unwrap().success());
    assert_eq!(toolloop(&["get", &run, "in/piped"]).await, b"from a pipe");
    toolloop(&["get", &run, "out/made.txt", "--output", "copy.txt"]).await;
    assert_eq!(std::fs::read(service.dir.path().join("copy.txt")).unwrap(), b"made");
    let listed = String::from_utf8(toolloop(&["ls", &run]).await).unwrap();
    assert!(listed.contains("in/new file.txt") && listed.contains("out/made.txt"), "{listed}");
    let json: Value =
        serde_json::from_slice(&toolloop(&["ls", &run, "--prefix", "out", "--json"]).await)
            .unwrap();
    assert_eq!(json["data"].as_array().unwrap().len(), 1);
    assert_eq!(StatusCode::OK, service.get(&files).await.status);
}
