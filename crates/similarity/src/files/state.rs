//! Checksums of files, kept between scans: a scan reads only new and changed files, and an interrupted scan
//! continues.
//!
//! The state's directory has `sums` (a CRC-32C for each block of 4 KiB, little-endian, the files one after
//! another with one unused place between) and `index` (magic `VARVSUMS`, CRC-32C, then the places of each
//! file, by postcard). The sums are durable before the index that refers to them; sums behind the indexed
//! ones are truncated at the next start.

use super::read::{ReadRate, open, pieces};
use super::walk::Chosen;
use crate::candidates::Checksums;
use crate::hash::BLOCK_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"VARVSUMS";
/// CRC-32C of 4 KiB of zeros: such blocks are holes, and are not shared.
const ZERO_SUM: u32 = 0x98f9_4189;
/// Bytes read after which the index is written.
const SAVE_BYTES: u64 = 4 << 30;

/// An unusable state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It could not be read or written.
    #[error("cannot use the state in {dir}: {error}", dir = .dir.display())]
    Io {
        /// Its directory.
        dir: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// Another scan uses it.
    #[error("another scan uses the state in {dir}", dir = .0.display())]
    InUse(PathBuf),
    /// It is damaged.
    #[error("the state in {dir} is damaged; remove {dir} and scan again", dir = .0.display())]
    Damaged(PathBuf),
}

/// A file with kept checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its path at the last scan.
    pub path: PathBuf,
    id: (u64, u64),
    len: u64,
    times: (i128, i128),
    /// Place of its first checksum.
    at: u64,
}

impl Kept {
    fn blocks(&self) -> u64 {
        self.len.div_ceil(BLOCK_BYTES as u64)
    }

    /// Device and inode number.
    pub const fn id(&self) -> (u64, u64) {
        self.id
    }

    /// Whether this is the file as it was read: the number, size and times are the same.
    pub fn is(&self, chosen: &Chosen) -> bool {
        (self.id, self.len, self.times) == (chosen.id, chosen.len, (chosen.mtime_ns, chosen.ctime_ns))
    }
}

/// Location of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// The file.
    pub path: &'a Path,
    /// Offset in bytes.
    pub offset_bytes: u64,
    /// Bytes from there to the end of the file.
    pub left_bytes: u64,
}

/// The result of looking at a file in a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Looked {
    /// The file is unchanged.
    Unchanged,
    /// The file was read.
    Read,
    /// The file changed while it was read, and is left out.
    Changing,
}

/// Calls its second argument with the number of a block and the CRC-32C of it and of successive ones.
pub type Teller<'t> = dyn FnMut(&Chosen, &mut dyn FnMut(u64, &[u32])) -> std::io::Result<()> + 't;

/// Kept checksums.
#[derive(Debug)]
pub struct State {
    dir: PathBuf,
    sums: File,
    lock: File,
    /// Files with kept checksums, by place.
    kept: Vec<Kept>,
    /// Indices into `kept`.
    by_id: HashMap<(u64, u64), usize>,
    seen: HashSet<(u64, u64)>,
    /// The next free place.
    next: u64,
    unsaved_bytes: u64,
}

impl Drop for State {
    /// Releases the lock at once: a child process that is being started may hold a copy of the descriptor for
    /// a moment.
    fn drop(&mut self) {
        let _ = self.lock.unlock();
    }
}

impl State {
    /// Opens the state in a directory, or creates it.
    ///
    /// # Errors
    /// If it is in use, damaged, or cannot be read or written.
    pub fn open(dir: &Path) -> Result<Self, StateError> {
        let failed = |error| StateError::Io {
            dir: dir.to_owned(),
            error,
        };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let options = || {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options
        };
        let lock = options().open(dir.join("lock")).map_err(failed)?;
        lock.try_lock().map_err(|_| StateError::InUse(dir.to_owned()))?;
        let sums = options().open(dir.join("sums")).map_err(failed)?;
        let kept = match std::fs::read(dir.join("index")) {
            Ok(bytes) => decode(&bytes).ok_or_else(|| StateError::Damaged(dir.to_owned()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let next = kept.last().map_or(0, |last| last.at + last.blocks() + 1);
        if sums.metadata().map_err(failed)?.len() < next * 4 {
            return Err(StateError::Damaged(dir.to_owned()));
        }
        sums.set_len(next * 4).map_err(failed)?;
        let by_id = kept.iter().enumerate().map(|(n, kept)| (kept.id, n)).collect();
        Ok(Self {
            dir: dir.to_owned(),
            sums,
            lock,
            kept,
            by_id,
            seen: HashSet::new(),
            next,
            unsaved_bytes: 0,
        })
    }

    fn failed(&self, error: std::io::Error) -> StateError {
        StateError::Io {
            dir: self.dir.clone(),
            error,
        }
    }

    /// Reads a file if it is new or has changed.
    ///
    /// # Errors
    /// The inner one if the file cannot be read, the outer one if the state cannot be written.
    pub fn look(
        &mut self,
        chosen: Chosen,
        rate: &mut ReadRate,
    ) -> Result<std::io::Result<Looked>, StateError> {
        self.look_by(chosen, &mut |chosen, writer| {
            let file = open(chosen)?;
            pieces(&file, rate, &mut |at, piece| writer.add(at, piece))
        })
    }

    /// Takes the checksums of a file that is new or has changed from someone who knows them, without a read
    /// of the file. `tell` tells them in ascending order; what is left out is zeros. The last block is padded
    /// with zeros.
    ///
    /// # Errors
    /// The inner one is that of `tell`, the outer one if the state cannot be written.
    pub fn look_told(
        &mut self,
        chosen: Chosen,
        tell: &mut Teller<'_>,
    ) -> Result<std::io::Result<Looked>, StateError> {
        self.look_by(chosen, &mut |chosen, writer| {
            let blocks = chosen.len.div_ceil(BLOCK_BYTES as u64);
            tell(chosen, &mut |first, sums| {
                writer.zeros(first.min(blocks));
                for (_, sum) in (first..blocks).zip(sums) {
                    writer.put(*sum);
                }
            })
        })
    }

    fn look_by(
        &mut self,
        chosen: Chosen,
        fill: &mut dyn FnMut(&Chosen, &mut Sums<'_>) -> std::io::Result<()>,
    ) -> Result<std::io::Result<Looked>, StateError> {
        if let Some(n) = self.by_id.get(&chosen.id)
            && self.kept[*n].is(&chosen)
        {
            self.seen.insert(chosen.id);
            self.kept[*n].path = chosen.path;
            return Ok(Ok(Looked::Unchanged));
        }
        self.sums
            .seek(SeekFrom::Start(self.next * 4))
            .map_err(|error| self.failed(error))?;
        let mut writer = Sums {
            out: BufWriter::with_capacity(1 << 16, &self.sums),
            blocks: 0,
            error: None,
        };
        if let Err(error) = fill(&chosen, &mut writer) {
            return Ok(Err(error));
        }
        let blocks = chosen.len.div_ceil(BLOCK_BYTES as u64);
        writer.zeros(blocks + 1);
        let written = writer.end();
        written.map_err(|error| self.failed(error))?;
        let after =
            std::fs::symlink_metadata(&chosen.path).map(|metadata| Chosen::new(&chosen.path, &metadata));
        if after.as_ref().ok() != Some(&chosen) {
            return Ok(Ok(Looked::Changing));
        }
        self.keep(chosen, blocks);
        if self.unsaved_bytes >= SAVE_BYTES {
            self.save()?;
        }
        Ok(Ok(Looked::Read))
    }

    fn keep(&mut self, chosen: Chosen, blocks: u64) {
        self.seen.insert(chosen.id);
        self.unsaved_bytes += chosen.len;
        self.by_id.insert(chosen.id, self.kept.len());
        self.kept.push(Kept {
            path: chosen.path,
            id: chosen.id,
            len: chosen.len,
            times: (chosen.mtime_ns, chosen.ctime_ns),
            at: self.next,
        });
        self.next += blocks + 1;
    }

    /// Makes the checksums read so far durable: an interrupted scan continues from here.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&mut self) -> Result<(), StateError> {
        self.unsaved_bytes = 0;
        self.sums.sync_data().map_err(|error| self.failed(error))?;
        let path = self.dir.join("index");
        crate::manifest::replace(&path, &encode(&self.kept)).map_err(|error| self.failed(error))
    }

    /// Ends a scan that has looked at every file: forgets the others and the outdated checksums, and saves.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(&mut self) -> Result<(), StateError> {
        let (seen, by_id) = (std::mem::take(&mut self.seen), std::mem::take(&mut self.by_id));
        let mut n = 0;
        self.kept.retain(|kept| {
            n += 1;
            seen.contains(&kept.id) && by_id.get(&kept.id) == Some(&(n - 1))
        });
        self.by_id = self
            .kept
            .iter()
            .enumerate()
            .map(|(n, kept)| (kept.id, n))
            .collect();
        self.save()
    }

    /// The files with kept checksums.
    pub fn files(&self) -> &[Kept] {
        &self.kept
    }

    /// Returns the checksums of the files that `picks` chooses, as a source of a search.
    pub fn only<P: Fn(&Kept) -> bool>(&mut self, picks: P) -> Picked<'_, P> {
        Picked { state: self, picks }
    }

    /// Returns the file that has the block at a position.
    pub fn file_at(&self, position: u64) -> Option<&Kept> {
        let after = self.kept.partition_point(|kept| kept.at <= position);
        self.kept.get(after.checked_sub(1)?)
    }

    /// Returns the location of the block at a position.
    pub fn place(&self, position: u64) -> Option<Place<'_>> {
        let kept = self.file_at(position)?;
        let offset_bytes = (position - kept.at) * BLOCK_BYTES as u64;
        Some(Place {
            path: &kept.path,
            offset_bytes,
            left_bytes: kept.len.checked_sub(offset_bytes).filter(|left| *left > 0)?,
        })
    }
}

/// Writes the checksums of a file.
struct Sums<'a> {
    out: BufWriter<&'a File>,
    blocks: u64,
    error: Option<std::io::Error>,
}

impl Sums<'_> {
    fn put(&mut self, sum: u32) {
        self.blocks += 1;
        if let Err(error) = self.out.write_all(&sum.to_le_bytes()) {
            self.error.get_or_insert(error);
        }
    }

    /// Writes zero blocks up to block `to`.
    fn zeros(&mut self, to: u64) {
        while self.blocks < to {
            self.put(ZERO_SUM);
        }
    }

    fn add(&mut self, at: u64, piece: &[u8]) {
        self.zeros(at / BLOCK_BYTES as u64);
        for block in piece.chunks(BLOCK_BYTES) {
            // The last block of a file is padded with zeros, as on a disk.
            let sum = match block.len() {
                BLOCK_BYTES => crc32c::crc32c(block),
                short => crc32c::crc32c_append(crc32c::crc32c(block), &[0; BLOCK_BYTES][short..]),
            };
            self.put(sum);
        }
    }

    fn end(mut self) -> std::io::Result<()> {
        self.out.flush()?;
        self.error.map_or(Ok(()), Err)
    }
}

/// The checksums of some files of a state.
#[derive(Debug)]
pub struct Picked<'s, P> {
    state: &'s mut State,
    picks: P,
}

impl<P: Fn(&Kept) -> bool> Checksums for Picked<'_, P> {
    fn blocks(&self) -> u64 {
        let picked = self.state.kept.iter().filter(|kept| (self.picks)(kept));
        picked.map(Kept::blocks).sum()
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
        self.state.scan_some(&self.picks, each)
    }
}

impl Checksums for State {
    fn blocks(&self) -> u64 {
        self.kept.iter().map(Kept::blocks).sum()
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
        self.scan_some(&|_| true, each)
    }
}

impl State {
    fn scan_some(
        &self,
        picks: &dyn Fn(&Kept) -> bool,
        each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>,
    ) -> std::io::Result<()> {
        let mut reader = BufReader::with_capacity(1 << 18, &self.sums);
        let mut here = 0;
        reader.seek(SeekFrom::Start(0))?;
        let mut sums = vec![0u32; 1 << 14];
        for kept in self.kept.iter().filter(|kept| picks(kept)) {
            reader.seek_relative((kept.at - here) as i64 * 4)?;
            here = kept.at;
            let end = kept.at + kept.blocks();
            while here < end {
                let now = ((end - here) as usize).min(sums.len());
                for sum in &mut sums[..now] {
                    let mut bytes = [0; 4];
                    reader.read_exact(&mut bytes)?;
                    *sum = u32::from_le_bytes(bytes);
                }
                let mut at = here;
                for data in sums[..now].chunk_by(|a, b| (*a == ZERO_SUM) == (*b == ZERO_SUM)) {
                    if data[0] != ZERO_SUM && each(at, data).is_break() {
                        return Ok(());
                    }
                    at += data.len() as u64;
                }
                here += now as u64;
            }
        }
        Ok(())
    }
}

fn encode(kept: &[Kept]) -> Vec<u8> {
    let body = postcard::to_allocvec(kept).expect("plain data");
    [&MAGIC[..], &crc32c::crc32c(&body).to_le_bytes(), &body].concat()
}

fn decode(bytes: &[u8]) -> Option<Vec<Kept>> {
    let (sum, body) = bytes.strip_prefix(MAGIC)?.split_at_checked(4)?;
    if crc32c::crc32c(body).to_le_bytes() != sum {
        return None;
    }
    let kept: Vec<Kept> = postcard::from_bytes(body).ok()?;
    kept.is_sorted_by(|a, b| a.at + a.blocks() < b.at).then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::super::walk::{Filter, walk};
    use super::*;
    use crate::candidates::{self, MIN_MEMORY_BYTES, SearchSettings};
    use crate::hash::mix;

    fn noise(seed: u64, bytes: usize) -> Vec<u8> {
        let words = (0..bytes as u64 / 8 + 1).flat_map(|n| mix(mix(seed) ^ n).to_le_bytes());
        words.take(bytes).collect()
    }

    fn scan(state: &mut State, dir: &Path) -> Vec<Looked> {
        let mut looked = Vec::new();
        let mut rate = ReadRate::new(None);
        walk(&[dir.to_owned()], &Filter::default(), &mut |chosen| {
            let file = state.look(chosen, &mut rate).expect("the state is written");
            looked.push(file.expect("the file is read"));
            true
        });
        state.finish().expect("saved");
        looked
    }

    fn duplicates(state: &mut State, spill: &Path) -> Vec<(PathBuf, u64, u64)> {
        let settings = SearchSettings {
            memory_bytes: MIN_MEMORY_BYTES,
            min_run_blocks: 2,
            spill_dir: spill.to_owned(),
        };
        let mut runs = Vec::new();
        let mut go = |_| ControlFlow::Continue(());
        candidates::find(state, &settings, &mut go, &mut |run| runs.push(run)).expect("found");
        let place = |run: &candidates::Run| {
            let place = state.place(run.at).expect("a place");
            (place.path.to_owned(), place.offset_bytes, run.blocks)
        };
        runs.iter().map(place).collect()
    }

    #[test]
    fn scan_reads_only_what_changed_and_finds_copies() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        std::fs::create_dir(&data).expect("made");
        let original = noise(1, 100_000);
        std::fs::write(data.join("a"), &original).expect("written");
        std::fs::write(data.join("b"), &original).expect("written");
        let sparse = File::create(data.join("c")).expect("made");
        sparse.set_len(1 << 20).expect("sparse");
        let mut state = State::open(&kept).expect("made");
        assert!(matches!(State::open(&kept), Err(StateError::InUse(_))));
        assert_eq!(scan(&mut state, &data), [Looked::Read; 3]);
        assert_eq!(duplicates(&mut state, dir.path()), [(data.join("b"), 0, 25)]);
        drop(state);

        let mut state = State::open(&kept).expect("opened");
        assert_eq!(scan(&mut state, &data), [Looked::Unchanged; 3]);
        std::fs::write(data.join("b"), noise(2, 50_000)).expect("written");
        std::fs::remove_file(data.join("a")).expect("removed");
        let mut copy = noise(3, 8192);
        copy.extend(noise(2, 50_000));
        std::fs::write(data.join("d"), copy).expect("written");
        assert_eq!(
            scan(&mut state, &data),
            [Looked::Read, Looked::Unchanged, Looked::Read]
        );
        assert_eq!(state.files().len(), 3);
        assert_eq!(duplicates(&mut state, dir.path()), [(data.join("d"), 8192, 13)]);
    }

    #[test]
    fn told_checksums_are_kept_as_read_ones_are() {
        let dir = tempfile::tempdir().expect("a directory");
        let data = dir.path().join("data");
        std::fs::create_dir(&data).expect("made");
        let mut bytes = noise(1, 100_000);
        bytes[20_480..36_864].fill(0);
        std::fs::write(data.join("a"), &bytes).expect("written");
        std::fs::write(data.join("b"), &bytes[8192..]).expect("written");
        let mut read = State::open(&dir.path().join("read")).expect("made");
        scan(&mut read, &data);
        let mut told = State::open(&dir.path().join("told")).expect("made");
        walk(std::slice::from_ref(&data), &Filter::default(), &mut |chosen| {
            let looked = told.look_told(chosen, &mut |chosen, each| {
                let mut bytes = std::fs::read(&chosen.path)?;
                bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
                // Without the zeros, and with a block more than the file has.
                for (at, block) in (0..).zip(bytes.chunks(BLOCK_BYTES)) {
                    if block.iter().any(|byte| *byte != 0) {
                        each(at, &[crc32c::crc32c(block)]);
                    }
                }
                each(bytes.len() as u64 / 4096, &[77]);
                Ok(())
            });
            assert_eq!(looked.expect("written").expect("told"), Looked::Read);
            true
        });
        told.finish().expect("saved");
        let sums = |name: &str| std::fs::read(dir.path().join(name).join("sums")).expect("read");
        assert!(sums("read") == sums("told"));
        assert_eq!(read.files(), told.files());
        // Who cannot tell leaves nothing behind.
        std::fs::write(data.join("c"), &bytes).expect("written");
        walk(std::slice::from_ref(&data), &Filter::default(), &mut |chosen| {
            let is_new = chosen.path.ends_with("c");
            let looked = told.look_told(chosen, &mut |_, _| Err(std::io::Error::other("not told")));
            assert_eq!(looked.expect("written").is_err(), is_new);
            true
        });
        told.finish().expect("saved");
        assert_eq!(read.files(), told.files());
    }

    #[test]
    fn state_that_was_cut_off_goes_on_from_what_was_saved() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        std::fs::create_dir(&data).expect("made");
        for name in ["a", "b"] {
            std::fs::write(data.join(name), noise(7, 40_000)).expect("written");
        }
        let mut state = State::open(&kept).expect("made");
        let mut first = true;
        walk(std::slice::from_ref(&data), &Filter::default(), &mut |chosen| {
            let looked = state.look(chosen, &mut ReadRate::new(None)).expect("written");
            assert_eq!(looked.expect("read"), Looked::Read);
            if std::mem::take(&mut first) {
                state.save().expect("saved");
            }
            true
        });
        // The second file was read but not saved.
        drop(state);
        let mut state = State::open(&kept).expect("opened");
        assert_eq!(scan(&mut state, &data), [Looked::Unchanged, Looked::Read]);
        assert_eq!(duplicates(&mut state, dir.path()), [(data.join("b"), 0, 10)]);
    }

    #[test]
    fn damaged_state_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let data = dir.path().join("data");
        std::fs::create_dir(&data).expect("made");
        std::fs::write(data.join("a"), noise(1, 9000)).expect("written");
        let kept = dir.path().join("state");
        scan(&mut State::open(&kept).expect("made"), &data);
        let index = std::fs::read(kept.join("index")).expect("read");
        for at in 0..index.len() {
            let mut bad = index.clone();
            bad[at] ^= 4;
            std::fs::write(kept.join("index"), &bad).expect("written");
            assert!(
                matches!(State::open(&kept), Err(StateError::Damaged(_))),
                "byte {at}"
            );
        }
        std::fs::write(kept.join("index"), &index).expect("written");
        File::options()
            .write(true)
            .open(kept.join("sums"))
            .expect("opened")
            .set_len(3)
            .expect("cut");
        assert!(matches!(State::open(&kept), Err(StateError::Damaged(_))));
    }

    #[test]
    fn sum_of_a_zero_block_is_known() {
        assert_eq!(crc32c::crc32c(&[0; BLOCK_BYTES]), ZERO_SUM);
    }
}
