//! A handler of faults that does nothing, to compare with.

use crate::error::Error;
use crate::sys::{self, PAGE_BYTES, Region, Uffd};
use std::sync::Arc;
use std::thread::JoinHandle;
use varve_far::Page;

/// Memory whose pages a thread of this process fills with zeros when they are touched, and that does no more.
#[derive(Debug)]
pub struct BareFaults {
    uffd: Arc<Uffd>,
    memory: Region,
    thread: Option<JoinHandle<()>>,
}

impl BareFaults {
    /// So many pages.
    ///
    /// # Errors
    /// `Userfault`, `System`.
    pub fn new(pages: usize) -> Result<Self, Error> {
        let system = |what| move |error| Error::System { what, error };
        let kernel = |what| move |error| Error::Userfault { what, error };
        let uffd = Arc::new(Uffd::for_faults().map_err(kernel("a userfaultfd"))?);
        let memory = Region::new((pages + 1) * PAGE_BYTES).map_err(system("addresses"))?;
        uffd.register(memory.start(), memory.len_bytes(), true)
            .map_err(kernel("to register addresses"))?;
        let (of_thread, end) = (Arc::clone(&uffd), memory.start() + (pages * PAGE_BYTES) as u64);
        let thread = sys::spawn("bare-faults", move || {
            let zeros = Page::default();
            while let Ok(fault) = of_thread.wait() {
                let Some(fault) = fault else { continue };
                let put = of_thread.copy(fault.address, &zeros, false);
                if fault.address == end || put.is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            uffd,
            memory,
            thread: Some(thread.map_err(system("a thread"))?),
        })
    }

    /// Address of the first page.
    #[must_use]
    pub fn address(&self) -> usize {
        self.memory.start() as usize
    }

    /// Takes all pages out of memory.
    ///
    /// # Errors
    /// The kernel's.
    pub fn empty(&self) -> Result<(), Error> {
        let len = self.memory.len_bytes() as usize - PAGE_BYTES;
        self.memory
            .empty(self.memory.start(), len)
            .map_err(|error| Error::System {
                what: "to empty memory",
                error,
            })
    }
}

impl Drop for BareFaults {
    fn drop(&mut self) {
        self.memory
            .touch(self.memory.start() + self.memory.len_bytes() - PAGE_BYTES as u64);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        debug_assert_eq!(Arc::strong_count(&self.uffd), 1);
    }
}
