//! One program of the run: its address space, what is known of its pages, and its agent.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use varve_far::aside::Ring;
use varve_far::table::{Entry, PageNo, Stored, Table};
use varve_far::{PAGE_BYTES, Page, Space, wire};

use super::agent::Agent;
use crate::sys::Faults;
use crate::types::Pid;

/// How long a range is left alone after its contents were given up (invariant 7 of ADR 36).
const QUARANTINE: Duration = Duration::from_secs(2);

/// The last page but one below the end of user addresses: nothing is registered there.
const NEVER_MAPPED: u64 = (1 << 47) - 0x2000;

/// The set-aside area of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub start: u64,
}

impl Area {
    /// Bytes for pages; the mailbox follows.
    pub const BYTES: u64 = wire::ASIDE_BYTES - wire::MAILBOX_BYTES;
    /// Slots.
    pub const SLOTS: u64 = Self::BYTES / PAGE_BYTES as u64;

    pub(super) fn mailbox(self) -> u64 {
        self.start + Self::BYTES
    }

    pub(super) fn end(self) -> u64 {
        self.start + wire::ASIDE_BYTES
    }

    pub(super) fn contains(self, address: u64) -> bool {
        (self.start..self.end()).contains(&address)
    }
}

/// The state of the pages of a program.
#[derive(Debug)]
pub(super) struct Pages {
    pub table: Table,
    pub ring: Ring,
    /// Pages that are being read without the lock, for threads that wait.
    pub reading: HashSet<PageNo>,
    /// Ranges whose contents were given up, in pages, and until when they are left alone.
    quarantine: Vec<(PageNo, PageNo, Instant)>,
}

impl Pages {
    pub(super) fn new() -> Self {
        Self {
            table: Table::default(),
            ring: Ring::new(Area::SLOTS),
            reading: HashSet::new(),
            quarantine: Vec::new(),
        }
    }

    /// The state of the pages of a child, forked now: its set-aside area holds what this one's does. Each
    /// object has one user more.
    pub(super) fn fork(&self, space: &Space) -> Self {
        self.table.each(|_, entry| {
            if let Some(stored) = entry.stored() {
                space.retain(stored.place);
            }
        });
        for stored in self.ring.filled().filter_map(|slot| slot.kept) {
            space.retain(stored.place);
        }
        Self {
            table: self.table.clone(),
            ring: self.ring.clone(),
            reading: HashSet::new(),
            quarantine: self.quarantine.clone(),
        }
    }

    /// Starts with an empty set-aside area. False if a page is still there.
    pub(super) fn empty_ring(&mut self) -> bool {
        let is_empty = self.ring.filled().next().is_none();
        if is_empty {
            self.ring = Ring::new(Area::SLOTS);
        }
        is_empty
    }

    /// Whether a page is left alone for now.
    pub(super) fn is_quarantined(&mut self, page: PageNo) -> bool {
        if self.quarantine.is_empty() {
            return false;
        }
        let now = Instant::now();
        self.quarantine.retain(|(_, _, until)| *until > now);
        self.quarantine
            .iter()
            .any(|(first, end, _)| (*first..*end).contains(&page))
    }

    /// Forgets a range. `is_pending`: the kernel drops its pages only later.
    pub(super) fn forget(&mut self, start: u64, end: u64, is_pending: bool, space: &Space) {
        let (first, last) = (PageNo::of(start), PageNo::of(end));
        for (_, entry) in self.table.take_range(first, last) {
            self.give_up(entry, space);
        }
        if is_pending {
            self.quarantine.push((first, last, Instant::now() + QUARANTINE));
        }
    }

    /// Follows a move of a mapping.
    pub(super) fn follow(&mut self, from: u64, to: u64, len: u64, space: &Space) {
        let (from, to, count) = (PageNo::of(from), PageNo::of(to), len / PAGE_BYTES as u64);
        for (_, entry) in self.table.move_range(from, to, count) {
            self.give_up(entry, space);
        }
        for page in (to.0..to.0 + count).map(PageNo) {
            if let Entry::Aside(slot) = self.table.get(page) {
                self.ring.rename(slot, page);
            }
        }
    }

    /// Ends the use of what an entry named.
    fn give_up(&mut self, entry: Entry, space: &Space) {
        let kept = match entry {
            Entry::Aside(slot) => self.ring.take(slot).and_then(|slot| slot.kept),
            other => other.stored(),
        };
        release(space, kept);
    }

    /// Gives up objects that are kept for pages in memory, of at most `chunks` chunks.
    pub(super) fn release_kept(&mut self, chunks: usize, space: &Space) {
        for stored in self.table.take_kept(chunks) {
            space.release(stored.place);
        }
    }

    /// Sets an entry whose old one names nothing that must be given up.
    pub(super) fn set(&mut self, page: PageNo, entry: Entry) {
        let _ = self.table.set(page, entry);
    }
}

/// Ends one use of an object.
pub(super) fn release(space: &Space, stored: Option<Stored>) {
    if let Some(stored) = stored {
        space.release(stored.place);
    }
}

/// One address space.
pub(super) struct Program {
    pub faults: Faults,
    pub area: Area,
    /// 0 while unknown: a child that did not join.
    pid: AtomicU64,
    agent: Mutex<Option<Agent>>,
    pages: Mutex<Pages>,
    is_gone: AtomicBool,
    /// The number in the mailbox of a child that has not joined; 0: it cannot join.
    number: AtomicU64,
    /// Bytes of private memory, at the last look.
    resident: AtomicU64,
    /// Pages that are to leave, for the evicting thread.
    want: Mutex<u64>,
    wanted: Condvar,
}

impl Program {
    pub(super) fn new(faults: Faults, area: Area, pages: Pages) -> Self {
        Self {
            faults,
            area,
            pid: AtomicU64::new(0),
            agent: Mutex::new(None),
            pages: Mutex::new(pages),
            is_gone: AtomicBool::new(false),
            number: AtomicU64::new(0),
            resident: AtomicU64::new(0),
            want: Mutex::new(0),
            wanted: Condvar::new(),
        }
    }

    /// Its pid, once it joined.
    pub(super) fn pid(&self) -> Option<Pid> {
        let pid = self.pid.load(Ordering::Acquire);
        (pid != 0).then_some(Pid(pid as i32))
    }

    /// Gives it its agent: from now on pages can leave.
    pub(super) fn join(&self, pid: Pid, agent: Agent) {
        *self.agent.lock() = Some(agent);
        self.set_pid(pid);
    }

    /// Says which process it is: its set-aside area can be read.
    pub(super) fn set_pid(&self, pid: Pid) {
        self.pid.store(pid.0 as u64, Ordering::Release);
    }

    /// Looks at how much private memory it has in memory, and keeps that.
    pub(super) fn look(&self) -> u64 {
        let Some(pid) = self.pid() else { return 0 };
        let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        let mut fields = text.split_ascii_whitespace().skip(1);
        let mut next = || {
            fields
                .next()
                .and_then(|field| field.parse::<u64>().ok())
                .unwrap_or(0)
        };
        let (resident, shared) = (next(), next());
        let bytes = resident.saturating_sub(shared) * PAGE_BYTES as u64;
        self.resident.store(bytes, Ordering::Relaxed);
        bytes
    }

    /// Bytes of private memory at the last look.
    pub(super) fn resident(&self) -> u64 {
        self.resident.load(Ordering::Relaxed)
    }

    /// The number by which a forked child is found; 0 when it cannot be.
    pub(super) fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    pub(super) fn set_number(&self, number: u64) {
        self.number.store(number, Ordering::Release);
    }

    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock()
    }

    /// Returns the state of its pages, unless another thread keeps it for long.
    pub(super) fn try_pages(&self) -> Option<MutexGuard<'_, Pages>> {
        self.pages.try_lock_for(Duration::from_millis(5))
    }

    /// The agent, for one command.
    pub(super) fn agent(&self) -> MutexGuard<'_, Option<Agent>> {
        self.agent.lock()
    }

    /// Whether the address space has ended. Asks the kernel for something that it cannot do, and looks at the
    /// reason.
    pub(super) fn has_ended(&self) -> bool {
        let answer = self.faults.zero(NEVER_MAPPED);
        self.is_gone() || answer.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Notes that the address space has ended.
    pub(super) fn end(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.wanted.notify_all();
    }

    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Says how many pages are to leave, in place of what was said before.
    pub(super) fn want(&self, pages: u64) {
        *self.want.lock() = pages;
        if pages > 0 {
            self.wanted.notify_all();
        }
    }

    /// Takes at most `most` of the pages that are to leave; waits half a second for any. 0 when there are
    /// none.
    pub(super) fn take_wanted(&self, most: u64) -> u64 {
        let mut want = self.want.lock();
        if *want == 0 && !self.is_gone() {
            self.wanted.wait_for(&mut want, Duration::from_millis(500));
        }
        let taken = most.min(*want);
        *want -= taken;
        taken
    }

    /// Reads slots of the set-aside area: number of the first one and how many, for each run.
    pub(super) fn read_slots(&self, runs: &[(u64, usize)], pages: &mut [Page]) -> io::Result<()> {
        let Some(pid) = self.pid() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let ranges: Vec<(u64, usize)> = runs
            .iter()
            .map(|(slot, count)| (self.slot_address(*slot), *count))
            .collect();
        crate::sys::read_memory(pid, &ranges, pages)
    }

    /// Where a slot lies in the program.
    pub(super) fn slot_address(&self, slot: u64) -> u64 {
        self.area.start + slot % Area::SLOTS * PAGE_BYTES as u64
    }
}
