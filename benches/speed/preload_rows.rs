//! The same calls through linking and through preload: a program that uses the standard library's calls only,
//! started again from this binary under `varve run`, on the plain mount and on tmpfs, beside a linked session
//! of the same pool. Each has a directory of its own, which is its working directory, so that no lease passes
//! between them.

use crate::Options;
use crate::common::Dice;
use crate::fuse_rows::Server;
use crate::name_rows::number;
use crate::places::Places;
use crate::pools::{Plan, make, told};
use crate::report::{Report, Row, Target, Unit};
use crate::timing::{Side, per_op, per_op_threads, rounds};
use anyhow::{Context, bail};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use varve_libfs::{Cred, Posix};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 256 * MIB;
/// Files in the directory that names are looked up in.
const FILES: u64 = 1000;
/// First argument of this binary as the program that makes the calls.
const DRIVER: &str = "--drive-calls";

/// What is called, how often in a round (a tenth of it in quick runs), and how much longer than linking it
/// may take, in microseconds.
const KINDS: [(&str, u64, f64); 11] = [
    ("overwrite 4 KiB at random", 200_000, 0.06),
    ("append 4096 B", 50_000, 0.06),
    ("append 128 B", 400_000, 0.06),
    ("read 4 KiB at random, file of 256 MiB", 400_000, 0.06),
    ("create, write 1 KiB, close, unlink", 50_000, 4.0 * 0.06),
    ("stat of a name in a directory of 1,000", 400_000, 0.06),
    ("open and close of a name in a directory of 1,000", 200_000, 0.4),
    ("sequential write, 1 MiB a call", 1_000, 0.06),
    ("sequential read, 1 MiB a call, file of 256 MiB", 1_000, 0.06),
    ("overwrite 4 KiB at random, two threads, one file", 100_000, 0.06),
    (SYNCED, 500, 2.0 * 0.06),
];
/// The kind that is of interest where a sync waits for a disk; the only one of the pool that lies there.
const SYNCED: &str = "append 4 KiB and fsync";

/// The calls, as a program or a linked session makes them.
trait Calls: Sync {
    type File: Sync;
    fn open(&self, name: &str, flags: i32) -> anyhow::Result<Self::File>;
    fn append(&self, file: &Self::File, data: &[u8]) -> anyhow::Result<usize>;
    fn write_at(&self, file: &Self::File, data: &[u8], at: u64) -> anyhow::Result<usize>;
    fn read_at(&self, file: &Self::File, out: &mut [u8], at: u64) -> anyhow::Result<usize>;
    fn close(&self, file: Self::File) -> anyhow::Result<()>;
    fn sync(&self, file: &Self::File) -> anyhow::Result<()>;
    fn unlink(&self, name: &str) -> anyhow::Result<()>;
    fn stat(&self, name: &str) -> anyhow::Result<u64>;
    fn mkdir(&self, name: &str) -> anyhow::Result<()>;
}

/// A program's calls of the C library.
struct Plain;

impl Calls for Plain {
    type File = File;

    fn open(&self, name: &str, flags: i32) -> anyhow::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if flags & libc::O_CREAT != 0 {
            options.create(true);
        }
        // The library sets what it knows by itself, and takes the others as they are.
        Ok(options
            .custom_flags(flags & !libc::O_CREAT)
            .mode(0o644)
            .open(name)?)
    }

    fn append(&self, mut file: &File, data: &[u8]) -> anyhow::Result<usize> {
        Ok(file.write(data)?)
    }

    fn write_at(&self, file: &File, data: &[u8], at: u64) -> anyhow::Result<usize> {
        Ok(FileExt::write_at(file, data, at)?)
    }

    fn read_at(&self, file: &File, out: &mut [u8], at: u64) -> anyhow::Result<usize> {
        Ok(FileExt::read_at(file, out, at)?)
    }

    fn close(&self, file: File) -> anyhow::Result<()> {
        drop(file);
        Ok(())
    }

    fn sync(&self, file: &File) -> anyhow::Result<()> {
        Ok(file.sync_data()?)
    }

    fn unlink(&self, name: &str) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(name)?)
    }

    fn stat(&self, name: &str) -> anyhow::Result<u64> {
        Ok(std::fs::symlink_metadata(name)?.len())
    }

    fn mkdir(&self, name: &str) -> anyhow::Result<()> {
        Ok(std::fs::create_dir(name)?)
    }
}

impl Calls for Posix {
    type File = varve_libfs::posix::Fd;

    fn open(&self, name: &str, flags: i32) -> anyhow::Result<Self::File> {
        Self::open(self, name.as_bytes(), flags | libc::O_RDWR, 0o644).map_err(told("open"))
    }

    fn append(&self, file: &Self::File, data: &[u8]) -> anyhow::Result<usize> {
        self.write(*file, data).map_err(told("write"))
    }

    fn write_at(&self, file: &Self::File, data: &[u8], at: u64) -> anyhow::Result<usize> {
        self.pwrite(*file, data, at).map_err(told("pwrite"))
    }

    fn read_at(&self, file: &Self::File, out: &mut [u8], at: u64) -> anyhow::Result<usize> {
        self.pread(*file, out, at).map_err(told("pread"))
    }

    fn close(&self, file: Self::File) -> anyhow::Result<()> {
        Self::close(self, file).map_err(told("close"))
    }

    fn sync(&self, file: &Self::File) -> anyhow::Result<()> {
        Self::fdatasync(self, *file).map_err(told("fdatasync"))
    }

    fn unlink(&self, name: &str) -> anyhow::Result<()> {
        Self::unlink(self, name.as_bytes()).map_err(told("unlink"))
    }

    fn stat(&self, name: &str) -> anyhow::Result<u64> {
        Ok(self.lstat(name.as_bytes()).map_err(told("stat"))?.size_bytes)
    }

    fn mkdir(&self, name: &str) -> anyhow::Result<()> {
        Self::mkdir(self, name.as_bytes(), 0o755).map_err(told("mkdir"))
    }
}

/// `names/name-` and eight digits.
fn name_of(buffer: &mut [u8; 19], step: u64) -> anyhow::Result<&str> {
    number(buffer, step);
    Ok(std::str::from_utf8(buffer)?)
}

/// Makes the file and the directory that the calls are about, in the working directory.
fn prepare<C: Calls>(calls: &C) -> anyhow::Result<()> {
    let file = calls.open("data", libc::O_CREAT)?;
    let block = vec![7; MIB as usize];
    for at in (0..FILE_BYTES).step_by(block.len()) {
        whole(calls.write_at(&file, &block, at)?, block.len())?;
    }
    calls.close(file)?;
    calls.mkdir("names")?;
    let mut name = *b"names/name-00000000";
    for step in 0..FILES {
        calls.close(calls.open(name_of(&mut name, step)?, libc::O_CREAT)?)?;
    }
    Ok(())
}

fn whole(got: usize, wanted: usize) -> anyhow::Result<()> {
    anyhow::ensure!(got == wanted, "{got} bytes of {wanted}");
    Ok(())
}

/// One round of the kind at this place of the list; nanoseconds a call.
fn round<C: Calls>(calls: &C, kind: usize, count: u64) -> anyhow::Result<f64> {
    let mut block = [7; 4096];
    let mut dice = Dice::new(count);
    let mut name = *b"names/name-00000000";
    match kind {
        0 | 3 => {
            let file = calls.open("data", 0)?;
            let result = per_op(count, |_| {
                let at = dice.below(FILE_BYTES / 4096) * 4096;
                let got = if kind == 0 {
                    calls.write_at(&file, &block, at)?
                } else {
                    calls.read_at(&file, &mut block, at)?
                };
                whole(got, 4096)
            });
            calls.close(file)?;
            result
        }
        1 | 2 => {
            let file = calls.open("log", libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND)?;
            let data = &block[..if kind == 1 { 4096 } else { 128 }];
            let result = per_op(count, |_| whole(calls.append(&file, data)?, data.len()));
            calls.close(file)?;
            calls.unlink("log")?;
            result
        }
        4 => per_op(count, |step| {
            let name = name_of(&mut name, FILES + step)?;
            let file = calls.open(name, libc::O_CREAT | libc::O_EXCL)?;
            whole(calls.append(&file, &block[..1024])?, 1024)?;
            calls.close(file)?;
            calls.unlink(name)
        }),
        5 => per_op(count, |step| {
            calls.stat(name_of(&mut name, step % FILES)?)?;
            Ok(())
        }),
        6 => per_op(count, |step| {
            calls.close(calls.open(name_of(&mut name, step % FILES)?, 0)?)
        }),
        7 | 8 => {
            let file = calls.open("data", 0)?;
            let mut block = vec![7; MIB as usize];
            let result = per_op(count, |step| {
                let at = step * MIB % FILE_BYTES;
                let got = if kind == 7 {
                    calls.write_at(&file, &block, at)?
                } else {
                    calls.read_at(&file, &mut block, at)?
                };
                whole(got, block.len())
            });
            calls.close(file)?;
            result
        }
        9 => {
            let file = calls.open("data", 0)?;
            let result = per_op_threads(2, count, |thread| {
                let mut dice = Dice::new(thread + 1);
                (0..count).try_for_each(|_| {
                    let at = dice.below(FILE_BYTES / 4096) * 4096;
                    whole(calls.write_at(&file, &block, at)?, 4096)
                })
            });
            calls.close(file)?;
            result
        }
        10 => {
            let file = calls.open("log", libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND)?;
            let result = per_op(count, |_| {
                whole(calls.append(&file, &block)?, 4096)?;
                calls.sync(&file)
            });
            calls.close(file)?;
            calls.unlink("log")?;
            result
        }
        _ => bail!("there is no kind {kind}"),
    }
}

/// If this process was started to make calls: makes those that its standard input names, until that ends.
pub fn drive_if_asked() -> anyhow::Result<bool> {
    if std::env::args().nth(1).is_none_or(|word| word != DRIVER) {
        return Ok(false);
    }
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let numbers: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
        let said = match numbers[..] {
            [] => prepare(&Plain).map(|()| 0.0),
            [kind, count] => round(&Plain, kind as usize, count),
            _ => bail!("told {line:?}"),
        };
        match said {
            Ok(ns) => println!("{ns}"),
            Err(error) => println!("{error:#}"),
        }
        std::io::stdout().flush()?;
    }
    Ok(true)
}

/// A process that makes calls in a directory.
struct Driver {
    name: &'static str,
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Driver {
    /// `program` has everything but the driver's own arguments.
    fn start(name: &'static str, mut program: Command, dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir(dir)?;
        let mut child = program
            .arg(DRIVER)
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{program:?} does not start"))?;
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().context("no pipe")?);
        let mut driver = Self {
            name,
            child,
            to,
            from,
        };
        driver.ask("prepare")?;
        Ok(driver)
    }

    fn ask(&mut self, what: &str) -> anyhow::Result<f64> {
        let to = self.to.as_mut().context("no pipe")?;
        writeln!(to, "{what}")?;
        let mut said = String::new();
        self.from.read_line(&mut said)?;
        let said = said.trim();
        said.parse()
            .ok()
            .with_context(|| format!("{} said {said:?} to {what}", self.name))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // It ends with its standard input; one that hangs must not keep the bench.
        drop(self.to.take());
        for _ in 0..200 {
            if self.child.try_wait().is_ok_and(|status| status.is_some()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rows of one pool: those of a disk have the kind that waits for it, and the disk's own file system
/// beside them.
fn rows(options: &Options, places: &Places, on_disk: bool, report: &mut Report) -> anyhow::Result<()> {
    let (name, where_) = match on_disk {
        true => ("preload-disk", ", NVM in a file on the disk"),
        false => ("preload", ""),
    };
    let files = make(
        &Plan {
            name,
            on_disk,
            nvm_bytes: 2048 * MIB,
            log_bytes: 64 * MIB,
            digest: true,
            in_place: true,
        },
        places,
    )?;
    let _daemon = files.serve()?;
    let at = places.disk().join(format!("mnt-{name}"));
    std::fs::create_dir(&at)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_varve"));
    command.arg("mount").arg(files.dir()).arg(&at);
    let _mount = Server::start(command, &at)?;
    let itself = std::env::current_exe()?;
    let mut served = Command::new(env!("CARGO_BIN_EXE_varve"));
    served.arg("run").arg("--mount").arg(&at).arg("--").arg(&itself);
    let (beside, dir) = match on_disk {
        true => ("disk's file system", places.disk().join("calls")),
        false => ("tmpfs", places.tmpfs().join("preload")),
    };
    let mut drivers = [
        Driver::start("run", served, &at.join("run"))?,
        Driver::start("mount", Command::new(&itself), &at.join("plain"))?,
        Driver::start(beside, Command::new(&itself), &dir)?,
    ];
    std::fs::create_dir(at.join("linked"))?;
    let posix = Posix::new(files.session()?, Cred::root());
    posix.chdir(b"linked").map_err(told("chdir"))?;
    prepare(&posix)?;
    files.digest()?;
    for (kind, (name, count, over)) in KINDS.into_iter().enumerate() {
        if (name == SYNCED) != on_disk {
            continue;
        }
        let count = options.pick(count / 10, count);
        let mut sides = vec![Side::new("linked", || {
            let ns = round(&posix, kind, count)?;
            files.digest()?;
            Ok(ns)
        })];
        for driver in &mut drivers {
            // In memory a call through the mount takes a hundred times as long.
            let tenth = driver.name == "mount" && !on_disk;
            let count = if tenth { count / 10 } else { count };
            let (asked, files) = (format!("{kind} {count}"), &files);
            sides.push(Side::new(driver.name, move || {
                let ns = driver.ask(&asked)?;
                files.digest()?;
                Ok(ns)
            }));
        }
        let values = rounds(options.pick(3, 7), &mut sides)?;
        // A disk's times differ by more than a call costs.
        let target = match on_disk {
            true => Target::AtMost("run", 1.05, "linked"),
            false => Target::Over("run", over, "linked"),
        };
        report.row(Row {
            name: format!("preload: {name}{where_}"),
            unit: Unit::Micros,
            values,
            targets: vec![target],
        });
    }
    drop(drivers);
    posix.fs().unmount().map_err(told("unmount"))
}

/// The rows of this module.
pub fn run(options: &Options, places: &Places, report: &mut Report) -> anyhow::Result<()> {
    if let Err(error) = varve_fuse_shim::check_host(false) {
        report.remark(format!("SKIPPED: preload: {error}"));
        return Ok(());
    }
    rows(options, places, false, report)?;
    rows(options, places, true, report)
}
