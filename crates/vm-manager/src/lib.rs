//! Memory tiers for unmodified programs, from user space: MULTI-CLOCK page tiering, Ingens huge pages, far
//! memory.
//!
//! Three small interfaces ([`interfaces`]): trackers see which pages are touched, policies decide, actuators
//! act. The policies are pure: one code runs over a kernel ([`tracker`], [`actuator`], [`sys`]) and over
//! [`sim`]. "The seed" in comments is the publication that introduced the policy; chapters, sections,
//! equations and figures are those of its text.

#![deny(unsafe_code)]
// `println!` and `eprintln!` panic when their reader has gone; `cli::out` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod actuator;
pub mod cli;
pub mod config;
pub mod coop;
pub mod engine;
pub mod far;
pub mod governor;
pub mod heat;
pub mod ingens;
pub mod interfaces;
pub mod machine;
pub mod metrics;
pub mod multiclock;
pub mod probe;
pub mod processes;
mod report;
pub mod sim;
pub mod snapshot;
pub mod survey;
#[expect(unsafe_code, reason = "the one module that makes raw system calls")]
pub mod sys;
pub mod tracker;
pub mod types;
