//! Large answers and streams that are not read: the memory that they keep is given to others.

use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::service::{Db, Service, Setup};

const BYTES: usize = 950_000;
/// More answers of [`BYTES`] than an eighth of the memory limit has.
const MANY: usize = 48;

/// Streams of events, each with one of [`BYTES`], and how much the service may grow by them, in MiB.
const STREAMS: usize = 300;
const MOST_GROWN: u64 = 150;

/// Asks for JSON, and reads the status alone.
async fn unread(service: &Service, path: &str) -> TcpStream {
    unread_as(service, path, "application/json").await
}

async fn unread_as(service: &Service, path: &str, accept: &str) -> TcpStream {
    let url = service.url("");
    let address = url.trim_start_matches("http://");
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut client = socket.connect(address.parse().unwrap()).await.unwrap();
    let key = &service.key;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nAccept: {accept}\r\n\
         Connection: close\r\n\r\n"
    );
    client.write_all(request.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    client.read_exact(&mut status).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&status), "HTTP/1.1 200");
    client
}

#[tokio::test]
async fn answers_that_are_not_read_give_way_to_others() {
    let service = Setup::new()
        .scenario("none", "steps: [{text: x}]")
        .agent("reader", "model: scripted/none\n")
        .config("[runtime]\nmax_memory = \"256MiB\"\n[server]\nwrite_timeout = \"1h\"")
        .start(Db::Sqlite)
        .await;
    let inputs = json!({"inputs": {"text": "x".repeat(BYTES)}});
    let run = service.post("/v1/agents/reader/invoke", &inputs).await;
    let path = format!("/v1/runs/{}/messages", run.body["run_id"].as_str().unwrap());

    let mut clients = Vec::new();
    for _ in 0..MANY {
        clients.push(unread(&service, &path).await);
    }
    let mut lost = 0;
    for mut client in clients {
        let mut answer = Vec::new();
        let ended = client.read_to_end(&mut answer).await;
        lost += usize::from(ended.is_err() || answer.len() < BYTES);
    }
    assert!((1..MANY).contains(&lost), "{lost} answers are not whole");
    let whole = service.get(&path).await;
    assert_eq!(whole.status, 200);
}

/// The events of a new run, one of which has [`BYTES`].
async fn large_events(service: &Service) -> String {
    let inputs = json!({"inputs": {"text": "x".repeat(BYTES)}});
    let run = service.post("/v1/agents/reader/invoke", &inputs).await;
    format!("/v1/runs/{}/events", run.body["run_id"].as_str().unwrap())
}

async fn read_stream(service: &Service, path: &str) {
    let request = service.request(Method::GET, path).header("accept", "text/event-stream");
    let text = request.send().await.unwrap().text().await.unwrap();
    assert!(text.len() > BYTES && text.contains("event: run.completed"), "{}", text.len());
}

#[tokio::test]
async fn streams_that_are_not_read_are_bounded_and_keep_no_other_tenant_waiting() {
    let mut service = Setup::new()
        .scenario("none", "steps: [{text: x}]")
        .agent("reader", "model: scripted/none\n")
        .config("[runtime]\nmax_memory = \"256MiB\"\n[server]\nwrite_timeout = \"1h\"")
        .start(Db::Sqlite)
        .await;
    let scopes = json!({"name": "k", "tenant": "other", "scopes": ["agents:invoke", "runs:read"]});
    let other = service.post("/v1/keys", &scopes).await.body["key"].as_str().unwrap().to_owned();
    let path = large_events(&service).await;
    read_stream(&service, &path).await;
    let before = service.peak_memory_mib();
    let mut clients = Vec::new();
    for _ in 0..STREAMS {
        clients.push(unread_as(&service, &path, "text/event-stream").await);
    }
    let own = std::mem::replace(&mut service.key, other);
    let of_other = large_events(&service).await;
    for _ in 0..3 {
        read_stream(&service, &of_other).await;
    }
    let grown = service.peak_memory_mib() - before;
    assert!(grown <= MOST_GROWN, "the service grew by {grown} MiB from {before}");
    service.key = own;
    drop(clients);
    read_stream(&service, &path).await;
}
