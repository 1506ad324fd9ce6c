//! Extent trees and name indexes over checksummed metadata blocks.
#![forbid(unsafe_code)]

mod btree;
mod dir;
mod error;
mod extents;
mod io;
mod names;
mod progress;
mod shared;
#[cfg(test)]
mod testing;
mod xattr;

pub use btree::Recall;
pub use dir::{DirEntry, Directory};
pub use error::{CheckVisitor, Fault, TreeError};
pub use extents::{ExtentTree, Mapping, Run};
pub use io::{MetaIo, MetaRead};
pub use progress::Progress;
pub use shared::SharedRuns;
pub use xattr::Xattrs;
