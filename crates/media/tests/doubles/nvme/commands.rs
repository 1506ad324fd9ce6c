//! What the simulated device does at each command, and how it answers.

use super::{Pending, Queue, Quirk, State};

const PAGE: u64 = 4096;
const INVALID_OPCODE: u16 = 0x01 | 0x4000;
const INVALID_FIELD: u16 = 0x02 | 0x4000;
const OUT_OF_RANGE: u16 = 0x80 | 0x4000;
const INVALID_NAMESPACE: u16 = 0x0b | 0x4000;

fn word(bytes: &[u8; 64], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8; 64], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

impl State {
    /// Carries a command out and posts its completion.
    pub(super) fn answer(&mut self, pending: &Pending) {
        let command = &pending.bytes;
        let (status, result) = match pending.quirk {
            Some(Quirk::Status(status)) => (status, 0),
            Some(Quirk::Lie) => (0, 0),
            _ if pending.stale => (0, 0),
            _ if pending.queue == 0 => self.administer(command),
            _ => (self.transfer(command), 0),
        };
        let id = u16::from_le_bytes([command[2], command[3]]);
        self.post(pending, id, status, result);
        if pending.quirk == Some(Quirk::Duplicate) {
            self.post(pending, id, status, result);
        }
    }

    fn post(&mut self, pending: &Pending, id: u16, status: u16, result: u32) {
        let (queue_id, quirk) = (pending.queue, pending.quirk);
        let sq_head = self.submission.get(&queue_id).map_or(0, |queue| queue.head);
        let Some(queue) = self.completion.get_mut(&queue_id) else {
            // Late, and the queue was not made again.
            return;
        };
        let Queue {
            address,
            tail,
            phase,
            entries,
            ..
        } = *queue;
        queue.tail += 1;
        if queue.tail == entries {
            (queue.tail, queue.phase) = (0, !phase);
        }
        let phase = phase ^ (quirk == Some(Quirk::WrongPhase));
        let mut entry = [0; 16];
        if quirk == Some(Quirk::Garbage) {
            for part in entry.chunks_mut(4) {
                part.copy_from_slice(&(self.random() as u32).to_le_bytes());
            }
            entry[14] = entry[14] & !1 | u8::from(phase);
        } else {
            let id = match quirk {
                Some(Quirk::WrongId(flip)) => id ^ flip.max(1),
                _ => id,
            };
            let head = if quirk == Some(Quirk::HeadPastEnd) {
                u16::MAX
            } else {
                sq_head
            };
            let named = queue_id + u16::from(quirk == Some(Quirk::WrongQueue));
            entry[..4].copy_from_slice(&result.to_le_bytes());
            entry[8..10].copy_from_slice(&head.to_le_bytes());
            entry[10..12].copy_from_slice(&named.to_le_bytes());
            entry[12..14].copy_from_slice(&id.to_le_bytes());
            entry[14..].copy_from_slice(&(status << 1 | u16::from(phase)).to_le_bytes());
        }
        self.dma_write(address + 16 * u64::from(tail), &entry);
    }

    fn administer(&mut self, command: &[u8; 64]) -> (u16, u32) {
        let (dword10, dword11) = (word(command, 40), word(command, 44));
        match command[0] {
            0x06 => {
                let mut bytes = vec![0u8; 4096];
                match dword10 {
                    _ if self.shape.random_identity => {
                        for byte in &mut bytes {
                            *byte = self.random() as u8;
                        }
                    }
                    1 => self.controller_identity(&mut bytes),
                    0 => self.namespace_identity(&mut bytes, word(command, 4)),
                    _ => return (INVALID_FIELD, 0),
                }
                self.dma_write(long(command, 24), &bytes);
                (0, 0)
            }
            0x09 if dword10 == 7 => {
                let given = u32::from(self.shape.queues.saturating_sub(1));
                (0, given << 16 | given)
            }
            0x01 | 0x05 => {
                let (id, size) = (dword10 as u16, (dword10 >> 16) as u16);
                if size > self.shape.mqes || size == 0 || dword11 & 1 == 0 {
                    self.violation(format!("queue {id} created with size {size}, {dword11:#x}"));
                }
                if id == 0 || id > self.shape.queues_real {
                    return (0x101 | 0x4000, 0);
                }
                let queue = Queue {
                    address: long(command, 24),
                    entries: size + 1,
                    phase: true,
                    ..Queue::default()
                };
                if command[0] == 0x05 {
                    self.completion.insert(id, queue);
                } else if dword11 >> 16 != u32::from(id) || !self.completion.contains_key(&id) {
                    self.violation(format!("queue {id} created without its completion queue"));
                } else {
                    self.submission.insert(id, queue);
                }
                (0, 0)
            }
            _ => (INVALID_OPCODE, 0),
        }
    }

    fn controller_identity(&self, bytes: &mut [u8]) {
        bytes[4..10].copy_from_slice(b"SERIAL");
        bytes[24..29].copy_from_slice(b"MODEL");
        bytes[77] = self.shape.mdts;
        (bytes[512], bytes[513]) = (0x66, 0x44);
        bytes[516..520].copy_from_slice(&self.shape.namespaces.to_le_bytes());
        bytes[520] = u8::from(self.shape.can_deallocate) << 2;
        bytes[525] = u8::from(self.shape.write_cache);
    }

    fn namespace_identity(&self, bytes: &mut [u8], nsid: u32) {
        if nsid != 1 {
            return;
        }
        bytes[..8].copy_from_slice(&self.shape.sectors.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.shape.sectors.to_le_bytes());
        let format = u32::from(self.shape.metadata_bytes) | u32::from(self.shape.sector_shift) << 16;
        bytes[128..132].copy_from_slice(&format.to_le_bytes());
    }

    /// Addresses of the pages of a transfer, as the command gives them.
    fn pages(&mut self, command: &[u8; 64], bytes: u64) -> Vec<u64> {
        let (first, second) = (long(command, 24), long(command, 32));
        let count = bytes.div_ceil(PAGE);
        if !first.is_multiple_of(PAGE) {
            self.violation(format!("first page at {first:#x}"));
        }
        match count {
            0 | 1 => vec![first],
            2 => vec![first, second],
            _ => {
                let mut pages = vec![first];
                for index in 0..count - 1 {
                    let mut entry = [0; 8];
                    self.dma_read(second + 8 * index, &mut entry);
                    pages.push(u64::from_le_bytes(entry));
                }
                pages
            }
        }
    }

    fn transfer(&mut self, command: &[u8; 64]) -> u16 {
        if word(command, 4) != 1 {
            return INVALID_NAMESPACE;
        }
        let shift = self.shape.sector_shift;
        let (first, count) = (long(command, 40), u64::from(word(command, 48) & 0xffff) + 1);
        let range = || first.checked_add(count).filter(|end| *end <= self.shape.sectors);
        match command[0] {
            0x00 => {
                if !self.shape.lies_about_flush {
                    self.write_back();
                }
                0
            }
            0x01 | 0x02 => {
                if range().is_none() {
                    return OUT_OF_RANGE;
                }
                let bytes = count << shift;
                if self.shape.mdts > 0 && bytes > PAGE << self.shape.mdts {
                    self.violation(format!("transfer of {bytes} bytes"));
                    return INVALID_FIELD;
                }
                let pages = self.pages(command, bytes);
                if command[0] == 0x02 {
                    let data = self.sectors(first, count);
                    for (part, page) in data.chunks(PAGE as usize).zip(pages) {
                        self.dma_write(page, part);
                    }
                    return 0;
                }
                let mut data = vec![0; bytes as usize];
                for (part, page) in data.chunks_mut(PAGE as usize).zip(pages) {
                    self.dma_read(page, part);
                }
                let durable = word(command, 48) >> 30 & 1 == 1;
                self.counts.durable_writes += u64::from(durable);
                for (index, part) in data.chunks(1 << shift).enumerate() {
                    self.store(first + index as u64, part, durable);
                }
                0
            }
            0x09 if self.shape.can_deallocate => self.deallocate(command),
            _ => INVALID_OPCODE,
        }
    }

    fn deallocate(&mut self, command: &[u8; 64]) -> u16 {
        let count = u64::from(word(command, 40) & 0xff) + 1;
        let pages = self.pages(command, count * 16);
        for index in 0..count {
            let mut range = [0; 16];
            self.dma_read(pages[0] + 16 * index, &mut range);
            let mut padded = [0; 64];
            padded[..16].copy_from_slice(&range);
            let (first, sectors) = (long(&padded, 8), u64::from(word(&padded, 4)));
            if first + sectors > self.shape.sectors {
                return OUT_OF_RANGE;
            }
            for sector in first..first + sectors {
                self.store(sector, &vec![0; 1 << self.shape.sector_shift], false);
            }
        }
        0
    }

    fn store(&mut self, sector: u64, bytes: &[u8], durable: bool) {
        let at = (sector << self.shape.sector_shift) as usize;
        if durable || !self.shape.write_cache {
            self.cache.remove(&sector);
            self.disk[at..at + bytes.len()].copy_from_slice(bytes);
        } else {
            self.cache.insert(sector, bytes.to_vec());
        }
    }

    fn sectors(&self, first: u64, count: u64) -> Vec<u8> {
        let size = 1usize << self.shape.sector_shift;
        let mut out = Vec::new();
        for sector in first..first + count {
            let at = sector as usize * size;
            match self.cache.get(&sector) {
                Some(bytes) => out.extend_from_slice(bytes),
                None => out.extend_from_slice(&self.disk[at..at + size]),
            }
        }
        out
    }

    /// Makes what is cached durable.
    pub(super) fn write_back(&mut self) {
        for (sector, bytes) in std::mem::take(&mut self.cache) {
            let at = (sector << self.shape.sector_shift) as usize;
            self.disk[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }
}
