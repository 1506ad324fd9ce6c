//! A daemon for tests: finds entries by the rules of the log's format, applies them to files held as plain
//! bytes, and lays those out on an NVM region by copy on write. Blocks that were freed are filled with
//! [`POISON`] once every inode has forgotten its extents.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use varve_format::log::{
    CHUNK_BYTES, HEADER_SIZE, LIVE_HEADER_SIZE, PAYLOAD_MAX, crc_seed, entry_crc, entry_size, payload_crc,
};
use varve_format::{
    BLOCK_BYTES, BLOCK_SIZE, BlockNo, EntryFlags, EntryHeader, FallocateMode, FileBlock, Generation, Ino,
    InodeAttr, InodeKey, LogOp, LogSeq, SessionId, Tier,
};
use varve_ipc::{
    IpcError, Link, MappedExtent, Page, ReadRun, Request, Response, SessionPage, Summed, SummedBlocks,
    TOLD_MAX, Upcall, Welcome,
};
use varve_media::lock::Mutex;
use varve_media::{Backing, MappedOptions, MappedRegion, Region};
use zerocopy::FromBytes;

/// Freed blocks are filled with this.
pub const POISON: u8 = 0xEE;
/// The session of all tests.
pub const SESSION: SessionId = SessionId(3);

/// A region of `len` bytes in memory that can grow to `max`.
pub fn region(dir: &Path, name: &str, len: u64, max: u64) -> Arc<dyn Region> {
    let options = MappedOptions {
        backing: Backing::Shm,
        len_bytes: len,
        max_bytes: max,
        sparse: false,
    };
    Arc::new(MappedRegion::create(&dir.join(name), options).expect("a region in memory"))
}

/// An entry found in a log.
#[derive(Clone)]
pub struct Found {
    pub header: EntryHeader,
    pub payload: Vec<u8>,
}

/// All valid entries of a log by number: each chunk from its start, until one is wrong or does not grow.
pub fn scan(log: &dyn Region) -> BTreeMap<u64, Found> {
    let mut found = BTreeMap::new();
    for chunk in 0..log.len_bytes() / CHUNK_BYTES {
        let mut pos = if chunk == 0 { LIVE_HEADER_SIZE as u64 } else { 0 };
        let mut last = 0;
        while pos + HEADER_SIZE as u64 <= CHUNK_BYTES {
            let mut bytes = [0; HEADER_SIZE];
            log.read(chunk * CHUNK_BYTES + pos, &mut bytes)
                .expect("in the log");
            let header = EntryHeader::read_from_bytes(&bytes).expect("64 bytes");
            let len = header.payload_len.get() as usize;
            let seq = header.seq.get();
            if seq <= last || len > PAYLOAD_MAX || pos + entry_size(len) as u64 > CHUNK_BYTES {
                break;
            }
            let mut payload = vec![0; len];
            log.read(chunk * CHUNK_BYTES + pos + HEADER_SIZE as u64, &mut payload)
                .expect("in the log");
            if entry_crc(payload_crc(crc_seed(SESSION), &payload), &header) != header.crc32c.get() {
                break;
            }
            found.insert(seq, Found { header, payload });
            last = seq;
            pos += entry_size(len) as u64;
        }
    }
    found
}

#[derive(Default)]
struct File {
    bytes: Vec<u8>,
    /// Block in the file to block on the medium.
    map: BTreeMap<u64, u64>,
}

#[derive(Default)]
struct Files {
    files: HashMap<InodeKey, File>,
    free: Vec<u64>,
    next: u64,
    /// Freed, but perhaps still in cached extents.
    limbo: Vec<u64>,
    digested: u64,
}

/// The daemon and the session's link to it.
pub struct Fake {
    pub log: Arc<dyn Region>,
    pub nvm: Arc<dyn Region>,
    pub page: Arc<Page>,
    files: Mutex<Files>,
    /// Tier that extents claim to be on.
    pub tier: Mutex<Tier>,
    pub log_max_bytes: u64,
    pub wait_ms: u64,
    /// Answers `Reserve` with ENOSPC below this many blocks left.
    pub unreserved: AtomicU64,
    /// Blocks that the client knew to have been granted when it returned reserved blocks.
    pub vouched: AtomicU64,
    /// A `Digest` with `wait` digests.
    pub obeys: AtomicBool,
    pub calls: Mutex<HashMap<&'static str, u64>>,
    /// Reads that were reported.
    pub reads: Mutex<Vec<ReadRun>>,
    /// Called once, when the next maps of several files have been looked up and not sent.
    pub amid_maps: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// Attributes of an empty regular file.
pub fn attr(ino: u64) -> InodeAttr {
    InodeAttr::new(InodeKey::new(ino, 1), 0o100_644, 0)
}

impl Fake {
    pub fn new(dir: &Path, log_bytes: u64, log_max_bytes: u64, wait_ms: u64) -> Arc<Self> {
        Arc::new(Self {
            log: region(dir, "log", log_bytes, log_max_bytes),
            nvm: region(dir, "nvm", 64 << 20, 64 << 20),
            page: Arc::new(Page::heap(SESSION)),
            files: Mutex::new(Files {
                next: 1,
                ..Files::default()
            }),
            tier: Mutex::new(Tier::Nvm),
            log_max_bytes,
            wait_ms,
            unreserved: AtomicU64::new(u64::MAX),
            vouched: AtomicU64::new(0),
            obeys: AtomicBool::new(true),
            calls: Mutex::new(HashMap::new()),
            reads: Mutex::default(),
            amid_maps: Mutex::default(),
        })
    }

    pub fn welcome(&self) -> Welcome {
        Welcome {
            session: SESSION,
            token: 1,
            pool_uuid: [0; 16],
            root: attr(1),
            privileged: true,
            acts_for: None,
            read_only: false,
            latched: None,
            shared: false,
            log_bytes: self.log.len_bytes(),
            log_max_bytes: self.log_max_bytes,
            nvm_bytes: self.nvm.len_bytes(),
            nvm_sums: None,
            nvm_sums_once: false,
            nvm_emulated: false,
            dax: varve_ipc::DaxMaps::default(),
            lease_ms: 2000,
            wait_ms: self.wait_ms,
            digest_percent: 30,
            read_ahead_bytes: 256 << 10,
            sync_ms: 0,
            needs_sync: false,
            seal: None,
            last_forwarded: varve_format::LastForwarded::default(),
            leases_max: 1000,
            name_hash: None,
            copies_at: None,
        }
    }

    pub fn called(&self, what: &'static str) -> u64 {
        self.calls.lock().get(what).copied().unwrap_or(0)
    }

    /// The digested bytes of a file.
    pub fn bytes(&self, key: InodeKey) -> Vec<u8> {
        self.files
            .lock()
            .files
            .get(&key)
            .map(|file| file.bytes.clone())
            .unwrap_or_default()
    }

    /// Digests whole transactions of the contiguous prefix, at most up to `upto`.
    pub fn digest(&self, upto: u64) {
        let mut files = self.files.lock();
        let entries = scan(&*self.log);
        let mut transaction: Vec<Found> = Vec::new();
        let mut next = files.digested + 1;
        while let Some(entry) = entries
            .get(&next)
            .filter(|_| next <= upto || !transaction.is_empty())
        {
            let continues = EntryFlags::from_bits_retain(entry.header.flags).contains(EntryFlags::CONTINUES);
            assert_eq!(
                continues,
                !transaction.is_empty(),
                "entry {next} continues its transaction or begins one"
            );
            assert!(u64::from(entry.header.stable_delta.get()) < next);
            transaction.push(entry.clone());
            if entry.header.tx_left.get() == 0 {
                for entry in transaction.drain(..) {
                    files.apply(&entry, &*self.nvm);
                }
                files.digested = next;
            }
            next += 1;
        }
        self.page.set_digested(LogSeq(files.digested));
    }

    /// Returns freed blocks: give them to [`poison`](Self::poison) when every inode has forgotten its
    /// extents.
    pub fn freed(&self) -> Vec<u64> {
        std::mem::take(&mut self.files.lock().limbo)
    }

    /// Returns the map of a file from a block on, and whether it ends there.
    fn runs(&self, key: InodeKey, from: FileBlock, max: usize) -> (Vec<MappedExtent>, bool) {
        let files = self.files.lock();
        let tier = *self.tier.lock();
        let mut runs = Vec::new();
        if let Some(file) = files.files.get(&key) {
            runs.extend(file.map.range(from.0..).map(|(&block, &place)| MappedExtent {
                file_block: FileBlock(block),
                len: 1,
                tier,
                block: BlockNo(place),
                unwritten: false,
                number: None,
            }));
        }
        let end = runs.len() <= max;
        runs.truncate(max);
        (runs, end)
    }

    /// Fills freed blocks and lets them be used again.
    pub fn poison(&self, freed: Vec<u64>) {
        let mut files = self.files.lock();
        for block in freed {
            self.nvm
                .write(block * BLOCK_BYTES, &[POISON; BLOCK_SIZE])
                .expect("in the region");
            files.free.push(block);
        }
        self.nvm.fence().expect("memory");
    }
}

impl Files {
    fn apply(&mut self, found: &Found, nvm: &dyn Region) {
        let op = LogOp::parse(&found.header, &found.payload).expect("what LibFS writes is an operation");
        let key = InodeKey {
            ino: Ino(found.header.ino.get()),
            generation: Generation(found.header.generation.get()),
        };
        let file = self.files.entry(key).or_default();
        let old = file.bytes.clone();
        let (mut written, mut cleared) = (0..0, 0..0);
        match op {
            LogOp::Write { offset, data, .. } => {
                let (start, end) = (offset as usize, offset as usize + data.len());
                if file.bytes.len() < end {
                    file.bytes.resize(end, 0);
                }
                file.bytes[start..end].copy_from_slice(data);
                written = start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE);
            }
            LogOp::Truncate { size, .. } => {
                file.bytes.resize(size as usize, 0);
                cleared = (size as usize).div_ceil(BLOCK_SIZE)..usize::MAX;
            }
            LogOp::Fallocate {
                mode, offset, len, ..
            } => {
                let end = (offset + len) as usize;
                if mode.grows() && file.bytes.len() < end {
                    file.bytes.resize(end, 0);
                }
                if !matches!(mode, FallocateMode::Allocate | FallocateMode::AllocateKeepSize) {
                    let len = file.bytes.len();
                    file.bytes[(offset as usize).min(len)..end.min(len)].fill(0);
                    cleared = (offset as usize).div_ceil(BLOCK_SIZE)..end / BLOCK_SIZE;
                }
            }
            _ => {}
        }
        // Copy on write of every block that changed; whole ones that were cut off or zeroed become holes.
        for block in 0..old.len().max(file.bytes.len()).div_ceil(BLOCK_SIZE) {
            let part = |bytes: &[u8]| {
                let mut image = [0; BLOCK_SIZE];
                let start = (block * BLOCK_SIZE).min(bytes.len());
                let end = (start + BLOCK_SIZE).min(bytes.len());
                image[..end - start].copy_from_slice(&bytes[start..end]);
                image
            };
            let (before, after) = (part(&old), part(&file.bytes));
            let mapped = file.map.contains_key(&(block as u64));
            let is_data = written.contains(&block) || mapped && !cleared.contains(&block);
            if before == after && is_data == mapped {
                continue;
            }
            if let Some(freed) = file.map.remove(&(block as u64)) {
                self.limbo.push(freed);
            }
            if is_data {
                let place = self.free.pop().unwrap_or_else(|| {
                    self.next += 1;
                    self.next - 1
                });
                nvm.write(place * BLOCK_BYTES, &after)
                    .expect("the test's files fit");
                file.map.insert(block as u64, place);
            }
        }
        nvm.fence().expect("memory");
    }
}

impl Link for Fake {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let count = |what| *self.calls.lock().entry(what).or_insert(0) += 1;
        match request {
            Request::MapExtents { key, from, max } => {
                count("map");
                let (runs, end) = self.runs(key, from, max as usize);
                Ok(Response::Extents(runs, end))
            }
            Request::MapFiles { keys } => {
                count("maps");
                let each = keys
                    .into_iter()
                    .map(|key| match self.runs(key, FileBlock(0), TOLD_MAX) {
                        (runs, true) => Some(runs),
                        _ => None,
                    });
                let maps = each.collect();
                if let Some(hook) = self.amid_maps.lock().take() {
                    hook();
                }
                Ok(Response::Mapped(maps))
            }
            Request::ReadData { key, offset, len } => {
                count("read");
                let bytes = self.bytes(key);
                let start = (offset as usize).min(bytes.len());
                let end = (start + len as usize).min(bytes.len());
                Ok(Response::Bytes(bytes[start..end].to_vec()))
            }
            Request::Checksums { key, from, max } => {
                count("sums");
                let sum = |place: u64| {
                    let mut image = [0; BLOCK_SIZE];
                    self.nvm
                        .read(place * BLOCK_BYTES, &mut image)
                        .expect("in the region");
                    crc32c::crc32c(&image)
                };
                let files = self.files.lock();
                let file = files.files.get(&key);
                let blocks = file
                    .iter()
                    .flat_map(|file| file.map.range(from.0..from.0 + u64::from(max)));
                let parts = blocks.map(|(&block, &place)| SummedBlocks {
                    file_block: FileBlock(block),
                    number: None,
                    sums: vec![sum(place)],
                });
                Ok(Response::Summed(Summed {
                    parts: parts.collect(),
                    next: None,
                }))
            }
            Request::NoteReads { reads } => {
                count("note");
                self.reads.lock().extend(reads);
                Ok(Response::Done)
            }
            Request::GrowLog { len_bytes } => {
                count("grow");
                let len = len_bytes.min(self.log_max_bytes);
                self.log.grow(len).map_err(|_| IpcError::Errno(libc::ENOSPC))?;
                Ok(Response::LogBytes(len))
            }
            Request::Reserve { blocks, least } => {
                count("reserve");
                let left = self.unreserved.load(Ordering::SeqCst);
                if left < u64::from(least) {
                    return Err(IpcError::Errno(libc::ENOSPC));
                }
                let given = u64::from(blocks).min(left);
                self.unreserved.fetch_sub(given, Ordering::SeqCst);
                Ok(Response::Reserved(given as u32))
            }
            Request::ReturnReservation { blocks, of } => {
                count("back");
                self.vouched.store(of, Ordering::SeqCst);
                self.unreserved.fetch_add(blocks, Ordering::SeqCst);
                Ok(Response::Done)
            }
            Request::Digest { upto, wait } => {
                count("digest");
                if wait && self.obeys.load(Ordering::SeqCst) {
                    self.digest(upto.0);
                }
                Ok(Response::Digested(self.page.digested()))
            }
            other => Err(IpcError::Protocol(format!(
                "the test daemon does not know {other:?}"
            ))),
        }
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}
