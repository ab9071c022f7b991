//! Programs that may ask the network, through the HTTP API, on both stores.
//!
//! With other features. Children: have what their own rules allow and their parent's do not deny, as with
//! `web_fetch.rs`, whose rules these are. Parked runs, sessions: nothing of a connection is kept.
//! Cancel and crash of the service: connections are descriptors of the call, which end with it
//! (here, by its timeout); what a crashed call had asked is not counted. Other replica: has its own
//! proxies. Streaming: as every tool. Tenants: a proxy is one call's. Budgets: `network.max_requests`
//! (here); not shared in a tree, as with `web_fetch`. Skills, policies: by the tool's name. Dry run,
//! console, command line, generated clients: as every tool; `network` of `tool_call.completed` shows it.

use std::io::Read;
use std::net::{TcpListener as StdListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    programs_reach_allowed_hosts_and_nothing_else,
    requests_are_counted_audited_and_end_with_their_call,
}

/// The site that is allowed.
struct Site {
    port: u16,
    requests: Arc<AtomicUsize>,
    /// At the same time, at most.
    most: Arc<AtomicUsize>,
    server: JoinHandle<()>,
}

impl Site {
    async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.2", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (requests, now, most) =
            <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (counted, highest) = (Arc::clone(&requests), Arc::clone(&most));
        let app = Router::new().fallback(move |request: Request| {
            counted.fetch_add(1, Ordering::SeqCst);
            let (now, highest) = (Arc::clone(&now), Arc::clone(&highest));
            async move {
                highest.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let answer = respond(request).await;
                now.fetch_sub(1, Ordering::SeqCst);
                answer
            }
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { port, requests, most, server }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn respond(request: Request) -> Response {
    let (head, body) = request.into_parts();
    match head.uri.path() {
        "/ok" => "fine".into_response(),
        "/echo" => {
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let names = head
                .headers
                .keys()
                .map(axum::http::HeaderName::as_str)
                .collect::<Vec<_>>()
                .join(" ");
            format!("{} {} {names}", head.method, String::from_utf8_lossy(&body)).into_response()
        }
        "/slow" => {
            tokio::time::sleep(Duration::from_millis(10)).await;
            "slow".into_response()
        }
        "/large" => vec![b'x'; 3 << 20].into_response(),
        "/away" => {
            let to = head.uri.query().unwrap_or_default().to_owned();
            (StatusCode::FOUND, [("location", to)]).into_response()
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Everything that no program may reach.
struct Sinks {
    home: TempDir,
    tcp: Vec<StdListener>,
    udp: UdpSocket,
    unix: Vec<UnixListener>,
    datagrams: UnixDatagram,
}

impl Sinks {
    fn new() -> Self {
        let home = TempDir::new().unwrap();
        let tcp = StdListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let six = StdListener::bind(("::1", port)).ok();
        let tcp: Vec<StdListener> = [Some(tcp), six].into_iter().flatten().collect();
        let udp = UdpSocket::bind(("127.0.0.1", port)).unwrap();
        let hidden = SocketAddr::from_abstract_name(format!("way-out-{port}")).unwrap();
        let unix = vec![
            UnixListener::bind(home.path().join("stream")).unwrap(),
            UnixListener::bind_addr(&hidden).unwrap(),
        ];
        let datagrams = UnixDatagram::bind(home.path().join("datagram")).unwrap();
        for listener in &tcp {
            listener.set_nonblocking(true).unwrap();
        }
        for listener in &unix {
            listener.set_nonblocking(true).unwrap();
        }
        udp.set_nonblocking(true).unwrap();
        datagrams.set_nonblocking(true).unwrap();
        Self { home, tcp, udp, unix, datagrams }
    }

    fn port(&self) -> u16 {
        self.udp.local_addr().unwrap().port()
    }

    fn assert_empty(&self) {
        let mut buffer = [0; 8];
        assert!(self.tcp.iter().all(|it| it.accept().is_err()));
        assert!(self.unix.iter().all(|it| it.accept().is_err()));
        assert!(self.udp.recv(&mut buffer).is_err());
        assert!(self.datagrams.recv(&mut buffer).is_err());
    }
}

/// Tries ways that are Python expressions, and says what came of each.
const TRIES: &str = r#"
import ctypes, http.client, json, os, socket, subprocess, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
given = json.load(sys.stdin)
SITE, SINK, HOME = given["site"], given["sink"], given["home"]
TCP, UDP = socket.SOCK_STREAM, socket.SOCK_DGRAM
libc = ctypes.CDLL(None, use_errno=True)
socket.setdefaulttimeout(10)
def all_of(s):
    got = b""
    while part := s.recv(65536):
        got += part
    return got.decode("latin-1")
def raw(text):
    s = socket.create_connection(("127.0.0.1", 3128))
    s.sendall(text.encode("latin-1"))
    return all_of(s)
def ask(line, *headers, body=""):
    return raw("\r\n".join([line, *headers, "Connection: close", "", body]))
def connect(authority, *headers):
    return ask(f"CONNECT {authority} HTTP/1.1", *headers)
def get(address, *headers):
    host = address.split("/")[2]
    return ask(f"GET {address} HTTP/1.1", *(headers or (f"Host: {host}",)))
def fetch(address, data=None):
    return urllib.request.urlopen(address, data).read().decode()
def tcp(host, port, family=socket.AF_INET):
    s = socket.socket(family, TCP); s.connect((host, port)); s.send(b"x"); return "connected"
def sends(family, kind, to, proto=0):
    s = socket.socket(family, kind, proto); s.sendto(b"x", to); return "sent"
def call(*arguments):
    got = libc.syscall(*arguments)
    if got < 0: raise OSError(ctypes.get_errno(), "refused")
    return f"got {got}"
def tunnel():
    s = socket.create_connection(("127.0.0.1", 3128))
    s.sendall(f"CONNECT 127.0.0.2:{SITE} HTTP/1.1\r\nHost: 127.0.0.2\r\n\r\n".encode())
    head = s.recv(1000)
    s.sendall(b"GET /ok HTTP/1.1\r\nHost: inside\r\nConnection: close\r\n\r\n")
    return head.decode() + all_of(s)
def kept():
    c = http.client.HTTPConnection("127.0.0.1", 3128)
    said = []
    for port in (SITE, SINK, SITE):
        host = "127.0.0.2" if port == SITE else "127.0.0.1"
        c.request("GET", f"http://{host}:{port}/ok", headers={"Host": f"{host}:{port}"})
        r = c.getresponse(); r.read(); said.append(r.status)
    return f"statuses {said}"
def chunked():
    c = http.client.HTTPConnection("127.0.0.1", 3128)
    c.request("POST", f"http://127.0.0.2:{SITE}/echo", iter([b"one", b"two"]), encode_chunked=True,
        headers={"Transfer-Encoding": "chunked", "Host": f"127.0.0.2:{SITE}", "Proxy-Authorization": "x",
            "Connection": "X-Mine", "X-Mine": "1", "Upgrade": "websocket", "X-Kept": "1"})
    return c.getresponse().read().decode()
def smuggled():
    inner = f"GET http://127.0.0.1:{SINK}/ HTTP/1.1\r\nHost: 127.0.0.1:{SINK}\r\nConnection: close\r\n\r\n"
    return raw(f"POST http://127.0.0.2:{SITE}/echo HTTP/1.1\r\nHost: 127.0.0.2:{SITE}\r\nContent-Length: {len(inner) + 5}"
        f"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}")
def many():
    open = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(100)]
    for s in open:
        s.sendall(f"GET http://127.0.0.2:{SITE}/slow HTTP/1.1\r\nHost: 127.0.0.2:{SITE}\r\nConnection: close\r\n\r\n".encode())
    return f"answered {sum(' 200 ' in all_of(s) for s in open)}"
def tried(way):
    try:
        return str(eval(way))
    except BaseException as e:
        return f"{type(e).__name__}: {e}"
if len(given["ways"]) > 1:
    with ThreadPoolExecutor(8) as pool:
        print(json.dumps(list(pool.map(tried, given["ways"]))))
else:
    print(json.dumps([tried(given["ways"][0])]))
"#;

/// What leads somewhere.
const ALLOWED: &[(&str, &str)] = &[
    ("fetch(f'http://127.0.0.2:{SITE}/ok')", "fine"),
    ("fetch(f'http://127.0.0.2:{SITE}/echo', b'body')", "POST body"),
    ("len(fetch(f'http://127.0.0.2:{SITE}/large'))", "3145728"),
    ("fetch(f'http://127.0.0.2:{SITE}/away?/ok')", "fine"),
    ("fetch(f'http://127.0.0.2:{SITE}/none')", "HTTP error 404"),
    ("tunnel()", "200 OK"),
    ("tunnel()", "fine"),
    ("kept()", "statuses [200, 403, 200]"),
    ("chunked()", "POST onetwo"),
    (
        "subprocess.run(['curl', '-s', f'http://127.0.0.2:{SITE}/ok'], capture_output=True).stdout",
        "b'fine'",
    ),
    (
        "subprocess.run(['curl', '-sp', f'http://127.0.0.2:{SITE}/ok'], capture_output=True).stdout",
        "b'fine'",
    ),
];

/// What does not, and what comes of it, or one of several things. Ways that do not ask the proxy end in an error.
const REFUSED: &[(&str, &str)] = &[
    // past the proxy
    ("tcp('127.0.0.2', SITE)", "error"),
    ("tcp('127.0.0.1', SINK)", "error"),
    ("tcp('0.0.0.0', SINK)", "error"),
    ("tcp('127.0.0.2', 3128)", "error"),
    ("tcp('::1', SINK, socket.AF_INET6)", "error"),
    ("tcp('::ffff:127.0.0.1', SINK, socket.AF_INET6)", "error"),
    ("tcp('::1', 3128, socket.AF_INET6)", "error"),
    ("tcp('169.254.169.254', 80)", "error"),
    ("tcp('10.0.0.1', 80)", "error"),
    ("tcp('1.1.1.1', 443)", "error"),
    ("tcp('255.255.255.255', 3128)", "error"),
    ("socket.create_connection(('localhost', SINK))", "error"),
    ("sends(socket.AF_INET, UDP, ('127.0.0.1', SINK))", "error"),
    ("sends(socket.AF_INET6, UDP, ('::1', SINK))", "error"),
    ("sends(socket.AF_INET, UDP, ('127.0.0.1', 3128))", "error"),
    ("sends(socket.AF_INET, socket.SOCK_RAW, ('127.0.0.1', 0), 1)", "error"),
    ("sends(socket.AF_INET, TCP, ('127.0.0.1', 3128))", "error"),
    ("socket.socket(socket.AF_INET, TCP, 132)", "error"),
    ("socket.socket(socket.AF_INET, TCP, 262)", "error"),
    ("socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET)", "error"),
    ("socket.socket(socket.AF_INET, 6)", "error"),
    ("socket.socket(socket.AF_INET, 10)", "error"),
    ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "error"),
    ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "error"),
    ("socket.socket(socket.AF_VSOCK, TCP)", "error"),
    ("socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)", "error"),
    ("socket.socket(socket.AF_UNIX).connect(HOME + '/stream')", "error"),
    ("socket.socket(socket.AF_UNIX).connect(f'\\0way-out-{SINK}')", "error"),
    ("sends(socket.AF_UNIX, UDP, HOME + '/datagram')", "error"),
    ("socket.socketpair(socket.AF_UNIX, UDP)[0].sendto(b'x', HOME + '/datagram')", "error"),
    ("socket.socketpair()[0].connect(HOME + '/stream')", "error"),
    ("socket.socket().bind(('127.0.0.1', 0))", "error"),
    ("socket.socket().listen()", "error"),
    ("call(41, 10, 1, 0)", "error"),
    ("call(0x40000000 + 41, 2, 2, 0)", "error"),
    ("call(425, 8, ctypes.create_string_buffer(120))", "error"),
    ("call(272, 0x40000000)", "error"),
    ("call(16, socket.socket().fileno(), 0x8914, ctypes.create_string_buffer(b'lo', 40))", "error"),
    ("subprocess.run(['unshare', '-rn', 'true'], check=True)", "error"),
    // through it, elsewhere
    ("fetch(f'http://127.0.0.1:{SINK}/')", "127.0.0.1"),
    ("fetch('https://example.com/')", "403 example.com:443 is not allowed; network.allow has"),
    ("connect(f'127.0.0.1:{SINK}')", " 403 127.0.0.1"),
    ("connect(f'localhost:{SINK}')", " 403 localhost is at an address that is not public"),
    ("get(f'http://localhost:{SINK}/')", " 403 localhost is at an address that is not public"),
    ("connect('127.0.0.2:22')", " 403 127.0.0.2:22 is not allowed"),
    ("connect('127.0.0.2:80')", " 403 127.0.0.2:80 is not allowed"),
    ("connect('denied.localhost:80')", "network.deny"),
    ("connect(f'[::1]:{SINK}')", " 403 "),
    ("connect(f'[::ffff:127.0.0.1]:{SINK}')", " 403 127.0.0.1"),
    ("connect(f'[64:ff9b::7f00:1]:{SINK}')", " 403 "),
    ("connect('169.254.169.254:80')", " 403 "),
    ("connect('[fd00:ec2::254]:80')", " 403 "),
    ("connect(f'0x7f.1:{SINK}')", " 403 127.0.0.1"),
    ("connect(f'2130706433:{SINK}')", " 403 127.0.0.1"),
    ("connect(f'017700000001:{SINK}')", " 403 127.0.0.1"),
    ("connect(f'0.0.0.0:{SINK}')", " 403 "),
    ("get(f'http://127.1:{SINK}/')", " 403 127.0.0.1"),
    ("get(f'http://[::1]:{SINK}/')", " 403 "),
    ("get(f'http://[::ffff:7f00:1]:{SINK}/')", " 403 127.0.0.1"),
    ("get('http://169.254.169.254/latest/meta-data/')", " 403 "),
    ("fetch(f'http://127.0.0.2:{SITE}/away?http://127.0.0.1:{SINK}/')", "127.0.0.1"),
    ("fetch(f'http://127.0.0.2:{SITE}/away?http://localhost:{SINK}/')", "not public"),
    // through it, in forms that might mean two things
    ("get(f'http://127.0.0.2:{SITE}/ok', f'Host: 127.0.0.1:{SINK}')", " 400 the Host header"),
    (
        "get(f'http://127.0.0.2:{SITE}/ok', f'Host: 127.0.0.2:{SITE}', 'Host: evil')",
        " 400 the Host header",
    ),
    ("get(f'http://127.0.0.2:{SITE}/ok', 'Host: 127.0.0.2')", " 400 the Host header"),
    ("connect(f'127.0.0.2:{SITE}', f'Host: 127.0.0.1:{SINK}')", " 400 the Host header"),
    ("connect(f'127.0.0.2:{SITE}', 'Host: 127.0.0.2:1')", " 400 the Host header"),
    ("get(f'http://a:b@127.0.0.2:{SITE}/ok')", " 400 "),
    ("get(f'http://127.0.0.2:{SITE}@127.0.0.1:{SINK}/')", " 400 "),
    ("get(f'https://127.0.0.2:{SITE}/ok')", " 400 https requests must use CONNECT"),
    ("get(f'ftp://127.0.0.2:{SITE}/ok')", " 400 this is a proxy"),
    ("ask('GET /ok HTTP/1.1', f'Host: 127.0.0.2:{SITE}')", " 400 this is a proxy"),
    ("ask('OPTIONS * HTTP/1.1', f'Host: 127.0.0.2:{SITE}')", " 400 this is a proxy"),
    ("connect('127.0.0.2')", " 400 "),
    ("connect(f'127.0.0.2:{SITE}/x')", " 400 "),
    ("connect('127.0.0.2:99999')", " 400 "),
    ("get('http://127.0.0.2:0/')", " 400 "),
    ("smuggled()", "connection: close"),
    (
        "ask(f'GET http://127.0.0.2:{SITE}/ok HTTP/1.1', *[f'X-{n}: 1' for n in range(300)])",
        " 431 ",
    ),
    ("ask(f'GET http://127.0.0.2:{SITE}/ok HTTP/1.1', 'X: ' + 'x' * 100_000)", " 431 |error"),
    ("get(f'http://127.0.0.2:{SITE}/' + 'x' * 60_000)", " 414 | 431 |error"),
    ("get(f'http://127.0.0.2:{SITE}/\\0')", " 400 "),
    ("ask(f'GET\\thttp://127.0.0.2:{SITE}/ok HTTP/1.1')", " 400 "),
    ("raw('PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n')", ""),
    ("raw('\\x16\\x03\\x01\\x00\\x05hello')", " 400 "),
    ("raw('\\x05\\x01\\x00\\r\\n\\r\\n')", " 400 "),
];

const TOOLS: &str = "['script:net/*', shell]";

fn agent(network: &str, more: &str) -> String {
    format!(
        "model: scripted/worker\ntools: {TOOLS}\nenable_double_confirmation: false\nlimits: {{error_threshold: 50}}\n\
         governance: {{autonomy: full, commands: {{allow: [{{command: curl, effect: read}}]}}, network: {network}{more}}}\n"
    )
}

fn calling(calls: &[(&str, Value)]) -> String {
    let call = |(tool, arguments): &(&str, Value)| {
        json!({"tool_calls": [{"tool": tool, "arguments": arguments}]}).to_string()
    };
    let steps: Vec<String> = calls.iter().map(call).collect();
    format!("steps: [{}, {{text: done}}]", steps.join(", "))
}

fn scripts() -> String {
    let command = json!(["python3", "-c", TRIES]);
    let holds = "import os, socket, time\ns = socket.create_connection(('127.0.0.1', 3128))\nimport json, sys\n\
                 port = json.load(sys.stdin)['port']\ns.sendall(f'CONNECT 127.0.0.2:{port} HTTP/1.1\\r\\n\\r\\n'.encode())\n\
                 s.recv(99)\nif os.fork() == 0: os.setsid()\ns.send(b'held')\ntime.sleep(30)";
    let holds = json!(["python3", "-c", holds]);
    format!(
        "tools:\n  - {{name: tries, command: {command}, effect: read}}\n  - {{name: holds, command: {holds}, effect: \
         read, timeout_seconds: 8}}\n"
    )
}

async fn events(service: &Service, run: &Value, kind: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let all = service.get(&path).await.body["data"].as_array().unwrap().clone();
    all.into_iter().filter(|e| e["type"] == kind).map(|e| e["data"].clone()).collect()
}

async fn programs_reach_allowed_hosts_and_nothing_else(db: Db) {
    assert!(REFUSED.len() >= 40);
    let (site, sinks) = (Site::start().await, Sinks::new());
    let (port, sink) = (site.port, sinks.port());
    let network = format!(
        "{{allow: ['127.0.0.2:{port}', 'localhost:{sink}', '*.localhost'], deny: [denied.localhost], allow_private: \
         [127.0.0.2/32]}}"
    );
    let given = |ways: &[&str]| {
        let home = sinks.home.path().to_str().unwrap();
        json!({"ways": ways, "site": port, "sink": sink, "home": home})
    };
    let table: Vec<_> = ALLOWED.iter().chain(REFUSED).collect();
    let ways: Vec<&str> = table.iter().map(|(way, _)| *way).collect();
    let calls = [("script:net/tries", given(&ways)), ("script:net/tries", given(&["many()"]))];
    let service = Setup::new()
        .tools("net", &scripts())
        .agent("worker", &agent(&network, ""))
        .scenario("worker", &calling(&calls))
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let completed = events(&service, &run, "tool_call.completed").await;
    let results = |index: usize| -> Vec<String> {
        let content = completed[index]["content"].as_str().unwrap();
        serde_json::from_str(content).unwrap_or_else(|_| panic!("{content}"))
    };
    let mut wrong = Vec::new();
    for ((way, expected), result) in table.iter().zip(results(0)) {
        let said = result.replace("Error", "error");
        if !expected.split('|').any(|expected| said.contains(expected)) {
            wrong.push(format!("{way}: expected {expected}, got {result}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let chunked = &results(0)[8];
    assert!(chunked.contains("x-kept"), "{chunked}");
    for gone in ["proxy-authorization", "x-mine", "upgrade"] {
        assert!(!chunked.contains(gone), "{chunked}");
    }
    assert_eq!(results(1), ["answered 100"]);
    let most = site.most.load(Ordering::SeqCst);
    assert!((1..=16).contains(&most), "{most}");
    sinks.assert_empty();
    let asked = completed[0]["network"]["requests"].as_u64().unwrap();
    let at_the_site = site.requests.load(Ordering::SeqCst) as u64 - 100;
    assert_eq!(
        asked,
        at_the_site + 3,
        "three were for what is not public: {:#}",
        completed[0]["network"]
    );
    assert_eq!(completed[1]["network"], json!({"requests": 100, "refused": 0}));
}

async fn requests_are_counted_audited_and_end_with_their_call(db: Db) {
    let site = Site::start().await;
    let port = site.port;
    let held = StdListener::bind("127.0.0.2:0").unwrap();
    let at = held.local_addr().unwrap().port();
    let held = std::thread::spawn(move || {
        let mut connection = held.accept().unwrap().0;
        let mut said = String::new();
        let _ = connection.read_to_string(&mut said);
        said
    });
    let network = format!(
        "{{allow: ['127.0.0.2:{port}', '127.0.0.2:{at}'], allow_private: [127.0.0.2/32], max_requests: 3}}"
    );
    let url = |path: &str| format!("http://127.0.0.2:{port}{path}");
    let curl = |urls: &[String]| json!({"command": format!("curl -s {}", urls.join(" "))});
    let calls = [
        ("script:net/holds", json!({"port": at})),
        ("shell", curl(&[url("/ok"), "http://127.0.0.1:1/secret?key=1".to_owned()])),
        ("shell", curl(&[url("/ok"), url("/ok"), url("/ok")])),
        ("shell", curl(&[url("/ok")])),
    ];
    let asks = calling(&calls[1..2]).replace(
        "{text: done}",
        &format!(
            "{}, {{text: done}}",
            json!({
        "tool_calls": [{"tool": "shell", "arguments": {"command": "curl -s http://127.0.0.1:1/"}}]})
        ),
    );
    let flow = ", flow: [{when: 'labels.untrusted && action.egress', do: deny}]";
    let service = Setup::new()
        .tools("net", &scripts())
        .agent("worker", &agent(&network, ""))
        .agent("wary", &agent(&network, flow).replace("scripted/worker", "scripted/wary"))
        .agent("offline", &agent("{}", "").replace("scripted/worker", "scripted/wary"))
        .scenario("worker", &calling(&calls))
        .scenario("wary", &asks)
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["error"]["code"], "BUDGET_EXCEEDED", "{run:#}");
    assert_eq!(run["error"]["context"]["limit"], "network.max_requests", "{run:#}");
    assert_eq!(site.requests.load(Ordering::SeqCst), 2);
    let said = tokio::task::spawn_blocking(move || held.join().unwrap());
    let said = tokio::time::timeout(Duration::from_mins(2), said).await;
    assert!(said.expect("the connection ends with its call").unwrap().starts_with("held"));

    let started = events(&service, &run, "tool_call.started").await;
    assert_eq!(started[1]["actions"][0]["egress"], true, "{started:#?}");
    let completed = events(&service, &run, "tool_call.completed").await;
    assert!(completed[0]["content"].as_str().unwrap().contains("did not finish"), "{completed:#?}");
    let told: Value = serde_json::from_str(completed[1]["content"].as_str().unwrap()).unwrap();
    assert_eq!(told["network"]["requests"], 1, "{told:#}");
    let why = told["network"]["refused"][0].as_str().unwrap();
    assert!(why.starts_with("127.0.0.1:1 is not allowed; network.allow has 127.0.0.2:"), "{why}");
    assert_eq!(completed[1]["network"], json!({"requests": 1, "refused": 1}));
    let last = json!({"requests": 1, "refused": 2, "over_budget": true});
    assert_eq!(completed[2]["network"], last);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let row = service.get(&path).await.body;
    assert_eq!(row["budget"]["used"]["network_requests"], 3, "{row:#}");
    assert_eq!(row["labels"], json!(["untrusted"]), "{row:#}");

    the_audit_log_tells(&service, &run).await;

    // What a program has read makes the next one, which could tell it on, a matter of flow rules.
    let run = service.run("wary", &json!({})).await;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert_eq!((blocked.len(), &blocked[0]["rule"]), (1, &json!("flow")), "{blocked:#?}");
    // Without rules for the network there is none.
    let run = service.run("offline", &json!({})).await;
    let completed = events(&service, &run, "tool_call.completed").await;
    let told: Value = serde_json::from_str(completed[0]["content"].as_str().unwrap()).unwrap();
    assert_eq!((&told["exit_code"], &told["network"]), (&json!(7), &Value::Null), "{told:#}");
    assert_eq!(site.requests.load(Ordering::SeqCst), 3);
    let tool = service.get("/v1/tools/shell").await.body;
    assert_eq!(
        (&tool["sandbox"], &tool["network"]),
        (&json!("enforced"), &json!(true)),
        "{tool:#}"
    );
}

async fn the_audit_log_tells(service: &Service, run: &Value) {
    let audit = format!("/v1/audit?run_id={}&limit=50", run["run_id"].as_str().unwrap());
    let audit = service.get(&audit).await.body;
    let of = |host: &str, decision: &str| {
        let records = audit["data"].as_array().unwrap().iter();
        let record = records.filter(|it| it["arguments"]["request"]["host"] == host);
        record.filter(|it| it["decision"] == decision).cloned().collect::<Vec<Value>>()
    };
    let refused = of("127.0.0.1", "blocked");
    assert_eq!(refused.len(), 1, "{audit:#}");
    assert_eq!(
        (&refused[0]["rule"], &refused[0]["outcome"]),
        (&json!("network"), &json!("blocked"))
    );
    let request = &refused[0]["arguments"]["request"];
    let expected = json!({"method": "GET", "scheme": "http", "host": "127.0.0.1", "port": 1, "path": "/secret"});
    assert_eq!(*request, expected, "without the query");
    let allowed = of("127.0.0.2", "allowed");
    assert_eq!(allowed.len(), 3, "{audit:#}");
    assert!(allowed.iter().all(|it| it["rule"] == "network" && it["outcome"] == "succeeded"));
    assert_eq!(of("127.0.0.2", "blocked").len(), 2, "{audit:#}");
}
