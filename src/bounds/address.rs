//! Addresses as they were written: which are valid, when two are the same, and which hosts and
//! networks a list names.
//!
//! A text is read once, as browsers read it, and only what came of that is judged and asked: however
//! an IP address is written, `http://0x7f.1/` is 127.0.0.1. What those readers repair in silence
//! (backslashes, tabs, credentials in front of the host) is refused instead.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use url::{Host, Url};

use super::Refused;

/// Bytes of an address.
const MAX_URL: usize = 8192;
/// Bytes of a name.
const MAX_NAME: usize = 253;

/// Why a text is no address: a phrase that follows its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoAddress {
    #[error("is longer than {MAX_URL} bytes")]
    TooLong,
    #[error("contains spaces, control characters or backslashes")]
    Characters,
    #[error("is not a URL")]
    NotUrl,
    #[error("is neither http nor https")]
    Scheme,
    #[error("contains credentials")]
    Credentials,
    #[error("has no valid host")]
    Host,
    #[error("has no valid port")]
    Port,
}

/// The address that a text means, without its fragment.
///
/// # Errors
/// [`NoAddress`].
pub fn read(text: &str) -> Result<Url, NoAddress> {
    check_text(text)?;
    checked(Url::parse(text).map_err(|_| NoAddress::NotUrl)?)
}

/// The address that a text means on a page.
///
/// # Errors
/// [`NoAddress`].
pub fn read_relative(page: &Url, text: &str) -> Result<Url, NoAddress> {
    check_text(text)?;
    checked(page.join(text).map_err(|_| NoAddress::NotUrl)?)
}

/// Whether two addresses have scheme, host and port in common.
pub fn is_same_origin(one: &Url, other: &Url) -> bool {
    one.scheme() == other.scheme()
        && one.host() == other.host()
        && one.port_or_known_default() == other.port_or_known_default()
}

/// The host of an address, for messages.
pub fn shown_host(url: &Url) -> String {
    url.host_str().unwrap_or_default().to_owned()
}

/// A host in the one form in which it is compared: a name in lower case, without the dot at its end;
/// an IP address in its shortest form, IPv4 where it is one in disguise.
///
/// # Errors
/// [`NoAddress::Host`].
pub fn canonical_host(host: &str) -> Result<String, NoAddress> {
    match Host::parse(host).map_err(|_| NoAddress::Host)? {
        Host::Domain(name) => Ok(checked_name(&name)?.to_owned()),
        Host::Ipv4(address) => Ok(address.to_string()),
        Host::Ipv6(address) => Ok(match IpAddr::V6(address).to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        }),
    }
}

/// Hosts that a list names: `host`, `*.host` (what is below it), `host:port`, `*.host:port`, `*`
/// (all); an IPv6 address stands in brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPattern {
    hosts: Hosts,
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    All,
    One(String),
    /// With the dot in front.
    Below(String),
}

impl HostPattern {
    /// Whether a list that permits permits this host, in its canonical form, at this port: without
    /// a port of its own, at 80 and 443.
    pub fn permits(&self, host: &str, port: u16) -> bool {
        let at_port = self.port.map_or(matches!(port, 80 | 443), |own| own == port);
        at_port && self.hosts.contain(host)
    }

    /// Whether a list that forbids forbids it: without a port of its own, at every one.
    pub fn forbids(&self, host: &str, port: u16) -> bool {
        self.port.is_none_or(|own| own == port) && self.hosts.contain(host)
    }
}

impl Hosts {
    fn contain(&self, host: &str) -> bool {
        match self {
            Self::All => true,
            Self::One(own) => own == host,
            Self::Below(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        }
    }
}

impl FromStr for HostPattern {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Self, Refused> {
        let refused = || {
            Refused(
                "is not a host, *.host or *, with or without :port (an IPv6 address in brackets)"
                    .to_owned(),
            )
        };
        let (hosts, port) = match text.rfind(':').filter(|at| !text[*at..].contains(']')) {
            Some(at) => (&text[..at], Some(read_port(&text[at + 1..]).ok_or_else(refused)?)),
            None => (text, None),
        };
        if hosts == "*" {
            return Ok(Self { hosts: Hosts::All, port });
        }
        let (name, is_below) = match hosts.strip_prefix("*.") {
            Some(name) => (name, true),
            None => (hosts, false),
        };
        let is_plain = check_text(name).is_ok() && !name.contains(['*', '%']);
        let host = Some(name).filter(|_| is_plain).and_then(|name| canonical_host(name).ok());
        let host = host.ok_or_else(refused)?;
        let is_ip = host.starts_with('[') || host.parse::<IpAddr>().is_ok();
        let hosts = match is_below {
            true if is_ip => return Err(refused()),
            true => Hosts::Below(format!(".{host}")),
            false => Hosts::One(host),
        };
        Ok(Self { hosts, port })
    }
}

fn read_port(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port > 0)
}

/// A network that a list names, as CIDR; a single address is one of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network(IpNet);

impl Network {
    /// Whether an address, in its own family, lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }
}

impl FromStr for Network {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Self, Refused> {
        let single = |text: &str| text.parse::<IpAddr>().ok().map(IpNet::from);
        let net = text.parse::<IpNet>().ok().or_else(|| single(text));
        let net = net
            .ok_or_else(|| Refused("is not a network such as 10.0.0.0/8 or fd00::/8".to_owned()))?;
        Ok(Self(net.trunc()))
    }
}

fn check_text(text: &str) -> Result<(), NoAddress> {
    if text.len() > MAX_URL {
        return Err(NoAddress::TooLong);
    }
    if text.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\') {
        return Err(NoAddress::Characters);
    }
    Ok(())
}

fn checked(mut url: Url) -> Result<Url, NoAddress> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(NoAddress::Scheme);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(NoAddress::Credentials);
    }
    if url.port() == Some(0) {
        return Err(NoAddress::Port);
    }
    let host = canonical_host(url.host_str().ok_or(NoAddress::Host)?)?;
    if url.host_str() != Some(&host) {
        url.set_host(Some(&host)).map_err(|_| NoAddress::Host)?;
    }
    url.set_fragment(None);
    if url.as_str().len() > MAX_URL {
        return Err(NoAddress::TooLong);
    }
    Ok(url)
}

/// A name without the dot at its end.
fn checked_name(name: &str) -> Result<&str, NoAddress> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_of_label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let is_label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(is_of_label);
    if name.len() <= MAX_NAME && name.split('.').all(is_label) {
        return Ok(name);
    }
    Err(NoAddress::Host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_of_each_address() {
        let table = [
            ("http://EXAMPLE.com", Ok("http://example.com/")),
            ("https://example.com.:443/a?b#c", Ok("https://example.com/a?b")),
            ("http://0x7f.1/", Ok("http://127.0.0.1/")),
            ("http://2130706433/", Ok("http://127.0.0.1/")),
            ("http://0177.0.0.01/", Ok("http://127.0.0.1/")),
            ("http://[::ffff:127.0.0.1]:81/", Ok("http://127.0.0.1:81/")),
            ("http://[::ffff:7f00:1]/", Ok("http://127.0.0.1/")),
            ("http://①②⑦.⓪.⓪.①/", Ok("http://127.0.0.1/")),
            ("http://bücher.example/ü", Ok("http://xn--bcher-kva.example/%C3%BC")),
            ("http://%65xample.com/", Ok("http://example.com/")),
            ("http://a@example.com/", Err(NoAddress::Credentials)),
            ("http://a:b@example.com/", Err(NoAddress::Credentials)),
            ("http:\\\\example.com/", Err(NoAddress::Characters)),
            ("http://exam\tple.com/", Err(NoAddress::Characters)),
            (" http://example.com/", Err(NoAddress::Characters)),
            ("http://example.com/\u{a0}", Err(NoAddress::Characters)),
            ("http://example..com/", Err(NoAddress::Host)),
            ("http://127.0.0.1../", Err(NoAddress::Host)),
            ("http://", Err(NoAddress::NotUrl)),
            ("//example.com", Err(NoAddress::NotUrl)),
            ("example.com", Err(NoAddress::NotUrl)),
            ("http://1.2.3.4.5/", Err(NoAddress::NotUrl)),
            ("http://256.1.1.1/", Err(NoAddress::NotUrl)),
            ("http://[::1%25eth0]/", Err(NoAddress::NotUrl)),
            ("http://example.com:0/", Err(NoAddress::Port)),
            ("http://example.com:99999/", Err(NoAddress::NotUrl)),
            ("ftp://example.com/", Err(NoAddress::Scheme)),
            ("file:///etc/passwd", Err(NoAddress::Scheme)),
            ("gopher://example.com/", Err(NoAddress::Scheme)),
            ("javascript:alert(1)", Err(NoAddress::Scheme)),
            ("data:text/plain,x", Err(NoAddress::Scheme)),
        ];
        for (text, expected) in table {
            let expected = expected.map(str::to_owned);
            assert_eq!(read(text).map(|url| url.to_string()), expected, "{text}");
        }
        assert_eq!(read(&format!("http://x/{}", "a".repeat(9000))), Err(NoAddress::TooLong));
    }

    #[test]
    fn hosts_of_lists() {
        let table: &[(&str, &[&str], &[&str])] = &[
            (
                "api.example.com",
                &[
                    "http://api.example.com",
                    "https://API.example.com.",
                    "http://api.example.com:443",
                ],
                &[
                    "https://api.example.com:8443",
                    "https://example.com",
                    "https://a.api.example.com",
                ],
            ),
            (
                "*.Example.com",
                &["https://a.example.com", "https://a.b.example.com"],
                &["https://example.com", "https://badexample.com", "https://example.com.evil.test"],
            ),
            (
                "example.com:8080",
                &["http://example.com:8080"],
                &["http://example.com", "https://example.com"],
            ),
            ("*.example.com:81", &["http://x.example.com:81"], &["http://x.example.com"]),
            ("*", &["http://anything", "https://1.1.1.1"], &["http://anything:81"]),
            ("*:81", &["http://anything:81"], &["http://anything"]),
            ("bücher.example", &["http://xn--bcher-kva.example"], &["http://bucher.example"]),
            ("127.0.0.1:80", &["http://0x7f.1", "http://[::ffff:7f00:1]"], &["http://127.0.0.2"]),
            ("[::1]", &["http://[0:0::1]"], &["http://[::2]", "http://[::1]:81"]),
            ("[::1]:81", &["http://[::1]:81"], &["http://[::1]"]),
            ("[::ffff:10.0.0.1]", &["http://10.0.0.1"], &["http://10.0.0.2"]),
        ];
        for (pattern, inside, outside) in table {
            let pattern: HostPattern = pattern.parse().unwrap();
            for (urls, expected) in [(inside, true), (outside, false)] {
                for url in *urls {
                    let url = read(url).unwrap();
                    let port = url.port_or_known_default().unwrap();
                    let host = url.host_str().unwrap();
                    assert_eq!(pattern.permits(host, port), expected, "{pattern:?} {url}");
                }
            }
        }
        let anywhere: HostPattern = "example.com".parse().unwrap();
        assert!(anywhere.forbids("example.com", 1) && !anywhere.permits("example.com", 1));
        for text in [
            "",
            "*.",
            "**",
            "a*.example.com",
            "*.*.com",
            "example.com:",
            "example.com:0",
            "example.com:+1",
            "example.com:65536",
            "example.com:80:80",
            "https://example.com",
            "example.com/path",
            "user@example.com",
            "example .com",
            "exam%70le.com",
            "::1",
            "[::1",
            "*.127.0.0.1",
            "*.[::1]",
            "a..b",
        ] {
            assert!(text.parse::<HostPattern>().is_err(), "{text}");
        }
    }

    #[test]
    fn networks_of_lists() {
        let net: Network = "10.1.2.3/16".parse().unwrap();
        assert!(net.contains("10.1.255.1".parse().unwrap()));
        assert!(!net.contains("10.2.0.1".parse().unwrap()));
        for text in ["", "10.0.0.0/33", "10.0.0/8", "example.com", "fd00::/129", "[::1]", "0x7f.1"]
        {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }
}
