//! Tests on simulated media.
