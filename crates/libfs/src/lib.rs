//! LibFS: the file system in the process of its user.
