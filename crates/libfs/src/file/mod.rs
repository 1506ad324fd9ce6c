//! Operations on one file: opening, reading and writing, attributes, extended attributes. Knows no paths.

pub(crate) mod attr;
pub(crate) mod copy;
pub(crate) mod open;
mod owners;
mod pin;
pub(crate) mod read;
mod write;
pub(crate) mod xattr;
