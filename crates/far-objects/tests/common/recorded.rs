//! A file in memory that records every write and sync, for images of what a crash may leave.

#![allow(dead_code, clippy::unwrap_used)]

use fastrand::Rng;
use std::io;
use std::sync::{Arc, Mutex};
use varve_far_objects::CheckpointFile;

/// The unit that a device writes as one.
pub const SECTOR: usize = 512;

#[derive(Debug, Clone)]
pub enum Event {
    Write { at: u64, bytes: Vec<u8> },
    Sync,
}

#[derive(Debug, Default)]
struct Inner {
    bytes: Vec<u8>,
    events: Option<Vec<Event>>,
    /// Syncs that are to fail, and writes after so many others.
    fails_syncs: bool,
    writes_left: Option<u64>,
    syncs_left: Option<u64>,
    syncs: usize,
    /// Of two syncs, which is not recorded: a fault of the program that tests must find.
    forgotten_sync: Option<usize>,
}

type Hook = Box<dyn FnMut() + Send>;

/// Clones are the same file.
#[derive(Clone, Default)]
pub struct Recorded(Arc<Mutex<Inner>>, Arc<Mutex<Option<Hook>>>);

impl Recorded {
    pub fn of(bytes: Vec<u8>) -> Self {
        let file = Self::default();
        file.0.lock().unwrap().bytes = bytes;
        file
    }

    pub fn record(&self) {
        self.0.lock().unwrap().events = Some(Vec::new());
    }

    /// From now on the first or the second of two syncs is forgotten.
    pub fn forget_sync(&self, which: usize) {
        let mut inner = self.0.lock().unwrap();
        (inner.forgotten_sync, inner.syncs) = (Some(which), 0);
    }

    /// Calls `hook` after each write, but not while it runs.
    pub fn after_writes(&self, hook: Option<Hook>) {
        *self.1.lock().unwrap() = hook;
    }

    pub fn fail_syncs(&self, fails: bool) {
        self.0.lock().unwrap().fails_syncs = fails;
    }

    /// The next writes but so many fail; `None`: none does.
    pub fn fail_writes_after(&self, count: Option<u64>) {
        self.0.lock().unwrap().writes_left = count;
    }

    /// The next syncs but so many fail; `None`: none does.
    pub fn fail_syncs_after(&self, count: Option<u64>) {
        self.0.lock().unwrap().syncs_left = count;
    }

    pub fn events(&self) -> usize {
        self.0.lock().unwrap().events.as_ref().map_or(0, Vec::len)
    }

    pub fn take_events(&self) -> Vec<Event> {
        self.0.lock().unwrap().events.take().unwrap_or_default()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().bytes.clone()
    }

    pub fn change(&self, at: usize, change: u8) {
        self.0.lock().unwrap().bytes[at] ^= change;
    }
}

pub fn apply(bytes: &mut Vec<u8>, at: u64, part: &[u8]) {
    let end = at as usize + part.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[at as usize..end].copy_from_slice(part);
}

/// Moments of a crash, sorted: `images` of them by chance, and those around each root, which are few. `complete`:
/// number of events when each checkpoint was complete.
pub fn crash_points(events: usize, complete: &[usize], images: usize, random: &mut Rng) -> Vec<usize> {
    let mut points: Vec<usize> = (0..images).map(|_| random.usize(complete[0]..=events)).collect();
    for complete_at in complete {
        points.extend((complete_at.saturating_sub(3)..=complete_at + 1).filter(|at| *at >= complete[0]));
    }
    points.retain(|at| *at <= events);
    points.sort_unstable();
    points
}

/// What is on the device up to the last sync.
#[derive(Default)]
pub struct Durable {
    pub bytes: Vec<u8>,
    next: usize,
}

impl Durable {
    /// What begins as `bytes`.
    pub fn of(bytes: Vec<u8>) -> Self {
        Self { bytes, next: 0 }
    }

    /// What a crash after the first `point` events may leave: of the writes since the last sync none, all or some
    /// sectors. Points come in their order.
    pub fn image(&mut self, events: &[Event], point: usize, random: &mut Rng) -> Vec<u8> {
        let synced = events[..point]
            .iter()
            .rposition(|event| matches!(event, Event::Sync));
        let synced = synced.map_or(0, |at| at + 1).max(self.next);
        for event in &events[self.next..synced] {
            if let Event::Write { at, bytes } = event {
                apply(&mut self.bytes, *at, bytes);
            }
        }
        self.next = synced;
        let mut image = self.bytes.clone();
        for event in &events[synced..point] {
            let Event::Write { at, bytes } = event else {
                continue;
            };
            match random.u8(..4) {
                0 => {}
                1 | 2 => apply(&mut image, *at, bytes),
                _ => {
                    for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                        if random.bool() {
                            apply(&mut image, at + (number * SECTOR) as u64, sector);
                        }
                    }
                }
            }
        }
        image
    }
}

impl CheckpointFile for Recorded {
    fn name(&self) -> String {
        "recorded".into()
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        let inner = self.0.lock().unwrap();
        let from = offset_bytes as usize;
        let there = inner.bytes.get(from..from + bytes.len());
        bytes.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
        {
            let mut inner = self.0.lock().unwrap();
            if let Some(left) = &mut inner.writes_left {
                *left = left.checked_sub(1).ok_or(io::ErrorKind::Other)?;
            }
            apply(&mut inner.bytes, offset_bytes, bytes);
            if let Some(events) = &mut inner.events {
                events.push(Event::Write {
                    at: offset_bytes,
                    bytes: bytes.to_vec(),
                });
            }
        }
        if let Ok(mut hook) = self.1.try_lock()
            && let Some(hook) = &mut *hook
        {
            hook();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut inner = self.0.lock().unwrap();
        if inner.fails_syncs {
            return Err(io::Error::from_raw_os_error(5));
        }
        if let Some(left) = &mut inner.syncs_left {
            *left = left.checked_sub(1).ok_or(io::ErrorKind::Other)?;
        }
        inner.syncs += 1;
        let is_forgotten = inner
            .forgotten_sync
            .is_some_and(|which| inner.syncs % 2 == (which + 1) % 2);
        if let Some(events) = &mut inner.events
            && !is_forgotten
        {
            events.push(Event::Sync);
        }
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().bytes.len() as u64)
    }
}
