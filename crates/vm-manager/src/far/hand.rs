//! The hand that goes over a program's memory: which pages are there and may leave.

use std::time::{Duration, Instant};

use varve_far::table::CHUNK_BYTES;

use super::program::Area;
use crate::sys::{PageCategories, Pagemap};
use crate::types::Pid;

/// Mappings smaller than this are left alone, bytes: the C library and others keep small ones that a child of
/// a fork must find empty.
const LEAST_BYTES: u64 = 64 << 10;
/// How long the list of mappings is believed.
const FRESH: Duration = Duration::from_millis(500);

/// A mapping whose pages may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mapping {
    pub start: u64,
    pub end: u64,
}

/// Neighbouring pages that are in memory, with the part of their 2 MiB that belongs to their mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Present {
    pub start: u64,
    pub end: u64,
    pub around: Mapping,
}

/// The hand.
#[derive(Debug)]
pub(super) struct Hand {
    pid: Pid,
    pagemap: Pagemap,
    mappings: Vec<Mapping>,
    read: Option<Instant>,
    at: u64,
}

impl Hand {
    /// # Errors
    /// When the process has ended or forbids it.
    pub(super) fn new(pid: Pid) -> std::io::Result<Self> {
        Ok(Self {
            pid,
            pagemap: Pagemap::open(pid)?,
            mappings: Vec::new(),
            read: None,
            at: 0,
        })
    }

    /// The present pages of the next 2 MiB, and whether the hand began from the start again. `skip` says
    /// whether to pass over a chunk.
    ///
    /// # Errors
    /// When the process has ended.
    pub(super) fn next(
        &mut self,
        area: Area,
        mut skip: impl FnMut(u64) -> bool,
    ) -> std::io::Result<(Vec<Present>, bool)> {
        if self.read.is_none_or(|read| read.elapsed() > FRESH) {
            let text = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))?;
            self.mappings = mappings(&text, area);
            self.read = Some(Instant::now());
        }
        let next = self.mappings.iter().find(|mapping| mapping.end > self.at);
        let (mapping, wrapped) = match (next, self.mappings.first()) {
            (Some(mapping), _) => (*mapping, false),
            (None, Some(first)) => {
                self.at = 0;
                (*first, true)
            }
            (None, None) => return Ok((Vec::new(), true)),
        };
        let start = mapping.start.max(self.at);
        let chunk = start / CHUNK_BYTES;
        let end = mapping.end.min((chunk + 1) * CHUNK_BYTES);
        self.at = end;
        let mut found = Vec::new();
        if skip(chunk) {
            return Ok((found, wrapped));
        }
        let around = Mapping {
            start: mapping.start.max(chunk * CHUNK_BYTES),
            end,
        };
        self.pagemap.present(start, end, |run| {
            if !run.categories().contains(PageCategories::FILE) {
                found.push(Present {
                    start: run.start,
                    end: run.end,
                    around,
                });
            }
        })?;
        Ok((found, wrapped))
    }
}

/// Mappings whose pages may leave: private, anonymous, readable and writable, not a stack of the kernel's
/// making, not the data of a library, and not the set-aside area.
fn mappings(text: &str, area: Area) -> Vec<Mapping> {
    let mut found = Vec::new();
    // End of the last mapping of a file: the zero-initialised data of a library follows it.
    let mut file_end = 0;
    for line in text.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(rights), Some(_), Some(_), Some(inode)) = (
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
        ) else {
            continue;
        };
        let name = fields.next().unwrap_or_default();
        let Some((start, end)) = range.split_once('-') else {
            continue;
        };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else {
            continue;
        };
        if inode != "0" {
            file_end = end;
            continue;
        }
        let follows_file = start == file_end && name.is_empty();
        if follows_file {
            file_end = end;
        }
        let named = name.is_empty() || name == "[heap]" || name.starts_with("[anon:");
        let overlaps = start < area.end() && end > area.start;
        if rights.starts_with("rw-p") && named && !follows_file && !overlaps && end - start >= LEAST_BYTES {
            found.push(Mapping { start, end });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_anonymous_memory_may_leave() {
        let text = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0020000000-7f0030000000 rw-p 00000000 00:00 0
7f0040000000-7f0040100000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
7f0050000000-7f0050100000 r--p 00000000 00:00 0
7f0060000000-7f0060001000 rw-p 00000000 00:00 0
7f0070000000-7f0070020000 rw-p 00030000 fe:00 99                         /lib/libx.so
7f0070020000-7f0070080000 rw-p 00000000 00:00 0
7f0080000000-7f0080100000 rw-p 00000000 00:00 0                          [anon:arena]
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
";
        let area = Area {
            start: 0x7f00_2000_0000,
        };
        let starts: Vec<u64> = mappings(text, area).iter().map(|mapping| mapping.start).collect();
        assert_eq!(starts, [0x55d0_c000_0000, 0x7f00_0000_0000, 0x7f00_8000_0000]);
    }
}
