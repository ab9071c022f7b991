//! What programs make under denied names is put aside and never lost, whatever made it. Through the HTTP
//! API, on both stores.
//!
//! With other features. Others at work in the workspace meanwhile: uploads, `file_ops` and programs of other runs, and
//! what neither the service nor a program wrote, as another replica's (here). Cancel, crash, directories,
//! links, retention, a full quarantine (here). Children and rules that observe: `left_behind.rs`. Tenants:
//! each has its own. Two replicas on one volume (`two_replicas_share_one_quarantine`). Parked runs, sessions, streaming, dry run, generated clients: nothing of it is in events
//! but the error of the call.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::left_behind::{DENY, audited, completed, content, is_there, lines, place, told, with};
use crate::script_tools::python;
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    denied_files_of_programs_are_quarantined,
    files_made_by_others_meanwhile_are_not_lost,
    a_cancel_and_a_crash_lose_nothing,
    old_files_in_the_quarantine_are_deleted,
    a_full_quarantine_stops_programs_that_write,
}

fn top(service: &Service) -> PathBuf {
    service.dir.path().join("workspace/.quarantine")
}

/// What was put aside of the tenant: paths in its directory with what they hold.
fn aside(service: &Service) -> Vec<(String, String)> {
    fn walk(top: &Path, at: &Path, all: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(at).into_iter().flatten().flatten() {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            if kind.is_dir() {
                walk(top, &path, all);
                continue;
            }
            let held = if kind.is_symlink() {
                format!("-> {}", std::fs::read_link(&path).unwrap().display())
            } else {
                std::fs::read_to_string(&path).unwrap()
            };
            all.push((path.strip_prefix(top).unwrap().display().to_string(), held));
        }
    }
    let mut all = Vec::new();
    for id in std::fs::read_dir(top(service).join("default")).into_iter().flatten().flatten() {
        walk(&id.path(), &id.path(), &mut all);
    }
    all.sort();
    all
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter().map(|(path, held)| ((*path).to_owned(), (*held).to_owned())).collect()
}

async fn denied_files_of_programs_are_quarantined(db: Db) {
    let calls = lines(&[
        "cp a.txt .env",
        "mkdir -p secret/deep && cp a.txt secret/deep/k",
        "mv b.txt cargo.lock",
        "ln -s ../b.txt sub/.env",
    ]);
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let service = with(Setup::new(), "worker", &governance, &calls)
        .file("a.txt", "a")
        .file("b.txt", "b")
        .file("sub/x", "x")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    for call in &completed(&service, &run).await {
        assert!(content(call).contains("moved out of the workspace"), "{call:#}");
    }
    let expected =
        [(".env", "a"), ("cargo.lock", "b"), ("secret/deep/k", "a"), ("sub/.env", "-> ../b.txt")];
    assert_eq!(aside(&service), pairs(&expected));
    let mode = std::fs::metadata(top(&service)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    // The audit log tells an operator what to move back to where.
    for record in &audited(&service, &run).await {
        let left = &record["arguments"]["left"];
        let (path, kept) = (left["path"].as_str().unwrap(), left["kept"].as_str().unwrap());
        let kept = service.dir.path().join("workspace").join(kept).join(path);
        std::fs::rename(kept, place(&service, path)).unwrap();
    }
    assert_eq!(std::fs::read_to_string(place(&service, "secret/deep/k")).unwrap(), "a");
    assert_eq!(aside(&service), []);
}

/// Says that it runs, and waits until it is told to go on.
const WAITS: &str = "import os, time\nw = os.environ['TOOLLOOP_WORKSPACE']\nopen(w + '/started', 'w')\n\
     while not os.path.exists(w + '/go'): time.sleep(0.01)\nopen(w + '/secret/mine', 'w').write('mine')\n\
     open(w + '/mine.lock', 'w').write('mine')\nprint('done')";

async fn until_there(service: &Service, path: &str) {
    let until = Instant::now() + Duration::from_mins(3);
    while !is_there(service, path) {
        assert!(Instant::now() < until, "no {path}: {}", service.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn files_made_by_others_meanwhile_are_not_lost(db: Db) {
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let set = format!("tools:\n{}", python("waits", WAITS, ""));
    let write = |path: &str| {
        ("file_ops", json!({"operation": "write", "path": path, "content": "of another"}))
    };
    let others =
        [write("sub/.env"), write("secret/k"), ("shell", json!({"command": "cp a.txt x.lock"}))];
    let waits = [("script:set/waits", json!({}))];
    let setup = with(Setup::new(), "worker", &governance, &waits).tools("set", &set);
    let service = with(setup, "other", "paths: {write: ['./**']}", &others)
        .file("a.txt", "a")
        .start(db)
        .await;
    let path = service.enqueue("worker").await;
    until_there(&service, "started").await;
    let other = service.run("other", &json!({})).await;
    assert_eq!(other["status"], "completed", "{other:#}");
    let upload = format!("/v1/runs/{}/files/up.lock", other["run_id"].as_str().unwrap());
    let upload = service.request(Method::PUT, &upload).body("uploaded");
    let uploaded = answer(upload.header("content-type", "text/plain")).await;
    assert!(uploaded.status.is_success(), "{:#}", uploaded.body);
    std::fs::write(place(&service, "theirs.lock"), "from elsewhere").unwrap();
    std::fs::write(place(&service, "go"), "").unwrap();
    let run = service.until(&path, |run| run["status"] == "completed").await;
    let call = &completed(&service, &run).await[0];
    assert_eq!(call["failure"], "tool_error", "{call:#}");
    // What the service wrote stays where it is.
    for (path, held) in
        [("sub/.env", "of another"), ("secret/k", "of another"), ("up.lock", "uploaded")]
    {
        assert_eq!(std::fs::read_to_string(place(&service, path)).unwrap(), held, "{path}");
        assert!(!content(call).contains(path), "{path}: {call:#}");
    }
    // What it cannot tell from the programs' work is put aside.
    let expected = [
        ("mine.lock", "mine"),
        ("secret/mine", "mine"),
        ("theirs.lock", "from elsewhere"),
        ("x.lock", "a"),
    ];
    assert_eq!(aside(&service), pairs(&expected));
}

fn denies() -> String {
    format!("paths: {{write: ['./**'], {DENY}}}")
}

/// The same agents for two replicas on one volume.
fn of_two() -> Setup {
    let set = format!("tools:\n{}", python("waits", WAITS, ""));
    let write = |path: &str| {
        ("file_ops", json!({"operation": "write", "path": path, "content": "of the other"}))
    };
    let waits = [("script:set/waits", json!({}))];
    let setup = with(Setup::new(), "worker", &denies(), &waits).tools("set", &set);
    let others = [write("sub/.env"), write("secret/k"), write("plain.txt")];
    let setup = with(setup, "other", "paths: {write: ['./**']}", &others);
    with(setup, "maker", &denies(), &lines(&["cp plain.txt made.lock"]))
}

/// One volume has one quarantine, whichever replica put something there.
#[tokio::test]
async fn two_replicas_share_one_quarantine() {
    let shared = "[tools.workspace]\nstore = \"shared\"\n";
    let first = of_two().config(shared).start(Db::Postgres).await;
    let retention = format!("{shared}quarantine_retention = \"1s\"\n");
    let mut second = of_two().config(shared).start_on(first.database_url.clone()).await;
    let own = second.dir.path().join("workspace");
    std::fs::remove_dir_all(&own).unwrap();
    std::os::unix::fs::symlink(first.dir.path().join("workspace"), &own).unwrap();
    second.until("/readyz", |ready| ready["status"] == "ready").await;
    let nothing = json!({});
    let beside = async {
        until_there(&first, "started").await;
        let run = second.run("other", &nothing).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        std::fs::write(place(&first, "go"), "").unwrap();
    };
    let (run, ()) = tokio::join!(first.run("worker", &nothing), beside);
    // What the other replica wrote cannot be told from the programs' work: it is kept, and its record says where.
    let (mine, theirs) = ("mine", "of the other");
    let of_secret = [("secret/k", theirs), ("secret/mine", mine)];
    let expected = [("mine.lock", mine), of_secret[0], of_secret[1], ("sub/.env", theirs)];
    assert_eq!(aside(&first), pairs(&expected), "{run:#}");
    assert_eq!(aside(&second), aside(&first));
    assert!(is_there(&second, "plain.txt"));
    let records = audited(&second, &run).await;
    assert_eq!(records, audited(&first, &run).await);
    let mut left = records.iter().map(|record| &record["arguments"]["left"]);
    let left = left.find(|left| left["path"] == "sub/.env").unwrap();
    let kept = own.join(left["kept"].as_str().unwrap()).join("sub/.env");
    std::fs::rename(kept, place(&first, "sub/.env")).unwrap();
    // What one of them has given back is not blamed on later programs, and neither looks at what the other put aside.
    let run = second.run("maker", &nothing).await;
    assert_eq!(audited(&first, &run).await.len(), 1, "{run:#}");
    assert_eq!(std::fs::read_to_string(place(&second, "sub/.env")).unwrap(), theirs);
    let expected = [("made.lock", theirs), ("mine.lock", mine), of_secret[0], of_secret[1]];
    assert_eq!(aside(&first), pairs(&expected));
    // Either deletes what is old, also of the other.
    second.kill().await;
    let settings = std::fs::read_to_string(second.dir.path().join("toolloop.toml")).unwrap();
    second.write("toolloop.toml", &settings.replace(shared, &retention));
    second.restart().await;
    let until = Instant::now() + Duration::from_mins(1);
    while !aside(&first).is_empty() {
        assert!(Instant::now() < until, "it stays: {}", second.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(is_there(&first, "sub/.env") && is_there(&first, "plain.txt"));
}

async fn a_cancel_and_a_crash_lose_nothing(db: Db) {
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let calls = lines(&["cp a.txt sub/.env && touch copied && sleep 94"]);
    let mut service = with(Setup::new(), "worker", &governance, &calls)
        .file("a.txt", "a")
        .file("sub/x", "x")
        .start(db)
        .await;
    let path = service.enqueue("worker").await;
    until_there(&service, "copied").await;
    service.post(&format!("{path}/cancel"), &json!({})).await;
    service.until(&path, |run| run["status"] == "cancelled").await;
    assert_eq!(aside(&service), pairs(&[("sub/.env", "a")]));
    let path = service.enqueue("worker").await;
    until_there(&service, "sub/.env").await;
    service.kill().await;
    service.restart().await;
    service.until(&path, |run| run["status"] != "running" && run["status"] != "queued").await;
    assert!(is_there(&service, "sub/.env"), "no sweep runs where the service was killed");
    assert_eq!(aside(&service), pairs(&[("sub/.env", "a")]));
}

async fn old_files_in_the_quarantine_are_deleted(db: Db) {
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let deep = "import os\nw = os.environ['TOOLLOOP_WORKSPACE']\nd = w + '/deep.lock'\nos.mkdir(d)\nos.chdir(d)\n\
                for i in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\n    open('f', 'w')\nos.chmod('.', 0)\nprint('made')";
    let set = format!("tools:\n{}", python("deep", deep, ""));
    let calls = [("script:set/deep", json!({})), ("shell", json!({"command": "cp a.txt .env"}))];
    let service = with(Setup::new(), "worker", &governance, &calls)
        .tools("set", &set)
        .config("[tools.workspace]\nquarantine_retention = \"2s\"\n")
        .file("a.txt", "a")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(audited(&service, &run).await.len(), 2, "{run:#}");
    let until = Instant::now() + Duration::from_mins(1);
    let count = || std::fs::read_dir(top(&service).join("default")).unwrap().count();
    while count() > 0 {
        assert!(Instant::now() < until, "it stays: {}", service.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(is_there(&service, "a.txt"));
}

async fn a_full_quarantine_stops_programs_that_write(db: Db) {
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let many = "import os\nw = os.environ['TOOLLOOP_WORKSPACE']\nos.mkdir(w + '/secret')\n\
                for i in range(25): open(f'{w}/secret/{i}', 'w')\nprint('made')";
    let set = format!("tools:\n{}", python("many", many, ""));
    let calls = [
        ("script:set/many", json!({})),
        ("shell", json!({"command": "touch fine"})),
        ("shell", json!({"command": "ls"})),
        ("file_ops", json!({"operation": "write", "path": "note", "content": "n"})),
    ];
    let setup = with(Setup::new(), "worker", &governance, &calls);
    let service = with(setup, "other", "paths: {write: ['./**']}", &lines(&["touch free"]))
        .tools("set", &set)
        .config("[tools.file_ops]\nworkspace_files = 20\n")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let calls = completed(&service, &run).await;
    assert_eq!(calls[0]["failure"], "tool_error", "{:#}", calls[0]);
    assert!(content(&calls[1]).contains("filled the quarantine"), "{:#}", calls[1]);
    assert!(!is_there(&service, "fine"));
    assert_eq!(calls[2]["failure"], Value::Null, "{:#}", calls[2]);
    assert_eq!(calls[3]["failure"], Value::Null, "{:#}", calls[3]);
    // Whose rules deny nothing has nothing put aside.
    let run = service.run("other", &json!({})).await;
    assert_eq!(told(&completed(&service, &run).await[0]), json!([["free", "created"]]));
    // When the operator has looked through it, programs start again.
    std::fs::remove_dir_all(top(&service)).unwrap();
    let run = service.run("worker", &json!({})).await;
    assert_eq!(completed(&service, &run).await[1]["failure"], "tool_error", "it fills it again");
}
