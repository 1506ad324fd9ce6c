//! A device that loses power: any sector of an unflushed write may be old or new afterwards.

use super::{Device, DeviceError, MemoryDevice};
use parking_lot::Mutex;

const SECTOR_BYTES: usize = 512;

#[derive(Debug)]
struct Unflushed {
    off: u64,
    data: Vec<u8>,
}

/// Memory behind a volatile write cache.
#[derive(Debug)]
pub struct CrashDevice {
    /// The bytes that the running program reads.
    now: MemoryDevice,
    /// The bytes that are durable.
    flushed: MemoryDevice,
    unflushed: Mutex<Vec<Unflushed>>,
}

impl CrashDevice {
    /// A device that starts with these bytes, all of them durable.
    pub fn new(image: &MemoryDevice) -> Self {
        Self {
            now: image.copy(),
            flushed: image.copy(),
            unflushed: Mutex::default(),
        }
    }

    /// Returns the medium as a power cut leaves it. `random` decides for each unflushed write whether it is
    /// lost, complete, or torn into new and old sectors. The running program is not disturbed.
    pub fn cut(&self, mut random: impl FnMut() -> u64) -> MemoryDevice {
        let unflushed = self.unflushed.lock();
        let image = self.flushed.copy();
        for write in unflushed.iter() {
            let fate = random() % 4;
            for (n, sector) in write.data.chunks(SECTOR_BYTES).enumerate() {
                let lands = match fate {
                    0 => false,
                    1 => true,
                    _ => random().is_multiple_of(2),
                };
                if lands {
                    let off = write.off + (n * SECTOR_BYTES) as u64;
                    let done = image.write_at(off, sector);
                    done.expect("it was within the device before");
                }
            }
        }
        image
    }

    /// Returns the medium as a kill of the program leaves it: all writes are there.
    pub fn kill(&self) -> MemoryDevice {
        self.now.copy()
    }
}

impl Device for CrashDevice {
    fn name(&self) -> String {
        "crash".to_owned()
    }

    fn len_bytes(&self) -> u64 {
        self.now.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.now.read_at(off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.now.write_at(off, data)?;
        let data = data.to_vec();
        self.unflushed.lock().push(Unflushed { off, data });
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        for write in self.unflushed.lock().drain(..) {
            self.flushed.write_at(write.off, &write.data)?;
        }
        Ok(())
    }
}
