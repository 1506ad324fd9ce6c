//! The pager of a run: its programs, the limit of local memory, and the clock of the slabs.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use varve_far::place::SLABS_MAX;
use varve_far::{Dram, FileSlabs, PAGE_BYTES, Page, Space, TierConfig};

use super::agent::Agent;
use super::config::{FarConfig, Local};
use super::counters::Counters;
use super::goal::{Goal, Stall};
use super::program::{Area, Pages, Program};
use super::readers::Readers;
use super::{check, drain, evict, faults};
use crate::heat::HeatMap;
use crate::sys::Faults;
use crate::types::Pid;

/// How often memory is compared with the limit.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long eviction rests after far space was full.
const REST: Duration = Duration::from_secs(1);

/// The pager.
pub struct Pager {
    pub(super) space: Space,
    pub(super) counters: Counters,
    pub(super) config: FarConfig,
    pub(super) goal: Goal,
    pub(super) stall: Stall,
    pub(super) readers: Arc<Readers>,
    programs: Mutex<Vec<Arc<Program>>>,
    numbers: AtomicU64,
    pub(super) joined: AtomicU64,
    full: Mutex<Option<Instant>>,
    is_over: AtomicBool,
    is_ended: AtomicBool,
    pub(super) heat: Mutex<Vec<HeatMap>>,
}

impl Pager {
    /// Opens and measures the tiers and starts to watch the limit. Gives also a sentence for each tier that
    /// is not used.
    ///
    /// # Errors
    /// When a directory cannot hold slabs, or no tier is left.
    pub fn start(config: &FarConfig, local: Local) -> io::Result<(Arc<Self>, Vec<String>)> {
        let mut joining = Vec::new();
        let compressed = config.compressed_slabs(local);
        if compressed > 0 {
            joining.push(TierConfig {
                // Bounded by `limit_compressed`, which follows the limit.
                backend: Box::new(Dram::new(SLABS_MAX)),
                is_compressed: true,
            });
        }
        for tier in &config.tier {
            let file = FileSlabs::open(&tier.dir, tier.limit_mib);
            let file = file.map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("no slabs in {}: {error}", tier.dir.display()),
                )
            })?;
            joining.push(TierConfig {
                backend: Box::new(file),
                is_compressed: false,
            });
        }
        let (space, refused) = Space::new(joining, config.t_s);
        if space.is_empty() {
            return Err(io::Error::other(
                "there is no place for far pages: compressed memory is switched off and no [[far.tier]] works",
            ));
        }
        space.limit_compressed(compressed);
        let pager = Arc::new(Self {
            space,
            counters: Counters::default(),
            config: config.clone(),
            goal: Goal::new(local),
            stall: Stall::new(),
            readers: Arc::default(),
            programs: Mutex::default(),
            numbers: AtomicU64::new(0),
            joined: AtomicU64::new(0),
            full: Mutex::default(),
            is_over: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            heat: Mutex::default(),
        });
        Readers::start(&pager)?;
        let watching = Arc::downgrade(&pager);
        thread("far limit", move || watch(&watching))?;
        let ticking = Arc::downgrade(&pager);
        thread("far tiers", move || tick(&ticking))?;
        Ok((pager, refused))
    }

    /// Takes in a program that was just started.
    pub(super) fn add_new(
        self: &Arc<Self>,
        faults: Faults,
        area: Area,
        pid: Pid,
        agent: Agent,
    ) -> io::Result<()> {
        // The same process, before it ran another program.
        for old in self.programs.lock().iter().filter(|old| old.pid() == Some(pid)) {
            old.end();
        }
        let program = Arc::new(Program::new(faults, area, Pages::new()));
        program.join(pid, agent);
        self.serve(&program)?;
        self.evict(&program)
    }

    /// Takes in a child that `parent` forked. It is served at once; an agent may come later.
    pub(super) fn add_child(self: &Arc<Self>, parent: &Program, faults: Faults, pages: Pages) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let program = Arc::new(Program::new(faults, parent.area, pages));
        let mut mailbox = Page::default();
        mailbox.0[..8].copy_from_slice(&number.to_ne_bytes());
        match program.faults.copy(parent.area.mailbox(), &mailbox) {
            Ok(()) => program.set_number(number),
            // The parent has not emptied its own: neither can be told from the other.
            Err(_) => parent.set_number(0),
        }
        if let Err(error) = self.serve(&program) {
            tracing::error!("cannot serve a forked child, which waits for ever at its far pages: {error}");
        }
    }

    /// Finds the child with a number, which joins now.
    pub(super) fn child(&self, number: u64) -> Option<Arc<Program>> {
        let programs = self.programs.lock();
        let found = programs
            .iter()
            .find(|program| number != 0 && program.number() == number && program.pid().is_none());
        found.cloned()
    }

    /// Starts the thread that serves the faults of a program.
    fn serve(self: &Arc<Self>, program: &Arc<Program>) -> io::Result<()> {
        self.programs.lock().push(program.clone());
        let (pager, served) = (self.clone(), program.clone());
        thread("far faults", move || faults::serve(&pager, &served))
    }

    /// Starts the thread that evicts from a program that joined.
    pub(super) fn evict(self: &Arc<Self>, program: &Arc<Program>) -> io::Result<()> {
        self.joined.fetch_add(1, Ordering::Relaxed);
        let (pager, evicted) = (self.clone(), program.clone());
        thread("far eviction", move || evict::run(&pager, &evicted))
    }

    /// Lets go of a program that has ended.
    pub(super) fn forget(&self, program: &Arc<Program>) {
        self.programs.lock().retain(|other| !Arc::ptr_eq(other, program));
    }

    /// Pages that are to wait in the set-aside area of a program.
    pub(super) fn aside_pages(&self, program: &Program) -> u64 {
        (program.resident() as f64 * self.config.aside_share) as u64 / PAGE_BYTES as u64
    }

    /// Notes that far space was full.
    pub(super) fn note_full(&self) {
        *self.full.lock() = Some(Instant::now());
    }

    /// Whether far space was full lately.
    pub(super) fn was_full(&self) -> bool {
        self.full.lock().is_some_and(|full| full.elapsed() < REST)
    }

    /// The programs, those that have just ended among them.
    pub(super) fn programs(&self) -> Vec<Arc<Program>> {
        self.programs.lock().clone()
    }

    /// Whether a process is one that is served.
    pub(super) fn serves(&self, pid: Pid) -> bool {
        let programs = self.programs.lock();
        programs
            .iter()
            .any(|program| program.pid() == Some(pid) && !program.is_gone())
    }

    /// Sets another limit. Ends a drain.
    ///
    /// # Errors
    /// A sentence, when this machine cannot reach it.
    pub fn set_local(&self, local: Local) -> anyhow::Result<()> {
        check::limit(local)?;
        self.space.limit_compressed(self.config.compressed_slabs(local));
        *self.full.lock() = None;
        self.goal.set(local);
        Ok(())
    }

    /// Begins to bring all pages back. Nothing leaves from then on, until [`Self::set_local`].
    ///
    /// # Errors
    /// A sentence, when they do not fit into memory.
    pub fn drain(self: &Arc<Self>) -> anyhow::Result<()> {
        let far = self.status().far_pages * PAGE_BYTES as u64;
        let pids: Vec<Pid> = self
            .programs()
            .iter()
            .filter_map(|program| program.pid())
            .collect();
        let available = crate::machine::view(&pids).available_bytes;
        if far > available {
            anyhow::bail!(
                "{} MiB of far pages do not fit into the {} MiB of memory that are available: give a larger limit instead, or \
                free memory",
                far >> 20,
                available >> 20
            );
        }
        if let Some(number) = self.goal.drain() {
            let pager = self.clone();
            thread("far drain", move || drain::run(&pager, number))?;
        }
        Ok(())
    }

    /// Programs that are served now.
    #[must_use]
    pub fn served(&self) -> usize {
        let programs = self.programs.lock();
        programs.iter().filter(|program| !program.has_ended()).count()
    }

    /// Whether a program ever joined.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        self.joined.load(Ordering::Relaxed) > 0
    }

    /// Ends the threads of the pager.
    pub fn end(&self) {
        self.is_ended.store(true, Ordering::Release);
    }

    /// Whether the run is over.
    pub(super) fn has_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// The limit, with `far_bytes` of far pages and `local_bytes` of local ones.
    pub(super) fn limit(&self, local_bytes: u64, far_bytes: u64) -> u64 {
        match self.goal.local() {
            Some(Local::Bytes(bytes)) => bytes,
            Some(Local::Share(share)) => ((local_bytes + far_bytes) as f64 * share) as u64,
            Some(Local::Stall(_)) => self.stall.limit().unwrap_or(u64::MAX),
            None => u64::MAX,
        }
    }

    /// Compares memory with the limit and says how many pages are to leave.
    fn balance(&self) {
        let programs: Vec<Arc<Program>> = self.programs.lock().clone();
        let mut resident = 0;
        let mut far_pages = 0;
        for program in programs.iter().filter(|program| !program.is_gone()) {
            resident += program.look();
            if matches!(self.goal.local(), Some(Local::Share(_)))
                && let Some(pages) = program.try_pages()
            {
                far_pages += pages.table.far_pages();
            }
        }
        let local = resident + self.space.dram_bytes();
        let limit = self.limit(resident, far_pages * PAGE_BYTES as u64);
        let (high, low) = (limit - limit / 128, limit - limit / 64);
        let was_over = self.is_over.load(Ordering::Relaxed);
        let is_over = local > high || (was_over && local > low);
        self.is_over.store(is_over, Ordering::Relaxed);
        let excess = if is_over && !self.was_full() {
            local.saturating_sub(low)
        } else {
            0
        };
        for program in &programs {
            let share = excess as f64 * program.resident() as f64 / resident.max(1) as f64;
            program.want((share / PAGE_BYTES as f64).ceil() as u64);
        }
    }

    /// Once a second: takes the stall of it, and finds the limit from it where that is asked for.
    fn look_at_stall(&self) {
        let target = match self.goal.local() {
            Some(Local::Stall(target)) => Some(target),
            _ => None,
        };
        let (mut resident, mut far_pages) = (0, 0);
        if target.is_some() {
            for program in self.programs().iter().filter(|program| !program.is_gone()) {
                resident += program.resident();
                far_pages += program.try_pages().map_or(0, |pages| pages.table.far_pages());
            }
        }
        let local = resident + self.space.dram_bytes();
        self.stall
            .step(target, local, resident + far_pages * PAGE_BYTES as u64);
        if let (Some(_), Some(limit)) = (target, self.stall.limit()) {
            let compressed = self.config.compressed_slabs(Local::Bytes(limit));
            self.space.limit_compressed(compressed.max(1));
        }
    }
}

/// Starts a thread of the pager. One that panics ends the pager: its programs would wait for ever otherwise.
pub(super) fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let guarded = move || {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err() {
            std::process::abort();
        }
    };
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(guarded)
        .map(drop)
}

/// Runs `each` now and then, until the pager is gone.
fn every(period: Duration, pager: &Weak<Pager>, mut each: impl FnMut(&Pager)) {
    loop {
        std::thread::sleep(period);
        match pager.upgrade() {
            Some(pager) if !pager.is_ended.load(Ordering::Acquire) => each(&pager),
            _ => return,
        }
    }
}

fn watch(pager: &Weak<Pager>) {
    every(LOOK_EVERY, pager, Pager::balance);
}

fn tick(pager: &Weak<Pager>) {
    let begun = Instant::now();
    every(Duration::from_secs(1), pager, |pager| {
        pager.look_at_stall();
        pager.space.tick(begun.elapsed().as_secs());
    });
}
