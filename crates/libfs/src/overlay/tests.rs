//! Tests of the overlay.
