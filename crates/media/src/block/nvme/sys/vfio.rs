//! A device by VFIO: the IOMMU confines it to the memory that it was given.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::lock::Mutex;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP,
};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioOps};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::bus::{Bus, DmaMemory, PAGE_BYTES};
use super::pages::Pages;
use super::window::Window;
use super::{PCI_BUS_MASTER, PCI_COMMAND, PCI_MEMORY, pause};
use crate::error::{DeviceName, MediaError};

/// First address given to devices: above the range of old devices, below the range that IOMMUs keep for
/// interrupts.
const IOVA_FIRST: u64 = 0x1000_0000;
/// Interrupts are at 0xfee0_0000 on x86.
const IOVA_END: u64 = 0xf000_0000;

/// A PCI function that `vfio-pci` is bound to.
pub(in super::super) struct VfioBus {
    name: DeviceName,
    window: Window,
    /// Taken out when the device is released.
    device: Mutex<Option<VfioDevice>>,
    container: Arc<VfioContainer>,
    /// Signalled when the kernel wants the device back.
    request: Option<EventFd>,
    wanted_back: AtomicBool,
    next_address: AtomicU64,
    origin: Instant,
    /// Dropped after the device, which needs it for its own drop.
    _place: Place,
}

/// A directory named like the function, with the link to its IOMMU group. `vfio-ioctls` reads that link when
/// it releases a device, and panics if it is missing: in sysfs it disappears with a device that is pulled
/// out.
struct Place(PathBuf);

impl Place {
    fn new(records: &Path, sysfs: &Path) -> io::Result<Self> {
        let group = fs::read_link(sysfs.join("iommu_group"))?;
        let place = Self(records.join("groups").join(sysfs.file_name().unwrap_or_default()));
        fs::create_dir_all(&place.0)?;
        let link = place.0.join("iommu_group");
        // Left by a killed process: the record is locked, so no other process uses it.
        let _ = fs::remove_file(&link);
        symlink(group, link)?;
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.0.join("iommu_group"));
        let _ = fs::remove_dir(&self.0);
    }
}

/// Turns a failure into an error with advice for a person.
fn explain(name: &DeviceName, error: &VfioError) -> MediaError {
    let advice = match error {
        VfioError::OpenContainer(_) => "; load it with `modprobe vfio-pci`, and run as root",
        VfioError::OpenGroup(error, _) if error.raw_os_error() == Some(libc::EBUSY) => {
            ": another process uses it, perhaps the daemon of another pool"
        }
        VfioError::OpenGroup(..) => {
            "; run as root, or give the group's node to this user (`varve doctor` says how)"
        }
        VfioError::GroupViable => {
            ": other devices of its IOMMU group are in use by the kernel; `varve doctor` lists them. They \
             must be bound to vfio-pci \
             too, or the controller be put into another slot"
        }
        VfioError::IommuDmaMap(_) => {
            "; raise the limit of locked memory (`ulimit -l unlimited`), or run as root"
        }
        _ => "; `varve doctor` says what is missing",
    };
    MediaError::Refused {
        device: name.clone(),
        why: format!("VFIO: {error}{advice}").into(),
    }
}

impl VfioBus {
    /// Opens the function at `sysfs`, its directory in sysfs. `records` is a directory for files that live as
    /// long as the bus.
    pub(in super::super) fn open(
        name: &DeviceName,
        sysfs: &Path,
        records: &Path,
    ) -> Result<Self, MediaError> {
        let place = Place::new(records, sysfs)
            .map_err(|error| MediaError::setup(name, "find its IOMMU group", &error))?;
        let failed = |error: VfioError| explain(name, &error);
        let container = Arc::new(VfioContainer::new(None).map_err(failed)?);
        let ops: Arc<dyn VfioOps> = Arc::clone(&container) as _;
        let device = VfioDevice::new(&place.0, ops, false).map_err(failed)?;
        let bar = VFIO_PCI_BAR0_REGION_INDEX;
        let len = device.get_region_size(bar);
        let mappable = device.get_region_flags(bar) & VFIO_REGION_INFO_FLAG_MMAP != 0;
        if !mappable || len < PAGE_BYTES as u64 || len > 1 << 30 {
            return Err(MediaError::Refused {
                device: name.clone(),
                why: format!(
                    "VFIO gives {len} bytes of registers, mappable: {mappable}; is it an NVMe controller?"
                )
                .into(),
            });
        }
        let off = device.get_region_offset(bar);
        let window = Window::of_fd(device.as_raw_fd(), off, len as usize)
            .map_err(|error| MediaError::setup(name, "map its registers", &error))?;
        let request = EventFd::new(EFD_NONBLOCK).ok();
        // Kernels without this notice only miss orderly removals.
        let request = request.filter(|event| device.enable_irq(VFIO_PCI_REQ_IRQ_INDEX, vec![event]).is_ok());
        set_command(&device, PCI_MEMORY | PCI_BUS_MASTER, 0);
        Ok(Self {
            name: name.clone(),
            window,
            device: Mutex::new(Some(device)),
            container,
            request,
            wanted_back: AtomicBool::new(false),
            next_address: AtomicU64::new(IOVA_FIRST),
            origin: Instant::now(),
            _place: place,
        })
    }
}

/// Sets and clears bits of the command register.
fn set_command(device: &VfioDevice, set: u16, clear: u16) {
    let mut bytes = [0; 2];
    device.region_read(VFIO_PCI_CONFIG_REGION_INDEX, &mut bytes, PCI_COMMAND);
    let command = u16::from_le_bytes(bytes) & !clear | set;
    device.region_write(VFIO_PCI_CONFIG_REGION_INDEX, &command.to_le_bytes(), PCI_COMMAND);
}

impl Bus for VfioBus {
    fn registers_bytes(&self) -> usize {
        self.window.len()
    }

    fn read32(&self, off: usize) -> u32 {
        self.window.read(off)
    }

    fn write32(&self, off: usize, value: u32) {
        self.window.write(off, value);
    }

    fn allocate(&self, len_bytes: usize) -> Result<Arc<dyn DmaMemory>, MediaError> {
        let len = len_bytes.next_multiple_of(PAGE_BYTES);
        let pages = Pages::new(len, false)
            .map_err(|error| MediaError::setup(&self.name, "allocate memory for its queues", &error))?;
        let address = self.next_address.fetch_add(len as u64, Ordering::Relaxed);
        if address + len as u64 > IOVA_END {
            return Err(MediaError::setup(
                &self.name,
                "find addresses for its queues",
                &io::Error::from_raw_os_error(libc::ENOSPC),
            ));
        }
        // SAFETY: the pages are a mapping of `VfioMemory`'s own, reached by raw copies and atomics only, and
        // unmapped from the device before they go. No reference to them is ever made.
        unsafe { self.container.vfio_dma_map(address, len, pages.address()) }
            .map_err(|error| explain(&self.name, &error))?;
        Ok(Arc::new(VfioMemory {
            pages,
            address,
            container: Arc::clone(&self.container),
        }))
    }

    fn stop_dma(&self) {
        let Some(device) = self.device.lock().take() else {
            return;
        };
        set_command(&device, 0, PCI_BUS_MASTER);
        // The mapping of the registers keeps the device open too, and the kernel waits for it before it
        // removes the device.
        let _ = self.window.close();
        if let Some(request) = &self.request {
            let _ = device.disable_irq(VFIO_PCI_REQ_IRQ_INDEX);
            let _ = request.read();
        }
        device.reset();
        drop(device);
    }

    fn is_wanted_back(&self) -> bool {
        if let Some(request) = &self.request
            && request.read().is_ok()
        {
            self.wanted_back.store(true, Ordering::Relaxed);
        }
        self.wanted_back.load(Ordering::Relaxed)
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn pause(&self, waited: Duration) {
        pause(waited);
    }

    fn describe(&self) -> String {
        "VFIO with an IOMMU".into()
    }
}

/// Memory that the IOMMU maps for the device.
struct VfioMemory {
    pages: Pages,
    address: u64,
    container: Arc<VfioContainer>,
}

impl DmaMemory for VfioMemory {
    fn len_bytes(&self) -> usize {
        self.pages.len()
    }

    fn bus_address(&self, off: usize) -> u64 {
        self.address + off as u64
    }

    fn read(&self, off: usize, out: &mut [u8]) {
        self.pages.read(off, out);
    }

    fn write(&self, off: usize, src: &[u8]) {
        self.pages.write(off, src);
    }

    fn load_u32(&self, off: usize) -> u32 {
        self.pages.load(off)
    }
}

impl Drop for VfioMemory {
    fn drop(&mut self) {
        // Fails where the device is closed already, and all its mappings with it.
        let _ = self.container.vfio_dma_unmap(self.address, self.pages.len());
    }
}
