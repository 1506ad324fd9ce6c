//! Facts about the machine: memory, fragmentation, NUMA nodes, swap, control-group limits.
//!
//! Reads `/proc` and `/sys`; keeps no state.

use std::fs;
use std::path::Path;

use crate::interfaces::SystemView;
use crate::types::{HUGE_BYTES, NodeId, PAGE_BYTES, Pid};

/// Order of a 2 MiB block of free memory.
const HUGE_ORDER: usize = 9;

/// Returns a value of `/proc/meminfo` (or a file of its form), converted from KiB to bytes.
pub fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|l| {
        l.split_ascii_whitespace()
            .any(|w| w.trim_end_matches(':') == name)
    })?;
    let mut words = line
        .split_ascii_whitespace()
        .skip_while(|w| w.trim_end_matches(':') != name);
    words.nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the free memory fragmentation index for 2 MiB pages and the number of free 2 MiB blocks, over all
/// zones but DMA. The index is the share of free memory in smaller blocks (Gorman and Whitcroft's unusable
/// free space index).
pub fn fragmentation(buddyinfo: &str) -> Option<(f64, u64)> {
    let (mut free, mut usable) = (0u64, 0u64);
    for line in buddyinfo.lines() {
        let mut words = line.split_ascii_whitespace().skip_while(|w| *w != "zone");
        let zone = words.nth(1)?;
        if zone == "DMA" {
            continue;
        }
        for (order, count) in words.enumerate() {
            let pages = count.parse::<u64>().ok()? << order.min(20);
            free += pages;
            usable += if order >= HUGE_ORDER { pages } else { 0 };
        }
    }
    (free > 0).then(|| {
        (
            1.0 - usable as f64 / free as f64,
            usable * PAGE_BYTES / HUGE_BYTES,
        )
    })
}

/// Returns the NUMA nodes with memory: number, bytes, whether they have processors.
pub fn nodes() -> Vec<(NodeId, u64, bool)> {
    let base = Path::new("/sys/devices/system/node");
    let mut out = Vec::new();
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(number) = name.strip_prefix("node").and_then(|n| n.parse().ok()) else {
            continue;
        };
        let text = fs::read_to_string(entry.path().join("meminfo")).unwrap_or_default();
        let bytes = meminfo(&text, "MemTotal").unwrap_or(0);
        let cpus = fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
        if bytes > 0 {
            out.push((NodeId(number), bytes, !cpus.trim().is_empty()));
        }
    }
    out.sort();
    out
}

/// Returns the free bytes of a node.
pub fn node_free(node: NodeId) -> u64 {
    let text =
        fs::read_to_string(format!("/sys/devices/system/node/node{}/meminfo", node.0)).unwrap_or_default();
    meminfo(&text, "MemFree").unwrap_or(0)
}

/// Returns the bytes of swap space.
pub fn swap_bytes() -> u64 {
    meminfo(
        &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
        "SwapTotal",
    )
    .unwrap_or(0)
}

/// Returns the number of pages migrated since the machine started, by any process.
pub fn pages_migrated() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    counter(&text, "pgmigrate_success")
}

/// Returns a value of `/proc/vmstat` or of a control group's `memory.stat`; 0 if it is absent.
fn counter(text: &str, name: &str) -> u64 {
    let value = |l: &str| l.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value).unwrap_or(0)
}

/// Returns the bytes that a control group can still allocate. Its file pages count as free, as in the
/// kernel's `MemAvailable`: they are reclaimed before any process is killed. (A group that reads files is at
/// its limit all the time, and in no danger.)
fn headroom(limit: u64, usage: u64, stat: &str) -> u64 {
    // Version 1 counts the group's descendants under `total_`.
    let prefix = if stat.lines().any(|l| l.starts_with("total_inactive_file ")) {
        "total_"
    } else {
        ""
    };
    let file = |kind: &str| counter(stat, &format!("{prefix}{kind}_file"));
    let reclaimable = file("inactive") + file("active");
    limit.saturating_sub(usage.saturating_sub(reclaimable))
}

/// Returns (available, limit) of the tightest memory control group above a process, v1 or v2.
fn cgroup_headroom(pid: Pid) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mut best: Option<(u64, u64)> = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let (base, limit, usage) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            _ if controllers.split(',').any(|c| c == "memory") => (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            ),
            _ => continue,
        };
        let mut at = Path::new(base).join(path.trim_start_matches('/'));
        while at.starts_with(base) {
            let number = |file: &str| fs::read_to_string(at.join(file)).ok()?.trim().parse::<u64>().ok();
            // Limits near 2^63 mean "none".
            if let (Some(limit), Some(usage)) = (number(limit).filter(|l| *l < 1 << 60), number(usage)) {
                let stat = fs::read_to_string(at.join("memory.stat")).unwrap_or_default();
                let here = (headroom(limit, usage, &stat), limit);
                if best.is_none_or(|b| tightness(here) < tightness(b)) {
                    best = Some(here);
                }
            }
            if !at.pop() {
                break;
            }
        }
    }
    best
}

fn tightness((available, total): (u64, u64)) -> f64 {
    available as f64 / total.max(1) as f64
}

/// Returns the state of the machine for policies; memory is that of the machine or of the tightest control
/// group of `pids`.
pub fn view(pids: &[Pid]) -> SystemView {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let (fmfi, free_huge) = fragmentation(&fs::read_to_string("/proc/buddyinfo").unwrap_or_default())
        .map_or((None, 0), |(f, h)| (Some(f), h));
    let machine = (
        meminfo(&info, "MemAvailable").unwrap_or(0),
        meminfo(&info, "MemTotal").unwrap_or(0),
    );
    let groups = pids.iter().filter_map(|p| cgroup_headroom(*p));
    let (available_bytes, total_bytes) = groups
        .filter(|(_, limit)| *limit < machine.1)
        .fold(machine, |a, b| if tightness(b) < tightness(a) { b } else { a });
    SystemView {
        fmfi,
        free_huge,
        available_bytes,
        total_bytes,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn fragmentation_is_zero_for_whole_memory_and_near_one_for_splinters() {
        let whole = "Node 0, zone   Normal 0 0 0 0 0 0 0 0 0 4 10\n";
        assert_eq!(fragmentation(whole), Some((0.0, 4 + 20)));
        let splinters =
            "Node 0, zone DMA 0 0 0 0 0 0 0 0 0 0 9\nNode 0, zone Normal 51200 0 0 0 0 0 0 0 0 1 0\n";
        let (fmfi, huge) = fragmentation(splinters).unwrap();
        assert!(fmfi > 0.98 && fmfi < 1.0 && huge == 1, "{fmfi}");
        assert_eq!(fragmentation(""), None);
    }

    #[test]
    fn file_pages_of_a_control_group_count_as_available() {
        let v2 = "anon 400\nfile 580\ninactive_file 500\nactive_file 80\n";
        assert_eq!(headroom(1000, 990, v2), 590);
        let v1 = "inactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n";
        assert_eq!(headroom(1000, 1000, v1), 500);
        assert_eq!(headroom(1000, 1200, ""), 0);
        assert_eq!(headroom(1000, 10, v1), 1000, "never more than the limit");
    }

    #[test]
    fn meminfo_reads_both_forms_when_present() {
        assert_eq!(meminfo("MemTotal:  10 kB\nMemFree: 3 kB", "MemFree"), Some(3072));
        assert_eq!(meminfo("Node 1 MemFree:  7 kB", "MemFree"), Some(7168));
        assert_eq!(meminfo("MemTotal: 1 kB", "SwapTotal"), None);
    }
}
