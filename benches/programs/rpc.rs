//! Requests over loopback that a server persists before it replies (Strata, table 2.3): 1 KiB to 4 MiB,
//! microseconds from the request to the reply. The server appends each to a file and calls fdatasync; the
//! client is the bench and is not served.

use crate::report::{Row, Target, Unit};
use crate::sides::Side;
use crate::workload::{Plan, argument, ready, result, start};
use anyhow::Context;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const SIZES: [usize; 7] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// From here on the file is written from its beginning again.
const FILE_BYTES: u64 = 256 << 20;
/// Longest wait for a reply.
const LIMIT: Duration = Duration::from_secs(60);

/// A row for each size.
pub fn rows(plan: &Plan) -> Vec<Row> {
    let row = |bytes: &usize| {
        let name = if *bytes < 1 << 20 {
            format!("{} KiB persisted", bytes >> 10)
        } else {
            format!("{} MiB persisted", bytes >> 20)
        };
        let mut targets = Vec::new();
        if plan.on_disk {
            targets.push(Target::Faster("run", 1.0, "ext4+fsync"));
        }
        Row::new("rpc", &name, Unit::Micros, targets)
    };
    SIZES.iter().map(row).collect()
}

/// One round: a server for each size.
pub fn measure(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    let seconds = plan.seconds / 5.0;
    SIZES
        .iter()
        .map(|bytes| one(side, dir, *bytes, seconds))
        .collect()
}

fn one(side: &Side, dir: &Path, bytes: usize, seconds: f64) -> anyhow::Result<f64> {
    let (mut server, port) = start(side, dir, "rpc", &[bytes.to_string()])?;
    let mut stream = TcpStream::connect(("127.0.0.1", port.parse::<u16>().context("no port")?))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    server.say("go")?;
    let request = vec![b'r'; bytes];
    let mut call = || -> anyhow::Result<()> {
        stream.write_all(&request)?;
        let mut reply = [0];
        stream.read_exact(&mut reply).context("no reply")?;
        Ok(())
    };
    (0..5).try_for_each(|_| call())?;
    let (begin, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut count = 0;
    while begin.elapsed() < limit || count == 0 {
        call()?;
        count += 1;
    }
    let took = begin.elapsed().as_secs_f64() * 1e6 / f64::from(count);
    drop(stream);
    result(server)?;
    Ok(took)
}

/// The driver: the server of one client.
pub fn drive(arguments: &[String]) -> anyhow::Result<Value> {
    let bytes: usize = argument(arguments, 0)?;
    let file = std::fs::File::create(format!("log-{bytes}"))?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    ready(&listener.local_addr()?.port().to_string())?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let (mut buffer, mut at, mut count) = (vec![0; bytes], 0, 0_u64);
    while stream.read_exact(&mut buffer).is_ok() {
        file.write_all_at(&buffer, at)?;
        file.sync_data()?;
        stream.write_all(&[1])?;
        count += 1;
        at = if at + bytes as u64 >= FILE_BYTES {
            0
        } else {
            at + bytes as u64
        };
    }
    let len = file.metadata()?.len();
    let expected = (count * bytes as u64).min(FILE_BYTES);
    anyhow::ensure!(len == expected, "the file has {len} bytes after {count} requests");
    Ok(json!({ "count": count }))
}
