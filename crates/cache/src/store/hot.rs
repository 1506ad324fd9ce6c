//! Objects in memory: hot ones, prefetched ones, and pieces of large ones. They are dropped when the machine
//! runs short of memory (thesis §2.4.3 asks the kernel to take the pages; this module asks the kernel for the
//! available memory). What is larger than one read is kept only at its second use, so that a long download
//! does not drive the small objects out.

use super::object::Record;
use crate::hash::KeyHash;
use bytes::Bytes;
use lru::LruCache;
use std::any::Any;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::{Arc, OnceLock};

/// Bytes of a body that are read and kept at once; a piece begins at a multiple of it.
pub const PIECE_BYTES: u64 = 256 << 10;

/// Returns the end of the piece of a body that `offset` lies in, bytes from the beginning of a body without
/// end.
pub const fn piece_end(offset: u64) -> u64 {
    (offset / PIECE_BYTES + 1) * PIECE_BYTES
}

/// An object in memory: its head, and the content beside the head.
#[derive(Debug)]
pub struct HotObject {
    /// Its head.
    pub record: Record,
    /// Metadata and body, as far as they lie beside the head.
    pub content: Bytes,
    /// The metadata as the caller decodes it; see [`Hit::decoded`](super::Hit::decoded).
    decoded: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl HotObject {
    /// An object that was read.
    pub const fn new(record: Record, content: Bytes) -> Self {
        Self {
            record,
            content,
            decoded: OnceLock::new(),
        }
    }

    /// Returns the metadata as `decode` decodes it, once. `None` if the metadata is not all in memory, if
    /// `decode` refuses it, or if it was decoded to another type before.
    pub fn decoded<T: Any + Send + Sync>(&self, decode: impl FnOnce(&[u8]) -> Option<T>) -> Option<Arc<T>> {
        if let Some(decoded) = self.decoded.get() {
            return Arc::clone(decoded).downcast().ok();
        }
        let decoded = Arc::new(decode(self.content.get(..self.record.head.meta_len as usize)?)?);
        let _ = self
            .decoded
            .set(Arc::clone(&decoded) as Arc<dyn Any + Send + Sync>);
        Some(decoded)
    }

    /// Bytes of memory, with an estimate for the decoded metadata.
    fn cost(&self) -> usize {
        self.content.len() + self.record.key.len() + 2 * self.record.head.meta_len as usize + 256
    }
}

/// A cached thing: the object of a key, or a piece of the body of one of its versions.
#[derive(Debug)]
enum Cached {
    Object(Arc<HotObject>),
    Piece { version: u64, bytes: Bytes },
}

impl Cached {
    fn cost(&self) -> usize {
        match self {
            Self::Object(object) => object.cost(),
            Self::Piece { bytes, .. } => bytes.len() + 128,
        }
    }
}

/// Names an object, or a piece of its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HotKey {
    hash: KeyHash,
    /// Number of the piece, from 1 on; 0 is the object.
    piece: u64,
}

impl HotKey {
    const fn object(hash: KeyHash) -> Self {
        Self { hash, piece: 0 }
    }

    const fn piece(hash: KeyHash, number: u64) -> Self {
        Self {
            hash,
            piece: number + 1,
        }
    }

    /// Bits that nearly always differ for different keys. The hash is keyed, so nobody can aim at them.
    const fn bits(self) -> u64 {
        (self.hash.0 as u64).wrapping_add(self.piece.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
}

impl Hash for HotKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.bits());
    }
}

/// Identity hash of the bits of a [`HotKey`], which come from a keyed hash.
#[derive(Debug, Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        debug_assert!(false, "keys are 64 bits, not {}", bytes.len());
    }

    fn write_u64(&mut self, bits: u64) {
        self.0 = bits;
    }
}

/// Large things whose last use is remembered.
const DOORKEEPER_SLOTS: usize = 4096;

/// Number of insertions between two checks of the machine's available memory.
const LOOK_EVERY: u32 = 256;

/// The most recently used objects and pieces, within a limit in bytes.
#[derive(Debug)]
pub struct Hot {
    cached: LruCache<HotKey, Cached, BuildHasherDefault<IdentityHasher>>,
    /// Fingerprints of large things that were used lately (the doorkeeper of TinyLFU); 0: an empty slot.
    doorkeeper: Box<[u32]>,
    most_bytes: usize,
    bytes: usize,
    since_look: u32,
}

impl Hot {
    /// Room for `most_bytes`; 0 keeps nothing.
    pub fn new(most_bytes: usize) -> Self {
        Self {
            cached: LruCache::unbounded_with_hasher(BuildHasherDefault::default()),
            doorkeeper: vec![0; DOORKEEPER_SLOTS].into(),
            most_bytes,
            bytes: 0,
            since_look: 0,
        }
    }

    /// Number of objects and pieces.
    pub fn len(&self) -> usize {
        self.cached.len()
    }

    /// Bytes in use.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds an object and drops the least recently used ones beyond the limit. An object larger than an
    /// eighth of the limit is not added, and one that has more bytes than those beside its head is added at
    /// its second use.
    pub fn insert(&mut self, hash: KeyHash, object: Arc<HotObject>) {
        let key = HotKey::object(hash);
        if object.record.tail_len() == 0 || self.admits(key) {
            self.add(key, Cached::Object(object));
        }
    }

    /// Adds a piece of a body at its second use, as [`insert`](Self::insert).
    pub fn insert_piece(&mut self, hash: KeyHash, number: u64, version: u64, bytes: Bytes) {
        let key = HotKey::piece(hash, number);
        if self.admits(key) {
            self.add(key, Cached::Piece { version, bytes });
        }
    }

    fn add(&mut self, key: HotKey, new: Cached) {
        if new.cost() > self.most_bytes / 8 {
            return;
        }
        self.bytes += new.cost();
        if let Some((_, old)) = self.cached.push(key, new) {
            self.bytes -= old.cost();
        }
        self.shrink_to(self.most_bytes);
        self.since_look += 1;
        if self.since_look >= LOOK_EVERY {
            self.since_look = 0;
            if memory_is_short() {
                self.shrink_to(self.bytes / 2);
            }
        }
    }

    /// Whether a large thing was used lately, and may be added; notes this use.
    fn admits(&mut self, key: HotKey) -> bool {
        let bits = key.bits();
        let slot = &mut self.doorkeeper[bits as usize % DOORKEEPER_SLOTS];
        // Never 0.
        let fingerprint = (bits >> 32) as u32 | 1;
        std::mem::replace(slot, fingerprint) == fingerprint
    }

    /// Returns the object of a hash; the caller compares keys.
    pub fn get(&mut self, hash: KeyHash) -> Option<Arc<HotObject>> {
        match self.cached.get(&HotKey::object(hash))? {
            Cached::Object(object) => Some(Arc::clone(object)),
            Cached::Piece { .. } => None,
        }
    }

    /// Returns a piece of the body of a version.
    pub fn piece(&mut self, hash: KeyHash, number: u64, version: u64) -> Option<Bytes> {
        match self.cached.get(&HotKey::piece(hash, number))? {
            Cached::Piece { version: of, bytes } if *of == version => Some(bytes.clone()),
            _ => None,
        }
    }

    /// Drops an object. Its pieces are of no use any more, and are evicted as the least recently used.
    pub fn remove(&mut self, hash: KeyHash) {
        if let Some(old) = self.cached.pop(&HotKey::object(hash)) {
            self.bytes -= old.cost();
        }
    }

    /// Drops the least recently used things until at most `bytes` remain.
    pub fn shrink_to(&mut self, bytes: usize) {
        while self.bytes > bytes {
            let Some((_, old)) = self.cached.pop_lru() else {
                return;
            };
            self.bytes -= old.cost();
        }
    }
}

/// Whether less than a sixteenth of the machine's memory is available.
fn memory_is_short() -> bool {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    short_by(&text)
}

fn short_by(meminfo: &str) -> bool {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    match (field("MemTotal:"), field("MemAvailable:")) {
        (Some(total), Some(available)) => available < total / 16,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{Hot, HotObject, short_by};
    use crate::hash::KeyHash;
    use crate::store::object::Record;
    use bytes::Bytes;
    use std::sync::Arc;

    fn object(len: usize) -> Arc<HotObject> {
        let record = Record::new(1, 1, b"k", &[]);
        Arc::new(HotObject::new(record, Bytes::from(vec![0; len])))
    }

    #[test]
    fn hot_objects_stay_within_their_bytes_and_the_least_used_goes() {
        let mut hot = Hot::new(100_000);
        for n in 0..200 {
            hot.insert(KeyHash(n), object(1000));
            assert!(hot.get(KeyHash(0)).is_some(), "it is used all the time");
            assert!(hot.bytes() <= 100_000);
        }
        assert!(hot.get(KeyHash(1)).is_none());
        hot.insert(KeyHash(0), object(500));
        hot.insert(KeyHash(7), object(50_000));
        assert!(hot.get(KeyHash(7)).is_none(), "too large a part of all");
        hot.shrink_to(0);
        assert_eq!(hot.bytes(), 0);
    }

    #[test]
    fn pieces_are_kept_at_their_second_use_for_their_version_only() {
        let mut hot = Hot::new(1 << 20);
        let bytes = Bytes::from_static(b"piece");
        hot.insert_piece(KeyHash(3), 7, 1, bytes.clone());
        assert_eq!((hot.piece(KeyHash(3), 7, 1), hot.bytes()), (None, 0));
        hot.insert_piece(KeyHash(3), 7, 1, bytes.clone());
        assert_eq!(hot.piece(KeyHash(3), 7, 1), Some(bytes.clone()));
        for (hash, number, version) in [(4, 7, 1), (3, 8, 1), (3, 7, 2)] {
            assert_eq!(hot.piece(KeyHash(hash), number, version), None);
        }
        hot.insert_piece(KeyHash(3), 7, 2, bytes.clone());
        assert_eq!(hot.piece(KeyHash(3), 7, 2), Some(bytes));
        assert_eq!(hot.piece(KeyHash(3), 7, 1), None, "its slot was taken");
    }

    #[test]
    fn long_download_does_not_drive_small_objects_out() {
        let mut hot = Hot::new(1 << 20);
        hot.insert(KeyHash(1), object(1000));
        for number in 0..1000 {
            hot.insert_piece(KeyHash(2), number, 1, Bytes::from(vec![0; 60_000]));
        }
        assert!(hot.get(KeyHash(1)).is_some());
    }

    #[test]
    fn metadata_is_decoded_once() {
        let mut record = Record::new(1, 1, b"k", &[]);
        record.head.meta_len = 2;
        let object = HotObject::new(record, Bytes::from_static(b"12body"));
        let number = |meta: &[u8]| std::str::from_utf8(meta).ok()?.parse::<u32>().ok();
        assert_eq!(object.decoded(|_| None::<u32>), None);
        assert_eq!(object.decoded(number).as_deref(), Some(&12));
        assert_eq!(
            object.decoded(|_| -> Option<u32> { unreachable!() }).as_deref(),
            Some(&12)
        );
        assert_eq!(object.decoded(|_| Some("another type")), None);
    }

    #[test]
    fn memory_is_short_when_a_sixteenth_is_left() {
        assert!(short_by("MemTotal: 1600 kB\nMemAvailable: 99 kB\n"));
        assert!(!short_by("MemTotal: 1600 kB\nMemAvailable: 101 kB\n"));
        assert!(!short_by("nothing"));
    }
}
