//! Figure 4.6 again: time and similarity operations of the tree, the paper's tree and k-medoids, all in one
//! run; then the search for duplicates in the checksums of 1 TiB. `cargo bench -p varve-similarity` prints
//! the tables of docs/results/similarity.md; with `-- tree` or `-- finder` only one of them, with `--quick`
//! smaller ones. `-- manifests DIR` prints the growth of operations with the lists of packages in a directory
//! (`benches/alike/manifests.py` makes some), `-- images MANIFEST` what the clusters of real images are worth
//! (`varve dedup cluster --manifest`, images of `benches/alike/corpus.sh`).
#![allow(clippy::expect_used)]

#[path = "scaling/images.rs"]
mod images;
#[path = "../tests/kit/mod.rs"]
mod kit;

use kit::{ALONE, KINDS, Kind};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;
use varve_similarity::candidates::{self, Checksums, SearchSettings};
use varve_similarity::hash::mix;
use varve_similarity::input::{Collector, Limits, package_list};
use varve_similarity::measure::{View, Weigh};
use varve_similarity::tree::{ImageId, Mode, Settings, Tree};

fn main() {
    let wish: Vec<String> = std::env::args().collect();
    let asked = |what: &str| wish.iter().any(|argument| argument == what);
    let quick = asked("--quick");
    if let Some(at) = wish.iter().position(|argument| argument == "manifests") {
        let dir = wish.get(at + 1).expect("a directory follows");
        return manifests(std::path::Path::new(dir));
    }
    if let Some(at) = wish.iter().position(|argument| argument == "images") {
        let path = wish.get(at + 1).expect("a manifest follows");
        return images::tell(std::path::Path::new(path));
    }
    if !asked("finder") {
        scaling(if quick { 1000 } else { 10_000 });
    }
    if !asked("tree") {
        finder(if quick { 1 << 22 } else { 1 << 28 });
    }
}

/// Peak resident memory of this process, in MiB.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

fn online(mode: Mode, views: &[Arc<View>]) -> (Tree, f64) {
    let started = Instant::now();
    let mut tree = Tree::new(Settings::of(mode));
    for (id, view) in (0..).zip(views) {
        tree.insert(ImageId(id), view.clone());
    }
    (tree, started.elapsed().as_secs_f64())
}

/// Lists of packages of real releases: the seconds and operations of the default at each number of them, and
/// of the paper's tree up to 1,000.
fn manifests(dir: &std::path::Path) {
    let entries = std::fs::read_dir(dir).expect("a directory of lists");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("read").path()).collect();
    paths.sort();
    let limits = Limits::default();
    let view = |path: &std::path::PathBuf| {
        let mut collector = Collector::new(&path.to_string_lossy(), &limits);
        collector.packages(package_list(&std::fs::read(path).expect("a list")));
        Arc::new(collector.finish().sketches.view(Weigh::Packages))
    };
    let views: Vec<_> = paths.iter().map(view).collect();
    println!("| manifests | way | similarity operations | list entries | seconds | clusters | saved |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let mut grown = Vec::new();
    for count in [21, 50, 99, 1000, views.len()] {
        let some = &views[..count.min(views.len())];
        for (mode, way) in [(Mode::Rarity, "default"), (Mode::Seed, "paper's tree")] {
            if mode == Mode::Seed && count > 1000 {
                continue;
            }
            let (tree, seconds) = online(mode, some);
            let (work, clusters) = (tree.work(), tree.clusters(1).len());
            let operations = work.comparisons;
            let saved = kit::saved(some, &kit::labels_of(&tree, 1));
            println!(
                "| {} | {way} | {operations} | {} | {seconds:.2} | {clusters} | {:.4} |",
                some.len(),
                work.postings,
                saved / some.iter().map(|view| view.parts[0].weight()).sum::<f64>(),
            );
            if mode == Mode::Rarity {
                grown.push((some.len() as f64, operations.max(1) as f64));
            }
        }
    }
    println!(
        "\nexponent of the default's operations: {:.2} from the first to the last, {:.2} between the last two; peak \
         memory {} MiB",
        kit::exponent(&grown),
        kit::exponent(&grown[grown.len() - 2..]),
        peak_mib()
    );
}

fn scaling(most: u64) {
    println!("| kind | images | way | similarity operations | merges | list entries | seconds | index |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for kind in KINDS.into_iter().chain(ALONE) {
        for count in [21, 50, 99, 1000, 10_000]
            .into_iter()
            .filter(|count| *count <= most)
        {
            one(kind, count);
        }
    }
    println!("\npeak memory {} MiB", peak_mib());
}

fn one(kind: Kind, count: u64) {
    let families = (count / 10).clamp(3, 100);
    let (views, truth) = kit::images(kind, count, families, 1);
    let row = |way: &str, operations: u64, merges: u64, postings: u64, seconds: f64, labels: &[usize]| {
        let index = match kind.family {
            0 => "–".to_owned(),
            _ => format!("{:.3}", kit::adjusted_rand_index(&truth, labels)),
        };
        let name = kind.name;
        println!(
            "| {name} | {count} | {way} | {operations} | {merges} | {postings} | {seconds:.4} | {index} |"
        );
    };
    let mut clusters = 0;
    for (mode, way) in [(Mode::Rarity, "default"), (Mode::Seed, "paper's tree")] {
        if mode == Mode::Seed && count > 1000 {
            continue;
        }
        let (tree, seconds) = online(mode, &views);
        let work = tree.work();
        if mode == Mode::Rarity {
            clusters = tree.clusters(1).len();
        }
        let labels = kit::labels_of(&tree, 1);
        row(
            way,
            work.comparisons,
            work.merges,
            work.postings,
            seconds,
            &labels,
        );
    }
    if count <= 99 {
        let started = Instant::now();
        let distance = |a: usize, b: usize| kit::distance(&views[a], &views[b]);
        let (labels, asked) = kit::pam(views.len(), clusters, distance);
        row("k-medoids", asked, 0, 0, started.elapsed().as_secs_f64(), &labels);
    }
}

/// Checksums of files of 64 MiB: a third of them copies of others, whole or in part; made as they are read.
struct MadeUp {
    blocks: u64,
}

const FILE_BLOCKS: u64 = 1 << 14;

impl Checksums for MadeUp {
    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()> {
        let mut sums = vec![0u32; FILE_BLOCKS as usize - 1];
        for file in 0..self.blocks / FILE_BLOCKS {
            // Of three files the third has the middle of an earlier one.
            let other = if file % 3 == 2 { mix(file) % file } else { file };
            for (n, sum) in (0u64..).zip(&mut sums) {
                let of = if (2000..14_000).contains(&n) { other } else { file };
                *sum = mix(of << 20 | n) as u32;
            }
            if each(file * FILE_BLOCKS, &sums).is_break() {
                break;
            }
        }
        Ok(())
    }
}

fn finder(blocks: u64) {
    let dir = tempfile::tempdir().expect("a directory");
    println!("\n| blocks | memory | passes | seconds | duplicate blocks | runs | peak memory |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let mut results = Vec::new();
    // Unbounded last, so that the peak of the bounded search is its own.
    for memory_mib in [256, 4096] {
        let search = SearchSettings {
            memory_bytes: memory_mib << 20,
            min_run_blocks: 4,
            spill_dir: dir.path().to_owned(),
        };
        let started = Instant::now();
        let mut sum = 0u64;
        let mut go = |_| ControlFlow::Continue(());
        let found = candidates::find(&mut MadeUp { blocks }, &search, &mut go, &mut |run| {
            sum = mix(sum ^ run.at ^ mix(run.same_as) ^ run.blocks);
        })
        .expect("found");
        println!(
            "| {blocks} | {memory_mib} MiB | {} | {:.1} | {} | {} | {} MiB |",
            found.passes,
            started.elapsed().as_secs_f64(),
            found.blocks,
            found.runs,
            peak_mib(),
        );
        results.push((found.blocks, found.runs, sum));
    }
    assert!(results[0] == results[1], "the memory must not change the result");
    println!("\nboth found the same runs");
}
