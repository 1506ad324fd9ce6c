//! LibFS: the file system in the process of its user.
#![forbid(unsafe_code)]

mod attrs;
mod errno;
mod fs;
mod open;
mod options;

pub use attrs::{AttrChange, OpenFlags, RenameFlags, SetTime};
pub use errno::{Errno, Result};
pub use fs::{Counters, Fs};
pub use open::OpenFile;
pub use options::{CacheObserver, Connection, Connector, FsOptions, MountError};
pub use varve_ipc::{Cred, DirEntry, StatFs};
