//! Throughput of a tier of one, two or three emulated SSDs: transactions of 16 MiB that write to it, and
//! random reads of 64 KiB by eight threads. `cargo run --release -p varve-store --example devices_a_tier`.
//!
//! The devices are memory behind the model of an SSD of 150 MB/s written and 300 MB/s read, which does one
//! transfer at a time: slow enough that the processor is not the bound. Ratios say what the store makes of
//! several devices, and not how fast a device is.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;
use varve_format::{FileKind, InodeAttr, ROOT_INO, Tier};
use varve_media::emulated::{DiskModel, EmulatedDisk};
use varve_media::sim::{SimMedium, SimWorld};
use varve_media::{BlockDevice, DEVICE_BLOCK_BYTES};
use varve_store::{DataTarget, Devices, MkfsOptions, OpenOptions, Store};

const TX_BYTES: usize = 16 << 20;
const TXS: u64 = 24;
const READ_BYTES: usize = 64 << 10;
const READS: u64 = 600;
const THREADS: u64 = 8;

/// A device of memory: the simulated one records what it does, which takes time.
struct Ram(parking_lot::RwLock<Vec<u8>>, u64);

impl BlockDevice for Ram {
    fn len_bytes(&self) -> u64 {
        self.0.read().len() as u64
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), varve_media::MediaError> {
        let at = off as usize;
        out.copy_from_slice(&self.0.read()[at..at + out.len()]);
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), varve_media::MediaError> {
        assert!(off.is_multiple_of(DEVICE_BLOCK_BYTES));
        let at = off as usize;
        self.0.write()[at..at + src.len()].copy_from_slice(src);
        Ok(())
    }

    fn flush(&self) -> Result<(), varve_media::MediaError> {
        Ok(())
    }

    fn trim(&self, _off: u64, _len: u64) -> Result<(), varve_media::MediaError> {
        Ok(())
    }

    fn info(&self) -> varve_media::DeviceInfo {
        varve_media::DeviceInfo {
            name: format!("ram{}", self.1).into(),
            kind: varve_media::MediumKind::Block,
            backend: "memory".into(),
        }
    }
}

fn disk(number: u64) -> Arc<EmulatedDisk> {
    let ram = Ram(parking_lot::RwLock::new(vec![0; 640 << 20]), number);
    let model = DiskModel {
        read_mb_s: 300,
        write_mb_s: 150,
        ..DiskModel::SSD
    };
    Arc::new(EmulatedDisk::new(Arc::new(ram), model))
}

/// Returns MB/s of writes and of reads.
fn measure(devices: u64) -> Result<[f64; 2], Box<dyn Error>> {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 128 << 20, 128 << 20);
    let journal = world.add_region("journal", SimMedium::Dax, 16 << 20, 16 << 20);
    let media = Devices {
        nvm,
        journal,
        ssd: Some(disk(0)),
        hdd: None,
        more: Vec::new(),
    };
    let options = MkfsOptions {
        ssd_unit_blocks: Some(16_384),
        ..MkfsOptions::default()
    };
    Store::mkfs(&media, &options)?;
    let (store, _) = Store::open(media, OpenOptions::default())?;
    for number in 1..devices {
        store.add_device(Tier::Ssd, &(disk(number) as _), [number as u8; 16])?;
    }
    let mut tx = store.begin()?;
    let key = tx.alloc_inodes(ROOT_INO, 1)?[0];
    tx.create(
        &InodeAttr {
            parent: ROOT_INO,
            ..InodeAttr::new(key, 0o100_644, 0)
        },
        &[],
    )?;
    tx.dir_insert(ROOT_INO, b"file", key, FileKind::Regular)?;
    tx.commit()?;
    let bytes: Vec<u8> = (0..TX_BYTES).map(|at| (at / 7) as u8).collect();
    let begun = Instant::now();
    for number in 0..TXS {
        let mut tx = store.begin_with_room()?;
        let at = number * TX_BYTES as u64;
        tx.write_bytes(key.ino, &[(at, &bytes)], DataTarget::only(Tier::Ssd))?;
        tx.commit()?;
    }
    let all = TXS * TX_BYTES as u64;
    let written = all as f64 / 1e6 / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let store = &store;
            scope.spawn(move || {
                let mut out = vec![0; READ_BYTES];
                let mut state = thread * 7919 + 1;
                for _ in 0..READS {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = (state >> 20) % (all / READ_BYTES as u64) * READ_BYTES as u64;
                    store.read(key.ino, at, &mut out).expect("memory does not fail");
                }
            });
        }
    });
    let read = (THREADS * READS * READ_BYTES as u64) as f64 / 1e6 / begun.elapsed().as_secs_f64();
    Ok([written, read])
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("| devices | written, MB/s | read, MB/s |\n| ---: | ---: | ---: |");
    for turn in 0..3 {
        for devices in [1, 2, 3] {
            let [written, read] = measure(devices)?;
            println!("| {devices} (turn {turn}) | {written:.0} | {read:.0} |");
        }
    }
    Ok(())
}
