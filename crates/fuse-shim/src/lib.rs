//! The FUSE mount of a Varve pool.
