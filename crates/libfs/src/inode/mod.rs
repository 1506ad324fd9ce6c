//! One inode in this process's memory: its attributes, its data in the log, and the locations of its digested
//! blocks. Owns the lock order inside an inode; knows nothing of names and of the daemon.
//!
//! Three kinds of access: [`Inode::read`] (shared), [`Inode::write`] (exclusive), and *overwrites in place*,
//! which the data path runs under neither: whole blocks below the size are logged and published in the
//! `Radix` by compare-and-swap, so that threads that overwrite one file do not contend for a lock. `write`
//! bars them and waits for those under way. A fourth takes no lock: *optimistic reads* note `Inode::version`,
//! copy, and count only if the version is unchanged afterwards (`Inode::is_still`).

pub(crate) mod extents;
pub(crate) mod overlay;
pub(crate) mod places;

use self::extents::{Below, ExtentCache};
use self::places::Places;
use crate::errno::Errno;
use crate::inode::overlay::{Pieces, Radix};
use crate::log::slots;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::ops::{Deref, DerefMut};
use varve_format::{InodeAttr, InodeKey, LogSeq, TimeNs};

/// An inode that this process knows.
pub struct Inode {
    /// Number and generation.
    pub key: InodeKey,
    /// The lease word; the lease module defines its bits.
    pub lease: AtomicU64,
    /// Identifies this inode in thread slots. Never 0, never reused in a process.
    id: u64,
    /// Grows when the exclusive lock is taken (it is odd then: overwrites in place go through the lock) and
    /// when it is released.
    version: AtomicU64,
    /// Copy of the size for overwrites in place and optimistic reads; updated from `body` when the exclusive
    /// lock is released, as the next four fields.
    size: AtomicU64,
    /// A regular file without partial blocks, holes or zeros in the log: optimistic reads are possible.
    plain: AtomicBool,
    /// The mode has set-id bits.
    set_id: AtomicBool,
    /// The inode has no name.
    nameless: AtomicBool,
    /// A read at this time or later moves the time of the last read.
    atime_due_ns: AtomicI64,
    /// Time of the newest overwrite in place (0: none since it was last folded into the attributes).
    overwrite_time: AtomicI64,
    /// Overwrites in place were logged since the last release.
    overwritten: AtomicBool,
    /// The data or the owner was changed under this lease, and no file capabilities were set since.
    capability_gone: AtomicBool,
    /// End of the last read from a slow tier, to notice sequential reading.
    pub(crate) read_end: AtomicU64,
    /// Bytes that were read on slow tiers up to there, each read from where the one before ended.
    pub(crate) read_in_order: AtomicU64,
    /// Listed for pruning.
    pub(crate) listed: AtomicBool,
    /// Whether it is among the files that are asked for with others.
    pub(crate) noted: AtomicBool,
    /// Probable index in that list. Guarded by the list's lock.
    pub(crate) list_place: AtomicU32,
    /// Whole blocks in the log.
    pub(crate) radix: Radix,
    /// Locations of digested blocks in NVM that reads under the lock have used.
    pub(crate) places: Places,
    /// Shared by appends; an append in parts has it exclusively, from its first part to its last. Taken
    /// before any log space.
    pub(crate) appends: RwLock<()>,
    body: RwLock<InodeBody>,
}

/// State under the inode's lock.
pub struct InodeBody {
    /// Attributes as programs of this process see them (but see [`Inode::attr`] for times).
    pub attr: InodeAttr,
    /// Parts of blocks, holes and zeros in the log.
    pub(crate) pieces: Pieces,
    /// Locations of the digested blocks.
    pub(crate) extents: ExtentCache,
    /// Highest sequence number logged for it through the exclusive lock (see [`Inode::last_seq`]).
    pub last_seq: LogSeq,
    /// Number of those entries, under this lease.
    changes: u32,
    /// The inode lost its last name, and its last entry in the log said that it is not open here: it takes no
    /// more entries.
    pub(crate) dead: bool,
}

impl InodeBody {
    /// `ESTALE` for an inode that takes no more entries: a caller that came by its name looks the name up
    /// again.
    pub(crate) const fn check_alive(&self) -> Result<(), Errno> {
        if self.dead {
            Err(Errno(libc::ESTALE))
        } else {
            Ok(())
        }
    }

    /// Notes that entry `seq` of the log is about this inode.
    #[inline]
    pub fn logged(&mut self, seq: LogSeq) {
        self.last_seq = self.last_seq.max(seq);
        self.changes = self.changes.saturating_add(1);
    }
}

/// Exclusive access to an inode.
pub struct InodeWrite<'a> {
    inode: &'a Inode,
    body: RwLockWriteGuard<'a, InodeBody>,
}

impl Inode {
    /// Creates an inode without data in the log.
    #[must_use]
    pub fn new(attr: InodeAttr) -> Self {
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self {
            key: attr.key,
            lease: AtomicU64::new(0),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            version: AtomicU64::new(0),
            size: AtomicU64::new(attr.size_bytes),
            plain: AtomicBool::new(is_regular(&attr)),
            set_id: AtomicBool::new(attr.mode & SET_ID != 0),
            nameless: AtomicBool::new(attr.nlink == 0),
            atime_due_ns: AtomicI64::new(atime_due_ns(&attr)),
            overwrite_time: AtomicI64::new(0),
            overwritten: AtomicBool::new(false),
            capability_gone: AtomicBool::new(false),
            read_end: AtomicU64::new(0),
            read_in_order: AtomicU64::new(0),
            listed: AtomicBool::new(false),
            noted: AtomicBool::new(false),
            list_place: AtomicU32::new(0),
            radix: Radix::new(),
            places: Places::new(),
            appends: RwLock::new(()),
            body: RwLock::new(InodeBody {
                attr,
                pieces: Pieces::new(),
                extents: ExtentCache::new(),
                last_seq: LogSeq(0),
                changes: 0,
                dead: false,
            }),
        }
    }

    /// Shared access.
    pub fn read(&self) -> RwLockReadGuard<'_, InodeBody> {
        self.body.read()
    }

    /// As [`attr`](Self::attr), if no thread holds or waits for the exclusive lock.
    #[inline]
    pub(crate) fn try_attr(&self) -> Option<InodeAttr> {
        let mut attr = self.body.try_read()?.attr.clone();
        fold_time(&mut attr, self.overwrite_time.load(Ordering::Relaxed));
        Some(attr)
    }

    /// The version of the map of a live file, if the map is not known, and not void again with the next
    /// digest; `None` also if a thread holds or waits for the exclusive lock.
    pub(crate) fn unmapped(&self) -> Option<u64> {
        let body = self.body.try_read()?;
        let in_log = self.listed.load(Ordering::SeqCst);
        let unknown = !in_log && !body.dead && matches!(body.extents.find(0), Below::Unknown);
        unknown.then(|| body.extents.version())
    }

    /// Exclusive access: waits for readers and for overwrites in place.
    pub fn write(&self) -> InodeWrite<'_> {
        self.own(self.body.write())
    }

    /// Exclusive access if the lock is free.
    pub fn try_write(&self) -> Option<InodeWrite<'_>> {
        self.body.try_write().map(|body| self.own(body))
    }

    /// Exclusive access without a wait: if the lock is free and no thread overwrites in place.
    pub(crate) fn try_write_idle(&self) -> Option<InodeWrite<'_>> {
        let body = self.body.try_write()?;
        self.bar_overwrites();
        if slots::overwrites(self.id) {
            let version = self.version.load(Ordering::Relaxed);
            self.version.store(version + 1, Ordering::Release);
            return None;
        }
        Some(self.barred(body))
    }

    fn own<'a>(&'a self, body: RwLockWriteGuard<'a, InodeBody>) -> InodeWrite<'a> {
        self.bar_overwrites();
        slots::wait_for_overwrites(self.id);
        self.barred(body)
    }

    /// Bars overwrites in place, with the lock held.
    fn bar_overwrites(&self) {
        // SeqCst pairs with the overwriter, which names the inode in its slot, passes a full barrier and
        // loads this word. Only the holder of the lock changes it.
        self.version.fetch_add(1, Ordering::SeqCst);
        // A reader that sees a change made from here on also sees the odd word, or a later one.
        std::sync::atomic::fence(Ordering::Release);
    }

    fn barred<'a>(&'a self, mut body: RwLockWriteGuard<'a, InodeBody>) -> InodeWrite<'a> {
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

    /// Highest sequence number that may have been logged for this inode; `log_last` is the log's last one.
    /// Call it when no operation on the inode is under way.
    #[must_use]
    pub fn last_seq(&self, log_last: LogSeq) -> LogSeq {
        if self.overwritten.load(Ordering::Acquire) {
            log_last
        } else {
            self.read().last_seq
        }
    }

    /// Number of changes that were logged under the lease; `u32::MAX` if overwrites in place, which are not
    /// counted, are among them.
    pub(crate) fn changes(&self) -> u32 {
        if self.overwritten.load(Ordering::Acquire) {
            u32::MAX
        } else {
            self.read().changes
        }
    }

    /// Drops all references to a session's log (after the session ended, or when the lease is given back):
    /// the next reads see digested data. `attr` replaces the attributes.
    pub fn reset(&self, attr: InodeAttr) {
        let mut body = self.write();
        body.forget_log();
        body.last_seq = LogSeq(0);
        body.changes = 0;
        body.attr = attr;
        body.dead = false;
        self.overwritten.store(false, Ordering::Release);
    }

    /// Returns the id that names this inode in thread slots.
    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    /// Whether an overwrite in place must use the lock. The caller has named the inode in its slot and passed
    /// a full barrier.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.version.load(Ordering::SeqCst) & 1 != 0
    }

    /// Begins a read without a lock; `None` if the exclusive lock is held, or if the inode is not a regular
    /// file with whole blocks only in the log.
    #[inline]
    pub(crate) fn version(&self) -> Option<u64> {
        let version = self.version.load(Ordering::Acquire);
        (version & 1 == 0 && self.plain.load(Ordering::Relaxed)).then_some(version)
    }

    /// Whether the exclusive lock was not taken since `version`: all values loaded meanwhile are consistent,
    /// and nothing that they point to was reused before.
    #[inline]
    pub(crate) fn is_still(&self, version: u64) -> bool {
        std::sync::atomic::fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    /// Whether the inode has a name, and no thread is changing that. A later change sees the effects of the
    /// caller's operations before this call (a lock or another full barrier lies between).
    pub(crate) fn is_surely_named(&self) -> bool {
        let version = self.version.load(Ordering::SeqCst);
        version & 1 == 0 && !self.nameless.load(Ordering::Relaxed) && self.is_still(version)
    }

    /// Whether a change of the data by an ordinary user may have to clear set-id bits.
    #[inline]
    pub(crate) fn may_have_set_id(&self) -> bool {
        self.set_id.load(Ordering::Acquire)
    }

    /// Whether a read at `now_ns` may have to move the time of the last read.
    #[inline]
    pub(crate) fn is_atime_due(&self, now_ns: TimeNs) -> bool {
        now_ns >= self.atime_due_ns.load(Ordering::Relaxed)
    }

    /// Size for overwrites in place.
    pub(crate) fn size_hint(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Notes an overwrite in place. Stores only changed values: these words are shared by all overwriting
    /// threads.
    pub(crate) fn note_overwrite(&self, time: TimeNs) {
        if self.overwrite_time.load(Ordering::Relaxed) < time {
            self.overwrite_time.store(time, Ordering::Relaxed);
        }
        if !self.overwritten.load(Ordering::Relaxed) {
            self.overwritten.store(true, Ordering::Release);
        }
        self.drop_capability();
    }

    /// Notes that the data or the owner changes: file capabilities are dropped, also if they were never
    /// loaded. Stores only a changed value, as above.
    #[inline]
    pub(crate) fn drop_capability(&self) {
        if !self.capability_gone.load(Ordering::Relaxed) {
            self.capability_gone.store(true, Ordering::Release);
        }
    }

    /// Whether the daemon's answer about file capabilities is out of date: they are gone.
    pub(crate) fn is_capability_gone(&self) -> bool {
        self.capability_gone.load(Ordering::Acquire)
    }

    /// Notes that file capabilities were set, or that all changes are digested.
    pub(crate) fn renew_capability(&self) {
        self.capability_gone.store(false, Ordering::Release);
    }
}

fn is_regular(attr: &InodeAttr) -> bool {
    attr.kind() == varve_format::FileKind::Regular
}

const SET_ID: u32 = 0o6000;
const DAY_NS: TimeNs = 86_400_000_000_000;

/// Time from which on a read moves the time of the last read (as [`crate::attrs::atime_is_due`] decides).
const fn atime_due_ns(attr: &InodeAttr) -> TimeNs {
    if attr.atime_ns <= attr.mtime_ns || attr.atime_ns <= attr.ctime_ns {
        TimeNs::MIN
    } else {
        attr.atime_ns.saturating_add(DAY_NS)
    }
}

/// Applies the time of an overwrite in place, which came after all changes under the lock: mtime is its time,
/// even if mtime was set to a later one. 0 stands for none.
fn fold_time(attr: &mut InodeAttr, time: TimeNs) {
    if time != 0 {
        attr.mtime_ns = time;
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
    /// As [`Inode::drop_capability`].
    #[inline]
    pub(crate) fn drop_capability(&self) {
        self.inode.drop_capability();
    }

    /// Drops every pointer into the log and the cached extents.
    pub fn forget_log(&mut self) {
        self.inode.radix.clear();
        self.body.pieces = Pieces::new();
        self.body.extents.invalidate();
    }
}

impl Drop for InodeWrite<'_> {
    #[inline]
    fn drop(&mut self) {
        let (inode, body) = (self.inode, &*self.body);
        inode.size.store(body.attr.size_bytes, Ordering::Release);
        let plain = body.pieces.is_empty() && is_regular(&body.attr);
        inode.plain.store(plain, Ordering::Relaxed);
        inode.nameless.store(body.attr.nlink == 0, Ordering::Relaxed);
        inode
            .set_id
            .store(body.attr.mode & SET_ID != 0, Ordering::Relaxed);
        inode
            .atime_due_ns
            .store(atime_due_ns(&body.attr), Ordering::Relaxed);
        inode.places.count_from(body.extents.version());
        let version = inode.version.load(Ordering::Relaxed);
        inode.version.store(version + 1, Ordering::Release);
    }
}
