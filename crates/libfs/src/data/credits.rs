//! Space credits: asked for in bulk, kept by lane, consumed before an operation is logged. Knows the formula's result only.

use super::{DataPlane, confused};
use crate::errno::{Errno, OpError, OpResult};
use crate::log::{LogHost, Slot};
use std::sync::atomic::{AtomicU64, Ordering};
use varve_ipc::{IpcError, Request, Response};

/// Blocks asked for at once.
const BULK_BLOCKS: u32 = 16_384;
/// Blocks that a lane takes at once from the common stock.
const LANE_BLOCKS: u64 = 2048;

/// Takes `least` to `most` from `stock`; 0 if there are fewer.
fn draw(stock: &AtomicU64, least: u64, most: u64) -> u64 {
    let mut have = stock.load(Ordering::Relaxed);
    loop {
        if have < least {
            return 0;
        }
        let take = have.min(most);
        match stock.compare_exchange_weak(have, have - take, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return take,
            Err(now) => have = now,
        }
    }
}

impl DataPlane {
    /// Consumes `blocks` from the lane's credits.
    #[inline]
    pub(super) fn consume<T>(&self, slot: &Slot<'_>, blocks: u32) -> OpResult<(), T> {
        let blocks = u64::from(blocks);
        // The slot's holder alone changes its lane's credits: no read-modify-write is needed.
        let have = slot.credits().load(Ordering::Relaxed);
        if have < blocks {
            return self.refill(slot, have, blocks);
        }
        slot.credits().store(have - blocks, Ordering::Relaxed);
        Ok(())
    }

    #[cold]
    fn refill<T>(&self, slot: &Slot<'_>, have: u64, blocks: u64) -> OpResult<(), T> {
        let missing = blocks - have;
        let want = missing.max(LANE_BLOCKS);
        let mut got = draw(&self.credits, missing, want);
        if got == 0 {
            let granted = match self.ask(missing) {
                Err(IpcError::Errno(libc::ENOSPC)) => {
                    // What the log holds may be superseded: digested, it gives back more than it takes.
                    let log = self.log.as_ref().ok_or(OpError::Failed(Errno(libc::EROFS)))?;
                    LogHost::digest(self, log.last_seq(), true).map_err(OpError::from)?;
                    self.ask(missing)
                }
                other => other,
            };
            let granted = u64::from(granted.map_err(OpError::from)?);
            if granted < missing {
                self.credits.fetch_add(granted, Ordering::Relaxed);
                return Err(OpError::Failed(Errno(libc::ENOSPC)));
            }
            got = granted.min(want);
            self.credits.fetch_add(granted - got, Ordering::Relaxed);
        }
        slot.credits().store(have + got - blocks, Ordering::Relaxed);
        Ok(())
    }

    /// Blocks left: in the common stock and in the lanes. Exact while nobody writes.
    pub(crate) fn credits_left(&self) -> u64 {
        let lanes = self.log.as_ref().map_or(0, crate::log::Log::credits);
        self.credits.load(Ordering::Relaxed) + lanes
    }

    fn ask(&self, least: u64) -> Result<u32, IpcError> {
        let least = u32::try_from(least).map_err(|_| IpcError::Errno(libc::ENOSPC))?;
        match self.call(Request::Credits {
            blocks: least.max(BULK_BLOCKS),
            least,
        })? {
            Response::Credits(blocks) => Ok(blocks),
            _ => Err(confused("Credits")),
        }
    }
}
