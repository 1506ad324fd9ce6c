//! The controller's registers (NVM Express base specification 2.0, §3.1): offsets, fields, and their
//! acceptable values. Pure.

use std::time::Duration;

/// Controller capabilities, 64 bits.
pub(super) const CAP: usize = 0x00;
/// Version.
pub(super) const VS: usize = 0x08;
/// Interrupt mask set.
pub(super) const INTMS: usize = 0x0c;
/// Controller configuration.
pub(super) const CC: usize = 0x14;
/// Controller status.
pub(super) const CSTS: usize = 0x1c;
/// Admin queue attributes.
pub(super) const AQA: usize = 0x24;
/// Admin submission queue's address, 64 bits.
pub(super) const ASQ: usize = 0x28;
/// Admin completion queue's address, 64 bits.
pub(super) const ACQ: usize = 0x30;
/// First doorbell.
pub(super) const DOORBELLS: usize = 0x1000;

/// Value of every register where no device answers.
pub(super) const ALL_ONES: u32 = u32::MAX;

/// Controller is ready.
pub(super) const CSTS_READY: u32 = 1;
/// Controller has met a fatal error.
pub(super) const CSTS_FATAL: u32 = 1 << 1;
/// Shutdown status.
pub(super) const CSTS_SHUTDOWN: u32 = 3 << 2;
/// Shutdown is complete.
pub(super) const CSTS_SHUTDOWN_DONE: u32 = 2 << 2;

/// Enables the controller.
pub(super) const CC_ENABLE: u32 = 1;
/// Requests an orderly shutdown.
pub(super) const CC_SHUTDOWN: u32 = 1 << 14;

/// Shortest time that a controller is given to become ready: some report 0.
const READY_MIN: Duration = Duration::from_secs(5);

/// The fields of `CAP` that the driver uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// Entries that an I/O queue may have at most, 2 to 65,536.
    pub entries_max: u32,
    /// How long enabling and disabling may take.
    pub ready_limit: Duration,
    /// Bytes from one doorbell to the next.
    pub doorbell_bytes: usize,
    /// Selected command set for `CC`.
    command_set: u32,
}

impl Capabilities {
    /// Decodes the register.
    ///
    /// # Errors
    /// Names the property that this driver cannot work with.
    pub(super) fn parse(cap: u64) -> Result<Self, String> {
        let entries_max = (cap & 0xffff) as u32 + 1;
        if entries_max < 2 {
            return Err("its queues hold no command (CAP.MQES is 0, at least 1 is required)".into());
        }
        let page_min = 12 + (cap >> 48 & 0xf);
        if page_min != 12 {
            return Err(format!(
                "its smallest memory page is {} bytes; this driver works with 4096",
                1u64 << page_min
            ));
        }
        let command_set = match (cap >> 37 & 1, cap >> 43 & 1) {
            (1, _) => 0,
            (_, 1) => 6,
            _ => return Err("it has no NVM command set (it may be an administrative controller)".into()),
        };
        Ok(Self {
            entries_max,
            ready_limit: Duration::from_millis(500 * (cap >> 24 & 0xff)).max(READY_MIN),
            doorbell_bytes: 4 << (cap >> 32 & 0xf),
            command_set,
        })
    }

    /// `CC` of a running controller: 4 KiB pages, round robin, entries of 64 and 16 bytes.
    pub(super) const fn configuration(&self) -> u32 {
        CC_ENABLE | self.command_set << 4 | 6 << 16 | 4 << 20
    }

    /// Offset of a queue's doorbell.
    pub(super) const fn doorbell(&self, queue: u16, completion: bool) -> usize {
        DOORBELLS + (2 * queue as usize + completion as usize) * self.doorbell_bytes
    }

    /// Returns the number of queue pairs, the admin queue included, whose doorbells lie within
    /// `registers_bytes` of registers.
    pub(super) const fn queues_within(&self, registers_bytes: usize) -> usize {
        registers_bytes.saturating_sub(DOORBELLS) / (2 * self.doorbell_bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Capabilities;
    use std::time::Duration;

    #[test]
    fn capabilities_are_taken_apart_and_checked() {
        let cap = 0x3ff | 20 << 24 | 1 << 37 | 2 << 32;
        let capabilities = Capabilities::parse(cap).unwrap();
        assert_eq!(capabilities.entries_max, 1024);
        assert_eq!(capabilities.ready_limit, Duration::from_secs(10));
        assert_eq!(capabilities.doorbell(1, true), 0x1000 + 3 * 16);
        assert_eq!(capabilities.queues_within(0x2000), 128);
        assert_eq!(capabilities.queues_within(16), 0);
        assert_eq!(capabilities.configuration() >> 4 & 7, 0);
        let sets = Capabilities::parse(0x3ff | 1 << 43).unwrap();
        assert_eq!(sets.configuration() >> 4 & 7, 6);
        for (wrong, said) in [
            (1 << 37, "MQES"),
            (cap | 1 << 48, "8192 bytes"),
            (0x3ff, "command set"),
        ] {
            assert!(Capabilities::parse(wrong).unwrap_err().contains(said));
        }
    }
}
