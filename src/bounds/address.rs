//! Addresses (URLs): which texts are valid ones, when two are the same, and which hosts and networks
//! a list names.
//!
//! A text is parsed once, as browsers parse it. Only the parsed address is judged and requested, so
//! `http://0x7f.1/` is 127.0.0.1. What browsers repair silently (backslashes, tabs, credentials in
//! front of the host) is refused.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use url::{Host, Url};

use super::Refused;

/// Bytes of an address.
const MAX_URL: usize = 8192;
/// Bytes of a name.
const MAX_NAME: usize = 253;

/// Why a text is not an address: a phrase that follows the name of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
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
/// [`AddressError`].
pub fn read(text: &str) -> Result<Url, AddressError> {
    check_text(text)?;
    checked(Url::parse(text).map_err(|_| AddressError::NotUrl)?)
}

/// The address that a text means on a page.
///
/// # Errors
/// [`AddressError`].
pub fn read_relative(page: &Url, text: &str) -> Result<Url, AddressError> {
    check_text(text)?;
    checked(page.join(text).map_err(|_| AddressError::NotUrl)?)
}

/// Whether two addresses have scheme, host and port in common.
pub fn is_same_origin(one: &Url, other: &Url) -> bool {
    one.scheme() == other.scheme()
        && one.host() == other.host()
        && one.port_or_known_default() == other.port_or_known_default()
}

/// Whether an address is a loopback address, which no proxy can reach.
pub fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

/// The host of an address, for messages.
pub fn shown_host(url: &Url) -> String {
    url.host_str().unwrap_or_default().to_owned()
}

/// The canonical form of a host, in which hosts are compared: a name in lower case without the final
/// dot, or an IP address in its shortest form. An IPv4 address that is embedded in IPv6 becomes IPv4.
///
/// # Errors
/// [`AddressError::Host`].
pub fn canonical_host(host: &str) -> Result<String, AddressError> {
    match Host::parse(host).map_err(|_| AddressError::Host)? {
        Host::Domain(name) => Ok(checked_name(&name)?.to_owned()),
        Host::Ipv4(address) => Ok(address.to_string()),
        Host::Ipv6(address) => Ok(match IpAddr::V6(address).to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        }),
    }
}

/// A pattern of hosts in a list: `host`, `*.host` (its subdomains), `host:port`, `*.host:port` or `*`
/// (all hosts). An IPv6 address stands in brackets.
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
    /// Whether this pattern of an allow list matches the canonical host and the port. A pattern without
    /// a port matches ports 80 and 443.
    pub fn permits(&self, host: &str, port: u16) -> bool {
        let at_port = self.port.map_or(matches!(port, 80 | 443), |own| own == port);
        at_port && self.hosts.contain(host)
    }

    /// Whether this pattern of a deny list matches the host and the port. A pattern without a port
    /// matches all ports.
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

/// A network in a list, in CIDR notation. A single address is a network with one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network(IpNet);

impl Network {
    /// Whether the network contains an address of its own family.
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

fn check_text(text: &str) -> Result<(), AddressError> {
    if text.len() > MAX_URL {
        return Err(AddressError::TooLong);
    }
    if text.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\') {
        return Err(AddressError::Characters);
    }
    Ok(())
}

fn checked(mut url: Url) -> Result<Url, AddressError> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(AddressError::Scheme);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(AddressError::Credentials);
    }
    if url.port() == Some(0) {
        return Err(AddressError::Port);
    }
    let host = canonical_host(url.host_str().ok_or(AddressError::Host)?)?;
    if url.host_str() != Some(&host) {
        url.set_host(Some(&host)).map_err(|_| AddressError::Host)?;
    }
    url.set_fragment(None);
    if url.as_str().len() > MAX_URL {
        return Err(AddressError::TooLong);
    }
    Ok(url)
}

/// A name without the dot at its end.
fn checked_name(name: &str) -> Result<&str, AddressError> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_of_label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let is_label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(is_of_label);
    if name.len() <= MAX_NAME && name.split('.').all(is_label) {
        return Ok(name);
    }
    Err(AddressError::Host)
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
            ("http://a@example.com/", Err(AddressError::Credentials)),
            ("http://a:b@example.com/", Err(AddressError::Credentials)),
            ("http:\\\\example.com/", Err(AddressError::Characters)),
            ("http://exam\tple.com/", Err(AddressError::Characters)),
            (" http://example.com/", Err(AddressError::Characters)),
            ("http://example.com/\u{a0}", Err(AddressError::Characters)),
            ("http://example..com/", Err(AddressError::Host)),
            ("http://127.0.0.1../", Err(AddressError::Host)),
            ("http://", Err(AddressError::NotUrl)),
            ("//example.com", Err(AddressError::NotUrl)),
            ("example.com", Err(AddressError::NotUrl)),
            ("http://1.2.3.4.5/", Err(AddressError::NotUrl)),
            ("http://256.1.1.1/", Err(AddressError::NotUrl)),
            ("http://[::1%25eth0]/", Err(AddressError::NotUrl)),
            ("http://example.com:0/", Err(AddressError::Port)),
            ("http://example.com:99999/", Err(AddressError::NotUrl)),
            ("ftp://example.com/", Err(AddressError::Scheme)),
            ("file:///etc/passwd", Err(AddressError::Scheme)),
            ("gopher://example.com/", Err(AddressError::Scheme)),
            ("javascript:alert(1)", Err(AddressError::Scheme)),
            ("data:text/plain,x", Err(AddressError::Scheme)),
        ];
        for (text, expected) in table {
            let expected = expected.map(str::to_owned);
            assert_eq!(read(text).map(|url| url.to_string()), expected, "{text}");
        }
        assert_eq!(read(&format!("http://x/{}", "a".repeat(9000))), Err(AddressError::TooLong));
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
