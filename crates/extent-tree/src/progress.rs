//! Operations that are cut into bounded steps.

/// The progress of an operation that is cut into bounded steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Call again, in this transaction or a later one, with the root that this call left.
    More,
    /// All is done.
    Done,
}
