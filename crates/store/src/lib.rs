//! The shared area of a Varve pool: journal, space, inodes, directories, data.
