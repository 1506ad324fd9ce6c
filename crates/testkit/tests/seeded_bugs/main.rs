//! Bugs on purpose, to show that the harness finds them. The lists are in `docs/internals/seeded-bugs.md`.
//! Prints by what each was caught, after how many images, and whether it took a power cut that kept some of
//! the pending lines, pages or sectors and not others.

#![cfg(debug_assertions)]

mod first;
mod second;
