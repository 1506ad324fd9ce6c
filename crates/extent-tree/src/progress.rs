//! Operations that are cut into bounded steps.

/// How far an operation that is cut into bounded steps has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Call again, in this transaction or a later one, with the root as it now is.
    More,
    /// All is done.
    Done,
}
