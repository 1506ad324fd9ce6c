//! The guest's disk in a qcow2 image (versions 2 and 3), as far as this file holds it.
//!
//! A backing file is named by the image and never opened: clusters that are not in this file read as holes.

use super::InputError;
use super::disk::{ReadAt, past_end};
use std::cell::RefCell;
use std::io::{Error, Read, Result};
use std::rc::Rc;

const HEAD_BYTES: usize = 112;
/// Bytes of the first-level table, at most: a disk of 2 PiB with clusters of 64 KiB.
const MAX_L1_BYTES: u64 = 32 << 20;
/// Bytes of the guest's disk for each byte of the file, at most: a cluster of 64 KiB in 1 KiB.
const MAX_EXPANSION: u64 = 64;
/// Offset bits of an entry.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Incompatible features that do not affect a reader (dirty, corrupt), and the compression type, which is
/// checked.
const KNOWN: u64 = 0b1011;
const ZSTD: u8 = 1;

/// A qcow2 image.
pub(super) struct Qcow2 {
    file: Rc<dyn ReadAt>,
    cluster_bits: u32,
    size: u64,
    l1: Vec<u64>,
    backed: bool,
    zstd: bool,
    state: RefCell<State>,
}

/// The second-level table and the decompressed cluster that were read last.
#[derive(Default)]
struct State {
    l2: Option<(u64, Vec<u64>)>,
    cluster: Option<(u64, Vec<u8>)>,
}

/// The kind of a cluster of the guest's disk.
enum Cluster {
    Hole,
    At(u64),
    Compressed(u64),
}

fn be(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Qcow2 {
    pub(super) fn open(file: Rc<dyn ReadAt>) -> std::result::Result<Self, InputError> {
        let damaged = |detail: String| InputError::damaged("qcow2", detail);
        let mut head = [0; HEAD_BYTES];
        let known = file.len().min(HEAD_BYTES as u64) as usize;
        file.read_at(0, &mut head[..known])?;
        let version = be(&head[4..8]);
        let (cluster_bits, size) = (be(&head[20..24]), be(&head[24..32]));
        let (l1_entries, l1_at) = (be(&head[36..40]), be(&head[40..48]));
        if !(2..=3).contains(&version) {
            return Err(InputError::Unsupported(format!("qcow2 version {version}")));
        }
        if be(&head[32..36]) != 0 {
            return Err(InputError::Unsupported("an encrypted qcow2 image".into()));
        }
        let features = if version == 3 { be(&head[72..80]) } else { 0 };
        if features & !KNOWN != 0 {
            let text = format!("a qcow2 image with the features {features:#x}");
            return Err(InputError::Unsupported(text));
        }
        if !(9..=21).contains(&cluster_bits) {
            return Err(damaged(format!("clusters of 2^{cluster_bits} bytes")));
        }
        let cluster_bits = cluster_bits as u32;
        let by_l2 = 1u64 << (cluster_bits + cluster_bits - 3);
        let needed = size.div_ceil(by_l2);
        if needed > l1_entries || needed * 8 > MAX_L1_BYTES {
            return Err(damaged(format!(
                "{size} bytes and a table for {l1_entries} parts"
            )));
        }
        let mut table = vec![0; needed as usize * 8];
        file.read_at(l1_at, &mut table)
            .map_err(|_| damaged(format!("its table lies at byte {l1_at}, behind its end")))?;
        Ok(Self {
            cluster_bits,
            size,
            l1: table.chunks(8).map(be).collect(),
            backed: be(&head[8..16]) != 0,
            zstd: features & 0b1000 != 0 && head[104] == ZSTD,
            file,
            state: RefCell::default(),
        })
    }

    /// Returns a note for the user, if there is one.
    pub(super) fn note(&self) -> Option<String> {
        let text = "it has a backing file, which is not looked at: only what is in this file was compared";
        self.backed.then(|| text.into())
    }

    const fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Number of clusters that a second-level table maps.
    const fn by_l2(&self) -> u64 {
        1 << (self.cluster_bits - 3)
    }

    /// Returns the location of a cluster.
    fn cluster(&self, number: u64) -> Result<Cluster> {
        let at = self
            .l1
            .get((number / self.by_l2()) as usize)
            .ok_or_else(past_end)?
            & OFFSET;
        if at == 0 {
            return Ok(Cluster::Hole);
        }
        let mut state = self.state.borrow_mut();
        if state.l2.as_ref().is_none_or(|(read, _)| *read != at) {
            let mut bytes = vec![0; self.cluster_bytes() as usize];
            self.file.read_at(at, &mut bytes)?;
            state.l2 = Some((at, bytes.chunks(8).map(be).collect()));
        }
        let entry = state
            .l2
            .as_ref()
            .and_then(|(_, table)| table.get((number % self.by_l2()) as usize))
            .copied()
            .unwrap_or(0);
        Ok(match entry {
            entry if entry & COMPRESSED != 0 => Cluster::Compressed(entry),
            entry if entry & ZERO != 0 || entry & OFFSET == 0 => Cluster::Hole,
            entry => Cluster::At(entry & OFFSET),
        })
    }

    /// Fills `buffer` from a range within one cluster.
    fn read_within(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let within = offset % self.cluster_bytes();
        match self.cluster(offset >> self.cluster_bits)? {
            Cluster::Hole => buffer.fill(0),
            Cluster::At(at) => self.file.read_at(at.saturating_add(within), buffer)?,
            Cluster::Compressed(entry) => self.with_decompressed(entry, |bytes| {
                let from = within as usize;
                buffer.copy_from_slice(&bytes[from..from + buffer.len()]);
            })?,
        }
        Ok(())
    }

    fn with_decompressed(&self, entry: u64, then: impl FnOnce(&[u8])) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if let Some((read, bytes)) = &state.cluster
            && *read == entry
        {
            then(bytes);
            return Ok(());
        }
        // Offset in the low bits, then the number of further sectors of 512 bytes.
        let bits = 62 - (self.cluster_bits - 8);
        let at = entry & ((1 << bits) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> bits;
        let stored = (sectors + 1) * 512 - at % 512;
        let stored = stored.min(self.file.len().saturating_sub(at));
        let mut packed = vec![0; stored as usize];
        self.file.read_at(at, &mut packed)?;
        let mut bytes = Vec::new();
        let most = self.cluster_bytes();
        if self.zstd {
            let decoder = ruzstd::decoding::StreamingDecoder::new(&packed[..]);
            decoder
                .map_err(|error| Error::other(error.to_string()))?
                .take(most)
                .read_to_end(&mut bytes)?;
        } else {
            // Bytes after the data in the last sector belong to others.
            let decoder = flate2::read::DeflateDecoder::new(&packed[..]);
            decoder.take(most).read_to_end(&mut bytes)?;
        }
        bytes.resize(most as usize, 0);
        then(&bytes);
        state.cluster = Some((entry, bytes));
        Ok(())
    }
}

impl ReadAt for Qcow2 {
    fn len(&self) -> u64 {
        self.size
    }

    /// Also bounded by the file's length: tables can name one cluster of the file any number of times.
    fn max_data(&self) -> u64 {
        self.file.len().saturating_mul(MAX_EXPANSION).min(self.size)
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset_bytes.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(past_end());
        }
        let mut at = offset_bytes;
        let mut rest = buffer;
        while !rest.is_empty() {
            let left = self.cluster_bytes() - at % self.cluster_bytes();
            let now = (rest.len() as u64).min(left) as usize;
            let (this, later) = rest.split_at_mut(now);
            self.read_within(at, this)?;
            at += now as u64;
            rest = later;
        }
        Ok(())
    }

    fn next_data(&self, from: u64) -> Result<Option<(u64, u64)>> {
        let mut number = from >> self.cluster_bits;
        let clusters = self.size.div_ceil(self.cluster_bytes());
        while number < clusters {
            let l1 = self
                .l1
                .get((number / self.by_l2()) as usize)
                .copied()
                .unwrap_or(0);
            if l1 & OFFSET == 0 {
                number = (number / self.by_l2() + 1) * self.by_l2();
            } else if matches!(self.cluster(number)?, Cluster::Hole) {
                number += 1;
            } else {
                let first = (number << self.cluster_bits).max(from);
                let end = ((number + 1) << self.cluster_bits).min(self.size);
                return Ok(Some((first, end)));
            }
        }
        Ok(None)
    }
}
