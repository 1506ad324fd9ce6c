//! A pool as the commands see it: paths of its files, and whether a daemon serves it.

use crate::cli::TierArgs;
use crate::exit::Usage;
use crate::out::Progress;
use anyhow::Context;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use varve_format::Tier;
use varve_ipc::{Admin, IpcError};
use varve_kernelfs::pool::{HostPool, NvmSpec, PoolSpec, TOML, TierSpec, create_pool};
use varve_media::block::{BlockOptions, explain};

/// How long a command waits for the daemon of a pool that is up: `up` starts one that died again.
const RESTART_WAIT: Duration = Duration::from_secs(5);
const RESTART_POLL: Duration = Duration::from_millis(20);

/// Error: no daemon serves the pool.
#[derive(Debug)]
pub struct NoDaemon {
    pool: PathBuf,
    missing: Missing,
}

/// Why nothing answers.
#[derive(Debug)]
enum Missing {
    /// The pool is not up.
    Down,
    /// `up` runs, and its daemon is not ready.
    Starting,
    /// The daemon ended before it answered.
    Ended,
    /// The socket is not this user's to use.
    Closed,
}

impl NoDaemon {
    /// Whether there is none; else there may be one for others.
    pub const fn is_absent(&self) -> bool {
        !matches!(self.missing, Missing::Closed)
    }
}

impl fmt::Display for NoDaemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pool = self.pool.display();
        match self.missing {
            Missing::Down => write!(
                f,
                "no daemon serves {pool}; start one with `varve up {pool}` or `varve serve {pool}`"
            ),
            Missing::Starting => write!(
                f,
                "the daemon of {pool} is not ready; `varve up` runs and starts it again. Try again in a moment, \
                 or see what it says in {pool}/varve.log"
            ),
            Missing::Ended => write!(
                f,
                "the daemon of {pool} ended before it answered; whether it did what it was asked for is not \
                 known. Look at `varve status {pool}`, then try again"
            ),
            Missing::Closed => f.write_str(&not_open(&self.pool)),
        }
    }
}

impl std::error::Error for NoDaemon {}

/// The text for a pool that this user may not use.
pub fn not_open(pool: &Path) -> String {
    format!(
        "the pool {} is not open to user {} (`users` in its varve.toml)",
        pool.display(),
        rustix::process::geteuid().as_raw()
    )
}

/// An existing pool.
#[derive(Debug, Clone)]
pub struct Pool {
    host: HostPool,
    /// Mountpoint of `up`, if not in the pool's directory.
    at: Option<PathBuf>,
}

/// An opened pool, with a report if it is new.
pub struct Fresh {
    /// The pool.
    pub pool: Pool,
    /// Parameters of a new pool, in a few lines.
    pub report: Option<String>,
}

/// Parses the tiers of the command line.
pub fn spec(tiers: &TierArgs) -> Result<PoolSpec, Usage> {
    let spec = PoolSpec::parse_lists(tiers.nvm.as_deref(), &tiers.ssd, &tiers.hdd).map_err(Usage)?;
    spec.check_new().map_err(Usage)?;
    Ok(spec)
}

impl Pool {
    /// Finds a pool by its directory or TOML file.
    pub fn open(at: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            host: HostPool::find(at)?,
            at: None,
        })
    }

    /// Finds the pool in `dir`, or makes one.
    pub fn open_or_create(dir: &Path, tiers: &TierArgs, recreate: bool) -> anyhow::Result<Fresh> {
        // Refused for a pool that is there too.
        spec(tiers).map(drop)?;
        if dir.is_file() || dir.join(TOML).exists() {
            let mut pool = Self::open(dir)?;
            let given = tiers.nvm.is_some() || !tiers.ssd.is_empty() || !tiers.hdd.is_empty();
            if given && *pool.host.spec() != spec_over(pool.host.spec(), tiers)? {
                tracing::warn!(
                    "{} has its sizes already; --nvm, --ssd and --hdd change nothing",
                    dir.display()
                );
            }
            if recreate {
                pool.host = pool.host.recreate()?;
                let report = Some(pool.made_text());
                return Ok(Fresh { pool, report });
            }
            return Ok(Fresh { pool, report: None });
        }
        let (pool, report) = Self::create(dir, tiers)?;
        let report = Some(report);
        Ok(Fresh { pool, report })
    }

    /// Makes a pool. Returns it with its parameters, in a few lines.
    pub fn create(dir: &Path, tiers: &TierArgs) -> anyhow::Result<(Self, String)> {
        let mut spec = spec(tiers)?;
        let chosen = match NvmSpec::is_open(tiers.nvm.as_deref()) {
            true => spec.choose_nvm(dir),
            false => None,
        };
        let _progress = Progress::start("making the pool");
        let host =
            create_pool(dir, &spec).with_context(|| format!("no pool was made in {}", dir.display()))?;
        let pool = Self { host, at: None };
        let mut text = pool.made_text();
        if let Some(why) = chosen {
            text.push('\n');
            text.push_str(&why);
        }
        Ok((pool, text))
    }

    /// Describes the pool's tiers in a few lines.
    pub fn made_text(&self) -> String {
        let spec = self.host.spec();
        let mut text = format!(
            "made a pool in {}: NVM {}, SSD {}, HDD {}\n{}",
            self.dir().display(),
            spec.nvm,
            spec.shown(Tier::Ssd),
            spec.shown(Tier::Hdd),
            self.durability()
        );
        for device in [Tier::Ssd, Tier::Hdd]
            .into_iter()
            .flat_map(|tier| spec.devices_of(tier))
        {
            if let TierSpec::Device(device) = device
                && let Some(why) = explain(&device.relative_to(self.dir()), BlockOptions::default())
            {
                text.push('\n');
                text.push_str(&why);
            }
        }
        text
    }

    /// Returns the library's pool.
    pub fn host(&self) -> &HostPool {
        &self.host
    }

    /// Returns the pool's directory, absolute.
    pub fn dir(&self) -> &Path {
        self.host.dir()
    }

    /// Whether the daemon answers this user as an operator: root or the pool's owner.
    pub fn is_operator(&self) -> bool {
        let user = rustix::process::geteuid().as_raw();
        user == 0 || user == self.host.owner_uid()
    }

    /// Returns the mountpoint of `up`.
    pub fn mountpoint(&self) -> PathBuf {
        self.at.clone().unwrap_or_else(|| self.dir().join("mnt"))
    }

    /// Sets the mountpoint of `up`.
    pub fn mounted_at(self, at: PathBuf) -> Self {
        let at = Some(at);
        Self { at, ..self }
    }

    /// Returns the path of the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.host.socket()
    }

    /// Returns the path of the lock file that `up` holds.
    pub fn up_lock(&self) -> PathBuf {
        self.dir().join("up.lock")
    }

    /// Returns the path of the file with the process id of `up`.
    pub fn up_pid(&self) -> PathBuf {
        self.dir().join("up.pid")
    }

    /// Returns the path of the log of a detached `up`.
    pub fn log_file(&self) -> PathBuf {
        self.dir().join("varve.log")
    }

    /// Returns the path of the file by which `down --force` signals `up`.
    pub fn force_flag(&self) -> PathBuf {
        self.dir().join("down.force")
    }

    /// Describes which failures the pool's data survives.
    pub fn durability(&self) -> &'static str {
        self.host.durability()
    }

    /// Returns the process id in the daemon's pid file.
    pub fn daemon_pid(&self) -> Option<u32> {
        std::fs::read_to_string(self.host.pid_file())
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// Whether a daemon listens on the socket.
    pub fn has_daemon(&self) -> bool {
        self.connect().is_ok()
    }

    fn connect(&self) -> std::io::Result<()> {
        std::os::unix::net::UnixStream::connect(self.socket()).map(drop)
    }

    /// Whether `up` runs for the pool, which starts a daemon that died again. Only a hint: its pid file may be
    /// left over.
    fn is_up(&self) -> bool {
        let pid = std::fs::read_to_string(self.up_pid());
        let name = pid.and_then(|pid| std::fs::read_to_string(format!("/proc/{}/comm", pid.trim())));
        let own = std::fs::read_to_string("/proc/self/comm");
        matches!((name, own), (Ok(name), Ok(own)) if name == own)
    }

    /// Waits for the daemon of a pool that is up, for a moment; fails if none serves the pool.
    pub fn require_daemon(&self) -> Result<(), NoDaemon> {
        let until = Instant::now() + RESTART_WAIT;
        while let Err(error) = self.connect() {
            if error.kind() == std::io::ErrorKind::PermissionDenied {
                return Err(self.no_daemon(Missing::Closed));
            }
            let missing = match self.is_up() {
                false => Missing::Down,
                true if Instant::now() >= until => Missing::Starting,
                true => {
                    std::thread::sleep(RESTART_POLL);
                    continue;
                }
            };
            return Err(self.no_daemon(missing));
        }
        Ok(())
    }

    fn no_daemon(&self, missing: Missing) -> NoDaemon {
        NoDaemon {
            pool: self.dir().to_owned(),
            missing,
        }
    }

    /// Sends a request to the daemon; returns its JSON answer. What may be asked again is, if the daemon of a
    /// pool that is up ends meanwhile.
    pub fn ask(&self, request: Admin) -> anyhow::Result<String> {
        let until = Instant::now() + RESTART_WAIT;
        loop {
            self.require_daemon()?;
            match varve_ipc::socket::admin(&self.socket(), request.clone()) {
                Ok(json) => return Ok(json),
                Err(IpcError::Gone(_)) if may_be_repeated(&request) && Instant::now() < until => {
                    std::thread::sleep(RESTART_POLL);
                }
                Err(IpcError::Gone(_)) => return Err(self.no_daemon(Missing::Ended).into()),
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("the daemon of {} refused", self.dir().display()));
                }
            }
        }
    }
}

/// Whether a request done twice comes to the same as once.
const fn may_be_repeated(request: &Admin) -> bool {
    matches!(
        request,
        Admin::Status
            | Admin::DigestAll
            | Admin::Sync
            | Admin::Fsck
            | Admin::Scrub
            | Admin::Session(_)
            | Admin::Placed { .. }
            | Admin::Jobs
    )
}

/// Returns the pool's spec, overridden by the command line.
fn spec_over(have: &PoolSpec, tiers: &TierArgs) -> Result<PoolSpec, Usage> {
    let nvm = tiers.nvm.clone().unwrap_or_else(|| have.nvm.to_string());
    let list = |given: &[String], tier: Tier| match given {
        [] => have.devices_of(tier).map(ToString::to_string).collect(),
        given => given.to_vec(),
    };
    let (ssd, hdd) = (list(&tiers.ssd, Tier::Ssd), list(&tiers.hdd, Tier::Hdd));
    PoolSpec::parse_lists(Some(&nvm), &ssd, &hdd).map_err(Usage)
}
