//! Checkpoints of memory at addresses (version 2): records of slots, notes of ranges. Owns what must hold
//! whatever the bytes say: a file is restored or refused, memory stays below its limit, and every call on
//! what was restored ends in memory or an error.

use crate::far_checkpoint::{Memory, Sound};
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock};
use varve_far_alloc::{Config, Error, FarAlloc};
use varve_far_objects::FarHeap;

const TAG: u64 = 0xadd7;
const SECTOR: usize = 512;
/// Pages that may be newer than their objects.
const NEWER: usize = 128;
const LOOKS: usize = 3000;
/// Sectors that are not zeros, each behind its number: memory of all kinds, two checkpoints.
const PACKED: &[u8] = include_bytes!("../../crates/far-alloc/tests/fixtures/checkpoint-v2");

fn config() -> Config {
    let mut config = Config::new(6 << 20);
    config.page_buffer_bytes = 512 << 10;
    config.objects.has_thread = false;
    config
}

fn sound() -> &'static Sound {
    static SOUND: OnceLock<Sound> = OnceLock::new();
    SOUND.get_or_init(|| {
        let mut bytes = Vec::new();
        for sector in PACKED.chunks_exact(SECTOR + 4) {
            let (number, sector) = sector.split_at(4);
            let at = crate::far_checkpoint::number(number, 0) * SECTOR;
            bytes.resize(bytes.len().max(at + SECTOR), 0);
            bytes[at..at + SECTOR].copy_from_slice(sector);
        }
        bytes.resize(bytes.len().next_multiple_of(128 << 10), 0);
        // Generations 3 and 4; the first was in the first slot.
        Sound::new(bytes, 4096)
    })
}

/// A file of memory at addresses with some bytes changed (`Sound::changed`). Whether it was restored.
pub fn far_addresses(data: &[u8]) -> bool {
    // Two heaps of one file have the same addresses.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (bytes, forged) = sound().changed(data);
    let is_taken = restore_slots(&bytes, forged);
    restore_memory(bytes, forged);
    is_taken
}

/// The store alone, which needs nothing of the kernel.
fn restore_slots(bytes: &[u8], forged: bool) -> bool {
    let config = config().objects;
    let Ok((heap, _, all)) = FarHeap::restore_for_slots(Memory::of(bytes.to_vec()), TAG, NEWER, &config)
    else {
        return false;
    };
    for restored in &all {
        let slots = &restored.slots;
        for slot in 0..slots.slots().min(LOOKS) {
            let mut bytes = [0; 4096];
            match slots.read(slot, 0, &mut bytes) {
                Ok(len) => assert!(restored.lens_bytes.contains(&len), "{len} bytes"),
                Err(_) => assert!(forged || !slots.is_occupied(slot), "slot {slot}"),
            }
            let _ = slots.write(slot, 0, &[5; 64]);
        }
    }
    let stats = heap.stats();
    assert!(stats.memory_used_bytes <= stats.memory_limit_bytes);
    drop(all);
    assert_eq!(heap.stats().log.promised_bytes, 0, "objects that nobody has");
    true
}

/// All of it, where the kernel lets faults be served.
fn restore_memory(bytes: Vec<u8>, forged: bool) {
    let file = Memory::of(bytes);
    let (heap, record) = match FarAlloc::restore(file.clone(), TAG, &config()) {
        Ok(restored) => restored,
        Err(Error::Userfault { .. } | Error::AddressesTaken { .. }) => return,
        Err(_) => return,
    };
    let (numbers, _) = record.as_chunks::<8>();
    let mut all: Vec<NonNull<u8>> = numbers
        .iter()
        .filter_map(|number| NonZero::new(u64::from_le_bytes(*number) as usize))
        .map(NonNull::without_provenance)
        .collect();
    for at in &all {
        // Brings the page.
        let pinned = heap.pin(*at, 1);
        assert!(forged || pinned.is_ok(), "{pinned:?}");
        let _ = pinned.map(|()| heap.unpin(*at, 1));
    }
    all.extend(heap.malloc(3000));
    all.extend(heap.calloc(3, 5000));
    all.extend(heap.oalloc(1, 40));
    all.extend(heap.oalloc(300, 200));
    all = all
        .into_iter()
        .map(|at| heap.realloc(at, 5000).unwrap_or(at))
        .collect();
    let _ = heap.flush();
    let made = heap.checkpoint(&record);
    assert!(forged || made.is_ok(), "{made:?}");
    for at in all {
        let freed = heap.free(at);
        assert!(forged || freed.is_ok(), "{freed:?}");
        // It may be, where the record names an object twice, or one in another.
        assert!(forged || heap.free(at).is_err());
    }
    let stats = heap.objects().map(FarHeap::stats);
    assert!(stats.is_ok_and(|stats| stats.memory_used_bytes <= stats.memory_limit_bytes));
    drop(heap);
    if made.is_ok() {
        let again = FarAlloc::restore(file, TAG, &config());
        assert!(forged || again.is_ok_and(|(_, again)| again == record));
    }
}

/// Changes that leave the file as it was, or make small ones.
#[cfg(test)]
pub(crate) fn changes() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = (0..4).map(|which| vec![which, 0, 0, 0]).collect();
    // A damaged root: the one before counts.
    for at in [0u16, 12, 28, 64, 140] {
        let [low, high] = at.to_le_bytes();
        all.push(vec![0x80, low, high, 1, 0xff]);
    }
    all
}
