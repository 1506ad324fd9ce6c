//! Child processes of `up`: started, watched, restarted with back-off, ended by their id.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Most restarts within [`WINDOW`] before a child is given up.
pub const TRIES_MAX: u32 = 5;
const WINDOW: Duration = Duration::from_secs(60);

/// One child process, with its recent restarts.
pub struct Supervised {
    /// Its name in messages.
    pub name: &'static str,
    arguments: Vec<std::ffi::OsString>,
    child: Child,
    restarts: Vec<Instant>,
}

/// State of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The child runs.
    Alive,
    /// The child has ended and may be restarted after this time.
    Restart(Duration, ExitStatus),
    /// The child ended too often.
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

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the child runs and, if not, whether to restart it.
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

    /// Whether the child was killed but one of its threads has not ended: the thread waits in the kernel for
    /// an answer that only the killed process could have given. For example, a mount's thread that
    /// invalidates cached pages waits for a write that holds one of them.
    pub fn is_held(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        stat.is_ok_and(|stat| is_zombie(&stat))
    }

    /// Restarts the child.
    pub fn restart(&mut self) -> io::Result<()> {
        self.restarts.push(Instant::now());
        self.child = spawn(&self.arguments)?;
        Ok(())
    }

    /// Sends a signal to the child.
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Waits until the child has ended, at most `limit`. `None`: it still runs.
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

/// Whether `/proc/PID/stat` shows a process whose first thread has ended.
fn is_zombie(stat: &str) -> bool {
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes().first());
    matches!(state, Some(Some(b'Z' | b'X')))
}

/// Makes the kernel send SIGTERM to this child process when its parent ends; fails if the parent has ended
/// already.
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
