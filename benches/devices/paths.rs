//! Cold reads and synced writes of whole pools beside the bare device and the kernel's file systems.

use crate::common::Dice;
use crate::places::{Loop, Mounted, Pool};
use crate::{BLOCK, MIB, Options, median};
use rustix::fs::{Advice, Mode, OFlags, fadvise, open};
use rustix::io::{pread, pwrite};
use std::path::Path;
use std::time::Instant;
use varve_libfs::Posix;
use varve_media::AlignedBuf;

/// Bytes of each device, and of the file on it.
const DEVICE_BYTES: u64 = 1024 * MIB;
const FILE_BYTES: u64 = 256 * MIB;
const BLOCKS: u64 = FILE_BYTES / BLOCK as u64;

/// Does one operation on a block of the file.
type Each<'s> = Box<dyn FnMut(u64) -> anyhow::Result<()> + 's>;
/// Begins a round: with empty caches.
type Begin<'s> = Box<dyn Fn() -> anyhow::Result<Each<'s>> + 's>;

struct Side<'s> {
    name: String,
    begin: Begin<'s>,
    /// Medians of the rounds, their means, and the 99th percentiles, in microseconds.
    medians: Vec<f64>,
    means: Vec<f64>,
    tails: Vec<f64>,
}

fn side<'s>(name: &str, begin: impl Fn() -> anyhow::Result<Each<'s>> + 's) -> Side<'s> {
    Side {
        name: name.to_owned(),
        begin: Box::new(begin),
        medians: Vec::new(),
        means: Vec::new(),
        tails: Vec::new(),
    }
}

fn posix<T>(result: Result<T, varve_libfs::Errno>) -> anyhow::Result<T> {
    result.map_err(|errno| anyhow::anyhow!("errno {}", errno.0))
}

/// Runs all sides by turns. `next` gives the blocks of a round.
fn by_turns(options: &Options, sides: &mut [Side<'_>], once: bool) -> anyhow::Result<()> {
    for round in 0..options.rounds as u64 {
        for side in &mut *sides {
            let mut each = (side.begin)()?;
            let mut dice = Dice::new(round + 1);
            let mut order: Vec<u64> = (0..BLOCKS).collect();
            for at in (1..order.len()).rev() {
                order.swap(at, dice.below(at as u64 + 1) as usize);
            }
            let mut took = Vec::new();
            let begun = Instant::now();
            for block in order
                .iter()
                .cycle()
                .take(if once { order.len() } else { usize::MAX })
            {
                let before = begun.elapsed();
                if before.as_secs_f64() > options.seconds {
                    break;
                }
                each(*block)?;
                took.push((begun.elapsed() - before).as_secs_f64() * 1e6);
            }
            side.means.push(took.iter().sum::<f64>() / took.len() as f64);
            side.medians.push(median(&mut took));
            side.tails.push(took[took.len() * 99 / 100]);
        }
    }
    Ok(())
}

fn report(what: &str, sides: &mut [Side<'_>]) {
    println!("\n{what}: microseconds of one (medians of the rounds)");
    println!(
        "{:34} {:>9} {:>9} {:>9} {:>10} {:>9} {:>9}",
        "side", "median", "mean", "p99", "a second", "/ device", "mean /"
    );
    let mut first = None;
    for side in sides {
        let (mid, mean) = (median(&mut side.medians), median(&mut side.means));
        let (of_mid, of_mean) = *first.get_or_insert((mid, mean));
        println!(
            "{:34} {mid:9.1} {mean:9.1} {:9.1} {:10.0} {:9.2} {:9.2}",
            side.name,
            median(&mut side.tails),
            1e6 / mean,
            mid / of_mid,
            mean / of_mean,
        );
    }
}

fn drop_caches() -> anyhow::Result<()> {
    rustix::fs::sync();
    Ok(std::fs::write("/proc/sys/vm/drop_caches", "3")?)
}

/// Reads of a descriptor of the kernel.
fn kernel_reads(path: &Path, direct: bool) -> anyhow::Result<Each<'static>> {
    drop_caches()?;
    let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
    let fd = open(path, OFlags::RDONLY | flags, Mode::empty())?;
    fadvise(&fd, 0, None, Advice::Random)?;
    let mut buffer = AlignedBuf::new(BLOCK);
    Ok(Box::new(move |block| {
        let got = pread(&fd, buffer.bytes_mut(), block * BLOCK as u64)?;
        anyhow::ensure!(got == BLOCK, "{got} bytes");
        Ok(())
    }))
}

/// Keeps a session's descriptor open as long as it is used.
struct Open(Posix, i32);

impl Drop for Open {
    fn drop(&mut self) {
        let _ = self.0.close(self.1);
        self.0.close_all();
    }
}

fn session(pool: &Pool) -> anyhow::Result<Open> {
    let session = pool.session()?;
    let fd = posix(session.open(b"/f", libc::O_RDWR, 0))?;
    Ok(Open(session, fd))
}

fn pool_reads(pool: &Pool) -> anyhow::Result<Each<'static>> {
    drop_caches()?;
    let open = session(pool)?;
    let mut buffer = AlignedBuf::new(BLOCK);
    Ok(Box::new(move |block| {
        let got = posix(open.0.pread(open.1, buffer.bytes_mut(), block * BLOCK as u64))?;
        anyhow::ensure!(got == BLOCK, "{got} bytes");
        Ok(())
    }))
}

/// Writes the file of a pool; all of it is digested then.
fn furnish(pool: &Pool) -> anyhow::Result<()> {
    let session = pool.session()?;
    let fd = posix(session.open(b"/f", libc::O_CREAT | libc::O_RDWR, 0o600))?;
    let piece = vec![0x5a; 1 << 20];
    for at in 0..FILE_BYTES / MIB {
        posix(session.pwrite(fd, &piece, at * MIB))?;
    }
    posix(session.fsync(fd))?;
    posix(session.close(fd))?;
    drop(session);
    pool.digest()
}

fn on_loop(top: &Path, name: &str, nvm: &str, settings: &str) -> anyhow::Result<Pool> {
    let device = Loop::make(top, &format!("{name}-ssd"), DEVICE_BYTES)?;
    let path = device.path.display().to_string();
    Pool::make(top, name, nvm, &path, Some(device), settings)
}

/// File systems of the kernel, each on a loop device.
fn kernel_sides(top: &Path, file: impl Fn(&Path) -> anyhow::Result<()>) -> Vec<Mounted> {
    let mut mounted = Vec::new();
    for kind in ["ext4", "xfs"] {
        match Mounted::make(top, kind, DEVICE_BYTES).and_then(|made| file(&made.dir.join("f")).map(|()| made))
        {
            Ok(made) => mounted.push(made),
            Err(error) => println!("SKIPPED: {kind}: {error:#}"),
        }
    }
    mounted
}

/// A loop device for the bare side of `what`, if this machine has them.
fn bare(top: &Path, what: &str) -> Option<Loop> {
    let made = Loop::make(top, "bare", DEVICE_BYTES);
    made.inspect_err(|error| println!("SKIPPED: {what}: {error:#}"))
        .ok()
}

pub fn reads(options: &Options, top: &Path) -> anyhow::Result<()> {
    let top = &top.join("reads");
    std::fs::create_dir(top)?;
    let Some(device) = bare(top, "cold reads") else {
        return Ok(());
    };
    let mounted = kernel_sides(top, |file| crate::places::fill(file, FILE_BYTES, 0x5a));
    // NVM holds a part of the file only; the rest is on SSD, and stays there.
    let still = "placement_high_percent = 60\nplacement_low_percent = 40\n";
    let direct = on_loop(top, "direct", "64M", still)?;
    let mediated = on_loop(top, "mediated", "64M", &format!("{still}direct_reads = false\n"))?;
    let emulated = Pool::make(
        top,
        "emulated",
        "64M",
        "1G",
        None,
        &format!("{still}emulate = ['ssd']\n"),
    )?;
    let slow = format!("{still}emulate = ['ssd']\ndirect_reads = false\n");
    let slow = Pool::make(top, "emulated-mediated", "64M", "1G", None, &slow)?;
    let pools = [&direct, &mediated, &emulated, &slow];
    for pool in pools {
        furnish(pool)?;
        let session = pool.session()?;
        let pin = varve_ipc::PIN_ATTRIBUTE.as_bytes();
        posix(session.setxattr(b"/f", pin, b"ssd", 0))?;
        wait_for_ssd(pool)?;
    }
    let mut sides = vec![side("the device (loop, O_DIRECT)", || {
        kernel_reads(&device.path, true)
    })];
    for mounted in &mounted {
        let name = mounted.dir.file_name().unwrap_or_default().to_string_lossy();
        sides.push(side(&name, || kernel_reads(&mounted.dir.join("f"), false)));
    }
    let names = [
        "varve",
        "varve, by the daemon",
        "varve, emulated SSD (80 us)",
        "the same, by the daemon",
    ];
    for (name, pool) in names.into_iter().zip(pools) {
        sides.push(side(name, move || pool_reads(pool)));
    }
    by_turns(options, &mut sides, true)?;
    report("cold reads of 4 KiB at random places", &mut sides);
    Ok(())
}

/// Waits until all of the file is on SSD.
fn wait_for_ssd(pool: &Pool) -> anyhow::Result<()> {
    let until = Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let said = varve_ipc::socket::admin(&pool.dir.join("sock"), varve_ipc::Admin::Status)?;
        let told: serde_json::Value = serde_json::from_str(&said)?;
        let tiers = told["tiers"].as_array().cloned().unwrap_or_default();
        let used = |name: &str| {
            let tier = tiers.iter().find(|tier| tier["tier"] == name);
            tier.and_then(|tier| tier["used_bytes"].as_u64())
                .unwrap_or_default()
        };
        if used("ssd") >= FILE_BYTES && used("nvm") < 8 * MIB {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "the file does not come to the SSD: {said}"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn kernel_writes(path: &Path, flags: OFlags) -> anyhow::Result<Each<'static>> {
    let fd = open(path, OFlags::RDWR | flags, Mode::empty())?;
    let mut buffer = AlignedBuf::new(BLOCK);
    buffer.bytes_mut().fill(7);
    let syncs = !flags.contains(OFlags::DSYNC);
    Ok(Box::new(move |block| {
        pwrite(&fd, buffer.bytes(), block * BLOCK as u64)?;
        if syncs {
            rustix::fs::fdatasync(&fd)?;
        }
        Ok(())
    }))
}

pub fn writes(options: &Options, top: &Path) -> anyhow::Result<()> {
    let top = &top.join("writes");
    std::fs::create_dir(top)?;
    let Some(device) = bare(top, "synced writes") else {
        return Ok(());
    };
    let mounted = kernel_sides(top, |file| crate::places::fill(file, FILE_BYTES, 0x5a));
    // Far less NVM than is written: what is measured has the digest and the moves to SSD in it.
    let pool = on_loop(top, "pool", "64M", "")?;
    furnish(&pool)?;
    let bare = OFlags::DIRECT | OFlags::DSYNC;
    let mut sides = vec![side("the device (loop, O_DSYNC)", || {
        kernel_writes(&device.path, bare)
    })];
    for mounted in &mounted {
        let name = mounted.dir.file_name().unwrap_or_default().to_string_lossy();
        sides.push(side(&name, || {
            kernel_writes(&mounted.dir.join("f"), OFlags::empty())
        }));
    }
    sides.push(side("varve", || {
        let open = session(&pool)?;
        let buffer = [7; BLOCK];
        Ok(Box::new(move |block| {
            posix(open.0.pwrite(open.1, &buffer, block * BLOCK as u64))?;
            posix(open.0.fdatasync(open.1))
        }))
    }));
    by_turns(options, &mut sides, false)?;
    report("synced writes of 4 KiB at random places", &mut sides);
    Ok(())
}
