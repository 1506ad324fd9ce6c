//! Dispositions of signals, kept over a library that sets its own. SPDK sets a handler of SIGBUS when it is
//! loaded, for the registers of removed devices; this process has one already.

use std::mem::MaybeUninit;

/// The highest number of a signal.
const SIGNALS: usize = 64;

/// What every signal does.
pub(super) struct Dispositions([Option<libc::sigaction>; SIGNALS]);

fn now(signal: libc::c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: only asks; `action` is written where the call succeeds.
    unsafe {
        (libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0).then(|| action.assume_init())
    }
}

impl Dispositions {
    /// Notes all.
    pub(super) fn note() -> Self {
        Self(std::array::from_fn(|at| now(at as libc::c_int + 1)))
    }

    /// Puts back what was changed since. Returns the changed action for SIGBUS.
    pub(super) fn put_back(&self) -> Option<libc::sigaction> {
        let mut bus = None;
        for (at, before) in self.0.iter().enumerate() {
            let signal = at as libc::c_int + 1;
            let (Some(before), Some(after)) = (before, now(signal)) else {
                continue;
            };
            if after.sa_sigaction == before.sa_sigaction && after.sa_flags == before.sa_flags {
                continue;
            }
            // SAFETY: `before` is what the kernel returned for this signal.
            unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
            if signal == libc::SIGBUS {
                bus = Some(after);
            }
        }
        bus
    }
}

/// Keeps signals that are sent to the process from the calling thread, and from threads that it starts.
pub(super) fn leave_to_other_threads() {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is initialised by the first call; those that a fault of the thread's own raises stay
    // open, since a blocked one ends the process.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for fault in [
            libc::SIGBUS,
            libc::SIGSEGV,
            libc::SIGFPE,
            libc::SIGILL,
            libc::SIGTRAP,
            libc::SIGSYS,
        ] {
            libc::sigdelset(set.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::Dispositions;

    #[test]
    fn changed_handler_is_put_back() {
        extern "C" fn handler(_: libc::c_int) {}
        let signal = libc::SIGRTMAX();
        let before = Dispositions::note();
        // SAFETY: a signal that nothing uses; the handler does nothing.
        unsafe { libc::signal(signal, handler as extern "C" fn(libc::c_int) as usize) };
        assert!(before.put_back().is_none());
        // SAFETY: as above.
        let now = unsafe { libc::signal(signal, libc::SIG_DFL) };
        assert_eq!(now, libc::SIG_DFL);
    }
}
