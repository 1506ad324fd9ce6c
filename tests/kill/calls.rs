//! What a writer does: a sequence of calls that its seed and the round determine, and what a directory is
//! after each of them.

use std::collections::BTreeMap;
use varve_testkit::workload::Rng;

/// Slots of a writer's file that is written in place; odd on purpose, so that records cross blocks.
const SLOT_BYTES: u64 = 5000;
const SLOTS: u64 = 16;
/// The most bytes of one record. Less than the kernel's least limit of one request, so that a record is one
/// call.
const RECORD_MAX: u64 = 90_000;

/// One system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Opens a file of the writer's directory, making it if it is not there; later calls use the descriptor.
    Open(&'static str),
    /// Writes a record to the end of the open log (`O_APPEND`).
    Append(Vec<u8>),
    /// Writes a record into a slot of the open file of slots.
    Put(u64, Vec<u8>),
    /// Cuts the file of slots.
    Cut(u64),
    /// Makes a file, or empties it; later calls use the descriptor.
    Fresh(String),
    /// Writes to the fresh file.
    Fill(Vec<u8>),
    /// Makes what was done durable, through the descriptor of the log or of the fresh file.
    Fsync(bool),
    /// Renames, over what may be there.
    Rename(String, String),
    /// Takes a name away; it may not be there.
    Unlink(String),
    /// Reads a whole file and compares it.
    Read(String),
}

/// Whether a call is an fsync.
pub fn syncs(call: &Call) -> bool {
    matches!(call, Call::Fsync(_))
}

/// The calls of one writer in one round.
pub struct Calls {
    rng: Rng,
    writer: u32,
    round: u32,
    /// Whether there are fsyncs; without them a power cut may take up to a second.
    synced: bool,
    next: u32,
    ahead: std::collections::VecDeque<Call>,
}

impl Calls {
    /// From the first.
    pub fn new(seed: u64, writer: u32, round: u32) -> Self {
        let mut rng = Rng::new(seed ^ (u64::from(round) << 32) ^ (u64::from(writer) << 56));
        rng.next_u64();
        Self {
            rng,
            writer,
            round,
            synced: !round.is_multiple_of(3),
            next: 0,
            ahead: [Call::Open("log"), Call::Open("slots")].into(),
        }
    }

    fn record(&mut self, len: u64) -> Vec<u8> {
        self.next += 1;
        record(self.writer, self.round, self.next, len)
    }

    fn some_len(&mut self) -> u64 {
        match self.rng.below(20) {
            0 => self.rng.below(RECORD_MAX),
            1..5 => self.rng.below(9000),
            _ => self.rng.below(600),
        }
    }

    fn replace(&mut self, to: &str, synced: bool) {
        let len = self.some_len();
        let body = self.record(len);
        self.ahead.push_back(Call::Fresh("tmp".into()));
        self.ahead.push_back(Call::Fill(body));
        if synced && self.synced {
            self.ahead.push_back(Call::Fsync(true));
        }
        self.ahead.push_back(Call::Rename("tmp".into(), to.into()));
    }

    fn plan(&mut self) {
        let some = format!("n{}", self.rng.below(8));
        match self.rng.below(100) {
            0..50 => {
                let len = self.some_len().min(20_000);
                let body = self.record(len);
                self.ahead.push_back(Call::Append(body));
            }
            50..62 => {
                let slot = self.rng.below(SLOTS);
                let len = self.rng.below(SLOT_BYTES - HEAD_BYTES);
                let body = self.record(len);
                self.ahead.push_back(Call::Put(slot, body));
            }
            62..70 => self.replace("current", true),
            70..76 => self.replace("current", false),
            76..82 => self.replace(&some, false),
            82..87 => self.ahead.push_back(Call::Unlink(some)),
            87..90 if self.synced => self.ahead.push_back(Call::Fsync(false)),
            87..97 => {
                let name = [some.as_str(), "current", "slots", "log"][self.rng.below(4) as usize];
                self.ahead.push_back(Call::Read(name.into()));
            }
            97 => {
                let len = self.rng.below(SLOTS * SLOT_BYTES);
                self.ahead.push_back(Call::Cut(len));
            }
            _ => {
                self.ahead.push_back(Call::Rename("log".into(), "log.old".into()));
                self.ahead.push_back(Call::Open("log"));
            }
        }
    }
}

impl Iterator for Calls {
    type Item = Call;

    fn next(&mut self) -> Option<Call> {
        while self.ahead.is_empty() {
            self.plan();
        }
        self.ahead.pop_front()
    }
}

/// Bytes before a record's body.
const HEAD_BYTES: u64 = 32;
const MAGIC: &[u8; 4] = b"VREC";

fn checksum(head: &[u8], body: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    head.iter().chain(body).fold(0xcbf2_9ce4_8422_2325, step)
}

/// A record: magic, writer, round, number, length and checksum, then bytes that nobody else writes.
fn record(writer: u32, round: u32, number: u32, len: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity((HEAD_BYTES + len) as usize);
    out.extend(MAGIC);
    for word in [writer, round, number, len as u32, 0] {
        out.extend(word.to_le_bytes());
    }
    let mut rng = Rng::new((u64::from(writer) << 48) ^ (u64::from(round) << 24) ^ u64::from(number));
    let mut body = Vec::with_capacity(len as usize + 8);
    while (body.len() as u64) < len {
        body.extend(rng.next_u64().to_le_bytes());
    }
    body.truncate(len as usize);
    let sum = checksum(&out, &body);
    out.extend(sum.to_le_bytes());
    out.extend(body);
    out
}

/// The first record at the start of `bytes`: what it says of itself, and how long it is; `None` if it is not
/// whole.
pub fn whole_record(bytes: &[u8]) -> Option<(String, usize)> {
    let word = |at: usize| {
        let word = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(word))
    };
    let (writer, round, number, len) = (word(4)?, word(8)?, word(12)?, word(16)? as usize);
    let head = bytes.get(..24).filter(|head| head.starts_with(MAGIC))?;
    let end = HEAD_BYTES as usize + len;
    let body = bytes.get(HEAD_BYTES as usize..end)?;
    (bytes[24..32] == checksum(head, body).to_le_bytes()).then(|| (format!("{writer}/{round}/{number}"), end))
}

/// What a writer's directory holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Names and contents.
    pub files: BTreeMap<String, Vec<u8>>,
    fresh: String,
}

impl State {
    /// A directory with these files.
    pub fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        Self {
            files,
            fresh: String::new(),
        }
    }

    fn body(&mut self, name: &str) -> &mut Vec<u8> {
        self.files.entry(name.to_owned()).or_default()
    }

    /// What a write would leave if only its beginning came, up to a multiple of `align` in the file: the
    /// file's name and body, each.
    pub fn parts(&self, call: &Call, align: usize) -> Vec<(String, Vec<u8>)> {
        let len = |name: &str| self.files.get(name).map_or(0, Vec::len);
        let (name, at, record) = match call {
            Call::Append(record) => ("log", len("log"), record),
            Call::Put(slot, record) => ("slots", slot_offset(*slot) as usize, record),
            Call::Fill(record) => (self.fresh.as_str(), len(&self.fresh), record),
            _ => return Vec::new(),
        };
        let cuts = (at / align + 1..)
            .map(|page| page * align)
            .take_while(|cut| *cut < at + record.len());
        cuts.map(|cut| {
            let mut body = self.files.get(name).cloned().unwrap_or_default();
            body.resize(body.len().max(cut), 0);
            body[at..cut].copy_from_slice(&record[..cut - at]);
            (name.to_owned(), body)
        })
        .collect()
    }

    /// Does a call. Returns the errno that it must have had, and the names whose files it may have changed.
    pub fn apply(&mut self, call: &Call) -> (i32, Vec<String>) {
        match call {
            Call::Open(name) => {
                self.body(name);
                (0, vec![(*name).to_owned()])
            }
            Call::Append(record) => {
                self.body("log").extend(record);
                (0, vec!["log".into()])
            }
            Call::Put(slot, record) => {
                let at = (slot * SLOT_BYTES) as usize;
                let body = self.body("slots");
                body.resize(body.len().max(at + record.len()), 0);
                body[at..at + record.len()].copy_from_slice(record);
                (0, vec!["slots".into()])
            }
            Call::Cut(len) => {
                self.body("slots").resize(*len as usize, 0);
                (0, vec!["slots".into()])
            }
            Call::Fresh(name) => {
                self.fresh.clone_from(name);
                self.body(name).clear();
                (0, vec![name.clone()])
            }
            Call::Fill(record) => {
                let name = self.fresh.clone();
                self.body(&name).extend(record);
                (0, vec![name])
            }
            Call::Rename(from, to) => {
                let Some(body) = self.files.remove(from) else {
                    return (libc::ENOENT, Vec::new());
                };
                self.files.insert(to.clone(), body);
                (0, vec![from.clone(), to.clone()])
            }
            Call::Unlink(name) => match self.files.remove(name) {
                Some(_) => (0, vec![name.clone()]),
                None => (libc::ENOENT, Vec::new()),
            },
            Call::Read(name) if !self.files.contains_key(name) => (libc::ENOENT, Vec::new()),
            Call::Read(_) | Call::Fsync(_) => (0, Vec::new()),
        }
    }
}

/// Where a slot begins.
pub const fn slot_offset(slot: u64) -> u64 {
    slot * SLOT_BYTES
}

#[test]
fn calls_are_the_same_for_the_same_seed() {
    let some = |seed| Calls::new(seed, 3, 4).take(500).collect::<Vec<_>>();
    assert_eq!(some(1), some(1));
    assert_ne!(some(1), some(2));
    assert!(some(1).iter().any(syncs));
}

#[test]
fn parts_of_a_write_end_at_pages() {
    let mut state = State::default();
    state.apply(&Call::Append(vec![1; 4000]));
    let parts = state.parts(&Call::Append(vec![2; 5000]), 4096);
    let lens: Vec<_> = parts
        .iter()
        .map(|(name, body)| (name.as_str(), body.len()))
        .collect();
    assert_eq!(lens, [("log", 4096), ("log", 8192)]);
    assert!(parts[0].1[..4000] == [1; 4000] && parts[0].1[4000..] == [2; 96]);
    assert!(state.parts(&Call::Append(vec![2; 96]), 4096).is_empty());
    assert!(state.parts(&Call::Read("log".into()), 4096).is_empty());
}

#[test]
fn record_is_whole_only_with_all_its_bytes() {
    let record = record(1, 2, 3, 100);
    assert_eq!(whole_record(&record), Some(("1/2/3".into(), record.len())));
    assert_eq!(whole_record(&record[..131]), None);
    let mut torn = record;
    torn[70] ^= 1;
    assert_eq!(whole_record(&torn), None);
}
