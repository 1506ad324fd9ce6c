//! The jobs that empty devices: their rows after the pool state, in its block. A row counts while the row of
//! its device says that it is emptied, and changes with it in one record. Moves nothing.

use super::TxState;
use super::devices::row_in;
use crate::layout::Place;
use crate::reader::{MetaReader, View};
use crate::{Emptied, JobRow, Result, Store, StoreError};
use varve_format::device::DeviceRow;
use varve_format::state::{EVACUATION_ROW_SIZE, EvacuationRow, POOL_STATE_SIZE, REMOVAL_ROWS};
use varve_format::{BLOCK_HEADER_SIZE, BlockKind, TimeNs};
use zerocopy::little_endian::{I64, U16, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Rows with their places in the table.
type Removals = Vec<(usize, JobRow)>;

impl Store {
    /// Returns the jobs of devices that are emptied.
    pub(crate) fn removals_in<V: View>(&self, reader: &MetaReader<'_, V>) -> Result<Removals> {
        let rows = removal_rows(reader)?;
        if rows.is_empty() {
            return Ok(Removals::new());
        }
        let devices = self.rows_in(&mut |place| reader.row(place, BlockKind::DeviceTable, row_in))?;
        let job = |(at, row): (usize, EvacuationRow)| {
            let is_its = |slot: usize| slot + 1 == usize::from(row.device.get());
            let (_, device) = devices.iter().find(|(slot, _)| is_its(*slot))?;
            let of = Emptied::Device {
                tier: device.tier()?,
                first: device.first.get(),
            };
            (device.state == DeviceRow::EMPTYING).then_some((at, JobRow { of, row }))
        };
        Ok(rows.into_iter().filter_map(job).collect())
    }

    /// Changes the row of a job of a device. Durable when this returns.
    pub(crate) fn change_removal(&self, job: u64, change: &mut dyn FnMut(&mut EvacuationRow)) -> Result<()> {
        let _one_at_a_time = self.sharing.lock();
        let mut tx = self.begin()?;
        tx.guard(|core| {
            let rows = core.store.removals_in(&core.reader())?;
            let found = rows.into_iter().find(|(_, found)| found.row.job.get() == job);
            let (at, mut found) = found.ok_or(StoreError::NotFound)?;
            change(&mut found.row);
            core.put_removal(at, &found.row)
        })?;
        tx.commit()?;
        Ok(())
    }

    /// Gives a job to each device that is emptied without one: an older program began it, or the pool state
    /// was made anew. Durable when this returns.
    ///
    /// # Errors
    /// `TableFull`: there are too many jobs; a device failed.
    pub fn adopt_removals(&self, now_ns: TimeNs) -> Result<()> {
        let _one_at_a_time = self.sharing.lock();
        let mut tx = self.begin()?;
        tx.guard(|core| {
            let jobs = core.store.removals_in(&core.reader())?;
            for (slot, row) in core.device_rows()? {
                let has = |(_, job): &(usize, JobRow)| usize::from(job.row.device.get()) == slot + 1;
                if row.state == DeviceRow::EMPTYING && !jobs.iter().any(has) {
                    core.start_removal(slot, now_ns)?;
                }
            }
            Ok(())
        })?;
        tx.commit()?;
        Ok(())
    }
}

/// Returns the rows with a job.
fn removal_rows<V: View>(reader: &MetaReader<'_, V>) -> Result<Vec<(usize, EvacuationRow)>> {
    let place = place(reader, 0);
    reader.row(place, BlockKind::PoolState, |bytes| {
        let rows = bytes
            .chunks_exact(EVACUATION_ROW_SIZE)
            .take(REMOVAL_ROWS)
            .enumerate();
        let read = |(at, bytes): (usize, &[u8])| {
            let row = EvacuationRow::read_from_bytes(bytes).ok()?;
            (row.is_job() && row.device.get() > 0).then_some((at, row))
        };
        rows.filter_map(read).collect()
    })
}

fn place<V: View>(reader: &MetaReader<'_, V>, at: usize) -> Place {
    Place {
        block: reader.state_block(),
        offset: BLOCK_HEADER_SIZE + POOL_STATE_SIZE + at * EVACUATION_ROW_SIZE,
    }
}

impl TxState<'_> {
    fn put_removal(&mut self, at: usize, row: &EvacuationRow) -> Result<()> {
        let place = place(&self.reader(), at);
        self.patch(place, row.as_bytes())
    }

    /// Makes the job of a device that is emptied from now on, or was without one. Returns its number, which no
    /// job of the pool had before.
    pub(super) fn start_removal(&mut self, slot: usize, now_ns: TimeNs) -> Result<u64> {
        self.end_removal(slot)?;
        // A row whose device is not emptied is one that an older program left.
        let live = self.store.removals_in(&self.reader())?;
        let mut free = (0..REMOVAL_ROWS).filter(|at| live.iter().all(|(other, _)| other != at));
        let at = free.next().ok_or(StoreError::TableFull("job"))?;
        let mut job = 0;
        self.change_state(|state| {
            job = state.last_job.get() + 1;
            state.last_job = U64::new(job);
        })?;
        let row = EvacuationRow {
            job: U64::new(job),
            started_ns: I64::new(now_ns),
            device: U16::new(slot as u16 + 1),
            ..EvacuationRow::default()
        };
        self.put_removal(at, &row)?;
        Ok(job)
    }

    /// Ends the job of a device, if it has one.
    pub(super) fn end_removal(&mut self, slot: usize) -> Result<()> {
        for (at, row) in removal_rows(&self.reader())? {
            if usize::from(row.device.get()) == slot + 1 {
                self.put_removal(at, &EvacuationRow::default())?;
            }
        }
        Ok(())
    }

    /// Changes the row of the job that empties a device, if it has one.
    pub(crate) fn count_removed(&mut self, of: Emptied, change: &dyn Fn(&mut EvacuationRow)) -> Result<()> {
        let rows = self.store.removals_in(&self.reader())?;
        if let Some((at, mut job)) = rows.into_iter().find(|(_, job)| job.of == of) {
            change(&mut job.row);
            self.put_removal(at, &job.row)?;
        }
        Ok(())
    }
}
