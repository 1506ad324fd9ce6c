//! `varve run`: runs a program whose file calls on a mount are served in its own process, by the preload
//! library that this binary contains.

use crate::cli::RunArgs;
use crate::out;
use crate::pool::{Pool, not_open};
use anyhow::{Context, bail};
use serde_json::{Map, json};
use std::ffi::{OsStr, OsString};
use std::hash::Hasher;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use varve_libfs::Atime;
use varve_libfs::mounts::{PoolMount, places, pool_mounts};

// Only the names: linking the library itself would run its constructor here.
#[path = "../crates/preload/src/config.rs"]
#[allow(dead_code, reason = "shared with the library")]
mod config;
#[path = "../crates/preload/src/syscalls.rs"]
#[allow(dead_code, reason = "shared with the library")]
mod syscalls;
#[path = "../crates/preload/src/why.rs"]
#[allow(dead_code, reason = "shared with the library")]
mod why;

/// The preload library. Empty under `cargo check`.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("VARVE_PRELOAD_DIR"), "/libvarve_preload.so"));
/// Base of a shell's exit code for a program ended by a signal.
const SIGNALLED: i32 = 128;

/// `varve run`.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let Some((program, rest)) = args.program.split_first() else {
        bail!(crate::exit::Usage(
            "which program? `varve run [--mount DIR] -- PROGRAM ARGS`".into()
        ));
    };
    let served = served(choose(args)?, program)?;
    let mut command = Command::new(program);
    command.args(rest);
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        tracing::warn!(
            "calls are served in-process on x86-64 only: {} works through the mount",
            program.display()
        );
    } else if let Some(first) = served.first() {
        let library = unpack(first.pool.dir())?;
        let sites = sites_beside(&library);
        sites.parent().into_iter().for_each(sweep);
        command.env(config::SITES, sites);
        let mut preload = library.into_os_string();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        command
            .env("LD_PRELOAD", preload)
            .env_remove(config::STATS)
            .env(config::SESSION_AFTER, args.session_after.to_string());
        // The mounts of a `varve run` around this one do not count here.
        for n in 0..config::MOUNTS_MAX {
            for variable in [
                config::MOUNT,
                config::SOCKET,
                config::DEVICE,
                config::READ_ONLY,
                config::ATIME,
            ] {
                command.env_remove(config::nth(variable, n));
            }
        }
        for (n, Served { mounted, pool }) in served.iter().enumerate() {
            let _ = rustix::fs::getxattr(&mounted.at, varve_ipc::RUN_ATTRIBUTE, &mut [0_u8; 0]);
            let name = |variable| config::nth(variable, n);
            command
                .env(name(config::MOUNT), &mounted.at)
                .env(name(config::SOCKET), pool.socket())
                .env(name(config::DEVICE), mounted.device.to_string());
            if mounted.is_read_only {
                command.env(name(config::READ_ONLY), "1");
            }
            match mounted.atime {
                Atime::Relative => {}
                Atime::Never => drop(command.env(name(config::ATIME), "noatime")),
                Atime::Strict => drop(command.env(name(config::ATIME), "strictatime")),
            }
        }
    }
    if args.stats {
        return with_stats(command, program);
    }
    let error = command.exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}

/// A mount that is served, and its pool.
struct Served {
    mounted: PoolMount,
    pool: Pool,
}

/// The mounts that the arguments select.
struct Chosen {
    mounts: Vec<PoolMount>,
    /// They were asked for: one that cannot be served is an error.
    is_named: bool,
}

/// Those of the chosen mounts that can be served; says of the others why not.
fn served(chosen: Chosen, program: &OsStr) -> anyhow::Result<Vec<Served>> {
    let mut served = Vec::new();
    let is_only = chosen.mounts.len() == 1;
    for mounted in chosen.mounts {
        let through_mount = |why: String| {
            tracing::warn!("{why}: {} works through the mount", program.display());
        };
        let pool = match Pool::open(&mounted.pool) {
            Ok(pool) => pool,
            Err(error) if chosen.is_named || is_only => return Err(error),
            Err(_) => continue,
        };
        if is_closed_to_us(&pool) {
            // Of pools that nobody named, others' are no news.
            if chosen.is_named || is_only {
                through_mount(not_open(pool.dir()));
            }
        } else if let Err(error) = pool.require_daemon() {
            if chosen.is_named || is_only {
                return Err(error.into());
            }
            through_mount(error.to_string());
        } else if let Some(inner) = mounted_inside(&mounted.at)? {
            through_mount(format!(
                "{} is mounted inside {}",
                inner.display(),
                mounted.at.display()
            ));
        } else if served.len() == config::MOUNTS_MAX {
            through_mount(format!(
                "{} mounts are served at once, and {} is one more",
                config::MOUNTS_MAX,
                mounted.at.display()
            ));
        } else {
            served.push(Served { mounted, pool });
        }
    }
    Ok(served)
}

/// Whether the daemon's socket exists but is not accessible to this user.
fn is_closed_to_us(pool: &Pool) -> bool {
    let tried = std::os::unix::net::UnixStream::connect(pool.socket());
    tried.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// Returns the mounts that the arguments select, at least one.
fn choose(args: &RunArgs) -> anyhow::Result<Chosen> {
    let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    let all = visible(pool_mounts(&table));
    let absolute =
        |path: &Path| std::fs::canonicalize(path).with_context(|| format!("{} is not there", path.display()));
    let is_named = !(args.mount.is_empty() && args.pool.is_empty());
    let mut wanted = vec![!is_named; all.len()];
    for at in &args.mount {
        let is_at = absolute(at)?;
        let found = all.iter().position(|mounted| mounted.at == is_at);
        let found = found.with_context(|| {
            format!(
                "no pool is mounted at {0}; `varve mount POOL {0}` does that",
                at.display()
            )
        })?;
        wanted[found] = true;
    }
    for dir in &args.pool {
        let pool = absolute(Pool::open(dir)?.dir())?;
        let mut found = false;
        for (wanted, mounted) in wanted.iter_mut().zip(&all) {
            if mounted.pool == pool && mounted.is_whole {
                (*wanted, found) = (true, true);
            }
        }
        if !found {
            bail!(
                "the pool {0} is not mounted; `varve mount {0} DIR` does that",
                dir.display()
            );
        }
    }
    // A mount that shows a directory of a pool only is served by the kernel.
    let mounts: Vec<PoolMount> = all
        .into_iter()
        .zip(wanted)
        .filter(|(mounted, wanted)| *wanted && (is_named || mounted.is_whole))
        .map(|(mounted, _)| mounted)
        .collect();
    if mounts.is_empty() {
        bail!("no pool is mounted; `varve up DIR` mounts one at DIR/mnt");
    }
    Ok(Chosen { mounts, is_named })
}

/// Mounts without those that others lie over.
fn visible(all: Vec<PoolMount>) -> Vec<PoolMount> {
    let mut visible: Vec<PoolMount> = Vec::new();
    for mounted in all {
        visible.retain(|other| other.at != mounted.at);
        visible.push(mounted);
    }
    visible
}

/// Returns a file system mounted below `at`, which LibFS would not see.
fn mounted_inside(at: &Path) -> anyhow::Result<Option<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    Ok(places(&table)
        .map(|path| PathBuf::from(OsString::from_vec(path)))
        .find(|path| path != at && path.starts_with(at)))
}

/// A number that another build of a library does not have: of the build id that the linker put into its first
/// page, or of all of its bytes, which takes milliseconds.
fn identity(library: &[u8]) -> u64 {
    /// Head of a note with a build id of 20 bytes: lengths of name and id, kind, name.
    const HEAD: &[u8; 16] = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0";
    const ID: usize = 20;
    const FIRST_PAGE: usize = 4096;
    let first = &library[..library.len().min(FIRST_PAGE)];
    let note = first.windows(HEAD.len() + ID).find(|note| note.starts_with(HEAD));
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(note.unwrap_or(library));
    hasher.finish()
}

/// Writes the library to a directory from which every program started here can load it, and returns its path.
/// A trusted copy in the pool's directory is used if there is one. Otherwise the library goes into the pool's
/// directory if that belongs to this user, else into a private directory: its owner controls the programs
/// that load it. The private directory also serves if the loader cannot take the pool's path (it splits at
/// blanks and colons).
fn unpack(pool: &Path) -> anyhow::Result<PathBuf> {
    if LIBRARY.is_empty() {
        bail!("this binary was built without the preload library; build it with `cargo build --release`");
    }
    let splits = |path: &Path| {
        path.as_os_str()
            .as_bytes()
            .iter()
            .any(|byte| b" \t\n:".contains(byte))
    };
    let name = format!("preload-{:016x}.so", identity(LIBRARY));
    let of = |path: &Path| std::fs::symlink_metadata(path).ok();
    let there = |path: &Path| {
        of(path).is_some_and(|meta| meta.is_file() && is_trusted(&meta) && meta.len() == LIBRARY.len() as u64)
    };
    let trusted = !splits(pool) && of(pool).is_some_and(|meta| is_trusted(&meta));
    if trusted && there(&pool.join(&name)) {
        return Ok(pool.join(name));
    }
    let own = trusted && of(pool).is_some_and(|meta| meta.uid() == rustix::process::geteuid().as_raw());
    let dir = if own { pool.to_owned() } else { private_dir()? };
    let path = dir.join(name);
    if there(&path) {
        return Ok(path);
    }
    let most = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if most.is_some_and(|most| most < LIBRARY.len() as u64) {
        bail!(
            "the preload library ({} MiB) is longer than files may be here: raise `ulimit -f` for the first run",
            LIBRARY.len() >> 20
        );
    }
    // Under a name of its own, since others may do the same in another PID namespace; durable before it has
    // its last name, since its bytes are not looked at again, and a power cut could leave it empty.
    let number = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
    let fresh = dir.join(format!(".preload-{number:016x}.tmp"));
    let written = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(&fresh)
        .and_then(|mut file| {
            // Whatever the umask is: others load it, too.
            file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
            file.write_all(LIBRARY)?;
            file.sync_all()
        })
        .and_then(|()| std::fs::rename(&fresh, &path));
    if written.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    written.with_context(|| format!("cannot put the preload library into {}", dir.display()))?;
    Ok(path)
}

/// Removes what is left: an hour later libraries that were not finished, a week later what processes have put
/// beside a library for C libraries that may be gone by now. Who runs such a copy keeps it, and who looks for
/// one makes it again.
fn sweep(dir: &Path) {
    const HOUR: u64 = 3600;
    let outlives = |name: &[u8]| {
        let is_beside = name.starts_with(b"preload-") && name.windows(7).any(|part| part == b".sites-");
        match (
            name.starts_with(b".preload-") && name.ends_with(b".tmp"),
            is_beside,
        ) {
            (true, _) => Some(HOUR),
            (_, true) => Some(7 * 24 * HOUR),
            _ => None,
        }
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Some(secs) = outlives(entry.file_name().as_bytes()) else {
            continue;
        };
        let modified = entry.metadata().ok().and_then(|meta| meta.modified().ok());
        if modified.is_some_and(|time| time.elapsed().is_ok_and(|age| age.as_secs() > secs)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Where processes note what they find in the C library, and put their copy of it: beside the library, or in
/// this user's private directory where the library is another's.
fn sites_beside(library: &Path) -> PathBuf {
    let own = rustix::process::geteuid().as_raw();
    let sites = library.with_extension("sites");
    let dir = library.parent().and_then(|dir| std::fs::metadata(dir).ok());
    if own == 0 || dir.is_some_and(|dir| dir.uid() == own) {
        return sites;
    }
    match (private_dir(), sites.file_name()) {
        (Ok(dir), Some(name)) => dir.join(name),
        _ => sites,
    }
}

/// Whether only this user or root can change the file, so that it may be loaded.
fn is_trusted(meta: &std::fs::Metadata) -> bool {
    let own = rustix::process::geteuid().as_raw();
    (meta.uid() == 0 || meta.uid() == own) && meta.mode() & 0o022 == 0
}

/// Returns this user's private directory under `/tmp`; creates it if needed.
fn private_dir() -> anyhow::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let dir = PathBuf::from(format!("/tmp/varve-{uid}"));
    let _ = std::fs::DirBuilder::new().mode(0o755).create(&dir);
    let meta = std::fs::symlink_metadata(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    if !meta.is_dir() || meta.uid() != uid || meta.mode() & 0o022 != 0 {
        bail!("{} is not a directory of this user's own", dir.display());
    }
    Ok(dir)
}

/// Runs the program, then prints how its calls were served.
fn with_stats(mut command: Command, program: &OsStr) -> anyhow::Result<ExitCode> {
    let counters = Counters::make()?;
    command.env(config::STATS, &counters.path);
    // A keyboard signal ends the program; this process must outlive it.
    let mut signals = signal_hook::iterator::Signals::new([
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGQUIT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ])?;
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let pid = rustix::process::Pid::from_child(&child);
    let handle = signals.handle();
    let forward = std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                let passed = match signal {
                    signal_hook::consts::SIGTERM => rustix::process::Signal::TERM,
                    signal_hook::consts::SIGHUP => rustix::process::Signal::HUP,
                    // The terminal sends these to the program itself.
                    _ => continue,
                };
                let _ = rustix::process::kill_process(pid, passed);
            }
        })?;
    let status = child.wait()?;
    handle.close();
    let _ = forward.join();
    let report = counters.report()?;
    for line in reasons(&report) {
        out::note(&line);
    }
    out::note(&report.to_string());
    let code = status
        .code()
        .unwrap_or_else(|| SIGNALLED + status.signal().unwrap_or(0));
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// A line for each reason why calls were left to the mount, the most frequent first.
fn reasons(report: &serde_json::Value) -> Vec<String> {
    let why = report["why"].as_object().into_iter().flatten();
    let mut reasons: Vec<_> = why
        .filter_map(|(name, calls)| Some((calls.as_u64()?, name)))
        .collect();
    reasons.sort_by_key(|(calls, name)| (std::cmp::Reverse(*calls), *name));
    let line = |(calls, name)| format!("{calls:>8} calls by the mount: {name}");
    reasons.into_iter().map(line).collect()
}

/// The file with the counters of a run's processes. Removed on drop.
struct Counters {
    path: PathBuf,
}

impl Counters {
    fn make() -> anyhow::Result<Self> {
        let dir = if Path::new("/dev/shm").is_dir() {
            PathBuf::from("/dev/shm")
        } else {
            std::env::temp_dir()
        };
        let path = dir.join(format!("varve-run-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let file = file.with_context(|| format!("cannot make {}", path.display()))?;
        let counters = Self { path };
        file.set_len(((syscalls::WHY + why::Why::ALL.len()) * 8) as u64)?;
        Ok(counters)
    }

    /// Reads all counters, as JSON by name.
    fn report(&self) -> anyhow::Result<serde_json::Value> {
        let bytes = std::fs::read(&self.path).context("the counters are gone")?;
        let count = |slot: usize| {
            let word = bytes
                .get(slot * 8..slot * 8 + 8)
                .and_then(|word| word.try_into().ok());
            word.map_or(0, u64::from_ne_bytes)
        };
        let mut sides = [(Map::new(), 0), (Map::new(), 0)];
        for number in 0..syscalls::NUMBERS {
            for (side, (names, total)) in sides.iter_mut().enumerate() {
                let calls = count(number * 2 + side);
                if calls > 0 {
                    let name = syscalls::name(number).map_or_else(|| number.to_string(), str::to_owned);
                    names.insert(name, json!(calls));
                    *total += calls;
                }
            }
        }
        let sessions: Map<_, _> = syscalls::SESSIONS
            .iter()
            .zip(syscalls::NUMBERS * 2..)
            .map(|(name, slot)| ((*name).to_owned(), json!(count(slot))))
            .collect();
        let why: Map<_, _> = why::Why::ALL
            .iter()
            .zip(syscalls::WHY..)
            .map(|(why, slot)| (why.name().to_owned(), count(slot)))
            .filter(|(_, calls)| *calls > 0)
            .map(|(name, calls)| (name, json!(calls)))
            .collect();
        let [(served, served_total), (fell_back, fell_back_total)] = sides;
        let all = served_total + fell_back_total;
        let share = (served_total * 10_000).checked_div(all).unwrap_or(0) as f64 / 10_000.0;
        Ok(json!({
            "served_total": served_total,
            "fell_back_total": fell_back_total,
            "share": share,
            "served": served,
            "fell_back": fell_back,
            "why": why,
            "sessions": sessions,
            "opened_on_mount": count(syscalls::OPENED),
        }))
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::{identity, reasons, unpack};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn reasons_have_a_line_each_the_most_frequent_first() {
        let report = serde_json::json!({"why": {"a": 3, "b": 12, "c": 3}});
        let expected = [
            "12 calls by the mount: b",
            "3 calls by the mount: a",
            "3 calls by the mount: c",
        ];
        let lines = reasons(&report);
        assert!(lines.iter().map(|line| line.trim()).eq(expected), "{lines:?}");
        assert!(reasons(&serde_json::json!({})).is_empty());
    }

    #[test]
    fn library_is_known_by_its_build_id_or_by_its_bytes() {
        let with_id = |id: u8, rest: u8| {
            let mut library = vec![0; 700];
            library.extend_from_slice(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0");
            library.extend_from_slice(&[id; 20]);
            library.resize(9000, rest);
            library
        };
        assert_eq!(identity(&with_id(1, 2)), identity(&with_id(1, 3)));
        assert_ne!(identity(&with_id(1, 2)), identity(&with_id(4, 2)));
        assert_ne!(identity(&[1; 9000]), identity(&[2; 9000]));
        assert_ne!(identity(b""), identity(b"x"));
    }

    #[test]
    fn library_is_not_loaded_from_where_others_can_change_it() {
        if super::LIBRARY.is_empty() {
            return;
        }
        let pool = tempfile::tempdir().expect("a directory");
        let mode = |mode| std::fs::set_permissions(pool.path(), std::fs::Permissions::from_mode(mode));
        mode(0o755).expect("its mode");
        let own = unpack(pool.path()).expect("a library");
        assert!(own.starts_with(pool.path()));
        for others in [0o777, 0o775] {
            mode(others).expect("its mode");
            let elsewhere = unpack(pool.path()).expect("a library");
            assert!(
                !elsewhere.starts_with(pool.path()),
                "{others:o}: {}",
                elsewhere.display()
            );
        }
        mode(0o755).expect("its mode");
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o666)).expect("its mode");
        let again = unpack(pool.path()).expect("a library");
        let meta = std::fs::metadata(&again).expect("it is there");
        assert!(
            super::is_trusted(&meta),
            "one that others could have changed is written anew"
        );
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&again, Some(65_534), None).expect("its owner");
            unpack(pool.path()).expect("a library");
            let meta = std::fs::metadata(&again).expect("it is there");
            assert!(super::is_trusted(&meta), "nor one of somebody else");
        }
    }
}
