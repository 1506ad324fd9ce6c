//! The log by itself: every committed entry is found by a scan, numbers are dense, chunks come back, a full
//! log waits.
#![allow(clippy::unwrap_used)]

use super::{Log, LogHost, LogOptions, Stamp};
use crate::data::tests::fake::{SESSION, region, scan};
use crate::errno::{Errno, OpError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::log::{CHUNK_BYTES, entry_size};
use varve_format::{EntryFlags, InodeKey, LogOp, LogSeq, OpCode, TxId};
use varve_ipc::{IpcError, Page};
use varve_media::lock::Mutex;
use varve_media::{Backing, DeviceInfo, MappedOptions, MappedRegion, MediaError, MediumKind, Region};

const NONE: EntryFlags = EntryFlags::empty();

struct Host {
    region: Arc<dyn Region>,
    page: Arc<Page>,
    max_bytes: u64,
    digests: bool,
    pruned: AtomicU64,
    asked: Mutex<Vec<(u64, bool)>>,
    looks: AtomicU64,
}

impl LogHost for Host {
    fn look_ahead(&self) {
        self.looks.fetch_add(1, Ordering::SeqCst);
    }

    fn grow(&self, len_bytes: u64) -> Result<u64, IpcError> {
        let len = len_bytes.min(self.max_bytes);
        self.region.grow(len).map_err(|_| IpcError::Errno(libc::ENOSPC))?;
        Ok(len)
    }

    fn digest(&self, upto: LogSeq, wait: bool) -> Result<(), IpcError> {
        self.asked.lock().push((upto.0, wait));
        if self.digests {
            // As far as there is no gap.
            let found = scan(&*self.region);
            let mut last = varve_ipc::SessionPage::digested(&*self.page).0;
            while last < upto.0 && found.contains_key(&(last + 1)) {
                last += 1;
            }
            self.page.set_digested(LogSeq(last));
        }
        Ok(())
    }

    fn prune(&self, digested: LogSeq) {
        self.pruned.fetch_max(digested.0, Ordering::SeqCst);
    }
}

fn log(chunks: u64, max_chunks: u64, digests: bool) -> (Log, Host, tempfile::TempDir) {
    // Long enough that a busy machine does not matter.
    log_that_waits(chunks, max_chunks, digests, 60_000)
}

fn log_that_waits(
    chunks: u64,
    max_chunks: u64,
    digests: bool,
    wait_ms: u64,
) -> (Log, Host, tempfile::TempDir) {
    let dir = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap();
    let max_bytes = max_chunks * CHUNK_BYTES;
    let region = region(dir.path(), "log", chunks * CHUNK_BYTES, max_bytes);
    log_over(region, (chunks, max_chunks), digests, wait_ms, dir)
}

fn log_over(
    region: Arc<dyn Region>,
    (chunks, max_chunks): (u64, u64),
    digests: bool,
    wait_ms: u64,
    dir: tempfile::TempDir,
) -> (Log, Host, tempfile::TempDir) {
    let (log, host) = log_in(region, chunks, max_chunks * CHUNK_BYTES, digests, wait_ms);
    (log, host, dir)
}

fn log_in(region: Arc<dyn Region>, chunks: u64, max_bytes: u64, digests: bool, wait_ms: u64) -> (Log, Host) {
    let page = Arc::new(Page::heap(SESSION));
    let options = LogOptions {
        session: SESSION,
        len_bytes: chunks * CHUNK_BYTES,
        max_bytes,
        digest_percent: 30,
        wait_ms,
    };
    let log = Log::new(region.clone(), page.clone(), options);
    let host = Host {
        region,
        page,
        max_bytes,
        digests,
        pruned: AtomicU64::new(0),
        asked: Mutex::new(Vec::new()),
        looks: AtomicU64::new(0),
    };
    (log, host)
}

fn key() -> InodeKey {
    InodeKey::new(5, 1)
}

#[test]
fn entries_of_several_threads_are_found_dense_when_scanned() {
    let (log, host, _dir) = log(2, 32, false);
    std::thread::scope(|scope| {
        for thread in 0..5_u64 {
            let (log, host) = (&log, &host);
            scope.spawn(move || {
                for step in 0..150_u64 {
                    let data = vec![thread as u8; 1 + (step * 97 % 3000) as usize];
                    let op = LogOp::Write {
                        key: key(),
                        offset: thread << 32 | step,
                        data: &data,
                    };
                    let mut slot = log.reserve::<()>(host, entry_size(data.len())).unwrap();
                    if step % 3 == 0 {
                        slot.stage::<()>(host, &op, NONE).unwrap();
                        drop(slot.commit::<()>(Stamp::default(), 0).unwrap());
                    } else {
                        drop(
                            slot.append::<()>(
                                &op,
                                NONE,
                                Stamp {
                                    time_ns: 1,
                                    base: TxId(4),
                                },
                            )
                            .unwrap(),
                        );
                    }
                }
            });
        }
    });
    let found = scan(&*host.region);
    assert_eq!(
        found.keys().copied().collect::<Vec<_>>(),
        (1..=750).collect::<Vec<_>>()
    );
    assert_eq!(log.stable_below(), LogSeq(751));
    let mut steps = [0; 5];
    for entry in found.values() {
        let thread = (entry.header.offset.get() >> 32) as usize;
        assert_eq!(
            entry.header.offset.get() & 0xffff_ffff,
            steps[thread],
            "a thread's entries are in its order"
        );
        steps[thread] += 1;
        assert!(entry.payload.iter().all(|byte| *byte == thread as u8));
        assert!(u64::from(entry.header.stable_delta.get()) < 750);
    }
}

#[test]
fn transaction_of_names_has_one_commit() {
    let (log, host, _dir) = log(1, 1, false);
    let dir = InodeKey::new(1, 1);
    let ops = [
        (
            LogOp::Create {
                dir,
                name: b"f",
                key: key(),
                mode: 0o100_644,
                uid: 1,
                gid: 2,
                rdev: 0,
                target: b"",
            },
            NONE,
        ),
        (
            LogOp::SetXattr {
                key: key(),
                name: b"user.a",
                value: &[7; 900],
            },
            NONE,
        ),
        (
            LogOp::Unlink {
                dir,
                name: b"f",
                key: key(),
            },
            EntryFlags::LAST_CLOSED,
        ),
    ];
    let slot = log.reserve::<()>(&host, 4096).unwrap();
    let committed = slot
        .append_all::<()>(
            &ops,
            Stamp {
                time_ns: 77,
                base: TxId(2),
            },
        )
        .unwrap();
    assert_eq!(
        (committed.seqs.first, committed.seqs.last, committed.live),
        (LogSeq(1), LogSeq(3), true)
    );
    let value = committed.entries()[1];
    let mut back = vec![0; value.len as usize];
    host.region.read(value.addr, &mut back).unwrap();
    assert_eq!(back, [7; 900]);
    drop(committed);
    let found: Vec<_> = scan(&*host.region).into_values().collect();
    for (index, (entry, (op, flags))) in found.iter().zip(&ops).enumerate() {
        assert_eq!(LogOp::parse(&entry.header, &entry.payload).as_ref(), Ok(op));
        let mut want = *flags;
        want.set(EntryFlags::CONTINUES, index > 0);
        assert_eq!(entry.header.flags, want.bits());
        assert_eq!(
            (entry.header.tx_left.get(), entry.header.time_ns.get()),
            (2 - index as u32, 77)
        );
    }
    assert_eq!(found.len(), 3);
}

#[test]
fn number_in_flight_holds_back_what_is_stable_and_what_may_be_dropped() {
    let (log, host, _dir) = log(8, 256, true);
    let has_lane = || super::slots::lane() < log.own_lanes;
    if !has_lane() {
        eprintln!("skipped: more threads than lanes run at once");
        return;
    }
    let op = LogOp::Write {
        key: key(),
        offset: 0,
        data: &[1; 100],
    };
    let first = log
        .reserve::<()>(&host, 1024)
        .unwrap()
        .append::<()>(&op, NONE, Stamp::default())
        .unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // In the shared lane, if need be: the first thread holds one of its own.
            let second = log
                .reserve::<()>(&host, 1024)
                .unwrap()
                .append::<()>(&op, NONE, Stamp::default())
                .unwrap();
            assert_eq!(second.seqs.first, LogSeq(2));
        });
    });
    let found = scan(&*host.region);
    assert_eq!(
        found[&2].header.stable_delta.get(),
        1,
        "number 1 was not published when 2 was written"
    );
    host.digest(LogSeq(2), true).unwrap();
    assert_eq!((log.stable_below(), log.droppable()), (LogSeq(1), 0));
    drop(first);
    assert_eq!((log.stable_below(), log.droppable()), (LogSeq(3), 2));
    log.reclaim(&host);
    assert_eq!(host.pruned.load(Ordering::SeqCst), 2);
}

#[test]
fn abandoned_number_is_a_noop_and_a_dropped_stage_leaves_nothing() {
    let (log, host, _dir) = log(4, 4, false);
    let op = LogOp::Write {
        key: key(),
        offset: 0,
        data: &[9; 5000],
    };
    let mut slot = log.reserve::<()>(&host, entry_size(5000)).unwrap();
    let number = slot.take_number();
    slot.abandon(number);
    drop(slot);
    let mut slot = log.reserve::<()>(&host, entry_size(5000)).unwrap();
    slot.stage::<()>(&host, &op, NONE).unwrap();
    drop(slot);
    // Staged over several chunks and dropped: the chunks come back.
    let big = vec![3; 900_000];
    for _ in 0..10 {
        let mut slot = log.reserve::<()>(&host, 64).unwrap();
        for _ in 0..5 {
            slot.stage::<()>(
                &host,
                &LogOp::Write {
                    key: key(),
                    offset: 0,
                    data: &big,
                },
                NONE,
            )
            .unwrap();
        }
    }
    drop(
        log.reserve::<()>(&host, entry_size(5000))
            .unwrap()
            .append::<()>(&op, NONE, Stamp::default())
            .unwrap(),
    );
    let found = scan(&*host.region);
    let ops: Vec<u8> = found.values().map(|entry| entry.header.op).collect();
    assert_eq!(ops, [OpCode::Noop as u8, OpCode::Write as u8]);
    assert!(LogOp::parse(&found[&1].header, &found[&1].payload).is_ok());
}

#[test]
fn chunks_are_used_again_only_when_digested() {
    let (log, host, _dir) = log(1, 3, true);
    let data = vec![5; 50_000];
    for step in 0..500_u64 {
        let op = LogOp::Write {
            key: key(),
            offset: step,
            data: &data,
        };
        drop(
            log.reserve::<()>(&host, entry_size(data.len()))
                .unwrap()
                .append::<()>(&op, NONE, Stamp::default())
                .unwrap(),
        );
        let digested = varve_ipc::SessionPage::digested(&*host.page).0;
        let found = scan(&*host.region);
        for seq in digested + 1..=step + 1 {
            assert!(
                found.contains_key(&seq),
                "number {seq} is neither digested nor in the log"
            );
        }
    }
    assert!(log.len_bytes() <= 3 * CHUNK_BYTES);
    assert!(
        host.asked.lock().iter().any(|(_, wait)| !wait),
        "a digest is asked for before the log is full"
    );
}

#[test]
fn chunk_that_was_used_is_used_again_before_one_that_was_not() {
    let (log, host, _dir) = log(64, 64, true);
    let data = vec![1; 64 << 10];
    let op = LogOp::Write {
        key: key(),
        offset: 0,
        data: &data,
    };
    let mut highest = 0;
    // Twice as many bytes as the log has.
    for step in 0..2 * 64 * 31 {
        let slot = log.reserve::<()>(&host, entry_size(data.len() + 8)).unwrap();
        let committed = slot.append::<()>(&op, NONE, Stamp::default()).unwrap();
        highest = highest.max(committed.entries()[0].addr / CHUNK_BYTES);
        drop(committed);
        if step % 31 == 0 {
            host.digest(log.last_seq(), false).unwrap();
        }
    }
    assert!(highest < 8, "chunk {highest} of 64 was needed");
}

#[test]
fn full_log_fails_with_enospc_after_the_wait_when_nothing_is_digested() {
    let (log, host, _dir) = log_that_waits(1, 2, false, 100);
    let data = vec![5; 1 << 20];
    let mut entries = 0;
    let error = loop {
        match log.reserve::<()>(&host, entry_size(data.len())) {
            Ok(slot) => {
                let op = LogOp::Write {
                    key: key(),
                    offset: 0,
                    data: &data,
                };
                drop(slot.append::<()>(&op, NONE, Stamp::default()).unwrap());
                entries += 1;
            }
            Err(error) => break error,
        }
    };
    assert_eq!((error, entries), (OpError::Failed(Errno(libc::ENOSPC)), 2));
    host.page.seal();
    assert_eq!(log.reserve::<()>(&host, 100).err(), Some(OpError::lost()));
}

#[test]
fn writer_of_a_full_log_goes_on_with_the_next_record_of_a_long_digest() {
    let (log, host, _dir) = log(1, 2, false);
    let data = vec![5; 1 << 20];
    let op = LogOp::Write {
        key: key(),
        offset: 0,
        data: &data,
    };
    let fill = || {
        let slot = log.reserve::<()>(&host, entry_size(data.len())).unwrap();
        drop(slot.append::<()>(&op, NONE, Stamp::default()).unwrap());
    };
    // One in each chunk.
    fill();
    fill();
    std::thread::scope(|scope| {
        let third = scope.spawn(fill);
        while !host.asked.lock().iter().any(|(upto, _)| *upto == 2) {
            std::thread::yield_now();
        }
        // Longer than most records take. The digest goes on behind its first one.
        std::thread::sleep(std::time::Duration::from_millis(20));
        host.page.set_digested(LogSeq(1));
        third.join().unwrap();
    });
    let asked = host.asked.lock();
    assert!(asked.iter().all(|(_, wait)| !wait), "{asked:?}");
    assert!(asked.len() < 4, "{asked:?}");
}

#[test]
fn second_slot_of_a_thread_is_refused() {
    let (log, host, _dir) = log(8, 256, false);
    if super::slots::lane() >= log.own_lanes {
        eprintln!("skipped: more threads than lanes run at once");
        return;
    }
    let _slot = log.reserve::<()>(&host, 100).unwrap();
    assert_eq!(
        log.reserve::<()>(&host, 100).err(),
        Some(OpError::Failed(Errno(libc::EDEADLK)))
    );
}

#[test]
fn more_threads_than_lanes_share_one() {
    let (log, host, _dir) = log(2, 4, true);
    // With four chunks one thread has a lane of its own; the others share.
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let op = LogOp::Write {
                        key: key(),
                        offset: 0,
                        data: &[1; 20_000],
                    };
                    let slot = log.reserve::<()>(&host, entry_size(20_000)).unwrap();
                    drop(slot.append::<()>(&op, NONE, Stamp::default()).unwrap());
                }
            });
        }
    });
    assert_eq!(log.last_seq(), LogSeq(300));
    host.digest(LogSeq(300), true).unwrap();
    assert_eq!(varve_ipc::SessionPage::digested(&*host.page), LogSeq(300));
}

#[test]
fn sync_returns_and_covers_all_lanes() {
    let dir = tempfile::tempdir().unwrap();
    let options = MappedOptions {
        backing: Backing::File,
        len_bytes: 4 * CHUNK_BYTES,
        max_bytes: 8 * CHUNK_BYTES,
        sparse: false,
    };
    let region = MappedRegion::create(&dir.path().join("log"), options).unwrap();
    let (log, host) = log_in(Arc::new(region), 4, 8 * CHUNK_BYTES, false, 60_000);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let op = LogOp::Write {
                        key: key(),
                        offset: 0,
                        data: &[1; 9_000],
                    };
                    let slot = log.reserve::<()>(&host, entry_size(9_000)).unwrap();
                    drop(slot.append::<()>(&op, NONE, Stamp::default()).unwrap());
                    log.sync_upto(log.last_seq()).unwrap();
                }
            });
        }
    });
    assert!(log.pool.lock().unsynced.is_empty());
}

fn append(log: &Log, host: &Host, bytes: usize) {
    let op = LogOp::Write {
        key: key(),
        offset: 0,
        data: &vec![1; bytes],
    };
    let slot = log.reserve::<()>(host, entry_size(bytes)).unwrap();
    drop(slot.append::<()>(&op, NONE, Stamp::default()).unwrap());
}

#[test]
fn log_becomes_longer_before_its_last_chunk_is_full_when_somebody_looks_ahead() {
    let (log, host, _dir) = log(2, 7, false);
    append(&log, &host, 100);
    assert_eq!(host.looks.load(Ordering::SeqCst), 0, "one of two chunks is free");
    log.look_ahead(&host);
    assert_eq!(log.len_bytes(), 2 * CHUNK_BYTES);
    append(&log, &host, 1 << 20);
    append(&log, &host, 1 << 20);
    assert_eq!(host.looks.load(Ordering::SeqCst), 1, "none is free");
    log.look_ahead(&host);
    assert_eq!(log.len_bytes(), 6 * CHUNK_BYTES);
    log.look_ahead(&host);
    assert_eq!(log.len_bytes(), 6 * CHUNK_BYTES, "four of six are free");
    (0..3).for_each(|_| append(&log, &host, 1 << 20));
    log.look_ahead(&host);
    assert_eq!(log.len_bytes(), 7 * CHUNK_BYTES, "and not beyond its limit");
}

/// A region that records the ranges that it was told to prepare, and says that its syncs write something.
struct Readied(Arc<dyn Region>, Mutex<Vec<u64>>);

impl Region for Readied {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.0.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.0.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.0.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.0.fence()
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.sync(off, len)
    }

    fn prepare(&self, off: u64, len: u64) -> Result<(), MediaError> {
        assert_eq!(len, CHUNK_BYTES);
        self.1.lock().push(off / CHUNK_BYTES);
        Ok(())
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.0.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.allocate(off, len)
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: MediumKind::File,
            ..self.0.info()
        }
    }
}

#[test]
fn chunks_that_come_next_are_readied_when_the_program_syncs_a_little() {
    let dir = tempfile::tempdir().unwrap();
    let inner = region(dir.path(), "log", 16 * CHUNK_BYTES, 16 * CHUNK_BYTES);
    let readied = Arc::new(Readied(inner, Mutex::default()));
    let (log, host, _dir) = log_over(Arc::clone(&readied) as _, (16, 16), false, 60_000, dir);
    append(&log, &host, 100);
    log.look_ahead(&host);
    assert!(readied.1.lock().is_empty(), "nobody syncs");
    log.sync_upto(log.last_seq()).unwrap();
    assert!(log.note_sync(), "there is work now");
    log.look_ahead(&host);
    let first: Vec<u64> = std::mem::take(&mut readied.1.lock());
    assert!(
        [0, 1, 2, 3, 4].iter().all(|chunk| first.contains(chunk)),
        "{first:?}"
    );
    assert!(!first.contains(&15), "not all at once: {first:?}");
    append(&log, &host, 100);
    log.sync_upto(log.last_seq()).unwrap();
    assert!(!log.note_sync(), "it is known");
    assert_eq!(host.looks.load(Ordering::SeqCst), 0);
    // The next chunk is taken: the background thread is told.
    (0..2).for_each(|_| append(&log, &host, 1 << 20));
    assert_eq!(host.looks.load(Ordering::SeqCst), 1);
    log.sync_upto(log.last_seq()).unwrap();
    assert!(!log.note_sync());
    log.look_ahead(&host);
    assert!(readied.1.lock().is_empty(), "what was written is much: {first:?}");
}

#[test]
fn log_in_memory_remembers_nothing_to_sync() {
    let (log, host, _dir) = log(4, 8, true);
    for _ in 0..200 {
        append(&log, &host, 60_000);
        log.sync_upto(log.last_seq()).unwrap();
    }
    assert!(log.pool.lock().unsynced.is_empty());
}
