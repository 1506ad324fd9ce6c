//! This library's ways to a device beside fio's, on one file of the disk.

use crate::common::{Dice, output};
use crate::{MIB, Options, median, processor_us};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use varve_media::{AlignedBuf, BlockDevice, BlockOptions, FileDevice};

const FILE_BYTES: u64 = 1024 * MIB;

/// What a side did in its turn.
#[derive(Default, Clone, Copy)]
struct Turn {
    per_second: f64,
    /// Microseconds from the begin of a transfer to its end.
    us: f64,
    /// Microseconds of processors for each.
    processor_us: f64,
}

#[derive(Clone, Copy)]
struct Load {
    /// fio's name.
    name: &'static str,
    bytes: usize,
    /// Transfers under way.
    depth: usize,
    /// Transfers of a call of ours; more than `depth` only where that is all that a ring has under way.
    call: usize,
}

/// Transfers under way, and in a call.
const DEPTHS: [(usize, usize); 4] = [(1, 1), (8, 8), (32, 32), (32, 256)];

impl Load {
    fn writes(self) -> bool {
        self.name.ends_with("write")
    }

    fn is_random(self) -> bool {
        self.name.starts_with("rand")
    }
}

fn ours(device: &dyn BlockDevice, load: Load, seconds: f64, dice: &mut Dice) -> anyhow::Result<Turn> {
    let mut memory = AlignedBuf::new(load.call * load.bytes);
    let places = device.len_bytes() / load.bytes as u64;
    let (mut done, mut next) = (0_u64, 0_u64);
    let (begun, used) = (Instant::now(), processor_us());
    while begun.elapsed().as_secs_f64() < seconds {
        let mut place = || {
            next = if load.is_random() {
                dice.below(places)
            } else {
                (next + 1) % places
            };
            next * load.bytes as u64
        };
        if load.writes() {
            let buffers = memory.bytes().chunks(load.bytes);
            device.write_batch(&buffers.map(|buffer| (place(), buffer)).collect::<Vec<_>>())?;
        } else {
            let buffers = memory.bytes_mut().chunks_mut(load.bytes);
            device.read_batch(&mut buffers.map(|buffer| (place(), buffer)).collect::<Vec<_>>())?;
        }
        done += load.call as u64;
    }
    let took = begun.elapsed().as_secs_f64();
    Ok(Turn {
        per_second: done as f64 / took,
        us: took * 1e6 * load.depth as f64 / done as f64,
        processor_us: (processor_us() - used) / done as f64,
    })
}

fn fio(file: &Path, load: Load, seconds: f64) -> anyhow::Result<Turn> {
    let mut command = Command::new("fio");
    // Its buffers in large pages, as ours are.
    command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    command.args([
        "--name=fio",
        "--ioengine=io_uring",
        "--direct=1",
        "--time_based",
        "--output-format=json",
    ]);
    command.args([
        "--fixedbufs=1",
        "--registerfiles=1",
        "--norandommap",
        "--randrepeat=0",
    ]);
    command.arg(format!("--filename={}", file.display()));
    command.arg(format!("--rw={}", load.name));
    command.arg(format!("--bs={}", load.bytes));
    command.arg(format!("--iodepth={}", load.depth));
    command.arg(format!("--runtime={seconds}s"));
    command.arg(format!("--size={FILE_BYTES}"));
    let said = output(&mut command)?;
    let told: Value = serde_json::from_str(&said[said.find('{').unwrap_or(0)..])?;
    let job = &told["jobs"][0];
    let side = if load.writes() {
        &job["write"]
    } else {
        &job["read"]
    };
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let per_second = number(&side["iops"]);
    Ok(Turn {
        per_second,
        us: number(&side["lat_ns"]["mean"]) / 1000.0,
        processor_us: (number(&job["usr_cpu"]) + number(&job["sys_cpu"])) * 1e4 / per_second,
    })
}

fn shown(turns: &[Turn]) -> Turn {
    let of = |what: fn(&Turn) -> f64| median(&mut turns.iter().map(what).collect::<Vec<_>>());
    Turn {
        per_second: of(|turn| turn.per_second),
        us: of(|turn| turn.us),
        processor_us: of(|turn| turn.processor_us),
    }
}

pub fn run(options: &Options, top: &Path) -> anyhow::Result<()> {
    let file = top.join("disk.img");
    crate::places::fill(&file, FILE_BYTES, 0x5a)?;
    let device = FileDevice::open(&file, BlockOptions::default())?;
    let has_fio = output(Command::new("fio").arg("--version"));
    println!("\nbackends: {} beside {has_fio:?}", device.info());
    println!(
        "{:9} {:>5} {:>5} {:>5} | {:>9} {:>9} {:>8} | {:>9} {:>9} {:>8} | {:>6} {:>6} {:>6}",
        "load",
        "KiB",
        "depth",
        "call",
        "ours/s",
        "us",
        "cpu us",
        "fio/s",
        "us",
        "cpu us",
        "ops",
        "time",
        "cpu"
    );
    let mut dice = Dice::new(7);
    for name in ["randread", "randwrite", "read", "write"] {
        for kib in [4, 64, 1024] {
            for (depth, call) in DEPTHS {
                let load = Load {
                    name,
                    bytes: kib << 10,
                    depth,
                    call,
                };
                let (mut own, mut others) = (Vec::new(), Vec::new());
                for _ in 0..options.rounds {
                    own.push(ours(&device, load, options.seconds / 2.0, &mut dice)?);
                    if has_fio.is_ok() {
                        others.push(fio(&file, load, (options.seconds / 2.0).max(1.0))?);
                    }
                }
                let (own, other) = (shown(&own), shown(&others));
                println!(
                    "{name:9} {kib:5} {depth:5} {call:5} | {:9.0} {:9.1} {:8.1} | {:9.0} {:9.1} {:8.1} | {:6.2} {:6.2} {:6.2}",
                    own.per_second,
                    own.us,
                    own.processor_us,
                    other.per_second,
                    other.us,
                    other.processor_us,
                    own.per_second / other.per_second,
                    own.us / other.us,
                    own.processor_us / other.processor_us,
                );
            }
        }
    }
    std::fs::remove_file(&file)?;
    Ok(())
}
