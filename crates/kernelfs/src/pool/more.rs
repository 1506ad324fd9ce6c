//! Further devices of a pool's tiers: opens those that its settings name, adds one to a pool, in service or
//! not, and takes those out of the settings that are not part of the pool any more. The store decides what a
//! device is; this knows paths, files and `varve.toml`.

use super::devices::{check_empty, check_node, slowed_disk};
use super::files::{HostPool, new_uuid};
use super::spec::{PoolSpec, TierSpec};
use crate::KernelError;
use parking_lot::Mutex;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_format::device::DeviceLabel;
use varve_format::{BLOCK_SIZE, Tier};
use varve_media::{
    BlockDevice, BlockOptions, DeviceInfo, DeviceName, DeviceSpec, DeviceState, FileDevice, MediaError,
    MediumKind,
};
use varve_store::{DeviceUse, Devices, OpenOptions, Store};

/// Further devices, with their tiers.
type More = Vec<(Tier, Arc<dyn BlockDevice>)>;

/// A device that is named in the settings and cannot be opened. The store says whether it is needed.
struct Absent {
    name: DeviceName,
    why: Arc<str>,
}

impl Absent {
    fn error(&self) -> MediaError {
        MediaError::Failed {
            device: self.name.clone(),
            reason: Arc::clone(&self.why),
        }
    }
}

impl BlockDevice for Absent {
    fn len_bytes(&self) -> u64 {
        0
    }

    fn read(&self, _off: u64, _out: &mut [u8]) -> Result<(), MediaError> {
        Err(self.error())
    }

    fn write(&self, _off: u64, _src: &[u8]) -> Result<(), MediaError> {
        Err(self.error())
    }

    fn flush(&self) -> Result<(), MediaError> {
        Err(self.error())
    }

    fn trim(&self, _off: u64, _len: u64) -> Result<(), MediaError> {
        Err(self.error())
    }

    fn state(&self) -> DeviceState {
        DeviceState::Failed {
            reason: Arc::clone(&self.why),
        }
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Block,
            backend: "absent".into(),
        }
    }
}

/// Name of a file of a pool's directory that holds a further device.
pub(super) fn is_image(name: &str) -> bool {
    let number = |tier: &str| name.strip_prefix(tier)?.strip_suffix(".img")?.parse::<u64>().ok();
    number("ssd-").or_else(|| number("hdd-")).is_some()
}

const fn options(pool: &HostPool) -> BlockOptions {
    BlockOptions {
        uring: pool.config().io_uring,
        direct: pool.config().o_direct,
    }
}

/// Returns the whole name of a device, without `.` in its path.
fn named(pool: &HostPool, device: &DeviceSpec) -> DeviceSpec {
    let plain = |path: PathBuf| path.components().collect();
    match device.relative_to(pool.dir()) {
        DeviceSpec::Path(path) => DeviceSpec::Path(plain(path)),
        DeviceSpec::Uring(path) => DeviceSpec::Uring(plain(path)),
        other => other,
    }
}

fn open_one(pool: &HostPool, tier: Tier, device: &DeviceSpec) -> Result<Arc<dyn BlockDevice>, KernelError> {
    let opened = varve_media::block::open(&named(pool, device), options(pool))?;
    if !opened.why.is_empty() {
        tracing::info!("{}", opened.why);
    }
    Ok(slowed_disk(pool, tier, opened.device))
}

fn absent(name: String, error: &KernelError) -> Arc<dyn BlockDevice> {
    Arc::new(Absent {
        name: name.into(),
        why: error.to_string().into(),
    })
}

/// Stands for the first device of a tier of several that cannot be opened: it may have been taken out, and be
/// in use elsewhere.
pub(super) fn absent_first(pool: &HostPool, tier: Tier, error: &KernelError) -> Arc<dyn BlockDevice> {
    tracing::warn!("the first {} device cannot be opened: {error}", tier.name());
    absent(pool.spec().first(tier).to_string(), error)
}

/// Opens the further devices that the settings name; one that cannot be opened is there as one that failed.
pub(super) fn open(pool: &HostPool) -> More {
    let mut out = Vec::new();
    for (tier, spec) in &pool.spec().more {
        let TierSpec::Device(device) = spec else { continue };
        let opened = open_one(pool, *tier, device).unwrap_or_else(|error| {
            tracing::warn!("a further {} device cannot be opened: {error}", tier.name());
            absent(named(pool, device).to_string(), &error)
        });
        out.push((*tier, opened));
    }
    out
}

/// Opens the further devices of a new pool; `again`: they may have content.
pub(super) fn open_new(pool: &HostPool, again: bool) -> Result<More, KernelError> {
    let mut out = Vec::new();
    for (tier, spec) in &pool.spec().more {
        let TierSpec::Device(device) = spec else { continue };
        if let DeviceSpec::Path(path) | DeviceSpec::Uring(path) = device {
            check_node(&pool.dir().join(path))?;
        }
        let opened = open_one(pool, *tier, device)?;
        if !again {
            check_empty(&*opened)?;
        }
        out.push((*tier, opened));
    }
    Ok(out)
}

/// Makes the files of a new pool for its further devices that are given by a size. Returns the settings with
/// their names.
pub(super) fn with_files(dir: &Path, spec: &PoolSpec) -> Result<PoolSpec, KernelError> {
    let mut named = spec.clone();
    let mut counts = [1; 3];
    for (tier, spec) in &mut named.more {
        counts[*tier as usize] += 1;
        if let TierSpec::Size(bytes) = spec {
            let name = format!("{}-{}.img", tier.name(), counts[*tier as usize]);
            FileDevice::create(&dir.join(&name), *bytes, BlockOptions::default())?;
            *spec = TierSpec::Device(DeviceSpec::Path(Path::new(".").join(name)));
        }
    }
    Ok(named)
}

/// Returns the files of the pool's directory that hold further devices, and their lengths.
pub(super) fn own_files(pool: &HostPool) -> Vec<(PathBuf, u64)> {
    let paths = pool
        .spec()
        .more
        .iter()
        .filter_map(|(_, spec)| spec.device()?.path());
    let own = paths.filter(|path| {
        path.file_name()
            .is_some_and(|name| is_image(&name.to_string_lossy()))
    });
    let paths = own.map(|path| pool.dir().join(path));
    paths
        .filter_map(|path| std::fs::metadata(&path).ok().map(|meta| (path, meta.len())))
        .collect()
}

/// Makes these files again, empty.
pub(super) fn make_again(files: &[(PathBuf, u64)]) -> Result<(), KernelError> {
    for (path, bytes) in files {
        FileDevice::create(path, *bytes, BlockOptions::default())?;
    }
    Ok(())
}

/// Adds the further devices of a pool that was just made.
pub(super) fn add_all(devices: &Devices) -> Result<(), KernelError> {
    if devices.more.is_empty() {
        return Ok(());
    }
    let first = Devices {
        more: Vec::new(),
        ..devices.clone()
    };
    let (store, _) = Store::open(first, OpenOptions::default())?;
    for (tier, device) in &devices.more {
        store.add_device(*tier, device, new_uuid()?)?;
    }
    store.checkpoint()?;
    Ok(())
}

/// Whether an entry of the settings means the device with this name.
pub(super) fn is_named(pool: &HostPool, tier: Tier, spec: &TierSpec, name: &str) -> bool {
    match spec {
        TierSpec::None => false,
        TierSpec::Size(_) => Path::new(name).file_name() == Some(format!("{}.img", tier.name()).as_ref()),
        TierSpec::Device(device) => {
            let device = named(pool, device);
            device.to_string() == name || device.path().is_some_and(|path| path == Path::new(name))
        }
    }
}

/// The devices that the settings of a pool in service name, with the names of those that were opened for them.
/// Locked while the settings change.
#[derive(Debug)]
pub struct Settings {
    pool: HostPool,
    named: Mutex<Vec<((Tier, TierSpec), String)>>,
}

impl Settings {
    /// `names` are the names of the further devices of the settings, in their order.
    #[must_use]
    pub fn new(pool: HostPool, names: Vec<String>) -> Self {
        let more = pool
            .spec()
            .more
            .iter()
            .filter(|(_, spec)| spec.device().is_some());
        let named = more.cloned().zip(names).collect();
        Self {
            pool,
            named: Mutex::new(named),
        }
    }

    /// Adds a device to a pool in service, see [`add_device`].
    ///
    /// # Errors
    /// As that.
    pub fn add(&self, store: &Store, tier: Tier, text: &str) -> Result<String, KernelError> {
        let mut named = self.named.lock();
        let (device, name) = add_one(&self.pool, store, tier, text)?;
        named.push(((tier, TierSpec::Device(device)), name.clone()));
        Ok(name)
    }

    /// Takes devices out of the settings that are not part of the pool any more. Best effort: they do no
    /// harm, and the next start tries it again.
    pub fn tidy(&self, store: &Store) {
        tidy(&self.pool, store, &self.named.lock());
    }
}

/// Adds a device to a tier of a pool that is open as `store`, in service or not, and to its `varve.toml`.
/// `text` is a size, for a file in the pool's directory, or the name of a device. Returns the device's name.
/// Durable when this returns; after a crash it can be done again.
///
/// # Errors
/// A text that means no device; a device in use, or not empty; the store's.
pub fn add_device(pool: &HostPool, store: &Store, tier: Tier, text: &str) -> Result<String, KernelError> {
    add_one(pool, store, tier, text).map(|(_, name)| name)
}

fn add_one(
    pool: &HostPool,
    store: &Store,
    tier: Tier,
    text: &str,
) -> Result<(DeviceSpec, String), KernelError> {
    let refuse = |text: String| Err(KernelError::Pool(text));
    let spec = TierSpec::parse(tier.name(), text).map_err(KernelError::Pool)?;
    let (device, made) = match spec {
        TierSpec::None => return refuse("0 is no device".into()),
        TierSpec::Device(device) => (device, None),
        TierSpec::Size(bytes) => {
            let name = free_name(pool.dir(), tier);
            let path = pool.dir().join(&name);
            FileDevice::create(&path, bytes, options(pool))?;
            (DeviceSpec::Path(Path::new(".").join(name)), Some(path))
        }
    };
    let result = add_opened(pool, store, tier, &device);
    if let (Err(_), Some(path)) = (&result, &made)
        && !may_be_added(store)
    {
        // Best effort: nothing is in it.
        let _ = std::fs::remove_file(path);
    }
    Ok((device, result?))
}

fn add_opened(
    pool: &HostPool,
    store: &Store,
    tier: Tier,
    device: &DeviceSpec,
) -> Result<String, KernelError> {
    if let DeviceSpec::Path(path) | DeviceSpec::Uring(path) = device {
        let path = pool.dir().join(path);
        check_node(&path)?;
        let own = [pool.ssd_path(), pool.hdd_path()];
        if own.into_iter().flatten().any(|own| is_same_file(&own, &path)) {
            return Err(KernelError::Pool(format!(
                "{} is a device of this pool already",
                path.display()
            )));
        }
    }
    let opened = open_one(pool, tier, device)?;
    check_free(pool, store, &*opened)?;
    let before = pool.read_spec()?;
    let mut after = before.clone();
    // An earlier attempt, or a device that was taken out, may have left it there by another name or for the
    // other tier.
    after.more.retain(|(_, spec)| !is_same_device(pool, spec, device));
    after.more.push((tier, TierSpec::Device(device.clone())));
    if after != before {
        pool.write_tiers(&after)?;
    }
    let name = opened.name().to_string();
    match store.add_device(tier, &opened, new_uuid()?) {
        Ok(()) => Ok(name),
        Err(error) => {
            // As after a crash, a device that is named and not part of the pool does no harm.
            if !may_be_added(store)
                && let Err(error) = pool.write_tiers(&before)
            {
                tracing::warn!("{name} is left in the settings: {error}");
            }
            Err(error.into())
        }
    }
}

/// Whether a device that could not be added may be a part of the pool at its next start: the record that
/// failed may be durable all the same, and the pool is not opened without the device then.
fn may_be_added(store: &Store) -> bool {
    store.latched().is_some()
}

/// Whether an entry of the settings means this device, by whatever name.
fn is_same_device(pool: &HostPool, spec: &TierSpec, device: &DeviceSpec) -> bool {
    let Some(other) = spec.device() else { return false };
    let path = |device: &DeviceSpec| device.path().map(|path| pool.dir().join(path));
    *other == *device
        || match (path(other), path(device)) {
            (Some(other), Some(path)) => is_same_file(&other, &path),
            _ => false,
        }
}

/// Whether two paths lead to one file or one block device.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let (Ok(one), Ok(other)) = (std::fs::metadata(one), std::fs::metadata(other)) else {
        return false;
    };
    let node = |meta: &Metadata| meta.file_type().is_block_device().then(|| meta.rdev());
    match (node(&one), node(&other)) {
        (None, None) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        (one, other) => one == other,
    }
}

/// Refuses a device that is not empty. One that an interrupted attempt has labelled counts as empty.
fn check_free(pool: &HostPool, store: &Store, device: &dyn BlockDevice) -> Result<(), KernelError> {
    let mut start = vec![0; BLOCK_SIZE];
    if device.len_bytes() >= BLOCK_SIZE as u64 {
        device.read(0, &mut start)?;
    }
    match DeviceLabel::read(&start) {
        Some(label) if label.pool_uuid == pool.uuid() => {
            let listed = store.device_list()?;
            let used = |device: &varve_store::DeviceStatus| {
                device.uuid == Some(label.uuid) && device.state != DeviceUse::Gone
            };
            match listed.iter().any(used) {
                false => Ok(()),
                true => Err(KernelError::Pool(format!(
                    "{} is a device of this pool already",
                    device.name()
                ))),
            }
        }
        _ => check_empty(device),
    }
}

/// Returns the name of a file in the pool's directory for one more device.
fn free_name(dir: &Path, tier: Tier) -> String {
    let names = (2..).map(|number| format!("{}-{number}.img", tier.name()));
    let mut free = names.filter(|name| !dir.join(name).exists());
    free.next().unwrap_or_default()
}

fn tidy(pool: &HostPool, store: &Store, named: &[((Tier, TierSpec), String)]) {
    let Ok(listed) = store.device_list() else { return };
    let used = |name: &String| {
        let mut of_name = listed.iter().filter(|listed| listed.name == *name);
        of_name.any(|listed| listed.state != DeviceUse::Gone)
    };
    let part = |spec: &(Tier, TierSpec)| named.iter().any(|(other, name)| other == spec && used(name));
    let Ok(before) = pool.read_spec() else { return };
    let mut after = before.clone();
    after.more.retain(|spec| part(spec));
    for (tier, first) in [(Tier::Ssd, &mut after.ssd), (Tier::Hdd, &mut after.hdd)] {
        let mut of_tier = listed.iter().filter(|device| device.tier == tier);
        if of_tier
            .next()
            .is_some_and(|device| device.state == DeviceUse::Gone)
        {
            *first = TierSpec::None;
        }
    }
    if after == before {
        return;
    }
    match pool.write_tiers(&after) {
        Ok(()) => tracing::info!(
            "devices that are not part of the pool were taken out of {}",
            pool.dir().join(super::files::TOML).display()
        ),
        Err(error) => tracing::warn!("the settings name devices that are not part of the pool: {error}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::is_same_file;

    #[test]
    fn file_is_the_same_by_all_of_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let [one, link, other] = ["one", "link", "other"].map(|name| dir.path().join(name));
        std::fs::write(&one, "").unwrap();
        std::fs::write(&other, "").unwrap();
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let hard = dir.path().join("hard");
        std::fs::hard_link(&one, &hard).unwrap();
        let dotted = dir.path().join(".").join("one");
        for same in [&one, &link, &hard, &dotted] {
            assert!(is_same_file(&one, same), "{}", same.display());
        }
        for not in [other, dir.path().join("none")] {
            assert!(!is_same_file(&one, &not), "{}", not.display());
        }
    }
}
