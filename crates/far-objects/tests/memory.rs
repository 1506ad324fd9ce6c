//! The limit of memory against what the kernel says the process has. Alone in its process.

#![allow(clippy::unwrap_used, missing_docs)]

use varve_far::FileSlabs;
use varve_far_objects::{Config, FarHeap, FarVec, ObjectId};

const LIMIT: u64 = 32 << 20;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Writes objects of the sizes, one after the other, and gives by how much the process grew at most.
fn grown_by(sizes: &[usize]) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let file = FileSlabs::open(dir.path(), 192).unwrap();
    let mut objects: Vec<(ObjectId, usize)> = vec![(ObjectId::from_u64(0), 0); 100_000];
    objects.clear();
    let before = resident_bytes();
    let heap = FarHeap::new(file, &Config::new(LIMIT)).unwrap();
    let words: FarVec<u64> = FarVec::zeroed(&heap, 1_000_000).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    let mut most = 0;
    for (round, len) in sizes.iter().enumerate() {
        while objects.len() < 100_000 && heap.stats().log.promised_bytes < 150 << 20 {
            objects.push((heap.alloc(*len).unwrap(), *len));
        }
        for _ in 0..30_000 {
            let (id, len) = objects[random.usize(..objects.len())];
            heap.write(id, 0, &vec![round as u8; len]).unwrap();
            let word = random.usize(..words.len());
            words.set(word, word as u64).unwrap();
        }
        most = most.max(resident_bytes());
        assert!(heap.stats().memory_used_bytes <= LIMIT + LIMIT / 16);
        for (id, _) in objects.split_off(objects.len() / 3) {
            heap.free(id).unwrap();
        }
    }
    assert!(heap.stats().evicted > 50_000);
    most.saturating_sub(before)
}

#[test]
fn process_stays_near_the_limit() {
    let same = grown_by(&[600; 6]);
    println!("objects of one size: limit {LIMIT}, grown by {same}");
    assert!(same < LIMIT + LIMIT / 4, "{same} bytes");
    // What the allocator cannot give from one size to another is not counted.
    let changing = grown_by(&[100, 900, 200, 3000, 130, 600, 100, 900]);
    println!(
        "sizes that change: limit {LIMIT}, grown by {} in all",
        same + changing
    );
    assert!(same + changing < 2 * LIMIT, "{changing} bytes");
}
