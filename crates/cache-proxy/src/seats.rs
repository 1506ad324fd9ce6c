//! Limits on connections of clients: in all, and from each address. Tunnels count too.

use crate::config::Limits;
use crate::metrics::Metrics;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

/// Open connections, in all and of each address.
#[derive(Default)]
pub struct Seats(Mutex<(usize, HashMap<IpAddr, usize>)>);

/// The slot of a connection; freed on drop.
pub struct Seat {
    seats: Arc<Seats>,
    metrics: Arc<Metrics>,
    address: IpAddr,
}

impl Seats {
    /// Takes a slot for a client; `None` at a limit.
    pub fn take(self: &Arc<Self>, limits: &Limits, metrics: &Arc<Metrics>, address: IpAddr) -> Option<Seat> {
        let address = counted(address);
        let mut seats = self.0.lock();
        let (all, by_address) = &mut *seats;
        let of_address = by_address.get(&address).copied().unwrap_or(0);
        if *all >= limits.connections || of_address >= limits.connections_per_address {
            metrics.connections_refused.inc();
            return None;
        }
        *all += 1;
        by_address.insert(address, of_address + 1);
        metrics.connections.inc();
        Some(Seat {
            seats: Arc::clone(self),
            metrics: Arc::clone(metrics),
            address,
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.seats.0.lock();
        let (all, by_address) = &mut *seats;
        *all -= 1;
        if let Some(count) = by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                by_address.remove(&self.address);
            }
        }
        self.metrics.connections.dec();
    }
}

/// Returns the address that a client is counted by; for IPv6 the /64 network, which is one customer.
fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn clients_of_one_network_of_ipv6_are_counted_together() {
        let of = |text: &str| counted(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }
}
