//! The HTTP API: one route table, one file a resource.
//!
//! A request passes [`edge`], is refused by an extractor ([`auth`], [`extract`]) or reaches a
//! handler of at most 25 lines, which commands [`Runtime`] or reads [`Store`], [`Catalogue`] or the
//! tools. Errors become HTTP in [`problem`] and nowhere else. The same registration yields the
//! routes and the OpenAPI document. Nothing is decided here about runs.

mod accept;
mod agents;
mod answers;
mod approvals;
mod assets;
mod audit;
mod auth;
mod console;
mod docs;
mod dry_run;
mod edge;
mod events;
mod extract;
mod health;
mod invocation;
mod invoke;
mod keys;
mod metrics;
mod openapi;
mod outgoing;
mod page;
mod problem;
mod rate_limit;
mod run_parts;
mod runs;
mod schemas;
mod server;
mod sessions;
mod stats;
mod stream;
mod terms;
mod tools;
mod vocabulary;

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::{Router, middleware};
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::problem::{Code, Problem};
use crate::agents::Catalogue;
use crate::runtime::Runtime;
use crate::store::{RateLimit, Store};
use crate::tools::ToolInfo;

pub use self::auth::Auth;
pub use self::metrics::Meters;
pub use self::server::{Limits, serve};

/// What the handlers work with.
pub struct HttpState {
    /// Takes commands.
    pub runtime: Runtime,
    /// Answers reads.
    pub store: Arc<dyn Store>,
    /// The agents.
    pub catalogue: Arc<Catalogue>,
    /// The tools, by name.
    pub tools: Arc<Vec<ToolInfo>>,
    /// How callers prove who they are.
    pub auth: Auth,
    /// Where answers are counted and metrics come from.
    pub meters: Meters,
}

/// What the operator sets.
#[derive(Debug, Clone, Copy)]
pub struct HttpSettings {
    /// The largest body that is read, in bytes.
    pub body_limit: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// How long a caller may wait for an answer. A run that takes longer goes on.
    pub request_timeout: Duration,
    /// Which pages for operators are served.
    pub expose: Exposed,
    /// How often a key may invoke that has no limits of its own.
    pub rate_limit: RateLimit,
}

/// The pages that are served to everybody, or else to nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exposed {
    /// `/metrics`
    pub metrics: bool,
    /// `/docs`
    pub docs: bool,
    /// `/console`
    pub console: bool,
}

/// The state of the routes.
type App = Arc<Shared>;

struct Shared {
    state: HttpState,
    settings: HttpSettings,
    keys: auth::KeyRing,
}

impl Deref for Shared {
    type Target = HttpState;

    fn deref(&self) -> &HttpState {
        &self.state
    }
}

/// Every route, under `/v1` and without a prefix.
pub fn router(state: HttpState, settings: HttpSettings) -> Router {
    let app: App = Arc::new(Shared { state, settings, keys: auth::KeyRing::new() });
    let (routes, _) = table().split_for_parts();
    let routes = routes.method_not_allowed_fallback(wrong_method);
    Router::new()
        .nest("/v1", routes.clone())
        .merge(routes)
        .merge(pages(settings.expose).method_not_allowed_fallback(wrong_method))
        .fallback(unknown_path)
        .layer(middleware::from_fn_with_state(app.clone(), edge::edge))
        .with_state(app)
}

/// The OpenAPI 3.1 document of exactly these routes.
pub fn openapi() -> Value {
    openapi::document(table().into_openapi())
}

/// The document as indented text, as it is served and committed.
pub fn openapi_json() -> String {
    serde_json::to_string_pretty(&openapi()).unwrap_or_default()
}

/// The route table.
fn table() -> OpenApiRouter<App> {
    OpenApiRouter::default()
        .routes(routes!(agents::list_agents))
        .routes(routes!(agents::get_agent))
        .routes(routes!(invoke::invoke_agent))
        .routes(routes!(invoke::invoke_agent_iterative))
        .routes(routes!(runs::list_runs))
        .routes(routes!(runs::get_run))
        .routes(routes!(runs::wait_for_run))
        .routes(routes!(runs::cancel_run))
        .routes(routes!(approvals::list_approvals))
        .routes(routes!(approvals::approve_tool_call))
        .routes(routes!(approvals::deny_tool_call))
        .routes(routes!(approvals::resolve_tool_call))
        .routes(routes!(approvals::give_tool_result))
        .routes(routes!(run_parts::list_iterations))
        .routes(routes!(run_parts::list_tool_calls))
        .routes(routes!(run_parts::list_messages))
        .routes(routes!(events::list_events))
        .routes(routes!(sessions::get_session))
        .routes(routes!(sessions::delete_session))
        .routes(routes!(stats::get_tool_stats))
        .routes(routes!(stats::get_usage_stats))
        .routes(routes!(tools::list_tools))
        .routes(routes!(tools::get_tool))
        .routes(routes!(keys::create_key))
        .routes(routes!(keys::list_keys))
        .routes(routes!(keys::revoke_key))
        .routes(routes!(audit::list_audit))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::openapi_json))
}

/// What people look at; it is no part of the API.
fn pages(expose: Exposed) -> Router<App> {
    let docs = if expose.docs { docs::routes() } else { Router::new() };
    let console = if expose.console { console::routes() } else { Router::new() };
    docs.merge(console)
}

async fn unknown_path() -> Problem {
    Problem::not_found("path")
}

async fn wrong_method() -> Problem {
    Problem::new(
        Code::MethodNotAllowed,
        "This path does not take that method; `Allow` lists those it takes.",
    )
}

#[cfg(test)]
mod router_tests;
