//! Names: create, write, close and unlink of a small file; stat; open and close.

use crate::Options;
use crate::places::Places;
use crate::pools::{Ours, Plan, RW, told};
use crate::report::{Report, Row, Target, Unit};
use crate::timing::{Side, per_op, rounds};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::path::Path;
use varve_format::{BLOCK_BYTES, InodeKey};

const MIB: u64 = 1 << 20;
/// Files in the directory that names are looked up in.
const FILES: u64 = 1000;
/// Log bytes of one create, write of 1 KiB and unlink, about.
const ROUND_TRIP_BYTES: u64 = 1536;
/// Space that one is charged with in advance, whatever it comes to: six blocks for the name and the inode,
/// four for the data.
const ROUND_TRIP_BLOCKS: u64 = 10;

fn our_round_trip(ours: &Ours, dir: InodeKey, count: u64) -> anyhow::Result<f64> {
    let body = [7_u8; 1024];
    let mut name = *b"file-00000000";
    per_op(count, |step| {
        number(&mut name, step);
        let attr = ours
            .fs
            .create(dir, &name, 0o100_644, 0, &ours.cred)
            .map_err(told("create"))?;
        let file = ours.fs.open(attr.key, RW, &ours.cred).map_err(told("open"))?;
        file.write_at(0, &body, &ours.cred).map_err(told("write"))?;
        drop(file);
        ours.fs.unlink(dir, &name, &ours.cred).map_err(told("unlink"))
    })
}

fn host_round_trip(dir: &Path, count: u64) -> anyhow::Result<f64> {
    let body = [7_u8; 1024];
    let dir = rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())?;
    let mut name = *b"file-00000000";
    per_op(count, |step| {
        number(&mut name, step);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, &name[..], flags, Mode::from_raw_mode(0o644))?;
        rustix::io::pwrite(&file, &body, 0)?;
        drop(file);
        Ok(rustix::fs::unlinkat(&dir, &name[..], AtFlags::empty())?)
    })
}

/// Writes the digits of `step` over the end of the name, without allocation.
pub fn number(name: &mut [u8], mut step: u64) {
    for digit in name.iter_mut().rev().take(8) {
        *digit = b'0' + (step % 10) as u8;
        step /= 10;
    }
}

fn make_dir(ours: &Ours) -> anyhow::Result<InodeKey> {
    let dir = ours
        .fs
        .create(ours.fs.root(), b"names", 0o040_755, 0, &ours.cred)
        .map_err(told("mkdir"))?;
    let mut name = *b"name-00000000";
    for step in 0..FILES {
        number(&mut name, step);
        ours.fs
            .create(dir.key, &name, 0o100_644, 0, &ours.cred)
            .map_err(told("create"))?;
    }
    ours.settle()?;
    Ok(dir.key)
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    let plan = Plan {
        name: "names",
        on_disk: false,
        nvm_bytes: 1024 * MIB,
        log_bytes: options.pick(32 * MIB, 64 * MIB),
        digest: true,
        in_place: true,
    };
    let embedded = Plan {
        name: "names-embedded",
        ..plan
    };
    let no_digest = Plan {
        name: "names-no-digest",
        log_bytes: 768 * MIB,
        digest: false,
        ..plan
    };
    let all = [
        ("LibFS", Ours::daemon(&plan, places)?),
        ("embedded", Ours::embedded(&embedded, places)?),
        ("no digest", Ours::daemon(&no_digest, places)?),
    ];
    let mut hosts = vec![("tmpfs", places.tmpfs())];
    hosts.extend(
        places
            .hosts
            .iter()
            .map(|host| (host.names[2], host.dir.as_path())),
    );
    let dirs: Vec<_> = all
        .iter()
        .map(|(_, ours)| make_dir(ours))
        .collect::<Result<_, _>>()?;

    let mut sides = Vec::new();
    let ten = 10 * plan.log_bytes / ROUND_TRIP_BYTES;
    // No more than there is space for: else the calls wait for a digest of all that is logged, time and
    // again.
    let without_digest = no_digest.nvm_bytes / BLOCK_BYTES / ROUND_TRIP_BLOCKS / 2;
    for ((name, ours), dir) in all.iter().zip(&dirs) {
        let count = if *name == "no digest" { without_digest } else { ten };
        sides.push(Side::new(name, move || {
            let ns = our_round_trip(ours, *dir, count)?;
            ours.settle()?;
            Ok(ns)
        }));
    }
    for (name, dir) in &hosts {
        sides.push(Side::new(name, move || host_round_trip(dir, ten.min(50_000))));
    }
    let count = options.pick(3, 7);
    let values = rounds(count, &mut sides)?;
    drop(sides);
    report.row(Row {
        name: "create, write 1 KiB, close, unlink".into(),
        unit: Unit::Micros,
        values,
        targets: vec![
            Target::Below("LibFS", 2.5),
            Target::Below("no digest", 2.5),
            Target::AtMost("LibFS", 1.0, "tmpfs"),
        ],
    });
    stat_and_open(report, &all[0].1, dirs[0], &hosts, count)
}

fn stat_and_open(
    report: &mut Report,
    ours: &Ours,
    dir: InodeKey,
    hosts: &[(&'static str, &Path)],
    count: usize,
) -> anyhow::Result<()> {
    const CALLS: u64 = 200_000;
    let handles: Vec<_> = hosts
        .iter()
        .map(|(name, dir)| {
            let dir = dir.join("names");
            std::fs::create_dir(&dir)?;
            let mut name_of = *b"name-00000000";
            let handle = rustix::fs::open(&dir, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())?;
            for step in 0..FILES {
                number(&mut name_of, step);
                let flags = OFlags::CREATE | OFlags::RDWR;
                rustix::fs::openat(&handle, &name_of[..], flags, Mode::from_raw_mode(0o644))?;
            }
            Ok((*name, handle))
        })
        .collect::<anyhow::Result<_>>()?;
    let mut name = *b"name-00000000";
    let mut sides = vec![Side::new("LibFS", move || {
        per_op(CALLS, |step| {
            number(&mut name, step % FILES);
            ours.fs.lookup(dir, &name, &ours.cred).map_err(told("stat"))?;
            Ok(())
        })
    })];
    let key = ours.fs.lookup(dir, &name, &ours.cred).map_err(told("stat"))?.key;
    sides.push(Side::new("LibFS, by inode", move || {
        per_op(CALLS, |_| {
            std::hint::black_box(ours.fs.getattr(key).map_err(told("stat"))?);
            Ok(())
        })
    }));
    for (host, handle) in &handles {
        sides.push(Side::new(host, move || {
            per_op(CALLS, |step| {
                number(&mut name, step % FILES);
                rustix::fs::statat(handle, &name[..], AtFlags::empty())?;
                Ok(())
            })
        }));
    }
    let values = rounds(count, &mut sides)?;
    report.row(Row {
        name: "stat of a name in a directory of 1,000".into(),
        unit: Unit::Micros,
        values,
        targets: vec![
            Target::Below("LibFS", 0.15),
            Target::Below("LibFS, by inode", 0.15),
        ],
    });
    let mut sides = vec![Side::new("LibFS", move || {
        per_op(CALLS, |step| {
            number(&mut name, step % FILES);
            let attr = ours.fs.lookup(dir, &name, &ours.cred).map_err(told("lookup"))?;
            drop(ours.fs.open(attr.key, RW, &ours.cred).map_err(told("open"))?);
            Ok(())
        })
    })];
    sides.push(Side::new("LibFS, by inode", move || {
        per_op(CALLS, |_| {
            drop(ours.fs.open(key, RW, &ours.cred).map_err(told("open"))?);
            Ok(())
        })
    }));
    for (host, handle) in &handles {
        sides.push(Side::new(host, move || {
            per_op(CALLS, |step| {
                number(&mut name, step % FILES);
                drop(rustix::fs::openat(
                    handle,
                    &name[..],
                    OFlags::RDWR,
                    Mode::empty(),
                )?);
                Ok(())
            })
        }));
    }
    let values = rounds(count, &mut sides)?;
    report.row(Row {
        name: "open and close of a name in a directory of 1,000".into(),
        unit: Unit::Micros,
        values,
        targets: vec![
            Target::Below("LibFS", 0.30),
            Target::Below("LibFS, by inode", 0.30),
        ],
    });
    Ok(())
}
