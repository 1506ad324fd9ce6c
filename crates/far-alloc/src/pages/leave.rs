//! How pages leave: the clean are dropped, the dirty moved aside and stored.

use super::cut::is_gone;
use super::{ASIDE_PAGES, PATIENCE, Pages, SHORTLY, State, Stripe, Tools, add, address, ignore};
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
        let epoch = self.epoch.load(Ordering::Acquire);
        if !self.save_batch(page, tools) {
            return Left::No;
        }
        let mut stripe = self.stripe(page);
        if self.epoch.load(Ordering::Relaxed) != epoch {
            // A cut was made meanwhile, that may need others of its batch.
            return Left::No;
        }
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
            State::Loading | State::Leaving | State::Saving | State::Poisoned(_) => return Left::No,
        }
        let epoch = self.epoch_of(listed);
        let aside = match self.set_aside(page, tools) {
            Ok(aside) => aside,
            // The program dropped it.
            Err(libc::ENOENT) => {
                self.remove(&mut stripe, page, true);
                return Left::Yes;
            }
            Err(_) => {
                add(&self.counters.kept);
                return Left::No;
            }
        };
        listed.state = State::Leaving;
        listed.is_wanted = false;
        drop(stripe);
        let stored = self.store(page, aside, epoch, tools);
        self.left(page, aside, stored, tools)
    }

    /// Moves a page aside. Gives where it is, or the kernel's errno: `ENOENT` where the program dropped it.
    pub(super) fn set_aside(&self, page: u64, tools: &mut Tools) -> Result<u64, i32> {
        let aside = self.aside_page(tools);
        self.moves
            .move_page(address(page), aside)
            .map_err(|error| error.raw_os_error().unwrap_or_default())?;
        tools.next += 1;
        Ok(aside)
    }

    /// Puts a page back that was moved aside, write-protected if `is_protected` and it can be; whether it is.
    /// `None` where it cannot be put back, because the program took the addresses away.
    pub(super) fn put_back(
        &self,
        page: u64,
        aside: u64,
        is_protected: bool,
        tools: &mut Tools,
    ) -> Option<bool> {
        let copy = |is_protected: bool, tools: &mut Tools| {
            self.fetch_aside(aside, PAGE_BYTES, tools).is_ok()
                && self
                    .faults
                    .copy(address(page), &tools.bytes, is_protected)
                    .is_ok()
        };
        if is_protected && copy(true, tools) {
            return Some(true);
        }
        let is_back = self.faults.move_page(aside, address(page)).is_ok() || copy(false, tools);
        is_back.then_some(false)
    }

    /// Puts a page back whose bytes are not stored. What a checkpoint needs must not be written before it is
    /// saved.
    pub(super) fn put_back_dirty(&self, stripe: &mut Stripe, page: u64, aside: u64, tools: &mut Tools) {
        let Some(listed) = stripe.pages.get_mut(&page) else {
            return;
        };
        listed.state = State::Dirty;
        let is_pending = listed.is_pending;
        match self.put_back(page, aside, is_pending, tools) {
            Some(is_protected) if is_protected || !is_pending => {}
            Some(_) => {
                self.is_saved(listed);
                self.fail_cut(error_of_protection());
            }
            // Only where the program took the addresses away.
            None => self.remove(stripe, page, true),
        }
    }

    fn aside_page(&self, tools: &mut Tools) -> u64 {
        if tools.next == ASIDE_PAGES {
            ignore(self.aside.empty(tools.aside, ASIDE_PAGES * PAGE_BYTES));
            tools.next = 0;
        }
        tools.aside + address(tools.next as u64)
    }

    /// Stores what was moved aside, of an epoch.
    pub(super) fn store(&self, page: u64, aside: u64, epoch: u32, tools: &mut Tools) -> Result<(), Error> {
        let range = self
            .ranges
            .get(page)
            .ok_or(Error::NotAllocated(address(page) as usize))?;
        let len = range.len_on(page)?;
        self.fetch_aside(aside, len, tools)?;
        range.write_of(page, &tools.bytes.0[..len], epoch)
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
            Err(error) if is_gone(&error) => {
                self.remove(&mut stripe, page, true);
                Left::Yes
            }
            Ok(()) => {
                self.remove(&mut stripe, page, true);
                add(&self.counters.stored);
                Left::Yes
            }
            Err(error) => {
                self.put_back_dirty(&mut stripe, page, aside, tools);
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

fn error_of_protection() -> Error {
    Error::System {
        what: "to put a page back write-protected",
        error: std::io::ErrorKind::OutOfMemory.into(),
    }
}

/// The two halves of leaving, for tests of what happens in between.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
impl Pages {
    pub(crate) fn begin_to_leave(&self, page: u64, tools: &mut Tools) -> u64 {
        let mut stripe = self.stripe(page);
        let aside = self.set_aside(page, tools).unwrap();
        stripe.pages.get_mut(&page).unwrap().state = State::Leaving;
        aside
    }

    pub(crate) fn end_to_leave(&self, page: u64, aside: u64, epoch: u32, tools: &mut Tools) {
        let stored = self.store(page, aside, epoch, tools);
        assert!(matches!(self.left(page, aside, stored, tools), Left::Yes));
    }
}
