//! Memory tiers for unmodified programs: MULTI-CLOCK page tiering and Ingens huge pages, from user space.
//!
//! Three small seams ([`interfaces`]): trackers see which pages are touched, policies decide, actuators act. The
//! policies are pure and run the same over a kernel ([`tracker`], [`actuator`], [`sys`]) and over [`sim`].

pub mod ingens;
pub mod interfaces;
pub mod multiclock;
pub mod sim;
pub mod types;
