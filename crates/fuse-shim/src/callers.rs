//! The threads that send requests: which of them have ended, and which run under `varve run`.
//!
//! That a thread has ended must be true: leases are given back earlier for it (ADR 59).
//!
//! That a program runs under `varve run` its environment says. It changes what it has looked at by its own
//! session, which would then wait for the kernel's cached replies to expire: it gets replies without a
//! timeout. Only a matter of speed: a wrong verdict is harmless. The environment is read by a thread of its
//! own. It lies behind the process' `mmap_lock`, which another thread of that process may hold while it
//! waits for this mount. Until the verdict is known a process counts as one under `varve run`.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tracing::warn;
use varve_ipc::PRELOAD_VARIABLES;

/// Number of verdicts that are kept.
const SLOTS: usize = 1024;
/// Most processes that wait for a verdict.
const QUEUE: usize = 64;
/// Time after which a verdict is renewed: the number may be another process' by then.
const FRESH: Duration = Duration::from_secs(1);
/// Most bytes of an environment that are searched.
const ENVIRONMENT_MAX: u64 = 1 << 20;

/// Verdicts by thread number.
pub(crate) struct Callers {
    slots: Arc<[AtomicU64]>,
    started: Instant,
    queue: OnceLock<SyncSender<u32>>,
    /// Programs under `varve run` use this mount, or did.
    expects_run: AtomicBool,
}

/// A verdict on a thread: its number, when it was made, and whether the process runs under `varve run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Verdict {
    thread: u32,
    /// Milliseconds since the start, of 31 bits.
    made_ms: u32,
    is_run: bool,
}

impl Verdict {
    const fn pack(self) -> u64 {
        ((self.thread as u64) << 32) | ((self.made_ms as u64) << 1) | self.is_run as u64
    }

    const fn unpack(word: u64) -> Self {
        Self {
            thread: (word >> 32) as u32,
            made_ms: (word as u32) >> 1,
            is_run: word & 1 == 1,
        }
    }
}

const fn slot_of(thread: u32) -> usize {
    thread as usize % SLOTS
}

impl Callers {
    pub(crate) fn new() -> Self {
        Self {
            slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
            started: Instant::now(),
            queue: OnceLock::new(),
            expects_run: AtomicBool::new(false),
        }
    }

    /// Notes that programs under `varve run` may call from now on. Before, nobody looks at callers.
    pub(crate) fn expect_run(&self) {
        if !self.expects_run.load(Ordering::Relaxed) {
            self.expects_run.store(true, Ordering::Relaxed);
        }
    }

    /// Notes a thread that is about to become a program under `varve run`. A verdict from before, as its
    /// environment was then, would count for [`FRESH`].
    pub(crate) fn note_run(&self, thread: u32) {
        self.expect_run();
        let verdict = Verdict {
            thread,
            made_ms: millis(self.started),
            is_run: true,
        };
        self.slots[slot_of(thread)].store(verdict.pack(), Ordering::Relaxed);
    }

    /// Whether a thread's process runs under `varve run`, or may and is not known yet.
    pub(crate) fn is_run(&self, thread: u32) -> bool {
        if !self.expects_run.load(Ordering::Relaxed) {
            return false;
        }
        let now_ms = millis(self.started);
        let verdict = Verdict::unpack(self.slots[slot_of(thread)].load(Ordering::Relaxed));
        let is_known = verdict.thread == thread;
        if !is_known || now_ms.wrapping_sub(verdict.made_ms) >= FRESH.as_millis() as u32 {
            let queue = self.queue.get_or_init(|| self.start());
            // With a full queue the next request asks again.
            let _ = queue.try_send(thread);
        }
        !is_known || verdict.is_run
    }

    fn start(&self) -> SyncSender<u32> {
        let (queue, threads) = sync_channel(QUEUE);
        let (slots, started) = (Arc::clone(&self.slots), self.started);
        let judge = move || judge(&threads, &slots, started);
        if let Err(error) = std::thread::Builder::new()
            .name("varve-callers".into())
            .spawn(judge)
        {
            warn!(%error, "no thread to look at callers: none of them gets cached names beside other sessions");
        }
        queue
    }
}

fn millis(started: Instant) -> u32 {
    started.elapsed().as_millis() as u32 & (u32::MAX >> 1)
}

fn judge(threads: &Receiver<u32>, slots: &[AtomicU64], started: Instant) {
    while let Ok(thread) = threads.recv() {
        let slot = &slots[slot_of(thread)];
        let before = slot.load(Ordering::Relaxed);
        let verdict = Verdict {
            thread,
            made_ms: millis(started),
            is_run: has_preload(thread).unwrap_or(false),
        };
        // What was noted meanwhile is newer.
        let _ = slot.compare_exchange(before, verdict.pack(), Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether `varve run`'s variables are in the environment of a thread's process.
fn has_preload(thread: u32) -> std::io::Result<bool> {
    let mut environment = Vec::new();
    std::fs::File::open(format!("/proc/{thread}/environ"))?
        .take(ENVIRONMENT_MAX)
        .read_to_end(&mut environment)?;
    let starts = |variable: &[u8]| variable.starts_with(PRELOAD_VARIABLES.as_bytes());
    Ok(environment.split(|byte| *byte == 0).any(starts))
}

/// The numbers of threads that call, and whether they mean threads of this process' PID namespace. They do
/// where this process has mounted, by itself or by a child; a helper may have been started in another
/// namespace.
#[derive(Debug)]
pub(crate) struct Numbers {
    /// Numbers that were a thread's here when it called.
    seen: Box<[AtomicU32]>,
    /// A thread that called was not here.
    are_foreign: AtomicBool,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            seen: (0..SLOTS).map(|_| AtomicU32::new(0)).collect(),
            are_foreign: AtomicBool::new(false),
        }
    }
}

impl Numbers {
    /// Notes a thread that calls, and waits for the reply.
    pub(crate) fn note_calling(&self, thread: u32) {
        let seen = &self.seen[slot_of(thread)];
        if thread == 0 || seen.load(Ordering::Relaxed) == thread {
            return;
        }
        if is_gone(thread) {
            self.are_foreign.store(true, Ordering::SeqCst);
        }
        seen.store(thread, Ordering::Release);
    }

    /// Whether a thread that has called has ended, and is not even in the kernel any more. `false` if that is
    /// not known.
    pub(crate) fn has_ended(&self, thread: u32) -> bool {
        let is_known = thread != 0 && self.seen[slot_of(thread)].load(Ordering::Acquire) == thread;
        is_known && !self.are_foreign.load(Ordering::SeqCst) && (is_gone(thread) || is_zombie(thread))
    }
}

fn pid(thread: u32) -> Option<Pid> {
    let number = i32::try_from(thread).ok().filter(|number| *number > 0);
    number.and_then(Pid::from_raw)
}

/// Whether no thread has this number. If another has got it since, the one that called has ended, too, and
/// only counts as if it had not.
///
/// Not by `/proc`, which may be mounted for another PID namespace.
fn is_gone(thread: u32) -> bool {
    pid(thread).is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
}

/// Whether the number is that of a process, all threads of which have ended, that nobody has waited for yet.
fn is_zombie(thread: u32) -> bool {
    // Refused for a thread that leads no process.
    let Some(Ok(fd)) = pid(thread).map(|pid| pidfd_open(pid, PidfdFlags::empty())) else {
        return false;
    };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 1) && fds[0].revents().contains(PollFlags::IN)
}

#[cfg(test)]
mod tests {
    use super::{Callers, Numbers, PRELOAD_VARIABLES, Verdict};
    use std::io::Read;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    fn verdict_on(callers: &Callers, variable: Option<&str>) -> bool {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(variable) = variable {
            command.env(variable, "1");
        }
        let mut child = command.spawn().expect("a shell");
        // It has its environment from here on.
        let mut line = [0];
        let out = child.stdout.as_mut().expect("piped");
        out.read_exact(&mut line).expect("it runs");
        assert!(callers.is_run(child.id()), "nothing is known of it");
        let until = Instant::now() + Duration::from_secs(20);
        let known =
            || Verdict::unpack(callers.slots[super::slot_of(child.id())].load(super::Ordering::Relaxed));
        while known().thread != child.id() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let is_run = callers.is_run(child.id());
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        is_run
    }

    #[test]
    fn programs_under_run_are_told_from_others_by_their_environment() {
        let callers = Callers::new();
        assert!(!callers.is_run(std::process::id()), "nobody is expected");
        callers.expect_run();
        assert!(!verdict_on(&callers, None));
        assert!(!verdict_on(&callers, Some("NOT_VARVE_PRELOAD_MOUNT")));
        assert!(verdict_on(&callers, Some(&format!("{PRELOAD_VARIABLES}MOUNT"))));
    }

    #[test]
    fn thread_that_announces_itself_counts_as_under_run_at_once() {
        let callers = Callers::new();
        callers.note_run(std::process::id());
        assert!(callers.is_run(std::process::id()));
    }

    fn wait_until(ready: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !ready() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(ready());
    }

    #[test]
    fn ended_threads_are_told_from_living_and_unknown_ones() {
        let numbers = Numbers::default();
        let own = std::process::id();
        for thread in [0, own] {
            numbers.note_calling(thread);
            assert!(!numbers.has_ended(thread));
        }
        let mut child = Command::new("sh")
            .args(["-c", "read line"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        numbers.note_calling(child.id());
        assert!(!numbers.has_ended(child.id()), "it reads");
        drop(child.stdin.take());
        wait_until(|| numbers.has_ended(child.id()));
        child.wait().expect("it ends");
        assert!(numbers.has_ended(child.id()));
        assert!(!Numbers::default().has_ended(child.id()), "it never called");
        // A thread that is no process.
        let (started, threads) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = started.send(rustix::thread::gettid().as_raw_pid() as u32);
            let _ = ends.recv();
        });
        let number = threads.recv().expect("it runs");
        numbers.note_calling(number);
        assert!(!numbers.has_ended(number));
        drop(end);
        thread.join().expect("it ends");
        wait_until(|| numbers.has_ended(number));
    }

    #[test]
    fn numbers_of_another_namespace_say_nothing() {
        let numbers = Numbers::default();
        let mut child = Command::new("true").spawn().expect("a process");
        numbers.note_calling(child.id());
        child.wait().expect("it ends");
        wait_until(|| numbers.has_ended(child.id()));
        // It calls, and yet there is no such thread here.
        numbers.note_calling(u32::MAX >> 1);
        assert!(!numbers.has_ended(child.id()) && !numbers.has_ended(u32::MAX >> 1));
    }

    #[test]
    fn verdicts_fit_into_a_word() {
        for verdict in [(1, 0, true), (u32::MAX, u32::MAX >> 1, false), (77, 12_345, true)] {
            let (thread, made_ms, is_run) = verdict;
            let verdict = Verdict {
                thread,
                made_ms,
                is_run,
            };
            assert_eq!(Verdict::unpack(verdict.pack()), verdict);
        }
    }
}
