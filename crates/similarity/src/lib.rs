//! Similarity of images, clusters of them, and the candidates for sharing blocks (CORIOLIS).
//!
//! This crate owns sketches of content, the measures of similarity, the cluster tree and its manifest. It
//! does not know pools, daemons or the command line.
//!
//! The source is chapter 4 of "Optimizing Main Memory Usage in Modern Computing Systems to Improve Overall
//! System Performance" (CORIOLIS); comments name the equation or section that an item implements.
#![forbid(unsafe_code)]

pub mod candidates;
pub mod estimate;
pub mod files;
pub mod hash;
pub mod image;
pub mod input;
pub mod manifest;
pub mod measure;
pub mod plan;
pub mod sandbox;
pub mod similar;
pub mod sketch;
pub mod tree;
