//! Storing a response: gathering its body or passing it on to the store piece by piece, and entering it under
//! its key, as a variant, or as a part beside others.

use super::{GATHERED_MAX, HERE_MAX, Hold, PARTS_ID, PERMIT_BYTES, Storage, Turn, attributes};
use crate::headers;
use crate::key::Key;
use crate::parts::{self, Span, Spans};
use crate::ranges;
use crate::record::{Parts, Place, Record, Stored, Variant};
use crate::vary::{self, VARIANTS_MAX};
use bytes::Bytes;
use http::HeaderMap;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use varve_cache::PutOutcome;
use varve_cache::nonblocking::{Attributes, Upload};

/// The bytes that a partial response has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Offset of its first byte.
    pub start: u64,
    /// Length of the whole representation.
    pub whole_len: u64,
}

/// Returns the part in a response with status 206, if its `Content-Range` fits its length.
pub fn part_of(response: &HeaderMap, len: Option<u64>) -> Option<Part> {
    let (range, whole_len) = ranges::content_range(response)?;
    let fits = len == Some(range.end - range.start);
    fits.then_some(Part {
        start: range.start,
        whole_len,
    })
}

/// Memory of a response in flight beside its body: fields, key, task; bytes.
const FIELDS_BYTES: u64 = 4 << 10;

/// A response to store.
#[derive(Debug)]
pub struct Taken<'a> {
    /// Its key.
    pub key: &'a Key,
    /// The request's fields.
    pub request: &'a HeaderMap,
    /// Status, fields and times.
    pub stored: Stored,
    /// The part of the representation that the body is, if it is not the whole.
    pub part: Option<Part>,
    /// Bytes of the body, if the origin said so.
    pub len: Option<u64>,
    /// Most bytes of a body of unknown length.
    pub unknown_max: u64,
    /// Counters when it was requested.
    pub turn: Turn,
    /// Its group, if the object may wait for others of its page.
    pub group: Option<u64>,
}

/// A response that is being stored. Dropping it before `finish` discards it.
pub struct Sink {
    storage: Arc<Storage>,
    key: Key,
    stored: Stored,
    part: Option<Part>,
    selecting: vary::Selecting,
    attributes: Attributes,
    turn: Turn,
    group: Option<u64>,
    bytes: Vec<u8>,
    most: u64,
    apart: Option<(Upload, u64, u64)>,
    _permit: OwnedSemaphorePermit,
}

impl Storage {
    /// Begins to store a response. `None` if the memory for objects in flight is used up, or the fields or
    /// the key are too large.
    pub async fn begin(self: &Arc<Self>, taken: Taken<'_>) -> Option<Sink> {
        let Taken {
            key,
            request,
            mut stored,
            part,
            len,
            unknown_max,
            turn,
            group,
        } = taken;
        if !key.fits() || !stored.fits() {
            return None;
        }
        let memory = len
            .unwrap_or(unknown_max)
            .min(if len.is_some() { GATHERED_MAX } else { u64::MAX });
        let permits = u32::try_from((memory + FIELDS_BYTES).div_ceil(PERMIT_BYTES)).ok()?;
        let permit = Arc::clone(&self.in_flight).try_acquire_many_owned(permits).ok()?;
        stored.headers = headers::unshared(&stored.headers);
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
            part,
            selecting,
            attributes,
            turn,
            group,
            bytes,
            most: len.unwrap_or(unknown_max),
            apart,
            _permit: permit,
        })
    }
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
            Some((upload, _, _)) => upload.write(bytes.clone()).await.is_ok(),
            None if self.bytes.len() as u64 + bytes.len() as u64 > self.most => false,
            None => {
                self.bytes.extend_from_slice(bytes);
                true
            }
        }
    }

    /// Stores the response. Returns false if it was invalidated meanwhile, not admitted, or the device
    /// failed.
    pub async fn finish(mut self) -> bool {
        let Some(place) = self.put_body().await else {
            return false;
        };
        self.stored.place = place;
        let lock = Arc::clone(&self.storage.locks[self.storage.slot(self.key.bytes())]);
        let _lock = lock.lock().await;
        if self.storage.turn(&self.key) != self.turn {
            return false;
        }
        match (self.part, self.selecting.is_empty()) {
            (Some(part), _) => self.put_part(part).await,
            (None, true) => {
                let hold = self.hold();
                let record = Record::Response(Arc::new(self.stored));
                self.storage
                    .put(
                        self.key.bytes().to_vec(),
                        self.bytes,
                        record,
                        &self.attributes,
                        hold,
                    )
                    .await
            }
            (None, false) => self.put_variant().await,
        }
    }

    fn hold(&self) -> Option<Hold> {
        self.group.map(|group| Hold {
            group,
            main: self.key.clone(),
            turn: self.turn,
        })
    }

    /// Puts a body that does not lie with its fields: a large one, or a part. `None` if the store did not
    /// take it.
    async fn put_body(&mut self) -> Option<Place> {
        let (id, len, outcome) = if let Some((upload, id, len)) = self.apart.take() {
            (id, len, upload.finish().await)
        } else if self.bytes.len() as u64 > HERE_MAX || self.part.is_some() {
            let (id, len) = (self.storage.new_id(), self.bytes.len() as u64);
            let (at, body) = (self.key.part('b', id), std::mem::take(&mut self.bytes));
            let put = self.storage.cache.put(at, body, self.attributes.clone());
            (id, len, put.await)
        } else {
            return Some(Place::Here);
        };
        matches!(outcome, Ok(PutOutcome::Stored { .. })).then_some(Place::Apart { id, len })
    }

    async fn put_variant(self) -> bool {
        let hold = self.hold();
        let Self {
            storage,
            key,
            stored,
            selecting,
            attributes,
            bytes,
            ..
        } = self;
        let variant = Variant {
            id: storage.new_id(),
            selecting,
        };
        let (at, record) = (key.part('v', variant.id), Record::Response(Arc::new(stored)));
        if !storage.put(at, bytes, record, &attributes, hold.clone()).await {
            return false;
        }
        let mut variants = match storage.record(key.bytes()).await {
            Some((_, Record::Variants(variants))) => variants,
            _ => Vec::new(),
        };
        variants.retain(|old| old.selecting != variant.selecting);
        variants.insert(0, variant);
        variants.truncate(VARIANTS_MAX);
        let list = Attributes {
            tags: attributes
                .tags
                .iter()
                .filter(|tag| **tag == key.url_tag())
                .cloned()
                .collect(),
            ..attributes
        };
        let (at, record) = (key.bytes().to_vec(), Record::Variants(variants));
        storage.put(at, Bytes::new(), record, &list, hold).await
    }

    /// Enters a part in the list of its key. Parts of another representation are dropped from it. When the
    /// parts are the whole, the list becomes the response of the key.
    async fn put_part(self, part: Part) -> bool {
        let Self {
            storage,
            key,
            stored,
            attributes,
            ..
        } = self;
        let Place::Apart { id, len } = stored.place else {
            return false;
        };
        let new = Span {
            start: part.start,
            len,
            id,
        };
        let at = key.part('p', PARTS_ID);
        let old = match storage.record(&at).await {
            Some((_, Record::Parts(old))) => Some(old),
            _ => None,
        };
        let had_list = old.is_some();
        let joins = |old: &Parts| {
            old.whole_len == part.whole_len && parts::are_of_one(&old.stored.headers, &stored.headers)
        };
        let mut spans = old.filter(joins).map_or_else(Spans::default, |old| old.spans);
        // The origin was asked though this span covers the new one: it was stale, or the log has taken it.
        while let Some(covers) = spans.covering(&new) {
            if storage.body(&key, covers.id, covers.len).await.is_some() {
                break;
            }
            spans.remove(covers.id);
        }
        spans.add(new);
        let is_whole = spans.cover(&(0..part.whole_len));
        let list = Record::Parts(Parts {
            stored,
            whole_len: part.whole_len,
            spans,
        });
        if !is_whole {
            return storage.put(at, Bytes::new(), list, &attributes, None).await;
        }
        let main = key.bytes().to_vec();
        if !storage.put(main, Bytes::new(), list, &attributes, None).await {
            return false;
        }
        if had_list && let Err(error) = storage.cache.delete(at).await {
            tracing::warn!(key = key.text(), %error, "the store failed to remove a list of parts");
        }
        true
    }
}
