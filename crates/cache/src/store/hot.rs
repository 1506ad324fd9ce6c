//! Objects in memory: hot ones and prefetched ones. They are dropped when the machine runs short of memory
//! (thesis §2.4.3 asks the kernel to take the pages; this module asks the kernel for the available memory).

use super::object::Record;
use crate::hash::KeyHash;
use lru::LruCache;
use std::sync::Arc;

/// A whole object in memory.
#[derive(Debug)]
pub struct HotObject {
    /// Its head.
    pub record: Record,
    /// Metadata and body.
    pub content: Vec<u8>,
}

impl HotObject {
    fn cost(&self) -> usize {
        self.content.len() + self.record.key.len() + 256
    }
}

/// Number of insertions between two checks of the machine's available memory.
const LOOK_EVERY: u32 = 256;

/// The most recently used objects, within a limit in bytes.
#[derive(Debug)]
pub struct Hot {
    objects: LruCache<KeyHash, Arc<HotObject>>,
    most_bytes: usize,
    bytes: usize,
    since_look: u32,
}

impl Hot {
    /// Room for `most_bytes`; 0 keeps nothing.
    pub fn new(most_bytes: usize) -> Self {
        Self {
            objects: LruCache::unbounded(),
            most_bytes,
            bytes: 0,
            since_look: 0,
        }
    }

    /// Bytes in use.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds an object and drops the least recently used ones beyond the limit. An object larger than an
    /// eighth of the limit is not added.
    pub fn insert(&mut self, hash: KeyHash, object: Arc<HotObject>) {
        if object.cost() > self.most_bytes / 8 {
            return;
        }
        self.bytes += object.cost();
        if let Some((_, old)) = self.objects.push(hash, object) {
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

    /// Returns the object of a hash; the caller compares keys.
    pub fn get(&mut self, hash: KeyHash) -> Option<Arc<HotObject>> {
        self.objects.get(&hash).cloned()
    }

    /// Drops an object.
    pub fn remove(&mut self, hash: KeyHash) {
        if let Some(old) = self.objects.pop(&hash) {
            self.bytes -= old.cost();
        }
    }

    /// Drops the least recently used objects until at most `bytes` remain.
    pub fn shrink_to(&mut self, bytes: usize) {
        while self.bytes > bytes {
            let Some((_, old)) = self.objects.pop_lru() else {
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
    use std::sync::Arc;

    fn object(len: usize) -> Arc<HotObject> {
        Arc::new(HotObject {
            record: Record::new(1, 1, b"k", &[]),
            content: vec![0; len],
        })
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
    fn memory_is_short_when_a_sixteenth_is_left() {
        assert!(short_by("MemTotal: 1600 kB\nMemAvailable: 99 kB\n"));
        assert!(!short_by("MemTotal: 1600 kB\nMemAvailable: 101 kB\n"));
        assert!(!short_by("nothing"));
    }
}
