//! The command line of `varve dedup`: its commands, options and help. No behaviour.

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use varve_format::Tier;
use varve_kernelfs::pool::size;
use varve_similarity::candidates::MIN_MEMORY_BYTES;

/// The commands of `varve dedup`.
#[derive(Debug, Subcommand)]
pub enum DedupCommand {
    /// Say what deduplication would save in directories or files, at which block size; needs no pool
    Estimate(EstimateArgs),
    /// Find blocks that are the same in files, within bounded memory
    Scan(ScanArgs),
    /// Look at images and group those that are alike
    Cluster(ClusterArgs),
    /// Say which images go to one host or into one wave of a migration
    Plan(PlanArgs),
    /// Say which images are nearest to one, and what differs
    Similar(SimilarArgs),
    /// Parse standard input as an image, without rights (started by `cluster` and `similar`).
    #[command(hide = true)]
    Parse {
        /// Limits.
        limits: Vec<String>,
    },
}

/// The commands of `varve dedup` for files of a running pool.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Share blocks that are the same in files of a running pool, after a comparison of their bytes
    Apply(ApplyArgs),
    /// Say how many bytes of files in a running pool are alone, shared and saved
    Status(DedupStatusArgs),
    /// Give files of a running pool blocks of their own again
    Undo(UndoArgs),
}

/// The commands of `varve dedup` that say where shared blocks of a running pool lie.
#[derive(Debug, Subcommand)]
pub enum PlaceCommand {
    /// Keep what files of a running pool share on a tier, once for all of them
    Place(PlaceArgs),
    /// End what `place` has said of files
    Unplace(UnplaceArgs),
}

fn bytes(text: &str) -> Result<u64, String> {
    size::parse(text)
}

/// Parses the memory of a search or a count.
fn memory(text: &str) -> Result<u64, String> {
    let least = MIN_MEMORY_BYTES as u64;
    size::parse(text).and_then(|bytes| match bytes >= least && usize::try_from(bytes).is_ok() {
        true => Ok(bytes),
        false => Err(format!(
            "`{text}` is too little or too much; the least is {}",
            size::exact(least)
        )),
    })
}

/// Parses a number of bytes a second.
fn rate(text: &str) -> Result<u64, String> {
    size::parse(text).and_then(|bytes| match bytes {
        0 => Err(format!(
            "`{text}` would never end; leave --rate out to read without a bound"
        )),
        bytes => Ok(bytes),
    })
}

/// Parses a time such as 90, 90s, 5m, 12h or 7d to seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let unit = match text.chars().last() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 3600,
        Some('d') => 86_400,
        _ => 0,
    };
    let digits = if unit == 0 { text } else { &text[..text.len() - 1] };
    let number: Option<u64> = digits.parse().ok();
    let number = number.and_then(|number| number.checked_mul(unit.max(1)));
    number.ok_or_else(|| format!("`{text}` is no time; write it as 90, 90s, 5m, 12h or 7d"))
}

/// Which files, and how they are read.
#[derive(Debug, Clone, Args)]
pub struct FileArgs {
    /// Look only at files whose path or name matches (may be given several times), as '*.img' or
    /// '/srv/**/disk*'
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// Leave out files and directories whose path or name matches (may be given several times)
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Leave out files that were changed less than this ago, as 90s, 5m, 12h, 7d
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = seconds)]
    pub min_age: u64,
    /// Read at most so many bytes a second, as 50M
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    pub rate: Option<u64>,
}

/// Which files of a pool, and the form of the output.
#[derive(Debug, Clone, Args)]
pub struct PoolArgs {
    /// Directories or files in a mount of a running pool
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dedup estimate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve dedup estimate /srv/images --exclude '*.tmp'

Everything is read once and nothing is written. Zeros and holes count for nothing. What fits into
--memory is counted exactly; beyond that a sample of the blocks is counted, chosen by their hash,
and the standard error is shown. A pool shares blocks of 4 KiB at equal alignment, by default in
runs of four and more: the first line is the most it can save. Encrypted and compressed files
share next to nothing.")]
pub struct EstimateArgs {
    /// Directories or files
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
    /// Memory to count in
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = memory)]
    pub memory: u64,
    /// Which files, and how they are read.
    #[command(flatten)]
    pub files: FileArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dedup scan`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve dedup scan /srv/images --state ~/.cache/varve-scan
  varve dedup scan /srv/images --state ~/.cache/varve-scan --list --json | jq '.runs[0]'

The state keeps a checksum of 4 bytes for each block of 4 KiB (1/1024 of the data; holes and zeros
cost nothing), so that the next scan reads only what is new or has changed, and one that was
interrupted goes on where it was (what it had read since its last save is read again). Two
neighbouring checksums are a key of 64 bits; equal keys are found in passes over the state, as many
as --memory asks for, with the same result for any memory. For each file some 200 bytes come on top
of it, and 24 for each hole of 1 MiB and more within one.

A checksum is no proof, and single blocks (about 3 % of all duplicates) are not found. Nothing is
changed and nothing is shared: sharing compares all bytes first.")]
pub struct ScanArgs {
    /// Directories or files
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
    /// Directory that keeps the checksums between scans
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
    /// Memory for the search
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = memory)]
    pub memory: u64,
    /// Shortest run of equal blocks that counts
    #[arg(long, value_name = "BLOCKS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub min_run: u64,
    /// Print each run: file, offset, bytes, and where the same is
    #[arg(long)]
    pub list: bool,
    /// Read all bytes, also where a running pool knows the checksums of its files
    #[arg(long)]
    pub full: bool,
    /// Which files, and how they are read.
    #[command(flatten)]
    pub files: FileArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dedup apply`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve dedup apply ./pool/mnt/images --dry-run
  varve dedup apply ./pool/mnt --state ~/.cache/varve-scan --min-age 1h --rate 50M
  varve dedup apply ./pool/mnt --json | jq '.left'

Reads the files as `varve dedup scan` does (with --state only what is new or has changed; without
it, everything, and the state is thrown away), and has the daemon share each run that looks the
same. The daemon holds both files, compares all bytes, and shares them in one transaction of its
journal: a file that changes meanwhile is not harmed, and at a crash a run is shared or it is not.
No byte and no time of a file changes. Nothing stays but the shared blocks; a later write to one
of the files takes a block of its own. What is shared already is neither compared nor shared
again: a second run finds nothing left to do, and one that was interrupted goes on where it was.

Left, and named with the reason: files that a program has open for writing or has mapped shared
(as far as this user may look at processes), that a program under `varve run` or with the library
uses or has used, that have changed since they were read, that are immutable, and that belong to
another user. The owner of the pool and root share the files of all users, but no file with one of
another user unless `dedup_scope` in varve.toml is `group` or `pool`; across users only blocks on
SSD and HDD.

Memory: --memory for the search (in as many passes as that takes), 250 bytes a file, and a file of
24 bytes a run in the state. --rate bounds what is read and what is compared, each.

Exit status: 0 if all was done that may be (files may have been left); 1 if it was stopped, or
space ran out.")]
pub struct ApplyArgs {
    /// Directory that keeps the checksums between runs; may be that of a scan of the same paths
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Memory for the search
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = memory)]
    pub memory: u64,
    /// Shortest run that is shared: each run may become an extent of its own
    #[arg(long, value_name = "BLOCKS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub min_run: u64,
    /// Read all bytes to find what is the same, instead of asking the pool for its checksums
    #[arg(long)]
    pub full: bool,
    /// Share nothing; say what looks the same and is not shared yet
    #[arg(long)]
    pub dry_run: bool,
    /// Which files, and how they are read.
    #[command(flatten)]
    pub files: FileArgs,
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `dedup status`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve dedup status ./pool/mnt/images

`alone` is what no other file has; `shared` counts shared blocks once for each place that has
them, and `kept in` once; `saved` is what the files would take more if they shared nothing with
each other. Clones (`cp --reflink`, `varve clone`) count as well: nothing tells them from what
`apply` has shared. `varve usage` tells it by file. Only the owner of a file is told of its
blocks; root and the pool's owner of all.")]
pub struct DedupStatusArgs {
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `usage`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve usage ./pool/mnt/images
  varve usage -s ./pool/mnt/*

For each file, then for each path: `total` is all that is mapped, `alone` what no other place has
(in this file or another), `shared` the rest; `set shared` counts each shared block below the path
once, also if one file has it several times: alone + set shared is what the path takes. The
columns are those of `btrfs filesystem du`, where `alone` is called `exclusive`. `du` counts
shared blocks in full, for each file. What is in logs counts. Holes and metadata do not. Only the
owner of a file is told of its blocks; root and the pool's owner of all.")]
pub struct UsageArgs {
    /// Only a line for each path
    #[arg(short, long)]
    pub summarize: bool,
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `dedup undo`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve dedup undo ./pool/mnt/images/db.img
  varve dedup undo ./pool/mnt --dry-run            only says how much space it takes

Every shared block of the files is copied to a place of its own on the tier where it lies (or a
slower one, if that is full); the last file that has a block keeps it without a copy. Done by the
daemon, 16 MiB at a time, each in a transaction: at no moment is a byte missing, also at a crash.
Bytes, times (mtime, ctime) and modes stay. Programs may read and write the files meanwhile.
Clones are undone, too: nothing tells them from what `apply` has shared.

If the copies need more than is free, nothing is begun. If space runs out nevertheless, as others
write, it ends: what was done stays done, the rest stays shared, and nothing is lost. A second run
goes on.

Exit status: 0 if all files have blocks of their own, but for those that are named; 1 if it was
refused or stopped.")]
pub struct UndoArgs {
    /// Change nothing; say what would be copied and what is free
    #[arg(long)]
    pub dry_run: bool,
    /// Which files, and how they are read.
    #[command(flatten)]
    pub files: FileArgs,
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `defrag`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve defrag ./pool/mnt/images
  varve defrag ./pool/mnt/db --dry-run            only says in how many pieces it lies
  varve dedup apply ./pool/mnt/images && varve defrag ./pool/mnt/images

What a file has alone on SSD or HDD in pieces of less than 8 MiB (SSD: 1 MiB) that lie apart is copied to one
place of the same tier, in the order of the file: a disk reads it without a seek for each piece. On HDD
neighbours are joined if they are at most 8 MiB together.
What files share is neither moved nor copied, and stays shared: after `varve dedup apply` it lies
where the first file has it, and this moves together what the others have besides. Use it for
files that random writes have scattered, too. NVM is left: there is nothing to gain.

A piece lies directly behind the one before it in the file, of what the file has alone on the
tier; holes and shared blocks between them do not count. On a tier of several devices a piece
ends where the turn of the next device begins. Pieces stay where free space lies apart as much.

Done by the daemon, 8 MiB (SSD: 4 MiB) in a transaction: at no moment is a byte missing, also at a crash.
Bytes, times (mtime, ctime), modes and tiers stay. Programs may read and write the files
meanwhile. Needs as much free space on the tier as is moved at once (16 MiB). If space runs out,
or the command is stopped, what was done stays done. A second run moves nothing that lies well.
For the owner of a file, who may write it, and root.

Exit status: 0 if all files were looked at, but for those that are named; 1 if it was refused or
stopped.")]
pub struct DefragArgs {
    /// Change nothing; say in how many pieces the files lie, and what would be moved at most
    #[arg(long)]
    pub dry_run: bool,
    /// Which files, and how they are read.
    #[command(flatten)]
    pub files: FileArgs,
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `dedup place`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve dedup apply ./pool/mnt/images
  varve dedup place --tier ssd ./pool/mnt/images/*.img       what they have in common, once on flash
  varve dedup place --tier nvm --wait ./pool/mnt/base.img    returns when it is there
  varve which-tier ./pool/mnt/images                         where it is, and what it waits for
  varve dedup unplace ./pool/mnt/images/*.img

The blocks that the files share, with each other or with any file, move to the tier, in the
background, and no policy moves them away. What a file has alone is not moved: that is for
`varve pin`, which in turn moves nothing that is shared. A block is on the fastest tier that one
of its files asks for, also if others ask for none: it is there once, for all of them. The wish is
the file's: it holds for what the file shares later, through restarts and renames, until `unplace`
or until the file is removed. A block that one file alone has left, by an undo or by writes to the
others, is that file's own again, and its pin or the policy places it.

It never makes a write fail: while the tier is full (placement_high_percent), what is shared stays
where it is and follows when there is room; `varve which-tier` says so. A directory stands for the
files that are in it now. For root and the pool's owner, since it takes room on the tier from all.

Exit status: 0 if the wishes are kept (with --wait: and the data is there); 1 otherwise.")]
pub struct PlaceArgs {
    /// The tier
    #[arg(long, value_name = "nvm|ssd|hdd", value_parser = crate::pin_args::tier)]
    pub tier: Tier,
    /// Wait until the data is there; fails if it cannot move there now, and says why
    #[arg(long)]
    pub wait: bool,
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `dedup unplace`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve dedup unplace ./pool/mnt/images/*.img       the policy decides again

What the files share is moved by the policy again, unless another file that has it is still placed.
For root and the pool's owner.")]
pub struct UnplaceArgs {
    /// Files of the pool, and the form of the output.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// The measure of similarity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeighArg {
    /// Bytes of 4 KiB blocks
    Blocks,
    /// Bytes of whole files
    Files,
    /// Installed size of packages
    Packages,
    /// Blocks and packages
    Mix,
}

/// How clusters are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TreeArg {
    /// Content weighed by its rarity, candidates by an inverted index
    Rarity,
    /// The paper's tree: bytes, every child compared
    Seed,
}

/// Bounds on reading an image.
#[derive(Debug, Clone, Args)]
pub struct LimitArgs {
    /// Time for one image, as 90s, 5m
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = seconds)]
    pub image_time: u64,
    /// Memory for the process that parses an image
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = bytes)]
    pub image_memory: u64,
}

/// Arguments of `dedup cluster`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve dedup cluster /srv/images/*.qcow2 --manifest images.clusters
  varve dedup cluster new.img --manifest images.clusters       one more; the others are not read again
  varve dedup cluster --remove old.img --manifest images.clusters
  varve dedup cluster --manifest images.clusters --json        what is in it

An image is a raw disk (MBR, GPT, ext4), a qcow2, a directory, a tar archive (also .gz and .zst),
an OCI image (a layout or an archive), or a list of packages: dpkg's status, apk's installed, or
`name version [arch] bytes` a line, as by
  rpm -qa --qf '%{NAME} %{VERSION}-%{RELEASE} %{ARCH} %{SIZE}\\n'
  dpkg-query -W -f '${Package} ${Version} ${Architecture} ${Installed-Size}\\n'
Images are parsed in a process without rights, never mounted; what cannot be parsed is compared by
blocks. The manifest holds samples of hashes, some 100 KiB an image, and no content. Images whose
size and time are unchanged are not read. Levels: images of a cluster share at least half (0.5) or
nine tenths (0.9) of what is not in all, or are equal (1).")]
pub struct ClusterArgs {
    /// Images to add, or to look at again
    pub images: Vec<PathBuf>,
    /// File that keeps images and clusters; made if it is not there
    #[arg(long, value_name = "FILE")]
    pub manifest: PathBuf,
    /// Take an image out, by the path it was added under (may be given several times)
    #[arg(long, value_name = "IMAGE")]
    pub remove: Vec<PathBuf>,
    /// What is weighed (of a new manifest, or to change it)
    #[arg(long, value_enum)]
    pub weigh: Option<WeighArg>,
    /// How clusters are made (of a new manifest, or to change it)
    #[arg(long, value_enum)]
    pub tree: Option<TreeArg>,
    /// Show the clusters of this level: 1 (half), 2 (nine tenths) or 3 (equal)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
    pub level: u8,
    /// Images that are read at once
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub jobs: u8,
    /// Bounds on reading an image.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Which files of directories, and how they are read.
    #[command(flatten)]
    pub files: FileArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dedup plan`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve dedup plan --manifest images.clusters --hosts 3 --memory 16G
  varve dedup plan --manifest images.clusters --waves 4

With --hosts, each image takes its distinct content of a host's memory, and what is shared is not
counted twice only in what is saved: a plan still fits when sharing ends. With --waves, all waves
have as equal numbers of images as can be, and a wave sends what its images share once. What
chance would save under the same bounds is shown beside it (64 random plans). By --weigh or table
4.1 of the paper, a plan weighs blocks and packages where both are known.")]
pub struct PlanArgs {
    /// The manifest (see `varve dedup cluster`)
    #[arg(long, value_name = "FILE")]
    pub manifest: PathBuf,
    /// Number of hosts
    #[arg(
        long,
        value_name = "N",
        requires = "memory",
        conflicts_with = "waves",
        required_unless_present = "waves"
    )]
    pub hosts: Option<usize>,
    /// Memory of each host
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub memory: Option<u64>,
    /// Number of waves
    #[arg(long, value_name = "K")]
    pub waves: Option<usize>,
    /// What is weighed; the manifest's if it is not given
    #[arg(long, value_enum)]
    pub weigh: Option<WeighArg>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dedup similar`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve dedup similar broken.img --manifest images.clusters

SIM is what two images share of all that either has (equation 4.1), S what they share of the
smaller one (4.2). The difference to the nearest image (or to --to) names packages, versions and
directories.")]
pub struct SimilarArgs {
    /// An image of the manifest by its path, or another one, which is read
    pub image: PathBuf,
    /// The manifest (see `varve dedup cluster`)
    #[arg(long, value_name = "FILE")]
    pub manifest: PathBuf,
    /// Show the difference to this image of the manifest
    #[arg(long, value_name = "IMAGE")]
    pub to: Option<PathBuf>,
    /// Number of images that are shown
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub count: usize,
    /// Bounds on reading an image.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::{memory, rate, seconds};

    #[test]
    fn sizes_that_cannot_be_meant_are_refused() {
        assert_eq!(
            (memory("1M"), rate("1"), rate("50M")),
            (Ok(1 << 20), Ok(1), Ok(50 << 20))
        );
        for bad in ["0", "1", "1023K", "many"] {
            assert!(memory(bad).is_err(), "{bad}");
        }
        for bad in ["0", "0M", "0.4", "fast"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(seconds("90"), Ok(90));
        assert_eq!(seconds("5m"), Ok(300));
        assert_eq!(seconds("7d"), Ok(604_800));
        for bad in ["", "m", "-1s", "1.5h", "99999999999999999999d", "µ"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
