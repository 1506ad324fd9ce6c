//! State that the demotion of metadata keeps between transactions. Decides nothing (`demotion`).

use varve_format::TxId;

/// State of the demotion between transactions.
#[derive(Debug, Default)]
pub(crate) struct DemotionState {
    /// Block of the inode file to be examined next.
    pub(crate) hand: u64,
    /// The last attempt could demote nothing.
    pub(crate) futile: Option<Futile>,
    pub(crate) away: u64,
    pub(crate) back: u64,
}

/// The end of a pause after a futile attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Futile {
    /// No attempt before this transaction…
    pub(crate) until: TxId,
    /// …unless slower tiers have more free blocks than this, because they were full.
    pub(crate) room: u64,
}
