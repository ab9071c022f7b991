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

use axum::handler::Handler;
use axum::routing::MethodRouter;
use axum::{Router, middleware};
use serde_json::Value;
use utoipa::openapi::HttpMethod;
use utoipa_axum::PathItemExt as _;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::document::{docs, openapi};
use self::edge::console_cookie::EndedSessions;
use self::edge::problem::{Code, Problem};
use self::edge::store_check::StoreCheck;
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
        store_check: StoreCheck::default(),
    });
    let routes = routes().merge(pages(expose)).method_not_allowed_fallback(wrong_method);
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

/// Calls a macro with all handlers, those of one path in one entry.
macro_rules! with_handlers {
    ($with:ident) => {
        $with! {
            agents::list_agents;
            agents::get_agent;
            policy::replay_policy;
            judged_calls::judge_call;
            invoke::invoke_agent;
            invoke::invoke_agent_iterative;
            invoke::stream_agent;
            invoke::dry_run_agent;
            invoke::call_tool;
            runs::list_runs;
            runs::get_run;
            runs::wait_for_run;
            runs::cancel_run;
            approvals::list_approvals;
            approvals::approve_tool_call;
            approvals::deny_tool_call;
            approvals::resolve_tool_call;
            approvals::give_tool_result;
            run_parts::list_iterations;
            run_parts::list_tool_calls;
            run_parts::list_messages;
            changes::list_changes;
            files::list_run_files;
            files::get_run_file, files::put_run_file, files::delete_run_file;
            files::list_session_files;
            files::get_session_file, files::put_session_file, files::delete_session_file;
            files::list_agent_files;
            files::get_agent_file, files::put_agent_file, files::delete_agent_file;
            events::list_events;
            webhooks::list_webhook_deliveries;
            webhooks::redeliver_webhook;
            sessions::list_sessions;
            sessions::get_session;
            session_messages::list_session_messages;
            sessions::delete_session;
            memory::list_memory, memory::forget_memory;
            memory::forget_observation;
            stats::get_tool_stats;
            stats::get_usage_stats;
            tools::list_tools;
            tools::get_tool;
            keys::create_key;
            keys::list_keys;
            keys::revoke_key;
            subjects::list_subjects;
            tokens::create_token;
            audit::list_audit;
            audit_stretches::list_audit_stretches;
            health::healthz;
            health::readyz;
            metrics::metrics;
            openapi::openapi_json;
        }
    };
}

macro_rules! routes_of {
    ($($module:ident :: $handler:ident $(, $modules:ident :: $handlers:ident)*;)+) => {
        utoipa_axum::paste! {
            Router::new()$(.route(&<$module::[<__path_ $handler>] as utoipa::Path>::path(), {
                let methods = MethodRouter::new();
                let methods = answered::<$module::[<__path_ $handler>], _, _>(
                    methods,
                    $module::$handler,
                );
                $(
                    let methods = answered::<$modules::[<__path_ $handlers>], _, _>(
                        methods,
                        $modules::$handlers,
                    );
                )*
                methods
            }))+
        }
    };
}

macro_rules! documented {
    ($($module:ident :: $handler:ident $(, $modules:ident :: $handlers:ident)*;)+) => {
        OpenApiRouter::<App>::default()$(.routes(routes!($module::$handler $(, $modules::$handlers)*)))+
    };
}

/// The routes without their documentation, which is made on request.
fn routes() -> Router<App> {
    with_handlers!(routes_of)
}

/// The routes with their documentation.
fn table() -> OpenApiRouter<App> {
    with_handlers!(documented)
}

/// Adds a handler for the methods that its description names.
fn answered<P: utoipa::Path, H: Handler<T, App>, T: 'static>(
    methods: MethodRouter<App>,
    handler: H,
) -> MethodRouter<App> {
    let add = move |methods: MethodRouter<App>, method: HttpMethod| {
        methods.on(method.to_method_filter(), handler.clone())
    };
    P::methods().into_iter().fold(methods, add)
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
