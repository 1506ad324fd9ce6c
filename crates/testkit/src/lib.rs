//! Reference model, workloads and crash exploration. For tests only.

pub mod model;
pub mod ops;
pub mod target;
pub mod workload;
