//! Reads of slow slabs for several faults at a time, of one program too.
//!
//! The thread of a program's faults hands such a read over and goes on. The bytes are read without the lock of
//! the program and installed under it, if the entry still names that place (invariant 5 of ADR 36).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use varve_far::Page;
use varve_far::table::{Entry, PageNo, Stored};

use super::counters::FaultKind;
use super::faults::{self, Outcome};
use super::pager::{Pager, thread};
use super::program::{Pages, Program, release};

/// How long a page waits that cannot be installed while an event is not read.
const RETRY: Duration = Duration::from_micros(50);

/// A page that a thread waits for.
struct Job {
    program: Arc<Program>,
    page: PageNo,
    stored: Stored,
    since: Instant,
}

/// The threads that read, and what they are to read.
#[derive(Default)]
pub(super) struct Readers {
    jobs: Mutex<VecDeque<Job>>,
    wake: Condvar,
    /// Jobs that are not done, and the most that there were.
    under_way: AtomicU64,
    most: AtomicU64,
}

impl Readers {
    /// Starts the threads.
    pub(super) fn start(pager: &Arc<Pager>) -> io::Result<()> {
        for _ in 0..pager.config.readers {
            let (readers, pager) = (pager.readers.clone(), Arc::downgrade(pager));
            thread("far reads", move || readers.work(&pager))?;
        }
        Ok(())
    }

    /// The most reads that were under way at once.
    pub(super) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Takes over a fault, if its page lies in a slab that is slow. A page that is being read already needs
    /// no second read: all threads that wait for it go on together.
    pub(super) fn take_over(
        &self,
        pager: &Pager,
        program: &Arc<Program>,
        pages: &mut Pages,
        page: PageNo,
        since: Instant,
    ) -> bool {
        let Entry::Far(stored) = pages.table.get(page) else {
            return false;
        };
        if pages.reading.contains(&page) {
            return true;
        }
        let least = Duration::from_micros(pager.config.read_apart_us);
        if pager
            .space
            .read_time(stored.place)
            .is_none_or(|time| time < least)
        {
            return false;
        }
        pages.reading.insert(page);
        pager.space.retain(stored.place);
        pager.stall.begin(since, 1);
        let under_way = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(under_way, Ordering::Relaxed);
        self.jobs.lock().push_back(Job {
            program: program.clone(),
            page,
            stored,
            since,
        });
        self.wake.notify_one();
        true
    }

    fn work(&self, pager: &Weak<Pager>) {
        loop {
            let job = {
                let mut jobs = self.jobs.lock();
                if jobs.is_empty() {
                    self.wake.wait_for(&mut jobs, Duration::from_millis(500));
                }
                jobs.pop_front()
            };
            let Some(pager) = pager.upgrade().filter(|pager| !pager.has_ended()) else {
                return;
            };
            if let Some(job) = job {
                bring(&pager, &job);
                self.under_way.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

/// Reads a page and installs it.
fn bring(pager: &Pager, job: &Job) {
    let program = &job.program;
    let mut bytes = Page::default();
    let (tier, mut error) = match pager.space.load(&job.stored, &mut bytes) {
        Ok(tier) => (Some(tier), None),
        Err(error) => (None, Some(error)),
    };
    loop {
        let mut pages = program.pages();
        let is_there_still = pages.table.get(job.page) == Entry::Far(job.stored);
        let loaded = if is_there_still {
            tier.map(Ok).or_else(|| error.take().map(Err))
        } else {
            None
        };
        let outcome = match loaded {
            Some(loaded) => {
                faults::install(pager, program, &mut pages, (job.page, job.stored), &bytes, loaded)
            }
            // It came back, was dropped or moved: the thread waits for what is there now.
            None => faults::resolve(pager, program, &mut pages, job.page),
        };
        match outcome {
            Outcome::Later if !program.is_gone() => {
                drop(pages);
                std::thread::sleep(RETRY);
                continue;
            }
            Outcome::Later | Outcome::Gone => {}
            Outcome::Served(kind) => {
                pages.table.note_fault(job.page, kind != FaultKind::Zero);
                pager.counters.fault(kind, job.since.elapsed());
            }
        }
        pages.reading.remove(&job.page);
        break;
    }
    pager.stall.end(1);
    release(&pager.space, Some(job.stored));
}
