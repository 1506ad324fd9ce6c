//! Request coalescing: the first request for a key leads and asks the origin. Others wait until its response
//! is stored or turns out not to be storable. Bounded in number and time.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Number of recent keys with unstorable responses; requests for them do not wait.
const UNSTORABLE: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// Counters of ended fetches.
const ENDED: usize = 4096;
const UNSTORABLE_FOR: Duration = Duration::from_secs(10);

/// All fetches in progress.
pub struct Flights {
    now: Mutex<HashMap<Vec<u8>, watch::Receiver<()>>>,
    unstorable: Mutex<lru::LruCache<Vec<u8>, Instant>>,
    waiting: AtomicUsize,
    /// Numbers of fetches that ended, by hash of the key.
    ended: Vec<AtomicU32>,
    hasher: RandomState,
}

impl Default for Flights {
    fn default() -> Self {
        Self {
            now: Mutex::default(),
            unstorable: Mutex::new(lru::LruCache::new(UNSTORABLE)),
            waiting: AtomicUsize::new(0),
            ended: (0..ENDED).map(|_| AtomicU32::new(0)).collect(),
            hasher: RandomState::new(),
        }
    }
}

/// The outcome of joining the fetch of a key.
pub enum Joined {
    /// The caller leads: it asks the origin, and others wait for it.
    Lead(Lead),
    /// Another request led, and its fetch has ended.
    Waited,
    /// The caller asks the origin for itself only.
    Alone,
}

/// The outcome of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// No fetch of this key was in progress.
    Nothing,
    /// The leader's fetch has ended: look the key up again.
    Ended,
    /// Too many requests wait, or the time is over.
    Vainly,
}

/// The right to fetch a key. Dropping it wakes the waiting requests, which look the key up again.
pub struct Lead {
    flights: Arc<Flights>,
    key: Vec<u8>,
    _done: watch::Sender<()>,
}

impl Lead {
    /// Records that the response cannot be stored, so that requests for this key do not wait for a while.
    pub fn unstorable(self) {
        let mut unstorable = self.flights.unstorable.lock();
        unstorable.put(self.key.clone(), Instant::now());
        drop(unstorable);
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // Before another can lead: who sees the old number and leads knows that no fetch ended meanwhile.
        self.flights.counter(&self.key).fetch_add(1, Ordering::SeqCst);
        self.flights.now.lock().remove(&self.key);
    }
}

impl Flights {
    /// Takes the lead of a key; `None` if another request has it.
    pub fn try_lead(self: &Arc<Self>, key: &[u8]) -> Option<Lead> {
        let mut now = self.now.lock();
        if now.contains_key(key) {
            return None;
        }
        let (done, waits) = watch::channel(());
        now.insert(key.to_vec(), waits);
        Some(Lead {
            flights: Arc::clone(self),
            key: key.to_vec(),
            _done: done,
        })
    }

    /// Returns a number that changes when a fetch of a key ends. Who reads it, finds nothing stored, takes the
    /// lead and reads the same number need not look again.
    pub fn ended(&self, key: &[u8]) -> u32 {
        self.counter(key).load(Ordering::SeqCst)
    }

    fn counter(&self, key: &[u8]) -> &AtomicU32 {
        &self.ended[self.hasher.hash_one(key) as usize % ENDED]
    }

    /// Takes the lead of a key or waits for the leader, at most for `timeout`. With `most` requests waiting
    /// already, the caller asks alone.
    pub async fn join(self: &Arc<Self>, key: &[u8], most: usize, timeout: Duration) -> Joined {
        if self.is_unstorable(key) {
            return Joined::Alone;
        }
        if let Some(lead) = self.try_lead(key) {
            return Joined::Lead(lead);
        }
        match self.wait(key, most, timeout).await {
            Waited::Nothing | Waited::Ended => Joined::Waited,
            Waited::Vainly => Joined::Alone,
        }
    }

    /// Waits for the leader of a key, if there is one, at most for `timeout`. At most `most` requests wait at
    /// once.
    pub async fn wait(&self, key: &[u8], most: usize, timeout: Duration) -> Waited {
        let Some(mut waits) = self.now.lock().get(key).cloned() else {
            return Waited::Nothing;
        };
        let count = Counted(&self.waiting);
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= most {
            return Waited::Vainly;
        }
        let ended = tokio::time::timeout(timeout, waits.changed()).await;
        drop(count);
        if ended.is_ok() {
            Waited::Ended
        } else {
            Waited::Vainly
        }
    }

    /// Returns the number of fetches in progress.
    pub fn len(&self) -> usize {
        self.now.lock().len()
    }

    /// Returns the number of keys that are known to have unstorable responses.
    pub fn unstorable(&self) -> usize {
        self.unstorable.lock().len()
    }

    /// Whether no fetch is in progress.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    fn is_unstorable(&self, key: &[u8]) -> bool {
        let mut unstorable = self.unstorable.lock();
        match unstorable.get(key) {
            Some(since) if since.elapsed() < UNSTORABLE_FOR => true,
            Some(_) => {
                unstorable.pop(key);
                false
            }
            None => false,
        }
    }
}

/// Decrements the counter when dropped, also when the request is cancelled.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(5);

    fn run(work: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        runtime.expect("a runtime").block_on(work);
    }

    #[test]
    fn those_who_wait_go_on_when_the_lead_is_dropped() {
        run(async {
            let flights = Arc::new(Flights::default());
            let Joined::Lead(lead) = flights.join(b"k", 9, LONG).await else {
                panic!("it is the first")
            };
            let other = Arc::clone(&flights);
            let waits =
                tokio::spawn(async move { matches!(other.join(b"k", 9, LONG).await, Joined::Waited) });
            while flights.waiting() == 0 {
                tokio::task::yield_now().await;
            }
            drop(lead);
            assert!(waits.await.expect("it ends"));
            assert_eq!(flights.waiting(), 0);
        });
    }

    #[test]
    fn number_of_a_key_changes_when_its_fetch_ends_and_before_another_may_lead() {
        let flights = Arc::new(Flights::default());
        let before = flights.ended(b"k");
        let lead = flights.try_lead(b"k").expect("it is the first");
        assert_eq!(flights.ended(b"k"), before);
        drop(lead);
        let after = flights.ended(b"k");
        assert_ne!(after, before);
        let _lead = flights.try_lead(b"k").expect("the fetch has ended");
        assert_eq!(flights.ended(b"k"), after);
    }

    #[test]
    fn nobody_waits_beyond_the_bounds_or_for_what_cannot_be_stored() {
        run(async {
            let flights = Arc::new(Flights::default());
            let lead = flights.try_lead(b"k").expect("it is the first");
            assert!(matches!(flights.join(b"k", 0, LONG).await, Joined::Alone));
            assert!(matches!(
                flights.join(b"k", 9, Duration::ZERO).await,
                Joined::Alone
            ));
            lead.unstorable();
            assert!(matches!(flights.join(b"k", 9, LONG).await, Joined::Alone));
            assert!(matches!(flights.join(b"other", 9, LONG).await, Joined::Lead(_)));
        });
    }
}
