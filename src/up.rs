//! `varve up` and `varve down`: start and stop a pool, its daemon and its mount together.

use crate::cli::{DownArgs, UpArgs};
use crate::mounted::{absolute, is_mounted, is_ours, mount_minor, servers};
use crate::out;
use crate::pool::Pool;
use crate::signals::Stop;
use crate::supervise::{Supervised, Verdict};
use anyhow::{Context, bail};
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the daemon and the mount may take to come up.
const START_LIMIT: Duration = Duration::from_secs(600);
/// How long a killed mount may take to end before its connection is aborted.
const HELD_LIMIT: Duration = Duration::from_millis(500);
/// Time between messages that a start takes long.
const START_TOLD: Duration = Duration::from_secs(10);
/// How long a mount may take to write back its changes before it is removed by force.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// How long the daemon may take to digest the rest and end.
const STOP_LIMIT: Duration = Duration::from_secs(120);
/// Time between checks of children and signals.
const TICK: Duration = Duration::from_millis(20);

/// `varve up`.
pub fn up(args: &UpArgs) -> anyhow::Result<()> {
    let others = args.options.and_then(|options| options.allow_other);
    varve_fuse_shim::check_host(others.unwrap_or(args.allow_other))?;
    let fresh = Pool::open_or_create(&args.dir, &args.tiers, args.recreate)?;
    fresh.pool.host().rules()?;
    if !args.background {
        crate::destroy::tell(&fresh.pool);
    }
    let pool = match &args.mountpoint {
        Some(at) => fresh.pool.mounted_at(absolute(at)?),
        None => fresh.pool,
    };
    if args.detach && !args.background {
        return detach(args, &pool, &fresh.report);
    }
    if args.background {
        let _ = rustix::process::setsid();
    }
    let Some(lock) = try_lock(&pool.up_lock())? else {
        bail!(
            "another `varve up` serves {0} already; it is mounted at {1}. Stop it with `varve down {0}`",
            pool.dir().display(),
            pool.mountpoint().display()
        );
    };
    let stop = Stop::install()?;
    // A dead mount of a killed run is ours, since we hold the lock. Accessing it before it is removed could
    // block for ever.
    if args.mountpoint.is_none() || is_ours(&pool) {
        clear_mount(&pool.mountpoint())?;
    }
    if args.mountpoint.is_none() {
        std::fs::create_dir_all(pool.mountpoint())
            .with_context(|| format!("cannot make {}", pool.mountpoint().display()))?;
    }
    // Left by an earlier `down --force` whose mount was not in use.
    let _ = std::fs::remove_file(pool.force_flag());
    let mut run = Run::start(args, &pool, &stop)?;
    write_pid(&pool)?;
    if let Some(report) = &fresh.report {
        out::line(report);
    }
    out::line(&ready_text(&pool, fresh.report.is_some()));
    let _ = std::io::stdout().flush();
    let outcome = run.watch(&stop);
    let ended = run.end(&stop);
    let _ = std::fs::remove_file(pool.up_pid());
    drop(lock);
    outcome.and(ended)
}

fn ready_text(pool: &Pool, told: bool) -> String {
    format!(
        "{mounted}\n\
         try:   cp -a /usr/share/doc {mnt}/\n\
         \x20      varve status {dir}{varve}\n\
         Ctrl-C here, or `varve down {dir}`, unmounts and stops",
        mounted = mounted_text(pool, told),
        varve = where_varve_is(),
        mnt = pool.mountpoint().display(),
        dir = pool.dir().display()
    )
}

/// Returns the mountpoint and the durability; the latter only unless it was `told` when the pool was made.
fn mounted_text(pool: &Pool, told: bool) -> String {
    let mnt = pool.mountpoint();
    match told {
        true => format!("mounted at {}", mnt.display()),
        false => format!("mounted at {}  ({})", mnt.display(), pool.durability()),
    }
}

/// Returns a hint on the program's path if it is not in `PATH`, as when it runs from the build directory.
fn where_varve_is() -> String {
    let found =
        |path: std::ffi::OsString| std::env::split_paths(&path).any(|dir| dir.join("varve").is_file());
    match std::env::current_exe() {
        Ok(own) if !std::env::var_os("PATH").is_some_and(found) => {
            format!(
                "\n       (`varve` is {} here; `cargo xtask install` puts it where it is found)",
                own.display()
            )
        }
        _ => String::new(),
    }
}

fn write_pid(pool: &Pool) -> anyhow::Result<()> {
    std::fs::write(pool.up_pid(), format!("{}\n", std::process::id())).context("cannot write the pid file")
}

/// Takes an exclusive lock on a file, held as long as the returned file; `None` if another process holds it.
pub fn try_lock(path: &Path) -> anyhow::Result<Option<File>> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        // Every process that can open the file, even for reading, can lock it.
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let _ = file.set_permissions(std::fs::Permissions::from_mode(0o600));
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// Removes the mount of an earlier, killed run.
fn clear_mount(path: &Path) -> anyhow::Result<()> {
    if !is_mounted(path) {
        return Ok(());
    }
    clear_dead_mount(path)
        .with_context(|| format!("{} is mounted already and cannot be unmounted", path.display()))
}

/// Removes a mount that is in use, or whose server does not answer. Changes in mapped memory are written back
/// first, if that takes no more than [`FLUSH_LIMIT`].
pub fn detach_mount(path: &Path) -> anyhow::Result<()> {
    let (done, ended) = std::sync::mpsc::channel();
    let mount = path.to_owned();
    std::thread::spawn(move || {
        let _ = std::fs::File::open(mount).map(rustix::fs::syncfs);
        let _ = done.send(());
    });
    let _ = ended.recv_timeout(FLUSH_LIMIT);
    abort_mount(path)
}

/// Removes a mount whose process was killed or does not answer, and ends that process.
fn clear_dead_mount(path: &Path) -> anyhow::Result<()> {
    // Looked up first: without the mount, its number may at once be that of another one.
    let servers = mount_minor(path).map(servers).unwrap_or_default();
    abort_mount(path)?;
    // The kernel copies a request that comes by io_uring in the context of the thread that takes it. It
    // cannot end that request while the thread is stopped, but when it ends.
    for server in servers {
        let _ = rustix::process::pidfd_send_signal(server, Signal::KILL);
    }
    Ok(())
}

/// Removes a mount: its pending requests fail, and the waiting threads go on.
fn abort_mount(path: &Path) -> anyhow::Result<()> {
    let force = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
    match rustix::mount::unmount(path, force) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            // An ordinary user may abort the connections of their own mounts, if the control file system is
            // mounted.
            if let Some(minor) = mount_minor(path) {
                let _ = std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1");
            }
            unmount_lazily(path)
        }
        Err(error) => Err(error.into()),
    }
}

/// Detaches a mount, busy or dead.
fn unmount_lazily(path: &Path) -> anyhow::Result<()> {
    match rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            let output = std::process::Command::new("fusermount3")
                .args(["-u", "-z", "--"])
                .arg(path)
                .output()?;
            if output.status.success() {
                return Ok(());
            }
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
        Err(error) => Err(error.into()),
    }
}

/// The daemon and the mount.
struct Run {
    pool: Pool,
    serve: Supervised,
    mount: Supervised,
}

impl Run {
    fn start(args: &UpArgs, pool: &Pool, stop: &Stop) -> anyhow::Result<Self> {
        let dir = pool.dir().as_os_str().to_owned();
        let mut words: Vec<OsString> = vec!["serve".into(), "--supervised".into()];
        if let Some(address) = args.metrics {
            words.extend(["--metrics".into(), address.to_string().into()]);
        }
        words.push(dir.clone());
        let mut serve = Supervised::start("daemon", words)?;
        let pid = serve.pid();
        let ready = || pool.daemon_pid() == Some(pid) && pool.has_daemon();
        if let Err(error) = wait_for("the daemon", &mut serve, stop, ready) {
            serve.signal(Signal::TERM);
            let _ = serve.wait(STOP_LIMIT);
            return Err(error);
        }
        let mut words: Vec<OsString> = vec!["mount".into(), "--supervised".into()];
        if args.allow_other {
            words.push("--allow-other".into());
        }
        if let Some(options) = &args.options {
            words.extend(["--remountable".into(), "-o".into(), options.text().into()]);
        }
        words.extend([dir, pool.mountpoint().into_os_string()]);
        let mut mount = match Supervised::start("mount", words) {
            Ok(mount) => mount,
            Err(error) => {
                serve.signal(Signal::TERM);
                let _ = serve.wait(STOP_LIMIT);
                return Err(error.into());
            }
        };
        if let Err(error) = wait_for("the mount", &mut mount, stop, || is_ours(pool)) {
            mount.signal(Signal::TERM);
            let _ = mount.wait(Duration::from_secs(10));
            serve.signal(Signal::TERM);
            let _ = serve.wait(STOP_LIMIT);
            return Err(error);
        }
        Ok(Self {
            pool: pool.clone(),
            serve,
            mount,
        })
    }

    /// Keeps the daemon and the mount running until a signal comes.
    fn watch(&mut self, stop: &Stop) -> anyhow::Result<()> {
        let mountpoint = self.pool.mountpoint();
        let (mut held, mut aborted) = (None, false);
        while stop.count() == 0 {
            std::thread::sleep(TICK);
            keep(&mut self.serve, || ())?;
            match self.mount.check()? {
                Verdict::Alive if self.mount.is_held() && !aborted => {
                    // Most threads of a killed process end at once.
                    if held.get_or_insert_with(Instant::now).elapsed() > HELD_LIMIT {
                        out::note(
                            "varve: the killed mount is held by requests that it cannot answer any more; \
                            they are aborted",
                        );
                        take_dead_away(&mountpoint);
                        aborted = true;
                    }
                    continue;
                }
                Verdict::Restart(..) if !aborted && !is_ours(&self.pool) => {
                    // A user unmounted it on purpose, which ends the run.
                    out::line(&format!("{} was unmounted; stopping", mountpoint.display()));
                    return Ok(());
                }
                _ => {}
            }
            let pool = &self.pool;
            keep(&mut self.mount, || {
                if is_ours(pool) {
                    take_dead_away(&mountpoint);
                }
                (held, aborted) = (None, false);
            })?;
        }
        Ok(())
    }

    /// Unmounts, then ends the daemon.
    fn end(&mut self, stop: &Stop) -> anyhow::Result<()> {
        out::line("stopping: unmounting, then digesting what is left");
        let _ = std::io::stdout().flush();
        self.end_mount(stop)?;
        self.serve.signal(Signal::TERM);
        if self.serve.wait(STOP_LIMIT)?.is_none() {
            bail!(
                "the daemon (pid {}) has not ended after {STOP_LIMIT:?}; see `varve status`",
                self.serve.pid()
            );
        }
        out::line(&format!(
            "stopped; everything is in {}",
            self.pool.dir().display()
        ));
        Ok(())
    }

    fn end_mount(&mut self, stop: &Stop) -> anyhow::Result<()> {
        let mountpoint = self.pool.mountpoint();
        let already = stop.count();
        let mut told = false;
        loop {
            if self.mount.wait(Duration::ZERO)?.is_some() {
                if is_ours(&self.pool) {
                    abort_mount(&mountpoint)?;
                }
                return Ok(());
            }
            self.mount.signal(Signal::TERM);
            if self.mount.wait(Duration::from_secs(2))?.is_some() {
                continue;
            }
            if !told {
                told = true;
                out::line(&format!(
                    "{} is in use{}; it is unmounted as soon as they end (Ctrl-C again detaches it now)",
                    mountpoint.display(),
                    users_text(&mountpoint)
                ));
                let _ = std::io::stdout().flush();
            }
            if stop.count() > already.max(1) || self.pool.force_flag().exists() {
                let _ = std::fs::remove_file(self.pool.force_flag());
                detach_mount(&mountpoint)?;
                self.mount.wait(Duration::from_secs(5))?;
                self.mount.signal(Signal::KILL);
                self.mount.wait(Duration::from_secs(5))?;
            }
        }
    }
}

fn take_dead_away(mountpoint: &Path) {
    if let Err(error) = clear_dead_mount(mountpoint) {
        out::note(&format!("varve: the dead mount could not be taken away: {error}"));
    }
}

/// Restarts a child that has ended; an error if it ended too often.
fn keep(child: &mut Supervised, before: impl FnOnce()) -> anyhow::Result<()> {
    match child.check()? {
        Verdict::Alive => Ok(()),
        Verdict::Restart(wait, status) => {
            out::note(&format!(
                "varve: the {} ended ({status}); starting it again in {wait:?}",
                child.name
            ));
            std::thread::sleep(wait);
            before();
            child.restart()?;
            Ok(())
        }
        Verdict::GiveUp(status) => {
            bail!(
                "the {} ended ({status}) for the {}th time within a minute; giving up",
                child.name,
                crate::supervise::TRIES_MAX + 1
            )
        }
    }
}

/// Waits until `ready` returns true; fails if the child ends or a signal comes.
fn wait_for(what: &str, child: &mut Supervised, stop: &Stop, ready: impl Fn() -> bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut told = began;
    while !ready() {
        if let Verdict::Restart(_, status) | Verdict::GiveUp(status) = child.check()? {
            bail!("{what} could not start ({status}); its message is above");
        }
        if stop.count() > 0 {
            bail!("stopped while {what} was starting");
        }
        if began.elapsed() >= START_LIMIT {
            bail!("{what} is not ready after {START_LIMIT:?}");
        }
        if told.elapsed() >= START_TOLD {
            told = Instant::now();
            out::note(&format!(
                "varve: {what} is still starting after {:.0?} (it digests what a crash left)",
                began.elapsed()
            ));
        }
        std::thread::sleep(TICK);
    }
    Ok(())
}

/// Lists processes with a working directory or open file below `mountpoint`: " by bash (pid 12)", or an empty
/// text.
fn users_text(mountpoint: &Path) -> String {
    let Ok(mountpoint) = absolute(mountpoint) else {
        return String::new();
    };
    let mut users = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let base = entry.path();
        let fds = std::fs::read_dir(base.join("fd"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|fd| fd.path());
        let mut links = [base.join("cwd"), base.join("root")].into_iter().chain(fds);
        if links.any(|link| std::fs::read_link(link).is_ok_and(|target| target.starts_with(&mountpoint))) {
            let name = std::fs::read_to_string(base.join("comm")).unwrap_or_default();
            users.push(format!("{} (pid {pid})", name.trim()));
        }
    }
    if users.is_empty() {
        String::new()
    } else {
        format!(" by {}", users.join(", "))
    }
}

/// Starts `up` again in the background and waits until it is mounted.
fn detach(args: &UpArgs, pool: &Pool, report: &Option<String>) -> anyhow::Result<()> {
    let log = File::options().create(true).append(true).open(pool.log_file())?;
    let start = log.metadata()?.len();
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command.args(["up", "--detach", "--background"]).arg(pool.dir());
    if let Some(address) = args.metrics {
        command.args(["--metrics", &address.to_string()]);
    }
    if args.allow_other {
        command.arg("--allow-other");
    }
    if let Some(at) = &args.mountpoint {
        command.arg("--mountpoint").arg(at);
    }
    if let Some(options) = &args.options {
        command.args(["-o", &options.text()]);
    }
    let mut child = command
        .stdin(std::process::Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start")?;
    let until = Instant::now() + START_LIMIT * 2;
    loop {
        if let Some(status) = child.try_wait()? {
            let said = std::fs::read(pool.log_file()).unwrap_or_default();
            let said = said.get(start as usize..).unwrap_or_default();
            bail!(
                "it did not start ({status}):\n{}",
                String::from_utf8_lossy(said).trim_end()
            );
        }
        let pid = std::fs::read_to_string(pool.up_pid())
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok());
        if pid == Some(child.id()) && is_ours(pool) {
            if args.quiet {
                return Ok(());
            }
            if let Some(report) = report {
                out::line(report);
            }
            out::line(&format!(
                "{}\nrunning in the background (pid {}), log in {}; stop it with `varve down {}`",
                mounted_text(pool, report.is_some()),
                child.id(),
                pool.log_file().display(),
                pool.dir().display()
            ));
            return Ok(());
        }
        if Instant::now() >= until {
            bail!(
                "not mounted after {:?}; see {}",
                START_LIMIT * 2,
                pool.log_file().display()
            );
        }
        std::thread::sleep(TICK);
    }
}

/// `varve down`.
pub fn down(args: &DownArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.dir)?;
    if try_lock(&pool.up_lock())?.is_some() {
        if is_mounted(&pool.mountpoint()) {
            clear_dead_mount(&pool.mountpoint())?;
            out::line(&format!(
                "{} was a left-over mount; taken away",
                pool.mountpoint().display()
            ));
        } else {
            out::line(&format!("{} is not up", pool.dir().display()));
        }
        return Ok(());
    }
    let pid: i32 = std::fs::read_to_string(pool.up_pid())
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .context("`varve up` is starting; try again in a moment")?;
    if args.force {
        std::fs::write(pool.force_flag(), b"")?;
    }
    let pid = rustix::process::Pid::from_raw(pid).context("the pid file is damaged")?;
    rustix::process::kill_process(pid, Signal::TERM).context("cannot signal `varve up`")?;
    let started = Instant::now();
    let mut told = false;
    while try_lock(&pool.up_lock())?.is_none() {
        if !told && started.elapsed() > Duration::from_secs(3) && is_mounted(&pool.mountpoint()) {
            told = true;
            out::note(&format!(
                "waiting: {} is in use{} (`varve down --force {}` detaches it)",
                pool.mountpoint().display(),
                users_text(&pool.mountpoint()),
                pool.dir().display()
            ));
        }
        if started.elapsed() > STOP_LIMIT {
            bail!(
                "still not stopped after {STOP_LIMIT:?}{}",
                users_text(&pool.mountpoint())
            );
        }
        std::thread::sleep(TICK);
    }
    out::line("stopped");
    Ok(())
}
