//! The cache for programs on tokio (feature `tokio`). A call that memory answers is answered in line; every
//! other call runs on a blocking thread, and at most a configured number of calls run at once. Further calls
//! wait without a thread, which gives back-pressure. A slow reader holds no thread between pieces. Changes
//! take at most half of the threads, since they wait for each other in the store: lookups must not wait
//! behind them. Owns no state of the cache.
//!
//! [`AsyncCache::find`] and [`AsyncCache::bytes`] are the two places that choose between the two ways.

use crate::{Cache, Hit, MemoryLookup, PutOptions, PutOutcome, PutStream, StoreError};
use bytes::Bytes;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

pub use crate::store::{PIECE_BYTES, piece_end};

/// A cache whose calls may be awaited. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AsyncCache {
    cache: Arc<Cache>,
    free: Arc<Semaphore>,
    /// Changes that may run at once.
    changes: Arc<Semaphore>,
    workers: usize,
    /// The runtime whose threads do the work, unless it is that of the caller.
    runtime: Option<Handle>,
}

/// [`PutOptions`] in owned form, for calls that run on another thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Metadata, given back with the object.
    pub meta: Vec<u8>,
    /// Tags by which it can be purged.
    pub tags: Vec<Vec<u8>>,
    /// A host by which it can be purged.
    pub host: Option<Vec<u8>>,
    /// Expiry, seconds since 1970; 0: never.
    pub expires_s: u64,
}

impl Attributes {
    fn with<T>(&self, work: impl FnOnce(PutOptions<'_>) -> T) -> T {
        let tags: Vec<&[u8]> = self.tags.iter().map(Vec::as_slice).collect();
        work(PutOptions {
            meta: &self.meta,
            tags: &tags,
            host: self.host.as_deref(),
            expires_s: self.expires_s,
        })
    }
}

impl AsyncCache {
    /// Runs at most `workers` calls at once; choose the number that the devices serve well together. Within a
    /// runtime, that one's threads run all of them, also for callers on others: with threads of each runtime
    /// there would be a multiple of `workers`, each with its share of the allocator's memory. That runtime
    /// has to live as long as the cache is used.
    pub fn new(cache: Arc<Cache>, workers: NonZeroUsize) -> Self {
        let workers = workers.get().min(Semaphore::MAX_PERMITS);
        Self {
            cache,
            free: Arc::new(Semaphore::new(workers)),
            changes: Arc::new(Semaphore::new((workers / 2).max(1))),
            workers,
            runtime: Handle::try_current().ok(),
        }
    }

    /// The cache itself, for calls that do not wait for devices.
    pub const fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// Number of running calls.
    pub fn running(&self) -> usize {
        self.workers - self.free.available_permits()
    }

    /// Runs any work that changes the cache when a worker is free, but never on more than half of them: a
    /// purge, a flush, a group of related objects. Work that has begun completes even if its future is
    /// dropped.
    ///
    /// # Panics
    /// Outside of a tokio runtime; where `work` panics.
    pub async fn change<T: Send + 'static>(&self, work: impl FnOnce(&Cache) -> T + Send + 'static) -> T {
        let permit = Arc::clone(&self.changes).acquire_owned().await;
        let permit = permit.expect("nobody closes it");
        self.run(move |cache| {
            let done = work(cache);
            drop(permit);
            done
        })
        .await
    }

    /// Runs any work that only reads when a worker is free, as [`change`](Self::change).
    ///
    /// # Panics
    /// Outside of a tokio runtime; where `work` panics.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce(&Cache) -> T + Send + 'static) -> T {
        let permit = Arc::clone(&self.free).acquire_owned().await;
        let permit = permit.expect("nobody closes it");
        let cache = Arc::clone(&self.cache);
        let work = move || {
            let done = work(&cache);
            drop(permit);
            done
        };
        let done = match &self.runtime {
            Some(runtime) => runtime.spawn_blocking(work),
            None => tokio::task::spawn_blocking(work),
        };
        match done.await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime shuts down, and the awaiting task with it.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Looks an object up, as [`Cache::get`]: in line where that needs no device.
    pub async fn find(&self, key: &[u8]) -> Option<Hit> {
        match self.cache.get_in_memory(key) {
            MemoryLookup::Hit(hit) => Some(hit),
            MemoryLookup::Miss => None,
            MemoryLookup::NeedsDevice => {
                let key = key.to_vec();
                self.run(move |cache| cache.get(&key)).await
            }
        }
    }

    /// Bytes of the body of an object, as [`Hit::bytes`]: in line if they are in memory.
    ///
    /// # Errors
    /// As [`Hit::read`].
    pub async fn bytes(&self, hit: &Hit, range: Range<u64>) -> Result<Bytes, StoreError> {
        if let Some(bytes) = hit.bytes_in_memory(range.clone()) {
            return Ok(bytes);
        }
        let hit = hit.clone();
        self.run(move |_| hit.bytes(range)).await
    }

    /// Looks an object up, as [`find`](Self::find).
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Option<Object> {
        let hit = self.find(key.as_ref()).await?;
        Some(Object {
            hit,
            pool: self.clone(),
        })
    }

    /// Puts an object, as [`Cache::put`].
    ///
    /// # Errors
    /// `TooLong`.
    pub async fn put(
        &self,
        key: impl Into<Vec<u8>>,
        body: impl Into<Bytes>,
        attributes: Attributes,
    ) -> Result<PutOutcome, StoreError> {
        let (key, body) = (key.into(), body.into());
        self.change(move |cache| attributes.with(|options| cache.put(&key, &body, options)))
            .await
    }

    /// Begins to put an object of `body_len` bytes, as [`Cache::put_stream`].
    ///
    /// # Errors
    /// `TooLong`.
    pub async fn put_stream(
        &self,
        key: impl Into<Vec<u8>>,
        body_len: u64,
        attributes: Attributes,
    ) -> Result<Option<Upload>, StoreError> {
        let key = key.into();
        let begun = self
            .change(move |cache| attributes.with(|options| cache.put_stream(&key, body_len, options)))
            .await?;
        Ok(begun.map(|stream| Upload {
            stream: Some(stream),
            pool: self.clone(),
        }))
    }

    /// Removes an object, as [`Cache::remove`].
    ///
    /// # Errors
    /// The device failed.
    pub async fn delete(&self, key: impl Into<Vec<u8>>) -> Result<(), StoreError> {
        let key = key.into();
        self.change(move |cache| cache.remove(&key)).await
    }
}

/// An object that was found.
#[derive(Debug, Clone)]
pub struct Object {
    hit: Hit,
    pool: AsyncCache,
}

impl Object {
    /// The object's head, which is in memory.
    pub const fn hit(&self) -> &Hit {
        &self.hit
    }

    /// Bytes of the body, as [`AsyncCache::bytes`].
    ///
    /// # Errors
    /// As [`Hit::read`].
    pub async fn read(&self, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.pool.bytes(&self.hit, range).await
    }

    /// The body, or a range of it, piece by piece.
    pub fn body(self, range: Range<u64>) -> Body {
        Body { object: self, range }
    }

    /// The whole body, piece by piece.
    pub fn whole(self) -> Body {
        let len = self.hit.body_len();
        self.body(0..len)
    }
}

/// A body that is being read. Nothing is pinned for it: a read returns `Gone` if the log overwrites the body
/// before the reader reaches the end.
#[derive(Debug)]
pub struct Body {
    object: Object,
    range: Range<u64>,
}

impl Body {
    /// Bytes not yet read.
    pub const fn left(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    /// Returns the next piece, which ends at a multiple of [`PIECE_BYTES`] at the latest; `None` at the end.
    /// A cancelled call consumes nothing.
    ///
    /// # Errors
    /// As [`Hit::read`].
    pub async fn next(&mut self) -> Option<Result<Bytes, StoreError>> {
        if self.left() == 0 {
            return None;
        }
        let end = self.range.end.min(piece_end(self.range.start));
        let piece = self.object.read(self.range.start..end).await;
        if piece.is_ok() {
            self.range.start = end;
        }
        Some(piece)
    }
}

/// An object that is being put piece by piece. It is discarded if it is dropped before
/// [`finish`](Self::finish) or one of its writes is cancelled.
pub struct Upload {
    /// `None` after a call was cancelled while it ran.
    stream: Option<PutStream>,
    pool: AsyncCache,
}

impl Upload {
    /// Takes the next bytes of the body. A sender that awaits it before it reads the next piece from its
    /// source is slowed down to the device's speed.
    ///
    /// # Errors
    /// `Length`, when the bytes exceed the declared length; `Gone`, after a cancelled call.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), StoreError> {
        let bytes = bytes.into();
        let mut stream = self.stream.take().ok_or(StoreError::Gone)?;
        let (stream, done) = self
            .pool
            .change(move |_| {
                let done = stream.write(&bytes);
                (stream, done)
            })
            .await;
        self.stream = Some(stream);
        done
    }

    /// Puts the object after all its bytes were written.
    ///
    /// # Errors
    /// `Length`, when there are fewer bytes than declared; `Gone`, after a cancelled call.
    pub async fn finish(mut self) -> Result<PutOutcome, StoreError> {
        let stream = self.stream.take().ok_or(StoreError::Gone)?;
        self.pool.change(move |_| stream.finish()).await
    }
}
