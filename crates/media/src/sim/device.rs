//! Handles on the devices of a simulated machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::history::{DeviceIndex, Event};
use super::{Device, Flaw, SimMedium, SimWorld, World};
use crate::DEVICE_BLOCK_BYTES;
use crate::error::{DeviceName, MediaError, check_blocks, check_range};
use crate::pmem::persist::crc32c_append;
use crate::pmem::steps::{self, Step};
use crate::traits::{BlockDevice, DeviceInfo, MediumKind, Region};

/// Returns a number for this thread: fences order the stores of one thread only.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

/// A simulated region.
pub struct SimRegion {
    world: SimWorld,
    index: DeviceIndex,
    name: DeviceName,
    medium: SimMedium,
}

/// A simulated block device.
pub struct SimBlock {
    world: SimWorld,
    index: DeviceIndex,
    name: DeviceName,
    len_bytes: u64,
}

impl SimWorld {
    /// Runs `work` on a device, if it still exists and holds the range.
    fn on_device<T>(
        &self,
        index: DeviceIndex,
        off: u64,
        len: u64,
        work: impl FnOnce(&mut World) -> T,
    ) -> Result<T, MediaError> {
        let mut world = self.0.lock();
        let device = &world.devices[index];
        if device.removed {
            let (device, op) = (device.name.clone(), "access");
            return Err(MediaError::Io {
                device,
                op,
                off,
                len,
                errno: libc::ENODEV,
            });
        }
        check_range(&device.name, off, len, device.len_bytes)?;
        Ok(work(&mut world))
    }

    fn store(&self, index: DeviceIndex, off: u64, data: Arc<[u8]>) -> Result<(), MediaError> {
        self.on_device(index, off, data.len() as u64, |world| {
            world.devices[index].pages.write(off, &data);
            if !data.is_empty() {
                world.record(Event::Store {
                    device: index,
                    thread: thread_number(),
                    off,
                    data,
                    cached: false,
                });
            }
        })
    }

    /// Stores by the functions of `dax`, each step an event of its own.
    fn store_by_steps(
        &self,
        index: DeviceIndex,
        off: u64,
        src: &[u8],
        seed: u32,
        flaw: Flaw,
    ) -> Result<u32, MediaError> {
        self.on_device(index, off, src.len() as u64, |world| {
            let (crc, steps) = steps::of_copy(off, src, seed, flaw != Flaw::NoWriteBack);
            let thread = thread_number();
            for step in steps {
                let (off, data, cached) = match step {
                    Step::Cached(off, data) => (off, data, true),
                    Step::Streamed(off, data) => (off, data, false),
                    Step::WrittenBack(off) => {
                        world.record(Event::WriteBack {
                            device: index,
                            thread,
                            line: off as u64 / 64 * 64,
                        });
                        continue;
                    }
                    Step::Fenced => continue,
                };
                let (off, data) = (off as u64, Arc::from(data));
                world.devices[index].pages.write(off, &data);
                world.record(Event::Store {
                    device: index,
                    thread,
                    off,
                    data,
                    cached,
                });
            }
            crc
        })
    }

    fn load(&self, index: DeviceIndex, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.on_device(index, off, out.len() as u64, |world| {
            world.devices[index].pages.read(off, out)
        })
    }
}

impl SimRegion {
    pub(super) fn new(world: SimWorld, index: DeviceIndex, name: DeviceName, medium: SimMedium) -> Self {
        Self {
            world,
            index,
            name,
            medium,
        }
    }
}

impl SimBlock {
    pub(super) fn new(world: SimWorld, index: DeviceIndex, name: DeviceName, len_bytes: u64) -> Self {
        Self {
            world,
            index,
            name,
            len_bytes,
        }
    }
}

impl Region for SimRegion {
    fn len_bytes(&self) -> u64 {
        self.world.0.lock().devices[self.index].len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.world.load(self.index, off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        match self.medium {
            SimMedium::DaxByStore(flaw) => self.world.store_by_steps(self.index, off, src, 0, flaw).map(drop),
            _ => self.world.store(self.index, off, src.into()),
        }
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        if let SimMedium::DaxByStore(flaw) = self.medium {
            return self.world.store_by_steps(self.index, off, src, seed, flaw);
        }
        // Copied once, so that the checksum covers the stored bytes.
        let data: Arc<[u8]> = src.into();
        let crc = crc32c_append(seed, &data);
        self.world.store(self.index, off, data)?;
        Ok(crc)
    }

    fn fence(&self) -> Result<(), MediaError> {
        if let SimMedium::DaxByStore(flaw) = self.medium
            && (flaw == Flaw::NoFence || !steps::fences())
        {
            return Ok(());
        }
        self.world.0.lock().record(Event::Fence {
            thread: thread_number(),
        });
        Ok(())
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        if matches!(self.medium, SimMedium::DaxByStore(_)) {
            self.fence()?;
        }
        self.world.on_device(self.index, off, len, |world| {
            world.record(Event::Sync {
                device: self.index,
                thread: thread_number(),
                off,
                len,
            });
        })
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.world.on_device(self.index, 0, 0, |world| {
            let Device {
                len_bytes, max_bytes, ..
            } = world.devices[self.index];
            if new_len > max_bytes {
                return Err(MediaError::TooLong {
                    device: self.name.clone(),
                    wanted_bytes: new_len,
                    max_bytes,
                });
            }
            if new_len > len_bytes {
                world.devices[self.index].len_bytes = new_len;
                world.record(Event::Grow {
                    device: self.index,
                    len_bytes: new_len,
                });
            }
            Ok(())
        })?
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.world.on_device(self.index, off, len, |_| ())
    }

    fn info(&self) -> DeviceInfo {
        let backend = format!("sim: {:?} rules", self.medium);
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Sim,
            backend,
        }
    }
}

impl BlockDevice for SimBlock {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.world.load(self.index, off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        check_blocks(&self.name, off, src.len() as u64, DEVICE_BLOCK_BYTES)?;
        self.world.store(self.index, off, src.into())
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.world.on_device(self.index, 0, 0, |world| {
            world.record(Event::Flush { device: self.index })
        })
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_blocks(&self.name, off, len, DEVICE_BLOCK_BYTES)?;
        self.world.on_device(self.index, off, len, |world| {
            world.devices[self.index].pages.zero(off, len);
            world.record(Event::Trim {
                device: self.index,
                off,
                len,
            });
        })
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Sim,
            backend: "sim: block device".into(),
        }
    }
}
