//! Random transactions: mostly possible ones, made by looking at the state; some nonsense.

use super::model::{Model, Session};
use crate::Op;
use varve_format::{EntryFlags, FallocateMode, InodeKey, LogOp, LogSeq, SetAttr, SetAttrMask};

/// One that stays, and one that goes with each change of the data.
const ATTRIBUTES: [&[u8]; 2] = [b"user.x", varve_format::XATTR_CAPABILITY];

/// A small generator of numbers (xorshift).
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(super) const fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let at = self.below(from.len().max(1) as u64) as usize;
        from.get(at).copied()
    }
}

/// An operation that owns its bytes.
#[derive(Debug, Clone)]
pub(super) enum Owned {
    Plain(LogOp<'static>),
    Write(InodeKey, u64, Vec<u8>),
}

impl Owned {
    pub(super) fn borrow(&self) -> LogOp<'_> {
        match self {
            Self::Plain(op) => *op,
            Self::Write(key, offset, data) => LogOp::Write {
                key: *key,
                offset: *offset,
                data,
            },
        }
    }
}

pub(super) struct Transaction {
    pub(super) session: u64,
    pub(super) ops: Vec<(EntryFlags, Owned)>,
}

const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"e", b"f"];

/// Transactions that are likely to be possible one after another from `model` on.
pub(super) fn batch(random: &mut Random, model: &Model, len: usize) -> Vec<Transaction> {
    let mut ahead = model.clone();
    (0..len)
        .map(|_| {
            let session = 1 + random.below(2);
            let count = if random.below(5) == 0 {
                1 + random.below(4)
            } else {
                1
            };
            let mut ops = Vec::new();
            for _ in 0..count {
                let (flags, op) = operation(random, &ahead);
                let _ = ahead.transaction(
                    Session(session),
                    &[Op {
                        seq: LogSeq(1),
                        time_ns: 1,
                        flags,
                        op: op.borrow(),
                        left: None,
                    }],
                );
                ops.push((flags, op));
            }
            Transaction { session, ops }
        })
        .collect()
}

fn operation(random: &mut Random, model: &Model) -> (EntryFlags, Owned) {
    let dirs: Vec<InodeKey> = model
        .files
        .values()
        .filter(|file| file.attr.is_dir())
        .map(|file| file.attr.key)
        .collect();
    let keys: Vec<InodeKey> = model.files.values().map(|file| file.attr.key).collect();
    let names: Vec<(InodeKey, &[u8], InodeKey)> = model
        .files
        .values()
        .flat_map(|file| {
            file.names.iter().map(|(name, key)| {
                let fixed = NAMES.into_iter().find(|fixed| fixed == name).unwrap_or(b"a");
                (file.attr.key, fixed, *key)
            })
        })
        .collect();
    let reserved: Vec<InodeKey> = model.reserved.iter().map(|ino| InodeKey::new(ino.0, 3)).collect();
    let stray = InodeKey::new(random.below(32), 1 + random.below(4) as u32);
    let dir = random.pick(&dirs).unwrap_or(stray);
    let key = if random.below(20) == 0 {
        stray
    } else {
        random.pick(&keys).unwrap_or(stray)
    };
    let name = random.pick(&NAMES).unwrap_or(b"a");
    let offset = match random.below(3) {
        0 => random.below(20_000),
        1 => random.below(5) * 4096,
        _ => random.below(100),
    };
    let len = if random.below(2) == 0 {
        1 + random.below(9000)
    } else {
        4096
    };
    let flags = match random.below(4) {
        0 => EntryFlags::LAST_CLOSED,
        1 => EntryFlags::CLEAR_SUID,
        2 => EntryFlags::LAST_CLOSED | EntryFlags::CLEAR_SGID,
        _ => EntryFlags::empty(),
    };
    let known = random.pick(&names);
    let op = match random.below(16) {
        0..=2 => {
            let fill = random.below(255) as u8 + 1;
            return (flags, Owned::Write(key, offset, vec![fill; len as usize]));
        }
        3 => LogOp::Truncate {
            key,
            size: random.below(25_000),
        },
        4 => {
            let mode = FallocateMode::from_u32(random.below(5) as u32).unwrap_or(FallocateMode::Allocate);
            LogOp::Fallocate {
                key,
                mode,
                offset,
                len,
            }
        }
        5 => {
            let attr = SetAttr {
                mask: SetAttrMask::from_bits_truncate(random.below(2) as u32 + 16),
                mode: 0o4000 + random.below(0o1000) as u32,
                mtime_ns: random.below(1000) as i64,
                ..SetAttr::default()
            };
            LogOp::SetAttr { key, attr }
        }
        6 => LogOp::SetXattr {
            key,
            name: ATTRIBUTES[random.below(2) as usize],
            value: [&b"1"[..], b"22"][random.below(2) as usize],
        },
        7 => LogOp::RemoveXattr {
            key,
            name: ATTRIBUTES[random.below(2) as usize],
        },
        8..=10 => {
            let key = random.pick(&reserved).unwrap_or(stray);
            let (mode, target): (u32, &[u8]) = match random.below(6) {
                0 | 1 => (0o040_755, b""),
                2 => (0o120_777, b"somewhere"),
                _ => (0o104_755, b""),
            };
            let unnamed = mode == 0o104_755 && random.below(6) == 0;
            let op = super::create(dir, if unnamed { b"" } else { name }, key, mode);
            match op {
                LogOp::Create {
                    dir,
                    name,
                    key,
                    mode,
                    uid,
                    gid,
                    rdev,
                    ..
                } => LogOp::Create {
                    dir,
                    name,
                    key,
                    mode,
                    uid,
                    gid,
                    rdev,
                    target,
                },
                other => other,
            }
        }
        11 => LogOp::Link { dir, name, key },
        12 | 13 => {
            let (dir, name, key) = known.unwrap_or((dir, name, key));
            LogOp::Unlink { dir, name, key }
        }
        14 => {
            let (from, old, key) = known.unwrap_or((dir, name, key));
            let victim = names.iter().find(|(at, there, _)| *at == dir && *there == name);
            LogOp::Rename {
                dir: from,
                name: old,
                key,
                new_dir: dir,
                new_name: name,
                victim: victim.map(|(_, _, key)| *key),
                exchange: victim.is_some() && random.below(3) == 0,
            }
        }
        _ => LogOp::Forget { key },
    };
    (flags, Owned::Plain(op))
}
