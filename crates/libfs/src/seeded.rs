//! Bugs on demand, to prove that the crash tests find them: see [`varve_format::seeded`].

#[cfg(all(test, feature = "shuttle"))]
pub use varve_format::seeded::is_found;
pub use varve_format::seeded::{Bug, arm, armed, current};
