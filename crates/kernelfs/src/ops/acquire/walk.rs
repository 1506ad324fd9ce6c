//! Recalls of leases ahead of a session that walks through a tree: finds the inodes. How many:
//! [`crate::leases`] (`walks`).

use super::Leasing;
use crate::session::state::Session;
use std::collections::{HashSet, VecDeque};
use varve_format::FileKind;
use varve_ipc::{ClientKind, Grant, LeaseMode, Want};

/// Entries of directories that are looked at for each lease that may be asked back ahead.
const LOOKS_PER_LEASE: usize = 4;
/// Rights to read a directory and to enter it.
const MAY_LIST: u32 = 5;
/// And to change it.
const MAY_CHANGE: u32 = 7;

impl Leasing<'_> {
    /// Asks leases back ahead below directories that a session takes from another; then below those whose leases were
    /// asked back last; and then beside the first directory and beside those above it.
    pub(super) fn recall_ahead(&self, session: &Session, wants: &[Want], grants: &[Grant]) {
        // A mount asks for all its users: what one looks at says nothing of what another may take.
        if session.kind == ClientKind::Shim {
            return;
        }
        let (mode, may) = match wants.iter().all(|want| want.mode == LeaseMode::Read) {
            true => (LeaseMode::Read, MAY_LIST),
            false => (LeaseMode::Write, MAY_CHANGE),
        };
        let dirs = grants.iter().filter(|grant| grant.attr.is_dir());
        let more = dirs.clone().next().is_some();
        let (mut room, mut left) = self.core.locked().table.walk_room(session.id, more);
        if room == 0 {
            return;
        }
        let mut below: VecDeque<_> = dirs.clone().map(|dir| dir.attr.key.ino).collect();
        let mut first = dirs.map(|dir| (dir.attr.key.ino, dir.attr.parent)).next();
        let mut looks = LOOKS_PER_LEASE * room;
        while room > 0 && looks > 0 {
            let Some(at) = below.pop_front().or_else(|| left.pop()) else {
                // The root is its own parent.
                let Some((_, parent)) = first.filter(|(dir, parent)| dir != parent) else {
                    break;
                };
                first = self
                    .core
                    .store
                    .get(parent)
                    .ok()
                    .map(|dir| (parent, dir.attr.parent));
                below.push_back(parent);
                continue;
            };
            let dir = self.core.store.get(at).ok();
            let listed = dir.filter(|dir| dir.attr.is_dir() && session.may(&dir.attr, may));
            let Some(items) = listed.and_then(|_| self.core.store.dir_iter(at, 0, looks).ok()) else {
                looks -= 1;
                continue;
            };
            looks = looks.saturating_sub(items.len() + 1);
            let wants: Vec<_> = items.iter().map(|item| Want { key: item.key, mode }).collect();
            let now_ms = self.core.now_ms();
            let mut sessions = self.core.locked();
            let revocations = sessions.table.revoke_for_walk(session.id, &wants, room, now_ms);
            sessions.send_revocations(&revocations);
            drop(sessions);
            room = room.saturating_sub(revocations.len());
            let asked: HashSet<_> = revocations.iter().map(|asked| asked.key).collect();
            let dirs = items.iter().filter(|item| item.kind == FileKind::Directory);
            below.extend(
                dirs.filter(|item| asked.contains(&item.key))
                    .map(|item| item.key.ino),
            );
        }
        left.extend(below.into_iter().rev());
        self.core.locked().table.leave_for_walk(session.id, left);
    }
}
