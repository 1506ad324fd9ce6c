//! The policy in use, its jobs for operators, and the numbers of moved blocks. Moves nothing (`ops::migrate`
//! does).

use super::meter::Meters;
use super::walk::Walk;
use super::{Cause, Evacuations, Job, Pins, Placement};
use crate::bell::Bell;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use varve_format::{Tier, TxId};
use varve_placement::rules::Rules;
use varve_store::Store;

/// Called after a device was taken out of the pool.
pub type DeviceGone = Box<dyn Fn(&Store) + Send + Sync>;

/// A job, for operators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementStatus {
    /// Source: `nvm`, `ssd` or `hdd`.
    pub from: String,
    /// Target; for metadata `slower tiers`.
    pub to: String,
    /// Reason of the move.
    pub cause: Cause,
    /// Moved between the two for this cause since the daemon started, in blocks of 4 KiB.
    pub moved_blocks: u64,
    /// Obstacle that it waits for, if it waits.
    pub waiting: Option<String>,
}

/// Data moved from one tier to another for one cause, since the daemon started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedStatus {
    /// Source: `nvm`, `ssd` or `hdd`.
    pub from: String,
    /// Target.
    pub to: String,
    /// Reason of the moves.
    pub cause: Cause,
    /// Blocks of 4 KiB.
    pub blocks: u64,
}

const fn key_of(job: &Job) -> (Cause, Tier, Tier) {
    (job.cause, job.from, job.to)
}

impl fmt::Display for PlacementStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.cause.reason();
        let Self { from, to, .. } = self;
        write!(
            f,
            "moving {what} from {from} to {to}: {} blocks",
            self.moved_blocks
        )?;
        match &self.waiting {
            Some(reason) => write!(f, " ({reason})"),
            None => Ok(()),
        }
    }
}

/// How long others count as active after a change, in milliseconds.
const ACTIVE_MS: u64 = 500;

/// Whether others than the mover change the pool. A gap in the numbers of its own transactions shows it.
#[derive(Debug, Default)]
pub(crate) struct Others {
    /// The newest transaction that was seen.
    seen: AtomicU64,
    active_until_ms: AtomicU64,
}

impl Others {
    /// Whether others have changed the pool lately; `newest` is the newest transaction.
    pub(crate) fn are_active(&self, newest: TxId, now_ms: u64) -> bool {
        if self.seen.fetch_max(newest.0, Ordering::Relaxed) < newest.0 {
            self.active_until_ms.store(now_ms + ACTIVE_MS, Ordering::Relaxed);
        }
        now_ms < self.active_until_ms.load(Ordering::Relaxed)
    }

    /// The mover has committed a transaction.
    pub(crate) fn have_moved(&self, own: TxId, now_ms: u64) {
        let before = TxId(own.0.saturating_sub(1));
        self.are_active(before, now_ms);
        self.seen.fetch_max(own.0, Ordering::Relaxed);
    }
}

/// The mover's state, for operators only.
pub(crate) struct Placer {
    /// Decides where new data goes, and which data moves.
    pub(crate) policy: Box<dyn Placement>,
    /// Operators' wishes, which come first.
    pub(crate) pins: Pins,
    /// Operators' jobs, which come before wishes where these name what is emptied.
    pub(crate) evacuations: Evacuations,
    /// Operators' rules, which come before the policy and after commands; `None`: they cannot be read, and
    /// nothing changes what earlier ones have set.
    pub(crate) rules: Option<Rules>,
    /// The walk that applies them.
    pub(crate) walk: Mutex<Walk>,
    /// Serializes steps; requests never wait for it.
    pub(crate) turn: Mutex<()>,
    /// A leaf of the lock order.
    pub(crate) jobs: Mutex<Vec<PlacementStatus>>,
    /// Blocks moved, by cause, source and target tier. A leaf of the lock order.
    pub(crate) moved: Mutex<BTreeMap<(Cause, Tier, Tier), u64>>,
    pub(crate) moved_in: [AtomicU64; 3],
    pub(crate) moved_out: [AtomicU64; 3],
    pub(crate) bell: Bell,
    /// What others do meanwhile.
    pub(crate) others: Others,
    /// Told when a device was taken out.
    pub(crate) device_gone: OnceLock<DeviceGone>,
    /// What the tiers' devices are measured to do.
    pub(crate) meters: Arc<Meters>,
}

impl Placer {
    /// Tiers take pinned and evacuated data until they are `high` percent full.
    pub(crate) fn new(
        policy: Box<dyn Placement>,
        rules: Option<Rules>,
        high: u64,
        meters: Arc<Meters>,
    ) -> Self {
        Self {
            policy,
            pins: Pins::new(high),
            evacuations: Evacuations::new(high),
            rules,
            walk: Mutex::default(),
            turn: Mutex::default(),
            jobs: Mutex::default(),
            moved: Mutex::default(),
            moved_in: Default::default(),
            moved_out: Default::default(),
            bell: Bell::default(),
            others: Others::default(),
            device_gone: OnceLock::new(),
            meters,
        }
    }

    /// Returns the jobs of the last step.
    pub(crate) fn jobs(&self) -> Vec<PlacementStatus> {
        self.jobs.lock().clone()
    }

    /// Has the mover look for pinned data, if pins have changed.
    pub(crate) fn note_pins(&self, have_changed: bool) {
        if have_changed {
            self.pins.changed();
            self.bell.ring();
        }
    }

    pub(crate) fn count(&self, job: &Job, blocks: u64) {
        *self.moved.lock().entry(key_of(job)).or_default() += blocks;
        self.moved_out[job.from as usize].fetch_add(blocks, Ordering::Relaxed);
        self.moved_in[job.to as usize].fetch_add(blocks, Ordering::Relaxed);
    }

    /// Blocks moved between the tiers of a job for its cause.
    pub(crate) fn moved(&self, job: &Job) -> u64 {
        self.moved.lock().get(&key_of(job)).copied().unwrap_or(0)
    }

    /// All moves since the daemon started.
    pub(crate) fn all_moved(&self) -> Vec<MovedStatus> {
        let moved = self.moved.lock();
        let shown = |(&(cause, from, to), &blocks): (&(Cause, Tier, Tier), &u64)| MovedStatus {
            from: from.name().into(),
            to: to.name().into(),
            cause,
            blocks,
        };
        moved.iter().map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{ACTIVE_MS, Others};
    use varve_format::TxId;

    #[test]
    fn others_are_active_for_a_while_after_each_change_of_theirs() {
        let others = Others::default();
        assert!(
            others.are_active(TxId(7), 10),
            "what was before it began may be theirs"
        );
        assert!(others.are_active(TxId(7), 9 + ACTIVE_MS));
        assert!(!others.are_active(TxId(7), 10 + ACTIVE_MS));
        let mut now_ms = 1000;
        for own in 8..20 {
            others.have_moved(TxId(own), now_ms);
            now_ms += 1;
            assert!(!others.are_active(TxId(own), now_ms), "they are the mover's own");
        }
        others.have_moved(TxId(21), now_ms);
        assert!(others.are_active(TxId(21), now_ms + 1), "20 was theirs");
    }
}
