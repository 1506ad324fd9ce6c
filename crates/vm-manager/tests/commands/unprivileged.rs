//! Without root: what still works on one's own processes, and what is said about the rest.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use super::{Check, Fault, ensure, err, out};

/// Debian's `nobody` and `nogroup`.
const NOBODY: u32 = 65_534;

/// This program where everybody can read it, and a directory for whoever runs it.
struct Place {
    _dir: tempfile::TempDir,
    program: PathBuf,
    runtime: PathBuf,
    root: bool,
}

impl Place {
    fn make() -> Result<Self, Fault> {
        let root = rustix::process::geteuid().is_root();
        let dir = tempfile::tempdir()?;
        let (program, runtime) = (dir.path().join("vm"), dir.path().join("run"));
        std::fs::copy(std::env::current_exe()?, &program)?;
        std::fs::create_dir(&runtime)?;
        if root {
            let open = || std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(dir.path(), open())?;
            std::fs::set_permissions(&program, open())?;
            std::os::unix::fs::chown(&runtime, Some(NOBODY), Some(NOBODY))?;
        }
        Ok(Self {
            _dir: dir,
            program,
            runtime,
            root,
        })
    }

    /// `varve vm` as somebody without privileges.
    fn output(&self, arguments: &[&str]) -> Result<Output, Fault> {
        let mut command = Command::new(&self.program);
        command.arg("--vm").args(arguments).stdin(Stdio::null());
        command.env("XDG_RUNTIME_DIR", &self.runtime).current_dir("/");
        if self.root {
            command.uid(NOBODY).gid(NOBODY);
        }
        match command.output() {
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Err(Fault::Skip(format!(
                "the directory for temporary files is closed to others: {e}"
            ))),
            other => Ok(other?),
        }
    }
}

pub fn without_root_own_processes_are_watched_and_the_rest_is_said() -> Check {
    let place = Place::make()?;
    let probe = place.output(&["probe"])?;
    let said = out(&probe);
    ensure(probe.status.success() && said.contains("without root"), || {
        format!("{said}{}", err(&probe))
    })?;
    for feature in ["frames", "process-madvise", "compaction"] {
        let line = said
            .lines()
            .find(|l| l.trim_start().starts_with(&format!("- {feature}")));
        ensure(line.is_some_and(|l| l.contains("root")), || {
            format!("nothing says what root would add to {feature}: {said}")
        })?;
    }
    // A program of one's own is managed until it has seen so itself, and keeps its status; what cannot be
    // used is named.
    let script = "n=0; until \"$0\" --vm status --json | grep -q \"\\\"pid\\\": *$$,\"; do
        n=$((n + 1)); [ $n -lt 2000 ] || exit 1; sleep 0.05; done; exit 6";
    let program = place.program.to_string_lossy();
    let run = place.output(&["run", "--", "sh", "-c", script, &program])?;
    let said = err(&run);
    ensure(run.status.code() == Some(6), || {
        format!("{:?}: {said}", run.status)
    })?;
    for part in ["not used: process-madvise", "only looked at", "cost: looking"] {
        ensure(said.contains(part), || format!("{part:?} is not in {said}"))?;
    }
    // Somebody else's process is refused in words.
    if place.root {
        let other = place.output(&["attach", "--seconds", "1", &std::process::id().to_string()])?;
        let said = err(&other);
        ensure(!other.status.success() && said.contains("somebody else"), || {
            said.clone()
        })?;
    }
    Ok(())
}
