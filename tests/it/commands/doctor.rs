//! `toolloop doctor`: what it finds, what it leaves alone, and what it does not say.

use serde_json::Value;

use super::{ECHO, directory, toolloop};
use crate::claims::change;
use crate::service::{Db, Setup, command, on_both_stores};

/// A proxy that is not there, and that nothing on this machine is asked through.
const NO_PROXY: &str = "http://127.0.0.1:1";

/// The findings of a check in `doctor --json`.
fn of<'r>(report: &'r Value, check: &str) -> Vec<&'r Value> {
    report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["check"] == check)
        .collect()
}

#[tokio::test]
async fn an_empty_directory_is_healthy_and_unchanged() {
    let dir = directory(&[]);
    let seen = toolloop(dir.path(), &["doctor", "--listen", "127.0.0.1:0", "--json"]).await;
    assert_eq!(seen.code, Some(0), "{}{}", seen.out, seen.err);
    let report: Value = serde_json::from_str(&seen.out).unwrap();
    assert_eq!(report["status"], "warn");
    assert!(of(&report, "configuration")[0]["detail"].as_str().unwrap().contains("--listen"));
    assert!(of(&report, "agents")[0]["next"].as_str().unwrap().contains("schema agent"));
    assert!(
        of(&report, "model openai")[0]["detail"]
            .as_str()
            .unwrap()
            .contains("OPENAI_API_KEY is not set")
    );
    assert_eq!(dir.path().read_dir().unwrap().count(), 0, "nothing was made");
    let text = toolloop(dir.path(), &["doctor", "--listen", "127.0.0.1:0"]).await;
    assert!(text.out.starts_with("ok    configuration"), "{}", text.out);
}

#[tokio::test]
async fn every_failure_is_reported_with_exit_code_1() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = directory(&[
        ("agents/echo.yaml", &ECHO.replace("scripted/", "local/")),
        ("agents/bad.yaml", "name: bad\nmodel: scripted/x\nlimit: {}\n"),
        ("tools/orders.yaml", "base_url: x\n"),
        (
            "toolloop.toml",
            "[models.local]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1/v1\"\n[tools]\nworkspace = \"toolloop.toml/x\"\n\
             [mcp.odd]\ncommand = \"sh\"\nargs = [\"-c\", \"printf 'no module \\\\033[31modd\\\\n' >&2; exit 3\"]\ncwd = \"/tmp\"\n",
        ),
    ]);
    let seen = toolloop(dir.path(), &["doctor", "--listen", &address, "--json"]).await;
    assert_eq!(seen.code, Some(1), "{}", seen.err);
    let report: Value = serde_json::from_str(&seen.out).unwrap();
    for (check, word) in [
        ("agents", "/bad.yaml: line 3"),
        ("tools", "tools/orders.yaml: line 1"),
        ("model local", "does not respond"),
        ("listen", &address),
        ("workspace", "toolloop.toml"),
    ] {
        let failed = of(&report, check).into_iter().find(|finding| finding["status"] == "fail");
        let failed = failed.unwrap_or_else(|| panic!("{check}: {report:#}"));
        assert!(
            failed["detail"].as_str().unwrap().contains(word) && failed["next"].is_string(),
            "{failed}"
        );
    }

    let tools = of(&report, "tools")[0];
    assert!(!tools["detail"].as_str().unwrap().contains("agents/"), "{tools}");
    assert!(tools["next"].as_str().unwrap().contains("restart"), "{tools}");
    let unused = of(&report, "model openai")[0];
    assert_eq!(unused["status"], "ok", "no agent uses it: {unused}");
    let odd = of(&report, "mcp odd")[0];
    let detail = odd["detail"].as_str().unwrap();
    assert!(detail.contains("exit code 3") && detail.contains("no module \\u{1b}[31modd"), "{odd}");
    assert!(odd["next"].as_str().unwrap().contains("`reads`"), "{odd}");

    let dir = directory(&[("toolloop.toml", "[server]\nlissen = 1\n")]);
    let seen = toolloop(dir.path(), &["doctor"]).await;
    assert!(seen.code == Some(1) && seen.out.contains("toolloop.toml:2"), "{}", seen.out);
}

/// The service, its database and its log are as they were; a provider that answers is seen.
async fn a_running_service_is_recognised(db: Db) {
    let setup = Setup::new().agent("echo", "model: scripted/echo\n");
    let service = setup.scenario("echo", "steps: [{text: hi}]").start(db).await;
    let address = service.url("").replace("http://", "");
    let local =
        format!("[models.local]\nkind = \"openai\"\nbase_url = \"{}\"\n", service.url("/v1"));
    service.write("toolloop.toml", &local);
    let mut runs = command(service.dir.path());
    runs.args(["runs", "list", "--server", &service.url(""), "--key", &service.key]);
    let listed = runs.env("http_proxy", NO_PROXY).output().await.unwrap();
    assert!(listed.status.success(), "{listed:?}");
    let mut command = command(service.dir.path());
    command.args(["doctor", "--json", "--listen", &address]);
    command
        .env("http_proxy", NO_PROXY)
        .env("DATABASE_URL", &service.database_url)
        .env("TOOLLOOP_ADMIN_KEY", crate::service::ADMIN_KEY);
    let output = command.env("OPENAI_API_KEY", "").output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(!text.contains(crate::service::ADMIN_KEY));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert!(
        of(&report, "listen")[0]["detail"].as_str().unwrap().contains("a toolloop service"),
        "{report:#}"
    );
    assert!(
        of(&report, "model local")[0]["detail"].as_str().unwrap().contains("responds"),
        "{report:#}"
    );
    let database = of(&report, "database")[0]["detail"].as_str().unwrap();
    match db {
        Db::Sqlite => {
            assert!(database.contains("in use by a running service (process "), "{database}");
        }
        Db::Postgres => {
            assert!(database.starts_with("PostgreSQL 1"), "{database}");
            assert_eq!(of(&report, "schema")[0]["status"], "ok");
            assert_eq!(of(&report, "clock")[0]["detail"], "agrees with the database's");
        }
    }
}

#[tokio::test]
async fn an_unreachable_database_does_not_reveal_its_password() {
    let dir = directory(&[]);
    let url = "postgres://someone:hunter2@127.0.0.1:1/none";
    let seen =
        toolloop(dir.path(), &["doctor", "--listen", "127.0.0.1:0", "--database-url", url]).await;
    assert_eq!(seen.code, Some(1), "{}", seen.out);
    assert!(
        seen.out.contains("FAIL  database")
            && seen.out.contains("PostgreSQL at 127.0.0.1:1")
            && !seen.out.contains("hunter2")
            && !seen.err.contains("hunter2")
    );
}

/// A schema one step ahead of this version, in which a service starts; further ahead it does not.
async fn a_schema_ahead_is_judged_as_a_start_judges_it(db: Db) {
    let mut service = Setup::new().start(db).await;
    service.kill().await;
    for (health, code) in [("warn", 0), ("fail", 1)] {
        change(
            &service,
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
             SELECT version + 1, 'newer', success, checksum, 0 FROM _sqlx_migrations \
             ORDER BY version DESC LIMIT 1",
        )
        .await;
        let database = ["--database-url", &service.database_url];
        let here = async |arguments: &[&str]| {
            toolloop(service.dir.path(), &[arguments, &database].concat()).await
        };
        let seen = here(&["doctor", "--json", "--listen", "127.0.0.1:0"]).await;
        assert_eq!(seen.code, Some(code), "{}{}", seen.out, seen.err);
        let report: Value = serde_json::from_str(&seen.out).unwrap();
        let schema = of(&report, "schema")[0];
        assert!(schema["status"] == health && schema["next"].is_string(), "{schema}");
        assert_eq!(here(&["migrate"]).await.code, Some(code));
    }
}

on_both_stores!(a_running_service_is_recognised, a_schema_ahead_is_judged_as_a_start_judges_it);
