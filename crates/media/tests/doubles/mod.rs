//! Test doubles of hardware that several test programs share.

pub mod nvme;
