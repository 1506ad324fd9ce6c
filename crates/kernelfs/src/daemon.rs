//! The daemon's own threads. Owns when background work runs; the work itself is [`KernelFs::tick`].

use crate::KernelFs;
use crate::bell::Bell;
use crate::ops::digest::Digests;
use crate::session::table::Sessions;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use varve_store::StoreError;

/// Interval of the check for late sessions and ended processes, in milliseconds.
const TICK_MS: u64 = 50;

/// Longest sleep of a digest thread, in milliseconds; requests wake it earlier.
const DIGEST_MS: u64 = 100;

/// Delay between the end of a session and the return of its free memory to the system, in milliseconds;
/// sessions that end in between share one return.
const GIVE_BACK_MS: u64 = 5_000;

/// Pause between two steps of placement while there is data to move, in milliseconds.
const PLACE_PAUSE_MS: u64 = 1;

/// Blocks of NVM that one tick checks for pages that the host has dropped from memory: a gibibyte takes some
/// six seconds, and 0.3 % of a processor.
const ABSENT_BLOCKS: u64 = 2_048;

/// Background threads of a [`KernelFs`]; [`stop`](Self::stop) or dropping it ends them.
pub struct Daemon {
    kernel: Arc<KernelFs>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Daemon {
    /// Starts the background threads.
    ///
    /// # Errors
    /// If no thread can be made.
    pub fn start(kernel: Arc<KernelFs>) -> io::Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let worker = std::thread::Builder::new().name("varve-work".into()).spawn({
            let (kernel, over) = (Arc::clone(&kernel), Arc::clone(&over));
            move || work(&kernel, &over)
        })?;
        kernel.lifecycle.background.store(true, Ordering::Release);
        // From here on dropping `daemon` ends the started threads.
        let mut daemon = Self {
            kernel: Arc::clone(&kernel),
            over: Arc::clone(&over),
            threads: vec![worker],
        };
        for _ in 0..kernel.config().digest_threads() {
            let (kernel, over) = (Arc::clone(&kernel), Arc::clone(&over));
            let digester = std::thread::Builder::new()
                .name("varve-digest".into())
                .spawn(move || digest(&kernel, &over))?;
            daemon.threads.push(digester);
        }
        // A thread of its own: work that clients wait for must not wait for slow media.
        let mover = std::thread::Builder::new()
            .name("varve-place".into())
            .spawn(move || place(&kernel, &over))?;
        daemon.threads.push(mover);
        Ok(daemon)
    }

    /// Returns the daemon's object.
    #[must_use]
    pub const fn kernel(&self) -> &Arc<KernelFs> {
        &self.kernel
    }

    fn join(&mut self) {
        self.kernel.lifecycle.background.store(false, Ordering::Release);
        self.over.store(true, Ordering::Release);
        self.kernel.lifecycle.bell.ring();
        self.kernel.placer.bell.ring();
        for thread in self.threads.drain(..) {
            // A ring wakes all waiting threads, and one that is about to wait.
            self.kernel.lifecycle.digest_bell.ring();
            let _ = thread.join();
        }
    }

    /// Ends the threads, then all sessions.
    ///
    /// # Errors
    /// As [`KernelFs::shutdown`].
    pub fn stop(mut self) -> Result<(), StoreError> {
        self.join();
        self.kernel.shutdown()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.join();
    }
}

fn work(kernel: &KernelFs, over: &AtomicBool) {
    let mut idle_since_ms = kernel.now_ms();
    let mut memory = GiveBack::default();
    let (mut absent, mut absent_due_ms) = (0, 0);
    while !over.load(Ordering::Acquire) {
        kernel.lifecycle.bell.wait(TICK_MS);
        kernel.tick();
        let now_ms = kernel.now_ms();
        if now_ms >= idle_since_ms + kernel.config().idle_digest_ms {
            idle_since_ms = now_ms;
            // Idle logs hold entries that clients did not ask to digest.
            ask_for_all(&kernel.sessions, &kernel.lifecycle.digest_bell);
        }
        if now_ms >= absent_due_ms {
            absent_due_ms = now_ms + TICK_MS;
            absent = kernel.store().forget_absent(absent, ABSENT_BLOCKS);
        }
        if memory.is_due(kernel.sealed_until_now(), now_ms) {
            varve_media::sys::give_free_memory_back();
        }
    }
}

fn digest(kernel: &KernelFs, over: &AtomicBool) {
    while !over.load(Ordering::Acquire) {
        kernel.lifecycle.digest_bell.wait(DIGEST_MS);
        digest_asked(kernel);
    }
}

/// When free memory goes back to the system: some time after sessions have ended, once for all of them.
#[derive(Debug, Default)]
struct GiveBack {
    /// Number of ended sessions at the last return.
    ended: u64,
    due_ms: Option<u64>,
}

impl GiveBack {
    fn is_due(&mut self, ended: u64, now_ms: u64) -> bool {
        if ended > self.ended && self.due_ms.is_none() {
            self.due_ms = Some(now_ms + GIVE_BACK_MS);
        }
        let due = self.due_ms.is_some_and(|due_ms| now_ms >= due_ms);
        if due {
            *self = Self { ended, due_ms: None };
        }
        due
    }
}

fn place(kernel: &KernelFs, over: &AtomicBool) {
    let mut pause_ms = TICK_MS;
    while !over.load(Ordering::Acquire) {
        kernel.placer.bell.wait(pause_ms);
        let moved = kernel.place();
        pause_ms = if moved > 0 { PLACE_PAUSE_MS } else { TICK_MS };
    }
}

/// Requests a digest of every log, without waiting.
fn ask_for_all(sessions: &Sessions, digest_bell: &Bell) {
    let mut sessions = sessions.table.lock();
    let sessions = &mut *sessions;
    for id in sessions.entries.keys() {
        sessions.to_digest.ask(*id);
    }
    digest_bell.ring();
}

/// Digests the queued sessions.
fn digest_asked(kernel: &KernelFs) {
    loop {
        let (id, session) = {
            let mut sessions = kernel.locked();
            let Some(id) = sessions.to_digest.begin() else {
                return;
            };
            (id, sessions.live(id))
        };
        if let Some(session) = session {
            // The failure is noted and logged where it occurred; the client gets it from its next call.
            let _ = Digests::of(kernel).digest_session(&session, None);
        }
        kernel.locked().to_digest.done(id);
    }
}

#[cfg(test)]
mod tests {
    use super::{GIVE_BACK_MS, GiveBack};

    #[test]
    fn memory_goes_back_once_for_all_sessions_that_end_within_a_while() {
        let mut memory = GiveBack::default();
        assert!(!memory.is_due(0, 1_000_000), "nobody has been there");
        assert!(!memory.is_due(1, 1000));
        assert!(!memory.is_due(9, 999 + GIVE_BACK_MS));
        assert!(memory.is_due(9, 1000 + GIVE_BACK_MS));
        assert!(!memory.is_due(9, 1000 + 2 * GIVE_BACK_MS), "nobody since");
        assert!(!memory.is_due(10, 50_000));
        assert!(memory.is_due(10, 50_000 + GIVE_BACK_MS));
    }
}
