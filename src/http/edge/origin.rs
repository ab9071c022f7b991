//! Which requests are accepted without authentication (`auth.mode = "none"`): those of programs and
//! pages of this machine.
//!
//! A page of any site can make a browser send requests to loopback addresses, by a host name that
//! resolves to one or across origins. Such requests name a foreign host or origin. Which requests
//! come from the service's own pages is decided here, too.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, Version};

use super::cors::CorsOrigins;
use super::problem::{Code, Problem};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses a request that names no host or several hosts (RFC 9112, section 3.2): a proxy in front of the
/// service could have routed it by another one.
pub(super) fn check_host(version: Version, headers: &HeaderMap) -> Result<(), Problem> {
    let mut named = headers.get_all(HOST).iter();
    let is_host = |host: &HeaderValue| {
        let host = host.to_str().unwrap_or("@");
        host.is_empty() || host.parse::<Authority>().is_ok_and(|_| !host.contains('@'))
    };
    let is_needed = version == Version::HTTP_11;
    let is_one = named.next().map_or(!is_needed, is_host) && named.next().is_none();
    if is_one {
        return Ok(());
    }
    Err(Problem::new(
        Code::InvalidParameter,
        "The request must have exactly one Host header, and it must name a host.",
    ))
}

/// Refuses a request for another host than a loopback one, and one of a page of another origin that
/// is not listed.
pub(super) fn check_local(
    uri: &Uri,
    headers: &HeaderMap,
    listed: &CorsOrigins,
) -> Result<(), Problem> {
    let foreign = |what: &str| {
        let detail = format!(
            "With auth.mode = \"none\", {what}; set auth.mode = \"api_key\" for other requests."
        );
        Err(Problem::new(Code::ForeignOrigin, detail))
    };
    let hosts = hosts(uri, headers);
    if hosts.is_empty() || !hosts.iter().all(|host| is_loopback(host)) {
        return foreign("the host must be localhost, a 127.0.0.0/8 address or [::1]");
    }
    if listed.allows(headers).is_some() {
        return Ok(());
    }
    let is_own = |origin: &str| is_of(&hosts, origin);
    if !headers.get_all(ORIGIN).iter().all(|origin| origin.to_str().is_ok_and(is_own)) {
        return foreign(
            "the header Origin must be the service's own, or listed in server.cors_origins",
        );
    }
    let is_near = |site: &str| ["same-origin", "none"].contains(&site);
    if !headers.get_all(SEC_FETCH_SITE).iter().all(|site| site.to_str().is_ok_and(is_near)) {
        return foreign("the header Sec-Fetch-Site must be `same-origin` or `none`");
    }
    Ok(())
}

/// Whether a browser says that a page of the service itself sent the request. A page cannot choose the
/// header Sec-Fetch-Site. A browser without it sends Origin, except in requests that
/// only read (`may_be_silent`).
pub(super) fn is_of_own_page(uri: &Uri, headers: &HeaderMap, may_be_silent: bool) -> bool {
    let mut sites = headers.get_all(SEC_FETCH_SITE).iter().peekable();
    if sites.peek().is_some() {
        return sites.all(|site| site == "same-origin");
    }
    let hosts = hosts(uri, headers);
    let mut origins = headers.get_all(ORIGIN).iter().peekable();
    if origins.peek().is_none() {
        return may_be_silent;
    }
    origins.all(|origin| origin.to_str().is_ok_and(|origin| is_of(&hosts, origin)))
}

/// The hosts that the request names as its target.
fn hosts<'r>(uri: &'r Uri, headers: &'r HeaderMap) -> Vec<&'r str> {
    let named = headers.get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
    uri.authority().map(Authority::as_str).into_iter().chain(named).collect()
}

/// Whether an origin is that of one of the hosts.
fn is_of(hosts: &[&str], origin: &str) -> bool {
    let origin = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    origin.is_some_and(|origin| hosts.iter().any(|host| host.eq_ignore_ascii_case(origin)))
}

/// Whether a `Host` is a loopback name or address, with any port.
fn is_loopback(host: &str) -> bool {
    let (name, port) = match host.rfind(':') {
        Some(colon) if !host.ends_with(']') => (&host[..colon], &host[colon + 1..]),
        _ => (host, ""),
    };
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse() == Ok(Ipv6Addr::LOCALHOST),
        None => {
            name.eq_ignore_ascii_case("localhost")
                || name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_the_services_own_where_the_browser_says_so() {
        let uri = Uri::from_static("/v1/runs");
        let asked = |given: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, "box.example:8080".parse().unwrap());
            for (name, value) in given {
                headers.append(*name, value.parse().unwrap());
            }
            (is_of_own_page(&uri, &headers, true), is_of_own_page(&uri, &headers, false))
        };
        assert_eq!(asked(&[]), (true, false));
        for own in [
            &[("sec-fetch-site", "same-origin")][..],
            &[("origin", "https://box.example:8080")],
            &[("origin", "http://BOX.example:8080")],
            // A proxy that has another name inside.
            &[("sec-fetch-site", "same-origin"), ("origin", "https://outside.example")],
        ] {
            assert_eq!(asked(own), (true, true), "{own:?}");
        }
        for foreign in [
            &[("sec-fetch-site", "cross-site")][..],
            &[("sec-fetch-site", "same-site")],
            &[("sec-fetch-site", "none")],
            &[("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "cross-site"), ("origin", "https://box.example:8080")],
            &[("origin", "https://box.example")],
            &[("origin", "https://evil.example")],
            &[("origin", "null")],
            &[("origin", "https://box.example:8080"), ("origin", "https://evil.example")],
        ] {
            assert_eq!(asked(foreign), (false, false), "{foreign:?}");
        }
    }

    #[test]
    fn loopback_hosts_have_any_port() {
        for host in [
            "localhost",
            "LocalHost:8080",
            "localhost:",
            "127.0.0.1",
            "127.0.0.1:1",
            "127.255.0.9:80",
            "[::1]",
            "[::1]:8080",
            "[0:0:0:0:0:0:0:1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            ":80",
            "evil.example",
            "localhost.evil.example",
            "localhost@evil.example",
            "evil.localhost",
            "127.0.0.1.evil.example",
            "127.1",
            "0x7f.0.0.1",
            "0.0.0.0",
            "10.0.0.1",
            "::1",
            "[::]",
            "[::1",
            "[::1]x",
            "[::ffff:127.0.0.1]",
            "localhost:80:80",
            "localhost:http",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
