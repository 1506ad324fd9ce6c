//! A controller of this machine as a block device: taken from the kernel, watched while it is idle, given
//! back when it is closed.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::binding::Way;
use super::bus::Bus;
use super::device::{NvmeDevice, NvmeOptions};
use super::pci::Places;
use super::sys::{UioBus, VfioBus};
use crate::block::NvmeAddress;
use crate::block::attached::Attached;
use crate::error::{DeviceName, MediaError};
use crate::traits::{BlockDevice, DeviceState};

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

/// Takes a controller from the kernel, also one that a dead process left taken, and opens a namespace of it.
/// Dropping the device shuts the controller down and gives it back.
///
/// # Errors
/// `Refused`: it is in use, or something is missing; the text names the remedy. `Setup`.
pub(in crate::block) fn open(
    address: NvmeAddress,
    options: NvmeOptions,
) -> Result<impl BlockDevice + use<>, MediaError> {
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
    // The watcher has the device too, and ends before the controller is given back.
    Ok(Attached::new(device, (watcher, taken)))
}
