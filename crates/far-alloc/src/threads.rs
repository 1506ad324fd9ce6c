//! The threads that serve faults, and the one that makes room.
//!
//! A thread that serves faults touches no far memory, or it would wait for itself: it works with copies, and
//! with pages that were moved aside.

use crate::error::Error;
use crate::pages::{Left, Pages, Tools};
use crate::sys::{self, Region};
use crate::turn::{Holder, Turn};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the thread that makes room rests after its device failed.
const REST: Duration = Duration::from_millis(50);
/// Objects in a row that cannot be stored, until it rests.
const FAILURES: usize = 4;

/// The threads of a heap.
#[derive(Debug)]
pub(crate) struct Threads {
    handlers: Vec<JoinHandle<()>>,
    evictor: Option<JoinHandle<()>>,
    /// A page for each handler, whose fault ends it.
    ends: Region,
}

impl Threads {
    /// Starts them; `handlers` serve faults. Tools from the first on are theirs.
    pub(crate) fn start(pages: &Arc<Pages>, handlers: usize) -> Result<Self, Error> {
        let system = |what| move |error| Error::System { what, error };
        let ends = Region::new(handlers * sys::PAGE_BYTES).map_err(system("addresses"))?;
        pages
            .faults
            .register(ends.start(), ends.len_bytes(), false)
            .map_err(system("to register addresses"))?;
        let mut all = Self {
            handlers: Vec::new(),
            evictor: None,
            ends,
        };
        let turn = Turn::default();
        for number in 0..handlers {
            let of_thread = Arc::clone(pages);
            let mut tools = pages.tools(number);
            tools.turn = Holder::new(&turn);
            let range = all.ends.start()..all.ends.start() + all.ends.len_bytes();
            let started = sys::spawn("far-faults", move || serve(&of_thread, tools, &range));
            match started {
                Ok(thread) => all.handlers.push(thread),
                Err(error) => {
                    all.stop(pages);
                    return Err(system("a thread")(error));
                }
            }
        }
        let (of_thread, tools) = (Arc::clone(pages), pages.tools(handlers));
        match sys::spawn("far-pages", move || make_room(&of_thread, tools)) {
            Ok(thread) => all.evictor = Some(thread),
            Err(error) => {
                all.stop(pages);
                return Err(system("a thread")(error));
            }
        }
        Ok(all)
    }

    /// Ends them. Who touches what is not in memory meanwhile gets SIGBUS.
    pub(crate) fn stop(&mut self, pages: &Pages) {
        pages.is_ending.store(true, Ordering::Release);
        pages.ask();
        if let Some(thread) = self.evictor.take() {
            // A panic of it was printed; there is nobody to tell.
            let _ = thread.join();
        }
        for number in 0..self.handlers.len() {
            self.ends
                .touch(self.ends.start() + (number * sys::PAGE_BYTES) as u64);
        }
        for thread in self.handlers.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(pages: &Pages, mut tools: Tools, ends: &std::ops::Range<u64>) {
    loop {
        tools.turn.take();
        match pages.faults.wait() {
            Ok(Some(fault)) if ends.contains(&fault.address) => {
                tools.turn.give();
                // Fails only where it is there already.
                let _ = pages.faults.zero(fault.address);
                return;
            }
            Ok(Some(fault)) => pages.serve(fault, &mut tools),
            Ok(None) => {}
            // EINTR, or something that passes: faults wait for us.
            Err(_) => std::thread::yield_now(),
        }
    }
}

fn make_room(pages: &Pages, mut tools: Tools) {
    let is_ending = || pages.is_ending.load(Ordering::Acquire);
    while !is_ending() {
        pages.wait_until_asked();
        pages.forgive();
        let (mut idle, mut failures) = (0, 0);
        while pages.needs_room() && !is_ending() {
            match pages.leave(&mut tools) {
                Left::Yes => (idle, failures) = (0, 0),
                Left::No => idle += 1,
                Left::Failed(_) => failures += 1,
                Left::Nothing => break,
            }
            if failures == FAILURES || idle > pages.stats().pages {
                std::thread::sleep(REST);
                break;
            }
        }
    }
}
