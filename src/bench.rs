//! `varve bench`: compares small calls of one thread through LibFS and the host's file system. A first
//! impression; `cargo bench` is the measurement.

use crate::cli::BenchArgs;
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use varve_libfs::{Cred, Fs, FsOptions, OpenFlags, SocketConnector};

const CALL_BYTES: usize = 4096;
/// Number of files in the test of small files.
const FILES: u64 = 2000;
/// Number of calls in tests that wait for a disk at each call.
const SYNCED_CALLS: u64 = 200;

/// One row of the result: nanoseconds per call, or why a value is missing.
struct Row {
    name: &'static str,
    varve_ns: f64,
    host_ns: f64,
    host_synced_ns: Option<f64>,
}

fn timed(calls: u64, mut call: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    for i in 0..calls {
        call(i)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / calls.max(1) as f64)
}

/// Maps `i` to a permutation of `0..calls` that is identical in each run.
fn shuffled(i: u64, calls: u64) -> u64 {
    // An odd factor permutes the residues of a power of two, to which the caller rounds `calls`.
    i.wrapping_mul(0x9E37_79B9_7F4A_7C15) % calls
}

/// A directory on the host's file system, removed on drop.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `varve bench`.
pub fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    if !(1..=16_384).contains(&args.mib) {
        bail!(crate::exit::Usage(format!(
            "--mib {} is out of bounds: 1 to 16384",
            args.mib
        )));
    }
    let pool = Pool::open(&args.pool)?;
    pool.require_daemon()?;
    let calls = (args.mib * (1 << 20) / CALL_BYTES as u64).next_power_of_two();
    let connector = Arc::new(SocketConnector { path: pool.socket() });
    let fs = Fs::mount(connector, FsOptions::default()).context("cannot open a session")?;
    let rows = run(&fs, pool.dir(), calls);
    let ended = fs.unmount();
    let rows = rows?;
    ended.map_err(|error| anyhow::anyhow!("the session did not end in order: {error}"))?;
    show(args, &pool, calls, &rows);
    Ok(())
}

fn run(fs: &Fs, dir: &Path, calls: u64) -> anyhow::Result<Vec<Row>> {
    let cred = Cred {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
    };
    let name = format!(".bench-{}", std::process::id());
    let top = fs
        .create(fs.root(), name.as_bytes(), 0o040_700, 0, &cred)
        .map_err(told("make a directory"))?;
    let host = Scratch(dir.join(format!("bench-{}", std::process::id())));
    std::fs::create_dir(&host.0).with_context(|| format!("cannot make {}", host.0.display()))?;
    let result = rows(fs, top.key, &host.0, calls, &cred);
    let _ = fs.unlink(top.key, b"file", &cred);
    let _ = fs.rmdir(fs.root(), name.as_bytes(), &cred);
    result
}

fn told(what: &'static str) -> impl Fn(varve_libfs::Errno) -> anyhow::Error {
    move |error| anyhow::anyhow!("cannot {what} in the pool: {error}")
}

fn rows(
    fs: &Fs,
    dir: varve_format::InodeKey,
    host: &Path,
    calls: u64,
    cred: &Cred,
) -> anyhow::Result<Vec<Row>> {
    let body = vec![0x5a_u8; CALL_BYTES];
    let attr = fs
        .create(dir, b"file", 0o100_600, 0, cred)
        .map_err(told("make a file"))?;
    let flags = OpenFlags::READ_WRITE;
    let ours = fs.open(attr.key, flags, cred).map_err(told("open a file"))?;
    let path = host.join("file");
    let theirs = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    let at = |i: u64| i * CALL_BYTES as u64;
    let mut rows = Vec::new();
    let mut row = |name, varve_ns, host_ns, host_synced_ns| {
        rows.push(Row {
            name,
            varve_ns,
            host_ns,
            host_synced_ns,
        });
    };
    row(
        "append",
        timed(calls, |i| {
            ours.write_at(at(i), &body, cred)
                .map(drop)
                .map_err(told("append"))
        })?,
        timed(calls, |i| Ok(theirs.write_all_at(&body, at(i))?))?,
        Some(timed(SYNCED_CALLS, |i| {
            Ok(theirs
                .write_all_at(&body, at(calls + i))
                .and_then(|()| theirs.sync_data())?)
        })?),
    );
    row(
        "overwrite, random",
        timed(calls, |i| {
            ours.write_at(at(shuffled(i, calls)), &body, cred)
                .map(drop)
                .map_err(told("overwrite"))
        })?,
        timed(calls, |i| Ok(theirs.write_all_at(&body, at(shuffled(i, calls)))?))?,
        Some(timed(SYNCED_CALLS, |i| {
            Ok(theirs
                .write_all_at(&body, at(shuffled(i, calls)))
                .and_then(|()| theirs.sync_data())?)
        })?),
    );
    let mut buffer = vec![0; CALL_BYTES];
    row(
        "read, sequential",
        timed(calls, |i| {
            ours.read_at(at(i), &mut buffer).map(drop).map_err(told("read"))
        })?,
        timed(calls, |i| Ok(theirs.read_exact_at(&mut buffer, at(i))?))?,
        None,
    );
    row(
        "read, random",
        timed(calls, |i| {
            ours.read_at(at(shuffled(i, calls)), &mut buffer)
                .map(drop)
                .map_err(told("read"))
        })?,
        timed(calls, |i| {
            Ok(theirs.read_exact_at(&mut buffer, at(shuffled(i, calls)))?)
        })?,
        None,
    );
    drop(ours);
    row(
        "create and unlink",
        timed(FILES, |i| {
            let name = format!("f{i}");
            fs.create(dir, name.as_bytes(), 0o100_600, 0, cred)
                .map_err(told("create"))?;
            fs.unlink(dir, name.as_bytes(), cred).map_err(told("unlink"))
        })?,
        timed(FILES, |i| {
            let path = host.join(format!("f{i}"));
            std::fs::File::create(&path)?;
            Ok(std::fs::remove_file(path)?)
        })?,
        None,
    );
    Ok(rows)
}

fn show(args: &BenchArgs, pool: &Pool, calls: u64, rows: &[Row]) {
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name,
                    "varve_ns": row.varve_ns,
                    "host_ns": row.host_ns,
                    "host_fdatasync_ns": row.host_synced_ns,
                })
            })
            .collect();
        let value = json!({
            "call_bytes": CALL_BYTES,
            "calls": calls,
            "durability": pool.durability(),
            "rows": rows,
        });
        out::line(&format!("{value:#}"));
        return;
    }
    out::line(&format!(
        "{} MiB in calls of 4 KiB, one thread, microseconds a call\n\n{:<20} {:>10} {:>10} {:>18}",
        (calls * CALL_BYTES as u64) >> 20,
        "",
        "LibFS",
        "host",
        "host + fdatasync"
    ));
    for row in rows {
        let synced = row
            .host_synced_ns
            .map_or("-".to_owned(), |ns| format!("{:.1}", ns / 1000.0));
        out::line(&format!(
            "{:<20} {:>10.2} {:>10.2} {synced:>18}",
            row.name,
            row.varve_ns / 1000.0,
            row.host_ns / 1000.0
        ));
    }
    out::line(
        "\nA LibFS write survives the end of any program when it returns; one to the host's page cache \
        survives that too, but not a\n\
         crash of the kernel. Power cuts: see `varve status`. Reads of both come from memory here.",
    );
}
