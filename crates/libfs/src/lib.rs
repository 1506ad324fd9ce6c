//! LibFS: the file system in the process of its user.
#![forbid(unsafe_code)]
#![allow(
    clippy::result_large_err,
    reason = "the result of a lost session travels in its error, once in a session's life"
)]

mod attrs;
mod connect;
pub mod data;
mod dir;
mod dir_cache;
mod errno;
mod file;
mod fs;
mod hash;
pub mod inode;
mod kernel_cache;
mod lease;
pub mod log;
pub mod mounts;
mod options;
mod paths;
pub mod posix;
pub mod seeded;
mod session;
mod sync;
mod txn;

pub use attrs::{AttrChange, OpenFlags, RenameFlags, SetTime};
pub use connect::{SocketConnector, named_by_daemon};
pub use errno::{Errno, OpError, OpResult, Result};
pub use file::copy::RangePair;
pub use file::open::OpenFile;
pub use file::read::ReadUnder;
pub use fs::{Counters, Fs};
pub use kernel_cache::{CachedReply, KernelCall, PageUse, ReplyVersion};
pub use options::{Atime, AtimePolicy, CacheObserver, Connection, Connector, Copies, FsOptions, MountError};
pub use posix::Posix;
pub use txn::{GROUP_BYTES_MAX, GROUP_ENTRIES_MAX, Made, Transaction, TxDir, TxFile};
pub use varve_ipc::{Cred, DEDUPE_RANGES_MAX, Deduped, DirEntry, OwnedBlocks, StatFs, SummedBlocks, Watched};
