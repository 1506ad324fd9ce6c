//! Compares the policies of placement in a whole pool: NVM in memory, an SSD and an HDD slowed down to a
//! model, four threads that read and write a hot set which changes.
//!
//! `cargo run --release -p varve-embed --example placement_load [SECONDS] [POLICY...]` prints requests a second
//! for each policy (default: all) and phase, and what was moved. SECONDS: length of a phase, default 15.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_embed::{Embedded, SimPool};
use varve_format::InodeKey;
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::{Config, Parts, PolicyName, SimLogs};
use varve_libfs::{Fs, OpenFlags};
use varve_media::emulated::{DiskModel, EmulatedDisk};
use varve_media::sim::SimWorld;
use varve_store::{Devices, OpenOptions, Store};

const MIB: u64 = 1 << 20;
/// Files of 1 MiB.
const FILES: u64 = 192;
/// Files of them in the hot set.
const HOT: u64 = 32;
/// Bytes of a request.
const REQUEST: u64 = 16 << 10;
const THREADS: u64 = 4;
const PHASES: u64 = 3;

/// A pool whose SSD and HDD take their time.
fn open(policy: PolicyName) -> Result<Embedded, Box<dyn Error>> {
    let world = SimWorld::new();
    let pool = SimPool {
        nvm_bytes: 64 * MIB,
        journal_bytes: 4 * MIB,
        ssd_bytes: 80 * MIB,
        hdd_bytes: 256 * MIB,
        ..SimPool::default()
    };
    pool.mkfs(&world)?;
    let devices = SimPool::devices(&world)?;
    let slow = |device, model| Arc::new(EmulatedDisk::new(device, model)) as _;
    let devices = Devices {
        ssd: devices.ssd.map(|device| slow(device, DiskModel::SSD)),
        hdd: devices.hdd.map(|device| slow(device, DiskModel::HDD)),
        ..devices
    };
    let (store, _) = Store::open(devices, OpenOptions::default())?;
    let logs = Arc::new(SimLogs::new(world, pool.medium));
    let config = Config {
        placement_policy: policy,
        ..Config::default()
    };
    let embedded = Embedded::open(Parts::new(store, logs, config, Arc::new(SystemClock)))?;
    embedded.start()?;
    Ok(embedded)
}

/// One thread's requests until it is told to stop; returns their number.
fn requests(fs: &Fs, keys: &[InodeKey], seed: u64, write_percent: u64, stop: &AtomicBool) -> u64 {
    let (user, mut state, mut done) = (Cred::root(), seed | 1, 0);
    let mut buffer = vec![7; REQUEST as usize];
    let mut dice = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let hot = (seed >> 32) * HOT;
    while !stop.load(Ordering::Relaxed) {
        let file = if dice(100) < 90 {
            (hot + dice(HOT)) % FILES
        } else {
            dice(FILES)
        };
        let at = dice(MIB / REQUEST) * REQUEST;
        let Ok(file) = fs.open(keys[file as usize], OpenFlags::READ_WRITE, &user) else {
            continue;
        };
        let result = if dice(100) < write_percent {
            file.write_at(at, &buffer, &user)
        } else {
            file.read_at(at, &mut buffer)
        };
        done += u64::from(result.is_ok());
    }
    done
}

fn phase(fs: &Fs, keys: &[InodeKey], phase: u64, write_percent: u64, time: Duration) -> f64 {
    let (stop, done, begun) = (AtomicBool::new(false), AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (stop, done) = (&stop, &done);
            let seed = (phase << 32) | ((thread + 1) * 0x9e37_79b9);
            scope.spawn(move || {
                done.fetch_add(requests(fs, keys, seed, write_percent, stop), Ordering::Relaxed);
            });
        }
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
    });
    done.into_inner() as f64 / begun.elapsed().as_secs_f64()
}

fn run(policy: PolicyName, write_percent: u64, time: Duration) -> Result<(), Box<dyn Error>> {
    let pool = open(policy)?;
    let (fs, user) = (pool.mount()?, Cred::root());
    let mut keys = Vec::new();
    for number in 0..FILES {
        let attr = fs.create(fs.root(), format!("f{number}").as_bytes(), 0o100_644, 0, &user)?;
        let file = fs.open(attr.key, OpenFlags::READ_WRITE, &user)?;
        for at in (0..MIB).step_by(256 << 10) {
            file.write_at(at, &vec![number as u8; 256 << 10], &user)?;
        }
        keys.push(attr.key);
    }
    fs.sync()?;
    pool.kernel().digest_all()?;
    let mut line = format!("{:<10} {write_percent:>3} % writes:", policy.name());
    for number in 0..PHASES {
        let rate = phase(&fs, &keys, number, write_percent, time);
        line += &format!(" {rate:>8.0}/s");
    }
    let status = pool.kernel().status();
    let moved: u64 = status.moved.iter().map(|moved| moved.blocks).sum();
    let used: Vec<u64> = status.tiers.iter().map(|tier| tier.used_bytes / MIB).collect();
    println!("{line}; {} MiB moved, {used:?} MiB used", moved * 4096 / MIB);
    for tier in &status.tiers {
        let (read, write) = (&tier.figures.read, &tier.figures.write);
        let us = |ns: Option<u64>| ns.unwrap_or(0) / 1000;
        println!(
            "{:<10} {}: {} reads of {} µs, {} MiB; {} writes of {} µs, {} MiB",
            "",
            tier.tier,
            read.samples,
            us(read.response_ns),
            tier.read_bytes / MIB,
            write.samples,
            us(write.response_ns),
            tier.written_bytes / MIB
        );
    }
    for moved in &status.moved {
        let (from, to, mib) = (&moved.from, &moved.to, moved.blocks * 4096 / MIB);
        println!("{:<10} {from} to {to}: {mib} MiB of {}", "", moved.cause.reason());
    }
    fs.unmount()?;
    Ok(pool.shutdown()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let seconds = std::env::args().nth(1).map_or(Ok(15), |text| text.parse())?;
    let named: Vec<String> = std::env::args().skip(2).collect();
    let is_named = |policy: &PolicyName| named.is_empty() || named.iter().any(|name| name == policy.name());
    for write_percent in [5, 50] {
        for policy in PolicyName::ALL.into_iter().filter(is_named) {
            run(policy, write_percent, Duration::from_secs(seconds))?;
        }
    }
    Ok(())
}
