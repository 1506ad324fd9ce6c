//! One inode in this process's memory: its attributes, what the log holds of it, and where the digested rest
//! lies. Owns the lock order inside an inode; knows nothing of names and of the daemon.
//!
//! Three kinds of access: [`Inode::read`] (shared), [`Inode::write`] (exclusive), and *overwrites in place*,
//! which the data path runs under neither: whole blocks below the size are logged and published in the
//! `Radix` by compare-and-swap, so that threads that overwrite one file do not meet on a lock. `write` keeps
//! them out and waits for those under way. And one kind of look without any: *reads that are tried* note
//! `Inode::version`, copy, and count only if the version is the same afterwards (`Inode::is_still`).

pub(crate) mod extents;
pub(crate) mod overlay;
pub(crate) mod places;

use self::{extents::ExtentCache, places::Places};
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
    /// The lease word; its meaning is the lease module's.
    pub lease: AtomicU64,
    /// Never 0, never given out twice in a process: how thread slots name this inode.
    id: u64,
    /// Grows when the exclusive lock is taken (it is odd then: overwrites in place go through the lock) and
    /// when it is let go.
    version: AtomicU64,
    /// Copy of the size for overwrites in place and reads that are tried; follows `body` when an exclusive
    /// lock is let go, as those below.
    size: AtomicU64,
    /// A regular file of whose blocks the log holds no parts: reads may be tried.
    plain: AtomicBool,
    /// The mode has set-id bits.
    set_id: AtomicBool,
    /// It has no name.
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
    /// Listed for pruning.
    pub(crate) listed: AtomicBool,
    /// Where in that list it probably is. Under the list's lock.
    pub(crate) list_place: AtomicU32,
    /// Whole blocks in the log.
    pub(crate) radix: Radix,
    /// Digested blocks in NVM, as far as reads under the lock have met them.
    pub(crate) places: Places,
    /// Shared by appends; an append in parts has it alone, from its first part to its last. Before any room
    /// in the log is taken.
    pub(crate) appends: RwLock<()>,
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
    /// How many entries those were, under this lease.
    changes: u32,
    /// It lost its last name, and its last entry in the log said that nobody here has it open: it takes no
    /// more entries.
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

    /// Entry `seq` of the log is about this inode.
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
    /// An inode of which the log holds nothing.
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
            listed: AtomicBool::new(false),
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

    /// As [`attr`](Self::attr), if nobody has or wants the exclusive lock now.
    #[inline]
    pub(crate) fn try_attr(&self) -> Option<InodeAttr> {
        let mut attr = self.body.try_read()?.attr.clone();
        fold_time(&mut attr, self.overwrite_time.load(Ordering::Relaxed));
        Some(attr)
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
        // SeqCst pairs with the overwriter, which names the inode in its slot, passes a full barrier and
        // loads this word. Only who has the lock changes it.
        self.version.fetch_add(1, Ordering::SeqCst);
        // What is changed from here on is seen changed only by those who see the word odd, or later.
        std::sync::atomic::fence(Ordering::Release);
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

    /// Highest sequence number that may have been logged for this inode; `log_last` is the log's last one.
    /// Call it when the inode's operations have come to rest.
    #[must_use]
    pub fn last_seq(&self, log_last: LogSeq) -> LogSeq {
        if self.overwritten.load(Ordering::Acquire) {
            log_last
        } else {
            self.read().last_seq
        }
    }

    /// How many changes were logged under the lease; `u32::MAX`: overwrites in place too, which are not
    /// counted.
    pub(crate) fn changes(&self) -> u32 {
        if self.overwritten.load(Ordering::Acquire) {
            u32::MAX
        } else {
            self.read().changes
        }
    }

    /// Forgets all that a session's log held (after the session ended, or when the lease is let go): the next
    /// reads see what is digested. `attr` is the new truth.
    pub fn reset(&self, attr: InodeAttr) {
        let mut body = self.write();
        body.forget_log();
        body.last_seq = LogSeq(0);
        body.changes = 0;
        body.attr = attr;
        body.dead = false;
        self.overwritten.store(false, Ordering::Release);
    }

    /// How thread slots name this inode.
    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    /// Whether an overwrite in place must use the lock. The caller has named the inode in its slot and passed
    /// a full barrier.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.version.load(Ordering::SeqCst) & 1 != 0
    }

    /// Begins a read without a lock; `None` if somebody has the inode, or if it is no file whose blocks are
    /// all whole.
    #[inline]
    pub(crate) fn version(&self) -> Option<u64> {
        let version = self.version.load(Ordering::Acquire);
        (version & 1 == 0 && self.plain.load(Ordering::Relaxed)).then_some(version)
    }

    /// Whether nobody has had the exclusive lock since `version`: what was loaded meanwhile belongs together,
    /// and nothing that it points to was used again before.
    #[inline]
    pub(crate) fn is_still(&self, version: u64) -> bool {
        std::sync::atomic::fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    /// Whether it has a name, and nobody is changing that. What the caller did before (with a lock or another
    /// full barrier) is seen by whoever changes it later.
    pub(crate) fn is_surely_named(&self) -> bool {
        let version = self.version.load(Ordering::SeqCst);
        version & 1 == 0 && !self.nameless.load(Ordering::Relaxed) && self.is_still(version)
    }

    /// Whether a change of the data by an ordinary user may have to clear set-id bits.
    #[inline]
    pub(crate) fn may_have_set_id(&self) -> bool {
        self.set_id.load(Ordering::Acquire)
    }

    /// Whether a read now may have to move the time of the last read.
    #[inline]
    pub(crate) fn is_atime_due(&self, now_ns: TimeNs) -> bool {
        now_ns >= self.atime_due_ns.load(Ordering::Relaxed)
    }

    /// Size for overwrites in place.
    pub(crate) fn size_hint(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Notes an overwrite in place. Stores only what changed: these words are shared by all overwriting
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

    /// The data or the owner changes: file capabilities go with it, also those that were never loaded. Stores
    /// only what changed, as above.
    #[inline]
    pub(crate) fn drop_capability(&self) {
        if !self.capability_gone.load(Ordering::Relaxed) {
            self.capability_gone.store(true, Ordering::Release);
        }
    }

    /// Whether what the daemon says of file capabilities is out of date: they are gone.
    pub(crate) fn is_capability_gone(&self) -> bool {
        self.capability_gone.load(Ordering::Acquire)
    }

    /// They were set, or all that was changed is digested.
    pub(crate) fn renew_capability(&self) {
        self.capability_gone.store(false, Ordering::Release);
    }
}

fn is_regular(attr: &InodeAttr) -> bool {
    attr.kind() == varve_format::FileKind::Regular
}

const SET_ID: u32 = 0o6000;
const DAY_NS: TimeNs = 86_400_000_000_000;

/// From when on a read moves the time of the last read (as [`crate::attrs::atime_is_due`] decides).
const fn atime_due_ns(attr: &InodeAttr) -> TimeNs {
    if attr.atime_ns <= attr.mtime_ns || attr.atime_ns <= attr.ctime_ns {
        TimeNs::MIN
    } else {
        attr.atime_ns.saturating_add(DAY_NS)
    }
}

/// An overwrite in place came after all that was done under the lock: mtime is its time, also where it was
/// set to a later one. 0 stands for none.
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
