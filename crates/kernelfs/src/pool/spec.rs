//! Description of a new pool, as a person writes it. Text and values; touches no file.

use super::size;
use std::fmt;
use varve_media::DeviceSpec;

/// The NVM tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvmSpec {
    /// A plain file in the pool of this many bytes.
    File(u64),
    /// Memory only, of this many bytes: survives the daemon, not the machine.
    Shm(u64),
}

impl NvmSpec {
    /// Returns the tier's bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::File(bytes) | Self::Shm(bytes) => bytes,
        }
    }

    /// Whether it lies in memory only.
    #[must_use]
    pub const fn is_memory(self) -> bool {
        matches!(self, Self::Shm(_))
    }

    /// Reads `SIZE` or `shm:SIZE`.
    ///
    /// # Errors
    /// A message with the fault.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.starts_with(['/', '.']) {
            return Err(format!(
                "NVM `{text}`: persistent-memory devices are not supported yet; write SIZE or shm:SIZE, for \
                example 1G or shm:1G"
            ));
        }
        let (memory, size) = match text.strip_prefix("shm:") {
            Some(size) => (true, size),
            None => (false, text),
        };
        let bytes = size::parse(size).map_err(|error| format!("NVM: {error} (or shm:1G)"))?;
        let least = varve_format::superblock::NVM_MIN_BYTES;
        if bytes < least {
            return Err(format!(
                "NVM `{text}` is too small; the least is {}",
                size::show(least)
            ));
        }
        let bytes = bytes / varve_format::BLOCK_BYTES * varve_format::BLOCK_BYTES;
        Ok(if memory {
            Self::Shm(bytes)
        } else {
            Self::File(bytes)
        })
    }
}

impl fmt::Display for NvmSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(bytes) => f.write_str(&size::exact(*bytes)),
            Self::Shm(bytes) => write!(f, "shm:{}", size::exact(*bytes)),
        }
    }
}

/// The SSD or HDD tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TierSpec {
    /// The pool has none.
    None,
    /// A sparse file in the pool of this many bytes.
    Size(u64),
    /// An existing file or device, all of it.
    Device(DeviceSpec),
}

impl TierSpec {
    /// Reads `SIZE`, `0`, or the name of a [device](DeviceSpec::parse): a path (anything with a `/`), or
    /// another address of a device.
    ///
    /// # Errors
    /// A message with the fault.
    pub fn parse(tier: &str, text: &str) -> Result<Self, String> {
        let text = text.trim();
        match DeviceSpec::parse(text) {
            Ok(Some(device)) => return Ok(Self::Device(device)),
            Ok(None) => {}
            Err(error) => return Err(format!("{tier}: {error}")),
        }
        if text.eq_ignore_ascii_case("none") {
            return Ok(Self::None);
        }
        let bytes = size::parse(text)
            .map_err(|error| format!("{tier}: {error}; or a path with a `/` in it; or 0 for no {tier}"))?;
        if bytes == 0 {
            return Ok(Self::None);
        }
        let least = 1 << 20;
        if bytes < least {
            return Err(format!("{tier} `{text}` is too small; the least is 1M (0: none)"));
        }
        Ok(Self::Size(bytes.next_multiple_of(varve_format::BLOCK_BYTES)))
    }
}

impl fmt::Display for TierSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("0"),
            Self::Size(bytes) => f.write_str(&size::exact(*bytes)),
            Self::Device(device) => device.fmt(f),
        }
    }
}

/// Tiers of a pool. The default: 1 GiB, 16 GiB, 64 GiB, all plain files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec {
    /// NVM.
    pub nvm: NvmSpec,
    /// SSD.
    pub ssd: TierSpec,
    /// HDD.
    pub hdd: TierSpec,
}

impl Default for PoolSpec {
    fn default() -> Self {
        Self {
            nvm: NvmSpec::File(1 << 30),
            ssd: TierSpec::Size(16 << 30),
            hdd: TierSpec::Size(64 << 30),
        }
    }
}

impl PoolSpec {
    /// Returns the default, with the given tiers in their places.
    ///
    /// # Errors
    /// A message with the fault of one of them.
    pub fn parse(nvm: Option<&str>, ssd: Option<&str>, hdd: Option<&str>) -> Result<Self, String> {
        let mut spec = Self::default();
        if let Some(text) = nvm {
            spec.nvm = NvmSpec::parse(text)?;
        }
        if let Some(text) = ssd {
            spec.ssd = TierSpec::parse("SSD", text)?;
        }
        if let Some(text) = hdd {
            spec.hdd = TierSpec::parse("HDD", text)?;
        }
        if let (TierSpec::Device(one), TierSpec::Device(other)) = (&spec.ssd, &spec.hdd)
            && is_same(one, other)
        {
            return Err(format!("{one} cannot be both SSD and HDD"));
        }
        Ok(spec)
    }
}

/// Whether two names denote one device, as far as the names show. A controller is taken with all its
/// namespaces.
fn is_same(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    match (one, other) {
        (DeviceSpec::Nvme(one), DeviceSpec::Nvme(other)) => one.pci == other.pci,
        _ => one.path().is_some() && one.path() == other.path(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{NvmSpec, PoolSpec, TierSpec};
    use varve_media::DeviceSpec;

    #[test]
    fn specs_are_read_and_written_the_same_way() {
        let spec = PoolSpec::parse(Some("shm:64M"), Some("0"), Some("/dev/sdz")).unwrap();
        assert_eq!(spec.nvm, NvmSpec::Shm(64 << 20));
        assert_eq!(
            (&spec.ssd, &spec.hdd),
            (
                &TierSpec::None,
                &TierSpec::Device(DeviceSpec::Path("/dev/sdz".into()))
            )
        );
        let again = PoolSpec::parse(
            Some(&spec.nvm.to_string()),
            Some(&spec.ssd.to_string()),
            Some(&spec.hdd.to_string()),
        );
        assert_eq!(again, Ok(spec));
        assert_eq!(PoolSpec::parse(None, None, None), Ok(PoolSpec::default()));
    }

    #[test]
    fn specs_are_refused_with_a_reason() {
        for (nvm, ssd, hdd, said) in [
            (Some("/dev/pmem0"), None, None, "not supported yet"),
            (Some("0"), None, None, "too small"),
            (Some("shm:much"), None, None, "not a size"),
            (None, Some("many"), None, "SSD"),
            (None, Some("5K"), None, "too small"),
            (None, Some("./x"), Some("uring:./x"), "both"),
            (None, Some("nvme:00:04.0"), Some("nvme:00:04.0/2"), "both"),
            (
                None,
                None,
                Some("spdk:00:04.0"),
                "HDD: `spdk:` is not supported yet",
            ),
        ] {
            let error = PoolSpec::parse(nvm, ssd, hdd).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
