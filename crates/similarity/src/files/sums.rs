//! The words of a state: a CRC-32C for each block of a file, XOR that of zeros, so that a block of zeros is a
//! zero word. Long stretches of zero blocks have no words: what a file takes follows its data, not its
//! length. Knows no paths.

use crate::hash::BLOCK_BYTES;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufReader, BufWriter, Error, Read, Result, Seek, SeekFrom, Write};
use std::ops::ControlFlow;

/// CRC-32C of 4 KiB of zeros.
const ZERO_SUM: u32 = 0x98f9_4189;
/// Zero blocks in a row that end a stretch: fewer are kept as zero words, 1 KiB at most.
const GAP_BLOCKS: u64 = 256;
pub(super) const WORD_BYTES: u64 = 4;

/// Blocks of a file whose words lie one after another. The first and the last have data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stretch {
    /// Number of the first block in its file.
    pub block: u64,
    /// Place of the first word.
    pub at: u64,
    pub blocks: u64,
}

impl Stretch {
    /// The place after the last word, which stays unused: blocks of two stretches are no neighbours.
    pub const fn end(&self) -> u64 {
        self.at + self.blocks
    }

    const fn end_block(&self) -> u64 {
        self.block + self.blocks
    }
}

/// The words of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Words {
    pub stretches: Vec<Stretch>,
    /// Blocks with data.
    pub data_blocks: u64,
    /// CRC-32C of all words.
    sum: u32,
}

impl Words {
    /// The next free place, if the file's first was at `at`.
    pub fn next(&self, at: u64) -> u64 {
        self.stretches.last().map_or(at, |last| last.end() + 1)
    }

    /// Whether they may be those of a file of `blocks` blocks whose first place is `at`.
    pub fn is_sound(&self, at: u64, blocks: u64) -> bool {
        let (mut free, mut next_block) = (at, 0);
        for stretch in &self.stretches {
            let ends = stretch.at.checked_add(stretch.blocks);
            let end_block = stretch.block.checked_add(stretch.blocks);
            let (Some(end), Some(end_block)) = (ends.and_then(|end| end.checked_add(1)), end_block) else {
                return false;
            };
            if stretch.blocks == 0 || stretch.at != free || stretch.block < next_block || end_block > blocks {
                return false;
            }
            (free, next_block) = (end, end_block);
        }
        true
    }

    /// The number of the block whose word is at a place.
    pub fn block_at(&self, place: u64) -> Option<u64> {
        let after = self.stretches.partition_point(|stretch| stretch.at <= place);
        let stretch = self.stretches.get(after.checked_sub(1)?)?;
        (place < stretch.end()).then(|| stretch.block + (place - stretch.at))
    }
}

/// Writes the words of one file.
pub(super) struct Writer<'a> {
    out: BufWriter<&'a File>,
    at: u64,
    words: Words,
    /// Blocks so far.
    blocks: u64,
    error: Option<Error>,
}

impl<'a> Writer<'a> {
    /// Begins at a place.
    pub fn new(mut sums: &'a File, at: u64) -> Result<Self> {
        sums.seek(SeekFrom::Start(at * WORD_BYTES))?;
        Ok(Self {
            out: BufWriter::with_capacity(1 << 16, sums),
            at,
            words: Words::default(),
            blocks: 0,
            error: None,
        })
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Err(error) = self.out.write_all(bytes) {
            self.error.get_or_insert(error);
        }
    }

    /// Adds the checksum of the next block.
    pub fn put(&mut self, sum: u32) {
        let (block, word) = (self.blocks, sum ^ ZERO_SUM);
        self.blocks += 1;
        if word == 0 {
            return;
        }
        let (bytes, zeros) = (word.to_le_bytes(), [0; (GAP_BLOCKS * WORD_BYTES) as usize]);
        self.words.data_blocks += 1;
        match self.words.stretches.last_mut() {
            Some(last) if block - last.end_block() < GAP_BLOCKS => {
                let gap = block - last.end_block();
                last.blocks += gap + 1;
                let zeros = &zeros[..(gap * WORD_BYTES) as usize];
                self.words.sum = crc32c::crc32c_append(self.words.sum, zeros);
                self.write(zeros);
            }
            last => {
                let at = last.map_or(self.at, |last| last.end() + 1);
                let is_first = at == self.at;
                self.words.stretches.push(Stretch { block, at, blocks: 1 });
                if !is_first {
                    self.write(&[0; WORD_BYTES as usize]);
                }
            }
        }
        self.words.sum = crc32c::crc32c_append(self.words.sum, &bytes);
        self.write(&bytes);
    }

    /// Adds zero blocks up to block `to`.
    pub fn zeros(&mut self, to: u64) {
        self.blocks = self.blocks.max(to);
    }

    /// Adds the blocks of a piece of the file, aligned to blocks, after zeros.
    pub fn add(&mut self, offset_bytes: u64, piece: &[u8]) {
        self.zeros(offset_bytes / BLOCK_BYTES as u64);
        for block in piece.chunks(BLOCK_BYTES) {
            // The last block of a file is padded with zeros, as on a disk.
            let sum = match block.len() {
                BLOCK_BYTES => crc32c::crc32c(block),
                short => crc32c::crc32c_append(crc32c::crc32c(block), &[0; BLOCK_BYTES][short..]),
            };
            self.put(sum);
        }
    }

    /// Ends the file.
    pub fn end(mut self) -> Result<Words> {
        if !self.words.stretches.is_empty() {
            self.write(&[0; WORD_BYTES as usize]);
        }
        self.out.flush()?;
        self.error.map_or(Ok(self.words), Err)
    }
}

/// Reads the words of files, in the order of their places.
pub(super) struct Reader<'a> {
    from: BufReader<&'a File>,
    here: u64,
    bytes: Vec<u8>,
    sums: Vec<u32>,
}

impl<'a> Reader<'a> {
    pub fn new(mut sums: &'a File) -> Result<Self> {
        sums.seek(SeekFrom::Start(0))?;
        Ok(Self {
            from: BufReader::with_capacity(1 << 18, sums),
            here: 0,
            bytes: vec![0; 1 << 16],
            sums: Vec::with_capacity(1 << 14),
        })
    }

    /// Calls `each` with the place and the checksums of successive blocks with data, until it breaks. Returns
    /// whether the words are the ones that were written, as far as they were read.
    pub fn words(
        &mut self,
        words: &Words,
        each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>,
    ) -> Result<ControlFlow<(), bool>> {
        let mut sum = 0;
        for stretch in &words.stretches {
            self.from
                .seek_relative((stretch.at as i64 - self.here as i64) * WORD_BYTES as i64)?;
            self.here = stretch.at;
            while self.here < stretch.end() {
                let most = self.bytes.len() as u64 / WORD_BYTES;
                let now = (stretch.end() - self.here).min(most);
                let bytes = &mut self.bytes[..(now * WORD_BYTES) as usize];
                self.from.read_exact(bytes)?;
                sum = crc32c::crc32c_append(sum, bytes);
                let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) ^ ZERO_SUM;
                self.sums.clear();
                self.sums.extend(bytes.as_chunks::<4>().0.iter().map(word));
                let mut at = self.here;
                self.here += now;
                for data in self.sums.chunk_by(|a, b| (*a == ZERO_SUM) == (*b == ZERO_SUM)) {
                    if data[0] != ZERO_SUM && each(at, data).is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                    at += data.len() as u64;
                }
            }
        }
        Ok(ControlFlow::Continue(sum == words.sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_of_a_zero_block_is_known() {
        assert_eq!(crc32c::crc32c(&[0; BLOCK_BYTES]), ZERO_SUM);
    }

    #[test]
    fn words_take_place_for_data_and_not_for_zeros() {
        let file = tempfile::tempfile().expect("a file");
        let blocks = [
            (0, 5),
            (1, 6),
            (10, 7),
            (10 + GAP_BLOCKS, 8),
            (11 + 2 * GAP_BLOCKS, 9),
            (1 << 50, 10),
        ];
        let mut writer = Writer::new(&file, 3).expect("begun");
        for (block, sum) in blocks {
            writer.zeros(block);
            writer.put(sum);
        }
        writer.zeros(1 << 51);
        writer.put(ZERO_SUM);
        let words = writer.end().expect("written");
        assert_eq!(words.data_blocks, blocks.len() as u64);
        let starts: Vec<_> = words.stretches.iter().map(|stretch| stretch.block).collect();
        assert_eq!(starts, [0, 11 + 2 * GAP_BLOCKS, 1 << 50]);
        assert!(
            words.is_sound(3, (1 << 50) + 1) && !words.is_sound(3, 1 << 50) && !words.is_sound(4, 1 << 51)
        );
        let bytes = file.metadata().expect("there").len();
        assert_eq!(bytes, words.next(3) * WORD_BYTES);
        assert!(bytes < 4 * WORD_BYTES * GAP_BLOCKS);
        let mut found = Vec::new();
        let read = Reader::new(&file)
            .expect("begun")
            .words(&words, &mut |at, sums| {
                found.extend((at..).zip(sums.iter().copied()));
                ControlFlow::Continue(())
            })
            .expect("read");
        assert_eq!(read, ControlFlow::Continue(true));
        let found: Vec<_> = found
            .iter()
            .map(|(at, sum)| (words.block_at(*at).expect("a block"), *sum))
            .collect();
        assert_eq!(found, blocks);
        assert_eq!(words.block_at(words.stretches[0].end()), None);
    }
}
