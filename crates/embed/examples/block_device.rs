//! A block device of one's own: a mirror of two devices, which the pool uses as its SSD.
//!
//! All that a device needs is the trait [`BlockDevice`]; the line that registers it is `ssd: Some(mirror)`
//! below. `cargo run -p varve-embed --example block_device` breaks one half and reads on.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_embed::Embedded;
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::{Config, Parts, SimLogs};
use varve_libfs::OpenFlags;
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
use varve_media::sim::{SimMedium, SimWorld};
use varve_media::{BlockDevice, DeviceInfo, DeviceState, MediaError, MediumKind};
use varve_store::{Devices, MkfsOptions, OpenOptions, Store};

/// Two devices with the same content. A half that fails a write, a flush or a trim is not used again, since
/// its content is then unknown; a read that fails is repeated on the other half.
struct Mirror {
    halves: [Arc<dyn BlockDevice>; 2],
    failed: [AtomicBool; 2],
}

impl Mirror {
    fn new(halves: [Arc<dyn BlockDevice>; 2]) -> Self {
        Self {
            halves,
            failed: Default::default(),
        }
    }

    fn in_service(&self) -> impl Iterator<Item = usize> {
        (0..2).filter(|half| !self.failed[*half].load(Ordering::Acquire))
    }

    /// Does it on every half in service; an error only when no half has done it.
    fn on_all(&self, act: impl Fn(&dyn BlockDevice) -> Result<(), MediaError>) -> Result<(), MediaError> {
        let (mut done, mut last) = (false, None);
        for half in self.in_service() {
            match act(&*self.halves[half]) {
                Ok(()) => done = true,
                // The caller's mistake, and nothing was done: both halves are still the same.
                Err(error @ (MediaError::OutOfRange { .. } | MediaError::Misaligned { .. })) => {
                    return Err(error);
                }
                Err(error) => last = Some((half, error)),
            }
            if let (true, Some((half, _))) = (done, &last) {
                self.failed[*half].store(true, Ordering::Release);
            }
        }
        match last {
            Some((_, error)) if !done => Err(error),
            _ => Ok(()),
        }
    }
}

impl BlockDevice for Mirror {
    fn len_bytes(&self) -> u64 {
        self.halves.iter().map(|half| half.len_bytes()).min().unwrap_or(0)
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let mut result = Ok(());
        for half in self.in_service() {
            result = self.halves[half].read(off, out);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.on_all(|half| half.write(off, src))
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.on_all(|half| half.flush())
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.on_all(|half| half.trim(off, len))
    }

    fn state(&self) -> DeviceState {
        self.in_service()
            .map(|half| self.halves[half].state())
            .next()
            .unwrap_or(DeviceState::Ok)
    }

    fn info(&self) -> DeviceInfo {
        let names: Vec<String> = self.halves.iter().map(|half| half.name().to_string()).collect();
        DeviceInfo {
            name: "mirror".into(),
            kind: MediumKind::Block,
            backend: format!("mirror of {}", names.join(", ")),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    run()
}

/// Writes through a pool whose SSD is the mirror, breaks one half, and reads everything back.
pub fn run() -> Result<(), Box<dyn Error>> {
    let (world, script, user) = (SimWorld::new(), FaultScript::new(), Cred::root());
    let breaks = FaultyDevice::new(world.add_block("left", 32 << 20), script.clone());
    let mirror = Arc::new(Mirror::new([
        Arc::new(breaks),
        world.add_block("right", 32 << 20),
    ]));
    let devices = Devices {
        nvm: world.add_region("nvm", SimMedium::Dax, 8 << 20, 8 << 20),
        journal: world.add_region("journal", SimMedium::Dax, 1 << 20, 1 << 20),
        ssd: Some(mirror.clone()),
        hdd: None,
        more: Vec::new(),
    };
    Store::mkfs(&devices, &MkfsOptions::default())?;
    let (store, _) = Store::open(devices, OpenOptions::default())?;
    let logs = Arc::new(SimLogs::new(world, SimMedium::Dax));
    let mut parts = Parts::new(store, logs, Config::default(), Arc::new(SystemClock));
    parts.owner_uid = 0;
    let pool = Embedded::open(parts)?;
    let fs = pool.mount()?;

    // More than the NVM holds, so that most of it lies on the mirror.
    let body: Vec<u8> = (0..16_u32 << 20).map(|at| (at >> 8) as u8).collect();
    let attr = fs.create(fs.root(), b"file", 0o100_644, 0, &user)?;
    let file = fs.open(attr.key, OpenFlags::READ_WRITE, &user)?;
    for (at, piece) in body.chunks(64 << 10).enumerate() {
        if at == 128 {
            script.push(FaultRule::always(FaultOp::Write, Fault::Errno(5)));
        }
        let mut done = 0;
        while done < piece.len() {
            done += file.write_at(((at << 16) + done) as u64, &piece[done..], &user)?;
        }
        pool.tick();
    }
    let on_ssd = pool.kernel().status().tiers[1].used_bytes;
    let mut back = vec![0; body.len()];
    let mut read = 0;
    while read < back.len() {
        read += file.read_at(read as u64, &mut back[read..])?;
    }
    println!(
        "{on_ssd} bytes on {}; half of it broke: {:?}",
        mirror.info(),
        mirror.failed
    );
    if back != body || on_ssd < 8 << 20 || mirror.in_service().count() != 1 {
        return Err("what was written was not read back, or not from one half of the mirror".into());
    }
    drop(file);
    fs.unmount()?;
    Ok(pool.shutdown()?)
}
