//! Records of a segment: a byte that says which, then what follows.
//!
//! ```text
//! 1 tables   u32 count; each: u32 number, u8 flags (1: is there, 2: begins anew), u32 slots, u16 length
//! 2 entries  u32 table, u8 flags (1: lengths, 2: all from a slot on, 4: 5 bytes), u32 first slot, u32 count;
//!            each: u16 slot unless all, u16 length where there are, u32 or u40 sector + 1 (0: zeros)
//! 3 blocks   u32 count; each: u32 number, u32 place, u32 sequence number
//! 4 pool     u32 table, u8 kind (0: batches of `size` bytes, 1: up to `size` half KiB), u8 size, u32 objects,
//!            then u64 for each 64 of them: which are allocated
//! 5 array    u64 handle, u32 bytes of an element, u64 elements, u32 tables; each: u32 number
//! 6 map      u64 handle, u32 bytes of a key, u32 of a value, u64 and u64 secret, u64 array of buckets,
//!            u64 array of chains, u64 entries, u32 free buckets of chains; each: u32 number
//! 7 gone     u32 count; each: u64 handle
//! 8 record   u32 bytes, then they
//! 9 end
//! 10 slots   u64 handle, u32 length of most objects, u64 slots, u32 tables; each: u32 number; u8 which
//!            have an object (0: all, 1: as bits say), then u64 for each 64 of them; u32 bytes, then they: of
//!            who has the slots
//! ```

use super::{Malformed, RECORD_MAX_BYTES};
use crate::error::Error;
use crate::layout::OBJECT_MAX_BYTES;
use crate::table::{SLOTS_MAX, SLOTS_TABLE_SLOTS, TABLES_MAX};

const TABLES: u8 = 1;
const ENTRIES: u8 = 2;
const BLOCKS: u8 = 3;
const POOL: u8 = 4;
const ARRAY: u8 = 5;
const MAP: u8 = 6;
const GONE: u8 = 7;
const RECORD: u8 = 8;
const END: u8 = 9;
const SLOTS: u8 = 10;

const IS_THERE: u8 = 1;
const IS_NEW: u8 = 2;
const HAS_LENGTHS: u8 = 1;
const IS_DENSE: u8 = 2;
const IS_WIDE: u8 = 4;

/// Numbers that are read at once, so that a count that lies costs no memory.
const CHUNK: usize = 4096;
/// Bytes that who has some slots may say of them.
pub(crate) const NOTE_MAX_BYTES: usize = 64 << 20;

/// What became of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableRow {
    pub(crate) number: u32,
    /// Slots and length of new objects; `None`: there is no such table.
    pub(crate) shape: Option<(u32, u16)>,
    /// Whether what was known of the number is of another table.
    pub(crate) is_new: bool,
}

/// A slot: its number, the length of its object where that is told, the sector plus 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) slot: u16,
    pub(crate) len: u16,
    pub(crate) value: u64,
}

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockRow {
    pub(crate) number: u32,
    pub(crate) place: u32,
    pub(crate) sequence: u32,
}

/// Which objects of a pool's table are allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolRow {
    pub(crate) table: u32,
    pub(crate) kind: u8,
    pub(crate) size: u8,
    pub(crate) objects: u32,
    pub(crate) used: Vec<u64>,
}

/// An array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ArrayRecord {
    pub(crate) handle: u64,
    pub(crate) element_bytes: u32,
    pub(crate) len: u64,
    pub(crate) tables: Vec<u32>,
}

/// A map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MapRecord {
    pub(crate) handle: u64,
    pub(crate) key_bytes: u32,
    pub(crate) value_bytes: u32,
    pub(crate) secret: [u64; 2],
    pub(crate) buckets: u64,
    pub(crate) chains: u64,
    pub(crate) len: u64,
    pub(crate) free: Vec<u32>,
}

/// Slots that somebody outside of the heap has, and what that one says of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotsRecord {
    pub(crate) handle: u64,
    pub(crate) len_bytes: u32,
    pub(crate) slots: u64,
    pub(crate) tables: Vec<u32>,
    /// A bit for each slot that has an object; `None`: all have one.
    pub(crate) occupied: Option<Vec<u64>>,
    pub(crate) note: Vec<u8>,
}

impl SlotsRecord {
    /// Memory of a record, about.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let words = self.occupied.as_ref().map_or(0, Vec::len);
        (size_of::<Self>() + self.tables.len() * 4 + words * 8 + self.note.len()) as u64
    }
}

/// Why records were not taken.
#[derive(Debug)]
pub(crate) enum Failure {
    Malformed(Malformed),
    Other(Error),
}

impl From<Malformed> for Failure {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Who takes what is read. Nothing but its form was checked.
pub(crate) trait Sink {
    fn table(&mut self, row: TableRow) -> Result<(), Failure>;
    fn entries(&mut self, table: u32, has_lengths: bool, rows: &[Row]) -> Result<(), Failure>;
    /// Values of 4 bytes each, from a slot on, of objects that have the table's length.
    fn values(&mut self, table: u32, first: usize, values: &[[u8; 4]]) -> Result<(), Failure>;
    fn block(&mut self, row: BlockRow) -> Result<(), Failure>;
    fn pool(&mut self, row: PoolRow) -> Result<(), Failure>;
    fn array(&mut self, record: ArrayRecord) -> Result<(), Failure>;
    fn map(&mut self, record: MapRecord) -> Result<(), Failure>;
    fn slots(&mut self, record: SlotsRecord) -> Result<(), Failure>;
    /// Whether there is memory for so many bytes of one record, before they are read.
    fn check_room(&mut self, bytes: u64) -> Result<(), Failure>;
    fn gone(&mut self, handle: u64) -> Result<(), Failure>;
    fn record(&mut self, bytes: Vec<u8>) -> Result<(), Failure>;
}

/// Records that are being written.
#[derive(Debug, Default)]
pub(crate) struct Out {
    pub(crate) bytes: Vec<u8>,
}

impl Out {
    fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn tables(&mut self, rows: &[TableRow]) {
        self.u8(TABLES);
        self.u32(rows.len() as u32);
        for row in rows {
            let (slots, len) = row.shape.unwrap_or_default();
            self.u32(row.number);
            let is_there = if row.shape.is_some() { IS_THERE } else { 0 };
            self.u8(is_there | if row.is_new { IS_NEW } else { 0 });
            self.u32(slots);
            self.u16(len);
        }
    }

    /// Rows of a table, in the order of their slots.
    pub(crate) fn entries(&mut self, table: u32, is_wide: bool, has_lengths: bool, rows: &[Row]) {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
            return;
        };
        let is_dense = usize::from(last.slot - first.slot) + 1 == rows.len();
        let mut flags = if has_lengths { HAS_LENGTHS } else { 0 };
        flags |= if is_dense { IS_DENSE } else { 0 };
        flags |= if is_wide { IS_WIDE } else { 0 };
        self.u8(ENTRIES);
        self.u32(table);
        self.u8(flags);
        self.u32(u32::from(first.slot));
        self.u32(rows.len() as u32);
        for row in rows {
            if !is_dense {
                self.u16(row.slot);
            }
            if has_lengths {
                self.u16(row.len);
            }
            let width = if is_wide { 5 } else { 4 };
            self.bytes.extend_from_slice(&row.value.to_le_bytes()[..width]);
        }
    }

    pub(crate) fn blocks(&mut self, rows: &[BlockRow]) {
        self.u8(BLOCKS);
        self.u32(rows.len() as u32);
        for row in rows {
            self.u32(row.number);
            self.u32(row.place);
            self.u32(row.sequence);
        }
    }

    pub(crate) fn pool(&mut self, row: &PoolRow) {
        self.u8(POOL);
        self.u32(row.table);
        self.u8(row.kind);
        self.u8(row.size);
        self.u32(row.objects);
        for word in &row.used {
            self.u64(*word);
        }
    }

    pub(crate) fn array(&mut self, record: &ArrayRecord) {
        self.u8(ARRAY);
        self.u64(record.handle);
        self.u32(record.element_bytes);
        self.u64(record.len);
        self.u32(record.tables.len() as u32);
        for table in &record.tables {
            self.u32(*table);
        }
    }

    pub(crate) fn map(&mut self, record: &MapRecord) {
        self.u8(MAP);
        self.u64(record.handle);
        self.u32(record.key_bytes);
        self.u32(record.value_bytes);
        self.u64(record.secret[0]);
        self.u64(record.secret[1]);
        self.u64(record.buckets);
        self.u64(record.chains);
        self.u64(record.len);
        self.u32(record.free.len() as u32);
        for number in &record.free {
            self.u32(*number);
        }
    }

    pub(crate) fn slots(&mut self, record: &SlotsRecord) {
        debug_assert!(record.note.len() <= NOTE_MAX_BYTES);
        self.u8(SLOTS);
        self.u64(record.handle);
        self.u32(record.len_bytes);
        self.u64(record.slots);
        self.u32(record.tables.len() as u32);
        for table in &record.tables {
            self.u32(*table);
        }
        self.u8(u8::from(record.occupied.is_some()));
        for word in record.occupied.iter().flatten() {
            self.u64(*word);
        }
        self.u32(record.note.len() as u32);
        self.bytes.extend_from_slice(&record.note);
    }

    pub(crate) fn gone(&mut self, handles: &[u64]) {
        self.u8(GONE);
        self.u32(handles.len() as u32);
        for handle in handles {
            self.u64(*handle);
        }
    }

    pub(crate) fn record(&mut self, bytes: &[u8]) {
        self.u8(RECORD);
        self.u32(bytes.len() as u32);
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn end(&mut self) {
        self.u8(END);
    }
}

/// Reads bytes in order.
struct In<'a, R> {
    read: &'a mut R,
}

impl<R: FnMut(&mut [u8]) -> Result<(), Failure>> In<'_, R> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Failure> {
        let mut bytes = [0; N];
        (self.read)(&mut bytes)?;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8, Failure> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, Failure> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, Failure> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Failure> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A list of numbers, however long it says to be, as far as there are bytes.
    fn u32s(&mut self, count: u32) -> Result<Vec<u32>, Failure> {
        let mut all = Vec::new();
        let mut bytes = [0; CHUNK * 4];
        let mut left = count as usize;
        while left != 0 {
            let now = left.min(CHUNK);
            (self.read)(&mut bytes[..now * 4])?;
            let (chunks, _) = bytes[..now * 4].as_chunks::<4>();
            all.extend(chunks.iter().map(|chunk| u32::from_le_bytes(*chunk)));
            left -= now;
        }
        Ok(all)
    }
}

/// Reads the records of a segment until their end. `read` fills bytes with the next ones.
///
/// # Errors
/// `Malformed`; what `read` and `sink` say.
pub(crate) fn decode<R: FnMut(&mut [u8]) -> Result<(), Failure>>(
    read: &mut R,
    sink: &mut impl Sink,
) -> Result<(), Failure> {
    let mut input = In { read };
    let mut rows = Vec::new();
    loop {
        match input.u8()? {
            TABLES => {
                for _ in 0..input.u32()? {
                    sink.table(table_row(&mut input)?)?;
                }
            }
            ENTRIES => entries(&mut input, &mut rows, sink)?,
            BLOCKS => {
                for _ in 0..input.u32()? {
                    sink.block(BlockRow {
                        number: input.u32()?,
                        place: input.u32()?,
                        sequence: input.u32()?,
                    })?;
                }
            }
            POOL => sink.pool(pool_row(&mut input)?)?,
            ARRAY => {
                let (handle, element_bytes, len) = (input.u64()?, input.u32()?, input.u64()?);
                let count = input.u32()?;
                sink.array(ArrayRecord {
                    handle,
                    element_bytes,
                    len,
                    tables: input.u32s(count)?,
                })?;
            }
            MAP => {
                let (handle, key_bytes, value_bytes) = (input.u64()?, input.u32()?, input.u32()?);
                let secret = [input.u64()?, input.u64()?];
                let (buckets, chains, len) = (input.u64()?, input.u64()?, input.u64()?);
                let count = input.u32()?;
                sink.map(MapRecord {
                    handle,
                    key_bytes,
                    value_bytes,
                    secret,
                    buckets,
                    chains,
                    len,
                    free: input.u32s(count)?,
                })?;
            }
            GONE => {
                for _ in 0..input.u32()? {
                    sink.gone(input.u64()?)?;
                }
            }
            RECORD => {
                let len = input.u32()? as usize;
                if len > RECORD_MAX_BYTES {
                    return Err(Malformed::new(format!("a record of {len} bytes")).into());
                }
                let mut bytes = vec![0; len];
                (input.read)(&mut bytes)?;
                sink.record(bytes)?;
            }
            SLOTS => {
                let record = slots(&mut input, sink)?;
                sink.slots(record)?;
            }
            END => return Ok(()),
            other => return Err(Malformed::new(format!("a record of kind {other}")).into()),
        }
    }
}

fn table_row<R: FnMut(&mut [u8]) -> Result<(), Failure>>(input: &mut In<'_, R>) -> Result<TableRow, Failure> {
    let (number, flags) = (input.u32()?, input.u8()?);
    let (slots, len) = (input.u32()?, input.u16()?);
    let is_there = flags & IS_THERE != 0;
    let is_sound = (1..=TABLES_MAX).contains(&number)
        && flags & !(IS_THERE | IS_NEW) == 0
        && (!is_there || (1..=SLOTS_MAX).contains(&(slots as usize)))
        && (!is_there || (1..=OBJECT_MAX_BYTES).contains(&usize::from(len)));
    if !is_sound {
        return Err(Malformed::new(format!("table {number} of {slots} slots of {len} bytes")).into());
    }
    Ok(TableRow {
        number,
        shape: is_there.then_some((slots, len)),
        is_new: flags & IS_NEW != 0,
    })
}

fn entries<R: FnMut(&mut [u8]) -> Result<(), Failure>>(
    input: &mut In<'_, R>,
    rows: &mut Vec<Row>,
    sink: &mut impl Sink,
) -> Result<(), Failure> {
    let (table, flags) = (input.u32()?, input.u8()?);
    let (first, count) = (input.u32()? as usize, input.u32()? as usize);
    let wrong = || Malformed::new(format!("{count} entries of table {table} from {first} on"));
    let is_dense = flags & IS_DENSE != 0;
    let has_lengths = flags & HAS_LENGTHS != 0;
    if flags & !(HAS_LENGTHS | IS_DENSE | IS_WIDE) != 0 || count > SLOTS_MAX || first + count > 2 * SLOTS_MAX
    {
        return Err(wrong().into());
    }
    let width = if flags & IS_WIDE != 0 { 5 } else { 4 };
    let lengths = if has_lengths { 2 } else { 0 };
    let slots = if is_dense { 0 } else { 2 };
    let each = slots + lengths + width;
    rows.clear();
    let mut bytes = [0; 1024 * 9];
    if is_dense && !has_lengths && width == 4 {
        let mut done = 0;
        while done < count {
            let now = (count - done).min(2048);
            (input.read)(&mut bytes[..now * 4])?;
            sink.values(table, first + done, bytes[..now * 4].as_chunks().0)?;
            done += now;
        }
        return Ok(());
    }
    while rows.len() < count {
        let now = (count - rows.len()).min(1024);
        (input.read)(&mut bytes[..now * each])?;
        for one in bytes[..now * each].chunks_exact(each) {
            let slot = match one.first_chunk::<2>() {
                Some(slot) if !is_dense => usize::from(u16::from_le_bytes(*slot)),
                _ => first + rows.len(),
            };
            let len = match one.get(slots..).and_then(|rest| rest.first_chunk::<2>()) {
                Some(len) if has_lengths => u16::from_le_bytes(*len),
                _ => 0,
            };
            let mut value = [0; 8];
            value[..width].copy_from_slice(&one[slots + lengths..]);
            rows.push(Row {
                slot: u16::try_from(slot).map_err(|_| wrong())?,
                len,
                value: u64::from_le_bytes(value),
            });
        }
    }
    sink.entries(table, has_lengths, rows)
}

fn slots<R: FnMut(&mut [u8]) -> Result<(), Failure>>(
    input: &mut In<'_, R>,
    sink: &mut impl Sink,
) -> Result<SlotsRecord, Failure> {
    let (handle, len_bytes, slots) = (input.u64()?, input.u32()?, input.u64()?);
    let count = input.u32()?;
    let wrong = || Failure::from(Malformed::new(format!("{slots} slots of handle {handle}")));
    if slots == 0 || slots.div_ceil(SLOTS_TABLE_SLOTS as u64) != u64::from(count) {
        return Err(wrong());
    }
    let most_bytes = u64::from(count) * 4 + slots.div_ceil(64) * 8;
    sink.check_room(most_bytes)?;
    let tables = input.u32s(count)?;
    let occupied = match input.u8()? {
        0 => None,
        1 => {
            let mut words = Vec::new();
            for _ in 0..slots.div_ceil(64) {
                words.push(input.u64()?);
            }
            let is_beyond = |last: &u64| !slots.is_multiple_of(64) && *last >> (slots % 64) != 0;
            if words.last().is_some_and(is_beyond) {
                return Err(wrong());
            }
            Some(words)
        }
        _ => return Err(wrong()),
    };
    let len = input.u32()? as usize;
    if len > NOTE_MAX_BYTES {
        return Err(wrong());
    }
    sink.check_room(most_bytes + len as u64)?;
    let mut note = Vec::with_capacity(len);
    while note.len() < len {
        let from = note.len();
        note.resize(len.min(from + CHUNK), 0);
        (input.read)(&mut note[from..])?;
    }
    Ok(SlotsRecord {
        handle,
        len_bytes,
        slots,
        tables,
        occupied,
        note,
    })
}

fn pool_row<R: FnMut(&mut [u8]) -> Result<(), Failure>>(input: &mut In<'_, R>) -> Result<PoolRow, Failure> {
    let table = input.u32()?;
    let (kind, size, objects) = (input.u8()?, input.u8()?, input.u32()?);
    // A slot has 128 objects at most.
    if objects == 0 || objects as usize > SLOTS_MAX * 128 {
        return Err(Malformed::new(format!("{objects} objects of table {table}")).into());
    }
    let mut used = Vec::new();
    for _ in 0..objects.div_ceil(64) {
        used.push(input.u64()?);
    }
    Ok(PoolRow {
        table,
        kind,
        size,
        objects,
        used,
    })
}
