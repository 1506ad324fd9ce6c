//! A simulated NVMe controller below the driver: registers, queues, a disk with a volatile cache, virtual
//! time. Deterministic under a seed as long as one thread uses it. It watches the driver (every address and
//! doorbell is checked: [`SimController::violations`]) and lies to it as told ([`Quirk`]).

mod commands;
mod memory;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use varve_media::MediaError;
use varve_media::block::nvme::{Bus, DmaMemory};

use memory::{Memories, SimMemory};

/// What the device does instead of the right thing, at one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quirk {
    /// It never answers.
    Drop,
    /// It answers with the wrong phase bit.
    WrongPhase,
    /// It answers for a command that nobody sent.
    WrongId(u16),
    /// It answers twice.
    Duplicate,
    /// Its answer names another queue.
    WrongQueue,
    /// Its answer names a place in the queue past the end.
    HeadPastEnd,
    /// Sixteen random bytes, in the right phase.
    Garbage,
    /// It refuses with this status field (without the phase bit).
    Status(u16),
    /// It answers with success and does nothing.
    Lie,
    /// It stops with a fatal error.
    Fatal,
    /// It is pulled out.
    Remove,
    /// It answers after this many milliseconds; if there is a reset meanwhile it does nothing more, but
    /// answers all the same.
    Late(u64),
}

/// What the device is.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub sectors: u64,
    pub sector_shift: u8,
    pub metadata_bytes: u16,
    pub write_cache: bool,
    pub can_deallocate: bool,
    pub mdts: u8,
    pub mqes: u16,
    pub doorbell_shift: u8,
    /// I/O queue pairs that it gives.
    pub queues: u16,
    /// Queues that it creates, whatever it promised.
    pub queues_real: u16,
    pub namespaces: u32,
    pub registers_bytes: usize,
    /// Bits of `CAP` that are turned over.
    pub cap_flips: u64,
    pub never_ready: bool,
    pub lies_about_flush: bool,
    /// Answers to identify commands are random bytes.
    pub random_identity: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            sectors: 16 << 11,
            sector_shift: 9,
            metadata_bytes: 0,
            write_cache: true,
            can_deallocate: true,
            mdts: 5,
            mqes: 1023,
            doorbell_shift: 0,
            queues: 8,
            queues_real: 8,
            namespaces: 1,
            registers_bytes: 0x4000,
            cap_flips: 0,
            never_ready: false,
            lies_about_flush: false,
            random_identity: false,
        }
    }
}

/// A queue as the device knows it.
#[derive(Debug, Clone, Copy, Default)]
struct Queue {
    address: u64,
    entries: u16,
    head: u16,
    tail: u16,
    phase: bool,
}

/// A command that will be answered.
#[derive(Debug, Clone, Copy)]
struct Pending {
    due_ns: u64,
    queue: u16,
    bytes: [u8; 64],
    quirk: Option<Quirk>,
    /// Of a queue that was reset since.
    stale: bool,
}

/// What the driver has done so far.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Commands by queue and opcode.
    pub commands: BTreeMap<(u16, u8), u64>,
    /// Times that the controller was enabled.
    pub enables: u64,
    pub shutdowns: u64,
    pub dma_stops: u64,
    /// Writes with FUA.
    pub durable_writes: u64,
}

impl Counts {
    /// I/O commands of a kind.
    pub fn io(&self, opcode: u8) -> u64 {
        let of_kind = |(key, _): &(&(u16, u8), &u64)| key.0 > 0 && key.1 == opcode;
        self.commands.iter().filter(of_kind).map(|(_, count)| count).sum()
    }
}

struct State {
    shape: Shape,
    now_ns: u64,
    random: u64,
    registers: HashMap<usize, u32>,
    ready_at_ns: Option<u64>,
    fatal: bool,
    removed: bool,
    wanted_back: bool,
    dma_stopped: bool,
    submission: BTreeMap<u16, Queue>,
    completion: BTreeMap<u16, Queue>,
    pending: Vec<Pending>,
    memories: Memories,
    disk: Vec<u8>,
    /// Sectors that are written but not durable.
    cache: BTreeMap<u64, Vec<u8>>,
    /// What happens at which I/O command, counted from the start.
    script: BTreeMap<u64, Quirk>,
    /// Every n-th I/O command stops the controller.
    fatal_every: u64,
    io_commands: u64,
    /// The same for admin commands.
    admin_script: BTreeMap<u64, Quirk>,
    admin_commands: u64,
    counts: Counts,
    violations: Vec<String>,
}

/// A simulated controller, to be given to the driver as its bus.
pub struct SimController(Mutex<State>);

const CC: usize = 0x14;
const CSTS: usize = 0x1c;

impl SimController {
    pub fn new(shape: Shape, seed: u64) -> Arc<Self> {
        let bytes = shape.sectors.min(1 << 16) << shape.sector_shift.min(12);
        Arc::new(Self(Mutex::new(State {
            shape,
            now_ns: 0,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            registers: HashMap::new(),
            ready_at_ns: None,
            fatal: false,
            removed: false,
            wanted_back: false,
            dma_stopped: false,
            submission: BTreeMap::new(),
            completion: BTreeMap::new(),
            pending: Vec::new(),
            memories: Memories::default(),
            disk: vec![0; bytes as usize],
            cache: BTreeMap::new(),
            script: BTreeMap::new(),
            fatal_every: 0,
            io_commands: 0,
            admin_script: BTreeMap::new(),
            admin_commands: 0,
            counts: Counts::default(),
            violations: Vec::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Has something happen at the I/O command that comes `after` so many from now.
    pub fn at(&self, after: u64, quirk: Quirk) {
        let mut state = self.state();
        let at = state.io_commands + after;
        state.script.insert(at, quirk);
    }

    /// Number of I/O commands to come at which something is to happen.
    pub fn to_come(&self) -> usize {
        let state = self.state();
        state.script.keys().filter(|at| **at >= state.io_commands).count()
    }

    /// The same as `at`, for admin commands.
    pub fn at_admin(&self, after: u64, quirk: Quirk) {
        let mut state = self.state();
        let at = state.admin_commands + after;
        state.admin_script.insert(at, quirk);
    }

    /// Stops the controller at every n-th I/O command; 0: no more.
    pub fn fail_every(&self, commands: u64) {
        self.state().fatal_every = commands;
    }

    pub fn pull_out(&self) {
        self.state().removed = true;
    }

    pub fn want_back(&self) {
        self.state().wanted_back = true;
    }

    pub fn reshape(&self, change: impl FnOnce(&mut Shape)) {
        change(&mut self.state().shape);
    }

    pub fn counts(&self) -> Counts {
        self.state().counts.clone()
    }

    /// What the driver did wrong.
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.state().now_ns)
    }

    /// The power goes and comes back: of what is cached each sector is lost, or torn where asked, or by luck
    /// on the disk.
    pub fn cut_power(&self, torn: bool) {
        let mut state = self.state();
        for (sector, bytes) in std::mem::take(&mut state.cache) {
            let kept = match state.random() % 3 {
                0 => bytes.len(),
                1 if torn => (state.random() as usize) % bytes.len(),
                _ => 0,
            };
            let at = (sector << state.shape.sector_shift) as usize;
            state.disk[at..at + kept].copy_from_slice(&bytes[..kept]);
        }
        state.reset();
        state.registers.clear();
        state.fatal = false;
    }

    /// What is on the disk, durable or not.
    pub fn content(&self) -> Vec<u8> {
        let state = self.state();
        let mut bytes = state.disk.clone();
        for (sector, cached) in &state.cache {
            let at = (sector << state.shape.sector_shift) as usize;
            bytes[at..at + cached.len()].copy_from_slice(cached);
        }
        bytes
    }
}

impl State {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }

    fn violation(&mut self, what: String) {
        if self.violations.len() < 20 {
            self.violations.push(what);
        }
    }

    /// What a disabled controller knows.
    fn reset(&mut self) {
        self.submission.clear();
        self.completion.clear();
        self.pending
            .retain(|pending| matches!(pending.quirk, Some(Quirk::Late(_))));
        for pending in &mut self.pending {
            pending.stale = true;
        }
        self.ready_at_ns = None;
    }

    fn is_ready(&self) -> bool {
        self.ready_at_ns.is_some_and(|at| at <= self.now_ns)
    }

    fn capabilities(&self) -> u64 {
        let shape = &self.shape;
        let cap = u64::from(shape.mqes) | 4 << 24 | u64::from(shape.doorbell_shift) << 32 | 1 << 37;
        cap ^ shape.cap_flips
    }

    fn read_register(&mut self, at: usize) -> u32 {
        if !at.is_multiple_of(4) || at + 4 > self.shape.registers_bytes {
            self.violation(format!("read of register {at:#x}"));
            return 0;
        }
        if self.removed {
            return u32::MAX;
        }
        match at {
            0 => self.capabilities() as u32,
            4 => (self.capabilities() >> 32) as u32,
            8 => 0x0002_0000,
            CSTS => {
                let shut = self.registers.get(&CC).copied().unwrap_or(0) >> 14 & 3 != 0;
                u32::from(self.is_ready()) | u32::from(self.fatal) << 1 | if shut { 2 << 2 } else { 0 }
            }
            at => self.registers.get(&at).copied().unwrap_or(0),
        }
    }

    fn write_register(&mut self, at: usize, value: u32) {
        if !at.is_multiple_of(4) || at + 4 > self.shape.registers_bytes {
            self.violation(format!("write of register {at:#x}"));
            return;
        }
        if self.removed {
            return;
        }
        if at >= 0x1000 {
            self.ring(at, value);
            return;
        }
        let before = self.registers.insert(at, value).unwrap_or(0);
        if at == CC {
            self.configure(before, value);
        }
    }

    fn configure(&mut self, before: u32, value: u32) {
        if value >> 14 & 3 != 0 && before >> 14 & 3 == 0 {
            self.counts.shutdowns += 1;
            self.write_back();
        }
        match (before & 1, value & 1) {
            (0, 1) => {
                let sizes = (value >> 16 & 0xf, value >> 20 & 0xf, value >> 7 & 0xf);
                if sizes != (6, 4, 0) {
                    self.violation(format!("enabled with CC {value:#x}"));
                }
                self.counts.enables += 1;
                self.fatal = false;
                let register = |at| u64::from(self.registers.get(&at).copied().unwrap_or(0));
                let (attributes, address) = (register(0x24), |at| register(at) | register(at + 4) << 32);
                let queue = |address, entries: u64| Queue {
                    address,
                    entries: (entries & 0xfff) as u16 + 1,
                    phase: true,
                    ..Queue::default()
                };
                let (submission, completion) = (
                    queue(address(0x28), attributes),
                    queue(address(0x30), attributes >> 16),
                );
                self.submission.insert(0, submission);
                self.completion.insert(0, completion);
                self.ready_at_ns = (!self.shape.never_ready).then_some(self.now_ns + 200_000);
            }
            (1, 0) => self.reset(),
            _ => {}
        }
    }

    fn ring(&mut self, at: usize, value: u32) {
        let number = (at - 0x1000) / (4 << self.shape.doorbell_shift);
        let (id, completion) = ((number / 2) as u16, number % 2 == 1);
        let queues = if completion {
            &mut self.completion
        } else {
            &mut self.submission
        };
        let Some(queue) = queues
            .get_mut(&id)
            .filter(|queue| value < u32::from(queue.entries))
        else {
            // After a fatal error the queues are as they were; after a reset nobody may ring.
            self.violation(format!("doorbell {at:#x} rung with {value}"));
            return;
        };
        if completion {
            queue.head = value as u16;
            return;
        }
        queue.tail = value as u16;
        self.fetch(id);
    }

    /// What goes wrong with the command that was just taken from a queue.
    fn next_quirk(&mut self, queue: u16) -> Option<Quirk> {
        let (script, count) = match queue {
            0 => (&mut self.admin_script, &mut self.admin_commands),
            _ => (&mut self.script, &mut self.io_commands),
        };
        let quirk = script.remove(count);
        *count += 1;
        let stops = queue > 0 && self.fatal_every > 0 && self.io_commands.is_multiple_of(self.fatal_every);
        if stops { Some(Quirk::Fatal) } else { quirk }
    }

    /// Takes what is new in a submission queue.
    fn fetch(&mut self, id: u16) {
        while let Some(queue) = self.submission.get(&id).copied()
            && queue.head != queue.tail
            && !self.fatal
            && !self.removed
        {
            let mut bytes = [0; 64];
            self.dma_read(queue.address + 64 * u64::from(queue.head), &mut bytes);
            if let Some(queue) = self.submission.get_mut(&id) {
                queue.head = (queue.head + 1) % queue.entries;
            }
            *self.counts.commands.entry((id, bytes[0])).or_default() += 1;
            let quirk = self.next_quirk(id);
            let mut due_ns = self.now_ns + 500 + self.random() % 20_000;
            match quirk {
                Some(Quirk::Fatal) => self.fatal = true,
                Some(Quirk::Remove) => self.removed = true,
                Some(Quirk::Drop) => {}
                other => {
                    if let Some(Quirk::Late(ms)) = other {
                        due_ns = self.now_ns + ms * 1_000_000;
                    }
                    self.pending.push(Pending {
                        due_ns,
                        queue: id,
                        bytes,
                        quirk,
                        stale: false,
                    });
                }
            }
        }
    }

    /// Lets time pass, and answers what is due, in an order of its own.
    fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        loop {
            let stopped = self.fatal || self.removed || self.dma_stopped;
            let is_due = |pending: &Pending| pending.due_ns <= self.now_ns && !stopped;
            let due: Vec<usize> = (0..self.pending.len())
                .filter(|at| is_due(&self.pending[*at]))
                .collect();
            if due.is_empty() {
                return;
            }
            let chosen = due[self.random() as usize % due.len()];
            let pending = self.pending.swap_remove(chosen);
            self.answer(&pending);
        }
    }

    fn dma_read(&mut self, address: u64, out: &mut [u8]) {
        if let Err(what) = self.memories.copy(address, out, false) {
            self.violation(format!("device read {what}"));
        }
    }

    fn dma_write(&mut self, address: u64, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        if let Err(what) = self.memories.copy(address, &mut bytes, true) {
            self.violation(format!("device write {what}"));
        }
    }
}

impl Bus for SimController {
    fn registers_bytes(&self) -> usize {
        self.state().shape.registers_bytes
    }

    fn read32(&self, off: usize) -> u32 {
        let mut state = self.state();
        state.pass(100);
        state.read_register(off)
    }

    fn write32(&self, off: usize, value: u32) {
        let mut state = self.state();
        state.write_register(off, value);
        state.pass(100);
    }

    fn allocate(&self, len_bytes: usize) -> Result<Arc<dyn DmaMemory>, MediaError> {
        let memory: Arc<SimMemory> = self.state().memories.allocate(len_bytes);
        Ok(memory)
    }

    fn stop_dma(&self) {
        let mut state = self.state();
        state.dma_stopped = true;
        state.counts.dma_stops += 1;
    }

    fn is_wanted_back(&self) -> bool {
        self.state().wanted_back
    }

    fn now(&self) -> Duration {
        self.elapsed()
    }

    fn pause(&self, waited: Duration) {
        // Virtual time runs faster the longer one waits, so that time-outs of minutes take no time.
        let ns = (waited.as_nanos() as u64 / 8).max(1_000);
        self.state().pass(ns);
        std::thread::yield_now();
    }

    fn describe(&self) -> String {
        "simulated".into()
    }
}
