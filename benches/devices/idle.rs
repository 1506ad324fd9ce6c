//! What a pool costs that nobody uses, by the way to its SSD: start, stop, memory, processor.

use crate::places::{Loop, Pool};
use crate::{MIB, median};
use std::path::Path;
use std::time::Duration;

/// How long an idle daemon is watched.
const WATCHED: Duration = Duration::from_secs(10);

/// Time on processors of a process in ticks of 10 ms, and its resident memory in MiB.
fn of_process(pid: u32) -> (u64, f64) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name in brackets: state is the third field, times are the 14th and 15th.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .collect();
    let field = |at: usize| fields.get(at - 3).and_then(|text| text.parse::<u64>().ok());
    let ticks = field(14).unwrap_or_default() + field(15).unwrap_or_default();
    (ticks, field(24).unwrap_or_default() as f64 * 4096.0 / MIB as f64)
}

fn row(name: &str, mut pool: Pool) -> anyhow::Result<()> {
    let (mut starts, mut stops) = (vec![pool.started.as_secs_f64() * 1e3], Vec::new());
    for _ in 0..4 {
        stops.push(pool.stop()?.as_secs_f64() * 1e3);
        pool.serve()?;
        starts.push(pool.started.as_secs_f64() * 1e3);
    }
    std::thread::sleep(Duration::from_secs(3));
    let (before, _) = of_process(pool.pid());
    std::thread::sleep(WATCHED);
    let (after, memory) = of_process(pool.pid());
    let percent = (after - before) as f64 / WATCHED.as_secs_f64();
    println!(
        "{name:34} {:9.0} {:9.0} {memory:9.1} {percent:9.2}",
        median(&mut starts),
        median(&mut stops)
    );
    Ok(())
}

pub fn run(top: &Path) -> anyhow::Result<()> {
    println!("\nidle: daemon of a pool with 64 MiB of NVM and 1 GiB of SSD");
    println!(
        "{:34} {:>9} {:>9} {:>9} {:>9}",
        "SSD", "start ms", "stop ms", "MiB", "% of one"
    );
    let make = |name: &str, settings: &str| Pool::make(top, name, "64M", "1G", None, settings);
    row("file, io_uring", make("idle-uring", "")?)?;
    row("file, pread", make("idle-pread", "io_uring = false")?)?;
    row("file, emulated SSD", make("idle-emulated", "emulate = ['ssd']")?)?;
    match Loop::make(top, "idle-loop", 1024 * MIB) {
        Ok(device) => {
            let path = device.path.display().to_string();
            row(
                "loop device",
                Pool::make(top, "idle-device", "64M", &path, Some(device), "")?,
            )?;
        }
        Err(error) => println!("SKIPPED: loop device: {error:#}"),
    }
    println!("not here: ng:, nvme: and spdk: (no NVMe controller, no SPDK); see docs/results/devices.md");
    Ok(())
}
