//! Repairs from the bottom up: fixed blocks, bitmaps, unit rows, the inode file, images, trees. Does not look
//! at names.

mod inodes;

use inodes::{free_image, make_tree};

use super::survey::{BlockSet, Survey};
use super::{RepairOptions, RepairReport};
use crate::pool::Store;
use crate::reader::POOL_INO;
use crate::seeded::{Bug, armed};
use crate::tx::shared::SHARED;
use crate::{Result, StoreError};
use std::collections::BTreeMap;
use varve_format::features::Incompat;
use varve_format::inode::{INODE_SIZE, INODES_PER_BLOCK};
use varve_format::session::{GRANT_ROW_SIZE, GrantRow, SESSION_ROW_SIZE, SessionRow};
use varve_format::space::{CHECKSUMS_PER_BLOCK, UnitRow};
use varve_format::state::PoolState;
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, BlockHeader, BlockKind, BlockNo, Extent, ExtentFlags,
    FileBlock, FileKind, Ino, SharedRoot, Tier, TreeRoot, init_block, sum_of_metadata, verify_block,
};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

/// First session and lease number after the pool state was lost: far above all numbers that may have been
/// given out.
const NUMBER_LEAP: u64 = 1 << 32;

impl Store {
    pub(super) fn mend_structures(
        &self,
        survey: &Survey,
        options: RepairOptions,
        report: &mut RepairReport,
    ) -> Result<()> {
        let before = report.mended.len();
        self.hold_space(survey);
        self.mend_fixed(survey, report)?;
        self.mend_bits(survey, &survey.union(), report)?;
        self.mend_rows(report)?;
        self.mend_state(survey, report)?;
        self.mend_units(survey, options, report)?;
        self.mend_inode_file(survey, options, report)?;
        self.mend_images(survey, options, report)?;
        self.mend_runs(survey, report)?;
        for (ino, found) in &survey.found {
            self.note_doubts(survey, *ino, found, report);
            self.mend_inode(*ino, found, report)?;
        }
        if report.mended.len() == before || armed(Bug::RepairFreesFirst) {
            // Nothing waits to be saved, so blocks without an owner are freed.
            self.mend_bits(survey, &survey.claims, report)?;
        }
        Ok(())
    }

    /// Marks all blocks that a bitmap or a structure claims as in use, so that they are not given out.
    fn hold_space(&self, survey: &Survey) {
        let mut space = self.space.lock();
        for tier in Tier::ALL {
            for block in 0..self.layout.blocks(tier) {
                if self.layout.usable(tier, block)
                    && (survey.claims[tier as usize].has(block) || survey.marked[tier as usize].has(block))
                {
                    space.mark(tier, block);
                }
            }
            for (run, _) in self.layout.live_runs(tier).filter(|_| tier != Tier::Nvm) {
                // Of a tier's first device only if the pool state is whole.
                if let Ok(open) = self.snapshot().reader().open_unit(tier, run)
                    && (run > 0 || survey.state.is_some())
                {
                    space.set_open(tier, run, open);
                }
            }
        }
    }

    /// Rebuilds damaged fixed blocks.
    fn mend_fixed(&self, survey: &Survey, report: &mut RepairReport) -> Result<()> {
        for (number, (kind, fault)) in &survey.bad_fixed {
            let at = BlockNo(*number);
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            match kind {
                BlockKind::ChecksumTable => self.recompute_sums(survey, at, &mut block, report)?,
                BlockKind::SessionTable => report.lost(
                    Ino(0),
                    None,
                    format!(
                        "session rows in NVM block {at}: what their logs held and was not digested, if \
                        anything"
                    ),
                ),
                BlockKind::GrantTable => report.lost(
                    Ino(0),
                    None,
                    format!("grant rows in NVM block {at}: logged operations that rest on them are refused"),
                ),
                BlockKind::PoolState => {
                    let state = self.rebuilt_state(survey)?;
                    let end = BLOCK_HEADER_SIZE + state.as_bytes().len();
                    block[BLOCK_HEADER_SIZE..end].copy_from_slice(state.as_bytes());
                }
                BlockKind::UnitTable => self.rebuilt_units(survey, at, &mut block)?,
                BlockKind::Bitmap => self.rebuilt_bits(survey, at, &mut block),
                // They were whole when the pool was opened, and nothing tells them anew.
                BlockKind::DeviceTable => {
                    return Err(StoreError::Damaged(format!(
                        "device rows in NVM block {at}: {fault}"
                    )));
                }
                _ => {}
            }
            init_block(&mut block, *kind, POOL_INO, at);
            let mut tx = self.begin()?;
            tx.core.force(at, block, false);
            tx.commit()?;
            report.mended(format!("{kind:?} block {at} made anew ({fault})"));
        }
        Ok(())
    }

    /// Sets the bits of blocks in use in a rebuilt bitmap block, in the same transaction. After an
    /// interruption that left an empty bitmap, the next repair would find nothing of trees whose nodes are
    /// lost.
    fn rebuilt_bits(&self, survey: &Survey, at: BlockNo, block: &mut Block) {
        for tier in Tier::ALL {
            let used = &survey.claims[tier as usize];
            for (_, first, count) in self.layout.bitmap_blocks(tier).filter(|(it, ..)| *it == at) {
                for bit in (0..count).filter(|bit| used.has(first + bit)) {
                    block[BLOCK_HEADER_SIZE + (bit / 8) as usize] |= 1 << (bit % 8);
                }
            }
        }
    }

    /// Computes checksums of the blocks' present content, which can no longer be verified.
    fn recompute_sums(
        &self,
        survey: &Survey,
        at: BlockNo,
        block: &mut Block,
        report: &mut RepairReport,
    ) -> Result<()> {
        let runs = Tier::ALL
            .into_iter()
            .flat_map(|tier| self.layout.live_runs(tier).map(move |run| (tier, run)));
        for (tier, (number, run)) in runs {
            let area = run.checksums;
            if !(area.start.get()..area.end()).contains(&at.0) {
                continue;
            }
            let index = (at.0 - area.start.get()) * CHECKSUMS_PER_BLOCK;
            let open = match (tier, &survey.state) {
                (Tier::Nvm, _) => Some(0),
                (_, None) if number == 0 => self.open_by_rows(tier),
                _ => self.snapshot().reader().open_unit(tier, number)?,
            };
            let Some(open) = open else { return Ok(()) };
            let base = open * self.layout.unit_blocks(tier);
            let first = base + index;
            // In NVM only data gets checksums. A node with a checksum here would be taken for data if this
            // repair were interrupted and the pointers to the node were lost.
            let numbers = survey.data_blocks(tier, first..first + CHECKSUMS_PER_BLOCK);
            let meta = (first..first + CHECKSUMS_PER_BLOCK)
                .filter(|number| tier != Tier::Nvm && survey.meta[tier as usize].has(*number));
            for number in numbers.into_iter().chain(meta) {
                let sum = self.sum_of(survey, tier, number)?;
                let offset = BLOCK_HEADER_SIZE + (number - first) as usize * 4;
                block[offset..offset + 4].copy_from_slice(&sum.to_le_bytes());
            }
            survey.doubt(
                tier,
                first..first + CHECKSUMS_PER_BLOCK,
                "its checksums are lost: the data is kept as it is, unverified",
                report,
            );
        }
        Ok(())
    }

    /// Computes the checksum that a tier's table should have of a block.
    fn sum_of(&self, survey: &Survey, tier: Tier, block: u64) -> Result<u32> {
        let mut bytes = vec![0; BLOCK_SIZE];
        match self.read_blocks(tier, block, &mut bytes) {
            Ok(()) if survey.meta[tier as usize].has(block) => Ok(sum_of_metadata(crc32c::crc32c(&bytes))),
            Ok(()) => Ok(crc32c::crc32c(&bytes)),
            // The sector stays unreadable, and no checksum fits it.
            Err(StoreError::Media(_)) if tier != Tier::Nvm => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Returns the open unit of a tier's first device, as the unit rows say.
    fn open_by_rows(&self, tier: Tier) -> Option<u64> {
        let unit_blocks = self.layout.unit_blocks(tier);
        let blocks = self.layout.sb.tier(tier).blocks.get();
        let units = blocks.checked_div(unit_blocks)?;
        let snapshot = self.snapshot();
        (0..units).find(|unit| {
            snapshot
                .reader()
                .unit_row(tier, *unit)
                .is_ok_and(|row| row.state == UnitRow::OPEN)
        })
    }

    /// Rebuilds the pool state from the survey.
    fn rebuilt_state(&self, survey: &Survey) -> Result<PoolState> {
        let mut state = PoolState::new_zeroed();
        state.next_session = U64::new(NUMBER_LEAP);
        state.next_lease = U64::new(NUMBER_LEAP);
        // With its length but without its tree, the inode file is searched for again if the repair is
        // interrupted here.
        state.inode_blocks = U64::new(survey.inode_blocks);
        for tier in [Tier::Ssd, Tier::Hdd] {
            state.open_unit[tier as usize] = U64::new(self.open_by_rows(tier).map_or(0, |unit| unit + 1));
        }
        state.inode_root.copy_from_slice(TreeRoot::EMPTY.as_bytes());
        state.inodes_used = U64::new((survey.found.len() + survey.reserved.len()) as u64);
        let may_share = self.layout.features().incompat.get() & Incompat::SHARED_EXTENTS.bits();
        if may_share != 0 {
            state.features.incompat.set(may_share);
            state.next_shared = U64::new(survey.numbers_end().saturating_add(NUMBER_LEAP));
        }
        if self.layout.device_table().is_some() {
            let incompat = state.features.incompat.get() | Incompat::DEVICES.bits();
            state.features.incompat.set(incompat);
        }
        Ok(state)
    }

    /// Rebuilds unit rows from footers and the pool state. A unit in use without a sound footer gets the row
    /// of a sealed unit. If the repair were interrupted before the footer is rebuilt, an empty row would let
    /// the unit be opened again without checksums of its data.
    fn rebuilt_units(&self, survey: &Survey, at: BlockNo, block: &mut Block) -> Result<()> {
        for tier in [Tier::Ssd, Tier::Hdd] {
            for unit in self.layout.live_units(tier) {
                let place = self.layout.unit_row(tier, unit);
                if place.block != at {
                    continue;
                }
                let first = unit * self.layout.unit_blocks(tier) < self.layout.sb.tier(tier).blocks.get();
                let open = match &survey.state {
                    Some(state) if first => state.open_unit[tier as usize].get() == unit + 1,
                    None if first => false,
                    _ => self.snapshot().reader().is_open_unit(tier, unit)?,
                };
                let mut row = UnitRow::default();
                if open {
                    row.state = UnitRow::OPEN;
                } else if let Some((footer, crc)) = self.footer_that_fits(survey, tier, unit)? {
                    row.state = UnitRow::SEALED;
                    row.footer = footer;
                    row.footer_crc32c = U32::new(crc);
                    row.sealed_tx = U64::new(self.newest_tx().0);
                } else if self.is_used(survey, tier, unit) {
                    row.state = UnitRow::SEALED;
                }
                block[place.offset..place.offset + row.as_bytes().len()].copy_from_slice(row.as_bytes());
            }
        }
        Ok(())
    }

    /// Returns the sound footer and its checksum; if both are sound, the one that fits more of the unit's
    /// blocks where the two differ.
    fn footer_that_fits(&self, survey: &Survey, tier: Tier, unit: u64) -> Result<Option<(u8, u32)>> {
        let (first, second) = match [
            self.footer_on_media(tier, unit, 0)?,
            self.footer_on_media(tier, unit, 1)?,
        ] {
            [(first, Some(crc)), (second, Some(other))] => ((first, crc), (second, other)),
            [(_, Some(crc)), _] => return Ok(Some((0, crc))),
            [_, (_, Some(crc))] => return Ok(Some((1, crc))),
            _ => return Ok(None),
        };
        let mut ahead = 0_i64;
        for (index, (one, other)) in (0..).zip(first.0.iter().zip(&second.0)) {
            if one != other {
                let sum = self.sum_of(survey, tier, unit * self.layout.unit_blocks(tier) + index)?;
                ahead += i64::from(Some(sum) == *other) - i64::from(Some(sum) == *one);
            }
        }
        Ok(Some(if ahead > 0 { (1, second.1) } else { (0, first.1) }))
    }

    /// Reads the checksums in a footer (`None` where its block is bad), and computes the checksum over the
    /// footer if it is whole.
    fn footer_on_media(&self, tier: Tier, unit: u64, footer: u8) -> Result<(Vec<Option<u32>>, Option<u32>)> {
        let data = self.layout.unit_data_blocks(tier);
        let start = self.layout.footer_start(tier, unit, footer);
        let mut sums = Vec::new();
        let mut crc = Some(0);
        for index in 0..data.div_ceil(CHECKSUMS_PER_BLOCK) {
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            let at = BlockNo(start + index);
            let good = self.read_blocks(tier, at.0, &mut block[..]).is_ok()
                && verify_block(&block).is_ok()
                && BlockHeader::of(&block)
                    .expect(BlockKind::UnitFooter, POOL_INO, at)
                    .is_ok();
            crc = crc
                .filter(|_| good)
                .map(|crc| crc32c::crc32c_append(crc, &block[BLOCK_HEADER_SIZE..]));
            sums.extend(
                block[BLOCK_HEADER_SIZE..]
                    .chunks_exact(4)
                    .map(|word| good.then(|| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))),
            );
        }
        sums.truncate(data as usize);
        Ok((sums, crc))
    }

    /// Sets the bits of `wanted`, clears all others.
    fn mend_bits(&self, survey: &Survey, wanted: &[BlockSet; 3], report: &mut RepairReport) -> Result<()> {
        for tier in Tier::ALL {
            let (mut set, mut cleared) = (0_u64, 0_u64);
            for (at, first, count) in self.layout.bitmap_blocks(tier) {
                let old = self.cache.load(at, false)?;
                let mut body = old[BLOCK_HEADER_SIZE..].to_vec();
                for bit in 0..count {
                    if !self.layout.usable(tier, first + bit) {
                        continue;
                    }
                    let (byte, mask) = ((bit / 8) as usize, 1_u8 << (bit % 8));
                    let (is, should) = (body[byte] & mask != 0, wanted[tier as usize].has(first + bit));
                    if is != should {
                        body[byte] ^= mask;
                        if should { set += 1 } else { cleared += 1 }
                    }
                }
                if body[..] != old[BLOCK_HEADER_SIZE..] {
                    let mut tx = self.begin()?;
                    let place = crate::layout::Place {
                        block: at,
                        offset: BLOCK_HEADER_SIZE,
                    };
                    tx.core.patch(place, &body)?;
                    tx.commit()?;
                }
            }
            let rebuilt = survey
                .bad_fixed
                .values()
                .any(|(kind, _)| *kind == BlockKind::Bitmap);
            if set > 0 && !rebuilt {
                report.mended(format!(
                    "{}: {set} blocks in use were marked as free",
                    tier.name()
                ));
            }
            if cleared > 0 {
                report.mended(format!("{}: {cleared} blocks of nobody set free", tier.name()));
            }
        }
        Ok(())
    }

    /// Drops session and grant rows that are invalid or duplicate, and grants of sessions without a row.
    fn mend_rows(&self, report: &mut RepairReport) -> Result<()> {
        let mut sessions = std::collections::BTreeSet::new();
        let mut highest = (0, 0);
        for slot in 0..self.layout.session_slots() {
            let place = self.layout.session_row(slot);
            let row = self
                .snapshot()
                .reader()
                .row(place, BlockKind::SessionTable, SessionRow::decode)?;
            let why = match row {
                Ok(None) => continue,
                Ok(Some(row)) if sessions.insert(row.id) => {
                    highest.0 = highest.0.max(row.id.0);
                    continue;
                }
                Ok(Some(row)) => format!("second row of session {}", row.id),
                Err(_) => format!("session row {slot}, which makes no sense"),
            };
            let mut tx = self.begin()?;
            tx.core.patch(place, &[0; SESSION_ROW_SIZE])?;
            tx.commit()?;
            report.mended(format!("{why}, dropped"));
            report.lost(
                Ino(0),
                None,
                format!("{why}: what its log held and was not digested, if anything"),
            );
        }
        let mut leases = std::collections::BTreeSet::new();
        for slot in 0..self.layout.grant_slots() {
            let place = self.layout.grant_row(slot);
            let row = self
                .snapshot()
                .reader()
                .row(place, BlockKind::GrantTable, GrantRow::decode)?;
            let why = match row {
                Ok(None) => continue,
                Ok(Some(row)) if !sessions.contains(&row.session) => {
                    format!("grant {} of session {}, which has no row", row.lease, row.session)
                }
                Ok(Some(row)) if leases.insert(row.lease) => {
                    highest.1 = highest.1.max(row.lease.0);
                    continue;
                }
                Ok(Some(row)) => format!("second row of lease {}", row.lease),
                Err(_) => format!("grant row {slot}, which makes no sense"),
            };
            let mut tx = self.begin()?;
            tx.core.patch(place, &[0; GRANT_ROW_SIZE])?;
            tx.commit()?;
            report.mended(format!("{why}, dropped"));
        }
        let mut state = self.snapshot().reader().state()?;
        if state.next_session.get() <= highest.0 || state.next_lease.get() <= highest.1 {
            state.next_session = U64::new(state.next_session.get().max(highest.0 + 1));
            state.next_lease = U64::new(state.next_lease.get().max(highest.1 + 1));
            self.put_state(&state)?;
            report.mended("numbers of sessions and leases");
        }
        Ok(())
    }

    fn put_state(&self, state: &PoolState) -> Result<()> {
        let mut tx = self.begin()?;
        tx.core.set_state(state)?;
        tx.commit().map(drop)
    }

    /// Corrects the number of inodes in use and the open units in the pool state.
    fn mend_state(&self, survey: &Survey, report: &mut RepairReport) -> Result<()> {
        let mut state = self.snapshot().reader().state()?;
        let used = (survey.found.len() + survey.reserved.len()) as u64;
        let old = state;
        state.inodes_used = U64::new(used);
        for tier in [Tier::Ssd, Tier::Hdd] {
            let blocks = self.layout.sb.tier(tier).blocks.get();
            let units = blocks.checked_div(self.layout.unit_blocks(tier)).unwrap_or(0);
            let open = &mut state.open_unit[tier as usize];
            if open.get() > units {
                *open = U64::new(0);
            }
        }
        state.open_unit[0] = U64::new(0);
        let numbers = survey.numbers_end();
        if numbers > state.next_shared.get() {
            state.next_shared = U64::new(numbers);
        }
        if state != old {
            self.put_state(&state)?;
            report.mended("counters of the pool");
        }
        Ok(())
    }

    /// The tree of the shared runs, with the counts that the files' extents give. Blocks of an old one are
    /// left to the bitmaps' last pass.
    fn mend_runs(&self, survey: &Survey, report: &mut RepairReport) -> Result<()> {
        if survey.runs.is_sound() {
            return Ok(());
        }
        let mut tx = self.begin()?;
        tx.use_reserve();
        let core = &mut tx.core;
        let mut root = SharedRoot::default();
        for run in &survey.runs.wanted {
            SHARED.add(core, &mut root, run)?;
        }
        core.change_state(|state| state.shared.copy_from_slice(root.as_bytes()))?;
        tx.commit()?;
        report.mended(format!(
            "shared blocks: their tree made again ({})",
            survey.runs.why()
        ));
        Ok(())
    }

    /// Corrects unit rows by the pool state, and footers by the rows.
    fn mend_units(&self, survey: &Survey, options: RepairOptions, report: &mut RepairReport) -> Result<()> {
        for tier in [Tier::Ssd, Tier::Hdd] {
            for unit in self.layout.live_units(tier) {
                let open = self.snapshot().reader().is_open_unit(tier, unit)?;
                let row = self.snapshot().reader().unit_row(tier, unit)?;
                let used = self.is_used(survey, tier, unit);
                if open {
                    if row.state != UnitRow::OPEN {
                        self.put_unit_row(
                            tier,
                            unit,
                            UnitRow {
                                state: UnitRow::OPEN,
                                ..UnitRow::default()
                            },
                        )?;
                        report.mended(format!("{} unit {unit}: its row", tier.name()));
                    }
                    continue;
                }
                let good = match row.state {
                    UnitRow::SEALED if used => self.footer(tier, unit, &row).is_ok(),
                    UnitRow::SEALED | UnitRow::EMPTY => !used,
                    _ => false,
                };
                if good {
                    continue;
                }
                if used {
                    self.seal_again(survey, (tier, unit, row), options, report)?;
                } else {
                    self.put_unit_row(tier, unit, UnitRow::default())?;
                }
                report.mended(format!("{} unit {unit}: its row and footer", tier.name()));
            }
        }
        Ok(())
    }

    /// Returns whether a block of the unit is in use.
    fn is_used(&self, survey: &Survey, tier: Tier, unit: u64) -> bool {
        let first = unit * self.layout.unit_blocks(tier);
        (first..first + self.layout.unit_data_blocks(tier))
            .any(|block| survey.claims[tier as usize].has(block))
    }

    fn put_unit_row(&self, tier: Tier, unit: u64, row: UnitRow) -> Result<()> {
        let mut tx = self.begin()?;
        tx.core.patch(self.layout.unit_row(tier, unit), row.as_bytes())?;
        tx.commit().map(drop)
    }

    /// Writes a footer for the present content of the unit. A block that matches a checksum in an old footer
    /// is known to be good; others are reported. A whole footer that is not the one of the row says nothing:
    /// the device lost writes, or is another pool's. With `any_device` all of the unit is given up: its reads
    /// fail, so that what is another pool's is never taken for a file's own.
    fn seal_again(
        &self,
        survey: &Survey,
        (tier, unit, row): (Tier, u64, UnitRow),
        options: RepairOptions,
        report: &mut RepairReport,
    ) -> Result<()> {
        let [first, second] = [0, 1].map(|footer| self.footer_on_media(tier, unit, footer));
        let [first, second] = [first?, second?];
        let named = if row.footer == 0 { &first.1 } else { &second.1 };
        let is_strange =
            row.state == UnitRow::SEALED && named.is_some_and(|crc| row.footer_crc32c.get() != crc);
        let why = match (options.any_device, is_strange) {
            (true, _) => "its unit is not on the device: the data is given up",
            (false, true) => {
                "the footer of its unit is of another time, or another pool: the data is kept as it is, unverified"
            }
            (false, false) => "the footer of its unit is damaged: the data is kept as it is, unverified",
        };
        let unit_blocks = self.layout.unit_blocks(tier);
        let data = self.layout.unit_data_blocks(tier);
        let mut sums = Vec::new();
        for (index, known) in (0..data).zip(first.0.into_iter().zip(second.0)) {
            let block = unit * unit_blocks + index;
            if !survey.claims[tier as usize].has(block) {
                sums.push(0);
                continue;
            }
            let sum = self.sum_of(survey, tier, block)?;
            let is_known =
                !is_strange && !options.any_device && (known.0 == Some(sum) || known.1 == Some(sum));
            if !is_known {
                survey.doubt(tier, block..block + 1, why, report);
            }
            sums.push(if options.any_device { !sum } else { sum });
        }
        let mut tx = self.begin()?;
        tx.core.seal_with(tier, unit, &sums)?;
        tx.commit().map(drop)
    }

    /// Rebuilds the inode file's tree and length; replaces lost blocks by empty ones.
    fn mend_inode_file(
        &self,
        survey: &Survey,
        options: RepairOptions,
        report: &mut RepairReport,
    ) -> Result<()> {
        let state = self.snapshot().reader().state()?;
        if survey.inode_tree.is_none() && state.inode_blocks.get() == survey.inode_blocks {
            return Ok(());
        }
        let mut tx = self.begin()?;
        tx.use_reserve();
        let core = &mut tx.core;
        let mut map: BTreeMap<u64, BlockNo> = survey.inode_file.clone();
        for index in (0..survey.inode_blocks).filter(|index| !survey.inode_file.contains_key(index)) {
            let span = core.alloc_raw(1)?;
            for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
                // Images saved from a damaged block go to the new block: nothing points to the damaged one
                // any more.
                let bytes = match survey.misplaced.get(&Ino(ino)) {
                    Some(slot) => slot
                        .encode(Ino(ino))
                        .map_err(|fault| StoreError::Inode { ino: Ino(ino), fault })?,
                    None => free_image(survey, Ino(ino), options)?,
                };
                let offset = (ino % INODES_PER_BLOCK) as usize * INODE_SIZE;
                core.patch_raw(
                    crate::layout::Place {
                        block: BlockNo(span.start),
                        offset,
                    },
                    &bytes,
                )?;
            }
            map.insert(index, BlockNo(span.start));
        }
        let extents: Vec<Extent> = map
            .iter()
            .filter_map(|(index, block)| {
                let (tier, number) = block.home()?;
                Some(Extent {
                    file_block: FileBlock(*index),
                    len: 1,
                    tier,
                    block: BlockNo(number),
                    flags: ExtentFlags::empty(),
                })
            })
            .collect();
        let root = make_tree(core, POOL_INO, &extents)?;
        core.inode_file_changed = true;
        core.change_state(|state| {
            state.inode_root.copy_from_slice(root.as_bytes());
            state.inode_blocks = U64::new(survey.inode_blocks);
        })?;
        tx.commit()?;
        report.mended(format!(
            "inode file: its tree made again ({})",
            survey.inode_tree.as_deref().unwrap_or("its length")
        ));
        Ok(())
    }
}

impl Survey {
    /// The number after the last of the shared space that a run or an extent has.
    fn numbers_end(&self) -> u64 {
        let extents = self.found.values().flat_map(|found| &found.shared);
        let extents = extents.map(|extent| extent.block.0 + u64::from(extent.len));
        let runs = self.runs.wanted.iter().map(|run| run.end());
        extents.chain(runs).max().unwrap_or(0)
    }

    /// Returns the blocks that bitmaps or structures claim.
    fn union(&self) -> [BlockSet; 3] {
        Tier::ALL.map(|tier| self.claims[tier as usize].with(&self.marked[tier as usize]))
    }

    /// Reports the parts of files that lie in a range of blocks.
    fn doubt(&self, tier: Tier, blocks: std::ops::Range<u64>, what: &str, report: &mut RepairReport) {
        for (ino, found) in &self.found {
            for extent in found
                .extents
                .iter()
                .filter(|extent| extent.tier == tier && !extent.flags.contains(ExtentFlags::UNWRITTEN))
            {
                let from = extent.block.0.max(blocks.start);
                let to = (extent.block.0 + u64::from(extent.len)).min(blocks.end);
                if from < to && found.inode.attr.kind() == FileKind::Regular {
                    let at = (extent.file_block.0 + from - extent.block.0) * BLOCK_BYTES;
                    report.lost(*ino, Some((at, at + (to - from) * BLOCK_BYTES)), what);
                }
            }
            for run in self.runs.wanted.iter().filter(|run| run.tier == tier) {
                let numbers = |block: u64| {
                    run.first + block.clamp(run.block.0, run.block.0 + u64::from(run.len)) - run.block.0
                };
                let (from, to) = (numbers(blocks.start), numbers(blocks.end));
                for part in found.shared.iter().filter_map(|extent| {
                    let file = |number: u64| {
                        FileBlock((extent.file_block.0 + number).saturating_sub(extent.block.0))
                    };
                    extent.clip(file(from), file(to))
                }) {
                    let at = part.file_block.0 * BLOCK_BYTES;
                    report.lost(*ino, Some((at, part.end().0 * BLOCK_BYTES)), what);
                }
            }
        }
    }
}
