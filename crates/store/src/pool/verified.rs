//! Which data on NVM is compared with its checksums: none, each block that is read, or each once. What is
//! known lasts as long as the store is open; no block is believed because it was written by this store.

use super::Store;
use crate::Result;
use crate::reader::checksums::compare;
use crate::seeded::{Bug, armed};
use std::sync::Arc;
use varve_format::{BLOCK_SIZE, Tier};
use varve_media::Verified;

impl Store {
    /// Reads compare each block of NVM once, from here on: with what is noted in `verified`, which others
    /// may share.
    pub fn verify_nvm_once(&mut self, verified: Arc<Verified>) {
        self.verify_nvm = true;
        self.verified = Some(verified);
    }

    /// Which blocks of NVM are not compared any more, if they are compared once.
    #[must_use]
    pub const fn verified(&self) -> Option<&Arc<Verified>> {
        self.verified.as_ref()
    }

    /// Whether these blocks of NVM are given out without a look at their checksums.
    pub(super) fn believes(&self, first: u64, end: u64) -> bool {
        match &self.verified {
            _ if !self.verify_nvm => true,
            Some(verified) => verified.has(first, end) || armed(Bug::NvmBelieved),
            None => false,
        }
    }

    /// Compares blocks with their checksums and keeps in mind which of NVM had them. One that has not is
    /// believed by nobody any more.
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

    /// Forgets which blocks were compared that are not in the host's memory any more, of `blocks` blocks of
    /// NVM from `from` on: when they are read again, their disk gives them anew. Returns where to go on.
    pub fn forget_absent(&self, from: u64, blocks: u64) -> u64 {
        match &self.verified {
            Some(verified) => verified.forget_absent(&*self.devices.nvm, from, blocks),
            None => 0,
        }
    }
}
