//! Devices of this machine by SPDK: what they are made of is claimed, the library is started with the first
//! device and stopped with the last. Owns the one use of the library in this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::lock::Mutex;

use super::config;
use super::device::{SpdkDevice, SpdkOptions};
use super::reactor::{Reactor, Wanted};
use super::sys;
use crate::block::attached::Attached;
use crate::block::file::claim;
use crate::block::nvme::{Places, Taken};
use crate::block::{PciAddress, SpdkAddress};
use crate::error::{DeviceName, MediaError};
use crate::traits::BlockDevice;

/// Huge pages of 2 MiB that must be free for a controller. With the settings of `config` SPDK takes 14 for one
/// (docs/results/devices.md); more for a second, or with more nodes.
pub(in crate::block) const HUGE_PAGES: u64 = 32;

/// What is kept from others while the library has it.
enum Claim {
    /// A controller, taken from the kernel's driver.
    Controller(
        PciAddress,
        #[expect(dead_code, reason = "gives it back when dropped")] Taken,
    ),
    /// A block device of the kernel's.
    Node(#[expect(dead_code, reason = "held open")] fs::File),
}

/// The library at work in this process. Dropped from the top: the library stops before anything is given
/// back.
struct Process {
    reactor: Arc<Reactor>,
    claims: Vec<Claim>,
    /// Configurations that were carried out.
    configured: Vec<PathBuf>,
    devices: usize,
}

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

/// One device's part in [`PROCESS`].
struct Part;

impl Drop for Part {
    fn drop(&mut self) {
        let mut process = PROCESS.lock();
        if let Some(running) = process.as_mut() {
            running.devices -= 1;
            if running.devices == 0 {
                // Under the lock: nobody starts the library again before it has stopped.
                *process = None;
            }
        }
    }
}

/// What a device needs of the library.
struct Plan {
    claims: Vec<Claim>,
    controllers: Vec<PciAddress>,
    json: String,
    /// The file that `json` is from.
    path: Option<PathBuf>,
    bdev: Option<String>,
    watched: Option<(PciAddress, String)>,
    /// Flushes reach what lies below.
    flushes: bool,
}

/// Opens a device by SPDK, which is loaded and started if this is the first one in the process. Dropping the
/// last one stops it and gives its controllers back to the kernel.
///
/// # Errors
/// `Refused`: something is missing, or the device is in use; the text names the remedy. `Setup`.
pub(in crate::block) fn open(
    address: &SpdkAddress,
    options: SpdkOptions,
) -> Result<impl BlockDevice + use<>, MediaError> {
    let name = DeviceName::from(address.to_string());
    let refused = |why: String| MediaError::Refused {
        device: name.clone(),
        why: why.into(),
    };
    let library = sys::load().map_err(refused)?;
    let mut process = PROCESS.lock();
    let taken: Vec<_> = process
        .iter()
        .flat_map(|running| controllers(&running.claims))
        .collect();
    let is_known = |path: &PathBuf| process.iter().any(|running| running.configured.contains(path));
    let is_known = matches!(address, SpdkAddress::Config { path, .. } if is_known(path));
    let mut plan = Plan::of(address, &name, &taken, is_known)?;
    if process.is_none() {
        let places = Places::default();
        let huge = places.free_huge_pages() >= HUGE_PAGES;
        if !huge && !plan.controllers.is_empty() {
            return Err(refused(too_few_pages(&places)));
        }
        // The entries before the start take effect now, the others when the device is opened.
        let json = plan.json.clone();
        let reactor = Reactor::start(library, plan.controllers.clone(), huge, json).map_err(refused)?;
        *process = Some(Process {
            reactor: Arc::new(reactor),
            claims: Vec::new(),
            configured: Vec::new(),
            devices: 0,
        });
    }
    let Some(running) = process.as_mut() else {
        return Err(refused("SPDK is not running".into()));
    };
    running.claims.append(&mut plan.claims);
    let wanted = Wanted {
        json: plan.json,
        bdev: plan.bdev,
        controller: plan.watched,
        io_timeout: options.io_timeout,
    };
    let opened = SpdkDevice::with(Arc::clone(&running.reactor), name.clone(), wanted, plan.flushes);
    match opened {
        Ok(device) => {
            running.devices += 1;
            running.configured.extend(plan.path);
            Ok(Attached::new(Arc::new(device), Part))
        }
        Err(error) => {
            if running.devices == 0 {
                *process = None;
            }
            Err(error)
        }
    }
}

fn controllers(claims: &[Claim]) -> Vec<PciAddress> {
    let addresses = claims.iter().filter_map(|claim| match claim {
        Claim::Controller(address, _) => Some(*address),
        Claim::Node(_) => None,
    });
    addresses.collect()
}

fn too_few_pages(places: &Places) -> String {
    let free = places.free_huge_pages();
    format!(
        "SPDK needs {HUGE_PAGES} huge pages of 2 MiB for a controller, {free} are free; reserve them by \
         `sysctl vm.nr_hugepages={}`",
        places.huge_pages() + HUGE_PAGES - free
    )
}

impl Plan {
    /// Claims what a device is made of. `taken`: controllers that this process has already.
    /// `is_known`: its configuration was carried out before.
    fn of(
        address: &SpdkAddress,
        name: &DeviceName,
        taken: &[PciAddress],
        is_known: bool,
    ) -> Result<Self, MediaError> {
        let refused = |why: String| MediaError::Refused {
            device: name.clone(),
            why: why.into(),
        };
        match address {
            SpdkAddress::Controller(address) => {
                let pci = address.pci;
                let known = taken.contains(&pci);
                Ok(Self {
                    claims: if known {
                        Vec::new()
                    } else {
                        vec![take(pci).map_err(refused)?]
                    },
                    controllers: vec![pci],
                    json: if known { String::new() } else { config::attach(pci) },
                    path: None,
                    bdev: Some(config::namespace(*address)),
                    watched: Some((pci, config::controller(pci))),
                    flushes: true,
                })
            }
            SpdkAddress::Config { path, bdev } => {
                let (json, found) = read(path).map_err(refused)?;
                let mut claims = Vec::new();
                for pci in found.controllers.iter().filter(|pci| !taken.contains(pci)) {
                    let claimed = take(*pci).map_err(|why| refused(format!("{pci}: {why}")))?;
                    claims.push(claimed);
                }
                // Its devices are claimed once, by the first of its block devices that is opened.
                for file in found.files.iter().filter(|_| !is_known) {
                    let claimed = claim(file, &DeviceName::from(&**file));
                    let claimed = claimed.map_err(|error| refused(error.to_string()))?;
                    claims.extend(claimed.map(Claim::Node));
                }
                Ok(Self {
                    claims,
                    controllers: found.controllers,
                    flushes: found.flushes,
                    json: if is_known { String::new() } else { json },
                    path: Some(path.clone()),
                    bdev: bdev.clone(),
                    watched: None,
                })
            }
        }
    }
}

fn take(pci: PciAddress) -> Result<Claim, String> {
    Places::default()
        .take(pci)
        .map(|taken| Claim::Controller(pci, taken))
}

/// Reads a configuration, as text and what it says.
fn read(path: &Path) -> Result<(String, config::Operators), String> {
    let read = fs::read_to_string(path).map_err(|error| error.to_string());
    let read = read.and_then(|json| config::read(&json).map(|found| (json, found)));
    read.map_err(|error| {
        format!(
            "cannot read {}: {error}; it is to be a configuration as SPDK's `rpc.py save_config` writes it",
            path.display()
        )
    })
}
