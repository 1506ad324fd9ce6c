//! One inode in this process's memory: its attributes, what the log holds of it, and where the digested rest lies. Owns the lock
//! order inside an inode; knows nothing of names and of the daemon.
//!
//! Three kinds of access: [`Inode::read`] (shared), [`Inode::write`] (exclusive), and *overwrites in place*, which the data path
//! runs under neither: whole blocks below the size are logged and published in the `Radix` by compare-and-swap, so that threads
//! that overwrite one file do not meet on a lock. `write` keeps them out and waits for those under way.

use crate::data::ExtentCache;
use crate::errno::Errno;
use crate::log::slots;
use crate::overlay::{Pieces, Radix};
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::ops::{Deref, DerefMut};
use varve_format::{InodeAttr, InodeKey, LogSeq, TimeNs};

/// An inode that this process knows.
pub struct Inode {
    /// Number and generation.
    pub key: InodeKey,
    /// The lease word; its meaning is the lease module's.
    pub lease: AtomicU64,
    /// Never 0, never given out twice in a process: how thread slots name this inode.
    id: u64,
    /// Some thread has or wants the exclusive lock: overwrites in place go through the lock.
    exclusive: AtomicBool,
    /// Copy of the size for overwrites in place; follows `body` when an exclusive lock is let go.
    size: AtomicU64,
    /// Time of the newest overwrite in place (0: none since it was last folded into the attributes).
    overwrite_time: AtomicI64,
    /// Overwrites in place were logged since the last release.
    overwritten: AtomicBool,
    /// End of the last read from a slow tier, to notice sequential reading.
    pub(crate) read_end: AtomicU64,
    /// Listed for pruning.
    pub(crate) listed: AtomicBool,
    /// Whole blocks in the log.
    pub(crate) radix: Radix,
    body: RwLock<InodeBody>,
}

/// What the inode's lock guards.
pub struct InodeBody {
    /// Attributes as programs of this process see them (but see [`Inode::attr`] for times).
    pub attr: InodeAttr,
    /// Parts of blocks, holes and zeros in the log.
    pub(crate) pieces: Pieces,
    /// Where the digested blocks lie.
    pub(crate) extents: ExtentCache,
    /// Highest sequence number logged for it through the exclusive lock (see [`Inode::last_seq`]).
    pub last_seq: LogSeq,
    /// It lost its last name, and its last entry in the log said that nobody here has it open: it takes no more entries.
    pub(crate) dead: bool,
}

impl InodeBody {
    /// `ESTALE` for an inode that takes no more entries: whoever came by its name looks the name up again.
    pub(crate) const fn check_alive(&self) -> Result<(), Errno> {
        if self.dead {
            Err(Errno(libc::ESTALE))
        } else {
            Ok(())
        }
    }
}

/// Exclusive access to an inode.
pub struct InodeWrite<'a> {
    inode: &'a Inode,
    body: RwLockWriteGuard<'a, InodeBody>,
}

impl Inode {
    /// An inode of which the log holds nothing.
    #[must_use]
    pub fn new(attr: InodeAttr) -> Self {
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self {
            key: attr.key,
            lease: AtomicU64::new(0),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            exclusive: AtomicBool::new(false),
            size: AtomicU64::new(attr.size_bytes),
            overwrite_time: AtomicI64::new(0),
            overwritten: AtomicBool::new(false),
            read_end: AtomicU64::new(0),
            listed: AtomicBool::new(false),
            radix: Radix::new(),
            body: RwLock::new(InodeBody {
                attr,
                pieces: Pieces::new(),
                extents: ExtentCache::new(),
                last_seq: LogSeq(0),
                dead: false,
            }),
        }
    }

    /// Shared access.
    pub fn read(&self) -> RwLockReadGuard<'_, InodeBody> {
        self.body.read()
    }

    /// Exclusive access: waits for readers and for overwrites in place.
    pub fn write(&self) -> InodeWrite<'_> {
        self.own(self.body.write())
    }

    /// Exclusive access if nobody has the lock now.
    pub fn try_write(&self) -> Option<InodeWrite<'_>> {
        self.body.try_write().map(|body| self.own(body))
    }

    fn own<'a>(&'a self, mut body: RwLockWriteGuard<'a, InodeBody>) -> InodeWrite<'a> {
        // SeqCst pairs with the overwriter, which names the inode in its slot, passes a full barrier and loads this flag.
        self.exclusive.swap(true, Ordering::SeqCst);
        slots::wait_for_overwrites(self.id);
        let time = self.overwrite_time.load(Ordering::Relaxed);
        if time != 0 {
            self.overwrite_time.store(0, Ordering::Relaxed);
            fold_time(&mut body.attr, time);
        }
        InodeWrite { inode: self, body }
    }

    /// Attributes, with the times of overwrites in place.
    #[must_use]
    pub fn attr(&self) -> InodeAttr {
        let mut attr = self.read().attr.clone();
        fold_time(&mut attr, self.overwrite_time.load(Ordering::Relaxed));
        attr
    }

    /// Highest sequence number that may have been logged for this inode; `log_last` is the log's last one. Call it when the inode's
    /// operations have come to rest.
    #[must_use]
    pub fn last_seq(&self, log_last: LogSeq) -> LogSeq {
        if self.overwritten.load(Ordering::Acquire) {
            log_last
        } else {
            self.read().last_seq
        }
    }

    /// Forgets all that a session's log held (after the session ended, or when the lease is let go): the next reads see what is
    /// digested. `attr` is the new truth.
    pub fn reset(&self, attr: InodeAttr) {
        let mut body = self.write();
        body.forget_log();
        body.last_seq = LogSeq(0);
        body.attr = attr;
        body.dead = false;
        self.overwritten.store(false, Ordering::Release);
    }

    /// How thread slots name this inode.
    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    /// Whether an overwrite in place must use the lock. The caller has named the inode in its slot and passed a full barrier.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.exclusive.load(Ordering::SeqCst)
    }

    /// Size for overwrites in place.
    pub(crate) fn size_hint(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Notes an overwrite in place. Stores only what changed: these words are shared by all overwriting threads.
    pub(crate) fn note_overwrite(&self, time: TimeNs) {
        if self.overwrite_time.load(Ordering::Relaxed) < time {
            self.overwrite_time.store(time, Ordering::Relaxed);
        }
        if !self.overwritten.load(Ordering::Relaxed) {
            self.overwritten.store(true, Ordering::Release);
        }
    }
}

/// Later data makes mtime and ctime later; 0 stands for none.
fn fold_time(attr: &mut InodeAttr, time: TimeNs) {
    if time != 0 {
        attr.mtime_ns = attr.mtime_ns.max(time);
        attr.ctime_ns = attr.ctime_ns.max(time);
    }
}

impl Deref for InodeWrite<'_> {
    type Target = InodeBody;
    fn deref(&self) -> &InodeBody {
        &self.body
    }
}

impl DerefMut for InodeWrite<'_> {
    fn deref_mut(&mut self) -> &mut InodeBody {
        &mut self.body
    }
}

impl InodeWrite<'_> {
    /// Drops every pointer into the log and the cached extents.
    pub fn forget_log(&mut self) {
        self.inode.radix.clear();
        self.body.pieces = Pieces::new();
        self.body.extents.invalidate();
    }
}

impl Drop for InodeWrite<'_> {
    fn drop(&mut self) {
        self.inode
            .size
            .store(self.body.attr.size_bytes, Ordering::Release);
        self.inode.exclusive.store(false, Ordering::Release);
    }
}
