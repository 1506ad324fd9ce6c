//! Idle page tracking: one bit a frame in `/sys/kernel/mm/page_idle/bitmap` (CONFIG_IDLE_PAGE_TRACKING,
//! root).

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use crate::interfaces::{Touch, Tracker, TrackerError, TrackerInfo};
use crate::processes::SharedProcesses;
use crate::types::{PAGE_BYTES, PageKey};

/// Path of the kernel's bitmap.
pub const BITMAP: &str = "/sys/kernel/mm/page_idle/bitmap";

/// The tracker. Each query sets a frame's bit ("idle"); the kernel clears it when the page is touched.
#[derive(Debug)]
pub struct IdleBitmap {
    bitmap: File,
    processes: SharedProcesses,
    frames: Vec<Option<u64>>,
}

impl IdleBitmap {
    /// Opens the bitmap.
    ///
    /// # Errors
    /// `ENOENT` when the kernel was built without it, `EACCES` without root.
    pub fn open(processes: SharedProcesses) -> io::Result<Self> {
        let bitmap = OpenOptions::new().read(true).write(true).open(BITMAP)?;
        Ok(Self {
            bitmap,
            processes,
            frames: Vec::new(),
        })
    }

    /// Reads the words in `masks`, in runs of neighbouring words. Words that the kernel does not return are
    /// left out: it returns whole words only, so if memory ends within a word, the frames of that word cannot
    /// be judged.
    fn read(&self, masks: &BTreeMap<u64, u64>) -> io::Result<BTreeMap<u64, u64>> {
        let mut out = BTreeMap::new();
        for (first, count) in runs(masks) {
            let mut bytes = vec![0u8; count * 8];
            let mut got = 0;
            while got < bytes.len() {
                match self.bitmap.read_at(&mut bytes[got..], first * 8 + got as u64) {
                    Ok(0) => break,
                    Ok(n) => got += n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            for (i, word) in bytes[..got].chunks_exact(8).enumerate() {
                out.insert(
                    first + i as u64,
                    u64::from_ne_bytes(word.try_into().unwrap_or_default()),
                );
            }
        }
        Ok(out)
    }

    /// Sets the bits in `masks`; the kernel ignores zeros.
    fn arm(&self, masks: &BTreeMap<u64, u64>) -> io::Result<()> {
        for (first, count) in runs(masks) {
            let words = (first..first + count as u64).map(|w| masks.get(&w).copied().unwrap_or(0));
            let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            self.bitmap.write_all_at(&bytes, first * 8)?;
        }
        Ok(())
    }
}

/// Judges one frame by its bit.
fn judge(frame: Option<u64>, idle: &BTreeMap<u64, u64>) -> Touch {
    let word = frame.and_then(|f| Some((f, idle.get(&(f / 64))?)));
    match word {
        None => Touch::Unknown,
        Some((f, w)) if w >> (f % 64) & 1 == 1 => Touch::Idle,
        // A bit that was never set counts as touched: the page was allocated since the last query.
        Some(_) => Touch::Read,
    }
}

/// Groups neighbouring words into runs of at most 512.
fn runs(masks: &BTreeMap<u64, u64>) -> Vec<(u64, usize)> {
    let mut out: Vec<(u64, usize)> = Vec::new();
    for word in masks.keys() {
        match out.last_mut() {
            Some((first, count)) if *first + *count as u64 == *word && *count < 512 => *count += 1,
            _ => out.push((*word, 1)),
        }
    }
    out
}

impl Tracker for IdleBitmap {
    fn info(&self) -> TrackerInfo {
        TrackerInfo {
            name: "idle",
            resolution_bytes: PAGE_BYTES,
            sees_reads: true,
            tells_writes: false,
            note: "idle page tracking: exact for every page on the kernel's lists; does not tell writes"
                .to_owned(),
        }
    }

    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        let fail = |e: io::Error| TrackerError::Unusable {
            tracker: "idle",
            what: format!("{BITMAP}: {e}"),
        };
        self.frames.clear();
        self.processes.borrow().frames(pages, &mut self.frames);
        let mut masks: BTreeMap<u64, u64> = BTreeMap::new();
        for frame in self.frames.iter().flatten() {
            *masks.entry(frame / 64).or_default() |= 1 << (frame % 64);
        }
        let idle = self.read(&masks).map_err(fail)?;
        masks.retain(|word, _| idle.contains_key(word));
        self.arm(&masks).map_err(fail)?;
        out.extend(self.frames.iter().map(|frame| judge(*frame, &idle)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn frames_of_a_word_that_memory_ends_in_are_unknown_and_the_others_are_judged() {
        // Three whole words and four bytes: for a memory of 224 frames the kernel returns the first three
        // words.
        let bitmap = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = [0u64, 2, 1]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .chain([0xff; 4])
            .collect();
        bitmap.write_all_at(&bytes, 0).unwrap();
        let tracker = IdleBitmap {
            bitmap,
            processes: SharedProcesses::default(),
            frames: Vec::new(),
        };
        let masks: BTreeMap<u64, u64> = (0..6).map(|w| (w, u64::MAX)).collect();
        let idle = tracker.read(&masks).unwrap();
        let touches = [Some(0), Some(65), Some(128), Some(192), Some(320), None].map(|f| judge(f, &idle));
        let (read, unknown) = (Touch::Read, Touch::Unknown);
        assert_eq!(
            touches,
            [read, Touch::Idle, Touch::Idle, unknown, unknown, unknown]
        );
    }

    #[test]
    fn runs_join_neighbouring_words_and_stay_bounded() {
        let masks: BTreeMap<u64, u64> = [1, 2, 3, 7].into_iter().chain(100..700).map(|w| (w, 1)).collect();
        assert_eq!(runs(&masks), [(1, 3), (7, 1), (100, 512), (612, 88)]);
    }
}
