//! How many neighbours' leases are asked for with one that is missing. Programs walk through trees in the order in which they were made
//! (`find`, `tar`, `cp -a`, `rm -r`, a build), and files made one after another have numbers one after another; so do not a message for each
//! file, but one for many, as read-ahead does for bytes. The window grows while what came ahead is used, and shrinks while it is not.

use std::sync::Arc;
use varve_ipc::{LeaseMode, NEAR_MAX, Near, Want};

use super::node::Node;
use crate::sync::atomic::{AtomicU32, Ordering};

/// First window, and the one after a pause.
const FIRST: u32 = 4;
/// After so many requests without neighbours they are tried again.
const PAUSE: u32 = 64;

/// Of one mode.
#[derive(Debug)]
struct Window {
    size: AtomicU32,
    /// Came ahead since the window last changed.
    given: AtomicU32,
    /// Of them, used.
    used: AtomicU32,
    /// Requests since the window was closed.
    alone: AtomicU32,
}

impl Window {
    fn new() -> Self {
        Self {
            size: AtomicU32::new(FIRST),
            given: AtomicU32::new(0),
            used: AtomicU32::new(0),
            alone: AtomicU32::new(0),
        }
    }

    /// How many to ask for now. Not exact where threads meet; that harms nothing.
    fn next(&self) -> u32 {
        let mut size = self.size.load(Ordering::Relaxed);
        if size == 0 {
            if self.alone.fetch_add(1, Ordering::Relaxed) < PAUSE {
                return 0;
            }
            self.alone.store(0, Ordering::Relaxed);
            size = FIRST;
        } else if self.given.load(Ordering::Relaxed) >= size {
            let given = self.given.swap(0, Ordering::Relaxed);
            let used = self.used.swap(0, Ordering::Relaxed);
            if 2 * used >= given {
                size = (2 * size).min(u32::from(NEAR_MAX));
            } else if 8 * used < given {
                size /= 2;
            }
        }
        self.size.store(size, Ordering::Relaxed);
        size
    }
}

/// The windows of a session.
#[derive(Debug)]
pub(crate) struct Ahead {
    read: Window,
    write: Window,
    /// Requests with neighbours that are under way.
    asking: AtomicU32,
}

/// A request with neighbours, until its answer was taken in.
pub(super) struct Asking<'a>(&'a Ahead);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Ahead {
    pub(crate) fn new() -> Self {
        Self {
            read: Window::new(),
            write: Window::new(),
            asking: AtomicU32::new(0),
        }
    }

    const fn window(&self, mode: LeaseMode) -> &Window {
        match mode {
            LeaseMode::Read => &self.read,
            LeaseMode::Write => &self.write,
        }
    }

    /// Whose neighbours to ask for together with these leases: those of the one that is missing.
    pub(super) fn wish(&self, asked: &[(&Arc<Node>, Want)]) -> Option<(Near, Asking<'_>)> {
        let mut missing = asked.iter().filter(|(node, want)| node.mode() < Some(want.mode));
        let (_, want) = missing.next()?;
        if missing.next().is_some() {
            return None;
        }
        let count = u16::try_from(self.window(want.mode).next()).ok()?;
        if count == 0 {
            return None;
        }
        self.asking.fetch_add(1, Ordering::SeqCst);
        let near = Near {
            after: want.key.ino,
            count,
            mode: want.mode,
        };
        Some((near, Asking(self)))
    }

    /// Whether a lease may be under way that nobody here has named.
    pub(super) fn is_asking(&self) -> bool {
        self.asking.load(Ordering::SeqCst) > 0
    }

    /// A lease came ahead.
    pub(super) fn came(&self, node: &Node, mode: LeaseMode) {
        node.ahead.store(1 + mode as u32, Ordering::Relaxed);
        self.window(mode).given.fetch_add(1, Ordering::Relaxed);
    }

    /// What came ahead is used.
    #[cold]
    pub(super) fn used(&self, node: &Node) {
        let mode = match node.ahead.swap(0, Ordering::Relaxed) {
            0 => return,
            1 => LeaseMode::Read,
            _ => LeaseMode::Write,
        };
        self.window(mode).used.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{FIRST, PAUSE, Window};
    use crate::sync::atomic::Ordering;
    use varve_ipc::NEAR_MAX;

    /// Asks `times`, with the share of what came that is used in percent; the last window.
    fn after(window: &Window, times: u32, percent: u32) -> u32 {
        let mut size = 0;
        for _ in 0..times {
            size = window.next();
            window.given.fetch_add(size, Ordering::Relaxed);
            window.used.fetch_add(size * percent / 100, Ordering::Relaxed);
        }
        size
    }

    #[test]
    fn window_grows_while_it_is_used_and_closes_while_it_is_not() {
        let window = Window::new();
        assert_eq!(after(&window, 1, 100), FIRST);
        assert_eq!(after(&window, 20, 100), u32::from(NEAR_MAX));
        assert_eq!(after(&window, 20, 30), u32::from(NEAR_MAX));
        assert_eq!(after(&window, 20, 0), 0);
        // Tried again after a while, and not for long.
        let tries = (0..10 * PAUSE).filter(|_| after(&window, 1, 0) > 0).count();
        assert!((1..60).contains(&tries), "{tries}");
        assert_eq!(after(&window, PAUSE + 20, 100), u32::from(NEAR_MAX));
    }
}
