//! Operators' requests about the place of files: sets pins and wishes for shared parts, and says where data
//! is. Moves nothing (`migrate` does).

use crate::digest::Applied;
use crate::error::no;
use crate::kernel::{Change, Core, KernelFs};
use crate::ops::digest::{Digests, TakeOver};
use crate::placement::jobs::Placer;
use crate::placement::{At, Cause};
use crate::session::table::Sessions;
use serde::{Deserialize, Serialize};
use varve_format::inode::Content;
use varve_format::{BLOCK_BYTES, FileBlock, FileKind, InodeKey, Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{IpcError, PINS_MAX, Pinned};
use varve_store::{MappedPart, OP_ROOM, Store, StoreError, Tx};

/// Most extents of one answer.
const EXTENTS_MAX: usize = 4096;

/// Result of setting pins.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PinsSet {
    /// Inodes that have the pin now.
    pub set: u64,
    /// Inodes that keep a pin of their own.
    pub kept: Vec<InodeKey>,
    /// Inodes that do not exist any more.
    pub gone: u64,
}

/// A part of a file on one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedExtent {
    /// First byte in the file.
    pub offset_bytes: u64,
    /// Bytes.
    pub len_bytes: u64,
    /// `nvm`, `ssd` or `hdd`.
    pub tier: String,
    /// Its blocks have other owners, too: they move for all of them.
    pub shared: bool,
    /// The tier on which its shared blocks are placed: the fastest that one of their files wishes.
    pub placed: Option<String>,
    /// Counted reads of the 64 KiB around its beginning, as far as they are known; halved each 30 s.
    pub reads: u64,
    /// The same of writes.
    pub writes: u64,
}

/// Where a file's data is, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedFile {
    /// Its pin.
    pub pin: Pin,
    /// The tier on which its shared part is wanted.
    pub shared_pin: Option<Tier>,
    /// Extents, in order.
    pub extents: Vec<PlacedExtent>,
    /// Block from which there are more.
    pub next: Option<u64>,
    /// What keeps pinned data of this pool from moving to the tier of the pin now.
    pub waiting: Option<String>,
    /// The same for the tier of the shared part.
    pub shared_waiting: Option<String>,
}

/// The pin that a rule wants for a file, and what it was when it was looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ruled {
    pub(crate) key: InodeKey,
    pub(crate) from: Pin,
    pub(crate) to: Pin,
    pub(crate) dir: InodeKey,
    pub(crate) of_dir: Pin,
}

/// Whether the inode has the name by which it was found.
fn has_name(store: &Store, inode: &Pinned) -> bool {
    let Some((dir, name)) = &inode.name else {
        return true;
    };
    let found = store.get_key(*dir).and_then(|_| store.dir_lookup(dir.ino, name));
    matches!(found, Ok(Some(item)) if item.key == inode.key)
}

/// The pin to store for an inode. That a command has taken a pin away is stored where the directory has one,
/// as it would come back otherwise.
fn unpinned_in_pinned(tx: &Tx<'_>, inode: &Pinned, pin: Pin) -> Result<Pin, StoreError> {
    let taken_away = pin.to == PinTo::Policy && pin.by == PinnedBy::Command;
    match &inode.name {
        Some((dir, _)) if taken_away && tx.pin(dir.ino)?.to != PinTo::Policy => Ok(pin),
        _ if taken_away => Ok(Pin::NONE),
        _ => Ok(pin),
    }
}

/// Context of requests about pins.
pub(crate) struct Pinning<'k> {
    core: Core<'k>,
    store: &'k Store,
    sessions: &'k Sessions,
    placer: &'k Placer,
    digests: Digests<'k>,
    take_over: TakeOver<'k>,
}

impl<'k> Pinning<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            store: &kernel.store,
            sessions: &kernel.sessions,
            placer: &kernel.placer,
            digests: Digests::of(kernel),
            take_over: TakeOver::of(kernel),
        }
    }

    /// Sets the pin of inodes. Those that a command has pinned keep it, unless `over_own`. Durable when this
    /// returns; the data moves in the background.
    ///
    /// # Errors
    /// EINVAL for more than [`PINS_MAX`] inodes, ENXIO if the pool has no such tier, EIO, ENOSPC.
    pub(crate) fn set(&self, inodes: &[Pinned], pin: Pin, over_own: bool) -> Result<PinsSet, IpcError> {
        self.check(inodes, pin.tier())?;
        self.digest_new(inodes)?;
        let mut result = PinsSet::default();
        self.in_transactions(inodes, &mut |tx, inode| {
            let found = match tx.get_key(inode.key) {
                Ok(found) if has_name(self.store, inode) => found,
                Ok(_) | Err(StoreError::NoInode(_)) => {
                    result.gone += 1;
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            if found.pin.by == PinnedBy::Command && !over_own {
                result.kept.push(inode.key);
                return Ok(());
            }
            result.set += 1;
            let pin = unpinned_in_pinned(tx, inode, pin)?;
            if found.pin != pin {
                tx.set_pin(inode.key.ino, pin)?;
            }
            Ok(())
        })?;
        Ok(result)
    }

    /// Checks that wishes for a tier can be set.
    fn check(&self, inodes: &[Pinned], tier: Option<Tier>) -> Result<(), IpcError> {
        if inodes.len() > PINS_MAX {
            return Err(no(libc::EINVAL));
        }
        if self.store.latched().is_some() {
            return Err(no(libc::EIO));
        }
        let exists = |tier: Tier| self.store.space().tiers[tier as usize].total > 0;
        if tier.is_some_and(|tier| !exists(tier)) {
            return Err(no(libc::ENXIO));
        }
        Ok(())
    }

    /// Has the logs digested if some of the inodes are not known by their names.
    fn digest_new(&self, inodes: &[Pinned]) -> Result<(), IpcError> {
        let is_new = |inode: &Pinned| self.store.get_key(inode.key).is_err() || !has_name(self.store, inode);
        if inodes.iter().any(is_new) {
            let digested = self.digests.digest_all();
            digested.map_err(|error| self.core.refused(&error))?;
        }
        Ok(())
    }

    /// Sets the tier on which the shared part of files is wanted, or takes the wish away. Durable when this
    /// returns; the data moves in the background.
    ///
    /// # Errors
    /// EINVAL for more than [`PINS_MAX`] inodes, ENXIO if the pool has no such tier, EIO, ENOSPC.
    pub(crate) fn place_shared(&self, files: &[Pinned], to: Option<Tier>) -> Result<PinsSet, IpcError> {
        self.check(files, to)?;
        self.digest_new(files)?;
        let mut result = PinsSet::default();
        self.in_transactions(files, &mut |tx, file| {
            match tx.get_key(file.key) {
                Ok(found) if found.attr.kind() == FileKind::Regular && has_name(self.store, file) => {
                    result.set += 1;
                    if found.shared_pin != to {
                        tx.set_shared_pin(file.key.ino, to)?;
                    }
                }
                Ok(_) | Err(StoreError::NoInode(_)) => result.gone += 1,
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        Ok(result)
    }

    /// Sets pins of files as a rule wants them, if neither the file's pin nor its directory's has changed
    /// since they were looked at. Returns the number that were set. Durable when this returns.
    ///
    /// # Errors
    /// EIO, ENOSPC.
    pub(crate) fn set_ruled(&self, files: &[Ruled]) -> Result<u64, IpcError> {
        let mut set = 0;
        self.in_transactions(files, &mut |tx, file| {
            let same = tx.get_key(file.key).is_ok_and(|found| found.pin == file.from)
                && tx.get_key(file.dir).is_ok_and(|dir| dir.pin == file.of_dir);
            if same {
                set += 1;
                tx.set_pin(file.key.ino, file.to)?;
            }
            Ok(())
        })?;
        Ok(set)
    }

    /// Calls `each` with all items, in as many transactions as their records take.
    fn in_transactions<T>(
        &self,
        items: &[T],
        each: &mut dyn FnMut(&mut Tx<'_>, &T) -> Result<(), StoreError>,
    ) -> Result<(), IpcError> {
        let refused = |error: StoreError| self.core.refused(&error);
        let mut rest = items;
        while !rest.is_empty() {
            let change = Change::begin(self.store, self.sessions);
            let mut tx = self.store.begin_with_room().map_err(refused)?;
            let mut done = 0;
            while done < rest.len() && (done == 0 || tx.room() >= 2 * OP_ROOM) {
                each(&mut tx, &rest[done]).map_err(refused)?;
                done += 1;
            }
            let tx = tx.commit().map_err(refused)?;
            let changes = self.take_over.take_over(&Applied {
                tx,
                pinned: true,
                ..Applied::default()
            });
            debug_assert!(changes.is_empty(), "a pin frees no inode");
            drop(change);
            rest = &rest[done..];
        }
        Ok(())
    }

    /// Returns where the data of inodes is, each from a block on; `None` for those that do not exist. Beyond
    /// some extents in all, an answer only says that there are more.
    ///
    /// # Errors
    /// EINVAL for more than [`PINS_MAX`] inodes, EIO.
    pub(crate) fn placed(
        &self,
        inodes: &[(InodeKey, FileBlock)],
    ) -> Result<Vec<Option<PlacedFile>>, IpcError> {
        if inodes.len() > PINS_MAX {
            return Err(no(libc::EINVAL));
        }
        let mut left = EXTENTS_MAX;
        let one = |(key, from): &(InodeKey, FileBlock)| self.placed_one(*key, *from, &mut left);
        inodes.iter().map(one).collect()
    }

    fn placed_one(
        &self,
        key: InodeKey,
        from: FileBlock,
        left: &mut usize,
    ) -> Result<Option<PlacedFile>, IpcError> {
        let inode = match self.store.get_key(key) {
            Ok(inode) => inode,
            Err(StoreError::NoInode(_)) => return Ok(None),
            Err(error) => return Err(self.core.refused(&error)),
        };
        let parts = match &inode.content {
            Content::File(_) => self.store.map_parts(key.ino, from, (*left).max(1)),
            _ => Ok(Vec::new()),
        };
        let mut parts = parts.map_err(|error| self.core.refused(&error))?;
        let mut next = None;
        if *left == 0 && !parts.is_empty() {
            parts.clear();
            next = Some(from.0);
        } else if parts.len() >= *left {
            next = parts.last().map(|part| part.extent.end().0);
        }
        *left -= parts.len().min(*left);
        let waiting = |tier: Option<Tier>| tier.and_then(|tier| self.waiting_for(tier));
        let held = self.placer.pins.held();
        let extents = parts.iter().map(|part| {
            // The file's wish may be newer than the last pass of the search.
            let placed = held.wished(part).into_iter().chain(inode.shared_pin).min();
            self.extent(key, part, placed.filter(|_| part.owners > 1))
        });
        let extents: Vec<_> = extents.collect();
        Ok(Some(PlacedFile {
            pin: inode.pin,
            shared_pin: inode.shared_pin,
            extents,
            next,
            waiting: waiting(inode.pin.tier()),
            shared_waiting: waiting(inode.shared_pin),
        }))
    }

    fn extent(&self, key: InodeKey, part: &MappedPart, placed: Option<Tier>) -> PlacedExtent {
        let extent = &part.extent;
        let heat = self.placer.policy.heat(At::of(key, part));
        PlacedExtent {
            offset_bytes: extent.file_block.0 * BLOCK_BYTES,
            len_bytes: u64::from(extent.len) * BLOCK_BYTES,
            tier: extent.tier.name().into(),
            shared: part.owners > 1,
            placed: placed.map(|tier| tier.name().into()),
            reads: heat.reads.into(),
            writes: heat.writes.into(),
        }
    }

    /// Why pinned data does not move to a tier.
    fn waiting_for(&self, tier: Tier) -> Option<String> {
        let jobs = self.placer.jobs();
        let mut of_pins = jobs.into_iter().filter(|job| job.cause == Cause::Pinned);
        of_pins.find_map(|job| job.waiting.filter(|_| job.to == tier.name()))
    }
}
