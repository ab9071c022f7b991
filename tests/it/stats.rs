//! What callers are told about their runs in sums.

use serde_json::{Value, json};

use crate::service::{Db, Setup, on_both_stores};

on_both_stores! {
    sums_are_told_by_tool_and_by_model,
    the_usage_of_a_deleted_session_stays,
}

const AGENT: &str = "
model: scripted/reader
tools: [file_ops]
enable_double_confirmation: false
";

const STEPS: &str = "
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: list, path: .}}
      - {tool: file_ops, arguments: {operation: read, path: missing.txt}}
      - {tool: file_ops, arguments: {operation: write, path: a.txt, content: x}}
    usage: {input_tokens: 100, output_tokens: 10}
  - {text: done, usage: {input_tokens: 200, output_tokens: 20, cached_input_tokens: 50}}
";

async fn sums_are_told_by_tool_and_by_model(db: Db) {
    let setup = Setup::new().agent("reader", AGENT).agent("other", AGENT).scenario("reader", STEPS);
    let mut service = setup.start(db).await;
    assert_eq!(service.get("/v1/stats/tools").await.body, json!({"data": [], "next_cursor": null}));
    let before = chrono::Utc::now().to_rfc3339();
    for agent in ["reader", "reader", "other"] {
        service.run(agent, &json!({})).await;
    }
    let tools = service.get("/v1/stats/tools").await.body;
    assert_eq!(tools["next_cursor"], Value::Null);
    let row = &tools["data"][0];
    assert_eq!(
        (&row["tool"], &row["calls"], &row["errors"], &row["blocked"]),
        (&json!("file_ops"), &json!(9), &json!(3), &json!(3)),
        "{tools:#}"
    );
    for quantile in ["p50_ms", "p95_ms", "p99_ms"] {
        assert!(row[quantile].is_u64(), "{row}");
    }
    let usage = service.get("/v1/stats/usage").await.body;
    let rows = usage["data"].as_array().unwrap();
    let agents: Vec<&Value> = rows.iter().map(|row| &row["agent"]).collect();
    assert_eq!(agents, ["other", "reader"], "{usage:#}");
    let reader = &rows[1];
    assert_eq!((&reader["model"], &reader["runs"]), (&json!("scripted/reader"), &json!(2)));
    let tokens = ["input_tokens", "output_tokens", "cached_input_tokens", "total_tokens"]
        .map(|name| &reader[name]);
    assert_eq!(tokens, [&json!(600), &json!(60), &json!(100), &json!(660)]);
    assert_eq!(reader["day"].as_str().unwrap().len(), 10);
    let encoded = before.replace('+', "%2B");
    for (query, calls) in [
        ("agent=other".to_owned(), json!(3)),
        ("agent=nobody".to_owned(), Value::Null),
        (format!("since={encoded}"), json!(9)),
        (format!("until={encoded}"), Value::Null),
    ] {
        let tools = service.get(&format!("/v1/stats/tools?{query}")).await.body;
        assert_eq!(tools["data"][0]["calls"], calls, "{query}: {tools:#}");
        let usage = service.get(&format!("/v1/stats/usage?{query}")).await.body;
        assert_eq!(usage["data"][0].is_null(), calls.is_null(), "{query}: {usage:#}");
    }
    let first = service.get("/v1/stats/usage?limit=1").await.body;
    let second = service
        .get(&format!("/v1/stats/usage?limit=1&cursor={}", first["next_cursor"].as_str().unwrap()))
        .await;
    assert_eq!(
        (&first["data"][0]["agent"], &second.body["data"][0]["agent"]),
        (&json!("other"), &json!("reader"))
    );
    assert_eq!(second.body["next_cursor"], Value::Null);
    for query in ["since=yesterday", "until=1", "colour=red", "tool=file_ops"] {
        let refused = service.get(&format!("/v1/stats/tools?{query}")).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (400, &json!("INVALID_PARAMETER")),
            "{query}"
        );
    }
    let key = service
        .post("/v1/keys", &json!({"name": "k", "tenant": "acme", "scopes": ["runs:read"]}))
        .await;
    service.key = key.body["key"].as_str().unwrap().to_owned();
    for path in ["/v1/stats/tools", "/v1/stats/usage"] {
        assert_eq!(service.get(path).await.body["data"], json!([]), "another tenant");
    }
}

async fn the_usage_of_a_deleted_session_stays(db: Db) {
    let setup = Setup::new().agent("reader", AGENT).scenario("reader", STEPS);
    let service = setup.start(db).await;
    for _ in 0..2 {
        let run = service.run("reader", &json!({"session_id": "s"})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }
    let before = service.get("/v1/stats/usage").await.body;
    assert_eq!(
        (&before["data"][0]["runs"], &before["data"][0]["input_tokens"]),
        (&json!(2), &json!(600))
    );
    // Whether replicas have moved it to sums meanwhile or not.
    tokio::time::sleep(std::time::Duration::from_secs(6)).await;
    assert_eq!(service.get("/v1/stats/usage").await.body, before);
    let deleted = service.delete("/v1/sessions/s").await;
    assert!(deleted.status.is_success(), "{:#}", deleted.body);
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]));
    assert_eq!(service.get("/v1/stats/usage").await.body, before);
}
