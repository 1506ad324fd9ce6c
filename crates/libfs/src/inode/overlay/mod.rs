//! Data of one file that the log holds and the shared area does not yet: log pointers for whole blocks
//! ([`Radix`]), and parts of blocks and zeroed ranges ([`Pieces`]). The highest sequence number wins. Knows
//! addresses in the log, never the log's bytes.

mod pieces;
mod radix;
#[cfg(test)]
mod tests;

pub(crate) use pieces::{Block, Pieces, Source, is_clean};
pub(crate) use radix::{LOG_BYTES_MAX, Radix};
