//! Requests of MCP servers that are programs: which hosts the operator lists for one, and what it
//! asked for.
//!
//! Such a request belongs to no run, and counts for no run's budget. Requests are counted here for the
//! audit log, by server, host and outcome.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::bounds::address::{HostPattern, Network};
use crate::bounds::tally::Tally;
use crate::run::Target;

/// The reason of a request of which the outcome is not known.
const CANCELLED: &str = "the server did not wait for the answer";
/// The reason of requests that are counted together.
const SEVERAL: &str = "for several reasons";

/// The hosts that a server may ask.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hosts {
    pub listed: Vec<HostPattern>,
    /// As they are written.
    pub written: Vec<String>,
    /// Networks that may be connected to although they are not public.
    pub private: Vec<Network>,
}

impl Hosts {
    pub fn are_none(&self) -> bool {
        self.listed.is_empty()
    }
}

impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written.join(", "))
    }
}

/// Requests of a server that are counted as one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServerRequest {
    pub server: String,
    /// Host and port; `None` for those that are counted together.
    pub to: Option<(String, u16)>,
    pub is_refused: bool,
    /// Why it was refused, or has failed.
    pub reason: Option<String>,
}

impl ServerRequest {
    fn of_the_rest(self) -> Self {
        Self { to: None, reason: self.reason.map(|_| SEVERAL.to_owned()), ..self }
    }
}

/// Requests of servers that are not recorded in the audit log yet. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ServerRequests(Arc<Mutex<Tally<ServerRequest>>>);

impl ServerRequests {
    /// The requests that are due to be recorded, with their counts; all of them if `is_last`.
    pub fn take(&self, now: Instant, is_last: bool) -> Vec<(ServerRequest, u64)> {
        self.0.lock().take(now, is_last)
    }

    /// Returns requests that could not be recorded; they are due again a minute after they were taken.
    pub fn give_back(&self, request: ServerRequest, count: u64) {
        self.0.lock().give_back(request, count);
    }

    fn note(&self, request: ServerRequest) {
        self.0.lock().note(request, ServerRequest::of_the_rest);
    }
}

/// One server, as requests of it are judged.
pub(super) struct ServerPolicy {
    pub(super) server: String,
    pub(super) hosts: Arc<Hosts>,
    pub(super) noted: ServerRequests,
}

impl ServerPolicy {
    /// Whether its operator lists the host.
    ///
    /// # Errors
    /// Why the request is not sent.
    pub(super) fn admit(
        &self,
        Target { host, port, .. }: Target,
    ) -> Result<PendingServerRequest, String> {
        let server = self.server.clone();
        let is_listed = self.hosts.listed.iter().any(|listed| listed.permits(&host, port));
        let refusal =
            (!is_listed).then(|| format!("{host}:{port} is not listed in mcp.{server}.network"));
        let request = ServerRequest {
            server,
            to: Some((host, port)),
            is_refused: refusal.is_some(),
            reason: Some(refusal.clone().unwrap_or_else(|| CANCELLED.to_owned())),
        };
        let pending = PendingServerRequest { request: Some(request), noted: self.noted.clone() };
        refusal.map_or(Ok(pending), Err)
    }
}

/// A request that was sent, or is refused; it is noted when this is dropped.
pub(super) struct PendingServerRequest {
    request: Option<ServerRequest>,
    noted: ServerRequests,
}

impl PendingServerRequest {
    /// Records its outcome.
    pub(super) fn settle(mut self, failure: Option<&str>) {
        if let Some(request) = &mut self.request {
            request.reason = failure.map(str::to_owned);
        }
    }
}

impl Drop for PendingServerRequest {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.noted.note(request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_noted_whatever_became_of_it() {
        let hosts = Hosts { listed: vec!["a.example".parse().unwrap()], ..Hosts::default() };
        let policy = ServerPolicy {
            server: "s".to_owned(),
            hosts: Arc::new(hosts),
            noted: ServerRequests::default(),
        };
        let target = |host: &str| Target {
            scheme: "https".to_owned(),
            host: host.to_owned(),
            port: 443,
            path: "/".to_owned(),
            declared: false,
        };
        policy.admit(target("a.example")).ok().unwrap().settle(None);
        drop(policy.admit(target("a.example")));
        policy.admit(target("a.example")).ok().unwrap().settle(Some("it is down"));
        assert!(policy.admit(target("b.example")).is_err());
        let taken = policy.noted.take(Instant::now(), false);
        let mut told: Vec<_> =
            taken.iter().map(|(it, _)| (it.is_refused, it.reason.as_deref())).collect();
        told.sort_unstable();
        let refusal = "b.example:443 is not listed in mcp.s.network";
        let expected = [
            (false, None),
            (false, Some("it is down")),
            (false, Some(CANCELLED)),
            (true, Some(refusal)),
        ];
        assert_eq!(told, expected);
    }
}
