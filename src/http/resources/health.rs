//! Whether the process lives, and whether it should get requests.
//!
//! Open to everybody, so answers say what is wrong and not why; the log has the cause.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::agents::DefinitionProblem;
use crate::http::document::vocabulary::ReadinessStatus;
use crate::http::state::App;

/// How long the store may take to answer.
const STORE_PATIENCE: Duration = Duration::from_secs(2);

/// The process lives.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Liveness {
    /// Always `ok`.
    #[schema(example = "ok")]
    status: &'static str,
}

/// Whether requests should be sent here.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    /// Whether they should.
    #[schema(value_type = ReadinessStatus, example = "ready")]
    status: &'static str,
    /// What was looked at.
    checks: Checks,
    /// Definition files that are broken; their agents keep their last good version.
    definitions: Vec<DefinitionProblem>,
}

/// Each is `ok`, or what is wrong.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ReadinessChecks)]
pub(crate) struct Checks {
    /// `ok` or `unavailable`; its migrations included.
    #[schema(example = "ok")]
    store: &'static str,
    /// `ok` or `draining`.
    #[schema(example = "ok")]
    serving: &'static str,
}

/// Tell whether the process lives
#[utoipa::path(
    get, path = "/healthz", operation_id = "check_health", tag = "health",
    responses((status = 200, description = "It does.", body = Liveness)),
)]
pub(crate) async fn healthz() -> Json<Liveness> {
    Json(Liveness { status: "ok" })
}

/// Tell whether requests should be sent here
#[utoipa::path(
    get, path = "/readyz", operation_id = "check_readiness", tag = "health",
    responses(
        (status = 200, description = "They should.", body = Readiness),
        (status = 503, description = "They should not: the store is away, or the service is stopping.", body = Readiness),
    ),
)]
pub(crate) async fn readyz(State(app): State<App>) -> (StatusCode, Json<Readiness>) {
    let store = match tokio::time::timeout(STORE_PATIENCE, app.store.ping()).await {
        Ok(Ok(())) => "ok",
        Ok(Err(error)) => {
            tracing::warn!(%error, "not ready");
            "unavailable"
        }
        Err(_) => "unavailable",
    };
    let serving = if app.runtime.is_draining() { "draining" } else { "ok" };
    let checks = Checks { store, serving };
    let (code, status) = match (checks.store, checks.serving) {
        ("ok", "ok") => (StatusCode::OK, "ready"),
        ("ok", serving) => (StatusCode::SERVICE_UNAVAILABLE, serving),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    (code, Json(Readiness { status, checks, definitions: app.catalogue.problems() }))
}
