//! Which IP addresses are public, and who may connect to others.
//!
//! An address is public if the registries of the IANA call it globally reachable. An IPv4 address
//! that is embedded in an IPv6 address is judged as IPv4; obsolete embeddings are refused as a whole.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use super::address::Network;

/// IPv4 that is not public.
const NOT_PUBLIC_V4: [(Ipv4Addr, u8); 18] = [
    (Ipv4Addr::UNSPECIFIED, 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    // Of a cloud: metadata and keys of the machine, at an address that looks public.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 31, 196, 0), 24),
    (Ipv4Addr::new(192, 52, 193, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(192, 175, 48, 0), 24),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 3),
];
/// Where IPv6 is public at all.
const GLOBAL_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
/// In there: Teredo, benchmarks and other protocols; documentation; 6to4; documentation again.
const NOT_PUBLIC_V6: [(Ipv6Addr, u8); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Which IP addresses may be connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressPolicy(Permitted);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Permitted {
    Any,
    PublicAnd(Vec<Network>),
}

impl AddressPolicy {
    /// Public addresses only.
    pub fn public() -> Self {
        Self(Permitted::PublicAnd(Vec::new()))
    }

    /// Public addresses, and those of these networks.
    pub fn public_and(networks: impl IntoIterator<Item = Network>) -> Self {
        Self(Permitted::PublicAnd(networks.into_iter().collect()))
    }

    /// Every address: only for hosts from the operator's configuration.
    pub fn any() -> Self {
        Self(Permitted::Any)
    }

    /// Whether an address may be connected to.
    pub fn permits(&self, address: IpAddr) -> bool {
        self.connectable(address).is_some()
    }

    /// The address to connect to, in its own family, if it may be connected to.
    pub fn connectable(&self, address: IpAddr) -> Option<IpAddr> {
        let address = address.to_canonical();
        let permitted = match &self.0 {
            Permitted::Any => true,
            Permitted::PublicAnd(networks) => {
                is_public(address) || networks.iter().any(|network| network.contains(address))
            }
        };
        permitted.then_some(address)
    }
}

/// Whether an address is one of the public internet.
pub fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !NOT_PUBLIC_V4
        .iter()
        .any(|&(net, length)| Ipv4Net::new(net, length).is_ok_and(|net| net.contains(&address)))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let within = |&(net, length): &(Ipv6Addr, u8)| {
        Ipv6Net::new(net, length).is_ok_and(|net| net.contains(&address))
    };
    if let Some(translated) = nat64(address) {
        return is_public_v4(translated);
    }
    within(&GLOBAL_V6) && !NOT_PUBLIC_V6.iter().any(within) && !is_isatap(address)
}

/// The IPv4 address behind the well-known prefix by which networks without IPv4 reach it.
fn nat64(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [0x64, 0xff9b, 0, 0, 0, 0, high, low] = address.segments() else { return None };
    let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
    Some(Ipv4Addr::new(a, b, c, d))
}

/// Whether the interface is an IPv4 address of a tunnel.
fn is_isatap(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    segments[5] == 0x5efe && matches!(segments[4], 0 | 0x200)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_public() {
        let public = [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "198.17.255.255",
            "223.255.255.255",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2606:4700:4700::1111",
            "2a00:1450:4001:80b::200e",
        ];
        let private = [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::2",
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0:127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "2001::1",
            "2001:0:7f00:1::",
            "2001:10::1",
            "2001:20::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:808:808::",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2606:4700:0:0:0:5efe:7f00:1",
            "2606:4700:0:0:200:5efe:10.0.0.1",
        ];
        for (addresses, expected) in [(&public[..], true), (&private[..], false)] {
            for text in addresses {
                assert_eq!(is_public(text.parse().unwrap()), expected, "{text}");
            }
        }
    }

    #[test]
    fn what_an_operator_permits() {
        let networks = ["10.1.0.0/16", "127.0.0.2", "fd00::/8"].map(|net| net.parse().unwrap());
        let policy = AddressPolicy::public_and(networks);
        let table = [
            ("10.1.2.3", Some("10.1.2.3")),
            ("::ffff:10.1.2.3", Some("10.1.2.3")),
            ("64:ff9b::10.1.2.3", None),
            ("10.2.0.1", None),
            ("127.0.0.2", Some("127.0.0.2")),
            ("127.0.0.1", None),
            ("fd12::1", Some("fd12::1")),
            ("fe80::1", None),
            ("8.8.8.8", Some("8.8.8.8")),
        ];
        for (address, expected) in table {
            let expected = expected.map(|text| text.parse().unwrap());
            assert_eq!(policy.connectable(address.parse().unwrap()), expected, "{address}");
        }
    }
}
