//! Against servers that an attacker would run. `127.0.0.2` plays the public internet, because the
//! tests permit it; everything else that listens here is a sink that nothing may reach.

#[path = "hostile_tests.rs"]
mod hostile;
#[path = "private_hosts_tests.rs"]
mod private_hosts;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt as _;
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
    Arc::new(move |name, _| {
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
        tenant: "",
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

/// What went wrong after a redirect.
fn redirected(error: OutboundError) -> OutboundError {
    match error {
        OutboundError::Redirected(error) => *error,
        error => panic!("before a redirect: {error:?}"),
    }
}

#[tokio::test]
async fn a_tenant_whose_look_ups_hang_leaves_room_for_those_of_others() {
    let take = || LOOKUPS.acquire("one").now_or_never().flatten();
    let hanging: Vec<_> = std::iter::from_fn(take).collect();
    assert_eq!(hanging.len(), MAX_LOOKUPS / 2);
    let found = look_up("127.0.0.1".to_owned(), "other").await.unwrap();
    assert_eq!(found, [IpAddr::from([127, 0, 0, 1])]);
}

#[tokio::test]
async fn a_name_is_resolved_once_and_the_connection_goes_there() {
    let site = Site::answering(|_| answer("200 OK", b"public")).await;
    let sink = TcpListener::bind(("127.0.0.1", site.port)).await;
    let sink = Sink::on(sink.unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    // Public when it is asked first, private whenever it is asked again.
    let rebinding: LookUp = Arc::new(move |_, _| {
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
        let error = redirected(fetch(&client, site.url(path)).await.unwrap_err());
        let expected = matches!(error, OutboundError::NotPublic(_) | OutboundError::Redirect(_));
        assert!(expected, "{path}: {error:?}");
    }
    assert_eq!(sink.connections(), 0);
    let arrived = fetch(&client, site.url("/chain/5")).await.unwrap();
    assert_eq!((arrived.body.as_slice(), arrived.requests), (&b"arrived"[..], 6));
    assert_eq!(arrived.url, site.url("/chain/0"));
    for path in ["/chain/6", "/chain/30", "/loop"] {
        let sent = fetch(&client, site.url(path)).await;
        let error = redirected(sent.unwrap_err());
        assert_eq!(error, OutboundError::TooManyRedirects(5), "{path}");
    }
    // What is sent is judged by its address as well, on each hop.
    let policy = public();
    let judge = |url: &Url| match url.path() {
        "/chain/1" => Err("not there".to_owned()),
        _ => Ok(()),
    };
    let judged = Terms { judge: &judge, ..terms(&policy) };
    let refused = client.send(get(site.url("/deep")), &judged).await.unwrap_err();
    assert!(!refused.was_not_sent(), "a server has answered");
    assert_eq!(redirected(refused), OutboundError::Refused("not there".into()));
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
    assert!(matches!(redirected(refused), OutboundError::Redirect(_)));
    request.url = site.url("/here");
    let here = text(client.send(request, &terms(&policy)).await.unwrap());
    assert!(here.starts_with("put /echo ") && here.ends_with("content"), "{here}");
}
