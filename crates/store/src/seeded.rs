//! Bugs on demand, to prove that the crash tests find them: see [`varve_format::seeded`].

pub use varve_format::seeded::{Bug, arm, armed};
