//! Where an object lies: a slab's number and the object's index in it.

/// Most slabs of a space: 16 TiB.
pub const SLABS_MAX: u32 = 1 << 24;
/// Most objects of a slab.
pub const OBJECTS_MAX: u16 = 1 << 12;

/// An object in a slab. The slab's number stays when the slab moves to another tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Below [`SLABS_MAX`].
    pub slab: u32,
    /// Below [`OBJECTS_MAX`].
    pub object: u16,
}
