//! The session page: a few words that the daemon shows a session, read by the client without a call. Owns
//! their layout, their mapping and the matching barrier; refuses to know why a word changes.
//!
//! The daemon maps the page read-write, the client read-only; both access it through atomics only. The daemon
//! only writes the words, and never relies on a word that it reads there.
//!
//! *Act, then check*: a client makes its entry durable (fence), then loads [`SessionPage::state`]. The daemon
//! stores `Sealed`, calls [`membarrier`], then reads the log's tail. The barrier runs on every thread of
//! every registered process, so an entry whose writer saw `Live` is in memory before the tail is read.

use once_cell::race::OnceBool;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use varve_format::{LogSeq, SessionId, TxId};

/// Bytes of a page file.
pub const PAGE_BYTES: usize = 4096;
/// First word of a page.
const MAGIC: u64 = u64::from_le_bytes(*b"VARVEPG1");
const LIVE: u32 = 1;
const SEALED: u32 = 2;

/// Whether a session still counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// Leases hold and entries count.
    Live,
    /// The session is over: request its seal with `Hello { resume }`.
    Sealed,
}

/// The values that a session reads without a call. Each method is one atomic load.
pub trait SessionPage: Send + Sync {
    /// Whether the session still counts (acquire; see the module's documentation for the barrier).
    fn state(&self) -> PageState;
    /// Every entry up to this number is in the shared area.
    fn digested(&self) -> LogSeq;
    /// Newest journal transaction: the base of operations that begin after this load.
    fn committed_tx(&self) -> TxId;
    /// 0 while no inode of the pool is watched in a mount's kernel (see [`Watched`](crate::Watched)); else a
    /// number that differs after each change of the watched set.
    fn watched(&self) -> u64;
    /// Devices of the SSD that were taken out of the pool, by the bits of
    /// [`DevicePart::index`](crate::DevicePart::index): the session is to close them. Bits of other devices
    /// mean nothing.
    fn gone_devices(&self) -> u64 {
        0
    }
}

#[repr(C)]
struct Words {
    magic: AtomicU64,
    session: AtomicU64,
    digested: AtomicU64,
    committed_tx: AtomicU64,
    state: AtomicU32,
    reserved: AtomicU32,
    watched: AtomicU64,
    gone_devices: AtomicU64,
}

const _: () = assert!(size_of::<Words>() <= PAGE_BYTES);

enum Backing {
    Heap(Box<Words>),
    Mapped { base: NonNull<Words>, writable: bool },
}

/// A session page in the heap or in a mapped file.
pub struct Page {
    backing: Backing,
}

// SAFETY: the mapping belongs to this value alone, lives until its drop, and is only reached through atomics.
unsafe impl Send for Page {}
// SAFETY: as above; shared references reach it through atomics only.
unsafe impl Sync for Page {}

impl Page {
    /// Makes a page in the heap, live: both sides are in this process.
    #[must_use]
    pub fn heap(session: SessionId) -> Self {
        Self {
            backing: Backing::Heap(Box::new(Words {
                magic: AtomicU64::new(MAGIC),
                session: AtomicU64::new(session.0),
                digested: AtomicU64::new(0),
                committed_tx: AtomicU64::new(0),
                state: AtomicU32::new(LIVE),
                reserved: AtomicU32::new(0),
                watched: AtomicU64::new(0),
                gone_devices: AtomicU64::new(0),
            })),
        }
    }

    /// Makes the page file `path` (it must not exist), live, mapped for the daemon.
    ///
    /// # Errors
    /// Errors of open, allocation (space is allocated at once, so that no later store can fault) and mapping.
    pub fn create(path: &Path, session: SessionId) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, PAGE_BYTES as u64)?;
        let page = Self::map(&file, true)?;
        let words = page.words();
        words.session.store(session.0, Ordering::Relaxed);
        words.state.store(LIVE, Ordering::Relaxed);
        words.magic.store(MAGIC, Ordering::Release);
        Ok(page)
    }

    /// Opens an existing page file for the daemon (after its restart).
    ///
    /// # Errors
    /// Errors of open and mapping; `InvalidData` if the file is too short to be a page.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Self::map(&rustix::fs::open(path, flags, Mode::empty())?, true)
    }

    /// Opens a read-only descriptor of the page file, to pass to the client.
    ///
    /// # Errors
    /// Errors of open.
    pub fn open_for_client(path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }

    /// Maps a descriptor that the daemon passed, read-only, and registers this process for the daemon's
    /// barriers.
    ///
    /// # Errors
    /// Errors of mapping; `InvalidData` if it is not a page.
    pub fn from_descriptor(fd: impl AsFd) -> io::Result<Self> {
        register_for_membarrier();
        let page = Self::map(fd, false)?;
        if page.words().magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a session page"));
        }
        Ok(page)
    }

    fn map(fd: impl AsFd, writable: bool) -> io::Result<Self> {
        let fd = fd.as_fd();
        let len = rustix::fs::fstat(fd)?.st_size;
        if len < PAGE_BYTES as i64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("page file of {len} bytes"),
            ));
        }
        let mut prot = ProtFlags::READ;
        if writable {
            prot |= ProtFlags::WRITE;
        }
        // SAFETY: the kernel chooses the address, so no existing mapping is touched; the result is owned by
        // the value built below. The file is in the daemon's own directory and clients hold it read-only, so
        // it does not shrink.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, prot, MapFlags::SHARED, fd, 0) }?;
        let base = NonNull::new(base.cast::<Words>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            backing: Backing::Mapped { base, writable },
        })
    }

    fn words(&self) -> &Words {
        match &self.backing {
            Backing::Heap(words) => words,
            // SAFETY: a whole page is mapped at `base` (checked in `map`), page-aligned, until drop; every
            // field is an atomic, for which any bit pattern is valid and concurrent change by another process
            // is defined.
            Backing::Mapped { base, .. } => unsafe { base.as_ref() },
        }
    }

    fn writable(&self) -> Option<&Words> {
        match self.backing {
            Backing::Mapped { writable: false, .. } => None,
            _ => Some(self.words()),
        }
    }

    /// The session that the page was made for.
    #[must_use]
    pub fn session(&self) -> SessionId {
        SessionId(self.words().session.load(Ordering::Relaxed))
    }

    /// Daemon: ends the session. Call [`membarrier`] before reading the log's tail. Does nothing on a
    /// client's mapping.
    pub fn seal(&self) {
        if let Some(words) = self.writable() {
            words.state.store(SEALED, Ordering::SeqCst);
        }
    }

    /// Daemon: publishes that everything up to `seq` is in the shared area.
    pub fn set_digested(&self, seq: LogSeq) {
        if let Some(words) = self.writable() {
            words.digested.store(seq.0, Ordering::Release);
        }
    }

    /// Daemon: publishes a change of the watched inodes.
    pub fn set_watched(&self, generation: u64) {
        if let Some(words) = self.writable() {
            words.watched.store(generation, Ordering::Release);
        }
    }

    /// Daemon: publishes that devices are no part of the pool any more.
    pub fn add_gone_devices(&self, bits: u64) {
        if let Some(words) = self.writable() {
            words.gone_devices.fetch_or(bits, Ordering::Release);
        }
    }

    /// Daemon: publishes the newest transaction.
    pub fn set_committed_tx(&self, tx: TxId) {
        if let Some(words) = self.writable() {
            words.committed_tx.fetch_max(tx.0, Ordering::Release);
        }
    }
}

impl SessionPage for Page {
    fn state(&self) -> PageState {
        if self.words().state.load(Ordering::Acquire) == LIVE {
            PageState::Live
        } else {
            PageState::Sealed
        }
    }

    fn digested(&self) -> LogSeq {
        LogSeq(self.words().digested.load(Ordering::Acquire))
    }

    fn committed_tx(&self) -> TxId {
        TxId(self.words().committed_tx.load(Ordering::Acquire))
    }

    fn watched(&self) -> u64 {
        self.words().watched.load(Ordering::Acquire)
    }

    fn gone_devices(&self) -> u64 {
        self.words().gone_devices.load(Ordering::Acquire)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if let Backing::Mapped { base, .. } = self.backing {
            // SAFETY: mapped with this length in `map`, unmapped once, and no reference outlives `self`.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), PAGE_BYTES) };
        }
    }
}

const CMD_GLOBAL: libc::c_int = 1;
const CMD_GLOBAL_EXPEDITED: libc::c_int = 2;
const CMD_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 4;
const CMD_PRIVATE_EXPEDITED: libc::c_int = 8;
const CMD_REGISTER_PRIVATE_EXPEDITED: libc::c_int = 16;

fn membarrier_command(command: libc::c_int) -> bool {
    // SAFETY: takes three integers and touches no memory of this process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Makes every running thread of every registered process pass a full memory barrier before this returns.
/// Where the kernel lacks the quick command the slow one is used (all processes, milliseconds).
pub fn membarrier() {
    if !membarrier_command(CMD_GLOBAL_EXPEDITED) {
        membarrier_command(CMD_GLOBAL);
    }
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// Registers this process for the [`membarrier`] calls of others and for its own barriers. Cheap when
/// repeated, and at first if the process has one thread. With several, the kernel waits until all processors
/// have passed, some 10 ms.
pub fn register_for_membarrier() {
    membarrier_command(CMD_REGISTER_GLOBAL_EXPEDITED);
    barriers_are_asymmetric();
}

/// Whether [`heavy_barrier`] makes the other threads of this process pass a barrier, so that
/// [`light_barrier`] need not be one. Determined before the first of either, by each thread that needs it at
/// first: in a child that is forked meanwhile, one that waited would wait for ever.
#[inline]
fn barriers_are_asymmetric() -> bool {
    static FOUND: OnceBool = OnceBool::new();
    FOUND.get_or_init(|| membarrier_command(CMD_REGISTER_PRIVATE_EXPEDITED))
}

/// The cheap half of a pair of barriers between threads of this process: one thread stores, passes this,
/// loads; another stores, passes [`heavy_barrier`], loads. At least one of them sees the other's store. Costs
/// nothing where the kernel helps.
#[inline]
pub fn light_barrier() {
    if barriers_are_asymmetric() {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// The expensive half of the pair: about a microsecond.
pub fn heavy_barrier() {
    if barriers_are_asymmetric() && !membarrier_command(CMD_PRIVATE_EXPEDITED) {
        // It fails only unregistered; a fork keeps the registration, but the kernel does not promise that.
        membarrier_command(CMD_REGISTER_PRIVATE_EXPEDITED);
        membarrier_command(CMD_PRIVATE_EXPEDITED);
    }
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Page, PageState, SessionPage, membarrier};
    use varve_format::{LogSeq, SessionId, TxId};

    #[test]
    fn page_shows_the_clients_mapping_what_the_daemon_stores() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page-7");
        let daemon = Page::create(&path, SessionId(7)).unwrap();
        let client = Page::from_descriptor(Page::open_for_client(&path).unwrap()).unwrap();
        assert_eq!(
            (client.session(), client.state()),
            (SessionId(7), PageState::Live)
        );
        daemon.set_digested(LogSeq(5));
        daemon.set_committed_tx(TxId(9));
        daemon.set_committed_tx(TxId(8));
        assert_eq!((client.digested(), client.committed_tx()), (LogSeq(5), TxId(9)));
        daemon.seal();
        membarrier();
        assert_eq!(client.state(), PageState::Sealed);
        assert_eq!(Page::open(&path).unwrap().state(), PageState::Sealed);
    }

    #[test]
    fn one_of_two_threads_sees_the_other_when_both_pass_their_barriers() {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        const ROUNDS: u64 = 3_000;
        let (light, heavy, met) = (AtomicU64::new(0), AtomicU64::new(0), std::sync::Barrier::new(2));
        let mut missed = 0;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                (1..=ROUNDS)
                    .map(|round| {
                        met.wait();
                        light.store(round, Relaxed);
                        super::light_barrier();
                        let seen = heavy.load(Relaxed) == round;
                        met.wait();
                        seen
                    })
                    .collect::<Vec<_>>()
            });
            let own: Vec<_> = (1..=ROUNDS)
                .map(|round| {
                    met.wait();
                    heavy.store(round, Relaxed);
                    super::heavy_barrier();
                    let seen = light.load(Relaxed) == round;
                    met.wait();
                    seen
                })
                .collect();
            let others = other.join().unwrap();
            missed = own.iter().zip(others).filter(|(a, b)| !**a && !b).count();
        });
        assert_eq!(missed, 0);
    }

    #[test]
    fn page_of_a_client_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page-1");
        let daemon = Page::create(&path, SessionId(1)).unwrap();
        let fd = Page::open_for_client(&path).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        let client = Page::from_descriptor(fd).unwrap();
        client.seal();
        client.set_digested(LogSeq(3));
        assert_eq!((daemon.state(), daemon.digested()), (PageState::Live, LogSeq(0)));
    }

    #[test]
    fn page_is_refused_when_the_file_is_short_or_foreign() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, [0; 100]).unwrap();
        assert!(Page::open(&path).is_err());
        std::fs::write(&path, [0; 4096]).unwrap();
        assert!(Page::from_descriptor(Page::open_for_client(&path).unwrap()).is_err());
    }
}
