//! A disk that fills up under the embedded database: runs wait, callers are told, and nothing is
//! torn when there is room again. Needs the right to mount a file system; where that is missing,
//! the test says that it was not run.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};
use tempfile::TempDir;
use tokio::sync::watch;

use crate::mock_model::{MockModel, Reply};
use crate::postgres_cluster::OwnServer;
use crate::service::{Db, Service, Setup, answer};

const READER: &str = r#"
model: mock/m
instructions: Read.
tools: [file_ops]
governance: {paths: {write: ["**"]}}
enable_double_confirmation: false
"#;

/// A model that lists, writes a file and is done; its first answer comes when the test lets it.
async fn model() -> (MockModel, watch::Sender<bool>) {
    let mock = MockModel::start().await;
    let (go_on, held) = watch::channel(false);
    mock.reply_by(move |request| {
        let of_role = |role: &'static str| {
            let messages = request["messages"].as_array().unwrap().iter();
            messages.filter(move |message| message["role"] == role)
        };
        let call = |arguments: Value| Reply::call("file_ops", &arguments);
        match of_role("assistant").count() {
            0 => {
                let list = call(json!({"operation": "list", "path": "."}));
                Reply::Held(held.clone(), Box::new(list))
            }
            1 => {
                let of = |it: &Value| serde_json::from_str::<Value>(it["content"].as_str()?).ok();
                let inputs = of_role("user").find_map(of).unwrap();
                call(json!({"operation": "write", "path": inputs["out"], "content": "x"}))
            }
            _ => Reply::text("done"),
        }
    });
    (mock, go_on)
}

fn reading(setup: Setup, mock: &MockModel) -> Setup {
    let models = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url());
    setup.agent("reader", READER).config(&models)
}

/// A small file system of its own.
struct SmallDisk {
    dir: TempDir,
}

impl SmallDisk {
    /// Of that many MiB; says so where it cannot be mounted.
    fn mount(size: u32) -> Option<Self> {
        let disk = Self { dir: TempDir::new().unwrap() };
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}m,mode=0777"), "tmpfs"])
            .arg(disk.dir.path())
            .output();
        if mount.is_ok_and(|mount| mount.status.success()) {
            return Some(disk);
        }
        // Written to the terminal directly, because the output of a passing test is not shown.
        let _ = writeln!(
            std::io::stderr(),
            "NOT RUN: full_disk needs the right to mount a file system"
        );
        None
    }

    fn filler(&self) -> PathBuf {
        self.dir.path().join("filler")
    }

    /// Leaves not one byte.
    fn fill(&self) {
        let mut filler = File::create(self.filler()).unwrap();
        for size in [1 << 16, 1 << 12, 1] {
            let full = loop {
                if let Err(error) = filler.write_all(&vec![0; size]) {
                    break error;
                }
            };
            assert_eq!(full.kind(), ErrorKind::StorageFull);
        }
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Where it was never mounted, this fails and changes nothing.
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).output();
    }
}

#[tokio::test]
async fn the_service_recovers_from_a_full_disk() {
    survive(Setup::new()).await;
}

#[tokio::test]
async fn the_service_recovers_from_a_full_disk_without_keys() {
    survive(Setup::new().config("[auth]\nmode = \"none\"")).await;
}

async fn survive(setup: Setup) {
    let Some(disk) = SmallDisk::mount(8) else { return };
    let database = format!("sqlite://{}", disk.dir.path().join("toolloop.db").display());
    let (mock, go_on) = model().await;
    let setup = reading(setup, &mock).file("notes.txt", "seventeen\n");
    let mut service = setup.start_on(database.clone()).await;
    let runs: Vec<_> = (1..=6).map(|number| start(&service, number)).collect();
    let is_running = |list: &Value| list["data"].as_array().is_some_and(|runs| runs.len() == 6);
    service.until("/v1/runs?status=running", is_running).await;

    disk.fill();
    go_on.send_replace(true);
    service.until("/readyz", |ready| ready["checks"]["store"] == "unavailable").await;
    service.until_logged("writes wait for the store").await;
    let body = json!({"inputs": {"out": "new.txt"}});
    for mode in ["invoke", "invoke-iterative"] {
        let refused = service.post(&format!("/v1/agents/reader/{mode}"), &body).await;
        let code = refused.body["code"].as_str();
        assert_eq!(
            (refused.status.as_u16(), code),
            (503, Some("STORE_UNAVAILABLE")),
            "{refused:?}"
        );
        assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    }
    // What is stored can be read, and no run is said to have ended.
    assert!(is_running(&service.get("/v1/runs?status=running").await.body));
    assert!(runs.iter().all(|run| !run.is_finished()));

    disk.make_room();
    for run in runs {
        let run = run.await.unwrap();
        assert_eq!(
            (&run["status"], &run["raw_response"]),
            (&json!("completed"), &json!("done")),
            "{run:#}\n{}",
            service.log()
        );
        let events =
            service.get(&format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap())).await.body;
        let seqs: Vec<u64> =
            events["data"].as_array().unwrap().iter().map(|e| e["seq"].as_u64().unwrap()).collect();
        assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>());
        assert_eq!(events["data"].as_array().unwrap().last().unwrap()["type"], "run.completed");
    }
    service.until("/readyz", |ready| ready["status"] == "ready").await;
    assert_eq!(service.run("reader", &body).await["status"], "completed");

    service.signal(crate::service::Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0), "{}", service.log());
    let mut connection = SqliteConnection::connect(&database).await.unwrap();
    let found: String =
        sqlx::query_scalar("PRAGMA integrity_check").fetch_one(&mut connection).await.unwrap();
    assert_eq!(found, "ok");
}

/// The tables are on a disk of their own; what the server needs besides goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_under_postgres_turns_readiness_off_and_loses_nothing() {
    let Some(disk) = SmallDisk::mount(64) else { return };
    std::fs::set_permissions(disk.dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let postgres = tokio::task::spawn_blocking(OwnServer::start).await.unwrap();
    let tables = disk.dir.path().join("tables");
    postgres.directory(&tables);
    let mut admin = PgConnection::connect(&postgres.url()).await.unwrap();
    for sql in [
        format!("CREATE TABLESPACE small LOCATION '{}'", tables.display()),
        "CREATE DATABASE small TABLESPACE small".to_owned(),
    ] {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.unwrap();
    }
    let database = postgres.url().replace("/postgres", "/small").replace("//small@", "//postgres@");
    let (mock, go_on) = model().await;
    go_on.send_replace(true);
    let setup = reading(Setup::new(), &mock).config("[runtime]\nstore_patience = \"60s\"");
    let service = setup.start_on(database).await;
    // Hardly compressible, so that each run needs pages of its own.
    let noise: String = (0..4000).map(|_| uuid::Uuid::new_v4().to_string()).collect();
    let body = json!({"inputs": {"out": "new.txt", "noise": noise}});
    assert_eq!(service.run("reader", &body).await["status"], "completed");

    disk.fill();
    let caught = {
        let request = service
            .request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative")
            .json(&body);
        tokio::spawn(async move { answer(request).await })
    };
    service.until("/readyz", |ready| ready["checks"]["store"] == "unavailable").await;
    for _ in 0..3 {
        let refused = service.post("/v1/agents/reader/invoke-iterative", &body).await;
        let code = refused.body["code"].as_str();
        assert_eq!((refused.status.as_u16(), code), (503, Some("STORE_UNAVAILABLE")));
        assert_eq!(service.get("/readyz").await.status, 503);
    }
    assert!(!caught.is_finished());

    disk.make_room();
    let caught = caught.await.unwrap();
    assert_eq!((caught.status.as_u16(), &caught.body["status"]), (200, &json!("completed")));
    service.until("/readyz", |ready| ready["status"] == "ready").await;
    assert_eq!(service.run("reader", &body).await["status"], "completed");
    drop(service);
    drop(admin);
    drop(postgres);
}

fn start(service: &Service, number: u8) -> tokio::task::JoinHandle<Value> {
    let body = json!({"inputs": {"out": format!("{number}.txt")}});
    let request =
        service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative").json(&body);
    tokio::spawn(async move { answer(request).await.body })
}

#[tokio::test]
async fn an_append_that_finds_no_room_is_recorded_as_far_as_it_went() {
    let Some(disk) = SmallDisk::mount(2) else { return };
    disk.fill();
    let filler = File::options().write(true).open(disk.filler()).unwrap();
    filler.set_len(filler.metadata().unwrap().len() - (256 << 10)).unwrap();
    let mock = MockModel::start().await;
    let content = "x".repeat(700_000);
    let append = json!({"operation": "append", "path": "log.txt", "content": content});
    mock.reply_by(move |request| {
        let messages = request["messages"].as_array().unwrap();
        if messages.iter().any(|message| message["role"] == "assistant") {
            Reply::text("done")
        } else {
            Reply::call("file_ops", &append)
        }
    });
    let workspace = format!("[tools.workspace]\ndir = \"{}\"\n", disk.dir.path().display());
    let service = reading(Setup::new(), &mock).config(&workspace).start(Db::Sqlite).await;
    let run = service.run("reader", &json!({})).await;
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let calls = service.get(&format!("{path}/tool-calls")).await.body;
    let size = fs::metadata(disk.dir.path().join("default/log.txt")).unwrap().len();
    let told = calls["data"][0]["result"].as_str().unwrap();
    assert!(told.ends_with(&format!("{size} of {} bytes were appended", content.len())), "{told}");
    assert!(size > 0 && size < content.len() as u64, "{size}");
    let changes = service.get(&format!("{path}/changes")).await.body;
    let change = &changes["data"][0];
    assert_eq!((&change["path"], &change["change"]), (&json!("log.txt"), &json!("created")));
}
