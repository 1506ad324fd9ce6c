//! Carries out decisions with the kernel's calls: `move_pages`, `process_madvise`, compaction, cooperation.
//!
//! Owns the accounting of their cost. Refuses to know why anything is done.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use crate::coop::Request;
use crate::interfaces::{Action, Actuator, Outcome};
use crate::machine;
use crate::processes::SharedProcesses;
use crate::sys::{self, Advice};
use crate::types::{
    HUGE_BYTES, HUGE_PAGES, HugeIndex, NodeId, PAGE_BYTES, PageKey, ProcId, TierId, UtilVector, VirtPage,
};

/// Longest round of compaction.
const COMPACTION_TIME: Duration = Duration::from_secs(1);

/// The NUMA nodes of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tier {
    /// The nodes.
    pub nodes: Vec<NodeId>,
}

/// Cost of the actuator's work.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
pub struct Cost {
    /// Processor time of our own thread spent in calls that change memory, µs.
    pub busy_us: u64,
    /// Time in compaction, µs.
    pub compaction_us: u64,
    /// Bytes moved during compaction, by the whole machine: the kernel has no counter per process.
    pub compaction_bytes: u64,
    /// Free huge pages gained by compaction.
    pub compaction_gained: u64,
    /// Requested splits.
    pub split_calls: u64,
}

/// The actuator over the kernel.
#[derive(Debug)]
pub struct KernelActuator {
    processes: SharedProcesses,
    tiers: Vec<Tier>,
    cost: Cost,
    frames: sys::Frames,
    /// Whether compaction is allowed.
    pub may_compact: bool,
    /// Whether to report every action as declined without carrying it out, to measure the cost of tracking
    /// alone.
    pub dry_run: bool,
}

/// Maps the errno of a call on one region or page to an outcome.
fn outcome(error: &io::Error) -> Outcome {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::EFAULT | libc::ENOENT) => Outcome::Gone,
        Some(libc::EAGAIN | libc::EBUSY | libc::EACCES | libc::EINTR) => Outcome::Busy,
        Some(libc::ENOMEM | libc::ENOSPC) => Outcome::NoMemory,
        _ => Outcome::Unsupported,
    }
}

impl KernelActuator {
    /// Makes an actuator for these processes and tiers.
    pub fn new(processes: SharedProcesses, tiers: Vec<Tier>) -> Self {
        Self {
            processes,
            tiers,
            cost: Cost::default(),
            frames: sys::Frames::open(),
            may_compact: true,
            dry_run: false,
        }
    }

    /// Returns the cost since the start.
    pub const fn cost(&self) -> Cost {
        self.cost
    }

    fn advise(&self, proc: ProcId, address: u64, len: u64, advice: Advice) -> Outcome {
        let processes = self.processes.borrow();
        let Some(process) = processes.get(proc) else {
            return Outcome::Gone;
        };
        match process.handle.advise(address, len, advice) {
            Ok(_) => Outcome::Done,
            // A vanished mapping also gives EINVAL; the next survey finds out.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && advice == Advice::Collapse => {
                Outcome::Unsupported
            }
            Err(e) => outcome(&e),
        }
    }

    /// Splits a huge page by aging one base page of it: the kernel splits to do that, and since Linux 6.12
    /// maps base pages that hold only zeros to the shared zero page, which frees them. A cooperating process
    /// is asked first.
    fn split(&mut self, proc: ProcId, region: HugeIndex, used: &UtilVector) -> Outcome {
        self.cost.split_calls += 1;
        let range = region.address()..region.address() + HUGE_BYTES;
        if let Some(link) = self
            .processes
            .borrow_mut()
            .get_mut(proc)
            .and_then(|p| p.coop.as_mut())
            && matches!(link.ask(Request::Release, range), Ok(bytes) if bytes > 0)
        {
            return Outcome::Done;
        }
        let offset = used.first().unwrap_or(0) as u64;
        self.advise(proc, region.page(offset).address(), PAGE_BYTES, Advice::Cold)
    }

    fn sharing(&mut self, proc: ProcId, region: HugeIndex, allow: bool) -> Outcome {
        let range = region.address()..region.address() + HUGE_BYTES;
        let request = if allow {
            Request::Mergeable
        } else {
            Request::Unmergeable
        };
        match self.processes.borrow_mut().get_mut(proc) {
            None => Outcome::Gone,
            Some(process) => match process.coop.as_mut() {
                None => Outcome::Unsupported,
                Some(link) => link
                    .ask(request, range)
                    .map_or_else(|e| outcome(&e), |_| Outcome::Done),
            },
        }
    }

    /// One round of compaction. The kernel's interface compacts whole nodes and takes no bound, but it heeds
    /// SIGKILL: a child asks for it and is ended when enough was moved, or after a second. Its processor time
    /// counts as ours.
    fn compact(&mut self, bytes: u64) -> Outcome {
        if !self.may_compact {
            return Outcome::Unsupported;
        }
        let (free, moved) = (machine::view(&[]).free_huge, machine::pages_migrated());
        let start = Instant::now();
        let node = self
            .tiers
            .first()
            .and_then(|t| t.nodes.first())
            .map_or(0, |n| n.0);
        let by_node = format!("/sys/devices/system/node/node{node}/compact");
        let file = match std::path::Path::new(&by_node).exists() {
            true => by_node.as_str(),
            false => "/proc/sys/vm/compact_memory",
        };
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", "echo 1 > \"$0\"", file]);
        let mut enough = false;
        let result = sys::run_until(&mut command, || {
            let so_far = (machine::pages_migrated() - moved) * PAGE_BYTES;
            enough |= so_far >= bytes || start.elapsed() > COMPACTION_TIME;
            enough
        });
        self.cost.compaction_us += start.elapsed().as_micros() as u64;
        self.cost.compaction_bytes += (machine::pages_migrated() - moved) * PAGE_BYTES;
        self.cost.compaction_gained += machine::view(&[]).free_huge.saturating_sub(free);
        match result {
            Ok((done, time)) => {
                self.cost.busy_us += time.as_micros() as u64;
                if done || enough {
                    Outcome::Done
                } else {
                    Outcome::Unsupported
                }
            }
            Err(_) => Outcome::Unsupported,
        }
    }

    fn roomiest(&self, tier: TierId) -> Option<NodeId> {
        let nodes = &self.tiers.get(tier.index())?.nodes;
        nodes.iter().copied().max_by_key(|n| machine::node_free(*n))
    }

    fn tier_of(&self, node: NodeId) -> Option<TierId> {
        self.tiers
            .iter()
            .position(|t| t.nodes.contains(&node))
            .map(|t| TierId(t as u8))
    }

    /// Moves pages of one process to one tier; returns the outcomes in the order of `pages`.
    fn move_batch(&self, proc: ProcId, pages: &[VirtPage], to: TierId) -> Vec<Outcome> {
        let processes = self.processes.borrow();
        let Some(process) = processes.get(proc) else {
            return vec![Outcome::Gone; pages.len()];
        };
        let Some(node) = self.roomiest(to) else {
            return vec![Outcome::Unsupported; pages.len()];
        };
        match sys::move_pages(process.pid, pages, node) {
            Err(e) => vec![outcome(&e); pages.len()],
            Ok(status) => status
                .into_iter()
                .map(|s| match s {
                    Ok(at) if at == node => Outcome::Done,
                    Ok(_) => Outcome::Busy,
                    Err(errno) => outcome(&io::Error::from_raw_os_error(errno)),
                })
                .collect(),
        }
    }

    fn apply_one(&mut self, action: &Action) -> Outcome {
        match action {
            Action::Move { page, to } => self.move_batch(page.proc, &[page.page], *to)[0],
            Action::Evict { page } => {
                self.advise(page.proc, page.page.address(), PAGE_BYTES, Advice::PageOut)
            }
            Action::Collapse { proc, region } => {
                self.advise(*proc, region.address(), HUGE_BYTES, Advice::Collapse)
            }
            Action::Split { proc, region, used } => self.split(*proc, *region, used),
            Action::Compact { bytes } => self.compact(*bytes),
            Action::Sharing { proc, region, allow } => self.sharing(*proc, *region, *allow),
        }
    }
}

impl Actuator for KernelActuator {
    fn name(&self) -> &'static str {
        "kernel"
    }

    fn apply(&mut self, actions: &[Action], out: &mut Vec<Outcome>) {
        if self.dry_run {
            out.extend(actions.iter().map(|_| Outcome::Busy));
            return;
        }
        let started = sys::thread_cpu_time();
        let base = out.len();
        out.resize(base + actions.len(), Outcome::Busy);
        let mut moves: BTreeMap<(ProcId, TierId), Vec<(usize, VirtPage)>> = BTreeMap::new();
        for (i, action) in actions.iter().enumerate() {
            match action {
                Action::Move { page, to } => moves.entry((page.proc, *to)).or_default().push((i, page.page)),
                other => out[base + i] = self.apply_one(other),
            }
        }
        for ((proc, to), pages) in moves {
            let list: Vec<VirtPage> = pages.iter().map(|(_, p)| *p).collect();
            for ((i, _), result) in pages.iter().zip(self.move_batch(proc, &list, to)) {
                out[base + i] = result;
            }
        }
        self.cost.busy_us += (sys::thread_cpu_time() - started).as_micros() as u64;
    }

    fn locate(&mut self, pages: &[PageKey], out: &mut Vec<Option<TierId>>) {
        if self.tiers.len() < 2 {
            out.extend(pages.iter().map(|_| Some(TierId(0))));
            return;
        }
        let processes = self.processes.borrow();
        for run in pages.chunk_by(|a, b| a.proc == b.proc) {
            let list: Vec<VirtPage> = run.iter().map(|k| k.page).collect();
            let status = processes
                .get(run[0].proc)
                .and_then(|p| sys::page_nodes(p.pid, &list).ok());
            match status {
                None => out.extend(run.iter().map(|_| None)),
                Some(status) => out.extend(status.into_iter().map(|s| self.tier_of(s.ok()?))),
            }
        }
    }

    fn used_now(&mut self, proc: ProcId, region: HugeIndex) -> Option<UtilVector> {
        let processes = self.processes.borrow();
        let mut used = UtilVector::default();
        let page = |address: u64| ((address - region.address()) / PAGE_BYTES) as usize;
        let end = region.address() + HUGE_BYTES;
        let map = &processes.get(proc)?.pagemap;
        map.present(region.address(), end, |run| {
            used.set_range(page(run.start), page(run.end.min(end)))
        })
        .ok()?;
        Some(used)
    }

    fn merged_now(&mut self, proc: ProcId, region: HugeIndex) -> u64 {
        let processes = self.processes.borrow();
        let Some(process) = processes.get(proc) else {
            return 0;
        };
        // For most processes this one short read shows that nothing is merged.
        let merging = std::fs::read_to_string(format!("/proc/{}/ksm_merging_pages", process.pid));
        if merging.map_or(true, |t| t.trim() == "0") {
            return 0;
        }
        let entries = process.pagemap.entries(region.page(0), HUGE_PAGES as usize);
        let merged = |e: &&u64| self.frames.flags(**e).contains(sys::FrameFlags::KSM);
        entries.map_or(0, |all| all.iter().filter(merged).count() as u64)
    }

    fn free_pages(&mut self, tier: TierId) -> u64 {
        let Some(t) = self.tiers.get(tier.index()) else {
            return 0;
        };
        t.nodes.iter().map(|n| machine::node_free(*n) / PAGE_BYTES).sum()
    }
}

/// Returns the processor time in a cost.
pub const fn busy(cost: Cost) -> Duration {
    Duration::from_micros(cost.busy_us)
}
