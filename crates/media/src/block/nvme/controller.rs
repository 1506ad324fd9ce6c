//! The controller as a whole: enabling, the admin queue, identification, creation of I/O queues, shutdown
//! (base specification, §3.5, §3.6, §5). Owns the admin queue; data goes by `transfer`.

use std::sync::Arc;
use std::time::Duration;

use super::bus::{Bus, PAGE_BYTES};
use super::command::{Command, Status, admin};
use super::identify::{CNS_CONTROLLER, CNS_NAMESPACE, ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity};
use super::queue::{Breach, Ended, QueuePair};
use super::registers::{
    ACQ, ALL_ONES, AQA, ASQ, CAP, CC, CC_ENABLE, CC_SHUTDOWN, CSTS, CSTS_FATAL, CSTS_READY, CSTS_SHUTDOWN,
    CSTS_SHUTDOWN_DONE, Capabilities, INTMS, VS,
};
use crate::error::MediaError;

/// Entries of the admin queue. One command is in flight at a time.
const ADMIN_ENTRIES: u16 = 4;
/// Longest time for an orderly shutdown.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// Why the controller cannot be used.
#[derive(Debug)]
pub(super) enum ControllerError {
    /// It broke the protocol or does not answer.
    Breach(Breach),
    /// The device is not usable; the text names the remedy.
    Unusable(String),
    /// It refused a command.
    Refused(&'static str, Status),
    /// The host lacks something.
    Host(MediaError),
}

impl From<Breach> for ControllerError {
    fn from(breach: Breach) -> Self {
        Self::Breach(breach)
    }
}

impl From<MediaError> for ControllerError {
    fn from(error: MediaError) -> Self {
        Self::Host(error)
    }
}

impl std::fmt::Display for ControllerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Breach(breach) => breach.fmt(f),
            Self::Unusable(what) => f.write_str(what),
            Self::Refused(what, status) => write!(f, "it refused to {what} ({status})"),
            Self::Host(error) => error.fmt(f),
        }
    }
}

/// Identities of the controller and its namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub controller: ControllerIdentity,
    pub namespace: NamespaceIdentity,
}

/// Checks that the controller is present and has not failed.
///
/// # Errors
/// Removed, wanted back, or failed.
pub(super) fn check_status(bus: &dyn Bus) -> Result<u32, Breach> {
    if bus.is_wanted_back() {
        return Err(Breach::WantedBack);
    }
    match bus.read32(CSTS) {
        ALL_ONES => Err(Breach::Removed),
        status if status & CSTS_FATAL != 0 => Err(Breach::Fatal),
        status => Ok(status),
    }
}

/// A controller and its admin queue.
pub(super) struct Controller {
    bus: Arc<dyn Bus>,
    capabilities: Capabilities,
    admin: QueuePair,
    timeout: Duration,
    nsid: u32,
}

impl Controller {
    /// Reads the capabilities. Leaves the controller as it is: [`enable`](Self::enable) comes next.
    pub(super) fn new(bus: Arc<dyn Bus>, nsid: u32, timeout: Duration) -> Result<Self, ControllerError> {
        if bus.registers_bytes() < PAGE_BYTES {
            return Err(ControllerError::Unusable(
                "its register space is too small for an NVMe controller".into(),
            ));
        }
        let (low, high) = (bus.read32(CAP), bus.read32(CAP + 4));
        if low == ALL_ONES && high == ALL_ONES || bus.read32(VS) == ALL_ONES {
            return Err(Breach::Removed.into());
        }
        let capabilities =
            Capabilities::parse(u64::from(high) << 32 | u64::from(low)).map_err(ControllerError::Unusable)?;
        if capabilities.queues_within(bus.registers_bytes()) < 2 {
            return Err(ControllerError::Unusable(
                "its register space has no room for the doorbells of an I/O queue".into(),
            ));
        }
        let entries = ADMIN_ENTRIES.min(capabilities.entries_max.try_into().unwrap_or(u16::MAX));
        let admin = QueuePair::new(&*bus, &capabilities, 0, entries, PAGE_BYTES)?;
        Ok(Self {
            bus,
            capabilities,
            admin,
            timeout,
            nsid,
        })
    }

    pub(super) const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Waits until a field of the status is `wanted`.
    fn wait_status(&self, mask: u32, wanted: u32, limit: Duration, fatal: bool) -> Result<(), Breach> {
        let begun = self.bus.now();
        loop {
            let status = self.bus.read32(CSTS);
            if status == ALL_ONES {
                return Err(Breach::Removed);
            }
            if status & mask == wanted {
                return Ok(());
            }
            if fatal && status & CSTS_FATAL != 0 {
                return Err(Breach::Fatal);
            }
            let waited = self.bus.now().saturating_sub(begun);
            if waited > limit {
                return Err(Breach::Timeout);
            }
            self.bus.pause(waited);
        }
    }

    /// Disables the controller. Commands in flight are lost, and the device touches no memory any more.
    pub(super) fn disable(&self) -> Result<(), Breach> {
        let configuration = self.bus.read32(CC);
        if configuration == ALL_ONES {
            return Err(Breach::Removed);
        }
        if configuration & CC_ENABLE != 0 {
            // The specification requires a starting controller to become ready before it may be disabled.
            let _ = self.wait_status(CSTS_READY, CSTS_READY, self.capabilities.ready_limit, true);
            self.bus
                .write32(CC, configuration & !CC_ENABLE & !(CC_SHUTDOWN | CC_SHUTDOWN << 1));
        }
        self.wait_status(CSTS_READY, 0, self.capabilities.ready_limit, false)
    }

    /// Resets the controller and makes it ready for admin commands.
    pub(super) fn enable(&mut self) -> Result<(), ControllerError> {
        self.disable()?;
        self.admin.clear();
        let last = u32::from(self.admin.entries() - 1);
        let (submission, completion) = self.admin.addresses();
        let write64 = |at: usize, value: u64| {
            self.bus.write32(at, value as u32);
            self.bus.write32(at + 4, (value >> 32) as u32);
        };
        self.bus.write32(AQA, last << 16 | last);
        write64(ASQ, submission);
        write64(ACQ, completion);
        // Everything is polled.
        self.bus.write32(INTMS, u32::MAX);
        self.bus.write32(CC, self.capabilities.configuration());
        self.wait_status(CSTS_READY, CSTS_READY, self.capabilities.ready_limit, true)?;
        Ok(())
    }

    /// Sends one admin command and waits for its end. Returns its result; data is left in the queue's first
    /// slot.
    fn execute(&mut self, command: Command, len: usize) -> Result<Result<u32, Status>, Breach> {
        let slot = self.admin.free_slot().ok_or(Breach::Timeout)?;
        self.admin.fill(slot, 0, &[0; PAGE_BYTES]);
        self.admin.submit(slot, command, len, 0);
        self.admin.ring(&*self.bus);
        let begun = self.bus.now();
        loop {
            if let Some(Ended { status, result, .. }) = self.admin.poll()? {
                self.admin.ring(&*self.bus);
                return Ok(status.map_or(Ok(result), Err));
            }
            check_status(&*self.bus)?;
            let waited = self.bus.now().saturating_sub(begun);
            if waited > self.timeout {
                return Err(Breach::Timeout);
            }
            self.bus.pause(waited);
        }
    }

    fn identify_bytes(&mut self, cns: u32, nsid: u32) -> Result<[u8; IDENTIFY_BYTES], ControllerError> {
        let command = Command {
            opcode: admin::IDENTIFY,
            nsid,
            dwords: [cns, 0, 0, 0, 0, 0],
            ..Command::default()
        };
        self.execute(command, IDENTIFY_BYTES)?
            .map_err(|status| ControllerError::Refused("identify itself", status))?;
        let mut bytes = [0; IDENTIFY_BYTES];
        // One command is in flight at a time, so it was in the first slot.
        self.admin.take(0, 0, &mut bytes);
        Ok(bytes)
    }

    /// Identifies the controller and its namespace.
    pub(super) fn identify(&mut self) -> Result<Identity, ControllerError> {
        let bytes = self.identify_bytes(CNS_CONTROLLER, 0)?;
        let controller = ControllerIdentity::parse(&bytes).map_err(ControllerError::Unusable)?;
        if self.nsid > controller.namespaces {
            return Err(ControllerError::Unusable(format!(
                "it has {} namespaces, there is no namespace {}; `nvme list-ns` shows those that it has",
                controller.namespaces, self.nsid
            )));
        }
        let bytes = self.identify_bytes(CNS_NAMESPACE, self.nsid)?;
        let namespace = NamespaceIdentity::parse(&bytes, self.nsid).map_err(ControllerError::Unusable)?;
        Ok(Identity {
            controller,
            namespace,
        })
    }

    /// Asks for `wanted` I/O queue pairs. Returns the number granted, at least 1 and at most `wanted`.
    pub(super) fn negotiate_queues(&mut self, wanted: u16) -> Result<u16, ControllerError> {
        let doorbells = self.capabilities.queues_within(self.bus.registers_bytes()) - 1;
        let wanted = wanted.clamp(1, doorbells.min(usize::from(u16::MAX)) as u16);
        let command = Command {
            opcode: admin::SET_FEATURES,
            dwords: [
                admin::NUMBER_OF_QUEUES,
                u32::from(wanted - 1) << 16 | u32::from(wanted - 1),
                0,
                0,
                0,
                0,
            ],
            ..Command::default()
        };
        let given = self
            .execute(command, 0)?
            .map_err(|status| ControllerError::Refused("allocate I/O queues", status))?;
        let (submission, completion) = (given & 0xffff, given >> 16);
        Ok(wanted.min(u16::try_from(submission.min(completion) + 1).unwrap_or(u16::MAX)))
    }

    /// Has the device create a queue pair, which must be clear.
    pub(super) fn create_queues(&mut self, pair: &QueuePair) -> Result<(), ControllerError> {
        let (submission, completion) = pair.addresses();
        let size = u32::from(pair.entries() - 1) << 16 | u32::from(pair.id());
        let command = |opcode, address, dword11| Command {
            opcode,
            // Physically contiguous; the queue's address goes in place of data.
            prp: [address, 0],
            dwords: [size, dword11, 0, 0, 0, 0],
            ..Command::default()
        };
        let create = command(admin::CREATE_COMPLETION_QUEUE, completion, 1);
        self.execute(create, 0)?
            .map_err(|status| ControllerError::Refused("create a completion queue", status))?;
        let create = command(
            admin::CREATE_SUBMISSION_QUEUE,
            submission,
            u32::from(pair.id()) << 16 | 1,
        );
        self.execute(create, 0)?
            .map_err(|status| ControllerError::Refused("create a submission queue", status))?;
        Ok(())
    }

    /// Has the controller write its cached data, and disables it. Best effort.
    pub(super) fn shut_down(&self) {
        let configuration = self.bus.read32(CC);
        if configuration == ALL_ONES || configuration & CC_ENABLE == 0 {
            return;
        }
        self.bus.write32(CC, configuration | CC_SHUTDOWN);
        let _ = self.wait_status(CSTS_SHUTDOWN, CSTS_SHUTDOWN_DONE, SHUTDOWN_LIMIT, true);
        let _ = self.disable();
    }
}
