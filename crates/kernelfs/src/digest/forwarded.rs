//! Forwarded operations: the daemon executes one operation for a client. Has the caller's rights checked,
//! then folds and executes it as an entry of a log.
//!
//! `ESTALE` tells the client that names have changed: it looks them up and decides again. Any other error is
//! the call's result.

use super::allocation::{self, Filled, Spent};
use super::commit::{execute, finish_free, forwarded_actor, run_pre_step};
use super::deferred::{NoPayloads, Redone};
use super::execute::{CommitFailure, PreStep};
use super::permission::{Caller, MAY_SEARCH, check_dir, live, need};
use super::share;
use super::types::{Applied, Check, Client, Environment, ForwardError, refuse};
use super::view::{SessionGrants, TxView};
use std::ops::Range;
use varve_digest::{Fold, Grants, Need, Op, Refusal};
use varve_format::log::HEADER_SIZE;
use varve_format::session::SessionState;
use varve_format::{
    BLOCK_BYTES, EntryFlags, EntryHeader, FILE_SIZE_MAX, FileBlock, InodeAttr, InodeKey, LastForwarded,
    LogOp, LogSeq, Tier,
};
use varve_ipc::{Cred, ForwardedOp, ForwardedResult};
use varve_store::{Defragmented, Fetched, Store, StoreError, Tx};
use zerocopy::FromBytes;

/// Most rounds of preparing one operation before it fits into a record.
const ROUNDS: usize = 64;

/// Does `op` for `client` in one record. Allocations that are too large for it come before, in records of
/// their own: they are undone if the operation fails, and `spent` is called for each. The caller has taken
/// the leases on everything that the operation names (other sessions' leases were revoked and their logs
/// digested; `client`'s own log too). An inode to be made is `0` (the daemon takes a number) or one that was
/// given to the client; an inode `0` to be renamed is `named`, which must still have the name. The session's
/// `last_forwarded` advances in the record; a number that was already used is `EALREADY`.
///
/// # Errors
/// The errno of the call, or the store's error.
pub fn apply_forwarded(
    store: &Store,
    client: Client,
    op: &ForwardedOp,
    named: Option<InodeKey>,
    env: &Environment<'_>,
    spent: Spent<'_>,
) -> Result<(Applied, ForwardedResult), ForwardError> {
    let mut filled = None;
    let done = in_rounds(store, client, op, named, env, (&mut filled, spent));
    match done {
        Ok((applied, outcome)) => Ok((applied, finish(store, outcome)?)),
        Err(error) => {
            if let Some(filled) = filled {
                filled.undo(store);
            }
            Err(error)
        }
    }
}

/// Prepares and does `op`; an error means that it was not done.
fn in_rounds(
    store: &Store,
    client: Client,
    op: &ForwardedOp,
    named: Option<InodeKey>,
    env: &Environment<'_>,
    (filled, spent): (&mut Option<Filled>, Spent<'_>),
) -> Result<(Applied, Outcome), ForwardError> {
    let (mut rounds, mut shared, mut moved) = (0, 0, Moved::default());
    while rounds < ROUNDS {
        let fetched = fetch_fragments(store, op, &moved)?;
        let mut tx = store.begin_with_room()?;
        tx.use_fetched(&fetched);
        let so_far = SoFar {
            filled: filled.is_some(),
            shared,
            moved,
        };
        match attempt(store, &mut tx, client, op, named, env, so_far) {
            Ok((mut applied, result, unfinished)) => {
                match tx.commit() {
                    Ok(tx) => applied.tx = tx,
                    // The other devices of its tier take it: each device is lost once.
                    Err(error) if error.is_device_lost() => continue,
                    Err(error) => return Err(error.into()),
                }
                *filled = None;
                for key in unfinished {
                    finish_free(store, key)?;
                }
                return Ok((applied, result));
            }
            Err(Failed::Shared(blocks)) => match tx.commit() {
                Ok(_) => shared = blocks,
                Err(error) if error.is_device_lost() => {}
                Err(error) => return Err(error.into()),
            },
            Err(Failed::Unshared(copied)) => match tx.commit() {
                Ok(_) => spent(copied),
                Err(error) if error.is_device_lost() => {}
                Err(error) => return Err(error.into()),
            },
            Err(Failed::Moved(now)) => match tx.commit() {
                Ok(_) => {
                    spent(now.blocks - moved.blocks);
                    moved = now;
                }
                Err(error) if error.is_device_lost() => {}
                Err(error) => return Err(error.into()),
            },
            Err(Failed::Error(ForwardError::Store(error))) if error.is_device_lost() => {}
            Err(Failed::PreStep(before)) => {
                rounds += 1;
                drop(tx);
                if let PreStep::Allocate(ino, offset, len, target) | PreStep::Zero(ino, offset, len, target) =
                    before
                {
                    // A lack of space must surface before anything is zeroed.
                    Filled::fill(store, filled, (ino, offset, len), target, spent)?;
                }
                run_pre_step(store, before)?;
            }
            Err(Failed::Error(error)) => {
                drop(tx);
                if shared > 0 {
                    share::free_failed(store, op)?;
                }
                return Err(error);
            }
        }
    }
    refuse(libc::EFBIG)
}

/// Progress of an operation by its earlier rounds.
#[derive(Debug, Clone, Copy)]
struct SoFar {
    /// Its blocks are allocated.
    filled: bool,
    /// Blocks of its range that are shared.
    shared: u64,
    moved: Moved,
}

/// Progress of a defragmentation.
#[derive(Debug, Clone, Copy)]
struct Moved {
    /// The tier to go on with, and the block to go on from.
    tier: Tier,
    from: FileBlock,
    /// Blocks that have a new place.
    blocks: u64,
    /// The caller's rights were checked.
    is_begun: bool,
}

impl Default for Moved {
    fn default() -> Self {
        Self {
            tier: Tier::Ssd,
            from: FileBlock(0),
            blocks: 0,
            is_begun: false,
        }
    }
}

impl Moved {
    /// Returns what is left of a range on the tier.
    fn rest(&self, blocks: &Range<FileBlock>) -> Range<FileBlock> {
        self.from.max(blocks.start)..blocks.end
    }

    /// After a step; `None`: all is done.
    fn after(&self, step: Defragmented, end: FileBlock) -> (u64, Option<Self>) {
        let blocks = self.blocks + step.moved;
        let next = match (step.next < end, self.tier) {
            (true, tier) => Some((tier, step.next)),
            (false, Tier::Ssd) => Some((Tier::Hdd, FileBlock(0))),
            (false, _) => None,
        };
        let next = next.map(|(tier, from)| Self {
            tier,
            from,
            blocks,
            is_begun: true,
        });
        (blocks, next)
    }
}

/// Reads what the next step of a defragmentation is to copy before its transaction begins: others go on
/// meanwhile.
fn fetch_fragments<'s>(store: &'s Store, op: &ForwardedOp, moved: &Moved) -> Check<Fetched<'s>> {
    let LogOp::Defrag { key, offset, len } = parse(op)?.1 else {
        return Ok(Fetched::default());
    };
    Ok(match share::blocks_of(store, key, (offset, len)) {
        // Who may not have it done has nothing read.
        Ok(blocks) if moved.is_begun => store.fetch_fragments(key.ino, moved.rest(&blocks), moved.tier),
        _ => Fetched::default(),
    })
}

enum Failed {
    PreStep(PreStep),
    /// This number of blocks is shared; there are more.
    Shared(u64),
    /// A part of an undo of shares is done, which copied this number of blocks; there is more.
    Unshared(u64),
    /// A step of a defragmentation is done; there is more.
    Moved(Moved),
    Error(ForwardError),
}

impl From<ForwardError> for Failed {
    fn from(error: ForwardError) -> Self {
        Self::Error(error)
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Error(error.into())
    }
}

/// Parses the entry of an operation.
pub(super) fn parse(op: &ForwardedOp) -> Check<(EntryHeader, LogOp<'_>)> {
    let einval = || ForwardError::Errno(libc::EINVAL);
    let header = op.entry.get(..HEADER_SIZE).ok_or_else(einval)?;
    let header = EntryHeader::read_from_bytes(header).map_err(|_| einval())?;
    let parsed = LogOp::parse(&header, &op.entry[HEADER_SIZE..]).map_err(|_| einval())?;
    Ok((header, parsed))
}

/// Inputs of the answer, before the attributes are read.
struct Outcome {
    of: Option<InodeKey>,
    offset: u64,
    victim: Option<InodeKey>,
}

fn finish(store: &Store, outcome: Outcome) -> Result<ForwardedResult, ForwardError> {
    let attr = match outcome.of {
        None => None,
        Some(key) => match store.get_key(key) {
            Ok(inode) => Some(inode.attr),
            Err(StoreError::NoInode(_)) => None,
            Err(error) => return Err(error.into()),
        },
    };
    Ok(ForwardedResult {
        attr,
        offset: outcome.offset,
        victim: outcome.victim,
        contended: Vec::new(),
    })
}

fn attempt(
    store: &Store,
    tx: &mut Tx<'_>,
    client: Client,
    op: &ForwardedOp,
    named: Option<InodeKey>,
    env: &Environment<'_>,
    SoFar {
        filled,
        shared,
        moved,
    }: SoFar,
) -> Result<(Applied, Outcome, Vec<InodeKey>), Failed> {
    let mut row = tx
        .session(client.session)?
        .ok_or(StoreError::NoSession(client.session))?;
    // The client of a sealed session learns which operations preceded the seal, and repeats the later ones
    // elsewhere.
    if !matches!(row.state, SessionState::Live) {
        return Err(StoreError::NoSession(client.session).into());
    }
    if op.number <= row.last_forwarded.number {
        return Err(ForwardError::Errno(libc::EALREADY).into());
    }
    let einval = || ForwardError::Errno(libc::EINVAL);
    let (header, parsed) = parse(op)?;
    let mut flags = EntryFlags::from_bits_truncate(header.flags);
    let rows = SessionGrants::new(client, env.leases);
    let mut parsed = parsed;
    if let LogOp::Create { dir, key, .. } = &mut parsed {
        if key.ino.0 == 0 {
            let dir_ino = dir.ino;
            check_dir(tx, *dir)?;
            *key = tx.alloc_inodes(dir_ino, 1)?.first().copied().ok_or_else(einval)?;
        } else if !rows.allows(*key, Need::Write, LogSeq(u64::MAX)) {
            return Err(ForwardError::Errno(libc::EPERM).into());
        }
    }
    if let LogOp::Rename { key, .. } = &mut parsed
        && key.ino.0 == 0
    {
        *key = named.ok_or_else(einval)?;
    }
    if let LogOp::Write { key, .. }
    | LogOp::Truncate { key, .. }
    | LogOp::Fallocate { key, .. }
    | LogOp::Share {
        key, compare: false, ..
    } = &parsed
    {
        // The client has no lease on the file, so it may not know the mode.
        flags |= clears(&live(tx, *key)?, &op.cred);
    }
    let mut offset = 0;
    if let LogOp::Write {
        key,
        offset: at,
        data,
    } = &mut parsed
    {
        if op.append {
            *at = live(tx, *key)?.size_bytes;
        }
        if at.saturating_add(data.len() as u64) > FILE_SIZE_MAX {
            return Err(ForwardError::Errno(libc::EFBIG).into());
        }
        offset = *at;
    }
    let parsed = Caller {
        tx,
        client,
        cred: &op.cred,
        leases: env.leases,
        dedup_scope: env.dedup_scope,
    }
    .check(parsed)?;
    let made = match parsed {
        LogOp::Create { key, .. } => Some(key),
        _ => None,
    };
    let mut outcome = Outcome {
        of: subject(&parsed),
        offset,
        victim: victim(&parsed),
    };
    let operation = |op, flags| Op {
        seq: LogSeq(0),
        time_ns: env.now_ns,
        flags,
        op,
        left: None,
    };
    let (mut remapped, mut wished) = (None, false);
    let parsed = match share::check_share(tx, &parsed)? {
        None => parsed,
        Some(share) => {
            remapped = Some(share.target);
            wished = share::is_placed(tx, &[share.target, share.source])?;
            if let Some(blocks) = share.blocks() {
                let users = [live(tx, share.target)?.uid, live(tx, share.source)?.uid];
                // Memory that an ordinary user maps holds no block of another user's file.
                if share.compare && users[0] != users[1] && share::is_in_nvm(store, &blocks)? {
                    return Err(ForwardError::Errno(libc::EOPNOTSUPP).into());
                }
                if shared == 0
                    && share.compare
                    && !share::has_equal_bytes(|ino, at, out| tx.read(ino, at, out), &blocks)?
                {
                    return Err(ForwardError::Errno(libc::EILSEQ).into());
                }
                let done = tx.share(&blocks, shared).map_err(|error| match error {
                    StoreError::Unfinished(ino) => Failed::PreStep(PreStep::Finish(ino)),
                    error => error.into(),
                })?;
                if done < blocks.blocks {
                    if !share.compare {
                        share::update_attr(tx, &share, flags, env.now_ns)?;
                    }
                    return Err(Failed::Shared(done));
                }
            }
            share::attr_update(tx, &share)?
        }
    };
    let mut parsed = parsed;
    if let LogOp::Unshare { key, .. } = parsed {
        remapped = Some(key);
        wished = share::is_placed(tx, &[key])?;
        if let Some(blocks) = share::check_copies(tx, &parsed)? {
            let end = blocks.end;
            let done = match env.rejoin {
                true => tx.unshare_joined(key.ino, blocks),
                false => tx.unshare(key.ino, blocks),
            };
            let done = done.map_err(|error| match error {
                StoreError::Unfinished(ino) => Failed::PreStep(PreStep::Finish(ino)),
                error => error.into(),
            })?;
            if done.next < end {
                return Err(Failed::Unshared(done.copied));
            }
        }
        parsed = LogOp::Noop;
    }
    if let LogOp::Defrag { key, .. } = parsed {
        remapped = Some(key);
        if let Some(blocks) = share::check_copies(tx, &parsed)? {
            let end = blocks.end;
            if !moved.is_begun {
                let is_begun = true;
                return Err(Failed::Moved(Moved { is_begun, ..moved }));
            }
            let step = tx.defrag(key.ino, moved.rest(&blocks), moved.tier);
            let step = step.map_err(|error| match error {
                StoreError::Unfinished(ino) => Failed::PreStep(PreStep::Finish(ino)),
                error => error.into(),
            })?;
            let (blocks, next) = moved.after(step, end);
            if let Some(next) = next {
                return Err(Failed::Moved(next));
            }
            offset = blocks * BLOCK_BYTES;
            outcome.offset = offset;
        }
        parsed = LogOp::Noop;
    }
    let mut operations = vec![operation(parsed, flags)];
    if op.whiteout {
        operations.push(operation(whiteout(tx, &parsed, &op.cred)?, EntryFlags::empty()));
    }
    if !filled && let Some(before) = allocation::of_many_records(store, &parsed, env)? {
        return Err(Failed::PreStep(before));
    }
    let mut fold = Fold::new(TxView::new(tx, env.leases), env.now_ns);
    let folded = fold.transaction(forwarded_actor(client, op.cred.uid), &rows, &operations)?;
    if let Err(refused) = folded {
        return Err(ForwardError::Errno(errno(refused.why)).into());
    }
    let plan = fold.finish();
    let sessions = [client.session];
    let (mut applied, unfinished) = execute(
        store,
        tx,
        (&plan, true),
        env,
        &sessions,
        (&NoPayloads, &Redone::default()),
    )
    .map_err(|stuck| match stuck {
        CommitFailure::PreStep(before) => Failed::PreStep(before),
        CommitFailure::RecordFull => ForwardError::Errno(libc::EFBIG).into(),
        CommitFailure::Store(error) => error.into(),
    })?;
    applied.remapped.extend(remapped);
    applied.pinned |= wished;
    row.last_forwarded = LastForwarded {
        number: op.number,
        made,
        open: op.open,
        offset,
    };
    tx.session_put(&row)?;
    Ok((applied, outcome, unfinished))
}

/// Returns the operation that makes the whiteout of a rename, with an inode number of its own. A caller that
/// may remove the name may create the whiteout, as in Linux: no driver answers for its device number.
fn whiteout<'o>(tx: &mut Tx<'_>, rename: &LogOp<'o>, cred: &Cred) -> Check<LogOp<'o>> {
    let LogOp::Rename {
        dir,
        name,
        exchange: false,
        ..
    } = *rename
    else {
        return refuse(libc::EINVAL);
    };
    let parent = check_dir(tx, dir)?;
    let numbers = tx.alloc_inodes(dir.ino, 1)?;
    let hands_on = parent.mode & libc::S_ISGID != 0;
    Ok(LogOp::Create {
        dir,
        name,
        key: *numbers.first().ok_or(ForwardError::Errno(libc::ENOSPC))?,
        mode: libc::S_IFCHR,
        uid: cred.uid,
        gid: if hands_on { parent.gid } else { cred.gid },
        rdev: 0,
        target: b"",
    })
}

/// Returns the inode whose attributes the answer carries.
const fn subject(op: &LogOp<'_>) -> Option<InodeKey> {
    match op {
        LogOp::Noop => None,
        LogOp::Write { key, .. }
        | LogOp::Truncate { key, .. }
        | LogOp::Fallocate { key, .. }
        | LogOp::Share { key, .. }
        | LogOp::Unshare { key, .. }
        | LogOp::Defrag { key, .. }
        | LogOp::SetAttr { key, .. }
        | LogOp::SetXattr { key, .. }
        | LogOp::RemoveXattr { key, .. }
        | LogOp::Create { key, .. }
        | LogOp::Link { key, .. }
        | LogOp::Unlink { key, .. }
        | LogOp::Rename { key, .. }
        | LogOp::Forget { key } => Some(*key),
    }
}

const fn victim(op: &LogOp<'_>) -> Option<InodeKey> {
    match op {
        LogOp::Unlink { key, .. } => Some(*key),
        LogOp::Rename {
            victim,
            exchange: false,
            ..
        } => *victim,
        _ => None,
    }
}

/// Returns the set-id bits that a change of the data clears.
fn clears(attr: &InodeAttr, cred: &Cred) -> EntryFlags {
    let mut flags = EntryFlags::empty();
    if cred.uid != 0 {
        flags.set(EntryFlags::CLEAR_SUID, attr.mode & 0o4000 != 0);
        flags.set(EntryFlags::CLEAR_SGID, attr.mode & 0o2010 == 0o2010);
    }
    flags
}

/// Looks `name` up in `dir` with the rights of `cred`; both as digested.
///
/// # Errors
/// The errno of the call, or the store's error.
pub fn find_named(
    store: &Store,
    client: Client,
    dir: InodeKey,
    name: &[u8],
    cred: &Cred,
) -> Check<Option<InodeKey>> {
    let attr = match store.get_key(dir) {
        Ok(inode) => inode.attr,
        Err(StoreError::NoInode(_)) => return refuse(libc::ESTALE),
        Err(error) => return Err(error.into()),
    };
    if !attr.is_dir() {
        return refuse(libc::ENOTDIR);
    }
    if !client.checked {
        need(&attr, cred, MAY_SEARCH)?;
    }
    Ok(store.dir_lookup(dir.ino, name)?.map(|item| item.key))
}

/// Returns the errno for an operation that the checks above pass and the fold refuses.
const fn errno(why: Refusal) -> i32 {
    match why {
        Refusal::Malformed(_) | Refusal::NotFile | Refusal::Loop => libc::EINVAL,
        Refusal::NoGrant | Refusal::NotPermitted | Refusal::DirectoryMove => libc::EPERM,
        Refusal::NoInode => libc::ESTALE,
        Refusal::NoEntry => libc::ENOENT,
        Refusal::Exists => libc::EEXIST,
        Refusal::NotDirectory => libc::ENOTDIR,
        Refusal::IsDirectory => libc::EISDIR,
        Refusal::NotEmpty => libc::ENOTEMPTY,
        Refusal::TooManyLinks => libc::EMLINK,
        Refusal::NoXattr => libc::ENODATA,
        Refusal::HasName => libc::EBUSY,
        Refusal::NotReserved => libc::ENOSPC,
        Refusal::Contradicted => libc::EIO,
    }
}
