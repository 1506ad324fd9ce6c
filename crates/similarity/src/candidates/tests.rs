//! Bounded search against the unbounded one, and against known properties of the data.

use super::*;
use std::collections::HashMap;

/// Checksums in memory: files with a position left out between them.
struct Files(Vec<Vec<u32>>);

impl Checksums for Files {
    fn blocks(&self) -> u64 {
        self.0.iter().map(|file| file.len() as u64).sum()
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
        let mut at = 0;
        for file in &self.0 {
            // In pieces, as a reader with a buffer delivers them.
            for (n, piece) in file.chunks(100).enumerate() {
                if each(at + n as u64 * 100, piece).is_break() {
                    return Ok(());
                }
            }
            at += file.len() as u64 + 1;
        }
        Ok(())
    }
}

impl Files {
    fn at(&self) -> HashMap<u64, u32> {
        let mut at = 0;
        let mut blocks = HashMap::new();
        for file in &self.0 {
            blocks.extend((at..).zip(file.iter().copied()));
            at += file.len() as u64 + 1;
        }
        blocks
    }
}

fn random(seed: u64, blocks: u64) -> Vec<u32> {
    (0..blocks).map(|n| mix(mix(seed) ^ n) as u32 | 1).collect()
}

use crate::hash::mix;

fn search(files: &mut Files, memory_bytes: usize, min_run_blocks: u64) -> (Vec<Run>, SearchOutcome) {
    let dir = tempfile::tempdir().expect("a directory");
    let settings = SearchSettings {
        memory_bytes,
        min_run_blocks,
        spill_dir: dir.path().to_owned(),
    };
    let mut runs = Vec::new();
    let found = find(files, &settings, &mut |_| ControlFlow::Continue(()), &mut |run| {
        runs.push(run)
    })
    .expect("found");
    let left = std::fs::read_dir(dir.path()).expect("listed").count();
    assert_eq!(left, 0, "nothing is left in the directory");
    (runs, found)
}

#[test]
fn copies_of_a_file_are_found_as_one_run_each() {
    let original = random(1, 1000);
    let mut part = random(2, 10);
    part.extend(&original[300..500]);
    let mut files = Files(vec![original.clone(), original, part, random(3, 50)]);
    let (runs, found) = search(&mut files, 1 << 24, 4);
    let run = |at, same_as, blocks| Run { at, same_as, blocks };
    assert_eq!(runs, [run(1001, 0, 1000), run(2012, 300, 200)]);
    assert_eq!(
        (found.passes, found.blocks, found.blocks_in_short_runs),
        (1, 1200, 0)
    );
}

#[test]
fn short_runs_are_counted_and_not_told() {
    let original = random(1, 100);
    let mut other = random(2, 10);
    other.extend(&original[10..13]);
    other.extend(random(3, 10));
    let (runs, found) = search(&mut Files(vec![original, other]), 1 << 24, 4);
    assert_eq!((runs, found.blocks_in_short_runs), (vec![], 3));
}

/// Copies, parts, fills and repeated blocks of every length, more keys than fit in the least memory.
fn mixed(blocks: u64) -> Files {
    let mut files = vec![random(1, blocks / 2)];
    let mut at = 0;
    while at + 500 < blocks / 4 {
        let from = (mix(at) % (blocks / 2 - 300)) as usize;
        let long = 1 + (mix(at + 1) % 200) as usize;
        let copied = files[0][from..from + long].to_vec();
        let own = random(at + 7, mix(at + 2) % 50);
        at += (copied.len() + own.len()) as u64;
        files.push([copied, own].concat());
    }
    // One block many times, and a repeated pair of blocks.
    files.push(vec![7; (blocks / 8) as usize]);
    files.push([9, 11].repeat((blocks / 16) as usize));
    files.push(vec![7; 1000]);
    Files(files)
}

#[test]
fn bounded_search_finds_what_the_unbounded_one_finds() {
    let mut files = mixed(400_000);
    let (all, unbounded) = search(&mut files, 1 << 28, 2);
    let (few, bounded) = search(&mut files, MIN_MEMORY_BYTES, 2);
    assert_eq!(unbounded.passes, 1);
    assert!(bounded.passes >= 3, "{bounded:?}");
    assert!(all == few, "{} runs and {}", all.len(), few.len());
    assert_eq!(SearchOutcome { passes: 1, ..bounded }, unbounded);
}

#[test]
fn runs_tell_the_truth_and_do_not_overlap() {
    let mut files = mixed(100_000);
    let blocks = files.at();
    let (runs, found) = search(&mut files, MIN_MEMORY_BYTES, 2);
    let mut end = 0;
    for run in &runs {
        assert!(run.at >= end, "{run:?} begins before {end}");
        end = run.at + run.blocks;
        for n in 0..run.blocks {
            assert!(run.same_as + n < run.at + n, "{run:?}");
            assert_eq!(
                blocks[&(run.at + n)],
                blocks[&(run.same_as + n)],
                "{run:?}, block {n}"
            );
        }
    }
    // Every block of a repeated run of two and more is in a reported run.
    let mut seen = HashMap::new();
    let mut expected = 0;
    let mut at = 0;
    for file in &files.0 {
        let mut again = vec![false; file.len()];
        for (n, pair) in file.windows(2).enumerate() {
            if seen.insert((pair[0], pair[1]), at).is_some() {
                (again[n], again[n + 1]) = (true, true);
            }
            at += 1;
        }
        expected += again.iter().filter(|again| **again).count() as u64;
    }
    let told = found.blocks + found.blocks_in_short_runs;
    // Of equal blocks in a row, the first sixteen are kept.
    assert!(told <= expected && told + 64 >= expected, "{told} of {expected}");
}

#[test]
fn runs_of_one_block_leave_each_checksum_once() {
    let mut files = mixed(100_000);
    let blocks = files.at();
    let (runs, found) = search(&mut files, MIN_MEMORY_BYTES, 1);
    let (all, unbounded) = search(&mut files, 1 << 28, 1);
    assert!(
        found.passes > unbounded.passes && unbounded.passes == 2,
        "{found:?}"
    );
    assert!(runs == all, "{} runs and {}", runs.len(), all.len());
    let mut end = 0;
    for run in &runs {
        assert!(run.at >= end, "{run:?} begins before {end}");
        end = run.at + run.blocks;
        for n in 0..run.blocks {
            assert!(run.same_as + n < run.at + n, "{run:?}");
            assert_eq!(blocks[&(run.at + n)], blocks[&(run.same_as + n)]);
        }
    }
    let different: std::collections::HashSet<u32> = blocks.values().copied().collect();
    assert_eq!(found.blocks as usize, blocks.len() - different.len());
    assert_eq!(found.blocks_in_short_runs, 0);
}

#[test]
fn one_block_a_million_times_fits_in_the_least_memory() {
    let mut files = Files(vec![vec![5; 1_000_000]]);
    let (_, found) = search(&mut files, MIN_MEMORY_BYTES, 4);
    assert!(found.blocks >= 999_900, "{found:?}");
}

#[test]
fn bad_settings_and_sources_are_named() {
    struct Backwards;
    impl Checksums for Backwards {
        fn blocks(&self) -> u64 {
            4
        }
        fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
            let _ = each(10, &[1, 2]);
            let _ = each(5, &[1, 2]);
            Ok(())
        }
    }
    let dir = tempfile::tempdir().expect("a directory");
    let settings = SearchSettings {
        memory_bytes: 10,
        min_run_blocks: 4,
        spill_dir: dir.path().to_owned(),
    };
    let mut go = |_| ControlFlow::Continue(());
    let small = find(&mut Backwards, &settings, &mut go, &mut |_| ());
    assert!(matches!(small, Err(FindError::Memory(10))));
    let enough = SearchSettings {
        memory_bytes: MIN_MEMORY_BYTES,
        ..settings
    };
    let order = find(&mut Backwards, &enough, &mut go, &mut |_| ());
    assert!(
        matches!(order, Err(FindError::Order { at: 5, before: 11 })),
        "{order:?}"
    );
    struct Far;
    impl Checksums for Far {
        fn blocks(&self) -> u64 {
            2
        }
        fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
            let _ = each(MAX_BLOCKS - 1, &[1, 2]);
            Ok(())
        }
    }
    let far = find(&mut Far, &enough, &mut go, &mut |_| ());
    assert!(matches!(far, Err(FindError::Blocks(_))), "{far:?}");
    let mut stop = |_| ControlFlow::Break(());
    let mut long = Files(vec![random(1, 1_000_000)]);
    let stopped = find(&mut long, &enough, &mut stop, &mut |_| ());
    assert!(matches!(stopped, Err(FindError::Stopped)));
}

#[test]
fn search_can_be_stopped_at_each_pass_and_while_runs_are_told() {
    let mut files = mixed(400_000);
    let (_, found) = search(&mut files, MIN_MEMORY_BYTES, 2);
    let dir = tempfile::tempdir().expect("a directory");
    let settings = SearchSettings {
        memory_bytes: MIN_MEMORY_BYTES,
        min_run_blocks: 2,
        spill_dir: dir.path().to_owned(),
    };
    let mut begun = Vec::new();
    let mut note = |now: Progress| {
        if now.blocks == 0 {
            begun.push(now.pass);
        }
        ControlFlow::Continue(())
    };
    find(&mut files, &settings, &mut note, &mut |_| ()).expect("found");
    assert_eq!(begun, (1..=found.passes).collect::<Vec<_>>());
    // Few blocks, of which no pass reads enough to tell them.
    let (mut few, mut asked) = (Files(vec![random(1, 10), random(1, 10)]), 0);
    let mut stop = |now: Progress| {
        asked += 1;
        match now.blocks {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    };
    let mut runs = 0;
    let stopped = find(&mut few, &settings, &mut stop, &mut |_| runs += 1);
    assert!(matches!(stopped, Err(FindError::Stopped)), "{stopped:?}");
    assert_eq!((asked, runs), (2, 0));
}
