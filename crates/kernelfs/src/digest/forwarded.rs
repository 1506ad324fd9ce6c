//! Forwarded operations: the daemon executes one operation for a client. Makes POSIX's checks in POSIX's
//! order with the caller's credentials, then folds and executes it as an entry of a log.
//!
//! `ESTALE` tells the client that names have changed: it looks them up and decides again. Any other error is
//! the call's result.

use super::allocation::{self, Filled, Spent};
use super::commit::{execute, finish_free, forwarded_actor, run_pre_step};
use super::deferred::{NoPayloads, Redone};
use super::execute::{CommitFailure, PreStep};
use super::share;
use super::types::{Applied, Client, Environment, Leases};
use super::view::{SessionGrants, TxView};
use varve_digest::{Fold, Grants, Need, Op, Refusal};
use varve_format::log::HEADER_SIZE;
use varve_format::session::SessionState;
use varve_format::{
    EntryFlags, EntryHeader, FILE_SIZE_MAX, FileKind, InodeAttr, InodeKey, LINK_MAX, LastForwarded, LogOp,
    LogSeq, SetAttr, SetAttrMask, is_whiteout,
};
use varve_ipc::{Cred, ForwardedOp, ForwardedResult};
use varve_store::{Store, StoreError, Tx};
use zerocopy::FromBytes;

/// Why a forwarded operation was not done. It had no effect.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The call fails with this errno.
    #[error("errno {0}")]
    Errno(i32),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

type Check<T> = Result<T, ForwardError>;

const fn refuse<T>(errno: i32) -> Check<T> {
    Err(ForwardError::Errno(errno))
}

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
    let (mut rounds, mut shared) = (0, 0);
    while rounds < ROUNDS {
        let mut tx = store.begin_with_room()?;
        let so_far = SoFar {
            filled: filled.is_some(),
            shared,
        };
        match attempt(store, &mut tx, client, op, named, env, so_far) {
            Ok((mut applied, result, unfinished)) => {
                applied.tx = tx.commit()?;
                *filled = None;
                for key in unfinished {
                    finish_free(store, key)?;
                }
                return Ok((applied, result));
            }
            Err(Failed::Shared(blocks)) => {
                tx.commit()?;
                shared = blocks;
            }
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
                    share::give_up(store, op)?;
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
}

enum Failed {
    PreStep(PreStep),
    /// This number of blocks is shared; there are more.
    Shared(u64),
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
    SoFar { filled, shared }: SoFar,
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
    }
    .check(parsed)?;
    let made = match parsed {
        LogOp::Create { key, .. } => Some(key),
        _ => None,
    };
    let outcome = Outcome {
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
    let mut remapped = None;
    let parsed = match share::range(tx, &parsed)? {
        None => parsed,
        Some((range, compare)) => {
            remapped = Some(range.key);
            if let Some(blocks) = range.blocks() {
                if shared == 0 && compare && !share::is_alike(tx, &blocks)? {
                    return Err(ForwardError::Errno(libc::EILSEQ).into());
                }
                let done = tx.share(&blocks, shared).map_err(|error| match error {
                    StoreError::Unfinished(ino) => Failed::PreStep(PreStep::Finish(ino)),
                    error => error.into(),
                })?;
                if done < blocks.blocks {
                    if !compare {
                        share::note_changed(tx, &range, flags, env.now_ns)?;
                    }
                    return Err(Failed::Shared(done));
                }
            }
            share::rest(tx, &range, compare)?
        }
    };
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

fn live(tx: &Tx<'_>, key: InodeKey) -> Check<InodeAttr> {
    match tx.get_key(key) {
        Ok(inode) => Ok(inode.attr),
        Err(StoreError::NoInode(_) | StoreError::Invalid(_)) => refuse(libc::ESTALE),
        Err(error) => Err(error.into()),
    }
}

fn check_dir(tx: &Tx<'_>, key: InodeKey) -> Check<InodeAttr> {
    let attr = live(tx, key)?;
    if !attr.is_dir() {
        return refuse(libc::ENOTDIR);
    }
    Ok(attr)
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

const READ_BIT_SHIFTS: [u32; 3] = [6, 3, 0];
const MAY_READ: u32 = 4;
const MAY_WRITE: u32 = 2;
const MAY_SEARCH: u32 = 1;

/// Whether the permission bits grant `want` to `cred`. The superuser may do everything with directories and
/// data.
fn permits(attr: &InodeAttr, cred: &Cred, want: u32) -> bool {
    if cred.uid == 0 {
        return true;
    }
    let [owner, group, other] = READ_BIT_SHIFTS;
    let shift = if attr.uid == cred.uid {
        owner
    } else if cred.in_group(attr.gid) {
        group
    } else {
        other
    };
    (attr.mode >> shift) & want == want
}

fn need(attr: &InodeAttr, cred: &Cred, want: u32) -> Check<()> {
    if permits(attr, cred, want) {
        Ok(())
    } else {
        refuse(libc::EACCES)
    }
}

fn owner(attr: &InodeAttr, cred: &Cred) -> bool {
    cred.uid == 0 || cred.uid == attr.uid
}

/// One caller's rights.
struct Caller<'c, 's> {
    tx: &'c Tx<'s>,
    client: Client,
    cred: &'c Cred,
    leases: &'c dyn Leases,
}

impl Caller<'_, '_> {
    /// Checks an operation, and returns the operation to execute.
    fn check<'o>(&self, op: LogOp<'o>) -> Check<LogOp<'o>> {
        match op {
            LogOp::Noop => {}
            LogOp::Write { key, .. } | LogOp::Truncate { key, .. } | LogOp::Fallocate { key, .. } => {
                self.data(key)?
            }
            LogOp::Share {
                key, source, compare, ..
            } => self.share(key, source, compare)?,
            LogOp::SetAttr { key, attr } => {
                let attr = self.set_attr(&live(self.tx, key)?, attr)?;
                return Ok(LogOp::SetAttr { key, attr });
            }
            LogOp::SetXattr { key, name, .. } | LogOp::RemoveXattr { key, name } => self.xattr(key, name)?,
            LogOp::Create {
                dir,
                name,
                mode,
                uid,
                rdev,
                ..
            } => self.create(dir, name, (mode, rdev), uid)?,
            LogOp::Link { dir, name, key } => self.link(dir, name, key)?,
            LogOp::Unlink { dir, name, key } => self.unlink(dir, name, key)?,
            LogOp::Rename { .. } => self.rename(&op)?,
            LogOp::Forget { key } => {
                live(self.tx, key)?;
            }
        }
        Ok(op)
    }

    /// Checks write access to file data. For privileged clients and mounts it was checked when the file was
    /// opened, by the client or the kernel; for others it is checked here again.
    fn data(&self, key: InodeKey) -> Check<()> {
        let attr = live(self.tx, key)?;
        match attr.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return refuse(libc::EISDIR),
            _ => return refuse(libc::EINVAL),
        }
        let opened = || self.leases.had(self.client.session, key) & MAY_WRITE != 0;
        if self.client.privileged || owner(&attr, self.cred) || opened() {
            return Ok(());
        }
        self.need(&attr, MAY_WRITE)
    }

    /// Checks read access to the source of a share, and write access to its target. Who owns the target may
    /// have it compared without write access, as in Linux.
    fn share(&self, key: InodeKey, source: InodeKey, compare: bool) -> Check<()> {
        let (attr, from) = (live(self.tx, key)?, live(self.tx, source)?);
        if attr.is_dir() || from.is_dir() {
            return refuse(libc::EISDIR);
        }
        if attr.kind() != FileKind::Regular || from.kind() != FileKind::Regular {
            return refuse(libc::EINVAL);
        }
        let opened = self.leases.had(self.client.session, source) & MAY_READ != 0;
        if !self.client.privileged && !owner(&from, self.cred) && !opened {
            self.need(&from, MAY_READ)?;
        }
        if compare && owner(&attr, self.cred) {
            return Ok(());
        }
        self.data(key)
    }

    fn need(&self, attr: &InodeAttr, want: u32) -> Check<()> {
        if self.client.checked {
            Ok(())
        } else {
            need(attr, self.cred, want)
        }
    }

    fn set_attr(&self, old: &InodeAttr, mut new: SetAttr) -> Check<SetAttr> {
        if self.client.checked {
            return Ok(new);
        }
        let owner = owner(old, self.cred);
        let root = self.cred.uid == 0;
        if new.mask.contains(SetAttrMask::UID) && !root && !(owner && new.uid == old.uid) {
            return refuse(libc::EPERM);
        }
        if new.mask.contains(SetAttrMask::GID)
            && !root
            && !(owner && (new.gid == old.gid || self.cred.in_group(new.gid)))
        {
            return refuse(libc::EPERM);
        }
        if new.mask.contains(SetAttrMask::MODE) {
            if !owner {
                return refuse(libc::EPERM);
            }
            let group = if new.mask.contains(SetAttrMask::GID) {
                new.gid
            } else {
                old.gid
            };
            if !root && !self.cred.in_group(group) {
                new.mode &= !0o2000;
            }
        }
        let times = SetAttrMask::ATIME | SetAttrMask::MTIME;
        if new.mask.intersects(times) && !owner && !permits(old, self.cred, MAY_WRITE) {
            return refuse(libc::EACCES);
        }
        Ok(new)
    }

    fn xattr(&self, key: InodeKey, name: &[u8]) -> Check<()> {
        let attr = live(self.tx, key)?;
        if name.starts_with(b"user.") {
            if !matches!(attr.kind(), FileKind::Regular | FileKind::Directory) {
                return refuse(libc::EPERM);
            }
            let sticky = attr.is_dir() && attr.mode & 0o1000 != 0;
            if sticky && !owner(&attr, self.cred) {
                return refuse(libc::EPERM);
            }
            return self.need(&attr, MAY_WRITE);
        }
        let allowed = if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
            self.cred.uid == 0
        } else {
            owner(&attr, self.cred)
        };
        if allowed { Ok(()) } else { refuse(libc::EPERM) }
    }

    /// Checks a directory that names are looked up in.
    fn search(&self, dir: InodeKey) -> Check<InodeAttr> {
        let attr = check_dir(self.tx, dir)?;
        self.need(&attr, MAY_SEARCH)?;
        Ok(attr)
    }

    /// Checks that `dir` may get a name.
    fn may_add(&self, dir: &InodeAttr) -> Check<()> {
        if dir.nlink == 0 {
            return refuse(libc::ENOENT);
        }
        self.need(dir, MAY_WRITE | MAY_SEARCH)
    }

    /// Checks that `dir` may lose the name of `attr`.
    fn may_remove(&self, dir: &InodeAttr, attr: &InodeAttr) -> Check<()> {
        self.need(dir, MAY_WRITE | MAY_SEARCH)?;
        if dir.mode & 0o1000 != 0 && !owner(dir, self.cred) && self.cred.uid != attr.uid {
            return refuse(libc::EPERM);
        }
        Ok(())
    }

    fn lookup(&self, dir: InodeKey, name: &[u8]) -> Check<Option<InodeKey>> {
        Ok(self.tx.dir_lookup(dir.ino, name)?.map(|item| item.key))
    }

    fn create(&self, dir: InodeKey, name: &[u8], (mode, rdev): (u32, u32), uid: u32) -> Check<()> {
        let parent = self.search(dir)?;
        if !name.is_empty() && self.lookup(dir, name)?.is_some() {
            return refuse(libc::EEXIST);
        }
        self.may_add(&parent)?;
        let kind = FileKind::from_mode(mode);
        let device =
            matches!(kind, Some(FileKind::CharDevice | FileKind::BlockDevice)) && !is_whiteout(mode, rdev);
        if (device || uid != self.cred.uid) && self.cred.uid != 0 {
            return refuse(libc::EPERM);
        }
        if kind == Some(FileKind::Directory) && parent.nlink >= LINK_MAX {
            return refuse(libc::EMLINK);
        }
        Ok(())
    }

    fn link(&self, dir: InodeKey, name: &[u8], key: InodeKey) -> Check<()> {
        let attr = live(self.tx, key)?;
        let parent = self.search(dir)?;
        if self.lookup(dir, name)?.is_some() {
            return refuse(libc::EEXIST);
        }
        self.may_add(&parent)?;
        if attr.is_dir() {
            return refuse(libc::EPERM);
        }
        if attr.nlink >= LINK_MAX {
            return refuse(libc::EMLINK);
        }
        Ok(())
    }

    fn unlink(&self, dir: InodeKey, name: &[u8], key: InodeKey) -> Check<()> {
        let parent = self.search(dir)?;
        let attr = self.named(dir, name, key)?;
        self.may_remove(&parent, &attr)?;
        self.empty(&attr)
    }

    /// Returns the attributes of `key`, if `name` names it.
    fn named(&self, dir: InodeKey, name: &[u8], key: InodeKey) -> Check<InodeAttr> {
        match self.lookup(dir, name)? {
            None => refuse(libc::ENOENT),
            Some(other) if other != key => refuse(libc::ESTALE),
            Some(_) => live(self.tx, key),
        }
    }

    fn empty(&self, attr: &InodeAttr) -> Check<()> {
        if attr.is_dir() && !self.tx.dir_iter(attr.key.ino, 0, 1)?.is_empty() {
            return refuse(libc::ENOTEMPTY);
        }
        Ok(())
    }

    /// Whether `key` is `below` or one of its ancestors.
    fn is_above(&self, key: InodeKey, below: InodeKey) -> Check<bool> {
        let mut at = below.ino;
        for _ in 0..=u16::MAX {
            if at == key.ino {
                return Ok(true);
            }
            if at == varve_format::ROOT_INO || at.0 == 0 {
                return Ok(false);
            }
            at = self.tx.get(at)?.attr.parent;
        }
        refuse(libc::ELOOP)
    }

    fn rename(&self, op: &LogOp<'_>) -> Check<()> {
        let LogOp::Rename {
            dir,
            name,
            key,
            new_dir,
            new_name,
            victim,
            exchange,
        } = *op
        else {
            return Ok(());
        };
        let from = self.search(dir)?;
        let to = self.search(new_dir)?;
        let attr = self.named(dir, name, key)?;
        let there = self.lookup(new_dir, new_name)?;
        if exchange && there.is_none() {
            return refuse(libc::ENOENT);
        }
        if there != victim {
            // Without an expected victim the client may have meant not to replace anything.
            return refuse(if victim.is_none() {
                libc::EEXIST
            } else {
                libc::ESTALE
            });
        }
        let victim = victim.filter(|victim| *victim != key);
        let across = dir != new_dir;
        if attr.is_dir() && across && self.is_above(key, new_dir)? {
            return refuse(libc::EINVAL);
        }
        if let Some(victim) = victim
            && across
            && live(self.tx, victim)?.is_dir()
            && self.is_above(victim, dir)?
        {
            return refuse(if exchange { libc::EINVAL } else { libc::ENOTEMPTY });
        }
        self.may_remove(&from, &attr)?;
        match victim {
            None => self.may_add(&to)?,
            Some(victim) => self.may_replace(&attr, &to, &live(self.tx, victim)?, exchange)?,
        }
        if across && attr.is_dir() {
            // The move changes its entry "..".
            self.need(&attr, MAY_WRITE)?;
            if victim.is_none() && to.nlink >= LINK_MAX {
                return refuse(libc::EMLINK);
            }
        }
        Ok(())
    }

    fn may_replace(&self, attr: &InodeAttr, to: &InodeAttr, victim: &InodeAttr, exchange: bool) -> Check<()> {
        self.may_remove(to, victim)?;
        if exchange {
            return Ok(());
        }
        match (attr.is_dir(), victim.is_dir()) {
            (true, false) => refuse(libc::ENOTDIR),
            (false, true) => refuse(libc::EISDIR),
            _ => self.empty(victim),
        }
    }
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
