//! A pool of plain files: the directory, its `varve.toml`, its lock. Owns names and the messages about
//! misfits; the store owns the files' content.

use super::arena::Arena;
use super::devices;
use super::live;
use super::more;
use super::spec::{NvmSpec, PoolSpec, TierSpec};
use super::tier_lines::{line_naming, tier_line, with_tiers};
use crate::config::Emulated;
use crate::{Config, KernelError};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_format::Tier;
use varve_media::emulated::NvmModel;
use varve_placement::rules::{RuleSpec, Rules};
use varve_store::Devices;

/// Version of the directory's layout and of `varve.toml`.
pub const LAYOUT_VERSION: u32 = 1;
/// The configuration file in a pool's directory.
pub const TOML: &str = "varve.toml";
/// Its name while the pool is being made.
pub(super) const TOML_NEW: &str = "varve.toml.new";
/// Files of tiers.
pub(super) const IMAGES: [&str; 4] = ["nvm.img", "journal.img", "ssd.img", "hdd.img"];
/// Files that may lie in the directory of a new pool.
const HARMLESS: [&str; 7] = [
    "lost+found",
    "mnt",
    "lock",
    "up.lock",
    "varve.log",
    ".gitignore",
    "logs",
];
/// Longest path of a Unix socket.
const SOCKET_PATH_MAX: usize = 107 - ".new".len();

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TiersToml {
    nvm: String,
    #[serde(default)]
    ssd: OneOrMore,
    #[serde(default)]
    hdd: OneOrMore,
}

/// The devices of a tier.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl Default for OneOrMore {
    fn default() -> Self {
        Self::One("0".into())
    }
}

impl OneOrMore {
    fn as_slice(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::More(list) => list,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolToml {
    version: u32,
    uuid: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dir: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    live: Option<PathBuf>,
    tiers: TiersToml,
    #[serde(default)]
    daemon: Config,
    /// Read where rules are used: a wrong one must not keep other commands from the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rule: Option<toml::Value>,
}

/// A pool's place and settings; no file of it is open.
#[derive(Debug, Clone)]
pub struct HostPool {
    dir: PathBuf,
    uuid: [u8; 16],
    spec: PoolSpec,
    config: Config,
    rules: Option<toml::Value>,
    live: PathBuf,
    owner_uid: u32,
}

/// The right to serve or change a pool, held until dropped.
#[derive(Debug)]
pub struct PoolLock {
    file: File,
    /// The process that took it: a forked child that drops its copy does not unlock.
    pid: u32,
}

impl Drop for PoolLock {
    fn drop(&mut self) {
        // Closing alone does not unlock: a child that another thread starts at this moment has the descriptor
        // too until it runs its program.
        if self.pid == std::process::id() {
            let _ = rustix::fs::flock(&self.file, rustix::fs::FlockOperation::Unlock);
        }
    }
}

/// Formats a UUID as text.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|byte| *byte != b'-')
        .map(|byte| (byte as char).to_digit(16).map(|digit| digit as u8))
        .collect::<Option<_>>()?;
    let pairs: Vec<u8> = digits
        .chunks(2)
        .map(|pair| pair.iter().fold(0, |sum, digit| sum << 4 | digit))
        .collect();
    (digits.len() == 32).then(|| pairs.try_into().ok()).flatten()
}

pub(super) fn random_bytes() -> Result<[u8; 16], KernelError> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| KernelError::io("cannot read /dev/urandom", error))?;
    Ok(bytes)
}

fn refuse<T>(text: impl Into<String>) -> Result<T, KernelError> {
    Err(KernelError::Pool(text.into()))
}

impl HostPool {
    /// Finds a pool by its directory or its TOML file, and reads its settings.
    ///
    /// # Errors
    /// No pool there, a newer layout, settings that make no sense: each says what to do.
    pub fn find(at: &Path) -> Result<Self, KernelError> {
        let meta = std::fs::metadata(at)
            .map_err(|error| KernelError::io(format!("{}: no such pool", at.display()), error))?;
        let toml = if meta.is_dir() {
            at.join(TOML)
        } else {
            at.to_owned()
        };
        let text = match std::fs::read_to_string(&toml) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return refuse(format!(
                    "{0} holds no pool ({TOML} is not there); make one with `varve mkfs {0}` or `varve up \
                    {0}`",
                    at.display()
                ));
            }
            Err(error) => return Err(KernelError::io(format!("cannot read {}", toml.display()), error)),
        };
        Self::parse(&text, &toml)
    }

    fn parse(text: &str, toml_path: &Path) -> Result<Self, KernelError> {
        let wrong = |what: String| KernelError::Pool(format!("{}: {what}", toml_path.display()));
        let table: toml::Table = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        match table.get("version").and_then(toml::Value::as_integer) {
            Some(version) if version == i64::from(LAYOUT_VERSION) => {}
            Some(version) if version > i64::from(LAYOUT_VERSION) => {
                return Err(wrong(format!(
                    "this pool is of format version {version}, this program knows version {LAYOUT_VERSION}: \
                    use a newer varve"
                )));
            }
            _ => {
                return Err(wrong(
                    "`version = 1` is missing: is this the configuration of a pool?".into(),
                ));
            }
        }
        let file: PoolToml = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        file.daemon.validate()?;
        let Some(uuid) = parse_uuid(&file.uuid) else {
            return Err(wrong(format!("`uuid = \"{}\"` is not a UUID", file.uuid)));
        };
        let spec = PoolSpec::parse_lists(
            Some(&file.tiers.nvm),
            file.tiers.ssd.as_slice(),
            file.tiers.hdd.as_slice(),
        )
        .map_err(|what| wrong(format!("[tiers]: {what}")))?;
        let beside = toml_path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let mut dir = beside.unwrap_or(Path::new(".")).to_owned();
        if let Some(other) = file.dir {
            dir = dir.join(other);
        }
        let dir = dir
            .canonicalize()
            .map_err(|error| KernelError::io(format!("cannot look at {}", dir.display()), error))?;
        let owner_uid = std::fs::metadata(toml_path)
            .map_err(|error| KernelError::io(format!("cannot look at {}", toml_path.display()), error))?
            .uid();
        let parent = file.live.unwrap_or_else(|| live::DEFAULT_PARENT.into());
        Ok(Self {
            live: live::place(&parent, &uuid_text(&uuid), owner_uid),
            dir,
            uuid,
            spec,
            config: file.daemon,
            rules: file.rule,
            owner_uid,
        })
    }

    /// Returns the pool's directory, absolute.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the live directory; it may not exist.
    #[must_use]
    pub fn live(&self) -> &Path {
        &self.live
    }

    /// Returns the pool's UUID.
    #[must_use]
    pub const fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Returns the tiers as requested.
    #[must_use]
    pub const fn spec(&self) -> &PoolSpec {
        &self.spec
    }

    /// Returns the settings as configured.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the user whom the pool belongs to.
    #[must_use]
    pub const fn owner_uid(&self) -> u32 {
        self.owner_uid
    }

    /// Returns the placement rules as configured.
    ///
    /// # Errors
    /// One of them is wrong.
    pub fn rules(&self) -> Result<Rules, KernelError> {
        let wrong = |what: String| KernelError::Pool(format!("{}: {what}", self.dir.join(TOML).display()));
        let Some(written) = &self.rules else {
            return Ok(Rules::default());
        };
        let specs: Vec<RuleSpec> = written
            .clone()
            .try_into()
            .map_err(|error| wrong(format!("[[rule]]: {error}")))?;
        let rules = Rules::new(specs).map_err(|error| wrong(error.to_string()))?;
        let lacks = |tier: &Tier| match tier {
            Tier::Nvm => false,
            Tier::Ssd | Tier::Hdd => self.spec.devices_of(*tier).all(|spec| *spec == TierSpec::None),
        };
        let lacked = rules.tiers().find(lacks);
        match lacked {
            Some(tier) => Err(wrong(format!(
                "a [[rule]] names {}, and the pool has none",
                tier.name()
            ))),
            None => Ok(rules),
        }
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("sock")
    }

    /// Returns the path of the file that holds the daemon's process id while one runs.
    #[must_use]
    pub fn pid_file(&self) -> PathBuf {
        self.dir.join("pid")
    }

    /// Returns the directory of the logs' backing files.
    #[must_use]
    pub fn logs_dir(&self) -> PathBuf {
        self.dir.join("logs")
    }

    /// Returns the file or device of the NVM tier.
    #[must_use]
    pub fn nvm_path(&self) -> PathBuf {
        self.fast_path("nvm.img")
    }

    /// Returns the file of the journal, or the device that it is on.
    #[must_use]
    pub fn journal_path(&self) -> PathBuf {
        self.fast_path("journal.img")
    }

    fn fast_path(&self, name: &str) -> PathBuf {
        match &self.spec.nvm {
            NvmSpec::Device(path) => path.clone(),
            _ => self.fast_dir().join(name),
        }
    }

    fn fast_dir(&self) -> &Path {
        if self.spec.nvm.is_memory() {
            &self.live
        } else {
            &self.dir
        }
    }

    /// Reads the tiers that `varve.toml` names now.
    pub(super) fn read_spec(&self) -> Result<PoolSpec, KernelError> {
        Self::find(&self.dir).map(|pool| pool.spec)
    }

    /// Writes other devices of SSD and HDD to `varve.toml`; all else in it stays. Durable when this returns.
    ///
    /// # Errors
    /// Its lines are not as Varve writes them; it cannot be written.
    pub(super) fn write_tiers(&self, spec: &PoolSpec) -> Result<(), KernelError> {
        let path = self.dir.join(TOML);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| KernelError::io(format!("cannot read {}", path.display()), error))?;
        let new = with_tiers(&text, spec);
        let reads_back = Self::parse(&new, &path).is_ok_and(|pool| pool.spec == *spec);
        if !reads_back {
            let [ssd, hdd] = [Tier::Ssd, Tier::Hdd].map(|tier| tier_line(spec, tier));
            return refuse(format!(
                "the devices in [tiers] of {} are not written as Varve does it: write them there as \
                 {ssd} and {hdd}, and \
                 try again",
                path.display()
            ));
        }
        write_durably(&self.dir.join(TOML_NEW), &new)?;
        rename(&self.dir, TOML_NEW, TOML)
    }

    /// Where `varve.toml` names a device of a tier still, although it is not a part of the pool any more: the
    /// number of the line, its text, and the name in it. `device` is the device's name in service.
    #[must_use]
    pub fn named_still(&self, tier: Tier, device: &str) -> Option<(usize, String, String)> {
        let text = std::fs::read_to_string(self.dir.join(TOML)).ok()?;
        let spec = self.read_spec().ok()?;
        let listed = spec
            .more
            .iter()
            .filter(|(of, _)| *of == tier)
            .map(|(_, spec)| spec);
        let mut named = std::iter::once(spec.first(tier)).chain(listed);
        let found = named.find(|spec| more::is_named(self, tier, spec, device))?;
        let (number, line) = line_naming(&text, tier, found).unwrap_or_default();
        Some((number, line, found.to_string()))
    }

    /// Returns the file or device node of the SSD tier, if there is one.
    #[must_use]
    pub fn ssd_path(&self) -> Option<PathBuf> {
        self.tier_path(&self.spec.ssd, "ssd.img")
    }

    /// Returns the file or device node of the HDD tier, if there is one.
    #[must_use]
    pub fn hdd_path(&self) -> Option<PathBuf> {
        self.tier_path(&self.spec.hdd, "hdd.img")
    }

    fn tier_path(&self, spec: &TierSpec, name: &str) -> Option<PathBuf> {
        match spec {
            TierSpec::None => None,
            TierSpec::Size(_) => Some(self.dir.join(name)),
            TierSpec::Device(device) => device.path().map(|path| self.dir.join(path)),
        }
    }

    /// Describes in a few words which failures data survives.
    #[must_use]
    pub fn durability(&self) -> &'static str {
        match &self.spec.nvm {
            NvmSpec::File(_) => {
                "every call survives a crash of any program; a power cut too once fsynced, and at most 1 s \
                is lost otherwise"
            }
            NvmSpec::Dax(_) | NvmSpec::Device(_) => {
                "every call survives a crash of any program, and a power cut, once it has returned"
            }
            NvmSpec::Shm(_) => {
                "memory only: survives a crash of any program, but is LOST at power-off or reboot"
            }
        }
    }

    /// Takes the pool's lock.
    ///
    /// # Errors
    /// Another process has it: the message names it.
    pub fn lock(&self) -> Result<PoolLock, KernelError> {
        take_lock(&self.dir)
    }

    /// Whether this is a memory-only pool whose memory is gone.
    #[must_use]
    pub fn memory_is_gone(&self) -> bool {
        self.spec.nvm.is_memory() && (!self.nvm_path().exists() || !self.journal_path().exists())
    }

    fn check_memory(&self) -> Result<(), KernelError> {
        if !self.memory_is_gone() {
            return Ok(());
        }
        refuse(format!(
            "{dir} is a memory-only pool (--nvm shm:…) and its memory is gone: its content ended with the \
            last reboot, or when \
             {live} was removed. `varve up --recreate {dir}` makes it again, empty, with the same sizes",
            dir = self.dir.display(),
            live = self.live.display()
        ))
    }

    /// Opens the pool's devices for serving it. Hold the [lock](Self::lock).
    ///
    /// # Errors
    /// A file is missing or cannot be used.
    pub fn devices(&self) -> Result<Devices, KernelError> {
        Ok(self.opened()?.devices)
    }

    /// [`devices`](Self::devices), with the device of persistent memory that they are parts of, if any.
    pub(super) fn opened(&self) -> Result<devices::Opened, KernelError> {
        self.check_memory()?;
        devices::open(self)
    }

    /// Opens the pool's devices so that nothing on them changes, whatever the store does. Hold the
    /// [lock](Self::lock).
    ///
    /// # Errors
    /// As for [`devices`](Self::devices).
    pub fn devices_for_looking(&self) -> Result<Devices, KernelError> {
        self.devices().map(devices::for_looking)
    }

    /// Opens the pool's devices for a trial: writes are visible, and then forgotten. Hold the
    /// [lock](Self::lock).
    ///
    /// # Errors
    /// As for [`devices`](Self::devices).
    pub fn devices_for_trying(&self) -> Result<Devices, KernelError> {
        self.devices().map(devices::for_trying)
    }

    /// Opens the sessions' logs.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn logs(&self) -> Result<super::HostLogs, KernelError> {
        self.logs_with(None)
    }

    /// [`logs`](Self::logs), some of which are on a device that is open already.
    pub(super) fn logs_with(&self, arena: Option<Arc<Arena>>) -> Result<super::HostLogs, KernelError> {
        let boot_id = varve_media::host::boot_id()
            .map_err(|error| KernelError::io("cannot read the boot id", error))?;
        let backing = (!self.spec.nvm.is_memory()).then(|| self.logs_dir());
        let logs = super::HostLogs::new(self.live.clone(), backing, self.nvm_path(), boot_id, self.uuid);
        let logs = match (&self.spec.nvm, arena) {
            (NvmSpec::Device(_), Some(arena)) => logs.on_device(arena),
            (NvmSpec::Device(path), None) => logs.on_device(Arc::new(Arena::open_beside(path, self.uuid)?)),
            (NvmSpec::Dax(_), _) => logs.on_dax_files(),
            _ => logs,
        };
        Ok(if self.config.emulate.contains(&Emulated::Nvm) {
            logs.slowed_to(NvmModel::STRATA)
        } else {
            logs
        })
    }

    /// Refuses to serve another user's pool: its memory files and images would change hands.
    ///
    /// # Errors
    /// Names the owner.
    pub fn check_owner(&self) -> Result<(), KernelError> {
        let uid = rustix::process::geteuid().as_raw();
        if uid == self.owner_uid {
            return Ok(());
        }
        refuse(format!(
            "{} belongs to user {}, this is user {uid}: run the daemon as its owner",
            self.dir.display(),
            self.owner_uid
        ))
    }

    /// Makes a memory-only pool again whose memory is gone: same place, sizes and settings, empty, another
    /// UUID. Other files in its directory stay. If it cannot be made, its `varve.toml` is unchanged, and this
    /// can be tried again.
    ///
    /// # Errors
    /// Its memory exists; and as for [`create_pool`].
    pub fn recreate(&self) -> Result<Self, KernelError> {
        if !self.memory_is_gone() {
            return refuse(format!(
                "{} does not need to be made again; only a memory-only pool that lost its memory does",
                self.dir.display()
            ));
        }
        self.check_owner()?;
        let lock = self.lock()?;
        let path = self.dir.join(TOML);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| KernelError::io(format!("cannot read {}", path.display()), error))?;
        let _ = std::fs::remove_dir_all(&self.live);
        let own = more::own_files(self);
        remove_images(&self.dir)?;
        more::make_again(&own)?;
        let again = make_locked(&self.dir, &self.spec, self.live.parent(), Some(&text))?;
        drop(lock);
        Ok(Self {
            config: self.config.clone(),
            ..again
        })
    }
}

fn rename(dir: &Path, from: &str, to: &str) -> Result<(), KernelError> {
    std::fs::rename(dir.join(from), dir.join(to))
        .and_then(|()| varve_media::host::sync_dir(dir))
        .map_err(|error| KernelError::io(format!("cannot rename {from} in {}", dir.display()), error))
}

fn take_lock(dir: &Path) -> Result<PoolLock, KernelError> {
    let path = dir.join("lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        // A user who can open the file, even for reading, can lock it and keep the daemon out.
        .mode(0o600)
        .open(&path)
        .map_err(|error| KernelError::io(format!("cannot open {}", path.display()), error))?;
    let _ = file.set_permissions(std::fs::Permissions::from_mode(0o600));
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(PoolLock {
            file,
            pid: std::process::id(),
        }),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let pid = std::fs::read_to_string(dir.join("pid")).unwrap_or_default();
            let who = match pid.trim() {
                "" => "another process".to_owned(),
                pid => format!("the daemon with pid {pid}"),
            };
            refuse(format!(
                "{0} is in use by {who}; stop it first (`varve down {0}`, or Ctrl-C where it runs)",
                dir.display()
            ))
        }
        Err(error) => Err(KernelError::io(format!("cannot lock {}", path.display()), error)),
    }
}

/// Makes a pool in `dir`: a new or an empty directory. Durable when this returns; the next call clears the
/// remains of an interrupted one.
///
/// # Errors
/// The directory has a pool or something else; no space; devices that do not fit. Nothing is left behind
/// then.
pub fn create_pool(dir: &Path, spec: &PoolSpec) -> Result<HostPool, KernelError> {
    let made = match std::fs::DirBuilder::new()
        .recursive(false)
        .mode(0o755)
        .create(dir)
    {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(KernelError::io(format!("cannot make {}", dir.display()), error)),
    };
    let whole = dir
        .canonicalize()
        .map_err(|error| KernelError::io(format!("cannot look at {}", dir.display()), error))?;
    let result = make_in(&whole, spec);
    if result.is_err() && made {
        // Best effort: only directories made here, and only if nothing else is in them.
        let _ = std::fs::remove_file(whole.join("lock"));
        let _ = std::fs::remove_dir(&whole);
    }
    result
}

fn make_in(dir: &Path, spec: &PoolSpec) -> Result<HostPool, KernelError> {
    if dir.join("sock").as_os_str().len() > SOCKET_PATH_MAX {
        return refuse(format!(
            "the path {} is too long for a socket in it (at most {} bytes); use a shorter one",
            dir.display(),
            SOCKET_PATH_MAX - "/sock".len()
        ));
    }
    if dir.join(TOML).exists() {
        return refuse(format!(
            "{0} holds a pool already; `varve up {0}` starts it. To make another one use another directory, \
            or remove this one",
            dir.display()
        ));
    }
    let _lock = take_lock(dir)?;
    check_empty(dir)?;
    make_locked(dir, spec, None, None)
}

/// Makes a pool in a directory that is locked and prepared for it; `again` is the `varve.toml` of the earlier
/// pool to recreate.
fn make_locked(
    dir: &Path,
    spec: &PoolSpec,
    live_parent: Option<&Path>,
    again: Option<&str>,
) -> Result<HostPool, KernelError> {
    let uuid = uuid_v4(random_bytes()?);
    let parent = live_parent.unwrap_or(Path::new(live::DEFAULT_PARENT));
    spec.check_new().map_err(KernelError::Pool)?;
    let named = more::with_files(dir, spec).inspect_err(|_| drop(remove_images(dir)))?;
    let spec = &named;
    let renamed = again.and_then(|text| with_uuid(text, &uuid));
    let text = renamed.unwrap_or_else(|| toml_text(spec, &uuid, live_parent));
    let new = dir.join(TOML_NEW);
    write_durably(&new, &text)?;
    let owner_uid = rustix::process::geteuid().as_raw();
    let pool = HostPool {
        dir: dir.to_owned(),
        uuid,
        spec: spec.clone(),
        config: Config::default(),
        rules: None,
        live: live::place(parent, &uuid_text(&uuid), owner_uid),
        owner_uid,
    };
    let done = live::ensure(&pool.live)
        .and_then(|()| live::note_pool(&pool.live, dir))
        .map(drop)
        .and_then(|()| devices::create(&pool, again.is_some()))
        .and_then(|devices| devices::format(&pool, &devices, random_bytes()?));
    if let Err(error) = done {
        devices::remove(&pool);
        live::remove_empty(&pool.live);
        let _ = std::fs::remove_dir(pool.logs_dir());
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    if !spec.nvm.is_memory() {
        // The daemon makes it again when it starts.
        live::remove_empty(&pool.live);
    }
    rename(dir, TOML_NEW, TOML)?;
    Ok(pool)
}

/// Refuses a directory that is not empty, and clears the remains of an interrupted `mkfs`.
fn check_empty(dir: &Path) -> Result<(), KernelError> {
    let interrupted = dir.join(TOML_NEW).exists();
    let entries = std::fs::read_dir(dir)
        .map_err(|error| KernelError::io(format!("cannot list {}", dir.display()), error))?;
    for entry in entries {
        let entry =
            entry.map_err(|error| KernelError::io(format!("cannot list {}", dir.display()), error))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if HARMLESS.contains(&&*name) {
            continue;
        }
        let ours = IMAGES.contains(&&*name)
            || more::is_image(&name)
            || [TOML_NEW, "sock", "pid", "up.pid"].contains(&&*name);
        if !(interrupted && ours) {
            return refuse(format!(
                "{} is not empty ({name} is in it); give a new or an empty directory",
                dir.display()
            ));
        }
    }
    if interrupted {
        tracing::warn!("{}: what an interrupted mkfs left is cleared", dir.display());
        remove_images(dir)?;
        let _ = std::fs::remove_file(dir.join(TOML_NEW));
    }
    Ok(())
}

/// Removes the files of tiers that lie in a pool's directory.
fn remove_images(dir: &Path) -> Result<(), KernelError> {
    let listed = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = listed.filter_map(|entry| entry.file_name().into_string().ok());
    let more = names.filter(|name| more::is_image(name));
    for name in IMAGES.into_iter().map(str::to_owned).chain(more) {
        match std::fs::remove_file(dir.join(&name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(KernelError::io(
                    format!("cannot remove {name} in {}", dir.display()),
                    error,
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes a random UUID.
pub(crate) fn new_uuid() -> Result<[u8; 16], KernelError> {
    random_bytes().map(uuid_v4)
}

fn uuid_v4(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

/// Returns the text of a `varve.toml` with another UUID.
fn with_uuid(text: &str, uuid: &[u8; 16]) -> Option<String> {
    let is_it = |line: &&str| line.split_once('=').is_some_and(|(key, _)| key.trim() == "uuid");
    let mut lines: Vec<_> = text.lines().collect();
    let own = format!("uuid = \"{}\"", uuid_text(uuid));
    *lines.iter_mut().find(|line| is_it(line))? = &own;
    Some(lines.join("\n") + "\n")
}

fn toml_text(spec: &PoolSpec, uuid: &[u8; 16], live_parent: Option<&Path>) -> String {
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let live = match live_parent {
        Some(parent) if parent != Path::new(live::DEFAULT_PARENT) => {
            format!("live = {}\n", quoted(&parent.to_string_lossy()))
        }
        _ => String::new(),
    };
    format!(
        "# A Varve pool. The sizes are those it was made with; changing them here does not change the pool.\n\
         version = {LAYOUT_VERSION}\nuuid = \"{}\"\n{live}\n[tiers]\nnvm = {}\n{}\n{}\n\n\
         # Settings of the daemon, read when it starts. What is left out has its default, for example:\n\
         # lease_ms = 2000\n# digest_percent = 30\n[daemon]\n",
        uuid_text(uuid),
        quoted(&spec.nvm.to_string()),
        tier_line(spec, Tier::Ssd),
        tier_line(spec, Tier::Hdd),
    )
}

fn write_durably(path: &Path, text: &str) -> Result<(), KernelError> {
    let write = || -> io::Result<()> {
        let mut file = File::create(path)?;
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|error| KernelError::io(format!("cannot write {}", path.display()), error))
}

#[cfg(test)]
mod tests;
