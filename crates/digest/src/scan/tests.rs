#![allow(clippy::unwrap_used)]
use super::{Batch, BatchLimit, Cursors, Damage, GatherLimits, LogBytes, gather, seal_scan};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use std::cell::RefCell;
use std::convert::Infallible;
use varve_format::log::{CHUNK_BYTES, EntryMeta, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::{EntryFlags, InodeKey, LogOp, LogSeq, SeqRange, SessionId, TxId};
use zerocopy::IntoBytes;

const S: SessionId = SessionId(7);
const CHUNK: usize = CHUNK_BYTES as usize;

/// A log in memory, and where the next entry of each chunk goes.
struct Log {
    bytes: RefCell<Vec<u8>>,
    ends: Vec<usize>,
}

impl LogBytes for Log {
    type Error = Infallible;

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Infallible> {
        let start = offset as usize;
        out.copy_from_slice(&self.bytes.borrow()[start..start + out.len()]);
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }
}

impl Log {
    fn new(chunks: usize) -> Self {
        let mut ends = vec![0; chunks];
        ends[0] = 64;
        Self {
            bytes: RefCell::new(vec![0; chunks * CHUNK]),
            ends,
        }
    }

    fn reuse(&mut self, chunk: usize) {
        self.ends[chunk] = if chunk == 0 { 64 } else { 0 };
    }

    fn put_meta(&mut self, chunk: usize, session: SessionId, meta: &EntryMeta, data: &[u8]) {
        self.put_data(chunk, session, meta.seq.0, meta, data);
    }

    fn put_write(&mut self, chunk: usize, offset: u64, meta: &EntryMeta, data: &[u8]) {
        self.put_data(chunk, S, offset, meta, data);
    }

    fn put_data(&mut self, chunk: usize, session: SessionId, offset: u64, meta: &EntryMeta, data: &[u8]) {
        let op = LogOp::Write {
            key: InodeKey::new(9, 1),
            offset,
            data,
        };
        let mut header = op.header(meta, 0);
        header.crc32c = entry_crc(payload_crc(crc_seed(session), data), &header).into();
        let at = chunk * CHUNK + self.ends[chunk];
        let mut bytes = self.bytes.borrow_mut();
        bytes[at..at + 64].copy_from_slice(header.as_bytes());
        bytes[at + 64..at + 64 + data.len()].copy_from_slice(data);
        self.ends[chunk] += entry_size(data.len());
    }

    /// One entry that says nothing about what was committed before it.
    fn put(&mut self, chunk: usize, seq: u64, tx_left: u32) {
        self.put_stable(chunk, seq, tx_left, 0);
    }

    fn put_stable(&mut self, chunk: usize, seq: u64, tx_left: u32, stable_below: u64) {
        let meta = EntryMeta {
            seq: LogSeq(seq),
            stable_below: LogSeq(stable_below),
            tx_left,
            ..EntryMeta::default()
        };
        self.put_meta(chunk, S, &meta, &seq.to_le_bytes());
    }

    fn live(&self, digested: u64, limits: &GatherLimits, cursors: &Cursors) -> Batch {
        gather(
            self,
            S,
            LogSeq(digested),
            &|| TxId(0),
            BatchLimit::Live(None),
            limits,
            cursors,
        )
        .unwrap()
    }

    fn all(&self) -> Vec<u64> {
        seqs(&self.live(0, &GatherLimits::default(), &Cursors::new()))
    }

    fn sealed(&self) -> super::SealScan {
        seal_scan(self, S, LogSeq(0), &|| TxId(0), &Cursors::new()).unwrap()
    }
}

fn seqs(batch: &Batch) -> Vec<u64> {
    for entry in &batch.entries {
        let LogOp::Write { offset, data, .. } = batch.op(entry).unwrap() else {
            panic!("not a write")
        };
        assert_eq!((offset, data), (entry.seq().0, &entry.seq().0.to_le_bytes()[..]));
    }
    batch.entries.iter().map(|entry| entry.seq().0).collect()
}

const fn run(first: u64, last: u64) -> SeqRange {
    SeqRange {
        first: LogSeq(first),
        last: LogSeq(last),
    }
}

#[test]
fn gather_merges_lanes_by_number_and_ends_at_a_gap() {
    let mut log = Log::new(3);
    for seq in [1, 4, 6, 9] {
        log.put(0, seq, 0);
    }
    for seq in [2, 3, 5] {
        log.put(2, seq, 0);
    }
    log.put(1, 8, 0);
    let batch = log.live(0, &GatherLimits::default(), &Cursors::new());
    assert_eq!(seqs(&batch), [1, 2, 3, 4, 5, 6]);
    assert_eq!((batch.upto, batch.more), (LogSeq(6), false));
}

#[test]
fn gather_goes_on_where_the_last_batch_ended() {
    let mut log = Log::new(2);
    for seq in 1..=20 {
        log.put((seq % 2) as usize, seq, 0);
    }
    let limits = GatherLimits {
        entries: 3,
        ..GatherLimits::default()
    };
    let (mut digested, mut cursors, mut found) = (0, Cursors::new(), Vec::new());
    loop {
        let batch = log.live(digested, &limits, &cursors);
        found.extend(seqs(&batch));
        if batch.upto.0 == digested {
            break;
        }
        digested = batch.upto.0;
        cursors = batch.cursors;
    }
    assert_eq!(found, (1..=20).collect::<Vec<_>>());
}

#[test]
fn gather_does_not_read_again_what_was_digested() {
    let mut log = Log::new(1);
    for seq in 1..=50 {
        log.put(0, seq, 0);
    }
    let first = log.live(0, &GatherLimits::default(), &Cursors::new());
    // An old entry is spoilt (not the first): a scan from the start would end there.
    log.bytes.borrow_mut()[64 + 10 * 128 + 70] ^= 1;
    log.put(0, 51, 0);
    assert_eq!(
        seqs(&log.live(50, &GatherLimits::default(), &first.cursors)),
        [51]
    );
    assert!(seqs(&log.live(50, &GatherLimits::default(), &Cursors::new())).is_empty());
}

#[test]
fn chunk_used_anew_is_scanned_from_its_start() {
    let mut log = Log::new(2);
    for seq in 1..=6 {
        log.put(1, seq, 0);
    }
    let first = log.live(0, &GatherLimits::default(), &Cursors::new());
    log.reuse(1);
    log.put(1, 7, 0);
    log.put(1, 8, 0);
    // The stale entries 3.. stand after it and have smaller numbers.
    assert_eq!(
        seqs(&log.live(6, &GatherLimits::default(), &first.cursors)),
        [7, 8]
    );
}

#[test]
fn entry_of_another_session_ends_the_chunk() {
    let mut log = Log::new(1);
    log.put(0, 1, 0);
    let meta = EntryMeta {
        seq: LogSeq(2),
        ..EntryMeta::default()
    };
    log.put_meta(0, SessionId(8), &meta, b"x");
    log.put(0, 3, 0);
    assert_eq!(log.all(), [1]);
}

#[test]
fn entry_with_a_number_that_does_not_grow_ends_the_chunk() {
    let mut log = Log::new(2);
    log.put(0, 1, 0);
    log.put(0, 1, 0);
    log.put(0, 2, 0);
    assert_eq!(log.all(), [1]);
    log.put(1, 2, 0);
    log.put(1, 3, 0);
    assert_eq!(log.all(), [1, 2, 3]);
}

#[test]
fn transaction_counts_wholly_or_not_at_all() {
    let mut log = Log::new(2);
    log.put(0, 1, 0);
    log.put(0, 2, 2);
    log.put(0, 3, 1);
    let before = log.live(0, &GatherLimits::default(), &Cursors::new());
    assert_eq!((seqs(&before), before.upto), (vec![1], LogSeq(1)));
    assert_eq!(log.sealed().seal.last, LogSeq(1));
    log.put(0, 4, 0);
    let after = log.live(1, &GatherLimits::default(), &before.cursors);
    assert_eq!(seqs(&after), [2, 3, 4]);
    assert_eq!((after.transactions[0].first, after.transactions[0].len), (0, 3));
    assert_eq!(log.sealed().seal.last, LogSeq(4));
}

#[test]
fn transaction_that_contradicts_itself_is_left_out_and_stalls_nothing() {
    let mut log = Log::new(1);
    for (seq, left) in [(1, 5), (2, 5), (3, 4), (4, 0), (5, 900), (6, 0)] {
        log.put(0, seq, left);
    }
    let batch = log.live(0, &GatherLimits::default(), &Cursors::new());
    assert_eq!((seqs(&batch), batch.upto), (vec![4, 6], LogSeq(6)));
    assert_eq!(batch.refused.len(), 3);
}

#[test]
fn rest_of_a_torn_transaction_in_another_chunk_does_not_count() {
    let mut log = Log::new(2);
    log.put(0, 1, 0);
    // 2 was the first of three and is gone.
    for (seq, tx_left) in [(3, 1), (4, 0)] {
        let meta = EntryMeta {
            seq: LogSeq(seq),
            tx_left,
            flags: EntryFlags::CONTINUES,
            ..EntryMeta::default()
        };
        log.put_meta(1, S, &meta, &seq.to_le_bytes());
    }
    assert_eq!(log.sealed().seal.last, LogSeq(1));
}

/// A log that is read while transactions commit.
struct Meanwhile<'l> {
    log: &'l Log,
    newest: std::cell::Cell<u64>,
}

impl LogBytes for Meanwhile<'_> {
    type Error = Infallible;

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Infallible> {
        self.newest.set(7);
        self.log.read(offset, out)
    }

    fn len_bytes(&self) -> u64 {
        self.log.len_bytes()
    }
}

#[test]
fn entry_that_rests_on_what_was_committed_while_the_log_was_read_counts() {
    let mut log = Log::new(1);
    let meta = EntryMeta {
        seq: LogSeq(1),
        base: varve_format::TxId(7),
        ..EntryMeta::default()
    };
    log.put_meta(0, S, &meta, &1_u64.to_le_bytes());
    let meanwhile = || Meanwhile {
        log: &log,
        newest: std::cell::Cell::new(6),
    };
    let (limits, cursors) = (GatherLimits::default(), Cursors::new());
    let live = meanwhile();
    let newest = || TxId(live.newest.get());
    let batch = gather(
        &live,
        S,
        LogSeq(0),
        &newest,
        BatchLimit::Live(None),
        &limits,
        &cursors,
    )
    .unwrap();
    assert_eq!((seqs(&batch), batch.refused), (vec![1], vec![]));
    let sealed = meanwhile();
    let newest = || TxId(sealed.newest.get());
    let scan = seal_scan(&sealed, S, LogSeq(0), &newest, &cursors).unwrap();
    assert_eq!((scan.seal.last, scan.damage), (LogSeq(1), None));
}

#[test]
fn seal_names_the_gaps_of_lanes_in_flight() {
    let mut log = Log::new(3);
    log.put_stable(0, 1, 0, 1);
    log.put_stable(1, 3, 0, 2);
    log.put_stable(2, 6, 0, 2);
    let scan = log.sealed();
    assert_eq!((scan.seal.last, scan.damage), (LogSeq(6), None));
    assert_eq!(scan.seal.missing, [run(2, 2), run(4, 5)]);
    let cut = BatchLimit::Sealed(&scan.seal);
    let batch = gather(
        &log,
        S,
        LogSeq(0),
        &|| TxId(0),
        cut,
        &GatherLimits::default(),
        &Cursors::new(),
    )
    .unwrap();
    assert_eq!((seqs(&batch), batch.upto), (vec![1, 3, 6], LogSeq(6)));
}

#[test]
fn gap_below_a_stable_number_is_damage_and_ends_the_log() {
    let mut log = Log::new(2);
    log.put_stable(0, 1, 0, 1);
    log.put_stable(0, 3, 0, 2);
    log.put_stable(1, 4, 0, 3);
    log.put_stable(1, 5, 0, 1);
    let scan = log.sealed();
    assert_eq!(scan.seal.last, LogSeq(3));
    assert_eq!(
        scan.damage,
        Some(Damage::Gap {
            seq: LogSeq(4),
            missing: LogSeq(2)
        })
    );
}

#[test]
fn damaged_entry_is_told_when_a_later_one_was_acknowledged_after_it() {
    for (seq, told) in [(3, true), (5, true), (6, false)] {
        let mut log = Log::new(2);
        for seq in 1..=6 {
            log.put_stable(0, seq, 0, seq);
        }
        // The second byte of the payload.
        let at = 64 + (seq as usize - 1) * entry_size(8) + 65;
        log.bytes.borrow_mut()[at] ^= 4;
        let scan = log.sealed();
        assert_eq!(scan.seal.last, LogSeq(seq - 1));
        let damage = told.then_some(Damage::Gap {
            seq: LogSeq(seq + 1),
            missing: LogSeq(seq),
        });
        assert_eq!(scan.damage, damage, "entry {seq}");
    }
}

#[test]
fn more_gaps_than_lanes_are_damage() {
    let mut log = Log::new(1);
    for seq in 1..=80 {
        log.put(0, seq * 2, 0);
    }
    let scan = log.sealed();
    assert_eq!((scan.seal.last, scan.seal.missing.len()), (LogSeq(128), 64));
    assert_eq!(scan.damage, Some(Damage::TooManyGaps(LogSeq(130))));
}

#[test]
fn entry_on_a_future_base_is_refused_alone_in_use_and_ends_a_sealed_log() {
    let mut log = Log::new(1);
    log.put(0, 1, 0);
    let meta = EntryMeta {
        seq: LogSeq(2),
        base: TxId(50),
        ..EntryMeta::default()
    };
    log.put_meta(0, S, &meta, &2_u64.to_le_bytes());
    log.put(0, 3, 0);
    let batch = log.live(0, &GatherLimits::default(), &Cursors::new());
    assert_eq!(
        (seqs(&batch), batch.upto, batch.refused.len()),
        (vec![1, 3], LogSeq(3), 1)
    );
    let scan = log.sealed();
    assert_eq!(scan.seal.last, LogSeq(1));
    assert!(matches!(scan.damage, Some(Damage::FutureBase { .. })));
}

#[test]
fn sealed_entry_that_was_wiped_since_is_reported_and_nothing_after_it_counts() {
    let mut log = Log::new(2);
    log.put(0, 1, 0);
    log.put(1, 2, 0);
    log.put(0, 3, 0);
    log.put(1, 4, 0);
    let seal = log.sealed().seal;
    log.bytes.borrow_mut()[CHUNK + 3] ^= 1;
    let cut = BatchLimit::Sealed(&seal);
    let limits = GatherLimits::default();
    let batch = gather(&log, S, LogSeq(0), &|| TxId(0), cut, &limits, &Cursors::new()).unwrap();
    // 3 is there: a power cut may keep what came later in another chunk.
    assert_eq!(
        (seqs(&batch), batch.upto, batch.more),
        (vec![1], LogSeq(4), false)
    );
    assert_eq!(batch.refused.len(), 1);
}

#[test]
fn number_at_the_end_of_the_range_ends_the_chunk() {
    let mut log = Log::new(1);
    log.put(0, 1, 0);
    log.put(0, u64::MAX, 0);
    assert_eq!(log.sealed().seal.last, LogSeq(1));
    log.reuse(0);
    log.put(0, u64::MAX - 1, 0);
    // A gap of more numbers than a session's row can name.
    let scan = log.sealed();
    assert!(scan.damage.is_some() && scan.seal.missing.is_empty());
}

proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 64, failure_persistence: None, ..Default::default() })]

    /// Lanes commit transactions in any order; some of the last are lost. The seal is what a slow reading of
    /// the rules says.
    #[test]
    fn seal_equals_the_rules_read_slowly(
        steps in prop::collection::vec((0_usize..4, 1_u64..4), 1..60),
        lost in prop::collection::vec(0_u64..3, 4),
    ) {
        let mut log = Log::new(4);
        let mut lanes = vec![Vec::new(); 4];
        let mut seq = 1;
        for (lane, len) in steps {
            lanes[lane].push((seq, len));
            seq += len;
        }
        let mut kept = Vec::new();
        for (lane, txs) in lanes.iter().enumerate() {
            let keep = txs.len().saturating_sub(lost[lane] as usize);
            for (first, len) in &txs[..keep] {
                for at in 0..*len {
                    log.put(lane, first + at, (len - at - 1) as u32);
                    kept.push(first + at);
                }
            }
        }
        kept.sort_unstable();
        let scan = log.sealed();
        prop_assert_eq!(scan.damage, None);
        prop_assert_eq!(scan.seal.last.0, kept.last().copied().unwrap_or(0));
        for seq in 1..=scan.seal.last.0 {
            prop_assert_eq!(scan.seal.covers(LogSeq(seq)), kept.binary_search(&seq).is_ok());
        }
        let cut = BatchLimit::Sealed(&scan.seal);
        let limits = GatherLimits { entries: 5, ..GatherLimits::default() };
        let (mut digested, mut cursors, mut found) = (LogSeq(0), Cursors::new(), Vec::new());
        loop {
            let batch = gather(&log, S, digested, &|| TxId(0), cut, &limits, &cursors).unwrap();
            prop_assert!(batch.refused.is_empty());
            found.extend(seqs(&batch));
            if batch.upto == digested { break }
            digested = batch.upto;
            cursors = batch.cursors;
        }
        prop_assert_eq!(found, kept);
        prop_assert_eq!(digested, scan.seal.last);
    }

    /// Any damage: no panic, an end, and never an entry that was not written.
    #[test]
    fn scan_survives_any_bytes(
        flips in prop::collection::vec((0_usize..2, 0_usize..3000, any::<u8>()), 0..40),
        noise in any::<bool>(),
    ) {
        let mut log = Log::new(2);
        for seq in 1..=30 {
            log.put((seq % 2) as usize, seq, ((30 - seq) % 3) as u32);
        }
        for (chunk, at, value) in flips {
            log.bytes.borrow_mut()[chunk * CHUNK + at] ^= value;
        }
        if noise {
            for (at, byte) in log.bytes.borrow_mut()[CHUNK..CHUNK + 4096].iter_mut().enumerate() {
                *byte = (at as u8).wrapping_mul(31) ^ 0x5a;
            }
        }
        let found = log.all();
        prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
        let scan = log.sealed();
        prop_assert!(scan.seal.missing.windows(2).all(|pair| pair[0].last < pair[1].first));
        let cut = BatchLimit::Sealed(&scan.seal);
        let limits = GatherLimits::default();
        let batch = gather(&log, S, LogSeq(0), &|| TxId(0), cut, &limits, &Cursors::new()).unwrap();
        prop_assert_eq!(batch.upto, scan.seal.last);
    }
}

/// Limits that leave every whole block in the log.
const LEAVE: GatherLimits = GatherLimits {
    bytes: usize::MAX,
    entries: usize::MAX,
    leave_bytes: 4096,
};

impl Log {
    /// Whole blocks as number `seq`, with everything below `stable_below` committed before.
    fn put_blocks(&mut self, seq: u64, stable_below: u64, blocks: usize) {
        let meta = EntryMeta {
            seq: LogSeq(seq),
            stable_below: LogSeq(stable_below),
            ..EntryMeta::default()
        };
        let data = vec![seq as u8; blocks * 4096];
        self.put_write(0, seq * 4096, &meta, &data);
    }

    /// Changes the last byte of what was put in last.
    fn tear(&self) {
        let at = self.ends[0] - 1;
        self.bytes.borrow_mut()[at] ^= 1;
    }
}

#[test]
fn whole_blocks_are_left_in_a_log_in_use_and_others_copied() {
    let mut log = Log::new(1);
    log.put_blocks(1, 0, 1);
    log.put_stable(0, 2, 0, 2);
    log.put_blocks(3, 3, 2);
    log.put_stable(0, 4, 0, 4);
    let batch = log.live(0, &LEAVE, &Cursors::new());
    let left: Vec<_> = batch.entries.iter().map(super::Entry::left_at).collect();
    let second = 64 + entry_size(4096) as u64 + entry_size(8) as u64 + 64;
    assert_eq!(left, [Some(128), None, Some(second), None]);
    assert_eq!((batch.upto, batch.entries.len()), (LogSeq(4), 4));
    assert!(batch.payload(&batch.entries[0]).is_empty());
    let op = batch.op(&batch.entries[2]).unwrap();
    assert!(matches!(
        op,
        LogOp::Write {
            offset: 12_288,
            data: &[],
            ..
        }
    ));
    let sum = payload_crc(crc_seed(S), &[3; 8192]);
    assert!(batch.entries[2].is_sound(sum) && !batch.entries[2].is_sound(sum ^ 1));
    let copied = log.live(0, &LEAVE.copying_all(), &Cursors::new());
    assert!(copied.entries.iter().all(|entry| entry.left_at().is_none()));
    let seal = log.sealed().seal;
    let sealed = gather(
        &log,
        S,
        LogSeq(0),
        &|| TxId(0),
        BatchLimit::Sealed(&seal),
        &LEAVE,
        &Cursors::new(),
    )
    .unwrap();
    assert!(sealed.entries.iter().all(|entry| entry.left_at().is_none()));
}

#[test]
fn last_entries_are_looked_at_before_they_are_left() {
    let mut log = Log::new(1);
    log.put_blocks(1, 0, 1);
    log.put_blocks(2, 2, 1);
    log.tear();
    // Its thread may be about to write it: nothing says that it was committed.
    let batch = log.live(0, &LEAVE, &Cursors::new());
    assert_eq!((batch.upto, batch.entries.len()), (LogSeq(1), 1));
    log.tear();
    log.put_blocks(3, 2, 1);
    log.tear();
    let batch = log.live(0, &LEAVE, &Cursors::new());
    assert_eq!(batch.upto, LogSeq(2));
}

#[test]
fn nothing_is_refused_by_what_was_left() {
    let mut log = Log::new(1);
    log.put(0, 1, 0);
    // Bytes of an older use of the chunk that look like the middle of a transaction.
    log.put_data(
        0,
        SessionId(8),
        0,
        &EntryMeta {
            seq: LogSeq(2),
            flags: EntryFlags::CONTINUES,
            ..EntryMeta::default()
        },
        &[2; 4096],
    );
    let batch = log.live(0, &LEAVE, &Cursors::new());
    assert_eq!((batch.upto, batch.refused.as_slice()), (LogSeq(1), &[][..]));
}
