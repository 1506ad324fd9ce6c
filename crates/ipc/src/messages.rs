//! What LibFS and KernelFS say to each other. Plain values; encoding and transport are elsewhere.
//!
//! The daemon trusts nothing in a [`Request`]. The client trusts the daemon.

use serde::{Deserialize, Serialize};
use varve_format::{
    BlockNo, FileBlock, FileKind, HashKey, Ino, InodeAttr, InodeKey, LastForwarded, LeaseNo, LogSeq, Seal,
    SessionId, Tier, TxId,
};

/// Version of this protocol; both sides must have the same.
pub const PROTOCOL_VERSION: u32 = 15;

/// Most ranges of one [`Request::SyncLog`].
pub const SYNC_RANGES_MAX: usize = 1024;
/// Most wants in one request.
pub const ITEMS_MAX: usize = 64;
/// Most leases given back in one request.
pub const RELEASED_MAX: usize = 256;

/// Most numbers for new inodes in one request.
pub const NUMBERS_MAX: u16 = 4096;
/// Ordinary users' sessions are told a file's map in windows of so many blocks, from multiples of it on.
pub const WINDOW_BLOCKS: u64 = 64;
/// Most neighbours of one request, of each kind.
pub const NEAR_MAX: u16 = 128;
/// Most bytes of file data in one message.
pub const DATA_MAX: usize = 1 << 20;
/// Most inodes of one [`Watched`] that are named; where there are more, all are watched.
pub const WATCHED_MAX: usize = 4096;
/// Most inodes that a resuming client can name as held open in one [`Hello`]; more follow in
/// [`Request::Hold`].
pub const HELD_MAX: usize = 4096;

/// Who asks: the caller of a file-system call.
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

/// What kind of client a session serves.
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
    /// Wants no log: this session only reads.
    pub read_only: bool,
    /// Token of the session that this one continues, if any.
    pub resume: Option<u128>,
    /// Inodes that the client holds open (when it resumes).
    pub held: Vec<InodeKey>,
}

/// What the daemon answers to [`Hello`]; descriptors travel beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The new session.
    pub session: SessionId,
    /// Shown in [`Hello::resume`] to continue after a seal.
    pub token: u128,
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// The root directory.
    pub root: InodeAttr,
    /// May act for other credentials (root or the pool's owner), and reads data directly.
    pub privileged: bool,
    /// Whom the session acts for if it is not privileged, as far as the daemon could see. What anybody else
    /// might do, or a member of further groups, is not to be logged: it would be refused later.
    pub acts_for: Option<Cred>,
    /// No log, no changes: the client asked so, or the pool is latched read-only.
    pub read_only: bool,
    /// Why the pool is latched, if it is.
    pub latched: Option<String>,
    /// Another session is there: a shim starts with zero time-outs.
    pub shared: bool,
    /// Bytes of the log at first.
    pub log_bytes: u64,
    /// Most bytes the log may grow to.
    pub log_max_bytes: u64,
    /// Bytes of the region from which data is read directly: the NVM for a privileged session, its user's
    /// segments for another.
    pub nvm_bytes: u64,
    /// Where the checksums of that region's blocks begin, in bytes, if reads are to be compared with them.
    /// Laid out as NVM's checksum table in a pool's format.
    pub nvm_sums: Option<u64>,
    /// A block is compared when it is first read since the daemon started, and not again.
    pub nvm_sums_once: bool,
    /// The pool's NVM is to be slowed down to a model: the client does so with what it maps.
    pub nvm_emulated: bool,
    /// Time to give a lease back, in milliseconds.
    pub lease_ms: u64,
    /// Bound on every wait, in milliseconds.
    pub wait_ms: u64,
    /// Digest is asked for at this share of the log, in percent.
    pub digest_percent: u8,
    /// Read-ahead on SSD and HDD, in bytes.
    pub read_ahead_bytes: u64,
    /// Background sync of the log, in milliseconds; 0: none is needed.
    pub sync_ms: u64,
    /// The log must be written back for power cuts: by the client to the backing file, or with
    /// [`Request::SyncLog`] where it was given none.
    pub needs_sync: bool,
    /// Seal of the session that this one continues.
    pub seal: Option<Seal>,
    /// Last [`Request::Forward`] of the old session that was carried out. If what it made is open, it is held
    /// open for the new session.
    pub last_forwarded: LastForwarded,
    /// Most leases that one session should keep.
    pub leases_max: u32,
    /// What orders the names of directories, so that the session can list one that it knows all names of. A
    /// privileged session's alone, which could read it from the pool: who does not know it cannot make names
    /// that collide.
    pub name_hash: Option<HashKey>,
    /// Where the client may keep copies of what it reads beyond its calls. A privileged session's of a linked
    /// program alone.
    pub copies_at: Option<CopiesAt>,
}

/// A file of memory in which a process keeps copies of files' pages, for its maps. The client makes it, owned
/// as its directory is. The daemon empties it whenever a session of the process ends, before anybody else is
/// given its leases, and removes it when the process is gone: so whoever is stopped keeps nothing that others
/// may have changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiesAt {
    /// Its directory's path.
    pub dir: Vec<u8>,
    /// Device and inode of that directory: elsewhere the path may lead to another one, where no daemon looks.
    pub dir_is: (u64, u64),
    /// Its name there.
    pub name: String,
}

/// How far a lease reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LeaseMode {
    /// Shared: cache and read.
    Read,
    /// Exclusive: log changes.
    Write,
}

/// One wish of [`Request::Acquire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Inode.
    pub key: InodeKey,
    /// Mode.
    pub mode: LeaseMode,
}

/// Inodes that a client is likely to want next: what it has listed, and those whose numbers come next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Near {
    /// These; at most [`NEAR_MAX`].
    pub these: Vec<InodeKey>,
    /// The numbers behind this one.
    pub after: Ino,
    /// So many of them; at most [`NEAR_MAX`].
    pub count: u16,
    /// Mode.
    pub mode: LeaseMode,
}

/// A granted lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Number of this grant.
    pub lease: LeaseNo,
    /// Mode (may be more than was asked for, if the session had more).
    pub mode: LeaseMode,
    /// The session's read lease whose place it takes: nobody else had the inode in between.
    pub replaces: Option<LeaseNo>,
    /// Attributes as digested. When the session already holds a write lease its own view is newer.
    pub attr: InodeAttr,
}

/// A lease given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseItem {
    /// Inode.
    pub key: InodeKey,
    /// Which grant; another number than the current one is ignored.
    pub lease: LeaseNo,
    /// Keeps a read lease.
    pub downgrade: bool,
    /// Highest sequence number logged for it (0: none): digested before the lease passes on.
    pub last_seq: LogSeq,
    /// Whether the client still has it open (it stays held).
    pub open: bool,
    /// How many changes were logged under it; [`u32::MAX`]: they were not counted. Tells leases that are
    /// worth their way from those that only go to and fro.
    pub changes: u32,
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
    /// Attributes as digested, unless another session has a write lease on the inode (then ask for a lease).
    pub attr: Option<InodeAttr>,
}

/// A mapped run of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedExtent {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks.
    pub len: u32,
    /// Medium. In a session that is not privileged NVM stands for its user's segments; what is not there has
    /// another one, and is read by message.
    pub tier: Tier,
    /// First block on it.
    pub block: BlockNo,
    /// Allocated but never written: reads as zeros.
    pub unwritten: bool,
}

/// An operation done by the daemon for a client. `entry` is an encoded log entry (header and payload,
/// unsigned, seq 0); the daemon checks names, permissions (with `cred`) and limits itself.
///
/// A rename of inode number 0, with nothing to be replaced, is *by name*: the daemon finds what has the name.
/// It is done in contended directories only, where no client knows the names; EAGAIN says that it is to be
/// done under leases, or that there is something to be replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardedOp {
    /// 64 header bytes and the payload.
    #[serde(with = "crate::blob")]
    pub entry: Vec<u8>,
    /// A write goes to the end of the file, wherever that is.
    pub append: bool,
    /// A creation: the session has what is made open from the moment on that others can find it, as after
    /// [`Request::Hold`].
    pub open: bool,
    /// A rename that leaves a whiteout under the old name, in the same record.
    pub whiteout: bool,
    /// Whose right it is.
    pub cred: Cred,
    /// Grows by one with each forwarded operation of the session.
    pub number: u64,
}

/// Answer to [`Request::Forward`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ForwardedResult {
    /// Attributes afterwards of the inode acted on.
    pub attr: Option<InodeAttr>,
    /// Offset that an append was written at.
    pub offset: u64,
    /// Inode whose name was removed or replaced, if any.
    pub victim: Option<InodeKey>,
    /// Of the inodes that the operation changed, those that are contended now: what comes next on them soon
    /// is to be forwarded too.
    pub contended: Vec<InodeKey>,
}

/// Inodes that carry marks of `inotify` or `fanotify` in a mount's kernel. The kernel makes events of what is
/// done through the mount only.
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

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Opens a session; the first message on a connection, and only the first.
    Hello(Hello),
    /// After [`Upcall::Sharing`]: what the shim answers from now on is not cached, and what it opens is
    /// opened as in shared mode, but for what is under way. The newcomer may begin.
    SharingNoted,
    /// After [`Request::SharingNoted`]: what the shim's kernel cached has
    /// run out. The newcomer may change what others see.
    SharingAck,
    /// Asks what `name` in `dir` is. Needs a lease on `dir` (any mode).
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
    /// Leases, all or nothing. Waits up to `wait_ms`.
    Acquire {
        /// Wishes; at most [`ITEMS_MAX`].
        wants: Vec<Want>,
    },
    /// As `Acquire`, and with it leases of neighbours: those that nobody has or waits for, so that nothing is
    /// asked back for them.
    AcquireNear {
        /// Wishes; at most [`ITEMS_MAX`].
        wants: Vec<Want>,
        /// Whose neighbours.
        near: Near,
    },
    /// Gives leases back (asked for or not).
    Release {
        /// Leases; at most [`RELEASED_MAX`].
        items: Vec<ReleaseItem>,
    },
    /// Last close of inodes whose lease is gone already.
    Drop {
        /// Inodes; at most [`HELD_MAX`].
        keys: Vec<InodeKey>,
    },
    /// More inodes that a resumed client holds open.
    Hold {
        /// Inodes; at most [`HELD_MAX`].
        keys: Vec<InodeKey>,
    },
    /// Numbers for new inodes, with exclusive leases on them.
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
        /// Whether attributes are wanted with them.
        attrs: bool,
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
    /// Where a file's blocks are, as digested. Needs a lease.
    MapExtents {
        /// File.
        key: InodeKey,
        /// First block.
        from: FileBlock,
        /// Most extents.
        max: u32,
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
    /// More log space.
    GrowLog {
        /// Wished length in bytes, a multiple of the chunk size.
        len_bytes: u64,
    },
    /// Makes ranges of the session's log durable against a power cut: for a session that was given no backing
    /// file. Durable when it is answered.
    SyncLog {
        /// First byte and length of each, in bytes; at most [`SYNC_RANGES_MAX`].
        ranges: Vec<(u64, u64)>,
    },
    /// Makes durable against a power cut what all other sessions have logged: their logs are digested. The
    /// caller makes its own durable before. Durable when it is answered; an error says that not all is.
    SyncAll,
    /// Asks for space to be reserved, before anything that needs it is logged.
    Reserve {
        /// Blocks wished for.
        blocks: u32,
        /// Least number that helps; fewer is an error.
        least: u32,
    },
    /// Returns reserved blocks that are not used: they stand for nothing in a log, and will for nothing.
    /// Asked for or not.
    ReturnReservation {
        /// Blocks; of more than the session has, all are taken.
        blocks: u64,
        /// Of how many that the session was ever granted the answers had come when it was looked what is
        /// left. Fewer than were granted: an answer is under way, and the session is asked again.
        of: u64,
    },
    /// Digests this session's log.
    Digest {
        /// At least up to here (as far as contiguous).
        upto: LogSeq,
        /// Waits until it is done and durable.
        wait: bool,
    },
    /// An operation by the daemon.
    Forward(ForwardedOp),
    /// Says that a [`Upcall::Barrier`] was obeyed.
    BarrierAck {
        /// Its transaction.
        tx: TxId,
    },
    /// Free and total space.
    StatFs,
    /// A mount says which inodes are watched in its kernel, in place of what it said before. Forgotten when
    /// the session ends. Privileged sessions of mounts alone.
    SetWatched(Watched),
    /// Asks what is watched in the kernels of all mounts.
    Watched,
    /// Tells the daemon what it cannot see; for its status.
    ClientFault(ClientFault),
    /// Closes the session in order: everything is committed; the log is digested behind.
    Bye,
    /// For operators.
    Admin(Admin),
}

/// What went wrong in the client's own process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientFault {
    /// The session's log could not be written, lengthened or made durable.
    LogFailed {
        /// What the host said; 0: not known.
        errno: i32,
    },
    /// A block of NVM that the session reads directly does not have its checksum.
    NvmDamaged {
        /// The block.
        block: BlockNo,
    },
    /// Making the log durable took long.
    LogSlow {
        /// How long, in milliseconds.
        ms: u32,
    },
}

/// What operators ask; answered in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admin {
    /// State and counters.
    Status,
    /// Digests all logs.
    DigestAll,
    /// Makes durable what all sessions have logged: see [`Request::SyncAll`].
    Sync,
    /// Checks the structures of the running pool.
    Fsck,
    /// Verifies all data against its checksums.
    Scrub,
    /// Ends the daemon after a last digest.
    Shutdown,
    /// One session: its leases, and who waits for whom. `ENOENT` if there is none of that number.
    Session(u64),
}

/// Free and total space in blocks, as `statvfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatFs {
    /// Blocks in all tiers.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks that may be written: with what is promised to other sessions, and without what is promised
    /// to the one that asks, which knows what of that is left.
    pub blocks_available: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    /// To [`Request::Hello`].
    Welcome(Box<Welcome>),
    /// Done.
    Done,
    /// To [`Request::Lookup`]: what the name names, if anything.
    Entry(Option<InodeAttr>),
    /// To [`Request::GetAttr`].
    Attr(InodeAttr),
    /// To [`Request::Acquire`] and [`Request::AcquireNear`], in the order of the wants; then neighbours.
    Granted(Vec<Grant>),
    /// To [`Request::AllocInodes`]: keys and their leases.
    Inodes(Vec<(InodeKey, LeaseNo)>),
    /// To [`Request::ReadDir`]; an empty list is the end.
    Entries(Vec<DirEntry>),
    /// To [`Request::ReadLink`] and [`Request::ReadData`] (short at the end of the file).
    Bytes(#[serde(with = "crate::blob")] Vec<u8>),
    /// To [`Request::Xattrs`]: names and values.
    Xattrs(Vec<(Vec<u8>, Vec<u8>)>),
    /// To [`Request::MapExtents`]: runs in order, holes left out; the flag says that there is nothing beyond.
    Extents(Vec<MappedExtent>, bool),
    /// To [`Request::GrowLog`]: the new length in bytes.
    LogBytes(u64),
    /// To [`Request::Reserve`]: blocks granted.
    Reserved(u32),
    /// To [`Request::Digest`]: digested up to here.
    Digested(LogSeq),
    /// To [`Request::Forward`].
    Forwarded(ForwardedResult),
    /// To [`Request::Watched`]: what [`SessionPage::watched`](crate::SessionPage::watched) says meanwhile,
    /// and the inodes.
    Watched(u64, Watched),
    /// To [`Request::StatFs`].
    StatFs(StatFs),
    /// To [`Request::Admin`].
    Json(String),
}

/// What the daemon asks of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Upcall {
    /// Give a lease back with [`Request::Release`] within `lease_ms`.
    Revoke {
        /// Inode.
        key: InodeKey,
        /// Which grant.
        lease: LeaseNo,
        /// What may be kept.
        keep: Option<LeaseMode>,
    },
    /// Forget the cached extents of these files, then say [`Request::BarrierAck`] (within `lease_ms`).
    Barrier {
        /// Transaction whose freed blocks wait for this.
        tx: TxId,
        /// Files whose blocks moved or were replaced.
        keys: Vec<InodeKey>,
    },
    /// Other sessions come (said once, until [`Upcall::Exclusive`]): use zero time-outs, say
    /// [`Request::SharingNoted`], let the old ones run out, say [`Request::SharingAck`].
    Sharing,
    /// Space is short: return unused reserved blocks with [`Request::ReturnReservation`] within `lease_ms`,
    /// also if there are none.
    ReclaimReservations,
    /// Alone again.
    Exclusive,
    /// The session is sealed: resume.
    Sealed,
}

/// Why a call failed.
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
    /// The daemon is not there.
    #[error("the daemon is away: {0}")]
    Gone(String),
    /// The other side does not speak this protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
}

/// The client's end of a session: the *message* seam.
pub trait Link: Send + Sync {
    /// Asks and waits for the answer. Several threads may call at once.
    ///
    /// # Errors
    /// An [`IpcError`]; `Gone` if the daemon died or closed the connection (then every later call fails too).
    fn call(&self, request: Request) -> Result<Response, IpcError>;

    /// The next upcall, or `None` after `timeout`. One thread waits at a time.
    ///
    /// # Errors
    /// `Gone` when the connection is over.
    fn upcall(&self, timeout: std::time::Duration) -> Result<Option<Upcall>, IpcError>;

    /// The session is over: gives back what the link takes, here and in the daemon, though somebody may refer
    /// to it still.
    fn close(&self) {}
}
