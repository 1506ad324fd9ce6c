//! Files outside a pool: choosing them, reading them, and keeping their checksums between scans.

mod index;
mod oci;
mod read;
mod state;
mod sums;
mod walk;

pub use index::Kept;
pub use oci::{is_layout, layers};
pub use read::{ReadRate, estimate, open_image, profile};
pub use state::{Looked, Picked, Place, State, StateError, Teller};
pub use walk::{Chosen, Filter, Found, walk};
