//! Processor time of this thread and of helper processes, and the setting of huge pages in the fault path.

use std::io;
use std::process::Command;
use std::time::Duration;

use super::check;

/// Returns the processor time of the calling thread.
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec for the kernel to write; the clock id is one of the kernel's
    // constants.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    if result != 0 {
        return Duration::ZERO;
    }
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// The extent to which huge pages are switched off for a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThpDisable {
    /// Not at all.
    No,
    /// Off in the fault path and for khugepaged, on by request (Linux 6.18).
    ExceptAdvised,
    /// Never, not even by request.
    Completely,
}

const PR_THP_DISABLE_EXCEPT_ADVISED: libc::c_ulong = 2;

/// Sets the mode for the calling process and for the programs that it executes.
///
/// # Errors
/// `EINVAL` when the kernel does not know the mode.
pub fn disable_thp(mode: ThpDisable) -> io::Result<()> {
    let (on, flags): (libc::c_ulong, libc::c_ulong) = match mode {
        ThpDisable::No => (0, 0),
        ThpDisable::ExceptAdvised => (1, PR_THP_DISABLE_EXCEPT_ADVISED),
        ThpDisable::Completely => (1, 0),
    };
    let zero: libc::c_ulong = 0;
    // SAFETY: this prctl takes integers only.
    let result = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, on, flags, zero, zero) };
    check(libc::c_long::from(result)).map(drop)
}

/// Makes `command` start with huge pages by request only. Without kernel support the program starts
/// unchanged; the caller has probed for that and told the user.
pub fn restrict_child_thp(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: the closure runs between fork and exec and makes one system call; it allocates nothing and
    // takes no lock.
    unsafe {
        command.pre_exec(|| {
            let _ = disable_thp(ThpDisable::ExceptAdvised);
            Ok(())
        });
    }
}

/// Runs `command` to its end, or kills it when `stop` returns true (called about every 500 µs). Returns
/// whether it ended by itself and successfully, and its processor time.
///
/// # Errors
/// It cannot be started or waited for.
pub fn run_until(command: &mut Command, mut stop: impl FnMut() -> bool) -> io::Result<(bool, Duration)> {
    let mut child = command.spawn()?;
    loop {
        // SAFETY: an all-zero rusage is a valid value; the kernel fills it in.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        let mut status: libc::c_int = 0;
        let pid = child.id() as libc::pid_t;
        // SAFETY: `status` and `usage` are valid for writing; the child is ours and no other thread waits for
        // it.
        let got = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage) };
        match got {
            0 => {
                if stop() {
                    child.kill()?;
                }
                std::thread::sleep(Duration::from_micros(500));
            }
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            _ => {
                let time = |t: libc::timeval| {
                    Duration::new(t.tv_sec.unsigned_abs(), t.tv_usec.unsigned_abs() as u32 * 1_000)
                };
                let good = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
                return Ok((good, time(usage.ru_utime) + time(usage.ru_stime)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn run_until_tells_an_end_from_a_stop() {
        assert!(run_until(&mut Command::new("true"), || false).unwrap().0);
        assert!(!run_until(&mut Command::new("false"), || false).unwrap().0);
        let stopped = run_until(Command::new("sleep").arg("1000"), || true).unwrap();
        assert!(!stopped.0);
        assert!(run_until(&mut Command::new("/nonexistent/program"), || true).is_err());
    }
}
