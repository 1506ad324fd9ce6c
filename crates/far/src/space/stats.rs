//! Counters of a space.

use super::Space;
use crate::backend::SLAB_BYTES;
use crate::measure::Speed;
use crate::temperature::Temperature;

pub(super) struct Counters {
    pub stored: Vec<u64>,
    pub loaded: Vec<u64>,
    pub stored_bytes: u64,
    pub promoted: u64,
    pub demoted: u64,
    pub failed_moves: u64,
    pub full: u64,
    pub io_errors: u64,
    pub checksums: u64,
    pub reason: Option<String>,
}

impl Counters {
    pub fn new(tiers: usize) -> Self {
        Self {
            stored: vec![0; tiers],
            loaded: vec![0; tiers],
            stored_bytes: 0,
            promoted: 0,
            demoted: 0,
            failed_moves: 0,
            full: 0,
            io_errors: 0,
            checksums: 0,
            reason: None,
        }
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self::new(0)
    }
}

/// One tier, now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierStats {
    /// Name of the backend.
    pub name: String,
    /// The speed measured when it joined.
    pub speed: Speed,
    /// Most slabs.
    pub capacity_slabs: u32,
    /// Slabs in it.
    pub slabs: u32,
    /// Slabs that were hot, warm and cold at the last look.
    pub by_temperature: [u32; 3],
    /// Objects in them.
    pub objects: u64,
    /// Pages stored to it, ever.
    pub stored: u64,
    /// Pages read from it, ever.
    pub loaded: u64,
}

/// A space, now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpaceStats {
    /// Tiers, fastest first.
    pub tiers: Vec<TierStats>,
    /// Slabs moved to a faster tier, ever.
    pub promoted: u64,
    /// Slabs moved to a slower tier, ever.
    pub demoted: u64,
    /// Bytes moved between tiers, ever.
    pub migrated_bytes: u64,
    /// Moves given up: no room, an error, a copy that differs.
    pub failed_moves: u64,
    /// Pages that found no room.
    pub full: u64,
    /// Failures of backends.
    pub io_errors: u64,
    /// Pages with a wrong checksum.
    pub checksums: u64,
    /// Objects read ahead; of these used, and not used.
    pub ahead: [u64; 3],
    /// Seconds after which slabs are cold: whole pages, and compressed ones.
    pub cold_s: [u64; 2],
    /// Objects that several tables name.
    pub shared_objects: u64,
    /// The last failure, for people.
    pub reason: Option<String>,
}

impl Space {
    /// Counts of now.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        let state = self.state.lock();
        let named = self
            .tiers
            .iter()
            .zip(&state.stats.stored)
            .zip(&state.stats.loaded);
        let mut tiers: Vec<TierStats> = named
            .map(|((tier, stored), loaded)| TierStats {
                name: tier.backend.name().to_owned(),
                speed: tier.speed,
                capacity_slabs: tier.limit_slabs(),
                stored: *stored,
                loaded: *loaded,
                ..TierStats::default()
            })
            .collect();
        for slab in state.slabs.iter().flatten() {
            let tier = &mut tiers[slab.tier];
            tier.slabs += 1;
            tier.objects += u64::from(slab.used);
            let temperature = match slab.history.temperature() {
                Temperature::Hot => 0,
                Temperature::Warm => 1,
                Temperature::Cold => 2,
            };
            tier.by_temperature[temperature] += 1;
        }
        let counters = &state.stats;
        SpaceStats {
            tiers,
            promoted: counters.promoted,
            demoted: counters.demoted,
            migrated_bytes: (counters.promoted + counters.demoted) * SLAB_BYTES as u64,
            failed_moves: counters.failed_moves,
            full: counters.full,
            io_errors: counters.io_errors,
            checksums: counters.checksums,
            ahead: [state.ahead.read, state.ahead.used, state.ahead.wasted],
            cold_s: [0, 1].map(|group| match self.t_s {
                0 => state.rest[group].cold_s,
                t_s => 2 * t_s,
            }),
            shared_objects: state.shared.len() as u64,
            reason: counters.reason.clone(),
        }
    }
}
