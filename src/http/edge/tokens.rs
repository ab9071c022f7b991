//! Short-lived tokens: where they are accepted, and for what.
//!
//! Only the routes of [`REQUIRED_ACTIONS`] accept tokens. A token permits its actions as far
//! as the API key that made it still has their scopes. How a token is signed is in
//! [`super::token_signer`].

use axum::extract::MatchedPath;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method};
use uuid::Uuid;

use super::accept::{MediaType, preferred};
use super::extract::Params;
use super::problem::{Code, Problem};
use super::token_signer::{Action, Grant, Target};
use crate::http::state::App;
use crate::runtime::MAX_ANCESTORS;
use crate::store::Store;

/// Whether a bearer credential is a token, not an API key.
pub(super) fn is_token(bearer: &str) -> bool {
    bearer.starts_with("eyJ")
}

/// The token in the query of an event stream, where a browser's `EventSource` has to put it.
pub(super) fn in_query(parts: &Parts) -> Result<Option<String>, Problem> {
    let query = parts.uri.query().unwrap_or_default();
    if !query.contains(PARAMETER) {
        return Ok(None);
    }
    let Some(token) = Params::parse(query)?.text(PARAMETER) else { return Ok(None) };
    let is_stream =
        required_action(&parts.method, &route(parts), &parts.headers) == Some(Action::Stream);
    if !is_stream || !is_token(&token) {
        return Err(Problem::new(
            Code::Unauthenticated,
            "`access_token` is for short-lived tokens, in requests for a run's event stream only.",
        ));
    }
    Ok(Some(token))
}

/// The query parameter of a token.
pub(crate) const PARAMETER: &str = "access_token";

/// The routes that accept tokens, and the action that each requires; [`EVENTS`] as a stream requires
/// another one.
const REQUIRED_ACTIONS: [(&Method, &str, Action); 14] = [
    (&Method::GET, "/runs/{id}", Action::Read),
    (&Method::GET, "/runs/{id}/wait", Action::Read),
    (&Method::GET, "/runs/{id}/iterations", Action::Read),
    (&Method::GET, "/runs/{id}/tool-calls", Action::Read),
    (&Method::GET, "/runs/{id}/messages", Action::Read),
    (&Method::GET, "/runs/{id}/changes", Action::Read),
    (&Method::GET, EVENTS, Action::Read),
    (&Method::GET, "/sessions/{id}", Action::Read),
    (&Method::GET, "/sessions/{id}/messages", Action::Read),
    (&Method::POST, "/runs/{id}/cancel", Action::Cancel),
    (&Method::POST, "/runs/{id}/tool-calls/{call_id}/approve", Action::Respond),
    (&Method::POST, "/runs/{id}/tool-calls/{call_id}/deny", Action::Respond),
    (&Method::POST, "/runs/{id}/tool-calls/{call_id}/resolve", Action::Respond),
    (&Method::POST, "/runs/{id}/tool-calls/{call_id}/result", Action::Respond),
];

const EVENTS: &str = "/runs/{id}/events";

/// The action that a request requires; `None` if the route does not accept tokens.
fn required_action(method: &Method, route: &str, headers: &HeaderMap) -> Option<Action> {
    let method = if method == Method::HEAD { &Method::GET } else { method };
    let mut routes = REQUIRED_ACTIONS.iter();
    let (_, path, action) = routes.find(|(of, path, _)| *of == method && *path == route)?;
    let streams = *path == EVENTS && preferred(headers) == Some(MediaType::EventStream);
    Some(if streams { Action::Stream } else { *action })
}

/// The request's route, without the version.
fn route(parts: &Parts) -> String {
    let matched = parts.extensions.get::<MatchedPath>();
    let path = matched.map_or("", MatchedPath::as_str);
    path.strip_prefix("/v1").unwrap_or(path).to_owned()
}

/// Refuses a request for another action (403) or another object (404) than the token's.
pub(super) async fn check(
    grant: &Grant,
    app: &App,
    tenant: &str,
    parts: &Parts,
) -> Result<(), Problem> {
    let route = route(parts);
    let Some(needed) = required_action(&parts.method, &route, &parts.headers) else {
        let detail = "Short-lived tokens are not accepted here: use an API key.";
        return Err(Problem::new(Code::Forbidden, detail));
    };
    if !grant.actions.contains(&needed) {
        let name: &str = needed.into();
        let detail = format!("This requires a token with the action `{name}`.");
        return Err(Problem::new(Code::Forbidden, detail));
    }
    let path = parts.uri.path();
    let path = path.strip_prefix("/v1").unwrap_or(path);
    let id = path.split('/').nth(2).unwrap_or_default();
    let id = percent_encoding::percent_decode_str(id).decode_utf8_lossy();
    if route.starts_with("/sessions/") {
        let is_it = matches!(&grant.target, Target::Session(session) if *session == id);
        return if is_it { Ok(()) } else { Err(Problem::not_found("session")) };
    }
    let run = Uuid::try_parse(&id).map_err(|_| Problem::not_found("run"))?;
    if reaches(&grant.target, &app.store, tenant, run).await? {
        Ok(())
    } else {
        Err(Problem::not_found("run"))
    }
}

/// Whether a run is the token's, is of its session, or was started by such a run.
async fn reaches(target: &Target, store: &Store, tenant: &str, run: Uuid) -> Result<bool, Problem> {
    let mut next = Some(run);
    for _ in 0..=MAX_ANCESTORS {
        let Some(id) = next else { return Ok(false) };
        if *target == Target::Run(id) {
            return Ok(true);
        }
        let Some(run) = store.run(tenant, id).await? else { return Ok(false) };
        let session = run.session_id.as_ref();
        if session.is_some_and(|session| *target == Target::Session(session.clone())) {
            return Ok(true);
        }
        next = run.parent_run_id;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_few_routes_accept_tokens() {
        let needs =
            |method: &Method, route: &str| required_action(method, route, &HeaderMap::new());
        assert_eq!(needs(&Method::HEAD, "/runs/{id}"), Some(Action::Read));
        assert_eq!(needs(&Method::GET, EVENTS), Some(Action::Read));
        let mut streams = HeaderMap::new();
        streams.insert("accept", "text/event-stream".parse().unwrap());
        assert_eq!(required_action(&Method::GET, EVENTS, &streams), Some(Action::Stream));
        for (method, route) in [
            (Method::GET, "/runs"),
            (Method::DELETE, "/sessions/{id}"),
            (Method::POST, "/agents/{name}/invoke"),
            (Method::POST, "/tokens"),
            (Method::GET, "/runs/{id}/files"),
        ] {
            assert_eq!(needs(&method, route), None, "{method} {route}");
        }
    }
}
