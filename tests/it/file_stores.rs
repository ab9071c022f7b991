//! Where the files of runs are kept, with several replicas that have directories of their own.
//!
//! | | shared |
//! |---|---|
//! | queued runs | taken by replicas that see the volume |
//! | new runs, files of callers | refused elsewhere (503, come again) |
//! | children, handoffs, approvals, sessions, crash, other replica | one file system: nothing to carry |
//! | cancel | needs no files |
//! | tenants, budgets, skills, gate | below the file system |
//! | dry run | reads what is there |
//! | console, generated clients | see the interface only |
//! | command line | `doctor` tells what is wrong |

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::files::an_emptied_directory_is_gone;
use crate::service::{Answer, Db, Service, Setup, answer, command, on_both_stores};

on_both_stores! {
    a_volume_that_goes_away_turns_readiness_off,
    a_volume_that_hangs_holds_up_only_requests_that_need_it,
}

const WRITER: &str = "model: scripted/writer\ntools: [file_ops]\nworkspace: files\n\
    enable_double_confirmation: false\ngovernance: {autonomy: full, paths: {read: ['**'], write: ['**']}}\n";

const WRITING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: made.txt, content: made}}]
  - {text: done}
";

fn setup(workspace: &str) -> Setup {
    Setup::new()
        .agent("writer", WRITER)
        .scenario("writer", WRITING)
        .config(&format!("[tools.workspace]\n{workspace}"))
}

fn is_ready(ready: &Value) -> bool {
    ready["status"] == "ready"
}

fn has_ended(run: &Value) -> bool {
    run["finished_at"].is_string()
}

pub(crate) async fn doctor(dir: &Path, database_url: &str) -> Value {
    let said = command(dir)
        .args(["doctor", "--json", "--listen", "127.0.0.1:0", "--database-url", database_url])
        .output()
        .await
        .unwrap();
    let said: Value = serde_json::from_slice(&said.stdout).unwrap();
    let checks = said["checks"].as_array().unwrap().iter();
    checks.clone().find(|check| check["check"] == "workspace").unwrap().clone()
}

/// Nothing that needs files is begun.
async fn takes_nothing(service: &Service) {
    let ready = service.get("/readyz").await;
    assert_eq!(ready.status, 503);
    assert_eq!(ready.body["checks"]["workspace"], "unavailable");
    let refused = service.post("/v1/agents/writer/invoke-iterative", &json!({})).await;
    let files = service.get("/v1/agents/writer/files").await;
    for refused in [refused, files] {
        assert_eq!(refused.body["code"], "WORKSPACE_UNAVAILABLE", "{:#}", refused.body);
        assert_eq!(refused.status, 503);
        assert!(refused.headers.contains_key("retry-after"));
    }
}

#[tokio::test]
async fn a_replica_with_another_volume_takes_nothing() {
    let first = setup("store = \"shared\"").start(Db::Postgres).await;
    assert!(is_ready(&first.get("/readyz").await.body));
    let other = setup("store = \"shared\"").start_on(first.database_url.clone()).await;
    takes_nothing(&other).await;
    other.until_logged("not the volume that the replicas share").await;
    let told = doctor(other.dir.path(), &other.database_url).await;
    assert_eq!(told["status"], "fail", "{told:#}");
    assert!(told["detail"].as_str().unwrap().contains(".workspace-id"), "{told:#}");
    for _ in 0..8 {
        let run = other.enqueue("writer").await;
        assert_eq!(other.until(&run, has_ended).await["status"], "completed");
    }
    assert!(first.dir.path().join("workspace/default/files/made.txt").exists());
    assert!(!other.dir.path().join("workspace/default").exists());

    // It is mounted.
    let own = other.dir.path().join("workspace");
    std::fs::remove_dir_all(&own).unwrap();
    std::os::unix::fs::symlink(first.dir.path().join("workspace"), &own).unwrap();
    other.until("/readyz", is_ready).await;
    assert_eq!(other.run("writer", &json!({})).await["status"], "completed");
    let listed = other.get("/v1/agents/writer/files").await.body;
    assert_eq!(listed["data"][0]["path"], "made.txt", "{listed:#}");
    assert_eq!(doctor(other.dir.path(), &other.database_url).await["status"], "ok");
}

#[tokio::test]
async fn edited_arguments_are_judged_where_the_files_are() {
    let asks = WRITER.replace("governance: {", "governance: {tool_policies: {file_ops: ask}, ");
    let asking = || setup("store = \"shared\"").agent("writer", &asks);
    let first = asking().start(Db::Postgres).await;
    let other = asking().start_on(first.database_url.clone()).await;
    let parked = first.post("/v1/agents/writer/invoke-iterative", &json!({})).await.body;
    let run = parked["run_id"].as_str().unwrap();
    let call = parked["pending"][0]["call_id"].as_str().unwrap();
    let approve = format!("/v1/runs/{run}/tool-calls/{call}/approve");
    let edited = json!({"arguments": {"operation": "write", "path": "other.txt", "content": "x"}});
    let refused = other.post(&approve, &edited).await;
    assert_eq!(refused.body["code"], "WORKSPACE_UNAVAILABLE", "{:#}", refused.body);
    assert_eq!(refused.status, 503);
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(first.post(&approve, &edited).await.status, 200);
}

#[tokio::test]
async fn replicas_count_each_others_files_on_the_volume() {
    let volume = tempfile::TempDir::new().unwrap();
    let on_volume = || {
        setup(&format!(
            "store = \"shared\"\ndir = \"{}\"\n[tools.file_ops]\nworkspace_quota = \"64KiB\"",
            volume.path().display()
        ))
    };
    let first = on_volume().start(Db::Postgres).await;
    let second = on_volume().start_on(first.database_url.clone()).await;
    let mut kept = 0;
    for number in 0..12 {
        let service = [&first, &second][number % 2];
        let path = format!("/v1/agents/writer/files/{number}");
        let put = service.request(Method::PUT, &path).body(vec![b'x'; 10_000]);
        kept += usize::from(answer(put).await.status == 201);
    }
    assert!((6..=7).contains(&kept), "{kept}");
    // What one deletes makes room for the other at once.
    let files = "/v1/agents/writer/files";
    let put = |service: &Service, path: &str, tag: Option<&str>, bytes: Vec<u8>| {
        let put = service.request(Method::PUT, &format!("{files}/{path}")).body(bytes);
        answer(match tag {
            Some(tag) => put.header("if-match", tag),
            None => put,
        })
    };
    assert_eq!(put(&second, "more", None, vec![b'x'; 10_000]).await.status, 413);
    for number in 0..5 {
        assert_eq!(first.delete(&format!("{files}/{number}")).await.status, 204);
    }
    assert_eq!(put(&second, "more", None, vec![b'x'; 10_000]).await.status, 201);

    // Who changes a file at the same moment as another replica.
    let statuses = |one: Answer, other: Answer| {
        let mut statuses = [one.status, other.status];
        statuses.sort_unstable();
        statuses
    };
    for round in 0..10 {
        let path = format!("same{round}");
        let (one, other) = tokio::join!(
            put(&first, &path, None, b"one".into()),
            put(&second, &path, None, b"other".into())
        );
        assert_eq!(statuses(one, other), [201, 204]);
        let tag = first.get(&format!("{files}/{path}")).await;
        let tag = tag.headers["etag"].to_str().unwrap();
        let (one, other) = tokio::join!(
            put(&first, &path, Some(tag), b"1".into()),
            put(&second, &path, Some(tag), b"2".into())
        );
        assert_eq!(statuses(one, other), [204, 412]);
        let beneath = format!("dir{round}/l");
        let (one, other) = tokio::join!(
            put(&first, &format!("dir{round}"), None, b"1".into()),
            put(&second, &beneath, None, b"2".into())
        );
        assert_eq!(statuses(one, other), [201, 409]);
    }
    an_emptied_directory_is_gone(&first, &second, files).await;
}

async fn a_volume_that_goes_away_turns_readiness_off(db: Db) {
    let mut service = setup("store = \"shared\"").start(db).await;
    assert_eq!(service.run("writer", &json!({})).await["status"], "completed");
    let (workspace, aside) =
        (service.dir.path().join("workspace"), service.dir.path().join("aside"));
    std::fs::rename(&workspace, &aside).unwrap();
    std::fs::create_dir(&workspace).unwrap(); // where nothing is mounted
    service.until("/readyz", |ready| !is_ready(ready)).await;
    takes_nothing(&service).await;
    let run = service.enqueue("writer").await;

    service.kill().await;
    service.restart().await;
    takes_nothing(&service).await;
    assert_eq!(service.get(&run).await.body["status"], "queued");
    std::fs::remove_dir_all(&workspace).unwrap();
    std::fs::rename(&aside, &workspace).unwrap();
    service.until("/readyz", is_ready).await;
    assert_eq!(service.until(&run, has_ended).await["status"], "completed");
}

/// A file system over a directory that answers nothing, until it is dropped.
struct SilentVolume {
    directory: PathBuf,
    _requests: File,
}

impl SilentVolume {
    /// `None`, said on the terminal, where it cannot be mounted.
    fn mount(directory: PathBuf) -> Option<Self> {
        let mounted =
            File::options().read(true).write(true).open("/dev/fuse").and_then(|requests| {
                let options =
                    format!("fd={},rootmode=40000,user_id=0,group_id=0", requests.as_raw_fd());
                let options = CString::new(options).unwrap();
                let flags = rustix::mount::MountFlags::empty();
                rustix::mount::mount("silent", &directory, "fuse", flags, options.as_c_str())?;
                Ok(Self { directory, _requests: requests })
            });
        if mounted.is_err() {
            let _ = writeln!(
                std::io::stderr(),
                "NOT RUN: file_stores needs the right to mount a file system of the kind fuse"
            );
        }
        mounted.ok()
    }
}

impl Drop for SilentVolume {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.directory, rustix::mount::UnmountFlags::DETACH);
    }
}

async fn a_volume_that_hangs_holds_up_only_requests_that_need_it(db: Db) {
    let service = setup("store = \"shared\"").start(db).await;
    assert_eq!(service.run("writer", &json!({})).await["status"], "completed");
    let Some(volume) = SilentVolume::mount(service.dir.path().join("workspace")) else { return };
    let files = (0..100).map(|_| service.get("/v1/agents/writer/files"));
    let runs = (0..20)
        .map(|_| async { service.post("/v1/agents/writer/invoke-iterative", &json!({})).await });
    let asked = async { tokio::join!(join_all(files), join_all(runs)) };
    let probed = async {
        for _ in 0..20 {
            let answer = timeout(Duration::from_secs(20), service.get("/healthz")).await;
            assert_eq!(answer.expect("it hangs, too").status, 200);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let ((files, runs), ()) = tokio::join!(asked, probed);
    for refused in files.iter().chain(&runs) {
        assert_eq!(refused.body["code"], "WORKSPACE_UNAVAILABLE", "{:#}", refused.body);
    }
    service.until("/readyz", |ready| !is_ready(ready)).await;
    takes_nothing(&service).await;
    drop(volume);
    service.until("/readyz", is_ready).await;
    assert_eq!(service.run("writer", &json!({})).await["status"], "completed");
}

#[tokio::test]
async fn the_doctor_warns_of_replicas_with_files_of_their_own() {
    let first = setup("store = \"local\"").start(Db::Postgres).await;
    assert_eq!(doctor(first.dir.path(), &first.database_url).await["status"], "ok");
    let second = setup("").start_on(first.database_url.clone()).await;
    let told = doctor(second.dir.path(), &second.database_url).await;
    assert_eq!(told["status"], "warn", "{told:#}");
    assert!(told["next"].as_str().unwrap().contains("shared"), "{told:#}");
}
