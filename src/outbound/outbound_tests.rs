//! Against servers that an attacker would run. `127.0.0.2` plays the public internet, because the
//! tests permit it; everything else that listens here is a sink that nothing may reach.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::*;

const PUBLIC: &str = "127.0.0.2";

/// Counts who comes.
struct Sink {
    connections: Arc<AtomicUsize>,
    port: u16,
    listening: JoinHandle<()>,
}

impl Sink {
    fn on(listener: TcpListener) -> Self {
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let listening = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nsecret").await;
            }
        });
        Self { connections, port, listening }
    }

    /// Every address of this machine, in both families where it has them.
    async fn everywhere() -> Self {
        let both = TcpListener::bind("[::]:0").await;
        Self::on(match both {
            Ok(listener) => listener,
            Err(_) => TcpListener::bind("0.0.0.0:0").await.unwrap(),
        })
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

type Behaviour = Arc<dyn Fn(String, TcpStream) -> BoxFuture<'static, ()> + Send + Sync>;

/// A server of the public internet.
struct Site {
    port: u16,
    listening: JoinHandle<()>,
}

impl Site {
    async fn new(behaviour: Behaviour) -> Self {
        Self::on(&format!("{PUBLIC}:0"), behaviour).await
    }

    async fn on(address: &str, behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let listening = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let behaviour = Arc::clone(&behaviour);
                tokio::spawn(async move {
                    let mut request = vec![0; 64 * 1024];
                    let read = stream.read(&mut request).await.unwrap_or(0);
                    let request = String::from_utf8_lossy(&request[..read]).into_owned();
                    behaviour(request, stream).await;
                });
            }
        });
        Self { port, listening }
    }

    /// Answers each path with what the function makes of the request.
    async fn answering(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let answer = Arc::new(answer);
        Self::new(Arc::new(move |request, mut stream| {
            let answer = answer(&request);
            Box::pin(async move {
                let _ = stream.write_all(&answer).await;
                let _ = stream.shutdown().await;
            })
        }))
        .await
    }

    fn url(&self, path: &str) -> Url {
        address::read(&format!("http://{PUBLIC}:{}{path}", self.port)).unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

fn names(table: &[(&str, &[&str])]) -> LookUp {
    let table: HashMap<String, Vec<IpAddr>> = table
        .iter()
        .map(|(name, addresses)| {
            ((*name).to_owned(), addresses.iter().map(|a| a.parse().unwrap()).collect())
        })
        .collect();
    Arc::new(move |name| {
        let found = table.get(&name).cloned();
        Box::pin(async move { found.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    })
}

fn get(url: Url) -> Request {
    Request { method: Method::GET, url, headers: HeaderMap::new(), body: Bytes::new() }
}

fn public() -> AddressPolicy {
    AddressPolicy::public_and([PUBLIC.parse().unwrap()])
}

fn terms(addresses: &AddressPolicy) -> Terms<'_> {
    Terms {
        addresses,
        judge: &|_| Ok(()),
        redirects: MAX_REDIRECTS,
        deadline: Duration::from_secs(5),
        max_body: 1024 * 1024,
    }
}

async fn fetch(client: &Client, url: Url) -> Result<Response, OutboundError> {
    client.send(get(url), &terms(&public())).await
}

fn answer(head: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {head}\r\n").into_bytes();
    if !head.to_ascii_lowercase().contains("content-length") {
        bytes.extend(format!("content-length: {}\r\n", body.len()).bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

fn path_of(request: &str) -> String {
    request.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// Hosts behind which there is something private, however they are written.
const PRIVATE_HOSTS: &[&str] = &[
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "127.000.000.001",
    "0177.0.0.1",
    "0177.0.0.01",
    "00000177.1",
    "0x7f.0.0.1",
    "0x7f.1",
    "0X7F.1",
    "0x7f000001",
    "0x7F000001",
    "2130706433",
    "017700000001",
    "0000017700000001",
    "127.0x1",
    "127.0.0x0.1",
    "127.0.0.0x",
    "0x7f.0.01",
    "127.255.255.254",
    "127.127.127.127",
    "①②⑦.⓪.⓪.①",
    "１２７.０.０.１",
    "127。0。0。1",
    "127．0．0．1",
    "127.0.0.%31",
    "%31%32%37.0.0.1",
    "0",
    "0.0.0.0",
    "0.0",
    "0x0",
    "00",
    "0.0.0.1",
    "10.0.0.1",
    "10.1",
    "0xa000001",
    "167772161",
    "012.1",
    "172.16.0.1",
    "172.31.255.255",
    "0xac100001",
    "2886729729",
    "192.168.0.1",
    "192.168.1",
    "192.168.257",
    "0xc0a80001",
    "3232235521",
    "0300.0250.0.1",
    "169.254.169.254",
    "169.254.43518",
    "169.16689662",
    "0xa9fea9fe",
    "2852039166",
    "025177524776",
    "0251.0376.0251.0376",
    "0xa9.0xfe.0xa9.0xfe",
    "169.254.170.2",
    "168.63.129.16",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.7",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "4294967295",
    "0xffffffff",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[0000::0001]",
    "[::]",
    "[::0]",
    "[::127.0.0.1]",
    "[::7f00:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::FFFF:7F00:0001]",
    "[0:0:0:0:0:ffff:127.0.0.1]",
    "[::ffff:0:127.0.0.1]",
    "[::ffff:10.0.0.1]",
    "[::ffff:192.168.1.1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b::10.0.0.1]",
    "[64:ff9b:1::127.0.0.1]",
    "[64:ff9b:1:ffff::1]",
    "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]",
    "[2002:c0a8:101::1]",
    "[2001::7f00:1]",
    "[2001:0:80ff:fffe::]",
    "[2001:db8::1]",
    "[2606:4700::5efe:127.0.0.1]",
    "[2606:4700::200:5efe:10.0.0.1]",
    "[fc00::1]",
    "[fd00::1]",
    "[fd00:ec2::254]",
    "[fe80::1]",
    "[fec0::1]",
    "[ff02::1]",
    "[100::1]",
    "[3fff::1]",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "ｌｏｃａｌｈｏｓｔ",
    "%6c%6f%63alhost",
    "sub.localhost",
    "metadata",
    "metadata.google.internal",
    "loop.attacker.example",
    "mapped.attacker.example",
    "compatible.attacker.example",
    "nat64.attacker.example",
    "sixtofour.attacker.example",
    "teredo.attacker.example",
    "six.attacker.example",
    "link.attacker.example",
    "mixed.attacker.example",
    "zero.attacker.example",
    "127.0.0.1.attacker.example",
    "allowed.example.attacker.example",
];

/// What is refused as it is written.
const NO_ADDRESSES: &[&str] = &[
    "http://allowed.example@127.0.0.1:PORT/",
    "http://allowed.example:80@127.0.0.1:PORT/",
    "http://127.0.0.1:PORT\\@allowed.example/",
    "http:\\\\127.0.0.1:PORT/",
    "http:/\\127.0.0.1:PORT/",
    "http://\t127.0.0.1:PORT/",
    "http://127.0.\n0.1:PORT/",
    " http://127.0.0.1:PORT/",
    "http://127.0.0.1 :PORT/",
    "http://127.0.0.1:PORT\u{0}/",
    "http://127.0.0.1\u{0}.allowed.example:PORT/",
    "http://127.0.0.1..:PORT/",
    "http://.127.0.0.1:PORT/",
    "http://256.256.256.256:PORT/",
    "http://1.2.3.4.5:PORT/",
    "http://[::1%25lo]:PORT/",
    "http://[::1:PORT/",
    "http://[127.0.0.1]:PORT/",
    "http://[::ffff:127.0.0.1.]:PORT/",
    "http://127.0.0.1:PORT0000/",
    "http://127.0.0.1:-1/",
    "http://:PORT/",
    "http:///",
    "//127.0.0.1:PORT/",
    "127.0.0.1:PORT",
    "ftp://127.0.0.1:PORT/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:PORT/_x",
    "dict://127.0.0.1:PORT/",
    "ldap://127.0.0.1:PORT/",
    "ws://127.0.0.1:PORT/",
    "unix:///var/run/docker.sock",
    "jar:http://127.0.0.1:PORT!/",
    "view-source:http://127.0.0.1:PORT/",
    "data:text/plain,x",
    "javascript:0",
];

fn attackers_names() -> LookUp {
    names(&[
        ("localhost", &["127.0.0.1", "::1"]),
        ("sub.localhost", &["127.0.0.1"]),
        ("metadata", &["169.254.169.254"]),
        ("metadata.google.internal", &["169.254.169.254"]),
        ("loop.attacker.example", &["127.0.0.1"]),
        ("mapped.attacker.example", &["::ffff:127.0.0.1"]),
        ("compatible.attacker.example", &["::127.0.0.1"]),
        ("nat64.attacker.example", &["64:ff9b::7f00:1"]),
        ("sixtofour.attacker.example", &["2002:7f00:1::"]),
        ("teredo.attacker.example", &["2001:0:7f00:1::1"]),
        ("six.attacker.example", &["::1"]),
        ("link.attacker.example", &["fe80::1", "169.254.169.254"]),
        ("mixed.attacker.example", &["10.0.0.1", "127.0.0.1", "::1"]),
        ("zero.attacker.example", &["0.0.0.0", "::"]),
        ("127.0.0.1.attacker.example", &["127.0.0.1"]),
        ("allowed.example.attacker.example", &["127.0.0.1"]),
    ])
}

#[tokio::test]
async fn nothing_private_is_reached_however_it_is_written() {
    let sink = Sink::everywhere().await;
    let client = Client::resolving_with(attackers_names());
    let policy = AddressPolicy::public();
    assert!(PRIVATE_HOSTS.len() + NO_ADDRESSES.len() >= 120);
    for scheme in ["http", "https"] {
        for host in PRIVATE_HOSTS {
            let text = format!("{scheme}://{host}:{}/latest/meta-data", sink.port);
            let Ok(url) = address::read(&text) else { panic!("{text} is an address") };
            let sent = client.send(get(url), &terms(&policy)).await;
            assert!(matches!(sent, Err(OutboundError::NotPublic(_))), "{text}: {sent:?}");
        }
    }
    for text in NO_ADDRESSES {
        let text = text.replace("PORT", &sink.port.to_string());
        assert!(address::read(&text).is_err(), "{text}");
    }
    assert_eq!(sink.connections(), 0);
}

#[tokio::test]
async fn a_name_is_resolved_once_and_the_connection_goes_there() {
    let site = Site::answering(|_| answer("200 OK", b"public")).await;
    let sink = TcpListener::bind(("127.0.0.1", site.port)).await;
    let sink = Sink::on(sink.unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    // Public when it is asked first, private whenever it is asked again.
    let rebinding: LookUp = Arc::new(move |_| {
        let turn = counted.fetch_add(1, Ordering::SeqCst);
        let address = if turn.is_multiple_of(2) { PUBLIC } else { "127.0.0.1" };
        Box::pin(async move { Ok(vec![address.parse().unwrap()]) })
    });
    let client = Client::resolving_with(rebinding);
    let url = address::read(&format!("http://rebinding.example:{}/", site.port)).unwrap();
    for round in 0..100 {
        let sent = fetch(&client, url.clone()).await;
        match sent {
            Ok(response) => assert_eq!((round % 2, response.body.as_slice()), (0, &b"public"[..])),
            Err(error) => {
                let refused = OutboundError::NotPublic("rebinding.example".into());
                assert_eq!((round % 2, error), (1, refused));
            }
        }
    }
    assert_eq!(asked.load(Ordering::SeqCst), 100);

    let mixed = names(&[("mixed.example", &["127.0.0.1", "10.0.0.1", PUBLIC, "::1"])]);
    let url = address::read(&format!("http://mixed.example:{}/", site.port)).unwrap();
    let client = Client::resolving_with(mixed);
    for _ in 0..20 {
        assert_eq!(fetch(&client, url.clone()).await.unwrap().body, b"public");
    }
    assert_eq!(sink.connections(), 0);
}

#[tokio::test]
async fn every_redirect_is_judged_again() {
    let sink = Sink::everywhere().await;
    let port = sink.port;
    let site = Site::answering(move |request| {
        let path = path_of(request);
        if let Some(left) = path.strip_prefix("/chain/") {
            return match left.parse::<u32>().unwrap() {
                0 => answer("200 OK", b"arrived"),
                left => answer(&format!("302 Found\r\nlocation: /chain/{}", left - 1), b"x"),
            };
        }
        let location = match path.as_str() {
            "/loop" => "/loop".to_owned(),
            "/literal" => format!("http://127.0.0.1:{port}/"),
            "/hex" => format!("http://0x7f.1:{port}/"),
            "/scheme-relative" => format!("//[::ffff:127.0.0.1]:{port}/"),
            "/backslash" => format!("\\\\127.0.0.1:{port}/"),
            "/name" => format!("http://loop.attacker.example:{port}/"),
            "/mapped" => format!("http://mapped.attacker.example:{port}/"),
            "/metadata" => "http://169.254.169.254/latest/meta-data/".to_owned(),
            "/file" => "file:///etc/passwd".to_owned(),
            "/ftp" => format!("ftp://127.0.0.1:{port}/"),
            "/credentials" => format!("http://a:b@127.0.0.1:{port}/"),
            "/deep" => "/chain/2".to_owned(),
            _ => "/nowhere\u{7f}".to_owned(),
        };
        answer(&format!("302 Found\r\nlocation: {location}"), b"")
    })
    .await;
    let client = Client::resolving_with(attackers_names());
    for path in [
        "/literal",
        "/hex",
        "/scheme-relative",
        "/backslash",
        "/name",
        "/mapped",
        "/metadata",
        "/file",
        "/ftp",
        "/credentials",
    ] {
        let sent = fetch(&client, site.url(path)).await;
        let expected =
            matches!(sent, Err(OutboundError::NotPublic(_) | OutboundError::Redirect(_)));
        assert!(expected, "{path}: {sent:?}");
    }
    assert_eq!(sink.connections(), 0);
    let arrived = fetch(&client, site.url("/chain/5")).await.unwrap();
    assert_eq!((arrived.body.as_slice(), arrived.requests), (&b"arrived"[..], 6));
    assert_eq!(arrived.url, site.url("/chain/0"));
    for path in ["/chain/6", "/chain/30", "/loop"] {
        let sent = fetch(&client, site.url(path)).await;
        assert_eq!(sent.unwrap_err(), OutboundError::TooManyRedirects(5), "{path}");
    }
    // What is sent is judged by its address as well, on each hop.
    let policy = public();
    let judge = |url: &Url| match url.path() {
        "/chain/1" => Err("not there".to_owned()),
        _ => Ok(()),
    };
    let judged = Terms { judge: &judge, ..terms(&policy) };
    let refused = client.send(get(site.url("/deep")), &judged).await.unwrap_err();
    assert_eq!(refused, OutboundError::Refused("not there".into()));
    let none = Terms { redirects: 0, ..terms(&policy) };
    assert_eq!(client.send(get(site.url("/deep")), &none).await.unwrap().status, 302);
}

#[tokio::test]
async fn secrets_and_bodies_stay_with_their_host() {
    let echo = Site::answering(|request| answer("200 OK", request.as_bytes())).await;
    let away = echo.port;
    let site = Site::answering(move |request| {
        let location = match path_of(request).as_str() {
            "/here" => "/echo".to_owned(),
            "/echo" => return answer("200 OK", request.as_bytes()),
            _ => format!("http://{PUBLIC}:{away}/"),
        };
        let status = if request.starts_with("PUT") { "307 Moved" } else { "302 Found" };
        answer(&format!("{status}\r\nlocation: {location}\r\nset-cookie: a=b"), b"")
    })
    .await;
    let client = Client::new();
    let policy = public();
    let mut request = get(site.url("/here"));
    for (name, value) in [
        ("authorization", "Bearer hunter2"),
        ("cookie", "hunter2"),
        ("x-api-key", "hunter2"),
        ("accept", "text/plain"),
        ("host", "other.example"),
        ("transfer-encoding", "chunked"),
        ("connection", "keep-alive"),
    ] {
        let name = HeaderName::from_static(name);
        request.headers.insert(name, HeaderValue::from_static(value));
    }
    let text = |response: Response| String::from_utf8(response.body).unwrap().to_lowercase();
    let here = text(client.send(request.clone(), &terms(&policy)).await.unwrap());
    assert_eq!(here.matches("hunter2").count(), 3, "{here}");
    assert!(here.contains(&format!("host: {PUBLIC}:{}", site.port)), "{here}");
    assert!(here.contains("connection: close") && !here.contains("chunked"), "{here}");
    assert!(!here.contains("a=b"), "{here}");
    request.url = site.url("/away");
    let there = text(client.send(request.clone(), &terms(&policy)).await.unwrap());
    assert!(!there.contains("hunter2") && there.contains("accept: text/plain"), "{there}");
    request.body = Bytes::from_static(b"content");
    request.method = Method::POST;
    let there = text(client.send(request.clone(), &terms(&policy)).await.unwrap());
    assert!(there.starts_with("get / ") && !there.contains("content\n"), "{there}");
    request.method = Method::PUT;
    let refused = client.send(request.clone(), &terms(&policy)).await.unwrap_err();
    assert!(matches!(refused, OutboundError::Redirect(_)), "{refused}");
    request.url = site.url("/here");
    let here = text(client.send(request, &terms(&policy)).await.unwrap());
    assert!(here.starts_with("put /echo ") && here.ends_with("content"), "{here}");
}

/// Half a gigabyte in half a megabyte.
fn bomb() -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&vec![0; 1024 * 1024]).unwrap();
    encoder.finish().unwrap().repeat(500)
}

/// What a hostile server sends, by path; those that never end are [`endless`].
fn hostile(path: &str) -> Vec<u8> {
    let chunked = |rest: &str| {
        format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{rest}").into_bytes()
    };
    match path {
        "/bomb" => answer("200 OK\r\ncontent-type: text/html\r\ncontent-encoding: gzip", &bomb()),
        "/long-header" => answer(&format!("200 OK\r\nx: {}", "y".repeat(70_000)), b""),
        "/many-headers" => answer(&format!("200 OK{}", "\r\nx: y".repeat(200)), b""),
        "/no-http" => b"SSH-2.0-OpenSSH_9.9\r\n".to_vec(),
        "/silent" => Vec::new(),
        "/short" => answer("200 OK\r\ncontent-length: 100", b"too short"),
        "/two-lengths" => answer("200 OK\r\ncontent-length: 1\r\ncontent-length: 2", b"x"),
        "/chunks" => chunked("zz\r\n"),
        "/huge-chunk" => chunked("ffffffffffffffff\r\n"),
        "/brotli" => answer("200 OK\r\ncontent-encoding: br", b"x"),
        "/not-gzip" => answer("200 OK\r\ncontent-encoding: gzip", b"plain"),
        _ => answer("200 OK\r\ncontent-length: 10000000000", b"x"),
    }
}

/// What one that never ends begins with, and what it sends again and again.
fn endless(path: &str) -> Option<(&'static str, String)> {
    Some(match path {
        "/hang" => ("", String::new()),
        "/drip" => ("HTTP/1.1 200 OK\r\n\r\n", "x".to_owned()),
        "/drip-head" => ("HTTP/1.1 200 OK\r\n", "x: y\r\n".to_owned()),
        "/endless" => ("HTTP/1.1 200 OK\r\n\r\n", "x".repeat(100_000)),
        "/informational" => ("", "HTTP/1.1 100 Continue\r\n\r\n".to_owned()),
        _ => return None,
    })
}

async fn hostile_site() -> Site {
    let behaviour = |request: String, mut stream: TcpStream| -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let path = path_of(&request);
            let Some((start, piece)) = endless(&path) else {
                let _ = stream.write_all(&hostile(&path)).await;
                let _ = stream.shutdown().await;
                return;
            };
            let _ = stream.write_all(start.as_bytes()).await;
            while stream.write_all(piece.as_bytes()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    };
    Site::new(Arc::new(behaviour)).await
}

#[tokio::test]
async fn hostile_answers_end() {
    let site = hostile_site().await;
    let client = Client::new();
    let policy = public();
    let short = Terms { deadline: Duration::from_millis(400), ..terms(&policy) };
    let late = OutboundError::Late(short.deadline);
    for path in ["/hang", "/drip"] {
        assert_eq!(client.send(get(site.url(path)), &short).await.unwrap_err(), late, "{path}");
    }
    for path in ["/bomb", "/endless"] {
        let response = fetch(&client, site.url(path)).await.unwrap();
        assert_eq!((response.body.len(), response.is_whole), (1024 * 1024, false), "{path}");
    }
    for path in ["/informational", "/drip-head"] {
        assert!(client.send(get(site.url(path)), &short).await.is_err(), "{path}");
    }
    for path in ["/long-header", "/many-headers", "/no-http", "/two-lengths"] {
        let error = fetch(&client, site.url(path)).await.unwrap_err();
        assert!(matches!(error, OutboundError::Malformed { .. }), "{path}: {error}");
    }
    for path in ["/silent", "/short", "/chunks", "/huge-chunk", "/huge"] {
        let error = fetch(&client, site.url(path)).await.unwrap_err();
        assert!(matches!(error, OutboundError::BrokenOff(_)), "{path}: {error}");
    }
    for path in ["/brotli", "/not-gzip"] {
        let error = fetch(&client, site.url(path)).await.unwrap_err();
        assert!(matches!(error, OutboundError::Encoding(_)), "{path}: {error}");
    }
    // Who wants no body waits for none.
    let none = Terms { max_body: 0, ..terms(&policy) };
    assert_eq!(client.send(get(site.url("/drip")), &none).await.unwrap().status, 200);
    let nobody = fetch(&client, address::read("http://nobody.invalid/").unwrap()).await;
    assert_eq!(nobody.unwrap_err(), OutboundError::Unresolved("nobody.invalid".into()));
    let secured = address::read(&site.url("/").as_str().replace("http:", "https:")).unwrap();
    let not_secure = client.send(get(secured), &short).await.unwrap_err();
    assert!(not_secure.was_not_sent() || not_secure == late, "{not_secure}");
}
