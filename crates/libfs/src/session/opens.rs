//! Inodes that this mount has open, across sessions. Knows keys only.

use varve_format::InodeKey;
use varve_media::lock::Mutex;

use crate::hash::KeyMap;

#[derive(Debug, Clone, Copy, Default)]
struct Open {
    count: u64,
    /// Made without a name (O_TMPFILE): `link` may give it its first.
    linkable: bool,
}

/// Open file descriptions by inode.
#[derive(Debug, Default)]
pub(crate) struct Opens {
    table: Mutex<KeyMap<Open>>,
}

impl Opens {
    /// Adds an open.
    pub(crate) fn open(&self, key: InodeKey) {
        self.table.lock().entry(key).or_default().count += 1;
    }

    /// Adds an open, if there is one already.
    pub(crate) fn open_again(&self, key: InodeKey) -> bool {
        match self.table.lock().get_mut(&key) {
            Some(open) => {
                open.count += 1;
                true
            }
            None => false,
        }
    }

    /// Removes an open; `true` if it was the last.
    pub(crate) fn close(&self, key: InodeKey) -> bool {
        let mut table = self.table.lock();
        let Some(open) = table.get_mut(&key) else {
            return false;
        };
        open.count -= 1;
        let last = open.count == 0;
        if last {
            table.remove(&key);
        }
        last
    }

    pub(crate) fn is_open(&self, key: InodeKey) -> bool {
        self.table.lock().contains_key(&key)
    }

    /// Notes whether the open, nameless inode may get a name.
    pub(crate) fn set_linkable(&self, key: InodeKey, linkable: bool) {
        if let Some(open) = self.table.lock().get_mut(&key) {
            open.linkable = linkable;
        }
    }

    pub(crate) fn is_linkable(&self, key: InodeKey) -> bool {
        self.table.lock().get(&key).is_some_and(|open| open.linkable)
    }

    /// Returns the keys of all open inodes, sorted.
    pub(crate) fn keys(&self) -> Vec<InodeKey> {
        let mut keys: Vec<_> = self.table.lock().keys().copied().collect();
        keys.sort_unstable();
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::Opens;
    use varve_format::InodeKey;

    #[test]
    fn last_close_is_told_once() {
        let (opens, key) = (Opens::default(), InodeKey::new(5, 1));
        assert!(!opens.open_again(key));
        opens.open(key);
        assert!(opens.open_again(key));
        assert!(!opens.close(key));
        assert!(opens.is_open(key));
        assert!(opens.close(key));
        assert!(!opens.close(key) && !opens.is_open(key));
    }
}
