//! Values as bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A value that is its bytes: any type of `zerocopy`'s `FromBytes + IntoBytes + Immutable`, such as integers,
/// arrays of them, and `#[repr(C)]` structs without padding. Implemented for all of them.
pub trait Plain: FromBytes + IntoBytes + Immutable + Send + Sync + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + Send + Sync + 'static> Plain for T {}

/// The value at `offset`, if it is inside.
pub(crate) fn load<T: Plain>(bytes: &[u8], offset: usize) -> Option<T> {
    T::read_from_bytes(bytes.get(offset..)?.get(..size_of::<T>())?).ok()
}

/// Stores the value at `offset`, if it fits.
pub(crate) fn store<T: Plain>(bytes: &mut [u8], offset: usize, value: &T) {
    let target = bytes
        .get_mut(offset..)
        .and_then(|rest| rest.get_mut(..size_of::<T>()));
    if let Some(target) = target {
        target.copy_from_slice(value.as_bytes());
    }
}
