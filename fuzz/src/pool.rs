//! Structures that only an open pool reads: a small sound pool in memory, one of its blocks replaced. Owns
//! what must hold whatever that block says: the pool opens or is refused, a file shows its own bytes or an
//! error, every look ends, a change is done or refused.

use crate::ram::Ram;
use std::sync::{Arc, OnceLock};
use varve_format::space::{CHECKSUMS_PER_BLOCK, UNIT_ROW_SIZE, UnitRow, footer_blocks};
use varve_format::state::STATE_BODY_SIZE;
use varve_format::superblock::{Superblock, TierLayout};
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, BlockKind, BlockNo, FileBlock, FileKind, Ino,
    InodeAttr, ROOT_INO, Tier, init_block, seal_block,
};
use varve_store::repair::RepairOptions;
use varve_store::{DataTarget, Devices, MkfsOptions, OpenOptions, Result, Store, StoreError};
use zerocopy::{FromBytes, IntoBytes};

/// Blocks of the units: some with one block of checksums, some with two.
const UNIT_BLOCKS: [u64; 2] = [16, 1_100];
/// Units of the tiers.
const UNITS: [u64; 2] = [8, 4];
/// Blocks that a look at a file reads at each of its places.
const LOOK_BLOCKS: u64 = 4;
/// Blocks that a change writes: on the SSD it fills the open unit and opens another.
const CHANGE_BLOCKS: u64 = 10;
/// One input in so many is repaired, too.
const REPAIRED_ONE_IN: u32 = 16;

/// The media of the sound pool, and its files.
pub(crate) struct Pool {
    nvm: Vec<u8>,
    journal: Vec<u8>,
    disks: [Vec<u8>; 2],
    sb: Superblock,
    files: Vec<File>,
}

#[derive(Clone, Copy)]
struct File {
    ino: Ino,
    tier: Tier,
    blocks: u64,
}

/// What each block of a file holds.
fn content(ino: Ino, block: u64) -> Vec<u8> {
    let word = (ino.0 << 32 | block).to_le_bytes();
    word.repeat(BLOCK_SIZE / word.len())
}

fn contents(ino: Ino, from: u64, blocks: u64) -> Vec<u8> {
    (from..from + blocks)
        .flat_map(|block| content(ino, block))
        .collect()
}

/// A pool whose one block was replaced.
struct Opened(Store);

struct Media {
    nvm: Arc<Ram>,
    journal: Arc<Ram>,
    disks: [Arc<Ram>; 2],
}

impl Media {
    fn devices(&self) -> Devices {
        let [ssd, hdd] = &self.disks;
        Devices {
            nvm: Arc::clone(&self.nvm) as _,
            journal: Arc::clone(&self.journal) as _,
            ssd: Some(Arc::clone(ssd) as _),
            hdd: Some(Arc::clone(hdd) as _),
            more: Vec::new(),
        }
    }

    /// Changes the body of a metadata block, with its checksum.
    fn replace(medium: &Ram, block: BlockNo, change: impl FnOnce(&mut [u8])) {
        let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
        medium.load(block.offset_bytes(), &mut bytes[..]);
        change(&mut bytes[BLOCK_HEADER_SIZE..]);
        seal_block(&mut bytes);
        medium.store(block.offset_bytes(), &bytes[..]);
    }
}

fn options() -> MkfsOptions {
    MkfsOptions {
        pool_uuid: [7; 16],
        dir_hash_key: [9; 16],
        ssd_unit_blocks: Some(UNIT_BLOCKS[0]),
        hdd_unit_blocks: Some(UNIT_BLOCKS[1]),
        ..MkfsOptions::default()
    }
}

fn make(store: &Store, name: &str, tier: Tier, blocks: u64) -> Result<File> {
    let mut tx = store.begin()?;
    let key = tx.alloc_inodes(ROOT_INO, 1)?[0];
    let attr = InodeAttr {
        nlink: 1,
        ..InodeAttr::new(key, 0o100_644, 0)
    };
    tx.create(&attr, b"")?;
    tx.dir_insert(ROOT_INO, name.as_bytes(), key, FileKind::Regular)?;
    tx.commit()?;
    let mut at = 0;
    while at < blocks {
        let count = (blocks - at).min(64);
        let mut tx = store.begin()?;
        let data = contents(key.ino, at, count);
        tx.write_data(key.ino, FileBlock(at), &data, true, DataTarget::only(tier))?;
        tx.commit()?;
        at += count;
    }
    Ok(File {
        ino: key.ino,
        tier,
        blocks,
    })
}

fn build() -> Result<Pool> {
    let zeros = |bytes: u64| Arc::new(Ram::new(&[], bytes));
    let disk = |at: usize| zeros(UNIT_BLOCKS[at] * UNITS[at] * BLOCK_BYTES);
    let media = Media {
        nvm: zeros(4 << 20),
        journal: zeros(256 << 10),
        disks: [disk(0), disk(1)],
    };
    Store::mkfs(&media.devices(), &options())?;
    let (store, _) = Store::open(media.devices(), OpenOptions::default())?;
    // Sealed units full and with holes, an open one on each tier, and empty ones.
    let mut files = vec![
        make(&store, "nvm", Tier::Nvm, 6)?,
        make(&store, "ssd", Tier::Ssd, 20)?,
        make(&store, "gone", Tier::Ssd, 20)?,
        make(&store, "more", Tier::Ssd, 20)?,
        make(&store, "hdd", Tier::Hdd, 1_300)?,
    ];
    let gone = files.remove(2);
    let mut tx = store.begin()?;
    tx.dir_remove(ROOT_INO, b"gone")?;
    tx.edit(gone.ino, |attr| attr.nlink = 0)?;
    tx.continue_free(gone.ino, 1_000)?;
    tx.commit()?;
    store.checkpoint()?;
    drop(store);
    let (sb, _) = Superblock::read_from_prefix(&media.nvm.bytes())
        .map_err(|_| StoreError::Damaged("no superblock".into()))?;
    Ok(Pool {
        nvm: media.nvm.bytes(),
        journal: media.journal.bytes(),
        disks: media.disks.map(|disk| disk.bytes()),
        sb,
        files,
    })
}

impl Pool {
    /// The one of this process.
    pub(crate) fn sound() -> &'static Self {
        static POOL: OnceLock<Pool> = OnceLock::new();
        POOL.get_or_init(|| build().unwrap_or_else(|error| panic!("a sound pool: {error}")))
    }

    fn media(&'static self) -> Media {
        let ram = |bytes: &'static [u8]| Arc::new(Ram::new(bytes, bytes.len() as u64));
        let [ssd, hdd] = &self.disks;
        Media {
            nvm: ram(&self.nvm),
            journal: ram(&self.journal),
            disks: [ram(ssd), ram(hdd)],
        }
    }

    fn tier(&self, disk: usize) -> &TierLayout {
        &self.sb.tiers[disk + 1]
    }

    fn body(&self, block: u64, len: usize) -> &[u8] {
        let at = (block * BLOCK_BYTES) as usize + BLOCK_HEADER_SIZE;
        &self.nvm[at..at + len]
    }

    /// The rows of all units as they are, those of the SSD first.
    pub(crate) fn unit_rows(&self) -> Vec<u8> {
        let rows = |disk: usize| {
            let start = self.tier(disk).units.start.get();
            self.body(start, UNITS[disk] as usize * UNIT_ROW_SIZE)
        };
        [rows(0), rows(1)].concat()
    }

    /// The row of a unit as it is.
    fn unit_row(&self, disk: usize, unit: u64) -> UnitRow {
        let all = self.unit_rows();
        let at = (disk as u64 * UNITS[0] + unit) as usize * UNIT_ROW_SIZE;
        UnitRow::read_from_prefix(&all[at..]).map_or_else(|_| UnitRow::default(), |(row, _)| row)
    }
}

/// What the corpus has of it.
#[cfg(test)]
impl Pool {
    /// The pool state as it is.
    pub(crate) fn state(&self) -> &[u8] {
        self.body(self.sb.state.start.get(), STATE_BODY_SIZE)
    }

    /// The checksums of a sealed unit as its footer has them.
    pub(crate) fn footer(&self, disk: usize, unit: u64) -> Vec<u8> {
        let start = footer_start(disk, unit, self.unit_row(disk, unit).footer);
        let data = UNIT_BLOCKS[disk] - UnitRow::FOOTERS * footer_blocks(UNIT_BLOCKS[disk]);
        let body = |block: u64| {
            let at = ((start + block) * BLOCK_BYTES) as usize;
            &self.disks[disk][at + BLOCK_HEADER_SIZE..at + BLOCK_SIZE]
        };
        let all: Vec<u8> = (0..data.div_ceil(CHECKSUMS_PER_BLOCK))
            .flat_map(|block| body(block).iter().copied())
            .collect();
        all[..data as usize * 4].to_vec()
    }
}

fn footer_start(disk: usize, unit: u64, footer: u8) -> u64 {
    let (blocks, one) = (UNIT_BLOCKS[disk], footer_blocks(UNIT_BLOCKS[disk]));
    (unit + 1) * blocks - (UnitRow::FOOTERS - u64::from(footer)) * one
}

impl Opened {
    fn of(media: &Media) -> Option<Self> {
        let (store, _) = Store::open(media.devices(), OpenOptions::default()).ok()?;
        Some(Self(store))
    }

    /// Whether a piece of the file can be read; then it is what was written.
    fn looks_right(&self, file: &File, from: u64) -> bool {
        let blocks = LOOK_BLOCKS.min(file.blocks - from);
        let expected = contents(file.ino, from, blocks);
        let mut found = vec![0; expected.len()];
        let read = self.0.read(file.ino, from * BLOCK_BYTES, &mut found);
        // A file may be shorter, but not other.
        read.is_ok_and(|len| {
            assert!(found[..len] == expected[..len], "other bytes in {}", file.ino);
            len == expected.len()
        })
    }

    /// Whether all pieces that are looked at of files on slower tiers can be read.
    fn look(&self, files: &[File]) -> bool {
        let mut all = true;
        for file in files {
            for from in [0, file.blocks / 2, file.blocks - LOOK_BLOCKS] {
                all &= self.looks_right(file, from) || file.tier == Tier::Nvm;
            }
        }
        all
    }

    /// A new file on each tier. Done or refused; done, it reads as it was written, until another change makes
    /// the units' rows otherwise.
    fn change(&self) {
        for (name, tier) in [("a", Tier::Nvm), ("b", Tier::Ssd), ("c", Tier::Hdd)] {
            let _ = make(&self.0, name, tier, CHANGE_BLOCKS);
        }
    }

    fn removed(&self, file: &File, name: &str) -> Result<()> {
        let mut tx = self.0.begin()?;
        tx.dir_remove(ROOT_INO, name.as_bytes())?;
        tx.edit(file.ino, |attr| attr.nlink = 0)?;
        tx.continue_free(file.ino, 1_000)?;
        tx.commit().map(|_| ())
    }

    /// Everything that is done with an open pool. Whether all of the files on slower tiers could be read
    /// before anything was changed.
    fn use_it(&self, files: &[File]) -> bool {
        let before = self.look(files);
        let _ = self.0.check();
        let _ = self.0.check_data();
        let _ = (self.0.jobs(), self.0.adopt_removals(0));
        self.change();
        self.look(files);
        let _ = self.removed(&files[0], "nvm");
        let _ = self.0.checkpoint();
        self.look(&files[1..]);
        before
    }
}

/// What a repair leaves can be opened, and its check is clean.
fn mend(media: &Media, files: &[File]) {
    let repair = |any_device| {
        let options = RepairOptions {
            any_device,
            ..RepairOptions::default()
        };
        Store::repair(&media.devices(), options)
    };
    let report = match repair(false) {
        // Rows that name no footer that is there: as if the device were another pool's.
        Err(StoreError::Devices(_)) => repair(true),
        done => done,
    };
    let report = match report {
        Ok(report) => report,
        Err(StoreError::NoSpace { .. }) => return,
        // Features that it does not know.
        Err(StoreError::Superblock { fault, .. }) if fault.is_refusal() => return,
        Err(error) => panic!("the repair failed: {error}"),
    };
    assert_eq!(report.left, [], "{:?}", report.mended);
    let Some(opened) = Opened::of(media) else {
        panic!("what was repaired cannot be opened: {:?}", report.mended);
    };
    opened.look(files);
    assert_eq!(opened.0.check().ok(), Some(Vec::new()));
}

/// Opens what is on the media and uses it, if it is not refused; repairs some. Whether it was taken in.
fn try_pool(pool: &Pool, media: &Media, data: &[u8]) -> bool {
    let taken = Opened::of(media).is_some_and(|opened| opened.use_it(&pool.files));
    if varve_format::log::payload_crc(0, data).is_multiple_of(REPAIRED_ONE_IN) {
        mend(media, &pool.files[1..]);
    }
    taken
}

/// Rows of units, those of the SSD first: so many as there are bytes for, the others as they were.
pub fn unit_rows(data: &[u8]) -> bool {
    let pool = Pool::sound();
    let media = pool.media();
    let (ssd, hdd) = data.split_at(data.len().min(UNITS[0] as usize * UNIT_ROW_SIZE));
    for (disk, rows) in [ssd, hdd].into_iter().enumerate() {
        let block = BlockNo(pool.tier(disk).units.start.get());
        let len = rows.len().min(UNITS[disk] as usize * UNIT_ROW_SIZE);
        Media::replace(&media.nvm, block, |body| {
            body[..len].copy_from_slice(&rows[..len])
        });
    }
    try_pool(pool, &media, data)
}

/// The checksums in the footer of a sealed unit, behind which unit it is and what else is wrong: bit 0: the
/// row has the old sum; bit 1: the block says that it is another; bit 2: the other place is written.
pub fn unit_footers(data: &[u8]) -> bool {
    let Some(([which, wrong], sums)) = data.split_first_chunk::<2>().map(|(head, sums)| (*head, sums)) else {
        return false;
    };
    let pool = Pool::sound();
    let media = pool.media();
    let disk = usize::from(which >> 7);
    let unit = u64::from(which & 0x7f) % UNITS[disk];
    let row = pool.unit_row(disk, unit);
    let place = (row.footer & 1) ^ (wrong >> 2 & 1);
    let start = footer_start(disk, unit, place);
    let mut crc = 0;
    for (index, part) in
        (0..footer_blocks(UNIT_BLOCKS[disk])).zip(sums.chunks(CHECKSUMS_PER_BLOCK as usize * 4))
    {
        let block = BlockNo(start + index);
        let says = BlockNo(block.0 + u64::from(wrong >> 1 & 1));
        let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
        bytes[BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + part.len()].copy_from_slice(part);
        init_block(&mut bytes, BlockKind::UnitFooter, Ino(0), says);
        media.disks[disk].store(block.offset_bytes(), &bytes[..]);
        crc = varve_format::log::payload_crc(crc, &bytes[BLOCK_HEADER_SIZE..]);
    }
    let rows = BlockNo(pool.tier(disk).units.start.get());
    if wrong & 1 == 0 {
        let at = unit as usize * UNIT_ROW_SIZE;
        let row = UnitRow {
            footer: place,
            footer_crc32c: crc.into(),
            ..row
        };
        Media::replace(&media.nvm, rows, |body| {
            body[at..at + UNIT_ROW_SIZE].copy_from_slice(row.as_bytes());
        });
    }
    let taken = Store::open(media.devices(), OpenOptions::default()).is_ok_and(|(store, _)| {
        let block = BlockNo(unit * UNIT_BLOCKS[disk]);
        let tier = [Tier::Ssd, Tier::Hdd][disk];
        // Its checksums were compared, right or wrong.
        row.state == UnitRow::SEALED
            && matches!(
                store.verify_block(tier, block),
                Ok(()) | Err(StoreError::DataChecksum { .. })
            )
    });
    try_pool(pool, &media, data);
    taken
}

/// The pool state and the jobs of devices after it: as many of its bytes as there are, the others as they were.
pub fn pool_state(data: &[u8]) -> bool {
    let pool = Pool::sound();
    let media = pool.media();
    let len = data.len().min(STATE_BODY_SIZE);
    let block = BlockNo(pool.sb.state.start.get());
    Media::replace(&media.nvm, block, |body| {
        body[..len].copy_from_slice(&data[..len])
    });
    try_pool(pool, &media, data)
}
