//! Which addresses webhooks may be sent to.
//!
//! Public addresses, and hosts that the operator lists. The written address is checked before a run starts; the
//! IP addresses of its host, when something is sent.

use url::{Host, Url};

use crate::bounds::address;
use crate::outbound::AddressPolicy;

/// Bytes of an address.
const MAX_URL: usize = 2048;

#[derive(Debug, Clone)]
pub(super) struct Receivers {
    hosts: Vec<String>,
    listed: AddressPolicy,
    any: AddressPolicy,
}

impl Receivers {
    pub(super) fn new(hosts: Vec<String>, listed: AddressPolicy) -> Self {
        Self { hosts, listed, any: AddressPolicy::any() }
    }

    /// The address, or why nothing will ever be sent there: a phrase that follows its name.
    pub(super) fn read(&self, written: &str) -> Result<Url, String> {
        if written.len() > MAX_URL {
            return Err(format!("is longer than {MAX_URL} bytes"));
        }
        let url = address::read(written).map_err(|error| error.to_string())?;
        let literal = match url.host() {
            Some(Host::Ipv4(address)) => Some(address.into()),
            Some(Host::Ipv6(address)) => Some(address.into()),
            Some(Host::Domain(_)) | None => None,
        };
        match literal {
            Some(address) if !self.policy(&url).permits(address) => {
                Err("is an address that is not public".to_owned())
            }
            _ => Ok(url),
        }
    }

    /// Which IP addresses may be connected to.
    pub(super) fn policy(&self, url: &Url) -> &AddressPolicy {
        let is_listed = url.host_str().is_some_and(|host| self.hosts.iter().any(|h| h == host));
        if is_listed { &self.any } else { &self.listed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_never_sent_to_are_known_before_the_run() {
        let listed = AddressPolicy::public_and(["10.1.0.0/16".parse().unwrap()]);
        let receivers = Receivers::new(vec!["localhost".into(), "hooks.internal".into()], listed);
        let table = [
            ("https://example.com/hook?a=b", None),
            ("http://hooks.internal:8080/", None),
            ("http://HOOKS.internal./", None),
            ("http://10.1.2.3/", None),
            ("http://localhost:9/", None),
            ("http://127.0.0.1/", Some("not public")),
            ("http://0x7f.1/", Some("not public")),
            ("http://[::ffff:127.0.0.1]/", Some("not public")),
            ("http://[::1]:80/", Some("not public")),
            ("http://169.254.169.254/latest", Some("not public")),
            ("http://10.2.0.1/", Some("not public")),
            ("https://user:secret@example.com/", Some("credentials")),
            ("ftp://example.com/", Some("neither http nor https")),
            ("javascript:alert(1)", Some("neither http nor https")),
            ("example.com/hook", Some("not a URL")),
            ("http://exa mple.com/", Some("spaces")),
            ("", Some("not a URL")),
        ];
        for (written, refused) in table {
            match (receivers.read(written), refused) {
                (Ok(_), None) => {}
                (Err(why), Some(part)) if why.contains(part) => {}
                (found, _) => panic!("{written}: {found:?}"),
            }
        }
        let long = format!("https://example.com/{}", "a".repeat(MAX_URL));
        assert!(receivers.read(&long).unwrap_err().contains("2048"));
    }
}
