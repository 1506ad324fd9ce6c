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
        let count = Arc::new(AtomicUsize::new(0));
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let counter = Arc::clone(&count);
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for _ in signals.forever() {
                    counter.fetch_add(1, Ordering::SeqCst);
                }
            })?;
        Ok(Self { count })
    }

    /// Returns the number of received signals.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}
