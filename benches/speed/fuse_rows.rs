//! Small requests through the kernel: a Varve mount beside a FUSE file system that does nothing. Each is
//! served by a process of its own.

use crate::Options;
use crate::common::Dice;
use crate::places::Places;
use crate::pools::{Files, Plan, make};
use crate::report::{Report, Row, Target, Unit};
use crate::switch::UringSwitch;
use crate::timing::{Side, per_op_threads, rounds};
use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use varve_fuse_shim::{MountRequest, mount_null};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 256 * MIB;
/// Threads that ask at once.
const JOBS: u64 = 2;
const START_LIMIT: Duration = Duration::from_secs(20);
/// First argument of the process that serves the null file system.
const NULL_SERVER: &str = "--serve-null";

/// If this process was started to serve the null file system, does so until its standard input ends.
pub fn serve_null_if_asked() -> anyhow::Result<bool> {
    let words: Vec<_> = std::env::args_os().collect();
    if words.get(1).is_none_or(|word| word != NULL_SERVER) {
        return Ok(false);
    }
    let mountpoint = PathBuf::from(words.get(2).context("no mountpoint")?);
    let mounted = mount_null(&MountRequest::new(mountpoint, "varve-null"))?;
    // Ends with the bench, however that ends.
    let _ = std::io::stdin().read(&mut [0]);
    drop(mounted);
    Ok(true)
}

/// A process that serves a mount.
pub struct Server {
    child: Child,
    at: PathBuf,
}

impl Server {
    /// Starts it and waits until it has mounted `at`.
    pub fn start(mut command: Command, at: &Path) -> anyhow::Result<Self> {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("{command:?} does not start"))?;
        let mut server = Self {
            child,
            at: at.to_owned(),
        };
        let start = Instant::now();
        let parent = std::fs::metadata(at.parent().unwrap_or(at))?;
        loop {
            use std::os::unix::fs::MetadataExt;
            if std::fs::metadata(at)?.dev() != parent.dev() {
                return Ok(server);
            }
            if let Some(status) = server.child.try_wait()? {
                bail!("{command:?} ended with {status}");
            }
            if start.elapsed() > START_LIMIT {
                bail!("{command:?} does not mount");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A buffer for O_DIRECT.
#[repr(C, align(4096))]
struct Block([u8; 4096]);

/// One kind of request on all jobs at once.
#[derive(Clone, Copy)]
enum Kind {
    Read,
    Write,
    Stat,
}

fn round(path: &Path, kind: Kind, count: u64) -> anyhow::Result<f64> {
    per_op_threads(JOBS, count, |job| {
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let (mut dice, mut block) = (Dice::new(job + 3), Box::new(Block([7; 4096])));
        for _ in 0..count {
            let at = dice.below(FILE_BYTES / 4096) * 4096;
            let got = match kind {
                Kind::Read => rustix::io::pread(&file, &mut block.0[..], at)?,
                Kind::Write => rustix::io::pwrite(&file, &block.0, at)?,
                Kind::Stat => {
                    rustix::fs::statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)?;
                    4096
                }
            };
            anyhow::ensure!(got == 4096, "{got} bytes");
        }
        Ok(())
    })
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    if let Err(error) = varve_fuse_shim::check_host(false) {
        report.remark(format!("SKIPPED: FUSE: {error}"));
        return Ok(());
    }
    let files = make(
        &Plan {
            name: "fuse",
            on_disk: false,
            nvm_bytes: 1024 * MIB,
            log_bytes: 64 * MIB,
            digest: true,
            in_place: true,
        },
        places,
    )?;
    let _daemon = files.serve()?;
    let switch = UringSwitch::set(false);
    rows("FUSE", options, places, &files, report)?;
    let title = "FUSE over io_uring";
    match switch.and_then(|switch| switch.turn(true).map(|()| switch)) {
        Ok(_on) => rows(title, options, places, &files, report),
        Err(error) => {
            report.remark(format!("SKIPPED: {title} cannot be switched on: {error}"));
            Ok(())
        }
    }
}

/// The rows of one transport, which new mounts have.
fn rows(
    title: &str,
    options: &Options,
    places: &Places,
    files: &Files,
    report: &mut Report,
) -> anyhow::Result<()> {
    let (null_dir, our_dir) = (places.disk().join("mnt-null"), places.disk().join("mnt"));
    std::fs::create_dir_all(&null_dir)?;
    std::fs::create_dir_all(&our_dir)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(NULL_SERVER).arg(&null_dir);
    let _null = Server::start(command, &null_dir)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_varve"));
    command.arg("mount").arg(files.dir()).arg(&our_dir);
    let _ours = Server::start(command, &our_dir)?;
    {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(our_dir.join("data"))?;
        let block = vec![7; 1 << 20];
        for at in (0..FILE_BYTES).step_by(block.len()) {
            file.write_all_at(&block, at)?;
        }
    }
    files.digest()?;
    let count = options.pick(20_000, 60_000);
    for (name, kind) in [
        ("read 4 KiB at random", Kind::Read),
        ("overwrite 4 KiB at random", Kind::Write),
        ("uncached stat", Kind::Stat),
    ] {
        let mut sides: Vec<_> = [("null", &null_dir), ("mount", &our_dir)]
            .into_iter()
            .map(|(name, dir)| {
                let path = dir.join("data");
                Side::new(name, move || round(&path, kind, count))
            })
            .collect();
        let values = rounds(options.pick(5, 9), &mut sides)?;
        report.row(Row {
            name: format!("{title}: {name}, two jobs"),
            unit: Unit::KiloOps,
            values,
            targets: vec![Target::Faster("mount", 0.85, "null")],
        });
    }
    Ok(())
}
