//! Commands and completions as bytes (base specification, §3.3 and §4; NVM command set specification, §3).
//! Pure.

use super::bus::PAGE_BYTES;

/// Bytes of a submission queue's entry.
pub(super) const COMMAND_BYTES: usize = 64;
/// Bytes of a completion queue's entry.
pub(super) const COMPLETION_BYTES: usize = 16;

/// Operations of an I/O queue; [`ng`](crate::block) sends the same ones through the kernel.
pub(in crate::block) mod io {
    pub(in crate::block) const FLUSH: u8 = 0x00;
    pub(in crate::block) const WRITE: u8 = 0x01;
    pub(in crate::block) const READ: u8 = 0x02;
    pub(in crate::block) const DATASET_MANAGEMENT: u8 = 0x09;
    /// Force unit access: bit of double word 12 of a read or write.
    pub(in crate::block) const FUA: u32 = 1 << 30;
    /// Deallocate: bit of double word 11 of a dataset management command.
    pub(in crate::block) const DEALLOCATE: u32 = 1 << 2;
}

/// Operations of the admin queue.
pub(in crate::block) mod admin {
    pub(in crate::block) const CREATE_SUBMISSION_QUEUE: u8 = 0x01;
    pub(in crate::block) const CREATE_COMPLETION_QUEUE: u8 = 0x05;
    pub(in crate::block) const IDENTIFY: u8 = 0x06;
    pub(in crate::block) const SET_FEATURES: u8 = 0x09;
    /// Feature: number of queues.
    pub(in crate::block) const NUMBER_OF_QUEUES: u32 = 0x07;
}

/// A command without its identifier, which its queue assigns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Command {
    pub opcode: u8,
    pub nsid: u32,
    /// Physical region pages.
    pub prp: [u64; 2],
    /// Double words 10 to 15.
    pub dwords: [u32; 6],
}

impl Command {
    /// Its 64 bytes.
    pub(super) fn bytes(&self, id: u16) -> [u8; COMMAND_BYTES] {
        let mut out = [0; COMMAND_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[self.opcode]);
        put(2, &id.to_le_bytes());
        put(4, &self.nsid.to_le_bytes());
        put(24, &self.prp[0].to_le_bytes());
        put(32, &self.prp[1].to_le_bytes());
        for (index, dword) in self.dwords.iter().enumerate() {
            put(40 + 4 * index, &dword.to_le_bytes());
        }
        out
    }
}

/// Status of a command that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block) struct Status {
    /// Status code type.
    kind: u8,
    /// Status code.
    code: u8,
    /// A retry cannot help.
    final_: bool,
}

/// The consequence of a status for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block) enum Meaning {
    /// A passing condition: send the command again.
    Again,
    /// The errno to answer with.
    Errno(i32),
}

impl Status {
    /// Parses the completion's status field, the phase bit removed. `None`: success.
    pub(in crate::block) const fn parse(field: u16) -> Option<Self> {
        let status = Self {
            code: field as u8,
            kind: (field >> 8 & 7) as u8,
            final_: field >> 14 & 1 == 1,
        };
        if status.code == 0 && status.kind == 0 {
            None
        } else {
            Some(status)
        }
    }

    /// Returns the consequence for the caller.
    pub(in crate::block) const fn meaning(self) -> Meaning {
        match (self.kind, self.code) {
            // Capacity exceeded.
            (0, 0x81) => Meaning::Errno(libc::ENOSPC),
            // Namespace is write-protected.
            (0, 0x20) => Meaning::Errno(libc::EROFS),
            // Invalid namespace or format.
            (0, 0x0b) => Meaning::Errno(libc::ENXIO),
            // LBA out of range, invalid field or opcode: this driver and the device disagree.
            (0, 0x80 | 0x01 | 0x02) => Meaning::Errno(libc::EIO),
            // Media errors: the device has already tried again itself.
            (2, _) => Meaning::Errno(libc::EIO),
            _ if self.final_ => Meaning::Errno(libc::EIO),
            // Aborted, deleted queue, namespace not ready, path errors and all others that may pass.
            _ => Meaning::Again,
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVMe status {:x}h/{:02x}h", self.kind, self.code)
    }
}

/// An entry of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Completion {
    /// Command-specific result.
    pub result: u32,
    /// The device's position in the submission queue.
    pub sq_head: u16,
    /// Submission queue.
    pub sq_id: u16,
    /// Command.
    pub id: u16,
    /// Status field.
    pub status: u16,
}

impl Completion {
    pub(super) fn parse(bytes: &[u8; COMPLETION_BYTES]) -> Self {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            result: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            sq_head: half(8),
            sq_id: half(10),
            id: half(12),
            status: half(14) >> 1,
        }
    }
}

/// Returns the addresses of a transfer of `len` bytes in pages of which the n-th begins at `page(n)`.
/// Addresses that do not fit in the command go to `list`, which the device finds at `list_address`.
pub(super) fn prp(
    len: usize,
    page: impl Fn(usize) -> u64,
    list_address: u64,
    list: &mut Vec<u64>,
) -> [u64; 2] {
    list.clear();
    match len.div_ceil(PAGE_BYTES) {
        0 => [0, 0],
        1 => [page(0), 0],
        2 => [page(0), page(1)],
        pages => {
            list.extend((1..pages).map(&page));
            [page(0), list_address]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Command, Completion, Meaning, Status, prp};

    #[test]
    fn command_lies_in_its_64_bytes_as_the_specification_says() {
        let command = Command {
            opcode: 2,
            nsid: 0x0403_0201,
            prp: [0x1000, 0x2000],
            dwords: [10, 11, 12, 13, 14, 15],
        };
        let bytes = command.bytes(0xbeef);
        assert_eq!(bytes[..8], [2, 0, 0xef, 0xbe, 1, 2, 3, 4]);
        assert_eq!(bytes[24..26], [0, 0x10]);
        assert_eq!((bytes[40], bytes[48], bytes[60]), (10, 12, 15));
        let mut entry = [0; 16];
        entry[..4].copy_from_slice(&7u32.to_le_bytes());
        entry[8..].copy_from_slice(&[1, 0, 2, 0, 3, 0, 0x03, 0x80]);
        let completion = Completion::parse(&entry);
        assert_eq!((completion.result, completion.sq_head), (7, 1));
        assert_eq!((completion.sq_id, completion.id), (2, 3));
        assert_eq!(completion.status, 0x4001);
    }

    #[test]
    fn status_says_what_may_be_tried_again() {
        assert_eq!(Status::parse(0), None);
        let meaning = |field| Status::parse(field).map(Status::meaning);
        assert_eq!(meaning(0x81), Some(Meaning::Errno(libc::ENOSPC)));
        assert_eq!(meaning(0x281), Some(Meaning::Errno(libc::EIO)));
        assert_eq!(meaning(0x07), Some(Meaning::Again));
        assert_eq!(meaning(0x4007), Some(Meaning::Errno(libc::EIO)));
    }

    #[test]
    fn prp_goes_to_a_list_from_the_third_page_on() {
        let (mut list, page) = (Vec::new(), |n: usize| 0x10_0000 + n as u64 * 0x3000);
        assert_eq!(prp(512, page, 9, &mut list), [0x10_0000, 0]);
        assert_eq!(prp(4097, page, 9, &mut list), [0x10_0000, 0x10_3000]);
        assert!(list.is_empty());
        assert_eq!(prp(12288, page, 9, &mut list), [0x10_0000, 9]);
        assert_eq!(list, [0x10_3000, 0x10_6000]);
    }
}
