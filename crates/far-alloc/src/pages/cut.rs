//! Cuts: all pages as they are at one moment, for a checkpoint, while the threads that write to them go on.
//!
//! At the cut all stripes are locked, so that no fault is served and no page becomes writable. Then all pages
//! are write-protected. A write that ends before the last page is protected went to a page that was not yet,
//! and is in what is saved; one that comes later waits until the cut is over, and is not. So what is saved is
//! memory as it is at the end of the cut, whatever order the pages were protected in.
//!
//! A page that is newer than its object then is *pending*: it is stored as its object was before the cut,
//! before anything else happens to it: a write, another version of its stored object, its end. Clean pages
//! are not: their object has their bytes.

use super::{Page, Pages, SHORTLY, State, Tools, add, address, ignore};
use crate::error::Error;
use crate::sys::PAGE_BYTES;
use std::ops::Range as Span;
use std::sync::atomic::Ordering;

/// What came of saving a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saved {
    /// The checkpoint has it, or fails.
    Done,
    /// No checkpoint needs it, or it is not there.
    NotNeeded,
    /// Another thread is at it.
    Busy,
    /// The kernel uses it: a device writes to it.
    InUse,
}

/// Freed, by a program that still used it.
pub(super) fn is_gone(error: &Error) -> bool {
    matches!(
        error,
        Error::NotAllocated(_) | Error::Objects(varve_far_objects::Error::NotAllocated(_))
    )
}

impl Pages {
    /// Makes a cut through all pages. `cut` makes the one through the store, and gives the epoch that begins.
    /// Nobody else may change which pages have objects.
    ///
    /// # Errors
    /// The kernel's: no cut was made.
    pub(crate) fn cut(&self, cut: &mut dyn FnMut() -> u32) -> Result<(), Error> {
        let mut stripes: Vec<_> = self.stripes.iter().map(|stripe| stripe.lock()).collect();
        self.faults
            .protect(self.memory.start(), self.memory.len_bytes())
            .map_err(|error| Error::System {
                what: "to write-protect pages",
                error,
            })?;
        let epoch = cut();
        let mut all = Vec::new();
        for stripe in &mut stripes {
            for (page, listed) in &mut stripe.pages {
                listed.is_pending = matches!(listed.state, State::Dirty | State::Leaving | State::Saving);
                if listed.is_pending {
                    all.push(*page);
                }
            }
        }
        all.sort_unstable();
        let pending = all.len();
        *self.cut_error.lock() = None;
        *self.cut_pages.lock() = all;
        self.pending.store(pending, Ordering::Release);
        // Last: who sees the epoch without a stripe locked sees what is pending in it, too (`save_batch`).
        self.epoch.store(epoch, Ordering::Release);
        Ok(())
    }

    /// The epoch that a page's bytes are of. With its stripe locked.
    pub(super) fn epoch_of(&self, listed: &Page) -> u32 {
        self.epoch
            .load(Ordering::Relaxed)
            .saturating_sub(u32::from(listed.is_pending))
    }

    /// Notes that the checkpoint has a page, or never will.
    pub(super) fn is_saved(&self, listed: &mut Page) {
        if std::mem::take(&mut listed.is_pending) {
            self.pending.fetch_sub(1, Ordering::Release);
        }
    }

    /// The checkpoint fails.
    pub(super) fn fail_cut(&self, error: Error) {
        self.cut_error.lock().get_or_insert(error);
    }

    /// Saves a page, if the running checkpoint needs it. It stays, and can be written then if `is_write`.
    pub(crate) fn save(&self, page: u64, is_write: bool, tools: &mut Tools) -> Saved {
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe.pages.get_mut(&page).filter(|listed| listed.is_pending) else {
            return Saved::NotNeeded;
        };
        if listed.state != State::Dirty {
            listed.is_wanted |= is_write;
            return Saved::Busy;
        }
        let epoch = self.epoch_of(listed);
        let cut = self.epoch.load(Ordering::Relaxed);
        let aside = match self.set_aside(page, tools) {
            Ok(aside) => aside,
            Err(libc::ENOENT) => {
                // The program dropped it.
                self.remove(&mut stripe, page, true);
                return Saved::NotNeeded;
            }
            Err(_) => {
                listed.is_wanted |= is_write;
                return Saved::InUse;
            }
        };
        listed.state = State::Leaving;
        listed.is_wanted = false;
        drop(stripe);
        let stored = self.store(page, aside, epoch, tools);
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe.pages.get_mut(&page) else {
            return Saved::Done;
        };
        let is_stored = stored.is_ok();
        if !is_stored && self.epoch.load(Ordering::Relaxed) != cut {
            // Its checkpoint failed meanwhile, and the next one needs the page as it is.
            self.put_back_dirty(&mut stripe, page, aside, tools);
            return Saved::Busy;
        }
        self.is_saved(listed);
        match stored {
            Ok(()) => add(&self.counters.saved),
            Err(error) if is_gone(&error) => {
                self.remove(&mut stripe, page, true);
                self.wake(page);
                return Saved::Done;
            }
            Err(error) => self.fail_cut(error),
        }
        // Nobody else wrote to it, so its object has its bytes.
        let is_clean = is_stored && !is_write;
        match self.put_back(page, aside, is_clean, tools) {
            Some(is_protected) => {
                listed.state = if is_protected && is_stored {
                    State::Clean
                } else {
                    State::Dirty
                };
            }
            None => self.remove(&mut stripe, page, true),
        }
        self.wake(page);
        Saved::Done
    }

    /// Saves a page that the kernel uses, where it is. Not for a thread that serves faults: the program may
    /// drop the page meanwhile.
    fn save_in_place(&self, page: u64, tools: &mut Tools) {
        let epoch = {
            let mut stripe = self.stripe(page);
            let listed = stripe.pages.get_mut(&page);
            let Some(listed) = listed.filter(|listed| listed.is_pending && listed.state == State::Dirty)
            else {
                return;
            };
            listed.state = State::Saving;
            self.epoch_of(listed)
        };
        let mut stored = self
            .memory
            .read(address(page), &mut tools.bytes.0)
            .map_err(|error| Error::System {
                what: "to read a page",
                error,
            });
        tools.filled = PAGE_BYTES;
        let is_there = || {
            let stripe = self.stripe(page);
            stripe
                .pages
                .get(&page)
                .is_some_and(|listed| listed.state == State::Saving)
        };
        if is_there() {
            stored = stored.and_then(|()| match self.ranges.get(page) {
                Some(range) => range.write_of(page, &tools.bytes.0, epoch),
                None => Ok(()),
            });
        }
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe
            .pages
            .get_mut(&page)
            .filter(|listed| listed.state == State::Saving)
        else {
            return;
        };
        // What the device wrote meanwhile is in no checkpoint yet.
        listed.state = State::Dirty;
        self.is_saved(listed);
        match stored {
            Ok(()) => {
                add(&self.counters.saved);
                add(&self.counters.saved_in_place);
            }
            Err(error) => self.fail_cut(error),
        }
        if std::mem::take(&mut listed.is_wanted) {
            ignore(self.faults.unprotect(address(page)));
        }
    }

    /// Saves the pages of a span that the running checkpoint needs, before their objects change in another
    /// way. Not for a thread that serves faults.
    pub(crate) fn save_span(&self, span: Span<u64>, tools: &mut Tools) {
        if self.pending.load(Ordering::Acquire) == 0 {
            return;
        }
        let pages: Vec<u64> = {
            let all = self.cut_pages.lock();
            let at = |page| all.partition_point(|other| *other < page);
            all[at(span.start)..at(span.end)].to_vec()
        };
        for page in pages {
            loop {
                match self.save(page, false, tools) {
                    Saved::Done | Saved::NotNeeded => break,
                    Saved::Busy => std::thread::sleep(SHORTLY),
                    Saved::InUse => self.save_in_place(page, tools),
                }
            }
        }
    }

    /// Saves all pages that the running checkpoint needs.
    ///
    /// # Errors
    /// What keeps one from being stored.
    pub(crate) fn save_all(&self, tools: &mut Tools) -> Result<(), Error> {
        let pages = self.cut_pages.lock().clone();
        for page in pages {
            self.save_span(page..page + 1, tools);
            if let Some(error) = self.cut_error.lock().take() {
                return Err(error);
            }
        }
        // Those that others were at.
        self.cut_error.lock().take().map_or(Ok(()), Err)
    }

    /// Saves the pages that share their stored object with one that leaves. False where one cannot be now.
    ///
    /// Where this is true, and the epoch under the stripe of the page is still the one that the caller read
    /// before, with Acquire, none of the others is pending, so that no bytes of theirs are stored as of
    /// before the cut into an object that has later ones of this page:
    ///
    /// - Pages become pending in a cut alone, which changes the epoch with all stripes locked. So none became
    ///   pending between that cut, which is the one whose epoch was read, and the caller's second look.
    /// - That cut stored `pending` before the epoch, with Release. So what is read here is the number of that
    ///   cut, or a later one, and 0 only after each of its pages was saved: the number is counted down when
    ///   the bytes are stored, or never will be.
    /// - Where it is not 0, each of the others is looked at under its own stripe, and saved.
    pub(super) fn save_batch(&self, page: u64, tools: &mut Tools) -> bool {
        if self.pending.load(Ordering::Acquire) == 0 {
            return true;
        }
        let Some(range) = self.ranges.get(page) else {
            return true;
        };
        let mut others = range.batches_of(page..page + 1).filter(|other| *other != page);
        others.all(|other| matches!(self.save(other, false, tools), Saved::Done | Saved::NotNeeded))
    }

    /// Ends what the last cut began: nothing is pending any more.
    pub(crate) fn end_cut(&self) {
        let pages = std::mem::take(&mut *self.cut_pages.lock());
        for page in pages {
            let mut stripe = self.stripe(page);
            let Some(listed) = stripe.pages.get_mut(&page).filter(|listed| listed.is_pending) else {
                continue;
            };
            self.is_saved(listed);
            if listed.state == State::Dirty && std::mem::take(&mut listed.is_wanted) {
                ignore(self.faults.unprotect(address(page)));
            }
        }
    }
}

/// What tests see of a cut.
#[cfg(test)]
impl Pages {
    /// Holds cuts up, after the store's and before they are seen.
    pub(crate) fn hold_cut(&self) -> impl Drop + '_ {
        self.cut_pages.lock()
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Acquire)
    }
}
