//! A kernel above a mount: its page cache and its cache of names and sizes, as Linux' FUSE keeps them
//! (`libfs::lease::above` states the assumptions). Programs of the mount call it; it calls the mount as the
//! shim does, and drops the pages that the mount invalidates. Owns pages, their locks, and expiry times;
//! refuses to know leases, and the length of a timeout.

use crate::turns::Turns;
use crate::wire::RigClock;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;
use varve_format::InodeKey;
use varve_ipc::{Clock, Cred};
use varve_libfs::{CacheObserver, CachedReply, Errno, Fs, KernelCall, OpenFile, PageUse, ReplyVersion};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Time between two attempts to take a lock.
const LOOK: Duration = Duration::from_millis(5);
/// Marks a buffered write in progress, which excludes others. Writes past the pages run concurrently.
const BUFFERED: u32 = u32::MAX;
/// Longest time that a program needs to run on after its reply was sent, as the mount assumes.
const LATE_MS: u64 = 250;
/// Most turns of others at a point where another thread may run.
const BETWEEN_MAX: u64 = 12;

type Page = Box<[u8; PAGE_BYTES]>;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Locked {
    #[default]
    No,
    Read,
    Write,
}

struct Cached {
    locked: Locked,
    up_to_date: bool,
    bytes: Page,
}

impl Default for Cached {
    fn default() -> Self {
        Self {
            locked: Locked::No,
            up_to_date: false,
            bytes: Box::new([0; PAGE_BYTES]),
        }
    }
}

#[derive(Default)]
struct Caches {
    pages: BTreeMap<(InodeKey, u64), Cached>,
    /// Cached sizes, with their expiry.
    sizes: BTreeMap<InodeKey, Option<(u64, u64)>>,
    /// Cached names in the root: the size of the file (`None`: there is no such file), and the expiry.
    names: BTreeMap<&'static str, Option<(Option<u64>, u64)>>,
    /// The program of each thread, and the calls of the thread so far.
    programs: HashMap<ThreadId, (u32, u32)>,
    /// Programs in a call.
    calling: BTreeSet<u32>,
    /// The inodes' locks: the number of writes past the pages in progress, or [`BUFFERED`].
    writes: BTreeMap<InodeKey, u32>,
}

/// A simulated kernel. See the module.
pub struct Kernel {
    turns: Arc<Turns>,
    clock: Arc<RigClock>,
    caches: Mutex<Caches>,
    orders: AtomicU64,
    /// Reads answered from the cache.
    pub hits: AtomicU64,
    /// Pages dropped at the mount's request.
    pub dropped: AtomicU64,
}

impl Kernel {
    /// A kernel with empty caches.
    #[must_use]
    pub fn new(turns: &Arc<Turns>, clock: &Arc<RigClock>) -> Self {
        Self {
            turns: Arc::clone(turns),
            clock: Arc::clone(clock),
            caches: Mutex::default(),
            orders: AtomicU64::new(1),
            hits: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Caches> {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A point at which another thread may run.
    fn between(&self) {
        let turns = self.turns.draw(BETWEEN_MAX);
        self.turns.step_aside(turns);
    }

    fn call(&self, usage: PageUse, offset: u64, len: usize) -> KernelCall {
        let order = self.orders.fetch_add(1, Ordering::Relaxed);
        self.between();
        KernelCall::new(usage, order, offset, len).by_clock(&*self.clock)
    }

    /// Waits until the page is not locked, then calls `then`.
    fn when_unlocked<T>(&self, place: (InodeKey, u64), then: impl FnOnce(&mut Caches) -> T) -> T {
        loop {
            let mut caches = self.lock();
            if caches
                .pages
                .get(&place)
                .is_none_or(|page| page.locked == Locked::No)
            {
                return then(&mut caches);
            }
            drop(caches);
            self.turns.pause(LOOK);
        }
    }

    fn lock_inode(&self, key: InodeKey, buffered: bool) {
        loop {
            let mut caches = self.lock();
            let writes = caches.writes.entry(key).or_default();
            if buffered && *writes == 0 {
                *writes = BUFFERED;
                return;
            }
            if !buffered && *writes != BUFFERED {
                *writes += 1;
                return;
            }
            drop(caches);
            self.turns.pause(LOOK);
        }
    }

    fn unlock_inode(&self, key: InodeKey) {
        if let Some(writes) = self.lock().writes.get_mut(&key) {
            *writes = if *writes == BUFFERED { 0 } else { *writes - 1 };
        }
        self.turns.tell(|| format!("a write of {key} is over"));
    }

    fn unlock(&self, place: (InodeKey, u64), change: impl FnOnce(&mut Cached)) {
        if let Some(page) = self.lock().pages.get_mut(&place) {
            page.locked = Locked::No;
            change(page);
        }
        self.turns.tell(|| format!("page {place:?} is unlocked"));
    }

    /// Eight bytes of a page, read through the cache.
    ///
    /// # Errors
    /// The mount's error.
    pub fn read_word(&self, file: &OpenFile, page: u64, at: usize) -> Result<u64, Errno> {
        let place = (file.key(), page);
        let hit = self.when_unlocked(place, |caches| {
            let cached = caches.pages.entry(place).or_default();
            if cached.up_to_date {
                return Some(word(&cached.bytes, at));
            }
            cached.locked = Locked::Read;
            None
        });
        if let Some(word) = hit {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(word);
        }
        let offset = page * PAGE_BYTES as u64;
        let call = self.call(PageUse::Read, offset, PAGE_BYTES);
        let mut bytes = Box::new([0; PAGE_BYTES]);
        let count = file.read_pages(&call, offset, &mut bytes[..]);
        self.between();
        let found = word(&bytes, at);
        self.unlock(place, |cached| {
            cached.up_to_date = count.is_ok();
            cached.bytes = bytes;
        });
        count.map(|_| found)
    }

    /// Writes within a page, through the cache.
    ///
    /// # Errors
    /// The mount's error.
    pub fn write(&self, file: &OpenFile, page: u64, at: usize, data: &[u8]) -> Result<(), Errno> {
        let key = file.key();
        self.lock_inode(key, true);
        let place = (key, page);
        let stays_locked = self.when_unlocked(place, |caches| {
            let cached = caches.pages.entry(place).or_default();
            cached.bytes[at..at + data.len()].copy_from_slice(data);
            cached.up_to_date |= data.len() == PAGE_BYTES;
            if !cached.up_to_date {
                cached.locked = Locked::Write;
            }
            !cached.up_to_date
        });
        let offset = page * PAGE_BYTES as u64 + at as u64;
        let call = self.call(PageUse::Write, offset, data.len());
        let done = file.write_pages(&call, Some(offset), data, &Cred::root());
        if stays_locked {
            self.unlock(place, |_| {});
        }
        self.unlock_inode(key);
        done.map(drop)
    }

    /// Writes within a page, bypassing the cache, as Linux 6.6 and later: the page is dropped before the
    /// call.
    ///
    /// # Errors
    /// The mount's error.
    pub fn write_past(&self, file: &OpenFile, page: u64, at: usize, data: &[u8]) -> Result<(), Errno> {
        let offset = page * PAGE_BYTES as u64 + at as u64;
        self.lock_inode(file.key(), false);
        self.drop_page((file.key(), page));
        let call = self.call(PageUse::Direct { dropped: true }, offset, data.len());
        let done = file.write_pages(&call, Some(offset), data, &Cred::root());
        self.unlock_inode(file.key());
        done.map(drop)
    }

    /// Returns the cached value, or calls `operation` and caches its value until the answer, made by
    /// `reply` with its timeout, expires.
    fn look<T: Copy>(
        &self,
        fs: &Fs,
        cell: impl Fn(&mut Caches) -> &mut Option<(T, u64)>,
        operation: impl FnOnce() -> Result<T, Errno>,
        reply: impl FnOnce(ReplyVersion) -> (CachedReply, Duration),
    ) -> Result<T, Errno> {
        let known = *cell(&mut self.lock());
        if let Some((value, until_ms)) = known
            && self.clock.monotonic_ms() < until_ms
        {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(value);
        }
        self.between();
        let program = self.begin_call();
        fs.thread_calls(program);
        let version = fs.reply_version(program);
        let value = operation();
        self.between();
        let taken = value.map(|value| {
            let (held, ttl) = reply(version);
            let sent_ms = self.clock.monotonic_ms();
            drop(held);
            // The program runs on later, and time passes.
            self.between();
            let begun_ms = self.clock.monotonic_ms().min(sent_ms + LATE_MS);
            *cell(&mut self.lock()) = Some((value, begun_ms + ttl.as_millis() as u64));
            value
        });
        self.end_call(program);
        taken
    }

    /// Returns the number of the program that calls: each makes two or three calls from one thread.
    fn begin_call(&self) -> u32 {
        let mut caches = self.lock();
        let me = std::thread::current().id();
        let next = caches
            .programs
            .values()
            .map(|(number, _)| *number)
            .max()
            .unwrap_or(0)
            + 1;
        let (number, calls) = caches.programs.entry(me).or_insert((next, 0));
        *calls += 1;
        if *calls % 3 == 0 {
            *number = next;
        }
        let number = *number;
        caches.calling.insert(number);
        number
    }

    fn end_call(&self, program: u32) {
        self.lock().calling.remove(&program);
    }

    /// The size of a file as programs see it.
    ///
    /// # Errors
    /// The mount's error.
    pub fn size(&self, fs: &Fs, key: InodeKey) -> Result<u64, Errno> {
        let size = || Ok(fs.getattr(key)?.size_bytes);
        let reply = |version| {
            let reply = fs.attr_reply(version, key);
            let ttl = reply.attr_ttl();
            (reply, ttl)
        };
        self.look(fs, |caches| caches.sizes.entry(key).or_default(), size, reply)
    }

    /// The size of the file with a name in the root, as programs see it; `None` if there is none.
    ///
    /// # Errors
    /// The mount's error.
    pub fn size_of_name(&self, fs: &Fs, name: &'static str) -> Result<Option<u64>, Errno> {
        let inode = Cell::new(None);
        let size = || match fs.lookup(fs.root(), name.as_bytes(), &Cred::root()) {
            Ok(attr) => {
                inode.set(Some(attr.key));
                Ok(Some(attr.size_bytes))
            }
            Err(error) if error == Errno(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        };
        // One value here is both the name's and the attributes'.
        let reply = |version| {
            let reply = fs.name_reply(version, fs.root(), inode.get());
            let ttl = match inode.get() {
                Some(_) => reply.name_ttl().min(reply.attr_ttl()),
                None => reply.name_ttl(),
            };
            (reply, ttl)
        };
        self.look(fs, |caches| caches.names.entry(name).or_default(), size, reply)
    }

    fn drop_page(&self, place: (InodeKey, u64)) {
        self.when_unlocked(place, |caches| caches.pages.remove(&place));
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn word(bytes: &[u8; PAGE_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl CacheObserver for Kernel {
    fn has_ended(&self, thread: u32) -> bool {
        !self.lock().calling.contains(&thread)
    }

    fn invalidate_data(&self, key: InodeKey, offset: u64, len: u64) {
        let bytes = PAGE_BYTES as u64;
        let end = if len == 0 {
            u64::MAX
        } else {
            (offset + len).div_ceil(bytes)
        };
        let range = (key, offset / bytes)..(key, end);
        let places: Vec<_> = self.lock().pages.range(range).map(|(place, _)| *place).collect();
        for place in places {
            self.between();
            self.drop_page(place);
        }
        self.between();
    }

    fn invalidate_unless_locked(&self, key: InodeKey, offset: u64, _len: u64) {
        let place = (key, offset / PAGE_BYTES as u64);
        loop {
            let mut caches = self.lock();
            match caches.pages.get(&place).map(|page| page.locked) {
                Some(Locked::Read) => {}
                Some(Locked::No) => {
                    caches.pages.remove(&place);
                    return;
                }
                Some(Locked::Write) | None => return,
            }
            drop(caches);
            self.turns.pause(LOOK);
        }
    }
}
