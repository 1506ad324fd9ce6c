//! The command line: every command, its options and its help. No behaviour.

use crate::mount_options::MountOptions;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Text on the exit codes, shown under `--help`.
const EXIT_CODES: &str = "Exit codes:
  0  done
  1  it failed; the message on standard error says what to do
  2  the command line was wrong
  3  scrub or cache check found damage
  4  no daemon serves this pool
fsck has the codes of fsck(8), see `varve fsck --help`.";

/// A file system across NVM, SSD and HDD: writes are durable when they return and cost no system call.
#[derive(Debug, Parser)]
#[command(name = "varve", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Cli {
    /// What is logged on standard error: error, warn (the default), info, debug, trace, or a filter as
    /// `varve_kernelfs=debug`; also by the environment variable VARVE_LOG
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a pool if there is none, start its daemon, mount it at DIR/mnt, and stay until Ctrl-C
    Up(UpArgs),
    /// Stop what `up` started: unmount, digest, end
    Down(DownArgs),
    /// Make a pool of plain files
    Mkfs(MkfsArgs),
    /// Remove a pool for good, or memory of pools that are gone
    Destroy(DestroyArgs),
    /// Bring a stopped pool of an older version up to this program's format
    Upgrade(UpgradeArgs),
    /// Run the daemon of a pool in the foreground
    Serve(ServeArgs),
    /// Mount a pool whose daemon runs
    Mount(MountArgs),
    /// Unmount
    Umount(UmountArgs),
    /// Show what a pool's daemon does: tiers, sessions, digest, jobs
    Status(PoolJsonArgs),
    /// Watch a pool's daemon: rates, log fill, leases and who waits for whom
    Top(TopArgs),
    /// The same numbers for Prometheus, printed or over HTTP
    Metrics(MetricsArgs),
    /// Have everything that is logged digested into the shared area now
    Digest(PoolJsonArgs),
    /// Make everything that programs did on a pool durable against a power cut
    Sync(SyncArgs),
    /// Make a file that shares all blocks of another one in the same mounted pool
    Clone(CloneArgs),
    /// Say what files of a mounted pool take: bytes that are theirs alone, and bytes that they share
    Usage(crate::dedup::args::UsageArgs),
    /// Move together what files of a mounted pool have alone on SSD or HDD; what they share stays shared
    Defrag(crate::dedup::args::DefragArgs),
    /// Want the data of files and directories on one tier, for good
    Pin(crate::pin_args::PinArgs),
    /// Let the policy place data again that was pinned or excluded
    Unpin(crate::pin_args::UnpinArgs),
    /// Keep the data of files and directories from being moved
    Exclude(crate::pin_args::ExcludeArgs),
    /// Say which placement rule each file matches, or apply the rules
    Rules(crate::pin_args::RulesArgs),
    /// Say on which tiers the data of files is, and why
    WhichTier(crate::pin_args::WhichTierArgs),
    /// Move all data off a tier of a pool, and keep it empty
    Evacuate(crate::job_args::EvacuateArgs),
    /// Add a device to a tier of a pool
    AddDevice(crate::device_args::AddDeviceArgs),
    /// Move all data off a device and take it out of its pool
    RemoveDevice(crate::device_args::RemoveDeviceArgs),
    /// Put a device in the place of another one
    Replace(crate::device_args::ReplaceArgs),
    /// Show, pause, bound or cancel such jobs, and say why bytes do not move
    Jobs(crate::job_args::JobsArgs),
    /// Check every structure and cross-reference of a pool
    Fsck(FsckArgs),
    /// Verify all data against its checksums
    Scrub(PoolJsonArgs),
    /// Print a structure as it lies on the media
    Debug(DebugArgs),
    /// Say which ways to a device work on this machine, what is missing for the others, and how to mend it
    Doctor(DoctorArgs),
    /// A quick measurement of a mounted pool against the same directory's file system
    Bench(BenchArgs),
    /// Run a program with its file calls on a mount served in its own process
    Run(RunArgs),
    /// Manage memory tiers and huge pages of programs
    Vm(VmArgs),
    /// Make and look after a disk cache whose index takes a few bits an object
    Cache(CacheArgs),
    /// Find what is alike in files and images: what sharing would save, clusters, plans
    Dedup(DedupArgs),
}

/// Sizes and places of the tiers of a new pool.
#[derive(Debug, Clone, Default, Args)]
pub struct TierArgs {
    /// NVM: SIZE for a plain file (durable by fsync), shm:SIZE for memory only (fast; lost at power-off), or
    /// persistent memory: dax:SIZE in a directory with DAX (SIZE chooses it there), dax:/dev/dax0.0
    #[arg(long, value_name = "SIZE|shm:SIZE|dax:SIZE|dax:DEVICE")]
    pub nvm: Option<String>,
    /// SSD: SIZE for a sparse file in the pool, the path of a file or block device, or a way to a device
    /// (uring:PATH, ng:/dev/ng0n1, nvme:0000:00:04.0, spdk:0000:00:04.0, spdk:/PATH.json#BDEV); 0 for none.
    /// Give it again for each further SSD
    #[arg(long, value_name = "SIZE|PATH|DEVICE")]
    pub ssd: Vec<String>,
    /// HDD: SIZE for a sparse file in the pool, the path of a file or block device, or a way to a device; 0
    /// for none. Give it again for each further HDD
    #[arg(long, value_name = "SIZE|PATH|DEVICE")]
    pub hdd: Vec<String>,
}

/// Arguments of `up`.
#[derive(Debug, Default, Args)]
#[command(after_help = "Example:
  varve up ./pool --nvm 256M --ssd 1G --hdd 16G
  cp -a /usr/share/doc ./pool/mnt/        (in another terminal)
  varve status ./pool

Defaults of a new pool: --nvm 1G --ssd 16G --hdd 64G; the files are sparse. The sizes of an
existing pool do not change. `up` runs the daemon and the mount as two processes and restarts
either if it dies (five tries).")]
pub struct UpArgs {
    /// Directory of the pool; made if it is not there
    pub dir: PathBuf,
    /// Sizes of a new pool.
    #[command(flatten)]
    pub tiers: TierArgs,
    /// Mount there instead of at DIR/mnt; the directory must exist
    #[arg(long, value_name = "DIR")]
    pub mountpoint: Option<PathBuf>,
    /// Options of the mount, as for `varve mount`
    #[arg(short, long = "options", value_name = "OPTIONS", value_parser = crate::mount_options::parse)]
    pub options: Option<MountOptions>,
    /// Return once it is mounted; stop it with `varve down DIR`
    #[arg(long)]
    pub detach: bool,
    /// Let other users use the mount (an ordinary user needs `user_allow_other` in /etc/fuse.conf)
    #[arg(long)]
    pub allow_other: bool,
    /// Give the daemon's metrics out over HTTP at this address (see `varve metrics --help`)
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<std::net::SocketAddr>,
    /// Make a memory-only pool (--nvm shm:…) again, empty, after a reboot took its memory
    #[arg(long)]
    pub recreate: bool,
    /// Set by `--detach` for the process in the background.
    #[arg(long, hide = true)]
    pub background: bool,
    /// Prints nothing on success: for mount(8).
    #[arg(long, hide = true)]
    pub quiet: bool,
}

/// Arguments of `down`.
#[derive(Debug, Args)]
#[command(
    after_help = "Waits until programs that use the mount have ended (it names them); then everything is digested
and the daemon ends. Nothing happens to a pool that is not up, but a mount that a killed run left
behind is taken away."
)]
pub struct DownArgs {
    /// Directory of the pool
    pub dir: PathBuf,
    /// Detach the mount even if programs still use it
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `destroy`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve destroy ./pool            asks first
  varve destroy ./pool --yes
  varve destroy --orphans         what pools left in /dev/shm whose directories were removed

Removes the pool's images and logs, its memory in the live directory, and its directory if nothing
else lies there. Tiers on devices or files outside of it stay as they are: their names may be
another disk's by now. Refused while a daemon serves the pool or it is mounted. What `--orphans`
removes is listed first: live directories of this user's pools (of everybody's, for root) in which
no daemon works and whose pool is not where it was when its daemon was last started. A pool that
was moved, or that another container or mount namespace holds, counts as gone: look at the list.")]
pub struct DestroyArgs {
    /// Directory of the pool
    #[arg(required_unless_present = "orphans", conflicts_with = "orphans")]
    pub pool: Option<PathBuf>,
    /// Remove live directories whose pool is gone
    #[arg(long)]
    pub orphans: bool,
    /// Where live directories are looked for, if varve.toml of their pools named another place
    #[arg(long, value_name = "DIR", default_value = "/dev/shm", requires = "orphans")]
    pub live: PathBuf,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// Print what was removed as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `upgrade`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve down ./pool && varve upgrade ./pool
  varve upgrade --check ./pool    only says which version it has

Pools of older versions are served as they are. An upgrade lets a pool use features that came
since; it changes nothing else, takes milliseconds, and may be cut off at any point and run again.
What waits in logs stays there. There is no way back: older programs refuse the pool from then on.
docs/reference/format.md lists the versions and features.")]
pub struct UpgradeArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Change nothing
    #[arg(long)]
    pub check: bool,
    /// Print what was found as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `mkfs`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve mkfs ./pool                                    1G, 16G and 64G in sparse files
  varve mkfs ./pool --nvm shm:2G --ssd 8G --hdd 0      fast and memory-only, two tiers
  varve mkfs /var/lib/varve --nvm 4G --ssd /dev/nvme0n1p3 --hdd /dev/sdb
  varve mkfs /var/lib/varve --nvm dax:/dev/dax0.0 --ssd /dev/nvme0n1    all of a devdax device
  varve mkfs /var/lib/varve --nvm 4G --ssd nvme:0000:00:04.0    drive the SSD from the daemon, without the kernel
  varve mkfs /var/lib/varve --nvm 4G --ssd spdk:0000:00:04.0    the same by an installed SPDK

NVM holds all metadata and new data; the sizes cannot be changed later. A file or device given by
its path must start with zeros, so that nothing is overwritten by mistake. `varve doctor` shows
which ways to a device work here. Sparse files may promise more than the host's disk has: then
`df` shows the smaller number, and writes fail with ENOSPC before anything is lost.")]
pub struct MkfsArgs {
    /// Directory of the new pool; must not hold a pool
    pub dir: PathBuf,
    /// Sizes.
    #[command(flatten)]
    pub tiers: TierArgs,
    /// Print what was made as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Recovers whatever an earlier daemon or a power cut left, then listens on POOL/sock until Ctrl-C or
SIGTERM; then it digests all logs and ends. `varve up` runs this and `varve mount` for you.
Settings are in POOL/varve.toml, section [daemon]."
)]
pub struct ServeArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Give metrics out over HTTP at this address (see `varve metrics --help`)
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<std::net::SocketAddr>,
    /// End when the process that started this one ends.
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// Arguments of `mount`.
#[derive(Debug, Args)]
#[command(
    after_help = "Needs a running daemon (`varve serve` or `varve up`); a pool may be mounted several times at once.
Root mounts directly; other users need fusermount3 (Debian: apt-get install fuse3).

Options (-o, separated by commas; the last of those that contradict each other counts):
  ro, rw                            no changes through this mount, or changes
  sync, async                       as --sync-always, or not
  allow_other, noallow_other        other users may use the mount, or may not
  nosuid, nodev, noexec             as mount(8)
  noatime, relatime, strictatime    when reads move the time of the last read: never; when it is not newer than the last
                                    change, or a day old (the default); always, for which reads pass the kernel's page cache
  lazytime, nodiratime              accepted; times of last reads are kept in memory until the last close in any case, and
                                    those of directories do not move
  uring, nouring                    take requests by io_uring where the kernel offers it (the default; `varve doctor` says how
                                    to switch it on), or from /dev/fuse always
The default of the times is `atime` in the section [daemon] of POOL/varve.toml. Programs under
`varve run` go by the mount's. For /etc/fstab see mount.varve(8): docs/reference/mount.varve.8."
)]
pub struct MountArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Directory to mount on
    pub mountpoint: PathBuf,
    /// Let other users use the mount
    #[arg(long)]
    pub allow_other: bool,
    /// Refuse changes through this mount
    #[arg(long)]
    pub read_only: bool,
    /// Make each write durable against power loss before it returns
    #[arg(long)]
    pub sync_always: bool,
    /// Options of the mount; see below
    #[arg(short, long = "options", value_name = "OPTIONS", value_parser = crate::mount_options::parse)]
    pub options: Option<MountOptions>,
    /// Leaves it to the kernel to refuse changes, so that `mount -o remount,rw` can allow them.
    #[arg(long, hide = true)]
    pub remountable: bool,
    /// End when the process that started this one ends.
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// Arguments of `umount`.
#[derive(Debug, Args)]
pub struct UmountArgs {
    /// Where it is mounted
    pub mountpoint: PathBuf,
    /// Detach it even if programs use it or its server is gone
    #[arg(long)]
    pub force: bool,
}

/// A pool and how to print.
#[derive(Debug, Args)]
pub struct PoolJsonArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sync`.
#[derive(Debug, Args)]
#[command(
    after_help = "What syncfs(2) promises, for all programs at once: what returned before this command began,
through any mount of the pool, under `varve run` or linked, is durable when it ends with 0. The
kernel does not tell a FUSE file system of syncfs(2), so `sync` and `sync -f` on the mount make
nothing durable beyond what the mount does by itself within a second; use this command, fsync of
the file, or --sync-always. It waits for the digest of all logs, and for a client that stopped in
the middle of a call up to wait_ms (30 s), after which it fails. On a pool in memory (--nvm shm:…)
nothing survives power-off."
)]
pub struct SyncArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Print what was done as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `clone`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve clone ./pool/mnt/db.img ./pool/mnt/before-upgrade.img
  varve clone --force ./pool/mnt/base.img ./pool/mnt/vm/

The new file takes no space but for its map, and takes its own blocks where one of the two is
written later. It appears under its name when it is whole, with the permission bits of the source;
owner and times are those of a new file. Programs do the same: `varve run -- cp --reflink=always
SRC DST`. Through the mount, `cp` shares blocks of files of 1 MiB and more, as the kernel passes
on copy_file_range alone.")]
pub struct CloneArgs {
    /// The file to clone: a path in a mount of the pool
    pub source: PathBuf,
    /// The new file, or a directory for it, in a mount of the same pool
    pub target: PathBuf,
    /// Replace an existing file
    #[arg(short, long)]
    pub force: bool,
    /// Print what was done as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `top`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve top ./pool                      until q
  varve top ./pool --once               two looks a second apart, as text
  varve top ./pool --json | jq .rates   the same as JSON: status (as `status --json`), programs by pid, rates

`full` is the share of a session's log that waits to be digested (… while it is being digested);
`asked` counts leases that the session was asked to give back and has not; `waits` its requests
that wait for others. Lines under the table say for which inode, since when, and who has it (`find
DIR -inum N` names it).")]
pub struct TopArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Print one screen and end (also when standard output is no terminal)
    #[arg(long)]
    pub once: bool,
    /// Print it as JSON, and end
    #[arg(long)]
    pub json: bool,
    /// Seconds between looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,
}

/// Parses an interval between refreshes: at least 50 ms, so that it is not a busy loop, and at most an hour.
fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0.05 to 3600".into()),
    }
}

/// Arguments of `metrics`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve metrics ./pool                                 once, on standard output
  varve metrics ./pool --listen 127.0.0.1:9185         for Prometheus, at http://127.0.0.1:9185/metrics
  varve serve ./pool --metrics 127.0.0.1:9185          the same from within the daemon (also `up --metrics`)

The numbers are those of `status --json`; docs/reference/metrics.md lists them. A listener of its
own goes on when the daemon is away and then says varve_up 0. There is no password: choose an
address that only your monitoring reaches.")]
pub struct MetricsArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Give them out over HTTP at this address until Ctrl-C
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<std::net::SocketAddr>,
}

/// Arguments of `fsck`.
#[derive(Debug, Args)]
#[command(
    after_help = "Without --repair nothing is written. A pool that is being served is checked by its daemon (between
two transactions); a stopped one is checked in full, data on NVM included (reads compare only what
`verify_nvm_reads` says; `varve scrub` verifies all data). Repair needs a stopped pool. What
cannot be had back is named with its path and bytes: damaged data on NVM goes to a slower tier,
where reads of it fail; inodes without a name come to /lost+found. Cut off at any point, a repair
can be started again. Exit codes, as fsck(8):
  0  clean
  1  damage was mended
  4  damage is left (always without --repair)
  8  it could not be checked or mended; the message on standard error says what to do"
)]
pub struct FsckArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Mend what can be mended, and say what was done and what was lost
    #[arg(long, conflicts_with = "dry_run")]
    pub repair: bool,
    /// Show what --repair would do, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Go on with a device that seems to be another pool's: what cannot be found on it is given up
    #[arg(long)]
    pub any_device: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `debug`.
#[derive(Debug, Args)]
#[command(
    after_help = "The pool must be stopped (`varve down DIR`), but for `session`, which asks its daemon; nothing is
changed. What the journal holds beyond the last checkpoint is shown as if it were in place."
)]
pub struct DebugArgs {
    /// The structure to print.
    #[command(subcommand)]
    pub what: DebugWhat,
}

/// Structures that `debug` prints.
#[derive(Debug, Subcommand)]
pub enum DebugWhat {
    /// The superblock
    Super {
        /// The pool
        pool: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// The entries of the logs that are not digested yet
    Log {
        /// The pool
        pool: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// A session of a running pool: its log, its leases, what it waits for and who waits for it
    Session {
        /// The pool
        pool: PathBuf,
        /// Number of the session (see `varve status`)
        id: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// The image of an inode
    Inode {
        /// The pool
        pool: PathBuf,
        /// Inode number (see `ls -i`)
        ino: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// The entries of a directory
    Dir {
        /// The pool
        pool: PathBuf,
        /// Inode number
        ino: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// The extents of a file
    Tree {
        /// The pool
        pool: PathBuf,
        /// Inode number
        ino: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(
    after_help = "Looks at io_uring, NVMe nodes and controllers, drivers for user space (vfio-pci, uio_pci_generic),
the IOMMU, huge pages and rights, and prints for each whether it is there and else the commands
that mend it. Changes nothing. It needs no pool and no root, but sees less without.

Exit codes:
  0  nothing is missing for the devices of this machine
  1  something is missing; pools of files and of `uring:` devices work all the same"
)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(
    after_help = "One thread, 4 KiB calls, through LibFS (no kernel) and through the file system that the pool's
directory lies on. A LibFS write survives the end of any program when it returns; the host's does
not need to until fdatasync, so both are shown. It takes some seconds and works in a directory of
its own, which it removes. For real numbers: `cargo bench`."
)]
pub struct BenchArgs {
    /// The pool: its directory (its daemon must run)
    pub pool: PathBuf,
    /// Megabytes of the test file
    #[arg(long, default_value_t = 64)]
    pub mib: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve run -- sqlite3 ./pool/mnt/db.sqlite 'select count(*) from t'
  varve run --stats --mount ./pool/mnt -- tar -C ./pool/mnt -xf linux.tar
  varve run --mount ./a/mnt --mount ./b/mnt -- cp -a ./a/mnt/dir ./b/mnt

Unmodified, dynamically linked programs of x86-64; what they start is served too. Paths under a
mount go to LibFS in the program's process, all others to the kernel. Several pools are served at
once, each path by the pool whose mount it leads to; between two of them files are copied, not
renamed or linked (EXDEV), as between any two file systems. Whatever is not served (static
programs, raw system calls, io_uring) works through the mount. docs/guide/run.md lists the calls.
The exit code is the program's; 128 + N if signal N ended it.")]
pub struct RunArgs {
    /// Print at the end, on standard error, a line for each reason why calls were left to the mount, and as
    /// JSON how many calls were served in-process and how many fell back, by name
    #[arg(long)]
    pub stats: bool,
    /// A mount whose files are served; may be said several times. Without --mount and --pool: the mounts of
    /// all pools that run and are open to this user
    #[arg(long, value_name = "DIR")]
    pub mount: Vec<PathBuf>,
    /// A pool whose mounts are served; may be said several times
    #[arg(long, value_name = "DIR")]
    pub pool: Vec<PathBuf>,
    /// Calls on files which a process makes through the mount, without making a child in between, before it
    /// opens a session of its own; four calls by descriptor count as one. The first open of a directory or of
    /// a large file opens one at once. 0: every call is served
    #[arg(long, value_name = "CALLS", default_value_t = 16)]
    pub session_after: u32,
    /// Program and arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<std::ffi::OsString>,
}

/// Arguments of `vm`.
#[derive(Debug, Args)]
pub struct VmArgs {
    /// The command.
    #[command(subcommand)]
    pub command: varve_vm_manager::cli::VmCommand,
}

/// Arguments of `cache`.
#[derive(Debug, Args)]
pub struct CacheArgs {
    /// The command.
    #[command(subcommand)]
    pub command: crate::cache::args::CacheCommand,
}

/// Arguments of `dedup`.
#[derive(Debug, Args)]
#[command(after_help = "Nothing here changes what it reads. docs/guide/dedup.md has a session.")]
pub struct DedupArgs {
    /// The command.
    #[command(subcommand)]
    pub command: DedupSub,
}

/// The commands of `dedup`.
#[derive(Debug, clap::Subcommand)]
pub enum DedupSub {
    /// Those that need no pool.
    #[command(flatten)]
    Anywhere(crate::dedup::args::DedupCommand),
    /// Those for files of a running pool.
    #[command(flatten)]
    InPool(crate::dedup::args::PoolCommand),
    /// Those for the place of what such files share.
    #[command(flatten)]
    Placed(crate::dedup::args::PlaceCommand),
}
