//! The web console: a page of our own that uses the same API as everybody else.
//!
//! Nothing is rendered here. The files are the same for all, so they need no key; what they show is
//! asked for in the browser with the key of the person in front of it.

use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::HeaderMap;
use axum::response::{Redirect, Response};
use axum::routing::get;

use super::App;
use super::assets::Site;
use super::problem::Problem;

/// Only our own files, nothing inline, no markup made from strings.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, Bytes::from_static(include_bytes!(concat!("console/", $name))))),*]
    };
}

static SITE: LazyLock<Site> = LazyLock::new(|| {
    let files = files![
        "index.html",
        "console.css",
        "console.js",
        "api.js",
        "catalogue.js",
        "dom.js",
        "invoke.js",
        "run.js",
        "runs.js",
        "timeline.js",
    ];
    Site::new(POLICY, files)
});

/// The page and its files.
pub(crate) fn routes() -> Router<App> {
    let without_slash = get(async || Redirect::permanent("../console"));
    Router::new().route("/console", get(page)).route("/console/", without_slash).route("/console/{file}", get(file))
}

async fn page(headers: HeaderMap) -> Result<Response, Problem> {
    SITE.answer("index.html", &headers)
}

async fn file(Path(name): Path<String>, headers: HeaderMap) -> Result<Response, Problem> {
    SITE.answer(&name, &headers)
}
