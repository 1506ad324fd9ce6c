//! The command line of `varve pin`, `unpin`, `exclude` and `which-tier`: options and help. No behaviour.

use clap::Args;
use std::path::PathBuf;
use varve_format::Tier;

/// Parses the name of a tier.
pub fn tier(text: &str) -> Result<Tier, String> {
    Tier::named(text).ok_or_else(|| "it is nvm, ssd or hdd".into())
}

/// Files and directories.
#[derive(Debug, Args)]
pub struct TreeArgs {
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
    /// Files and directories in a mount of a pool
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// Arguments of `pin`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve pin --tier ssd mnt/db                 the database's data stays on flash
  varve pin --tier hdd --wait mnt/archive     returns when all of it is on the disk
  varve which-tier mnt/db                     where it is now, and what it waits for

A pin of a directory holds for everything in it and for what is made in it later, except for what
has a pin of its own. A file that is renamed into another directory takes that one's pin, and a
directory so takes it for what is made in it later; `varve pin` again for what it holds. New data
goes to the tier at once, older data moves in the background. A pin never makes a write fail:
while the tier is full (placement_high_percent) new data goes where the policy puts it and follows
later; data without a pin makes room. Blocks that files share are not moved by pins, but by
`varve dedup place`. For root and the pool's owner.")]
pub struct PinArgs {
    /// The tier
    #[arg(long, value_name = "nvm|ssd|hdd", value_parser = tier)]
    pub tier: Tier,
    /// Wait until the data is there; fails if it cannot move there now, and says why
    #[arg(long)]
    pub wait: bool,
    /// What to look at.
    #[command(flatten)]
    pub at: TreeArgs,
}

/// Arguments of `unpin`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve unpin mnt/db                          the policy decides again

Ends what `pin` and `exclude` said of the paths and of everything below them, except for what has
a pin of its own.")]
pub struct UnpinArgs {
    /// What to look at.
    #[command(flatten)]
    pub at: TreeArgs,
}

/// Arguments of `exclude`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve exclude mnt/images                    what is there stays on the tiers where it is

The data of the files is not moved any more, neither to slower tiers when theirs is full nor to
faster ones when it is read. It holds for directories as `varve pin` does; `varve unpin` ends it.")]
pub struct ExcludeArgs {
    /// What to look at.
    #[command(flatten)]
    pub at: TreeArgs,
}

/// Arguments of `rules`.
#[derive(Debug, Args)]
#[command(after_help = r#"Examples:
  varve rules mnt                             which rule each file matches; changes nothing
  varve rules --why mnt/var/log               with the rules that do not match, and why
  varve rules --apply mnt                     has the daemon apply its rules now

Rules are [[rule]] tables at the end of the pool's varve.toml; the first one that matches wins:

  [[rule]]
  match = ["*.log", "/var/spool/**"]          # without "/" a pattern matches names in all directories
  older_than = "7d"                           # since the last change of the data; also younger_than
  larger_than = "1MiB"                        # also smaller_than
  tier = "hdd"

  [[rule]]
  match = "*.iso"
  exclude = true                              # is not moved

Paths begin at the pool's root. The daemon reads the rules when it starts, and applies them then,
each ten minutes, and with --apply; new files are where the policy puts them until then. A file
that matches no longer is placed by the policy again. What `varve pin` and `varve exclude` say of
a file or its directory comes before the rules. Without --apply the rules are those that
varve.toml has now."#)]
pub struct RulesArgs {
    /// Have the daemon apply the rules that it has read
    #[arg(long, conflicts_with = "why")]
    pub apply: bool,
    /// Show the rules that were tried before, and why they do not match
    #[arg(long)]
    pub why: bool,
    /// What to look at.
    #[command(flatten)]
    pub at: TreeArgs,
}

/// Arguments of `which-tier`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve which-tier mnt/db                     a line for each file, and the sum
  varve which-tier --extents mnt/db/main      each extent, with the reads that the daemon has seen
  varve which-tier --json mnt/db | jq .tiers

What is logged is digested first. `waiting` says what keeps pinned data from moving: the tier is
full, the space is promised to sessions, the host's disk is full. Reads count blocks of 4 KiB of
the 2 MiB around an extent's beginning, older ones half; reads of data in NVM, which programs map,
count in part. For root and the pool's owner.")]
pub struct WhichTierArgs {
    /// Show each extent
    #[arg(long)]
    pub extents: bool,
    /// What to look at.
    #[command(flatten)]
    pub at: TreeArgs,
}
