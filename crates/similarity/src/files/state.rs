//! Checksums of files, kept between scans: a scan reads only new and changed files, and an interrupted scan
//! continues.
//!
//! The state's directory has `sums` (a word of 4 bytes, little-endian, for each block of 4 KiB, but for long
//! stretches of zeros; the files one after another) and `index` (magic `VARVSUM2`, CRC-32C, then the places
//! and the CRC-32C of each file's words, by postcard). The sums are durable before the index that refers to
//! them; sums behind the indexed ones are truncated at the next start. A state of an older form is thrown
//! away.

use super::index::{self, Index, Kept};
use super::read::{ReadRate, open, pieces};
use super::sums::{Reader, WORD_BYTES, Writer};
use super::walk::Chosen;
use crate::candidates::Checksums;
use crate::hash::BLOCK_BYTES;
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Bytes read after which the index is written.
const SAVE_BYTES: u64 = 4 << 30;
/// Forgotten words in a row whose space is given back: two blocks of a file system, of which one is whole.
const RELEASED_BYTES: u64 = 8192;

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
    /// The directory is not a state, and has something else in it.
    #[error(
        "{dir} is not a state of a scan, and is not empty; nothing was changed. Name a directory that is empty \
        or not there yet",
        dir = .0.display()
    )]
    NotState(PathBuf),
    /// It is damaged.
    #[error(
        "the state in {dir} is damaged; remove the files `index` and `sums` in it, and scan again",
        dir = .0.display()
    )]
    Damaged(PathBuf),
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
    /// The next free place.
    next: u64,
    unsaved_bytes: u64,
    was_old: bool,
    /// The scan has ended; what is looked at next is of another one.
    is_finished: bool,
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
    /// If the directory is something else, in use, damaged, or cannot be read or written.
    pub fn open(dir: &Path) -> Result<Self, StateError> {
        let failed = |error| StateError::Io {
            dir: dir.to_owned(),
            error,
        };
        std::fs::create_dir_all(dir).map_err(failed)?;
        if !index::is_own(dir).map_err(failed)? {
            return Err(StateError::NotState(dir.to_owned()));
        }
        let options = || {
            let mut options = index::options();
            options.write(true).create(true).truncate(false);
            options
        };
        let lock = options().open(dir.join(index::LOCK)).map_err(failed)?;
        lock.try_lock().map_err(|_| StateError::InUse(dir.to_owned()))?;
        let (kept, was_old) = match index::open(dir)? {
            Index::Files(kept) => (kept, false),
            Index::New => (Vec::new(), false),
            Index::Old => (Vec::new(), true),
        };
        if kept.is_empty() {
            // From here on the directory is known as a state.
            index::write(dir, &kept).map_err(failed)?;
        }
        let next = kept.last().map_or(0, Kept::next);
        let sums = options().open(dir.join("sums")).map_err(failed)?;
        let found = sums.metadata().map_err(failed)?;
        if !found.is_file() || found.len() < next * WORD_BYTES {
            return Err(StateError::Damaged(dir.to_owned()));
        }
        sums.set_len(next * WORD_BYTES).map_err(failed)?;
        let by_id = kept.iter().enumerate().map(|(n, kept)| (kept.id(), n)).collect();
        Ok(Self {
            dir: dir.to_owned(),
            sums,
            lock,
            kept,
            by_id,
            next,
            unsaved_bytes: 0,
            was_old,
            is_finished: false,
        })
    }

    /// Whether it was of an older form, and has been thrown away: all files are read anew.
    pub const fn was_old(&self) -> bool {
        self.was_old
    }

    /// Makes a file without a name in the state's directory.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn temporary(&self) -> std::io::Result<File> {
        tempfile::tempfile_in(&self.dir)
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
        fill: &mut dyn FnMut(&Chosen, &mut Writer<'_>) -> std::io::Result<()>,
    ) -> Result<std::io::Result<Looked>, StateError> {
        if std::mem::take(&mut self.is_finished) {
            self.kept.iter_mut().for_each(|kept| kept.is_current = false);
        }
        if let Some(n) = self.by_id.get(&chosen.id)
            && self.kept[*n].is(&chosen)
        {
            self.kept[*n].is_current = true;
            self.kept[*n].path = chosen.path;
            return Ok(Ok(Looked::Unchanged));
        }
        let mut writer = Writer::new(&self.sums, self.next).map_err(|error| self.failed(error))?;
        if let Err(error) = fill(&chosen, &mut writer) {
            return Ok(Err(error));
        }
        let words = writer.end().map_err(|error| self.failed(error))?;
        let after =
            std::fs::symlink_metadata(&chosen.path).map(|metadata| Chosen::new(&chosen.path, &metadata));
        if after.as_ref().ok() != Some(&chosen) {
            return Ok(Ok(Looked::Changing));
        }
        self.keep(Kept::new(chosen, self.next, words));
        if self.unsaved_bytes >= SAVE_BYTES {
            self.save()?;
        }
        Ok(Ok(Looked::Read))
    }

    fn keep(&mut self, kept: Kept) {
        self.unsaved_bytes += kept.words.data_blocks * BLOCK_BYTES as u64;
        if let Some(old) = self.by_id.insert(kept.id(), self.kept.len()) {
            self.kept[old].is_current = false;
        }
        self.next = kept.next();
        self.kept.push(kept);
    }

    /// Makes the checksums read so far durable: an interrupted scan continues from here.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&mut self) -> Result<(), StateError> {
        self.unsaved_bytes = 0;
        self.sums.sync_data().map_err(|error| self.failed(error))?;
        index::write(&self.dir, &self.kept).map_err(|error| self.failed(error))
    }

    /// Ends a scan: forgets the files that it has not looked at, but for those that it may have missed, by
    /// their path, and outdated checksums; and saves.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(&mut self, missed: &dyn Fn(&Path) -> bool) -> Result<(), StateError> {
        self.is_finished = true;
        let by_id = std::mem::take(&mut self.by_id);
        let mut n = 0;
        self.kept.retain(|kept| {
            n += 1;
            by_id.get(&kept.id()) == Some(&(n - 1)) && (kept.is_current || missed(&kept.path))
        });
        self.by_id = self
            .kept
            .iter()
            .enumerate()
            .map(|(n, kept)| (kept.id(), n))
            .collect();
        self.save()?;
        self.release();
        Ok(())
    }

    /// Gives the space of forgotten words back, where the file system can; no index refers to them any more.
    fn release(&self) {
        let mut free = 0;
        for kept in &self.kept {
            let (from, len) = (free * WORD_BYTES, (kept.at - free) * WORD_BYTES);
            if len >= RELEASED_BYTES {
                // What stays is of no use, and does no harm.
                let _ = fallocate(
                    &self.sums,
                    FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                    from,
                    len,
                );
            }
            free = kept.next();
        }
    }

    /// The files that this scan has looked at.
    pub fn files(&self) -> impl Iterator<Item = &Kept> {
        self.kept.iter().filter(|kept| kept.is_current)
    }

    /// Returns the checksums of the files that `picks` chooses of those looked at, as a source of a search.
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
        let offset_bytes = kept.words.block_at(position)? * BLOCK_BYTES as u64;
        Some(Place {
            path: &kept.path,
            offset_bytes,
            left_bytes: kept.len.checked_sub(offset_bytes).filter(|left| *left > 0)?,
        })
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
        self.state.blocks_of(&self.picks)
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
        self.state.scan_some(&self.picks, each)
    }
}

impl Checksums for State {
    fn blocks(&self) -> u64 {
        self.blocks_of(&|_| true)
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
        self.scan_some(&|_| true, each)
    }
}

impl State {
    fn blocks_of(&self, picks: &dyn Fn(&Kept) -> bool) -> u64 {
        let picked = self.files().filter(|kept| picks(kept));
        picked.map(|kept| kept.words.data_blocks).sum()
    }

    fn scan_some(
        &self,
        picks: &dyn Fn(&Kept) -> bool,
        each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>,
    ) -> std::io::Result<()> {
        let mut reader = Reader::new(&self.sums)?;
        for kept in self.files().filter(|kept| picks(kept)) {
            match reader.words(&kept.words, each)? {
                ControlFlow::Break(()) => break,
                ControlFlow::Continue(true) => {}
                ControlFlow::Continue(false) => {
                    let damaged = StateError::Damaged(self.dir.clone());
                    return Err(Error::new(ErrorKind::InvalidData, damaged));
                }
            }
        }
        Ok(())
    }
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
        state.finish(&|_| false).expect("saved");
        looked
    }

    fn find(
        state: &mut State,
        spill: &Path,
        tell: &mut dyn FnMut(candidates::Run),
    ) -> Result<candidates::SearchOutcome, candidates::FindError> {
        let settings = SearchSettings {
            memory_bytes: MIN_MEMORY_BYTES,
            min_run_blocks: 2,
            spill_dir: spill.to_owned(),
        };
        candidates::find(state, &settings, &mut |_| ControlFlow::Continue(()), tell)
    }

    fn duplicates(state: &mut State, spill: &Path) -> Vec<(PathBuf, u64, u64)> {
        let mut runs = Vec::new();
        find(state, spill, &mut |run| runs.push(run)).expect("found");
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
        assert_eq!(state.files().count(), 3);
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
        told.finish(&|_| false).expect("saved");
        let sums = |name: &str| std::fs::read(dir.path().join(name).join("sums")).expect("read");
        assert!(sums("read") == sums("told"));
        assert!(read.files().eq(told.files()));
        // Who cannot tell leaves nothing behind.
        std::fs::write(data.join("c"), &bytes).expect("written");
        walk(std::slice::from_ref(&data), &Filter::default(), &mut |chosen| {
            let is_new = chosen.path.ends_with("c");
            let looked = told.look_told(chosen, &mut |_, _| Err(std::io::Error::other("not told")));
            assert_eq!(looked.expect("written").is_err(), is_new);
            true
        });
        told.finish(&|_| false).expect("saved");
        assert!(read.files().eq(told.files()));
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
            let opened = State::open(&kept);
            match at {
                0..8 => assert!(matches!(opened, Err(StateError::NotState(_))), "byte {at}"),
                _ => assert!(matches!(opened, Err(StateError::Damaged(_))), "byte {at}"),
            }
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
    fn damaged_checksums_are_told_and_not_searched() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        std::fs::create_dir(&data).expect("made");
        for name in ["a", "b"] {
            std::fs::write(data.join(name), noise(1, 100_000)).expect("written");
        }
        scan(&mut State::open(&kept).expect("made"), &data);
        let sums = std::fs::read(kept.join("sums")).expect("read");
        for at in [0, 50, 99, sums.len() / 2 + 9, sums.len() - 5] {
            let mut bad = sums.clone();
            bad[at] ^= 4;
            std::fs::write(kept.join("sums"), &bad).expect("written");
            let mut state = State::open(&kept).expect("opened");
            scan(&mut state, &data);
            let error = find(&mut state, dir.path(), &mut |_| ()).expect_err("damaged");
            assert!(
                error.to_string().contains("is damaged; remove"),
                "byte {at}: {error}"
            );
        }
        std::fs::write(kept.join("sums"), &sums).expect("written");
        let mut state = State::open(&kept).expect("opened");
        scan(&mut state, &data);
        assert_eq!(duplicates(&mut state, dir.path()), [(data.join("b"), 0, 25)]);
    }

    #[test]
    fn names_need_not_be_utf8() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        std::fs::create_dir(&data).expect("made");
        let name = data.join(std::ffi::OsStr::from_bytes(b"no \xff\xfe text"));
        std::fs::write(&name, noise(1, 9000)).expect("written");
        std::fs::write(data.join("a"), noise(1, 9000)).expect("written");
        scan(&mut State::open(&kept).expect("made"), &data);
        let mut state = State::open(&kept).expect("opened");
        assert_eq!(scan(&mut state, &data), [Looked::Unchanged; 2]);
        assert_eq!(duplicates(&mut state, dir.path()), [(name, 0, 3)]);
    }

    #[test]
    fn holes_and_zeros_cost_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        std::fs::create_dir(&data).expect("made");
        let same = noise(1, 40_960);
        let far = 3 << 40;
        // Before all others, between them, and behind.
        for (name, len) in [("a", 8 << 40), ("c", 8 << 40), ("d", 1 << 40)] {
            let sparse = File::create(data.join(name)).expect("made");
            sparse.set_len(len).expect("sparse");
            if name == "c" {
                std::os::unix::fs::FileExt::write_all_at(&sparse, &same, far).expect("written");
            }
        }
        std::fs::write(data.join("b"), [&same[..], &[0; 8 << 20], &same].concat()).expect("written");
        let mut state = State::open(&kept).expect("made");
        assert_eq!(scan(&mut state, &data), [Looked::Read; 4]);
        assert_eq!(state.blocks(), 30);
        let found = duplicates(&mut state, dir.path());
        assert_eq!(
            found,
            [
                (data.join("b"), 40_960 + (8 << 20), 10),
                (data.join("c"), far, 10)
            ]
        );
        let last = state.kept[2].words.stretches[0].at;
        let place = state.place(last + 9).expect("a place");
        assert_eq!(
            (place.offset_bytes, place.left_bytes),
            (far + 9 * 4096, (5 << 40) - 9 * 4096)
        );
        assert!(state.place(last + 10).is_none() && state.place(last - 1).is_none());
        for name in ["sums", "index"] {
            let bytes = std::fs::metadata(kept.join(name)).expect("there").len();
            assert!(bytes < 2000, "{name}: {bytes}");
        }
        drop(state);
        let mut state = State::open(&kept).expect("opened");
        assert_eq!(scan(&mut state, &data), [Looked::Unchanged; 4]);
        assert_eq!(duplicates(&mut state, dir.path()), found);
    }

    #[test]
    fn forgotten_words_take_no_space() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        std::fs::create_dir(&data).expect("made");
        std::fs::write(data.join("a"), noise(1, 9000)).expect("written");
        let mut taken = Vec::new();
        for n in 0..4 {
            std::fs::write(data.join("b"), noise(n, 40 << 20)).expect("written");
            scan(&mut State::open(&kept).expect("opened"), &data);
            taken.push(std::fs::metadata(kept.join("sums")).expect("there").blocks() * 512);
        }
        assert!(taken[3] < 2 * taken[0], "{taken:?}");
        std::fs::write(data.join("c"), noise(3, 40 << 20)).expect("written");
        let mut state = State::open(&kept).expect("opened");
        scan(&mut state, &data);
        assert_eq!(duplicates(&mut state, dir.path()), [(data.join("c"), 0, 10_240)]);
    }

    #[test]
    fn directory_that_is_no_state_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let there = || std::fs::read_dir(dir.path()).expect("listed").count();
        let mine = dir.path().join("sums");
        std::fs::write(&mine, "mine").expect("written");
        assert!(matches!(State::open(dir.path()), Err(StateError::NotState(_))));
        std::fs::write(dir.path().join("index"), "also mine").expect("written");
        assert!(matches!(State::open(dir.path()), Err(StateError::NotState(_))));
        assert_eq!(
            (std::fs::read(&mine).expect("read"), there()),
            (b"mine".to_vec(), 2)
        );
        // In a state, a link that leads elsewhere.
        let state = dir.path().join("state");
        drop(State::open(&state).expect("made"));
        for name in ["sums", "lock", "index"] {
            let saved = dir.path().join("saved");
            std::fs::rename(state.join(name), &saved).expect("moved");
            std::os::unix::fs::symlink(&mine, state.join(name)).expect("linked");
            assert!(State::open(&state).is_err(), "{name}");
            assert_eq!(std::fs::read(&mine).expect("read"), b"mine");
            std::fs::rename(&saved, state.join(name)).expect("moved back");
        }
        // What is left of a start that ended before the first index.
        std::fs::remove_file(state.join("index")).expect("removed");
        std::fs::remove_file(state.join("sums")).expect("removed");
        assert!(State::open(&state).is_ok());
        std::fs::remove_file(state.join("index")).expect("removed");
        std::fs::write(state.join("sums"), "xxxx").expect("written");
        assert!(matches!(State::open(&state), Err(StateError::NotState(_))));
        std::fs::remove_file(state.join("sums")).expect("removed");
        std::fs::write(state.join("index.7.new"), "x").expect("written");
        assert!(State::open(&state).is_ok());
    }

    #[test]
    fn state_of_the_older_form_is_read_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        for dir in [&data, &kept] {
            std::fs::create_dir(dir).expect("made");
        }
        std::fs::write(data.join("a"), noise(1, 9000)).expect("written");
        let body = b"whatever it was";
        let old = [b"VARVSUMS", &crc32c::crc32c(body).to_le_bytes()[..], body].concat();
        std::fs::write(kept.join("index"), &old).expect("written");
        std::fs::write(kept.join("sums"), [7; 4000]).expect("written");
        let mut state = State::open(&kept).expect("opened");
        assert!(state.was_old());
        assert_eq!(scan(&mut state, &data), [Looked::Read]);
        drop(state);
        assert!(!State::open(&kept).expect("opened").was_old());
        std::fs::write(kept.join("index"), &old[..old.len() - 1]).expect("written");
        assert!(matches!(State::open(&kept), Err(StateError::Damaged(_))));
    }

    #[test]
    fn what_may_have_been_missed_is_kept_and_not_searched() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, kept) = (dir.path().join("data"), dir.path().join("state"));
        for name in ["x", "y"] {
            std::fs::create_dir_all(data.join(name)).expect("made");
            std::fs::write(data.join(name).join("a"), noise(1, 9000)).expect("written");
        }
        let mut state = State::open(&kept).expect("made");
        scan(&mut state, &data);
        drop(state);
        let mut state = State::open(&kept).expect("opened");
        assert_eq!((state.files().count(), state.blocks()), (0, 0));
        state
            .finish(&|path| path.starts_with(data.join("y")))
            .expect("saved");
        assert_eq!(duplicates(&mut state, dir.path()), []);
        assert_eq!(scan(&mut state, &data), [Looked::Read, Looked::Unchanged]);
    }
}
