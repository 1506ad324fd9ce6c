//! Opens a pool that may be damaged: repairs superblock copies and the journal, examines nothing else.

use super::RepairReport;
use crate::devices::{attach, read_rows};
use crate::journal::Journal;
use crate::layout::Layout;
use crate::pool::{bad_superblocks, journal_id, read_superblock, refuse_unknown, with_spans};
use crate::{Devices, OpenOptions, PoolMediaStats, Result, Store, StoreError};
use std::sync::Arc;
use varve_format::journal::Range;
use varve_format::{Ino, Tier, TxId};
use varve_media::Region;

/// Distance from the newest known transaction at which a journal with lost headers continues.
const TX_LEAP: u64 = 1 << 32;

fn put_ranges(nvm: &Arc<dyn Region>, ranges: &[Range<'_>]) -> Result<()> {
    for (block, offset, bytes) in ranges {
        nvm.write(block.offset_bytes() + u64::from(*offset), bytes)?;
    }
    Ok(())
}

impl Store {
    pub(super) fn open_damaged(
        devices: &Devices,
        any_device: bool,
        report: &mut RepairReport,
    ) -> Result<Self> {
        let sb = read_superblock(devices)?;
        let layout = Layout::validate(sb, devices)?;
        refuse_unknown(devices, &sb)?;
        let bad = bad_superblocks(devices, &sb)?;
        // Before anything is given up of what waits in the journal.
        let all_there = || {
            let layout = Layout::validate(sb, devices)?;
            let rows = read_rows(&*devices.nvm, &sb)?;
            attach(devices, &layout, rows.as_ref()).map(drop)
        };
        let journal = open_journal(devices, &layout, report, &all_there)?;
        let rows = read_rows(&*devices.nvm, &sb)?;
        let spans = attach(devices, &layout, rows.as_ref())?;
        let attached = with_spans(devices.clone(), &spans, &PoolMediaStats::default());
        let mut store = Self::assemble(attached, layout, journal, &OpenOptions::default());
        store.spans = spans;
        // An old copy of the superblock does not list later features, whose data would be taken for damage.
        if let Err(error @ StoreError::Superblock { .. }) = store.snapshot().reader().state() {
            return Err(error);
        }
        if !any_device {
            store.check_first_devices(devices)?;
        }
        if !bad.is_empty() {
            crate::pool::write_superblocks(devices, sb, &bad)?;
            report.mended(format!("superblock: {} restored from the other copy", bad.len()));
        }
        store.trusting = true;
        // Unreadable rows name no session.
        let _ = store.note_torn();
        Ok(store)
    }
}

fn open_journal(
    devices: &Devices,
    layout: &Layout,
    report: &mut RepairReport,
    all_there: &dyn Fn() -> Result<()>,
) -> Result<Journal> {
    let nvm = Arc::clone(&devices.nvm);
    let (id, len) = (journal_id(&layout.sb), layout.sb.journal_bytes.get());
    let nvm_blocks = layout.blocks(Tier::Nvm);
    let bad = Journal::bad_headers(&devices.journal)?;
    let mut apply = |ranges: &[Range<'_>]| put_ranges(&nvm, ranges);
    let opened = Journal::open(Arc::clone(&devices.journal), id, len, nvm_blocks, &mut apply);
    let (mut journal, scan) = match opened {
        Ok(opened) => opened,
        Err(StoreError::Journal(what)) if what != crate::journal::STRANGER => {
            all_there()?;
            // Without its header the journal does not tell which records are in place; all of them are,
            // unless the power failed meanwhile.
            let newest = Journal::newest_in_ring(&devices.journal, id, len)?;
            Journal::format_after(&devices.journal, id, len, TxId(newest.0.saturating_add(TX_LEAP)))?;
            report.mended(format!("journal: made anew, because {what}"));
            report.lost(
                Ino(0),
                None,
                "journal: what was committed but not yet in place when the power failed, if it did",
            );
            let mut nothing = |_: &[Range<'_>]| Ok(());
            return Journal::open(Arc::clone(&devices.journal), id, len, nvm_blocks, &mut nothing)
                .map(|(journal, _)| journal);
        }
        Err(error) => return Err(error),
    };
    let damage = scan.damage.is_some();
    if let Some(damage) = scan.damage {
        all_there()?;
        journal.skip_damage(nvm_blocks, &mut apply)?;
        report.mended(format!("{damage}: left out, the later ones put in place"));
        report.lost(
            Ino(0),
            None,
            format!("{damage}: what it changed, if the power failed before it was in place"),
        );
    }
    if scan.records > 0 || damage {
        nvm.fence()?;
        nvm.sync(0, nvm.len_bytes())?;
    }
    if scan.records > 0 || damage || scan.uneven {
        journal.advance_tail()?;
    }
    if !bad.is_empty() {
        report.mended("journal: a copy of its header restored from the other");
    }
    Ok(journal)
}
