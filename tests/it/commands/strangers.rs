//! Commands whose address is not that of a toolloop service, but of a server that answers 200.

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::{Output, directory, toolloop};

const ID: &str = "01970000-0000-7000-8000-000000000000";

const LISTS: [&[&str]; 7] = [
    &["runs", "list"],
    &["keys", "list"],
    &["files", "ls", ID],
    &["audit", "verify"],
    &["audit", "verify", "--json"],
    &["audit", "export"],
    &["audit", "export", "--ocsf"],
];

const OTHERS: [&[&str]; 18] = [
    &["runs", "show", ID],
    &["runs", "watch", ID],
    &["runs", "watch", ID, "--json"],
    &["runs", "cancel", ID],
    &["runs", "cancel", ID, "--json"],
    &["runs", "approve", ID, ID],
    &["runs", "approve", ID, ID, "--json"],
    &["runs", "deny", ID, ID],
    &["runs", "resolve", ID, ID, "--outcome", "happened"],
    &["runs", "result", ID, ID, "--content", "x"],
    &["keys", "create", "--name", "x", "--scope", "admin"],
    &["keys", "create", "--name", "x", "--scope", "admin", "--json"],
    &["keys", "revoke", "0123456789abcdef"],
    &["invoke", "echo"],
    &["invoke", "echo", "--dry-run"],
    &["tools", "call", "echo", "file_ops"],
    &["policy", "replay", "--agent", "echo"],
    &["policy", "replay", "--agent", "echo", "--json"],
];

/// A server that gives one answer to everything, and its address.
struct Stranger(String, JoinHandle<()>);

impl Drop for Stranger {
    fn drop(&mut self) {
        self.1.abort();
    }
}

impl Stranger {
    async fn start(media_type: &'static str, body: String) -> Self {
        let answer = move || async move { (StatusCode::OK, [(CONTENT_TYPE, media_type)], body) };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer);
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self(address, server)
    }

    async fn asked(&self, dir: &std::path::Path, arguments: &[&str]) -> Output {
        toolloop(dir, &[arguments, &["--server", &self.0, "--key", "tl_a_b"]].concat()).await
    }
}

#[tokio::test]
async fn answers_of_another_server_are_unexpected() {
    let dir = directory(&[("a.txt", "a")]);
    let file = dir.path().join("a.txt");
    let put = ["files", "put", ID, "a.txt", file.to_str().unwrap()];
    let files: [&[&str]; 2] = [&["files", "get", ID, "a.txt"], &put];
    for (media_type, body) in [
        ("application/json", "{}"),
        ("application/json", "null"),
        ("application/json", ""),
        ("text/html", "<html>Sign in</html>"),
    ] {
        let stranger = Stranger::start(media_type, body.to_owned()).await;
        for arguments in LISTS.iter().chain(&OTHERS).chain(&files) {
            let done = stranger.asked(dir.path(), arguments).await;
            assert_eq!((done.code, &*done.out), (Some(1), ""), "{arguments:?} {body}");
            assert!(done.err.contains("unexpected response: "), "{arguments:?}: {}", done.err);
            assert!(done.err.contains("a toolloop service at that address?"), "{}", done.err);
        }
    }
}

#[tokio::test]
async fn a_list_of_something_else_or_without_an_end_is_unexpected() {
    let dir = directory(&[]);
    let endless = json!({"data": [], "next_cursor": "x"});
    let others = json!({"data": [{"hello": "world"}], "next_cursor": null});
    for (list, why) in [(endless, "a page that leads to itself"), (others, " without ")] {
        let stranger = Stranger::start("application/json", list.to_string()).await;
        for arguments in LISTS {
            let done = stranger.asked(dir.path(), arguments).await;
            assert_eq!((done.code, &*done.out), (Some(1), ""), "{arguments:?}");
            assert!(done.err.contains(why), "{arguments:?}: {}", done.err);
        }
    }
}

#[tokio::test]
async fn a_check_escapes_what_a_service_at_its_address_says() {
    let dir = directory(&[]);
    let due = json!({"file": "a\u{1b}[2J", "error": "has changed since the start"});
    let stranger =
        Stranger::start("application/json", json!({"definitions": [due]}).to_string()).await;
    let address = stranger.0.replace("http://", "");
    let done = toolloop(dir.path(), &["check", "--listen", &address]).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.contains("a\\u{1b}[2J has changed"), "{}", done.out);
}

#[tokio::test]
async fn an_empty_audit_log_of_a_service_is_verified() {
    let dir = directory(&[]);
    let empty = json!({"data": [], "next_cursor": null});
    let stranger = Stranger::start("application/json", empty.to_string()).await;
    let done = stranger.asked(dir.path(), &["audit", "verify"]).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.starts_with("0 closed stretches with 0 records"), "{}", done.out);
}
