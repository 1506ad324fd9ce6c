//! The blocks of a region whose checksums were found right, one bit each, in memory that a daemon shares with
//! the sessions it trusts. Soft state: on no medium, and empty at each start of the daemon. Knows no
//! checksums, and no reason why a block is compared.

use crate::traits::Region;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a block. Where [`forget_absent`](Verified::forget_absent) has an effect, a page of memory has
/// this size too.
const BLOCK_BYTES: u64 = 4096;
/// Blocks of a word.
const WORD: u64 = u64::BITS as u64;
/// Blocks whose residency is asked for at once.
const ASKED: u64 = 512;

enum Words {
    Heap(Box<[AtomicU64]>),
    Mapped {
        base: NonNull<AtomicU64>,
        words: usize,
        /// Descriptor to pass to other processes; `None` in a process that received it.
        file: Option<OwnedFd>,
    },
}

/// A bit for each block that is trusted without comparing its checksum.
///
/// Relaxed throughout: a bit orders no other memory. A reader that sees it loads the compared bytes, or later
/// ones from the daemon; ordering between a block's write and its read is not established here.
pub struct Verified {
    words: Words,
}

// SAFETY: the mapping belongs to this value alone, lives until its drop, and is only reached through atomics.
unsafe impl Send for Verified {}
// SAFETY: as above; shared references reach it through atomics only.
unsafe impl Sync for Verified {}

/// Bits `from..to` of a word.
const fn mask(from: u64, to: u64) -> u64 {
    (u64::MAX >> (WORD - (to - from))) << from
}

impl Verified {
    /// Makes bits for `blocks` blocks, for this process alone.
    #[must_use]
    pub fn heap(blocks: u64) -> Self {
        let words = (0..blocks.div_ceil(WORD)).map(|_| AtomicU64::new(0));
        Self {
            words: Words::Heap(words.collect()),
        }
    }

    /// Makes bits in memory that other processes can map. Memory is allocated as bits are set.
    ///
    /// # Errors
    /// Errors of the host, which may not support such files.
    pub fn shared(blocks: u64) -> io::Result<Self> {
        let bytes = blocks.div_ceil(WORD).max(1) * size_of::<AtomicU64>() as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("varve-verified", flags)?;
        rustix::fs::ftruncate(&file, bytes)?;
        // A process that has the descriptor must not shorten it under the others.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let mut made = Self::map(&file)?;
        if let Words::Mapped { file: kept, .. } = &mut made.words {
            *kept = Some(file);
        }
        Ok(made)
    }

    /// Maps a descriptor from [`descriptor`](Self::descriptor).
    ///
    /// # Errors
    /// Errors of mapping; `InvalidData` if the file could become shorter.
    pub fn from_descriptor(file: OwnedFd) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not sealed"));
        }
        Self::map(&file)
    }

    fn map(file: &OwnedFd) -> io::Result<Self> {
        let words = rustix::fs::fstat(file)?.st_size as usize / size_of::<AtomicU64>();
        let (bytes, prot) = (words * size_of::<AtomicU64>(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses the address, so nothing that is mapped already is touched; the result is
        // owned by the value built below, and the file is sealed against shrinking.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                prot,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            words: Words::Mapped {
                base,
                words,
                file: None,
            },
        })
    }

    /// Returns a descriptor for another process to share these bits; `None` where they are private to one
    /// process, or were received from another.
    ///
    /// # Errors
    /// Too many open files.
    pub fn descriptor(&self) -> io::Result<Option<OwnedFd>> {
        match &self.words {
            Words::Heap(_) => Ok(None),
            Words::Mapped { file, .. } => file.as_ref().map(OwnedFd::try_clone).transpose(),
        }
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        match &self.words {
            Words::Heap(words) => words,
            // SAFETY: `words` words are mapped at `base`, page-aligned, until drop; any bit pattern is valid
            // for atomics, and concurrent change by another process is defined.
            Words::Mapped { base, words, .. } => unsafe { std::slice::from_raw_parts(base.as_ptr(), *words) },
        }
    }

    /// Whether each block of `first..end` is trusted.
    #[inline]
    #[must_use]
    pub fn has(&self, first: u64, end: u64) -> bool {
        let words = self.words();
        let mut at = first;
        while at < end {
            let stop = end.min((at / WORD + 1) * WORD);
            let mask = mask(at % WORD, at % WORD + (stop - at));
            let word = words.get((at / WORD) as usize);
            if word.is_none_or(|word| word.load(Ordering::Relaxed) & mask != mask) {
                return false;
            }
            at = stop;
        }
        true
    }

    /// Notes that a block had its checksum. The bit stays right when the block is reused: while the daemon
    /// lives, only the daemon writes to it.
    #[inline]
    pub fn note(&self, block: u64) {
        if let Some(word) = self.words().get((block / WORD) as usize) {
            word.fetch_or(1 << (block % WORD), Ordering::Relaxed);
        }
    }

    /// Has a block compared at its next read.
    pub fn forget(&self, block: u64) {
        if let Some(word) = self.words().get((block / WORD) as usize) {
            word.fetch_and(!(1 << (block % WORD)), Ordering::Relaxed);
        }
    }

    /// Number of trusted blocks.
    #[must_use]
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words().iter().map(ones).sum()
    }

    /// Forgets those of the `blocks` blocks from `from` on that are not in the host's memory: their next read
    /// comes from the disk. Does nothing where residency is not known. Returns the block to continue at,
    /// wrapping to 0 behind the end.
    pub fn forget_absent(&self, region: &dyn Region, from: u64, blocks: u64) -> u64 {
        let all = (region.len_bytes() / BLOCK_BYTES).min(self.words().len() as u64 * WORD);
        let end = from.saturating_add(blocks).min(all);
        let mut pages = [0; ASKED as usize];
        let mut at = from / WORD * WORD;
        while at < end {
            let stop = (at + ASKED).min(all);
            let words = &self.words()[(at / WORD) as usize..stop.div_ceil(WORD) as usize];
            // Mostly none of the blocks is trusted, and the residency query has a cost.
            if words.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
                let pages = &mut pages[..(stop - at) as usize];
                if !region.residency(at * BLOCK_BYTES, pages) {
                    return 0;
                }
                for (word, pages) in words.iter().zip(pages.chunks(WORD as usize)) {
                    let bits = (0..).zip(pages);
                    let absent = bits.fold(0, |mask, (bit, page)| mask | u64::from(page & 1 == 0) << bit);
                    if absent & word.load(Ordering::Relaxed) != 0 {
                        word.fetch_and(!absent, Ordering::Relaxed);
                    }
                }
            }
            at = stop;
        }
        if at < all { at } else { 0 }
    }
}

impl Drop for Verified {
    fn drop(&mut self) {
        if let Words::Mapped { base, words, .. } = &self.words {
            // SAFETY: exactly the range that `from_descriptor` mapped; nothing refers to it once its owner is
            // gone.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), words * size_of::<AtomicU64>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{BLOCK_BYTES, Verified};
    use crate::{Backing, MappedOptions, MappedRegion, Region};
    use std::sync::Arc;

    #[test]
    fn run_is_believed_when_each_of_its_blocks_was_noted() {
        for bits in [Verified::heap(200), Verified::shared(200).unwrap()] {
            for block in 60..140 {
                assert!(!bits.has(60, 140));
                bits.note(block);
            }
            assert!(bits.has(60, 140) && bits.has(64, 128) && bits.has(139, 140) && bits.has(7, 7));
            assert!(!bits.has(59, 61) && !bits.has(139, 141));
            bits.forget(100);
            assert!(!bits.has(60, 140) && bits.has(101, 140));
            assert_eq!(bits.count(), 79);
            // Blocks past the end are not trusted, and calls for them have no effect.
            bits.note(1_000_000);
            bits.forget(u64::MAX / 2);
            assert!(!bits.has(1_000_000, 1_000_001));
        }
    }

    #[test]
    fn bits_are_shared_with_whoever_maps_the_descriptor() {
        let ours = Verified::shared(1000).unwrap();
        let fd = ours.descriptor().unwrap().unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "it cannot be shortened");
        let theirs = Verified::from_descriptor(fd).unwrap();
        theirs.note(999);
        assert!(ours.has(999, 1000));
        ours.forget(999);
        assert!(!theirs.has(999, 1000));
        assert!(Verified::heap(1000).descriptor().unwrap().is_none());
        let unsealed = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(Verified::from_descriptor(unsealed).is_err());
    }

    #[test]
    fn no_bit_is_lost_when_threads_note_blocks_of_one_word() {
        let bits = Arc::new(Verified::heap(6400));
        std::thread::scope(|scope| {
            for part in 0..4 {
                let bits = Arc::clone(&bits);
                scope.spawn(move || (part..6400).step_by(4).for_each(|block| bits.note(block)));
            }
        });
        assert!(bits.has(0, 6400));
    }

    #[test]
    fn what_left_memory_is_forgotten_and_nothing_else() {
        // tmpfs has nothing to read back.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let options = MappedOptions {
            backing: Backing::File,
            len_bytes: 1100 * BLOCK_BYTES,
            max_bytes: 1100 * BLOCK_BYTES,
            sparse: false,
        };
        let region = MappedRegion::create(&dir.path().join("nvm"), options).unwrap();
        for block in 0..1100 {
            let at = block * BLOCK_BYTES;
            region.write(at, &[7; BLOCK_BYTES as usize]).unwrap();
        }
        region.sync(0, region.len_bytes()).unwrap();
        let bits = Verified::heap(1100);
        (0..1100)
            .filter(|block| block % 3 > 0)
            .for_each(|block| bits.note(block));
        let before = bits.count();
        assert_eq!(
            bits.forget_absent(&region, 0, 600),
            1024,
            "in steps, from where it was left"
        );
        assert_eq!(
            bits.forget_absent(&region, 1024, 600),
            0,
            "and from the beginning again"
        );
        assert_eq!(bits.count(), before, "all of it is in memory");
        let advice = rustix::fs::Advice::DontNeed;
        let gone = std::num::NonZero::new(200 * BLOCK_BYTES);
        rustix::fs::fadvise(region.file(), 640 * BLOCK_BYTES, gone, advice).unwrap();
        let mut pages = [0; 1100];
        assert!(region.residency(0, &mut pages));
        if pages.iter().all(|page| page & 1 == 1) {
            eprintln!("SKIPPED: this file system drops no pages when it is asked to");
            return;
        }
        bits.forget_absent(&region, 0, 1100);
        for (block, page) in (0..).zip(pages) {
            assert_eq!(
                bits.has(block, block + 1),
                block % 3 > 0 && page & 1 == 1,
                "{block}"
            );
        }
        assert!(bits.count() < before && bits.has(1, 2));
    }
}
