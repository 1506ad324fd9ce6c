//! Reference model, workloads and crash exploration. For tests only.
#![forbid(unsafe_code)]

pub mod crash;
mod group;
mod helper;
pub mod kernel;
pub mod lockstep;
pub mod lookup;
pub mod model;
pub mod ops;
pub mod rig;
pub mod target;
pub mod turns;
pub mod whole;
pub mod wire;
pub mod workload;
