//! Objects that are too large for one gathered write: their room is reserved, their frames go straight to the
//! device, and they enter the index when they are complete. Other puts proceed meanwhile.

use super::StoreError;
use super::log::in_units;
use super::object::{FRAME_CONTENT, INLINE_BYTES, Record, frames_bytes, write_frame};
use super::put::{Item, PutOptions, PutOutcome, check_lengths};
use super::shard::{Shard, Writer};
use super::stats::Stats;
use crate::hash::KeyHash;
use crate::index::LogPoint;
use std::sync::Arc;

/// Frames written to the device at once.
const WRITE_FRAMES: usize = 16;

/// The parts of a large object that is being put.
struct Large {
    record: Record,
    /// Bytes beside the head.
    inline_len: usize,
    inline: Vec<u8>,
    /// Content of the frames that are being filled.
    frames: Vec<u8>,
    next_frame: u32,
    /// Device offset of the next frame.
    off: u64,
    content_len: u64,
    got: u64,
}

/// An object that is being put piece by piece. None of it is served before [`finish`](Self::finish); it is
/// discarded if it is dropped earlier.
pub struct PutStream {
    shard: Arc<Shard>,
    key: Vec<u8>,
    hash: KeyHash,
    kind: Kind,
    body_len: u64,
}

enum Kind {
    /// Gathered in memory and put at the end.
    Small {
        body: Vec<u8>,
        options: Owned,
    },
    Large(Box<Large>),
    /// Not admitted, too large, or no device: bytes are only counted.
    Refused {
        outcome: PutOutcome,
        got: u64,
    },
}

/// [`PutOptions`] in owned form.
struct Owned {
    meta: Vec<u8>,
    tags: Vec<Vec<u8>>,
    host: Option<Vec<u8>>,
    expires_s: u64,
}

impl Shard {
    /// Begins to put an object of `body_len` bytes.
    ///
    /// # Errors
    /// `TooLong`; errors of the device give it up, and the outcome says so.
    pub fn put_stream(
        self: &Arc<Self>,
        key: &[u8],
        hash: KeyHash,
        body_len: u64,
        options: &PutOptions<'_>,
    ) -> Result<PutStream, StoreError> {
        check_lengths(key, options)?;
        let content_len = options.meta.len() as u64 + body_len;
        let kind = if frames_bytes(content_len) + INLINE_BYTES as u64 <= u64::from(self.layout.segment_bytes)
        {
            Kind::Small {
                body: Vec::with_capacity(body_len as usize),
                options: Owned {
                    meta: options.meta.to_vec(),
                    tags: options.tags.iter().map(|tag| tag.to_vec()).collect(),
                    host: options.host.map(<[u8]>::to_vec),
                    expires_s: options.expires_s,
                },
            }
        } else {
            self.begin_large(key, hash, body_len, options)
        };
        Ok(PutStream {
            shard: Arc::clone(self),
            key: key.to_vec(),
            hash,
            kind,
            body_len,
        })
    }

    fn begin_large(&self, key: &[u8], hash: KeyHash, body_len: u64, options: &PutOptions<'_>) -> Kind {
        let mut writer = self.writer.lock();
        Stats::count(&self.stats.puts, 1);
        let refused = |outcome| Kind::Refused { outcome, got: 0 };
        if self.is_failed() || writer.closed {
            return refused(PutOutcome::Unavailable);
        }
        let admitted = writer.door.admits(hash);
        let begun = self.guarded(&mut writer, |shard, writer| {
            // Removes the old version first: a stream that breaks off must not leave it.
            shard.remove_for_stream(writer, key, hash)?;
            if !admitted {
                return Ok(Err(PutOutcome::NotAdmitted));
            }
            let mut record = shard.new_record(writer, key, options);
            record.head.body_len = body_len;
            shard.reserve_for(writer, record)
        });
        match begun {
            Ok(Ok(mut large)) => large
                .take(self, options.meta)
                .map_or(refused(PutOutcome::Unavailable), |()| Kind::Large(large)),
            Ok(Err(outcome)) => refused(outcome),
            Err(_) => refused(PutOutcome::Unavailable),
        }
    }

    /// Reserves room for a large object.
    fn reserve_for(
        &self,
        writer: &mut Writer,
        mut record: Record,
    ) -> Result<Result<Box<Large>, PutOutcome>, StoreError> {
        let has_table = self.layout.shape().policy().has_table();
        let beside = if has_table {
            self.layout.block_bytes as usize
        } else {
            INLINE_BYTES
        };
        let content_len = record.content_len();
        let inline_len = (beside - record.head_bytes()).min(content_len as usize);
        let before = if has_table { 0 } else { INLINE_BYTES as u64 };
        let bytes = frames_bytes(content_len - inline_len as u64) + before;
        if bytes > self.layout.log.len / 2 {
            return Ok(Err(PutOutcome::TooLarge));
        }
        let start = self.reserve_large(writer, bytes)?;
        let tail = LogPoint(start.0 + in_units(&self.layout, before));
        record.head.home = start.0;
        record.head.tail = tail.0;
        Ok(Ok(Box::new(Large {
            record,
            inline_len,
            inline: Vec::with_capacity(inline_len),
            frames: Vec::new(),
            next_frame: 0,
            off: self.device_off(tail),
            content_len,
            got: 0,
        })))
    }

    /// Puts a large object after all its bytes were written.
    pub(super) fn put_large(
        &self,
        writer: &mut Writer,
        record: Record,
        content: &[u8],
        hash: KeyHash,
    ) -> Result<PutOutcome, StoreError> {
        match self.reserve_for(writer, record)? {
            Err(outcome) => {
                self.remove_for_stream(writer, &[], hash)?;
                Ok(outcome)
            }
            Ok(mut large) => {
                large.take(self, content)?;
                self.finish_large(writer, *large, hash)
            }
        }
    }

    fn finish_large(
        &self,
        writer: &mut Writer,
        mut large: Large,
        hash: KeyHash,
    ) -> Result<PutOutcome, StoreError> {
        large.write_frames(self)?;
        // If the put took so long that the log has overwritten the frames, the object is not indexed.
        let alive = {
            let lap = self.state.lock().lap;
            lap.head.0 <= large.record.head.tail + lap.units
        };
        if !alive {
            return Ok(PutOutcome::Unavailable);
        }
        writer.dirty = true;
        let version = large.record.head.version;
        if self.layout.shape().policy().has_table() {
            return self.put_bin(writer, large.record, &large.inline, hash);
        }
        let point = LogPoint(large.record.head.home);
        let mut first = Vec::with_capacity(INLINE_BYTES);
        large.record.write(&large.inline, &mut first);
        first.resize(INLINE_BYTES, 0);
        self.write_log(self.device_off(point), &first)?;
        self.index_log(writer, hash, point, 0);
        Ok(PutOutcome::Stored { version })
    }

    fn remove_for_stream(&self, writer: &mut Writer, key: &[u8], hash: KeyHash) -> Result<(), StoreError> {
        self.remove_locked(writer, key, hash)
    }
}

impl Large {
    /// Takes the next bytes of the content.
    fn take(&mut self, shard: &Shard, mut bytes: &[u8]) -> Result<(), StoreError> {
        self.got += bytes.len() as u64;
        if self.inline.len() < self.inline_len {
            let (beside, rest) = bytes.split_at(bytes.len().min(self.inline_len - self.inline.len()));
            self.inline.extend_from_slice(beside);
            bytes = rest;
        }
        while !bytes.is_empty() {
            let (now, rest) =
                bytes.split_at(bytes.len().min(WRITE_FRAMES * FRAME_CONTENT - self.frames.len()));
            self.frames.extend_from_slice(now);
            bytes = rest;
            if self.frames.len() == WRITE_FRAMES * FRAME_CONTENT {
                self.write_frames(shard)?;
            }
        }
        Ok(())
    }

    fn write_frames(&mut self, shard: &Shard) -> Result<(), StoreError> {
        let mut out = Vec::with_capacity(self.frames.len() + 4096);
        for content in self.frames.chunks(FRAME_CONTENT) {
            write_frame(self.record.head.version, self.next_frame, content, &mut out);
            self.next_frame += 1;
        }
        self.frames.clear();
        if out.is_empty() {
            return Ok(());
        }
        out.resize(out.len().next_multiple_of(super::layout::PAGE as usize), 0);
        shard.write_log(self.off, &out)?;
        self.off += out.len() as u64;
        Ok(())
    }
}

impl PutStream {
    /// Takes the next bytes of the body.
    ///
    /// # Errors
    /// `Length`, when the bytes exceed the declared length; the stream is unusable then.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let got = self.got() + bytes.len() as u64;
        if got > self.body_len {
            return Err(StoreError::Length {
                expected: self.body_len,
                got,
            });
        }
        let failed = match &mut self.kind {
            Kind::Small { body, .. } => {
                body.extend_from_slice(bytes);
                None
            }
            Kind::Large(large) => large.take(&self.shard, bytes).err(),
            Kind::Refused { got, .. } => {
                *got += bytes.len() as u64;
                None
            }
        };
        if let Some(error) = failed {
            self.shard.fail(&error);
            self.kind = Kind::Refused {
                outcome: PutOutcome::Unavailable,
                got,
            };
        }
        Ok(())
    }

    fn got(&self) -> u64 {
        match &self.kind {
            Kind::Small { body, .. } => body.len() as u64,
            Kind::Large(large) => large.got - u64::from(large.record.head.meta_len),
            Kind::Refused { got, .. } => *got,
        }
    }

    /// Puts the object after all its bytes were written.
    ///
    /// # Errors
    /// `Length`, when there are fewer bytes than declared; nothing is put then.
    pub fn finish(self) -> Result<PutOutcome, StoreError> {
        let (got, expected) = (self.got(), self.body_len);
        if got != expected {
            return Err(StoreError::Length { expected, got });
        }
        let Self {
            shard,
            key,
            hash,
            kind,
            ..
        } = self;
        match kind {
            Kind::Small { body, options } => {
                let tags: Vec<&[u8]> = options.tags.iter().map(Vec::as_slice).collect();
                let options = PutOptions {
                    meta: &options.meta,
                    tags: &tags,
                    host: options.host.as_deref(),
                    expires_s: options.expires_s,
                };
                shard.put(&Item {
                    key: &key,
                    hash,
                    body: &body,
                    options,
                })
            }
            Kind::Refused { outcome, .. } => Ok(outcome),
            Kind::Large(large) => {
                debug_assert_eq!(large.got, large.content_len);
                let mut writer = shard.writer.lock();
                if shard.is_failed() || writer.closed {
                    return Ok(PutOutcome::Unavailable);
                }
                let bytes = key.len() + large.content_len as usize;
                let done = shard.guarded(&mut writer, |shard, writer| {
                    let outcome = shard.finish_large(writer, *large, hash)?;
                    shard.after_put(writer)?;
                    Ok(outcome)
                });
                let outcome = done.unwrap_or(PutOutcome::Unavailable);
                if matches!(outcome, PutOutcome::Stored { .. }) {
                    shard.count_admitted(bytes);
                }
                Ok(outcome)
            }
        }
    }
}
