//! Optimistic reads (without a lock and without a pin) under a scheduler that tries interleavings: against
//! writes of the session, its digest, another session that takes the lease, reuse of blocks and log space,
//! and the seal. A read that counts returns bytes that were written, whole, and no older than the last write
//! that had returned when it began. Run by `cargo test -p varve-libfs --features shuttle --lib
//! interleavings`.
#![allow(clippy::unwrap_used)]

use super::DataPlane;
use super::nvm::Nvm;
use crate::lease::{Event, Leases, Node, Recalls, Surroundings, Use};
use crate::log::Log;
use crate::log::interleavings::DrivenPage;
use crate::options::CacheObserver;
use crate::seeded::{self, Bug};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex};
use shuttle::thread;
use std::sync::Arc;
use std::time::Duration;
use varve_format::log::{CHUNK_BYTES, HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, BlockNo, EntryFlags, EntryHeader, FileBlock, InodeAttr,
    InodeKey, LeaseNo, LogSeq, SessionId, Tier,
};
use varve_ipc::{
    Grant, IpcError, LeaseMode, Link, ManualClock, MappedExtent, Request, Response, Upcall, Welcome,
};
use varve_media::sim::{SimMedium, SimWorld};
use varve_media::{DeviceInfo, MediaError, Region, Verified};
use zerocopy::FromBytes;

const SESSION: SessionId = SessionId(3);
const FILE: InodeKey = InodeKey::new(5, 1);
const CHUNKS: u64 = 8;
/// Reused blocks and log space are filled with this.
const POISON: u64 = u64::MAX;
const WORDS: usize = BLOCK_SIZE / 8;

/// A block filled with `version`.
fn image(version: u64) -> Vec<u8> {
    version.to_le_bytes().repeat(WORDS)
}

/// Memory whose copies take a while: another thread may run in the middle.
struct Slow(Arc<dyn Region>);

impl Region for Slow {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let (front, back) = out.split_at_mut(out.len() / 2);
        thread::yield_now();
        self.0.read(off, front)?;
        thread::yield_now();
        self.0.read(off + front.len() as u64, back)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let (front, back) = src.split_at(src.len() / 2);
        self.0.write(off, front)?;
        thread::yield_now();
        self.0.write(off + front.len() as u64, back)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        thread::yield_now();
        self.0.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.0.fence()
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.sync(off, len)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.0.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.allocate(off, len)
    }

    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
}

/// The daemon's state.
#[derive(Default)]
struct Book {
    /// Location of the file's block, and the version there.
    place: u64,
    version: u64,
    /// Number of places given out; reused ones are poisoned.
    places: u64,
    freed: Vec<u64>,
    digested: u64,
    /// Entries known to be committed are written over the old block.
    in_place: bool,
    /// Log addresses of data that is digested.
    in_log: Vec<u64>,
    held: Option<LeaseNo>,
    granted: u64,
    /// Another session wants the file, or has it.
    other: bool,
    over: bool,
}

struct Daemon {
    book: Mutex<Book>,
    changed: Condvar,
    log: Arc<dyn Region>,
    nvm: Arc<dyn Region>,
    page: Arc<DrivenPage>,
    /// Number of writes that were begun, and the last that returned.
    begun: AtomicU64,
    returned: AtomicU64,
}

impl Daemon {
    /// Writes a version to a new place.
    fn put(&self, book: &mut Book, version: u64) {
        book.places += 1;
        self.nvm
            .write(book.places * BLOCK_BYTES, &image(version))
            .unwrap();
        let old = std::mem::replace(&mut book.place, book.places);
        if old != 0 {
            book.freed.push(old);
        }
        book.version = version;
    }

    /// Applies the log's entries up to the first gap.
    fn digest(&self, book: &mut Book) {
        loop {
            let wanted = book.digested + 1;
            let Some((addr, version)) = self.find(wanted) else {
                break;
            };
            if let Some(version) = version {
                if book.in_place && book.place != 0 && self.settled() > wanted {
                    self.nvm.write(book.place * BLOCK_BYTES, &image(version)).unwrap();
                    book.version = version;
                } else {
                    self.put(book, version);
                }
                book.in_log.push(addr);
            }
            book.digested = wanted;
        }
        self.page.digested.store(book.digested, Ordering::SeqCst);
    }

    /// Calls `look` for the headers in the log, each with the location of its payload; `None` of `look` goes
    /// on.
    fn headers<T>(&self, mut look: impl FnMut(&EntryHeader, u64) -> Option<T>) -> Option<T> {
        for chunk in 0..CHUNKS {
            let mut at = chunk * CHUNK_BYTES + if chunk == 0 { 64 } else { 0 };
            loop {
                let mut bytes = [0; HEADER_SIZE];
                self.log.read(at, &mut bytes).unwrap();
                let header = EntryHeader::read_from_bytes(&bytes).unwrap();
                let len = header.payload_len.get() as usize;
                if header.seq.get() == 0 || len > BLOCK_SIZE {
                    break;
                }
                if let Some(found) = look(&header, at + HEADER_SIZE as u64) {
                    return Some(found);
                }
                at += entry_size(len) as u64;
            }
        }
        None
    }

    /// The version that an entry writes (none: an abandoned number), if it is valid.
    fn version(&self, header: &EntryHeader, at: u64) -> Option<Option<u64>> {
        let mut payload = vec![0; header.payload_len.get() as usize];
        self.log.read(at, &mut payload).unwrap();
        let crc = entry_crc(payload_crc(crc_seed(SESSION), &payload), header);
        let word = payload.first_chunk().map(|word| u64::from_le_bytes(*word));
        (crc == header.crc32c.get()).then_some(word)
    }

    /// All entries below this number had been committed when the last one was written.
    fn settled(&self) -> u64 {
        let mut settled = 0;
        self.headers(|header, at| {
            if self.version(header, at).is_some() {
                settled = settled.max(header.seq.get() - u64::from(header.stable_delta.get()));
            }
            None::<()>
        });
        settled
    }

    /// Entry `wanted`: the location of its data, and its version.
    fn find(&self, wanted: u64) -> Option<(u64, Option<u64>)> {
        self.headers(|header, at| {
            let is_it = header.seq.get() == wanted;
            is_it.then(|| self.version(header, at).map(|version| (at, version)))
        })
        .flatten()
    }

    /// Another session's write, when the lease is its own.
    fn write(&self, book: &mut Book) {
        let version = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        self.put(book, version);
        self.returned.fetch_max(version, Ordering::SeqCst);
    }
}

impl Link for Daemon {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let mut book = self.book.lock();
        match request {
            Request::Acquire { wants } | Request::AcquireNear { wants, .. } => {
                while book.other && !book.over {
                    self.changed.wait(&mut book);
                }
                if book.over {
                    return Err(IpcError::Sealed);
                }
                let fresh = LeaseNo(book.granted + 1);
                let lease = *book.held.get_or_insert(fresh);
                book.granted += u64::from(lease == fresh);
                drop(book);
                thread::yield_now();
                let mut attr = InodeAttr::new(wants[0].key, 0o100_644, 0);
                attr.size_bytes = BLOCK_BYTES;
                Ok(Response::Granted(vec![Grant {
                    lease,
                    mode: LeaseMode::Write,
                    replaces: None,
                    attr,
                    told: varve_ipc::Told::default(),
                }]))
            }
            Request::Release { items } => {
                for item in items {
                    if book.held == Some(item.lease) {
                        self.digest(&mut book);
                        assert!(
                            book.digested >= item.last_seq.0,
                            "what was logged under it is not there"
                        );
                        book.held = None;
                    }
                }
                drop(book);
                self.changed.notify_all();
                Ok(Response::Done)
            }
            Request::MapExtents { .. } => {
                let run = MappedExtent {
                    file_block: FileBlock(0),
                    len: 1,
                    tier: Tier::Nvm,
                    block: BlockNo(book.place),
                    unwritten: false,
                    number: None,
                };
                Ok(Response::Extents(vec![run], true))
            }
            Request::Reserve { blocks, .. } => Ok(Response::Reserved(blocks)),
            Request::Digest { .. } => {
                self.digest(&mut book);
                Ok(Response::Digested(LogSeq(book.digested)))
            }
            other => panic!("{other:?}"),
        }
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

struct Stage {
    daemon: Arc<Daemon>,
    data: DataPlane,
    leases: Arc<Leases>,
    node: Arc<Node>,
}

impl Surroundings for Stage {
    fn last_seq(&self, node: &Node) -> LogSeq {
        node.inode.last_seq(self.log_last())
    }

    fn log_last(&self) -> LogSeq {
        self.data.log().map_or(LogSeq(0), Log::last_seq)
    }

    fn is_open(&self, _: InodeKey) -> bool {
        false
    }

    fn observer(&self) -> Option<Arc<dyn CacheObserver>> {
        None
    }
}

pub(super) fn welcome(log: &dyn Region, nvm: &dyn Region) -> Welcome {
    Welcome {
        session: SESSION,
        token: 1,
        pool_uuid: [0; 16],
        root: InodeAttr::new(InodeKey::ROOT, 0o040_755, 0),
        privileged: true,
        acts_for: None,
        read_only: false,
        latched: None,
        shared: false,
        log_bytes: log.len_bytes(),
        log_max_bytes: log.len_bytes(),
        nvm_bytes: nvm.len_bytes(),
        nvm_sums: None,
        nvm_sums_once: false,
        nvm_emulated: false,
        dax: varve_ipc::DaxMaps::default(),
        lease_ms: 100_000,
        wait_ms: 100_000,
        digest_percent: 90,
        read_ahead_bytes: 0,
        sync_ms: 0,
        needs_sync: false,
        seal: None,
        last_forwarded: varve_format::LastForwarded::default(),
        leases_max: 64,
        name_hash: None,
        copies_at: None,
    }
}

/// Sets the stage: the file has its first version, digested, and the lease is held. Also returns the other
/// end of the worker's events.
fn stage() -> (Arc<Stage>, crossbeam_channel::Receiver<Event>, Recalls) {
    let world = SimWorld::new();
    let slow = |name, bytes| Arc::new(Slow(world.add_region(name, SimMedium::Dax, bytes, bytes)));
    let log: Arc<dyn Region> = slow("log", CHUNKS * CHUNK_BYTES);
    let nvm: Arc<dyn Region> = slow("nvm", 32 * BLOCK_BYTES);
    let page = Arc::new(DrivenPage::default());
    let daemon = Arc::new(Daemon {
        book: Mutex::default(),
        changed: Condvar::new(),
        log: Arc::clone(&log),
        nvm: Arc::clone(&nvm),
        page: Arc::clone(&page),
        begun: AtomicU64::new(0),
        returned: AtomicU64::new(0),
    });
    daemon.write(&mut daemon.book.lock());
    let link = Arc::clone(&daemon) as Arc<dyn Link>;
    let data = DataPlane::new(
        &welcome(&*log, &*nvm),
        Arc::clone(&link),
        Arc::clone(&page) as _,
        Some(log),
        Some(nvm),
        None,
        Arc::new(ManualClock::new(1_000)),
    );
    let (events, inbox) = crossbeam_channel::unbounded();
    let asks = crossbeam_channel::unbounded().0;
    let leases = Arc::new(Leases::new(link, page, events.clone(), asks, 64, false));
    let recalls = Recalls::new(Arc::clone(&leases), events, 100_000);
    let node = leases.node_of(FILE).unwrap();
    let stage = Arc::new(Stage {
        daemon,
        data,
        leases,
        node,
    });
    // The location of the block is known, so that optimistic reads are possible from the beginning.
    stage.read();
    (stage, inbox, recalls)
}

impl Stage {
    /// Reads as an open file does; `false`: the session is over.
    fn read(&self) -> bool {
        let mut out = [0; BLOCK_SIZE];
        let least = self.daemon.returned.load(Ordering::SeqCst);
        let may = || self.leases.may_look(&self.node, Use::Own);
        let tried = self.data.try_read(&self.node.inode, 0, &mut out, may);
        if tried.is_none() {
            let Ok(_pin) = self.leases.pin_one::<()>(FILE, LeaseMode::Read, Use::Own) else {
                return false;
            };
            if self.data.read(&self.node.inode, 0, &mut out).is_err() {
                return false;
            }
        }
        Self::judge(&out, if tried.is_some() { "tried" } else { "pinned" }, least);
        true
    }

    /// One read under the inode's lock; `false`: the session is over.
    fn read_locked(&self) -> bool {
        let mut out = [0; BLOCK_SIZE];
        let least = self.daemon.returned.load(Ordering::SeqCst);
        let Ok(_pin) = self.leases.pin_one::<()>(FILE, LeaseMode::Read, Use::Own) else {
            return false;
        };
        if self.data.read(&self.node.inode, 0, &mut out).is_err() {
            return false;
        }
        Self::judge(&out, "locked", least);
        true
    }

    /// Checks the result of a read that began after version `least` was written.
    fn judge(out: &[u8], how: &str, least: u64) {
        let version = u64::from_le_bytes(*out.first_chunk().unwrap());
        assert!(out[..] == image(version), "a read that was {how} is torn");
        assert_ne!(version, POISON, "a read that was {how} shows what was used again");
        assert!(
            version >= least,
            "a read that was {how} shows {version} after {least}"
        );
    }

    /// One write of this session; `false`: the session is over.
    fn write(&self) -> bool {
        let Ok(_pin) = self.leases.pin_one::<()>(FILE, LeaseMode::Write, Use::Own) else {
            return false;
        };
        let version = self.daemon.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let written = self
            .data
            .write(&self.node.inode, 0, &image(version), EntryFlags::empty());
        if written.is_ok() {
            self.daemon.returned.fetch_max(version, Ordering::SeqCst);
        }
        written.is_ok()
    }

    /// Reuses blocks that the daemon has freed, after they are forgotten here, and log space of entries that
    /// are digested and published.
    fn reuse(&self) {
        let (freed, in_log) = {
            let mut book = self.daemon.book.lock();
            (std::mem::take(&mut book.freed), std::mem::take(&mut book.in_log))
        };
        // As the upcall thread does before it acknowledges.
        self.data.forget_extents(&self.node.inode);
        for place in freed {
            self.daemon
                .nvm
                .write(place * BLOCK_BYTES, &image(POISON))
                .unwrap();
        }
        let log = self.data.log().unwrap();
        let all = log.droppable() >= log.last_seq().0;
        self.data.reclaim();
        for addr in in_log.into_iter().filter(|_| all) {
            self.daemon.log.write(addr, &image(POISON)).unwrap();
        }
    }

    /// Recalls the lease, and writes as another session.
    fn write_as_another(&self) {
        let mut book = self.daemon.book.lock();
        book.other = true;
        while let Some(number) = book.held {
            self.leases.tell(Event::Revoke {
                key: FILE,
                number,
                only_read: false,
            });
            self.daemon.changed.wait(&mut book);
        }
        self.daemon.write(&mut book);
        book.other = false;
        drop(book);
        self.daemon.changed.notify_all();
    }
}

/// The session's worker, until it is told to stop.
fn work(
    stage: &Arc<Stage>,
    inbox: crossbeam_channel::Receiver<Event>,
    mut recalls: Recalls,
) -> (Arc<AtomicU64>, thread::JoinHandle<()>) {
    let stop = Arc::new(AtomicU64::new(0));
    let (stage, until) = (Arc::clone(stage), Arc::clone(&stop));
    let worker = thread::spawn(move || {
        loop {
            let last = until.load(Ordering::SeqCst) == 1;
            while let Ok(event) = inbox.try_recv() {
                recalls.take(event, &*stage);
            }
            recalls.flush(&*stage).unwrap();
            if last {
                return;
            }
            thread::yield_now();
        }
    });
    (stop, worker)
}

/// Optimistic reads run while the session writes, the log is digested and its space reused, and another
/// session writes and gives way.
fn tried_reads_show_what_counts() {
    let (stage, inbox, recalls) = stage();
    let (stop, worker) = work(&stage, inbox, recalls);
    let reader = {
        let stage = Arc::clone(&stage);
        thread::spawn(move || (0..3).all(|_| stage.read()))
    };
    let writer = {
        let stage = Arc::clone(&stage);
        thread::spawn(move || {
            let written = stage.write();
            stage.daemon.digest(&mut stage.daemon.book.lock());
            stage.reuse();
            written
        })
    };
    stage.write_as_another();
    stage.reuse();
    assert!(reader.join().unwrap());
    assert!(writer.join().unwrap());
    stop.store(1, Ordering::SeqCst);
    worker.join().unwrap();
}

/// Blocks are overwritten in place by the digest, while threads read and write them.
fn reads_beside_overwrites_show_one_or_the_other() {
    let (stage, _inbox, _recalls) = stage();
    stage.daemon.book.lock().in_place = true;
    let readers = [true, false].map(|tries| {
        let stage = Arc::clone(&stage);
        thread::spawn(move || if tries { stage.read() } else { stage.read_locked() })
    });
    // The second write knows that the first was committed.
    assert!(stage.write() && stage.write());
    stage.daemon.digest(&mut stage.daemon.book.lock());
    stage.reuse();
    for reader in readers {
        assert!(reader.join().unwrap());
    }
}

/// Optimistic reads run while the session is sealed; then other sessions write, and its blocks are reused
/// without a message to it.
fn tried_reads_end_with_the_session() {
    let (stage, _inbox, _recalls) = stage();
    let threads = [true, false].map(|reads| {
        let stage = Arc::clone(&stage);
        thread::spawn(move || {
            let _ = (0..3).all(|_| if reads { stage.read() } else { stage.write() });
        })
    });
    thread::yield_now();
    stage.daemon.page.sealed.store(1, Ordering::SeqCst);
    {
        let mut book = stage.daemon.book.lock();
        book.over = true;
        stage.daemon.digest(&mut book);
        stage.daemon.write(&mut book);
        for place in std::mem::take(&mut book.freed) {
            stage
                .daemon
                .nvm
                .write(place * BLOCK_BYTES, &image(POISON))
                .unwrap();
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Two threads of two sessions are the first to read a whole and a damaged block, at once, while the daemon
/// forgets which blocks were compared.
fn first_reads_show_no_damage() {
    const TABLE: u64 = 8 * BLOCK_BYTES;
    let region = SimWorld::new().add_region("nvm", SimMedium::Dax, 64 << 10, 64 << 10);
    for block in [1, 2] {
        region.write(block * BLOCK_BYTES, &image(block)).unwrap();
        let at = TABLE + BLOCK_HEADER_SIZE as u64 + block * 4;
        let sum = crc32c::crc32c(&image(block)).to_le_bytes();
        region.write(at, &sum).unwrap();
    }
    region.write(2 * BLOCK_BYTES + 100, &[77]).unwrap();
    let region: Arc<dyn Region> = Arc::new(Slow(region));
    let verified = Arc::new(Verified::heap(16));
    let bug = seeded::current();
    let readers = [1, 2].map(|first| {
        let nvm = Nvm::new(Arc::clone(&region), Some(TABLE), Some(Arc::clone(&verified)));
        thread::spawn(move || {
            seeded::arm(bug);
            for block in [first, 3 - first, first] {
                let mut out = image(POISON);
                match nvm.read_for_certain(block, 0, &mut out) {
                    Ok(()) => assert!(block == 1 && out == image(1)),
                    Err(_) => assert_eq!(block, 2),
                }
            }
        })
    });
    for _ in 0..2 {
        thread::yield_now();
        verified.forget(1);
        assert!(!verified.has(2, 3));
    }
    for reader in readers {
        reader.join().unwrap();
    }
    assert!(!verified.has(2, 3));
}

#[test]
fn first_reads_at_once_show_no_damage() {
    shuttle::check_random(first_reads_show_no_damage, 2_000);
    shuttle::check_pct(first_reads_show_no_damage, 1_000, 3);
}

#[test]
fn block_that_is_believed_unread_is_caught() {
    assert!(seeded::is_found(Bug::NvmBelieved, &[first_reads_show_no_damage]));
}

#[test]
fn read_that_is_tried_shows_what_counts_when_leases_and_blocks_go() {
    shuttle::check_random(tried_reads_show_what_counts, 3_000);
    shuttle::check_pct(tried_reads_show_what_counts, 2_000, 3);
}

#[test]
fn read_that_is_tried_shows_nothing_of_a_session_that_is_over() {
    shuttle::check_random(tried_reads_end_with_the_session, 2_000);
    shuttle::check_pct(tried_reads_end_with_the_session, 1_000, 3);
}

#[test]
fn read_beside_overwrites_in_place_is_whole() {
    shuttle::check_random(reads_beside_overwrites_show_one_or_the_other, 3_000);
    shuttle::check_pct(reads_beside_overwrites_show_one_or_the_other, 2_000, 3);
}

#[test]
fn tried_read_that_counts_although_it_was_overtaken_is_caught() {
    assert!(seeded::is_found(
        Bug::TriedReadOvertaken,
        &[tried_reads_show_what_counts]
    ));
}

#[test]
fn tried_read_that_counts_although_the_session_is_over_is_caught() {
    assert!(seeded::is_found(
        Bug::TriedReadSealed,
        &[tried_reads_end_with_the_session]
    ));
}
