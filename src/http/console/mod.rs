//! The web console: a page that uses the public API, like any client.
//!
//! Nothing is rendered here. The files are the same for all, so they need no key; what they show is
//! asked for in the browser with the session of the person in front of it.

mod session;

use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;
use axum::routing::get;

use crate::http::edge::assets::Site;
use crate::http::state::App;

/// Only our own files, nothing inline, no markup made from strings.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; \
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
        "api.js",
        "approvals.js",
        "catalogue.js",
        "changes.js",
        "children.js",
        "console.js",
        "decide.js",
        "diff.js",
        "dom.js",
        "dry-run.js",
        "fields.js",
        "files.js",
        "format.js",
        "icons.js",
        "invoke.js",
        "json.js",
        "judge.js",
        "meters.js",
        "overview.js",
        "pending-calls.js",
        "people.js",
        "picture.js",
        "pictures.js",
        "preview.js",
        "repeat-run.js",
        "rows.js",
        "run.js",
        "runs.js",
        "screenshot.js",
        "sessions.js",
        "snippets.js",
        "spans.js",
        "story.js",
        "stream.js",
        "timeline.js",
        "usage.js",
        "virtual.js",
        "waiting.js",
        "waterfall.js",
    ];
    Site::new(POLICY, files)
});

/// The page and its files, and signing in.
pub(crate) fn routes() -> Router<App> {
    let session = get(session::status).post(session::sign_in).delete(session::sign_out);
    Site::routes(&SITE, "/console").route("/console/session", session)
}
