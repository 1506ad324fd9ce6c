//! Batches to transactions: validates and folds as many operations as one journal record takes, executes the
//! plan, and advances each log's digested number in the same record. Bad operations are refused one
//! transaction at a time and stall nothing.

use super::ahead::Ahead;
use super::deferred::{DeferredPayloads, Redone};
use super::execute::{CommitFailure, FREE_BUDGET, PlanExecutor, PreStep};
use super::types::{Applied, Client, Environment, Leases, Source};
use super::view::{SessionGrants, TxView};
use std::collections::BTreeMap;
use varve_digest::{Actor, Batch, Fold, LogResident, Op, Plan, Refusal, RefusedTx, Transaction};
use varve_format::seeded::{Bug, armed, record_ops};
use varve_format::{Ino, InodeKey, LogSeq, SessionId};
use varve_store::{OP_ROOM, PayloadSource, Progress, Store, StoreError, Tx};

/// Most records of one oversized operation. A file of 2^60 bytes with an extent in each block would need
/// more; the bound keeps any operation from occupying the digest for ever.
const BEFORE_ROUNDS: usize = 1 << 20;

/// Outcome of a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Digested {
    /// Everything in the batches is digested.
    All,
    /// A payload that was left in a log does not match its header, or the log could not be read. Only records
    /// passed to `done` had an effect. The log is to be gathered again, [copying
    /// all](varve_digest::GatherLimits::copying_all).
    Unsure,
}

/// Digests batches of several sessions, whose grants do not overlap, in as few records as possible. What
/// `begin_change` returns lives during some records, and not while old blocks are fetched. `done` is
/// called for each record when it is durable; after the last one everything in the batches is digested, and
/// [`SessionLog::digested`](super::SessionLog::digested) may be called.
///
/// # Errors
/// The store's: a device's, or `NoSpace` when not even the next transaction alone fits. Records passed to
/// `done` stay; the logs keep the rest, and the same batches may be given again: digested entries are
/// skipped.
pub fn digest<C>(
    store: &Store,
    sources: &[Source<'_>],
    env: &Environment<'_>,
    begin_change: impl Fn() -> C,
    done: &mut dyn FnMut(&Applied),
) -> Result<Digested, StoreError> {
    let mut next = vec![0; sources.len()];
    loop {
        let ahead = Ahead::fetch(store, sources, &next, env.fetch_blocks);
        let _change = begin_change();
        if let Some(digested) = digest_some(store, sources, env, (&ahead, &mut next), done)? {
            return Ok(digested);
        }
    }
}

/// Digests what blocks were fetched for; `None`: there is more.
fn digest_some(
    store: &Store,
    sources: &[Source<'_>],
    env: &Environment<'_>,
    (ahead, next): (&Ahead<'_>, &mut Vec<usize>),
    done: &mut dyn FnMut(&Applied),
) -> Result<Option<Digested>, StoreError> {
    // Most transactions to take into one record; shrinks when a record was full, and recovers.
    let mut most = usize::MAX;
    loop {
        let left_ahead = ahead.left(next);
        if left_ahead == 0 {
            return Ok(None);
        }
        let mut tx = store.begin_with_room()?;
        tx.use_fetched(&ahead.blocks);
        // The fold's estimate is generous but no bound; the store decides whether a record is full.
        let budget = tx.room() / 4 * 3;
        let most_now = most.min(store.room_for_ops()).min(record_ops()).min(left_ahead);
        let folded = fold(&tx, sources, next, env, most_now, budget);
        let cut = match folded {
            Ok(Some(cut)) => cut,
            Ok(None) => return Ok(Some(Digested::All)),
            // An unreadable inode may be named by bytes that are no entry.
            Err(error) if !error.stops_writing() && leave_something(sources) => {
                return Ok(Some(Digested::Unsure));
            }
            Err(error) => return Err(error),
        };
        if armed(Bug::DigestedBeforeOps) {
            drop(tx);
            number_alone(store, sources, &cut)?;
            tx = store.begin_with_room()?;
        }
        let left = DeferredPayloads::new(sources);
        let redone = Redone::of(records(sources, next, &cut));
        let carried = commit(store, &mut tx, sources, &cut, env, (&left, &redone)).and_then(|carried| {
            leaves_what_is_promised(store, sources, &cut, env)?;
            Ok(carried)
        });
        if left.has_failed() || carried.is_ok() && !is_sound(&left, sources, next, &cut) {
            return Ok(Some(Digested::Unsure));
        }
        let committed = carried.and_then(|(applied, unfinished)| Ok((tx.commit()?, applied, unfinished)));
        let stuck = match committed {
            Ok((id, mut applied, unfinished)) => {
                applied.tx = id;
                if armed(Bug::NumberAfterOps) {
                    number_alone(store, sources, &cut)?;
                }
                done(&applied);
                *next = cut.next;
                most = most.saturating_mul(2);
                for key in unfinished {
                    finish_free(store, key)?;
                }
                continue;
            }
            Err(stuck) => stuck,
        };
        match stuck {
            CommitFailure::Store(error) if error.stops_writing() => return Err(error),
            // A transaction that needs unreadable metadata waits; earlier ones do not.
            CommitFailure::RecordFull | CommitFailure::Store(_) if cut.taken > 1 => most = cut.taken / 2,
            // The steps below take effect even if the cut is not committed.
            _ if !is_sound(&left, sources, next, &cut) => return Ok(Some(Digested::Unsure)),
            // This step would take its space record by record, without a check of other sessions'
            // reservations.
            CommitFailure::PreStep(PreStep::Allocate(..) | PreStep::Zero(..))
                if paid(sources, &cut, env).1 > 0 =>
            {
                if cut.taken > 1 {
                    most = cut.taken / 2;
                } else {
                    *next = refuse_alone(store, sources, cut, Refusal::NotReserved, done)?;
                }
            }
            CommitFailure::PreStep(before) => run_pre_step(store, before)?,
            CommitFailure::RecordFull => {
                return Err(StoreError::RecordFull {
                    needed: OP_ROOM,
                    bound: budget,
                });
            }
            CommitFailure::Store(error) => {
                let Some(why) = refusal(store, sources, &cut, env, &error) else {
                    return Err(error);
                };
                tracing::error!(%error, "an operation that was checked cannot be done: left out");
                *next = refuse_alone(store, sources, cut, why, done)?;
            }
        }
    }
}

/// The operations of one record.
struct RecordPlan<'a> {
    plan: Plan<'a>,
    /// Per source: the first transaction of its batch that is not in it.
    next: Vec<usize>,
    /// Per source: the digested number of its log before the record.
    above: Vec<LogSeq>,
    /// Per source: the digested number of its log after the record.
    upto: Vec<LogSeq>,
    /// Per source: reserved blocks used up.
    charged: Vec<u64>,
    /// Transactions in the record.
    taken: usize,
}

/// Whether an error concerns the inodes that an operation names, and not the pool: the inodes are damaged, or
/// differ from the checked ones. Structures that all operations rest on (bitmaps, tables of checksums,
/// footers of units, …) need a repair: until then the log waits, and no acknowledged operation is left out.
fn is_confined(store: &Store, error: &StoreError) -> bool {
    if let StoreError::Block { block, .. } = error {
        return !store.is_fixed(*block);
    }
    matches!(
        error,
        StoreError::NotFound
            | StoreError::Exists
            | StoreError::NoInode(_)
            | StoreError::WrongKind { .. }
            | StoreError::Invalid(_)
            | StoreError::Tree(_)
            | StoreError::Inode { .. }
            | StoreError::DataChecksum { .. }
            | StoreError::Damaged(_)
    )
}

/// Returns the cut's blocks that the sessions have reserved, and the blocks that they have not.
fn paid(sources: &[Source<'_>], cut: &RecordPlan<'_>, env: &Environment<'_>) -> (u64, u64) {
    let (mut paid, mut unpaid) = (0, 0);
    for (source, charged) in sources.iter().zip(&cut.charged) {
        let reserved = env.leases.reserved(source.client.session);
        let covered = reserved.map_or(*charged, |reserved| reserved.min(*charged));
        paid += covered;
        unpaid += charged - covered;
    }
    (paid, unpaid)
}

/// Checks that the cut's unreserved blocks leave enough space for all reservations; `NoSpace` otherwise. Call
/// after the transaction has taken its blocks.
fn leaves_what_is_promised(
    store: &Store,
    sources: &[Source<'_>],
    cut: &RecordPlan<'_>,
    env: &Environment<'_>,
) -> Result<(), StoreError> {
    let (paid, unpaid) = paid(sources, cut, env);
    if unpaid == 0 {
        return Ok(());
    }
    let space = store.space();
    let free: u64 = space.tiers.iter().map(|tier| tier.free).sum();
    let kept: u64 = space.tiers.iter().map(|tier| tier.kept).sum();
    let promised = space.reserved.saturating_sub(paid);
    if free.saturating_sub(kept) < promised {
        return Err(StoreError::NoSpace { blocks: unpaid });
    }
    Ok(())
}

/// Returns the reason to refuse a transaction that the store cannot do; `None`: the transaction waits.
fn refusal(
    store: &Store,
    sources: &[Source<'_>],
    cut: &RecordPlan<'_>,
    env: &Environment<'_>,
    error: &StoreError,
) -> Option<Refusal> {
    if is_confined(store, error) {
        store.note_damage(error);
        return Some(Refusal::Contradicted);
    }
    if !matches!(error, StoreError::NoSpace { .. }) {
        return None;
    }
    let total: u64 = store.space().tiers.iter().map(|tier| tier.total).sum();
    let unpaid = sources.iter().zip(&cut.charged).any(|(source, charged)| {
        let reserved = env.leases.reserved(source.client.session);
        *charged > reserved.unwrap_or(total)
    });
    unpaid.then_some(Refusal::NotReserved)
}

/// Folds transactions until the record is nearly full. `None`: everything is digested.
fn fold<'a>(
    tx: &Tx<'_>,
    sources: &[Source<'a>],
    next: &[usize],
    env: &Environment<'_>,
    most: usize,
    budget: u64,
) -> Result<Option<RecordPlan<'a>>, StoreError> {
    let view = TxView::new(tx, env.leases);
    let mut fold = Fold::new(view, env.now_ns);
    let mut cut = RecordPlan {
        plan: Plan::default(),
        next: next.to_vec(),
        above: Vec::new(),
        upto: Vec::new(),
        charged: Vec::new(),
        taken: 0,
    };
    let mut anything = false;
    let mut ops = Vec::new();
    for (number, (source, next)) in sources.iter().zip(&mut cut.next).enumerate() {
        let row = tx.session(source.client.session)?;
        let digested = row.map_or(LogSeq(0), |row| row.digested);
        let rows = SessionGrants::new(source.client, env.leases);
        let (mut upto, mut charged) = (digested, 0);
        let batch = source.batch;
        while let Some(transaction) = batch.transactions.get(*next) {
            if cut.taken >= most || (cut.taken > 0 && fold.record_bytes() > budget) {
                break;
            }
            let last = last_seq(batch, transaction);
            if last > digested {
                charged += match take(tx, &mut fold, &rows, (number, source), transaction, &mut ops) {
                    Ok(charged) => charged,
                    // The failed transaction and all later ones wait; earlier ones do not.
                    Err(error) if error.is_failed_read() && cut.taken > 0 => break,
                    Err(error) => return Err(error),
                };
                upto = last;
                cut.taken += 1;
            }
            *next += 1;
        }
        if *next >= batch.transactions.len() {
            // Numbers without an operation at the end (refused by the scan) are used up too.
            upto = upto.max(batch.upto);
        }
        anything |= upto > digested;
        cut.above.push(digested);
        cut.upto.push(upto);
        cut.charged.push(charged);
    }
    cut.plan = fold.finish();
    Ok(anything.then_some(cut))
}

/// Whether any payload was left in a log.
fn leave_something(sources: &[Source<'_>]) -> bool {
    let mut entries = sources.iter().flat_map(|source| &source.batch.entries);
    entries.any(|entry| entry.left_at().is_some())
}

/// Whether all entries of the cut that were left in logs match their headers. The cut starts at `next`.
fn is_sound(
    left: &DeferredPayloads<'_>,
    sources: &[Source<'_>],
    next: &[usize],
    cut: &RecordPlan<'_>,
) -> bool {
    let mut all = sources
        .iter()
        .zip(next)
        .zip(&cut.next)
        .zip(&cut.above)
        .enumerate();
    all.all(|(number, (((source, from), to), above))| {
        let transactions = &source.batch.transactions[*from..*to];
        let new = |transaction: &&Transaction| last_seq(source.batch, transaction) > *above;
        transactions
            .iter()
            .filter(new)
            .all(|transaction| left.are_sound(number, transaction.first..transaction.first + transaction.len))
    })
}

/// Iterates over the transactions of each source that are in the cut and were not digested before. The cut
/// starts at `next`.
fn records<'a>(
    sources: &'a [Source<'_>],
    next: &'a [usize],
    cut: &'a RecordPlan<'_>,
) -> impl Iterator<Item = (&'a Batch, &'a [Transaction])> {
    let parts = sources.iter().zip(next).zip(&cut.next).zip(&cut.above);
    parts.map(|(((source, from), to), above)| {
        let transactions = &source.batch.transactions[*from..*to];
        let old = transactions.partition_point(|of| last_seq(source.batch, of) <= *above);
        (source.batch, &transactions[old..])
    })
}

fn last_seq(batch: &Batch, transaction: &Transaction) -> LogSeq {
    let last = transaction.first + transaction.len - 1;
    batch.entries.get(last).map_or(LogSeq(0), |entry| entry.seq())
}

/// Folds one transaction; returns the reserved blocks that its operations used up. `ops` is scratch space.
fn take<'a>(
    tx: &Tx<'_>,
    fold: &mut Fold<'a, TxView<'_, '_>>,
    rows: &SessionGrants<'_>,
    (number, source): (usize, &Source<'a>),
    transaction: &Transaction,
    ops: &mut Vec<Op<'a>>,
) -> Result<u64, StoreError> {
    let batch = source.batch;
    let range = transaction.first..transaction.first + transaction.len;
    let entries = &batch.entries[range.clone()];
    ops.clear();
    let mut malformed = None;
    let mut charged = 0;
    for (index, entry) in range.zip(entries) {
        match batch.op(entry) {
            Ok(op) => {
                let op = Op {
                    seq: entry.seq(),
                    time_ns: entry.header.time_ns.get(),
                    flags: entry.flags(),
                    op,
                    left: entry.left_at().map(|_| LogResident {
                        source: number as u32,
                        entry: index as u32,
                        skip: 0,
                        len: entry.header.payload_len.get(),
                    }),
                };
                charged += u64::from(op.charge());
                ops.push(op);
            }
            Err(fault) => {
                malformed.get_or_insert((entry.seq(), fault));
            }
        }
    }
    let session = rows.client.session;
    if let Some((seq, fault)) = malformed {
        fold.refuse(session, seq, Refusal::Malformed(fault), entries.len());
        return Ok(charged);
    }
    let actor = Actor {
        session,
        uid: rows.client.uid,
        privileged: rows.client.privileged,
        forwarded: false,
    };
    match fold.transaction(actor, rows, ops) {
        // A refusal is counted in the fold.
        Ok(_) => {}
        Err(error) if is_confined(tx.store(), &error) => {
            tracing::error!(%session, %error, "an operation names what is damaged: left out");
            tx.note_damage(&error);
            let seq = ops.first().map_or(LogSeq(0), |op| op.seq);
            fold.refuse(session, seq, Refusal::Contradicted, ops.len());
        }
        Err(error) => return Err(error),
    }
    Ok(charged)
}

/// Executes a plan and advances the sessions' rows; the caller commits.
fn commit(
    store: &Store,
    tx: &mut Tx<'_>,
    sources: &[Source<'_>],
    cut: &RecordPlan<'_>,
    env: &Environment<'_>,
    left: (&dyn PayloadSource, &Redone),
) -> Result<(Applied, Vec<InodeKey>), CommitFailure> {
    let sessions: Vec<SessionId> = sources.iter().map(|source| source.client.session).collect();
    let alone = cut.taken <= 1;
    let (mut applied, unfinished) = execute(store, tx, (&cut.plan, alone), env, &sessions, left)?;
    for ((session, upto), charged) in sessions.iter().zip(&cut.upto).zip(&cut.charged) {
        let mut row = tx.session(*session)?.ok_or(StoreError::NoSession(*session))?;
        if row.digested < *upto && !armed(Bug::NumberAfterOps) {
            row.digested = *upto;
            tx.session_put(&row)?;
        }
        applied.digested.push((*session, *upto));
        applied.charged.push((*session, *charged));
    }
    if tx.room() < OP_ROOM / 4 {
        return Err(CommitFailure::RecordFull);
    }
    Ok((applied, unfinished))
}

/// Advances the digested numbers alone (seeded bugs only).
fn number_alone(store: &Store, sources: &[Source<'_>], cut: &RecordPlan<'_>) -> Result<(), StoreError> {
    let mut tx = store.begin()?;
    for (source, upto) in sources.iter().zip(&cut.upto) {
        let session = source.client.session;
        let mut row = tx.session(session)?.ok_or(StoreError::NoSession(session))?;
        row.digested = row.digested.max(*upto);
        tx.session_put(&row)?;
    }
    tx.commit().map(|_| ())
}

/// Executes a plan in `tx`, and knows whether it is of one transaction alone.
pub(super) fn execute(
    store: &Store,
    tx: &mut Tx<'_>,
    (plan, alone): (&Plan<'_>, bool),
    env: &Environment<'_>,
    sessions: &[SessionId],
    (left, redone): (&dyn PayloadSource, &Redone),
) -> Result<(Applied, Vec<InodeKey>), CommitFailure> {
    let mut carrier = PlanExecutor {
        tx,
        alone,
        env,
        space: store.space(),
        sessions,
        applied: Applied {
            refused: plan.refused.clone(),
            counts: plan.counts,
            ..Applied::default()
        },
        left,
        redone,
        rows: BTreeMap::new(),
        granted: Vec::new(),
        unfinished: Vec::new(),
        dir_pin: None,
    };
    carrier.carry_out(plan)?;
    Ok((carrier.applied, carrier.unfinished))
}

/// Uses up the numbers of a transaction that the store cannot do.
fn refuse_alone(
    store: &Store,
    sources: &[Source<'_>],
    cut: RecordPlan<'_>,
    why: Refusal,
    done: &mut dyn FnMut(&Applied),
) -> Result<Vec<usize>, StoreError> {
    let mut tx = store.begin()?;
    let mut applied = Applied {
        refused: cut.plan.refused,
        ..Applied::default()
    };
    applied.counts.refused = cut.plan.counts.ops + cut.plan.counts.refused;
    for ((source, upto), charged) in sources.iter().zip(&cut.upto).zip(&cut.charged) {
        let session = source.client.session;
        let mut row = tx.session(session)?.ok_or(StoreError::NoSession(session))?;
        if row.digested < *upto {
            row.digested = *upto;
            tx.session_put(&row)?;
            applied.refused.push((session, RefusedTx { seq: *upto, why }));
        }
        applied.digested.push((session, *upto));
        applied.charged.push((session, *charged));
    }
    applied.tx = tx.commit()?;
    done(&applied);
    Ok(cut.next)
}

/// Executes a pre-step, in records of its own.
pub(super) fn run_pre_step(store: &Store, before: PreStep) -> Result<(), StoreError> {
    for _ in 0..BEFORE_ROUNDS {
        let (progress, finish) = on_other_devices(|| one_round(store, before))?;
        match (progress, finish) {
            (Progress::Done, _) => return Ok(()),
            (Progress::More, Some(ino)) => return run_pre_step(store, PreStep::Finish(ino)),
            (Progress::More, None) => {}
        }
    }
    Err(StoreError::Damaged("an operation never ends".into()))
}

/// Does a change in a transaction of its own, and again when one of several devices failed under it: the others
/// of its tier take it then. Each device is lost once.
pub(super) fn on_other_devices<R>(
    mut change: impl FnMut() -> Result<R, StoreError>,
) -> Result<R, StoreError> {
    loop {
        match change() {
            Err(error) if error.is_device_lost() => tracing::warn!(%error, "done again on other devices"),
            done => return done,
        }
    }
}

/// Executes a pre-step as far as one record goes. Returns also the inode to be finished in others.
fn one_round(store: &Store, before: PreStep) -> Result<(Progress, Option<Ino>), StoreError> {
    let mut tx = store.begin_with_room()?;
    let ended = match before {
        PreStep::Truncate(ino, size) => (tx.truncate(ino, size)?, Some(ino)),
        PreStep::Finish(ino) => {
            // Not as an orphan is freed: one that is open goes on without a name.
            let size = tx.get(ino)?.attr.size_bytes;
            (tx.truncate(ino, size)?, None)
        }
        PreStep::Punch(ino, offset, len, target) => (tx.punch(ino, offset, len, target)?, None),
        PreStep::Zero(ino, offset, len, target) => (tx.zero(ino, offset, len, false, target)?, None),
        PreStep::Allocate(ino, offset, len, target) => (tx.allocate(ino, offset, len, false, target)?, None),
    };
    tx.commit()?;
    Ok(ended)
}

/// Frees the blocks of a file in the orphan list that lie beyond its size, in records of their own.
pub(crate) fn free_tail(store: &Store, key: InodeKey) -> Result<(), StoreError> {
    run_pre_step(store, PreStep::Finish(key.ino))
}

/// Frees the rest of a deleted inode, in records of its own.
pub(super) fn finish_free(store: &Store, key: InodeKey) -> Result<(), StoreError> {
    for _ in 0..BEFORE_ROUNDS {
        let mut tx = store.begin_with_room()?;
        // An empty commit costs nothing; a number that is already free is no error.
        let progress = match tx.get_key(key) {
            Ok(inode) if inode.attr.nlink == 0 => tx.continue_free(key.ino, FREE_BUDGET)?,
            Ok(_) | Err(StoreError::NoInode(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        tx.commit()?;
        if progress == Progress::Done {
            return Ok(());
        }
    }
    Err(StoreError::Damaged("an inode is never freed".into()))
}

/// Result of [`free_orphans`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Freed inodes.
    pub gone: Vec<InodeKey>,
    /// Inodes that need another transaction.
    pub left: Vec<InodeKey>,
}

/// Frees inodes that have no name, unless a session holds them, as many as fit in one transaction. Used by
/// the last close, and for the orphans found at start. The caller removes the grant rows that name them.
///
/// # Errors
/// The store's: nothing is freed then.
pub fn free_orphans(store: &Store, keys: &[InodeKey], leases: &dyn Leases) -> Result<Freed, StoreError> {
    let mut freed = Freed::default();
    let mut tx = store.begin_with_room()?;
    for key in keys {
        match tx.get_key(*key) {
            Ok(inode) if inode.attr.nlink == 0 => {
                if leases.held(*key, &[]) {
                    continue;
                }
                if tx.room_at_least(OP_ROOM) < OP_ROOM {
                    freed.left.push(*key);
                    continue;
                }
                match tx.continue_free(key.ino, FREE_BUDGET)? {
                    Progress::Done => freed.gone.push(*key),
                    Progress::More => freed.left.push(*key),
                }
            }
            Ok(_) => {}
            // The key may be a held number, of an inode that only a log has.
            Err(StoreError::NoInode(_)) => {
                if !leases.held(*key, &[]) {
                    freed.gone.push(*key);
                }
            }
            Err(error) => return Err(error),
        }
    }
    // An empty commit costs nothing.
    tx.commit()?;
    Ok(freed)
}

/// Returns the client as an actor whose rights were checked.
pub(super) const fn forwarded_actor(client: Client, uid: u32) -> Actor {
    Actor {
        session: client.session,
        uid,
        privileged: client.privileged,
        forwarded: true,
    }
}
