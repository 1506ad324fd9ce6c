//! How the cost of one operation grows with threads, files, the size of a directory and the size of a file.
//! Full mode goes to a million names and 100 GB; quick mode stops early.

use crate::Options;
use crate::common::Dice;
use crate::name_rows::number;
use crate::places::Places;
use crate::pools::{Ours, Plan, told};
use crate::report::{Report, Row, Target, Unit};
use crate::timing::{per_op, per_op_threads};
use varve_format::InodeKey;

const MIB: u64 = 1 << 20;
/// Sizes and their columns.
const COUNTS: [(u64, &str); 4] = [
    (1_000, "1 k"),
    (10_000, "10 k"),
    (100_000, "100 k"),
    (1_000_000, "1 M"),
];
/// Names looked up and made for one measurement.
const PROBES: u64 = 2_000;

fn threads(options: &Options, ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let count = options.pick(20_000, 100_000);
    let page = [5_u8; 4096];
    for (name, shared) in [("its own file", false), ("one file", true)] {
        let mut values = Vec::new();
        for (threads, column) in [(1, "1"), (2, "2"), (4, "4"), (8, "8")] {
            let files = (0..threads)
                .map(|thread| ours.filled(&format!("thread-{}", if shared { 0 } else { thread }), 16 * MIB))
                .collect::<Result<Vec<_>, _>>()?;
            let ns = per_op_threads(threads, count, |thread| {
                let file = &files[if shared {
                    threads as usize - 1
                } else {
                    thread as usize
                }];
                let mut dice = Dice::new(thread);
                for _ in 0..count {
                    file.write_at(dice.below(4096) * 4096, &page, &ours.cred)
                        .map_err(told("write"))?;
                }
                Ok(())
            })?;
            values.push((column, ns));
        }
        report.row(Row {
            name: format!("threads, overwrite 4 KiB, each {name}: time over all"),
            unit: Unit::Micros,
            values,
            targets: Vec::new(),
        });
    }
    Ok(())
}

fn make_files(ours: &Ours, dir: InodeKey, range: std::ops::Range<u64>) -> anyhow::Result<f64> {
    let mut name = *b"file-00000000";
    let first = range.start;
    per_op(range.end - range.start, |step| {
        number(&mut name, first + step);
        ours.fs
            .create(dir, &name, 0o100_644, 0, &ours.cred)
            .map_err(told("create"))?;
        Ok(())
    })
}

/// Takes one directory from size to size; at each looks at names all over it, and makes and unlinks some.
fn directory(most: u64, ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let dir = ours
        .fs
        .create(ours.fs.root(), b"big", 0o040_755, 0, &ours.cred)
        .map_err(told("mkdir"))?
        .key;
    let mut have = 0;
    let (mut creates, mut lookups, mut unlinks, mut lists) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (count, column) in COUNTS.into_iter().filter(|(count, _)| *count <= most) {
        creates.push((column, make_files(ours, dir, have..count)?));
        have = count;
        ours.settle()?;
        let (mut dice, mut name) = (Dice::new(count), *b"file-00000000");
        lookups.push((
            column,
            per_op(PROBES, |_| {
                number(&mut name, dice.below(count));
                ours.fs.lookup(dir, &name, &ours.cred).map_err(told("lookup"))?;
                Ok(())
            })?,
        ));
        make_files(ours, dir, count..count + PROBES)?;
        unlinks.push((
            column,
            per_op(PROBES, |step| {
                number(&mut name, count + step);
                ours.fs.unlink(dir, &name, &ours.cred).map_err(told("unlink"))
            })?,
        ));
        let (mut cookie, mut seen) = (0, 0_u64);
        let start = std::time::Instant::now();
        loop {
            let entries = ours.fs.readdir(dir, cookie, 500).map_err(told("readdir"))?;
            let Some(last) = entries.last() else { break };
            cookie = last.next_cookie;
            seen += entries.len() as u64;
        }
        anyhow::ensure!(seen == count, "{seen} of {count} names listed");
        lists.push((column, start.elapsed().as_nanos() as f64 / count as f64));
    }
    let last = creates.last().map_or("1 k", |(column, _)| *column);
    for (name, values, targets) in [
        ("create (on the way there)", creates, vec![]),
        (
            "lookup of a name",
            lookups,
            vec![Target::AtMost(last, 4.0, "1 k")],
        ),
        ("unlink", unlinks, vec![Target::AtMost(last, 4.0, "1 k")]),
        ("list, each name", lists, vec![Target::AtMost(last, 4.0, "1 k")]),
    ] {
        report.row(Row {
            name: format!("one directory by its size: {name}"),
            unit: Unit::Micros,
            values,
            targets,
        });
    }
    Ok(())
}

/// Files in directories of a thousand.
fn files(most: u64, ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let mut values = Vec::new();
    let mut stats = Vec::new();
    let (mut dirs, mut name) = (Vec::new(), *b"dir-00000000");
    for (count, column) in COUNTS.into_iter().filter(|(count, _)| *count <= most) {
        let mut made = 0;
        let start = std::time::Instant::now();
        while (dirs.len() as u64) < count / 1000 {
            number(&mut name, dirs.len() as u64);
            let dir = ours
                .fs
                .create(ours.fs.root(), &name, 0o040_755, 0, &ours.cred)
                .map_err(told("mkdir"))?
                .key;
            make_files(ours, dir, 0..1000)?;
            made += 1000;
            dirs.push(dir);
        }
        values.push((column, start.elapsed().as_nanos() as f64 / f64::from(made)));
        ours.settle()?;
        let (mut dice, mut file) = (Dice::new(count), *b"file-00000000");
        stats.push((
            column,
            per_op(PROBES, |_| {
                number(&mut file, dice.below(1000));
                let dir = dirs[dice.below(dirs.len() as u64) as usize];
                ours.fs.lookup(dir, &file, &ours.cred).map_err(told("lookup"))?;
                Ok(())
            })?,
        ));
    }
    let last = values.last().map_or("1 k", |(column, _)| *column);
    report.row(Row {
        name: "files in all, 1,000 a directory: create (on the way there)".into(),
        unit: Unit::Micros,
        values,
        targets: vec![Target::AtMost(last, 4.0, "1 k")],
    });
    report.row(Row {
        name: "files in all, 1,000 a directory: stat at random".into(),
        unit: Unit::Micros,
        values: stats,
        targets: Vec::new(),
    });
    Ok(())
}

/// Writes and reads 4 KiB all over sparse files.
fn file_size(options: &Options, ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let count = options.pick(5_000, 20_000);
    let page = [5_u8; 4096];
    let (mut writes, mut log_reads, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    for (gigabytes, column) in [(1_u64, "1 GB"), (10, "10 GB"), (100, "100 GB")] {
        let file = ours.fresh("sparse")?;
        ours.settle()?;
        let blocks = gigabytes * 1_000_000_000 / 4096;
        file.truncate(blocks * 4096, &ours.cred)
            .map_err(told("truncate"))?;
        let mut dice = Dice::new(gigabytes);
        writes.push((
            column,
            per_op(count, |_| {
                file.write_at(dice.below(blocks) * 4096, &page, &ours.cred)
                    .map_err(told("write"))?;
                Ok(())
            })?,
        ));
        let read = |into: &mut Vec<_>| -> anyhow::Result<()> {
            let (mut dice, mut out) = (Dice::new(gigabytes), [0; 4096]);
            let ns = per_op(count, |_| {
                file.read_at(dice.below(blocks) * 4096, &mut out)
                    .map_err(told("read"))?;
                anyhow::ensure!(out == page, "other bytes came back");
                Ok(())
            })?;
            into.push((column, ns));
            Ok(())
        };
        read(&mut log_reads)?;
        ours.settle()?;
        // The first reads bring the map of the file.
        let mut warm = Vec::new();
        read(&mut warm)?;
        read(&mut reads)?;
    }
    for (name, values) in [
        ("overwrite 4 KiB at random, first time", writes),
        ("read it back from the log", log_reads),
        ("read it back, digested", reads),
    ] {
        report.row(Row {
            name: format!("sparse file by its size: {name}"),
            unit: Unit::Micros,
            values,
            targets: vec![Target::AtMost("100 GB", 4.0, "1 GB")],
        });
    }
    Ok(())
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    let most = options.pick(10_000, 1_000_000);
    let plan = Plan {
        name: "growth",
        on_disk: false,
        nvm_bytes: 2048 * MIB,
        log_bytes: 256 * MIB,
        digest: true,
        in_place: true,
    };
    let ours = Ours::daemon(&plan, places)?;
    threads(options, &ours, report)?;
    file_size(options, &ours, report)?;
    drop(ours);
    let ours = Ours::daemon(&plan, places)?;
    directory(most, &ours, report)?;
    drop(ours);
    let ours = Ours::daemon(&plan, places)?;
    files(most, &ours, report)
}
