//! The web console: a page that uses the public API, like any client.
//!
//! Nothing is rendered here. The files are the same for all, so they need no key; what they show is
//! asked for in the browser with the key of the person in front of it.

use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;

use crate::http::edge::assets::Site;
use crate::http::state::App;

/// Only our own files, nothing inline, no markup made from strings.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, Bytes::from_static(include_bytes!($name)))),*]
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
        "waiting.js",
    ];
    Site::new(POLICY, files)
});

/// The page and its files.
pub(crate) fn routes() -> Router<App> {
    Site::routes(&SITE, "/console")
}
