//! Operators' requests about the place of files: sets pins, and says where data is. Moves nothing (`migrate`
//! does).

use crate::digest::Applied;
use crate::error::no;
use crate::kernel::{Change, Core, KernelFs};
use crate::ops::digest::{Digests, TakeOver};
use crate::placement::jobs::Placer;
use crate::placement::{At, Cause, Reads};
use crate::session::table::Sessions;
use serde::{Deserialize, Serialize};
use varve_format::inode::Content;
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, Pin, PinnedBy, Tier};
use varve_ipc::{IpcError, PINS_MAX};
use varve_store::{MappedPart, OP_ROOM, Store, StoreError};

/// Most extents of one answer.
const EXTENTS_MAX: usize = 1024;

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
    /// Its blocks may have other owners: the policy moves them for all of them.
    pub shared: bool,
    /// Reads of the 2 MiB around its beginning while they were on this tier, as far as they are known.
    pub reads: Reads,
}

/// Where a file's data is, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedFile {
    /// Its pin.
    pub pin: Pin,
    /// Extents, in order.
    pub extents: Vec<PlacedExtent>,
    /// Block from which there are more.
    pub next: Option<u64>,
    /// What keeps pinned data of this pool from moving to the tier of the pin now.
    pub waiting: Option<String>,
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

    /// Sets the pin of inodes. Those with a pin of their own keep it, unless `over_own`. Durable when this
    /// returns; the data moves in the background.
    ///
    /// # Errors
    /// EINVAL for more than [`PINS_MAX`] inodes, ENXIO if the pool has no such tier, EIO, ENOSPC.
    pub(crate) fn set(&self, keys: &[InodeKey], pin: Pin, over_own: bool) -> Result<PinsSet, IpcError> {
        if keys.len() > PINS_MAX {
            return Err(no(libc::EINVAL));
        }
        if self.store.latched().is_some() {
            return Err(no(libc::EIO));
        }
        let exists = |tier: Tier| self.store.space().tiers[tier as usize].total > 0;
        if pin.tier().is_some_and(|tier| !exists(tier)) {
            return Err(no(libc::ENXIO));
        }
        self.digest_if_new(keys)?;
        let pins: Vec<_> = keys.iter().map(|key| (*key, pin)).collect();
        let (mut rest, mut result) = (&*pins, PinsSet::default());
        while !rest.is_empty() {
            let done = self
                .set_some(rest, over_own, &mut result)
                .map_err(|error| self.core.refused(&error))?;
            rest = rest.get(done..).unwrap_or_default();
        }
        Ok(result)
    }

    /// Digests all logs if one of the inodes is not in the pool yet.
    fn digest_if_new(&self, keys: &[InodeKey]) -> Result<(), IpcError> {
        let is_new = |key: &InodeKey| matches!(self.store.get_key(*key), Err(StoreError::NoInode(_)));
        if !keys.iter().any(is_new) {
            return Ok(());
        }
        self.digests
            .digest_all()
            .map_err(|error| self.core.refused(&error))
    }

    /// Sets the pins of inodes, each its own, but for those that commands have set. Returns the number that
    /// have changed. Durable when this returns.
    ///
    /// # Errors
    /// EIO, ENOSPC.
    pub(crate) fn set_each(&self, pins: &[(InodeKey, Pin)]) -> Result<u64, IpcError> {
        let (mut rest, mut result) = (pins, PinsSet::default());
        while !rest.is_empty() {
            let done = self
                .set_some(rest, false, &mut result)
                .map_err(|error| self.core.refused(&error))?;
            rest = rest.get(done..).unwrap_or_default();
        }
        Ok(result.set)
    }

    /// Sets pins in one transaction. Returns the number of inodes that are done with.
    fn set_some(
        &self,
        pins: &[(InodeKey, Pin)],
        over_own: bool,
        result: &mut PinsSet,
    ) -> Result<usize, StoreError> {
        let change = Change::begin(self.store, self.sessions);
        let mut tx = self.store.begin_with_room()?;
        let (mut done, mut some) = (0, PinsSet::default());
        for (key, pin) in pins {
            if done > 0 && tx.room() < 2 * OP_ROOM {
                break;
            }
            done += 1;
            match tx.get_key(*key) {
                Ok(inode) if inode.pin.by == PinnedBy::Command && !over_own => some.kept.push(*key),
                Ok(inode) => {
                    some.set += 1;
                    if inode.pin != *pin {
                        tx.set_pin(key.ino, *pin)?;
                    }
                }
                Err(StoreError::NoInode(_)) => some.gone += 1,
                Err(error) => return Err(error),
            }
        }
        let tx = tx.commit()?;
        let changes = self.take_over.take_over(&Applied {
            tx,
            pinned: true,
            ..Applied::default()
        });
        debug_assert!(changes.is_empty(), "a pin frees no inode");
        drop(change);
        result.set += some.set;
        result.gone += some.gone;
        result.kept.append(&mut some.kept);
        Ok(done)
    }

    /// Returns where a file's data is, from a block on.
    ///
    /// # Errors
    /// ENOENT if there is no such inode, EIO.
    pub(crate) fn placed(&self, key: InodeKey, from: FileBlock) -> Result<PlacedFile, IpcError> {
        self.digest_if_new(&[key])?;
        let refused = |error: StoreError| match error {
            StoreError::NoInode(_) => no(libc::ENOENT),
            error => self.core.refused(&error),
        };
        let inode = self.store.get_key(key).map_err(refused)?;
        let parts = match &inode.content {
            Content::File(_) => self
                .store
                .map_parts(key.ino, from, EXTENTS_MAX)
                .map_err(refused)?,
            _ => Vec::new(),
        };
        let next = (parts.len() == EXTENTS_MAX)
            .then(|| parts.last().map(|part| part.extent.end().0))
            .flatten();
        let waiting = inode.pin.tier().and_then(|tier| self.waiting_for(tier));
        Ok(PlacedFile {
            pin: inode.pin,
            extents: parts.iter().map(|part| self.extent(key, part)).collect(),
            next,
            waiting,
        })
    }

    fn extent(&self, key: InodeKey, part: &MappedPart) -> PlacedExtent {
        let extent = &part.extent;
        PlacedExtent {
            offset_bytes: extent.file_block.0 * BLOCK_BYTES,
            len_bytes: u64::from(extent.len) * BLOCK_BYTES,
            tier: extent.tier.name().into(),
            shared: part.number.is_some(),
            reads: self.placer.policy.reads(At::of(key, part), extent.tier),
        }
    }

    /// Why pinned data does not move to a tier.
    fn waiting_for(&self, tier: Tier) -> Option<String> {
        let jobs = self.placer.jobs();
        let mut of_pins = jobs.into_iter().filter(|job| job.cause == Cause::Pinned);
        of_pins.find_map(|job| job.waiting.filter(|_| job.to == tier.name()))
    }
}
