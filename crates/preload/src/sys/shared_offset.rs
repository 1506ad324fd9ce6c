//! The state of an open file description that several processes share, in memory that `fork` shares. Owns the
//! lock between the processes, and the recovery when its holder dies.

use super::kernel;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Upper bound on the descriptions that a process and its descendants share at a time, as many as one process
/// can have served. Beyond it, the kernel keeps the offset. They take memory when they are first used.
const RECORDS: usize = 1 << 18;
/// Records that are looked at for a free one. Those that processes had when they were killed stay taken.
const TRIES: usize = 1 << 10;
/// Times the lock is polled before this sleeps.
const LOOKS: usize = 200;
const NAP_FIRST: Duration = Duration::from_micros(20);
const NAP_MOST: Duration = Duration::from_millis(2);
/// Naps after which the holder is checked for being alive.
const NAPS_BELIEVED: usize = 16;

/// An open file description that more than one process has.
#[repr(C, align(64))]
pub struct Record {
    /// Generation of the record (high half), and number of processes that have it (low half); a record
    /// without processes is free.
    users: AtomicU64,
    /// Thread id of the lock's holder; 0 for none.
    holder: AtomicI32,
    /// 1 once the kernel keeps the offset.
    kernels: AtomicU32,
    /// Flags as `F_GETFL` shows them.
    pub status: AtomicI32,
    at: AtomicU64,
}

const USERS: u64 = u32::MAX as u64;
const LIFE: u64 = USERS + 1;

/// The generation of a record when it was left.
#[derive(Debug, Clone, Copy)]
pub struct Left(u64);

static ARENA: OnceLock<Option<&'static [Record]>> = OnceLock::new();
/// Index at which the search for a free record starts next.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Returns the records, which the first process that forks with open files makes.
fn arena() -> Option<&'static [Record]> {
    *ARENA.get_or_init(|| {
        let len = RECORDS * size_of::<Record>();
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        );
        let a = [
            0,
            len,
            protection as usize,
            (flags | libc::MAP_NORESERVE) as usize,
            usize::MAX,
            0,
        ];
        // SAFETY: a new mapping at a place of the kernel's choice.
        let at = unsafe { kernel::call(libc::SYS_mmap as usize, a) };
        if at <= 0 {
            return None;
        }
        // SAFETY: mapped for good, page-aligned, and zeroed, which means free records; every process touches
        // it by atomics only.
        Some(unsafe { std::slice::from_raw_parts(at as *const Record, RECORDS) })
    })
}

/// Takes a free record for one process; `None` if there is none.
#[must_use]
pub fn take(at: u64, status: i32) -> Option<&'static Record> {
    let arena = arena()?;
    let from = NEXT.fetch_add(1, Ordering::Relaxed);
    let found = (0..TRIES).find(|i| {
        let record = &arena[from.wrapping_add(*i) % RECORDS];
        let free = record.users.load(Ordering::Acquire);
        let mine = (free & !USERS).wrapping_add(LIFE) | 1;
        free & USERS == 0
            && record
                .users
                .compare_exchange(free, mine, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
    });
    // The next search does not look at those again that were taken.
    NEXT.fetch_add(found.unwrap_or(TRIES), Ordering::Relaxed);
    let record = &arena[from.wrapping_add(found?) % RECORDS];
    record.holder.store(0, Ordering::Relaxed);
    record.kernels.store(0, Ordering::Relaxed);
    record.status.store(status, Ordering::Relaxed);
    record.at.store(at, Ordering::Release);
    Some(record)
}

impl Record {
    /// Counts one more process.
    pub fn join(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one process less. Returns the argument for [`rejoin`](Self::rejoin).
    pub fn leave(&self) -> Left {
        Left(self.users.fetch_sub(1, Ordering::AcqRel) & !USERS)
    }

    /// Undoes [`leave`](Self::leave). False if all other processes left meanwhile: the record may be in use
    /// for another description.
    #[must_use]
    pub fn rejoin(&self, left: Left) -> bool {
        let back = |now: u64| (now & !USERS == left.0 && now & USERS > 0).then_some(now + 1);
        self.users
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, back)
            .is_ok()
    }

    /// Whether no other process has it. Stays true until this process forks again.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.users.load(Ordering::Acquire) & USERS == 1
    }

    /// Takes the lock. Returns the offset, and whether the kernel keeps it instead.
    pub fn lock(&self) -> (u64, bool) {
        let me = kernel::gettid();
        let (mut looks, mut naps, mut nap) = (0, 0, NAP_FIRST);
        loop {
            match self
                .holder
                .compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(0) => continue,
                Err(holder) if naps >= NAPS_BELIEVED && !kernel::runs(holder) => {
                    // The holder was killed in the middle of a call. Data written before the offset was moved
                    // counts as not written.
                    let mine = self
                        .holder
                        .compare_exchange(holder, me, Ordering::Acquire, Ordering::Relaxed);
                    if mine.is_ok() {
                        break;
                    }
                }
                Err(_) if looks < LOOKS => {
                    looks += 1;
                    std::hint::spin_loop();
                }
                Err(_) => {
                    kernel::nap(nap);
                    naps += 1;
                    nap = (nap * 2).min(NAP_MOST);
                }
            }
        }
        (
            self.at.load(Ordering::Acquire),
            self.kernels.load(Ordering::Acquire) != 0,
        )
    }

    /// Releases the lock with a new offset, and with `kernels` if the kernel keeps the offset from then on.
    pub fn unlock(&self, at: u64, kernels: bool) {
        self.at.store(at, Ordering::Release);
        if kernels {
            self.kernels.store(1, Ordering::Release);
        }
        self.holder.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::take;

    #[test]
    fn a_record_keeps_the_offset_and_who_has_it() {
        let record = take(7, 1).unwrap();
        assert!(record.is_alone());
        assert_eq!(record.lock(), (7, false));
        record.unlock(9, false);
        record.join();
        assert!(!record.is_alone());
        assert_eq!(record.lock(), (9, false));
        record.unlock(10, true);
        assert_eq!(record.lock(), (10, true));
        record.unlock(11, false);
        assert_eq!(
            record.lock(),
            (11, true),
            "once the kernel has the offset it keeps it"
        );
        record.unlock(11, false);
        let left = record.leave();
        assert!(record.rejoin(left));
        let left = record.leave();
        record.leave();
        assert!(!record.rejoin(left), "nobody has it any more");
    }

    #[test]
    fn threads_take_turns() {
        let record = take(0, 0).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let (at, _) = record.lock();
                        record.unlock(at + 1, false);
                    }
                });
            }
        });
        assert_eq!(record.lock().0, 4000);
        record.unlock(0, false);
        record.leave();
    }

    #[test]
    fn the_lock_of_who_died_is_taken_over() {
        let record = take(5, 0).unwrap();
        let died = std::thread::spawn(crate::sys::kernel::gettid).join().unwrap();
        record.holder.store(died, std::sync::atomic::Ordering::Release);
        assert_eq!(record.lock(), (5, false));
        record.unlock(5, false);
        record.leave();
    }
}
