//! Data of one file: overwrite, append, read, sequential, two threads; and how many bytes are written for one
//! of the user's.

use crate::Options;
use crate::common::Dice;
use crate::places::Places;
use crate::pools::{Ours, Plan, told};
use crate::report::{Report, Row, Target, Unit};
use crate::timing::{Side, per_op, per_op_threads, rounds};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use varve_media::Region;

const MIB: u64 = 1 << 20;
/// Bytes of the region of the limit, and of the files that are overwritten.
const WINDOW: u64 = 256 * MIB;
/// Bytes of the files that are read.
const READ_BYTES: u64 = 1024 * MIB;

/// The sides of all rows.
struct Sides {
    raw: Arc<dyn Region>,
    daemon: Ours,
    embedded: Ours,
    no_digest: Ours,
    /// Its digest overwrites nothing in place.
    new_blocks: Ours,
    tmpfs: std::path::PathBuf,
    /// Directories of other file systems in memory, and their columns.
    hosts: Vec<(std::path::PathBuf, [&'static str; 3])>,
    rounds: usize,
    /// Operations of those with fsync in a round.
    synced: u64,
}

/// Non-temporal copies of `len` bytes and a line, one fence each, from `from` on, going round in `bytes`.
fn raw_writes(raw: &dyn Region, len: usize, from: u64, bytes: u64, count: u64) -> anyhow::Result<f64> {
    let data = vec![7_u8; len];
    let header = [1_u8; 64];
    let size = (len as u64 + 64).next_multiple_of(64);
    let mut at = from;
    per_op(count, |_| {
        if at + size > from + bytes {
            at = from;
        }
        raw.write(at + 64, &data)?;
        raw.write(at, &header)?;
        raw.fence()?;
        at += size;
        Ok(())
    })
}

fn raw_reads(raw: &dyn Region, len: usize, seed: u64, count: u64) -> anyhow::Result<f64> {
    let (mut dice, mut out) = (Dice::new(seed), vec![0_u8; len]);
    let places = raw.len_bytes() / len as u64;
    per_op(count, |_| {
        raw.read(dice.below(places) * len as u64, &mut out)?;
        std::hint::black_box(&mut out);
        Ok(())
    })
}

fn host_file(dir: &Path, name: &str, bytes: u64) -> anyhow::Result<File> {
    let path = dir.join(name);
    let _ = std::fs::remove_file(&path);
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    let block = vec![7; 1 << 20];
    for at in (0..bytes).step_by(block.len()) {
        file.write_all_at(&block, at)?;
    }
    Ok(file)
}

/// Most operations of a round without a digest: each is charged with five blocks, and for want of space there
/// would be a digest.
const CHARGED: u64 = 180_000;

/// Operations that fill the log ten times.
fn ten_logs(ours: &Ours, len: u64) -> u64 {
    10 * ours.log_bytes / (len + 64).next_multiple_of(64)
}

impl Sides {
    fn make(options: &Options, places: &Places) -> anyhow::Result<Self> {
        let log_bytes = options.pick(32 * MIB, 64 * MIB);
        let plan = Plan {
            name: "daemon",
            on_disk: false,
            nvm_bytes: 3072 * MIB,
            log_bytes,
            digest: true,
            in_place: true,
        };
        let new_blocks = Plan {
            name: "new-blocks",
            nvm_bytes: 1536 * MIB,
            in_place: false,
            ..plan
        };
        let embedded = Plan {
            name: "embedded",
            nvm_bytes: 2048 * MIB,
            ..plan
        };
        let no_digest = Plan {
            name: "no-digest",
            // What a round logs is charged with more than it will take; for want of space it would be
            // digested.
            nvm_bytes: 5120 * MIB,
            log_bytes: 1280 * MIB,
            digest: false,
            ..plan
        };
        Ok(Self {
            raw: places.region(READ_BYTES)?,
            daemon: Ours::daemon(&plan, places)?,
            embedded: Ours::embedded(&embedded, places)?,
            no_digest: Ours::daemon(&no_digest, places)?,
            new_blocks: Ours::daemon(&new_blocks, places)?,
            tmpfs: places.memory().to_owned(),
            hosts: places
                .hosts
                .iter()
                .map(|host| (host.dir.clone(), host.names))
                .collect(),
            rounds: options.pick(3, 9),
            synced: options.pick(100, 400),
        })
    }

    fn all_ours(&self) -> [(&'static str, &Ours); 3] {
        [
            ("LibFS", &self.daemon),
            ("embedded", &self.embedded),
            ("no digest", &self.no_digest),
        ]
    }

    /// Operations in a round of one of ours: ten logs, or as much as the log holds without a digest.
    fn count(&self, ours: &Ours, len: u64) -> u64 {
        if std::ptr::eq(ours, &raw const self.no_digest) {
            (ours.log_bytes * 6 / 10 / (len + 64).next_multiple_of(64))
                .min(ten_logs(&self.daemon, len))
                .min(CHARGED)
        } else {
            ten_logs(ours, len)
        }
    }

    fn overwrite(&self, report: &mut Report) -> anyhow::Result<()> {
        let page = vec![9_u8; 4096];
        let count = ten_logs(&self.daemon, 4096);
        let places = WINDOW / 4096;
        let mut sides = vec![Side::new("limit", || {
            raw_writes(&*self.raw, 4096, 0, WINDOW, count)
        })];
        for (name, ours) in self
            .all_ours()
            .into_iter()
            .chain([("new blocks", &self.new_blocks)])
        {
            let file = ours.filled("overwritten", WINDOW)?;
            let page = &page;
            let mut dice = Dice::new(1);
            sides.push(Side::new(name, move || {
                let ns = per_op(self.count(ours, 4096), |_| {
                    file.write_at(dice.below(places) * 4096, page, &ours.cred)
                        .map_err(told("write"))?;
                    Ok(())
                })?;
                ours.settle()?;
                Ok(ns)
            }));
        }
        for (name, dir, count, sync) in self.host_sides(count) {
            let file = host_file(dir, "overwritten", WINDOW)?;
            file.sync_all()?;
            let mut dice = Dice::new(1);
            let page = &page;
            sides.push(Side::new(name, move || {
                per_op(count, |_| {
                    file.write_all_at(page, dice.below(places) * 4096)?;
                    if sync {
                        file.sync_data()?;
                    }
                    Ok(())
                })
            }));
        }
        let values = rounds(self.rounds, &mut sides)?;
        drop(sides);
        self.remove("overwritten")?;
        report.row(Row {
            name: "overwrite 4 KiB at random".into(),
            unit: Unit::Micros,
            values,
            targets: vec![
                Target::AtMost("LibFS", 1.25, "limit"),
                Target::AtMost("no digest", 1.25, "limit"),
                Target::Faster("LibFS", 35.0, "ext4+fsync"),
            ],
        });
        Ok(())
    }

    /// Makes room for the next row.
    fn remove(&self, name: &str) -> anyhow::Result<()> {
        for (_, ours) in self.all_ours().into_iter().chain([("", &self.new_blocks)]) {
            match ours.fs.unlink(ours.fs.root(), name.as_bytes(), &ours.cred) {
                Ok(()) | Err(varve_libfs::Errno(libc::ENOENT)) => {}
                Err(errno) => anyhow::bail!("unlink {name}: {errno}"),
            }
            ours.settle()?;
        }
        for dir in self.hosts.iter().map(|(dir, _)| dir).chain([&self.tmpfs]) {
            let _ = std::fs::remove_file(dir.join(name));
        }
        Ok(())
    }

    fn host_sides(&self, count: u64) -> Vec<(&'static str, &Path, u64, bool)> {
        let mut sides = vec![("tmpfs", self.tmpfs.as_path(), count, false)];
        for (dir, [_, name, _]) in &self.hosts {
            sides.push((name, dir, self.synced, true));
        }
        sides
    }

    fn append(&self, len: usize, targets: Vec<Target>, report: &mut Report) -> anyhow::Result<()> {
        let data = vec![9_u8; len];
        let count = ten_logs(&self.daemon, len as u64);
        let mut sides = vec![Side::new("limit", || {
            raw_writes(&*self.raw, len, 0, WINDOW, count)
        })];
        for (name, ours) in self.all_ours() {
            let data = &data;
            sides.push(Side::new(name, move || {
                let file = ours.fresh("appended")?;
                ours.settle()?;
                let ns = per_op(self.count(ours, len as u64), |_| {
                    file.append(data, &ours.cred).map_err(told("append"))?;
                    Ok(())
                })?;
                ours.settle()?;
                Ok(ns)
            }));
        }
        for (name, dir, count, sync) in self.host_sides(count) {
            let data = &data;
            sides.push(Side::new(name, move || {
                let file = host_file(dir, "appended", 0)?;
                let ns = per_op(count, |step| {
                    file.write_all_at(data, step * len as u64)?;
                    if sync {
                        file.sync_data()?;
                    }
                    Ok(())
                })?;
                file.set_len(0)?;
                Ok(ns)
            }));
        }
        let values = rounds(self.rounds, &mut sides)?;
        drop(sides);
        self.remove("appended")?;
        report.row(Row {
            name: format!("append {len} B"),
            unit: Unit::Micros,
            values,
            targets,
        });
        Ok(())
    }

    fn read(&self, report: &mut Report) -> anyhow::Result<()> {
        let count = 100_000;
        let places = READ_BYTES / 4096;
        let in_log = self.no_digest.fresh("in-log")?;
        let block = vec![7; 1 << 20];
        self.no_digest.settle()?;
        for at in (0..READ_BYTES).step_by(block.len()) {
            in_log
                .write_at(at, &block, &self.no_digest.cred)
                .map_err(told("fill"))?;
        }
        let mut sides = vec![Side::new("limit", || raw_reads(&*self.raw, 4096, 5, count))];
        let mut add = |name, file: varve_libfs::OpenFile| {
            let (mut dice, mut out) = (Dice::new(6), vec![0; 4096]);
            sides.push(Side::new(name, move || {
                per_op(count, |_| {
                    let got = file
                        .read_at(dice.below(places) * 4096, &mut out)
                        .map_err(told("read"))?;
                    anyhow::ensure!(got == 4096, "read {got} bytes");
                    Ok(())
                })
            }));
        };
        add("LibFS", self.daemon.filled("read", READ_BYTES)?);
        add("LibFS, in the log", in_log);
        let mut hosts = vec![("tmpfs", self.tmpfs.as_path())];
        hosts.extend(self.hosts.iter().map(|(dir, [name, ..])| (*name, dir.as_path())));
        for (name, dir) in hosts {
            let file = host_file(dir, "read", READ_BYTES)?;
            let (mut dice, mut out) = (Dice::new(6), vec![0; 4096]);
            sides.push(Side::new(name, move || {
                per_op(count, |_| {
                    Ok(file.read_exact_at(&mut out, dice.below(places) * 4096)?)
                })
            }));
        }
        let values = rounds(self.rounds, &mut sides)?;
        drop(sides);
        report.row(Row {
            name: "read 4 KiB at random, file of 1 GiB".into(),
            unit: Unit::Micros,
            values,
            targets: vec![
                Target::AtMost("LibFS", 1.25, "limit"),
                Target::AtMost("LibFS, in the log", 1.25, "limit"),
                Target::AtMost("LibFS", 0.8, "tmpfs"),
            ],
        });
        self.sequential_read(report)
    }

    /// Of the files that `read` has left.
    fn sequential_read(&self, report: &mut Report) -> anyhow::Result<()> {
        let len = 1_u64 << 20;
        let mut out = vec![0; len as usize];
        let count = READ_BYTES / len;
        let mut sides = vec![Side::new("limit", move || {
            let ns = per_op(count, |step| Ok(self.raw.read(step * len, &mut out)?))?;
            Ok(ns / len as f64)
        })];
        let attr = self
            .daemon
            .fs
            .lookup(self.daemon.fs.root(), b"read", &self.daemon.cred)
            .map_err(told("lookup"))?;
        let file = self.daemon.open(attr.key)?;
        let mut out = vec![0; len as usize];
        sides.push(Side::new("LibFS", move || {
            let ns = per_op(count, |step| {
                file.read_at(step * len, &mut out).map_err(told("read"))?;
                Ok(())
            })?;
            Ok(ns / len as f64)
        }));
        let file = File::open(self.tmpfs.join("read"))?;
        let mut out = vec![0; len as usize];
        sides.push(Side::new("tmpfs", move || {
            let ns = per_op(count, |step| Ok(file.read_exact_at(&mut out, step * len)?))?;
            Ok(ns / len as f64)
        }));
        let values = rounds(self.rounds, &mut sides)?;
        drop(sides);
        let _ = std::fs::remove_file(self.tmpfs.join("read"));
        report.row(Row {
            name: "sequential read, 1 MiB calls".into(),
            unit: Unit::Bandwidth,
            values,
            targets: vec![Target::Faster("LibFS", 0.85, "limit")],
        });
        Ok(())
    }

    fn sequential_write(&self, report: &mut Report) -> anyhow::Result<()> {
        let len = 1_u64 << 20;
        let data = vec![9_u8; len as usize];
        let count = ten_logs(&self.daemon, len);
        let mut sides = vec![Side::new("limit", || {
            Ok(raw_writes(&*self.raw, len as usize, 0, WINDOW, count)? / len as f64)
        })];
        for (name, ours) in self.all_ours() {
            let data = &data;
            sides.push(Side::new(name, move || {
                let file = ours.fresh("sequential")?;
                ours.settle()?;
                let ns = per_op(self.count(ours, len), |step| {
                    file.write_at(step * len, data, &ours.cred)
                        .map_err(told("write"))?;
                    Ok(())
                })?;
                ours.settle()?;
                Ok(ns / len as f64)
            }));
        }
        let (dir, data) = (&self.tmpfs, &data);
        sides.push(Side::new("tmpfs", move || {
            let file = host_file(dir, "sequential", 0)?;
            let ns = per_op(count, |step| Ok(file.write_all_at(data, step * len)?))?;
            file.set_len(0)?;
            Ok(ns / len as f64)
        }));
        let values = rounds(self.rounds, &mut sides)?;
        drop(sides);
        self.remove("sequential")?;
        report.row(Row {
            name: "sequential write, 1 MiB calls, sustained".into(),
            unit: Unit::Bandwidth,
            values,
            targets: vec![Target::Faster("LibFS", 0.6, "limit")],
        });
        Ok(())
    }

    /// One and two threads, one file.
    fn two_threads(&self, report: &mut Report) -> anyhow::Result<()> {
        let (page, places) = (vec![9_u8; 4096], WINDOW / 4096);
        let page = &page;
        let mut sides = Vec::new();
        let count = self.count(&self.no_digest, 4096) / 2;
        for (threads, name) in [(1, "limit, 1"), (2, "limit, 2")] {
            sides.push(Side::new(name, move || {
                per_op_threads(threads, count, |thread| {
                    let part = WINDOW / 2;
                    raw_writes(&*self.raw, 4096, thread * part, part, count).map(drop)
                })
            }));
        }
        let names = [
            ("LibFS, 1", &self.daemon, 1),
            ("LibFS, 2", &self.daemon, 2),
            ("no digest, 1", &self.no_digest, 1),
            ("no digest, 2", &self.no_digest, 2),
        ];
        for (name, ours, threads) in names {
            let file = ours.filled("shared", WINDOW)?;
            let count = self.count(ours, 4096) / 2;
            sides.push(Side::new(name, move || {
                let ns = per_op_threads(threads, count, |thread| {
                    let mut dice = Dice::new(thread + 9);
                    for _ in 0..count {
                        file.write_at(dice.below(places) * 4096, page, &ours.cred)
                            .map_err(told("write"))?;
                    }
                    Ok(())
                })?;
                ours.settle()?;
                Ok(ns)
            }));
        }
        let shared = host_file(&self.tmpfs, "shared", WINDOW)?;
        for (threads, name) in [(1, "tmpfs, 1"), (2, "tmpfs, 2")] {
            let shared = shared.try_clone()?;
            sides.push(Side::new(name, move || {
                per_op_threads(threads, count, |thread| {
                    let mut dice = Dice::new(thread + 9);
                    for _ in 0..count {
                        shared.write_all_at(page, dice.below(places) * 4096)?;
                    }
                    Ok(())
                })
            }));
        }
        let values = rounds(self.rounds, &mut sides)?;
        drop(sides);
        self.remove("shared")?;
        let scaling = |one: usize| values[one].1 / values[one + 1].1;
        let scalings = [scaling(0), scaling(2), scaling(4), scaling(6)];
        report.row(Row {
            name: "overwrite 4 KiB at random, one file, one and two threads".into(),
            unit: Unit::Micros,
            values,
            targets: Vec::new(),
        });
        report.row(Row {
            name: "two threads over one, one file (on two processors LibFS shares them with the digest)"
                .into(),
            unit: Unit::Plain,
            values: vec![
                ("limit", scalings[0]),
                ("LibFS", scalings[1]),
                ("no digest", scalings[2]),
                ("tmpfs", scalings[3]),
            ],
            targets: vec![
                Target::AtLeast("no digest", 0.9, "limit"),
                Target::AtLeast("LibFS", 0.9, "limit"),
            ],
        });
        Ok(())
    }
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    let sides = Sides::make(options, places)?;
    if options.wants("overwrite") {
        sides.overwrite(report)?;
    }
    if options.wants("append 4096") {
        let targets = vec![
            Target::AtMost("LibFS", 1.25, "limit"),
            Target::AtMost("no digest", 1.25, "limit"),
            Target::AtMost("LibFS", 0.65, "tmpfs"),
            Target::Faster("LibFS", 90.0, "ext4+fsync"),
        ];
        sides.append(4096, targets, report)?;
    }
    if options.wants("append 128") {
        let targets = vec![Target::Below("LibFS", 0.35), Target::Below("no digest", 0.35)];
        sides.append(128, targets, report)?;
    }
    if options.wants("sequential write") {
        sides.sequential_write(report)?;
    }
    if options.wants("two threads") {
        sides.two_threads(report)?;
    }
    if options.wants("read") {
        sides.read(report)?;
    }
    Ok(())
}
