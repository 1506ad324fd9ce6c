//! What the kernel says of a block device's request queue. Knows sysfs; opens no device.

use std::path::Path;

use crate::error::{DeviceName, MediaError};

/// Properties of a block device, or of the one that a partition is of. What is not said counts as absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct BlockQueue {
    /// The driver has queues for polling (`nvme.poll_queues`).
    pub(super) polls: bool,
    /// It is one disk with a head, and the kernel knows that it is one: not a virtual machine's disk, an
    /// array or a volume over others, which say what any of their parts does.
    pub(super) rotates: bool,
    /// A scheduler of the kernel sorts its requests.
    pub(super) sorted: bool,
    /// It has zones that are written from their start on only.
    pub(super) zoned: bool,
}

impl BlockQueue {
    /// Reads what sysfs at `sys` says of the device with this number.
    pub(super) fn of(sys: &Path, device: u64) -> Self {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let dir = sys.join(format!("dev/block/{major}:{minor}"));
        let said = |name: &str| {
            // A partition has none of its own.
            let files = [dir.join("queue").join(name), dir.join("../queue").join(name)];
            let text = files.iter().find_map(|file| std::fs::read_to_string(file).ok());
            text.map(|text| text.trim().to_owned()).unwrap_or_default()
        };
        let at = std::fs::canonicalize(&dir).unwrap_or_default();
        let is_made_up = at.iter().any(|part| {
            let part = part.to_string_lossy();
            part == "virtual" || part.starts_with("virtio")
        });
        Self {
            polls: said("io_poll") == "1",
            rotates: said("rotational") == "1" && !is_made_up,
            // The chosen one is in brackets. Where there is no choice, somebody below may sort.
            sorted: !said("scheduler").contains("[none]"),
            zoned: said("zoned") == "host-managed",
        }
    }

    /// Refuses a device that a pool cannot write to.
    ///
    /// # Errors
    /// `Refused`.
    pub(super) fn check_zones(self, name: &DeviceName) -> Result<(), MediaError> {
        if !self.zoned {
            return Ok(());
        }
        Err(MediaError::Refused {
            device: name.clone(),
            why:
                "is a zoned device (host-managed: each zone is written from its start on only), which a pool \
                  cannot write to; `dmzadm` (dm-zoned) makes a device without zones of it"
                    .into(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::BlockQueue;

    /// A device with these files in its queue.
    fn of(files: &[(&str, &str)], partition: bool) -> BlockQueue {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/disk");
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        std::fs::create_dir_all(disk.join("part")).unwrap();
        std::fs::create_dir_all(sys.path().join("dev/block")).unwrap();
        for (name, text) in files {
            std::fs::write(disk.join("queue").join(name), format!("{text}\n")).unwrap();
        }
        let node = if partition { disk.join("part") } else { disk };
        std::os::unix::fs::symlink(node, sys.path().join("dev/block/8:1")).unwrap();
        BlockQueue::of(sys.path(), rustix::fs::makedev(8, 1))
    }

    #[test]
    fn queue_says_whether_it_polls_turns_sorts_and_has_zones() {
        let none = BlockQueue::default();
        let sorted = BlockQueue { sorted: true, ..none };
        assert_eq!(of(&[], false), sorted);
        let ssd = [
            ("rotational", "0"),
            ("io_poll", "1"),
            ("scheduler", "[none] mq-deadline"),
        ];
        for partition in [false, true] {
            assert_eq!(of(&ssd, partition), BlockQueue { polls: true, ..none });
        }
        let rotates = BlockQueue {
            rotates: true,
            ..none
        };
        for (scheduler, sorted) in [
            ("none [mq-deadline]", true),
            ("none", true),
            ("[none] bfq", false),
        ] {
            let disk = [("rotational", "1"), ("scheduler", scheduler), ("zoned", "none")];
            assert_eq!(of(&disk, true), BlockQueue { sorted, ..rotates });
        }
    }

    #[test]
    fn device_with_zones_is_refused_with_a_remedy() {
        let name = "sdz".into();
        for model in ["none", "host-aware"] {
            of(&[("zoned", model)], false).check_zones(&name).unwrap();
        }
        let refused = of(&[("zoned", "host-managed")], true).check_zones(&name);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("sdz") && text.contains("dmzadm"), "{text}");
    }
}
