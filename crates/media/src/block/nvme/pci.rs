//! PCI functions as sysfs shows them: their drivers, their uses by the kernel, the loaded drivers. Reads
//! only; `binding` makes all changes. The places are values, so that tests have machines of their own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::block::PciAddress;

/// Class of an NVMe controller: mass storage, non-volatile memory.
const CLASS: &str = "0x0108";

/// Directories in which the kernel shows its devices.
#[derive(Debug, Clone)]
pub struct Places {
    /// sysfs.
    pub sys: PathBuf,
    /// procfs.
    pub proc: PathBuf,
    /// Device nodes.
    pub dev: PathBuf,
    /// Records of devices that were taken from the kernel. Gone after a reboot, as are the bindings.
    pub records: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            proc: "/proc".into(),
            dev: "/dev".into(),
            records: records(),
        }
    }
}

/// Root's records are visible to all users; an ordinary user, whose controllers were bound beforehand, has
/// records of its own.
fn records() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return "/run/varve/nvme".into();
    }
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let own = own.map_or_else(|| format!("/run/user/{}", user.as_raw()).into(), PathBuf::from);
    own.join("varve/nvme")
}

fn first_line(path: &Path) -> io::Result<String> {
    Ok(fs::read_to_string(path)?
        .lines()
        .next()
        .unwrap_or("")
        .trim()
        .to_owned())
}

/// Returns the last part of the path that a link points to.
fn link_name(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// Names in a directory; none if it is not there.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A reason why the kernel needs a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// The block device, such as `nvme0n1p2`.
    pub node: String,
    /// The use.
    pub what: String,
}

impl Places {
    /// All NVMe controllers.
    #[must_use]
    pub fn controllers(&self) -> Vec<PciAddress> {
        let all = names(&self.sys.join("bus/pci/devices"));
        let found = all.iter().filter_map(|name| PciAddress::parse(name));
        found.filter(|address| self.is_controller(*address)).collect()
    }

    /// Directory of a function.
    #[must_use]
    pub fn function(&self, address: PciAddress) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address.to_string())
    }

    /// Whether the function exists and is an NVMe controller.
    #[must_use]
    pub fn is_controller(&self, address: PciAddress) -> bool {
        first_line(&self.function(address).join("class")).is_ok_and(|class| class.starts_with(CLASS))
    }

    /// The driver bound to a function.
    #[must_use]
    pub fn driver(&self, address: PciAddress) -> Option<String> {
        link_name(&self.function(address).join("driver"))
    }

    /// Whether a PCI driver is loaded.
    #[must_use]
    pub fn has_driver(&self, driver: &str) -> bool {
        self.sys.join("bus/pci/drivers").join(driver).is_dir()
    }

    /// IOMMU group of a function; `None`: no IOMMU covers it.
    #[must_use]
    pub fn group(&self, address: PciAddress) -> Option<String> {
        link_name(&self.function(address).join("iommu_group"))
    }

    /// Bits of the addresses that the IOMMU translates, the fewest of any; `None`: it does not say.
    #[must_use]
    pub fn iommu_address_bits(&self) -> Option<u32> {
        let units = self.sys.join("devices/virtual/iommu");
        let capabilities = names(&units).into_iter().filter_map(|unit| {
            let text = first_line(&units.join(unit).join("intel-iommu/cap")).ok()?;
            u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
        });
        // The maximum guest address width, less one, as VT-d's specification has it.
        capabilities
            .map(|capability| (capability >> 16 & 0x3f) as u32 + 1)
            .min()
    }

    /// Other functions of its IOMMU group whose driver keeps the group from VFIO.
    #[must_use]
    pub fn group_neighbours(&self, address: PciAddress) -> Vec<(String, String)> {
        let devices = names(&self.function(address).join("iommu_group/devices"));
        let others = devices.into_iter().filter(|name| *name != address.to_string());
        others
            .filter_map(|name| {
                let driver = link_name(&self.sys.join("bus/pci/devices").join(&name).join("driver"))?;
                // The kernel knows that these do not access memory by themselves.
                let harmless = driver.starts_with("vfio") || driver == "pcieport" || driver == "pci-stub";
                (!harmless).then_some((name, driver))
            })
            .collect()
    }

    /// Namespaces of a controller as block devices, such as `nvme0n1`.
    #[must_use]
    pub fn namespaces(&self, address: PciAddress) -> Vec<String> {
        let controllers = self.function(address).join("nvme");
        let mut found: Vec<String> = names(&controllers)
            .iter()
            .flat_map(|controller| names(&controllers.join(controller)))
            .filter_map(|name| namespace_name(&name))
            .collect();
        found.dedup();
        found
    }

    /// Partitions of a block device, and itself: name and directory.
    fn nodes(&self, namespace: &str) -> Vec<(String, PathBuf)> {
        let whole = self.sys.join("block").join(namespace);
        let parts = names(&whole)
            .into_iter()
            .filter(|name| whole.join(name).join("partition").exists())
            .map(|name| (name.clone(), whole.join(name)));
        let mut nodes: Vec<_> = parts.collect();
        nodes.insert(0, (namespace.to_owned(), whole));
        nodes
    }

    /// A number of `/proc/meminfo`.
    #[must_use]
    pub fn meminfo(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.proc.join("meminfo")).ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Huge pages of 2 MiB that are reserved.
    #[must_use]
    pub fn huge_pages(&self) -> u64 {
        self.huge_pages_that("HugePages_Total")
    }

    /// Huge pages of 2 MiB that nobody uses.
    #[must_use]
    pub fn free_huge_pages(&self) -> u64 {
        self.huge_pages_that("HugePages_Free")
    }

    fn huge_pages_that(&self, name: &str) -> u64 {
        match self.meminfo("Hugepagesize") {
            Some(2048) => self.meminfo(name).unwrap_or(0),
            _ => 0,
        }
    }

    /// Uses of a controller's namespaces by the kernel.
    #[must_use]
    pub fn uses(&self, address: PciAddress) -> Vec<Use> {
        let namespaces = self.namespaces(address);
        namespaces
            .iter()
            .flat_map(|namespace| self.uses_of_namespace(namespace))
            .collect()
    }

    /// Uses of a block device and its partitions by the kernel.
    #[must_use]
    pub fn uses_of_namespace(&self, namespace: &str) -> Vec<Use> {
        let mounts = fs::read_to_string(self.proc.join("self/mountinfo")).unwrap_or_default();
        let swaps = fs::read_to_string(self.proc.join("swaps")).unwrap_or_default();
        let mut uses = Vec::new();
        for (node, dir) in self.nodes(namespace) {
            let mut add = |what: String| {
                uses.push(Use {
                    node: node.clone(),
                    what,
                });
            };
            let number = first_line(&dir.join("dev")).unwrap_or_default();
            for line in mounts.lines() {
                let mut fields = line.split(' ');
                let (at, place) = (fields.nth(2), fields.nth(1));
                if !number.is_empty() && at == Some(&number) {
                    match place {
                        Some("/") => add("holds the root file system".into()),
                        place => add(format!("is mounted at {}", place.unwrap_or("?"))),
                    }
                }
            }
            let path = self.dev.join(&node).display().to_string();
            if swaps
                .lines()
                .any(|line| line.split_whitespace().next() == Some(&path))
            {
                add("is swap space".into());
            }
            for holder in names(&dir.join("holders")) {
                add(format!("is part of {holder}"));
            }
        }
        uses
    }
}

/// Returns the block device of an entry below a controller. With several paths to a namespace (`nvme0c1n1`),
/// the kernel's block device has the name without the path.
fn namespace_name(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (left, nsid) = rest.rsplit_once('n')?;
    let instance = left.split('c').next()?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(nsid) && is_number(instance)).then(|| format!("nvme{instance}n{nsid}"))
}

#[cfg(test)]
pub(in crate::block) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Places, Use, namespace_name};
    use crate::block::PciAddress;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    pub(in crate::block) const ADDRESS: &str = "0000:00:04.0";

    pub(in crate::block) fn address() -> PciAddress {
        PciAddress::parse(ADDRESS).unwrap()
    }

    /// A machine with one controller, its namespace and a partition, in files.
    pub(in crate::block) fn machine(root: &Path) -> Places {
        let places = Places {
            sys: root.join("sys"),
            proc: root.join("proc"),
            dev: root.join("dev"),
            records: root.join("run"),
        };
        let function = places.function(address());
        let put = |path: std::path::PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put(function.join("class"), "0x010802\n");
        put(function.join("driver_override"), "(null)\n");
        put(function.join("nvme/nvme0/nvme0c0n1/size"), "1\n");
        let drivers = places.sys.join("bus/pci/drivers");
        for driver in ["nvme", "vfio-pci", "uio_pci_generic"] {
            put(drivers.join(driver).join("bind"), "");
            put(drivers.join(driver).join("unbind"), "");
        }
        put(places.sys.join("bus/pci/drivers_probe"), "");
        symlink(drivers.join("nvme"), function.join("driver")).unwrap();
        let block = places.sys.join("block/nvme0n1");
        put(block.join("dev"), "259:0\n");
        put(block.join("nvme0n1p2/partition"), "2\n");
        put(block.join("nvme0n1p2/dev"), "259:2\n");
        put(
            places.proc.join("self/mountinfo"),
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n",
        );
        put(places.proc.join("swaps"), "Filename Type Size\n");
        places
    }

    #[test]
    fn controller_is_found_with_its_namespaces_and_driver() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        assert_eq!(places.controllers(), [address()]);
        assert_eq!(places.driver(address()).as_deref(), Some("nvme"));
        assert_eq!(places.namespaces(address()), ["nvme0n1"]);
        assert_eq!(places.group(address()), None);
        assert_eq!(places.iommu_address_bits(), None);
        let unit = places.sys.join("devices/virtual/iommu/dmar0/intel-iommu");
        fs::create_dir_all(&unit).unwrap();
        fs::write(unit.join("cap"), "d2008c222f0606\n").unwrap();
        assert_eq!(places.iommu_address_bits(), Some(48));
        assert!(places.has_driver("vfio-pci") && !places.has_driver("igb_uio"));
        assert_eq!(namespace_name("nvme12n3").as_deref(), Some("nvme12n3"));
        assert_eq!(namespace_name("nvme0"), None);
        assert_eq!(namespace_name("hwmon1"), None);
    }

    #[test]
    fn use_by_the_kernel_is_seen_on_the_device_and_its_partitions() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        assert_eq!(places.uses(address()), []);
        let swap = places.dev.join("nvme0n1").display().to_string();
        fs::write(
            places.proc.join("swaps"),
            format!("Filename Type\n{swap} partition 1\n"),
        )
        .unwrap();
        let mounts = "22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n30 22 259:2 /x /srv/a rw - ext4 d rw\n";
        fs::write(places.proc.join("self/mountinfo"), mounts).unwrap();
        fs::create_dir_all(places.sys.join("block/nvme0n1/nvme0n1p2/holders/dm-3")).unwrap();
        let of = |node: &str, what: &str| Use {
            node: node.into(),
            what: what.into(),
        };
        assert_eq!(
            places.uses(address()),
            [
                of("nvme0n1", "is swap space"),
                of("nvme0n1p2", "holds the root file system"),
                of("nvme0n1p2", "is mounted at /srv/a"),
                of("nvme0n1p2", "is part of dm-3"),
            ]
        );
    }
}
