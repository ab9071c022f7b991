//! From nothing to an agent of one's own: `init`, `new agent`, the first start, the front door.
//!
//! With other features. The project's runs are ordinary runs: children, sessions, budgets, crashes and other
//! replicas are told elsewhere. Stores: SQLite, which a project begins with; the whole road goes on
//! PostgreSQL too (here). Command line: `--json`, exit codes, refusals (here). Console: `/` leads a
//! browser to it, where it is served (here). Skills, webhooks: a project begins without them.

use std::path::Path;

use reqwest::header::{ACCEPT, LOCATION};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::commands::toolloop;
use crate::service::{Db, Service, Setup, answer, command, on_both_stores};

on_both_stores! { the_whole_road }

const FILES: [&str; 8] = [
    "toolloop.toml",
    "agents/hello.yaml",
    "scenarios/hello.yaml",
    "tools/text.yaml",
    "tools/word_count.py",
    "tests/hello.yaml",
    "docker-compose.yml",
    "README.md",
];

/// Every file beneath a directory, relative to it.
fn files(dir: &Path) -> Vec<String> {
    fn walk(root: &Path, dir: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
            } else {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    let mut found = Vec::new();
    walk(dir, dir, &mut found);
    found.sort();
    found
}

fn sorted(names: &[&str]) -> Vec<String> {
    let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    names.sort();
    names
}

async fn ask(service: &Service, agent: &str, inputs: &Value) -> Value {
    service.run(agent, &json!({ "inputs": inputs })).await
}

async fn the_whole_road(db: Db) {
    let home = TempDir::new().unwrap();
    let directory = tempfile::Builder::new().prefix("demo").tempdir_in(home.path()).unwrap();
    let demo = directory.path().to_owned();
    let name = demo.file_name().unwrap().to_str().unwrap();
    let made = toolloop(home.path(), &["init", name]).await;
    assert_eq!(made.code, Some(0), "{}", made.err);
    assert!(made.out.contains(&format!("cd {name} && toolloop serve")), "{}", made.out);
    assert_eq!(files(&demo), sorted(&FILES));

    let check = async || {
        let checked = toolloop(&demo, &["check"]).await;
        assert_eq!(checked.code, Some(0), "{}{}", checked.out, checked.err);
        assert!(!checked.out.contains("warning"), "{}", checked.out);
    };
    check().await;
    let cases = toolloop(&demo, &["policy", "test", "tests/hello.yaml"]).await;
    assert_eq!(cases.code, Some(0), "{}{}", cases.out, cases.err);
    assert!(cases.out.starts_with("3 cases, 0 failed."), "{}", cases.out);

    let service = Setup::new().start_in(directory, db).await;
    let run = ask(&service, "hello", &json!({"text": "the tide and the wind"})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    assert_eq!(run["output"], json!({"result": "Hello! Your text has 5 words."}));
    assert_eq!(run["tools_used"], json!(["script:text/word-count"]));
    assert_eq!(run["warnings"], json!([]), "{run:#}");
    let bare = ask(&service, "hello", &json!({})).await;
    assert_eq!(bare["output"]["result"], "Hello! Your text has 2 words.", "{bare:#}");

    let added = toolloop(&demo, &["new", "agent", "my-agent"]).await;
    assert_eq!(added.code, Some(0), "{}", added.err);
    assert!(added.out.contains("agents/my-agent.yaml"), "{}", added.out);
    check().await;
    let agent = service.until("/v1/agents/my-agent", |agent| agent["name"] == "my-agent").await;
    assert_eq!(agent["model"], "openai/gpt-4.1-mini", "{agent:#}");
}

#[tokio::test]
async fn a_file_that_is_there_is_named_and_nothing_is_written() {
    let dir = TempDir::new().unwrap();
    std::fs::create_dir(dir.path().join("tools")).unwrap();
    for there in ["README.md", "tools/text.yaml"] {
        std::fs::write(dir.path().join(there), "mine").unwrap();
    }
    let refused = toolloop(dir.path(), &["init"]).await;
    assert_eq!(refused.code, Some(2), "{}", refused.out);
    assert!(
        refused.err.contains("README.md") && refused.err.contains("tools/text.yaml"),
        "{}",
        refused.err
    );
    assert_eq!(files(dir.path()), ["README.md", "tools/text.yaml"]);
    assert_eq!(std::fs::read_to_string(dir.path().join("README.md")).unwrap(), "mine");

    // A link that leads nowhere is there, too: it would be written through.
    let linked = TempDir::new().unwrap();
    std::os::unix::fs::symlink("elsewhere.toml", linked.path().join("toolloop.toml")).unwrap();
    let refused = toolloop(linked.path(), &["init", "--json"]).await;
    assert!(refused.code == Some(2) && refused.err.contains("toolloop.toml"), "{}", refused.err);
    assert!(
        !linked.path().join("elsewhere.toml").exists() && !linked.path().join("agents").exists()
    );

    // What was begun is taken back: `tools` is a file, which no check of the eight has seen.
    let blocked = TempDir::new().unwrap();
    std::fs::write(blocked.path().join("tools"), "a file").unwrap();
    let refused = toolloop(blocked.path(), &["init"]).await;
    assert!(refused.code == Some(1) && refused.err.contains("tools"), "{}", refused.err);
    assert_eq!(files(blocked.path()), ["tools"]);
    assert!(!blocked.path().join("agents").exists());
}

#[tokio::test]
async fn json_says_what_was_written() {
    let dir = TempDir::new().unwrap();
    let made = toolloop(dir.path(), &["init", "a/b", "--json"]).await;
    assert_eq!(made.code, Some(0), "{}", made.err);
    let said: Value = serde_json::from_str(&made.out).unwrap();
    assert_eq!(said, json!({"directory": "a/b", "written": FILES}));
    let demo = dir.path().join("a/b");
    assert_eq!(files(&demo), sorted(&FILES));
    let added = toolloop(&demo, &["new", "agent", "second", "--json"]).await;
    let said: Value = serde_json::from_str(&added.out).unwrap();
    assert_eq!(said["agent"], "second", "{said:#}");
    assert!(said["written"][0].as_str().unwrap().ends_with("agents/second.yaml"), "{said:#}");
}

#[tokio::test]
async fn the_command_that_is_told_leads_into_any_directory() {
    let home = TempDir::new().unwrap();
    for name in ["a b", "x;y", "it's $(HOME)", "-dash", "-", "~"] {
        let made = toolloop(home.path(), &["init", "--", name]).await;
        assert_eq!(made.code, Some(0), "{}", made.err);
        let next = made.out.trim_end().rsplit("\n  ").next().unwrap().to_owned();
        let (cd, serve) = next.split_once(" && ").unwrap();
        assert_eq!(serve, "toolloop serve", "{next}");
        let shell = tokio::process::Command::new("sh")
            .args(["-c", &format!("{cd} && pwd")])
            .current_dir(home.path())
            .output()
            .await
            .unwrap();
        let there = String::from_utf8(shell.stdout).unwrap();
        assert!(there.ends_with(&format!("/{name}\n")), "{next}: {there:?}");
    }
}

#[tokio::test]
async fn a_new_agent_has_a_good_name_and_replaces_none() {
    let dir = TempDir::new().unwrap();
    for name in ["A", "a", "1st", "my_agent", "../out", "a/b", "-x", "", "a\nb", &"x".repeat(65)] {
        let refused = toolloop(dir.path(), &["new", "agent", "--", name]).await;
        assert_eq!(refused.code, Some(2), "{name:?}: {}", refused.out);
        assert!(refused.err.contains("^[a-z][a-z0-9-]{1,63}$"), "{name:?}: {}", refused.err);
    }
    assert!(files(dir.path()).is_empty());
    std::fs::create_dir(dir.path().join("agents")).unwrap();
    for there in ["one.yaml", "two.yml"] {
        std::fs::write(dir.path().join("agents").join(there), "mine").unwrap();
        let name = there.split('.').next().unwrap();
        let refused = toolloop(dir.path(), &["new", "agent", name]).await;
        assert!(refused.code == Some(2) && refused.err.contains(there), "{}", refused.err);
    }
    assert_eq!(files(dir.path()), ["agents/one.yaml", "agents/two.yml"]);

    // It needs none of the secrets that the service needs.
    std::fs::write(dir.path().join("toolloop.toml"), "[audit]\nkey_env = \"NOT_SET_HERE\"\n")
        .unwrap();
    let made = toolloop(dir.path(), &["new", "agent", "three"]).await;
    assert_eq!(made.code, Some(0), "{}", made.err);
    assert!(dir.path().join("agents/three.yaml").exists());
}

/// Standard output of a service that was started in a directory and stopped.
async fn banner(dir: &Path) -> String {
    let mut child = command(dir).args(["serve", "--listen", "127.0.0.1:0"]).spawn().unwrap();
    let mut lines =
        tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(child.stderr.take().unwrap()));
    while !lines.next_line().await.unwrap().unwrap().contains("listening") {}
    crate::service::send_signal(&child, crate::service::Signal::TERM);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(output.status.code(), Some(0));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn the_banner_says_what_to_do() {
    let empty = TempDir::new().unwrap();
    let said = banner(empty.path()).await;
    for part in ["toolloop init", "/console", "/docs", "toolloop doctor", "TOOLLOOP_KEY=tl_"] {
        assert!(said.contains(part), "no {part} in {said}");
    }
    assert!(!said.contains("curl"), "{said}");

    let home = TempDir::new().unwrap();
    assert_eq!(toolloop(home.path(), &["init"]).await.code, Some(0));
    let said = banner(home.path()).await;
    assert!(said.contains("/v1/agents/hello/invoke-iterative"), "{said}");
    assert!(said.contains(r#"-d '{"inputs":{"text":"Hello world"}}'"#), "{said}");
    assert!(!said.contains("toolloop init"), "{said}");

    let broken = TempDir::new().unwrap();
    std::fs::create_dir(broken.path().join("agents")).unwrap();
    std::fs::write(broken.path().join("agents/bad.yaml"), "name: [").unwrap();
    let said = banner(broken.path()).await;
    assert!(said.contains("toolloop check") && !said.contains("toolloop init"), "{said}");
}

#[tokio::test]
async fn a_browser_at_the_front_door_is_led_to_the_console() {
    let service = Setup::new().start(Db::Sqlite).await;
    let http =
        reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let knock = async |service: &Service, method: Method, accept: Option<&str>| {
        let mut request = http.request(method, service.url("/"));
        if let Some(accept) = accept {
            request = request.header(ACCEPT, accept);
        }
        answer(request).await
    };
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let led = knock(&service, Method::GET, Some(browser)).await;
    assert_eq!(led.status, StatusCode::TEMPORARY_REDIRECT);
    assert_eq!(led.headers[LOCATION], "/console");
    assert_eq!(led.headers["vary"], "accept");
    for accept in [None, Some("*/*"), Some("application/json"), Some("text/plain")] {
        let refused = knock(&service, Method::GET, accept).await;
        assert_eq!(
            (refused.status, &refused.body["code"]),
            (StatusCode::NOT_FOUND, &json!("NOT_FOUND"))
        );
    }
    let posted = knock(&service, Method::POST, Some(browser)).await;
    assert_eq!(posted.status, StatusCode::METHOD_NOT_ALLOWED);

    let closed = Setup::new().config("[server]\nexpose = [\"docs\"]").start(Db::Sqlite).await;
    let refused = knock(&closed, Method::GET, Some(browser)).await;
    assert_eq!(refused.status, StatusCode::NOT_FOUND);
}
