//! Redis: `redis-server` that appends to its file and syncs before it answers (`appendfsync always`), and
//! `redis-benchmark` over loopback: SET with values of 64 bytes to 16 KiB, one client and fifty; requests a
//! second. The benchmark's process is not served.

use crate::common::output;
use crate::report::{Row, Target, Unit};
use crate::running::{Running, has, install};
use crate::sides::Side;
use crate::workload::Plan;
use anyhow::{Context, bail};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const CLIENTS: [u64; 2] = [1, 50];
/// How long a server may take to answer, and to end.
const LIMIT: Duration = Duration::from_secs(60);

const fn sizes(plan: &Plan) -> &'static [usize] {
    if plan.on_disk {
        &[64, 1024, 16_384]
    } else {
        &[64, 256, 1024, 4096, 16_384]
    }
}

fn named(bytes: usize) -> String {
    if bytes < 1024 {
        format!("{bytes} B")
    } else {
        format!("{} KiB", bytes / 1024)
    }
}

/// Makes sure that the programs are there.
pub fn prepare() -> anyhow::Result<()> {
    install(&["redis-server", "redis-tools"], || {
        has("redis-server") && has("redis-benchmark") && has("redis-check-aof")
    })
}

/// A row for each number of clients and size.
pub fn rows(plan: &Plan) -> Vec<Row> {
    let mut rows = Vec::new();
    for clients in CLIENTS {
        for size in sizes(plan) {
            let target = if plan.on_disk {
                Target::Faster("run", 1.0, "ext4+fsync")
            } else {
                Target::Faster("run", 0.95, "tmpfs")
            };
            let who = if clients == 1 { "1 client" } else { "50 clients" };
            rows.push(Row::new(
                "redis",
                &format!("SET {}, {who}", named(*size)),
                Unit::Rate,
                vec![target],
            ));
        }
    }
    rows
}

/// A port that nobody has at the moment.
fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn serve<'a>(side: &'a Side, dir: &Path, port: u16) -> anyhow::Result<Running<'a>> {
    let mut command = side.command(Path::new("redis-server"));
    let port_word = port.to_string();
    command.args(["--port", &port_word, "--bind", "127.0.0.1", "--save", ""]);
    command.args(["--appendonly", "yes", "--appendfsync", "always"]);
    command.args(["--auto-aof-rewrite-percentage", "0", "--daemonize", "no"]);
    command.arg("--dir").arg(dir).current_dir(dir);
    let mut server = Running::start(command, side, "redis-server")?;
    let began = Instant::now();
    loop {
        // The line that tells that it accepts connections; it ends early when it cannot.
        if server.line(LIMIT)?.contains("Ready to accept connections") {
            break;
        }
        anyhow::ensure!(began.elapsed() < LIMIT, "redis-server does not answer");
    }
    TcpStream::connect(("127.0.0.1", port)).context("redis-server does not answer")?;
    Ok(server)
}

/// Requests a second.
fn load(port: u16, clients: u64, size: usize, requests: u64) -> anyhow::Result<f64> {
    let mut command = Command::new("redis-benchmark");
    let words = [u64::from(port), requests, clients, size as u64].map(|word| word.to_string());
    command.args(["-p", &words[0], "-n", &words[1], "-c", &words[2], "-d", &words[3]]);
    command.args(["-t", "set", "-r", "100000", "--csv"]);
    let said = output(&mut command)?;
    let line = said.lines().find(|line| line.starts_with("\"SET\""));
    let rate = line.and_then(|line| line.split(',').nth(1)?.trim_matches('"').parse().ok());
    rate.with_context(|| format!("redis-benchmark said {said:?}"))
}

/// How many keys the server has.
fn keys(port: u16) -> anyhow::Result<u64> {
    let said = output(Command::new("redis-cli").args(["-p", &port.to_string(), "dbsize"]))?;
    said.parse().ok().with_context(|| format!("dbsize is {said:?}"))
}

/// Ends a server that is to keep what it has.
fn shut(mut server: Running<'_>, port: u16) -> anyhow::Result<()> {
    let _ = Command::new("redis-cli")
        .args(["-p", &port.to_string(), "shutdown", "nosave"])
        .output();
    server.rest(LIMIT)?;
    Ok(())
}

/// One round: a server for each number of clients and size; each append-only file is checked, and the last is
/// read by a server of another way in.
pub fn measure(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    let mut values = Vec::new();
    for (clients, requests) in CLIENTS.into_iter().zip(plan.requests) {
        for size in sizes(plan) {
            let dir = dir.join(format!("{clients}-{size}"));
            std::fs::create_dir(&dir)?;
            let port = free_port()?;
            let server = serve(side, &dir, port)?;
            load(port, clients, *size, requests / 10)?;
            // Of the largest values fewer, so that the file stays below 400 MiB.
            let requests = requests.min((400 << 20) / *size as u64);
            values.push(load(port, clients, *size, requests)?);
            let there = keys(port)?;
            shut(server, port)?;
            check(&side.checker(), &dir, there)?;
            std::fs::remove_dir_all(&dir)?;
        }
    }
    Ok(values)
}

/// Another server reads the file, and must have as many keys.
fn check(side: &Side, dir: &Path, keys_before: u64) -> anyhow::Result<()> {
    let port = free_port()?;
    let server = serve(side, dir, port)?;
    let there = keys(port)?;
    shut(server, port)?;
    if there != keys_before {
        bail!("{there} of {keys_before} keys are there after a new start");
    }
    Ok(())
}
