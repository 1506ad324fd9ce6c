//! Sharing of many ranges at once, each after a comparison: what `varve dedup apply` asks for. Checks rights,
//! compares bytes with no transaction open, then shares in as few records as hold all. The caller has
//! exclusive leases on all files, so nothing of them changes meanwhile.
//!
//! # Invariants
//! - *Only equal bytes are shared*: a part is compared under the leases under which it is shared.
//! - *What is told is done*: a part counts as shared when its record is durable. One that fails takes no
//!   other with it.
//! - *A later part sees what earlier ones of its record have done*: its source may be their target.

use super::commit::run_pre_step;
use super::execute::PreStep;
use super::permission::Caller;
use super::share::{self, COMPARE_MAX, for_each_part};
use super::types::{Applied, Check, Client, Environment, ForwardError, refuse};
use super::unshared::{Unshared, unshared};
use crate::error::errno;
use std::ops::{ControlFlow, Range};
use varve_format::{BLOCK_BYTES, FileBlock, Ino, InodeKey, LogOp};
use varve_ipc::{DEDUPE_RANGES_MAX, DedupeOp, DedupeRange, Deduped};
use varve_store::{OwnedPart, ShareRange, Store, StoreError, Tx};

/// Pieces of which the space is reckoned beside those that the ranges have: each range may cut two extents of
/// each of two files, and runs in as many places.
const PIECES_BESIDE: u64 = 6;
/// Most records that wait for the end of an earlier truncation.
const FINISHED_MAX: usize = 64;

/// A part of a range whose bytes are the same in both files, and that is not shared yet.
struct Equal {
    /// Index of its range.
    range: usize,
    blocks: ShareRange,
    bytes: u64,
    freed_bytes: u64,
}

/// Returns the number of pieces in which the blocks of the ranges lie, as digested: of that depends the space
/// that their sharing takes.
///
/// # Errors
/// The store's.
pub fn count_pieces(store: &Store, op: &DedupeOp) -> Result<u64, StoreError> {
    let mut pieces = 0;
    for range in &op.ranges {
        pieces += PIECES_BESIDE;
        for (key, offset) in [
            (range.source, range.source_offset),
            (range.target, range.target_offset),
        ] {
            let counted = parts_of(store, key.ino, &blocks_of(offset, range.len.min(COMPARE_MAX)));
            match counted {
                Ok(parts) => pieces += parts.len() as u64,
                Err(StoreError::NoInode(_) | StoreError::WrongKind { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(pieces)
}

fn blocks_of(offset: u64, len: u64) -> Range<FileBlock> {
    let first = offset / BLOCK_BYTES;
    FileBlock(first)..FileBlock(first + len.div_ceil(BLOCK_BYTES))
}

fn parts_of(store: &Store, ino: Ino, blocks: &Range<FileBlock>) -> Result<Vec<OwnedPart>, StoreError> {
    let mut parts = Vec::new();
    for_each_part(store, ino, blocks.clone(), |part| {
        parts.push(*part);
        ControlFlow::Continue(())
    })?;
    Ok(parts)
}

/// Shares what is the same and not shared yet in each range; what became of each, in their order. With
/// `dry_run` nothing is compared or shared, and all that could be counts as shared.
///
/// # Errors
/// `EINVAL` for too many ranges or bytes; the store's, if nothing was done. What fails later fails for its
/// range alone.
pub fn dedupe(
    store: &Store,
    client: Client,
    op: &DedupeOp,
    env: &Environment<'_>,
) -> Result<(Applied, Vec<Deduped>), ForwardError> {
    let bytes = op.ranges.iter().map(|range| range.len);
    if op.ranges.len() > DEDUPE_RANGES_MAX || bytes.fold(0, u64::saturating_add) > COMPARE_MAX {
        return refuse(libc::EINVAL);
    }
    let mut told = vec![Deduped::default(); op.ranges.len()];
    let mut equal = Vec::new();
    let checked = {
        let tx = store.begin()?;
        let check = |range| check(store, &tx, client, op, range, env);
        op.ranges.iter().map(check).collect::<Vec<_>>()
    };
    for (at, checked) in checked.into_iter().enumerate() {
        let found =
            checked.and_then(|blocks| compare(store, at, blocks, &op.ranges[at], op.dry_run, &mut told[at]));
        match found {
            Ok(parts) => equal.extend(parts),
            Err(ForwardError::Errno(errno)) => told[at].errno = errno,
            Err(ForwardError::Store(error)) => told[at].errno = errno(&error),
        }
    }
    if op.dry_run {
        for part in &equal {
            told[part.range].shared_bytes += part.bytes;
            told[part.range].freed_bytes += part.freed_bytes;
        }
        return Ok((Applied::default(), told));
    }
    share_all(store, &equal, &mut told);
    let wishes = |key: InodeKey| store.get_key(key).is_ok_and(|inode| inode.shared_pin.is_some());
    let files = equal.iter().map(|part| &op.ranges[part.range]);
    let pinned = files
        .clone()
        .any(|range| wishes(range.source) || wishes(range.target));
    let mut remapped: Vec<_> = files.map(|range| range.target).collect();
    remapped.sort_unstable();
    remapped.dedup();
    let applied = Applied {
        tx: store.newest_tx(),
        remapped,
        pinned,
        ..Applied::default()
    };
    Ok((applied, told))
}

/// Checks the rights to share a range, and that it may be shared; returns its blocks.
fn check(
    store: &Store,
    tx: &Tx<'_>,
    client: Client,
    op: &DedupeOp,
    range: &DedupeRange,
    env: &Environment<'_>,
) -> Check<ShareRange> {
    let asked = LogOp::Share {
        key: range.target,
        offset: range.target_offset,
        source: range.source,
        source_offset: range.source_offset,
        len: range.len,
        compare: true,
    };
    let caller = Caller {
        tx,
        client,
        cred: &op.cred,
        leases: env.leases,
        dedup_scope: env.dedup_scope,
    };
    let checked = share::check_share(tx, &caller.check(asked)?)?;
    let Some(blocks) = checked.and_then(|share| share.blocks()) else {
        return refuse(libc::EINVAL);
    };
    // Memory that an ordinary user maps holds no block of another user's file.
    let users = [range.target, range.source].map(|key| tx.get_key(key).map(|inode| inode.attr.uid));
    let [one, other] = users;
    if one? != other? && share::is_in_nvm(store, &blocks)? {
        return refuse(libc::EOPNOTSUPP);
    }
    Ok(blocks)
}

/// Compares what is not shared yet in a range, and notes in `told` what is, and what differs.
fn compare(
    store: &Store,
    at: usize,
    blocks: ShareRange,
    range: &DedupeRange,
    believe: bool,
    told: &mut Deduped,
) -> Check<Vec<Equal>> {
    let ends = |first: FileBlock| first..FileBlock(first.0 + blocks.blocks);
    let sources = parts_of(store, blocks.from, &ends(blocks.from_block))?;
    let targets = parts_of(store, blocks.to, &ends(blocks.to_block))?;
    let parts = unshared(
        (&sources, blocks.from_block.0),
        (&targets, blocks.to_block.0),
        blocks.blocks,
    );
    let mut equal = Vec::new();
    let mut shared_bytes = range.len;
    for Unshared { blocks: part, alone } in parts {
        // The last block may be a part of one.
        let bytes = (part.end * BLOCK_BYTES).min(range.len) - part.start * BLOCK_BYTES;
        shared_bytes -= bytes;
        let part = ShareRange {
            from_block: FileBlock(blocks.from_block.0 + part.start),
            to_block: FileBlock(blocks.to_block.0 + part.start),
            blocks: part.end - part.start,
            ..blocks
        };
        if !believe && !share::has_equal_bytes(|ino, at, out| store.read(ino, at, out), &part)? {
            told.differing_bytes += bytes;
            continue;
        }
        equal.push(Equal {
            range: at,
            blocks: part,
            bytes,
            freed_bytes: (alone * BLOCK_BYTES).min(bytes),
        });
    }
    told.already_bytes = shared_bytes;
    Ok(equal)
}

/// How the parts of one record came out.
enum Filled {
    /// All that were taken are in it; `done` blocks of the next one, too.
    Whole { next: usize, done: u64 },
    /// This one failed, and the record is lost.
    Failed(usize, StoreError),
}

/// Shares the parts, several in a record.
fn share_all(store: &Store, equal: &[Equal], told: &mut [Deduped]) {
    let (mut at, mut done) = (0, 0);
    // Those before this one are shared in records of their own, as one after them has failed.
    let mut alone_until = 0;
    let mut finished = 0;
    while at < equal.len() {
        let committed = fill(store, &equal[at..], done, at < alone_until).map(|(tx, filled)| match filled {
            Filled::Failed(..) => Ok(filled),
            Filled::Whole { .. } => tx.commit().map(|_| filled),
        });
        match committed.and_then(|committed| committed) {
            Ok(Filled::Whole { next, done: more }) => {
                for part in &equal[at..at + next] {
                    let told = &mut told[part.range];
                    told.shared_bytes += part.bytes;
                    told.freed_bytes += part.freed_bytes;
                }
                (at, done) = (at + next, more);
            }
            Ok(Filled::Failed(0, StoreError::Unfinished(ino))) if finished < FINISHED_MAX => {
                finished += 1;
                if let Err(error) = run_pre_step(store, PreStep::Finish(ino)) {
                    told[equal[at].range].errno = errno(&error);
                    (at, done) = (at + 1, 0);
                }
            }
            // The other devices of its tier take it: each device is lost once.
            Ok(Filled::Failed(_, error)) | Err(error) if error.is_device_lost() => {}
            Ok(Filled::Failed(0, error)) | Err(error) => {
                told[equal[at].range].errno = errno(&error);
                (at, done) = (at + 1, 0);
            }
            Ok(Filled::Failed(failed, _)) => alone_until = at + failed,
        }
    }
}

/// Shares parts in a transaction until it is full: one alone, or as many as fit. `done` blocks of the first
/// were shared before.
fn fill<'s>(
    store: &'s Store,
    equal: &[Equal],
    done: u64,
    alone: bool,
) -> Result<(Tx<'s>, Filled), StoreError> {
    let mut tx = store.begin_with_room()?;
    let mut done = done;
    for (next, part) in equal.iter().enumerate() {
        if next > 0 && alone {
            return Ok((tx, Filled::Whole { next, done: 0 }));
        }
        match tx.share(&part.blocks, done) {
            Ok(all) if all == part.blocks.blocks => done = 0,
            Ok(some) => return Ok((tx, Filled::Whole { next, done: some })),
            Err(error) => return Ok((tx, Filled::Failed(next, error))),
        }
    }
    Ok((
        tx,
        Filled::Whole {
            next: equal.len(),
            done: 0,
        },
    ))
}
