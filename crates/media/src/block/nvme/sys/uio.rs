//! A device by `uio_pci_generic`, where there is no IOMMU: it gets physical addresses, of huge pages since
//! those do not move. Nothing keeps it from other memory, so VFIO is preferred.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::bus::{Bus, DmaMemory};
use super::pages::{HUGE_BYTES, Pages};
use super::window::Window;
use super::{PCI_BUS_MASTER, PCI_COMMAND, PCI_MEMORY, pause};
use crate::error::{DeviceName, MediaError};

/// A PCI function that `uio_pci_generic` is bound to.
pub(in super::super) struct UioBus {
    name: DeviceName,
    window: Window,
    config: File,
    /// Exists as long as the kernel's driver has the device.
    nodes: PathBuf,
    /// Open as long as the device is used: when it closes, also by the death of the process, the kernel ends
    /// the device's access to memory.
    _node: File,
    origin: Instant,
}

impl UioBus {
    /// Opens the function at `sysfs`, its directory in sysfs.
    pub(in super::super) fn open(name: &DeviceName, sysfs: &Path) -> Result<Self, MediaError> {
        let failed = |what: &'static str| move |error: io::Error| MediaError::setup(name, what, &error);
        let node = std::fs::read_dir(sysfs.join("uio"))
            .and_then(|mut entries| {
                entries
                    .next()
                    .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
            })
            .map_err(failed("find its UIO node (is uio_pci_generic bound?)"))?;
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        let node = open(&Path::new("/dev").join(node.file_name())).map_err(failed("open its UIO node"))?;
        let config = open(&sysfs.join("config")).map_err(failed("open its configuration space"))?;
        let registers = open(&sysfs.join("resource0")).map_err(failed("open its registers"))?;
        let len = registers
            .metadata()
            .map_err(failed("look at its registers"))?
            .len();
        let window = Window::of_file(&registers, len as usize).map_err(failed("map its registers"))?;
        let bus = Self {
            name: name.clone(),
            window,
            config,
            nodes: sysfs.join("uio"),
            _node: node,
            origin: Instant::now(),
        };
        bus.set_command(PCI_MEMORY | PCI_BUS_MASTER, 0)
            .map_err(failed("enable it"))?;
        Ok(bus)
    }

    fn set_command(&self, set: u16, clear: u16) -> io::Result<()> {
        let mut bytes = [0; 2];
        self.config.read_exact_at(&mut bytes, PCI_COMMAND)?;
        let command = u16::from_le_bytes(bytes) & !clear | set;
        self.config.write_all_at(&command.to_le_bytes(), PCI_COMMAND)
    }
}

impl Bus for UioBus {
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
        let len = len_bytes.next_multiple_of(HUGE_BYTES);
        let refused = |why: String| MediaError::Refused {
            device: self.name.clone(),
            why: why.into(),
        };
        let pages = Pages::new(len, true).map_err(|error| {
            refused(format!(
                "without an IOMMU its queues need huge pages, 2 MiB for each thread that uses it, and there \
                 is none free ({error}). Reserve \
                 some, as with `echo 64 > /proc/sys/vm/nr_hugepages`"
            ))
        })?;
        let physical = pages.physical().map_err(|error| {
            refused(format!(
                "the physical addresses of its queues cannot be read ({error}): run as root, or use an \
                 IOMMU and vfio-pci"
            ))
        })?;
        Ok(Arc::new(UioMemory { pages, physical }))
    }

    fn stop_dma(&self) {
        let _ = self.set_command(0, PCI_BUS_MASTER);
        let _ = self.window.close();
    }

    fn is_wanted_back(&self) -> bool {
        !self.nodes.exists()
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn pause(&self, waited: Duration) {
        pause(waited);
    }

    fn describe(&self) -> String {
        "UIO without an IOMMU".into()
    }
}

/// Huge pages and their physical addresses.
struct UioMemory {
    pages: Pages,
    physical: Vec<u64>,
}

impl DmaMemory for UioMemory {
    fn len_bytes(&self) -> usize {
        self.pages.len()
    }

    fn bus_address(&self, off: usize) -> u64 {
        self.physical[off / HUGE_BYTES] + (off % HUGE_BYTES) as u64
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
