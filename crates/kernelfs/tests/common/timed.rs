//! Block devices on which each transfer takes a time of the test's clock.

use std::sync::Arc;
use varve_ipc::ManualClock;
use varve_media::{BlockDevice, DeviceInfo, MediaError};
use varve_store::Devices;

struct Timed {
    inner: Arc<dyn BlockDevice>,
    clock: Arc<ManualClock>,
    ms: u64,
}

/// The devices, with times of SSD and HDD.
pub fn devices(devices: Devices, clock: &Arc<ManualClock>, [ssd_ms, hdd_ms]: [u64; 2]) -> Devices {
    let over = |inner: Option<Arc<dyn BlockDevice>>, ms| {
        inner.map(|inner| {
            let clock = Arc::clone(clock);
            Arc::new(Timed { inner, clock, ms }) as Arc<dyn BlockDevice>
        })
    };
    Devices {
        ssd: over(devices.ssd, ssd_ms),
        hdd: over(devices.hdd, hdd_ms),
        ..devices
    }
}

impl BlockDevice for Timed {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.clock.advance_ms(self.ms);
        self.inner.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.clock.advance_ms(self.ms);
        self.inner.write(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.inner.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.trim(off, len)
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}
