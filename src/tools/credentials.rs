//! Secrets of the operator that the proxy adds to requests of programs; the programs never see them.
//!
//! A program asks for `http://HOST/…`, and the request goes on to `https://HOST/…` with the secret
//! in a header. For git, variables replace `https://` by `http://` in the addresses in question. A
//! CONNECT tunnel is encrypted between program and host, so nothing is added to what goes through it.

use std::collections::BTreeMap;

use http::header::{HeaderMap, HeaderName, HeaderValue, LOCATION};
use percent_encoding::percent_decode_str;
use url::Url;

use crate::bounds::address;

/// The header with a secret, for requests to one address and everything beneath it.
#[derive(Debug, Clone)]
pub struct Credential {
    pub url: Url,
    pub header: HeaderName,
    pub value: HeaderValue,
}

/// The credentials that an agent may name, or why one is not available.
pub type Credentials = BTreeMap<String, Result<Credential, String>>;

impl Credential {
    /// Whether it is added to a request for this address, which is as the program wrote it.
    pub(super) fn covers(&self, asked: &Url) -> bool {
        let is_there = asked.scheme() == "http"
            && asked.host() == self.url.host()
            && asked.port() == self.url.port();
        is_there && is_beneath(asked.path(), self.url.path())
    }

    /// The address to which such a request is forwarded.
    pub(super) fn address(&self, asked: &Url) -> Url {
        let mut address = self.url.clone();
        address.set_path(asked.path());
        address.set_query(asked.query());
        address
    }

    /// Adds the secret, and replaces a header of the program.
    pub(super) fn add_to(&self, headers: &mut HeaderMap) {
        headers.insert(self.header.clone(), self.value.clone());
    }

    /// Rewrites a redirect so that the next request goes through the proxy without TLS, too, and gets the
    /// secret.
    pub(super) fn relocate(&self, headers: &mut HeaderMap) {
        let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
        let Some(location) = location.and_then(|text| address::read(text).ok()) else { return };
        let asked = plain(&location);
        if address::is_same_origin(&location, &self.url)
            && self.covers(&asked)
            && let Ok(value) = HeaderValue::try_from(asked.as_str())
        {
            headers.insert(LOCATION, value);
        }
    }
}

/// Environment variables that make git send its requests to the proxy without TLS.
pub(super) fn variables(credentials: &[Credential]) -> Vec<(String, String)> {
    let secured: Vec<_> = credentials.iter().filter(|it| it.url.scheme() == "https").collect();
    if secured.is_empty() {
        return Vec::new();
    }
    let mut variables = vec![("GIT_CONFIG_COUNT".to_owned(), secured.len().to_string())];
    for (i, Credential { url, .. }) in secured.iter().enumerate() {
        let key = format!("url.{}.insteadOf", plain(url));
        variables.push((format!("GIT_CONFIG_KEY_{i}"), key));
        variables.push((format!("GIT_CONFIG_VALUE_{i}"), url.to_string()));
    }
    variables
}

/// The address without TLS.
fn plain(url: &Url) -> Url {
    let mut url = url.clone();
    let port = url.port();
    let _ = url.set_scheme("http"); // both are special schemes
    let _ = url.set_port(port);
    url
}

/// Whether a path lies beneath another one, for every server that reads it.
fn is_beneath(path: &str, root: &str) -> bool {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    // Some servers treat the text after a semicolon as a parameter of the path segment.
    let is_up = |part: &str| part.split(';').next() == Some("..");
    if decoded.split(['/', '\\']).any(is_up) {
        return false;
    }
    let root = root.strip_suffix('/').unwrap_or(root);
    path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(url: &str) -> Credential {
        let url = Url::parse(url).unwrap();
        let value = HeaderValue::from_static("secret");
        Credential { url, header: http::header::AUTHORIZATION, value }
    }

    #[test]
    fn covers_its_address_and_what_is_beneath_it() {
        for (url, asked, expected) in [
            ("https://a.test/", "http://a.test/x?y", true),
            ("https://a.test/", "http://A.test:80/x", true),
            ("https://a.test/", "https://a.test/x", false),
            ("https://a.test/", "http://a.test:443/x", false),
            ("https://a.test/", "http://a.test:8080/x", false),
            ("https://a.test/", "http://b.a.test/x", false),
            ("https://a.test:8443/", "http://a.test:8443/x", true),
            ("https://a.test/acme", "http://a.test/acme", true),
            ("https://a.test/acme", "http://a.test/acme/x", true),
            ("https://a.test/acme/", "http://a.test/acme/x", true),
            ("https://a.test/acme", "http://a.test/acmeother", false),
            ("https://a.test/acme", "http://a.test/acme/../other", false),
            ("https://a.test/acme", "http://a.test/acme/..%2fother", false),
            ("https://a.test/acme", "http://a.test/acme/..;x/other", false),
            ("https://a.test/acme", "http://a.test/acme/a;../other", true),
            ("https://a.test/acme", "http://a.test/acme/%2E%2e%5Cother", false),
            ("https://a.test/acme", "http://a.test/acme/a%2fb", true),
            ("https://a.test/acme", "http://a.test/ACME/x", false),
        ] {
            let asked = address::read(asked).unwrap();
            assert_eq!(credential(url).covers(&asked), expected, "{url} {asked}");
        }
    }

    #[test]
    fn goes_on_to_the_address_with_tls_and_redirects_come_back() {
        let credential = credential("https://a.test:8443/acme/");
        let asked = Url::parse("http://a.test:8443/acme/x%2Fy?z=1").unwrap();
        assert_eq!(credential.address(&asked).as_str(), "https://a.test:8443/acme/x%2Fy?z=1");
        for (location, expected) in [
            ("https://a.test:8443/acme/new", "http://a.test:8443/acme/new"),
            ("https://a.test:8443/other", "https://a.test:8443/other"),
            ("https://b.test:8443/acme/", "https://b.test:8443/acme/"),
            ("/acme/new", "/acme/new"),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, HeaderValue::from_static(location));
            credential.relocate(&mut headers);
            assert_eq!(headers[LOCATION], expected);
        }
    }

    #[test]
    fn git_is_led_to_the_proxy() {
        let credentials = [credential("http://b.test/"), credential("https://a.test/acme/")];
        let text = |(name, value): (String, String)| format!("{name}={value}");
        let variables: Vec<String> = variables(&credentials).into_iter().map(text).collect();
        assert_eq!(
            variables,
            [
                "GIT_CONFIG_COUNT=1",
                "GIT_CONFIG_KEY_0=url.http://a.test/acme/.insteadOf",
                "GIT_CONFIG_VALUE_0=https://a.test/acme/"
            ]
        );
    }
}
