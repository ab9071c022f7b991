//! Liveness and readiness probes.
//!
//! Served without authentication, so responses say what is wrong but not why; the log has the cause.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::agents::DefinitionProblem;
use crate::http::document::vocabulary::ReadinessStatus;
use crate::http::state::App;
use crate::tools::mcp::ServerStatus;

/// Invalid definition files that are shown: the route needs no key.
const SHOWN: usize = 20;
/// Bytes that are shown of what is wrong with one.
const MAX_ERROR: usize = 500;

/// Liveness of the process.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Liveness {
    /// Always `ok`.
    #[schema(example = "ok")]
    status: &'static str,
}

/// Readiness of the process to serve requests.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    /// `ready`, or the reason why no requests should be sent here.
    #[schema(value_type = ReadinessStatus, example = "ready")]
    status: &'static str,
    /// The individual checks.
    checks: Checks,
    /// Invalid definition files, 20 at most; their agents keep the last valid version.
    definitions: Vec<DefinitionProblem>,
    /// How many more there are; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    more_definitions: Option<usize>,
    /// MCP servers whose tools are not available; the service is ready nevertheless.
    mcp_servers: Vec<UnavailableServer>,
}

/// An MCP server that is not available.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UnavailableServer {
    /// Its name in the configuration.
    #[schema(example = "time")]
    server: String,
    /// Why.
    #[schema(example = "The MCP server time is not available: it has ended.")]
    error: String,
}

/// The individual readiness checks.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ReadinessChecks)]
pub(crate) struct Checks {
    /// `ok`, or `unavailable` if the store or its schema is.
    #[schema(example = "ok")]
    store: &'static str,
    /// `ok`, or `unavailable` if files cannot be written.
    #[schema(example = "ok")]
    workspace: &'static str,
    /// `ok`, or `draining` during a graceful shutdown.
    #[schema(example = "ok")]
    serving: &'static str,
}

/// Check liveness
#[utoipa::path(
    get, path = "/healthz", operation_id = "check_health", tag = "health",
    responses((status = 200, description = "The process is running.", body = Liveness)),
)]
pub(crate) async fn healthz() -> Json<Liveness> {
    Json(Liveness { status: "ok" })
}

/// Check readiness
#[utoipa::path(
    get, path = "/readyz", operation_id = "check_readiness", tag = "health",
    responses(
        (status = 200, description = "Requests can be served.", body = Readiness),
        (status = 503, description = "The store or the workspace is unavailable, or the service is shutting down.", body = Readiness),
    ),
)]
pub(crate) async fn readyz(State(app): State<App>) -> (StatusCode, Json<Readiness>) {
    let look = async {
        // Where commits fail, answers to questions say little.
        let looked = if app.runtime.is_storing() {
            app.store.ping().await
        } else {
            app.store.check_writable().await
        };
        looked.inspect_err(|error| tracing::warn!(%error, "not ready")).is_ok()
    };
    let store = if app.store_check.answer(look).await { "ok" } else { "unavailable" };
    let serving = if app.runtime.is_draining() { "draining" } else { "ok" };
    let workspace = if app.runtime.has_workspace() { "ok" } else { "unavailable" };
    let checks = Checks { store, workspace, serving };
    let (code, status) = match (checks.store, checks.workspace, checks.serving) {
        ("ok", "ok", "ok") => (StatusCode::OK, "ready"),
        ("ok", "ok", serving) => (StatusCode::SERVICE_UNAVAILABLE, serving),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    let unplayable = Arc::clone(&app.unplayable);
    let unplayable = tokio::task::spawn_blocking(move || unplayable()).await.unwrap_or_default();
    let mut definitions = app.catalogue.problems();
    definitions.extend(unplayable);
    let more_definitions = definitions.len().checked_sub(SHOWN).filter(|more| *more > 0);
    definitions.truncate(SHOWN);
    for problem in &mut definitions {
        problem.error = unquoted(&problem.error, Names::Shown);
        problem.error.truncate(problem.error.floor_char_boundary(MAX_ERROR));
    }
    let unavailable = |ServerStatus { name, fault, .. }: ServerStatus| {
        Some(UnavailableServer { server: name, error: unquoted(&fault?, Names::Hidden) })
    };
    let mcp_servers = (app.servers)().into_iter().filter_map(unavailable).collect();
    (code, Json(Readiness { status, checks, definitions, more_definitions, mcp_servers }))
}

/// Whether the names that a message of a parser expects are shown: they are the service's own. A
/// message from elsewhere may call anything so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    Shown,
    Hidden,
}

/// What comes before a name that is expected, and between two of them.
const BEFORE_NAMES: [&str; 3] = [", expected one of ", ", expected ", " (did you mean "];
const BETWEEN_NAMES: [&str; 2] = [", ", " or "];

/// A message without what it quotes: this route needs no key, and a value in the wrong place may be
/// a secret. The log and `toolloop check` have the whole message.
fn unquoted(message: &str, names: Names) -> String {
    let mut shown = String::with_capacity(message.len());
    let mut is_after_name = false;
    let mut rest = message;
    while let Some(start) = rest.find(['"', '`']) {
        let (before, quoted) = rest.split_at(start);
        let quote = if quoted.starts_with('"') { '"' } else { '`' };
        let mut escaped = false;
        let end = quoted.char_indices().skip(1).find(|(_, c)| {
            let ends = *c == quote && !escaped;
            escaped = *c == '\\' && !escaped;
            ends
        });
        shown.push_str(before);
        let inner = end.map_or("", |(end, _)| &quoted[1..end]);
        let is_name = quote == '`'
            && inner.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
            && (BEFORE_NAMES.iter().any(|it| before.ends_with(it))
                || (is_after_name && BETWEEN_NAMES.contains(&before)));
        is_after_name = is_name && names == Names::Shown && !inner.is_empty();
        let inner = if is_after_name { inner } else { "…" };
        shown.push(quote);
        shown.push_str(inner);
        shown.push(quote);
        rest = end.map_or("", |(end, _)| &quoted[end + 1..]);
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::{Names, unquoted};

    #[test]
    fn what_is_quoted_is_not_shown() {
        for (message, shown) in [
            ("model: nothing quoted", "model: nothing quoted"),
            ("line 3: model: \"sk-1\" is not `provider/model`", "line 3: model: \"…\" is not `…`"),
            (r#""a \" b" and "c\\" is"#, r#""…" and "…" is"#),
            ("\"never closed `é", "\"…\""),
            ("`ä\"b` c", "`…` c"),
        ] {
            for names in [Names::Shown, Names::Hidden] {
                assert_eq!(unquoted(message, names), shown);
            }
        }
    }

    #[test]
    fn names_that_are_expected_are_shown() {
        for (message, shown) in [
            (
                "x: unknown key `x`, expected one of `a_b`, `c2`, `d`",
                "x: unknown key `…`, expected one of `a_b`, `c2`, `d`",
            ),
            (
                "unknown key `x`, expected `a` or `b`; `c`",
                "unknown key `…`, expected `a` or `b`; `…`",
            ),
            ("unknown key `x` (did you mean `a`?)", "unknown key `…` (did you mean `a`?)"),
            // Only the names of a list, and only such as the service has.
            ("expected `a`", "expected `…`"),
            (", expected `sk-1`, `a`", ", expected `…`, `…`"),
            (", expected ``, `a`", ", expected `…`, `…`"),
            ("\"is, expected \" `a`", "\"…\" `…`"),
            (", expected \"a\"", ", expected \"…\""),
            (", expected `a` and `b`", ", expected `a` and `…`"),
        ] {
            assert_eq!(unquoted(message, Names::Shown), shown);
        }
        assert_eq!(unquoted("x, expected `a`", Names::Hidden), "x, expected `…`");
    }
}
