//! Finds ext4 on a disk: on the whole disk, or in partitions by MBR (with logical ones) and GPT.

use super::Limits;
use super::disk::{ReadAt, Window};
use std::rc::Rc;

const SECTOR: u64 = 512;
const MAX_ENTRIES: u32 = 1024;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
const PROTECTIVE: u8 = 0xee;

/// Ranges of a disk that hold ext4, and notes on errors in its tables.
pub(super) fn find(disk: &Rc<dyn ReadAt>, limits: &Limits) -> (Vec<Window>, Vec<String>) {
    let mut notes = Vec::new();
    let whole = Window::new(disk.clone(), 0, disk.len());
    if is_ext4(&whole) {
        return (vec![whole], notes);
    }
    let ranges = mbr(disk, limits, &mut notes);
    let windows = ranges
        .into_iter()
        .map(|(first, sectors)| {
            Window::new(
                disk.clone(),
                first.saturating_mul(SECTOR),
                sectors.saturating_mul(SECTOR),
            )
        })
        .filter(is_ext4);
    let mut found: Vec<Window> = Vec::new();
    for window in windows {
        if !found.iter().any(|other| other.label() == window.label()) {
            found.push(window);
        }
    }
    (found, notes)
}

/// Checks for the magic number of ext2, ext3 and ext4.
fn is_ext4(part: &Window) -> bool {
    let mut magic = [0; 2];
    part.read_at(1024 + 56, &mut magic).is_ok() && magic == [0x53, 0xef]
}

fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// First sector and number of sectors of each partition.
fn mbr(disk: &Rc<dyn ReadAt>, limits: &Limits, notes: &mut Vec<String>) -> Vec<(u64, u64)> {
    let mut sector = [0; SECTOR as usize];
    if disk.read_at(0, &mut sector).is_err() || sector[510..] != [0x55, 0xaa] {
        return Vec::new();
    }
    let mut found = Vec::new();
    for entry in sector[446..510].chunks(16) {
        let (kind, first, sectors) = (entry[4], number(&entry[8..12]), number(&entry[12..16]));
        match kind {
            0 => {}
            PROTECTIVE => found.extend(gpt(disk, notes)),
            kind if EXTENDED.contains(&kind) => logical(disk, first, limits, &mut found, notes),
            _ => found.push((first, sectors)),
        }
    }
    found
}

/// The chain of logical partitions in an extended one.
fn logical(
    disk: &Rc<dyn ReadAt>,
    extended: u64,
    limits: &Limits,
    found: &mut Vec<(u64, u64)>,
    notes: &mut Vec<String>,
) {
    let mut at = extended;
    for _ in 0..limits.depth {
        let mut sector = [0; SECTOR as usize];
        let read = disk.read_at(at.saturating_mul(SECTOR), &mut sector);
        if read.is_err() || sector[510..] != [0x55, 0xaa] {
            notes.push("the chain of logical partitions is broken".into());
            return;
        }
        let (this, next) = (&sector[446..462], &sector[462..478]);
        if this[4] != 0 {
            found.push((at.saturating_add(number(&this[8..12])), number(&this[12..16])));
        }
        if next[4] == 0 {
            return;
        }
        at = extended.saturating_add(number(&next[8..12]));
    }
    notes.push("the chain of logical partitions has no end".into());
}

fn gpt(disk: &Rc<dyn ReadAt>, notes: &mut Vec<String>) -> Vec<(u64, u64)> {
    let mut head = [0; 92];
    if disk.read_at(SECTOR, &mut head).is_err() || !head.starts_with(b"EFI PART") {
        notes.push("the partition table (GPT) is not there".into());
        return Vec::new();
    }
    let table = number(&head[72..80]);
    let (entries, size) = (number(&head[80..84]) as u32, number(&head[84..88]) as usize);
    if entries > MAX_ENTRIES || !(128..=4096).contains(&size) {
        notes.push(format!(
            "the partition table (GPT) claims {entries} entries of {size} bytes"
        ));
        return Vec::new();
    }
    let mut bytes = vec![0; size * entries as usize];
    if disk.read_at(table.saturating_mul(SECTOR), &mut bytes).is_err() {
        notes.push("the partition table (GPT) lies outside the disk".into());
        return Vec::new();
    }
    let used = bytes.chunks(size).filter(|entry| entry[..16] != [0; 16]);
    used.filter_map(|entry| {
        let (first, last) = (number(&entry[32..40]), number(&entry[40..48]));
        Some((first, last.checked_sub(first)?.checked_add(1)?))
    })
    .collect()
}
