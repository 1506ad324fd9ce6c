//! Probe of the running kernel: features that it offers or lacks, and how to get them. Shown at the start.

use std::path::Path;

use serde::Serialize;

use crate::machine;
use crate::sys::{self, Advice, Pagemap, ProcessHandle, ThpDisable};
use crate::tracker;
use crate::types::Pid;

/// One feature of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Feature {
    /// Short name.
    pub name: &'static str,
    /// Whether it can be used now.
    pub usable: bool,
    /// Its purpose, or why it cannot be used and how to get it.
    pub note: String,
}

/// Result of the probe.
#[derive(Debug, Clone, Serialize)]
pub struct Probe {
    /// Kernel release.
    pub kernel: String,
    /// Whether the effective user is root.
    pub root: bool,
    /// Features, in the order of the documentation.
    pub features: Vec<Feature>,
}

fn feature(name: &'static str, result: Result<String, String>) -> Feature {
    let (usable, note) = match result {
        Ok(note) => (true, note),
        Err(note) => (false, note),
    };
    Feature { name, usable, note }
}

fn release() -> (String, (u32, u32)) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_owned();
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (text, version)
}

impl Probe {
    /// Probes the running kernel with the present privileges. Changes nothing.
    pub fn run() -> Self {
        let (kernel, version) = release();
        let root = rustix::process::geteuid().is_root();
        let me = Pid(std::process::id() as i32);
        let features = vec![
            feature("pagemap-scan", pagemap_scan(me)),
            feature("frames", frames(me)),
            feature("idle-bitmap", idle_bitmap(root)),
            feature("damon", damon(root)),
            feature("write-tracking", write_tracking()),
            feature("process-madvise", process_madvise(me, root)),
            feature("collapse", collapse(version)),
            feature("split-frees-zeros", split(version)),
            feature("thp-by-request", thp_by_request()),
            feature("numa", numa()),
            feature("swap", swap()),
            feature("compaction", compaction(root)),
            feature("ksm", ksm()),
        ];
        Self {
            kernel,
            root,
            features,
        }
    }

    /// Whether a feature can be used.
    pub fn has(&self, name: &str) -> bool {
        self.features.iter().any(|f| f.name == name && f.usable)
    }
}

impl std::fmt::Display for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "Linux {}, {}",
            self.kernel,
            if self.root { "as root" } else { "without root" }
        )?;
        for feature in &self.features {
            writeln!(
                f,
                "  {} {:<18} {}",
                if feature.usable { '+' } else { '-' },
                feature.name,
                feature.note
            )?;
        }
        Ok(())
    }
}

fn pagemap_scan(me: Pid) -> Result<String, String> {
    let map = Pagemap::open(me).map_err(|e| format!("/proc/PID/pagemap: {e}"))?;
    map.present(0x1000, 0x2000, |_| {})
        .map(|()| "PAGEMAP_SCAN: utilisation is read in runs of pages".to_owned())
        .map_err(|_| "needs Linux 6.7; utilisation is read page by page instead, which costs more".to_owned())
}

fn frames(me: Pid) -> Result<String, String> {
    let here = Box::new([1u8; 8192]);
    let address = here.as_ptr() as u64;
    let entry = Pagemap::open(me).and_then(|m| m.entries(crate::types::VirtPage::of_address(address), 1));
    match entry.ok().and_then(|e| e.first().copied()) {
        Some(e) if e & ((1 << 55) - 1) != 0 => Ok("page frame numbers are visible".to_owned()),
        _ => Err(
            "page frame numbers are hidden: root (CAP_SYS_ADMIN) would show them; idle bits and DAMON \
            need them"
                .to_owned(),
        ),
    }
}

fn idle_bitmap(root: bool) -> Result<String, String> {
    if !Path::new(tracker::IDLE_BITMAP).exists() {
        return Err("kernel built without CONFIG_IDLE_PAGE_TRACKING".to_owned());
    }
    if !root {
        return Err("there, but needs root".to_owned());
    }
    Ok("access bits of every page".to_owned())
}

fn damon(root: bool) -> Result<String, String> {
    match tracker::damon_available() {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Err("there, but needs root".to_owned()),
        Err(_) => Err("kernel built without DAMON's sysfs interface".to_owned()),
        Ok(_) if !root => Err("there, but needs root".to_owned()),
        Ok(true) => {
            Ok("over physical addresses, mapped back through the page map; sampled by region".to_owned())
        }
        Ok(false) => Err("in use by another manager or tool (nr_kdamonds is not 0); not touched".to_owned()),
    }
}

fn write_tracking() -> Result<String, String> {
    sys::WriteTracking::open()
        .map(|_| "asynchronous write protection, in cooperating processes only".to_owned())
        .map_err(|e| format!("userfaultfd with asynchronous write protection (Linux 6.7): {e}"))
}

fn process_madvise(me: Pid, root: bool) -> Result<String, String> {
    let handle = ProcessHandle::open(me).map_err(|e| format!("pidfd: {e}"))?;
    // An empty range: only checks that the call exists.
    handle
        .advise(0x1000, 0, Advice::Cold)
        .map_err(|e| format!("process_madvise: {e}"))?;
    if root {
        Ok("huge pages of any process".to_owned())
    } else {
        Err(
            "for other processes it needs root (CAP_SYS_NICE): without it only looking and move_pages work"
                .to_owned(),
        )
    }
}

fn collapse(version: (u32, u32)) -> Result<String, String> {
    let thp = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .map_err(|_| "kernel built without transparent huge pages".to_owned())?;
    if version < (6, 1) {
        return Err("MADV_COLLAPSE needs Linux 6.1".to_owned());
    }
    Ok(format!(
        "MADV_COLLAPSE; the system-wide setting is {}",
        thp.trim()
    ))
}

fn split(version: (u32, u32)) -> Result<String, String> {
    if version >= (6, 12) {
        Ok("splitting a huge page from outside frees base pages that hold zeros".to_owned())
    } else {
        Err("needs Linux 6.12; before, only a cooperating process or paging out gives bloat back".to_owned())
    }
}

fn thp_by_request() -> Result<String, String> {
    // The setting belongs to the whole process: try it, then restore it. "Completely off" stays as it is.
    let was = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if was
        .lines()
        .any(|l| l.strip_prefix("THP_enabled:").is_some_and(|v| v.trim() == "0"))
    {
        return Err("huge pages are switched off for this process tree".to_owned());
    }
    sys::disable_thp(ThpDisable::ExceptAdvised).map_err(|_| {
        "PR_THP_DISABLE_EXCEPT_ADVISED needs Linux 6.18; before, the fault path follows the system's \
        setting"
            .to_owned()
    })?;
    let _ = sys::disable_thp(ThpDisable::No);
    Ok("`run` keeps huge pages out of the program's fault path".to_owned())
}

fn numa() -> Result<String, String> {
    let nodes = machine::nodes();
    if nodes.len() < 2 {
        return Err("one NUMA node: there is nowhere to move pages, MULTI-CLOCK rests".to_owned());
    }
    let list: Vec<String> = nodes
        .iter()
        .map(|(n, bytes, cpus)| {
            format!(
                "{} ({} MiB{})",
                n.0,
                bytes >> 20,
                if *cpus { "" } else { ", memory only" }
            )
        })
        .collect();
    Ok(format!("nodes {}", list.join(", ")))
}

fn swap() -> Result<String, String> {
    match machine::swap_bytes() {
        0 => Err("no swap: anonymous pages of the lowest tier cannot be evicted".to_owned()),
        bytes => Ok(format!("{} MiB", bytes >> 20)),
    }
}

fn compaction(root: bool) -> Result<String, String> {
    if !Path::new("/proc/sys/vm/compact_memory").exists() {
        return Err("kernel built without compaction".to_owned());
    }
    if root {
        Ok("per node, ended when a round has moved enough".to_owned())
    } else {
        Err("needs root".to_owned())
    }
}

fn ksm() -> Result<String, String> {
    match std::fs::read_to_string("/sys/kernel/mm/ksm/run")
        .as_deref()
        .map(str::trim)
    {
        Ok("1") => {
            Ok("running; merged regions become huge pages only when they are frequently used".to_owned())
        }
        Ok(_) => {
            Err("same-page merging is off (/sys/kernel/mm/ksm/run): nothing to coordinate with".to_owned())
        }
        Err(_) => Err("kernel built without same-page merging".to_owned()),
    }
}
