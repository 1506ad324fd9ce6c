//! Names of block devices and of the ways to them. The one place that parses such names; text and values,
//! touches no device.

use std::fmt;
use std::path::{Path, PathBuf};

/// Supported schemes, for messages.
const SCHEMES: &str = "uring:PATH, ng:/dev/ngXnY, nvme:DDDD:BB:DD.F[/NSID], spdk:DDDD:BB:DD.F[/NSID], \
                       spdk:/PATH.json[#BDEV]";

/// A function of a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain (segment), up to 32 bits where controllers lie behind VMD.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// Reads `DDDD:BB:DD.F`, or `BB:DD.F` for domain 0; hexadecimal digits as `lspci` prints them.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let mut parts = rest.rsplit(':');
        let (device, bus) = (parts.next()?, parts.next()?);
        let domain = parts.next().unwrap_or("0");
        if parts.next().is_some() {
            return None;
        }
        let hex = |text: &str, digits_max: usize| {
            let plain = !text.is_empty() && text.len() <= digits_max;
            let plain = plain && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            plain.then(|| u32::from_str_radix(text, 16).ok()).flatten()
        };
        let address = Self {
            domain: hex(domain, 8)?,
            bus: hex(bus, 2)? as u8,
            device: hex(device, 2)? as u8,
            function: hex(function, 1)? as u8,
        };
        (address.device < 32 && address.function < 8).then_some(address)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// A namespace of an NVMe controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NvmeAddress {
    /// The controller.
    pub pci: PciAddress,
    /// The namespace; 1 by default.
    pub nsid: u32,
}

impl NvmeAddress {
    /// Reads `DDDD:BB:DD.F` or `DDDD:BB:DD.F/NSID`.
    fn parse(scheme: &'static str, text: &str, rest: &str) -> Result<Self, SpecError> {
        let (address, nsid) = match rest.split_once('/') {
            Some((address, nsid)) => (address, Some(nsid)),
            None => (rest, None),
        };
        let pci = PciAddress::parse(address).ok_or_else(|| SpecError::Pci {
            scheme,
            text: text.into(),
        })?;
        let nsid = match nsid {
            None => 1,
            // 0 and all ones have other meanings in the protocol.
            Some(nsid) => match nsid.parse() {
                Ok(nsid) if (1..u32::MAX).contains(&nsid) => nsid,
                _ => return Err(SpecError::Namespace { text: text.into() }),
            },
        };
        Ok(Self { pci, nsid })
    }

    fn show(self, scheme: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.nsid {
            1 => write!(f, "{scheme}:{}", self.pci),
            nsid => write!(f, "{scheme}:{}/{nsid}", self.pci),
        }
    }
}

impl fmt::Display for NvmeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.show("nvme", f)
    }
}

/// A device that SPDK drives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SpdkAddress {
    /// A namespace of an NVMe controller.
    Controller(NvmeAddress),
    /// A block device of SPDK's that a configuration makes.
    Config {
        /// The configuration, JSON as `rpc.py save_config` writes it.
        path: PathBuf,
        /// SPDK's name of the block device; `None`: the only one.
        bdev: Option<String>,
    },
}

impl fmt::Display for SpdkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller(address) => address.show("spdk", f),
            Self::Config { path, bdev: None } => write!(f, "spdk:{}", path.display()),
            Self::Config {
                path,
                bdev: Some(bdev),
            } => write!(f, "spdk:{}#{bdev}", path.display()),
        }
    }
}

/// A device and the way to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DeviceSpec {
    /// A file or block device by the best way of this host.
    Path(PathBuf),
    /// A file or block device by io_uring (by `pread` and `pwrite` where the host has none).
    Uring(PathBuf),
    /// A whole NVMe namespace by its character device, past the kernel's block layer.
    Ng(PathBuf),
    /// An NVMe controller taken from the kernel and driven by this process.
    Nvme(NvmeAddress),
    /// A device that an installed SPDK drives in this process.
    Spdk(SpdkAddress),
}

/// Why a name was refused. Each text says how to correct it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// No such way.
    #[error(
        "`{scheme}:` is no way to a device; write one of {SCHEMES}, or a path (`./{scheme}:…` for a file of \
         that name)"
    )]
    Scheme {
        /// The part before the colon.
        scheme: String,
    },
    /// Neither a PCI address nor a configuration.
    #[error(
        "`{text}`: spdk: wants an NVMe controller's PCI address, for example spdk:0000:00:04.0 \
         (`lspci -D -d ::0108` lists controllers), or a configuration of SPDK's by its absolute path and a \
         block device in it, for example spdk:/etc/varve/spdk.json#Nvme0n1"
    )]
    Spdk {
        /// The given text.
        text: String,
    },
    /// Nothing, or no absolute path, after the scheme.
    #[error("`{text}`: {scheme}: wants a path, for example {example}")]
    Path {
        /// The scheme.
        scheme: &'static str,
        /// The given text.
        text: String,
        /// A correct example.
        example: &'static str,
    },
    /// A block device where a character device belongs.
    #[error(
        "`{text}`: ng: wants the character device of a whole namespace; for this one write ng:{character}"
    )]
    BlockNode {
        /// The given text.
        text: String,
        /// Its character device.
        character: String,
    },
    /// No PCI address.
    #[error(
        "`{text}`: {scheme}: wants the controller's PCI address, for example {scheme}:0000:00:04.0 or \
         {scheme}:0000:00:04.0/2 for its namespace 2; \
         `lspci -D -d ::0108` lists controllers"
    )]
    Pci {
        /// The scheme.
        scheme: &'static str,
        /// The given text.
        text: String,
    },
    /// The namespace is no number from 1 on.
    #[error("`{text}`: a namespace is a number from 1 to 4294967294; `nvme list` shows them")]
    Namespace {
        /// The given text.
        text: String,
    },
}

impl DeviceSpec {
    /// Parses a name. `None`: it is neither a path nor has it a scheme (a size, perhaps).
    ///
    /// # Errors
    /// It is meant to be a device, but is malformed.
    pub fn parse(text: &str) -> Result<Option<Self>, SpecError> {
        let text = text.trim();
        let Some((scheme, rest)) = scheme_of(text) else {
            return Ok(text.contains('/').then(|| Self::Path(text.into())));
        };
        match scheme {
            "uring" => match rest {
                "" => Err(SpecError::Path {
                    scheme: "uring",
                    text: text.into(),
                    example: "uring:/dev/sdb",
                }),
                path => Ok(Some(Self::Uring(path.into()))),
            },
            "ng" => Self::parse_ng(text, rest).map(Some),
            "nvme" => NvmeAddress::parse("nvme", text, rest).map(|address| Some(Self::Nvme(address))),
            "spdk" => Self::parse_spdk(text, rest).map(Some),
            other => Err(SpecError::Scheme { scheme: other.into() }),
        }
    }

    fn parse_ng(text: &str, rest: &str) -> Result<Self, SpecError> {
        if !rest.starts_with('/') {
            return Err(SpecError::Path {
                scheme: "ng",
                text: text.into(),
                example: "ng:/dev/ng0n1",
            });
        }
        // Users know `/dev/nvme0n1`; `/dev/ng0n1` is its sibling. (A link such as `by-id/nvme-NAME` is followed.)
        let path = Path::new(rest);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let numbered = |rest: &&str| rest.starts_with(|first: char| first.is_ascii_digit());
        match name.strip_prefix("nvme").filter(numbered) {
            Some(number) => {
                let whole = number.split('p').next().unwrap_or(number);
                Err(SpecError::BlockNode {
                    text: text.into(),
                    character: path.with_file_name(format!("ng{whole}")).display().to_string(),
                })
            }
            None => Ok(Self::Ng(path.into())),
        }
    }

    fn parse_spdk(text: &str, rest: &str) -> Result<Self, SpecError> {
        if !rest.starts_with('/') {
            // A relative path would be another one for the daemon.
            if rest.is_empty() || rest.contains(".json") || rest.starts_with('.') {
                return Err(SpecError::Spdk { text: text.into() });
            }
            let address = NvmeAddress::parse("spdk", text, rest)?;
            return Ok(Self::Spdk(SpdkAddress::Controller(address)));
        }
        let (path, bdev) = match rest.split_once('#') {
            Some((path, bdev)) => (path, Some(bdev)),
            None => (rest, None),
        };
        if path.starts_with("/dev/") || bdev.is_some_and(str::is_empty) {
            return Err(SpecError::Spdk { text: text.into() });
        }
        Ok(Self::Spdk(SpdkAddress::Config {
            path: path.into(),
            bdev: bdev.map(str::to_owned),
        }))
    }

    /// The file or node that is opened; `None` for a device that has none.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) | Self::Uring(path) | Self::Ng(path) => Some(path),
            Self::Nvme(_) | Self::Spdk(_) => None,
        }
    }

    /// Returns this device with a relative path resolved against `dir`.
    #[must_use]
    pub fn relative_to(&self, dir: &Path) -> Self {
        match self {
            Self::Path(path) => Self::Path(dir.join(path)),
            Self::Uring(path) => Self::Uring(dir.join(path)),
            Self::Ng(_) | Self::Nvme(_) | Self::Spdk(_) => self.clone(),
        }
    }
}

/// Returns the letters before the first colon, if they could be a scheme, and the rest.
fn scheme_of(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(':')?;
    let named = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_lowercase());
    named.then_some((scheme, rest))
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Uring(path) => write!(f, "uring:{}", path.display()),
            Self::Ng(path) => write!(f, "ng:{}", path.display()),
            Self::Nvme(address) => write!(f, "{address}"),
            Self::Spdk(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{DeviceSpec, PciAddress};
    use std::path::Path;

    #[test]
    fn spec_is_read_and_written_the_same_way() {
        for text in [
            "/dev/sdb",
            "./disk:1/image",
            "uring:/dev/nvme0n1p3",
            "uring:relative",
            "ng:/dev/ng0n1",
            "nvme:0000:00:04.0",
            "nvme:10000:e1:1f.7/3",
            "spdk:0000:00:04.0",
            "spdk:0000:00:04.0/2",
            "spdk:/etc/varve/spdk.json",
            "spdk:/etc/varve/spdk.json#Malloc0",
        ] {
            let spec = DeviceSpec::parse(text).unwrap().unwrap();
            assert_eq!(spec.to_string(), text);
        }
        let short = DeviceSpec::parse(" nvme:00:04.0/1 ").unwrap().unwrap();
        assert_eq!(short.to_string(), "nvme:0000:00:04.0");
        for size in ["16G", "0", "none", "shm"] {
            assert_eq!(DeviceSpec::parse(size), Ok(None));
        }
    }

    #[test]
    fn spec_that_is_wrong_is_refused_with_what_would_be_right() {
        for (text, said) in [
            ("spdk:", "spdk:0000:00:04.0"),
            ("spdk:./spdk.json", "absolute path"),
            ("spdk:/dev/nvme0n1", "spdk:0000:00:04.0"),
            ("spdk:/etc/spdk.json#", "#Nvme0n1"),
            ("spdk:Nvme0n1", "spdk:0000:00:04.0/2 for its namespace"),
            ("spdk:0000:00:04.0/0", "from 1"),
            ("tape:/x", "spdk:/PATH.json"),
            ("file:/x", "`file:` is no way"),
            ("uring:", "uring:/dev/sdb"),
            ("ng:ng0n1", "ng:/dev/ng0n1"),
            ("ng:/dev/nvme3n2p1", "write ng:/dev/ng3n2"),
            ("nvme:/dev/nvme0n1", "lspci -D"),
            ("nvme:0000:00:20.0", "lspci -D"),
            ("nvme:0000:00:04.8", "lspci -D"),
            ("nvme:0:0:0:04.0", "lspci -D"),
            ("nvme:+1:04.0", "lspci -D"),
            ("nvme:0000:00:04.0/0", "from 1"),
            ("nvme:0000:00:04.0/4294967295", "from 1"),
            ("nvme:0000:00:04.0/one", "from 1"),
        ] {
            let error = DeviceSpec::parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        assert_eq!(PciAddress::parse(""), None);
    }

    #[test]
    fn spec_resolves_only_paths_against_the_pool() {
        let dir = Path::new("/pool");
        let of = |text: &str| DeviceSpec::parse(text).unwrap().unwrap().relative_to(dir);
        assert_eq!(of("./ssd").path(), Some(Path::new("/pool/./ssd")));
        assert_eq!(of("uring:ssd").to_string(), "uring:/pool/ssd");
        assert_eq!(of("nvme:00:04.0").path(), None);
        assert_eq!(of("spdk:/x.json").path(), None);
    }
}
