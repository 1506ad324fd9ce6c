//! Responses in the cache store. A response without `Vary` is stored under its key. With `Vary`, it is stored
//! under a part of the key, and the key holds the list of at most 16 variants. Bodies above 256 KiB are
//! objects of their own, so that a 304 rewrites only the fields. Parts of a response are objects of their
//! own, and a list names them; when they are the whole, the list takes the key. No memory is used per object
//! that is stored; small objects of a page wait a moment for each other (`held`).

mod held;
mod sink;

pub use held::Hold;
pub use sink::{Part, Sink, Taken, part_of};

use crate::config;
use crate::headers;
use crate::key::Key;
use crate::parts;
use crate::record::{Parts, Place, Record, Stored};
use crate::vary;
use bytes::Bytes;
use held::{Held, Object};
use http::{HeaderMap, HeaderName};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use varve_cache::aside::IndexPlace;
use varve_cache::device::{Device, FileDevice};
use varve_cache::nonblocking::{AsyncCache, Attributes};
pub use varve_cache::store::piece_end;
use varve_cache::store::{Admission, TAGS_MAX};
use varve_cache::{Cache, Hit, Options, PutOptions, PutOutcome, Related, Scope, StoreError, StorePlan};

/// Largest body that is stored together with its fields, bytes.
const HERE_MAX: u64 = 256 << 10;
/// Most memory of a large body in flight, bytes: the store collects a segment.
const GATHERED_MAX: u64 = 4 << 20;
const LOCKS: usize = 256;
/// Number of invalidation counters. Keys that share a counter sometimes keep each other from being stored, so
/// there are many.
const CHANGES: usize = 1 << 16;
/// Number of the list of the parts of a key's response.
const PARTS_ID: u64 = 0;

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
    /// All permits of `in_flight`.
    permits: usize,
    /// Held while groups are written: a call that writes all of them waits for those in progress.
    writing: Mutex<()>,
    /// Objects that wait for others of their page; none unless the store reads groups at once.
    held: Held,
    groups: bool,
}

/// Where the bytes of an object are.
#[derive(Debug, Clone)]
enum Source {
    Stored(Hit),
    Held(Arc<Object>),
}

impl Source {
    fn version(&self) -> u64 {
        match self {
            Self::Stored(hit) => hit.version(),
            Self::Held(object) => object.version,
        }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Stored(hit) => hit.body_len(),
            Self::Held(object) => object.body.len() as u64,
        }
    }
}

/// Bytes of a representation that are there.
#[derive(Debug, Clone)]
struct Piece {
    start: u64,
    from: Source,
}

/// A response that was found.
#[derive(Debug, Clone)]
pub struct Found {
    /// The stored fields.
    pub stored: Arc<Stored>,
    whole_len: u64,
    /// The list of parts, if the response is stored in parts.
    parts: Option<Parts>,
    /// Key of the object with the fields.
    record: Vec<u8>,
    version: u64,
    /// The parts of the body that are stored, in order of start.
    pieces: Vec<Piece>,
}

impl Found {
    /// Returns the length of the whole representation, bytes.
    pub const fn whole_len(&self) -> u64 {
        self.whole_len
    }

    fn cut(&self, range: &Range<u64>) -> Option<Vec<(usize, Range<u64>)>> {
        let spans = self.pieces.iter();
        parts::cut(
            spans.map(|piece| piece.start..piece.start.saturating_add(piece.from.len())),
            range,
        )
    }

    /// The whole body, if it is one piece with all bytes of a range, and the range within it.
    fn only_piece(&self, range: &Range<u64>) -> Option<(&Piece, Range<u64>)> {
        let [piece] = self.pieces.as_slice() else {
            return None;
        };
        let start = range.start.checked_sub(piece.start)?;
        let end = range.end.checked_sub(piece.start)?;
        (start <= end && end <= piece.from.len()).then_some((piece, start..end))
    }

    /// Whether all bytes of a range are there.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        self.only_piece(range).is_some() || self.cut(range).is_some()
    }

    /// Whether the whole representation is there.
    pub fn is_whole(&self) -> bool {
        self.covers(&(0..self.whole_len))
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
        let longest = devices.iter().map(|device| device.len_bytes()).max().unwrap_or(0);
        let mut plan = StorePlan::new(policy).with_room(longest);
        plan.aside = settings.pin;
        plan.object_bytes = settings.object_bytes.map_or(plan.object_bytes, |bytes| bytes.0);
        Cache::format(&devices, &plan, false)?;
    }
    let options = Options {
        hot_bytes: usize::try_from(settings.hot_bytes.0).unwrap_or(usize::MAX),
        admission: match settings.admission {
            config::Admission::All => Admission::All,
            config::Admission::SecondRequest => Admission::SecondRequest { window: 1 << 20 },
        },
        order_transfers: settings.order_transfers,
        ..Options::default()
    };
    let devices = opened
        .into_iter()
        .map(|(device, _)| Arc::new(device) as Arc<dyn Device>)
        .collect();
    let (cache, _) = Cache::open(devices, &options, settings.degraded)?;
    for shard in cache.shards().filter(|shard| shard.layout().aside != 0) {
        if let Some(place) = IndexPlace::of(Path::new(&shard.device_name()), shard.layout()) {
            tracing::info!("index on disk: {place}");
        }
    }
    Ok(cache)
}

impl Storage {
    /// Makes the storage over an open cache.
    pub fn new(cache: Cache, workers: NonZeroUsize, in_flight_bytes: u64) -> Self {
        let permits = usize::try_from(in_flight_bytes / PERMIT_BYTES).unwrap_or(usize::MAX);
        let permits = permits.min(Semaphore::MAX_PERMITS);
        let groups = cache
            .shards()
            .any(|shard| shard.layout().shape().policy().prefetches());
        Self {
            held: Held::default(),
            groups,
            cache: AsyncCache::new(Arc::new(cache), workers),
            locks: (0..LOCKS).map(|_| Arc::default()).collect(),
            changes: (0..CHANGES).map(|_| AtomicU64::new(0)).collect(),
            purges: AtomicU64::new(0),
            hasher: RandomState::new(),
            ids: AtomicU64::new(0),
            in_flight: Arc::new(Semaphore::new(permits)),
            permits,
            writing: Mutex::default(),
        }
    }

    /// Returns the cache.
    pub const fn cache(&self) -> &Arc<Cache> {
        self.cache.cache()
    }

    /// Waits until all responses that are being stored are stored or discarded: a client may have its answer
    /// before.
    pub async fn drain(&self) {
        const POLL: Duration = Duration::from_millis(5);
        while self.in_flight.available_permits() < self.permits {
            tokio::time::sleep(POLL).await;
        }
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

    /// Returns the number of a group: the client, and the page that it loads.
    pub fn group(&self, client: IpAddr, page: &str) -> Option<u64> {
        self.groups.then(|| self.hasher.hash_one((client, page)))
    }

    /// Looks up the object of a key. Its record is decoded once for as long as the object stays in memory.
    async fn record(&self, key: &[u8]) -> Option<(Source, Record)> {
        if let Some(object) = self.held(key) {
            let record = object.record.clone();
            return Some((Source::Held(object), record));
        }
        let hit = self.cache.find(key).await?;
        let record = match hit.decoded(Record::decode) {
            Some(record) => Record::clone(&record),
            // More metadata than lies beside the head, or damage.
            None => {
                let hit = hit.clone();
                let meta = self.cache.run(move |_| hit.meta()).await;
                Record::decode(&meta.ok()?)?
            }
        };
        Some((Source::Stored(hit), record))
    }

    /// Returns the object of a key that waits for its group, unless it was invalidated.
    fn held(&self, key: &[u8]) -> Option<Arc<Object>> {
        let object = self.groups.then(|| self.held.get(key))??;
        (self.turn(&object.hold.main) == object.hold.turn).then_some(object)
    }

    /// Looks up the object with a body, or a part of it, of `len` bytes.
    async fn body(&self, key: &Key, id: u64, len: u64) -> Option<Hit> {
        let hit = self.cache.find(&key.part('b', id)).await?;
        (hit.body_len() == len).then_some(hit)
    }

    async fn found(&self, key: &Key, at: Vec<u8>, source: Source, record: Record) -> Option<Found> {
        let version = source.version();
        match record {
            Record::Response(stored) => {
                let from = match stored.place {
                    Place::Here => source,
                    Place::Apart { id, len } => Source::Stored(self.body(key, id, len).await?),
                };
                Some(Found {
                    whole_len: from.len(),
                    parts: None,
                    record: at,
                    version,
                    pieces: vec![Piece { start: 0, from }],
                    stored,
                })
            }
            Record::Parts(parts) => {
                let mut pieces = Vec::new();
                for span in parts.spans.iter() {
                    // Parts that the log has overwritten are left out.
                    if let Some(hit) = self.body(key, span.id, span.len).await {
                        let (start, from) = (span.start, Source::Stored(hit));
                        pieces.push(Piece { start, from });
                    }
                }
                Some(Found {
                    stored: Arc::new(parts.stored.clone()),
                    whole_len: parts.whole_len,
                    parts: Some(parts),
                    record: at,
                    version,
                    pieces,
                })
            }
            Record::Variants(_) => None,
        }
    }

    /// Looks up the response for a request, fresh or not. It is whole, unless a part of it was overwritten.
    pub async fn lookup(&self, key: &Key, request: &HeaderMap) -> Option<Found> {
        if !key.fits() {
            return None;
        }
        let at = key.bytes().to_vec();
        match self.record(&at).await? {
            (_, Record::Variants(variants)) => {
                let chosen = variants
                    .iter()
                    .find(|variant| vary::matches(&variant.selecting, request))?;
                let at = key.part('v', chosen.id);
                let (source, record) = self.record(&at).await?;
                self.found(key, at, source, record).await
            }
            (source, record) => self.found(key, at, source, record).await,
        }
    }

    /// Looks up the parts of a key's response.
    pub async fn lookup_parts(&self, key: &Key) -> Option<Found> {
        if !key.fits() {
            return None;
        }
        let at = key.part('p', PARTS_ID);
        let (source, record) = self.record(&at).await?;
        self.found(key, at, source, record).await
    }

    /// Reads bytes of a response that was found.
    ///
    /// # Errors
    /// The bytes are not there or gone, or the device failed.
    pub async fn read(&self, found: &Found, range: Range<u64>) -> Result<Bytes, StoreError> {
        if let Some((piece, range)) = found.only_piece(&range) {
            return self.read_from(&piece.from, range).await;
        }
        let mut all = Vec::new();
        for (n, Range { start, end }) in found.cut(&range).ok_or(StoreError::Gone)? {
            let piece = &found.pieces[n];
            let bytes = self
                .read_from(&piece.from, start - piece.start..end - piece.start)
                .await?;
            all.extend_from_slice(&bytes);
        }
        Ok(all.into())
    }

    async fn read_from(&self, source: &Source, range: Range<u64>) -> Result<Bytes, StoreError> {
        match source {
            Source::Held(object) => Ok(object.body.slice(range.start as usize..range.end as usize)),
            Source::Stored(hit) => self.cache.bytes(hit, range).await,
        }
    }

    /// Puts an object; with `hold` it may wait for others of its group.
    async fn put(
        &self,
        key: Vec<u8>,
        body: impl Into<Bytes>,
        record: Record,
        attributes: &Attributes,
        hold: Option<Hold>,
    ) -> bool {
        let mut body = body.into();
        let mut attributes = Attributes {
            meta: record.encode(),
            ..attributes.clone()
        };
        let mut key = key;
        if self.groups {
            let Some(hold) = hold else {
                self.held.drop_key(&key);
                return self.put_now(key, body, attributes).await;
            };
            let object = Box::new(Object {
                key,
                body,
                record,
                attributes,
                hold,
                version: 0,
            });
            match self.held.add(object) {
                Ok(()) => return true,
                Err(back) => (key, body, attributes) = (back.key, back.body, back.attributes),
            }
            self.held.drop_key(&key);
        }
        self.put_now(key, body, attributes).await
    }

    async fn put_now(&self, key: Vec<u8>, body: Bytes, attributes: Attributes) -> bool {
        matches!(
            self.cache.put(key, body, attributes).await,
            Ok(PutOutcome::Stored { .. })
        )
    }

    /// Writes the groups whose window is over, or all of them; each side by side.
    pub async fn write_groups(&self, window: Duration, all: bool) {
        if !self.groups {
            return;
        }
        let _writing = self.writing.lock().await;
        for members in self.held.due(window, all) {
            let mut slots: Vec<usize> = members
                .iter()
                .map(|object| self.slot(object.hold.main.bytes()))
                .collect();
            slots.sort_unstable();
            slots.dedup();
            // Several locks are taken in this order.
            let mut locks = Vec::new();
            for slot in slots {
                locks.push(self.locks[slot].lock().await);
            }
            let current = |object: &&Arc<Object>| {
                self.held.is_current(object) && self.turn(&object.hold.main) == object.hold.turn
            };
            let group: Vec<Arc<Object>> = members.iter().filter(current).cloned().collect();
            if !group.is_empty() {
                self.cache.change(move |cache| put_group(cache, &group)).await;
            }
            self.held.written(&members);
        }
    }

    /// Rewrites the fields of a response that was found, unless another one has replaced it or the memory for
    /// objects in flight is used up.
    pub async fn update(&self, key: &Key, found: &Found) -> bool {
        let stored = Arc::clone(&found.stored);
        let memory = match stored.place {
            Place::Here if found.parts.is_none() => found.whole_len,
            _ => 0,
        };
        let permits = u32::try_from(memory.div_ceil(PERMIT_BYTES).max(1)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.in_flight).try_acquire_many_owned(permits);
        let (true, Ok(_permit)) = (stored.fits(), permit) else {
            return false;
        };
        let _lock = self.locks[self.slot(key.bytes())].lock().await;
        match self.record(&found.record).await {
            Some((source, _)) if source.version() == found.version => {}
            _ => return false,
        }
        let attributes = attributes(key, &stored.headers);
        let (body, record) = match (&found.parts, stored.place) {
            (Some(parts), _) => {
                let parts = Parts {
                    stored: Stored::clone(&stored),
                    ..parts.clone()
                };
                (Bytes::new(), Record::Parts(parts))
            }
            (None, Place::Here) => match self.read(found, 0..found.whole_len).await {
                Ok(body) => (body, Record::Response(stored)),
                Err(_) => return false,
            },
            (None, Place::Apart { .. }) => (Bytes::new(), Record::Response(stored)),
        };
        self.put(found.record.clone(), body, record, &attributes, None)
            .await
    }

    /// Removes all responses of a key. Responses requested before are not stored afterwards.
    pub async fn remove(&self, key: &Key) -> Result<(), StoreError> {
        if !key.fits() {
            return Ok(());
        }
        self.change(key.bytes()).fetch_add(1, Ordering::SeqCst);
        let _lock = self.locks[self.slot(key.bytes())].lock().await;
        let (whole, part) = (key.bytes().to_vec(), key.part('p', PARTS_ID));
        self.held.drop_key(&whole);
        self.cache
            .change(move |cache| {
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
        if let Purge::Key(key) | Purge::KeyWithFields(key) = &what {
            self.remove(key).await?;
            self.remove(&key.clone().forward()).await?;
        }
        if matches!(what, Purge::Key(_)) {
            return self.cache.change(Cache::flush).await;
        }
        self.purges.fetch_add(1, Ordering::SeqCst);
        // A task that checked the counter before the increment holds its lock until it has put its object, so
        // the purge below covers that object.
        for lock in &self.locks {
            drop(lock.lock().await);
        }
        self.cache
            .change(move |cache| match &what {
                Purge::Key(_) => Ok(()),
                // Durable for the plain key too: a purge flushes the store.
                Purge::KeyWithFields(key) => cache.purge(Scope::Tag(&key.url_tag())),
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
    /// All responses of a URL that have no request fields in their keys.
    Key(Key),
    /// All responses of a URL, whatever request fields are part of their keys. Takes one of the store's
    /// places for purges.
    KeyWithFields(Key),
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
    let own = key.has_fields().then(|| key.url_tag());
    let given = headers::list(response, &HeaderName::from_static("cache-tag"))
        .chain(
            headers::list(response, &HeaderName::from_static("surrogate-key"))
                .flat_map(str::split_ascii_whitespace),
        )
        .filter(|tag| tag.len() <= 256)
        .map(|tag| tag.as_bytes().to_vec());
    // The host takes the place of a tag.
    let tags = own.into_iter().chain(given).take(TAGS_MAX - 1).collect();
    Attributes {
        meta: Vec::new(),
        tags,
        host: Some(key.host().as_bytes().to_vec()),
        expires_s: 0,
    }
}

fn put_group(cache: &Cache, group: &[Arc<Object>]) {
    let tags: Vec<Vec<&[u8]>> = group
        .iter()
        .map(|object| object.attributes.tags.iter().map(Vec::as_slice).collect())
        .collect();
    let related: Vec<Related<'_>> = group
        .iter()
        .zip(&tags)
        .map(|(object, tags)| Related {
            key: &object.key,
            body: &object.body,
            options: PutOptions {
                meta: &object.attributes.meta,
                tags,
                host: object.attributes.host.as_deref(),
                expires_s: object.attributes.expires_s,
            },
        })
        .collect();
    if let Err(error) = cache.put_related(&related) {
        tracing::warn!(%error, "a group of objects was not stored");
    }
}
