//! Extent trees and name indexes over checksummed metadata blocks.
#![forbid(unsafe_code)]

mod btree;
mod dir;
mod error;
mod extents;
mod io;
mod names;
#[cfg(test)]
mod testing;
mod xattr;

pub use dir::{DirEntry, Directory};
pub use error::{CheckVisitor, Fault, TreeError};
pub use extents::{ExtentTree, Mapping, Run};
pub use io::{MetaIo, MetaRead};
pub use xattr::Xattrs;

/// How far an operation that is cut into bounded steps has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Call again, in this transaction or a later one, with the root as it now is.
    More,
    /// All is done.
    Done,
}
