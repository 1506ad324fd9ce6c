//! Verification of data on NVM: of none, of each block that is read, or of each block once. Results last as
//! long as the store is open; a block does not count as verified because this store wrote it.

use super::Store;
use crate::Result;
use crate::reader::checksums::compare;
use crate::seeded::{Bug, armed};
use std::sync::Arc;
use varve_format::{BLOCK_SIZE, Tier};
use varve_media::Verified;

impl Store {
    /// Makes reads verify each block of NVM once, from this call on. Verified blocks are noted in `verified`,
    /// which may be shared.
    pub fn verify_nvm_once(&mut self, verified: Arc<Verified>) {
        self.verify_nvm = true;
        self.verified = Some(verified);
    }

    /// Returns the verified blocks of NVM, if each block is verified once.
    #[must_use]
    pub const fn verified(&self) -> Option<&Arc<Verified>> {
        self.verified.as_ref()
    }

    /// Returns whether reads of these blocks of NVM need no verification.
    pub(super) fn believes(&self, first: u64, end: u64) -> bool {
        match &self.verified {
            _ if !self.verify_nvm => true,
            Some(verified) => verified.has(first, end) || armed(Bug::NvmBelieved),
            None => false,
        }
    }

    /// Compares blocks with their checksums and notes the verified blocks of NVM. A block that fails is
    /// forgotten, for all users of the set.
    pub(super) fn compare(&self, tier: Tier, start: u64, bytes: &[u8], sums: &[u32]) -> Result<()> {
        let Some(verified) = self.verified.as_deref().filter(|_| tier == Tier::Nvm) else {
            return compare(tier, start, bytes, sums);
        };
        for (block, (content, sum)) in (start..).zip(bytes.chunks(BLOCK_SIZE).zip(sums)) {
            match compare(tier, block, content, std::slice::from_ref(sum)) {
                Ok(()) => verified.note(block),
                Err(error) => {
                    verified.forget(block);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Forgets verified blocks that are no longer in the host's memory, of `blocks` blocks of NVM from `from`
    /// on: the next read gets them from their disk. Returns the block at which to continue.
    pub fn forget_absent(&self, from: u64, blocks: u64) -> u64 {
        match &self.verified {
            Some(verified) => verified.forget_absent(&*self.devices.nvm, from, blocks),
            None => 0,
        }
    }
}
