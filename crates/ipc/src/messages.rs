//! Messages between LibFS and KernelFS. Plain values; encoding and transport are elsewhere.
//!
//! The daemon trusts nothing in a [`Request`]. The client trusts the daemon.

use serde::{Deserialize, Serialize};
use varve_format::{
    BlockNo, FileBlock, FileKind, HashKey, Ino, InodeAttr, InodeKey, LastForwarded, LeaseNo, LogSeq, Pin,
    Seal, SessionId, Tier, TxId,
};

/// Version of this protocol; it must be equal on both sides.
pub const PROTOCOL_VERSION: u32 = 26;

/// Most processes in [`Owned::users`].
pub const USERS_MAX: usize = 16;
/// Most ranges of one [`Request::SyncLog`].
pub const SYNC_RANGES_MAX: usize = 1024;
/// Most wants in one request.
pub const ITEMS_MAX: usize = 64;
/// Most leases given back in one request.
pub const RELEASED_MAX: usize = 256;

/// Most numbers for new inodes in one request.
pub const NUMBERS_MAX: u16 = 4096;
/// Most runs in one [`Request::NoteReads`].
pub const READS_MAX: usize = 256;

/// Most blocks of one of them; what is larger is left out.
pub const READ_BLOCKS_MAX: u32 = 1 << 10;
/// Window, in blocks, in which the sessions of ordinary users get the map of a file; windows start at
/// multiples of it.
pub const WINDOW_BLOCKS: u64 = 64;
/// Most neighbours of one request, of each kind.
pub const NEAR_MAX: u16 = 128;
/// Most names, or extents, that are told of one inode with a lease on it.
pub const TOLD_MAX: usize = 64;
/// Most files of one [`Request::MapFiles`].
pub const MAPPED_FILES_MAX: usize = 32;
/// Most ranges of one [`DedupeOp`].
pub const DEDUPE_RANGES_MAX: usize = 512;
/// Most checksums in one message.
pub const SUMS_MAX: u32 = 1 << 16;
/// Most blocks of one [`Request::ReadChecksums`]: 16 MiB are read for it.
pub const READ_SUMS_MAX: u32 = 4096;
/// Most bytes of file data in one message.
pub const DATA_MAX: usize = 1 << 20;
/// Most inodes named in one [`Watched`]; where there are more, all are watched.
pub const WATCHED_MAX: usize = 4096;
/// Most inodes that a resuming client can name as held open in one [`Hello`]; more follow in
/// [`Request::Hold`].
pub const HELD_MAX: usize = 4096;

/// Credentials of the caller of a file-system call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cred {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Cred {
    /// The superuser.
    #[must_use]
    pub const fn root() -> Self {
        Self {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        }
    }

    /// Whether `gid` is the group or one of the supplementary groups.
    #[must_use]
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// Kind of client that a session serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientKind {
    /// The FUSE shim: the kernel caches on its behalf.
    Shim,
    /// A program linked with LibFS (or preloaded).
    Linked,
}

/// First message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`].
    pub version: u32,
    /// Kind of client.
    pub kind: ClientKind,
    /// No log is wanted: this session only reads.
    pub read_only: bool,
    /// Token of the session that this one continues, if any.
    pub resume: Option<u128>,
    /// Inodes that the client holds open (when it resumes).
    pub held: Vec<InodeKey>,
}

/// Answer of the daemon to [`Hello`]; descriptors travel beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The new session.
    pub session: SessionId,
    /// Secret to show in [`Hello::resume`] to continue after a seal.
    pub token: u128,
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// The root directory.
    pub root: InodeAttr,
    /// The session may act for other credentials (root or the pool's owner), and reads data directly.
    pub privileged: bool,
    /// Credentials that the session acts for if it is not privileged, as far as the daemon could see them. An
    /// operation that needs other credentials, or further groups, must not be logged: it would be refused
    /// later.
    pub acts_for: Option<Cred>,
    /// No log, no changes: the client asked for it, or the pool is latched read-only.
    pub read_only: bool,
    /// The reason why the pool is latched, if it is.
    pub latched: Option<String>,
    /// Other sessions exist: see [`Upcall::Sharing`].
    pub shared: bool,
    /// Initial length of the log, in bytes.
    pub log_bytes: u64,
    /// Most bytes that the log may grow to.
    pub log_max_bytes: u64,
    /// Bytes of the region from which data is read directly: the NVM for a privileged session, its user's
    /// segments for any other.
    pub nvm_bytes: u64,
    /// Offset of the checksums of that region's blocks, in bytes, if reads are to be compared with them. Laid
    /// out as NVM's checksum table in a pool's format.
    pub nvm_sums: Option<u64>,
    /// A block is compared only when it is first read since the daemon started.
    pub nvm_sums_once: bool,
    /// The pool's NVM is to be slowed down to a model: the client does so for its mapping.
    pub nvm_emulated: bool,
    /// The descriptors that are persistent memory.
    pub dax: DaxMaps,
    /// Time limit for giving back a recalled lease, in milliseconds.
    pub lease_ms: u64,
    /// Bound on every wait, in milliseconds.
    pub wait_ms: u64,
    /// Share of the log at which the client requests a digest, in percent.
    pub digest_percent: u8,
    /// Read-ahead on SSD and HDD, in bytes.
    pub read_ahead_bytes: u64,
    /// Interval of the log's background sync, in milliseconds; 0: none is needed.
    pub sync_ms: u64,
    /// The log must be written back to survive power cuts: with [`Request::SyncLog`], and after the first of
    /// those by the client to the backing file if it received one.
    pub needs_sync: bool,
    /// Seal of the session that this one continues.
    pub seal: Option<Seal>,
    /// Last [`Request::Forward`] of the old session that was carried out. If the inode that it created is
    /// open, it is held open for the new session.
    pub last_forwarded: LastForwarded,
    /// Most leases that one session should keep.
    pub leases_max: u32,
    /// Key that orders the names of directories, so that the session can list a directory whose names it all
    /// knows. Only for privileged sessions, which could read it from the pool: without the key, a user cannot
    /// construct names that collide.
    pub name_hash: Option<HashKey>,
    /// Directory in which the client may keep copies of read data after its calls return. Only for privileged
    /// sessions of linked programs.
    pub copies_at: Option<CopiesAt>,
}

/// Which of a session's descriptors are mapped as persistent memory (`MAP_SYNC`): the client then writes the
/// lines that it stores to back itself, and a fence makes them durable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaxMaps {
    /// The NVM region.
    pub nvm: Option<DaxAt>,
    /// The log. Otherwise it is memory.
    pub log: Option<DaxAt>,
}

/// Place of a region in the file or device that a descriptor is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaxAt {
    /// First byte; 0 for a file.
    pub off: u64,
    /// Bytes that a mapping of a device can be cut into; 4 KiB for a file.
    pub align_bytes: u64,
    /// A device, whose length the file system does not say; else a file.
    pub is_device: bool,
}

/// A memory file in which a process keeps copies of files' pages, for its maps. The client makes it, with the
/// owner of its directory. The daemon empties it whenever a session of the process ends, before any other
/// session is given its leases, and removes it when the process is gone: a stopped process thus keeps no
/// copies that others may have changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiesAt {
    /// Its directory's path.
    pub dir: Vec<u8>,
    /// Device and inode of that directory. If the client's path leads to a different directory (in another
    /// mount namespace, say), no daemon empties files there.
    pub dir_is: (u64, u64),
    /// Name of the file in it.
    pub name: String,
}

/// Rights of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LeaseMode {
    /// Shared: cache and read.
    Read,
    /// Exclusive: log changes.
    Write,
}

/// One lease requested by [`Request::Acquire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Inode.
    pub key: InodeKey,
    /// Mode.
    pub mode: LeaseMode,
}

/// Inodes that a client is likely to need next: those that it has listed, and those with the next numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Near {
    /// Listed inodes; at most [`NEAR_MAX`].
    pub these: Vec<InodeKey>,
    /// The number before the first of the next numbers.
    pub after: Ino,
    /// How many of the next numbers; at most [`NEAR_MAX`].
    pub count: u16,
    /// Mode.
    pub mode: LeaseMode,
    /// What to tell with the leases, of the wants too.
    pub tell: Tell,
}

/// Contents that a client is likely to ask for once it has the leases. The daemon tells them of small inodes,
/// as far as an answer has room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tell {
    /// Names in directories, as [`Request::ReadDir`].
    pub names: bool,
    /// Places of the blocks of files, as [`Request::MapExtents`].
    pub extents: bool,
}

/// What is told of an inode with a lease on it, as digested. For a client that held no lease on it: the view
/// of another one is newer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Told {
    /// It has no extended attributes.
    pub bare: bool,
    /// All names, in the order of their cookies.
    pub names: Option<Vec<DirEntry>>,
    /// All extents. They count unless a [`Upcall::Barrier`] came since the request was sent.
    pub extents: Option<Vec<MappedExtent>>,
}

/// A granted lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Number of this grant.
    pub lease: LeaseNo,
    /// Mode (may be more than was requested, if the session had more).
    pub mode: LeaseMode,
    /// The session's read lease that this one replaces: no other session had the inode in between.
    pub replaces: Option<LeaseNo>,
    /// Attributes as digested. If the session already holds a write lease, its own view is newer.
    pub attr: InodeAttr,
    /// What else is told of it.
    pub told: Told,
}

/// A lease given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseItem {
    /// Inode.
    pub key: InodeKey,
    /// The grant; any other than the current one is ignored.
    pub lease: LeaseNo,
    /// Keeps a read lease.
    pub downgrade: bool,
    /// Highest sequence number logged for it (0: none), to be digested before the lease passes on.
    pub last_seq: LogSeq,
    /// Whether the client still has the inode open (it stays held).
    pub open: bool,
    /// Number of changes logged under it; [`u32::MAX`]: they were not counted. Distinguishes leases that are
    /// worth their transfer from those that only alternate between sessions.
    pub changes: u32,
    /// For how many milliseconds the kernel above a mount may still use what it was told under the lease, at
    /// most [`DENTRY_TTL_MAX`](crate::DENTRY_TTL_MAX): until then no other session may change the inode.
    pub cached_ms: u32,
}

/// A directory entry with its attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    /// Name.
    pub name: Vec<u8>,
    /// Inode.
    pub key: InodeKey,
    /// Kind.
    pub kind: FileKind,
    /// Cookie of the position after this entry.
    pub next_cookie: u64,
}

/// A mapped run of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedExtent {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks.
    pub len: u32,
    /// Medium. In an unprivileged session NVM stands for its user's segments; blocks that are not there have
    /// another medium, and are read by message.
    pub tier: Tier,
    /// First block on it.
    pub block: BlockNo,
    /// Allocated but never written: reads as zeros.
    pub unwritten: bool,
    /// First number of the blocks in the shared space; a number stands for equal bytes as long as the pool
    /// exists. `None`: the blocks are not shared, or the session may not know.
    pub number: Option<u64>,
}

/// Blocks of a file that are in a shared run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumberedBlocks {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks.
    pub blocks: u32,
    /// First number in the shared space, as [`MappedExtent::number`].
    pub number: u64,
}

/// A part of a file whose blocks have equally many owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedBlocks {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks.
    pub blocks: u32,
    /// First number of the blocks; extents that share them have equal numbers. `None`: they lie in no shared
    /// run. Numbers are never used twice, and change when a file shares anew.
    pub number: Option<u64>,
    /// Extents that name the blocks, those of this file included. In an unprivileged session 2 stands for any
    /// number above 1.
    pub owners: u32,
    /// Medium of the blocks.
    pub tier: Tier,
    /// The first of them there.
    pub block: BlockNo,
}

/// Answer to [`Request::Owners`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Owned {
    /// Parts in order; holes are left out.
    pub parts: Vec<OwnedBlocks>,
    /// There are none beyond.
    pub complete: bool,
    /// Processes of other linked sessions that have the file open or have a lease on it, at most
    /// [`USERS_MAX`]; 0: another user's.
    pub users: Vec<u32>,
}

/// A part of a tier's bytes that a session reads by a descriptor of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePart {
    /// Number of the device in its tier, below 64.
    pub index: u8,
    /// Its first byte in the tier.
    pub first_byte: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Offset of its first byte in the descriptor's file.
    pub data_offset: u64,
    /// Reads are to be slowed down to the model of an SSD.
    pub emulated: bool,
}

/// Blocks of a file that a session has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadRun {
    /// File.
    pub key: InodeKey,
    /// First block.
    pub from: FileBlock,
    /// Blocks.
    pub blocks: u32,
}

/// Checksums of successive blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SummedBlocks {
    /// First block in the file.
    pub file_block: FileBlock,
    /// First number of the blocks in the shared space, as [`OwnedBlocks::number`]: equal numbers are equal
    /// blocks, shared already.
    pub number: Option<u64>,
    /// CRC-32C of each block. Behind the file's end a block has zeros.
    pub sums: Vec<u32>,
}

/// Answer to [`Request::Checksums`] and [`Request::ReadChecksums`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Summed {
    /// Parts in order. Holes, and blocks that were allocated but never written, are left out: they are zeros.
    pub parts: Vec<SummedBlocks>,
    /// The block to go on from; `None`: there are no more.
    pub next: Option<FileBlock>,
}

/// An operation done by the daemon for a client. `entry` is an encoded log entry (header and payload,
/// unsigned, seq 0); the daemon checks names, permissions (with `cred`) and limits itself.
///
/// A rename of inode number 0, with no target to be replaced, is *by name*: the daemon finds the inode of the
/// name. Used only in contended directories, whose names no client knows; EAGAIN: the rename must be done
/// under leases, or there is a target to be replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardedOp {
    /// 64 header bytes and the payload.
    #[serde(with = "crate::blob")]
    pub entry: Vec<u8>,
    /// A write goes to the end of the file, wherever that is.
    pub append: bool,
    /// A creation: the session holds the new inode open from the moment on that others can find it, as after
    /// [`Request::Hold`].
    pub open: bool,
    /// A rename that leaves a whiteout at the old name, in one record.
    pub whiteout: bool,
    /// Credentials that the operation is checked against.
    pub cred: Cred,
    /// Sequence number of the forwarded operation in its session.
    pub number: u64,
}

/// Two ranges of files that are to share blocks where their bytes are the same; offsets and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DedupeRange {
    /// File that has the blocks.
    pub source: InodeKey,
    /// First byte in it, a multiple of the block size.
    pub source_offset: u64,
    /// File that shares them.
    pub target: InodeKey,
    /// First byte in it, a multiple of the block size.
    pub target_offset: u64,
    /// Length: a multiple of the block size, or up to the end of both files.
    pub len: u64,
}

/// Many ranges that are compared and shared under one set of leases, several in a transaction. It may be sent
/// again: what is shared already is left as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DedupeOp {
    /// At most [`DEDUPE_RANGES_MAX`], of [`ITEMS_MAX`] files, and 16 MiB together.
    pub ranges: Vec<DedupeRange>,
    /// Neither compares nor shares: what is not shared yet is told as if it was.
    pub dry_run: bool,
    /// Credentials that the operation is checked against.
    pub cred: Cred,
}

/// What became of a [`DedupeRange`], in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Deduped {
    /// Shared now, durably.
    pub shared_bytes: u64,
    /// Of these, bytes of blocks that only the target had, and which are free now.
    pub freed_bytes: u64,
    /// Shared before, or holes.
    pub already_bytes: u64,
    /// In parts that are not the same.
    pub differing_bytes: u64,
    /// Why the rest was not shared; 0: there is none.
    pub errno: i32,
}

/// Answer to [`Request::Forward`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ForwardedResult {
    /// Attributes of the inode after the operation.
    pub attr: Option<InodeAttr>,
    /// Offset that an append was written at.
    pub offset: u64,
    /// Inode whose name was removed or replaced, if any.
    pub victim: Option<InodeKey>,
    /// Those of the changed inodes that are contended: operations that follow on them soon are to be
    /// forwarded too.
    pub contended: Vec<InodeKey>,
}

/// Inodes that carry marks of `inotify` or `fanotify` in a mount's kernel. The kernel generates events only
/// for changes made through the mount.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Watched {
    /// A whole mount or file system carries a mark, or more inodes than [`WATCHED_MAX`] do.
    pub all: bool,
    /// Inode numbers as `st_ino` shows them, sorted, without repetition.
    pub numbers: Vec<u64>,
}

impl Watched {
    /// Whether nothing is watched.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        !self.all && self.numbers.is_empty()
    }
}

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Opens a session; the first message on a connection, and only the first.
    Hello(Hello),
    /// Confirms [`Upcall::Sharing`]: files are opened as in shared mode from here on, except in calls under
    /// way. The newcomer may begin.
    SharingNoted,
    /// Asks for the inode of `name` in `dir`. Needs a lease on `dir` (any mode).
    Lookup {
        /// Directory.
        dir: InodeKey,
        /// Name.
        name: Vec<u8>,
    },
    /// Attributes of an inode as digested, without a lease.
    GetAttr {
        /// Inode.
        key: InodeKey,
    },
    /// Requests leases, all or nothing. Waits up to `wait_ms`.
    Acquire {
        /// Leases; at most [`ITEMS_MAX`].
        wants: Vec<Want>,
    },
    /// As `Acquire`, with additional leases on neighbours: only on those that no session has or waits for, so
    /// that no lease is recalled for them.
    AcquireNear {
        /// Leases; at most [`ITEMS_MAX`].
        wants: Vec<Want>,
        /// The neighbours.
        near: Near,
    },
    /// Gives leases back, recalled or not.
    Release {
        /// Leases; at most [`RELEASED_MAX`].
        items: Vec<ReleaseItem>,
    },
    /// Reports the last close of inodes whose lease is already gone.
    Drop {
        /// Inodes; at most [`HELD_MAX`].
        keys: Vec<InodeKey>,
    },
    /// More inodes that a resumed client holds open.
    Hold {
        /// Inodes; at most [`HELD_MAX`].
        keys: Vec<InodeKey>,
    },
    /// Requests numbers for new inodes, with exclusive leases on them.
    AllocInodes {
        /// Directory that they will be in.
        near: InodeKey,
        /// How many, 1 to [`NUMBERS_MAX`].
        count: u16,
    },
    /// A page of a directory, as digested. Needs a lease on `dir`; the client has its own changes digested
    /// before.
    ReadDir {
        /// Directory.
        dir: InodeKey,
        /// 0 at first, then [`DirEntry::next_cookie`].
        cookie: u64,
        /// Most entries.
        max: u32,
    },
    /// Target of a symbolic link.
    ReadLink {
        /// Link.
        key: InodeKey,
    },
    /// All extended attributes. Needs a lease.
    Xattrs {
        /// Inode.
        key: InodeKey,
    },
    /// Places of a file's blocks, as digested. Needs a lease.
    MapExtents {
        /// File.
        key: InodeKey,
        /// First block.
        from: FileBlock,
        /// Most extents.
        max: u32,
    },
    /// Places of all blocks of several files, as [`Request::MapExtents`] of each.
    MapFiles {
        /// Files; at most [`MAPPED_FILES_MAX`].
        keys: Vec<InodeKey>,
    },
    /// Owners of a file's blocks, as digested. Needs no lease; who wants what is in logs to count takes one
    /// before. Only for privileged sessions and the file's owner.
    Owners {
        /// File.
        key: InodeKey,
        /// First block.
        from: FileBlock,
        /// Most parts; 0: only whether the file is in use.
        max: u32,
    },
    /// Checksums of a file's blocks, as digested, which the pool keeps anyway: no data is read. Needs no
    /// lease; who wants what is in logs to count takes one before. Only for privileged sessions and the
    /// file's owner: a checksum tells of the bytes.
    Checksums {
        /// File.
        key: InodeKey,
        /// First block.
        from: FileBlock,
        /// Most blocks; the daemon tells at most [`SUMS_MAX`], and fewer of a file that lies in many places.
        max: u32,
    },
    /// As [`Checksums`](Self::Checksums), of the bytes themselves: the daemon reads them, and compares them
    /// as any read does.
    ReadChecksums {
        /// File.
        key: InodeKey,
        /// First block.
        from: FileBlock,
        /// Length of the range in blocks, holes counted; at most [`READ_SUMS_MAX`].
        blocks: u32,
    },
    /// File data as digested, from any tier. Needs a lease.
    ReadData {
        /// File.
        key: InodeKey,
        /// First byte.
        offset: u64,
        /// At most [`DATA_MAX`] bytes.
        len: u32,
    },
    /// Reports which blocks the session has read from a device by itself, for the placement of data. Files on
    /// which it has no lease are left out. Only for privileged sessions.
    NoteReads {
        /// Runs; at most [`READS_MAX`].
        reads: Vec<ReadRun>,
    },
    /// Requests more log space. The first of a session makes its record on media.
    GrowLog {
        /// Requested length in bytes, a multiple of the chunk size; 0: only the record.
        len_bytes: u64,
    },
    /// Makes ranges of the session's log durable against a power cut, and with the first the log's header and
    /// name: for the first sync of a session, and for all of one without a backing file. They are durable
    /// when it is answered.
    SyncLog {
        /// First byte and length of each range, in bytes; at most [`SYNC_RANGES_MAX`].
        ranges: Vec<(u64, u64)>,
    },
    /// Makes the logged operations of all other sessions durable against a power cut, by digesting their
    /// logs. The caller makes its own durable before. Durable when it is answered; an error says that not all
    /// are.
    SyncAll,
    /// Asks for space to be reserved, before any operation that needs it is logged.
    Reserve {
        /// Blocks requested.
        blocks: u32,
        /// Least useful number of blocks; if fewer are available, the request fails.
        least: u32,
    },
    /// Returns unused reserved blocks: no logged operation needs them, and none will. May be sent unasked.
    ReturnReservation {
        /// Number of blocks; if the session has fewer, all are taken.
        blocks: u64,
        /// Blocks granted to the session so far, by the answers that had arrived when the client counted the
        /// unused ones. Fewer than the daemon granted: an answer is under way, and the session is asked
        /// again.
        of: u64,
    },
    /// Digests this session's log.
    Digest {
        /// Last number to digest at least (as far as the log is contiguous).
        upto: LogSeq,
        /// Waits until it is done and durable.
        wait: bool,
    },
    /// An operation by the daemon.
    Forward(ForwardedOp),
    /// Compares ranges of files, and shares the blocks of those that are the same. Rights as for
    /// `FIDEDUPERANGE`; the session has given back its leases on the files.
    Dedupe(DedupeOp),
    /// Confirms a [`Upcall::Barrier`].
    BarrierAck {
        /// Its transaction.
        tx: TxId,
    },
    /// Free and total space.
    StatFs,
    /// Reports which inodes are watched in a mount's kernel, replacing the earlier report. Forgotten when the
    /// session ends. Only for privileged sessions of mounts.
    SetWatched(Watched),
    /// Asks which inodes are watched in the kernels of all mounts.
    Watched,
    /// Reports a fault that the daemon cannot see; shown in its status.
    ClientFault(ClientFault),
    /// Closes the session in order: everything is committed; the log is digested in the background.
    Bye,
    /// For operators.
    Admin(Admin),
}

/// A fault in the client's own process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientFault {
    /// The session's log could not be written, lengthened or made durable.
    LogFailed {
        /// The host's errno; 0: not known.
        errno: i32,
    },
    /// A block of NVM that the session reads directly does not have its checksum.
    NvmDamaged {
        /// The block.
        block: BlockNo,
    },
    /// Making the log durable took long.
    LogSlow {
        /// Duration, in milliseconds.
        ms: u32,
    },
}

/// An operator's request; answered in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admin {
    /// State and counters.
    Status,
    /// Digests all logs.
    DigestAll,
    /// Makes the logged operations of all sessions durable: see [`Request::SyncAll`].
    Sync,
    /// Checks the structures of the running pool.
    Fsck,
    /// Verifies all data against its checksums.
    Scrub,
    /// Ends the daemon after a last digest.
    Shutdown,
    /// One session: its leases, and which sessions wait for each other. `ENOENT` if it does not exist.
    Session(u64),
    /// Sets the pin of inodes, at most [`PINS_MAX`]. Those that a command has pinned keep it, unless
    /// `over_own`; those that have another name by now are left to the directory where they are. `ENXIO` if
    /// the pool has no such tier.
    Pin {
        /// Inodes; of a directory, for what is made in it from now on.
        inodes: Vec<Pinned>,
        /// Pin.
        pin: Pin,
        /// Replaces pins of their own.
        over_own: bool,
    },
    /// Applies the placement rules of the pool's configuration to all files now.
    ApplyRules,
    /// Where the data of inodes, at most [`PINS_MAX`], is: of each from a block on. An answer has only so
    /// many extents.
    Placed {
        /// Inodes, and blocks.
        inodes: Vec<(InodeKey, FileBlock)>,
    },
    /// Sets the tier on which what files, at most [`PINS_MAX`], share with others is wanted. Those that have
    /// another name by now are left alone. `ENXIO` if the pool has no such tier.
    PlaceShared {
        /// Regular files.
        files: Vec<Pinned>,
        /// Tier; `None`: the wish ends.
        to: Option<Tier>,
    },
    /// The jobs of operators.
    Jobs,
    /// Moves all data off a tier, and keeps new data away from it until the job is cancelled. `EINVAL` for
    /// NVM, `ENXIO` if the pool has no such tier, `EEXIST` if that is so already.
    Evacuate {
        /// Tier.
        tier: Tier,
        /// Although the other tiers do not take all that is on it.
        partly: bool,
    },
    /// Changes a job. `ENOENT` if there is none of this number.
    Job {
        /// Number.
        id: u64,
        /// What becomes of it.
        act: JobAct,
    },
    /// Adds a device to a tier. `ENOSYS` where the pool has no settings.
    AddDevice {
        /// Tier.
        tier: Tier,
        /// Path or address, or the size of a file in the pool.
        device: String,
    },
    /// Takes a device out of its tier, after its data has moved to others.
    RemoveDevice {
        /// Path, end of a path, or UUID.
        device: String,
        /// What becomes of it.
        act: RemovalAct,
    },
}

/// What becomes of a device that is taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemovalAct {
    /// It is emptied, and taken out then.
    Begin {
        /// Although the others do not take all that is on it.
        partly: bool,
    },
    /// It stays, and takes new data again.
    Cancel,
}

/// What becomes of a job of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobAct {
    /// It moves nothing until it is resumed; new data still goes elsewhere.
    Pause,
    /// It goes on, and tries again what it could not move.
    Resume,
    /// It ends: what was moved stays where it is, and the tier takes new data again.
    Cancel,
    /// Most bytes moved a second, at least 1; `None`: as fast as other moves.
    Limit(Option<u64>),
}

/// An inode that is to be pinned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// Inode.
    pub key: InodeKey,
    /// Directory and name by which it was found; `None` for the pool's root.
    pub name: Option<(InodeKey, Vec<u8>)>,
}

/// Most inodes of one [`Admin::Pin`], [`Admin::Placed`] or [`Admin::PlaceShared`].
pub const PINS_MAX: usize = 1024;

/// Free and total space in blocks, as `statvfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatFs {
    /// Blocks in all tiers.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks that may be written: including the reservations of other sessions, without those of the
    /// asking session, which knows its own unused part.
    pub blocks_available: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
}

/// An answer of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    /// To [`Request::Hello`].
    Welcome(Box<Welcome>),
    /// Done.
    Done,
    /// To [`Request::Lookup`]: the inode of the name, if any.
    Entry(Option<InodeAttr>),
    /// To [`Request::GetAttr`].
    Attr(InodeAttr),
    /// To [`Request::Acquire`] and [`Request::AcquireNear`], in the order of the wants; then neighbours.
    Granted(Vec<Grant>),
    /// To [`Request::AllocInodes`]: keys and their leases.
    Inodes(Vec<(InodeKey, LeaseNo)>),
    /// To [`Request::ReadDir`]; the flag says that there are none beyond.
    Entries(Vec<DirEntry>, bool),
    /// To [`Request::ReadLink`] and [`Request::ReadData`] (short at the end of the file).
    Bytes(#[serde(with = "crate::blob")] Vec<u8>),
    /// To [`Request::ReadData`], if some of the blocks are shared and the session may know their numbers: the
    /// numbers of the blocks from which the bytes were read, in order.
    Numbered(#[serde(with = "crate::blob")] Vec<u8>, Vec<NumberedBlocks>),
    /// To [`Request::Xattrs`]: names and values.
    Xattrs(Vec<(Vec<u8>, Vec<u8>)>),
    /// To [`Request::MapExtents`]: runs in order, holes left out; the flag says that the file has none
    /// beyond.
    Extents(Vec<MappedExtent>, bool),
    /// To [`Request::MapFiles`], in order: all runs of each file; `None` for one that is not to be had by
    /// this request, because it has [`TOLD_MAX`] or more, or no lease, or cannot be read.
    Mapped(Vec<Option<Vec<MappedExtent>>>),
    /// To [`Request::Owners`].
    Owned(Owned),
    /// To [`Request::Checksums`] and [`Request::ReadChecksums`].
    Summed(Summed),
    /// To [`Request::GrowLog`]: the new length in bytes.
    LogBytes(u64),
    /// To [`Request::Reserve`]: blocks granted.
    Reserved(u32),
    /// To [`Request::Digest`]: digested up to here.
    Digested(LogSeq),
    /// To [`Request::Forward`].
    Forwarded(ForwardedResult),
    /// To [`Request::Dedupe`]: of each range, in order.
    Deduped(Vec<Deduped>),
    /// To [`Request::Watched`]: the value of [`SessionPage::watched`](crate::SessionPage::watched) for this
    /// state, and the inodes.
    Watched(u64, Watched),
    /// To [`Request::StatFs`].
    StatFs(StatFs),
    /// To [`Request::Admin`].
    Json(String),
}

/// A message from the daemon that a client must act on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Upcall {
    /// Give a lease back with [`Request::Release`] within `lease_ms`.
    Revoke {
        /// Inode.
        key: InodeKey,
        /// The grant to give back.
        lease: LeaseNo,
        /// The mode that may be kept.
        keep: Option<LeaseMode>,
    },
    /// Forget the cached extents of these files, then send [`Request::BarrierAck`] (within `lease_ms`).
    Barrier {
        /// Transaction whose freed blocks wait for this.
        tx: TxId,
        /// Files whose blocks moved or were replaced.
        keys: Vec<InodeKey>,
    },
    /// Other sessions come (sent to mounts, once until [`Upcall::Exclusive`]): open files for writing past
    /// the kernel's page cache, send [`Request::SharingNoted`].
    Sharing,
    /// Space is short: return unused reserved blocks with [`Request::ReturnReservation`] within `lease_ms`,
    /// even if there are none.
    ReclaimReservations,
    /// The session is alone again: open files through the kernel's page cache.
    Exclusive,
    /// The session is sealed: resume.
    Sealed,
}

/// Reason why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum IpcError {
    /// The daemon refused with an errno.
    #[error("refused with errno {0}")]
    Errno(i32),
    /// The session is over; resume.
    #[error("the session was sealed")]
    Sealed,
    /// The inode is contended: send the operation as [`Request::Forward`].
    #[error("contended: to be forwarded")]
    Forward,
    /// The daemon is not reachable.
    #[error("the daemon is away: {0}")]
    Gone(String),
    /// The other side does not speak this protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
}

/// The client's end of a session: the *message* seam.
pub trait Link: Send + Sync {
    /// Sends a request and waits for the answer. Several threads may call at once.
    ///
    /// # Errors
    /// An [`IpcError`]; `Gone` if the daemon died or closed the connection (then every later call fails too).
    fn call(&self, request: Request) -> Result<Response, IpcError>;

    /// Returns the next upcall, or `None` after `timeout`. One thread waits at a time.
    ///
    /// # Errors
    /// `Gone` when the connection is over.
    fn upcall(&self, timeout: std::time::Duration) -> Result<Option<Upcall>, IpcError>;

    /// Ends the session: releases the link's resources, here and in the daemon, even while references to it
    /// exist.
    fn close(&self) {}
}
