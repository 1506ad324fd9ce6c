//! Bytes written for the user's bytes, and a mail server's load: what the digest takes in, drops and how
//! fast.

use crate::Options;
use crate::common::Dice;
use crate::name_rows::number;
use crate::places::Places;
use crate::pools::{Ours, Plan, RW, told};
use crate::report::{Report, Row, Target, Unit};
use crate::timing::{Side, per_op_threads, rounds};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;
use varve_format::InodeKey;
use varve_format::log::entry_size;

const MIB: u64 = 1 << 20;

/// Bytes that the user wrote over bytes written to NVM: the log's entries, and what the digest writes of
/// them.
fn efficiency(ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let names = ["128 B", "512 B", "1 KiB", "4 KiB", "16 KiB", "64 KiB"];
    let lens = [128_usize, 512, 1024, 4096, 16_384, 65_536];
    let mut log_only = Vec::new();
    let mut with_digest = Vec::new();
    for (name, len) in names.into_iter().zip(lens) {
        let file = ours.fresh("efficiency")?;
        ours.settle()?;
        let before = ours.files().status()?.digest;
        let data = vec![3; len];
        let count = (64 * MIB) / len as u64;
        for _ in 0..count {
            file.append(&data, &ours.cred).map_err(told("append"))?;
        }
        ours.settle()?;
        let after = ours.files().status()?.digest;
        anyhow::ensure!(
            after.operations - before.operations >= count,
            "only {} operations came",
            after.operations - before.operations
        );
        let user = (count * len as u64) as f64;
        let logged = (count * entry_size(len) as u64) as f64;
        let digested = (after.bytes_out - before.bytes_out) as f64;
        log_only.push((name, user / logged));
        with_digest.push((name, user / (logged + digested)));
    }
    report.row(Row {
        name: "write efficiency, appends: user's bytes over bytes in the log".into(),
        unit: Unit::Plain,
        values: log_only,
        targets: vec![Target::Above("1 KiB", 0.9)],
    });
    report.row(Row {
        name: "the same over bytes in the log and data written by the digest".into(),
        unit: Unit::Plain,
        values: with_digest,
        targets: Vec::new(),
    });
    Ok(())
}

/// Mails of one thread that are there at once.
const MAILS: u64 = 50;
/// First part of a mail and what is appended when it is read.
const PARTS: [usize; 2] = [8 << 10, 4 << 10];

fn our_mail(ours: &Ours, dir: InodeKey, thread: u64, count: u64) -> anyhow::Result<()> {
    let body = vec![thread as u8; PARTS[0]];
    let mut back = vec![0; PARTS[0] + PARTS[1]];
    let (mut dice, mut name) = (Dice::new(thread + 1), *b"mail-0-00000000");
    name[5] = b'0' + thread as u8;
    for step in 0..count {
        // A mail comes in ...
        number(&mut name, step);
        let attr = ours
            .fs
            .create(dir, &name, 0o100_600, 0, &ours.cred)
            .map_err(told("create"))?;
        let file = ours.fs.open(attr.key, RW, &ours.cred).map_err(told("open"))?;
        file.append(&body, &ours.cred).map_err(told("append"))?;
        file.fsync(false).map_err(told("fsync"))?;
        drop(file);
        // ... one that is there is read and answered ...
        number(&mut name, step - dice.below(step.min(MAILS - 1) + 1));
        let attr = ours.fs.lookup(dir, &name, &ours.cred).map_err(told("lookup"))?;
        let file = ours.fs.open(attr.key, RW, &ours.cred).map_err(told("open"))?;
        file.read_at(0, &mut back).map_err(told("read"))?;
        file.append(&body[..PARTS[1]], &ours.cred)
            .map_err(told("append"))?;
        file.fsync(false).map_err(told("fsync"))?;
        drop(file);
        // ... and an old one goes.
        if step >= MAILS {
            number(&mut name, step - MAILS);
            ours.fs.unlink(dir, &name, &ours.cred).map_err(told("unlink"))?;
        }
    }
    for step in count.saturating_sub(MAILS)..count {
        number(&mut name, step);
        ours.fs.unlink(dir, &name, &ours.cred).map_err(told("unlink"))?;
    }
    Ok(())
}

fn host_mail(dir: &Path, thread: u64, count: u64) -> anyhow::Result<()> {
    let body = vec![thread as u8; PARTS[0]];
    let mut back = vec![0; PARTS[0] + PARTS[1]];
    let mut dice = Dice::new(thread + 1);
    let path = |step: u64| dir.join(format!("mail-{thread}-{step:08}"));
    for step in 0..count {
        let mut file = std::fs::File::options()
            .append(true)
            .create_new(true)
            .open(path(step))?;
        file.write_all(&body)?;
        file.sync_all()?;
        let other = path(step - dice.below(step.min(MAILS - 1) + 1));
        let mut file = std::fs::File::options().read(true).append(true).open(other)?;
        file.read_at(&mut back, 0)?;
        file.write_all(&body[..PARTS[1]])?;
        file.sync_all()?;
        if step >= MAILS {
            std::fs::remove_file(path(step - MAILS))?;
        }
    }
    for step in count.saturating_sub(MAILS)..count {
        std::fs::remove_file(path(step))?;
    }
    Ok(())
}

fn mail(options: &Options, places: &Places, ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let threads = 2;
    let count = options.pick(5_000, 20_000);
    let synced = options.pick(200, 1_000);
    let dir = ours
        .fs
        .create(ours.fs.root(), b"mail", 0o040_755, 0, &ours.cred)
        .map_err(told("mkdir"))?
        .key;
    let before = ours.files().status()?.digest;
    let mut sides = vec![Side::new("LibFS", || {
        per_op_threads(threads, count, |thread| our_mail(ours, dir, thread, count))
    })];
    let mut hosts = vec![("tmpfs", places.tmpfs(), count)];
    let synced_hosts = places.hosts.iter();
    hosts.extend(synced_hosts.map(|host| (host.names[1], host.dir.as_path(), synced)));
    for (name, dir, count) in hosts {
        sides.push(Side::new(name, move || {
            per_op_threads(threads, count, |thread| host_mail(dir, thread, count))
        }));
    }
    let values = rounds(options.pick(3, 5), &mut sides)?;
    drop(sides);
    ours.settle()?;
    let after = ours.files().status()?.digest;
    report.row(Row {
        name: "mail: create 8 KiB, fsync; read, append 4 KiB, fsync; unlink; two threads".into(),
        unit: Unit::Micros,
        values,
        targets: vec![Target::AtMost("LibFS", 1.0, "tmpfs")],
    });
    let bytes_in = (after.bytes_in - before.bytes_in) as f64;
    let dropped = bytes_in - (after.bytes_out - before.bytes_out) as f64;
    report.row(Row {
        name: "mail: share of the logged data that the digest drops".into(),
        unit: Unit::Plain,
        values: vec![
            ("LibFS", dropped / bytes_in),
            (
                "files never written, of 1",
                (after.vanished - before.vanished) as f64
                    / ((options.pick(3, 5) + 1) * threads * count) as f64,
            ),
        ],
        targets: vec![Target::Above("LibFS", 0.86)],
    });
    Ok(())
}

/// Time that the daemon needs for a log that is full, by what is in it.
fn digest_speed(ours: &Ours, report: &mut Report) -> anyhow::Result<()> {
    let bytes = ours.log_bytes / 2;
    let mut values = Vec::new();
    for (name, len) in [("4 KiB", 4096_usize), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)] {
        let mut times = Vec::new();
        for _ in 0..3 {
            let file = ours.fresh("digested")?;
            ours.settle()?;
            let data = vec![4; len];
            for _ in 0..bytes / (len as u64 + 64) {
                file.append(&data, &ours.cred).map_err(told("append"))?;
            }
            let start = Instant::now();
            ours.settle()?;
            times.push(start.elapsed().as_nanos() as f64 / bytes as f64);
        }
        values.push((name, crate::timing::median(&mut times)));
    }
    report.row(Row {
        name: "digest of appends that nothing supersedes, by size".into(),
        unit: Unit::Bandwidth,
        values,
        targets: Vec::new(),
    });
    Ok(())
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    let plan = Plan {
        name: "load",
        on_disk: false,
        nvm_bytes: 1024 * MIB,
        log_bytes: 128 * MIB,
        digest: true,
        in_place: true,
    };
    let ours = Ours::daemon(&plan, places)?;
    efficiency(&ours, report)?;
    mail(options, places, &ours, report)?;
    drop(ours);
    let ours = Ours::daemon(
        &Plan {
            name: "digest",
            log_bytes: 384 * MIB,
            nvm_bytes: 1536 * MIB,
            digest: false,
            ..plan
        },
        places,
    )?;
    digest_speed(&ours, report)
}
