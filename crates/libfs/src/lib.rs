//! LibFS: the file system in the process of its user.
#![forbid(unsafe_code)]
#![allow(
    clippy::result_large_err,
    reason = "the result of a lost session travels in its error, once in a session's life"
)]

mod attrs;
mod beliefs;
mod connect;
pub mod data;
mod errno;
mod fs;
mod hash;
pub mod inode;
mod lease;
pub mod log;
pub mod mounts;
mod names;
mod open;
mod options;
mod overlay;
mod paths;
pub mod posix;
pub mod seeded;
mod session;
mod setattr;
mod sync;
mod transaction;
mod worker;
mod xattrs;

pub use attrs::{AttrChange, OpenFlags, RenameFlags, SetTime};
pub use beliefs::{Answer, Asked};
pub use connect::SocketConnector;
pub use errno::{Errno, OpError, OpResult, Result};
pub use fs::{Counters, Fs};
pub use lease::{KernelCall, PageUse};
pub use open::{OpenFile, ReadUnder};
pub use options::{CacheObserver, Connection, Connector, Copies, FsOptions, MountError};
pub use posix::Posix;
pub use transaction::{GROUP_BYTES_MAX, GROUP_ENTRIES_MAX, Made, Transaction, TxDir, TxFile};
pub use varve_ipc::{Cred, DirEntry, StatFs};
