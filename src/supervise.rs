//! Child processes of `up`: started, watched, restarted with back-off, ended by their id.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Restarts within [`WINDOW`] before a child is given up.
pub const TRIES_MAX: u32 = 5;
const WINDOW: Duration = Duration::from_secs(60);

/// One child and how often it had to be started again lately.
pub struct Supervised {
    /// For messages.
    pub name: &'static str,
    arguments: Vec<std::ffi::OsString>,
    child: Child,
    restarts: Vec<Instant>,
}

/// What became of a child that died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It runs.
    Alive,
    /// It has ended and may be started again after this time.
    Restart(Duration, ExitStatus),
    /// It ended too often.
    GiveUp(ExitStatus),
}

fn spawn(arguments: &[std::ffi::OsString]) -> io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(std::process::Stdio::null())
        .spawn()
}

impl Supervised {
    /// Starts this program with `arguments`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &'static str, arguments: Vec<std::ffi::OsString>) -> io::Result<Self> {
        let child = spawn(&arguments)?;
        Ok(Self {
            name,
            arguments,
            child,
            restarts: Vec::new(),
        })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it runs, and if not, whether it should be started again.
    pub fn check(&mut self) -> io::Result<Verdict> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(Verdict::Alive);
        };
        let now = Instant::now();
        self.restarts.retain(|at| now.duration_since(*at) < WINDOW);
        if self.restarts.len() as u32 >= TRIES_MAX {
            return Ok(Verdict::GiveUp(status));
        }
        // 0.1 s, 0.2 s, ... 1.6 s.
        let wait = Duration::from_millis(100 << self.restarts.len());
        Ok(Verdict::Restart(wait, status))
    }

    /// Whether it was killed, but a thread of it has not ended: it waits in the kernel for an answer that
    /// only this process could have given. A mount's thread that withdraws cached pages waits so for a write
    /// that holds one of them.
    pub fn is_held(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        stat.is_ok_and(|stat| is_zombie(&stat))
    }

    /// Starts it again.
    pub fn restart(&mut self) -> io::Result<()> {
        self.restarts.push(Instant::now());
        self.child = spawn(&self.arguments)?;
        Ok(())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Waits until it has ended, at most `limit`. `None`: it still runs.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// What `/proc/PID/stat` says of a process whose first thread has ended.
fn is_zombie(stat: &str) -> bool {
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes().first());
    matches!(state, Some(Some(b'Z' | b'X')))
}

/// For a child: asks the kernel for SIGTERM when the parent ends, and ends at once if it already has.
pub fn follow_parent() -> io::Result<()> {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    if rustix::process::getppid() != parent || parent.is_none() {
        return Err(io::Error::other("the process that started this one is gone"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zombie_is_told_by_its_state_whatever_its_name() {
        assert!(is_zombie("12 (varve) Z 1 12 12"));
        assert!(is_zombie("12 (a) S b) Z 1 12 12"));
        assert!(!is_zombie("12 (Z) S 1 12 12"));
        assert!(!is_zombie(""));
    }
}
