//! What the demotion of metadata remembers between transactions. Decides nothing (`demotion`).

use varve_format::TxId;

/// What is remembered between transactions.
#[derive(Debug, Default)]
pub(crate) struct DemotionState {
    /// Block of the inode file that is looked at next.
    pub(crate) hand: u64,
    /// Nothing could go.
    pub(crate) futile: Option<Futile>,
    pub(crate) away: u64,
    pub(crate) back: u64,
}

/// Until when it is not tried again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Futile {
    /// Not before this transaction…
    pub(crate) until: TxId,
    /// …unless slower tiers have more blocks than these by then: they were full.
    pub(crate) room: u64,
}
