//! Finds out which ways to a device work on this machine, the causes why others do not, and the commands that
//! mend them. Only looks; the operator decides what to do.

use std::fs;
use std::path::Path;

use io_uring::{IoUring, Probe, opcode};

use super::PciAddress;
use super::nvme::Places;
use super::spdk;
use crate::finding::{Finding, Verdict};

/// Huge pages of 2 MiB that a controller without an IOMMU needs: a queue pair for each processor, at most 16,
/// and the admin queue.
fn huge_pages_wanted() -> u64 {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(16) as u64) + 1
}

/// Checks everything that a way to a device needs.
#[must_use]
pub fn survey(places: &Places) -> Vec<Finding> {
    let controllers = places.controllers();
    let mut found = vec![io_uring(places), nodes(places), spdk()];
    let needs_pages = controllers.iter().any(|address| places.group(*address).is_none());
    if controllers.is_empty() {
        let text = "this machine has none on PCI; `nvme:` and `ng:` have nothing to work with, pools of \
                    files and other disks need neither";
        found.push(Finding::new("NVMe controllers", Verdict::Note, text));
        return found;
    }
    found.push(iommu(places, &controllers));
    if needs_pages {
        found.push(huge_pages(places));
    }
    if spdk::find().is_ok() {
        found.push(pages_for_spdk(places));
    }
    found.extend(controllers.iter().map(|address| controller(places, *address)));
    found.extend(rights(places));
    found
}

fn io_uring(places: &Places) -> Finding {
    let topic = "io_uring";
    let ring = match IoUring::new(2) {
        Ok(ring) => ring,
        Err(error) => {
            let text = format!(
                "not available ({error}): SSD and HDD are read and written by pread and pwrite, `ng:` \
                 cannot be used"
            );
            let finding = Finding::new(topic, Verdict::Missing, text);
            let disabled = fs::read_to_string(places.proc.join("sys/kernel/io_uring_disabled"));
            return match disabled.unwrap_or_default().trim() {
                "1" | "2" => finding.mend("sysctl kernel.io_uring_disabled=0"),
                _ => finding,
            };
        }
    };
    let mut probe = Probe::new();
    let probed = ring.submitter().register_probe(&mut probe).is_ok();
    match probed && probe.is_supported(opcode::UringCmd80::CODE) {
        true => Finding::new(
            topic,
            Verdict::Good,
            "available, with passthrough commands for `ng:`",
        ),
        false => Finding::new(
            topic,
            Verdict::Note,
            "available without passthrough commands (Linux 5.19 has them): `ng:` cannot be used",
        ),
    }
}

/// Reports whether SPDK can be loaded. Without it nothing is missing: no other way needs it.
fn spdk() -> Finding {
    let topic = "SPDK";
    let installed = match spdk::find() {
        Ok(installed) => installed,
        Err(error) => return Finding::new(topic, Verdict::Note, format!("`spdk:` cannot be used: {error}")),
    };
    let home = installed.dirs[0].display();
    match spdk::load() {
        Ok(library) => Finding::new(
            topic,
            Verdict::Good,
            format!("{} in {home}, for `spdk:`", library.version),
        ),
        Err(error) => Finding::new(topic, Verdict::Missing, error)
            .mend(format!("echo {home} > /etc/ld.so.conf.d/spdk.conf && ldconfig")),
    }
}

/// Reports the huge pages that SPDK needs for controllers.
fn pages_for_spdk(places: &Places) -> Finding {
    let topic = "huge pages for SPDK";
    let (free, wanted) = (places.free_huge_pages(), spdk::HUGE_PAGES);
    if free >= wanted {
        let text = format!("{free} of 2 MiB free; `spdk:` takes up to {wanted} for a controller");
        return Finding::new(topic, Verdict::Good, text);
    }
    let text = format!(
        "{free} of 2 MiB free; `spdk:` takes up to {wanted} for a controller, and none for block devices of a \
         configuration without controllers"
    );
    Finding::new(topic, Verdict::Note, text).mend(format!(
        "sysctl vm.nr_hugepages={}",
        places.huge_pages() + wanted - free
    ))
}

fn nodes(places: &Places) -> Finding {
    let entries = fs::read_dir(&places.dev).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut nodes: Vec<String> = names.filter(|name| is_namespace_node(name)).collect();
    nodes.sort();
    let topic = "NVMe character devices";
    match nodes.is_empty() {
        true => Finding::new(
            topic,
            Verdict::Note,
            "none: `ng:` needs one, which Linux 5.13 makes for each namespace that it drives",
        ),
        false => Finding::new(
            topic,
            Verdict::Good,
            format!("/dev/{}: for `ng:`", nodes.join(", /dev/")),
        ),
    }
}

/// Whether a node is named like `ng0n1`.
fn is_namespace_node(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.strip_prefix("ng").and_then(|rest| rest.split_once('n'));
    parts.is_some_and(|(instance, nsid)| number(instance) && number(nsid))
}

fn iommu(places: &Places, controllers: &[PciAddress]) -> Finding {
    let watched = controllers.iter().any(|address| places.group(*address).is_some());
    let loaded = places.has_driver("vfio-pci");
    match (watched, loaded) {
        (true, true) => Finding::new(
            "IOMMU",
            Verdict::Good,
            "on, and vfio-pci is loaded: for `nvme:`, the device reaches nothing but its queues",
        ),
        (true, false) => Finding::new("IOMMU", Verdict::Missing, "on, but vfio-pci is not loaded")
            .mend("modprobe vfio-pci"),
        (false, _) => {
            let text = "off: `nvme:` must trust the device with all memory. Turn VT-d or AMD-Vi on in the \
                        firmware and add intel_iommu=on to the \
                        kernel's command line; without one it works by UIO and huge pages";
            let finding = Finding::new("IOMMU", Verdict::Note, text);
            match places.has_driver("uio_pci_generic") {
                true => finding,
                false => Finding {
                    verdict: Verdict::Missing,
                    ..finding
                }
                .mend("modprobe uio_pci_generic"),
            }
        }
    }
}

fn huge_pages(places: &Places) -> Finding {
    let topic = "huge pages";
    let wanted = huge_pages_wanted();
    let (free, size) = (places.meminfo("HugePages_Free"), places.meminfo("Hugepagesize"));
    if size != Some(2048) {
        let text = format!("the default size is {} KiB; UIO needs 2048", size.unwrap_or(0));
        return Finding::new(topic, Verdict::Missing, text)
            .mend("add hugepagesz=2M default_hugepagesz=2M to the kernel's command line");
    }
    let free = free.unwrap_or(0);
    if free >= wanted {
        return Finding::new(
            topic,
            Verdict::Good,
            format!("{free} of 2 MiB free; a controller takes up to {wanted}"),
        );
    }
    let total = places.meminfo("HugePages_Total").unwrap_or(0);
    Finding::new(
        topic,
        Verdict::Missing,
        format!("{free} of 2 MiB free; a controller without an IOMMU takes up to {wanted}"),
    )
    .mend(format!("sysctl vm.nr_hugepages={}", total + wanted - free))
}

fn controller(places: &Places, address: PciAddress) -> Finding {
    let topic = format!("nvme:{address}");
    let namespaces = places.namespaces(address).join(", ");
    let driver = places.driver(address);
    if let Some(used) = places.uses(address).first() {
        let text = format!("not free: its {} {}", used.node, used.what);
        return Finding::new(topic, Verdict::Note, text);
    }
    let neighbours = places.group_neighbours(address);
    if let Some((neighbour, owner)) = neighbours.first() {
        let text = format!(
            "shares its IOMMU group with {neighbour}, which {owner} has: both must be given to vfio-pci, or \
             neither"
        );
        return neighbours.iter().fold(
            Finding::new(topic, Verdict::Missing, text),
            |finding, (name, _)| {
                finding.mend(format!(
                    "echo vfio-pci > /sys/bus/pci/devices/{name}/driver_override; echo {name} > \
                 /sys/bus/pci/devices/{name}/driver/unbind; \
                 echo {name} > /sys/bus/pci/drivers_probe"
                ))
            },
        );
    }
    match driver.as_deref() {
        Some("nvme") => Finding::new(
            topic,
            Verdict::Good,
            format!("free, the kernel's ({namespaces}); `nvme:` or `spdk:` takes it and gives it back"),
        ),
        Some(driver @ ("vfio-pci" | "uio_pci_generic")) => Finding::new(
            topic,
            Verdict::Good,
            format!("bound to {driver}, ready for `nvme:` and `spdk:`"),
        ),
        None => Finding::new(
            topic,
            Verdict::Note,
            "no driver has it; `nvme:` or `spdk:` takes it as it is",
        )
        .mend(format!("echo {address} > /sys/bus/pci/drivers/nvme/bind")),
        Some(other) => Finding::new(topic, Verdict::Missing, format!("bound to {other}"))
            .mend(format!("echo {address} > /sys/bus/pci/drivers/{other}/unbind")),
    }
}

/// Reports the rights that an ordinary user lacks.
fn rights(places: &Places) -> Option<Finding> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let text = "`nvme:` takes controllers from the kernel, which only root may. As an ordinary user it \
                works with one that was bound to \
                vfio-pci beforehand; `ng:` works with a node that the user may write";
    let mut finding = Finding::new("rights", Verdict::Note, text);
    let user = rustix::process::geteuid().as_raw();
    for group in groups(&places.dev.join("vfio")) {
        finding = finding.mend(format!("chown {user} /dev/vfio/{group}"));
    }
    Some(finding.mend("ulimit -l unlimited"))
}

fn groups(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Finding, Verdict, is_namespace_node, survey};
    use crate::block::nvme::pci_tests::{address, machine};
    use std::fs;
    use std::os::unix::fs::symlink;

    fn about<'a>(found: &'a [Finding], topic: &str) -> &'a Finding {
        found
            .iter()
            .find(|finding| finding.topic.starts_with(topic))
            .unwrap()
    }

    #[test]
    fn survey_says_what_is_missing_and_the_commands_that_mend_it() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        fs::create_dir_all(&places.dev).unwrap();
        fs::write(places.dev.join("ng0n1"), "").unwrap();
        let meminfo = "HugePages_Total:       1\nHugePages_Free:        0\nHugepagesize:       2048 kB\n";
        fs::write(places.proc.join("meminfo"), meminfo).unwrap();
        let found = survey(&places);
        assert_eq!(about(&found, "IOMMU").verdict, Verdict::Note);
        let pages = about(&found, "huge pages");
        assert_eq!(pages.verdict, Verdict::Missing);
        assert!(
            pages.commands[0].starts_with("sysctl vm.nr_hugepages="),
            "{pages:?}"
        );
        assert_eq!(about(&found, "nvme:0000:00:04.0").verdict, Verdict::Good);
        assert!(about(&found, "NVMe character").text.contains("/dev/ng0n1"));

        // An IOMMU, a neighbour that the kernel uses, and no vfio-pci.
        let devices = root.path().join("9/devices");
        fs::create_dir_all(devices.join("0000:00:05.0")).unwrap();
        symlink(
            root.path().join("9"),
            places.function(address()).join("iommu_group"),
        )
        .unwrap();
        let other = places.sys.join("bus/pci/devices/0000:00:05.0");
        fs::create_dir_all(&other).unwrap();
        symlink(places.sys.join("bus/pci/drivers/nvme"), other.join("driver")).unwrap();
        fs::remove_dir_all(places.sys.join("bus/pci/drivers/vfio-pci")).unwrap();
        let found = survey(&places);
        assert_eq!(about(&found, "IOMMU").commands, ["modprobe vfio-pci"]);
        assert!(found.iter().all(|finding| finding.topic != "huge pages"));
        let shared = about(&found, "nvme:0000:00:04.0");
        assert!(
            shared.text.contains("0000:00:05.0") && shared.commands.len() == 1,
            "{shared:?}"
        );
    }

    #[test]
    fn machine_without_controllers_misses_nothing_for_them() {
        let root = tempfile::tempdir().unwrap();
        let places = machine(root.path());
        fs::remove_dir_all(places.sys.join("bus/pci/devices")).unwrap();
        let found = survey(&places);
        assert_eq!(about(&found, "NVMe controllers").verdict, Verdict::Note);
        assert!(is_namespace_node("ng10n2") && !is_namespace_node("ngx") && !is_namespace_node("ng0"));
    }
}
