//! What a hostile client does to its log and session page: entries that say anything, noise, other lengths,
//! changes under the reader.

use super::{Attacker, Outcome, PATIENCE};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_format::log::{
    CHUNK_BYTES, EntryMeta, LIVE_HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc,
};
use varve_format::{EntryFlags, FallocateMode, InodeKey, LogOp, LogSeq, SetAttr, SetAttrMask, TxId};
use varve_ipc::Request;
use varve_testkit::workload::Rng;
use zerocopy::IntoBytes;

impl Attacker {
    /// A file of its own, written as a client that keeps the rules would: what follows it in the log is read,
    /// too.
    pub(super) fn log_what_it_may(&mut self) -> Outcome {
        let name = format!("own{}", self.rng.below(40));
        let Some(at) = self.sessions.len().checked_sub(1) else {
            return Ok(());
        };
        let dir = self.job.common;
        let leases = &self.sessions[at].leases;
        if !leases.iter().any(|(key, _)| *key == dir) {
            return Ok(());
        }
        let Some((key, _)) = leases.iter().find(|(key, _)| *key != dir).copied() else {
            return Ok(());
        };
        let user = if self.job.owner { 0 } else { 65_534 };
        let ops = [
            LogOp::Create {
                dir,
                name: name.as_bytes(),
                key,
                mode: 0o100_644,
                uid: user,
                gid: user,
                rdev: 0,
                target: b"",
            },
            LogOp::Write {
                key,
                offset: 0,
                data: b"its own",
            },
        ];
        for op in ops {
            let mut body = Vec::new();
            op.encode_body(&mut body);
            let seq = self.sessions[at].seq + 1;
            let meta = EntryMeta {
                seq: LogSeq(seq),
                stable_below: LogSeq(seq),
                ..EntryMeta::default()
            };
            let mut header = op.header(&meta, body.len());
            body.extend_from_slice(op.data());
            let session = &mut self.sessions[at];
            header.crc32c = entry_crc(payload_crc(crc_seed(session.welcome.session), &body), &header).into();
            let Some(log) = &session.log else { return Ok(()) };
            let _ = log.write_all_at(&[header.as_bytes(), body.as_slice()].concat(), session.pos);
            session.pos += entry_size(body.len()) as u64;
            session.seq = seq;
        }
        self.digest(at)
    }

    pub(super) fn op<'b>(
        &mut self,
        keys: [InodeKey; 4],
        name: &'b [u8],
        other: &'b [u8],
        data: &'b mut Vec<u8>,
    ) -> LogOp<'b> {
        let [key, dir, new_dir, victim] = keys;
        data.iter_mut().for_each(|byte| *byte = 0xee);
        let data: &'b [u8] = data;
        let offset = match self.rng.below(3) {
            0 => self.extreme(),
            _ => self.rng.below(50_000),
        };
        match self.rng.below(13) {
            0..=2 => LogOp::Write { key, offset, data },
            3 => LogOp::Truncate { key, size: offset },
            4 => LogOp::Fallocate {
                key,
                mode: FallocateMode::from_u32(self.rng.below(5) as u32).unwrap_or(FallocateMode::PunchHole),
                offset,
                len: self.extreme(),
            },
            5 => LogOp::SetAttr {
                key,
                attr: SetAttr {
                    mask: SetAttrMask::from_bits_truncate(self.rng.next_u64() as u32),
                    mode: self.rng.next_u64() as u32 & 0o7777,
                    uid: self.rng.below(3) as u32 * 32_767,
                    gid: self.rng.below(3) as u32 * 32_767,
                    atime_ns: self.rng.next_u64() as i64,
                    mtime_ns: self.rng.next_u64() as i64,
                },
            },
            6 => LogOp::SetXattr {
                key,
                name: if self.rng.below(2) == 0 { b"user.k" } else { name },
                value: data,
            },
            7 => LogOp::RemoveXattr { key, name: b"user.k" },
            8..=9 => LogOp::Create {
                dir,
                name,
                key,
                mode: [0o100_644, 0o040_777, 0o106_755, 0o060_600, 0o120_777, 0][self.rng.below(6) as usize],
                uid: if self.rng.below(4) == 0 { 0 } else { 65_534 },
                gid: 65_534,
                rdev: 0,
                target: if self.rng.below(4) == 0 { other } else { b"" },
            },
            10 => LogOp::Link { dir, name, key },
            11 => LogOp::Unlink { dir, name, key },
            _ => LogOp::Rename {
                dir,
                name,
                key,
                new_dir,
                new_name: other,
                victim: (self.rng.below(2) == 0).then_some(victim),
                exchange: self.rng.below(4) == 0,
            },
        }
    }

    /// Entries whose checksums are right, and what they say not always.
    pub(super) fn log_operations(&mut self) -> Outcome {
        let at = self.some_session();
        let owner = self.job.owner;
        for _ in 0..1 + self.rng.below(12) {
            let mut data = vec![0; 1 + self.rng.below(6000) as usize];
            let (name, other) = (self.name(), self.name());
            // In the log even the owner of the pool changes only what it has leases on: anything may be
            // named.
            let keys = if self.rng.below(2) == 0 {
                [self.own_key(), self.job.common, self.job.common, self.own_key()]
            } else {
                [self.any_key(), self.any_key(), self.any_key(), self.any_key()]
            };
            let _ = owner;
            let op = self.op(keys, &name, &other, &mut data);
            let mut body = Vec::new();
            op.encode_body(&mut body);
            let body_len = body.len().min(usize::from(u16::MAX));
            body.extend_from_slice(op.data());
            let strange = self.rng.below(4) == 0;
            let (seq, stable, base, tx_left) = if strange {
                (
                    self.extreme(),
                    self.extreme(),
                    self.extreme(),
                    self.rng.below(70) as u32,
                )
            } else {
                let next = self.sessions[at].seq + 1;
                (next, next, 0, 0)
            };
            let meta = EntryMeta {
                seq: LogSeq(seq),
                stable_below: LogSeq(stable),
                base: TxId(base),
                tx_left,
                time_ns: self.rng.next_u64() as i64,
                flags: EntryFlags::from_bits_retain(if self.rng.below(4) == 0 {
                    self.rng.next_u64() as u8
                } else {
                    0
                }),
            };
            let mut header = op.header(&meta, body_len);
            if self.rng.below(8) == 0 {
                let place = 4 + self.rng.below(60) as usize;
                header.as_mut_bytes()[place] = self.rng.next_u64() as u8;
            }
            let session = &mut self.sessions[at];
            let seed = crc_seed(session.welcome.session);
            header.crc32c = entry_crc(payload_crc(seed, &body), &header).into();
            let Some(log) = &session.log else { return Ok(()) };
            let bytes = [header.as_bytes(), body.as_slice()].concat();
            let size = entry_size(body.len());
            if session.pos % CHUNK_BYTES + size as u64 > CHUNK_BYTES {
                session.pos = session.pos.next_multiple_of(CHUNK_BYTES);
                if session.pos >= session.welcome.log_bytes {
                    session.pos = LIVE_HEADER_SIZE as u64;
                }
            }
            let _ = log.write_all_at(&bytes, session.pos);
            session.last = Some((session.pos, bytes.len()));
            if !strange {
                session.seq += 1;
            }
            session.pos += size as u64;
        }
        self.digest(at)
    }

    pub(super) fn digest(&mut self, at: usize) -> Outcome {
        let request = Request::Digest {
            upto: LogSeq(self.sessions[at].seq),
            wait: true,
        };
        self.sessions[at].wire.ask(&request, PATIENCE)?;
        Ok(())
    }

    pub(super) fn log_noise(&mut self) -> Outcome {
        let at = self.some_session();
        for _ in 0..1 + self.rng.below(20) {
            let bytes: Vec<u8> = (0..1 + self.rng.below(200))
                .map(|_| self.rng.next_u64() as u8)
                .collect();
            let session = &self.sessions[at];
            let place = match (self.rng.below(3), session.last) {
                (0, Some((place, len))) => place + self.rng.below(len as u64),
                (1, _) => self.rng.below(512),
                _ => self.rng.below(session.welcome.log_bytes.max(1)),
            };
            if let Some(log) = &self.sessions[at].log {
                let _ = log.write_all_at(&bytes, place);
            }
        }
        self.digest(at)
    }

    /// A second thread changes bytes of entries and the file's length while the daemon reads.
    pub(super) fn race(&mut self) -> Outcome {
        self.log_operations()?;
        let at = self.some_session();
        let seed = self.rng.next_u64();
        let session = &mut self.sessions[at];
        let Some(log) = session.log.as_ref().and_then(|log| log.try_clone().ok()) else {
            return Ok(());
        };
        let (place, len) = session.last.unwrap_or((LIVE_HEADER_SIZE as u64, 256));
        let (len, size) = (len as u64, session.welcome.log_bytes);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::new(seed);
                let mut good = vec![0; len as usize];
                let _ = log.read_exact_at(&mut good, place);
                while !stop.load(Ordering::Relaxed) {
                    match rng.below(8) {
                        0 => {
                            let _ = log.set_len(rng.below(size));
                            let _ = log.set_len(size);
                        }
                        1..=3 => {
                            let _ = log.write_all_at(&good, place);
                        }
                        _ => {
                            let byte = [rng.next_u64() as u8];
                            let _ = log.write_all_at(&byte, place + rng.below(len));
                        }
                    }
                }
            });
            let outcome = (|| {
                for _ in 0..4 {
                    let upto = LogSeq(session.seq);
                    session
                        .wire
                        .ask(&Request::Digest { upto, wait: true }, PATIENCE)?;
                }
                Ok(())
            })();
            stop.store(true, Ordering::Relaxed);
            outcome
        })
    }

    /// Logs that are shorter or longer than they were.
    pub(super) fn lengths(&mut self) -> Outcome {
        let at = self.some_session();
        let len = match self.rng.below(8) {
            0 => 0,
            1 => 64,
            2 => 4095,
            3 => 4096,
            4 => 1 << 20,
            5 => 1 << 40,
            6 => self.rng.below(8 << 20),
            _ => 4 << 20,
        };
        let which = self.rng.below(3);
        let session = &mut self.sessions[at];
        for (turn, fd) in [(0, &session.given.log), (1, &session.given.backing)] {
            if which != 2 && which != turn {
                continue;
            }
            if let Some(file) = fd.as_ref().and_then(|fd| fd.try_clone().ok()).map(File::from) {
                let _ = file.set_len(len);
                if len == 4 << 20 {
                    // Space, not only a length.
                    let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 16 << 20);
                }
                let _ = file.write_all_at(b"more", len.min(1 << 41));
            }
        }
        self.digest(at)?;
        if self.rng.below(3) == 0 {
            let request = Request::GrowLog { len_bytes: 8 << 20 };
            self.sessions[at].wire.ask(&request, PATIENCE)?;
        }
        Ok(())
    }

    pub(super) fn write_page(&mut self) -> Outcome {
        let at = self.some_session();
        let given = &self.sessions[at].given;
        let mut wrong = Vec::new();
        for (what, fd) in [
            ("the session page", &given.page),
            ("the pool's memory", &given.nvm),
        ] {
            let Some(file) = fd.as_ref().and_then(|fd| fd.try_clone().ok()).map(File::from) else {
                continue;
            };
            // Another open file on the same inode would be the owner's own right.
            if file.write_all_at(&[2; 64], 0).is_ok() || file.set_len(0).is_ok() {
                wrong.push(what);
            }
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            if !self.job.owner && File::options().write(true).open(path).is_ok() {
                wrong.push(what);
            }
        }
        for what in wrong {
            self.forbidden(&format!("{what} can be written"));
        }
        Ok(())
    }
}
