//! Opens the device that a name stands for: by the requested way, or by the best available one, with the
//! reason.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::nvme::{self, NvmeOptions};
use super::spdk::{self, SpdkOptions};
use super::{BlockOptions, DeviceSpec, FileDevice, NgDevice};
use crate::error::MediaError;
use crate::traits::BlockDevice;

/// A device, and the reason for the way by which it is reached.
pub struct Opened {
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// For a person: the way taken, and why no better one. Empty where the name left no choice.
    pub why: String,
}

/// Returns the character device of the whole NVMe namespace that a block device is; `None` for anything else,
/// such as a partition.
fn character_sibling(path: &Path) -> Option<PathBuf> {
    let meta = fs::metadata(path)
        .ok()
        .filter(|meta| meta.file_type().is_block_device())?;
    let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    // Its name in sysfs, whichever link the path is.
    let dir = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let name = dir.file_name()?.to_str()?;
    if dir.join("partition").exists() {
        return None;
    }
    Some(Path::new("/dev").join(format!("ng{}", name.strip_prefix("nvme")?)))
}

/// Returns the character device that is meant: by its own name, a link, or a link to its block device, as
/// those in `/dev/disk/by-id` are.
fn character_node(path: &Path) -> PathBuf {
    character_sibling(path)
        .or_else(|| fs::canonicalize(path).ok())
        .unwrap_or_else(|| path.to_owned())
}

/// Opens an existing device. A path to a whole NVMe namespace is reached by its character device where that
/// works; a path to anything else by io_uring.
///
/// # Errors
/// Errors of the backend: each text names the remedy.
pub fn open(spec: &DeviceSpec, options: BlockOptions) -> Result<Opened, MediaError> {
    let opened = |device: Arc<dyn BlockDevice>, why: String| Ok(Opened { device, why });
    match spec {
        DeviceSpec::Uring(path) => opened(Arc::new(FileDevice::open(path, options)?), String::new()),
        DeviceSpec::Ng(path) => opened(Arc::new(NgDevice::open(&character_node(path))?), String::new()),
        DeviceSpec::Nvme(address) => {
            let device = nvme::open(*address, NvmeOptions::default())?;
            opened(Arc::new(device), String::new())
        }
        DeviceSpec::Spdk(address) => {
            let device = spdk::open(address, SpdkOptions::default())?;
            opened(Arc::new(device), String::new())
        }
        DeviceSpec::Path(path) => {
            let Some(node) = character_sibling(path).filter(|_| options.uring && options.direct) else {
                return opened(Arc::new(FileDevice::open(path, options)?), String::new());
            };
            let shown = path.display();
            match NgDevice::open(&node) {
                Ok(device) => opened(
                    Arc::new(device),
                    format!(
                        "{shown} is a whole NVMe namespace: ng:{} goes past the block layer",
                        node.display()
                    ),
                ),
                Err(error) => opened(
                    Arc::new(FileDevice::open(path, options)?),
                    format!("{shown} goes by io_uring through the block layer, since {error}"),
                ),
            }
        }
    }
}

/// Returns the way by which a path was reached, and the reason; `None` where the name or the kind of file
/// leaves no choice. Opens the device for a moment.
#[must_use]
pub fn explain(spec: &DeviceSpec, options: BlockOptions) -> Option<String> {
    let DeviceSpec::Path(_) = spec else { return None };
    let opened = open(spec, options).ok()?;
    (!opened.why.is_empty()).then_some(opened.why)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{character_node, open};
    use crate::block::{BlockOptions, DeviceSpec};

    #[test]
    fn link_to_a_namespace_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().canonicalize().unwrap().join("ng0n1");
        let link = dir.path().join("nvme-eui.0123");
        std::fs::write(&node, "").unwrap();
        std::os::unix::fs::symlink("ng0n1", &link).unwrap();
        let text = format!("ng:{}", link.display());
        assert_eq!(
            DeviceSpec::parse(&text).unwrap(),
            Some(DeviceSpec::Ng(link.clone()))
        );
        assert_eq!(character_node(&link), node);
        assert_eq!(
            character_node(&dir.path().join("absent")),
            dir.path().join("absent")
        );
    }

    #[test]
    fn file_is_opened_by_path_and_by_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [5; 8192]).unwrap();
        let name = path.display();
        for text in [format!("{name}"), format!("uring:{name}")] {
            let spec = DeviceSpec::parse(&text).unwrap().unwrap();
            let opened = open(&spec, BlockOptions::default()).unwrap();
            let mut back = [0; 100];
            opened.device.read(4000, &mut back).unwrap();
            assert_eq!((back, opened.device.len_bytes()), ([5; 100], 8192));
            assert_eq!(opened.why, "");
            assert_eq!(super::explain(&spec, BlockOptions::default()), None);
        }
        let absent = DeviceSpec::parse("nvme:ffff:ff:1f.7").unwrap().unwrap();
        let error = open(&absent, BlockOptions::default()).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("no such PCI function"), "{error}");
    }
}
