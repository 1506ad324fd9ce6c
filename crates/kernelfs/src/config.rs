//! Settings of a pool's daemon. Owns their names, meanings, defaults and bounds; knows nothing of their
//! readers.

use serde::{Deserialize, Serialize};
use varve_format::InodeAttr;

/// Users that may open sessions, besides root and the pool's owner.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "UsersText", into = "UsersText")]
pub enum Users {
    /// No others.
    #[default]
    Owner,
    /// All users that reach the socket.
    All,
    /// These user ids.
    Only(Vec<u32>),
}

/// [`Users`] as written in `varve.toml`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum UsersText {
    Word(String),
    Ids(Vec<u32>),
}

impl TryFrom<UsersText> for Users {
    type Error = String;

    fn try_from(text: UsersText) -> Result<Self, String> {
        match text {
            UsersText::Word(word) if word == "owner" => Ok(Self::Owner),
            UsersText::Word(word) if word == "all" => Ok(Self::All),
            UsersText::Word(word) => Err(format!(
                "`users = \"{word}\"`: it must be \"owner\", \"all\" or a list of user ids, such as [1000, \
                1001]"
            )),
            UsersText::Ids(ids) => Ok(Self::Only(ids)),
        }
    }
}

impl From<Users> for UsersText {
    fn from(users: Users) -> Self {
        match users {
            Users::Owner => Self::Word("owner".into()),
            Users::All => Self::Word("all".into()),
            Users::Only(ids) => Self::Ids(ids),
        }
    }
}

impl Users {
    /// Whether this user, who is neither root nor the pool's owner, may open sessions.
    #[must_use]
    pub fn admit(&self, uid: u32) -> bool {
        match self {
            Self::Owner => false,
            Self::All => true,
            Self::Only(ids) => ids.contains(&uid),
        }
    }

    /// Whether only root and the pool's owner may open sessions.
    #[must_use]
    pub const fn is_owner_only(&self) -> bool {
        matches!(self, Self::Owner)
    }
}

/// Files whose blocks may be shared because their bytes are the same (`FIDEDUPERANGE`, `varve dedup apply`).
/// Clones, which their maker asks for, are not bound by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DedupScope {
    /// Files of one user.
    #[default]
    User,
    /// Files of one group.
    Group,
    /// All files.
    Pool,
}

impl DedupScope {
    /// Whether files with these attributes may share blocks.
    #[must_use]
    pub const fn admits(self, one: &InodeAttr, other: &InodeAttr) -> bool {
        match self {
            Self::User => one.uid == other.uid,
            Self::Group => one.uid == other.uid || one.gid == other.gid,
            Self::Pool => true,
        }
    }
}

/// A tier that can be slowed down to a model of its medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Emulated {
    /// [`NvmModel::STRATA`](varve_media::emulated::NvmModel::STRATA); journal and logs with it.
    Nvm,
    /// [`DiskModel::SSD`](varve_media::emulated::DiskModel::SSD).
    Ssd,
    /// [`DiskModel::HDD`](varve_media::emulated::DiskModel::HDD).
    Hdd,
}

/// When reads through a mount update the access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AtimeSetting {
    /// If the access time is not newer than the last change, or is a day old.
    #[default]
    Relatime,
    /// Never.
    Noatime,
    /// Always.
    Strictatime,
}

/// Settings of a pool, the section `[daemon]` of `varve.toml`. Every field may be left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Time that a client has to give a lease back before its session is sealed, in milliseconds. Default
    /// 2,000; 100 to 60,000.
    pub lease_ms: u64,
    /// Least time that a holder keeps a lease, in milliseconds. Default 2; 0 to 100.
    pub min_hold_ms: u64,
    /// Bound of every wait, in milliseconds; after it ETIMEDOUT, EIO or ENOSPC is returned, depending on the
    /// wait. Default 30,000; `lease_ms` to 600,000.
    pub wait_ms: u64,
    /// Time after a start in which inodes without a name are kept for clients that may reconnect, in
    /// milliseconds. Default 5,000; 0 to 600,000.
    pub grace_ms: u64,
    /// Share of its log at which a client asks for a digest, in percent. Default 30; 5 to 90.
    pub digest_percent: u8,
    /// Threads that digest logs; each log is digested by one thread at a time. Default 0: one for each
    /// processor, at most 4. Else 1 to 64.
    pub digest_threads: u8,
    /// Initial bytes of a log. Default 4 MiB; 1 to 512 chunks of 2 MiB.
    pub log_initial_bytes: u64,
    /// Most bytes that one log may grow to. Default 0: an eighth of the NVM, at most 1 GiB. Else
    /// `log_initial_bytes` to 16 GiB.
    pub log_max_bytes: u64,
    /// Most sessions at once, including ended ones that may be resumed. Default 512; 1 to 4,096.
    pub sessions_max: u32,
    /// Most leases of one session; a mount of root's or the pool's owner may have four times as many (at most
    /// 1,048,576). Beyond the limit a session gives back its least used leases. Default 16,384; 64 to
    /// 1,048,576.
    pub leases_max: u32,
    /// Most blocks of 4 KiB that one session has reserved. Default 262,144 (1 GiB); 256 to 16,777,216.
    pub credits_max_blocks: u64,
    /// Read-ahead on SSD and HDD, in bytes, when a file begins to be read in order; it grows up to 2 MiB (1 MiB
    /// where the daemon reads) with what was. 0 for none. Default 256 KiB; 0 to 1 MiB.
    pub read_ahead_bytes: u64,
    /// Memory in which the daemon keeps what was read of shared blocks on SSD and HDD, in bytes. Default 128
    /// MiB; 0 to 1 TiB.
    pub shared_cache_bytes: u64,
    /// Interval at which a client makes its log durable in the background, in milliseconds; only where that
    /// needs a write (`file`). Default 1,000; 0 (never) to 60,000.
    pub sync_ms: u64,
    /// Whether mounts make each write durable against power loss before it returns, as `mount --sync-always`
    /// does. Default false.
    pub sync_always: bool,
    /// When reads through mounts update the access time, unless an option of the mount says otherwise:
    /// `"relatime"` (if it is not newer than the last change, or is a day old; the default), `"noatime"` or
    /// `"strictatime"`.
    pub atime: AtimeSetting,
    /// When reads of data on NVM are compared with its checksums (reads of SSD and HDD always are): `false`,
    /// `true` (each read), or `"first"` (the first read of a block since the daemon started). Default:
    /// `"first"` where NVM is a file, `false` where it is memory.
    pub verify_nvm_reads: VerifyNvm,
    /// Whether whole blocks of data on NVM are overwritten in place, if NVM makes a write durable as soon as
    /// it is ordered (`dax`, `shm`) and reads of NVM are not verified; else the data goes to new blocks.
    /// Default true.
    pub overwrite_in_place: bool,
    /// Whether slower tiers are read and written by io_uring where the host has it. Default true.
    pub io_uring: bool,
    /// Whether slower tiers bypass the host's page cache where its file system can. Default true.
    pub o_direct: bool,
    /// Whether programs of root and of the pool's owner, and mounts, read data on SSD by themselves, where
    /// its device can be shared; else the daemon reads for them. Default true.
    pub direct_reads: bool,
    /// Tiers that are slowed down to a model of their medium, to estimate a load's performance there. Default
    /// none. `status` names them.
    pub emulate: Vec<Emulated>,
    /// Time that a mount must be the only session before it opens files for writing through the kernel's page
    /// cache again, in milliseconds. Default 100; 0 to 3,600,000.
    pub solo_ms: u64,
    /// Interval at which idle logs are digested in the background, in milliseconds. Default 500; 10 to
    /// 60,000.
    pub idle_digest_ms: u64,
    /// Policy that decides where data is: `"hierarchy"` (the default), `"measured"`, `"wardrop"` or
    /// `"balance"`.
    pub placement_policy: PolicyName,
    /// Fill level at which a tier's coldest data begins to move down, in percent of the tier's space for
    /// data. Default 95; 20 to 99.
    pub placement_high_percent: u8,
    /// Fill level at which that movement stops, in percent. Default 90; 10 to less than
    /// `placement_high_percent`.
    pub placement_low_percent: u8,
    /// Most blocks of 4 KiB that one step of the background work moves; other work runs between steps.
    /// Default 1,024; 64 to 65,536.
    pub placement_step_blocks: u64,
    /// Users that may open sessions besides root and the pool's owner: `"owner"` (none, the default),
    /// `"all"`, or a list of user ids.
    pub users: Users,
    /// Most bytes of memory in which the processes of one ordinary user map its files. Default 64 MiB; 0
    /// (none: data is read by message), or 1 MiB to 16 GiB. All users together take at most a quarter of the
    /// file system that holds the live directory.
    pub user_bytes: u64,
    /// Files whose blocks may be shared because their bytes are the same: `"user"` (files of one user, the
    /// default), `"group"` (of one user or one group) or `"pool"` (all). Across users only blocks on SSD and
    /// HDD are shared.
    pub dedup_scope: DedupScope,
}

/// A policy of `varve_placement` (ADR 29).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyName {
    /// New data goes to the fastest tier with room; a full tier passes on what is used least, and what is
    /// used much moves up.
    #[default]
    Hierarchy,
    /// Tiers are peers: data moves to the one that has answered its mix of reads and writes fastest.
    Measured,
    /// New data is spread until all tiers answer in the same time.
    Wardrop,
    /// The mean time of all accesses becomes minimal, by a model of the devices' queues.
    Balance,
}

impl PolicyName {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Hierarchy, Self::Measured, Self::Wardrop, Self::Balance];

    /// As in the settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hierarchy => "hierarchy",
            Self::Measured => "measured",
            Self::Wardrop => "wardrop",
            Self::Balance => "balance",
        }
    }
}

/// When reads of data on NVM are compared with its checksums (ADR 16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "VerifyNvmText", into = "VerifyNvmText")]
pub enum VerifyNvm {
    /// The first read where NVM is a file, whose medium is a disk; none where it is memory.
    #[default]
    ByMedium,
    /// No read.
    Never,
    /// The first read of a block since the daemon started.
    First,
    /// Each read.
    Always,
}

/// [`VerifyNvm`] as written in `varve.toml`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum VerifyNvmText {
    Each(bool),
    Word(String),
}

impl TryFrom<VerifyNvmText> for VerifyNvm {
    type Error = String;

    fn try_from(text: VerifyNvmText) -> Result<Self, String> {
        match text {
            VerifyNvmText::Each(each) => Ok(each.into()),
            VerifyNvmText::Word(word) if word == "first" => Ok(Self::First),
            VerifyNvmText::Word(word) if word == "auto" => Ok(Self::ByMedium),
            VerifyNvmText::Word(word) => Err(format!(
                "verify_nvm_reads = \"{word}\": write true, false, \"first\" or \"auto\""
            )),
        }
    }
}

impl From<VerifyNvm> for VerifyNvmText {
    fn from(verify: VerifyNvm) -> Self {
        match verify {
            VerifyNvm::ByMedium => Self::Word("auto".into()),
            VerifyNvm::First => Self::Word("first".into()),
            VerifyNvm::Never => Self::Each(false),
            VerifyNvm::Always => Self::Each(true),
        }
    }
}

impl From<bool> for VerifyNvm {
    fn from(each: bool) -> Self {
        if each { Self::Always } else { Self::Never }
    }
}

impl VerifyNvm {
    /// Resolves the setting for NVM that lies `on_disk` or not: never [`ByMedium`](Self::ByMedium).
    #[must_use]
    pub const fn on(self, on_disk: bool) -> Self {
        match self {
            Self::ByMedium if on_disk => Self::First,
            Self::ByMedium => Self::Never,
            other => other,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            lease_ms: 2_000,
            min_hold_ms: 2,
            wait_ms: 30_000,
            grace_ms: 5_000,
            digest_percent: 30,
            digest_threads: 0,
            log_initial_bytes: 4 << 20,
            log_max_bytes: 0,
            sessions_max: 512,
            leases_max: 16_384,
            credits_max_blocks: 262_144,
            read_ahead_bytes: 256 << 10,
            shared_cache_bytes: 128 << 20,
            sync_ms: 1_000,
            sync_always: false,
            atime: AtimeSetting::Relatime,
            verify_nvm_reads: VerifyNvm::ByMedium,
            overwrite_in_place: true,
            io_uring: true,
            o_direct: true,
            direct_reads: true,
            emulate: Vec::new(),
            solo_ms: 100,
            idle_digest_ms: 500,
            placement_policy: PolicyName::default(),
            placement_high_percent: 95,
            placement_low_percent: 90,
            placement_step_blocks: 1_024,
            users: Users::Owner,
            user_bytes: 64 << 20,
            dedup_scope: DedupScope::User,
        }
    }
}

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text is not TOML, or has an unknown field or a value of the wrong type.
    #[error("the configuration cannot be read: {0}")]
    Syntax(String),
    /// A number out of its bounds.
    #[error("`{field} = {value}` is out of bounds: it must be {least} to {most}")]
    OutOfBounds {
        /// Field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Smallest valid value.
        least: u64,
        /// Largest valid value.
        most: u64,
    },
    /// A log size that is no multiple of a chunk.
    #[error("`{0}` must be a multiple of 2 MiB")]
    NotChunks(&'static str),
}

const CHUNK: u64 = varve_format::log::CHUNK_BYTES;

impl Config {
    /// Reads and checks TOML text.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the field.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| ConfigError::Syntax(error.to_string()))?;
        config.validate()?;
        Ok(config)
    }

    /// Checks every field against its bounds.
    ///
    /// # Errors
    /// The first field that is out of its bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let bounds = [
            ("lease_ms", self.lease_ms, 100, 60_000),
            ("min_hold_ms", self.min_hold_ms, 0, 100),
            ("wait_ms", self.wait_ms, self.lease_ms, 600_000),
            ("grace_ms", self.grace_ms, 0, 600_000),
            ("digest_percent", u64::from(self.digest_percent), 5, 90),
            ("digest_threads", u64::from(self.digest_threads), 0, 64),
            ("log_initial_bytes", self.log_initial_bytes, CHUNK, 512 * CHUNK),
            ("sessions_max", u64::from(self.sessions_max), 1, 4_096),
            ("leases_max", u64::from(self.leases_max), 64, 1 << 20),
            ("credits_max_blocks", self.credits_max_blocks, 256, 1 << 24),
            ("read_ahead_bytes", self.read_ahead_bytes, 0, 1 << 20),
            ("shared_cache_bytes", self.shared_cache_bytes, 0, 1 << 40),
            ("sync_ms", self.sync_ms, 0, 60_000),
            ("solo_ms", self.solo_ms, 0, 3_600_000),
            ("idle_digest_ms", self.idle_digest_ms, 10, 60_000),
            (
                "placement_high_percent",
                u64::from(self.placement_high_percent),
                20,
                99,
            ),
            (
                "placement_low_percent",
                u64::from(self.placement_low_percent),
                10,
                u64::from(self.placement_high_percent).saturating_sub(1),
            ),
            ("placement_step_blocks", self.placement_step_blocks, 64, 65_536),
        ];
        for (field, value, least, most) in bounds {
            if value < least || value > most {
                return Err(ConfigError::OutOfBounds {
                    field,
                    value,
                    least,
                    most,
                });
            }
        }
        for (field, value, least) in [
            ("log_max_bytes", self.log_max_bytes, self.log_initial_bytes),
            ("user_bytes", self.user_bytes, 1 << 20),
        ] {
            let most = 16 << 30;
            if value != 0 && (value < least || value > most) {
                return Err(ConfigError::OutOfBounds {
                    field,
                    value,
                    least,
                    most,
                });
            }
        }
        for (field, value) in [
            ("log_initial_bytes", self.log_initial_bytes),
            ("log_max_bytes", self.log_max_bytes),
        ] {
            if value % CHUNK != 0 {
                return Err(ConfigError::NotChunks(field));
            }
        }
        Ok(())
    }

    /// Returns the number of threads that digest logs.
    #[must_use]
    pub fn digest_threads(&self) -> usize {
        match self.digest_threads {
            0 => std::thread::available_parallelism().map_or(1, |processors| processors.get().min(4)),
            threads => usize::from(threads),
        }
    }

    /// Returns the most bytes of one log on a pool with this much NVM.
    #[must_use]
    pub fn log_limit(&self, nvm_bytes: u64) -> u64 {
        if self.log_max_bytes != 0 {
            return self.log_max_bytes;
        }
        let share = (nvm_bytes / 8).min(1 << 30) / CHUNK * CHUNK;
        share.max(self.log_initial_bytes)
    }

    /// Returns the bytes of a log at its first write.
    #[must_use]
    pub fn log_at_first(&self, nvm_bytes: u64) -> u64 {
        self.log_initial_bytes.min(self.log_limit(nvm_bytes))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Config, ConfigError, Users};

    #[test]
    fn users_are_a_word_or_ids() {
        let users = |text: &str| Config::from_toml(text).map(|config| config.users);
        assert_eq!(users("users = 'owner'").unwrap(), Users::Owner);
        assert_eq!(users("users = 'all'").unwrap(), Users::All);
        let some = users("users = [7, 8]").unwrap();
        assert!(some.admit(8) && !some.admit(9) && !some.is_owner_only());
        assert!(Users::All.admit(9) && !Users::Owner.admit(9));
        for bad in ["users = 'me'", "users = [-1]", "users = 5", "users = ['a']"] {
            assert!(matches!(users(bad), Err(ConfigError::Syntax(_))), "{bad}");
        }
        let config = Config {
            users: some,
            ..Config::default()
        };
        assert_eq!(
            Config::from_toml(&toml::to_string(&config).unwrap()).unwrap(),
            config
        );
    }

    #[test]
    fn defaults_are_within_their_bounds() {
        Config::default().validate().unwrap();
        assert_eq!(Config::from_toml("").unwrap(), Config::default());
        let text = toml::to_string(&Config::default()).unwrap();
        assert_eq!(Config::from_toml(&text).unwrap(), Config::default());
    }

    #[test]
    fn fields_are_refused_by_name_when_out_of_bounds() {
        for (text, field) in [
            ("lease_ms = 5", "lease_ms"),
            ("wait_ms = 500", "wait_ms"),
            ("digest_percent = 99", "digest_percent"),
            ("digest_threads = 65", "digest_threads"),
            ("placement_low_percent = 95", "placement_low_percent"),
            ("log_max_bytes = 2097152", "log_max_bytes"),
            ("user_bytes = 4096", "user_bytes"),
            ("log_initial_bytes = 3000000", "log_initial_bytes"),
            ("no_such_field = 1", "no_such_field"),
        ] {
            let error = Config::from_toml(text).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
        assert!(matches!(
            Config::from_toml("lease_ms = 'x'"),
            Err(ConfigError::Syntax(_))
        ));
    }

    #[test]
    fn log_limit_is_an_eighth_of_the_nvm_up_to_a_gibibyte() {
        let config = Config::default();
        assert_eq!(config.log_limit(256 << 20), 32 << 20);
        assert_eq!(config.log_limit(64 << 30), 1 << 30);
        assert_eq!(config.log_limit(16 << 20), config.log_initial_bytes);
    }
}
