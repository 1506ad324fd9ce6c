//! What waits for a disk: fsync on the `file` backend; and starting: after a clean stop, and after a crash
//! with a full log.

use crate::Options;
use crate::places::Places;
use crate::pools::{Files, Ours, Plan, make, told};
use crate::report::{Report, Row, Target, Unit};
use crate::timing::{Side, per_op, rounds};
use rustix::fs::{Mode, OFlags};
use std::os::unix::fs::FileExt;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// A buffer for O_DIRECT.
#[repr(C, align(4096))]
struct Block([u8; 4096]);

fn fsync(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    let count = options.pick(200, 1000);
    let plan = Plan {
        name: "on-disk",
        on_disk: true,
        nvm_bytes: 512 * MIB,
        log_bytes: 64 * MIB,
        digest: true,
        in_place: true,
    };
    let ours = Ours::daemon(&plan, places)?;
    let path = places.disk().join("device");
    {
        let file = std::fs::File::create(&path)?;
        for at in 0..64 {
            file.write_all_at(&vec![1; 1 << 20], at * MIB)?;
        }
        file.sync_all()?;
    }
    let device = rustix::fs::open(
        &path,
        OFlags::RDWR | OFlags::DIRECT | OFlags::DSYNC,
        Mode::empty(),
    );
    let block = Box::new(Block([7; 4096]));
    let mut sides = Vec::new();
    match device {
        Ok(device) => sides.push(Side::new("device", move || {
            per_op(count, |step| {
                rustix::io::pwrite(&device, &block.0, step % 16_384 * 4096)?;
                Ok(())
            })
        })),
        Err(error) => report.remark(format!("SKIPPED: the disk without a file system: {error}")),
    }
    let (file, page) = (ours.fresh("appended")?, vec![7_u8; 4096]);
    let cred = &ours.cred;
    let ours_page = page.clone();
    sides.push(Side::new("LibFS", move || {
        per_op(count, |_| {
            file.append(&ours_page, cred).map_err(told("append"))?;
            file.fsync(true).map_err(told("fsync"))
        })
    }));
    let file = std::fs::File::create(places.disk().join("appended"))?;
    let mut at = 0;
    sides.push(Side::new("disk's file system", move || {
        per_op(count, |_| {
            file.write_all_at(&page, at)?;
            at += 4096;
            Ok(file.sync_data()?)
        })
    }));
    let values = rounds(options.pick(5, 9), &mut sides)?;
    drop(sides);
    report.row(Row {
        name: "fsync after an append of 4 KiB, NVM in a file on the disk".into(),
        unit: Unit::Micros,
        values,
        targets: vec![
            Target::AtMost("LibFS", 1.15, "device"),
            Target::AtMost("LibFS", 1.0, "disk's file system"),
        ],
    });
    Ok(())
}

/// Fills the log without a digest and leaves it so.
fn fill(files: &Files, bytes: u64) -> anyhow::Result<()> {
    let daemon = files.serve()?;
    let fs = files.session()?;
    let cred = varve_ipc::Cred::root();
    let attr = fs
        .create(fs.root(), b"big", 0o100_644, 0, &cred)
        .map_err(told("create"))?;
    let file = fs.open(attr.key, crate::pools::RW, &cred).map_err(told("open"))?;
    let page = [7_u8; 4096];
    for at in (0..bytes).step_by(page.len()) {
        file.write_at(at, &page, &cred).map_err(told("write"))?;
    }
    daemon.kill();
    // The session cannot be ended any more; its log stays as a crash leaves it.
    drop(file);
    drop(fs);
    Ok(())
}

fn starts(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    let log = options.pick(256 * MIB, 1024 * MIB);
    let plan = Plan {
        name: "starts",
        on_disk: false,
        nvm_bytes: 2 * log + 1024 * MIB,
        // A log that is full to 90 % asks for a digest.
        log_bytes: log + log / 4,
        digest: false,
        in_place: true,
    };
    let files = make(&plan, places)?;
    let start = |files: &Files| -> anyhow::Result<_> {
        let start = Instant::now();
        let daemon = files.serve()?;
        let fs = files.session()?;
        let ns = start.elapsed().as_nanos() as f64;
        Ok((ns, daemon, fs))
    };
    fill(&files, log)?;
    let (crash_ns, daemon, fs) = start(&files)?;
    let attr = fs
        .lookup(fs.root(), b"big", &varve_ipc::Cred::root())
        .map_err(told("lookup"))?;
    anyhow::ensure!(
        attr.size_bytes == log,
        "{} bytes came back of {log}",
        attr.size_bytes
    );
    fs.unmount().map_err(told("unmount"))?;
    daemon.stop(&files)?;
    let mut clean = Vec::new();
    for _ in 0..5 {
        let (ns, daemon, fs) = start(&files)?;
        clean.push(ns);
        fs.unmount().map_err(told("unmount"))?;
        daemon.stop(&files)?;
    }
    report.row(Row {
        name: "start of the daemon and a session after a clean stop".into(),
        unit: Unit::Seconds,
        values: vec![("LibFS", crate::timing::median(&mut clean))],
        targets: vec![Target::Below("LibFS", 0.2)],
    });
    report.row(Row {
        name: format!("the same after a crash with {} MiB in the log", log / MIB),
        unit: Unit::Seconds,
        values: vec![("LibFS", crash_ns)],
        targets: vec![Target::Below("LibFS", options.pick(1.25, 5.0))],
    });
    Ok(())
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    fsync(options, places, report)?;
    starts(options, places, report)
}
