//! What a model reads of answers in all kinds of characters.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use url::Url;

use super::*;
use crate::outbound::BodyPlace;

fn response(kind: &'static str, body: &[u8]) -> Response {
    let mut headers = HeaderMap::new();
    if !kind.is_empty() {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    }
    Response {
        status: StatusCode::OK,
        headers,
        url: Url::parse("https://service.example/").unwrap(),
        body: body.to_vec(),
        is_whole: true,
        requests: 1,
        place: BodyPlace::default(),
    }
}

fn shown(pointer: Option<&str>) -> Shown {
    Shown { pointer: pointer.map(str::to_owned), max_bytes: USUAL }
}

fn utf_16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn characters_are_what_they_are_said_to_be() {
    let (json, marked) = ("{\"a\":\"ä\"}", "\u{feff}{\"a\":\"ä\"}");
    let table: &[(&str, &[u8], &str)] = &[
        ("text/plain", "ä".as_bytes(), "ä"),
        ("text/plain", b"\xe4", "ä"),
        ("text/plain; charset=iso-8859-1", b"\xe4", "ä"),
        ("text/plain; charset=nonsense", b"\xe4", "ä"),
        ("text/plain; charset=utf-8", b"a\xe4", "a\u{fffd}"),
        ("text/csv; Charset=\"windows-1251\"", b"\xff", "я"),
        ("text/plain; charset=utf-16", &utf_16("ä"), "ä"),
        ("text/plain", &utf_16("\u{feff}ä"), "ä"),
        (
            "application/xml",
            b"<?xml encoding='windows-1251'?>\xff",
            "<?xml encoding='windows-1251'?>я",
        ),
        ("application/x-unknown; charset=iso-8859-1", b"\xe4", "ä"),
        ("application/json", json.as_bytes(), json),
        ("application/json", marked.as_bytes(), json),
        ("application/json; charset=iso-8859-1", b"{\"a\": \"\xe4\"}", json),
        ("application/json; charset=utf-16", &utf_16(json), json),
        ("application/json", &utf_16(marked), json),
        ("application/json", b"\"\xff\"", "\"\u{fffd}\""),
        ("application/json; charset=iso-8859-1", b"no JSON: \xe4", "no JSON: ä"),
        ("", marked.as_bytes(), json),
    ];
    for (kind, body, expected) in table {
        assert_eq!(
            shown(None).of(&response(kind, body), Effect::Read).as_deref(),
            Ok(*expected),
            "{kind} {body:?}"
        );
    }
    for (kind, body) in [
        ("application/json", marked.as_bytes()),
        ("text/plain", marked.as_bytes()),
        ("application/json; charset=iso-8859-1", b"{\"a\": \"\xe4\"}"),
        ("application/json; charset=utf-16", &utf_16(json)),
    ] {
        assert_eq!(
            shown(Some("/a")).of(&response(kind, body), Effect::Read).as_deref(),
            Ok("ä"),
            "{kind}"
        );
    }
    for (kind, body) in [
        ("text/plain", &b"a\0b"[..]),
        ("application/octet-stream", b"\xe4"),
        ("image/svg+xml", b"<svg/>"),
        ("audio/mpeg", b"\xff\xfe"),
        ("", b"\xff"),
    ] {
        let why = shown(None).of(&response(kind, body), Effect::Read).unwrap_err();
        assert!(why.starts_with("The answer is not text"), "{kind}: {why}");
    }
    let why = shown(Some("/a")).of(&response("text/plain", b"\0"), Effect::Read).unwrap_err();
    assert!(why.starts_with("The answer is not JSON"), "{why}");
    let refused = response("text/plain; charset=iso-8859-1", b"zu gro\xdf");
    let refused = Response { status: StatusCode::BAD_REQUEST, ..refused };
    assert!(shown(None).of(&refused, Effect::Read).unwrap_err().ends_with("It says: zu gro\u{df}"));
}

#[test]
fn no_secret_is_cut_in_two() {
    secrets::remember(["a-secret-of-the-service".to_owned()]);
    let body = format!("{}a-secret-of-the-service, and more", "x".repeat(USUAL - 5));
    let told = shown(None).of(&response("text/plain", body.as_bytes()), Effect::Read).unwrap();
    assert!(told.contains("left out") && !told.contains("a-sec"));
}
