//! Description of a new pool, as a person writes it. Text and values; touches no file.

use super::size;
use std::fmt;
use std::path::PathBuf;
use varve_format::Tier;
use varve_media::DeviceSpec;
use varve_media::block::SpdkAddress;

/// The NVM tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NvmSpec {
    /// A plain file in the pool of this many bytes.
    File(u64),
    /// Persistent memory: a file in the pool, whose directory is on a file system with DAX, of this many
    /// bytes.
    Dax(u64),
    /// Persistent memory: all of this devdax device.
    Device(PathBuf),
    /// Memory only, of this many bytes: survives the daemon, not the machine.
    Shm(u64),
}

impl NvmSpec {
    /// Returns the tier's bytes; `None`: what the device has.
    #[must_use]
    pub const fn bytes(&self) -> Option<u64> {
        match self {
            Self::File(bytes) | Self::Dax(bytes) | Self::Shm(bytes) => Some(*bytes),
            Self::Device(_) => None,
        }
    }

    /// Whether it is persistent memory.
    #[must_use]
    pub const fn is_dax(&self) -> bool {
        matches!(self, Self::Dax(_) | Self::Device(_))
    }

    /// Whether it lies in memory only.
    #[must_use]
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Shm(_))
    }

    /// Whether a person left the choice of the medium open: a size and no more.
    #[must_use]
    pub fn is_open(text: Option<&str>) -> bool {
        text.is_none_or(|text| !text.contains([':', '/']))
    }

    /// Reads `SIZE`, `file:SIZE`, `shm:SIZE`, `dax:SIZE` or `dax:DEVICE`.
    ///
    /// # Errors
    /// A message with the fault.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (kind, size) = match text.split_once(':') {
            Some((kind, rest)) => (kind, rest),
            None => ("", text),
        };
        if kind == "dax" && size.starts_with('/') {
            return Ok(Self::Device(size.into()));
        }
        if text.starts_with(['/', '.']) {
            return Err(format!(
                "NVM `{text}`: a device of persistent memory is written dax:/dev/daxX.Y; for a file system \
                 that is mounted with DAX, make the pool in a directory there with dax:SIZE, for example \
                 dax:1G"
            ));
        }
        let bytes = size::parse(size).map_err(|error| format!("NVM: {error} (or shm:1G)"))?;
        let least = varve_format::superblock::NVM_MIN_BYTES;
        if bytes < least {
            return Err(format!(
                "NVM `{text}` is too small; the least is {}",
                size::show(least)
            ));
        }
        let bytes = bytes / varve_format::BLOCK_BYTES * varve_format::BLOCK_BYTES;
        match kind {
            "" | "file" => Ok(Self::File(bytes)),
            "shm" => Ok(Self::Shm(bytes)),
            "dax" => Ok(Self::Dax(bytes)),
            kind => Err(format!(
                "NVM: `{kind}:` is not known; write SIZE, file:SIZE, shm:SIZE or dax:SIZE"
            )),
        }
    }
}

impl fmt::Display for NvmSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(bytes) => f.write_str(&size::exact(*bytes)),
            Self::Dax(bytes) => write!(f, "dax:{}", size::exact(*bytes)),
            Self::Device(path) => write!(f, "dax:{}", path.display()),
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

impl TierSpec {
    /// The existing device, if it is one.
    #[must_use]
    pub const fn device(&self) -> Option<&DeviceSpec> {
        match self {
            Self::Device(device) => Some(device),
            Self::None | Self::Size(_) => None,
        }
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
    /// Further devices of SSD and HDD. The first of such a tier may be gone, and `None` then.
    pub more: Vec<(Tier, TierSpec)>,
}

impl Default for PoolSpec {
    fn default() -> Self {
        Self {
            nvm: NvmSpec::File(1 << 30),
            ssd: TierSpec::Size(16 << 30),
            hdd: TierSpec::Size(64 << 30),
            more: Vec::new(),
        }
    }
}

impl PoolSpec {
    /// Puts NVM of a plain size on persistent memory where the pool's directory is on a file system with DAX.
    /// Returns the reason, for a person, if it did.
    pub fn choose_nvm(&mut self, dir: &std::path::Path) -> Option<String> {
        let NvmSpec::File(bytes) = self.nvm else {
            return None;
        };
        // A directory that does not exist yet is made in the next one above it that does.
        let there = dir.ancestors().find(|dir| dir.is_dir())?;
        if !varve_media::dax::is_dax_dir(there) {
            return None;
        }
        self.nvm = NvmSpec::Dax(bytes);
        Some(format!(
            "NVM is dax: {} is on a file system with DAX, so stores go straight to persistent memory \
             (--nvm file:SIZE for a plain file)",
            there.display()
        ))
    }

    /// Returns the default, with the given tiers in their places.
    ///
    /// # Errors
    /// A message with the fault of one of them.
    pub fn parse(nvm: Option<&str>, ssd: Option<&str>, hdd: Option<&str>) -> Result<Self, String> {
        Self::parse_lists(nvm, ssd.as_slice(), hdd.as_slice())
    }

    /// As [`parse`](Self::parse), with several devices a tier; none stands for the default.
    ///
    /// # Errors
    /// A message with the fault of one of them.
    pub fn parse_lists(
        nvm: Option<&str>,
        ssd: &[impl AsRef<str>],
        hdd: &[impl AsRef<str>],
    ) -> Result<Self, String> {
        let mut spec = Self::default();
        if let Some(text) = nvm {
            spec.nvm = NvmSpec::parse(text)?;
        }
        let ssd: Result<Vec<_>, _> = ssd
            .iter()
            .map(|text| TierSpec::parse("SSD", text.as_ref()))
            .collect();
        let hdd: Result<Vec<_>, _> = hdd
            .iter()
            .map(|text| TierSpec::parse("HDD", text.as_ref()))
            .collect();
        for (tier, list) in [(Tier::Ssd, ssd?), (Tier::Hdd, hdd?)] {
            let mut list = list.into_iter();
            if let Some(first) = list.next() {
                match tier {
                    Tier::Hdd => spec.hdd = first,
                    _ => spec.ssd = first,
                }
            }
            for device in list {
                if device == TierSpec::None {
                    return Err(format!("{}: 0 is no further device", tier.name()));
                }
                spec.more.push((tier, device));
            }
        }
        let more = spec.more.iter().map(|(_, device)| device);
        let devices: Vec<&DeviceSpec> = [&spec.ssd, &spec.hdd]
            .into_iter()
            .chain(more)
            .filter_map(TierSpec::device)
            .collect();
        for (index, one) in devices.iter().enumerate() {
            if devices[..index].iter().any(|other| is_same(one, other)) {
                let tiers = spec.more.is_empty();
                return Err(match tiers {
                    true => format!("{one} cannot be both SSD and HDD"),
                    false => format!("{one} is named twice"),
                });
            }
        }
        Ok(spec)
    }

    /// The first device of a slower tier.
    #[must_use]
    pub const fn first(&self, tier: Tier) -> &TierSpec {
        match tier {
            Tier::Hdd => &self.hdd,
            _ => &self.ssd,
        }
    }

    /// All devices of a slower tier.
    pub fn devices_of(&self, tier: Tier) -> impl Iterator<Item = &TierSpec> {
        let more = self.more.iter().filter(move |(of, _)| *of == tier);
        std::iter::once(self.first(tier)).chain(more.map(|(_, device)| device))
    }

    /// Whether a tier has several devices, or had.
    #[must_use]
    pub fn has_more(&self, tier: Tier) -> bool {
        self.more.iter().any(|(of, _)| *of == tier)
    }

    /// The devices of a slower tier, for a person.
    #[must_use]
    pub fn shown(&self, tier: Tier) -> String {
        let devices: Vec<String> = self.devices_of(tier).map(ToString::to_string).collect();
        devices.join(" + ")
    }

    /// Refuses what a new pool cannot have.
    ///
    /// # Errors
    /// A message with the fault.
    pub fn check_new(&self) -> Result<(), String> {
        for tier in [Tier::Ssd, Tier::Hdd] {
            if self.has_more(tier) && *self.first(tier) == TierSpec::None {
                return Err(format!(
                    "{}: the first device cannot be 0 where others follow",
                    tier.name()
                ));
            }
        }
        Ok(())
    }
}

/// Whether two names denote one device, as far as the names show. A controller is taken with all its
/// namespaces.
fn is_same(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let controller = |spec: &DeviceSpec| match spec {
        DeviceSpec::Nvme(address) | DeviceSpec::Spdk(SpdkAddress::Controller(address)) => Some(address.pci),
        _ => None,
    };
    match (one, other) {
        (DeviceSpec::Spdk(one @ SpdkAddress::Config { .. }), DeviceSpec::Spdk(other)) => one == other,
        _ if controller(one).is_some() => controller(one) == controller(other),
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
        let parts = PoolSpec::parse(None, Some("spdk:/a.json#A"), Some("spdk:/a.json#B"));
        assert_eq!(parts.unwrap().ssd.to_string(), "spdk:/a.json#A");
        assert_eq!(PoolSpec::parse(None, None, None), Ok(PoolSpec::default()));
        for (text, nvm) in [
            ("dax:64M", NvmSpec::Dax(64 << 20)),
            ("dax:/dev/dax0.0", NvmSpec::Device("/dev/dax0.0".into())),
        ] {
            assert_eq!(NvmSpec::parse(text), Ok(nvm.clone()));
            assert_eq!(nvm.to_string(), text);
        }
        assert_eq!(NvmSpec::parse("file:64M"), Ok(NvmSpec::File(64 << 20)));
        assert!(NvmSpec::is_open(None) && NvmSpec::is_open(Some("1G")));
        assert!(!NvmSpec::is_open(Some("file:1G")) && !NvmSpec::is_open(Some("dax:/dev/dax0.0")));
    }

    #[test]
    fn tiers_have_several_devices() {
        let spec = PoolSpec::parse_lists(None, &["1G", "/dev/sdz", "2G"], &["0"]).unwrap();
        assert_eq!(spec.shown(varve_format::Tier::Ssd), "1G + /dev/sdz + 2G");
        assert!(spec.has_more(varve_format::Tier::Ssd) && !spec.has_more(varve_format::Tier::Hdd));
        assert_eq!(spec.check_new(), Ok(()));
        let gone = PoolSpec::parse_lists(None, &["0", "/dev/sdz"], &["0"]).unwrap();
        assert!(gone.check_new().is_err());
        for (ssd, hdd) in [(vec!["/a", "/a"], vec!["0"]), (vec!["1G", "/a"], vec!["/a"])] {
            let twice = PoolSpec::parse_lists(None, &ssd, &hdd).unwrap_err();
            assert!(twice.contains("named twice"), "{twice}");
        }
        assert!(PoolSpec::parse_lists(None, &["1G", "0"], &["0"]).is_err());
    }

    #[test]
    fn specs_are_refused_with_a_reason() {
        for (nvm, ssd, hdd, said) in [
            (Some("/dev/pmem0"), None, None, "dax:/dev/daxX.Y"),
            (Some("dax:64K"), None, None, "too small"),
            (Some("tape:1G"), None, None, "`tape:` is not known"),
            (Some("0"), None, None, "too small"),
            (Some("shm:much"), None, None, "not a size"),
            (None, Some("many"), None, "SSD"),
            (None, Some("5K"), None, "too small"),
            (None, Some("./x"), Some("uring:./x"), "both"),
            (None, Some("nvme:00:04.0"), Some("nvme:00:04.0/2"), "both"),
            (None, Some("nvme:00:04.0"), Some("spdk:00:04.0"), "both"),
            (None, Some("spdk:/a.json#A"), Some("spdk:/a.json#A"), "both"),
            (None, None, Some("spdk:a.json"), "HDD: `spdk:a.json`: spdk: wants"),
        ] {
            let error = PoolSpec::parse(nvm, ssd, hdd).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
