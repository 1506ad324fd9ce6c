//! The overlay against a model with one entry a byte.
#![allow(clippy::unwrap_used)]

use super::{Pieces, Radix, Source, is_clean};
use proptest::prelude::{Just, ProptestConfig, Strategy, prop, prop_oneof, proptest};
use varve_format::{BLOCK_BYTES, LogSeq};

const SPAN: u64 = 40 * BLOCK_BYTES;

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64),
    /// Whole blocks, published after `delay` later steps, as an overwrite in place may be.
    InPlace(u64, u64, usize),
    Zero(u64, u64),
    Truncate(u64),
    Prune(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let blocks = SPAN / BLOCK_BYTES;
    prop_oneof![
        4 => (0..SPAN, 1..6000_u64).prop_map(|(at, len)| Step::Write(at, len)),
        2 => (0..SPAN, 1..200_u64).prop_map(|(at, len)| Step::Write(at, len)),
        3 => (0..blocks, 1..4_u64, 0..3_usize).prop_map(|(block, len, delay)| Step::InPlace(block, len, delay)),
        2 => (0..SPAN, 1..20_000_u64).prop_map(|(at, len)| Step::Zero(at, len)),
        1 => (0..SPAN).prop_map(Step::Truncate),
        2 => (0..30_u64).prop_map(Step::Prune),
    ]
}

/// The newest operation on a byte.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Byte {
    seq: u64,
    source: Source,
}

const BELOW: Byte = Byte {
    seq: 0,
    source: Source::Below,
};

struct Model {
    bytes: Vec<Byte>,
    next_addr: u64,
    seq: u64,
}

impl Model {
    fn put(&mut self, start: u64, end: u64, seq: u64, addr: Option<u64>) {
        for at in start..end.min(self.bytes.len() as u64) {
            let byte = &mut self.bytes[at as usize];
            if byte.seq < seq {
                *byte = Byte {
                    seq,
                    source: addr.map_or(Source::Zero, |addr| Source::Log(addr + at - start)),
                };
            }
        }
    }
}

fn check(radix: &Radix, pieces: &Pieces, model: &Model) {
    let end = model.bytes.len() as u64;
    let mut pos = 0;
    while pos < end {
        let (source, stop) = pieces.find(radix.get(pos / BLOCK_BYTES), pos, end);
        assert!(stop > pos && stop <= (pos / BLOCK_BYTES + 1) * BLOCK_BYTES);
        for at in pos..stop {
            let want = match source {
                Source::Log(addr) => Source::Log(addr + at - pos),
                other => other,
            };
            assert_eq!(model.bytes[at as usize].source, want, "byte {at}");
        }
        pos = stop;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn lookup_finds_the_newest_byte_when_steps_are_random(
        steps in prop::collection::vec(step(), 1..60),
        base in prop_oneof![Just(0_u64), Just(3_u64), Just(511_u64), Just((1 << 18) - 20), Just(1_u64 << 30)],
    ) {
        let (radix, mut pieces) = (Radix::new(), Pieces::new());
        // The file begins at block `base`, so that every level of the radix is used.
        let shift = base * BLOCK_BYTES;
        let mut model = Model { bytes: vec![BELOW; SPAN as usize], next_addr: 64, seq: 0 };
        let mut late: Vec<(usize, u64, u64, u64, u64)> = Vec::new();
        for (now, step) in steps.into_iter().enumerate() {
            model.seq += 1;
            let seq = model.seq;
            match step {
                Step::Write(at, len) => {
                    let addr = model.next_addr;
                    let end = at + len;
                    let mut pos = at;
                    while pos < end {
                        let stop = end.min((pos / BLOCK_BYTES + 1) * BLOCK_BYTES);
                        let block = base + pos / BLOCK_BYTES;
                        if stop - pos == BLOCK_BYTES {
                            radix.publish(block, 1, addr + pos - at, LogSeq(seq));
                            pieces.forget_block(block);
                        } else {
                            let within = (pos % BLOCK_BYTES) as u16;
                            pieces.put(
                                block,
                                within,
                                within + (stop - pos) as u16,
                                addr + pos - at,
                                LogSeq(seq),
                            );
                        }
                        pos = stop;
                    }
                    model.put(at, end, seq, Some(addr));
                    model.next_addr += len.next_multiple_of(64) + 64;
                }
                Step::InPlace(block, blocks, delay) => {
                    late.push((now + delay, block, blocks, model.next_addr, seq));
                }
                Step::Zero(at, len) => {
                    pieces.zero(shift + at, shift + at + len, LogSeq(seq));
                    model.put(at, at + len, seq, None);
                }
                Step::Truncate(at) => {
                    pieces.zero(shift + at, u64::MAX, LogSeq(seq));
                    model.put(at, u64::MAX, seq, None);
                }
                Step::Prune(back) => {
                    // Never above the entries that are still to be published.
                    let bound = late.iter().map(|entry| entry.4 - 1).min().unwrap_or(u64::MAX);
                    let upto = seq.saturating_sub(back).min(bound);
                    radix.prune(LogSeq(upto));
                    pieces.prune(LogSeq(upto));
                    for byte in model.bytes.iter_mut().filter(|byte| byte.seq <= upto) {
                        *byte = BELOW;
                    }
                }
            }
            if let Some(&(_, _, blocks, _, _)) = late.last() {
                model.next_addr += blocks * BLOCK_BYTES + 64;
            }
            late.retain(|&(due, block, blocks, addr, seq)| {
                if due <= now {
                    radix.publish(base + block, blocks, addr, LogSeq(seq));
                    model.put(block * BLOCK_BYTES, (block + blocks) * BLOCK_BYTES, seq, Some(addr));
                }
                due > now
            });
            if base == 0 {
                check(&radix, &pieces, &model);
            }
        }
        for (_, block, blocks, addr, seq) in late {
            radix.publish(base + block, blocks, addr, LogSeq(seq));
            model.put(block * BLOCK_BYTES, (block + blocks) * BLOCK_BYTES, seq, Some(addr));
        }
        for (index, byte) in model.bytes.iter().enumerate().step_by(61) {
            let pos = shift + index as u64;
            let (source, _) = pieces.find(radix.get(pos / BLOCK_BYTES), pos, pos + 1);
            assert_eq!(source, byte.source, "byte {index}");
        }
        let used: Vec<u64> = (0..SPAN / BLOCK_BYTES).filter(|block| radix.get(base + block).is_some()).collect();
        let mut walked = Vec::new();
        let mut at = base;
        while let Some(found) = radix.next_used(at, base + SPAN / BLOCK_BYTES) {
            walked.push(found - base);
            at = found + 1;
        }
        assert_eq!(walked, used);
        radix.prune(LogSeq(model.seq));
        pieces.prune(LogSeq(model.seq));
        assert!(is_clean(&radix, &pieces));
    }
}

#[test]
fn words_keep_their_order_when_the_low_bits_wrap() {
    let radix = Radix::new();
    let old = LogSeq((1 << 30) - 1);
    radix.publish(600, 1, 4096, old);
    radix.publish(600, 1, 8192, LogSeq(old.0 + 1));
    assert_eq!(radix.get(600).unwrap().addr(), 8192);
    radix.publish(600, 1, 64, old);
    assert_eq!(
        radix.get(600).unwrap().addr(),
        8192,
        "an older copy that comes late does not win"
    );
    assert!(!radix.prune(old));
    assert!(radix.prune(LogSeq(old.0 + 1)));
    assert!(radix.is_empty());
}

#[test]
fn small_appends_stay_in_order() {
    let mut pieces = Pieces::new();
    for index in 0..200_u64 {
        let (block, within) = (index * 128 / 4096, (index * 128 % 4096) as u16);
        pieces.put(block, within, within + 128, 64 + index * 192, LogSeq(index + 1));
    }
    for index in 0..200_u64 {
        assert_eq!(
            pieces.find(None, index * 128 + 5, u64::MAX),
            (Source::Log(64 + index * 192 + 5), (index + 1) * 128)
        );
    }
    assert_eq!(pieces.find(None, 200 * 128, u64::MAX).0, Source::Below);
}
