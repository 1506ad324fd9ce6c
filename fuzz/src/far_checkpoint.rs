//! Checkpoints of far objects: roots and segments of tables. Owns what must hold whatever the bytes say: a
//! file is restored or refused, every look ends, and objects have the bytes that were stored or are errors.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use varve_far_objects::{CheckpointFile, Config, Far, FarHeap, FarMap, FarVec, ObjectId};

const TAG: u64 = 3;
const ROOT: usize = 4096;
const SLABS_AT: usize = 1 << 20;
const PLACE: usize = 128 << 10;
const HEAD: usize = 32;

/// A file in memory; clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    pub(crate) fn of(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(bytes)))
    }

    fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl CheckpointFile for Memory {
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        let from = offset_bytes as usize;
        let all = self.bytes();
        bytes.copy_from_slice(
            all.get(from..from + bytes.len())
                .ok_or(io::ErrorKind::UnexpectedEof)?,
        );
        Ok(())
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
        let (from, mut all) = (offset_bytes as usize, self.bytes());
        let end = from + bytes.len();
        if all.len() < end {
            all.resize(end, 0);
        }
        all[from..end].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes().len() as u64)
    }
}

fn config() -> Config {
    Config {
        has_thread: false,
        ..Config::new(3 << 20)
    }
}

/// A sound file, and where its parts lie: the root that counts, the tables' parts, a block of objects.
pub(crate) struct Sound {
    bytes: Vec<u8>,
    root: usize,
    parts: Vec<usize>,
}

impl Sound {
    /// A file whose root that counts begins at `root`.
    pub(crate) fn new(bytes: Vec<u8>, root: usize) -> Self {
        let mut parts = Vec::new();
        for segment in 0..number(&bytes, root + 64) {
            let mut place = number(&bytes, root + 128 + segment * 32 + 16);
            while place != u32::MAX as usize {
                let at = SLABS_AT + place * PLACE;
                parts.push(at);
                place = number(&bytes, at + 28);
            }
        }
        Self { bytes, root, parts }
    }

    /// The file with some bytes changed: an input is changes, each a structure, a place in it, a length and
    /// what comes there; the checksum is made right unless the structure's highest bit is set. Whether it
    /// was.
    pub(crate) fn changed(&self, data: &[u8]) -> (Vec<u8>, bool) {
        let mut bytes = self.bytes.clone();
        let mut rest = data;
        let mut forged = false;
        for _ in 0..16 {
            let Some(([structure, low, high, len], after)) = rest.split_first_chunk::<4>() else {
                break;
            };
            let (change, after) = after.split_at(usize::from(*len).min(after.len()));
            rest = after;
            let which = usize::from(structure & 0x7f) % (self.parts.len() + 1);
            let (from, size) = match which.checked_sub(1) {
                None => (self.root, ROOT),
                Some(part) => (self.parts[part], HEAD + number(&self.bytes, self.parts[part] + 4)),
            };
            let at = from + usize::from(u16::from_le_bytes([*low, *high])) % size;
            let end = (at + change.len()).min(from + size);
            bytes[at..end].copy_from_slice(&change[..end - at]);
            if structure & 0x80 != 0 {
                continue;
            }
            forged = true;
            if which == 0 {
                set_u32(&mut bytes, from + 12, 0);
                let crc = crc32c::crc32c(&bytes[from..from + ROOT]);
                set_u32(&mut bytes, from + 12, crc);
            } else {
                let len = number(&bytes, from + 4).min(PLACE - HEAD);
                let end = (from + HEAD + len).min(bytes.len());
                let crc = crc32c::crc32c(&bytes[from + 4..end]);
                set_u32(&mut bytes, from, crc);
            }
        }
        (bytes, forged)
    }
}

pub(crate) fn number(bytes: &[u8], at: usize) -> usize {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |chunk| u32::from_le_bytes(*chunk) as usize)
}

fn sound() -> &'static Sound {
    static SOUND: OnceLock<Sound> = OnceLock::new();
    SOUND.get_or_init(|| {
        let file = Memory::default();
        let heap = FarHeap::create(file.clone(), 24, TAG, &config()).expect("the file is empty");
        let far = Far::new(&heap, [5u64; 30]).expect("there is room");
        let small = Far::new(&heap, 6u32).expect("there is room");
        let long: FarVec<[u64; 20]> = FarVec::zeroed(&heap, 600).expect("there is room");
        let map: FarMap<u64, [u64; 8]> = FarMap::new(&heap).expect("there is room");
        for index in 0..200 {
            long.set(index as usize, [index; 20]).expect("there is room");
            map.insert(index, [index; 8]).expect("there is room");
        }
        let names = [
            far.name().to_u64(),
            small.name().to_u64(),
            long.name().expect("it has checkpoints"),
            map.name().expect("it has checkpoints"),
        ];
        let record: Vec<u8> = names.iter().flat_map(|name| name.to_le_bytes()).collect();
        for _ in 0..2 {
            heap.checkpoint(&record).expect("memory does not fail");
            map.remove(&7).expect("there is room");
            long.set(500, [500; 20]).expect("there is room");
        }
        let bytes = file.bytes().clone();
        // Generations are 1, made with the file in the first slot, 2 and 3.
        Sound::new(bytes, 0)
    })
}

fn set_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A file of handles with some bytes changed (`Sound::changed`). Whether it was restored.
pub fn far_checkpoint(data: &[u8]) -> bool {
    let (bytes, forged) = sound().changed(data);
    let file = Memory::of(bytes);
    let Ok((heap, record)) = FarHeap::restore(file.clone(), TAG, &config()) else {
        return false;
    };
    let (names, _) = record.as_chunks::<8>();
    let name = |index: usize| names.get(index).map_or(0, |name| u64::from_le_bytes(*name));
    // One that was forged may name other objects; their bytes are objects' bytes all the same.
    if let Ok(far) = Far::<[u64; 30]>::open(&heap, ObjectId::from_u64(name(0))) {
        assert!(forged || far.get().is_ok_and(|value| value == [5; 30]));
        let _ = far
            .set([8; 30])
            .map(|()| assert_eq!(far.get().ok(), Some([8; 30])));
    }
    if let Ok(small) = Far::<u32>::open(&heap, ObjectId::from_u64(name(1))) {
        assert!(forged || small.get().is_ok_and(|value| value == 6));
    }
    if let Ok(mut long) = FarVec::<[u64; 20]>::open(&heap, name(2)) {
        for (index, value) in long.iter().enumerate().take(2000) {
            let right = if index < 200 || index == 500 {
                [index as u64; 20]
            } else {
                [0; 20]
            };
            assert!(forged || value.is_ok_and(|value| value == right || index == 500));
        }
        let _ = long
            .push([9; 20])
            .map(|()| assert_eq!(long.get(long.len() - 1).ok(), Some([9; 20])));
    }
    if let Ok(map) = FarMap::<u64, [u64; 8]>::open(&heap, name(3)) {
        let mut entries = 0;
        let seen = map.for_each(|key, value| {
            assert!(forged || value == [key; 8]);
            entries += 1;
        });
        assert!(forged || (seen.is_ok() && (entries == 199 || entries == 200)));
        for key in 300..310 {
            if map.insert(key, [key; 8]).is_ok() && !forged {
                assert_eq!(map.get(&key).ok().flatten(), Some([key; 8]));
            }
            let _ = map.remove(&(key - 300));
        }
    }
    let made = heap.checkpoint(&record);
    drop(heap);
    if made.is_ok() {
        let again = FarHeap::restore(file, TAG, &config());
        assert!(forged || again.is_ok_and(|(_, again)| again == record));
    }
    true
}

/// Changes that leave the file as it was, or make small ones. The file differs from run to run, so they have
/// nothing of it.
#[cfg(test)]
pub(crate) fn changes() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = (0..3).map(|which| vec![which, 0, 0, 0]).collect();
    // A damaged root: the one before counts.
    for at in [0u16, 12, 28, 44, 64, 140, 300] {
        let [low, high] = at.to_le_bytes();
        all.push(vec![0x80, low, high, 1, 0xff]);
    }
    // Another generation, and bytes of zeros that nobody reads.
    for at in [28u16, 100, 3000] {
        let [low, high] = at.to_le_bytes();
        all.push(vec![0, low, high, 4, 1, 0, 0, 0]);
    }
    all
}
