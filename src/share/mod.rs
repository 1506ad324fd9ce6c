//! Blocks that files of a running pool share: `varve dedup apply`, `status` and `undo`, and `varve usage`; and
//! `varve defrag`, which moves together what they do not share.
//! Where they are placed is asked for by `pin`.
//! Finds what is the same by `dedup`; the pool's daemon tells checksums, compares, shares and undoes.

mod apply;
mod dedupe;
mod defrag;
mod in_use;
mod interruption;
mod open_files;
mod search;
mod status;
mod sums;
mod tally;
mod undo;

pub use defrag::defrag;
pub use status::{sums_of, usage};

use crate::dedup::args::{DedupCommand, PoolCommand};
use crate::pool_session::PoolSession;
use std::process::ExitCode;
use sums::PoolSums;

/// Runs a command of `varve dedup` for any files. A scan of files that all lie in one mount of a running pool
/// takes the checksums that the pool keeps, or reads them by a session of its own.
pub fn anywhere(command: &DedupCommand) -> anyhow::Result<ExitCode> {
    let pool = match command {
        DedupCommand::Scan(args) => PoolSession::open(&args.paths).ok().map(|pool| (pool, args.full)),
        _ => None,
    };
    let Some((pool, full)) = pool else {
        return crate::dedup::dedup(command, None);
    };
    let done = crate::dedup::dedup(command, Some(&mut PoolSums::new(&pool, full)))?;
    pool.end().map(|()| done)
}

/// Runs a command of `varve dedup` for files of a pool.
pub fn run(command: &PoolCommand) -> anyhow::Result<()> {
    match command {
        PoolCommand::Apply(args) => apply::apply(args),
        PoolCommand::Status(args) => status::status(args),
        PoolCommand::Undo(args) => undo::undo(args),
    }
}
