//! How slowly files may arrive: an upload may take long while enough of it arrives. And how many bytes of
//! uploads may be in progress.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::service::{ADMIN_KEY, Db, Service, Setup, answer, pause};

/// `server.body_timeout`, in which 9 KiB of a file must come.
const PATIENCE: Duration = Duration::from_secs(9);

const AGENT: &str = "model: scripted/says\ntools: [file_ops]\nworkspace: shared\nenable_double_confirmation: false\n\
    governance: {autonomy: full, paths: {read: ['**'], write: ['**']}}\n";

async fn start() -> Service {
    Setup::new()
        .agent("shared", AGENT)
        .scenario("says", "steps: [{text: done}]\n")
        .config("[server]\nbody_timeout = \"9s\"")
        .start(Db::Sqlite)
        .await
}

/// Sends a body piece by piece with pauses, until it is all sent or the service
/// answers; what that is. It announces `more` bytes than it sends.
async fn sent(
    service: &Service,
    head: &str,
    pieces: &[Vec<u8>],
    pause: Duration,
    more: usize,
) -> String {
    let address = service.url("").trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&address).await.unwrap();
    let bytes = pieces.iter().map(Vec::len).sum::<usize>() + more;
    let head = format!(
        "{head} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\nConnection: close\r\n\
         Content-Length: {bytes}\r\n"
    );
    stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    let mut said = Vec::new();
    for piece in pieces {
        if stream.write_all(piece).await.is_err() {
            break;
        }
        if tokio::time::timeout(pause, stream.read_buf(&mut said)).await.is_ok() {
            break;
        }
    }
    let _ = stream.read_to_end(&mut said).await;
    String::from_utf8(said).unwrap()
}

#[tokio::test]
async fn a_slow_upload_that_goes_on_is_taken() {
    let service = start().await;
    let pieces = vec![vec![b'x'; 4096]; 12];
    let since = Instant::now();
    let put = "PUT /v1/agents/shared/files/in/slow";
    let said = sent(&service, put, &pieces, PATIENCE / 6, 0).await;
    assert!(since.elapsed() > PATIENCE * 3 / 2, "slower than that in all");
    assert!(said.starts_with("HTTP/1.1 201"), "{said}");
    let read = answer(service.request(Method::GET, "/v1/agents/shared/files/in/slow")).await;
    assert_eq!(read.body.as_str().map(str::len), Some(12 * 4096));

    let start = "--b\r\nContent-Disposition: form-data; name=files; filename=\"in/form\"\r\n\r\n";
    let whole = [&[start.as_bytes().to_vec()], &pieces[..], &[b"\r\n--b--\r\n".to_vec()]].concat();
    let head = "POST /v1/agents/shared/invoke HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\nX-As:";
    let said = sent(&service, head, &whole, PATIENCE / 6, 0).await;
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
}

#[tokio::test]
async fn an_upload_that_drips_or_stops_is_given_up() {
    let service = start().await;
    let put = "PUT /v1/agents/shared/files/in/slow";
    let dripping = vec![b"x".to_vec(); 10_000];
    let stopping = vec![vec![b'x'; 16 << 10]];
    for (pieces, pause) in [(dripping, PATIENCE / 10), (stopping, PATIENCE * 100)] {
        let said = sent(&service, put, &pieces, pause, 100).await;
        assert!(said.starts_with("HTTP/1.1 408") && said.contains("REQUEST_TIMEOUT"), "{said}");
    }
    assert_eq!(service.get("/v1/agents/shared/files").await.body["data"], json!([]));
}

/// Waits until the files that are not in their places have so many bytes.
async fn until_staged(service: &Service, bytes: u64) {
    let tenant = service.dir.path().join("workspace/default");
    for looks in 0..3000 {
        let entries = std::fs::read_dir(&tenant).into_iter().flatten().flatten();
        let staged =
            entries.filter(|it| it.file_name().to_string_lossy().starts_with(".toolloop-"));
        if staged.filter_map(|it| it.metadata().ok()).map(|it| it.len()).sum::<u64>() == bytes {
            return;
        }
        pause(looks).await;
    }
    panic!("there were never {bytes} bytes of uploads in progress\n{}", service.log());
}

#[tokio::test]
async fn uploads_in_progress_hold_no_more_bytes_than_those_of_a_tenant_may() {
    let service = Setup::new()
        .agent("shared", AGENT)
        .scenario("says", "steps: [{text: done}]\n")
        .config("[tools.file_ops]\nmax_file = \"4KiB\"\nworkspace_quota = \"4KiB\"\n")
        .start(Db::Sqlite)
        .await;
    let address = service.url("").trim_start_matches("http://").to_owned();
    let mut open = Vec::new();
    for name in ["a", "b"] {
        let head = format!(
            "PUT /v1/agents/shared/files/in/{name} HTTP/1.1\r\nHost: x\r\n\
             Authorization: Bearer {ADMIN_KEY}\r\nContent-Length: 4096\r\n\r\n"
        );
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(&[head.as_bytes(), &[b'x'; 4095]].concat()).await.unwrap();
        open.push(stream);
    }
    until_staged(&service, 2 * 4095).await;
    let put = async || {
        let path = "/v1/agents/shared/files/in/c";
        answer(service.request(Method::PUT, path).body("abc")).await
    };
    let refused = put().await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (503, &json!("OVERLOADED")));
    open.pop();
    until_staged(&service, 4095).await;
    // What it held is free a moment after the file is gone.
    let mut taken = put().await;
    for looks in 0..3000 {
        if taken.status != 503 {
            break;
        }
        pause(looks).await;
        taken = put().await;
    }
    assert_eq!(taken.status, 201, "{:#}", taken.body);

    let part = |name: &str, content: &str| {
        format!(
            "--b\r\nContent-Disposition: form-data; name=files; filename=\"in/{name}\"\r\n\r\n{content}\r\n"
        )
    };
    let form = format!("{}{}--b--\r\n", part("d", &"x".repeat(2048)), part("e", &"x".repeat(2049)));
    let invoke = service.request(Method::POST, "/v1/agents/shared/invoke");
    let kind = "multipart/form-data; boundary=b";
    let refused = answer(invoke.header("content-type", kind).body(form)).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (413, &json!("PAYLOAD_TOO_LARGE"))
    );
}
