//! Redirects browsers from `/` to the console: clients that ask for HTML. Others get the 404 of any
//! other unknown path.

use axum::Router;
use axum::http::header::{ACCEPT, VARY};
use axum::http::{HeaderMap, HeaderName};
use axum::response::Redirect;
use axum::routing::get;

use super::problem::Problem;
use crate::bounds::text::bare_type;
use crate::http::state::App;

/// `/`, where the console is served.
pub(crate) fn routes() -> Router<App> {
    Router::new().route("/", get(front_door))
}

async fn front_door(
    headers: HeaderMap,
) -> Result<([(HeaderName, &'static str); 1], Redirect), Problem> {
    if wants_html(&headers) {
        Ok(([(VARY, "accept")], Redirect::temporary("/console")))
    } else {
        Err(Problem::not_found("path"))
    }
}

fn wants_html(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepts.flat_map(|value| value.split(',')).any(|kind| bare_type(kind) == "text/html")
}
