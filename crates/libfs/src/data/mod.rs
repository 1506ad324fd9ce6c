//! File data in the process: reading from log, NVM and slower tiers; writing through the log. Owns the data
//! state of a session ([`DataPlane`]); knows no names, descriptors, leases and permissions: callers hold the
//! lease that an operation needs.

mod cache;
mod device;
mod flights;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod nvm;
mod read;
mod replaced;
mod reservations;
mod seek;
#[cfg(test)]
pub(crate) mod tests;
mod write;

pub(crate) use write::{changed, cut_short, publish_data, within_one_file};

use crate::errno::{Errno, OpError, OpResult};
use crate::inode::overlay::LOG_BYTES_MAX;
use crate::inode::{Inode, InodeBody};
use crate::lease::Appetite;
use crate::log::{Log, LogHost, LogOptions, Slot, Stamp};
use crate::sync::{Mutex, TimedLock};
use cache::ReadCache;
use crossbeam_channel::Sender;
use device::DeviceReads;
use flights::Flights;
use nvm::Nvm;
use replaced::Replaced;
use reservations::Stock;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use varve_format::{BlockNo, LogSeq};
use varve_ipc::{ClientFault, Clock, IpcError, Link, PageState, Request, Response, SessionPage, Welcome};
use varve_media::{BlockDevice, Region, Verified};

/// The data state of one session. Created for each session; inodes outlive it (see [`Inode::reset`]).
pub struct DataPlane {
    log: Option<Log>,
    link: Arc<dyn Link>,
    page: Arc<dyn SessionPage>,
    nvm: Option<Nvm>,
    clock: Arc<dyn Clock>,
    read_ahead_bytes: u64,
    log_max_bytes: u64,
    /// The map is requested one window at a time: the daemon copies a window's data for an unprivileged
    /// session on request.
    windowed: bool,
    /// The daemon has a record of the session.
    recorded: AtomicBool,
    /// Reserved blocks that are in no lane.
    stock: Mutex<Stock>,
    /// Held by the one thread that asks for more.
    asking: TimedLock,
    cache: ReadCache,
    /// What is being read into it.
    flights: Flights,
    /// The SSD, if the session reads it by itself.
    device: Option<DeviceReads>,
    /// Inodes with pointers into the log.
    listed: Mutex<Vec<Weak<Inode>>>,
    /// Files whose known extents became void, to be asked for with those of another one.
    replaced: Replaced,
    /// Held during a prune.
    pruning: Mutex<()>,
    /// Channel to the thread that readies the log, if there is one.
    ahead: OnceLock<Sender<()>>,
    /// Counts requests for extents.
    pub(crate) appetite: Arc<Appetite>,
}

impl DataPlane {
    /// Creates the data state of the session that `welcome` opened. `log` is `None` for a read-only session;
    /// `nvm` is `None` if data is not read directly; `verified` marks the NVM blocks whose checksums were
    /// compared, and is `None` if the session keeps its own marks.
    #[must_use]
    pub fn new(
        welcome: &Welcome,
        link: Arc<dyn Link>,
        page: Arc<dyn SessionPage>,
        log: Option<Arc<dyn Region>>,
        nvm: Option<Arc<dyn Region>>,
        verified: Option<Arc<Verified>>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let options = LogOptions {
            session: welcome.session,
            len_bytes: welcome.log_bytes.min(LOG_BYTES_MAX),
            max_bytes: welcome.log_max_bytes.max(welcome.log_bytes).min(LOG_BYTES_MAX),
            digest_percent: welcome.digest_percent,
            wait_ms: welcome.wait_ms,
        };
        Self {
            log: log.map(|region| Log::new(region, page.clone(), options)),
            link,
            page,
            nvm: nvm.map(|region| Nvm::of(region, welcome, verified)),
            clock,
            read_ahead_bytes: welcome.read_ahead_bytes.min(varve_ipc::DATA_MAX as u64),
            log_max_bytes: options.max_bytes,
            windowed: !welcome.privileged,
            recorded: AtomicBool::new(false),
            stock: Mutex::default(),
            asking: TimedLock::default(),
            cache: ReadCache::new(),
            flights: Flights::new(),
            device: None,
            listed: Mutex::new(Vec::new()),
            replaced: Replaced::default(),
            pruning: Mutex::new(()),
            ahead: OnceLock::new(),
            appetite: Arc::default(),
        }
    }

    /// Has blocks on SSD read from `device` by the session itself, if there is one.
    #[must_use]
    pub fn reading_from(mut self, device: Option<Arc<dyn BlockDevice>>) -> Self {
        self.device = device.map(DeviceReads::new);
        self
    }

    /// The session's log.
    ///
    /// # Errors
    /// `EROFS` for a read-only session.
    pub fn log(&self) -> Result<&Log, Errno> {
        self.log.as_ref().ok_or(Errno(libc::EROFS))
    }

    /// Takes log space for `bytes` (sums of `entry_size`) and reserves `blocks` (sums of `charge`). Call
    /// it before locking inodes; then [`Slot::append`] under the locks.
    ///
    /// # Errors
    /// `EROFS`, `ENOSPC`, `EIO`; `SessionLost`. Nothing is logged then.
    #[inline]
    pub fn begin<T>(&self, bytes: usize, blocks: u32) -> OpResult<Slot<'_>, T> {
        let log = self.log.as_ref().ok_or(OpError::Failed(Errno(libc::EROFS)))?;
        let slot = log.reserve(self, bytes)?;
        self.consume(&slot, blocks)?;
        Ok(slot)
    }

    /// Returns the stamp of operations that begin at this moment.
    #[inline]
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp {
            time_ns: self.clock.now_ns(),
            base: self.page.committed_tx(),
        }
    }

    /// Whether the session still counts.
    #[inline]
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.page.state() == PageState::Live
    }

    /// Has the daemon record the session, if it may not have yet. What a session did is known after a crash
    /// of the daemon only with a record: to be called before anything that must not be done twice.
    ///
    /// # Errors
    /// The daemon's.
    pub(crate) fn be_recorded<T>(&self) -> OpResult<(), T> {
        if !self.recorded.load(std::sync::atomic::Ordering::Acquire) {
            LogHost::grow(self, 0).map_err(OpError::from)?;
        }
        Ok(())
    }

    /// Makes every entry that was logged so far durable against a power cut.
    ///
    /// # Errors
    /// `EIO`.
    pub fn sync(&self) -> Result<(), Errno> {
        self.sync_unasked()?;
        if self.log.as_ref().is_some_and(Log::note_sync) {
            LogHost::look_ahead(self);
        }
        Ok(())
    }

    /// As [`sync`](Self::sync), for a sync that the program did not ask for.
    ///
    /// # Errors
    /// `EIO`.
    pub(crate) fn sync_unasked(&self) -> Result<(), Errno> {
        match &self.log {
            Some(log) => log.sync_upto(log.last_seq()),
            None => Ok(()),
        }
    }

    /// Sets the channel that is told when [`ready_log`](Self::ready_log) has work. Once.
    pub(crate) fn tell_ahead(&self, ahead: Sender<()>) {
        let _ = self.ahead.set(ahead);
    }

    /// Readies the log for the next entries.
    pub(crate) fn ready_log(&self) {
        if let Some(log) = &self.log {
            log.look_ahead(self);
        }
    }

    /// Reports to the daemon what it does not see by itself: faults of the log, damaged NVM blocks, reads
    /// from the SSD. Costs three loads and a lock if there are none.
    pub(crate) fn report(&self) {
        self.report_reads();
        self.report_faults();
    }

    /// As [`report`](Self::report), of faults only.
    pub(crate) fn report_faults(&self) {
        let of_log = self.log.iter().flat_map(Log::take_faults).flatten();
        let damaged = self.nvm.as_ref().and_then(Nvm::take_damaged);
        let of_nvm = damaged.map(|block| ClientFault::NvmDamaged {
            block: BlockNo(block),
        });
        for fault in of_log.chain(of_nvm) {
            // The report may be lost: a daemon that does not answer shows that in its own status.
            let _ = self.call(Request::ClientFault(fault));
        }
    }

    /// Gives the log's memory back to the host: the session is over, and its log digested. Other references
    /// to the log may remain.
    pub(crate) fn retire(&self) {
        if let Some(log) = &self.log {
            log.region().retire();
        }
    }

    /// Drops digested log pointers, so that log space can be used again. For the worker, periodically.
    pub fn reclaim(&self) {
        if let Some(log) = &self.log {
            log.reclaim(self);
        }
    }

    /// Waits until everything logged so far is in the shared area.
    ///
    /// # Errors
    /// The daemon's; `SessionLost`.
    pub fn digest_all<T>(&self) -> OpResult<(), T> {
        if let Some(log) = &self.log {
            let upto = log.last_seq();
            if upto.0 > self.page.digested().0 {
                log.wait_stable(upto).map_err(OpError::Failed)?;
                LogHost::digest(self, upto, true).map_err(OpError::from)?;
            }
            self.reclaim();
        }
        Ok(())
    }

    /// Forgets the locations of `inode`'s digested blocks: the daemon has moved or replaced them. When this
    /// returns no read uses the old locations.
    pub fn forget_extents(&self, inode: &Arc<Inode>) {
        let mut body = inode.write();
        body.extents.invalidate();
        // One with data in the log becomes void once more, and is noted when the log has none.
        if !inode.listed.load(std::sync::atomic::Ordering::SeqCst) {
            self.note_replaced(inode, &body);
        }
    }

    fn note_replaced(&self, inode: &Arc<Inode>, body: &InodeBody) {
        // A user's session asks for one window at a time.
        if !self.windowed {
            self.replaced.note(inode, body);
        }
    }

    /// Notes that the log holds data of `inode`.
    #[inline]
    pub(crate) fn list(&self, inode: &Arc<Inode>) {
        if !inode.listed.load(std::sync::atomic::Ordering::Relaxed) {
            self.list_slow(inode);
        }
    }

    #[cold]
    fn list_slow(&self, inode: &Arc<Inode>) {
        let mut listed = self.listed.lock();
        if !inode.listed.swap(true, std::sync::atomic::Ordering::SeqCst) {
            let place = u32::try_from(listed.len()).unwrap_or(u32::MAX);
            inode
                .list_place
                .store(place, std::sync::atomic::Ordering::Relaxed);
            listed.push(Arc::downgrade(inode));
        }
    }

    /// Removes `inode`, which is not used any more, from the list. Otherwise its memory would stay until the
    /// next prune.
    pub(crate) fn unlist(&self, inode: &Arc<Inode>) {
        use std::sync::atomic::Ordering::{Relaxed, SeqCst};
        if !inode.listed.load(SeqCst) {
            return;
        }
        let mut listed = self.listed.lock();
        // After a prune its index may be another.
        let place = inode.list_place.load(Relaxed);
        if listed
            .get(place as usize)
            .is_some_and(|weak| weak.as_ptr() == Arc::as_ptr(inode))
        {
            listed.swap_remove(place as usize);
            if let Some(moved) = listed.get(place as usize).and_then(Weak::upgrade) {
                moved.list_place.store(place, Relaxed);
            }
        }
    }

    fn call(&self, request: Request) -> Result<Response, IpcError> {
        self.link.call(request)
    }
}

/// Error for an answer of the wrong type.
fn confused(what: &str) -> IpcError {
    IpcError::Protocol(format!("unexpected answer to {what}"))
}

impl LogHost for DataPlane {
    fn grow(&self, len_bytes: u64) -> Result<u64, IpcError> {
        match self.call(Request::GrowLog { len_bytes })? {
            Response::LogBytes(bytes) => {
                self.recorded.store(true, std::sync::atomic::Ordering::Release);
                Ok(bytes)
            }
            _ => Err(confused("GrowLog")),
        }
    }

    fn digest(&self, upto: LogSeq, wait: bool) -> Result<(), IpcError> {
        match self.call(Request::Digest { upto, wait })? {
            Response::Digested(_) | Response::Done => Ok(()),
            _ => Err(confused("Digest")),
        }
    }

    fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    fn look_ahead(&self) {
        if let Some(ahead) = self.ahead.get() {
            // Full: it was already told.
            let _ = ahead.try_send(());
        }
    }

    fn prune(&self, digested: LogSeq) {
        use std::sync::atomic::Ordering;
        let _one = self.pruning.lock();
        let inodes = std::mem::take(&mut *self.listed.lock());
        let mut kept = Vec::with_capacity(inodes.len());
        for weak in inodes {
            let Some(inode) = weak.upgrade() else { continue };
            let mut body = inode.write();
            let gone = inode.radix.prune(digested) | body.pieces.prune(digested);
            if gone {
                // The data of the dropped pointers is in extents that were not loaded yet.
                body.extents.invalidate();
            }
            if crate::inode::overlay::is_clean(&inode.radix, &body.pieces) {
                if gone {
                    self.note_replaced(&inode, &body);
                }
                // Under the exclusive lock: the next publication lists it again.
                inode.listed.store(false, Ordering::SeqCst);
            } else {
                kept.push(weak);
            }
        }
        self.listed.lock().append(&mut kept);
    }
}
