//! What a hostile client says to the daemon: any message, at any time, whole or not, with descriptors, by the
//! thousand.

use super::{Attacker, Outcome, PATIENCE};
use crate::client::{Wire, frame};
use std::fs::File;
use std::os::fd::AsFd;
use varve_format::log::{CHUNK_BYTES, EntryMeta};
use varve_format::{FileBlock, Ino, LeaseNo, LogSeq, TxId};
use varve_ipc::{
    Admin, Cred, ForwardedOp, LeaseMode, Near, ReadRun, ReleaseItem, Request, Response, Tell, Upcall, Want,
    Watched,
};
use zerocopy::IntoBytes;

impl Attacker {
    /// Does what the daemon asks for, at last.
    pub(super) fn behave(&mut self) -> Outcome {
        let at = self.some_session();
        let session = &mut self.sessions[at];
        session.wire.ask(&Request::StatFs, PATIENCE)?;
        for upcall in std::mem::take(&mut session.wire.upcalls) {
            let request = match upcall {
                Upcall::Revoke { key, lease, .. } => {
                    session.leases.retain(|(of, _)| *of != key);
                    Request::Release {
                        items: vec![ReleaseItem {
                            key,
                            lease,
                            downgrade: false,
                            last_seq: LogSeq(0),
                            open: false,
                            changes: 0,
                            cached_ms: 0,
                        }],
                    }
                }
                Upcall::Barrier { tx, .. } => Request::BarrierAck { tx },
                Upcall::Sharing => Request::SharingNoted,
                Upcall::ReclaimReservations => Request::ReturnReservation {
                    blocks: self.rng.below(2) * (1 << 20),
                    of: u64::MAX,
                },
                Upcall::Exclusive | Upcall::Sealed => continue,
            };
            session.wire.send(&request)?;
        }
        Ok(())
    }

    pub(super) fn request(&mut self) -> Request {
        let extreme = |rng: &mut Self| rng.extreme();
        match self.rng.below(28) {
            0 => Request::Hello(self.hello()),
            1 => Request::SharingNoted,
            2 => Request::Lookup {
                dir: self.any_key(),
                name: self.name(),
            },
            3 => Request::GetAttr { key: self.any_key() },
            4..=5 => {
                let count = if self.rng.below(20) == 0 {
                    300
                } else {
                    self.rng.below(5)
                };
                let write = self.rng.below(2) == 0;
                let wants = (0..count).map(|_| Want {
                    key: if write {
                        self.key_to_change()
                    } else {
                        self.any_key()
                    },
                    mode: if write { LeaseMode::Write } else { LeaseMode::Read },
                });
                let wants = wants.collect();
                if self.rng.below(2) == 0 {
                    Request::Acquire { wants }
                } else {
                    let these = if self.rng.below(10) == 0 {
                        200
                    } else {
                        self.rng.below(20)
                    };
                    let near = Near {
                        these: (0..these).map(|_| self.any_key()).collect(),
                        after: Ino(extreme(self)),
                        count: self.rng.next_u64() as u16 % 200,
                        mode: if write { LeaseMode::Write } else { LeaseMode::Read },
                        tell: Tell {
                            names: self.rng.below(2) == 0,
                            extents: self.rng.below(2) == 0,
                        },
                    };
                    Request::AcquireNear { wants, near }
                }
            }
            6 => {
                let items = (0..self.rng.below(6)).map(|_| ReleaseItem {
                    key: self.any_key(),
                    lease: LeaseNo(self.extreme()),
                    downgrade: self.rng.below(2) == 0,
                    last_seq: LogSeq(self.extreme()),
                    open: self.rng.below(2) == 0,
                    changes: self.extreme() as u32,
                    cached_ms: self.extreme() as u32,
                });
                Request::Release {
                    items: items.collect(),
                }
            }
            7 | 8 => {
                let count = if self.rng.below(10) == 0 {
                    5000
                } else {
                    self.rng.below(200)
                };
                let keys = (0..count).map(|_| self.any_key()).collect();
                if self.rng.below(2) == 0 {
                    Request::Drop { keys }
                } else {
                    Request::Hold { keys }
                }
            }
            9 => Request::AllocInodes {
                near: self.any_key(),
                count: self.rng.next_u64() as u16 % 300,
            },
            10 => Request::ReadDir {
                dir: self.any_key(),
                cookie: extreme(self),
                max: extreme(self) as u32,
            },
            11 => Request::ReadLink { key: self.any_key() },
            12 => Request::Xattrs { key: self.any_key() },
            13 if self.rng.below(3) == 0 => {
                // Now and then more than are allowed.
                let count = self.rng.below(40);
                Request::MapFiles {
                    keys: (0..count).map(|_| self.any_key()).collect(),
                }
            }
            13 => Request::MapExtents {
                key: self.any_key(),
                from: FileBlock(extreme(self)),
                max: extreme(self) as u32,
            },
            14..=15 => Request::ReadData {
                key: self.any_key(),
                offset: extreme(self),
                len: extreme(self) as u32 % (2 << 20),
            },
            16 if self.rng.below(4) == 0 => Request::NoteReads { reads: self.reads() },
            16 if self.rng.below(2) == 0 => {
                // Now and then more than are allowed.
                let count = if self.rng.below(8) == 0 {
                    1025
                } else {
                    self.rng.below(5)
                };
                let ranges = (0..count).map(|_| (extreme(self), extreme(self))).collect();
                Request::SyncLog { ranges }
            }
            16 => Request::GrowLog {
                len_bytes: extreme(self) & !(CHUNK_BYTES - 1) | self.rng.below(2),
            },
            17 => Request::Reserve {
                blocks: extreme(self) as u32,
                least: extreme(self) as u32,
            },
            18 => Request::Digest {
                upto: LogSeq(extreme(self)),
                wait: self.rng.below(2) == 0,
            },
            19..=20 => self.forward(),
            21 => Request::BarrierAck {
                tx: TxId(extreme(self)),
            },
            22 => Request::StatFs,
            24 => Request::Watched,
            25 => Request::SetWatched(Watched {
                all: self.rng.below(2) == 0,
                numbers: (0..self.rng.below(6000)).map(|_| self.extreme()).collect(),
            }),
            23 => Request::ReturnReservation {
                blocks: extreme(self),
                of: extreme(self),
            },
            _ if self.job.owner => Request::Admin(Admin::Status),
            _ => Request::Admin(
                [
                    Admin::Status,
                    Admin::DigestAll,
                    Admin::Fsck,
                    Admin::Scrub,
                    Admin::Shutdown,
                ][self.rng.below(5) as usize]
                    .clone(),
            ),
        }
    }

    /// Reads that it may have made, now and then more than are allowed.
    fn reads(&mut self) -> Vec<ReadRun> {
        let count = if self.rng.below(8) == 0 {
            300
        } else {
            self.rng.below(20)
        };
        let mut run = || ReadRun {
            key: self.any_key(),
            from: FileBlock(self.extreme()),
            blocks: self.extreme() as u32,
        };
        (0..count).map(|_| run()).collect()
    }

    pub(super) fn forward(&mut self) -> Request {
        let mut data = vec![0; self.rng.below(9000) as usize];
        let (name, other) = (self.name(), self.name());
        let keys = [
            self.key_to_change(),
            self.key_to_change(),
            self.key_to_change(),
            self.key_to_change(),
        ];
        let op = self.op(keys, &name, &other, &mut data);
        let mut entry = Vec::new();
        op.encode_body(&mut entry);
        let body_len = entry.len().min(usize::from(u16::MAX));
        entry.extend_from_slice(op.data());
        let mut bytes = op.header(&EntryMeta::default(), body_len).as_bytes().to_vec();
        bytes.extend(entry);
        if self.rng.below(3) == 0 && !bytes.is_empty() {
            let at = self.rng.below(bytes.len() as u64) as usize;
            // Not the inode of an owner's operation: that would be an operation that it may do.
            if !(self.job.owner && (24..40).contains(&at)) {
                bytes[at] = self.rng.next_u64() as u8;
            }
        }
        bytes.truncate(match self.rng.below(8) {
            0 => self.rng.below(bytes.len() as u64 + 1) as usize,
            _ => usize::MAX,
        });
        // Rename and others have inodes in their body: what an owner says must be its own there too.
        let cred = if self.job.owner || self.rng.below(2) == 0 {
            Cred {
                uid: 65_534,
                gid: 65_534,
                groups: Vec::new(),
            }
        } else {
            Cred {
                uid: 0,
                gid: 0,
                groups: vec![0; self.rng.below(100) as usize],
            }
        };
        Request::Forward(ForwardedOp {
            whiteout: self.rng.below(2) == 0,
            entry: bytes,
            append: self.rng.below(2) == 0,
            open: self.rng.below(2) == 0,
            cred,
            number: match self.rng.below(4) {
                0 => self.extreme(),
                _ => 1 + self.rng.below(20),
            },
        })
    }

    pub(super) fn ask_anything(&mut self) -> Outcome {
        let request = self.request();
        let at = self.some_session();
        let answer = self.sessions[at].wire.ask(&request, PATIENCE)?;
        match answer {
            Some(Ok(Response::Granted(grants))) => {
                if let Request::Acquire { wants } = &request {
                    let keys = wants.iter().map(|want| want.key);
                    self.sessions[at]
                        .leases
                        .extend(keys.zip(grants).map(|(key, grant)| (key, grant.lease)));
                }
            }
            Some(Ok(Response::Bytes(bytes))) if !self.job.owner => {
                let secret = &self.job.secret;
                if bytes.windows(secret.len()).any(|window| window == secret) {
                    self.forbidden(&format!("{request:?} shows what another user keeps secret"));
                }
            }
            Some(Ok(Response::Json(_))) if !self.job.owner => {
                self.forbidden("an operator's question was answered")
            }
            _ => {}
        }
        Ok(())
    }

    /// Bytes that are no message, and messages in the wrong order.
    pub(super) fn raw(&mut self) -> Outcome {
        let hello = frame(0, &Request::Hello(self.hello()));
        let request = frame(1, &self.request());
        let mut wire = Wire::connect(&self.job.socket)?;
        let noise: Vec<u8> = (0..self.rng.below(5000))
            .map(|_| self.rng.next_u64() as u8)
            .collect();
        let _ = match self.rng.below(8) {
            0 => wire.send_bytes(&noise),
            1 => wire.send_bytes(&u32::MAX.to_le_bytes()),
            2 => wire.send_bytes(&0_u32.to_le_bytes()),
            3 => wire.send_bytes(&hello[..self.rng.below(hello.len() as u64) as usize]),
            4 => wire.send_bytes(&request),
            5 => {
                // A frame whose length is right and whose inside is not.
                let mut bytes = (noise.len() as u32).to_le_bytes().to_vec();
                bytes.extend(&noise);
                wire.send_bytes(&bytes)
            }
            6 => {
                let mut bytes = hello.clone();
                let at = 4 + self.rng.below(bytes.len() as u64 - 4) as usize;
                bytes[at] ^= 1 << self.rng.below(8);
                wire.send_bytes(&bytes)
            }
            _ => wire.send_bytes(&[hello.clone(), hello, request].concat()),
        };
        wire.drain();
        if self.rng.below(2) == 0 {
            let at = self.some_session();
            let bytes = frame(7, &self.request());
            let cut = self.rng.below(bytes.len() as u64) as usize;
            self.sessions[at].wire.send_bytes(&bytes[..cut])?;
            self.sessions.swap_remove(at);
        }
        Ok(())
    }

    pub(super) fn descriptors(&mut self) -> Outcome {
        let file = File::open("/dev/null")?;
        let fds = vec![file.as_fd(); 1 + self.rng.below(30) as usize];
        let bytes = frame(1_000_000, &Request::StatFs);
        let at = self.some_session();
        let cut = 1 + self.rng.below(bytes.len() as u64) as usize;
        let session = &self.sessions[at];
        let sent = session.wire.send_with(&bytes[..cut], &fds)?;
        session.wire.send_bytes(&bytes[sent..])?;
        let fresh = Wire::connect(&self.job.socket)?;
        let hello = frame(0, &Request::Hello(self.hello()));
        fresh.send_with(&hello, &fds)?;
        Ok(())
    }

    pub(super) fn flood(&mut self) -> Outcome {
        let at = self.some_session();
        let requests: Vec<_> = (0..16).map(|_| frame(9, &self.request())).collect();
        for _ in 0..20 {
            for bytes in &requests {
                self.sessions[at].wire.send_bytes(bytes)?;
            }
        }
        // Half of the time nobody reads the answers.
        if self.rng.below(2) == 0 {
            self.sessions[at].wire.drain();
        } else {
            self.sessions.swap_remove(at);
        }
        Ok(())
    }

    pub(super) fn hang(&mut self) -> Outcome {
        for _ in 0..self.rng.below(12) {
            let wire = Wire::connect(&self.job.socket)?;
            if self.rng.below(2) == 0 {
                let _ = wire.send_bytes(&[9, 0]);
            }
            self.idle.push(wire);
        }
        if self.idle.len() > 40 {
            self.idle.drain(..30);
        }
        Ok(())
    }

    pub(super) fn goodbye(&mut self) -> Outcome {
        let at = self.some_session();
        self.sessions[at].wire.send(&Request::Bye)?;
        for _ in 0..4 {
            let request = self.request();
            self.sessions[at].wire.ask(&request, PATIENCE)?;
        }
        Ok(())
    }

    pub(super) fn resume(&mut self) -> Outcome {
        let token = match (self.rng.below(3), self.tokens.as_slice()) {
            (1.., [_, ..]) => *self.rng.pick(&self.tokens),
            _ => u128::from(self.rng.next_u64()),
        };
        let mut hello = self.hello();
        hello.resume = Some(token);
        let victims = self.job.victims.clone();
        hello.held.extend(&victims);
        self.open_with(hello)?;
        if self.job.owner {
            return Ok(());
        }
        // What it says to have open it may not read for that.
        let at = self.sessions.len().saturating_sub(1);
        for key in victims {
            let wants = vec![Want {
                key,
                mode: LeaseMode::Read,
            }];
            let secret = self.job.secret.clone();
            let Some(session) = self.sessions.get_mut(at) else {
                break;
            };
            session.wire.ask(&Request::Acquire { wants }, PATIENCE)?;
            let read = Request::ReadData {
                key,
                offset: 0,
                len: 4096,
            };
            if let Some(Ok(Response::Bytes(bytes))) = session.wire.ask(&read, PATIENCE)?
                && bytes.windows(secret.len()).any(|window| window == secret)
            {
                self.forbidden("a session that says to have had a file open may read it");
            }
        }
        Ok(())
    }
}
