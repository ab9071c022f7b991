//! Answers that want to cost time or memory.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::*;

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
