//! The `varve` command line.
fn main() {}
