//! Locks for code that runs in other people's programs: those of the standard library, which keep all their state
//! in themselves. `parking_lot` has a table of waiting threads for the whole process: where a thread holds a
//! part of it while another one forks, the child would wait for it for ever.
//!
//! A lock whose holder panicked is free.

use std::ops::{Deref, DerefMut};
use std::sync::{self, PoisonError, TryLockError};
use std::time::Duration;

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard};

const HELD: &str = "held outside of waits";

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock that is free.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard {
            mutex: self,
            held: Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let held = match self.0.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard {
            mutex: self,
            held: Some(held),
        })
    }

    /// The value, of which there is no other user.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lock that is held. `held` is empty only within [`Condvar::wait_for`] and [`unlocked`](Self::unlocked).
#[derive(Debug)]
#[must_use]
pub struct MutexGuard<'m, T: ?Sized> {
    mutex: &'m Mutex<T>,
    held: Option<sync::MutexGuard<'m, T>>,
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Releases the lock while `work` runs.
    pub fn unlocked<U>(guard: &mut Self, work: impl FnOnce() -> U) -> U {
        struct Again<'g, 'm, T: ?Sized>(&'g mut MutexGuard<'m, T>);
        impl<T: ?Sized> Drop for Again<'_, '_, T> {
            fn drop(&mut self) {
                self.0.held = self.0.mutex.lock().held.take();
            }
        }
        guard.held = None;
        let _again = Again(guard);
        work()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.held.as_ref().expect(HELD)
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect(HELD)
    }
}

/// A condition that threads wait for.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// A condition that nobody waits for.
    #[must_use]
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Releases the lock, waits for a notice, and takes the lock again.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.held.take().expect(HELD);
        guard.held = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
    }

    /// As [`wait`](Self::wait), for at most `most`.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, most: Duration) {
        let held = guard.held.take().expect(HELD);
        let woken = self.0.wait_timeout(held, most);
        guard.held = Some(woken.unwrap_or_else(PoisonError::into_inner).0);
    }

    /// Wakes a thread that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes the threads that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A lock for many readers or one writer. A thread that has it must not take it again.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock that is free.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Takes the lock to read.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock to write.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock to read if no writer has it.
    #[inline]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        match self.0.try_read() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Takes the lock to write if it is free.
    #[inline]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        match self.0.try_write() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The value, of which there is no other user.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Condvar, Mutex, MutexGuard, RwLock};
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_lock_is_held_by_one() {
        let mutex = Mutex::new(1);
        let mut guard = mutex.lock();
        assert!(mutex.try_lock().is_none());
        MutexGuard::unlocked(&mut guard, || *mutex.try_lock().expect("free") += 1);
        let work = std::panic::AssertUnwindSafe(|| {
            MutexGuard::unlocked(&mut guard, || std::panic::resume_unwind(Box::new(())));
        });
        assert!(std::panic::catch_unwind(work).is_err());
        assert_eq!(*guard, 2);
        assert!(mutex.try_lock().is_none());
        drop(guard);
        assert_eq!(mutex.into_inner(), 2);
    }

    #[test]
    fn those_who_wait_are_woken_or_give_up() {
        let pair = Arc::new((Mutex::new(false), Condvar::new()));
        let mut guard = pair.0.lock();
        pair.1.wait_for(&mut guard, Duration::from_millis(1));
        assert!(!*guard);
        let other = Arc::clone(&pair);
        let thread = std::thread::spawn(move || {
            *other.0.lock() = true;
            other.1.notify_all();
        });
        while !*guard {
            pair.1.wait(&mut guard);
        }
        drop(guard);
        thread.join().expect("it ends");
    }

    #[test]
    fn a_lock_whose_holder_panicked_is_free() {
        let both = Arc::new((Mutex::new(1), RwLock::new(2)));
        let other = Arc::clone(&both);
        let panicked = std::thread::spawn(move || {
            let _one = other.0.lock();
            let _two = other.1.write();
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(panicked.join().is_err());
        assert_eq!(both.0.try_lock().map(|guard| *guard), Some(1));
        assert_eq!(*both.0.lock(), 1);
        assert_eq!(both.1.try_read().map(|guard| *guard), Some(2));
        assert_eq!(*both.1.read(), 2);
        *both.1.write() = 3;
        assert_eq!(both.1.try_write().map(|guard| *guard), Some(3));
    }
}
