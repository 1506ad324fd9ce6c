//! Reads of slow tiers that are under way, so that a thread waits for what another one fetches instead of
//! fetching it too: a kernel that reads ahead sends the next part of a file before the one before is answered.
//! Knows ranges of blocks only.

use crate::sync::{Condvar, Mutex};
use std::ops::Range;

/// Blocks of a file, in one version of its extents, that are being fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Under {
    inode: u64,
    version: u64,
    blocks: Range<u64>,
}

/// The reads of one session.
pub(super) struct Flights {
    under_way: Mutex<Vec<Under>>,
    ended: Condvar,
}

impl Flights {
    pub(super) fn new() -> Self {
        Self {
            under_way: Mutex::new(Vec::new()),
            ended: Condvar::new(),
        }
    }

    /// Begins to fetch blocks: those before the next that another thread fetches. `None`: another one was
    /// fetching the first of them, and has ended since. With `at_once` it does not wait, and fetches it too.
    pub(super) fn begin(
        &self,
        (inode, version): (u64, u64),
        blocks: Range<u64>,
        at_once: bool,
    ) -> Option<Flight<'_>> {
        let mut under_way = self.under_way.lock();
        let of_file = |under: &&Under| (under.inode, under.version) == (inode, version);
        let has_first = |under_way: &Vec<Under>| {
            let mut same = under_way.iter().filter(of_file);
            same.any(|under| under.blocks.contains(&blocks.start))
        };
        if !at_once && has_first(&under_way) {
            while has_first(&under_way) {
                self.ended.wait(&mut under_way);
            }
            return None;
        }
        let later = under_way.iter().filter(of_file).map(|under| under.blocks.start);
        let end = later.filter(|start| *start > blocks.start).min();
        let under = Under {
            inode,
            version,
            blocks: blocks.start..end.map_or(blocks.end, |end| end.min(blocks.end)),
        };
        under_way.push(under.clone());
        drop(under_way);
        Some(Flight { flights: self, under })
    }
}

/// A read that is under way until it is dropped.
pub(super) struct Flight<'f> {
    flights: &'f Flights,
    under: Under,
}

impl Flight<'_> {
    /// Blocks that it fetches.
    pub(super) fn blocks(&self) -> u64 {
        self.under.blocks.end - self.under.blocks.start
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut under_way = self.flights.under_way.lock();
        if let Some(at) = under_way.iter().position(|under| *under == self.under) {
            under_way.swap_remove(at);
        }
        drop(under_way);
        self.flights.ended.notify_all();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::Flights;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn read_ends_where_another_one_begins_and_waits_for_one_that_has_its_first_block() {
        let flights = Flights::new();
        let first = flights.begin((1, 1), 100..200, false).unwrap();
        assert_eq!(first.blocks(), 100);
        assert_eq!(flights.begin((1, 1), 50..150, false).unwrap().blocks(), 50);
        assert_eq!(flights.begin((1, 2), 50..150, false).unwrap().blocks(), 100);
        assert_eq!(flights.begin((2, 1), 150..160, false).unwrap().blocks(), 10);
        assert_eq!(flights.begin((1, 1), 150..260, true).unwrap().blocks(), 110);
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(flights.begin((1, 1), 199..300, false).is_none());
                assert!(has_ended.load(Ordering::SeqCst));
            });
            std::thread::sleep(Duration::from_millis(50));
            has_ended.store(true, Ordering::SeqCst);
            drop(first);
        });
        assert!(flights.under_way.lock().is_empty());
    }
}
