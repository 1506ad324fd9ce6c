//! Pages that are kept in memory, and pages that nobody needs any more.

use super::{Listed, Page, Pages, SHORTLY, State, Tools, address, chunk};
use crate::error::Error;
use crate::sys::{CHUNK_PAGES, PAGE_BYTES};

impl Pages {
    /// Brings a page and keeps it in memory.
    ///
    /// # Errors
    /// `NotAllocated`, `PageBuffer`; what keeps it from being read.
    pub(crate) fn pin(&self, page: u64, tools: &mut Tools) -> Result<(), Error> {
        let mut since = None;
        loop {
            let mut stripe = self.stripe(page);
            match stripe.pages.get_mut(&page) {
                Some(listed) if matches!(listed.state, State::Clean | State::Dirty) => {
                    return self.pin_listed(listed);
                }
                Some(listed) if matches!(listed.state, State::Poisoned(_)) => {
                    self.remove(&mut stripe, page, false);
                }
                Some(_) => {
                    drop(stripe);
                    std::thread::sleep(SHORTLY);
                }
                None => match self.list(&mut stripe, page, false) {
                    Listed::Yes => {
                        drop(stripe);
                        self.load(page, tools)?;
                    }
                    Listed::NoObject => return Err(Error::NotAllocated(address(page) as usize)),
                    Listed::NoRoom => {
                        drop(stripe);
                        self.make_room(&mut since, tools)?;
                    }
                },
            }
        }
    }

    fn pin_listed(&self, listed: &mut Page) -> Result<(), Error> {
        let mut buffer = self.buffer.lock();
        let limit_bytes = (buffer.units() * PAGE_BYTES) as u64;
        let full = || Error::PageBuffer { limit_bytes };
        let pins = listed.pins.checked_add(1).ok_or_else(full)?;
        if listed.pins == 0 && !buffer.pin() {
            return Err(full());
        }
        listed.pins = pins;
        Ok(())
    }

    /// Ends a pin. False if the page has none.
    pub(crate) fn unpin(&self, page: u64) -> bool {
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe.pages.get_mut(&page).filter(|listed| listed.pins > 0) else {
            return false;
        };
        listed.pins -= 1;
        if listed.pins == 0 {
            self.buffer.lock().unpin();
        }
        true
    }

    /// Takes pages out of memory whose objects nobody needs any more.
    pub(crate) fn discard(&self, pages: std::ops::Range<u64>) {
        let mut page = pages.start;
        while page < pages.end {
            let mut stripe = self.stripe(page);
            if !stripe.chunks.contains_key(&chunk(page)) {
                page = (chunk(page) + 1) * CHUNK_PAGES;
                continue;
            }
            match stripe.pages.get(&page).map(|listed| listed.state) {
                Some(State::Loading | State::Leaving | State::Saving) => {
                    drop(stripe);
                    std::thread::sleep(SHORTLY);
                    continue;
                }
                Some(_) => self.remove(&mut stripe, page, false),
                None => {}
            }
            page += 1;
        }
    }
}
