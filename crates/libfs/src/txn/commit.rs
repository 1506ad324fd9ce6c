//! Groups of calls as one log transaction: plans the calls one after the other, takes all leases, space and
//! locks, logs the calls with consecutive numbers, and shows all effects at once. docs/adr/0008 has the
//! rules.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use varve_format::log::PAYLOAD_MAX;
use varve_format::{BLOCK_BYTES, InodeAttr, InodeKey, LeaseNo, LogOp, SeqRange, charge};
use varve_ipc::{Cred, ITEMS_MAX};

use super::effects::{Effect, Showing, entries};
use super::plan::{Halt, Shadow, Step, draw};
use crate::dir::create::take_number;
use crate::dir::{LOOKS_MAX, Locked, Target, check_name, is_dots, pin_or_forward, settle, still_named};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::lease::{Node, Pins};
use crate::log::Stamp;
use crate::session::{Mount, Session};

/// One call of a group. Directories and files are named by their keys; `txn::made_key` stands for an inode
/// that the group itself makes.
pub(crate) enum Call {
    /// A file, directory or symbolic link.
    Make {
        dir: InodeKey,
        name: Vec<u8>,
        index: usize,
        mode: u32,
        target: Vec<u8>,
    },
    /// Data, at the end of the file if there is no offset.
    Write {
        file: InodeKey,
        offset: Option<u64>,
        data: Vec<u8>,
    },
    Truncate {
        file: InodeKey,
        size: u64,
    },
    Link {
        file: InodeKey,
        dir: InodeKey,
        name: Vec<u8>,
    },
    Unlink {
        dir: InodeKey,
        name: Vec<u8>,
    },
    Rename {
        dir: InodeKey,
        name: Vec<u8>,
        new_dir: InodeKey,
        new_name: Vec<u8>,
    },
}

/// A group to be committed.
pub(crate) struct Group<'g> {
    pub calls: &'g [Call],
    /// Bytes of log that the entries take.
    pub bytes: usize,
    /// The commit is durable against a power cut before it returns.
    pub sync: bool,
    pub cred: &'g Cred,
}

/// Refuses an impossible name for a group's call.
pub(crate) fn check_new_name(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if is_dots(name) {
        return Err(Errno(libc::EINVAL));
    }
    Ok(())
}

pub(crate) const fn is_made(key: InodeKey) -> bool {
    // No existing inode has generation 0.
    key.generation.0 == 0
}

impl Call {
    fn keys(&self) -> [Option<InodeKey>; 2] {
        match self {
            Self::Make { dir, .. } | Self::Unlink { dir, .. } => [Some(*dir), None],
            Self::Write { file, .. } | Self::Truncate { file, .. } => [Some(*file), None],
            Self::Link { file, dir, .. } => [Some(*file), Some(*dir)],
            Self::Rename { dir, new_dir, .. } => [Some(*dir), Some(*new_dir)],
        }
    }
}

impl Group<'_> {
    /// Returns the existing inodes that calls name by key.
    fn keys(&self) -> Vec<InodeKey> {
        let all = self.calls.iter().flat_map(Call::keys).flatten();
        let mut keys: Vec<_> = all.filter(|key| !is_made(*key)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

/// Numbers for the new inodes; unused ones go back.
pub(crate) struct TakenNumbers<'s> {
    session: &'s Session,
    taken: Vec<(Arc<Node>, (InodeKey, LeaseNo))>,
}

impl<'s> TakenNumbers<'s> {
    fn take<T>(session: &'s Session, pins: &Pins<'_>, steps: &[Step<'_>]) -> OpResult<Self, T> {
        let mut numbers = Self {
            session,
            taken: Vec::new(),
        };
        let mut anchors: HashMap<InodeKey, InodeKey> = HashMap::new();
        for step in steps {
            if let Step::Make { dir, attr, .. } = step {
                // An inode in a directory that this group makes, too, gets its number near the closest
                // existing directory above.
                let anchor = anchors.get(dir).copied().unwrap_or(*dir);
                anchors.insert(attr.key, anchor);
                let node = pins.node(anchor)?;
                let number = take_number(session, node)?;
                numbers.taken.push((Arc::clone(node), number));
            }
        }
        Ok(numbers)
    }

    /// Returns the final key of an inode.
    pub(crate) fn real(&self, key: InodeKey) -> InodeKey {
        if !is_made(key) {
            return key;
        }
        let index = (u64::MAX - key.ino.0) as usize;
        self.taken.get(index).map_or(key, |(_, number)| number.0)
    }

    /// Takes the numbers out: they are in the log, whether that counts or not.
    fn spend(mut self) -> Vec<(InodeKey, LeaseNo)> {
        let taken = std::mem::take(&mut self.taken);
        taken.into_iter().map(|(_, number)| number).collect()
    }
}

impl Drop for TakenNumbers<'_> {
    fn drop(&mut self) {
        for (dir, number) in self.taken.drain(..) {
            self.session.leases.put_number_back(&dir, number);
        }
    }
}

/// Most blocks that the steps may cost, wherever appends go.
fn cost(steps: &[Step<'_>]) -> u32 {
    let nobody = InodeKey::new(0, 0);
    let sum = |step: &Step<'_>| match step {
        Step::Make { .. } | Step::Rename { .. } => charge(&LogOp::Rename {
            dir: nobody,
            name: b"",
            key: nobody,
            new_dir: nobody,
            new_name: b"",
            victim: None,
            exchange: false,
        }),
        Step::Link { .. } => charge(&LogOp::Link {
            dir: nobody,
            name: b"",
            key: nobody,
        }),
        Step::Write { offset, data, .. } => data
            .chunks(PAYLOAD_MAX)
            .map(|data| {
                charge(&LogOp::Write {
                    key: nobody,
                    offset: offset.unwrap_or(BLOCK_BYTES - 1),
                    data,
                }) + 1
            })
            .sum(),
        Step::Truncate { size, .. } => charge(&LogOp::Truncate {
            key: nobody,
            size: *size,
        }),
        Step::Unlink { .. } => 0,
    };
    steps.iter().map(sum).sum()
}

/// Creates the node of a new inode that no other thread knows yet.
fn new_node(attr: &InodeAttr, target: &[u8]) -> Arc<Node> {
    let node = Node::new(attr.clone());
    if attr.is_dir() {
        node.names.lock().set_complete();
    }
    *node.xattrs.lock() = Some(crate::lease::Xattrs::new());
    if !target.is_empty() {
        let _ = node.target.set(target.to_vec());
    }
    Arc::new(node)
}

/// Whether the attributes and names that the steps rely on are unchanged.
fn holds(pins: &Pins<'_>, locked: &mut Locked<'_>, shadow: &Shadow<'_, '_>) -> Result<bool> {
    for base in &shadow.base {
        let body = locked.get(base.key)?;
        let (now, then) = (&body.attr, base);
        let same = (now.mode, now.uid, now.gid, now.nlink) == (then.mode, then.uid, then.gid, then.nlink);
        if !same || body.dead {
            return Ok(false);
        }
    }
    for (dir, name, found) in &shadow.facts {
        let known = pins.node(*dir)?.names.lock().get(name);
        if known.is_none_or(|known| known.map(|t| t.key) != found.map(|t| t.key)) {
            return Ok(false);
        }
    }
    Ok(true)
}

type Done = (SeqRange, bool, Vec<InodeAttr>);

/// Commits the steps. `None`: something changed, look again.
fn commit_once<T>(
    mount: &Mount,
    session: &Session,
    keys: &[InodeKey],
    shadow: &Shadow<'_, '_>,
    steps: &[Step<'_>],
    bytes: usize,
) -> OpResult<Option<Done>, T> {
    let pins = shadow.pins;
    let mut nodes: HashMap<InodeKey, Arc<Node>> = HashMap::new();
    for key in keys {
        nodes.insert(*key, Arc::clone(pins.node(*key)?));
    }
    // In the order of their keys: the wait for appends in parts comes before anything else is taken.
    let mut appended: Vec<_> = steps.iter().filter_map(Step::appends_to).collect();
    appended.sort_unstable();
    appended.dedup();
    let appended: Vec<_> = appended
        .iter()
        .filter_map(|key| nodes.get(key).cloned())
        .collect();
    let _beside: Vec<_> = appended.iter().map(|node| node.inode.appends.read()).collect();
    let numbers = TakenNumbers::take(session, pins, steps)?;
    let blocks = cost(steps);
    let slot = session.data.begin(bytes, blocks)?;
    let olds: Vec<_> = keys.iter().filter_map(|key| pins.node(*key).ok()).collect();
    let mut fresh: Vec<(Arc<Node>, LeaseNo)> = Vec::new();
    let mut locked = Locked::new(&olds);
    match holds(pins, &mut locked, shadow) {
        Ok(true) => {}
        other => {
            slot.pay_back(blocks);
            return other.map(|_| None).map_err(OpError::from);
        }
    }
    let stamp = Stamp {
        time_ns: session.now_ns(),
        ..session.stamp()
    };
    let planned = match entries(mount, &numbers, &mut locked, steps, stamp.time_ns) {
        Ok(planned) => planned,
        Err(errno) => {
            slot.pay_back(blocks);
            return Err(errno.into());
        }
    };
    let (mut ops, mut effects) = (
        Vec::with_capacity(planned.len()),
        Vec::with_capacity(planned.len()),
    );
    for (op, flags, effect) in planned {
        if let (LogOp::Create { target, .. }, Effect::Make { attr, .. }) = (&op, &effect) {
            let number = numbers.taken.get(fresh.len()).ok_or(Errno(libc::EIO))?.1;
            fresh.push((new_node(attr, target), number.1));
        }
        ops.push((op, flags));
        effects.push(effect);
    }
    for (node, _) in &fresh {
        nodes.insert(node.key(), Arc::clone(node));
        locked.guards.push((node.key(), node.inode.write()));
    }
    // The daemon charges for the logged entries: the rest of the most that they might cost is paid back.
    let real: u32 = ops.iter().map(|(op, _)| charge(op)).sum();
    debug_assert!(
        real <= blocks,
        "{real} blocks may be used, {blocks} were counted on"
    );
    slot.pay_back(blocks.saturating_sub(real));
    let committed = match slot.append_all(&ops, stamp) {
        Ok(committed) => committed,
        Err(error) => {
            drop(locked);
            for (key, _) in numbers.spend() {
                session.leases.unreserve(key);
            }
            return Err(error);
        }
    };
    let spent = numbers.spend();
    let (seqs, live) = (committed.seqs, committed.live);
    let mut made = Vec::with_capacity(fresh.len());
    let mut pinned = Vec::new();
    if live {
        for (node, number) in &fresh {
            locked.get(node.key())?.extents.set_empty();
            node.born.store(seqs.last.0, Ordering::Relaxed);
            // Adopted before their names are published: a thread that finds a name finds the lease.
            pinned.push(session.leases.adopt(Arc::clone(node), *number));
        }
        for effect in &effects {
            if let Effect::Make { dir, attr, .. } = effect
                && attr.is_dir()
                && let Some(node) = nodes.get(&attr.key)
            {
                *node.parent.lock() = Some(*dir);
            }
        }
        Showing {
            session,
            locked: &mut locked,
            nodes: &nodes,
            stamp,
            seqs,
        }
        .show(&committed, &effects)?;
        for (node, _) in &fresh {
            made.push(locked.attr(node.key())?.clone());
        }
    } else {
        // The seal decides whether it counts; nothing of this session is used any more.
        made.extend(effects.iter().filter_map(|effect| match effect {
            Effect::Make { attr, .. } => Some(attr.clone()),
            _ => None,
        }));
        for (key, _) in spent {
            session.leases.unreserve(key);
        }
    }
    drop(committed);
    drop(locked);
    drop(pinned);
    Ok(Some((seqs, live, made)))
}

/// Commits a group of calls, wholly or not at all. Returns the inodes that it made, in order.
pub(crate) fn commit_together(mount: &Mount, group: &Group<'_>) -> Result<Vec<InodeAttr>> {
    let made = mount.with_session(|session, attempt| {
        session.may_write()?;
        attempt.forget_done();
        let made = commit_in(mount, session, group)?;
        if group.sync {
            // Entries committed before a seal are digested by it: then the group counts, and is durable.
            match session.sync_log::<()>() {
                Ok(()) => {}
                Err(OpError::SessionLost { .. }) => {
                    return Err(OpError::SessionLost {
                        committed: None,
                        otherwise: Some(made),
                    });
                }
                Err(_) => return Err(Errno(libc::EIO).into()),
            }
        }
        Ok(made)
    })?;
    for call in group.calls {
        if let Call::Link { file, .. } = call {
            mount.opens.set_linkable(*file, false);
        }
    }
    Ok(made)
}

fn commit_in(mount: &Mount, session: &Arc<Session>, group: &Group<'_>) -> OpResult<Vec<InodeAttr>> {
    let start = session.clock().moment();
    let mut keys = group.keys();
    let mut found: Vec<(InodeKey, Vec<u8>, Target)> = Vec::new();
    let mut contended = 0;
    for _ in 0..LOOKS_MAX {
        if keys.len() > ITEMS_MAX {
            return Err(Errno(libc::E2BIG).into());
        }
        let pins = match pin_or_forward(session, &keys) {
            // A name's inode is gone, with its name: look again.
            Err(OpError::Failed(Errno(libc::ESTALE))) if !found.is_empty() => {
                for (dir, name, target) in found.drain(..) {
                    still_named(session, dir, &name, target)?;
                }
                keys = group.keys();
                continue;
            }
            other => other?,
        };
        let Some(pins) = pins else {
            // The daemon does single operations only. A contended inode will be free in a moment.
            if session.clock().moment() - start > Duration::from_millis(session.welcome.wait_ms) {
                break;
            }
            contended += 1;
            session.clock().pause(Duration::from_millis(1 + contended / 10));
            continue;
        };
        let (shadow, steps) = match draw(mount, session, &pins, group) {
            Ok(drawn) => drawn,
            Err(Halt::Pin(more)) => {
                keys.push(more.2.key);
                keys.sort_unstable();
                keys.dedup();
                found.push(more);
                continue;
            }
            Err(Halt::Error(error)) => return Err(error),
        };
        if steps.is_empty() {
            return Ok(Vec::new());
        }
        if let Some((seqs, live, made)) = commit_once(mount, session, &keys, &shadow, &steps, group.bytes)? {
            drop(shadow);
            drop(pins);
            return settle(session, seqs, live, made);
        }
    }
    Err(Errno(libc::EAGAIN).into())
}
