//! Rows of the session and grant tables. Encodes and parses; decides nothing.

use crate::BLOCK_BODY_SIZE;
use crate::{Generation, Ino, InodeKey, LeaseNo, LogSeq, SEAL_MISSING_MAX, Seal, SeqRange, SessionId};
use serde::{Deserialize, Serialize};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a session row.
pub const SESSION_ROW_SIZE: usize = 1016;
/// Session rows in one block.
pub const SESSION_ROWS_PER_BLOCK: u64 = (BLOCK_BODY_SIZE / SESSION_ROW_SIZE) as u64;
/// Bytes of a grant row.
pub const GRANT_ROW_SIZE: usize = 64;
/// Grant rows in one block.
pub const GRANT_ROWS_PER_BLOCK: u64 = (BLOCK_BODY_SIZE / GRANT_ROW_SIZE) as u64;

/// Phase of a session's life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionState {
    /// Logs entries.
    Live,
    /// Logs no more entries; its log counts up to this seal.
    Sealed(Seal),
    /// Sealed and digested; kept until its client resumes or is gone.
    Ended(Seal),
}

/// The last operation that the daemon did for a session, and the parts of its answer that are stored nowhere
/// else: the client may not have received it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastForwarded {
    /// Its number; 0: there was none.
    pub number: u64,
    /// The inode that it created.
    pub made: Option<InodeKey>,
    /// The session holds the created inode open.
    pub open: bool,
    /// Where the bytes that it wrote begin, in bytes.
    pub offset: u64,
}

/// One session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// Number.
    pub id: SessionId,
    /// User.
    pub uid: u32,
    /// Process.
    pub pid: u32,
    /// Start time of the process (clock ticks since boot, as in /proc).
    pub pid_start: u64,
    /// Secret that the client shows to continue after a seal.
    pub token: u128,
    /// Phase of its life.
    pub state: SessionState,
    /// Last digested number.
    pub digested: LogSeq,
    /// Last forwarded operation that was carried out.
    pub last_forwarded: LastForwarded,
    /// Bytes of its log.
    pub log_bytes: u64,
    /// When it was opened, nanoseconds since 1970.
    pub created_ns: i64,
    /// [`SESSION_MOUNT`] and [`SESSION_SYNCED`].
    pub flags: u32,
}

/// Flag of a session's row: its client is a mount.
pub const SESSION_MOUNT: u32 = 1;
/// Flag of a session's row: its log was synced, so a power cut leaves it.
pub const SESSION_SYNCED: u32 = 2;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct MissingBytes {
    first: U64,
    len: U32,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SessionBytes {
    id: U64,
    uid: U32,
    pid: U32,
    pid_start: U64,
    token: [u8; 16],
    state: u8,
    missing: u8,
    reserved0: U16,
    flags: U32,
    digested: U64,
    last_forwarded: U64,
    log_bytes: U64,
    created_ns: I64,
    seal_last: U64,
    made_ino: U64,
    made_generation: U32,
    made_open: U32,
    forwarded_offset: U64,
    reserved: [u8; 136],
    runs: [MissingBytes; SEAL_MISSING_MAX],
}

const _: () = {
    assert!(size_of::<SessionBytes>() == SESSION_ROW_SIZE);
    assert!(offset_of!(SessionBytes, runs) == 248);
    assert!(size_of::<GrantBytes>() == GRANT_ROW_SIZE);
};

/// A row that is never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a session or grant row makes no sense")]
pub struct BadRow;

impl SessionRow {
    /// Returns the row's bytes.
    ///
    /// # Errors
    /// [`BadRow`] if the id is 0 or the seal names more than [`SEAL_MISSING_MAX`] runs, or a run of 2^32
    /// numbers or more.
    pub fn encode(&self) -> Result<[u8; SESSION_ROW_SIZE], BadRow> {
        let none = Seal::default();
        let (state, seal) = match &self.state {
            SessionState::Live => (1, &none),
            SessionState::Sealed(seal) => (2, seal),
            SessionState::Ended(seal) => (3, seal),
        };
        if self.id.0 == 0 || seal.missing.len() > SEAL_MISSING_MAX {
            return Err(BadRow);
        }
        let made = self.last_forwarded.made.unwrap_or(InodeKey::new(0, 0));
        let empty = MissingBytes {
            first: U64::new(0),
            len: U32::new(0),
        };
        let mut runs = [empty; SEAL_MISSING_MAX];
        for (run, range) in runs.iter_mut().zip(&seal.missing) {
            let len = range.last.0.checked_sub(range.first.0).ok_or(BadRow)?;
            run.first = U64::new(range.first.0);
            run.len = U32::new(u32::try_from(len + 1).map_err(|_| BadRow)?);
        }
        let bytes = SessionBytes {
            id: U64::new(self.id.0),
            uid: U32::new(self.uid),
            pid: U32::new(self.pid),
            pid_start: U64::new(self.pid_start),
            token: self.token.to_le_bytes(),
            state,
            missing: seal.missing.len() as u8,
            reserved0: U16::new(0),
            flags: U32::new(self.flags),
            digested: U64::new(self.digested.0),
            last_forwarded: U64::new(self.last_forwarded.number),
            log_bytes: U64::new(self.log_bytes),
            created_ns: I64::new(self.created_ns),
            seal_last: U64::new(seal.last.0),
            made_ino: U64::new(made.ino.0),
            made_generation: U32::new(made.generation.0),
            made_open: U32::new(self.last_forwarded.open.into()),
            forwarded_offset: U64::new(self.last_forwarded.offset),
            reserved: [0; 136],
            runs,
        };
        Ok(zerocopy::transmute!(bytes))
    }

    /// Parses the row in `bytes`; `None` if the slot is free.
    ///
    /// # Errors
    /// [`BadRow`] if its values are never written.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, BadRow> {
        let (row, _) = SessionBytes::read_from_prefix(bytes).map_err(|_| BadRow)?;
        if row.id.get() == 0 {
            return Ok(None);
        }
        let runs = row.runs.get(..usize::from(row.missing)).ok_or(BadRow)?;
        let missing = runs
            .iter()
            .map(|run| {
                let last = run
                    .first
                    .get()
                    .checked_add(u64::from(run.len.get()))
                    .ok_or(BadRow)?;
                if run.len.get() == 0 {
                    return Err(BadRow);
                }
                Ok(SeqRange {
                    first: LogSeq(run.first.get()),
                    last: LogSeq(last - 1),
                })
            })
            .collect::<Result<_, _>>()?;
        let seal = Seal {
            last: LogSeq(row.seal_last.get()),
            missing,
        };
        let state = match row.state {
            1 => SessionState::Live,
            2 => SessionState::Sealed(seal),
            3 => SessionState::Ended(seal),
            _ => return Err(BadRow),
        };
        Ok(Some(Self {
            id: SessionId(row.id.get()),
            uid: row.uid.get(),
            pid: row.pid.get(),
            pid_start: row.pid_start.get(),
            token: u128::from_le_bytes(row.token),
            state,
            digested: LogSeq(row.digested.get()),
            last_forwarded: LastForwarded {
                number: row.last_forwarded.get(),
                made: (row.made_ino.get() != 0)
                    .then(|| InodeKey::new(row.made_ino.get(), row.made_generation.get())),
                open: row.made_open.get() != 0,
                offset: row.forwarded_offset.get(),
            },
            log_bytes: row.log_bytes.get(),
            created_ns: row.created_ns.get(),
            flags: row.flags.get(),
        }))
    }
}

/// One grant: a session may log operations on an inode, or on a batch of new inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantRow {
    /// Session.
    pub session: SessionId,
    /// Number of the lease.
    pub lease: LeaseNo,
    /// Inode; for a batch the first number (the generation is then unused: each image has its own).
    pub key: InodeKey,
    /// Rights, as bits that the daemon defines.
    pub rights: u32,
    /// The first number from which operations count.
    pub first_seq: LogSeq,
    /// The last number that counts; `None` while the lease is held.
    pub last_seq: Option<LogSeq>,
    /// 0: one inode. Else bit `i` stands for inode `key.ino + i`.
    pub batch: u16,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct GrantBytes {
    session: U64,
    lease: U64,
    ino: U64,
    generation: U32,
    rights: U32,
    first_seq: U64,
    last_seq: U64,
    batch: U16,
    reserved: [u8; 14],
}

impl GrantRow {
    /// Returns the row's bytes.
    ///
    /// # Errors
    /// [`BadRow`] if the session's number is 0.
    pub fn encode(&self) -> Result<[u8; GRANT_ROW_SIZE], BadRow> {
        if self.session.0 == 0 || self.last_seq == Some(LogSeq(u64::MAX)) {
            return Err(BadRow);
        }
        Ok(zerocopy::transmute!(GrantBytes {
            session: U64::new(self.session.0),
            lease: U64::new(self.lease.0),
            ino: U64::new(self.key.ino.0),
            generation: U32::new(self.key.generation.0),
            rights: U32::new(self.rights),
            first_seq: U64::new(self.first_seq.0),
            last_seq: U64::new(self.last_seq.map_or(u64::MAX, |seq| seq.0)),
            batch: U16::new(self.batch),
            reserved: [0; 14],
        }))
    }

    /// Parses the row in `bytes`; `None` if the slot is free.
    ///
    /// # Errors
    /// [`BadRow`] if `bytes` is too short.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, BadRow> {
        let (row, _) = GrantBytes::read_from_prefix(bytes).map_err(|_| BadRow)?;
        if row.session.get() == 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            session: SessionId(row.session.get()),
            lease: LeaseNo(row.lease.get()),
            key: InodeKey {
                ino: Ino(row.ino.get()),
                generation: Generation(row.generation.get()),
            },
            rights: row.rights.get(),
            first_seq: LogSeq(row.first_seq.get()),
            last_seq: (row.last_seq.get() != u64::MAX).then(|| LogSeq(row.last_seq.get())),
            batch: row.batch.get(),
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rows_come_back_equal_when_decoded() {
        let seal = Seal {
            last: LogSeq(900),
            missing: (0..64)
                .map(|i| SeqRange {
                    first: LogSeq(10 * i + 1),
                    last: LogSeq(10 * i + 3),
                })
                .collect(),
        };
        for state in [
            SessionState::Live,
            SessionState::Sealed(seal.clone()),
            SessionState::Ended(Seal::default()),
        ] {
            let row = SessionRow {
                id: SessionId(5),
                uid: 1000,
                pid: 77,
                pid_start: 1 << 40,
                token: u128::MAX - 5,
                state,
                digested: LogSeq(12),
                last_forwarded: LastForwarded {
                    number: 4,
                    made: Some(InodeKey::new(18, 3)),
                    open: true,
                    offset: 5000,
                },
                log_bytes: 2 << 20,
                created_ns: -1,
                flags: 3,
            };
            assert_eq!(SessionRow::decode(&row.encode().unwrap()).unwrap(), Some(row));
        }
        let grant = GrantRow {
            session: SessionId(5),
            lease: LeaseNo(6),
            key: InodeKey::new(17, 2),
            rights: 3,
            first_seq: LogSeq(1),
            last_seq: None,
            batch: 0xff,
        };
        assert_eq!(GrantRow::decode(&grant.encode().unwrap()).unwrap(), Some(grant));
        assert_eq!(SessionRow::decode(&[0; SESSION_ROW_SIZE]).unwrap(), None);
        assert_eq!(GrantRow::decode(&[0; GRANT_ROW_SIZE]).unwrap(), None);
    }

    #[test]
    fn session_row_is_refused_when_the_seal_is_too_long() {
        let run = SeqRange {
            first: LogSeq(1),
            last: LogSeq(1),
        };
        let row = SessionRow {
            id: SessionId(1),
            uid: 0,
            pid: 0,
            pid_start: 0,
            token: 0,
            state: SessionState::Sealed(Seal {
                last: LogSeq(2),
                missing: vec![run; 65],
            }),
            digested: LogSeq(0),
            last_forwarded: LastForwarded::default(),
            log_bytes: 0,
            created_ns: 0,
            flags: 0,
        };
        assert!(row.encode().is_err());
    }
}
