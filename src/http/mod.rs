//! The HTTP API: one route table, one file per resource.
//!
//! A request passes the middleware in [`edge`], is rejected by an extractor or reaches a handler of
//! at most 25 lines, which sends a command to the runtime or reads the store, the catalogue or the
//! tools. Errors become HTTP only in [`edge::problem`]. The same registration yields the routes and
//! the OpenAPI document. Nothing about the course of a run is decided here.

mod console;
mod document;
mod edge;
mod resources;
mod state;

use std::sync::Arc;

use axum::{Router, middleware};
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::document::{docs, openapi};
use self::edge::console_cookie::EndedSessions;
use self::edge::problem::{Code, Problem};
use self::edge::{front, key_cache, layer, metrics};
use self::resources::{
    agents, approvals, audit, audit_stretches, changes, events, files, health, invoke,
    judged_calls, keys, memory, policy, run_parts, runs, session_messages, sessions, stats,
    subjects, tokens, tools, webhooks,
};
use self::state::{App, Shared};

pub use self::edge::cors::CorsOrigins;
pub use self::edge::key_cache::Auth;
pub use self::edge::metrics_sink::{Gauges, MetricsSink};
pub use self::edge::server::{Limits, affordable_connections, serve};
pub use self::edge::token_signer::TokenSigner;
pub use self::state::{Exposed, HttpSettings, HttpState};

/// All routes, each under `/v1` and without a prefix.
pub fn router(state: HttpState, settings: HttpSettings) -> Router {
    let expose = settings.expose;
    let keys = key_cache::KeyCache::new(state.store.wakeups());
    let app: App = Arc::new(Shared {
        state,
        settings,
        keys,
        open: Arc::default(),
        ended: EndedSessions::default(),
    });
    let (routes, _) = table().split_for_parts();
    let routes = routes.merge(pages(expose)).method_not_allowed_fallback(wrong_method);
    let door = if expose.console { front::routes() } else { Router::new() };
    Router::new()
        .nest("/v1", routes.clone())
        .merge(routes)
        .merge(door.method_not_allowed_fallback(wrong_method))
        .fallback(unknown_path)
        .layer(middleware::from_fn_with_state(app.clone(), layer::edge))
        .with_state(app)
}

/// The OpenAPI 3.1 document of exactly these routes.
pub fn openapi() -> Value {
    openapi::document(table().into_openapi())
}

/// The OpenAPI document as indented JSON, as it is served and committed.
pub fn openapi_json() -> String {
    serde_json::to_string_pretty(&openapi()).unwrap_or_default()
}

fn table() -> OpenApiRouter<App> {
    OpenApiRouter::default()
        .routes(routes!(agents::list_agents))
        .routes(routes!(agents::get_agent))
        .routes(routes!(policy::replay_policy))
        .routes(routes!(judged_calls::judge_call))
        .routes(routes!(invoke::invoke_agent))
        .routes(routes!(invoke::invoke_agent_iterative))
        .routes(routes!(invoke::stream_agent))
        .routes(routes!(invoke::dry_run_agent))
        .routes(routes!(invoke::call_tool))
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
        .routes(routes!(changes::list_changes))
        .routes(routes!(files::list_run_files))
        .routes(routes!(files::get_run_file, files::put_run_file, files::delete_run_file))
        .routes(routes!(files::list_session_files))
        .routes(routes!(
            files::get_session_file,
            files::put_session_file,
            files::delete_session_file
        ))
        .routes(routes!(files::list_agent_files))
        .routes(routes!(files::get_agent_file, files::put_agent_file, files::delete_agent_file))
        .routes(routes!(events::list_events))
        .routes(routes!(webhooks::list_webhook_deliveries))
        .routes(routes!(webhooks::redeliver_webhook))
        .routes(routes!(sessions::list_sessions))
        .routes(routes!(sessions::get_session))
        .routes(routes!(session_messages::list_session_messages))
        .routes(routes!(sessions::delete_session))
        .routes(routes!(memory::list_memory, memory::forget_memory))
        .routes(routes!(memory::forget_observation))
        .routes(routes!(stats::get_tool_stats))
        .routes(routes!(stats::get_usage_stats))
        .routes(routes!(tools::list_tools))
        .routes(routes!(tools::get_tool))
        .routes(routes!(keys::create_key))
        .routes(routes!(keys::list_keys))
        .routes(routes!(keys::revoke_key))
        .routes(routes!(subjects::list_subjects))
        .routes(routes!(tokens::create_token))
        .routes(routes!(audit::list_audit))
        .routes(routes!(audit_stretches::list_audit_stretches))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::openapi_json))
}

/// The web pages; they are not part of the API.
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
        "This path does not support that method; the header `Allow` lists those that it supports.",
    )
}

#[cfg(test)]
mod router_tests;
