//! The cookie that has a console's session: how it is set and found, which requests may use it, and
//! whether its session was ended.
//!
//! A browser adds a cookie to requests that other pages make, too. So it is accepted only in
//! requests that the browser says come from the service's own pages; those that change something
//! need a header, which no form and no other site can send. How a session is signed is in
//! [`super::token_signer`]; the caller that it belongs to is found in [`super::auth`].

use std::collections::HashMap;
use std::time::{Duration, Instant};

use axum::http::header::{COOKIE, ORIGIN};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use chrono::{DateTime, Utc};
use parking_lot::Mutex;
use uuid::Uuid;

use super::origin::is_of_own_page;
use super::problem::{Code, Problem};
use crate::clock;
use crate::event::Act;
use crate::store::{Store, StoreError};

/// The header that a request must have beside the cookie if it changes something; its value is `1`.
const CONSOLE_HEADER: HeaderName = HeaderName::from_static("x-toolloop-console");
/// The name of a cookie that a browser takes from this very host alone, by a secure connection.
const HOST_ONLY: &str = "__Host-";

/// The cookies of a request: names and values.
fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let headers = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let cookies = headers.flat_map(|value| value.split(';'));
    cookies.filter_map(|cookie| cookie.trim().split_once('='))
}

/// The session in a request's cookie; of two, the one that only this host can have set.
pub(super) fn in_cookie<'p>(parts: &'p Parts, name: &str) -> Option<&'p str> {
    let pairs: Vec<_> = cookies(&parts.headers).collect();
    let is_host_only = |of: &str| of.strip_prefix(HOST_ONLY) == Some(name);
    let found = pairs.iter().find(|(of, _)| is_host_only(of));
    found.or_else(|| pairs.iter().find(|(of, _)| *of == name)).map(|(_, value)| *value)
}

/// Refuses a request that may not use the cookie, or may not sign in or out.
pub(crate) fn check_own_page(parts: &Parts) -> Result<(), Problem> {
    let only_reads = parts.method.is_safe();
    let is_own = is_of_own_page(&parts.uri, &parts.headers, only_reads);
    let is_marked = parts.headers.get(CONSOLE_HEADER).is_some_and(|value| value == "1");
    if is_own && (only_reads || is_marked) {
        return Ok(());
    }
    Err(Problem::new(
        Code::ForeignOrigin,
        "A session of the console is accepted in requests of the service's own pages only: of the same origin, \
         and with the header `X-Toolloop-Console: 1` where they change something. Other programs use an API key.",
    ))
}

/// `Set-Cookie` for a session, or without one for its end. A browser that came by plain HTTP gets a
/// cookie that it sends by plain HTTP.
pub(crate) fn set_cookie(
    headers: &HeaderMap,
    name: &str,
    session: Option<(&str, DateTime<Utc>)>,
) -> Result<HeaderValue, Problem> {
    let is_secured = |(of, _): (&str, &str)| of.strip_prefix(HOST_ONLY) == Some(name);
    let is_plain = match headers.get(ORIGIN) {
        Some(origin) => origin.to_str().is_ok_and(|origin| origin.starts_with("http://")),
        // A request that only reads may have no Origin; a cookie is removed under the name that it has.
        None => session.is_none() && !cookies(headers).any(is_secured),
    };
    let (prefix, secure) = if is_plain { ("", "") } else { (HOST_ONLY, "; Secure") };
    let (token, seconds) =
        session.map_or(("", 0), |(token, end)| (token, (end - clock::now()).num_seconds().max(0)));
    let cookie = format!(
        "{prefix}{name}={token}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    );
    HeaderValue::from_str(&cookie).map_err(|error| Problem::internal(error.to_string()))
}

/// Caches which sessions were ended. A session that is ended on this replica is
/// refused at once, and within [`Self::TTL`] on others.
#[derive(Default)]
pub(crate) struct EndedSessions(Mutex<HashMap<Uuid, (bool, Instant)>>);

impl EndedSessions {
    /// How long the end of a session on another replica may go unnoticed.
    const TTL: Duration = Duration::from_secs(1);
    /// Above this size, entries that are not current are removed.
    const EVICT_ABOVE: usize = 1024;

    pub(super) async fn has(&self, store: &Store, id: Uuid) -> Result<bool, StoreError> {
        if let Some((is_ended, looked_at)) = self.0.lock().get(&id)
            && (*is_ended || looked_at.elapsed() < Self::TTL)
        {
            return Ok(*is_ended);
        }
        let looked_at = Instant::now();
        let is_ended = store.is_token_ended(id).await?;
        self.note(id, is_ended, looked_at);
        Ok(is_ended)
    }

    /// Ends a session, for all replicas.
    pub(crate) async fn end(
        &self,
        store: &Store,
        (id, expires_at): (Uuid, DateTime<Utc>),
        act: Act,
    ) -> Result<(), StoreError> {
        store.end_token(id, expires_at, act).await?;
        self.note(id, true, Instant::now());
        Ok(())
    }

    fn note(&self, id: Uuid, is_ended: bool, looked_at: Instant) {
        let mut known = self.0.lock();
        if known.len() >= Self::EVICT_ABOVE {
            known.retain(|_, (_, looked_at)| looked_at.elapsed() < Self::TTL);
        }
        let entry = known.entry(id).or_insert((is_ended, looked_at));
        // An ended session stays ended, even if an earlier read of the store says otherwise.
        *entry = (entry.0 || is_ended, looked_at);
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    #[test]
    fn a_cookie_ends_under_the_name_that_it_has() {
        let about = "Path=/; Max-Age=0; HttpOnly; SameSite=Strict";
        for (cookie, set) in [
            ("a=1; tl=x", format!("tl=; {about}")),
            ("tl=x; __Host-tl=x", format!("__Host-tl=; {about}; Secure")),
        ] {
            let headers = HeaderMap::from_iter([(COOKIE, HeaderValue::from_static(cookie))]);
            assert_eq!(set_cookie(&headers, "tl", None).unwrap(), set.as_str());
        }
    }

    #[test]
    fn the_cookie_is_found_among_others() {
        let parts = |cookies: &[&str]| {
            let request = Request::builder().uri("/");
            let request = cookies.iter().fold(request, |request, c| request.header(COOKIE, *c));
            request.body(()).unwrap().into_parts().0
        };
        let found = |cookies: &[&str]| in_cookie(&parts(cookies), "tl").map(str::to_owned);
        assert_eq!(found(&["a=1; tl=x.y.z; b=2"]).as_deref(), Some("x.y.z"));
        assert_eq!(found(&["a=1", "tl=x"]).as_deref(), Some("x"));
        assert_eq!(found(&["tl=x; __Host-tl=y"]).as_deref(), Some("y"));
        for none in [&[][..], &["tl"], &["xtl=1; tl2=2"], &["TL=1"], &[";;=;"]] {
            assert_eq!(found(none), None, "{none:?}");
        }
    }
}
