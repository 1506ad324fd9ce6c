//! Blocks that files of a running pool share: `varve dedup apply`, `status` and `undo`, and `varve usage`.
//! Finds what is the same by `dedup`; the pool's daemon compares, shares and undoes.

mod apply;
mod dedupe;
mod in_use;
mod interruption;
mod open_files;
mod search;
mod status;
mod tally;
mod undo;
mod unshared;

pub use status::usage;

use crate::dedup::args::PoolCommand;

/// Runs a command of `varve dedup` for files of a pool.
pub fn run(command: &PoolCommand) -> anyhow::Result<()> {
    match command {
        PoolCommand::Apply(args) => apply::apply(args),
        PoolCommand::Status(args) => status::status(args),
        PoolCommand::Undo(args) => undo::undo(args),
    }
}
