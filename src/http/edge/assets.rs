//! Static files compiled into the binary, served with a Content-Security-Policy and an ETag.
//!
//! Browsers revalidate on every request and get 304 while nothing has changed, so that a page never
//! mixes files of two versions. The sites themselves are defined in [`crate::http::console`] and
//! [`crate::http::document::docs`].

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
use super::responses::StaticText;
use crate::http::state::App;

/// An HTML page and the files that it loads.
pub(crate) struct Site {
    policy: HeaderValue,
    files: Vec<File>,
}

struct File {
    name: &'static str,
    content_type: HeaderValue,
    /// Weak, because the response may be compressed.
    etag: HeaderValue,
    content: StaticText,
}

impl Site {
    /// `policy` is the Content-Security-Policy of all files; files are given by name.
    pub(crate) fn new(
        policy: &'static str,
        files: impl IntoIterator<Item = (&'static str, Bytes)>,
    ) -> Self {
        let file = |(name, content): (&'static str, Bytes)| {
            let content_type = HeaderValue::from_static(content_type(name));
            File { name, content_type, etag: etag(&content), content: StaticText::new(content) }
        };
        Self {
            policy: HeaderValue::from_static(policy),
            files: files.into_iter().map(file).collect(),
        }
    }

    /// Serves `index.html` at `path` and every file at `path/{file}`.
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

    /// The file, or 304 if the client's copy is current.
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
        if if_none_match(asked, &file.etag) {
            return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
        }
        let content_type = [(CONTENT_TYPE, file.content_type.clone())];
        Ok((headers, content_type, file.content.answer(asked)).into_response())
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

/// Evaluates `If-None-Match` (RFC 9110, section 13.1.2) by weak comparison.
fn if_none_match(asked: &HeaderMap, etag: &HeaderValue) -> bool {
    let opaque = |tag: &str| tag.trim().trim_start_matches("W/").to_owned();
    let ours = etag.to_str().map(opaque).unwrap_or_default();
    let lists = asked.get_all(IF_NONE_MATCH).iter().filter_map(|list| list.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|tag| tag.trim() == "*" || opaque(tag) == ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matching_etag_is_answered_304() {
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
