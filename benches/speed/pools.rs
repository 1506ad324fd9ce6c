//! Pools to measure: made in memory or on disk, served by the program under test or in this process. Owns
//! their settings and their end.

use crate::places::Places;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_embed::Embedded;
use varve_format::InodeKey;
use varve_ipc::{Admin, Cred, SystemClock, socket};
use varve_kernelfs::pool::{HostPool, PoolSpec, create_pool};
use varve_kernelfs::{Parts, Status};
use varve_libfs::{Errno, Fs, FsOptions, OpenFile, OpenFlags, SocketConnector};
use varve_store::{OpenOptions, Store};

/// How long a daemon may take to answer.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Sizes and settings of a pool.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Name of its directory.
    pub name: &'static str,
    /// NVM in a file on the disk, not in memory.
    pub on_disk: bool,
    /// Bytes of NVM.
    pub nvm_bytes: u64,
    /// Most bytes of a log.
    pub log_bytes: u64,
    /// Whether the digest runs by itself.
    pub digest: bool,
    /// Whether it overwrites blocks in place where it may.
    pub in_place: bool,
}

/// A pool's files.
pub struct Files {
    dir: PathBuf,
    host: HostPool,
}

/// Makes the pool of `plan`, with its live files in the bench's memory.
pub fn make(plan: &Plan, places: &Places) -> anyhow::Result<Files> {
    let dir = places.disk().join(plan.name);
    let nvm = if plan.on_disk {
        format!("{}", plan.nvm_bytes)
    } else {
        format!("shm:{}", plan.nvm_bytes)
    };
    let spec = PoolSpec::parse(Some(&nvm), Some("0"), Some("0")).map_err(anyhow::Error::msg)?;
    let first = create_pool(&dir, &spec)?;
    let _ = std::fs::remove_dir_all(first.live());
    let toml = dir.join("varve.toml");
    let text = std::fs::read_to_string(&toml)?;
    let (percent, idle_ms) = if plan.digest { (30, 500) } else { (90, 60_000) };
    let mut table: toml::Table = toml::from_str(&text)?;
    table.insert(
        "live".into(),
        places.memory().to_string_lossy().into_owned().into(),
    );
    let mut daemon = toml::Table::new();
    let log = i64::try_from(plan.log_bytes)?;
    daemon.insert("log_initial_bytes".into(), log.min(1 << 30).into());
    daemon.insert("log_max_bytes".into(), log.into());
    daemon.insert("digest_percent".into(), percent.into());
    daemon.insert("idle_digest_ms".into(), idle_ms.into());
    daemon.insert("overwrite_in_place".into(), plan.in_place.into());
    // Nobody from before comes back: what is deleted is gone at once, as it is from the sixth second of any
    // daemon on.
    daemon.insert("grace_ms".into(), 0.into());
    daemon.insert("leases_max".into(), (1_i64 << 20).into());
    daemon.insert("credits_max_blocks".into(), (1_i64 << 20).into());
    table.insert("daemon".into(), daemon.into());
    std::fs::write(&toml, toml::to_string(&table)?)?;
    let host = HostPool::find(&dir)?;
    let host = if plan.on_disk { host } else { host.recreate()? };
    // A new pool is written with the settings' defaults.
    std::fs::write(&toml, toml::to_string(&table_of(&toml, table)?)?)?;
    Ok(Files {
        host: HostPool::find(host.dir())?,
        dir,
    })
}

/// The settings of `table` over what the pool's file says now (its name may have changed).
fn table_of(toml: &Path, table: toml::Table) -> anyhow::Result<toml::Table> {
    let mut now: toml::Table = toml::from_str(&std::fs::read_to_string(toml)?)?;
    for key in ["live", "daemon"] {
        if let Some(value) = table.get(key) {
            now.insert(key.into(), value.clone());
        }
    }
    Ok(now)
}

impl Files {
    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.host.socket()
    }

    /// The pool's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts a daemon and waits until it answers.
    pub fn serve(&self) -> anyhow::Result<Daemon> {
        let child = Command::new(env!("CARGO_BIN_EXE_varve"))
            .arg("serve")
            .arg(&self.dir)
            .stdout(Stdio::null())
            .stdin(Stdio::null())
            .spawn()
            .context("the daemon does not start")?;
        let mut daemon = Daemon { child };
        let start = Instant::now();
        while socket::admin(&self.socket(), Admin::Status).is_err() {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("the daemon ended with {status}");
            }
            if start.elapsed() > START_LIMIT {
                bail!("the daemon does not answer");
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(daemon)
    }

    /// Opens a session with the daemon.
    pub fn session(&self) -> anyhow::Result<Fs> {
        let connector = Arc::new(SocketConnector { path: self.socket() });
        Ok(Fs::mount(connector, FsOptions::default())?)
    }

    /// Counters of the daemon.
    pub fn status(&self) -> anyhow::Result<Status> {
        Ok(serde_json::from_str(&socket::admin(
            &self.socket(),
            Admin::Status,
        )?)?)
    }

    /// Has everything digested.
    pub fn digest(&self) -> anyhow::Result<()> {
        socket::admin(&self.socket(), Admin::DigestAll)?;
        Ok(())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.host.live());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A daemon's process; a drop kills it.
pub struct Daemon {
    child: Child,
}

impl Daemon {
    /// Ends it without a last digest.
    pub fn kill(mut self) {
        self.end_by_force();
    }

    /// Ends it in order.
    pub fn stop(mut self, files: &Files) -> anyhow::Result<()> {
        socket::admin(&files.socket(), Admin::Shutdown)?;
        self.child.wait()?;
        Ok(())
    }

    fn end_by_force(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end_by_force();
    }
}

enum Server {
    Process { _daemon: Daemon },
    Here(Option<Embedded>),
}

/// A session with a pool, and the pool.
pub struct Ours {
    /// The session.
    pub fs: Fs,
    /// Root's rights.
    pub cred: Cred,
    /// Most bytes of the log.
    pub log_bytes: u64,
    server: Server,
    files: Files,
}

/// For reading and writing.
pub const RW: OpenFlags = OpenFlags::READ_WRITE;

/// An errno as an error that says what was tried.
pub fn told(what: &'static str) -> impl Fn(Errno) -> anyhow::Error {
    move |errno| anyhow::anyhow!("{what}: {errno}")
}

impl Ours {
    /// A session with a daemon of its own process.
    pub fn daemon(plan: &Plan, places: &Places) -> anyhow::Result<Self> {
        let files = make(plan, places)?;
        let server = Server::Process {
            _daemon: files.serve()?,
        };
        let fs = files.session()?;
        Ok(Self::over(plan, fs, server, files))
    }

    /// A session in this process.
    pub fn embedded(plan: &Plan, places: &Places) -> anyhow::Result<Self> {
        let files = make(plan, places)?;
        std::fs::create_dir_all(files.host.live())?;
        let (store, _) = Store::open(files.host.devices()?, OpenOptions::default())?;
        let logs = Arc::new(files.host.logs()?);
        let parts = Parts::new(
            store,
            logs as _,
            files.host.config().clone(),
            Arc::new(SystemClock),
        );
        let embedded = Embedded::open(parts)?;
        embedded.start()?;
        let fs = embedded.mount()?;
        Ok(Self::over(plan, fs, Server::Here(Some(embedded)), files))
    }

    fn over(plan: &Plan, fs: Fs, server: Server, files: Files) -> Self {
        Self {
            fs,
            cred: Cred::root(),
            log_bytes: plan.log_bytes,
            server,
            files,
        }
    }

    /// The pool's files.
    pub const fn files(&self) -> &Files {
        &self.files
    }

    /// Has everything digested, and the log's space given back.
    pub fn settle(&self) -> anyhow::Result<()> {
        match &self.server {
            Server::Process { .. } => self.files.digest(),
            Server::Here(Some(embedded)) => Ok(embedded.kernel().digest_all()?),
            Server::Here(None) => Ok(()),
        }
    }

    /// A new, empty file in the root; one of this name goes first.
    pub fn fresh(&self, name: &str) -> anyhow::Result<OpenFile> {
        match self.fs.unlink(self.fs.root(), name.as_bytes(), &self.cred) {
            Ok(()) | Err(Errno(libc::ENOENT)) => {}
            Err(errno) => bail!("unlink {name}: {errno}"),
        }
        let attr = self
            .fs
            .create(self.fs.root(), name.as_bytes(), 0o100_644, 0, &self.cred)
            .map_err(told("create"))?;
        self.open(attr.key)
    }

    /// Opens for reading and writing.
    pub fn open(&self, key: InodeKey) -> anyhow::Result<OpenFile> {
        self.fs.open(key, RW, &self.cred).map_err(told("open"))
    }

    /// A file of `bytes`, digested.
    pub fn filled(&self, name: &str, bytes: u64) -> anyhow::Result<OpenFile> {
        let file = self.fresh(name)?;
        let block = vec![7; 1 << 20];
        for at in (0..bytes).step_by(block.len()) {
            file.write_at(at, &block, &self.cred).map_err(told("fill"))?;
        }
        self.settle()?;
        Ok(file)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.fs.unmount();
        if let Server::Here(embedded) = &mut self.server
            && let Some(embedded) = embedded.take()
        {
            let _ = embedded.shutdown();
        }
    }
}
