//! The objects behind handles. Knows numbers and objects; nothing of C.

use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use varve_cache::{Cache, Hit, PutStream};
use varve_embed::PoolHere;
use varve_far_alloc::FarAlloc;
use varve_ipc::DirEntry;
use varve_libfs::Posix;
use varve_libfs::posix::PosixTransaction;

/// A connected pool.
pub(crate) struct Session {
    pub(crate) posix: Posix,
    /// The pool's daemon, if it runs in this process.
    pub(crate) here: Mutex<Option<PoolHere>>,
}

/// An open directory.
pub(crate) struct Dir {
    pub(crate) session: Arc<Session>,
    pub(crate) key: varve_format::InodeKey,
    pub(crate) at: Mutex<DirAt>,
}

/// Position of a read through a directory.
#[derive(Default)]
pub(crate) struct DirAt {
    pub(crate) cookie: u64,
    pub(crate) page: std::collections::VecDeque<DirEntry>,
    pub(crate) end: bool,
}

/// A transaction that is being assembled.
pub(crate) struct Group {
    pub(crate) session: Arc<Session>,
    pub(crate) calls: Mutex<PosixTransaction>,
}

/// Objects by handle number. A number is never used twice.
pub(crate) struct Handles<T> {
    next: AtomicUsize,
    objects: RwLock<Option<HashMap<usize, Arc<T>>>>,
}

/// Distance between the numbers of one kind, so that kinds share no number. Numbers begin high enough not to
/// look like small integers.
const STEP: usize = 16;
const FIRST: usize = 1 << 20;

impl<T> Handles<T> {
    /// Makes the handles of a kind; `kind` is below [`STEP`] and used once.
    const fn new(kind: usize) -> Self {
        Self {
            next: AtomicUsize::new(FIRST + kind),
            objects: RwLock::new(None),
        }
    }

    pub(crate) fn add(&self, object: T) -> usize {
        let number = self.next.fetch_add(STEP, Ordering::Relaxed);
        let mut objects = self.objects.write();
        objects.get_or_insert_default().insert(number, Arc::new(object));
        number
    }

    /// Returns the object of a handle: `EINVAL` for 0, `EBADF` for an unknown number.
    pub(crate) fn get(&self, number: usize) -> Result<Arc<T>, i32> {
        let objects = self.objects.read();
        let found = objects.as_ref().and_then(|objects| objects.get(&number));
        found.cloned().ok_or(missing(number))
    }

    pub(crate) fn take(&self, number: usize) -> Result<Arc<T>, i32> {
        let taken = self
            .objects
            .write()
            .as_mut()
            .and_then(|objects| objects.remove(&number));
        taken.ok_or(missing(number))
    }
}

const fn missing(number: usize) -> i32 {
    if number == 0 { libc::EINVAL } else { libc::EBADF }
}

pub(crate) static SESSIONS: Handles<Session> = Handles::new(1);
pub(crate) static DIRS: Handles<Dir> = Handles::new(2);
pub(crate) static GROUPS: Handles<Group> = Handles::new(3);
pub(crate) static CACHES: Handles<Cache> = Handles::new(4);
pub(crate) static CACHE_HITS: Handles<Hit> = Handles::new(5);
/// `None` if the stream was ended while another thread was using it.
pub(crate) static CACHE_STREAMS: Handles<Mutex<Option<PutStream>>> = Handles::new(6);
pub(crate) static ALLOCS: Handles<FarAlloc> = Handles::new(7);

#[cfg(test)]
mod tests {
    use super::Handles;

    #[test]
    fn number_is_good_until_it_is_taken_and_never_again() {
        let handles = Handles::new(15);
        let number = handles.add("one");
        assert_eq!(handles.get(number).map(|object| *object), Ok("one"));
        assert_eq!(handles.get(0).err(), Some(libc::EINVAL));
        assert_eq!(handles.get(number + 1).err(), Some(libc::EBADF));
        assert!(handles.take(number).is_ok());
        assert_eq!(handles.get(number).err(), Some(libc::EBADF));
        assert_eq!(handles.take(number).err(), Some(libc::EBADF));
        assert_ne!(handles.add("two"), number);
    }
}
