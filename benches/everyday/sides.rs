//! Where the scripts run: a pool under `varve run` and on its mount, alone and in company, and file systems
//! of the kernel beside it. Whatever is made goes with the value.

use crate::common::output;
use crate::rows::Row;
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Pause between what is prepared and what is measured, on all sides: nobody types faster. What a program waits
/// for that comes directly behind another one is in the row with a look before.
const SETTLED: Duration = Duration::from_millis(500);

/// How a script is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By itself.
    Plain,
    /// Under `varve run`.
    Run,
    /// By itself, while another program works in the pool under `varve run`.
    InCompany,
}

/// One column.
pub struct Side {
    /// Its name in the table.
    pub name: String,
    way: Way,
    varve: PathBuf,
    dir: PathBuf,
}

impl Side {
    /// A directory of a file system of the kernel.
    pub fn plain(name: &str, dir: &Path) -> Self {
        Self::on(name.to_owned(), Way::Plain, Path::new(""), dir)
    }

    fn on(name: String, way: Way, varve: &Path, dir: &Path) -> Self {
        Self {
            name,
            way,
            varve: varve.to_owned(),
            dir: dir.to_owned(),
        }
    }

    fn command(&self, way: Way, script: &str, inputs: &Path, at: &Path) -> Command {
        let mut command = if way == Way::Run {
            let mut command = Command::new(&self.varve);
            command.args(["run", "--mount"]).arg(&self.dir).args(["--", "sh"]);
            command
        } else {
            Command::new("sh")
        };
        command.args(["-euc", script]).current_dir(at).env("I", inputs);
        command
    }

    /// Runs the row's scripts in a new directory. Milliseconds of the one that is measured, and how many names
    /// there are then.
    pub fn measure(&self, row: &Row, inputs: &Path) -> anyhow::Result<(f64, usize)> {
        let at = self.dir.join("work");
        std::fs::create_dir(&at).with_context(|| format!("cannot make {}", at.display()))?;
        let company = (self.way == Way::InCompany).then(|| Company::start(&self.varve, &self.dir));
        let measured = (|| {
            let run = |way, script: &str| output(&mut self.command(way, script, inputs, &at));
            if !row.setup.is_empty() {
                run(self.way, row.setup)?;
            }
            std::thread::sleep(SETTLED);
            if !row.looked.is_empty() {
                run(Way::Plain, row.looked)?;
            }
            let begun = Instant::now();
            run(self.way, row.script)?;
            let ms = begun.elapsed().as_secs_f64() * 1000.0;
            let names = output(Command::new("find").arg(&at))?.lines().count();
            Ok((ms, names))
        })();
        drop(company.transpose()?);
        output(Command::new("rm").arg("-r").arg(&at))?;
        measured
    }
}

/// A program that changes something elsewhere in the pool, a hundred times a second.
struct Company(Child);

impl Company {
    fn start(varve: &Path, mount: &Path) -> anyhow::Result<Self> {
        let script = "mkdir -p elsewhere; cd elsewhere; echo; while echo > f && rm f; do sleep 0.01; done";
        let mut command = Command::new(varve);
        command
            .args(["run", "--session-after", "0", "--mount"])
            .arg(mount);
        command
            .args(["--", "sh", "-c", script])
            .current_dir(mount)
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        // Its first line says that it is there.
        let mut said = [0; 1];
        std::io::Read::read(child.stdout.as_mut().context("piped")?, &mut said)?;
        Ok(Self(child))
    }
}

impl Drop for Company {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A pool that is up, until this goes.
pub struct Pool {
    varve: PathBuf,
    dir: PathBuf,
}

impl Pool {
    /// Makes one in `dir`; its NVM is memory, or a file.
    pub fn up(varve: &Path, dir: &Path, on_disk: bool) -> anyhow::Result<Self> {
        let mut up = Command::new(varve);
        up.arg("up")
            .arg(dir)
            .args(["--nvm", if on_disk { "1G" } else { "shm:1G" }]);
        up.args(["--ssd", "2G", "--hdd", "0", "--detach"]);
        output(&mut up)?;
        Ok(Self {
            varve: varve.to_owned(),
            dir: dir.to_owned(),
        })
    }

    /// Its mount alone, under the name `name`.
    pub fn mount(&self, name: String) -> Side {
        Side::on(name, Way::Plain, &self.varve, &self.dir.join("mnt"))
    }

    /// Its sides; `mark` tells those of several builds apart.
    pub fn sides(&self, mark: &str) -> Vec<Side> {
        let mount = self.dir.join("mnt");
        [
            ("run", Way::Run),
            ("mount", Way::Plain),
            ("company", Way::InCompany),
        ]
        .map(|(name, way)| Side::on(format!("{name}{mark}"), way, &self.varve, &mount))
        .into()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let ended = |words: &[&str]| {
            let done = Command::new(&self.varve).args(words).arg(&self.dir).output();
            done.is_ok_and(|output| output.status.success())
        };
        ended(&["down", "--force"]);
        // A process that was told to end may take a moment, and a pool in use is not destroyed.
        for _ in 0..50 {
            if ended(&["destroy", "--yes"]) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        eprintln!("FAILED: {} is left", self.dir.display());
    }
}
