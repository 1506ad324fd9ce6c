//! A controller of this machine as a block device: taken from the kernel, watched while it is idle, given
//! back when it is closed.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::binding::{Taken, Way};
use super::bus::Bus;
use super::device::{NvmeDevice, NvmeOptions};
use super::pci::Places;
use super::sys::{UioBus, VfioBus};
use crate::block::NvmeAddress;
use crate::error::{DeviceName, MediaError};
use crate::traits::{BlockDevice, DeviceInfo, DeviceState};

/// Interval between checks of an idle device.
const LOOK: Duration = Duration::from_millis(250);

/// Notices the removal of an idle device. Ends when dropped.
struct Watcher {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    fn start(device: &Arc<NvmeDevice>) -> std::io::Result<Self> {
        let device = Arc::clone(device);
        let (stop, stopped) = channel();
        let watch = move || {
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout)
                && device.look() == DeviceState::Ok
            {}
        };
        let thread = std::thread::Builder::new()
            .name("nvme-watch".into())
            .spawn(watch)?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A namespace of a controller that was taken from the kernel. Dropping it shuts the controller down and
/// gives it back.
pub struct AttachedNvme {
    // In the order in which they are dropped.
    _watcher: Watcher,
    device: Arc<NvmeDevice>,
    _taken: Taken,
}

impl AttachedNvme {
    /// Takes the controller and its namespace, also one that a dead process left taken.
    ///
    /// # Errors
    /// `Refused`: it is in use, or something is missing; the text names the remedy. `Setup`.
    pub fn open(address: NvmeAddress, options: NvmeOptions) -> Result<Self, MediaError> {
        let places = Places::default();
        let name = DeviceName::from(address.to_string());
        let refused = |why: String| MediaError::Refused {
            device: name.clone(),
            why: why.into(),
        };
        let taken = places.take(address.pci).map_err(refused)?;
        let bus: Arc<dyn Bus> = match taken.way() {
            Way::Vfio => Arc::new(VfioBus::open(&name, &taken.function(), &places.records)?),
            Way::Uio => Arc::new(UioBus::open(&name, &taken.function())?),
        };
        let device = Arc::new(NvmeDevice::open(bus, name.clone(), address.nsid, options)?);
        let watcher =
            Watcher::start(&device).map_err(|error| MediaError::setup(&name, "start a thread", &error))?;
        Ok(Self {
            _watcher: watcher,
            device,
            _taken: taken,
        })
    }
}

impl std::ops::Deref for AttachedNvme {
    type Target = NvmeDevice;

    fn deref(&self) -> &NvmeDevice {
        &self.device
    }
}

impl BlockDevice for AttachedNvme {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.device.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.device.write(off, src)
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.device.write_durable(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.device.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.device.trim(off, len)
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        self.device.read_batch(parts)
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        self.device.write_batch(parts)
    }

    fn state(&self) -> DeviceState {
        self.device.state()
    }

    fn name(&self) -> DeviceName {
        self.device.name()
    }

    fn info(&self) -> DeviceInfo {
        self.device.info()
    }
}
