//! One recorded operation, and its form in a file. Knows nothing of what is right.

use std::io::Write;
use std::path::Path;

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A block written whole: `a` is the value.
    RegWrite,
    /// A block read whole: `a` is the first word, `b` another one if there is one, else the same.
    RegRead,
    /// A new file renamed over the old one: `a` is the value. The time is the rename's.
    Replace,
    /// Open, read, close of a file that is replaced: as `RegRead`.
    ReadReplaced,
    /// A record at the end of the log: `a` is its value.
    Append,
    /// `a` is the size, `b` the time of change.
    Stat,
    /// The last record: `a` is 1 if it is whole.
    Tail,
    /// A name made, only if it is not there.
    Create,
    Unlink,
    Mkdir,
    Rmdir,
    /// Whether a name is there.
    Look,
    /// `a` has a bit for each name, `b` is not 0 if a name is there twice or unknown.
    List,
    /// The token taken by renaming it.
    Take,
    /// The token renamed for the process `a`.
    Hand,
    /// Waiting for a lock.
    Flock,
    Posix,
    Ofd,
    /// From the return of what took a lock to the call that gives it back: `a` is the counter that was read.
    Hold,
    /// The mapped counter, one more: `a` is what it was.
    MapAdd,
    /// The mapped counter by `pread`: `a`.
    MapRead,
    /// After `msync`: `a` is what the counter was at least before.
    MapSync,
    /// A file that is unlinked while open, replaced by another.
    Plant,
    /// Opened and kept: `a` is the value.
    Keep,
    /// Read again: `a` is the value, `b` what it must be.
    Again,
}

/// All kinds, in the order of their numbers.
pub const KINDS: [Kind; 25] = [
    Kind::RegWrite,
    Kind::RegRead,
    Kind::Replace,
    Kind::ReadReplaced,
    Kind::Append,
    Kind::Stat,
    Kind::Tail,
    Kind::Create,
    Kind::Unlink,
    Kind::Mkdir,
    Kind::Rmdir,
    Kind::Look,
    Kind::List,
    Kind::Take,
    Kind::Hand,
    Kind::Flock,
    Kind::Posix,
    Kind::Ofd,
    Kind::Hold,
    Kind::MapAdd,
    Kind::MapRead,
    Kind::MapSync,
    Kind::Plant,
    Kind::Keep,
    Kind::Again,
];

/// One operation of one process; times are nanoseconds of the monotonic clock, before and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub process: u8,
    pub kind: Kind,
    /// Which register, name or lock.
    pub object: u8,
    /// 0, or the errno.
    pub errno: u16,
    pub start: u64,
    pub end: u64,
    pub a: u64,
    pub b: u64,
}

const BYTES: usize = 40;

/// Writes a process' records.
pub fn store(path: &Path, records: &[Record]) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::fs::File::create(path)?);
    for record in records {
        let [low, high] = record.errno.to_le_bytes();
        out.write_all(&[
            record.process,
            record.kind as u8,
            record.object,
            low,
            high,
            0,
            0,
            0,
        ])?;
        for word in [record.start, record.end, record.a, record.b] {
            out.write_all(&word.to_le_bytes())?;
        }
    }
    out.flush()
}

/// Reads what [`store`] wrote.
pub fn load(path: &Path) -> std::io::Result<Vec<Record>> {
    let bytes = std::fs::read(path)?;
    let word = |part: &[u8], n: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&part[n * 8..n * 8 + 8]);
        u64::from_le_bytes(word)
    };
    Ok(bytes
        .chunks_exact(BYTES)
        .map(|part| Record {
            process: part[0],
            kind: KINDS[usize::from(part[1])],
            object: part[2],
            errno: u16::from_le_bytes([part[3], part[4]]),
            start: word(part, 1),
            end: word(part, 2),
            a: word(part, 3),
            b: word(part, 4),
        })
        .collect())
}

#[test]
fn kinds_stand_at_their_numbers_and_records_come_back() {
    assert!(KINDS.iter().enumerate().all(|(n, kind)| *kind as usize == n));
    let record = Record {
        process: 3,
        kind: Kind::Again,
        object: 7,
        errno: 300,
        start: 1,
        end: u64::MAX,
        a: 5,
        b: 6,
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    store(file.path(), &[record, record]).expect("written");
    assert_eq!(load(file.path()).expect("read"), [record, record]);
}
