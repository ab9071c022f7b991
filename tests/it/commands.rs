//! The command line, run as a person or a script would.

mod addresses;
mod away;
mod deciding;
mod doctor;
mod own_runs;
mod printed;
mod speaking;
mod strangers;
mod terminals;
mod usage;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::service::{Db, Setup, command};

pub struct Output {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

pub async fn toolloop(dir: &Path, arguments: &[&str]) -> Output {
    let output = command(dir).args(arguments).output().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Output { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

fn directory(files: &[(&str, &str)]) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (path, content) in files {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    dir
}

const ECHO: &str = "name: echo\nmodel: scripted/echo\ninputs: {type: object, properties: {word: {type: string}}}\n";

#[tokio::test]
async fn invoke_runs_an_agent_without_a_server() {
    let dir = directory(&[
        ("agents/echo.yaml", ECHO),
        ("scenarios/echo.yaml", "steps: [{text: '{{ inputs.word }}!'}]"),
    ]);
    let done = toolloop(dir.path(), &["invoke", "echo", "--input", "word=hello"]).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    let answer: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(
        (&answer["status"], &answer["output"]),
        (&json!("completed"), &json!({"result": "hello!"}))
    );
    assert!(done.err.contains("completed"), "progress is told on standard error: {}", done.err);

    let refused = toolloop(dir.path(), &["invoke", "echo", "--input", "word:=1"]).await;
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    let unknown = toolloop(dir.path(), &["invoke", "nobody"]).await;
    assert!(unknown.code == Some(1) && unknown.err.contains("nobody"), "{}", unknown.err);
}

#[tokio::test]
async fn a_failed_run_is_exit_code_one() {
    let dir = directory(&[
        ("agents/echo.yaml", ECHO),
        ("scenarios/echo.yaml", "steps: [{error: {status: 400, message: no}}]"),
    ]);
    let failed = toolloop(dir.path(), &["invoke", "echo"]).await;
    assert_eq!(failed.code, Some(1), "{}", failed.err);
    let answer: Value = serde_json::from_str(&failed.out).unwrap();
    assert_eq!(answer["error"]["code"], "MODEL_ERROR");
}

#[tokio::test]
async fn check_names_file_line_and_key() {
    let good =
        directory(&[("agents/echo.yaml", ECHO), ("scenarios/echo.yaml", "steps: [{text: hi}]")]);
    assert_eq!(toolloop(good.path(), &["check"]).await.code, Some(0));
    let bad = directory(&[("agents/echo.yaml", &format!("{ECHO}tools: [file_ops, teleport]\n"))]);
    // Commands that need no definitions say nothing of them.
    for quiet in [&["runs", "list"][..], &["keys", "list"], &["audit", "verify"], &["models"]] {
        let quiet = toolloop(bad.path(), quiet).await;
        assert!(!quiet.err.contains("echo.yaml") && !quiet.err.contains("WARN"), "{}", quiet.err);
    }
    let keys = toolloop(bad.path(), &["keys", "list"]).await;
    assert_eq!((keys.out.as_str(), keys.err.as_str()), ("", "There are no keys.\n"));
    let invoked = toolloop(bad.path(), &["invoke", "echo"]).await;
    assert!(invoked.err.contains("echo.yaml"), "{}", invoked.err);
    let bad = toolloop(bad.path(), &["check"]).await;
    assert_eq!(bad.code, Some(1), "{}", bad.err);
    let help = toolloop(good.path(), &["check", "--help"]).await.out;
    assert!(help.contains("1 a definition") && help.contains("2 a setting"), "{help}");
    assert!(bad.out.contains("echo.yaml") && bad.out.contains("teleport"), "{}", bad.out);
    let unknown =
        directory(&[("toolloop.toml", "[server]\nlisten = \"127.0.0.1:0\"\nlissen = 1\n")]);
    let unknown = toolloop(unknown.path(), &["check"]).await;
    assert_eq!(unknown.code, Some(2), "{}", unknown.err);
    assert!(
        unknown.err.contains("toolloop.toml:3") && unknown.err.contains("lissen"),
        "{}",
        unknown.err
    );
}

#[tokio::test]
async fn auth_none_requires_loopback() {
    let dir = directory(&[(
        "toolloop.toml",
        "[auth]\nmode = \"none\"\n[server]\nlisten = \"0.0.0.0:0\"\n",
    )]);
    let refused = toolloop(dir.path(), &["serve"]).await;
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("loopback"), "{}", refused.err);
}

/// What `serve` prints; it is ended when it prints nothing more.
async fn banner(dir: &Path) -> String {
    let mut serving = command(dir).args(["serve", "--listen", "127.0.0.1:0"]).spawn().unwrap();
    let mut lines = BufReader::new(serving.stdout.take().unwrap()).lines();
    let (mut banner, mut patience) = (String::new(), Duration::from_mins(2));
    while let Ok(Ok(Some(line))) = tokio::time::timeout(patience, lines.next_line()).await {
        banner.extend([&*line, "\n"]);
        patience = Duration::from_secs(5);
    }
    serving.kill().await.unwrap();
    banner
}

#[tokio::test]
async fn a_closed_standard_output_does_not_stop_the_service() {
    let dir = directory(&[]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut serve = command(dir.path());
    let serve = serve.args(["serve", "--listen", "127.0.0.1:0"]).stdout(writer);
    let mut serving = serve.spawn().unwrap();
    let mut lines = BufReader::new(serving.stderr.take().unwrap()).lines();
    let told = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.contains("standard output cannot be written to") {
                return;
            }
        }
        panic!("the service has ended");
    };
    tokio::time::timeout(Duration::from_mins(1), told).await.unwrap();
    assert!(serving.try_wait().unwrap().is_none());
    serving.kill().await.unwrap();
}

#[tokio::test]
async fn a_start_makes_an_admin_key_where_there_never_was_one() {
    for (scope, is_made) in [("runs:read", true), ("admin", false)] {
        let dir = directory(&[]);
        let made =
            toolloop(dir.path(), &["keys", "create", "--name", "ci", "--scope", scope]).await;
        assert_eq!(made.code, Some(0), "{}", made.err);
        let told = toolloop(dir.path(), &["doctor", "--listen", "127.0.0.1:0"]).await.out;
        assert_eq!(told.contains("no key with admin yet"), is_made, "{scope}: {told}");
        let first = banner(dir.path()).await;
        assert_eq!(first.contains("TOOLLOOP_KEY=tl_bootstrapadmin_"), is_made, "{scope}: {first}");
        let second = banner(dir.path()).await;
        assert!(second.contains("toolloop serves") && !second.contains("TOOLLOOP_KEY"), "{second}");
        let told = toolloop(dir.path(), &["doctor", "--listen", "127.0.0.1:0"]).await.out;
        assert!(told.contains("contains a key with admin"), "{told}");
        if is_made {
            let revoke = ["keys", "revoke", "bootstrapadmin", "--force"];
            assert_eq!(toolloop(dir.path(), &revoke).await.code, Some(0));
            let third = banner(dir.path()).await;
            assert!(!third.contains("TOOLLOOP_KEY"), "revoked it stays revoked: {third}");
            let told = toolloop(dir.path(), &["doctor", "--listen", "127.0.0.1:0"]).await.out;
            assert!(told.contains("keys create --name admin --scope admin"), "{told}");
        }
    }
}

#[tokio::test]
async fn keys_created_on_the_command_line_authenticate() {
    let mut service = Setup::new().start(Db::Postgres).await;
    let url = service.database_url.clone();
    let made = toolloop(
        service.dir.path(),
        &[
            "keys",
            "create",
            "--database-url",
            &url,
            "--name",
            "ci",
            "--scope",
            "runs:read",
            "--json",
        ],
    )
    .await;
    assert_eq!(made.code, Some(0), "{}", made.err);
    let key: Value = serde_json::from_str(&made.out).unwrap();
    service.key = key["key"].as_str().unwrap().into();
    assert_eq!(service.get("/v1/runs").await.status, 200);
    assert_eq!(service.get("/v1/keys").await.status, 403);
    let revoked = toolloop(
        service.dir.path(),
        &["keys", "revoke", key["id"].as_str().unwrap(), "--database-url", &url],
    )
    .await;
    assert_eq!(revoked.code, Some(0), "{}", revoked.err);
    let mut refused = service.get("/v1/runs").await.status;
    for _ in 0..3000 {
        if refused == 401 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        refused = service.get("/v1/runs").await.status;
    }
    assert_eq!(refused, 401, "a revoked key stops working");
}

#[tokio::test]
async fn the_first_start_prints_one_key_and_the_second_none() {
    let dir = directory(&[]);
    let first = toolloop(dir.path(), &["migrate"]).await;
    assert_eq!(first.code, Some(0), "{}", first.err);
    assert!(first.out.contains("schema was created"), "{}", first.out);
    let second = toolloop(dir.path(), &["migrate"]).await;
    assert!(second.out.contains("schema is up to date"), "{}", second.out);
    let start = async || {
        let mut child =
            command(dir.path()).args(["serve", "--listen", "127.0.0.1:0"]).spawn().unwrap();
        let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(
            child.stderr.take().unwrap(),
        ));
        while !lines.next_line().await.unwrap().unwrap().contains("listening") {}
        crate::service::send_signal(&child, crate::service::Signal::TERM);
        let output = child.wait_with_output().await.unwrap();
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(start().await.matches("TOOLLOOP_KEY=tl_").count(), 1);
    assert_eq!(start().await.matches("tl_").count(), 0);
}

#[tokio::test]
async fn variables_that_no_setting_has_are_told() {
    let tools = "base_url: http://a.example\nheaders: {A: '{{ env.TOOLLOOP_TICKETS }}'}\ntools: [{name: a, method: GET, path: /}]\n";
    let dir = directory(&[
        (
            "toolloop.toml",
            "tools_dir = \"tools\"\n[models.own]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:9\"\napi_key_env = \"TOOLLOOP_OWN\"\n",
        ),
        ("tools/set.yaml", tools),
    ]);
    let variables = [
        ("TOOLLOOP_AGENT_DIR", "x"),
        ("TOOLLOOP_FOO", "a secret"),
        // Those that mean something, and those that Kubernetes makes for a service of that name.
        ("TOOLLOOP_KEY", "x"),
        ("TOOLLOOP_OWN", "x"),
        ("TOOLLOOP_TICKETS", "x"),
        ("TOOLLOOP_LOG", "warn"),
        ("TOOLLOOP_SERVICE_HOST", "10.0.0.1"),
        ("TOOLLOOP_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("TOOLLOOP_POSTGRES_SERVICE_PORT_SQL", "5432"),
    ];
    let checked = command(dir.path()).arg("check").envs(variables).output().await.unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(0), "{said}");
    let told: Vec<&str> = said.lines().filter(|line| line.contains("TOOLLOOP_")).collect();
    let expected = [
        "warning: the environment variable TOOLLOOP_AGENT_DIR is not a setting (did you mean `TOOLLOOP_AGENTS_DIR`?)",
        "warning: the environment variable TOOLLOOP_FOO is not a setting",
    ];
    assert_eq!(told, expected, "{said}");
    let mut child = command(dir.path())
        .args(["serve", "--listen", "127.0.0.1:0"])
        .envs(variables)
        .spawn()
        .unwrap();
    let stderr = tokio::io::BufReader::new(child.stderr.take().unwrap());
    let mut lines = tokio::io::AsyncBufReadExt::lines(stderr);
    let mut log = String::new();
    while let Some(line) = lines.next_line().await.unwrap() {
        log.push_str(&line);
        log.push('\n');
        if line.contains("draining") {
            break;
        }
        if line.contains("TOOLLOOP_FOO") {
            crate::service::send_signal(&child, crate::service::Signal::TERM);
        }
    }
    child.wait().await.unwrap();
    assert!(log.contains("TOOLLOOP_AGENT_DIR") && !log.contains("a secret"), "{log}");
    assert!(!log.contains("TOOLLOOP_TICKETS"), "{log}");
}
