//! Whether the first device of a tier is another pool's. It has no label, but the checksums in NVM tell the
//! footers of its sealed units. Decides nothing about single damaged footers.

use super::Store;
use crate::reader::POOL_INO;
use crate::{Devices, Result, StoreError};
use varve_format::space::UnitRow;
use varve_format::{BLOCK_SIZE, Block, BlockHeader, BlockKind, BlockNo, Tier, verify_block};

/// Most sealed units that are looked at.
const UNITS: usize = 8;
/// Footers of another pool that are no accident: a device that lost a write may show an older footer of its
/// own.
const FOREIGN: usize = 2;

impl Store {
    /// Checks that the first devices of SSD and HDD, as they were `given`, are not those of another pool, as
    /// after a boot that gave disks other names. One without any footer, such as a new one in the place of a
    /// lost one, passes.
    ///
    /// # Errors
    /// `Devices`: no footer that was looked at is the pool's, and several are another's.
    pub(crate) fn check_first_devices(&self, given: &Devices) -> Result<()> {
        for tier in [Tier::Ssd, Tier::Hdd] {
            if let Some(device) = given.block_device(tier)
                && self.is_foreign(tier)
            {
                return Err(StoreError::Devices(format!(
                    "{} is not the {} of this pool: it holds another pool's data, and is left as it is. Disks may \
                     have got other names since the last start; in varve.toml, name them by /dev/disk/by-id/…. If it is \
                     the right one, `varve fsck --repair --any-device` gives up what cannot be found on it",
                    device.name(),
                    tier.name(),
                )));
            }
        }
        Ok(())
    }

    fn is_foreign(&self, tier: Tier) -> bool {
        let Some((0, first)) = self.layout.live_runs(tier).next() else {
            return false;
        };
        let snapshot = self.snapshot();
        let sealed = (0..first.end() / self.layout.unit_blocks(tier).max(1)).filter_map(|unit| {
            let row = snapshot.reader().unit_row(tier, unit).ok()?;
            (row.state == UnitRow::SEALED).then_some((unit, row))
        });
        let mut foreign = 0;
        for (unit, row) in sealed.take(UNITS) {
            match self.footer(tier, unit, &row) {
                Err(StoreError::Footer { .. }) => foreign += usize::from(self.has_a_footer(tier, unit, &row)),
                // The pool's own; or it cannot be read, which says nothing.
                Ok(_) | Err(_) => return false,
            }
        }
        foreign >= FOREIGN
    }

    /// Whether a whole footer of any pool is where that of a unit belongs.
    fn has_a_footer(&self, tier: Tier, unit: u64, row: &UnitRow) -> bool {
        let at = self.layout.footer_start(tier, unit, row.footer);
        let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
        self.read_blocks(tier, at, block.as_mut_slice()).is_ok()
            && verify_block(&block).is_ok()
            && BlockHeader::of(&block)
                .expect(BlockKind::UnitFooter, POOL_INO, BlockNo(at))
                .is_ok()
    }
}
