//! Access rules of the forward proxy: allowed clients and targets. Closed by default. A name is resolved
//! first and judged by its addresses; connections go to exactly those addresses.

use crate::config::Forward;
use ipnet::IpNet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Whether an address is on the public network. Other addresses have a meaning only near the proxy.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_unspecified()
        || address.is_broadcast()
        || address.is_multicast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && (b == 18 || b == 19));
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let words = address.segments();
    let low = |at: usize| {
        let [a, b] = words[at].to_be_bytes();
        let [c, d] = words[at + 1].to_be_bytes();
        Ipv4Addr::new(a, b, c, d)
    };
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    match words {
        // Global unicast is 2000::/3; within it some ranges embed other addresses, and some are for
        // documentation.
        [0x2001, 0, ..] => false,
        [0x2001, 0xdb8, ..] => false,
        [0x2001, second, ..] if second < 0x200 => false,
        [0x2002, ..] => is_public_v4(low(1)),
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => is_public_v4(low(6)),
        [first, ..] => first & 0xe000 == 0x2000 && first != 0x3fff,
    }
}

/// Whether the proxy may connect to an address: a public one, or one in `allowed`.
pub fn may_reach(address: IpAddr, allowed: &[IpNet]) -> bool {
    let plain = address.to_canonical();
    is_public(plain) || allowed.iter().any(|net| net.contains(&plain))
}

/// Whether a client may use the proxy.
pub fn may_use(client: IpAddr, rules: &Forward) -> bool {
    let client = client.to_canonical();
    rules.clients.iter().any(|net| net.contains(&client))
}

/// Resolves a name to its allowed addresses.
///
/// # Errors
/// The name has no address, or none is allowed.
pub async fn resolve(host: &str, port: u16, allowed: &[IpNet]) -> std::io::Result<Vec<SocketAddr>> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let all: Vec<SocketAddr> = tokio::net::lookup_host((bare, port)).await?.collect();
    let kept: Vec<SocketAddr> = all
        .iter()
        .copied()
        .filter(|address| may_reach(address.ip(), allowed))
        .collect();
    if kept.is_empty() {
        let kind = if all.is_empty() {
            std::io::ErrorKind::NotFound
        } else {
            std::io::ErrorKind::PermissionDenied
        };
        return Err(std::io::Error::new(
            kind,
            format!("{host} has no address that may be connected to"),
        ));
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn public(text: &str) -> bool {
        is_public(text.parse().expect("an address"))
    }

    #[test]
    fn addresses_near_the_proxy_are_not_public() {
        for near in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "198.18.0.1",
            "192.0.0.8",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "2001:db8::1",
            "2001::1",
        ] {
            assert!(!public(near), "{near}");
        }
        for far in [
            "1.1.1.1",
            "8.8.8.8",
            "2606:4700::1111",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
        ] {
            assert!(public(far), "{far}");
        }
    }

    #[test]
    fn allowed_networks_are_reached_all_the_same_also_as_mapped_addresses() {
        let allowed = ["127.0.0.0/8".parse().expect("a network")];
        assert!(may_reach(
            "::ffff:127.0.0.1".parse().expect("an address"),
            &allowed
        ));
        assert!(!may_reach("10.0.0.1".parse().expect("an address"), &allowed));
    }

    #[test]
    fn nobody_may_use_a_proxy_without_clients() {
        let mut rules = Forward::default();
        assert!(!may_use("127.0.0.1".parse().expect("an address"), &rules));
        rules.clients = vec!["192.0.2.0/24".parse().expect("a network")];
        assert!(may_use("::ffff:192.0.2.7".parse().expect("an address"), &rules));
    }
}
