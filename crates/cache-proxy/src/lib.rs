//! An HTTP caching proxy over the HashCache store (`varve-cache`): reverse and forward, RFC 9111.
//!
//! # Parts, from the ground up
//! - What messages say: [`headers`], [`cache_control`], [`vary`], [`ranges`], [`conditional`], [`policy`]. Pure.
//! - What is refused: [`framing`] (ambiguous requests), [`targets`] (where a forward proxy may not go).
//! - What is stored: [`key`], [`record`], [`storage`].
//! - What moves: [`body`], [`flights`] (one fetch for many), [`origin`], [`guard`], [`seats`], [`proxy`], [`server`], [`admin`].
//!
//! # Invariants
//! - Nothing is kept in memory for a stored object: the store's index is all.
//! - A request is read by the HTTP library only after [`framing`] found exactly one way to read it.
//! - Whatever a client or an origin can make grow has a bound in [`config::Limits`].
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
