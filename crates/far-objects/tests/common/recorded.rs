//! A file in memory that records every write and sync, for images of what a crash may leave.

#![allow(dead_code, clippy::unwrap_used)]

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
    /// Syncs that are not recorded: a fault of the program that tests must find.
    forgets_syncs: bool,
}

/// Clones are the same file.
#[derive(Debug, Clone, Default)]
pub struct Recorded(Arc<Mutex<Inner>>);

impl Recorded {
    pub fn of(bytes: Vec<u8>) -> Self {
        let file = Self::default();
        file.0.lock().unwrap().bytes = bytes;
        file
    }

    pub fn record(&self) {
        self.0.lock().unwrap().events = Some(Vec::new());
    }

    pub fn forget_syncs(&self) {
        self.0.lock().unwrap().forgets_syncs = true;
    }

    pub fn fail_syncs(&self, fails: bool) {
        self.0.lock().unwrap().fails_syncs = fails;
    }

    /// The next writes but so many fail; `None`: none does.
    pub fn fail_writes_after(&self, count: Option<u64>) {
        self.0.lock().unwrap().writes_left = count;
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
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut inner = self.0.lock().unwrap();
        if inner.fails_syncs {
            return Err(io::Error::from_raw_os_error(5));
        }
        if !inner.forgets_syncs
            && let Some(events) = &mut inner.events
        {
            events.push(Event::Sync);
        }
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().bytes.len() as u64)
    }
}
