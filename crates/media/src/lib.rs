//! Byte-addressable and block devices under a Varve pool.
