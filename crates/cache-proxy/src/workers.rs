//! The threads that serve connections: one for each processor, each with a runtime of its own. A connection
//! stays on one thread from its first byte to its last, so that no request wakes another thread. Knows
//! nothing of what is served.
//!
//! One task accepts the connections and gives each to the thread that has the fewest. A listener for each
//! thread (`SO_REUSEPORT`) would save the hand-over, but the kernel spreads connections by hash, unevenly
//! where they are few, and a second process of the same user could take a part of them unnoticed.

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// How long a thread that stops waits for its blocking calls.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(1);

struct Worker {
    handle: Handle,
    connections: Arc<AtomicUsize>,
    /// Stops the thread when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// All threads. Dropping them stops them and cancels the connections that they still serve.
pub struct Workers(Vec<Worker>);

impl Workers {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn start(count: NonZeroUsize) -> io::Result<Self> {
        let mut workers = Self(Vec::new());
        for number in 0..count.get() {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            let (stop, stopped) = oneshot::channel::<()>();
            let thread = std::thread::Builder::new()
                .name(format!("connections-{number}"))
                .spawn(move || {
                    let _ = runtime.block_on(stopped);
                    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
                })?;
            workers.0.push(Worker {
                handle,
                connections: Arc::default(),
                stop: Some(stop),
                thread: Some(thread),
            });
        }
        Ok(workers)
    }

    /// Serves a connection on the thread that has the fewest. Its future is made there, so that the task
    /// holds its state once.
    pub fn spawn<F: Future<Output = ()> + Send>(&self, connection: impl FnOnce() -> F + Send + 'static) {
        let fewest = self
            .0
            .iter()
            .min_by_key(|worker| worker.connections.load(Ordering::Relaxed));
        // There is one at least.
        let Some(worker) = fewest else { return };
        let count = ConnectionCount::new(Arc::clone(&worker.connections));
        worker.handle.spawn(async move {
            connection().await;
            drop(count);
        });
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for worker in &mut self.0 {
            worker.stop = None;
        }
        for thread in self.0.iter_mut().filter_map(|worker| worker.thread.take()) {
            // A panic was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// Counts one connection of a thread until it is dropped.
struct ConnectionCount(Arc<AtomicUsize>);

impl ConnectionCount {
    fn new(connections: Arc<AtomicUsize>) -> Self {
        connections.fetch_add(1, Ordering::Relaxed);
        Self(connections)
    }
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::sync::mpsc;
    use tokio::sync::watch;

    #[test]
    fn connections_are_spread_evenly_and_end_with_the_threads() {
        let workers = Workers::start(NonZeroUsize::new(3).expect("not zero")).expect("threads");
        let (stop, stopped) = watch::channel(false);
        let (sender, threads) = mpsc::channel();
        for _ in 0..30 {
            let (mut stopped, sender) = (stopped.clone(), sender.clone());
            workers.spawn(move || async move {
                let _ = sender.send(std::thread::current().id());
                let _ = stopped.wait_for(|stop| *stop).await;
            });
        }
        let mut by_thread = HashMap::new();
        for _ in 0..30 {
            let thread = threads.recv().expect("it runs");
            *by_thread.entry(thread).or_insert(0) += 1;
        }
        assert_eq!(by_thread.into_values().collect::<Vec<_>>(), [10, 10, 10]);
        stop.send(true).expect("they wait");
        while workers
            .0
            .iter()
            .any(|worker| worker.connections.load(Ordering::Relaxed) > 0)
        {
            std::thread::yield_now();
        }
        workers.spawn(std::future::pending);
        drop(workers);
    }
}
