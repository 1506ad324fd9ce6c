//! Overwrites in place as seen by the open pool: whether the feature is on, reads beside overwrites, and
//! files that an earlier daemon may have left torn. `tx::in_place` makes the writes.

use super::{Store, write_devices_area, write_superblocks};
use crate::Result;
use crate::seeded::{Bug, armed};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use varve_format::features::{Incompat, LogIncompat};
use varve_format::session::{GrantRow, SessionState};
use varve_format::superblock::{Area, FEATURES_VERSION, SUPERBLOCK_BLOCKS, Superblock};
use varve_format::{BLOCK_BYTES, Ino};

/// Attempts of a read beside overwrites before it excludes the writer.
const ATTEMPTS: usize = 8;

/// State of the overwrites in place of an open pool.
#[derive(Default)]
pub(crate) struct InPlaceState {
    on: AtomicBool,
    /// Odd while blocks are being written and their record is not published.
    epoch: AtomicU64,
    /// The superblock last written, if any.
    superblock: Mutex<Option<Superblock>>,
    /// Files whose blocks may be torn until the logs that an earlier daemon left are digested.
    torn: Mutex<HashSet<Ino>>,
}

/// Guard of the time in which blocks are written in place.
pub(crate) struct Writing<'s> {
    epoch: &'s AtomicU64,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

impl Store {
    /// Returns whether whole blocks of NVM are overwritten in place when the log redoes them.
    pub(crate) fn overwrites_in_place(&self) -> bool {
        self.in_place.on.load(Ordering::Relaxed)
    }

    /// Lets transactions overwrite whole blocks of NVM in place, from this call on. A fenced store must be
    /// durable on NVM, and so must the log entries of pieces marked as redone. Sets the feature first. Has no
    /// effect in pools of format versions without feature words.
    ///
    /// # Errors
    /// A device failed, or the store's: nothing is overwritten then.
    pub fn overwrite_in_place(&mut self) -> Result<()> {
        let sb = self.layout.sb;
        if sb.version.get() < FEATURES_VERSION {
            return Ok(());
        }
        let bit = LogIncompat::IN_PLACE.bits();
        if sb.log_incompat.get() & bit == 0 {
            self.layout.sb = self.write_features(|sb| sb.log_incompat.set(sb.log_incompat.get() | bit))?;
        }
        let mut tx = self.begin()?;
        tx.core.change_state(|state| {
            state
                .features
                .log_incompat
                .set(state.features.log_incompat.get() | bit)
        })?;
        tx.commit()?;
        self.in_place.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Clears the feature. No log may hold undigested entries, and no transaction may follow. Durable when
    /// this returns.
    ///
    /// # Errors
    /// A device failed, or the store's.
    pub fn end_in_place(&self) -> Result<()> {
        let bit = LogIncompat::IN_PLACE.bits();
        let sb = self.superblock();
        if sb.features().log_incompat.get() & bit == 0 {
            return Ok(());
        }
        self.in_place.on.store(false, Ordering::Relaxed);
        let mut tx = self.begin()?;
        tx.core.change_state(|state| {
            state
                .features
                .log_incompat
                .set(state.features.log_incompat.get() & !bit)
        })?;
        tx.commit()?;
        self.checkpoint()?;
        self.write_features(|sb| sb.log_incompat.set(sb.log_incompat.get() & !bit))
            .map(drop)
    }

    /// Changes the feature words of both copies of the superblock. Durable when this returns.
    pub(crate) fn write_features(&self, change: impl FnOnce(&mut Superblock)) -> Result<Superblock> {
        let mut superblock = self.in_place.superblock.lock();
        let mut sb = superblock.unwrap_or(self.layout.sb);
        change(&mut sb);
        sb.sequence.set(sb.sequence.get().saturating_add(1));
        let sb = sb.sealed();
        write_superblocks(&self.devices, sb, &SUPERBLOCK_BLOCKS)?;
        *superblock = Some(sb);
        Ok(sb)
    }

    /// Sets the feature of several devices a tier, with the place of their rows. Durable when this returns.
    pub(crate) fn write_devices(&self, area: Area) -> Result<()> {
        let mut superblock = self.in_place.superblock.lock();
        let old = superblock.unwrap_or(self.layout.sb);
        let mut sb = old;
        sb.incompat.set(sb.incompat.get() | Incompat::DEVICES.bits());
        sb.devices = area;
        sb.sequence.set(sb.sequence.get().saturating_add(1));
        let sb = sb.sealed();
        write_devices_area(&self.devices, &old, sb)?;
        *superblock = Some(sb);
        Ok(())
    }

    /// Returns the superblock as it is on media.
    pub(crate) fn superblock(&self) -> Superblock {
        self.in_place.superblock.lock().unwrap_or(self.layout.sb)
    }

    pub(crate) fn begin_in_place(&self) -> Writing<'_> {
        self.in_place.epoch.fetch_add(1, Ordering::Relaxed);
        // A reader that loads a byte written from here on finds the epoch changed.
        fence(Ordering::Release);
        Writing {
            epoch: &self.in_place.epoch,
        }
    }

    /// Repeats a read until no block was overwritten in place meanwhile. `read` returns whether it read from
    /// NVM; if not, its result counts in any case.
    pub(crate) fn read_beside<R>(&self, mut read: impl FnMut() -> (Result<R>, bool)) -> Result<R> {
        if armed(Bug::ReadBesideInPlace) {
            return read().0;
        }
        let epoch = &self.in_place.epoch;
        for _ in 0..ATTEMPTS {
            let before = epoch.load(Ordering::Acquire);
            if before & 1 == 1 {
                std::thread::yield_now();
                continue;
            }
            let (result, nvm) = read();
            fence(Ordering::Acquire);
            if !nvm || epoch.load(Ordering::Relaxed) == before {
                return result;
            }
        }
        let _writer = self.writer.lock();
        read().0
    }

    /// Notes the files that may be torn: those that could be written by sessions that have not ended. None in
    /// a pool that was not written in place.
    pub(crate) fn note_torn(&self) -> Result<()> {
        if self.layout.sb.features().log_incompat.get() & LogIncompat::IN_PLACE.bits() == 0 {
            return Ok(());
        }
        let sessions = self.sessions()?;
        let open: HashSet<_> = sessions
            .iter()
            .filter(|row| !matches!(row.state, SessionState::Ended(_)))
            .map(|row| row.id)
            .collect();
        let grants = self.grants()?;
        let grants = grants.iter().filter(|row| open.contains(&row.session));
        self.in_place.torn.lock().extend(grants.flat_map(inodes_of));
        Ok(())
    }

    /// Returns whether blocks of this file may be torn, because the log that redoes them is not digested.
    pub(crate) fn may_be_torn(&self, ino: Ino) -> bool {
        self.in_place.torn.lock().contains(&ino)
    }

    /// Returns whether any file may be torn: a crash may have come while blocks were overwritten in place.
    #[must_use]
    pub fn is_torn(&self) -> bool {
        !self.in_place.torn.lock().is_empty()
    }

    /// Forgets the torn files, after all logs of an earlier daemon are digested.
    pub fn forget_torn(&self) {
        self.in_place.torn.lock().clear();
    }

    /// Returns the blocks of a file in NVM with wrong checksums, which no log could redo, as the offset of
    /// their first byte in the file. Counts them as damage.
    ///
    /// # Errors
    /// Damage of the file's metadata, or a device failed.
    pub fn torn_blocks(&self, ino: Ino) -> Result<Vec<u64>> {
        let mut torn = Vec::new();
        self.bad_nvm_blocks(ino, &mut |at, _, error| {
            self.note_damage(error);
            torn.push(at.0 * BLOCK_BYTES);
        })?;
        Ok(torn)
    }
}

/// Returns the inodes that a grant covers.
fn inodes_of(row: &GrantRow) -> impl Iterator<Item = Ino> {
    let (first, batch) = (row.key.ino.0, row.batch.max(1));
    (0..16)
        .filter(move |bit| batch >> bit & 1 == 1)
        .map(move |bit| Ino(first + bit))
}
