//! What is found out about the machine once in a process.

use std::sync::atomic::{AtomicU8, Ordering};

/// A small number that is the same whoever finds it. Unlike with a `OnceLock`, threads that need it at once each
/// find it: a child that was forked meanwhile would wait for ever for a thread of its parent.
#[derive(Debug)]
pub(crate) struct Found(AtomicU8);

impl Found {
    const NOT_YET: u8 = u8::MAX;

    pub(crate) const fn new() -> Self {
        Self(AtomicU8::new(Self::NOT_YET))
    }

    /// The number; found by `find`, below 255, at first.
    pub(crate) fn get(&self, find: impl FnOnce() -> u8) -> u8 {
        // The number is all there is to see.
        let known = self.0.load(Ordering::Relaxed);
        if known != Self::NOT_YET {
            return known;
        }
        let found = find();
        debug_assert_ne!(found, Self::NOT_YET);
        self.0.store(found, Ordering::Relaxed);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::Found;

    #[test]
    fn a_number_is_found_once_and_nobody_waits_for_it() {
        static FOUND: Found = Found::new();
        // Somebody finds it while this one does.
        let found = FOUND.get(|| FOUND.get(|| 7));
        assert_eq!((found, FOUND.get(|| unreachable!())), (7, 7));
    }
}
