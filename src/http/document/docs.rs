//! Swagger UI at `/docs`, from the files in the `utoipa-swagger-ui` crate.
//!
//! It loads only `/openapi.json` of this service. Its scripts set inline styles, which the policy
//! therefore allows.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::body::Bytes;
use utoipa_swagger_ui::Config;

use crate::http::edge::assets::Site;
use crate::http::state::App;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; \
     img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The files that `docs.html` loads.
const FILES: [&str; 5] = [
    "swagger-ui.css",
    "swagger-ui-bundle.js",
    "swagger-ui-standalone-preset.js",
    "swagger-initializer.js",
    "favicon-32x32.png",
];

static SITE: LazyLock<Site> = LazyLock::new(|| {
    // By default Swagger UI sends the document's URL to a validator on the internet.
    let config = Arc::new(Config::new(["openapi.json"]).validator_url("none"));
    let page = ("index.html", Bytes::from_static(include_bytes!("docs.html")));
    let file = |name| {
        let found = utoipa_swagger_ui::serve(name, Arc::clone(&config)).ok().flatten()?;
        Some(match found.bytes {
            Cow::Borrowed(bytes) => (name, Bytes::from_static(bytes)),
            Cow::Owned(bytes) => (name, Bytes::from(bytes)),
        })
    };
    Site::new(POLICY, std::iter::once(page).chain(FILES.into_iter().filter_map(file)))
});

pub(crate) fn routes() -> Router<App> {
    Site::routes(&SITE, "/docs")
}
