//! The devices of a pool of files: made, opened, removed. Owns the choice of backend for each file and the
//! messages where the host lacks something; knows no formats.

use super::arena::Arena;
use super::files::HostPool;
use super::live;
use super::more;
use super::readonly::{ReadOnlyDevice, ScratchDevice, ScratchRegion};
use super::size;
use super::spec::{NvmSpec, TierSpec};
use crate::KernelError;
use crate::config::Emulated;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_format::Tier;
use varve_media::block::nvme::Places;
use varve_media::elevator::Elevator;
use varve_media::emulated::{DiskModel, EmulatedDisk, EmulatedRegion, NvmModel};
use varve_media::host::host_capacity;
use varve_media::{
    Backing, BlockDevice, BlockOptions, DeviceInfo, DeviceSpec, FileDevice, JournalFile, MappedOptions,
    MappedRegion, Region,
};
use varve_store::{Devices, MkfsOptions, Store};

/// First bytes of a device that must be zeros before it is taken for a tier.
const PROBE_BYTES: usize = 1 << 20;

/// Returns the bytes of the journal of a pool with this much NVM.
pub fn journal_bytes(nvm_bytes: u64) -> u64 {
    (nvm_bytes / 8 / 4096 * 4096).clamp(8 << 20, 64 << 20)
}

/// Devices of a pool, and the device of persistent memory that NVM and journal are parts of.
pub(super) struct Opened {
    pub(super) devices: Devices,
    pub(super) arena: Option<Arc<Arena>>,
}

/// NVM, journal, and the device that they are parts of.
type Fast = (Arc<dyn Region>, Arc<dyn Region>, Option<Arc<Arena>>);

/// The kind of the files of NVM and journal.
const fn backing(nvm: &NvmSpec) -> Backing {
    match nvm {
        NvmSpec::File(_) => Backing::File,
        NvmSpec::Dax(_) | NvmSpec::Device(_) => Backing::Dax,
        NvmSpec::Shm(_) => Backing::Shm,
    }
}

const fn mapped(bytes: u64, backing: Backing) -> MappedOptions {
    MappedOptions {
        backing,
        len_bytes: bytes,
        max_bytes: bytes,
        sparse: false,
    }
}

/// Makes the files of a new pool.
pub(super) fn create(pool: &HostPool, again: bool) -> Result<Devices, KernelError> {
    if let Some(nvm_bytes) = pool.spec().nvm.bytes() {
        check_space(pool, nvm_bytes, journal_bytes(nvm_bytes))?;
    }
    for (spec, path) in [
        (&pool.spec().ssd, pool.ssd_path()),
        (&pool.spec().hdd, pool.hdd_path()),
    ] {
        if let (TierSpec::Device(DeviceSpec::Path(_) | DeviceSpec::Uring(_)), Some(path)) = (spec, path) {
            check_node(&path)?;
        }
    }
    let (ssd, hdd) = (tier(pool, Emulated::Ssd, true)?, tier(pool, Emulated::Hdd, true)?);
    if !again {
        for (spec, device) in [(&pool.spec().ssd, &ssd), (&pool.spec().hdd, &hdd)] {
            if let (TierSpec::Device(_), Some(device)) = (spec, device) {
                check_empty(&**device)?;
            }
        }
    }
    let more = more::open_new(pool, again)?;
    let logs = pool.logs_dir();
    match std::fs::create_dir(&logs) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(KernelError::io(format!("cannot make {}", logs.display()), error));
        }
        _ => {}
    }
    let (nvm, journal, _) = create_fast(pool)?;
    Ok(Devices {
        nvm,
        journal,
        ssd,
        hdd,
        more,
    })
}

/// Makes NVM and journal.
fn create_fast(pool: &HostPool) -> Result<Fast, KernelError> {
    let bytes = match &pool.spec().nvm {
        NvmSpec::Device(path) => return parts(Arena::create(path, pool.uuid())?),
        NvmSpec::File(bytes) | NvmSpec::Dax(bytes) | NvmSpec::Shm(bytes) => *bytes,
    };
    let (backing, len) = (backing(&pool.spec().nvm), journal_bytes(bytes));
    let nvm = MappedRegion::create(&pool.nvm_path(), mapped(bytes, backing))?;
    let path = pool.journal_path();
    let journal: Arc<dyn Region> = match backing {
        Backing::File => Arc::new(JournalFile::create(&path, len)?),
        Backing::Shm | Backing::Dax => Arc::new(MappedRegion::create(&path, mapped(len, backing))?),
    };
    if backing != Backing::Shm {
        // Written once, so that later durable writes find allocated blocks and need no work of the host's own
        // journal.
        fill(&path, len)?;
    }
    Ok((Arc::new(nvm), journal, None))
}

/// Maps NVM and journal on a device.
fn parts(arena: Arena) -> Result<Fast, KernelError> {
    Ok((
        Arc::new(arena.nvm()?),
        Arc::new(arena.journal()?),
        Some(Arc::new(arena)),
    ))
}

/// Writes the pool's formats, then makes all names durable.
pub(super) fn format(pool: &HostPool, devices: &Devices, dir_hash_key: [u8; 16]) -> Result<(), KernelError> {
    let options = MkfsOptions {
        pool_uuid: pool.uuid(),
        dir_hash_key,
        now_ns: varve_ipc::Clock::now_ns(&varve_ipc::SystemClock),
        root_uid: rustix::process::geteuid().as_raw(),
        root_gid: rustix::process::getegid().as_raw(),
        ..MkfsOptions::default()
    };
    Store::mkfs(devices, &options)?;
    more::add_all(devices)?;
    varve_media::host::sync_dir(pool.dir())
        .map_err(|error| KernelError::io(format!("cannot sync {}", pool.dir().display()), error))
}

/// Removes the files that [`create`] made in the pool's own directories.
pub(super) fn remove(pool: &HostPool) {
    let mut fast = [Some(pool.nvm_path()), Some(pool.journal_path())];
    if let NvmSpec::Device(path) = &pool.spec().nvm {
        // Best effort, as below; a device that was not taken has no header of this pool.
        let _ = Arena::wipe(path, pool.uuid());
        fast = [None, None];
    }
    let own = |spec: &TierSpec, path: Option<PathBuf>| path.filter(|_| matches!(spec, TierSpec::Size(_)));
    let [nvm, journal] = fast;
    let paths = [
        nvm,
        journal,
        own(&pool.spec().ssd, pool.ssd_path()),
        own(&pool.spec().hdd, pool.hdd_path()),
    ];
    for path in paths.into_iter().flatten() {
        // Best effort: some files may not exist.
        let _ = std::fs::remove_file(path);
    }
}

fn fill(path: &Path, len_bytes: u64) -> Result<(), KernelError> {
    let zeros = vec![0; 1 << 20];
    let write = || -> io::Result<()> {
        let mut file = File::options().write(true).open(path)?;
        let mut left = len_bytes;
        while left > 0 {
            let n = left.min(zeros.len() as u64);
            file.write_all(&zeros[..n as usize])?;
            left -= n;
        }
        file.sync_all()
    };
    write().map_err(|error| KernelError::io(format!("cannot write {}", path.display()), error))
}

/// Opens the files of a pool.
pub(super) fn open(pool: &HostPool) -> Result<Opened, KernelError> {
    for line in Places::default().give_back_abandoned() {
        tracing::warn!("{line}");
    }
    // Where a tier has several devices, the store knows whether the first is needed.
    let needed = |tier, path: Option<PathBuf>| path.filter(|_| !pool.spec().has_more(tier));
    for path in [
        Some(pool.nvm_path()),
        Some(pool.journal_path()),
        needed(Tier::Ssd, pool.ssd_path()),
        needed(Tier::Hdd, pool.hdd_path()),
    ]
    .into_iter()
    .flatten()
    {
        match std::fs::metadata(&path) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(KernelError::Pool(format!(
                    "{} is not there: it is a part of the pool {}. Put it back (or attach the device); \
                    without it the pool cannot be opened",
                    path.display(),
                    pool.dir().display()
                )));
            }
            Err(error) => {
                return Err(KernelError::io(
                    format!("cannot look at {}", path.display()),
                    error,
                ));
            }
        }
    }
    let first = |of: Tier, emulated| match tier(pool, emulated, false) {
        Err(error) if pool.spec().has_more(of) => Ok(Some(more::absent_first(pool, of, &error))),
        opened => opened,
    };
    let (nvm, journal, arena) = open_fast(pool)?;
    Ok(Opened {
        devices: Devices {
            nvm: slowed(pool, nvm),
            journal: slowed(pool, journal),
            ssd: first(Tier::Ssd, Emulated::Ssd)?,
            hdd: first(Tier::Hdd, Emulated::Hdd)?,
            more: more::open(pool),
        },
        arena,
    })
}

fn open_fast(pool: &HostPool) -> Result<Fast, KernelError> {
    if let NvmSpec::Device(path) = &pool.spec().nvm {
        return parts(Arena::open(path, pool.uuid())?);
    }
    let backing = backing(&pool.spec().nvm);
    let nvm = MappedRegion::open(&pool.nvm_path(), backing, 0, true)?;
    let journal: Arc<dyn Region> = match backing {
        Backing::File => Arc::new(JournalFile::open(&pool.journal_path())?),
        Backing::Shm | Backing::Dax => Arc::new(MappedRegion::open(&pool.journal_path(), backing, 0, true)?),
    };
    Ok((Arc::new(nvm), journal, None))
}

/// Allocates all space of a mapped NVM file: a store into a hole that the host cannot fill would kill the
/// daemon. A restored copy may have holes.
///
/// # Errors
/// The host has no space for them.
pub fn fill_holes(pool: &HostPool, devices: &Devices) -> Result<(), KernelError> {
    let path = pool.nvm_path();
    let meta = std::fs::metadata(&path)
        .map_err(|error| KernelError::io(format!("cannot look at {}", path.display()), error))?;
    if !meta.is_file() {
        return Ok(());
    }
    let missing = meta.len().saturating_sub(meta.blocks() * 512);
    if missing == 0 {
        return Ok(());
    }
    devices.nvm.allocate(0, devices.nvm.len_bytes()).map_err(|error| {
        if error.is_no_space() {
            KernelError::Pool(format!(
                "{} has holes ({} are missing), as a copy may have, and its host has no space to fill them: \
                free some space there",
                path.display(),
                size::show(missing)
            ))
        } else {
            error.into()
        }
    })
}

/// Wraps the devices so that writes to them are forgotten.
pub(super) fn for_trying(devices: Devices) -> Devices {
    let scratch = |device: Arc<dyn BlockDevice>| Arc::new(ScratchDevice::new(device)) as Arc<dyn BlockDevice>;
    Devices {
        nvm: Arc::new(ScratchRegion::new(devices.nvm)),
        journal: Arc::new(ScratchRegion::new(devices.journal)),
        ssd: devices.ssd.map(scratch),
        hdd: devices.hdd.map(scratch),
        more: over_all(devices.more, scratch),
    }
}

/// Wraps the devices so that nothing changes them.
pub(super) fn for_looking(devices: Devices) -> Devices {
    let read_only =
        |device: Arc<dyn BlockDevice>| Arc::new(ReadOnlyDevice::new(device)) as Arc<dyn BlockDevice>;
    Devices {
        nvm: Arc::new(ScratchRegion::new(devices.nvm)),
        journal: Arc::new(ScratchRegion::new(devices.journal)),
        ssd: devices.ssd.map(read_only),
        hdd: devices.hdd.map(read_only),
        more: over_all(devices.more, read_only),
    }
}

/// Wraps further devices.
fn over_all(
    devices: Vec<(Tier, Arc<dyn BlockDevice>)>,
    over: impl Fn(Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice>,
) -> Vec<(Tier, Arc<dyn BlockDevice>)> {
    let each = devices.into_iter();
    each.map(|(tier, device)| (tier, over(device))).collect()
}

/// Opens or makes a slower tier's device, if the pool has it.
fn tier(pool: &HostPool, tier: Emulated, create: bool) -> Result<Option<Arc<dyn BlockDevice>>, KernelError> {
    let (tier, spec, path) = match tier {
        Emulated::Hdd => (Tier::Hdd, &pool.spec().hdd, pool.hdd_path()),
        _ => (Tier::Ssd, &pool.spec().ssd, pool.ssd_path()),
    };
    if let Some(path) = path.as_ref().filter(|path| !path.exists())
        && pool.spec().has_more(tier)
        && !create
    {
        tracing::warn!(
            "the first {} device, {}, is not there",
            tier.name(),
            path.display()
        );
        return Ok(None);
    }
    let options = BlockOptions {
        uring: pool.config().io_uring,
        direct: pool.config().o_direct,
    };
    let device: Arc<dyn BlockDevice> = match (spec, path) {
        (TierSpec::Device(device), _) => {
            let opened = varve_media::block::open(&device.relative_to(pool.dir()), options)?;
            if !opened.why.is_empty() {
                tracing::info!("{}", opened.why);
            }
            opened.device
        }
        (TierSpec::Size(bytes), Some(path)) if create => {
            Arc::new(FileDevice::create(&path, *bytes, options)?)
        }
        (TierSpec::Size(_), Some(path)) => Arc::new(FileDevice::open(&path, options)?),
        _ => return Ok(None),
    };
    Ok(Some(slowed_disk(pool, tier, device)))
}

/// Slows a device of a tier down, if the pool's configuration says so, and has its reads ordered where that
/// pays.
pub(super) fn slowed_disk(pool: &HostPool, tier: Tier, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let (emulated, model) = match tier {
        Tier::Hdd => (Emulated::Hdd, DiskModel::HDD),
        _ => (Emulated::Ssd, DiskModel::SSD),
    };
    let device = if pool.config().emulate.contains(&emulated) {
        Arc::new(EmulatedDisk::new(device, model))
    } else {
        device
    };
    if tier == Tier::Hdd && device.wants_order() {
        return Arc::new(Elevator::new(device));
    }
    device
}

/// Slows NVM, its journal or a log down, if the pool's configuration says so.
fn slowed(pool: &HostPool, region: Arc<dyn Region>) -> Arc<dyn Region> {
    if pool.config().emulate.contains(&Emulated::Nvm) {
        Arc::new(EmulatedRegion::new(region, NvmModel::STRATA))
    } else {
        region
    }
}

/// Returns the host's shortcomings, a line each: they cost speed only, but for bad parts of persistent
/// memory.
pub(super) fn remarks(pool: &HostPool, devices: &Devices) -> Vec<String> {
    let more = devices.more.iter().map(|(_, device)| device);
    let tiers = [&devices.ssd, &devices.hdd].into_iter().flatten().chain(more);
    let infos: Vec<DeviceInfo> = tiers.map(|device| device.info()).collect();
    let mut lines = remarks_on(&infos);
    if pool.spec().nvm.is_dax() {
        lines.extend(bad_memory(&pool.nvm_path()));
    }
    lines
}

/// Says how much of persistent memory the kernel lists as bad.
fn bad_memory(path: &Path) -> Option<String> {
    let bad = varve_media::dax::bad_parts(&varve_media::dax::KernelDirs::default(), &File::open(path).ok()?);
    let bytes: u64 = bad.iter().map(|(_, len)| len).sum();
    let (off, _) = bad.first()?;
    Some(format!(
        "{}: {} parts of its memory are bad ({bytes} bytes, the first at byte {off}); to read what is stored \
         there is an error. `varve scrub` names the files, `varve fsck --repair` of the stopped pool mends \
         what can be mended",
        path.display(),
        bad.len()
    ))
}

/// Returns the shortcomings for devices with these descriptions. Only files and block devices need anything
/// of the host.
fn remarks_on(infos: &[DeviceInfo]) -> Vec<String> {
    let buffered = infos.iter().filter(|info| info.backend.contains("buffered"));
    let mut lines: Vec<String> = buffered
        .map(|info| {
            format!(
                "{}: its file system does not take O_DIRECT (or `o_direct = false`); data goes through the \
                page cache",
                info.name
            )
        })
        .collect();
    if infos.iter().any(|info| info.backend.contains("pread/pwrite")) {
        lines.push(
            "io_uring is not available here (disabled by the kernel, a sandbox or `io_uring = \
            false`); SSD and HDD are read and written by pread and pwrite"
                .into(),
        );
    }
    lines
}

/// Refuses a pool that cannot fit on the host, before anything is made.
fn check_space(pool: &HostPool, nvm_bytes: u64, journal_len: u64) -> Result<(), KernelError> {
    match &pool.spec().nvm {
        NvmSpec::Device(_) => Ok(()),
        NvmSpec::Shm(_) => live::check_memory_pool(pool.live(), nvm_bytes, journal_len),
        NvmSpec::File(_) | NvmSpec::Dax(_) => {
            let space = host_capacity(pool.dir()).map_err(|error| {
                KernelError::io(
                    format!("cannot ask for the space at {}", pool.dir().display()),
                    error,
                )
            })?;
            let need = nvm_bytes + journal_len;
            if need <= space.available_bytes {
                return Ok(());
            }
            Err(KernelError::Pool(format!(
                "NVM and journal need {} at {}, which has {} free (SSD and HDD are sparse and take space as \
                they fill). Use a \
                 smaller --nvm, or free some space",
                size::show(need),
                pool.dir().display(),
                size::show(space.available_bytes)
            )))
        }
    }
}

/// Refuses a file or block device that is in use, before anything is made.
pub(super) fn check_node(path: &Path) -> Result<(), KernelError> {
    let meta = std::fs::metadata(path).map_err(|error| {
        KernelError::io(
            format!(
                "{} (a size makes a sparse file in the pool; a path must be a file or block device that \
                is there)",
                path.display()
            ),
            error,
        )
    })?;
    if !meta.is_file() && !meta.file_type().is_block_device() {
        return Err(KernelError::Pool(format!(
            "{} is neither a file nor a block device",
            path.display()
        )));
    }
    // On a block device O_EXCL without O_CREAT fails while it is mounted or part of something.
    let flags = if meta.is_file() { 0 } else { libc::O_EXCL };
    File::options()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| {
            KernelError::io(
                format!("cannot use {} (is it mounted or in use?)", path.display()),
                error,
            )
        })?;
    Ok(())
}

/// Refuses a device that is not empty.
pub(super) fn check_empty(device: &dyn BlockDevice) -> Result<(), KernelError> {
    let mut start = vec![0; PROBE_BYTES.min(usize::try_from(device.len_bytes()).unwrap_or(PROBE_BYTES))];
    device.read(0, &mut start)?;
    if start.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    let name = device.name();
    // A device without a node can be wiped only while the kernel drives it.
    let wipe = match name.as_str().split_once(':') {
        Some(("nvme", _)) => "`blkdiscard -z` or `dd` on its /dev/nvmeXnY".to_owned(),
        Some(("ng", node)) => format!("`blkdiscard -z {}`", node.replace("/dev/ng", "/dev/nvme")),
        _ => format!("`dd if=/dev/zero of={name} bs=1M count=1`"),
    };
    Err(KernelError::Pool(format!(
        "{name} is not empty: its first {} are not all zero. If nothing on it is needed, wipe it first \
        ({wipe})",
        size::show(PROBE_BYTES as u64)
    )))
}

#[cfg(test)]
mod tests {
    use super::remarks_on;
    use varve_media::{DeviceInfo, MediumKind};

    #[test]
    fn only_files_and_block_devices_are_remarked_on() {
        let of = |backend: &str| DeviceInfo {
            name: "disk".into(),
            kind: MediumKind::Block,
            backend: backend.into(),
        };
        assert!(
            remarks_on(&[
                of("nvme in user space, VFIO with an IOMMU"),
                of("io_uring passthrough")
            ])
            .is_empty()
        );
        assert!(remarks_on(&[of("io_uring (registered file), O_DIRECT, device")]).is_empty());
        let lines = remarks_on(&[of("emulated hdd over pread/pwrite, buffered, file")]);
        assert!(
            lines[0].starts_with("disk: ") && lines[1].contains("io_uring is not available"),
            "{lines:?}"
        );
    }
}
