//! What is read, and what is refused, of bodies, queries and headers.

use futures::stream;
use proptest::prelude::*;
use serde_json::json;
use utoipa::ToSchema;

use super::*;
use crate::run::Overrides;

fn headers(name: axum::http::HeaderName, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(name, value.parse().unwrap())])
}

proptest! {
    #[test]
    fn an_escaped_nul_is_detected_anywhere_and_nothing_else(key in ".*", value in ".*", nul in any::<bool>()) {
        let value = if nul { format!("{value}\0{key}") } else { value };
        let expected = key.contains('\0') || value.contains('\0');
        let body = serde_json::to_vec(&json!({ key: [value] })).unwrap();
        prop_assert_eq!(escapes_nul(&body), expected);
    }

    #[test]
    fn a_query_is_decoded_to_its_original_parameters(pairs in prop::collection::btree_map("[^\0]*", "[^\0]*", 0..5)) {
        let query = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(&pairs).finish();
        let mut params = Params::parse(&query).unwrap();
        for (name, value) in &pairs {
            prop_assert_eq!(params.text(name), Some(value.clone()));
        }
        prop_assert!(params.finish().is_ok());
    }

    #[test]
    fn arbitrary_queries_and_bodies_do_not_panic(text in ".*", bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = Params::parse(&text);
        let _ = object(&bytes);
    }
}

#[test]
fn an_escaped_backslash_before_u0000_is_not_a_nul() {
    assert!(!escapes_nul(br#"{"a": "\\u0000"}"#));
    assert!(escapes_nul(br#"{"a": "\\\u0000"}"#));
    assert!(!escapes_nul(br#"{"a": "\"#));
}

#[test]
fn a_body_that_is_not_a_json_object_is_rejected_with_its_position() {
    let deep = format!("{{\"a\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let bodies = [
        "nul",
        "null null",
        "{",
        "{\"a\": 1e999}",
        "{\"a\": \"\\ud800\"}",
        "{\"a\" 1}",
        "{} x",
        &deep,
    ];
    for body in bodies {
        let problem = format!("{:?}", object(body.as_bytes()).unwrap_err());
        assert!(problem.contains("MalformedJson"), "{body:.20}: {problem}");
    }
    for body in ["[]", "\"x\"", "7", "true"] {
        let problem = format!("{:?}", object(body.as_bytes()).unwrap_err());
        assert!(problem.contains("InvalidInputs"), "{body}: {problem}");
    }
    assert!(object(b"{\"a\": \"\xff\"}").is_err());
    assert_eq!(object(b" null\n").unwrap(), serde_json::Map::new(), "no body");
    let problem = format!("{:?}", object(b"{\n  \"a\": ?}").unwrap_err());
    assert!(problem.contains("line 2 column 8"), "{problem}");
}

#[test]
fn an_invalid_field_is_reported_with_its_pointer() {
    let read = |body: Value| fields::<Overrides>(body.as_object().unwrap().clone());
    let pointer = |body: Value| read(body).unwrap_err().pointer;
    assert_eq!(pointer(json!({"max_iterations": "many"})), "/max_iterations");
    assert_eq!(pointer(json!({"tools": ["a", 7]})), "/tools/1");
    assert_eq!(pointer(json!({"budget": {"max_tool_calls": -1}})), "/budget/max_tool_calls");
    assert_eq!(pointer(json!({"budget": {"max_a/b": 1}})), "/budget/max_a~1b");
    assert_eq!(pointer(json!({"colour": 1})), "/colour");
    assert_eq!(read(json!({"model": "a/b"})).unwrap().model.as_deref(), Some("a/b"));
}

#[test]
fn what_is_wrong_with_a_field_is_said_without_names_of_types() {
    #[derive(Debug, Deserialize, ToSchema)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only what is refused is looked at")]
    struct Outer {
        tool: String,
        inner: Option<Inner>,
        count: Option<u32>,
        #[schema(minimum = -9, maximum = 9)]
        rank: Option<i16>,
        choice: Option<Choice>,
        share: Option<f64>,
        id: Option<Uuid>,
        list: Option<Vec<Inner>>,
        map: Option<std::collections::BTreeMap<String, bool>>,
    }
    #[derive(Debug, Deserialize, ToSchema)]
    #[expect(dead_code, reason = "only what is refused is looked at")]
    struct Inner {
        url: String,
    }
    #[derive(Debug, Deserialize, ToSchema)]
    #[serde(rename_all = "snake_case")]
    #[expect(dead_code, reason = "only what is refused is looked at")]
    enum Choice {
        A,
        B,
        Tool(String),
    }
    for (field, value, pointer, message) in [
        ("inner", json!("x"), "/inner", "must be an object"),
        ("inner", json!({}), "/inner/url", "is required"),
        ("count", json!("many"), "/count", "must be a whole number of at least 0"),
        ("count", json!(-1), "/count", "must be a whole number of at least 0"),
        (
            "count",
            json!(4_294_967_296_u64),
            "/count",
            "must be a whole number of at most 4294967295",
        ),
        ("rank", json!(1.5), "/rank", "must be a whole number from -9 to 9"),
        ("choice", json!("c"), "/choice", "must be one of `a`, `b`, `tool`"),
        ("choice", json!({"tool": "x", "y": 1}), "/choice", "must be an object with one field"),
        ("share", json!([]), "/share", "must be a number"),
        ("id", json!(7), "/id", "must be a UUID"),
        ("id", json!("x, expected y"), "/id", "must be a UUID"),
        ("list", json!({}), "/list", "must be a list"),
        ("list", json!([{"url": "x"}, {"url": 1}]), "/list/1/url", "must be a string"),
        ("map", json!([]), "/map", "must be an object"),
        ("map", json!({"a/b": "x"}), "/map/a~1b", "must be a boolean"),
        ("tool", Value::Null, "/tool", "must be a string"),
    ] {
        let mut body = json!({"tool": "t"});
        body[field] = value;
        let wrong = fields::<Outer>(body.as_object().unwrap().clone()).unwrap_err();
        assert_eq!((&*wrong.pointer, &*wrong.message), (pointer, message), "{body}");
    }
    let wrong = fields::<Outer>(Map::new()).unwrap_err();
    assert_eq!((&*wrong.pointer, &*wrong.message), ("/tool", "is required"));
}

#[test]
fn a_repeated_or_undecodable_parameter_is_rejected() {
    for query in
        ["a=1&a=2", "a=%ff", "a=%00", "a=%", "a=%4", "a=%zz", "a=%+5", "%00=1", "a=1&%61=2"]
    {
        assert!(Params::parse(query).is_err(), "{query}");
    }
    let mut params = Params::parse("&a=x+y%2B&b&metadata.k=v&metadata.l=w&metadata.=z").unwrap();
    assert_eq!(params.text("a").as_deref(), Some("x y+"));
    assert_eq!(params.text("b").as_deref(), Some(""));
    assert_eq!(params.prefixed("metadata."), [("k".into(), "v".into()), ("l".into(), "w".into())]);
    assert!(params.finish().is_err(), "`metadata.` names no label");
}

#[test]
fn a_query_has_a_bounded_number_of_parameters() {
    let query = |count| (0..count).map(|n| format!("p{n}=1")).collect::<Vec<_>>().join("&");
    assert_eq!(Params::parse(&query(64)).unwrap().left.len(), 64);
    let refused = format!("{:?}", Params::parse(&query(65)).unwrap_err());
    assert!(refused.contains("more than 64 parameters"), "{refused}");
}

#[test]
fn times_are_rfc_3339_also_with_an_unencoded_plus() {
    for text in ["2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31T13:00:00%2B01:00"]
    {
        let time = Params::parse(&format!("t={text}")).unwrap().time("t").unwrap().unwrap();
        assert_eq!(time.to_rfc3339(), "2026-01-31T12:00:00+00:00", "{text}");
    }
    for (text, until) in [
        ("2026-06-30T23:59:60Z", "2026-07-01T00:00:00+00:00"),
        ("2026-06-30T23:59:60.5Z", "2026-07-01T00:00:00.500+00:00"),
        ("2026-01-31T12:00:00.000001Z", "2026-01-31T12:00:00.000001+00:00"),
        ("2026-01-31T12:00:00.000001001Z", "2026-01-31T12:00:00.000002+00:00"),
    ] {
        let bound = Params::parse(&format!("t={text}")).unwrap().bound("t").unwrap().unwrap();
        assert_eq!(bound.to_rfc3339(), until, "{text}");
    }
    let last = Params::parse("t=9999-12-31T23:59:59Z").unwrap().time("t").unwrap().unwrap();
    assert_eq!(last.to_rfc3339(), "9999-12-31T23:59:59+00:00");
    for text in [
        "yesterday",
        "2026-01-31",
        "1769860800",
        "",
        "9999-12-31T23:59:59-01:00",
        "9999-12-31T23:59:60Z",
        "0000-01-01T00:00:00+01:00",
    ] {
        assert!(Params::parse(&format!("t={text}")).unwrap().time("t").is_err(), "{text}");
    }
}

#[test]
fn json_is_recognised_by_its_media_type() {
    for kind in ["application/json", "Application/JSON; charset=utf-8"] {
        assert!(is_json(&headers(CONTENT_TYPE, kind)), "{kind}");
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"] {
        assert!(!is_json(&headers(CONTENT_TYPE, kind)), "{kind}");
    }
    assert!(!is_json(&HeaderMap::new()));
}

#[tokio::test]
async fn a_body_is_read_up_to_its_limit_in_any_framing() {
    let chunked = |chunks: &'static [&'static str]| {
        Body::from_stream(stream::iter(chunks.iter().map(|chunk| Ok::<_, std::io::Error>(*chunk))))
    };
    let read = async |body| read_body(body, 5, &mut BodyPlace::of("x")).await;
    assert_eq!(read(Body::from("12345")).await.unwrap(), "12345");
    assert_eq!(read(chunked(&["12", "34", "5"])).await.unwrap(), "12345");
    assert_eq!(read(Body::empty()).await.unwrap(), "");
    for body in [Body::from("123456"), chunked(&["12", "34", "56"]), chunked(&["123456"])] {
        let problem = format!("{:?}", read(body).await.unwrap_err());
        assert!(problem.contains("PayloadTooLarge"), "{problem}");
    }
}
