//! What has happened lately, in bounded memory: accesses that are not counted yet, and moves, so that nothing
//! goes back at once.

use super::super::units::{UNIT_BLOCKS, unit_at};
use super::super::{At, Use};
use hashbrown::HashMap;
use std::collections::BTreeMap;
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey};
use varve_placement::policy::{Cause, Step};
use varve_placement::{DeviceId, UnitId};

/// Most units whose accesses are remembered between two plans.
pub(super) const TOUCHED_MAX: usize = 8192;
/// Most units of one call that are noted.
pub(super) const UNITS_PER_USE: u64 = 1024;
/// Time within which a unit does not go back to where it came from, in milliseconds.
pub const STAY_MS: u64 = 10_000;
/// Most units whose last move is remembered.
pub(super) const ARRIVALS_MAX: usize = 1 << 16;

/// Accesses to a unit since the last plan.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Touched {
    pub(super) reads: u16,
    pub(super) writes: u16,
    /// A client may read it by itself.
    pub(super) mapped: bool,
    /// Bytes of the last access within the unit, and of its whole request.
    pub(super) bytes: u32,
    pub(super) request_bytes: u32,
}

impl Touched {
    /// Adds an access to another part of the same file, which may have reached the same shared blocks.
    pub(super) fn raise(&mut self, other: Self) {
        self.reads = self.reads.max(other.reads);
        self.writes = self.writes.max(other.writes);
        self.mapped |= other.mapped;
        (self.bytes, self.request_bytes) = (other.bytes, other.request_bytes);
    }

    /// Adds accesses by another owner of the same blocks.
    pub(super) fn add(&mut self, other: Self) {
        self.reads = self.reads.saturating_add(other.reads);
        self.writes = self.writes.saturating_add(other.writes);
        self.mapped |= other.mapped;
        (self.bytes, self.request_bytes) = (other.bytes, other.request_bytes);
    }
}

/// Accesses since the last plan.
#[derive(Debug, Default)]
pub(super) struct Accesses(pub(super) BTreeMap<UnitId, Touched>);

impl Accesses {
    pub(super) fn add(&mut self, key: InodeKey, from: u64, blocks: u64, how: Use) {
        let end = from.saturating_add(blocks);
        let request_bytes = u32::try_from(blocks.saturating_mul(BLOCK_BYTES)).unwrap_or(u32::MAX);
        let mut at = from;
        for _ in 0..UNITS_PER_USE {
            if at >= end {
                return;
            }
            let unit = unit_at(At::File(key, FileBlock(at)));
            let stop = ((at / UNIT_BLOCKS + 1) * UNIT_BLOCKS).min(end);
            if self.0.len() >= TOUCHED_MAX && !self.0.contains_key(&unit) {
                // As many as are known are a fair sample.
                return;
            }
            let touched = self.0.entry(unit).or_default();
            match how {
                Use::Read => touched.reads = touched.reads.saturating_add(1),
                Use::Written => touched.writes = touched.writes.saturating_add(1),
                Use::Mapped => touched.mapped = true,
            }
            touched.bytes = ((stop - at) * BLOCK_BYTES) as u32;
            touched.request_bytes = request_bytes;
            at = stop;
        }
    }
}

/// Where units came from lately.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    pub(super) units: HashMap<UnitId, (DeviceId, u64)>,
    /// Until then units may have moved that are not remembered.
    unsure_until_ms: u64,
}

impl Arrivals {
    pub(super) fn note(&mut self, unit: UnitId, from: DeviceId, now_ms: u64) {
        if self.units.len() >= ARRIVALS_MAX && !self.units.contains_key(&unit) {
            self.units.retain(|_, (_, since_ms)| *since_ms + STAY_MS > now_ms);
            if self.units.len() >= ARRIVALS_MAX {
                self.unsure_until_ms = now_ms + STAY_MS;
                return;
            }
        }
        self.units.insert(unit, (from, now_ms));
    }

    /// Whether a step would take a unit back, or might.
    pub(super) fn is_back(&self, step: &Step, now_ms: u64) -> bool {
        match self.units.get(&step.unit) {
            Some((from, since_ms)) => *from == step.to && since_ms + STAY_MS > now_ms,
            // What makes room goes on.
            None => self.unsure_until_ms > now_ms && step.cause != Cause::Full,
        }
    }
}
