//! Block reservations made before anything is logged: requested in bulk, kept by lane, consumed before an
//! operation is logged; unused ones are given back when the daemon asks. Knows only the result of the charge
//! formula.
//!
//! Every granted block is in one place at a time: the common stock, a lane, the call that has consumed it, or
//! the log. A call takes its blocks from its lane with one atomic operation, and from the stock under the
//! stock's lock, under which the lanes' blocks are collected, too: blocks that are given back are in no call
//! and no log, and consumed blocks are not given back. A grant counts as known once it is in the stock, so an
//! answer to the daemon does not cover grants that are still on their way.

use super::{DataPlane, confused};
use crate::errno::{Errno, OpError, OpResult};
use crate::log::{LogHost, Slot};
use crate::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use varve_ipc::{IpcError, Request, Response};

/// Blocks requested at once.
const BULK_BLOCKS: u32 = 16_384;
/// Longest wait of a thread for another one's request before it sends its own: a longer one may be the
/// daemon's search for space, and each request has its own time bound.
const ASKING_MOST: Duration = Duration::from_millis(200);
/// Blocks that a lane takes at once from the common stock.
const LANE_BLOCKS: u64 = 2048;

/// Blocks of a session beside its lanes.
#[derive(Debug, Default)]
pub(super) struct Stock {
    /// Blocks that are in no lane.
    blocks: u64,
    /// Total number of blocks granted to the session, wherever they are.
    granted: u64,
}

impl Stock {
    /// Pays `blocks`, of which the call has `have`, and fills the lane up; `false`: there are too few.
    fn pay(&mut self, lane: &AtomicU64, have: u64, blocks: u64) -> bool {
        let missing = blocks.saturating_sub(have);
        if self.blocks < missing {
            return false;
        }
        let taken = self.blocks.min(missing.max(LANE_BLOCKS));
        self.blocks -= taken;
        lane.fetch_add(have + taken - blocks, Ordering::Relaxed);
        true
    }
}

/// Takes `blocks` from a lane, if it has at least that many.
#[inline]
fn spend(lane: &AtomicU64, blocks: u64) -> bool {
    let mut have = lane.load(Ordering::Relaxed);
    while have >= blocks {
        match lane.compare_exchange_weak(have, have - blocks, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => have = now,
        }
    }
    false
}

impl DataPlane {
    /// Consumes `blocks` from the blocks reserved for the lane.
    #[inline]
    pub(super) fn consume<T>(&self, slot: &Slot<'_>, blocks: u32) -> OpResult<(), T> {
        // Only a locked instruction keeps spent blocks apart from blocks that are given back; it comes before
        // anything is copied to the log.
        if blocks == 0 || spend(slot.reserved(), blocks.into()) {
            return Ok(());
        }
        self.refill(slot, blocks.into())
    }

    #[cold]
    fn refill<T>(&self, slot: &Slot<'_>, blocks: u64) -> OpResult<(), T> {
        // The lane's blocks are this call's from here on: no other thread takes them while it asks for the
        // rest.
        let have = slot.reserved().swap(0, Ordering::Relaxed);
        if self.stock.lock().pay(slot.reserved(), have, blocks) {
            return Ok(());
        }
        // One thread asks at a time, and most likely for all: if many threads have no blocks, each request
        // would have the daemon search again.
        let _asking = self.asking.lock_within(&*self.clock, ASKING_MOST);
        if self.stock.lock().pay(slot.reserved(), have, blocks) {
            return Ok(());
        }
        let granted = self.obtain(blocks.saturating_sub(have));
        let paid = granted.map_err(OpError::from).and_then(|granted| {
            let mut stock = self.stock.lock();
            stock.blocks += u64::from(granted);
            stock.granted += u64::from(granted);
            match stock.pay(slot.reserved(), have, blocks) {
                true => Ok(()),
                false => Err(OpError::Failed(Errno(libc::ENOSPC))),
            }
        });
        if paid.is_err() {
            slot.reserved().fetch_add(have, Ordering::Relaxed);
        }
        paid
    }

    /// Gets at least `missing` blocks from the daemon.
    fn obtain(&self, missing: u64) -> Result<u32, IpcError> {
        match self.ask(missing) {
            Err(IpcError::Errno(libc::ENOSPC)) => {
                // Entries in the log may be superseded: their digest frees more blocks than it takes.
                let log = self.log.as_ref().ok_or(IpcError::Errno(libc::EROFS))?;
                LogHost::digest(self, log.last_seq(), true)?;
                self.ask(missing)
            }
            other => other,
        }
    }

    /// Unused reserved blocks: in the common stock and in the lanes. Exact while no thread writes.
    pub(crate) fn reserved_left(&self) -> u64 {
        let lanes = self.log.as_ref().map_or(0, crate::log::Log::reserved);
        self.stock.lock().blocks + lanes
    }

    /// Gives unused blocks back, because other sessions need them. Does not wait for other threads; if the
    /// answer fails, the link is gone, and the reservation with it.
    pub(crate) fn return_reservation(&self) {
        let (blocks, of) = {
            let mut stock = self.stock.lock();
            let lanes = self.log.as_ref().map_or(0, crate::log::Log::take_reserved);
            (std::mem::take(&mut stock.blocks) + lanes, stock.granted)
        };
        let _ = self.call(Request::ReturnReservation { blocks, of });
    }

    fn ask(&self, least: u64) -> Result<u32, IpcError> {
        let least = u32::try_from(least).map_err(|_| IpcError::Errno(libc::ENOSPC))?;
        match self.call(Request::Reserve {
            blocks: least.max(BULK_BLOCKS),
            least,
        })? {
            Response::Reserved(blocks) => Ok(blocks),
            _ => Err(confused("Reserve")),
        }
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
