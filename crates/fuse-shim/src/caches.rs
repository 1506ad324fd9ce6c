//! LibFS' access to the kernel's page cache: file data is dropped from it. Timeouts of dentries and
//! attributes are those of `varve_libfs::CachedReply`.

use crate::callers::Numbers;
use fuser::{INodeNo, Notifier};
use parking_lot::{Condvar, Mutex, RwLock, RwLockWriteGuard};
use rustix::thread::gettid;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};
use tracing::{debug, warn};
use varve_format::InodeKey;
use varve_libfs::CacheObserver;

/// Longer than a page stays locked while a read fills it, even on a busy machine.
const LOCKED: Duration = Duration::from_millis(20);
/// Interval between two checks for a locked page, and number of checks in a row that must find it locked.
const LOOK: Duration = Duration::from_millis(1);
const LOOKS: u32 = 3;
/// Upper bound on the wait for a page.
const LOCKED_MOST: Duration = Duration::from_secs(1);
/// Upper bound on an unmount's wait for the drops under way.
const STILL_MOST: Duration = Duration::from_secs(2);

/// Passes LibFS' invalidations to the kernel. Called only by threads of LibFS.
#[derive(Debug, Default)]
pub struct KernelCaches {
    notifier: RwLock<Option<Notifier>>,
    /// Held for reading while the kernel is told to drop pages.
    drops: Arc<RwLock<()>>,
    numbers: Numbers,
}

/// While this exists, no pages are dropped.
pub(crate) struct Still<'c> {
    _drops: RwLockWriteGuard<'c, ()>,
}

impl KernelCaches {
    /// Makes the caches of a mount that is not mounted yet; until [`attach`](Self::attach) there is nothing
    /// to invalidate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins to pass invalidations to the kernel, which caches from then on.
    pub fn attach(&self, notifier: Notifier) {
        *self.notifier.write() = Some(notifier);
    }

    /// Ends it, when the mount is gone.
    pub fn detach(&self) {
        *self.notifier.write() = None;
    }

    /// Notes a thread that calls, and waits for the reply.
    pub(crate) fn note_calling(&self, thread: u32) {
        self.numbers.note_calling(thread);
    }

    /// Waits for the drops under way and keeps others from beginning. An unmount waits in the kernel for
    /// drops, without a timeout and through every signal; a drop waits in that way for a page that a read of
    /// this process is to fill. If the process were killed amid both, it would stay forever: its reading
    /// threads are gone, and its connection ends only with the last thread. `None` if a drop takes too long.
    pub(crate) fn still(&self) -> Option<Still<'_>> {
        let drops = self.drops.try_write_for(STILL_MOST)?;
        Some(Still { _drops: drops })
    }
}

/// A thread that has the kernel drop a page.
#[derive(Default)]
struct Waiter {
    thread: AtomicI32,
    done: Mutex<bool>,
    changed: Condvar,
}

impl Waiter {
    /// Whether the thread sleeps uninterruptibly, as it does for a locked page, and is not merely without a
    /// processor.
    fn is_waiting_in_kernel(&self) -> bool {
        let thread = self.thread.load(Ordering::SeqCst);
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
        // The name before the state is in parentheses.
        stat.is_ok_and(|stat| {
            stat.rsplit_once(") ")
                .is_some_and(|(_, rest)| rest.starts_with('D'))
        })
    }
}

fn invalidate(notifier: &Notifier, key: InodeKey, offset: u64, len: u64) {
    let offset = i64::try_from(offset).unwrap_or(i64::MAX);
    let len = i64::try_from(len).unwrap_or(0);
    match notifier.inval_inode(INodeNo(key.number()), offset, len) {
        Ok(()) => debug!(%key, offset, len, "kernel dropped cached data"),
        // The kernel does not know the inode: nothing is cached.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => warn!(%key, %error, "the kernel did not drop cached data"),
    }
}

impl CacheObserver for KernelCaches {
    fn invalidate_data(&self, key: InodeKey, offset: u64, len: u64) {
        let Some(notifier) = self.notifier.read().clone() else {
            return;
        };
        let _under_way = self.drops.read();
        invalidate(&notifier, key, offset, len);
    }

    fn invalidate_unless_locked(&self, key: InodeKey, offset: u64, len: u64) {
        let Some(notifier) = self.notifier.read().clone() else {
            return;
        };
        let waiter = Arc::new(Waiter::default());
        let work = {
            let (waiter, drops) = (Arc::clone(&waiter), Arc::clone(&self.drops));
            move || {
                let _under_way = drops.read();
                waiter.thread.store(gettid().as_raw_pid(), Ordering::SeqCst);
                invalidate(&notifier, key, offset, len);
                *waiter.done.lock() = true;
                waiter.changed.notify_all();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("varve-page".into()).spawn(work) {
            return warn!(%key, %error, "no thread to have the kernel drop a page");
        }
        let started = Instant::now();
        let mut waited = 0;
        let mut done = waiter.done.lock();
        while !*done && started.elapsed() < LOCKED_MOST {
            let timed_out = waiter.changed.wait_for(&mut done, LOOK).timed_out();
            waited = match timed_out && waiter.is_waiting_in_kernel() {
                true => waited + 1,
                false => 0,
            };
            if waited >= LOOKS && started.elapsed() >= LOCKED {
                return;
            }
        }
    }

    fn has_ended(&self, thread: u32) -> bool {
        self.numbers.has_ended(thread)
    }
}

#[cfg(test)]
mod tests {
    use super::KernelCaches;
    use std::sync::Arc;

    #[test]
    fn nothing_is_still_while_a_drop_is_under_way_and_nothing_is_dropped_while_it_is() {
        let caches = Arc::new(KernelCaches::new());
        let under_way = caches.drops.read();
        assert!(caches.still().is_none(), "a drop is under way");
        drop(under_way);
        let still = caches.still();
        assert!(still.is_some() && caches.drops.try_read().is_none());
        drop(still);
        assert!(caches.drops.try_read().is_some());
    }
}
