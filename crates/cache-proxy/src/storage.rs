//! Responses in the cache store. A response without `Vary` is stored under its key. With `Vary`, it is stored
//! under a part of the key, and the key holds the list of at most 16 variants. Bodies above 256 KiB are
//! objects of their own, so that a 304 rewrites only the fields. No memory is used per object.

use crate::config;
use crate::headers;
use crate::key::Key;
use crate::record::{Part, Place, Record, Stored, Variant};
use crate::vary::{self, VARIANTS_MAX};
use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use varve_cache::device::{Device, FileDevice};
use varve_cache::nonblocking::{AsyncCache, Attributes, Upload};
use varve_cache::store::Admission;
use varve_cache::{Cache, Hit, Options, PutOutcome, Scope, StoreError, StorePlan};

/// Largest body that is stored together with its fields, bytes.
const HERE_MAX: u64 = 256 << 10;
/// Most memory of a large body in flight, bytes: the store collects a segment.
const GATHERED_MAX: u64 = 4 << 20;
const LOCKS: usize = 256;
/// Number of invalidation counters. Keys that share a counter sometimes keep each other from being stored, so
/// there are many.
const CHANGES: usize = 1 << 16;
/// Number of the only partial response of a key.
const PART_ID: u64 = 0;

/// The store of responses.
pub struct Storage {
    cache: AsyncCache,
    /// Locks for changes of a key's objects, by hash of the key.
    locks: Vec<Arc<Mutex<()>>>,
    /// Invalidation counters, by hash of the key. A response requested before an invalidation is not stored
    /// after it.
    changes: Vec<AtomicU64>,
    /// Number of purges of whole scopes.
    purges: AtomicU64,
    hasher: RandomState,
    ids: AtomicU64,
    in_flight: Arc<Semaphore>,
}

/// A response that was found.
#[derive(Debug, Clone)]
pub struct Found {
    /// The stored fields.
    pub stored: Stored,
    /// Key of the object with the fields.
    record: Vec<u8>,
    version: u64,
    body: Hit,
}

impl Found {
    /// Returns the number of stored bytes of the body.
    pub fn body_len(&self) -> u64 {
        self.body.body_len()
    }

    /// Returns the length of the whole representation, bytes.
    pub fn whole_len(&self) -> u64 {
        self.stored.part.map_or(self.body_len(), |part| part.whole_len)
    }
}

/// Values of the invalidation counters when a response was requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    change: u64,
    purge: u64,
}

/// Memory that one permit of `in_flight` stands for, bytes.
const PERMIT_BYTES: u64 = 1 << 10;

fn device(path: &Path, settings: &config::Store) -> Result<(FileDevice, bool), StoreError> {
    match settings.create_bytes {
        Some(bytes) if !path.exists() => Ok((FileDevice::create(path, bytes.0)?, true)),
        _ => Ok((FileDevice::open(path)?, false)),
    }
}

/// Opens the store. With `create_bytes`, missing devices are created as files; if all of them are new, the
/// store is formatted.
///
/// # Errors
/// There is no store, devices are missing, or a device failed.
pub fn open_cache(settings: &config::Store) -> Result<Cache, StoreError> {
    let opened = settings.devices.iter().map(|path| device(path, settings));
    let opened = opened.collect::<Result<Vec<_>, _>>()?;
    if opened.iter().all(|(_, is_new)| *is_new) {
        let policy = settings.policy.parse().unwrap_or(varve_cache::Policy::LogLru);
        let devices: Vec<&dyn Device> = opened.iter().map(|(device, _)| device as &dyn Device).collect();
        Cache::format(&devices, &StorePlan::new(policy), false)?;
    }
    let options = Options {
        hot_bytes: usize::try_from(settings.hot_bytes.0).unwrap_or(usize::MAX),
        admission: match settings.admission {
            config::Admission::All => Admission::All,
            config::Admission::SecondRequest => Admission::SecondRequest { window: 1 << 20 },
        },
        ..Options::default()
    };
    let devices = opened
        .into_iter()
        .map(|(device, _)| Arc::new(device) as Arc<dyn Device>)
        .collect();
    let (cache, _) = Cache::open(devices, &options, settings.degraded)?;
    Ok(cache)
}

impl Storage {
    /// Makes the storage over an open cache.
    pub fn new(cache: Cache, workers: NonZeroUsize, in_flight_bytes: u64) -> Self {
        let permits = usize::try_from(in_flight_bytes / PERMIT_BYTES).unwrap_or(usize::MAX);
        Self {
            cache: AsyncCache::new(Arc::new(cache), workers),
            locks: (0..LOCKS).map(|_| Arc::default()).collect(),
            changes: (0..CHANGES).map(|_| AtomicU64::new(0)).collect(),
            purges: AtomicU64::new(0),
            hasher: RandomState::new(),
            ids: AtomicU64::new(0),
            in_flight: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Returns the cache.
    pub const fn cache(&self) -> &Arc<Cache> {
        self.cache.cache()
    }

    /// Returns the memory left for objects in flight, bytes.
    pub fn in_flight_left_bytes(&self) -> u64 {
        self.in_flight.available_permits() as u64 * PERMIT_BYTES
    }

    fn slot(&self, key: &[u8]) -> usize {
        self.hasher.hash_one(key) as usize % LOCKS
    }

    fn change(&self, key: &[u8]) -> &AtomicU64 {
        &self.changes[self.hasher.hash_one(key) as usize % CHANGES]
    }

    /// Returns a number that is unlikely to have been used in this process or an earlier one.
    fn new_id(&self) -> u64 {
        self.hasher
            .hash_one((self.ids.fetch_add(1, Ordering::Relaxed), headers::now_ms()))
            | 1
    }

    /// Returns the present counters of a key; to be read before the origin is asked.
    pub fn turn(&self, key: &Key) -> Turn {
        Turn {
            change: self.change(key.bytes()).load(Ordering::SeqCst),
            purge: self.purges.load(Ordering::SeqCst),
        }
    }

    async fn record(&self, key: Vec<u8>) -> Option<(Hit, Record)> {
        self.cache
            .run(move |cache| {
                let hit = cache.get(&key)?;
                let record = Record::decode(&hit.meta().ok()?)?;
                Some((hit, record))
            })
            .await
    }

    async fn found(&self, key: &Key, at: Vec<u8>, hit: Hit, stored: Stored) -> Option<Found> {
        let version = hit.version();
        let body = match stored.place {
            Place::Here => hit,
            Place::Apart { id, len } => {
                let part = key.part('b', id);
                let body = self.cache.run(move |cache| cache.get(&part)).await?;
                (body.body_len() == len).then_some(body)?
            }
        };
        // The record is read from the medium: check that the part ends within the whole.
        let fits = stored.part.is_none_or(|part| {
            body.body_len() > 0
                && part
                    .start
                    .checked_add(body.body_len())
                    .is_some_and(|end| end <= part.whole_len)
        });
        fits.then_some(Found {
            stored,
            record: at,
            version,
            body,
        })
    }

    /// Looks up the complete response for a request, fresh or not.
    pub async fn lookup(&self, key: &Key, request: &HeaderMap) -> Option<Found> {
        if !key.fits() {
            return None;
        }
        let at = key.bytes().to_vec();
        match self.record(at.clone()).await? {
            (hit, Record::Response(stored)) if stored.part.is_none() => {
                self.found(key, at, hit, stored).await
            }
            (_, Record::Variants(variants)) => {
                let chosen = variants
                    .iter()
                    .find(|variant| vary::matches(&variant.selecting, request))?;
                let at = key.part('v', chosen.id);
                match self.record(at.clone()).await? {
                    (hit, Record::Response(stored)) if stored.part.is_none() => {
                        self.found(key, at, hit, stored).await
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Looks up the partial response of a key.
    pub async fn lookup_part(&self, key: &Key) -> Option<Found> {
        if !key.fits() {
            return None;
        }
        let at = key.part('p', PART_ID);
        match self.record(at.clone()).await? {
            (hit, Record::Response(stored)) if stored.part.is_some() => {
                self.found(key, at, hit, stored).await
            }
            _ => None,
        }
    }

    /// Reads bytes of a response that was found.
    ///
    /// # Errors
    /// The bytes are gone, or the device failed.
    pub async fn read(&self, found: &Found, start: u64, end: u64) -> Result<Bytes, StoreError> {
        let body = found.body.clone();
        self.cache
            .run(move |_| body.read(start..end))
            .await
            .map(Bytes::from)
    }

    /// Begins to store a response of `len` bytes, or of an unknown length up to `unknown_max`. `None` if the
    /// memory for objects in flight is used up, or the fields or the key are too large.
    pub async fn begin(
        self: &Arc<Self>,
        key: &Key,
        request: &HeaderMap,
        stored: Stored,
        len: Option<u64>,
        unknown_max: u64,
        turn: Turn,
    ) -> Option<Sink> {
        if !key.fits() || !stored.fits() {
            return None;
        }
        let memory = len
            .unwrap_or(unknown_max)
            .min(if len.is_some() { GATHERED_MAX } else { u64::MAX });
        let permits = u32::try_from(memory.div_ceil(PERMIT_BYTES).max(1)).ok()?;
        let permit = Arc::clone(&self.in_flight).try_acquire_many_owned(permits).ok()?;
        let selecting = vary::selecting(request, &stored.headers);
        let attributes = attributes(key, &stored.headers);
        let (bytes, apart) = match len {
            Some(len) if len > HERE_MAX => {
                let id = self.new_id();
                let upload = self
                    .cache
                    .put_stream(key.part('b', id), len, attributes.clone())
                    .await
                    .ok()??;
                (Vec::new(), Some((upload, id, len)))
            }
            len => (Vec::with_capacity(usize::try_from(len.unwrap_or(0)).ok()?), None),
        };
        Some(Sink {
            storage: Arc::clone(self),
            key: key.clone(),
            stored,
            selecting,
            attributes,
            turn,
            bytes,
            most: len.unwrap_or(unknown_max),
            apart,
            _permit: permit,
        })
    }

    async fn put(&self, key: Vec<u8>, body: Vec<u8>, record: &Record, attributes: &Attributes) -> bool {
        let attributes = Attributes {
            meta: record.encode(),
            ..attributes.clone()
        };
        matches!(
            self.cache.put(key, body, attributes).await,
            Ok(PutOutcome::Stored { .. })
        )
    }

    /// Rewrites the fields of a response that was found, unless another one has replaced it.
    pub async fn update(&self, key: &Key, found: &Found, stored: Stored) -> bool {
        if !stored.fits() {
            return false;
        }
        let _lock = self.locks[self.slot(key.bytes())].lock().await;
        match self.record(found.record.clone()).await {
            Some((hit, Record::Response(_))) if hit.version() == found.version => {}
            _ => return false,
        }
        let body = match stored.place {
            Place::Here => match self.read(found, 0, found.body_len()).await {
                Ok(body) => body.to_vec(),
                Err(_) => return false,
            },
            Place::Apart { .. } => Vec::new(),
        };
        let attributes = attributes(key, &stored.headers);
        self.put(found.record.clone(), body, &Record::Response(stored), &attributes)
            .await
    }

    /// Removes all responses of a key. Responses requested before are not stored afterwards.
    pub async fn remove(&self, key: &Key) -> Result<(), StoreError> {
        if !key.fits() {
            return Ok(());
        }
        self.change(key.bytes()).fetch_add(1, Ordering::SeqCst);
        let _lock = self.locks[self.slot(key.bytes())].lock().await;
        let (whole, part) = (key.bytes().to_vec(), key.part('p', PART_ID));
        self.cache
            .run(move |cache| {
                // Removing an absent key could remove another one with the same index signature.
                let mut there = [whole, part].into_iter().filter(|key| cache.get(key).is_some());
                there.try_for_each(|key| cache.remove(&key))
            })
            .await
    }

    /// Removes all responses in a scope. Durable when this returns.
    ///
    /// # Errors
    /// A device failed; a prefix is too long.
    pub async fn purge(&self, what: Purge) -> Result<(), StoreError> {
        if let Purge::Key(key) = &what {
            self.remove(key).await?;
            self.remove(&key.clone().forward()).await?;
            return self.cache.run(Cache::flush).await;
        }
        self.purges.fetch_add(1, Ordering::SeqCst);
        // A task that checked the counter before the increment holds its lock until it has put its object, so
        // the purge below covers that object.
        for lock in &self.locks {
            drop(lock.lock().await);
        }
        self.cache
            .run(move |cache| match &what {
                Purge::Key(_) => Ok(()),
                Purge::Tag(tag) => cache.purge(Scope::Tag(tag.as_bytes())),
                Purge::Host(host) => cache.purge(Scope::Host(host.as_bytes())),
                Purge::Prefix(prefix) => cache.purge(Scope::Prefix(prefix.as_bytes())),
                Purge::Everything => cache.purge(Scope::Everything),
            })
            .await
    }
}

/// The scope of a purge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purge {
    /// All responses of a URL.
    Key(Key),
    /// Responses whose `Cache-Tag` or `Surrogate-Key` names this tag.
    Tag(String),
    /// Responses of a host; its port is part of the name unless it is the scheme's default.
    Host(String),
    /// Responses whose URL starts with this.
    Prefix(String),
    /// All responses.
    Everything,
}

fn attributes(key: &Key, response: &HeaderMap) -> Attributes {
    let mut tags: Vec<Vec<u8>> = headers::list(response, &HeaderName::from_static("cache-tag"))
        .chain(
            headers::list(response, &HeaderName::from_static("surrogate-key"))
                .flat_map(str::split_ascii_whitespace),
        )
        .filter(|tag| tag.len() <= 256)
        .map(|tag| tag.as_bytes().to_vec())
        .collect();
    tags.truncate(16);
    Attributes {
        meta: Vec::new(),
        tags,
        host: Some(key.host().as_bytes().to_vec()),
        expires_s: 0,
    }
}

/// A response that is being stored. Dropping it before `finish` discards it.
pub struct Sink {
    storage: Arc<Storage>,
    key: Key,
    stored: Stored,
    selecting: vary::Selecting,
    attributes: Attributes,
    turn: Turn,
    bytes: Vec<u8>,
    most: u64,
    apart: Option<(Upload, u64, u64)>,
    _permit: OwnedSemaphorePermit,
}

impl Sink {
    /// Whether the whole body is collected in memory, so that the client does not wait for the device.
    pub const fn is_gathered(&self) -> bool {
        self.apart.is_none()
    }

    /// Appends bytes. Returns false if there are too many or the device failed; the sink must be dropped
    /// then.
    pub async fn write(&mut self, bytes: &Bytes) -> bool {
        match &mut self.apart {
            Some((upload, _, _)) => upload.write(bytes.to_vec()).await.is_ok(),
            None if self.bytes.len() as u64 + bytes.len() as u64 > self.most => false,
            None => {
                self.bytes.extend_from_slice(bytes);
                true
            }
        }
    }

    /// Stores the response. Returns false if it was invalidated meanwhile, not admitted, or the device
    /// failed.
    pub async fn finish(self) -> bool {
        let Self {
            storage,
            key,
            mut stored,
            selecting,
            attributes,
            turn,
            bytes,
            apart,
            ..
        } = self;
        let mut bytes = bytes;
        if let Some((upload, id, len)) = apart {
            if !matches!(upload.finish().await, Ok(PutOutcome::Stored { .. })) {
                return false;
            }
            stored.place = Place::Apart { id, len };
        } else if bytes.len() as u64 > HERE_MAX {
            let (id, len) = (storage.new_id(), bytes.len() as u64);
            let body = std::mem::take(&mut bytes);
            let outcome = storage
                .cache
                .put(key.part('b', id), body, attributes.clone())
                .await;
            if !matches!(outcome, Ok(PutOutcome::Stored { .. })) {
                return false;
            }
            stored.place = Place::Apart { id, len };
        } else {
            stored.place = Place::Here;
        }
        let _lock = storage.locks[storage.slot(key.bytes())].lock().await;
        if storage.turn(&key) != turn {
            return false;
        }
        let is_part = stored.part.is_some();
        let record = Record::Response(stored);
        if is_part {
            return storage
                .put(key.part('p', PART_ID), bytes, &record, &attributes)
                .await;
        }
        if selecting.is_empty() {
            return storage
                .put(key.bytes().to_vec(), bytes, &record, &attributes)
                .await;
        }
        let variant = Variant {
            id: storage.new_id(),
            selecting,
        };
        if !storage
            .put(key.part('v', variant.id), bytes, &record, &attributes)
            .await
        {
            return false;
        }
        let mut variants = match storage.record(key.bytes().to_vec()).await {
            Some((_, Record::Variants(variants))) => variants,
            _ => Vec::new(),
        };
        variants.retain(|old| old.selecting != variant.selecting);
        variants.insert(0, variant);
        variants.truncate(VARIANTS_MAX);
        let list = Attributes {
            tags: Vec::new(),
            ..attributes
        };
        storage
            .put(
                key.bytes().to_vec(),
                Vec::new(),
                &Record::Variants(variants),
                &list,
            )
            .await
    }
}

/// Returns the part in a response with status 206, if its `Content-Range` fits its length.
pub fn part_of(response: &HeaderMap, len: Option<u64>) -> Option<Part> {
    let (range, whole_len) = crate::ranges::content_range(response)?;
    let fits = len == Some(range.end - range.start);
    fits.then_some(Part {
        start: range.start,
        whole_len,
    })
}
