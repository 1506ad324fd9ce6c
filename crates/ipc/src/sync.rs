//! The synchronisation primitives of code that `shuttle` can drive. Owns the choice; refuses to know its
//! users.
//!
//! Words in memory that two processes share are always the standard library's atomics (see [`crate::page`]).

#[cfg(not(feature = "shuttle"))]
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

#[cfg(feature = "shuttle")]
pub use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

/// Locks a mutex. After a panic of a holder it goes on with the value: every holder in this crate leaves it
/// whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
