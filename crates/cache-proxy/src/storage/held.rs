//! Objects that wait for others of their page, so that all are written side by side and one read returns them
//! (HashCache, §2.3.5 and §2.4.2: same client, same Referer, small time window). They are served from here
//! meanwhile. Bounded in bytes and in time. Knows no store.

use super::Turn;
use crate::key::Key;
use crate::record::Record;
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_cache::nonblocking::Attributes;

/// Most bytes of all objects that wait. The windows shrink as half of it fills, so that groups are written
/// earlier, not torn: an object that finds no room is written alone, and a lookup of it brings no others.
const BYTES_MAX: usize = 16 << 20;
/// Most bytes of a group: what one read returns. An index entry has room for 255 blocks of 4 KiB at least.
const GROUP_BYTES_MAX: usize = 512 << 10;
/// Most bytes of an object that may wait: larger ones gain little, and the store reads them in frames.
const OBJECT_BYTES_MAX: usize = 48 << 10;
/// A group is written after this many windows at the latest.
const WINDOWS_MAX: u32 = 4;

/// The group that an object belongs to, and the URL that may invalidate it.
#[derive(Debug, Clone)]
pub struct Hold {
    /// Hash of client and page.
    pub group: u64,
    /// Key of the URL.
    pub main: Key,
    /// Counters when the response was requested.
    pub turn: Turn,
}

/// An object that waits.
#[derive(Debug)]
pub struct Object {
    /// Its key in the store.
    pub key: Vec<u8>,
    /// Its body.
    pub body: Bytes,
    /// Its metadata.
    pub record: Record,
    /// Its tags and host.
    pub attributes: Attributes,
    /// Its group.
    pub hold: Hold,
    /// Distinct from the versions of the store.
    pub version: u64,
}

impl Object {
    fn cost(&self) -> usize {
        self.body.len() + self.key.len() + self.attributes.meta.len() + 512
    }
}

struct Group {
    begun: Instant,
    latest: Instant,
    bytes: usize,
    members: Vec<Arc<Object>>,
}

#[derive(Default)]
struct Inner {
    objects: HashMap<Vec<u8>, Arc<Object>>,
    groups: HashMap<u64, Group>,
    /// Groups that are full.
    full: Vec<Group>,
    /// Of all members of groups, replaced ones included, until their group is written.
    bytes: usize,
    count: u64,
}

/// All objects that wait.
#[derive(Default)]
pub struct Held(Mutex<Inner>);

impl Held {
    /// Adds an object in place of an older one of its key. Returns it if there is no room.
    ///
    /// # Errors
    /// The object itself.
    pub fn add(&self, mut object: Box<Object>) -> Result<(), Box<Object>> {
        let cost = object.cost();
        let mut inner = self.0.lock();
        if object.body.len() > OBJECT_BYTES_MAX || inner.bytes + cost > BYTES_MAX {
            return Err(object);
        }
        let now = Instant::now();
        inner.count += 1;
        object.version = inner.count | 1 << 63;
        let object: Arc<Object> = Arc::from(object);
        let number = object.hold.group;
        inner.bytes += cost;
        inner.objects.insert(object.key.clone(), Arc::clone(&object));
        let group = inner.groups.entry(number).or_insert_with(|| Group {
            begun: now,
            latest: now,
            bytes: 0,
            members: Vec::new(),
        });
        group.latest = now;
        group.bytes += cost;
        group.members.push(object);
        if group.bytes >= GROUP_BYTES_MAX
            && let Some(group) = inner.groups.remove(&number)
        {
            inner.full.push(group);
        }
        Ok(())
    }

    /// Returns the object of a key.
    pub fn get(&self, key: &[u8]) -> Option<Arc<Object>> {
        self.0.lock().objects.get(key).cloned()
    }

    /// Drops the object of a key: it was replaced or removed.
    pub fn drop_key(&self, key: &[u8]) {
        self.0.lock().objects.remove(key);
    }

    /// Takes the groups whose window is over, or all of them; the fuller the memory for what waits, the
    /// shorter the window. Their objects stay visible until [`written`](Self::written).
    pub fn due(&self, window: Duration, all: bool) -> Vec<Vec<Arc<Object>>> {
        let now = Instant::now();
        let mut inner = self.0.lock();
        let room = (BYTES_MAX / 2).saturating_sub(inner.bytes);
        let window = window.mul_f64(room as f64 / (BYTES_MAX / 2) as f64);
        let is_due =
            |group: &Group| all || now - group.latest >= window || now - group.begun >= window * WINDOWS_MAX;
        let numbers: Vec<u64> = inner
            .groups
            .iter()
            .filter(|(_, group)| is_due(group))
            .map(|(number, _)| *number)
            .collect();
        let mut due = std::mem::take(&mut inner.full);
        due.extend(numbers.iter().filter_map(|number| inner.groups.remove(number)));
        due.into_iter().map(|group| group.members).collect()
    }

    /// Whether this very object still waits: it was not replaced or removed.
    pub fn is_current(&self, object: &Arc<Object>) -> bool {
        let inner = self.0.lock();
        inner
            .objects
            .get(&object.key)
            .is_some_and(|now| Arc::ptr_eq(now, object))
    }

    /// Ends a group that [`due`](Self::due) gave: its objects are in the store, or of no use.
    pub fn written(&self, members: &[Arc<Object>]) {
        let mut inner = self.0.lock();
        for member in members {
            inner.bytes -= member.cost();
            let is_same = inner
                .objects
                .get(&member.key)
                .is_some_and(|now| Arc::ptr_eq(now, member));
            if is_same {
                inner.objects.remove(&member.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{BYTES_MAX, Held, Hold, Object, Turn};
    use crate::key::Key;
    use crate::record::Record;
    use bytes::Bytes;
    use std::time::Duration;
    use varve_cache::nonblocking::Attributes;

    const WINDOW: Duration = Duration::from_secs(3600);
    const BODY_BYTES: usize = 40_000;

    fn object(group: u64, number: usize) -> Box<Object> {
        let main = Key::of_url(&format!("http://site.test/{group}/{number}")).unwrap();
        Box::new(Object {
            key: main.bytes().to_vec(),
            body: Bytes::from(vec![7; BODY_BYTES]),
            record: Record::Variants(Vec::new()),
            attributes: Attributes::default(),
            hold: Hold {
                group,
                main,
                turn: Turn { change: 0, purge: 0 },
            },
            version: 0,
        })
    }

    #[test]
    fn groups_are_due_before_their_window_ends_when_half_of_the_room_is_taken() {
        let held = Held::default();
        for n in 0..4 {
            held.add(object(1, n)).unwrap();
        }
        assert!(
            held.due(WINDOW, false).is_empty(),
            "there is room, and an hour left"
        );
        for n in 0..BYTES_MAX / 2 / BODY_BYTES {
            held.add(object(2 + n as u64 / 8, n)).unwrap();
        }
        let due = held.due(WINDOW, false);
        let first = due.iter().find(|members| members[0].hold.group == 1).unwrap();
        assert_eq!(first.len(), 4, "a group is written whole");
        due.iter().for_each(|members| held.written(members));
        held.add(object(1, 9)).unwrap();
        assert!(held.due(WINDOW, false).is_empty(), "there is room again");
    }

    #[test]
    fn objects_find_room_when_groups_are_taken_as_often_as_they_come() {
        let held = Held::default();
        let mut refused = 0;
        for page in 0..400 {
            for n in 0..16 {
                refused += usize::from(held.add(object(page, n)).is_err());
            }
            for members in held.due(WINDOW, false) {
                held.written(&members);
            }
        }
        assert_eq!(refused, 0, "256 MB came, 16 MB fit");
    }
}
