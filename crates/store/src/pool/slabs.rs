//! Slabs: runs of blocks that a session fills and reads itself, in no file (docs/adr/0068). Owns which rows are
//! served, the reads and writes of their bytes, and the limits. Transactions grant and free them
//! (`tx/slabs.rs`).

use super::Store;
use super::writer::Writer;
use crate::reader::{MetaReader, View};
use crate::{Result, StoreError};
use parking_lot::RwLock;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use varve_format::features::Incompat;
use varve_format::session::{GrantRow, SlabRow};
use varve_format::space::UnitRow;
use varve_format::superblock::FEATURES_VERSION;
use varve_format::{BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, BlockKind, LeaseNo, SessionId, Tier};

/// Slabs take at most one of this many rows of the grant table: leases need the others.
const ROWS_SHARE: u64 = 4;

/// Space that slabs take of one tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlabUse {
    /// Slabs.
    pub slabs: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Blocks that no file can have because of them: on SSD and HDD all of each unit in which a slab is.
    pub taken: u64,
}

/// A unit of slabs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlabUnit {
    /// SSD or HDD.
    pub tier: Tier,
    /// First block.
    pub first: u64,
    /// Blocks, without its footers: no file can have them.
    pub blocks: u64,
    /// Sessions that have slabs there.
    pub sessions: std::collections::BTreeSet<SessionId>,
}

/// A slab that is served.
#[derive(Debug)]
pub(crate) struct Served {
    session: SessionId,
    tier: Tier,
    block: u64,
    blocks: u32,
    /// Held while bytes are moved. False: it is freed, or is another session's now.
    open: RwLock<bool>,
}

impl Served {
    pub(crate) fn of(row: &SlabRow) -> Arc<Self> {
        Arc::new(Self {
            session: row.session,
            tier: row.tier,
            block: row.block,
            blocks: row.blocks,
            open: RwLock::new(true),
        })
    }
}

/// The slabs that are served, by number: those that have a row. Changed only under the writer's lock, which each
/// function that does so is shown: a slab is entered at the end of the commit that gives it a row, and closed before
/// the transaction that takes it away changes anything.
pub(crate) type ServedSlabs = RwLock<HashMap<LeaseNo, Arc<Served>>>;

/// The slabs as the one writer knows them.
#[derive(Debug, Default)]
pub(crate) struct SlabTable {
    rows: HashMap<LeaseNo, SlabRow>,
    /// By tier and first block.
    places: BTreeMap<(Tier, u64), LeaseNo>,
    /// Rows that contradict the rest of the pool. They are not served, their blocks not freed, and they go before
    /// any other row of a slab changes.
    unsound: HashMap<LeaseNo, SessionId>,
}

impl SlabTable {
    pub(crate) fn insert(&mut self, row: SlabRow) {
        self.rows.insert(row.lease, row);
        self.places.insert((row.tier, row.block), row.lease);
    }

    pub(crate) fn remove(&mut self, lease: LeaseNo) -> Option<SlabRow> {
        let row = self.rows.remove(&lease)?;
        self.places.remove(&(row.tier, row.block));
        Some(row)
    }

    pub(crate) fn get(&self, lease: LeaseNo) -> Option<SlabRow> {
        self.rows.get(&lease).copied()
    }

    /// Whether a number is a slab's.
    pub(crate) fn has(&self, lease: LeaseNo) -> bool {
        self.rows.contains_key(&lease) || self.unsound.contains_key(&lease)
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &SlabRow> {
        self.rows.values()
    }

    pub(crate) fn unsound(&self) -> Vec<LeaseNo> {
        self.unsound.keys().copied().collect()
    }

    /// Takes a row out that is not served, and its session.
    pub(crate) fn forget_unsound(&mut self, lease: LeaseNo) -> Option<SessionId> {
        self.unsound.remove(&lease)
    }

    pub(crate) fn note_unsound(&mut self, lease: LeaseNo, session: SessionId) {
        self.unsound.insert(lease, session);
    }

    pub(crate) fn len(&self) -> u64 {
        (self.rows.len() + self.unsound.len()) as u64
    }

    /// The slabs whose first block is in a range of a tier, in order.
    pub(crate) fn within(&self, tier: Tier, blocks: std::ops::Range<u64>) -> impl Iterator<Item = &SlabRow> {
        let found = self.places.range((tier, blocks.start)..(tier, blocks.end));
        found.filter_map(|(_, lease)| self.rows.get(lease))
    }
}

impl Store {
    /// Lets transactions grant slabs, from here on: sets the pool's feature. Durable when this returns.
    ///
    /// # Errors
    /// `Invalid` in pools of format versions without feature words; a device failed, or the store's.
    pub fn use_slabs(&self) -> Result<()> {
        let bit = Incompat::SLABS.bits();
        let _one_at_a_time = self.sharing.lock();
        if self.snapshot().reader().state()?.features.incompat.get() & bit != 0 {
            return Ok(());
        }
        if !self.may_use_slabs() {
            return Err(StoreError::Invalid(
                "the pool's format has no slabs: varve upgrade",
            ));
        }
        self.write_features(|sb| sb.incompat.set(sb.incompat.get() | bit))?;
        self.layout.note_feature(bit);
        let mut tx = self.begin()?;
        tx.core
            .change_state(|state| state.features.incompat.set(state.features.incompat.get() | bit))?;
        tx.commit().map(drop)
    }

    /// Grants a slab of `blocks` zeroed blocks on a tier to a session that has a row, as long as no more than
    /// `most` blocks of the tier are [taken](SlabUse::taken) for slabs. Durable when this returns.
    ///
    /// # Errors
    /// `NoSpace`: the tier has no run of this length left that is promised to nobody, takes no new blocks, or
    /// has its share; `TableFull`; `NoSession`; `Invalid` before [`use_slabs`](Self::use_slabs); a device's.
    pub fn grant_slab(&self, session: SessionId, tier: Tier, blocks: u32, most: u64) -> Result<LeaseNo> {
        self.drop_unsound_slabs()?;
        let mut tx = self.begin()?;
        let row = tx.slab_grant(session, tier, blocks, most)?;
        tx.commit()?;
        self.late_row(&row)?;
        Ok(row.lease)
    }

    /// Frees slabs of a session. Nobody reads or writes them when this begins to change anything. Durable when this
    /// returns.
    ///
    /// # Errors
    /// `NoGrant`: the session has no such slab (those before it in the list may be freed); a device's.
    pub fn free_slabs(&self, session: SessionId, leases: &[LeaseNo]) -> Result<()> {
        self.drop_unsound_slabs()?;
        let mut tx = self.begin()?;
        for lease in leases {
            if tx.room() < self.slab_room() {
                tx.commit()?;
                tx = self.begin()?;
            }
            tx.slab_free(session, *lease)?;
        }
        tx.commit().map(drop)
    }

    /// Frees those of these slabs that their sessions still have, and returns them. Durable when this returns.
    ///
    /// # Errors
    /// A device's, or the store's; some may be freed.
    pub fn take_slabs(&self, rows: &[SlabRow]) -> Result<Vec<SlabRow>> {
        let mut taken = Vec::new();
        self.drop_unsound_slabs()?;
        let mut tx = self.begin()?;
        for row in rows {
            if tx.room() < self.slab_room() {
                tx.commit()?;
                tx = self.begin()?;
            }
            match tx.slab_free(row.session, row.lease) {
                Ok(()) => taken.push(*row),
                Err(StoreError::NoGrant(_)) => {}
                Err(error) => return Err(error),
            }
        }
        tx.commit()?;
        Ok(taken)
    }

    /// Takes the rows of slabs out that contradict the pool, and are not served. Their blocks stay in use; a repair
    /// frees them. Precedes each change of slabs, which might make such a row look right. Durable on return.
    ///
    /// # Errors
    /// A device's, or the store's; some may be out.
    pub fn drop_unsound_slabs(&self) -> Result<()> {
        loop {
            if self.writer.lock().slabs.unsound.is_empty() {
                return Ok(());
            }
            let mut tx = self.begin()?;
            tx.slab_drop_unsound()?;
            tx.commit()?;
        }
    }

    /// Frees all slabs of a session, in as many records as they need. Durable when this returns.
    ///
    /// # Errors
    /// A device's, or the store's; some may be freed.
    pub fn end_slabs(&self, session: SessionId) -> Result<()> {
        loop {
            self.drop_unsound_slabs()?;
            let mut tx = self.begin()?;
            let left = tx.slabs_of(session);
            if left.is_empty() {
                return Ok(());
            }
            for (at, row) in left.into_iter().enumerate() {
                if at > 0 && tx.room() < self.slab_room() {
                    break;
                }
                tx.slab_free(session, row.lease)?;
            }
            tx.commit()?;
        }
    }

    /// Gives all slabs of a session to the one that goes on with its work, which has a row. Those that are taken
    /// meanwhile are left out. Returns them. Durable when this returns; after an error some may have passed on, and
    /// it can be done again.
    ///
    /// # Errors
    /// `NoSession`: the other one has no row; a device's, or the store's.
    pub fn pass_slabs(&self, from: SessionId, to: SessionId) -> Result<Vec<LeaseNo>> {
        let mut passed = Vec::new();
        loop {
            self.drop_unsound_slabs()?;
            let mut tx = self.begin()?;
            let left = if from == to { Vec::new() } else { tx.slabs_of(from) };
            if left.is_empty() {
                return Ok(passed);
            }
            for (at, row) in left.into_iter().enumerate() {
                if at > 0 && tx.room() < self.slab_room() {
                    break;
                }
                tx.slab_pass(from, to, row.lease)?;
                passed.push(row.lease);
            }
            tx.commit()?;
        }
    }

    /// Room in a record for one more slab.
    fn slab_room(&self) -> u64 {
        let unit = [Tier::Ssd, Tier::Hdd].map(|tier| self.layout.unit_blocks(tier) / 8);
        crate::OP_ROOM + unit[0].max(unit[1])
    }

    /// Returns all slabs.
    #[must_use]
    pub fn slabs(&self) -> Vec<SlabRow> {
        let mut rows: Vec<_> = self.writer.lock().slabs.rows().copied().collect();
        rows.sort_unstable_by_key(|row| row.lease);
        rows
    }

    /// Returns the slabs of a session, in the order of their numbers.
    #[must_use]
    pub fn slabs_of(&self, session: SessionId) -> Vec<SlabRow> {
        let mut rows = self.slabs();
        rows.retain(|row| row.session == session);
        rows
    }

    /// Returns the space that slabs take of each tier. Waits for no transaction.
    #[must_use]
    pub fn slab_use(&self) -> [SlabUse; 3] {
        let mut out = [SlabUse::default(); 3];
        let mut units = std::collections::BTreeSet::new();
        for slab in self.served.read().values() {
            let tier = &mut out[slab.tier as usize];
            tier.slabs += 1;
            tier.blocks += u64::from(slab.blocks);
            match slab.block.checked_div(self.layout.unit_blocks(slab.tier)) {
                None => tier.taken += u64::from(slab.blocks),
                Some(unit) if units.insert((slab.tier, unit)) => {
                    tier.taken += self.layout.unit_data_blocks(slab.tier);
                }
                Some(_) => {}
            }
        }
        out
    }

    /// Returns the units of SSD and HDD in which slabs are. Waits for no transaction.
    #[must_use]
    pub fn slab_units(&self) -> Vec<SlabUnit> {
        let mut units = BTreeMap::<_, SlabUnit>::new();
        for slab in self.served.read().values() {
            let unit_blocks = self.layout.unit_blocks(slab.tier);
            let Some(unit) = slab.block.checked_div(unit_blocks) else {
                continue;
            };
            let found = units.entry((slab.tier, unit)).or_insert_with(|| SlabUnit {
                tier: slab.tier,
                first: unit * unit_blocks,
                blocks: self.layout.unit_data_blocks(slab.tier),
                sessions: Default::default(),
            });
            found.sessions.insert(slab.session);
        }
        units.into_values().collect()
    }

    /// Returns how many slabs and bytes each session has on each tier. Waits for no transaction.
    #[must_use]
    pub fn slab_owners(&self) -> BTreeMap<SessionId, [SlabUse; 3]> {
        let mut out = BTreeMap::<_, [SlabUse; 3]>::new();
        for slab in self.served.read().values() {
            let tier = &mut out.entry(slab.session).or_default()[slab.tier as usize];
            tier.slabs += 1;
            tier.blocks += u64::from(slab.blocks);
        }
        out
    }

    /// Whether a session has slabs. Waits for no transaction.
    #[must_use]
    pub fn has_slabs(&self, session: SessionId) -> bool {
        self.served.read().values().any(|slab| slab.session == session)
    }

    /// Whether the pool's format has a place for slabs.
    #[must_use]
    pub fn may_use_slabs(&self) -> bool {
        self.layout.sb.version.get() >= FEATURES_VERSION
    }

    /// Whether the tier or the device of a block is to be emptied, or takes nothing any more.
    #[must_use]
    pub fn is_to_be_emptied(&self, tier: Tier, block: u64) -> bool {
        let unit = block.checked_div(self.layout.unit_blocks(tier));
        unit.is_some_and(|unit| !self.space.lock().takes_slabs(tier, unit))
    }

    /// Blocks that files can have when these slabs are freed: each of NVM, or all of a unit. Those of a device that
    /// is to be emptied, or that failed, are none.
    #[must_use]
    pub fn slabs_worth(&self, rows: &[SlabRow]) -> u64 {
        let Some(first) = rows.first() else { return 0 };
        match first.block.checked_div(self.layout.unit_blocks(first.tier)) {
            None => rows.iter().map(|row| u64::from(row.blocks)).sum(),
            Some(unit) if self.space.lock().is_in_service(first.tier, unit) => {
                self.layout.unit_data_blocks(first.tier)
            }
            Some(_) => 0,
        }
    }

    /// Most slabs that the pool can have.
    #[must_use]
    pub fn slabs_max(&self) -> u64 {
        self.layout.grant_slots() / ROWS_SHARE
    }

    /// Returns the slab if it is this session's and holds the bytes.
    fn served(&self, session: SessionId, lease: LeaseNo, offset: u64, len: usize) -> Result<Arc<Served>> {
        let served = self.served.read().get(&lease).cloned();
        let slab = served
            .filter(|slab| slab.session == session)
            .ok_or(StoreError::NoGrant(lease))?;
        let end = offset.checked_add(len as u64);
        let whole = offset.is_multiple_of(BLOCK_BYTES) && len.is_multiple_of(BLOCK_SIZE);
        match whole && end.is_some_and(|end| end <= u64::from(slab.blocks) * BLOCK_BYTES) {
            true => Ok(slab),
            false => Err(StoreError::Invalid("a range that is not blocks of the slab")),
        }
    }

    /// Reads whole blocks of a session's slab. They have no checksums.
    ///
    /// # Errors
    /// `NoGrant`: it is not this session's; `Invalid`: not whole blocks of it; a device's.
    pub fn read_slab(&self, session: SessionId, lease: LeaseNo, offset: u64, out: &mut [u8]) -> Result<()> {
        let slab = self.served(session, lease, offset, out.len())?;
        let open = slab.open.read();
        if !*open {
            return Err(StoreError::NoGrant(lease));
        }
        self.read_blocks(slab.tier, slab.block + offset / BLOCK_BYTES, out)
    }

    /// Writes whole blocks of a session's slab. Not durable, also later: nothing reads them after a power cut.
    ///
    /// # Errors
    /// As for [`read_slab`](Self::read_slab); `Latched`.
    pub fn write_slab(&self, session: SessionId, lease: LeaseNo, offset: u64, bytes: &[u8]) -> Result<()> {
        let slab = self.served(session, lease, offset, bytes.len())?;
        let open = slab.open.read();
        if !*open {
            return Err(StoreError::NoGrant(lease));
        }
        // Under the lock: who frees a slab and fails has latched the pool before it is open again.
        if let Some(reason) = self.latched() {
            return Err(StoreError::Latched(reason));
        }
        let at = slab.block * BLOCK_BYTES + offset;
        self.count_write(slab.tier, bytes.len());
        match slab.tier {
            Tier::Nvm => self.devices.nvm.write(at, bytes)?,
            tier => {
                let written = self.device(tier)?.write(at, bytes);
                written.map_err(|error| self.lose_device(tier, error.into()))?;
            }
        }
        Ok(())
    }

    /// Begins to serve slabs whose rows were committed.
    pub(crate) fn serve_slabs(&self, _: &Writer, rows: &[SlabRow]) {
        if !rows.is_empty() {
            let new = rows.iter().map(|row| (row.lease, Served::of(row)));
            self.served.write().extend(new);
        }
    }

    /// Ends the serving of a slab: waits for who moves its bytes, and lets nobody begin.
    pub(crate) fn close_slab(&self, _: &Writer, lease: LeaseNo) -> Option<Arc<Served>> {
        let slab = self.served.write().remove(&lease)?;
        *slab.open.write() = false;
        Some(slab)
    }

    pub(crate) fn reopen_slab(served: &ServedSlabs, _: &Writer, lease: LeaseNo, slab: Arc<Served>) {
        *slab.open.write() = true;
        served.write().insert(lease, slab);
    }

    /// Number that stands for the checksum of a block of NVM in a slab: a repair that lost the row takes its
    /// bytes, which a program chose, for nothing else. No program knows it.
    pub(crate) fn slab_mark(&self, block: u64) -> u32 {
        let key = crc32c::crc32c(&self.layout.sb.dir_hash_key);
        crc32c::crc32c_append(crc32c::crc32c_append(key, b"slab"), &block.to_le_bytes())
    }

    /// Reads the slab rows, with their places in the grant table.
    ///
    /// # Errors
    /// A block of the table is damaged. Rows that make no sense are left out.
    pub(crate) fn slab_rows(&self) -> Result<Vec<(u64, SlabRow)>> {
        let snapshot = self.snapshot();
        let mut rows = Vec::new();
        for slot in 0..self.layout.grant_slots() {
            let place = self.layout.grant_row(slot);
            let row = snapshot
                .reader()
                .row(place, BlockKind::GrantTable, GrantRow::decode)?;
            if let Ok(Some(row)) = row
                && let Ok(Some(slab)) = SlabRow::of(&row)
            {
                rows.push((slot, slab));
            }
        }
        Ok(rows)
    }

    /// Says of each of these rows what contradicts the rest of the pool, files aside. Of those that overlap all are
    /// at fault: nothing tells which one is true, and one of them would show the bytes of another session.
    pub(crate) fn slab_faults(&self, rows: &[(u64, SlabRow)]) -> Vec<Option<String>> {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let mut faults: Vec<_> = rows
            .iter()
            .map(|(_, row)| self.slab_fault(&reader, row))
            .collect();
        let mut order: Vec<usize> = (0..rows.len()).filter(|at| faults[*at].is_none()).collect();
        order.sort_unstable_by_key(|at| (rows[*at].1.tier, rows[*at].1.block));
        // The one of those before that reaches farthest.
        let mut farthest: Option<(usize, u64)> = None;
        for at in order {
            let row = &rows[at].1;
            let end = row.block + u64::from(row.blocks);
            let same_tier = farthest.filter(|(other, _)| rows[*other].1.tier == row.tier);
            if let Some((other, _)) = same_tier.filter(|(_, last)| *last > row.block) {
                for at in [other, at] {
                    faults[at] = Some("another slab has some of its blocks".to_owned());
                }
            }
            if same_tier.is_none_or(|(_, last)| end > last) {
                farthest = Some((at, end));
            }
        }
        faults
    }

    fn slab_fault<V: View>(&self, reader: &MetaReader<'_, V>, row: &SlabRow) -> Option<String> {
        if self.layout.features().incompat.get() & Incompat::SLABS.bits() == 0 {
            return Some("the pool has no slabs".into());
        }
        let last = row.end().map(|end| end - 1);
        let Some(last) = last
            .filter(|last| self.layout.usable(row.tier, row.block) && self.layout.usable(row.tier, *last))
        else {
            return Some(format!("its blocks are beyond the {} tier", row.tier.name()));
        };
        if let Some(unit) = row.block.checked_div(self.layout.unit_blocks(row.tier)) {
            let is_of_slabs = reader
                .unit_row(row.tier, unit)
                .is_ok_and(|unit| unit.state == UnitRow::SLABS);
            if !is_of_slabs || last / self.layout.unit_blocks(row.tier) != unit {
                return Some(format!(
                    "it lies in {} unit {unit}, which has files",
                    row.tier.name()
                ));
            }
        }
        // A table that cannot be read says nothing; a repair makes it anew.
        if row.tier == Tier::Nvm
            && let Ok(sums) = reader.table_checksums(Tier::Nvm, 0, row.block, row.blocks.into())
            && let Some((block, _)) = (row.block..)
                .zip(sums)
                .find(|(block, sum)| *sum != self.slab_mark(*block))
            && self.is_marked(Tier::Nvm, block)
        {
            return Some(format!("NVM block {block} of it is not a slab's"));
        }
        let free = (row.block..=last).find(|block| !self.is_marked(row.tier, *block))?;
        Some(format!("{} block {free} of it is free", row.tier.name()))
    }

    /// Whether a block is in use, as its bit on media says.
    fn is_marked(&self, tier: Tier, block: u64) -> bool {
        let (at, bit) = self.layout.bit(tier, block);
        let bits = self.cache.load(at, false);
        bits.is_ok_and(|bytes| bytes[BLOCK_HEADER_SIZE + (bit / 8) as usize] >> (bit % 8) & 1 == 1)
    }

    /// Notes the slabs of an opened pool.
    pub(crate) fn load_slabs(&self, rows: &[(u64, SlabRow)]) {
        let faults = self.slab_faults(rows);
        let mut writer = self.writer.lock();
        for ((_, row), fault) in rows.iter().zip(faults) {
            match fault {
                None => {
                    writer.slabs.insert(*row);
                    self.serve_slabs(&writer, &[*row]);
                }
                Some(what) => {
                    tracing::error!(slab = %row.lease, session = %row.session, "a slab is not served: {what}");
                    writer.slabs.note_unsound(row.lease, row.session);
                }
            }
        }
    }
}
