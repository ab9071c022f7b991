//! The router without a server, on a store that is unavailable: authentication and rejections.

use crate::message::tool_schema::ToolSchema;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode};
use axum::routing::get;
use serde_json::{Value, json};
use tower::ServiceExt;

use uuid::Uuid;

use super::*;
use crate::agents::Catalogue;
use crate::runtime::{self, Runtime};
use crate::store::{RateLimit, Store, open};
use crate::tools::ToolInfo;

/// A store that cannot be reached: its file is closed.
async fn away() -> Arc<Store> {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("away.db").display());
    let store = open(&url, 1, false).await.unwrap();
    store.close().await;
    store
}

fn settings() -> HttpSettings {
    HttpSettings {
        body_limit: 1024,
        body_timeout: Duration::from_secs(30),
        request_timeout: Duration::from_millis(10),
        expose: Exposed { metrics: true, docs: true, console: true },
        cors: CorsOrigins::default(),
        requests_per_key: 100,
        console_session: Duration::from_hours(1),
        rate_limit: RateLimit { per_minute: 60, burst: 10 },
    }
}

async fn state(auth: Auth) -> HttpState {
    let tool = ToolInfo {
        name: "mcp:time/now".into(),
        description: String::new(),
        input_schema: ToolSchema::from(json!({"type": "object"})),
        effect: crate::run::Effect::Read,
        varies: false,
        concurrent: true,
        source: "mcp:time".into(),
        destructive: false,
        defaults: crate::tools::Defaults::default(),
    };
    let store = away().await;
    let catalogue = Arc::new(Catalogue::load(
        std::path::Path::new("/nonexistent"),
        Arc::default(),
        Box::new(|_| Ok(())),
    ));
    let registry = Arc::new(crate::tools::registry::Registry::builtin());
    let settings = runtime::Settings {
        max_concurrent_runs: 1,
        run_limits: crate::store::RunLimits::default(),
        max_queued_runs: 1,
        queue_workers: 1,
        lease: Duration::from_secs(15),
        store_patience: Duration::ZERO,
        max_crashes: 3,
        retention: None,
        audit_retention: None,
        audit_key: None,
        approver: runtime::Approver::Any,
        rate_limit: crate::store::RateLimit { per_minute: 300, burst: 60 },
        webhooks: None,
        workspaces: runtime::WorkspaceSettings {
            root: std::env::temp_dir(),
            sharing: runtime::Sharing::None,
            quota: std::sync::Arc::default(),
            quarantine_retention: None,
        },
        sample_ratio: 0.0,
    };
    let router = Arc::new(crate::providers::router::Router::default());
    HttpState {
        runtime: Runtime::new(
            Arc::clone(&store),
            Arc::clone(&catalogue),
            router,
            registry,
            runtime::ChildIds::known(),
            settings,
            Arc::new(|_| ()),
        ),
        store,
        catalogue,
        unplayable: Arc::new(Vec::new),
        tools: Arc::new(move || {
            let info = tool.clone();
            vec![crate::tools::ToolNow {
                info,
                runs_programs: false,
                may_lead_out: true,
                unavailable: None,
            }]
        }),
        servers: Arc::new(Vec::new),
        sandbox: None,
        auth,
        tokens: Arc::new(TokenSigner::known()),
        metrics: MetricsSink {
            on_response: Box::new(|_, _, _, _| ()),
            scrape: Box::new(|gauges| format!("{gauges:?}")),
        },
    }
}

async fn ask(router: Router, request: Request<Body>) -> (StatusCode, HeaderMap, Value) {
    let mut request = request;
    request.headers_mut().entry("host").or_insert(HeaderValue::from_static("localhost"));
    let (parts, body) = router.oneshot(request).await.unwrap().into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    (parts.status, parts.headers, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn request(method: &str, path: &str, body: impl Into<Body>) -> Request<Body> {
    let request =
        Request::builder().method(method).uri(path).header("content-type", "application/json");
    request.body(body.into()).unwrap()
}

/// Status and code of a request by the local administrator.
async fn refusal(method: &str, path: &str, body: impl Into<Body>) -> (u16, String) {
    let (status, headers, body) =
        ask(router(state(Auth::None).await, settings()), request(method, path, body)).await;
    assert_eq!(headers["content-type"], "application/problem+json", "{method} {path}");
    assert_eq!(body["status"], status.as_u16());
    assert_eq!(body["instance"], path.split('?').next().unwrap());
    (status.as_u16(), body["code"].as_str().unwrap().to_owned())
}

/// Every secured operation of the document, as a request line.
fn secured() -> Vec<(String, String)> {
    let api = openapi();
    let mut operations = Vec::new();
    for (path, item) in api["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if operation["security"] != json!([]) {
                let path = path.replace("{id}", &Uuid::nil().to_string()).replace("{name}", "x");
                operations.push((method.to_uppercase(), path));
            }
        }
    }
    operations
}

#[tokio::test]
async fn secured_routes_reject_unauthenticated_requests() {
    assert!(secured().len() >= 16);
    let app = router(state(Auth::ApiKeys).await, settings());
    for (method, path) in secured() {
        for prefix in ["", "/v1"] {
            for token in [None, Some("Bearer nonsense"), Some("Basic dTpw"), Some("Bearer")] {
                let mut request = request(&method, &format!("{prefix}{path}"), "");
                if let Some(token) = token {
                    request.headers_mut().insert("authorization", token.parse().unwrap());
                }
                let (status, headers, body) = ask(app.clone(), request).await;
                let code = if method == "HEAD" { json!(null) } else { json!("UNAUTHENTICATED") };
                assert_eq!((status.as_u16(), &body["code"]), (401, &code), "{method} {path}");
                assert_eq!(headers["www-authenticate"], "Bearer");
            }
        }
    }
}

#[tokio::test]
async fn an_unavailable_store_is_answered_503_with_retry_after() {
    let app = router(state(Auth::ApiKeys).await, settings());
    for (method, path) in secured() {
        let mut request = request(&method, &path, "");
        request
            .headers_mut()
            .insert("authorization", "bearer tl_abc_0123456789abcdef".parse().unwrap());
        let (status, headers, body) = ask(app.clone(), request).await;
        let code = if method == "HEAD" { json!(null) } else { json!("STORE_UNAVAILABLE") };
        assert_eq!((status.as_u16(), &body["code"]), (503, &code), "{method} {path}");
        assert_eq!(headers["retry-after"], "2");
    }
    let (status, _, body) =
        ask(router(state(Auth::None).await, settings()), request("GET", "/v1/readyz", "")).await;
    assert_eq!((status.as_u16(), &body["checks"]["store"]), (503, &json!("unavailable")));
    let (status, ..) =
        ask(router(state(Auth::None).await, settings()), request("GET", "/healthz", "")).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn unknown_paths_and_ids_are_answered_404() {
    let run = Uuid::nil();
    let paths = [
        "/",
        "/v1",
        "/v2/runs",
        "/v1/runs/",
        "/v1/runs/abc",
        "/v1/agents/nobody",
        "/v1/agents/%ff",
    ];
    for path in paths {
        assert_eq!(refusal("GET", path, "").await, (404, "NOT_FOUND".into()), "{path}");
    }
    assert_eq!(refusal("DELETE", "/v1/keys/a%00b", "").await.0, 404);
    assert_eq!(refusal("POST", &format!("/v1/runs/{run}0/cancel"), "").await.0, 404);
}

#[tokio::test]
async fn an_unsupported_method_is_answered_405_with_allow() {
    for (method, path, allowed) in [
        ("PUT", "/v1/runs", "GET,HEAD"),
        ("GET", "/v1/agents/a/invoke", "POST"),
        ("PATCH", "/v1/keys", "POST,GET,HEAD"),
        ("OPTIONS", "/keys/abc", "DELETE"),
    ] {
        let (status, headers, body) =
            ask(router(state(Auth::None).await, settings()), request(method, path, "")).await;
        assert_eq!(
            (status.as_u16(), &body["code"]),
            (405, &json!("METHOD_NOT_ALLOWED")),
            "{method} {path}"
        );
        assert_eq!(headers["allow"], allowed, "{method} {path}");
    }
}

#[tokio::test]
async fn invalid_bodies_are_rejected_before_a_run_is_started() {
    let path = "/v1/agents/a/invoke-iterative";
    for (body, expected) in [
        ("{", (400, "MALFORMED_JSON")),
        ("[]", (422, "INVALID_INPUTS")),
        (r#"{"inputs": {"a": "\u0000"}}"#, (400, "MALFORMED_JSON")),
        (r#"{"inputs": 1}"#, (422, "INVALID_INPUTS")),
        (r#"{"inpts": {}}"#, (422, "INVALID_OVERRIDE")),
        ("{}", (404, "NOT_FOUND")),
        ("", (404, "NOT_FOUND")),
    ] {
        let (status, code) = refusal("POST", path, body).await;
        assert_eq!((status, code.as_str()), expected, "{body}");
    }
    assert_eq!(refusal("POST", path, " ".repeat(1025)).await, (413, "PAYLOAD_TOO_LARGE".into()));
    assert_eq!(refusal("POST", "/v1/keys", "{}").await, (422, "INVALID_INPUTS".into()));
    let mut request = request("POST", path, "{}");
    request.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    let (status, _, body) = ask(router(state(Auth::None).await, settings()), request).await;
    assert_eq!((status.as_u16(), &body["code"]), (415, &json!("UNSUPPORTED_MEDIA_TYPE")));
}

#[tokio::test]
async fn invalid_parameters_and_accept_headers_are_rejected() {
    for path in [
        "/v1/runs?colour=red",
        "/v1/runs?limit=0",
        "/v1/runs?cursor=x",
        "/v1/tools?a=1",
        "/v1/agents/a?b=1",
    ] {
        assert_eq!(refusal("GET", path, "").await, (400, "INVALID_PARAMETER".into()), "{path}");
    }
    for (method, path) in [
        ("POST", "/v1/agents/a/invoke"),
        ("GET", "/v1/runs/00000000-0000-0000-0000-000000000000/events"),
    ] {
        let mut request = request(method, path, "");
        request.headers_mut().insert("accept", "text/html".parse().unwrap());
        let (status, _, body) = ask(router(state(Auth::None).await, settings()), request).await;
        assert_eq!((status.as_u16(), &body["code"]), (406, &json!("NOT_ACCEPTABLE")), "{path}");
    }
}

#[tokio::test]
async fn a_tool_is_found_by_its_encoded_name() {
    let (status, _, tool) = ask(
        router(state(Auth::None).await, settings()),
        request("GET", "/v1/tools/mcp%3Atime%2Fnow", ""),
    )
    .await;
    assert_eq!(
        (status, &tool["name"], &tool["allowed"]),
        (StatusCode::OK, &json!("mcp:time/now"), &json!(true))
    );
}

#[tokio::test]
async fn a_safe_request_id_is_kept_and_any_other_replaced() {
    for (given, kept) in
        [(Some("abc-1.2_3:4"), true), (Some("a b"), false), (Some(""), false), (None, false)]
    {
        let mut request = request("GET", "/nowhere", "");
        if let Some(id) = given {
            request.headers_mut().insert("x-request-id", id.parse().unwrap());
        }
        let (_, headers, body) = ask(router(state(Auth::None).await, settings()), request).await;
        let id = headers["x-request-id"].to_str().unwrap();
        assert_eq!(Some(id) == given, kept, "{given:?}");
        assert!(!id.is_empty());
        assert_eq!(body["request_id"], id);
    }
}

async fn broken() -> &'static str {
    panic!("a secret path")
}

#[tokio::test]
async fn a_panic_is_answered_500_and_a_timeout_504() {
    let state = state(Auth::None).await;
    let keys = key_cache::KeyCache::new(state.store.wakeups());
    let shared = Shared {
        state,
        settings: settings(),
        keys,
        open: Arc::default(),
        ended: EndedSessions::default(),
        store_check: StoreCheck::default(),
    };
    let app: App = Arc::new(shared);
    let routes = Router::new()
        .route("/panic", get(broken))
        .route("/wait", get(std::future::pending::<&'static str>))
        .layer(middleware::from_fn_with_state(app, layer::edge));
    let (status, _, body) = ask(routes.clone(), request("GET", "/panic", "")).await;
    assert_eq!((status.as_u16(), &body["code"]), (500, &json!("INTERNAL")));
    assert!(!body.to_string().contains("secret"), "{body}");
    let (status, _, body) = ask(routes, request("GET", "/wait", "")).await;
    assert_eq!((status.as_u16(), &body["code"]), (504, &json!("TIMEOUT")));
}
