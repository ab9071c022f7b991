//! Clients that mean harm, or are merely broken: what they cost themselves, and that no others
//! notice. Raw sockets, because a good client library cannot be made to misbehave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::stream::{FuturesUnordered, StreamExt as _};
use reqwest::Method;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::mock_model::{MockModel, Reply};
use crate::service::{ADMIN_KEY, Db, Service, Setup, answer};

const SLEEPER: &str = "
model: scripted/sleeper
instructions: Think about it.
enable_double_confirmation: false
";

/// How long a test waits for what must happen.
const AT_MOST: Duration = Duration::from_mins(5);

async fn start(config: &str) -> Service {
    start_sleeper(config, 1500).await
}

async fn start_sleeper(config: &str, delay_ms: u32) -> Service {
    let scenario = format!("steps:\n  - text: done\n    delay_ms: {delay_ms}\n");
    let generous = "[governance]\nrate_limit_per_minute = 1000000\nrate_limit_burst = 1000000";
    let setup = Setup::new().agent("sleeper", SLEEPER).scenario("sleeper", &scenario);
    setup.config(config).config(generous).start(Db::Sqlite).await
}

fn address(service: &Service) -> SocketAddr {
    service.url("").trim_start_matches("http://").parse().unwrap()
}

async fn connect(service: &Service) -> TcpStream {
    TcpStream::connect(address(service)).await.unwrap()
}

/// A connection on which this was sent.
async fn send(service: &Service, bytes: impl AsRef<[u8]>) -> TcpStream {
    let mut stream = connect(service).await;
    let _ = stream.write_all(bytes.as_ref()).await; // it may be closed before all is taken
    stream
}

/// What arrives until the service closes the connection.
async fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let reading = async {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut chunk).await {
            bytes.extend_from_slice(&chunk[..count]);
        }
    };
    timeout(AT_MOST, reading).await.expect("the connection stays open");
    bytes
}

/// A raw answer, as much of it as tests look at.
#[derive(Debug)]
struct RawAnswer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Value,
}

/// Reads one answer that has a length; the connection stays open.
async fn one_answer(stream: &mut TcpStream) -> RawAnswer {
    let reading = async {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let byte = stream
                .read_u8()
                .await
                .unwrap_or_else(|_| panic!("closed after {}", head.escape_ascii()));
            head.push(byte);
        }
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: BTreeMap<String, String> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
            .collect();
        let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        RawAnswer { status, headers, body: serde_json::from_slice(&body).unwrap_or(Value::Null) }
    };
    timeout(AT_MOST, reading).await.expect("no answer")
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\n\r\n")
}

#[tokio::test]
async fn an_incomplete_request_head_times_out() {
    let service = start("[server]\nheader_timeout = \"3s\"").await;
    let mut silent = connect(&service).await;
    let mut half = send(&service, "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Half").await;
    let mut second = send(&service, get("/healthz")).await;
    assert_eq!(one_answer(&mut second).await.status, 200);
    second.write_all(b"GET /healthz HT").await.unwrap();
    let mut dripping = send(&service, "GET /healthz HTTP/1.1\r\nX-Drip: ").await;
    let drip = async {
        while dripping.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(AT_MOST, drip).await.expect("a head may take for ever, byte by byte");
    assert_eq!(service.get("/v1/runs").await.status, 200, "others are served meanwhile");
    for stream in [&mut silent, &mut half, &mut second] {
        assert_eq!(rest(stream).await, b"");
    }
    assert_eq!(service.get("/v1/runs").await.status, 200);
}

#[tokio::test]
async fn an_incomplete_body_is_answered_408() {
    let service = start("[server]\nbody_timeout = \"300ms\"").await;
    let head = format!(
        "POST /v1/agents/sleeper/invoke HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\n\
         Content-Type: application/json\r\n"
    );
    for started in [
        "Content-Length: 100\r\n\r\n{\"inputs\": ",
        "Transfer-Encoding: chunked\r\n\r\n64\r\n{\"inputs\": ",
    ] {
        let mut stream = send(&service, format!("{head}{started}")).await;
        let answer = one_answer(&mut stream).await;
        assert_eq!(
            (answer.status, &answer.body["code"]),
            (408, &json!("REQUEST_TIMEOUT")),
            "{answer:?}"
        );
        assert_eq!(rest(&mut stream).await, b"");
    }
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]), "nothing was started");
}

#[tokio::test]
async fn large_bodies_that_do_not_end_are_bounded() {
    // An eighth of it for all of them, half of that for one tenant: 16 of these.
    let memory = "[runtime]\nmax_memory = \"256MiB\"\n[server]\nbody_timeout = \"10m\"";
    let service = start(memory).await;
    let whole = format!("{{}}{}", " ".repeat((1 << 20) - 2));
    let begun = format!(
        "POST /v1/keys HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
        whole.len(),
        &whole[..20_000]
    );
    let mut answers = FuturesUnordered::new();
    for _ in 0..20 {
        let mut stream = send(&service, &begun).await;
        answers.push(async move { one_answer(&mut stream).await });
    }
    for _ in 16..20 {
        let refused = answers.next().await.unwrap();
        assert_eq!((refused.status, &refused.body["code"]), (503, &json!("OVERLOADED")));
        assert_eq!(refused.headers["retry-after"], "1");
    }
    assert!(answers.next().now_or_never().is_none(), "the others wait for their bodies");
    assert_eq!(
        service.post("/v1/keys", &json!({})).await.status,
        422,
        "a small body needs no place"
    );
    drop(answers);
    let regained = async {
        loop {
            let request = service.request(Method::POST, "/v1/keys").body(whole.clone());
            let request = request.header("content-type", "application/json");
            if answer(request).await.status == 422 {
                return;
            }
        }
    };
    timeout(AT_MOST, regained).await.expect("places are not given back");
}

#[tokio::test]
async fn large_request_heads_that_do_not_end_are_bounded() {
    // An eighth of it for all of them, half of that for one address: 128 of these.
    let memory = "[runtime]\nmax_memory = \"256MiB\"\n[server]\nheader_timeout = \"10m\"";
    let memory = format!("{memory}\nidle_timeout = \"10m\"");
    let long = format!("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: {}", "y".repeat(20_000));
    let whole = format!("{long}\r\nConnection: close\r\n\r\n");
    let (settings, headers) = (frame(4, 0, 0, &[]), frame(1, 1, 1, &http2_get("/healthz")));
    let http2 = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &settings, &headers].concat();
    for begun in [long.as_bytes(), &http2] {
        let service = start(&memory).await;
        let mut closed = FuturesUnordered::new();
        for _ in 0..140 {
            let mut stream = send(&service, begun).await;
            closed.push(async move { rest(&mut stream).await });
        }
        for _ in 128..140 {
            let said = closed.next().await.unwrap();
            assert!(!said.starts_with(b"HTTP/1.1"), "{}", said.escape_ascii());
        }
        assert!(closed.next().now_or_never().is_none(), "the others may send the rest");
        assert_eq!(service.get("/v1/runs").await.status, 200, "a small head needs no place");
        drop(closed);
        let regained = async {
            while !rest(&mut send(&service, &whole).await).await.starts_with(b"HTTP/1.1 200 ") {}
        };
        timeout(AT_MOST, regained).await.expect("places are not given back");
    }
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_a_waiting_one_is_not() {
    let service = start_sleeper(
        "[server]\nheader_timeout = \"2s\"\nidle_timeout = \"300ms\"\nwrite_timeout = \"300ms\"",
        5000,
    )
    .await;
    let waiting =
        service.request(Method::POST, "/v1/agents/sleeper/invoke").json(&json!({"inputs": {}}));
    let waiting = tokio::spawn(answer(waiting));
    let mut resting = send(&service, get("/healthz")).await;
    assert_eq!(one_answer(&mut resting).await.status, 200);
    assert_eq!(rest(&mut resting).await, b"");
    let waited = waiting.await.unwrap();
    assert_eq!(
        (waited.status.as_u16(), &waited.body["status"]),
        (200, &json!("completed")),
        "{waited:?}"
    );
}

#[tokio::test]
async fn request_heads_that_are_too_long_get_a_problem_document() {
    let service = start("").await;
    let many = |count: usize, value: &str| {
        let lines: Vec<String> = (0..count).map(|n| format!("X-{n}: {value}\r\n")).collect();
        format!("GET /v1/runs HTTP/1.1\r\nHost: x\r\n{}\r\n", lines.concat())
    };
    for (what, request, status, code) in [
        ("URL of 17 KB", get(&format!("/v1/{}", "a".repeat(17_000))), 414, Some("URI_TOO_LONG")),
        (
            "query of 64 KB",
            get(&format!("/v1/runs?agent={}", "a".repeat(64_000))),
            414,
            Some("URI_TOO_LONG"),
        ),
        ("URL of 70 KB", get(&format!("/v1/{}", "é".repeat(35_000))), 414, None),
        ("200 headers", many(200, "y"), 431, Some("HEADERS_TOO_LARGE")),
        ("80 KB of headers", many(80, &"y".repeat(1000)), 431, Some("HEADERS_TOO_LARGE")),
        ("300 headers", many(300, "y"), 431, None),
        ("127 KB in one header", many(1, &"y".repeat(127_000)), 431, Some("HEADERS_TOO_LARGE")),
    ] {
        let mut stream = send(&service, &request).await;
        let answer = one_answer(&mut stream).await;
        assert_eq!(answer.status, status, "{what}: {answer:?}");
        if let Some(code) = code {
            assert_eq!(answer.headers["content-type"], "application/problem+json", "{what}");
            assert_eq!(answer.body["code"], code, "{what}: {answer:?}");
            assert!(answer.body["instance"].as_str().unwrap().len() <= 1024, "{what}");
            stream.write_all(get("/healthz").as_bytes()).await.unwrap();
            assert_eq!(one_answer(&mut stream).await.status, 200, "{what}: the connection goes on");
        }
    }
    let mut fitting = send(&service, many(90, "y")).await;
    assert_eq!(one_answer(&mut fitting).await.status, 401, "90 headers are fine");
}

#[tokio::test]
async fn a_rejected_request_leaves_the_connection_usable() {
    let service = start("").await;
    let setup = Setup::new().agent("sleeper", SLEEPER).scenario("sleeper", "steps: [{text: x}]");
    let once = "[governance]\nrate_limit_per_minute = 1\nrate_limit_burst = 1";
    let limited = setup.config(once).start(Db::Sqlite).await;
    let key = format!("Authorization: Bearer {ADMIN_KEY}\r\n");
    let head = |path: &str, headers: &str, framing: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}{framing}\r\n\r\n"
        )
    };
    let invoke = "/v1/agents/sleeper/invoke";
    let spent =
        one_answer(&mut send(&limited, head(invoke, &key, "Content-Length: 0")).await).await;
    assert_eq!(spent.status, 200);
    let body = "x".repeat(900_000);
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    for (what, path, headers, status) in [
        ("without a key", invoke, "", 401),
        ("an unknown path", "/v1/nowhere", key.as_str(), 404),
        ("a wrong method", "/v1/runs", key.as_str(), 405),
        ("an unacceptable answer", invoke, &format!("{key}Accept: image/png\r\n"), 406),
        ("a bad header", invoke, &format!("{key}Prefer: wait=x\r\n"), 400),
        ("too often", invoke, key.as_str(), 429),
    ] {
        let length = format!("Content-Length: {}", body.len());
        for (framing, late) in [(length.as_str(), &body), ("Transfer-Encoding: chunked", &chunked)]
        {
            // The refusal is decided before the body is sent.
            let service = if status == 429 { &limited } else { &service };
            let (mut stream, refused) = loop {
                let since = Instant::now();
                let mut stream = send(service, head(path, headers, framing)).await;
                stream.write_all(late.as_bytes()).await.unwrap();
                let refused = one_answer(&mut stream).await;
                // Three seconds are given to the rest of a body: a slow machine tries again.
                if !refused.headers.contains_key("connection") || since.elapsed().as_secs() < 3 {
                    break (stream, refused);
                }
            };
            assert_eq!(refused.status, status, "{what}, {framing}: {refused:?}");
            assert!(!refused.headers.contains_key("connection"), "{what}, {framing}: {refused:?}");
            stream.write_all(get("/healthz").as_bytes()).await.unwrap();
            assert_eq!(one_answer(&mut stream).await.status, 200, "{what}, {framing}");
        }
    }
}

#[tokio::test]
async fn line_ends_are_looked_at_in_heads_alone() {
    let service = start("").await;
    let key = format!("Host: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\n");
    let body = "{\n\"inputs\":\n\n{}\n}";
    let mut stream = connect(&service).await;
    for split in [0, 1, 20, 60] {
        // The head comes in two parts, its body behind the second one.
        let head = format!(
            "POST /v1/agents/none/invoke HTTP/1.1\r\n{key}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let (one, other) = head.split_at(split);
        stream.write_all(one.as_bytes()).await.unwrap();
        tokio::task::yield_now().await;
        stream.write_all(format!("{other}{body}").as_bytes()).await.unwrap();
        assert_eq!(one_answer(&mut stream).await.status, 404, "{split}");
    }
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\nX: y\r\n\r\n").await.unwrap();
    assert_eq!(one_answer(&mut stream).await.status, 400, "the head of a later request");
}

#[tokio::test]
async fn a_body_too_large_to_discard_closes_the_connection_after_the_response() {
    let service = start("").await;
    let head = "POST /v1/agents/sleeper/invoke HTTP/1.1\r\nHost: x\r\n";
    for framing in ["Content-Length: 99999999", "Content-Length: 9\r\nExpect: 100-continue"] {
        let mut stream = send(&service, format!("{head}{framing}\r\n\r\n")).await;
        let refused = one_answer(&mut stream).await;
        assert_eq!((refused.status, refused.headers["connection"].as_str()), (401, "close"));
    }
    // What is sent after the refusal does not cost the caller the answer.
    let mut stream = send(&service, format!("{head}Content-Length: 99999999\r\n\r\n")).await;
    stream.write_all(&vec![b'x'; 300_000]).await.unwrap();
    assert_eq!(one_answer(&mut stream).await.status, 401);
    rest(&mut stream).await;
}

#[tokio::test]
async fn an_encoded_body_is_answered_415() {
    let service = start("").await;
    for (encoding, status) in [("gzip", 415), ("identity, br", 415), ("identity", 404), ("", 404)] {
        let head = format!(
            "POST /v1/agents/nobody/invoke HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\nContent-Type: application/json\r\nContent-Encoding: {encoding}\r\nContent-Length: 2\r\n\r\n{{}}"
        );
        let answer = one_answer(&mut send(&service, head).await).await;
        assert_eq!(answer.status, status, "{encoding:?}: {answer:?}");
    }
}

#[tokio::test]
async fn malformed_requests_are_rejected_without_an_error_log() {
    let service = start("").await;
    let head = |line: &str, header: &[u8]| {
        [line.as_bytes(), b" HTTP/1.1\r\nHost: x\r\n", header, b"\r\n\r\n"].concat()
    };
    let key = format!("Authorization: Bearer {ADMIN_KEY}");
    for (what, request, statuses) in [
        ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), &[400][..]),
        ("no version", b"GET /healthz\r\n\r\n".to_vec(), &[400]),
        (
            "raw bytes in the path",
            b"GET /v1/agents/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            &[400],
        ),
        ("NUL in a header", head("GET /healthz", b"X-A: a\0b"), &[400]),
        (
            "a line end without a return",
            b"GET /healthz HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n".to_vec(),
            &[400],
        ),
        ("nothing but such line ends", b"GET /healthz HTTP/1.1\nHost: x\n\n".to_vec(), &[400]),
        (
            "the same behind empty lines",
            b"\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n".to_vec(),
            &[400],
        ),
        ("the same at the end", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\n".to_vec(), &[400]),
        ("space in a header's name", head("GET /healthz", b"X A: b"), &[400]),
        ("two lengths", head("POST /v1/keys", b"Content-Length: 1\r\nContent-Length: 2"), &[400]),
        (
            "length and chunks",
            head("POST /v1/keys", b"Content-Length: a\r\nTransfer-Encoding: chunked"),
            &[400],
        ),
        (
            "raw bytes in a credential",
            head("GET /v1/runs", b"Authorization: Bearer \xff\xfe"),
            &[401],
        ),
        ("raw bytes in Accept", head("GET /v1/nowhere", b"Accept: \xff\xfe"), &[404]),
        ("encoded bytes in the path", head("GET /v1/agents/%ff%fe", key.as_bytes()), &[404]),
        ("encoded bytes in the query", head("GET /v1/runs?agent=%ff", key.as_bytes()), &[400]),
        ("a cut escape", head("GET /v1/runs?agent=%f", key.as_bytes()), &[400]),
        ("CONNECT", head("CONNECT x:1", b"X-A: b"), &[404, 405]),
        (
            "a chunk without size",
            head(
                "POST /v1/keys",
                format!("{key}\r\nTransfer-Encoding: chunked\r\n\r\nzz").as_bytes(),
            ),
            &[400],
        ),
    ] {
        let mut stream = send(&service, request).await;
        let answer = one_answer(&mut stream).await;
        assert!(statuses.contains(&answer.status), "{what}: {answer:?}");
        if answer.headers.contains_key("x-request-id") {
            assert_eq!(answer.headers["content-type"], "application/problem+json", "{what}");
        }
    }
    for half in [
        "",
        "G",
        "GET /v1/runs HTTP/1.1\r\nHost",
        "PRI * HTTP/2.0\r\n\r\nSM",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0",
    ] {
        let mut stream = send(&service, half).await;
        stream.shutdown().await.unwrap();
        rest(&mut stream).await;
    }
    assert_eq!(service.get("/v1/runs").await.status, 200);
    // Lines come in order: with this one, all of them are there.
    service.signal(crate::service::Signal::TERM);
    service.until_logged("draining: no new runs are accepted").await;
    let log = service.log();
    assert!(
        !log.contains("\"WARN\"") && !log.contains("\"ERROR\"") && !log.contains("panicked"),
        "{log}"
    );
}

#[tokio::test]
async fn clients_beyond_max_connections_are_served_probes_only() {
    let service = start("[server]\nmax_connections = 2").await;
    let mut first = send(&service, get("/healthz")).await;
    let mut second = send(&service, get("/healthz")).await;
    assert_eq!(
        (one_answer(&mut first).await.status, one_answer(&mut second).await.status),
        (200, 200)
    );
    let mut third = send(&service, get("/healthz")).await;
    let mut fourth = send(&service, get("/v1/runs")).await;
    assert_eq!(
        (one_answer(&mut third).await.status, one_answer(&mut fourth).await.status),
        (200, 503)
    );
    drop(first);
    let regained = async {
        loop {
            let mut next = send(&service, get("/v1/runs")).await;
            if one_answer(&mut next).await.status == 200 {
                return;
            }
        }
    };
    timeout(AT_MOST, regained).await.expect("a free connection is not given to others");
    service.until_logged("server.max_connections is reached").await;
}

#[tokio::test]
async fn probes_are_answered_however_many_connections_strangers_hold() {
    const STRANGERS: usize = 1500;
    // Those that are let in say nothing for as long as the test takes.
    let service = start("[server]\nmax_connections = 4\nheader_timeout = \"10m\"").await;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let mut held = Vec::with_capacity(STRANGERS);
    let probed = async {
        for n in 0..STRANGERS {
            let said =
                ["", "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Half", "PRI * HTTP/2.0\r\n\r\nSM"];
            held.push(send(&service, said[n % said.len()]).await);
        }
        for path in ["/healthz", "/readyz", "/v1/runs"] {
            let answer = one_answer(&mut send(&service, get(path)).await).await;
            let refused = path == "/v1/runs";
            assert_eq!(answer.status, if refused { 503 } else { 200 }, "{path}: {answer:?}");
            assert_eq!(answer.headers["connection"], "close");
            assert_eq!(answer.body["code"] == "OVERLOADED", refused, "{answer:?}");
        }
        // Nor does a body that never comes keep one.
        let bodiless = "POST /v1/keys HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n";
        for _ in 0..STRANGERS {
            held.push(send(&service, bodiless).await);
        }
        let answer = one_answer(&mut send(&service, get("/healthz")).await).await;
        assert_eq!(answer.status, 200);
    };
    timeout(AT_MOST, probed).await.expect("the probes wait for the strangers");
}

#[tokio::test]
async fn a_request_names_one_host() {
    let service = start("").await;
    for (version, hosts, status) in [
        ("1.1", "Host: x\r\n", 200),
        ("1.1", "Host:\r\n", 200),
        ("1.1", "Host: [::1]:80\r\n", 200),
        ("1.1", "", 400),
        ("1.1", "Host: x\r\nHost: x\r\n", 400),
        ("1.1", "Host: x\r\nhost: y\r\n", 400),
        ("1.1", "Host: x, y\r\n", 400),
        ("1.1", "Host: a@x\r\n", 400),
        ("1.0", "Host: x\r\n", 200),
        ("1.0", "", 200),
        ("1.0", "Host: x\r\nHost: y\r\n", 400),
    ] {
        let request = format!("GET /healthz HTTP/{version}\r\n{hosts}\r\n");
        let answer = one_answer(&mut send(&service, request).await).await;
        assert_eq!(answer.status, status, "HTTP/{version} {hosts:?}: {answer:?}");
        assert_eq!(answer.body["code"] == "INVALID_PARAMETER", status == 400, "{answer:?}");
    }
}

#[tokio::test]
async fn ten_thousand_idle_connections_do_not_affect_other_clients() {
    let service = start("[server]\nheader_timeout = \"10m\"\nidle_timeout = \"10m\"").await;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let count = maximum.map_or(10_000, |files| usize::try_from(files / 2).unwrap()).min(10_000);
    let mut idle = Vec::with_capacity(count);
    for n in 0..count {
        let mut stream = connect(&service).await;
        if n % 10 == 0 {
            stream.write_all(b"GET /v1/runs HTTP/1.1\r\nHost").await.unwrap();
        }
        idle.push(stream);
    }
    let run = service.run("sleeper", &json!({"inputs": {}})).await;
    assert_eq!(run["status"], "completed");
    for stream in idle.iter_mut().skip(1).step_by(count / 10) {
        stream.write_all(get("/healthz").as_bytes()).await.unwrap();
        assert_eq!(one_answer(stream).await.status, 200, "an idle connection can still be used");
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_its_connection() {
    let service = start("[server]\nwrite_timeout = \"400ms\"").await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(address(&service)).await.unwrap();
    let requests = get("/openapi.json").repeat(400);
    let writing = async { while stream.write_all(requests.as_bytes()).await.is_ok() {} };
    timeout(AT_MOST, writing).await.expect("the connection stays open");
    assert_eq!(service.get("/v1/runs").await.status, 200);
}

#[tokio::test]
async fn an_http2_stream_that_is_not_read_is_reset_alone() {
    const NO_WINDOW: [u8; 6] = [0, 4, 0, 0, 0, 0];
    let service = start("[server]\nwrite_timeout = \"300ms\"").await;
    let mut stream = send(&service, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    stream.write_all(&frame(4, 0, 0, &NO_WINDOW)).await.unwrap();
    stream.write_all(&frame(1, 5, 1, &http2_get("/openapi.json"))).await.unwrap();
    let (mut answered, mut reset) = (Vec::new(), Vec::new());
    let reading = async {
        while answered.len() < 2 {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
            stream.read_exact(&mut payload).await.unwrap();
            let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            match head[3] {
                0 => panic!("{} bytes beyond the window", payload.len()),
                1 => answered.push(id),
                3 => {
                    reset.push(id);
                    stream.write_all(&frame(1, 5, 3, &http2_get("/healthz"))).await.unwrap();
                }
                _ => {}
            }
        }
    };
    timeout(AT_MOST, reading).await.expect("the stream was kept");
    assert_eq!((answered, reset), (vec![1, 3], vec![1]));
}

/// An HTTP/2 frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
}

/// `GET` as HPACK (RFC 7541): indexed method and scheme, literal path and authority.
fn http2_get(path: &str) -> Vec<u8> {
    let mut block = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    block.extend_from_slice(path.as_bytes());
    block.extend_from_slice(b"\x01\x01x");
    block
}

#[tokio::test]
async fn http2_works_with_prior_knowledge() {
    let service = start("").await;
    let http2 = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let all = (0..50).map(|_| {
        let request =
            http2.post(service.url("/v1/agents/sleeper/invoke")).bearer_auth(&service.key);
        async {
            let response = request.json(&json!({"inputs": {}})).send().await.unwrap();
            let version = response.version();
            (version, response.json::<Value>().await.unwrap()["status"].clone())
        }
    });
    for (version, status) in futures::future::join_all(all).await {
        assert_eq!((version, status), (reqwest::Version::HTTP_2, json!("completed")));
    }
    let long = http2
        .get(service.url(&format!("/v1/runs?agent={}", "a".repeat(20_000))))
        .send()
        .await
        .unwrap();
    assert_eq!(long.status(), 414);
    for (count, status) in [(64, 200), (80, 431)] {
        let request = http2.get(service.url("/v1/runs")).bearer_auth(&service.key);
        let headers = 0..count;
        let request =
            headers.fold(request, |request, n| request.header(format!("x-{n}"), "y".repeat(1000)));
        let answered = answer(request).await;
        assert_eq!(answered.status, status, "{count} KB of headers: {answered:?}");
        assert_eq!(answered.body["code"] == "HEADERS_TOO_LARGE", status == 431, "{answered:?}");
    }
}

#[tokio::test]
async fn every_response_has_security_headers() {
    let service = start("").await;
    let long = format!("/v1/runs?agent={}", "a".repeat(20_000));
    for (path, status) in [
        ("/healthz", 200),
        ("/v1/runs", 200),
        ("/openapi.json", 200),
        ("/nowhere", 404),
        ("/v1/runs?x=1", 400),
        (&long, 414),
    ] {
        let answer = service.get(path).await;
        assert_eq!(answer.status, status, "{path}");
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("referrer-policy", "no-referrer"),
            ("x-frame-options", "DENY"),
            ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
            ("cross-origin-resource-policy", "same-origin"),
        ] {
            assert_eq!(answer.headers[name], value, "{path}");
        }
        assert!(!answer.headers.contains_key("server"), "{path}");
        assert!(
            !answer.headers.keys().any(|name| name.as_str().starts_with("access-control-")),
            "{path}"
        );
    }
}

#[tokio::test]
async fn gzip_depends_on_accept_encoding() {
    let service = start("").await;
    let plain = reqwest::Client::builder().no_gzip().build().unwrap();
    let ask = |path: &str, coding: Option<&'static str>| {
        let request = plain.get(service.url(path));
        let request = if let Some(coding) = coding {
            request.header("accept-encoding", coding)
        } else {
            request
        };
        async { request.send().await.unwrap() }
    };
    let whole = ask("/openapi.json", None).await;
    assert!(!whole.headers().contains_key("content-encoding"));
    assert_eq!(whole.headers()["vary"], "accept-encoding");
    let whole = whole.bytes().await.unwrap();
    let packed = ask("/openapi.json", Some("gzip")).await;
    assert_eq!(packed.headers()["content-encoding"], "gzip");
    let packed = packed.bytes().await.unwrap();
    assert!(packed.len() < whole.len() / 3, "{} of {}", packed.len(), whole.len());
    let unpacked =
        service.http.get(service.url("/openapi.json")).send().await.unwrap().bytes().await.unwrap();
    assert_eq!(unpacked, whole);
    assert!(
        !ask("/healthz", Some("gzip")).await.headers().contains_key("content-encoding"),
        "too small"
    );
    let picky = ask("/openapi.json", Some("br, identity;q=0")).await;
    assert_eq!((picky.status().as_u16(), picky.headers().get("content-encoding")), (200, None));
}

#[tokio::test]
async fn a_drain_answers_all_runs_in_progress() {
    const RUNS: usize = 200;
    let mock = MockModel::start().await;
    let (go_on, held) = watch::channel(false);
    mock.always(Reply::Held(held, Box::new(Reply::text("done"))));
    let config = format!(
        "[server]\nshutdown_grace = \"10m\"\n[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"",
        mock.base_url()
    );
    let setup = Setup::new().agent("sleeper", &SLEEPER.replace("scripted/sleeper", "mock/m"));
    let mut service = setup.config(&config).start(Db::Sqlite).await;
    let calls: Vec<_> = (0..RUNS)
        .map(|_| {
            let request = service.request(Method::POST, "/v1/agents/sleeper/invoke-iterative");
            tokio::spawn(answer(request.json(&json!({"inputs": {}}))))
        })
        .collect();
    let running = format!("/v1/runs?status=running&limit={RUNS}");
    service
        .until(&running, |page| page["data"].as_array().is_some_and(|runs| runs.len() == RUNS))
        .await;
    let mut resting = send(&service, get("/healthz")).await;
    assert_eq!(one_answer(&mut resting).await.status, 200);
    let http2 = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    assert_eq!(http2.get(service.url("/healthz")).send().await.unwrap().status(), 200);
    service.signal(crate::service::Signal::TERM);
    service.until("/readyz", |ready| ready["status"] == "draining").await;
    let late = service.post("/v1/agents/sleeper/invoke", &json!({"inputs": {}})).await;
    assert_eq!((late.status.as_u16(), &late.body["code"]), (503, &json!("DRAINING")), "{late:?}");
    go_on.send_replace(true);
    for call in calls {
        let answered = call.await.unwrap();
        assert_eq!(
            (answered.status.as_u16(), &answered.body["status"]),
            (200, &json!("completed")),
            "{answered:?}"
        );
    }
    assert_eq!(service.exit_code().await, Some(0), "{}", service.log());
    assert_eq!(rest(&mut resting).await, b"");
    assert!(!service.log().contains("still open"), "{}", service.log());
}

#[tokio::test]
async fn a_second_interrupt_ends_the_grace_of_a_drain() {
    let mock = MockModel::start().await;
    let (_never, held) = watch::channel(false);
    mock.always(Reply::Held(held, Box::new(Reply::text("done"))));
    let config = format!(
        "[server]\nshutdown_grace = \"1h\"\n[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"",
        mock.base_url()
    );
    let setup = Setup::new().agent("sleeper", &SLEEPER.replace("scripted/sleeper", "mock/m"));
    let mut service = setup.config(&config).start(Db::Sqlite).await;
    let request = service.request(Method::POST, "/v1/agents/sleeper/invoke-iterative");
    let call = tokio::spawn(answer(request.json(&json!({"inputs": {}}))));
    service.until("/v1/runs?status=running", |page| page["data"][0].is_object()).await;
    service.signal(crate::service::Signal::INT);
    service.until("/readyz", |ready| ready["status"] == "draining").await;
    service.signal(crate::service::Signal::INT);
    let told = call.await.unwrap();
    assert_eq!((told.status.as_u16(), &told.body["code"]), (503, &json!("DRAINING")), "{told:?}");
    assert_eq!(service.exit_code().await, Some(0), "{}", service.log());
}
