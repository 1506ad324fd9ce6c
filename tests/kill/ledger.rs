//! The record outside of the pool of which calls began and which returned. Owns its file; knows nothing of
//! what was called.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of an entry. Divides a page, so that no entry is cut where a process is killed.
const ENTRY_BYTES: usize = 16;
/// Errno of a read that returned what it must not.
pub const WRONG: u16 = 0xffff;
/// Added to how many bytes a write took that took too few: stands where an errno would.
pub const SHORT: u16 = 0x8000;

/// Numbers the beginnings and ends of all calls of a process in one order.
pub struct Ticks(AtomicU64);

impl Ticks {
    /// From 1.
    pub const fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    fn tick(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// Where a writer's ledger of a round is.
pub fn path(outside: &Path, writer: u32, round: u32) -> PathBuf {
    outside.join(format!("ledger-{writer}-{round}"))
}

/// A ledger that is being written.
pub struct Ledger<'a> {
    file: File,
    ticks: &'a Ticks,
}

impl<'a> Ledger<'a> {
    /// A new one.
    pub fn new(path: &Path, ticks: &'a Ticks) -> Self {
        let file = File::create_new(path).expect("a ledger");
        Self { file, ticks }
    }

    fn add(&mut self, kind: u8, errno: u16) {
        let mut entry = [0; ENTRY_BYTES];
        entry[0] = kind;
        entry[2..4].copy_from_slice(&errno.to_le_bytes());
        entry[8..].copy_from_slice(&self.ticks.tick().to_le_bytes());
        self.file.write_all(&entry).expect("a ledger that can be written");
    }

    /// A call is about to begin.
    pub fn begin(&mut self) {
        self.add(1, 0);
    }

    /// It has returned.
    pub fn end(&mut self, errno: u16) {
        self.add(2, errno);
    }
}

/// What became of one call.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// When it began.
    pub began: u64,
    /// When it returned, and with which errno; nothing if it did not.
    pub ended: Option<(u64, u16)>,
}

/// How many calls have returned; no ledger yet: none.
pub fn returned(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| meta.len() / (2 * ENTRY_BYTES as u64))
}

/// Reads a ledger.
pub fn read(path: &Path) -> Vec<Entry> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let mut entries: Vec<Entry> = Vec::new();
    for entry in bytes.chunks(ENTRY_BYTES) {
        assert_eq!(entry.len(), ENTRY_BYTES, "an entry of {} is cut", path.display());
        let tick = u64::from_le_bytes(entry[8..].try_into().expect("8 bytes"));
        let errno = u16::from_le_bytes([entry[2], entry[3]]);
        match entry[0] {
            1 => entries.push(Entry {
                began: tick,
                ended: None,
            }),
            2 => entries.last_mut().expect("an end after its begin").ended = Some((tick, errno)),
            kind => panic!("no entry of kind {kind}"),
        }
    }
    entries
}
