//! Files outside a pool: choosing them, reading them, and keeping their checksums between scans.

mod oci;
mod read;
mod state;
mod walk;

pub use oci::{is_layout, layers};
pub use read::{ReadRate, estimate, profile};
pub use state::{Kept, Looked, Picked, Place, State, StateError, Teller};
pub use walk::{Chosen, Filter, Found, walk};
