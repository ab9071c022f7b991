//! Large answers that are not read: others get the memory that they keep.

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::service::{Db, Service, Setup};

const BYTES: usize = 950_000;
/// More answers of [`BYTES`] than an eighth of the memory limit has.
const MANY: usize = 48;

/// Asks, and reads the status alone.
async fn unread(service: &Service, path: &str) -> TcpStream {
    let url = service.url("");
    let address = url.trim_start_matches("http://");
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut client = socket.connect(address.parse().unwrap()).await.unwrap();
    let key = &service.key;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
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
