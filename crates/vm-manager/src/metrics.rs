//! Prometheus metrics of a snapshot, and a small HTTP server for them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

use crate::far::FarStatus;
use crate::snapshot::Snapshot;

type Labels = Vec<(String, String)>;

/// Formats a snapshot in the text format of Prometheus (OpenMetrics).
pub fn text(s: &Snapshot) -> String {
    let mut registry = Registry::with_prefix("varve_vm");
    let mut gauge = |name: &str, help: &str, rows: Vec<(Labels, f64)>| {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in rows {
            family.get_or_create(&labels).set(value);
        }
        registry.register(name, help, family);
    };
    let one = |value: f64| vec![(Labels::new(), value)];
    let label = |key: &str, value: &str| vec![(key.to_owned(), value.to_owned())];
    let t = &s.totals;
    let events = [
        ("scanned", t.scanned),
        ("promoted", t.promoted),
        ("demoted", t.demoted),
        ("evicted", t.evicted),
        ("collapsed", t.collapsed),
        ("split", t.split),
        ("failed", t.failed),
        ("compactions", t.compactions),
        ("sharing", t.sharing),
    ];
    gauge(
        "events",
        "Events since start, by kind",
        events
            .iter()
            .map(|(k, v)| (label("kind", k), *v as f64))
            .collect(),
    );
    gauge(
        "cpu_share",
        "Processor time as a share of one core since start",
        vec![
            (label("part", "scan"), s.scan_cpu_share),
            (label("part", "work"), s.work_cpu_share),
            (label("part", "kdamond"), s.kdamond_cpu_share),
        ],
    );
    gauge(
        "metadata_bytes",
        "Bytes of bookkeeping",
        one(s.metadata_bytes as f64),
    );
    gauge(
        "metadata_pages",
        "Pages kept in the bookkeeping",
        one(s.metadata_pages as f64),
    );
    gauge(
        "available_bytes",
        "Memory before reclaim hurts",
        one(s.available_bytes as f64),
    );
    gauge(
        "fragmentation_index",
        "Free memory fragmentation index for huge pages",
        s.fmfi.map_or_else(Vec::new, one),
    );
    gauge(
        "fairness_objective",
        "Objective O of equation 3.3",
        one(s.fairness),
    );
    let of = |f: &dyn Fn(&crate::snapshot::ProcessStatus) -> f64| -> Vec<(Labels, f64)> {
        let labels = |p: &crate::snapshot::ProcessStatus| {
            vec![
                ("pid".to_owned(), p.pid.to_string()),
                ("name".to_owned(), p.name.clone()),
            ]
        };
        s.processes.iter().map(|p| (labels(p), f(p))).collect()
    };
    gauge(
        "process_used_bytes",
        "Base pages in use",
        of(&|p| p.used_bytes as f64),
    );
    gauge(
        "process_huge_pages",
        "Huge pages held",
        of(&|p| p.huge_pages as f64),
    );
    gauge(
        "process_idle_huge_pages",
        "Huge pages held and not frequently accessed",
        of(&|p| p.idle_huge_pages as f64),
    );
    let lists = ["inactive", "active", "promote", "unevictable"];
    let tiers = s.tiers.iter().enumerate().flat_map(|(i, tier)| {
        let row = move |(k, n): (usize, &u64)| {
            (
                vec![
                    ("tier".to_owned(), i.to_string()),
                    ("list".to_owned(), lists[k].to_owned()),
                ],
                *n as f64,
            )
        };
        tier.lists.iter().enumerate().map(row).collect::<Vec<_>>()
    });
    gauge("tier_pages", "Pages by tier and list", tiers.collect());
    if let Some(far) = &s.far {
        far_gauges(&mut gauge, far);
    }
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut out, &registry);
    out
}

type Rows = Vec<(Labels, f64)>;

/// Far memory: bytes, pages by place, faults by source with latencies, slabs by temperature.
fn far_gauges(gauge: &mut impl FnMut(&str, &str, Rows), far: &FarStatus) {
    let one = |value: f64| vec![(Labels::new(), value)];
    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    gauge(
        "far_local_bytes",
        "Bytes that are local",
        one(far.local_bytes as f64),
    );
    // None after a drain.
    let limit = far.drain.is_none().then_some(far.limit_bytes as f64);
    gauge(
        "far_limit_bytes",
        "Most local bytes",
        limit.map_or_else(Rows::new, one),
    );
    gauge(
        "far_stall_share",
        "Share of the last second in which a thread waited for a far page",
        one(far.stall_share),
    );
    gauge("far_table_bytes", "Bytes of tables", one(far.table_bytes as f64));
    gauge(
        "far_saved",
        "What far pages save, in the unit of far.price",
        far.saved.map_or_else(Rows::new, one),
    );
    let mut pages = vec![
        (vec![label("place", "aside")], far.aside_pages as f64),
        (vec![label("place", "one word")], far.repeated_pages as f64),
        (vec![label("place", "lost")], far.poisoned as f64),
    ];
    let mut sources = vec![
        ("first touch", far.zero_faults),
        ("aside", far.aside_faults),
        ("one word", far.repeated_faults),
    ];
    let (mut slabs, mut most) = (Rows::new(), Rows::new());
    for tier in &far.tiers {
        pages.push((vec![label("place", &tier.name)], tier.pages as f64));
        sources.push((&tier.name, tier.faults));
        most.push((vec![label("tier", &tier.name)], f64::from(tier.capacity_slabs)));
        for (temperature, count) in ["hot", "warm", "cold"].iter().zip(tier.by_temperature) {
            let labels = vec![label("tier", &tier.name), label("temperature", temperature)];
            slabs.push((labels, f64::from(count)));
        }
    }
    gauge("far_pages", "Pages by where they are", pages);
    gauge("far_slabs", "Slabs of 1 MiB by tier and temperature", slabs);
    gauge("far_slabs_max", "Most slabs of a tier", most);
    let faults = sources
        .iter()
        .map(|(name, all)| (vec![label("source", name)], all.count as f64));
    gauge(
        "far_faults",
        "Faults since start, by where the page was",
        faults.collect(),
    );
    let times = sources.iter().flat_map(|(name, all)| {
        [("0.5", all.median_ns), ("0.99", all.p99_ns)].map(|(quantile, ns)| {
            let labels = vec![label("source", name), label("quantile", quantile)];
            (labels, ns as f64 / 1e9)
        })
    });
    gauge(
        "far_fault_seconds",
        "Time in the pager until a thread goes on",
        times.collect(),
    );
    let moved = [
        ("aside", far.moved_aside),
        ("out", far.evicted),
        ("unwritten", far.unwritten),
        ("back", far.turned_back),
    ];
    let moved = moved.map(|(kind, count)| (vec![label("kind", kind)], count as f64));
    gauge(
        "far_moved_pages",
        "Pages moved since start: aside, out, of these unwritten, and back as far space was full",
        moved.into(),
    );
    let ahead = ["read", "used", "wasted"].iter().zip(far.ahead);
    let ahead = ahead.map(|(kind, count)| (vec![label("kind", kind)], count as f64));
    gauge(
        "far_ahead_pages",
        "Pages read ahead of a fault since start, of these used, and wasted",
        ahead.collect(),
    );
    let cold = ["page", "compressed"].iter().zip(far.cold_s);
    let cold = cold.map(|(kind, seconds)| (vec![label("slabs", kind)], seconds as f64));
    gauge(
        "far_cold_seconds",
        "Seconds without access after which slabs are cold",
        cold.collect(),
    );
    let migrated = ["up", "down"].iter().zip(far.migrated);
    let migrated = migrated.map(|(way, count)| (vec![label("way", way)], count as f64));
    gauge(
        "far_migrated_slabs",
        "Slabs moved between tiers since start",
        migrated.collect(),
    );
}

/// The latest snapshot, shared with the server.
pub type Shared = Arc<Mutex<Snapshot>>;

/// Serves `/metrics` on `address` until the process ends; returns the bound address.
///
/// # Errors
/// The address cannot be bound.
pub fn serve(address: SocketAddr, shared: Shared) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    let bound = listener.local_addr()?;
    std::thread::Builder::new()
        .name("varve-metrics".to_owned())
        .spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
                let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
                let mut request = [0u8; 1024];
                let got = stream.read(&mut request).unwrap_or(0);
                let found =
                    request[..got].starts_with(b"GET /metrics ") || request[..got].starts_with(b"GET / ");
                let (status, body) = if found {
                    ("200 OK", text(&shared.lock()))
                } else {
                    (
                        "404 Not \
                Found",
                        String::new(),
                    )
                };
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: \
                {}\r\nConnection: close\r\n\r\n",
                    body.len()
                );
                let _ = stream
                    .write_all(head.as_bytes())
                    .and_then(|()| stream.write_all(body.as_bytes()));
            }
        })?;
    Ok(bound)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_part_of_a_snapshot_is_a_metric_and_the_server_gives_it_out() {
        let process = crate::snapshot::ProcessStatus {
            pid: 42,
            name: "re\"dis".to_owned(),
            ..Default::default()
        };
        let snapshot = Snapshot {
            processes: vec![process],
            tiers: vec![crate::snapshot::TierStatus::default()],
            fmfi: Some(0.25),
            ..Snapshot::default()
        };
        let body = text(&snapshot);
        for name in [
            "events",
            "cpu_share",
            "metadata_bytes",
            "fragmentation_index",
            "process_huge_pages",
            "tier_pages",
        ] {
            assert!(body.contains(&format!("varve_vm_{name}")), "{name} in {body}");
        }
        assert!(body.ends_with("# EOF\n"));
        assert!(!body.contains("varve_vm_far"), "no far memory, no metrics of it");
        let tier = crate::far::FarTierStatus {
            name: "/ssd".to_owned(),
            by_temperature: [1, 2, 3],
            ..Default::default()
        };
        let far = FarStatus {
            stall_share: 0.25,
            tiers: vec![tier],
            ..FarStatus::default()
        };
        let body = text(&Snapshot {
            far: Some(far),
            ..Snapshot::default()
        });
        for line in [
            "varve_vm_far_stall_share{} 0.25",
            "varve_vm_far_slabs{tier=\"/ssd\",temperature=\"cold\"} 3.0",
            "varve_vm_far_fault_seconds{source=\"/ssd\",quantile=\"0.99\"} 0.0",
            "varve_vm_far_pages{place=\"aside\"} 0.0",
        ] {
            assert!(body.contains(line), "{line} in {body}");
        }
        assert!(!body.contains("varve_vm_far_saved{"), "no price, no saving");
        let shared: Shared = Arc::new(Mutex::new(snapshot));
        let address = serve("127.0.0.1:0".parse().unwrap(), shared).unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("varve_vm_events"));
    }
}
