//! Files of our pages, compiled into the binary: what they are sent with and when they need not be.
//!
//! A page is fenced in by the policy that it comes with. Browsers ask each time and are told by the
//! ETag that nothing has changed, so a new version of the service is never mixed with an old page.
//! Which pages there are is for [`crate::http::console`] and [`crate::http::document::docs`] to say.

use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

use super::problem::Problem;
use crate::http::state::App;

/// A page and what it loads.
pub(crate) struct Site {
    policy: HeaderValue,
    files: Vec<File>,
}

struct File {
    name: &'static str,
    content_type: HeaderValue,
    /// Weak: an answer may be compressed on its way.
    etag: HeaderValue,
    content: Bytes,
}

impl Site {
    /// Files by name under the Content-Security-Policy that holds for all of them.
    pub(crate) fn new(
        policy: &'static str,
        files: impl IntoIterator<Item = (&'static str, Bytes)>,
    ) -> Self {
        let file = |(name, content): (&'static str, Bytes)| {
            let content_type = HeaderValue::from_static(content_type(name));
            File { name, content_type, etag: etag(&content), content }
        };
        Self {
            policy: HeaderValue::from_static(policy),
            files: files.into_iter().map(file).collect(),
        }
    }

    /// The page at a path, and its files beneath it.
    pub(crate) fn routes(site: &'static LazyLock<Self>, path: &'static str) -> Router<App> {
        let page = get(async move |asked: HeaderMap| site.answer("index.html", &asked));
        let file =
            get(async move |Path(name): Path<String>, asked: HeaderMap| site.answer(&name, &asked));
        let slash = get(async move || Redirect::permanent(&format!("..{path}")));
        Router::new()
            .route(path, page)
            .route(&format!("{path}/"), slash)
            .route(&format!("{path}/{{file}}"), file)
    }

    /// The file, or word that the caller has it already.
    fn answer(&self, name: &str, asked: &HeaderMap) -> Result<Response, Problem> {
        let file = self
            .files
            .iter()
            .find(|file| file.name == name)
            .ok_or_else(|| Problem::not_found("path"))?;
        let headers = [
            (CONTENT_SECURITY_POLICY, self.policy.clone()),
            (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (ETAG, file.etag.clone()),
        ];
        if is_known(asked, &file.etag) {
            return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
        }
        Ok((headers, [(CONTENT_TYPE, file.content_type.clone())], file.content.clone())
            .into_response())
    }
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("css") => "text/css; charset=utf-8",
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("png") => "image/png",
        _ => "application/octet-stream",
    }
}

fn etag(content: &[u8]) -> HeaderValue {
    let hash: Vec<u8> = Sha256::digest(content).into_iter().take(16).collect();
    HeaderValue::from_str(&format!("W/\"{}\"", hex::encode(hash)))
        .unwrap_or(HeaderValue::from_static("\"\""))
}

/// RFC 9110 §13.1.2: weak comparison with each of a list, or `*`.
fn is_known(asked: &HeaderMap, etag: &HeaderValue) -> bool {
    let opaque = |tag: &str| tag.trim().trim_start_matches("W/").to_owned();
    let ours = etag.to_str().map(opaque).unwrap_or_default();
    let lists = asked.get_all(IF_NONE_MATCH).iter().filter_map(|list| list.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|tag| tag.trim() == "*" || opaque(tag) == ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_the_caller_has_is_not_sent_again() {
        let site = Site::new("default-src 'none'", [("a.css", Bytes::from_static(b"a {}"))]);
        let first = site.answer("a.css", &HeaderMap::new()).unwrap();
        assert_eq!(first.status(), StatusCode::OK);
        assert_eq!(first.headers()[CONTENT_TYPE], "text/css; charset=utf-8");
        let etag = first.headers()[ETAG].to_str().unwrap();
        for (known, status) in [
            (etag.to_owned(), StatusCode::NOT_MODIFIED),
            (etag.trim_start_matches("W/").to_owned(), StatusCode::NOT_MODIFIED),
            (format!("\"x\", {etag}"), StatusCode::NOT_MODIFIED),
            ("*".to_owned(), StatusCode::NOT_MODIFIED),
            ("W/\"x\"".to_owned(), StatusCode::OK),
        ] {
            let asked = HeaderMap::from_iter([(IF_NONE_MATCH, known.parse().unwrap())]);
            let again = site.answer("a.css", &asked).unwrap();
            assert_eq!(again.status(), status, "{known}");
            assert_eq!(again.headers()[CONTENT_SECURITY_POLICY], "default-src 'none'");
        }
        assert!(site.answer("b.css", &HeaderMap::new()).is_err());
    }
}
