//! Signals that end a command, as a counter that loops poll.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts SIGINT, SIGTERM and SIGHUP.
#[derive(Debug, Clone)]
pub struct Stop {
    count: Arc<AtomicUsize>,
}

impl Stop {
    /// Installs the handlers; the signals no longer end the process.
    ///
    /// # Errors
    /// If a handler cannot be set.
    pub fn install() -> io::Result<Self> {
        Self::counting(|_, _| ())
    }

    /// Calls `each` with each signal and their number so far.
    fn counting(each: impl Fn(i32, usize) + Send + 'static) -> io::Result<Self> {
        let count = Arc::new(AtomicUsize::new(0));
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let counter = Arc::clone(&count);
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for signal in signals.forever() {
                    each(signal, counter.fetch_add(1, Ordering::SeqCst) + 1);
                }
            })?;
        Ok(Self { count })
    }

    /// As [`install`](Self::install), but a second signal ends the process as if it was not caught.
    ///
    /// # Errors
    /// If a handler cannot be set.
    pub fn install_for_one() -> io::Result<Self> {
        Self::counting(|signal, count| {
            if count > 1 {
                // Fails for signals that have no default handler only.
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        })
    }

    /// Returns what tells whether a signal was received.
    pub fn flag(&self) -> impl Fn() -> bool + use<> {
        let count = Arc::clone(&self.count);
        move || count.load(Ordering::SeqCst) > 0
    }

    /// Returns the number of received signals.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}
