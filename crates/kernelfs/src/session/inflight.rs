//! Requests under way in the daemon's object: it has ended when all of them have left. Knows nothing of their
//! work.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Flag: no request enters any more.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Requests under way.
#[derive(Debug, Default)]
pub(crate) struct InFlight(AtomicUsize);

/// A request under way, until this is dropped.
pub(crate) struct InFlightGuard<'e>(&'e InFlight);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

impl InFlight {
    /// Enters a request. `None`: closed.
    #[inline]
    pub(crate) fn enter(&self) -> Option<InFlightGuard<'_>> {
        let entered = InFlightGuard(self);
        // Counted before the check: either `close` sees this request, or the request sees the flag.
        (self.0.fetch_add(1, Ordering::AcqRel) & CLOSED == 0).then_some(entered)
    }

    /// Lets no request enter any more.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether all requests have left.
    pub(crate) fn are_over(&self) -> bool {
        self.0.load(Ordering::Acquire) & !CLOSED == 0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::InFlight;
    use crate::common::{ROOT, World};
    use crate::config::Config;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn nobody_enters_what_is_closed_and_all_leave() {
        let in_flight = InFlight::default();
        let first = in_flight.enter();
        assert!(first.is_some() && !in_flight.are_over());
        let second = in_flight.enter();
        in_flight.close();
        assert!(in_flight.enter().is_none());
        drop(first);
        assert!(!in_flight.are_over());
        drop(second);
        assert!(in_flight.are_over());
    }

    #[test]
    fn daemon_has_stopped_when_the_requests_under_way_have_ended() {
        let world = World::new();
        let ended = Arc::new(AtomicBool::new(false));
        let (begun, begins) = std::sync::mpsc::channel();
        let request = {
            let (kernel, ended) = (Arc::clone(&world.kernel), Arc::clone(&ended));
            std::thread::spawn(move || {
                let entered = kernel.lifecycle.begin_request().unwrap();
                begun.send(()).unwrap();
                while !kernel.lifecycle.stopping.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(30));
                kernel.store.begin().unwrap().commit().unwrap();
                ended.store(true, Ordering::Release);
                drop(entered);
            })
        };
        begins.recv().unwrap();
        world.kernel.shutdown().unwrap();
        assert!(ended.load(Ordering::Acquire));
        assert!(world.kernel.lifecycle.begin_request().is_err());
        assert!(world.kernel.store.begin().is_err(), "whoever asks");
        request.join().unwrap();
    }

    #[test]
    fn who_looks_at_all_of_the_pool_does_not_hold_the_end_up() {
        let world = World::new();
        let (begun, begins) = std::sync::mpsc::channel();
        let request = {
            let kernel = Arc::clone(&world.kernel);
            std::thread::spawn(move || {
                let _entered = kernel.lifecycle.begin_request().unwrap();
                let (check, began) = (kernel.store.begin_check(), std::time::Instant::now());
                begun.send(()).unwrap();
                while kernel.store.goes_on(check).is_ok() && began.elapsed() < Duration::from_secs(10) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                kernel.store.goes_on(check).is_err()
            })
        };
        begins.recv().unwrap();
        world.kernel.shutdown().unwrap();
        assert!(request.join().unwrap(), "its check was cut off");
        assert!(world.kernel.store.check().is_ok(), "one that begins later is not");
    }

    #[test]
    fn request_that_does_not_end_changes_nothing_when_the_daemon_has_stopped() {
        let world = World::with(Config {
            lease_ms: 100,
            wait_ms: 100,
            ..Config::default()
        });
        let _entered = world.kernel.lifecycle.begin_request().unwrap();
        let before = world.kernel.store.newest_tx();
        world.kernel.shutdown().unwrap();
        assert_eq!(world.kernel.store.newest_tx(), before);
        assert!(world.kernel.store.begin().is_err());
        assert!(world.kernel.store.get_key(ROOT).is_ok());
    }
}
