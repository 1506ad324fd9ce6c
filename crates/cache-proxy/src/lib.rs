//! An HTTP caching proxy over the HashCache store (`varve-cache`): reverse and forward, RFC 9111.
//!
//! # Modules, bottom up
//! - HTTP semantics: [`headers`], [`cache_control`], [`vary`], [`ranges`], [`parts`], [`conditional`],
//!   [`policy`]. Pure.
//! - Refusals: [`framing`] (ambiguous requests), [`targets`] (addresses that a forward proxy may not reach).
//! - Storage: [`key`], [`record`], [`storage`].
//! - I/O: [`body`], [`flights`] (request coalescing), [`origin`], [`guard`], [`seats`], [`proxy`],
//!   [`workers`] (the threads of connections), [`server`], [`admin`].
//!
//! # Invariants
//! - Memory per stored object is only its entry in the store's index.
//! - The HTTP library sees a request only after [`framing`] found exactly one way to read it.
//! - A request that memory answers wakes no other thread.
//! - Every resource that a client or an origin can grow has a bound in [`config::Limits`].
#![forbid(unsafe_code)]

pub mod access_log;
pub mod admin;
pub mod body;
pub mod cache_control;
pub mod conditional;
pub mod config;
pub mod flights;
pub mod framing;
pub mod guard;
pub mod headers;
pub mod key;
pub mod metrics;
pub mod origin;
pub mod parts;
pub mod policy;
pub mod proxy;
pub mod ranges;
pub mod record;
pub mod seats;
pub mod server;
pub mod storage;
pub mod targets;
pub mod units;
pub mod vary;
pub mod workers;
