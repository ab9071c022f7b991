//! Secrets that the proxy adds to requests of programs, through the HTTP API, with git and a server
//! that speaks TLS and wants a password, on both stores.
//!
//! With other features. Children and handoffs: have the credentials of their own definition. Parked runs,
//! sessions, crash, other replica: a request is one call's; nothing of a credential is kept. Cancel:
//! as every program. Streaming, tenants, budgets, dry run, console, command line, generated clients:
//! as every request of a program (`way_out.rs`). Skills: name no credentials.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    git_fetches_with_a_secret_that_no_program_has,
    a_credential_that_is_not_there_is_a_mistake_of_the_definition,
}

const TOKEN: &str = "forge-token-5d41402abc4b2a76";

/// A server of files behind a password, and what it was asked.
struct Forge {
    port: u16,
    directory: TempDir,
    asked: Arc<Mutex<Vec<String>>>,
    server: JoinHandle<()>,
}

impl Drop for Forge {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Forge {
    async fn start() -> Self {
        let directory = TempDir::new().unwrap();
        repository(directory.path());
        let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let certificate = directory.path().join("certificate.pem");
        std::fs::write(&certificate, certified.cert.pem()).unwrap();
        let key =
            PrivateKeyDer::from(PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der()));
        let tls = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let (root, log) = (directory.path().to_owned(), Arc::clone(&asked));
        let server = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (acceptor, root, log) = (acceptor.clone(), root.clone(), Arc::clone(&log));
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = service_fn(|request| {
                        let answer = respond(&root, &log, &request, port);
                        async move { Ok::<_, std::convert::Infallible>(answer) }
                    });
                    let served = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service);
                    let _ = served.await;
                });
            }
        });
        Self { port, directory, asked, server }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn respond(
    root: &Path,
    log: &Mutex<Vec<String>>,
    request: &Request<Incoming>,
    port: u16,
) -> Response<Full<Bytes>> {
    let header = |name: &str| {
        let value = request.headers().get(name).map(|value| value.to_str().unwrap());
        value.unwrap_or("-").to_owned()
    };
    let path = request.uri().path();
    let (authorization, other) = (header("authorization"), header("private-token"));
    log.lock().unwrap().push(format!("{path} {authorization} {other}"));
    let answer = |status, body: Vec<u8>| {
        let mut answer = Response::new(Full::new(Bytes::from(body)));
        *answer.status_mut() = status;
        answer
    };
    let expected = BASE64_STANDARD.encode(format!("toolloop:{TOKEN}"));
    if path.starts_with("/acme/") && authorization != format!("Basic {expected}") {
        return answer(StatusCode::UNAUTHORIZED, b"who are you?".to_vec());
    }
    if let Some(new) = path.strip_prefix("/acme/moved/") {
        let mut moved = answer(StatusCode::FOUND, Vec::new());
        let location = format!("https://localhost:{port}/acme/{new}");
        moved.headers_mut().insert("location", location.parse().unwrap());
        return moved;
    }
    match std::fs::read(root.join(path.trim_start_matches('/'))) {
        Ok(file) => answer(StatusCode::OK, file),
        Err(_) => answer(StatusCode::NOT_FOUND, Vec::new()),
    }
}

/// `acme/widgets.git`, as git serves it without a program of its own.
fn repository(root: &Path) {
    let git = |directory: &Path, arguments: &[&str]| {
        let mut command = Command::new("git");
        command.current_dir(directory).args([
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@example.com",
        ]);
        let ran = command.args(arguments).env("HOME", root).output().unwrap();
        assert!(ran.status.success(), "{arguments:?} {}", String::from_utf8_lossy(&ran.stderr));
    };
    let work = root.join("work");
    std::fs::create_dir_all(&work).unwrap();
    std::fs::create_dir_all(root.join("acme")).unwrap();
    std::fs::create_dir_all(root.join("open")).unwrap();
    std::fs::write(root.join("acme/file.txt"), "inside").unwrap();
    std::fs::write(root.join("open/file.txt"), "outside").unwrap();
    git(&work, &["init", "-q", "-b", "main"]);
    std::fs::write(work.join("widget.txt"), "a widget\n").unwrap();
    git(&work, &["add", "."]);
    git(&work, &["commit", "-q", "-m", "first"]);
    git(root, &["clone", "-q", "--bare", "work", "acme/widgets.git"]);
    git(&root.join("acme/widgets.git"), &["update-server-info"]);
}

fn configured(port: u16) -> String {
    format!(
        "[tools.credentials.forge]\nurl = \"https://localhost:{port}/acme/\"\ntoken_env = \"FORGE_TOKEN\"\nusername = \
         \"toolloop\"\n[tools.credentials.open]\nurl = \"https://localhost:{port}/open\"\ntoken_env = \
         \"FORGE_TOKEN\"\nheader = \"PRIVATE-TOKEN\"\n"
    )
}

fn agent(port: u16, credentials: &str) -> String {
    format!(
        "model: scripted/worker\ntools: [shell]\nenable_double_confirmation: false\nlimits: {{error_threshold: 50}}\n\
         governance:\n  autonomy: full\n  paths: {{read: ['**'], write: ['**']}}\n  commands: {{allow: [{{command: curl, effect: read}}, {{command: git, args: \
         '^(clone|fetch|-C) '}}, {{command: printenv}}]}}\n  network: {{allow: ['localhost:{port}'], allow_private: \
         [127.0.0.0/8, '::1'], credentials: {credentials}}}\n"
    )
}

fn calling(commands: &[String]) -> String {
    let call = |command: &String| {
        json!({"tool_calls": [{"tool": "shell", "arguments": {"command": command}}]}).to_string()
    };
    let steps: Vec<String> = commands.iter().map(call).collect();
    format!("steps: [{}, {{text: done}}]", steps.join(", "))
}

async fn results(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let all = service.get(&path).await.body["data"].as_array().unwrap().clone();
    let completed = all.into_iter().filter(|event| event["type"] == "tool_call.completed");
    let content = completed.map(|event| event["data"]["content"].as_str().unwrap().to_owned());
    content.map(|text| serde_json::from_str(&text).unwrap_or(Value::String(text))).collect()
}

async fn git_fetches_with_a_secret_that_no_program_has(db: Db) {
    let forge = Forge::start().await;
    let port = forge.port;
    let secure = format!("https://localhost:{port}");
    let plain = format!("http://localhost:{port}");
    let commands = [
        format!("git clone -q {secure}/acme/widgets.git widgets"),
        "git -C widgets fetch -q".to_owned(),
        "git -C widgets log --oneline".to_owned(),
        format!("curl -s {plain}/acme/file.txt"),
        format!("curl -s -H 'Authorization: Basic bWU=' {plain}/acme/file.txt"),
        format!("curl -s -L {plain}/acme/moved/file.txt"),
        format!("curl -s {plain}/open/file.txt"),
        // Through the tunnel nothing is added, and elsewhere on the host neither.
        format!("curl -s -k {secure}/acme/file.txt"),
        format!("curl -s --path-as-is {plain}/acme/..%2fopen/file.txt"),
        "printenv".to_owned(),
    ];
    let certificate = forge.directory.path().join("certificate.pem");
    let service = Setup::new()
        .config(&configured(port))
        .variable("FORGE_TOKEN", TOKEN)
        .variable("SSL_CERT_FILE", certificate.to_str().unwrap())
        .agent("worker", &agent(port, "[forge, open]"))
        .scenario("worker", &calling(&commands))
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let results = results(&service, &run).await;
    let outputs: Vec<&str> =
        results.iter().map(|result| result["stdout"].as_str().unwrap_or("?")).collect();
    assert_eq!(results[0]["exit_code"], 0, "{results:#?}\n{:#?}", forge.asked());
    assert_eq!(results[1]["exit_code"], 0, "{results:#?}");
    assert!(outputs[2].ends_with(" first\n"), "{results:#?}");
    assert_eq!(outputs[3..8], ["inside", "inside", "inside", "outside", "who are you?"]);
    assert_ne!(outputs[8], "inside");
    assert!(outputs[9].contains("GIT_CONFIG_VALUE_0"), "{results:#?}");
    let asked = forge.asked();
    let open = asked.iter().find(|line| line.starts_with("/open/")).unwrap();
    assert_eq!(*open, format!("/open/file.txt - {TOKEN}"));
    let events = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let shown = [service.log(), service.get(&events).await.body.to_string()].concat();
    let basic = BASE64_STANDARD.encode(format!("toolloop:{TOKEN}"));
    assert!(!shown.contains(TOKEN) && !shown.contains(&basic), "{shown}");
    let audit = service.get("/v1/audit?limit=200").await.body["data"].to_string();
    assert!(audit.contains("/acme/file.txt"), "{audit:.2000}");
    assert!(!audit.contains(TOKEN) && !audit.contains(&basic));
}

async fn a_credential_that_is_not_there_is_a_mistake_of_the_definition(db: Db) {
    let elsewhere = agent(8443, "[forge]").replace("localhost:8443", "localhost:8444");
    let service = Setup::new()
        .config(&configured(8443))
        .agent("unset", &agent(8443, "[forge]"))
        .agent("unknown", &agent(8443, "[other]"))
        .agent("elsewhere", &elsewhere)
        .agent("none", &agent(8443, "[]"))
        .scenario("worker", "steps: [{text: done}]")
        .start(db)
        .await;
    let ready = service.get("/readyz").await;
    let told = ready.body.to_string();
    for expected in [
        "governance.network.credentials[0]: [tools.credentials.forge] needs the environment variable FORGE_TOKEN",
        "governance.network.credentials[0]: there is no [tools.credentials.other]",
    ] {
        assert!(told.contains(expected), "{told}");
    }
    assert_eq!(service.run("none", &json!({})).await["status"], "completed");
    for broken in ["unset", "unknown", "elsewhere"] {
        let answer = service.post(&format!("/v1/agents/{broken}/invoke"), &json!({})).await;
        assert!(answer.status.as_u16() >= 400, "{broken} {}", answer.body);
    }
}
