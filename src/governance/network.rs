//! The network rule: which hosts may be contacted, on which ports.
//!
//! `deny` beats everything. An address from the operator's configuration needs no entry in `allow`; any
//! other needs one, and an empty list permits nothing. The rule judges host and port as written. The IP
//! address to which a name resolves is checked where the connection is made (`outbound/`), again for
//! every redirect.

use std::net::IpAddr;

use super::gate::{PolicyError, Question, Ruling};
use super::{ActionKind, Decision, Policy};
use crate::bounds::Refused;
use crate::bounds::address::{HostPattern, Network};
use crate::bounds::networks::AddressPolicy;
use crate::run::Target;

/// The compiled lists.
#[derive(Debug)]
pub(super) struct NetworkRules {
    allow: Vec<(String, HostPattern)>,
    deny: Vec<(String, HostPattern)>,
    /// Denied hosts that only cause a warning.
    observed: Vec<(String, HostPattern)>,
    /// Networks that may be connected to although they are not public.
    pub(super) private: Vec<Network>,
    /// Names of the secrets that are added to requests of programs.
    pub(super) credentials: Vec<String>,
    /// Whether nothing is refused.
    pub(super) observes: bool,
}

impl NetworkRules {
    pub(super) fn new(policy: &Policy) -> Result<Self, PolicyError> {
        let private = policy.allow_private.iter().map(|network| {
            network.parse().map_err(|refused| wrong("network.allow_private", network, refused))
        });
        Ok(Self {
            allow: patterns("network.allow", &policy.allow_hosts)?,
            deny: patterns("network.deny", &policy.deny_hosts)?,
            observed: patterns("network.deny", &policy.deny_hosts_observed)?,
            private: private.collect::<Result<_, _>>()?,
            credentials: policy.credentials.clone(),
            observes: policy.observes,
        })
    }

    /// Whether there is a host that may be contacted.
    pub(super) fn permits_any(&self) -> bool {
        !self.allow.is_empty()
    }

    /// The entry that allows a request to that place.
    pub(super) fn allowed_by(&self, target: &Target) -> Option<String> {
        let Target { host, port, .. } = target;
        let allowing = self.allow.iter().find(|(_, hosts)| hosts.permits(host, *port));
        allowing.map(|(written, _)| written.clone())
    }

    /// Why a request to this target is refused.
    pub(super) fn objection(&self, target: &Target) -> Option<String> {
        self.objection_with_entry(target).map(|(why, _)| why)
    }

    /// As [`Self::objection`], with the entry of a list that decides, if there is one.
    pub(super) fn objection_with_entry(&self, target: &Target) -> Option<(String, Option<String>)> {
        let Target { host, port, declared, .. } = target;
        if let Some(written) = covering(&self.deny, target) {
            let why = format!("{host}:{port} is denied by {written:?} (network.deny)");
            return Some((why, Some(written.to_owned())));
        }
        if *declared {
            return None;
        }
        if self.allow.iter().any(|(_, hosts)| hosts.permits(host, *port)) {
            let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
            let addresses = AddressPolicy::public_and(self.private.iter().copied());
            let is_private = address.is_some_and(|address| !addresses.permits(address));
            return is_private.then(|| {
                (format!("{host} is not public, and in no network of network.allow_private"), None)
            });
        }
        if self.allow.is_empty() {
            let why = "this agent may not use the network (network.allow is empty)".to_owned();
            return Some((why, None));
        }
        let allowed = self.allow.iter().take(SHOWN).map(|(written, _)| written.as_str());
        let allowed = allowed.collect::<Vec<_>>().join(", ");
        let more = if self.allow.len() > SHOWN { ", …" } else { "" };
        let why = format!("{host}:{port} is not allowed; network.allow has {allowed}{more}");
        Some((why, None))
    }

    /// The warning of an observed entry about a request that passes, and the entry.
    pub(super) fn observed_objection(&self, target: &Target) -> Option<(String, String)> {
        let Target { host, port, .. } = target;
        let written = covering(&self.observed, target)?;
        let why = format!("{host}:{port} would be denied by {written:?}, which only observes");
        Some((why, written.to_owned()))
    }
}

/// The first of these patterns that covers a place.
fn covering<'a>(patterns: &'a [(String, HostPattern)], target: &Target) -> Option<&'a str> {
    let Target { host, port, .. } = target;
    let meant = patterns.iter().find(|(_, hosts)| hosts.forbids(host, *port));
    meant.map(|(written, _)| written.as_str())
}

/// Entries that a refusal names.
const SHOWN: usize = 10;

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let rules = &question.policy.network;
    let mut observed = Ruling::NoObjection;
    for action in question.call.actions.iter() {
        let ActionKind::Fetch(target) = &action.what else { continue };
        match rules.objection_with_entry(target) {
            Some((why, None)) => return Ruling::Objection(Decision::Blocked, why),
            Some((why, Some(entry))) => return Ruling::Matched(Decision::Blocked, why, entry),
            None => {}
        }
        if let Some((why, entry)) = rules.observed_objection(target) {
            observed = Ruling::Observed(Decision::Blocked, why, Some(entry));
        }
    }
    observed
}

fn patterns(
    setting: &'static str,
    written: &[String],
) -> Result<Vec<(String, HostPattern)>, PolicyError> {
    let pattern = |text: &String| match text.parse() {
        Ok(hosts) => Ok((text.clone(), hosts)),
        Err(refused) => Err(wrong(setting, text, refused)),
    };
    written.iter().map(pattern).collect()
}

fn wrong(setting: &'static str, pattern: &str, Refused(message): Refused) -> PolicyError {
    PolicyError { setting, pattern: pattern.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(allow: &[&str], deny: &[&str], url: &str, declared: bool) -> Option<String> {
        let owned = |list: &[&str]| list.iter().map(|&entry| entry.to_owned()).collect();
        let policy = Policy {
            allow_hosts: owned(allow),
            deny_hosts: owned(deny),
            allow_private: owned(&["10.0.0.0/8"]),
            ..Policy::default()
        };
        let url = crate::bounds::address::read(url).unwrap();
        NetworkRules::new(&policy).unwrap().objection(&Target::of(&url, declared))
    }

    #[test]
    fn requests_by_host_and_port() {
        let allow = ["api.example.com", "*.example.org", "dev.example.com:8080", "10.0.0.1"];
        let deny = ["secret.example.org", "*.internal", "api.example.com:80"];
        let table = [
            ("https://api.example.com/x", true, true),
            ("https://API.EXAMPLE.COM./x", true, true),
            ("http://api.example.com/x", false, false),
            ("https://api.example.com:8443/x", false, true),
            ("https://api.example.com.evil.test/", false, true),
            ("https://evil.test/api.example.com", false, true),
            ("https://a.example.org/", true, true),
            ("https://example.org/", false, true),
            ("https://secret.example.org/", false, false),
            ("https://secret.example.org:444/", false, false),
            ("http://dev.example.com:8080/", true, true),
            ("http://dev.example.com/", false, true),
            ("http://0xa000001/", true, true),
            ("http://[::ffff:10.0.0.1]/", true, true),
            ("http://db.internal:5432/", false, false),
        ];
        for (url, asked, declared) in table {
            assert_eq!(judged(&allow, &deny, url, false).is_none(), asked, "{url}");
            assert_eq!(judged(&allow, &deny, url, true).is_none(), declared, "{url} declared");
        }
        for (host, asked) in [
            ("169.254.169.254", false),
            ("127.0.0.1", false),
            ("[::1]", false),
            ("[::ffff:127.0.0.1]", false),
            ("[fd00:ec2::254]", false),
            ("[64:ff9b::a00:1]", false),
            ("10.9.9.9", true),
            ("1.1.1.1", true),
            ("[2606:4700:4700::1111]", true),
            ("localhost", true),
        ] {
            let url = format!("http://{host}/");
            let said = judged(&["*", host], &[], &url, false);
            assert_eq!(said.is_none(), asked, "{url}: {said:?}");
            assert!(said.is_none_or(|why| why.contains("network.allow_private")), "{url}");
            assert_eq!(judged(&[host], &[], &url, true), None, "{url} declared");
        }
        let nothing = judged(&[], &[], "https://example.com/", false).unwrap();
        assert!(nothing.contains("may not use the network"), "{nothing}");
        assert_eq!(judged(&["*"], &[], "https://anything.test/", false), None);
    }
}
