//! How pages leave: the clean are dropped, the dirty moved aside and stored.

use super::{ASIDE_PAGES, PATIENCE, Pages, SHORTLY, State, Tools, add, address, ignore};
use crate::error::Error;
use crate::sys::PAGE_BYTES;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What came of letting a page out.
#[derive(Debug)]
pub(crate) enum Left {
    /// There is room.
    Yes,
    /// It is pinned, moving, or the kernel uses it.
    No,
    /// Its object could not be stored; it is there as before.
    Failed(Error),
    /// No page is in memory.
    Nothing,
}

impl Pages {
    /// Lets the oldest page out that may leave.
    pub(crate) fn leave(&self, tools: &mut Tools) -> Left {
        let Some(page) = self.buffer.lock().next() else {
            return Left::Nothing;
        };
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe.pages.get_mut(&page).filter(|listed| listed.pins == 0) else {
            return Left::No;
        };
        match listed.state {
            State::Clean => {
                self.remove(&mut stripe, page, false);
                add(&self.counters.dropped);
                return Left::Yes;
            }
            State::Dirty => {}
            State::Loading | State::Leaving | State::Poisoned(_) => return Left::No,
        }
        let aside = self.aside_page(tools);
        match self.moves.move_page(address(page), aside) {
            Ok(()) => tools.next += 1,
            // The program dropped it.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                self.remove(&mut stripe, page, true);
                return Left::Yes;
            }
            Err(_) => {
                add(&self.counters.kept);
                return Left::No;
            }
        }
        listed.state = State::Leaving;
        listed.is_wanted = false;
        drop(stripe);
        let stored = self.store(page, aside, tools);
        self.left(page, aside, stored, tools)
    }

    fn aside_page(&self, tools: &mut Tools) -> u64 {
        if tools.next == ASIDE_PAGES {
            ignore(self.aside.empty(tools.aside, ASIDE_PAGES * PAGE_BYTES));
            tools.next = 0;
        }
        tools.aside + address(tools.next as u64)
    }

    /// Stores what was moved aside.
    fn store(&self, page: u64, aside: u64, tools: &mut Tools) -> Result<(), Error> {
        let range = self
            .ranges
            .get(page)
            .ok_or(Error::NotAllocated(address(page) as usize))?;
        let len = range.len_on(page)?;
        self.fetch_aside(aside, len, tools)?;
        range.write(page, &tools.bytes.0[..len])
    }

    fn fetch_aside(&self, aside: u64, len: usize, tools: &mut Tools) -> Result<(), Error> {
        let read = self.aside.read(aside, &mut tools.bytes.0[..len]);
        tools.filled = tools.filled.max(len);
        read.map_err(|error| Error::System {
            what: "to read what was set aside",
            error,
        })
    }

    /// Ends the leaving of a page: it is gone, or back.
    fn left(&self, page: u64, aside: u64, stored: Result<(), Error>, tools: &mut Tools) -> Left {
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe.pages.get_mut(&page) else {
            return Left::Yes;
        };
        let is_wanted = listed.is_wanted;
        let outcome = match stored {
            // Freed meanwhile, by a program that still used it.
            Err(Error::NotAllocated(_) | Error::Objects(varve_far_objects::Error::NotAllocated(_))) => {
                self.remove(&mut stripe, page, true);
                Left::Yes
            }
            Ok(()) => {
                self.remove(&mut stripe, page, true);
                add(&self.counters.stored);
                Left::Yes
            }
            Err(error) => {
                let is_back = self.faults.move_page(aside, address(page)).is_ok()
                    || (self.fetch_aside(aside, PAGE_BYTES, tools).is_ok()
                        && self.faults.copy(address(page), &tools.bytes, false).is_ok());
                listed.state = State::Dirty;
                if !is_back {
                    // Only where the program took the addresses away.
                    self.remove(&mut stripe, page, true);
                }
                add(&self.counters.kept);
                Left::Failed(error)
            }
        };
        if is_wanted {
            self.wake(page);
        }
        outcome
    }

    /// Lets a page out, for one that comes. Waits where none can leave.
    ///
    /// # Errors
    /// After a time, why none can.
    pub(super) fn make_room(&self, since: &mut Option<Instant>, tools: &mut Tools) -> Result<(), Error> {
        tools.turn.give();
        let since = *since.get_or_insert_with(Instant::now);
        let mut failed = None;
        let (pages, units) = {
            let buffer = self.buffer.lock();
            (buffer.pages(), buffer.units())
        };
        for _ in 0..pages {
            match self.leave(tools) {
                Left::Yes => return Ok(()),
                Left::No => {}
                Left::Failed(error) => failed = Some(error),
                Left::Nothing => break,
            }
            if since.elapsed() > PATIENCE || self.is_ending.load(Ordering::Relaxed) {
                break;
            }
        }
        if since.elapsed() > PATIENCE || self.is_ending.load(Ordering::Relaxed) {
            return Err(failed.unwrap_or(Error::PageBuffer {
                limit_bytes: (units * PAGE_BYTES) as u64,
            }));
        }
        std::thread::sleep(SHORTLY);
        Ok(())
    }

    /// Lets all pages out.
    ///
    /// # Errors
    /// Why one cannot; pages that are pinned stay.
    pub(crate) fn flush(&self, tools: &mut Tools) -> Result<(), Error> {
        let mut idle = 0;
        while idle <= self.stats().pages {
            match self.leave(tools) {
                Left::Yes => idle = 0,
                Left::No => idle += 1,
                Left::Failed(error) => return Err(error),
                Left::Nothing => break,
            }
        }
        Ok(())
    }
}
