//! The engine's reports on itself: snapshots and heat.

use crate::engine::Engine;
use crate::heat::HeatMap;
use crate::ingens::{Ingens, promotion_metric};
use crate::interfaces::{Actuator, Policy};
use crate::multiclock::{ListKind, MultiClock};
use crate::snapshot::{ProcessStatus, Snapshot, TierStatus, Totals};
use crate::types::{HUGE_BYTES, PAGE_BYTES, ProcId, TierId};

/// Clock ticks a second in `/proc/PID/stat`; this value on every Linux.
const TICKS: f64 = 100.0;

/// Returns the processor time of a (kernel) thread in clock ticks.
fn ticks(pid: u64) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

impl Engine {
    /// Adds a sample to the heat maps. Heat is Ingens' frequency of a region over 8, if it was ever observed.
    pub(crate) fn take_heat(&mut self) {
        let Some(ingens) = &self.ingens else { return };
        for (id, process) in self.processes.borrow().iter() {
            let regions: Vec<(u64, u64, Option<f64>)> = ingens
                .regions(id)
                .map(|(i, r)| {
                    let heat = (r.looks > 0).then(|| f64::from(r.frequency) / 8.0);
                    (i.address(), i.address() + HUGE_BYTES, heat)
                })
                .collect();
            let map = self.heat.entry(id).or_insert_with(|| HeatMap {
                pid: process.pid.0,
                name: process.name.clone(),
                step_s: 1.0,
                ..HeatMap::default()
            });
            map.push(&regions);
        }
        // DAMON's kernel thread works for this manager, so its time is reported.
        let path = std::path::Path::new(crate::tracker::DAMON_ADMIN).join("0/pid");
        let pid = std::fs::read_to_string(path)
            .ok()
            .and_then(|t| t.trim().parse::<u64>().ok());
        if self.tracker.info().name == "damon"
            && let Some(now) = pid.and_then(ticks)
        {
            let first = self.kdamond.map_or(now, |(first, _)| first.min(now));
            self.kdamond = Some((first, now));
        }
    }

    /// Returns a snapshot of the present state.
    pub fn snapshot(&mut self) -> Snapshot {
        let uptime_s = self.started.elapsed().as_secs_f64();
        let (scan, work) = self.governor.totals();
        let info = self.tracker.info();
        let processes = self.process_statuses();
        let metadata: Vec<(u64, u64)> = [
            self.ingens.as_ref().map(Policy::metadata),
            self.multi_clock.as_ref().map(Policy::metadata),
        ]
        .into_iter()
        .flatten()
        .collect();
        let t = self.totals;
        let cost = self.actuator.cost();
        let share = |s: f64| s / uptime_s.max(0.001);
        let tiers = (0..self.tiers.len()).map(|i| self.tier_status(i)).collect();
        Snapshot {
            far: None,
            version: 1,
            manager: std::process::id(),
            uptime_s,
            policies: self.policy_names(),
            tracker: format!(
                "{} ({} KiB): {}",
                info.name,
                info.resolution_bytes / 1024,
                info.note
            ),
            notes: self.notes.clone(),
            processes,
            tiers,
            totals: Totals {
                scanned: t.scanned,
                promoted: t.promoted,
                demoted: t.demoted,
                evicted: t.evicted,
                collapsed: t.collapsed,
                split: t.split,
                failed: t.failed,
                compactions: t.compactions,
                sharing: t.sharing,
            },
            scan_cpu_share: share(scan.as_secs_f64()),
            work_cpu_share: share(work.as_secs_f64()),
            kdamond_cpu_share: share(
                self.kdamond
                    .map_or(0.0, |(first, last)| (last - first) as f64 / TICKS),
            ),
            compaction_s: cost.compaction_us as f64 / 1e6,
            compaction_bytes: cost.compaction_bytes,
            compaction_gained: cost.compaction_gained,
            metadata_bytes: metadata.iter().map(|m| m.0).sum(),
            metadata_pages: metadata.iter().map(|m| m.1).max().unwrap_or(0),
            fmfi: self.view.fmfi,
            available_bytes: self.view.available_bytes,
            fairness: self.ingens.as_ref().map_or(0.0, Ingens::fairness_objective),
            heat: self.heat.values().cloned().collect(),
        }
    }

    fn process_statuses(&self) -> Vec<ProcessStatus> {
        let processes: Vec<(ProcId, i32, String, bool)> = self
            .processes
            .borrow()
            .iter()
            .map(|(id, p)| (id, p.pid.0, p.name.clone(), p.coop.is_some()))
            .collect();
        let tau = self.config.ingens.tau;
        let status = |(id, pid, name, cooperating): (ProcId, i32, String, bool)| {
            let claim = self.ingens.as_ref().and_then(|p| p.claim(id));
            let regions: Vec<u64> = self
                .ingens
                .iter()
                .flat_map(|p| p.regions(id))
                .map(|(_, r)| u64::from(r.util.weight()) * PAGE_BYTES)
                .collect();
            ProcessStatus {
                pid,
                name,
                cooperating,
                far_pages: 0,
                regions: regions.len() as u64,
                used_bytes: regions.iter().sum(),
                huge_pages: claim.map_or(0, |c| c.huge_pages),
                idle_huge_pages: claim.map_or(0, |c| c.idle_huge_pages),
                metric: claim.map_or(0.0, |c| promotion_metric(&c, tau) * (1 << 20) as f64),
            }
        };
        processes.into_iter().map(status).collect()
    }

    fn policy_names(&self) -> Vec<String> {
        let names = [
            self.ingens.as_ref().map(Policy::name),
            self.multi_clock.as_ref().map(Policy::name),
        ];
        names.into_iter().flatten().map(str::to_owned).collect()
    }

    fn tier_status(&mut self, i: usize) -> TierStatus {
        let tier = TierId(i as u8);
        let list = |p: &MultiClock| {
            [
                ListKind::Inactive,
                ListKind::Active,
                ListKind::Promote,
                ListKind::Unevictable,
            ]
            .map(|k| p.list_len(tier, k))
        };
        TierStatus {
            nodes: self.tiers[i].nodes.iter().map(|n| n.0).collect(),
            free_bytes: self.actuator.free_pages(tier) * PAGE_BYTES,
            lists: self.multi_clock.as_ref().map_or([0; 4], list),
        }
    }
}
