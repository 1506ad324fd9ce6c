//! `mount.varve` and `mount.fuse.varve`: mount(8) starts this program under these names for an entry of
//! fstab(5) with the type `varve`, and for `mount -o remount`. Its arguments are mount(8)'s: SOURCE DIR
//! [-sfnv] [-o OPTIONS] [-t TYPE].

use crate::cli::UpArgs;
use crate::exit::Usage;
use crate::mount_options::MountOptions;
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use rustix::mount::mount_remount;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use varve_fuse_shim::MountFlags;
use varve_libfs::mounts::pool_mounts;

/// Exit codes of mount(8): the mount failed; the command line was wrong.
const MOUNT_FAILED: u8 = 32;
const MOUNT_USAGE: u8 = 1;
/// How long a mount may take to come up.
const START_LIMIT: Duration = Duration::from_secs(600);
/// How long an earlier `up` may take to end.
const END_LIMIT: Duration = Duration::from_secs(150);
const TICK: Duration = Duration::from_millis(20);
/// Prefix of the source in the table of mounts, before the pool's directory.
const SOURCE: &[u8] = b"varve:";

/// Whether this program was started as a mount helper.
pub fn is_meant() -> bool {
    let name = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&name).file_name().unwrap_or_default();
    name == "mount.varve" || name == "mount.fuse.varve"
}

/// Arguments of mount(8).
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    source: PathBuf,
    dir: PathBuf,
    options: MountOptions,
    fake: bool,
}

impl Asked {
    fn parse(words: impl Iterator<Item = OsString>) -> Result<Self, Usage> {
        let wrong = |why: &str| {
            Usage(format!(
                "{why}; usage: mount.varve POOL DIR [-sfnv] [-o OPTIONS] [-t TYPE], as mount(8) calls it"
            ))
        };
        let (mut places, mut text, mut sloppy, mut fake) = (Vec::new(), Vec::new(), false, false);
        let mut words = words;
        while let Some(word) = words.next() {
            match word.to_str() {
                Some("-o") => {
                    let more = words.next().ok_or_else(|| wrong("-o needs options"))?;
                    text.push(more.to_string_lossy().into_owned());
                }
                Some("-t") => drop(words.next()),
                Some(flags) if flags.len() > 1 && flags.starts_with('-') => {
                    for flag in flags.chars().skip(1) {
                        match flag {
                            's' => sloppy = true,
                            'f' => fake = true,
                            'n' | 'v' => {}
                            _ => return Err(wrong(&format!("-{flag} is not known"))),
                        }
                    }
                }
                _ => places.push(word),
            }
        }
        let [source, dir] =
            <[OsString; 2]>::try_from(places).map_err(|_| wrong("a pool and a directory are needed"))?;
        // A remount passes the source as the table of mounts has it.
        let source = match source.as_bytes().strip_prefix(SOURCE) {
            Some(pool) => OsString::from_vec(pool.to_vec()),
            None => source,
        };
        Ok(Self {
            source: source.into(),
            dir: dir.into(),
            options: MountOptions::parse(&text.join(","), sloppy)?,
            fake,
        })
    }
}

/// Runs the mount helper.
pub fn run() -> ExitCode {
    let asked = match Asked::parse(std::env::args_os().skip(1)) {
        Ok(asked) => asked,
        Err(Usage(why)) => {
            out::note(&format!("mount.varve: {why}"));
            return ExitCode::from(MOUNT_USAGE);
        }
    };
    match mount(&asked) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            out::note(&format!("mount.varve: {}", crate::message(&error)));
            if asked.options.nofail {
                return ExitCode::SUCCESS;
            }
            ExitCode::from(MOUNT_FAILED)
        }
    }
}

fn mount(asked: &Asked) -> anyhow::Result<()> {
    if asked.options.remount {
        return remount(asked);
    }
    let pool = Pool::open(&asked.source)?;
    if asked.fake {
        return Ok(());
    }
    let mut options = asked.options;
    // All users may use root's mounts, as those of other file systems; otherwise only root could.
    let is_root = rustix::process::geteuid().is_root();
    options.allow_other = options.allow_other.or(is_root.then_some(true));
    await_end(&pool)?;
    if pool.has_daemon() {
        return beside(&pool, &asked.dir, &options);
    }
    crate::up::up(&UpArgs {
        dir: asked.source.clone(),
        mountpoint: Some(asked.dir.clone()),
        options: Some(options),
        detach: true,
        quiet: true,
        ..UpArgs::default()
    })
}

/// Changes the flags of a mount in the kernel; the mount's process follows those that concern it.
fn remount(asked: &Asked) -> anyhow::Result<()> {
    let dir = crate::mounted::absolute(&asked.dir)
        .with_context(|| format!("cannot look at {}", asked.dir.display()))?;
    let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    if !pool_mounts(&table).iter().any(|mounted| mounted.at == dir) {
        bail!("{} is not a mount of a pool", dir.display());
    }
    if asked.fake {
        return Ok(());
    }
    let mut flags = asked.options.flags;
    flags.set(MountFlags::RDONLY, asked.options.read_only);
    mount_remount(&dir, flags, c"").with_context(|| format!("cannot mount {} again", dir.display()))
}

/// Waits for an `up` that was just unmounted and is digesting the rest: it still holds the pool.
fn await_end(pool: &Pool) -> anyhow::Result<()> {
    let until = Instant::now() + END_LIMIT;
    while crate::up::try_lock(&pool.up_lock())?.is_none() {
        let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
        if pool_mounts(&table)
            .iter()
            .any(|mounted| mounted.pool == pool.dir())
        {
            return Ok(());
        }
        if Instant::now() >= until {
            bail!(
                "another `varve up` has {} and mounts nothing",
                pool.dir().display()
            );
        }
        std::thread::sleep(TICK);
    }
    Ok(())
}

/// Starts another mount of a served pool, in the background.
fn beside(pool: &Pool, dir: &Path, options: &MountOptions) -> anyhow::Result<()> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(pool.log_file())
        .with_context(|| format!("cannot write {}", pool.log_file().display()))?;
    let start = log.metadata()?.len();
    let before = crate::mounted::mount_device(dir);
    let mut child = Command::new(std::env::current_exe()?)
        .args(["mount", "--remountable", "-o", &options.text()])
        .arg(pool.dir())
        .arg(dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .context("cannot start")?;
    let until = Instant::now() + START_LIMIT;
    while crate::mounted::mount_device(dir) == before {
        if let Some(status) = child.try_wait()? {
            let said = std::fs::read(pool.log_file()).unwrap_or_default();
            let said = said.get(start as usize..).unwrap_or_default();
            bail!(
                "it did not start ({status}): {}",
                String::from_utf8_lossy(said).trim()
            );
        }
        if Instant::now() >= until {
            give_up(&mut child);
            bail!(
                "not mounted after {START_LIMIT:?}; see {}",
                pool.log_file().display()
            );
        }
        std::thread::sleep(TICK);
    }
    Ok(())
}

fn give_up(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Asked;
    use std::path::Path;

    fn parse(words: &[&str]) -> Result<Asked, String> {
        Asked::parse(words.iter().map(|word| (*word).into())).map_err(|usage| usage.0)
    }

    #[test]
    fn arguments_are_those_of_mount() {
        let asked = parse(&["/srv/pool", "/mnt", "-sn", "-o", "rw,noatime", "-t", "fuse.varve"]).unwrap();
        assert_eq!(
            (&*asked.source, &*asked.dir),
            (Path::new("/srv/pool"), Path::new("/mnt"))
        );
        assert!(!asked.fake && !asked.options.read_only);
        let again = parse(&["varve:/srv/pool", "/mnt", "-f", "-o", "ro,remount"]).unwrap();
        assert_eq!(&*again.source, Path::new("/srv/pool"));
        assert!(again.fake && again.options.remount && again.options.read_only);
        assert!(parse(&["/srv/pool"]).unwrap_err().contains("usage"));
        assert!(parse(&["/srv/pool", "/mnt", "-o"]).is_err());
        assert!(
            parse(&["/srv/pool", "/mnt", "-o", "nonsense"])
                .unwrap_err()
                .contains("nonsense")
        );
        assert!(parse(&["/srv/pool", "/mnt", "-z"]).is_err());
    }
}
