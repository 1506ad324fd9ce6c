//! Remembers the first error that cost data. Knows nothing of devices.

use std::sync::{Arc, OnceLock};

use crate::error::{DeviceName, MediaError};
use crate::traits::DeviceState;

/// Set once, never reset: a device that lost a write stays out of service until it is opened again.
#[derive(Debug, Default)]
pub(crate) struct Latch(OnceLock<Arc<str>>);

impl Latch {
    /// # Errors
    /// `Failed` if latched.
    pub(crate) fn check(&self, device: &DeviceName) -> Result<(), MediaError> {
        match self.0.get() {
            None => Ok(()),
            Some(reason) => Err(MediaError::Failed {
                device: device.clone(),
                reason: reason.clone(),
            }),
        }
    }

    /// Latches on a device error; lets want of space and the caller's own faults pass.
    pub(crate) fn note(&self, error: MediaError) -> MediaError {
        if matches!(error, MediaError::Io { .. }) {
            // Losing the race means that another error was first, and that one is kept.
            let _ = self.0.set(error.to_string().into());
        }
        error
    }

    /// Latches for a reason that is not a single error.
    pub(crate) fn set(&self, reason: String) {
        let _ = self.0.set(reason.into());
    }

    pub(crate) fn state(&self) -> DeviceState {
        self.0
            .get()
            .map_or(DeviceState::Ok, |reason| DeviceState::Failed {
                reason: reason.clone(),
            })
    }
}
