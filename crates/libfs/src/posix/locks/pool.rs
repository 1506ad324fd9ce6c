//! This process' part in a pool's locks: the mount that they are on, and the files on which the process
//! itself (not a description) may hold some. Owns the rule that the kernel's descriptors of such a file stay
//! open, since closing any of them drops all its locks; does not know descriptions.
//!
//! Record locks belong to the process, so there is one of these for a pool, however many sessions the process
//! has.

use nix::fcntl::{FcntlArg, fcntl};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use varve_format::InodeKey;
use varve_media::lock::Mutex;

use super::why::NoLocks;
use crate::errno::{Errno, Result};
use crate::mounts::{PoolMount, Table};

/// Name, in a pool's directory, of the directory where `varve up` mounts the pool.
const MNT: &str = "mnt";

/// Pools that this process has sessions of.
static POOLS: Mutex<Vec<Weak<PoolLocks>>> = Mutex::new(Vec::new());

/// The locks of one pool, as far as they concern this process.
pub(in crate::posix) struct PoolLocks {
    /// The process that made it: a child after `fork` has none of its record locks.
    process: u32,
    dir: PathBuf,
    seen: Mutex<Seen>,
    records: Mutex<HashMap<InodeKey, Records>>,
    /// Whether `records` has entries.
    any: AtomicBool,
    /// The last reason that was logged, which is not logged again.
    told: Mutex<Option<NoLocks>>,
}

/// The mount, as read from the table of mounts.
#[derive(Default)]
struct Seen {
    table: Option<Table>,
    mount: Option<std::result::Result<PoolMount, NoLocks>>,
}

/// A file on which the process may hold record locks.
#[derive(Default)]
struct Records {
    /// Number of threads in a call that may take one.
    waiting: usize,
    /// One was taken since the last close of a descriptor of the file.
    held: bool,
    /// The kernel's descriptors that are kept open meanwhile: all through which one may have been taken, and
    /// those that are not needed any more.
    kept: Vec<Arc<OwnedFd>>,
}

impl Records {
    fn keep(&mut self, fd: &Arc<OwnedFd>) {
        if !self.kept.iter().any(|kept| Arc::ptr_eq(kept, fd)) {
            self.kept.push(Arc::clone(fd));
        }
    }
}

impl PoolLocks {
    /// Returns the locks of the pool in `dir`, which is absolute and without symbolic links.
    pub(in crate::posix) fn of(dir: PathBuf) -> Arc<Self> {
        let process = std::process::id();
        let mut pools = POOLS.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        let mut there = pools.iter().filter_map(Weak::upgrade);
        if let Some(found) = there.find(|pool| pool.process == process && pool.dir == dir) {
            return found;
        }
        let pool = Arc::new(Self {
            process,
            dir,
            seen: Mutex::default(),
            records: Mutex::default(),
            any: AtomicBool::new(false),
            told: Mutex::new(None),
        });
        pools.push(Arc::downgrade(&pool));
        pool
    }

    /// Whether this is the process that made it, not a child of it.
    pub(super) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// The mount to lock on.
    pub(super) fn mount(&self) -> std::result::Result<PoolMount, NoLocks> {
        let mut seen = self.seen.lock();
        let Seen { table, mount } = &mut *seen;
        let fresh = table.is_none();
        let unread = |error: std::io::Error| NoLocks::NoTable {
            pool: self.dir.clone(),
            error: error.to_string(),
        };
        let table = match table {
            Some(table) => table,
            none => none.insert(Table::open().map_err(unread)?),
        };
        let stale = fresh || table.has_changed();
        if !stale && let Some(mount) = mount {
            return mount.clone();
        }
        // The kernel reports a change only once.
        let before = mount.take().and_then(std::result::Result::ok);
        let mounts = table.read().map_err(unread)?;
        let chosen = choose(&self.dir, mounts, before.as_ref());
        *mount = Some(chosen.clone());
        chosen
    }

    /// [`mount`](Self::mount), for a call that fails without one.
    pub(super) fn mount_or_tell(&self) -> Result<PoolMount> {
        self.mount().map_err(|why| self.tell(why))
    }

    /// Logs the reason, once, and returns the errno for the call.
    pub(super) fn tell(&self, why: NoLocks) -> Errno {
        let errno = why.errno();
        let mut told = self.told.lock();
        if told.as_ref() != Some(&why) {
            tracing::warn!("{why}");
            *told = Some(why);
        }
        errno
    }

    /// Makes `call`, which may give the process a record lock on `key`, and may wait for it. `fd` is a
    /// descriptor of that file.
    pub(super) fn take_record(
        &self,
        key: InodeKey,
        fd: &Arc<OwnedFd>,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        {
            let mut all = self.records.lock();
            self.any.store(true, Ordering::Release);
            let records = all.entry(key).or_default();
            records.waiting += 1;
            records.keep(fd);
        }
        let result = call();
        let mut all = self.records.lock();
        if let Some(records) = all.get_mut(&key) {
            records.waiting -= 1;
            records.held |= result.is_ok();
            self.forget_unused(&mut all, key);
        }
        result
    }

    /// Handles the close of a descriptor of `key`: drops the record locks that the process has on the file.
    pub(in crate::posix) fn closing(&self, key: InodeKey) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut all = self.records.lock();
        let Some(records) = all.get_mut(&key) else {
            return;
        };
        // A child after `fork` has no record locks, and the kernel would not refuse to drop its parent's.
        for fd in records.kept.iter().filter(|_| self.is_ours()) {
            let _ = fcntl(&**fd, FcntlArg::F_SETLK(&everything()));
        }
        records.held = false;
        self.forget_unused(&mut all, key);
    }

    /// Closes a descriptor of `key`, at once or when the process holds no record locks on it any more.
    pub(super) fn let_go(&self, key: InodeKey, fd: Arc<OwnedFd>) {
        let mut all = self.records.lock();
        match all.get_mut(&key) {
            Some(records) => records.keep(&fd),
            // Under the lock: no thread takes a record lock meanwhile.
            None => drop(fd),
        }
    }

    fn forget_unused(&self, all: &mut HashMap<InodeKey, Records>, key: InodeKey) {
        if all
            .get(&key)
            .is_some_and(|records| records.waiting == 0 && !records.held)
        {
            all.remove(&key);
            self.any.store(!all.is_empty(), Ordering::Release);
        }
    }
}

/// The request that unlocks all of a file.
pub(super) const fn everything() -> libc::flock {
    libc::flock {
        l_type: libc::F_UNLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Chooses the mount of the pool in `dir` to lock on: the one `before`, while it exists; else the one at
/// `mnt` in the pool's directory, else the only one.
fn choose(
    dir: &Path,
    mut mounts: Vec<PoolMount>,
    before: Option<&PoolMount>,
) -> std::result::Result<PoolMount, NoLocks> {
    mounts.retain(|mount| mount.is_whole && mount.pool == dir);
    let pick = |wanted: &dyn Fn(&PoolMount) -> bool| mounts.iter().rfind(|mount| wanted(mount)).cloned();
    let kept = before.and_then(|before| pick(&|mount| mount.device == before.device));
    if let Some(mount) = kept.or_else(|| pick(&|mount| mount.at == dir.join(MNT))) {
        return Ok(mount);
    }
    let pool = dir.to_owned();
    let Some(first) = mounts.first() else {
        return Err(NoLocks::NotMounted { pool });
    };
    if mounts.iter().all(|mount| mount.device == first.device) {
        return Ok(first.clone());
    }
    let at = mounts.into_iter().map(|mount| mount.at).collect();
    Err(NoLocks::Several { pool, at })
}

#[cfg(test)]
mod tests {
    use super::{PoolLocks, choose, everything};
    use crate::errno::{Errno, Result};
    use crate::mounts::PoolMount;
    use crate::posix::NoLocks;
    use nix::fcntl::{FcntlArg, fcntl};
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use varve_format::{Generation, Ino, InodeKey};

    const KEY: InodeKey = InodeKey {
        ino: Ino(77),
        generation: Generation(1),
    };

    fn mount(at: &str, device: u64) -> PoolMount {
        PoolMount {
            at: at.into(),
            pool: "/p".into(),
            device,
            is_whole: true,
            is_read_only: false,
            atime: crate::options::Atime::Relative,
        }
    }

    fn chosen(mounts: &[PoolMount], before: Option<&PoolMount>) -> std::result::Result<String, NoLocks> {
        choose(Path::new("/p"), mounts.to_vec(), before).map(|mount| mount.at.display().to_string())
    }

    #[test]
    fn mount_is_the_pools_own_or_the_only_one_and_is_kept_while_it_is_there() {
        let (own, other, third) = (mount("/p/mnt", 1), mount("/a", 2), mount("/b", 3));
        let foreign = PoolMount {
            pool: "/q".into(),
            ..mount("/q/mnt", 9)
        };
        let part = PoolMount {
            is_whole: false,
            ..mount("/part", 1)
        };
        let none = Err(NoLocks::NotMounted { pool: "/p".into() });
        assert_eq!(chosen(&[], None), none);
        assert_eq!(chosen(&[foreign.clone(), part.clone()], None), none);
        let all = [other.clone(), own.clone(), foreign, part];
        assert_eq!(chosen(&all, None).as_deref(), Ok("/p/mnt"));
        assert_eq!(chosen(std::slice::from_ref(&other), None).as_deref(), Ok("/a"));
        assert_eq!(
            chosen(&all, Some(&other)).as_deref(),
            Ok("/a"),
            "it is there still"
        );
        assert_eq!(chosen(&all, Some(&third)).as_deref(), Ok("/p/mnt"));
        let several = NoLocks::Several {
            pool: "/p".into(),
            at: vec!["/a".into(), "/b".into()],
        };
        assert_eq!(chosen(&[other.clone(), third], None), Err(several));
        // One mount in two places has one set of locks; of two at one place the later one is seen.
        assert_eq!(
            chosen(&[other.clone(), mount("/c", 2)], None).as_deref(),
            Ok("/a")
        );
        let over = choose(Path::new("/p"), vec![own, mount("/p/mnt", 5)], None);
        assert_eq!(over.map(|mount| mount.device), Ok(5));
    }

    /// A file, descriptors of it, and the locks that the process holds on it as other processes see them.
    struct Locked {
        pool: Arc<PoolLocks>,
        file: tempfile::NamedTempFile,
        _dir: tempfile::TempDir,
    }

    impl Locked {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            Self {
                pool: PoolLocks::of(dir.path().to_owned()),
                file: tempfile::NamedTempFile::new().expect("a file"),
                _dir: dir,
            }
        }

        fn fd(&self) -> Arc<OwnedFd> {
            Arc::new(self.file.reopen().expect("it opens").into())
        }

        fn take(&self, fd: &Arc<OwnedFd>) -> Result<()> {
            let whole = libc::flock {
                l_type: libc::F_WRLCK as i16,
                ..everything()
            };
            self.pool.take_record(KEY, fd, || {
                let done = fcntl(&**fd, FcntlArg::F_SETLK(&whole));
                done.map(drop).map_err(|error| Errno(error as i32))
            })
        }

        /// Through the file's own descriptor: a description's locks and its process' locks conflict.
        fn is_held(&self) -> bool {
            let mut asked = libc::flock {
                l_type: libc::F_WRLCK as i16,
                ..everything()
            };
            fcntl(self.file.as_file(), FcntlArg::F_OFD_GETLK(&mut asked)).expect("it answers");
            i32::from(asked.l_type) != libc::F_UNLCK
        }
    }

    #[test]
    fn record_lock_stays_when_the_librarys_descriptors_go_and_goes_when_one_of_the_programs_does() {
        let locked = Locked::new();
        let (first, second) = (locked.fd(), locked.fd());
        locked.take(&first).expect("it is free");
        assert!(locked.is_held());
        locked.pool.let_go(KEY, second);
        locked.pool.let_go(KEY, first);
        assert!(locked.is_held(), "they are kept open");
        locked.pool.closing(InodeKey { ino: Ino(78), ..KEY });
        assert!(locked.is_held(), "of another file");
        locked.pool.closing(KEY);
        assert!(!locked.is_held());
        assert!(
            !locked.pool.any.load(Ordering::Relaxed),
            "closing costs a look again"
        );
        assert!(locked.pool.records.lock().is_empty());
    }

    #[test]
    fn descriptor_is_kept_while_another_thread_waits_for_a_record_lock() {
        let locked = Locked::new();
        let (first, second) = (locked.fd(), locked.fd());
        let waited = locked.pool.take_record(KEY, &first, || {
            locked.pool.let_go(KEY, second);
            locked.pool.closing(KEY);
            assert_eq!(locked.pool.records.lock()[&KEY].kept.len(), 2);
            Err(Errno(libc::EINTR))
        });
        assert_eq!(waited, Err(Errno(libc::EINTR)));
        assert!(locked.pool.records.lock().is_empty(), "nothing was taken");
    }

    #[test]
    fn sessions_of_one_pool_have_the_same_locks() {
        let dir = tempfile::tempdir().expect("a directory");
        let one = PoolLocks::of(dir.path().to_owned());
        assert!(Arc::ptr_eq(&one, &PoolLocks::of(dir.path().to_owned())));
        assert!(!Arc::ptr_eq(&one, &PoolLocks::of(dir.path().join("other"))));
    }
}
