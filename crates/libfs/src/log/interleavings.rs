//! Lanes, numbers and the page under a scheduler that tries interleavings: a scan must find every entry that
//! a thread was told is committed. Run by `cargo test -p varve-libfs --features shuttle --lib interleavings`.
#![allow(clippy::unwrap_used)]

use super::{Log, LogHost, LogOptions, Stamp};
use crate::errno::OpError;
use crate::seeded::{self, Bug};
use crate::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::collections::BTreeMap;
use std::sync::Arc;
use varve_format::log::{CHUNK_BYTES, HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::{EntryFlags, EntryHeader, InodeKey, LogOp, LogSeq, SessionId, TxId};
use varve_ipc::{IpcError, PageState, SessionPage};
use varve_media::Region;
use varve_media::sim::{SimMedium, SimWorld};
use zerocopy::FromBytes;

const SESSION: SessionId = SessionId(7);
const CHUNKS: u64 = 16;

/// A session page whose words the scheduler sees.
#[derive(Default)]
pub(crate) struct DrivenPage {
    pub(crate) sealed: AtomicU64,
    pub(crate) digested: AtomicU64,
}

impl SessionPage for DrivenPage {
    fn state(&self) -> PageState {
        match self.sealed.load(Ordering::SeqCst) {
            0 => PageState::Live,
            _ => PageState::Sealed,
        }
    }

    fn digested(&self) -> LogSeq {
        LogSeq(self.digested.load(Ordering::SeqCst))
    }

    fn committed_tx(&self) -> TxId {
        TxId(0)
    }

    fn watched(&self) -> u64 {
        0
    }
}

/// Never needed: the log is large enough.
struct NoHost;

impl LogHost for NoHost {
    fn grow(&self, _: u64) -> Result<u64, IpcError> {
        Err(IpcError::Errno(libc::ENOSPC))
    }

    fn digest(&self, _: LogSeq, _: bool) -> Result<(), IpcError> {
        Ok(())
    }

    fn prune(&self, _: LogSeq) {}
}

struct Stage {
    log: Log,
    page: Arc<DrivenPage>,
    region: Arc<dyn Region>,
}

fn stage() -> Arc<Stage> {
    let region: Arc<dyn Region> =
        SimWorld::new().add_region("log", SimMedium::Dax, CHUNKS * CHUNK_BYTES, CHUNKS * CHUNK_BYTES);
    let page = Arc::new(DrivenPage::default());
    let options = LogOptions {
        session: SESSION,
        len_bytes: CHUNKS * CHUNK_BYTES,
        max_bytes: CHUNKS * CHUNK_BYTES,
        digest_percent: 90,
        wait_ms: 1_000,
    };
    let log = Log::new(Arc::clone(&region), Arc::clone(&page) as _, options);
    Arc::new(Stage { log, page, region })
}

impl Stage {
    /// Returns every whole entry: its number, and the number below which all were published.
    fn scan(&self) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        for chunk in 0..CHUNKS {
            let mut at = super::chunks::chunk_start(chunk);
            loop {
                let mut bytes = [0; HEADER_SIZE];
                self.region.read(at, &mut bytes).unwrap();
                let header = EntryHeader::read_from_bytes(&bytes).unwrap();
                let (seq, len) = (header.seq.get(), header.payload_len.get() as usize);
                if seq == 0 || len > 4096 {
                    break;
                }
                let mut payload = vec![0; len];
                self.region.read(at + HEADER_SIZE as u64, &mut payload).unwrap();
                if entry_crc(payload_crc(crc_seed(SESSION), &payload), &header) != header.crc32c.get() {
                    break;
                }
                found.insert(seq, seq - u64::from(header.stable_delta.get()));
                at += entry_size(len) as u64;
            }
        }
        found
    }

    /// Logs one write; returns its number, and whether it may be acknowledged.
    fn append(&self, data: &[u8]) -> (u64, bool) {
        let op = LogOp::Write {
            key: InodeKey::new(5, 1),
            offset: 0,
            data,
        };
        let slot = self.log.reserve::<()>(&NoHost, entry_size(data.len())).unwrap();
        let committed = slot
            .append::<()>(&op, EntryFlags::empty(), Stamp::default())
            .unwrap();
        let seq = committed.seqs.first.0;
        match committed.check(()) {
            Ok(()) => (seq, true),
            Err(OpError::SessionLost { .. }) => (seq, false),
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Two threads log, a third seals and scans: every acknowledged entry is in the scan, and so is everything
/// below a stable mark in it.
fn acknowledged_is_scanned() {
    let stage = stage();
    let writers: Vec<_> = (0..2_u8)
        .map(|thread| {
            let stage = Arc::clone(&stage);
            thread::spawn(move || [stage.append(&[thread; 40]), stage.append(&[thread; 700])])
        })
        .collect();
    // Store the page, then scan: the scheduler is sequentially consistent, so the barrier does nothing here.
    stage.page.sealed.store(1, Ordering::SeqCst);
    let scan = stage.scan();
    for stable_below in scan.values() {
        for seq in 1..*stable_below {
            assert!(scan.contains_key(&seq), "{seq} was said to be stable: {scan:?}");
        }
    }
    for writer in writers {
        for (seq, acknowledged) in writer.join().unwrap() {
            assert!(
                !acknowledged || scan.contains_key(&seq),
                "{seq} was acknowledged: {scan:?}"
            );
        }
    }
}

/// One thread logs, another takes a number and abandons it, a third logs after that, a fourth seals and
/// scans.
fn abandoned_number_claims_nothing() {
    let stage = stage();
    let writers: Vec<_> = (0..2_u8)
        .map(|thread| {
            let stage = Arc::clone(&stage);
            thread::spawn(move || vec![stage.append(&[thread; 40])])
        })
        .collect();
    let abandoner = {
        let stage = Arc::clone(&stage);
        thread::spawn(move || {
            let mut slot = stage.log.reserve::<()>(&NoHost, HEADER_SIZE).unwrap();
            let number = slot.take_number();
            slot.abandon(number);
        })
    };
    // The others run as long as the scheduler likes.
    thread::yield_now();
    let scan = stage.scan();
    for stable_below in scan.values() {
        for seq in 1..*stable_below {
            assert!(scan.contains_key(&seq), "{seq} was said to be stable: {scan:?}");
        }
    }
    abandoner.join().unwrap();
    for writer in writers {
        writer.join().unwrap();
    }
}

#[test]
fn abandoned_number_says_of_lower_ones_no_more_than_is_so() {
    shuttle::check_random(abandoned_number_claims_nothing, 3_000);
    shuttle::check_pct(abandoned_number_claims_nothing, 2_000, 3);
}

#[test]
fn abandoned_number_that_claims_all_lower_ones_is_caught() {
    let found = seeded::is_found(Bug::NoopClaimsStable, &[abandoned_number_claims_nothing]);
    assert!(found, "the seeded bug is not found");
}

#[test]
fn what_is_acknowledged_is_in_the_scan_after_the_seal() {
    shuttle::check_random(acknowledged_is_scanned, 3_000);
    shuttle::check_pct(acknowledged_is_scanned, 2_000, 3);
}

#[test]
fn acknowledging_without_a_look_at_the_page_is_caught() {
    let found = seeded::is_found(Bug::AckWithoutPageCheck, &[acknowledged_is_scanned]);
    assert!(found, "the seeded bug is not found");
}

/// A number is not droppable while its thread has not published it.
fn unpublished_is_not_dropped() {
    let stage = stage();
    let published: Arc<[AtomicU64; 4]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
    let writers: Vec<_> = (0..2_u8)
        .map(|thread| {
            let (stage, published) = (Arc::clone(&stage), Arc::clone(&published));
            thread::spawn(move || {
                let data = [thread; 100];
                let op = LogOp::Write {
                    key: InodeKey::new(5, 1),
                    offset: 0,
                    data: &data,
                };
                let slot = stage.log.reserve::<()>(&NoHost, entry_size(data.len())).unwrap();
                let committed = slot
                    .append::<()>(&op, EntryFlags::empty(), Stamp::default())
                    .unwrap();
                published[committed.seqs.first.0 as usize].store(1, Ordering::SeqCst);
                drop(committed);
            })
        })
        .collect();
    // The daemon digests all entries up to the first gap.
    let scan = stage.scan();
    let dense = (1..).take_while(|seq| scan.contains_key(seq)).last().unwrap_or(0);
    stage.page.digested.store(dense, Ordering::SeqCst);
    let droppable = stage.log.droppable();
    for seq in 1..=droppable as usize {
        assert_eq!(published[seq].load(Ordering::SeqCst), 1, "{seq} may be dropped");
    }
    for writer in writers {
        writer.join().unwrap();
    }
    assert_eq!(stage.log.stable_below(), LogSeq(3));
}

#[test]
fn chunk_is_not_given_back_under_a_number_that_is_in_flight() {
    shuttle::check_random(unpublished_is_not_dropped, 3_000);
    shuttle::check_pct(unpublished_is_not_dropped, 2_000, 3);
}

#[test]
fn number_that_is_taken_before_it_is_in_flight_is_caught() {
    let works = [
        unpublished_is_not_dropped as fn(),
        acknowledged_is_scanned as fn(),
    ];
    let found = seeded::is_found(Bug::NumberBeforeFlight, &works);
    assert!(found, "the seeded bug is not found");
}

/// `fsync` returns when entries committed before are synced, no matter which thread ran the round.
fn sync_covers_what_was_committed() {
    let world = SimWorld::new();
    let bytes = CHUNKS * CHUNK_BYTES;
    let region: Arc<dyn Region> = world.add_region("log", SimMedium::File, bytes, bytes);
    let page = Arc::new(DrivenPage::default());
    let options = LogOptions {
        session: SESSION,
        len_bytes: bytes,
        max_bytes: bytes,
        digest_percent: 90,
        wait_ms: 1_000,
    };
    let log = Log::new(Arc::clone(&region), Arc::clone(&page) as _, options);
    let stage = Arc::new(Stage { log, page, region });
    world.start_recording();
    let threads: Vec<_> = (0..3_u8)
        .map(|thread| {
            let (stage, world) = (Arc::clone(&stage), world.clone());
            thread::spawn(move || {
                let (seq, _) = stage.append(&[thread; 64]);
                stage.log.sync_upto(LogSeq(seq)).unwrap();
                (seq, world.events_len())
            })
        })
        .collect();
    let returned: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let recording = world.finish_recording();
    for (seq, events) in returned {
        let after = recording
            .image(events, varve_media::sim::Crash::PowerNone)
            .into_world();
        let survived = Stage {
            region: after.region("log").unwrap(),
            log: Log::new(
                after.region("log").unwrap(),
                Arc::clone(&stage.page) as _,
                options,
            ),
            page: Arc::clone(&stage.page),
        };
        assert!(survived.scan().contains_key(&seq), "{seq} was synced");
    }
}

#[test]
fn sync_round_covers_all_who_waited_for_it() {
    shuttle::check_random(sync_covers_what_was_committed, 2_000);
    shuttle::check_pct(sync_covers_what_was_committed, 1_000, 3);
}
