//! The state of the inodes and names that a batch touches, as its operations change it one after another.
//! Reads the digested state of an inode or a name through a [`View`] at its first use; writes nothing.
//!
//! An operation makes all checks before its first change. So a refused transaction of one entry leaves no
//! trace; a refused transaction of several entries is undone from copies.

use crate::bytes::FileFold;
use crate::op::{Actor, Counts, Grants, Need, Op, Refusal, RefusedTx, Slot, Stop, View};
use hashbrown::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use varve_format::log::LogFormatError;
use varve_format::{
    BLOCK_BYTES, EntryFlags, FileKind, Generation, Ino, InodeAttr, InodeKey, LINK_MAX, LogOp, LogSeq,
    SessionId, SetAttrMask, TimeNs, XATTR_CAPABILITY,
};

/// One inode as the batch leaves it.
#[derive(Debug, Clone)]
pub(crate) struct Node<'a> {
    /// Digested attributes; `None`: made in this batch.
    pub(crate) old: Option<InodeAttr>,
    /// Attributes after the operations so far.
    pub(crate) attr: InodeAttr,
    /// Deleted for good.
    pub(crate) gone: bool,
    pub(crate) target: &'a [u8],
    pub(crate) file: FileFold<'a>,
    /// Values set, or (`None`) removed.
    pub(crate) xattrs: BTreeMap<&'a [u8], Option<&'a [u8]>>,
    /// Sessions that closed it for the last time in this batch.
    pub(crate) left: Vec<SessionId>,
    pub(crate) changed: bool,
    /// The inode is known to have no file capabilities.
    pub(crate) no_capability: bool,
    /// Estimated bytes of journal record beyond those for the stretches in `file`.
    pub(crate) more_bytes: u64,
}

impl Node<'_> {
    /// Returns the approximate bytes of journal record for this inode.
    fn record_bytes(&self) -> u64 {
        match (self.changed, self.gone) {
            (false, _) => 0,
            (true, true) => INODE_BYTES + 4 * PIECE_BYTES,
            (true, false) => {
                let (stretches, bytes) = self.file.extent();
                let data = stretches * (PIECE_BYTES + 2 * BLOCK_RECORD_BYTES);
                INODE_BYTES + self.more_bytes + data + bytes / BLOCK_BYTES * BLOCK_RECORD_BYTES
            }
        }
    }
}

/// The state of an inode number.
#[derive(Debug, Clone)]
pub(crate) enum Known<'a> {
    Free,
    Reserved(Generation),
    Node(Box<Node<'a>>),
    /// An inode made and deleted in this batch. Only its reserved number is kept, to be given back; the
    /// memory of the rest is reused by the next short-lived file.
    Vanished(InodeKey),
}

/// A name as the batch leaves it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Name {
    /// Inode that it names in the digested state.
    pub(crate) old: Option<InodeKey>,
    /// Inode that it names after the operations so far.
    pub(crate) now: Option<InodeKey>,
    /// Order of the last change: names are added to the directory in the order in which they were made.
    pub(crate) order: u64,
}

/// Copies of the inodes and names that a transaction of several entries touched, from before it.
#[derive(Default)]
struct Undo<'a> {
    nodes: hashbrown::HashMap<Ino, Option<Known<'a>>>,
    names: Vec<(Ino, Box<[u8]>, Option<Name>)>,
    record_bytes: u64,
}

/// Folds operations; see the module's text. `'a` is the lifetime of the batches' bytes.
pub struct Fold<'a, V: View> {
    pub(crate) view: V,
    pub(crate) nodes: hashbrown::HashMap<Ino, Known<'a>>,
    /// Users choose names, so this map uses the standard library's keyed hash, which cannot be guessed.
    pub(crate) names: hashbrown::HashMap<Ino, HashMap<Box<[u8]>, Name>>,
    pub(crate) counts: Counts,
    pub(crate) refused: Vec<(SessionId, RefusedTx)>,
    order: u64,
    undo: Option<Undo<'a>>,
    now_ns: TimeNs,
    record_bytes: u64,
}

/// Generous averages of the bytes of journal record that one name, one inode, one inode made and deleted in
/// one batch, one stretch of data and one attribute need. A batch that needs more is cut smaller.
const NAME_BYTES: u64 = 768;
const INODE_BYTES: u64 = 512;
const VANISHED_BYTES: u64 = 320;
const PIECE_BYTES: u64 = 192;
const XATTR_BYTES: u64 = 1024;
/// Checksum and bitmap of one data block, in bytes.
const BLOCK_RECORD_BYTES: u64 = 6;

pub(crate) type Step<T, V> = Result<T, Stop<<V as View>::Error>>;

/// The context of one operation.
pub(crate) struct At<'g> {
    pub(crate) actor: Actor,
    pub(crate) grants: &'g dyn Grants,
    pub(crate) seq: LogSeq,
    pub(crate) time_ns: TimeNs,
    pub(crate) flags: EntryFlags,
}

impl At<'_> {
    /// Returns whether the caller's rights are not to be checked here: the session is privileged, or the
    /// daemon has checked them.
    pub(crate) const fn trusted(&self) -> bool {
        self.actor.privileged || self.actor.forwarded
    }

    /// Clears the set-group-id bit of a file whose group is not one of the caller's, as chmod(2) does.
    pub(crate) fn clear_foreign_sgid(&self, attr: &mut InodeAttr) {
        let own = self.actor.privileged || self.grants.in_group(attr.gid);
        if attr.mode & 0o2000 != 0 && !attr.is_dir() && !own {
            attr.mode &= !0o2000;
        }
    }

    /// Returns the flags of the set-id bits that a change of data clears: those named in the entry, and for
    /// unprivileged sessions also those that the kernel would clear.
    fn set_id_flags(&self, attr: &InodeAttr) -> EntryFlags {
        let mut flags = self.flags;
        if !self.actor.privileged {
            flags |= EntryFlags::CLEAR_SUID;
            if attr.mode & 0o010 != 0 || !self.grants.in_group(attr.gid) {
                flags |= EntryFlags::CLEAR_SGID;
            }
        }
        flags
    }

    pub(crate) fn need(&self, key: InodeKey, need: Need) -> Result<(), Refusal> {
        if self.actor.forwarded || self.grants.allows(key, need, self.seq) {
            Ok(())
        } else {
            Err(Refusal::NoGrant)
        }
    }
}

impl<'a, V: View> Fold<'a, V> {
    /// Starts from the state that `view` shows. No time in the result is later than `now_ns`.
    pub fn new(view: V, now_ns: TimeNs) -> Self {
        Self {
            view,
            nodes: hashbrown::HashMap::new(),
            names: hashbrown::HashMap::new(),
            counts: Counts::default(),
            refused: Vec::new(),
            order: 0,
            undo: None,
            now_ns,
            record_bytes: 0,
        }
    }

    /// Folds one transaction, wholly or not at all; a refusal is counted and returned inside.
    ///
    /// # Errors
    /// Only the view's. The transaction is not in the fold then; all other transactions are.
    pub fn transaction(
        &mut self,
        actor: Actor,
        grants: &dyn Grants,
        ops: &[Op<'a>],
    ) -> Result<Result<(), RefusedTx>, V::Error> {
        // Writes change nothing that decides whether a later write is possible. So all of them are checked
        // before the first is folded, and none has to be undone.
        let only_writes = ops.iter().all(|op| matches!(op.op, LogOp::Write { .. }));
        if ops.len() > 1 {
            self.undo = Some(Undo {
                record_bytes: self.record_bytes,
                ..Undo::default()
            });
        }
        for op in ops {
            let at = At {
                actor,
                grants,
                seq: op.seq,
                time_ns: op.time_ns.min(self.now_ns),
                flags: op.flags,
            };
            let step = if only_writes && ops.len() > 1 {
                self.may_write(&at, &op.op)
            } else {
                self.step(&at, op)
            };
            match step {
                Ok(()) => {}
                Err(Stop::State(error)) => {
                    self.roll_back();
                    return Err(error);
                }
                Err(Stop::Refused(why)) => {
                    self.roll_back();
                    let (key, named) = op.op.subject();
                    tracing::debug!(seq = %op.seq, op = ?op.op.code(), %key, named, "refused: {why}");
                    return Ok(Err(self.refuse(actor.session, op.seq, why, ops.len())));
                }
            }
        }
        self.undo = None;
        if only_writes && ops.len() > 1 {
            for op in ops {
                let at = At {
                    actor,
                    grants,
                    seq: op.seq,
                    time_ns: op.time_ns.min(self.now_ns),
                    flags: op.flags,
                };
                self.write(&at, op);
            }
        }
        self.counts.ops += ops.len() as u64;
        for op in ops {
            self.counts.bytes_in += op.bytes().len() as u64;
        }
        Ok(Ok(()))
    }

    /// Counts a transaction that was refused before it could be folded.
    pub fn refuse(&mut self, session: SessionId, seq: LogSeq, why: Refusal, ops: usize) -> RefusedTx {
        let refused = RefusedTx { seq, why };
        self.counts.refused += ops as u64;
        self.refused.push((session, refused));
        refused
    }

    /// Returns the approximate bytes of journal record that the plan needs, so that a batch can be cut in
    /// time. Changes undone by later operations are not counted; an inode made and deleted in the batch
    /// counts only for giving back its number.
    #[must_use]
    pub const fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// As [`record_bytes`](Self::record_bytes), counted anew.
    #[cfg(test)]
    pub(crate) fn record_bytes_counted(&self) -> u64 {
        let nodes = self.nodes.values().map(|known| match known {
            Known::Node(node) => node.record_bytes(),
            Known::Vanished(_) => VANISHED_BYTES,
            Known::Free | Known::Reserved(_) => 0,
        });
        let names = self.names.values().flat_map(HashMap::values);
        nodes.sum::<u64>() + names.filter(|name| name.now != name.old).count() as u64 * NAME_BYTES
    }

    /// Returns the view of the state before the batch.
    pub fn view(&mut self) -> &mut V {
        &mut self.view
    }

    /// Returns the attributes of an inode after the operations so far; `None` if it does not exist.
    ///
    /// # Errors
    /// The view's.
    pub fn attr(&mut self, ino: Ino) -> Result<Option<InodeAttr>, V::Error> {
        Ok(match self.known(ino)? {
            Known::Node(node) if !node.gone => Some(node.attr.clone()),
            _ => None,
        })
    }

    /// Returns the inode that `name` names in `dir` after the operations so far.
    ///
    /// # Errors
    /// The view's.
    pub fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Option<InodeKey>, V::Error> {
        Ok(self.name(dir, name)?.now)
    }

    fn roll_back(&mut self) {
        let Some(undo) = self.undo.take() else { return };
        self.record_bytes = undo.record_bytes;
        for (dir, name, old) in undo.names.into_iter().rev() {
            let names = self.names.entry(dir).or_default();
            match old {
                Some(old) => names.insert(name, old),
                None => names.remove(&name),
            };
        }
        for (ino, old) in undo.nodes {
            match old {
                Some(old) => self.nodes.insert(ino, old),
                None => self.nodes.remove(&ino),
            };
        }
    }

    pub(crate) fn known(&mut self, ino: Ino) -> Result<&Known<'a>, V::Error> {
        Ok(match self.nodes.entry(ino) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(match self.view.slot(ino)? {
                Slot::Free(_) => Known::Free,
                Slot::Reserved(generation) => Known::Reserved(generation),
                Slot::Used(attr) => Known::Node(Box::new(Node {
                    old: Some(attr.clone()),
                    attr,
                    gone: false,
                    target: &[],
                    file: FileFold::default(),
                    xattrs: BTreeMap::new(),
                    left: Vec::new(),
                    changed: false,
                    no_capability: false,
                    more_bytes: 0,
                })),
            }),
        })
    }

    /// Returns the inode `key` if its number exists with this generation.
    pub(crate) fn live(&mut self, key: InodeKey) -> Step<&Node<'a>, V> {
        match self.known(key.ino).map_err(Stop::State)? {
            Known::Node(node) if !node.gone && node.attr.key == key => Ok(node),
            _ => Err(Refusal::NoInode.into()),
        }
    }

    pub(crate) fn live_dir(&mut self, key: InodeKey) -> Step<&Node<'a>, V> {
        let node = self.live(key)?;
        if !node.attr.is_dir() {
            return Err(Refusal::NotDirectory.into());
        }
        if node.attr.nlink == 0 {
            return Err(Refusal::NoInode.into());
        }
        Ok(node)
    }

    fn live_file(&mut self, key: InodeKey) -> Step<&Node<'a>, V> {
        let node = self.live(key)?;
        match node.attr.kind() {
            FileKind::Regular => Ok(node),
            FileKind::Directory => Err(Refusal::IsDirectory.into()),
            _ => Err(Refusal::NotFile.into()),
        }
    }

    /// Changes an inode that was found [`live`](Self::live) before.
    pub(crate) fn change(&mut self, ino: Ino, f: impl FnOnce(&mut Node<'a>)) {
        self.keep(ino);
        if let Some(Known::Node(node)) = self.nodes.get_mut(&ino) {
            let before = node.record_bytes();
            node.changed = true;
            f(node);
            self.record_bytes = self.record_bytes + node.record_bytes() - before;
        }
    }

    /// Copies an inode's state, to restore it if the transaction is refused.
    fn keep(&mut self, ino: Ino) {
        if let Some(undo) = &mut self.undo {
            undo.nodes
                .entry(ino)
                .or_insert_with(|| self.nodes.get(&ino).cloned());
        }
    }

    pub(crate) fn put_new(&mut self, node: Node<'a>) {
        self.record_bytes += node.record_bytes();
        let ino = node.attr.key.ino;
        self.keep(ino);
        self.nodes.insert(ino, Known::Node(Box::new(node)));
    }

    pub(crate) fn name(&mut self, dir: Ino, name: &[u8]) -> Result<Name, V::Error> {
        if let Some(known) = self.names.get(&dir).and_then(|names| names.get(name)) {
            return Ok(*known);
        }
        let born = match self.nodes.get(&dir) {
            Some(Known::Node(node)) => node.old.is_none(),
            known => matches!(known, Some(Known::Vanished(_))),
        };
        let old = if born { None } else { self.view.lookup(dir, name)? };
        let known = Name {
            old,
            now: old,
            order: 0,
        };
        self.names.entry(dir).or_default().insert(name.into(), known);
        Ok(known)
    }

    /// Lets `name`, which was looked up before, name `now`.
    pub(crate) fn set_name(&mut self, dir: Ino, name: &[u8], now: Option<InodeKey>) {
        self.order += 1;
        let names = self.names.entry(dir).or_default();
        let mut changed = Name {
            old: None,
            now,
            order: self.order,
        };
        let old = names.get_mut(name).map(|known| {
            changed.old = known.old;
            std::mem::replace(known, changed)
        });
        if old.is_none() {
            names.insert(name.into(), changed);
        }
        if let Some(undo) = &mut self.undo {
            undo.names.push((dir, name.into(), old));
        }
        let bytes = |name: Name| if name.now == name.old { 0 } else { NAME_BYTES };
        self.record_bytes = self.record_bytes + bytes(changed) - old.map_or(0, bytes);
    }

    /// Returns whether a directory has no name left.
    pub(crate) fn is_empty(&mut self, dir: Ino) -> Result<bool, V::Error> {
        let names = self.names.get(&dir);
        if names.is_some_and(|names| names.values().any(|name| name.now.is_some())) {
            return Ok(false);
        }
        if matches!(self.nodes.get(&dir), Some(Known::Node(node)) if node.old.is_none()) {
            return Ok(true);
        }
        // The check above has shown that every name in `names` is removed.
        let mut gone = |name: &[u8]| names.is_some_and(|names| names.contains_key(name));
        Ok(!self.view.any_name(dir, &mut gone)?)
    }

    fn may_write(&mut self, at: &At<'_>, op: &LogOp<'a>) -> Step<(), V> {
        if let LogOp::Write { key, .. } = *op {
            at.need(key, Need::Write)?;
            self.live_file(key)?;
            self.drop_capability(key)?;
        }
        Ok(())
    }

    /// Removes the file capabilities of a file whose data or owner changes, for every caller
    /// (capabilities(7)). The daemon does so without regard to the log, so that a forged log gains no rights.
    fn drop_capability(&mut self, key: InodeKey) -> Step<(), V> {
        let node = self.live(key)?;
        if node.no_capability || node.attr.is_dir() {
            return Ok(());
        }
        let there = match node.xattrs.get(XATTR_CAPABILITY) {
            Some(value) => value.is_some(),
            None => {
                node.old.is_some()
                    && self
                        .view
                        .has_xattr(key.ino, XATTR_CAPABILITY)
                        .map_err(Stop::State)?
            }
        };
        if there {
            self.change(key.ino, |node| {
                node.more_bytes += XATTR_BYTES;
                node.xattrs.insert(XATTR_CAPABILITY, None);
            });
        }
        if let Some(Known::Node(node)) = self.nodes.get_mut(&key.ino) {
            node.no_capability = true;
        }
        Ok(())
    }

    /// Folds a write that [`may_write`](Self::may_write) has allowed.
    fn write(&mut self, at: &At<'_>, op: &Op<'a>) {
        if let LogOp::Write { key, offset, .. } = op.op {
            let data = op.bytes();
            self.change(key.ino, |node| {
                node.file.write(offset, data);
                node.attr.size_bytes = node.attr.size_bytes.max(offset + data.len() as u64);
                touch_data(&mut node.attr, at);
            });
        }
    }

    fn step(&mut self, at: &At<'_>, op: &Op<'a>) -> Step<(), V> {
        match op.op {
            LogOp::Noop => Ok(()),
            LogOp::Write { .. } => {
                self.may_write(at, &op.op)?;
                self.write(at, op);
                Ok(())
            }
            LogOp::Truncate { key, size } => {
                at.need(key, Need::Write)?;
                self.live_file(key)?;
                self.drop_capability(key)?;
                self.change(key.ino, |node| {
                    node.more_bytes += 4 * PIECE_BYTES;
                    node.file.truncate(node.attr.size_bytes, size);
                    node.attr.size_bytes = size;
                    touch_data(&mut node.attr, at);
                });
                Ok(())
            }
            LogOp::Fallocate {
                key,
                mode,
                offset,
                len,
            } => {
                at.need(key, Need::Write)?;
                self.live_file(key)?;
                self.drop_capability(key)?;
                self.change(key.ino, |node| {
                    node.more_bytes += 4 * PIECE_BYTES + (len / BLOCK_BYTES).min(1 << 20) / 8;
                    node.file.fallocate(mode, offset, len);
                    if mode.grows() {
                        node.attr.size_bytes = node.attr.size_bytes.max(offset + len);
                    }
                    touch_data(&mut node.attr, at);
                });
                Ok(())
            }
            // The daemon does it without a log.
            LogOp::Share { .. } | LogOp::Unshare { .. } | LogOp::Defrag { .. } => {
                let op = op.op.code() as u8;
                Err(Refusal::Malformed(LogFormatError::UnknownOp(op)).into())
            }
            LogOp::SetAttr { key, attr } => self.set_attr(at, key, &attr),
            LogOp::SetXattr { key, name, value } => {
                self.xattr_allowed(at, key, name)?;
                self.change(key.ino, |node| {
                    node.more_bytes += XATTR_BYTES;
                    node.xattrs.insert(name, Some(value));
                    node.no_capability &= name != XATTR_CAPABILITY;
                    node.attr.ctime_ns = at.time_ns;
                });
                Ok(())
            }
            LogOp::RemoveXattr { key, name } => {
                self.xattr_allowed(at, key, name)?;
                let node = self.live(key)?;
                let there = match node.xattrs.get(name) {
                    Some(value) => value.is_some(),
                    None if node.old.is_none() => false,
                    None => self.view.has_xattr(key.ino, name).map_err(Stop::State)?,
                };
                if !there && name == XATTR_CAPABILITY {
                    // An earlier change of the data in this log has removed the capabilities.
                    return Ok(());
                }
                if !there {
                    return Err(Refusal::NoXattr.into());
                }
                self.change(key.ino, |node| {
                    node.more_bytes += XATTR_BYTES;
                    node.xattrs.insert(name, None);
                    node.attr.ctime_ns = at.time_ns;
                });
                Ok(())
            }
            LogOp::Create { .. } => self.create(at, &op.op),
            LogOp::Link { dir, name, key } => self.link(at, dir, name, key),
            LogOp::Unlink { dir, name, key } => self.unlink(at, dir, name, key),
            LogOp::Rename { .. } => self.rename(at, &op.op),
            LogOp::Forget { key } => {
                at.need(key, Need::Links)?;
                if self.live(key)?.attr.nlink > 0 {
                    return Err(Refusal::HasName.into());
                }
                self.leave(at, key, true);
                Ok(())
            }
        }
    }

    /// Handles the loss of the last name of `key` (or, if `closed`, of its last open in a session): deletes
    /// the inode unless it has a name or a session holds it.
    pub(crate) fn leave(&mut self, at: &At<'_>, key: InodeKey, closed: bool) {
        self.change(key.ino, |node| {
            if closed && !node.left.contains(&at.actor.session) {
                node.left.push(at.actor.session);
            }
        });
        let Some(Known::Node(node)) = self.nodes.get_mut(&key.ino) else {
            return;
        };
        if node.attr.nlink == 0 && !self.view.held(key, &node.left) {
            let before = node.record_bytes();
            let after = if node.old.is_none() {
                self.nodes.insert(key.ino, Known::Vanished(key));
                VANISHED_BYTES
            } else {
                node.gone = true;
                node.file = FileFold::default();
                node.xattrs.clear();
                node.record_bytes()
            };
            self.record_bytes = self.record_bytes + after - before;
        }
    }

    fn set_attr(&mut self, at: &At<'_>, key: InodeKey, new: &varve_format::SetAttr) -> Step<(), V> {
        let to_now = new
            .mask
            .difference(SetAttrMask::ATIME | SetAttrMask::MTIME)
            .is_empty()
            && (!new.mask.contains(SetAttrMask::ATIME) || new.atime_ns == at.time_ns)
            && (!new.mask.contains(SetAttrMask::MTIME) || new.mtime_ns == at.time_ns);
        if !to_now || at.need(key, Need::Write).is_err() {
            at.need(key, Need::Own)?;
        }
        let old = &self.live(key)?.attr;
        let foreign = (new.mask.contains(SetAttrMask::UID) && new.uid != old.uid)
            || (new.mask.contains(SetAttrMask::GID) && new.gid != old.gid && !at.grants.may_give(new.gid));
        if foreign && !at.trusted() {
            return Err(Refusal::NotPermitted.into());
        }
        if new.mask.intersects(SetAttrMask::UID | SetAttrMask::GID) {
            self.drop_capability(key)?;
        }
        self.change(key.ino, |node| {
            let attr = &mut node.attr;
            if new.mask.contains(SetAttrMask::MODE) {
                attr.mode =
                    (attr.mode & varve_format::MODE_KIND_MASK) | (new.mode & varve_format::MODE_PERM_MASK);
            }
            if new.mask.contains(SetAttrMask::UID) {
                attr.uid = new.uid;
            }
            if new.mask.contains(SetAttrMask::GID) {
                attr.gid = new.gid;
            }
            if new.mask.contains(SetAttrMask::ATIME) {
                attr.atime_ns = new.atime_ns;
            }
            if new.mask.contains(SetAttrMask::MTIME) {
                attr.mtime_ns = new.mtime_ns;
            }
            attr.ctime_ns = at.time_ns;
            clear_set_id(attr, at.flags);
            at.clear_foreign_sgid(attr);
        });
        Ok(())
    }

    fn xattr_allowed(&mut self, at: &At<'_>, key: InodeKey, name: &[u8]) -> Step<(), V> {
        let user = name.starts_with(b"user.");
        at.need(key, if user { Need::Write } else { Need::Own })?;
        let kind = self.live(key)?.attr.kind();
        if at.trusted() {
            return Ok(());
        }
        let place = matches!(kind, FileKind::Regular | FileKind::Directory);
        if user && place || name.starts_with(b"system.posix_acl_") {
            Ok(())
        } else {
            Err(Refusal::NotPermitted.into())
        }
    }
}

/// Adds `by` to a link count that was checked before.
pub(crate) const fn links(attr: &mut InodeAttr, by: i32) {
    attr.nlink = attr.nlink.saturating_add_signed(by);
}

/// Checks that an inode can have one more link.
pub(crate) const fn can_link(attr: &InodeAttr) -> Result<(), Refusal> {
    if attr.nlink >= LINK_MAX {
        return Err(Refusal::TooManyLinks);
    }
    Ok(())
}

fn touch_data(attr: &mut InodeAttr, at: &At<'_>) {
    attr.mtime_ns = at.time_ns;
    attr.ctime_ns = at.time_ns;
    if attr.mode & 0o6000 != 0 {
        clear_set_id(attr, at.set_id_flags(attr));
    }
}

const fn clear_set_id(attr: &mut InodeAttr, flags: EntryFlags) {
    if flags.contains(EntryFlags::CLEAR_SUID) {
        attr.mode &= !0o4000;
    }
    if flags.contains(EntryFlags::CLEAR_SGID) {
        attr.mode &= !0o2000;
    }
}
