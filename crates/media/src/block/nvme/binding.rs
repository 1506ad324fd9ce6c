//! Takes a controller from the kernel's driver, and gives it back: at the end of its use, or at the next
//! start after a crash. Owns the records of taken controllers; refuses a controller that the kernel uses.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::pci::Places;
use crate::block::PciAddress;

/// The driver through which a function is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Vfio,
    Uio,
}

impl Way {
    const fn driver(self) -> &'static str {
        match self {
            Self::Vfio => "vfio-pci",
            Self::Uio => "uio_pci_generic",
        }
    }
}

/// A controller that belongs to this process until this is dropped.
#[derive(Debug)]
pub(in crate::block) struct Taken {
    places: Places,
    address: PciAddress,
    way: Way,
    record: Record,
}

/// The record of a taken function. Its process holds a lock on it, so that the death of that process shows.
#[derive(Debug)]
struct Record {
    path: PathBuf,
    lock: File,
    /// Driver to give it back to; `None`: leave it as it is.
    former: Option<String>,
}

impl Drop for Record {
    /// Releases the lock at once: a child that is being started has a copy of the descriptor for a moment.
    fn drop(&mut self) {
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// Locks a record; with `create` makes it if it is missing.
fn lock(path: &Path, create: bool) -> io::Result<Option<File>> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(create)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // Its former owner may have removed it between the two calls.
        if file.metadata()?.nlink() > 0 {
            return Ok(Some(file));
        }
    }
}

/// Returns the driver that a record names to give the function back to.
fn former_of(file: &mut File) -> io::Result<Option<String>> {
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let line = text.lines().find_map(|line| line.strip_prefix("former "));
    Ok(line.map(str::to_owned).filter(|driver| !driver.is_empty()))
}

impl Places {
    fn record(&self, address: PciAddress) -> PathBuf {
        self.records.join(address.to_string())
    }

    /// Writes a line to a file of sysfs.
    fn tell(&self, path: &Path, text: &str) -> Result<(), String> {
        let mut file = OpenOptions::new()
            .write(true)
            .open(path)
            .map_err(|error| self.untold(path, text, &error))?;
        file.write_all(text.as_bytes())
            .map_err(|error| self.untold(path, text, &error))
    }

    fn untold(&self, path: &Path, text: &str, error: &io::Error) -> String {
        let advice = match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
                "; taking a controller from the kernel needs root (or bind it beforehand, `varve doctor` \
                 says how)"
            }
            _ => "",
        };
        format!(
            "cannot write `{}` to {}: {error}{advice}",
            text.trim(),
            path.display()
        )
    }

    /// Has the kernel bind a function to `driver`, or to the driver of the kernel's choice.
    fn rebind(&self, address: PciAddress, driver: Option<&str>) -> Result<(), String> {
        let function = self.function(address);
        let text = format!("{address}\n");
        let wish = driver.map_or_else(|| "\n".to_owned(), |driver| format!("{driver}\n"));
        self.tell(&function.join("driver_override"), &wish)?;
        if self.driver(address).is_some() {
            self.tell(&function.join("driver/unbind"), &text)?;
        }
        self.tell(&self.sys.join("bus/pci/drivers_probe"), &text)
    }

    /// Gives back the controllers of dead processes. Returns a line of text for each.
    pub fn give_back_abandoned(&self) -> Vec<String> {
        let mut done = Vec::new();
        for entry in fs::read_dir(&self.records).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(address) = name.to_str().and_then(PciAddress::parse) else {
                continue;
            };
            // Its process is alive, or it belongs to another user.
            let Ok(Some(mut file)) = lock(&entry.path(), false) else {
                continue;
            };
            let Ok(former) = former_of(&mut file) else {
                continue;
            };
            if let Some(former) = former
                && self.is_controller(address)
                && self.driver(address).as_deref() != Some(&*former)
            {
                done.push(match self.rebind(address, None) {
                    Ok(()) => format!(
                        "{address} was given back to {former}, which an ended process had taken it from"
                    ),
                    Err(error) => {
                        format!("{address} could not be given back to {former}: {error}")
                    }
                });
            }
            let _ = fs::remove_file(entry.path());
        }
        done
    }

    /// Takes a controller for this process.
    ///
    /// # Errors
    /// Says why the controller cannot be taken, and the remedy.
    pub(in crate::block) fn take(&self, address: PciAddress) -> Result<Taken, String> {
        self.check_free(address)?;
        let path = self.record(address);
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.records);
        made.map_err(|error| format!("cannot make {}: {error}", self.records.display()))?;
        let file = lock(&path, true).map_err(|error| format!("cannot lock {}: {error}", path.display()))?;
        let Some(mut file) = file else {
            return Err("another process of varve uses it; a controller is for one pool".into());
        };
        let left = former_of(&mut file).unwrap_or(None);
        let driver = self.driver(address);
        let bound = [Way::Vfio, Way::Uio]
            .into_iter()
            .find(|way| driver.as_deref() == Some(way.driver()));
        let (way, former) = match (bound, driver) {
            // A crash or an operator left it bound so.
            (Some(way), _) => (way, left),
            (None, driver) => {
                if let Some(other) = driver.as_deref().filter(|driver| *driver != "nvme") {
                    return Err(format!(
                        "it is bound to the driver {other}; unbind it first (`echo {address} > \
                         /sys/bus/pci/drivers/{other}/unbind`)"
                    ));
                }
                (self.way(address)?, Some("nvme".to_owned()))
            }
        };
        let mut taken = Taken {
            places: self.clone(),
            address,
            way,
            record: Record {
                path,
                lock: file,
                former: None,
            },
        };
        taken.remember(former.as_deref())?;
        if bound.is_none() {
            self.rebind(address, Some(way.driver()))?;
            let now = self.driver(address);
            if now.as_deref() != Some(way.driver()) {
                return Err(format!(
                    "the kernel did not bind it to {} (its driver is {}); see `dmesg`",
                    way.driver(),
                    now.as_deref().unwrap_or("none")
                ));
            }
        }
        Ok(taken)
    }

    /// Refuses a function that is not a controller, or is in use.
    fn check_free(&self, address: PciAddress) -> Result<(), String> {
        let known = self.controllers();
        if !known.contains(&address) {
            let list: Vec<String> = known.iter().map(ToString::to_string).collect();
            let there = if self.function(address).exists() {
                "it is no NVMe controller"
            } else {
                "there is no such PCI function"
            };
            return Err(match list.len() {
                0 => format!("{there}; this machine has no NVMe controller on PCI"),
                _ => format!("{there}; NVMe controllers here: {}", list.join(", ")),
            });
        }
        if let Some(used) = self.uses(address).first() {
            return Err(format!(
                "its {} {}, and a controller is taken with all its namespaces; unmount it and take it out \
                 of use first, or choose another",
                used.node, used.what
            ));
        }
        for namespace in self.namespaces(address) {
            let node = self.dev.join(&namespace);
            // Fails while another process, a file system or another pool has claimed the device or a part of
            // it.
            let opened = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_EXCL)
                .open(&node);
            if let Err(error) = opened
                && error.raw_os_error() == Some(libc::EBUSY)
            {
                return Err(format!(
                    "{} is in use; `lsof {0}` may say by whom",
                    node.display()
                ));
            }
        }
        Ok(())
    }

    /// Returns the better of the available drivers.
    fn way(&self, address: PciAddress) -> Result<Way, String> {
        let has = |way: Way| self.has_driver(way.driver());
        match self.group(address) {
            Some(_) if has(Way::Vfio) => Ok(Way::Vfio),
            Some(_) => Err("there is an IOMMU, but vfio-pci is not loaded: `modprobe vfio-pci`".into()),
            None if has(Way::Uio) => Ok(Way::Uio),
            None => Err(
                "no IOMMU watches it, and uio_pci_generic is not loaded. Turn the IOMMU on (firmware, and \
                 `intel_iommu=on` on the \
                 kernel's command line) and `modprobe vfio-pci`; or `modprobe uio_pci_generic`, if you \
                 trust the device with all memory"
                    .into(),
            ),
        }
    }
}

impl Taken {
    pub(super) const fn way(&self) -> Way {
        self.way
    }

    pub(super) fn function(&self) -> PathBuf {
        self.places.function(self.address)
    }

    /// Writes down the driver to give the function back to, before it is taken.
    fn remember(&mut self, former: Option<&str>) -> Result<(), String> {
        let text = format!("former {}\npid {}\n", former.unwrap_or(""), std::process::id());
        fs::write(&self.record.path, text)
            .map_err(|error| format!("cannot write {}: {error}", self.record.path.display()))?;
        self.record.former = former.map(str::to_owned);
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let is_there = || self.places.is_controller(self.address);
        if self.record.former.is_some()
            && is_there()
            && self.places.rebind(self.address, None).is_err()
            // It may have been pulled out meanwhile.
            && is_there()
        {
            // The record stays: the next start tries again.
            return;
        }
        let _ = fs::remove_file(&self.record.path);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Way;
    use crate::block::nvme::pci::Places;
    use crate::block::nvme::pci::tests::{ADDRESS, address, machine};
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Sets the driver, which a real kernel does when it is told to probe.
    fn bind(places: &Places, driver: &str) {
        let link = places.function(address()).join("driver");
        let _ = fs::remove_file(&link);
        symlink(places.sys.join("bus/pci/drivers").join(driver), link).unwrap();
    }

    fn wish(places: &Places) -> String {
        fs::read_to_string(places.function(address()).join("driver_override")).unwrap()
    }

    #[test]
    fn controller_that_is_bound_already_is_left_as_it_is() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        bind(&places, "vfio-pci");
        let taken = places.take(address()).unwrap();
        assert_eq!(taken.way(), Way::Vfio);
        let error = places.take(address()).unwrap_err();
        assert!(error.contains("another process of varve"), "{error}");
        drop(taken);
        assert_eq!(wish(&places), "(null)\n");
        assert!(places.take(address()).is_ok());
    }

    #[test]
    fn record_is_written_before_the_kernel_is_told_and_stays_when_it_fails() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        // The simulated kernel binds nothing.
        let error = places.take(address()).unwrap_err();
        assert!(error.contains("did not bind it to uio_pci_generic"), "{error}");
        // It was given back at once: the last driver override is empty.
        assert!(wish(&places).ends_with('\n') && !places.record(address()).exists());
        let unbound = fs::read_to_string(places.sys.join("bus/pci/drivers/nvme/unbind")).unwrap();
        assert!(unbound.starts_with(ADDRESS), "{unbound}");
    }

    #[test]
    fn abandoned_controller_is_given_back_and_a_used_one_is_not() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        assert_eq!(places.give_back_abandoned(), Vec::<String>::new());
        fs::create_dir_all(&places.records).unwrap();
        bind(&places, "vfio-pci");
        fs::write(places.record(address()), "former nvme\npid 4000000\n").unwrap();
        let taken = places.take(address()).unwrap();
        assert_eq!(taken.record.former.as_deref(), Some("nvme"));
        assert_eq!(places.give_back_abandoned(), Vec::<String>::new());
        std::mem::forget(taken);
        // The lock lives as long as the forgotten descriptor: another record stands for one of a dead
        // process.
        fs::remove_file(places.record(address())).unwrap();
        fs::write(places.record(address()), "former nvme\npid 4000000\n").unwrap();
        let done = places.give_back_abandoned();
        assert!(
            done.len() == 1 && done[0].contains("given back to nvme"),
            "{done:?}"
        );
        assert!(!places.record(address()).exists());
        assert_eq!(wish(&places).trim_end_matches('\0').lines().next(), Some(""));
    }

    #[test]
    fn controller_that_cannot_be_taken_is_refused_with_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        let refusal = |places: &Places| places.take(address()).unwrap_err();
        let other = crate::block::PciAddress::parse("00:05.0").unwrap();
        let error = places.take(other).unwrap_err();
        assert!(
            error.contains("no such PCI function") && error.contains(ADDRESS),
            "{error}"
        );

        let mounts = "22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n";
        let proc = places.proc.join("self/mountinfo");
        let before = fs::read_to_string(&proc).unwrap();
        fs::write(&proc, mounts).unwrap();
        assert!(refusal(&places).contains("nvme0n1p2 holds the root file system"));
        fs::write(&proc, before).unwrap();

        fs::create_dir_all(places.sys.join("bus/pci/drivers/other")).unwrap();
        bind(&places, "other");
        assert!(refusal(&places).contains("drivers/other/unbind"));
        bind(&places, "nvme");

        fs::remove_dir_all(places.sys.join("bus/pci/drivers/uio_pci_generic")).unwrap();
        assert!(refusal(&places).contains("modprobe uio_pci_generic"));
        fs::create_dir_all(root.path().join("7")).unwrap();
        symlink(
            root.path().join("7"),
            places.function(address()).join("iommu_group"),
        )
        .unwrap();
        fs::remove_dir_all(places.sys.join("bus/pci/drivers/vfio-pci")).unwrap();
        assert!(refusal(&places).contains("modprobe vfio-pci"));

        fs::write(places.function(address()).join("class"), "0x020000\n").unwrap();
        assert!(refusal(&places).contains("no NVMe controller"));
    }
}
