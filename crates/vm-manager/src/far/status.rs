//! What a pager tells about itself: counts, programs, heat.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use varve_far::PAGE_BYTES;
use varve_far::table::CHUNK_BYTES;

use super::counters::{FaultKind, Latencies};
use super::goal::Drain;
use super::pager::Pager;
use crate::heat::HeatMap;
use crate::types::Pid;

/// One tier, for people.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FarTierStatus {
    /// Its directory, or that it is compressed memory.
    pub name: String,
    /// Median of 4 KiB reads when it joined, nanoseconds.
    pub read_ns: u64,
    /// 1 MiB slabs in it.
    pub slabs: u32,
    /// Most slabs.
    pub capacity_slabs: u32,
    /// Hot, warm and cold slabs.
    pub by_temperature: [u32; 3],
    /// Pages in it.
    pub pages: u64,
    /// Faults that it served.
    pub faults: Latencies,
}

/// Far memory, for people: in the state file, in `--json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FarStatus {
    /// Programs that are served.
    pub programs: usize,
    /// Programs that ever joined.
    pub joined: u64,
    /// Forks that were followed.
    pub forks: u64,
    /// Private memory of the programs that is in memory, and compressed pages, bytes.
    pub local_bytes: u64,
    /// The limit as it was asked for: a size, a share, or `all` after a drain.
    pub local: String,
    /// How far a drain has come; none without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// The bound on `local_bytes`; after a drain there is none, and this is 2^64 - 1.
    pub limit_bytes: u64,
    /// Pages in the set-aside area, which count as local.
    pub aside_pages: u64,
    /// Of the far pages, those kept as one word.
    pub repeated_pages: u64,
    /// What the far pages save for as long as they are far, in the unit of `[far.price]`; none without a price
    /// of DRAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<f64>,
    /// Share of the last second in which at least one thread waited for a page that had left.
    pub stall_share: f64,
    /// Pages in slabs or kept as one word.
    pub far_pages: u64,
    /// Bytes of tables.
    pub table_bytes: u64,
    /// Pages moved aside, ever.
    pub moved_aside: u64,
    /// Pages that left, ever.
    pub evicted: u64,
    /// Of these, pages that needed no writing.
    pub unwritten: u64,
    /// Pages that went back since far space was full.
    pub turned_back: u64,
    /// Pages that the kernel did not move.
    pub refused: u64,
    /// First touches of ranges that were evicted from.
    pub zero_faults: Latencies,
    /// Faults on pages in the set-aside area.
    pub aside_faults: Latencies,
    /// Faults on pages of one repeated word.
    pub repeated_faults: Latencies,
    /// Pages that are lost.
    pub poisoned: u64,
    /// The most faults whose pages were read from slow slabs at once.
    pub reads_at_once: u64,
    /// Pages read ahead of a fault; of these used, and not used.
    pub ahead: [u64; 3],
    /// Seconds without access after which slabs are cold: those of whole pages, and compressed ones.
    pub cold_s: [u64; 2],
    /// Slabs moved up and down.
    pub migrated: [u64; 2],
    /// Why a page was lost or not written, the last time.
    pub reason: Option<String>,
    /// Tiers, fastest first.
    pub tiers: Vec<FarTierStatus>,
}

impl Pager {
    /// Counts of now.
    #[must_use]
    pub fn status(&self) -> FarStatus {
        let programs = self.programs();
        let space = self.space.stats();
        let mut status = FarStatus {
            programs: self.served(),
            joined: self.joined.load(Ordering::Relaxed),
            reason: space.reason.clone(),
            reads_at_once: self.readers.most(),
            ahead: space.ahead,
            cold_s: space.cold_s,
            migrated: [space.promoted, space.demoted],
            local_bytes: self.space.dram_bytes(),
            local: self.goal.words(),
            drain: self.goal.progress(),
            stall_share: self.stall.share(),
            ..FarStatus::default()
        };
        for program in programs.iter().filter(|program| !program.is_gone()) {
            status.local_bytes += program.resident();
            // A program that was stopped in the middle of a move keeps its lock.
            if let Some(pages) = program.try_pages() {
                let counts = pages.table.counts();
                status.far_pages += pages.table.far_pages();
                status.aside_pages += counts.aside;
                status.repeated_pages += counts.repeated;
                status.table_bytes += pages.table.bytes();
            }
        }
        status.limit_bytes = self.limit(status.local_bytes, status.far_pages * PAGE_BYTES as u64);
        let counters = &self.counters;
        for (to, from) in [
            (&mut status.forks, &counters.forks),
            (&mut status.moved_aside, &counters.moved_aside),
            (&mut status.evicted, &counters.evicted),
            (&mut status.unwritten, &counters.unwritten),
            (&mut status.turned_back, &counters.turned_back),
            (&mut status.refused, &counters.refused),
        ] {
            *to = from.load(Ordering::Relaxed);
        }
        status.zero_faults = counters.latencies(FaultKind::Zero);
        status.aside_faults = counters.latencies(FaultKind::Aside);
        status.repeated_faults = counters.latencies(FaultKind::Repeated);
        status.poisoned = counters.latencies(FaultKind::Poisoned).count;
        let tiers = space.tiers.into_iter().enumerate();
        status.tiers = tiers
            .map(|(number, tier)| FarTierStatus {
                name: tier.name,
                read_ns: tier.speed.read.as_nanos() as u64,
                slabs: tier.slabs,
                capacity_slabs: tier.capacity_slabs,
                by_temperature: tier.by_temperature,
                pages: tier.objects,
                faults: counters.latencies(FaultKind::Tier(number)),
            })
            .collect();
        status.saved = self.config.price.saved(&status, |tier| self.space.is_dram(tier));
        status
    }

    /// The programs that joined: pid, name, bytes of private memory, far pages.
    #[must_use]
    pub fn processes(&self) -> Vec<(Pid, String, u64, u64)> {
        let programs = self.programs();
        let joined = programs.iter().filter(|program| !program.is_gone());
        let told = joined.filter_map(|program| {
            let pid = program.pid()?;
            let far = program.try_pages().map_or(0, |pages| pages.table.far_pages());
            Some((pid, name(pid), program.resident(), far))
        });
        told.collect()
    }

    /// Adds a sample to the heat maps and gives them. Heat is the share of the pages of 2 MiB that were out
    /// which a program touched lately; ranges of which nothing was out are not seen.
    pub fn take_heat(&self, step_s: f64) -> Vec<HeatMap> {
        let mut maps = self.heat.lock();
        let mut kept = Vec::new();
        for program in self.programs().iter().filter(|program| !program.is_gone()) {
            let Some(pid) = program.pid() else { continue };
            let before = maps.iter().position(|map| map.pid == pid.0);
            let mut map = before.map_or_else(
                || HeatMap {
                    pid: pid.0,
                    name: name(pid),
                    step_s,
                    ..HeatMap::default()
                },
                |at| maps.swap_remove(at),
            );
            if let Some(mut pages) = program.try_pages() {
                let regions: Vec<(u64, u64, Option<f64>)> = pages
                    .table
                    .sample_heat()
                    .into_iter()
                    .map(|(chunk, heat)| (chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES, heat))
                    .collect();
                if !regions.is_empty() {
                    map.push(&regions);
                }
            }
            kept.push(map);
        }
        maps.clone_from(&kept);
        kept
    }
}

fn name(pid: Pid) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    comm.trim().to_owned()
}
