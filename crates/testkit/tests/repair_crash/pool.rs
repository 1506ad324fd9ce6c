//! Stopped pools with data on all tiers, where their structures lie, and damage to them. Owns what is in a
//! pool; refuses to know what a repair makes of it.

use std::collections::BTreeMap;
use varve_format::inode::{INODE_SIZE, INODES_PER_BLOCK};
use varve_format::journal::{HEADER_OFFSETS, JournalHeader};
use varve_format::superblock::{FORMAT_VERSION, SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, Block, BlockHeader, BlockKind, BlockNo, FileBlock, Ino, Tier};
use varve_media::sim::{Crash, SimMedium, SimWorld};
use varve_media::{BlockDevice, Region};
use varve_store::{DataTarget, InodeSlot, OpenOptions, Store};
use varve_testkit::lockstep::both;
use varve_testkit::lookup;
use varve_testkit::model::{Model, Tree};
use varve_testkit::ops::{Op, write};
use varve_testkit::rig::{self, Rig, Shape};
use varve_testkit::workload::Rng;
use zerocopy::{FromBytes, IntoBytes};

/// Files of some blocks, in the root and below a directory.
const SMALL: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
/// Files of many, so that units of the slower tiers are full.
const BIG: [&str; 9] = [
    "big0", "big1", "big2", "big3", "big4", "big5", "big6", "big7", "big8",
];
const BIG_BYTES: u32 = 24 * BLOCK_SIZE as u32;
/// More shared runs than a leaf of their tree takes.
const RUNS: u64 = 150;

/// A stopped pool.
pub struct Pool {
    pub shape: Shape,
    pub world: SimWorld,
    /// What is in it.
    pub want: Tree,
    pub inos: BTreeMap<u64, String>,
    /// Blocks by what they hold.
    pub places: BTreeMap<String, Vec<Place>>,
}

/// A block of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    device: &'static str,
    block: u64,
}

/// A pool that is damaged.
pub struct Damaged {
    pub world: SimWorld,
    /// What was done to it.
    pub what: String,
    /// Data on a slower tier is damaged: it stays where it is, since every read of it fails.
    pub slow_data: bool,
}

/// What a kill leaves at this moment, on media of its own.
pub fn copy(world: &SimWorld) -> SimWorld {
    let (recording, ()) = world.clone().record(|| ());
    let last = recording.points().last().map_or(0, |point| point.index);
    recording.image(last, Crash::Kill).into_world()
}

impl Pool {
    /// Names, extents and attributes in blocks of their own, and data on three tiers: units of both slower
    /// ones are sealed, and one is open. One file has a tree whose leaves can be saved when its top is lost,
    /// into new nodes: there is room.
    pub fn new(medium: SimMedium) -> Self {
        let shape = Shape {
            nvm_bytes: 4 << 20,
            blocks_bytes: 3 << 20,
            ..Shape::tiny(medium)
        };
        let pool = Self::made(shape, false, |_, run| {
            run(&Op::Create(vec!["many"]));
            (0..260).for_each(|part| run(&write("many", part * 2 * BLOCK_BYTES, BLOCK_SIZE as u32, 11)));
        });
        assert!(pool.places.contains_key("ExtentNode"), "{:?}", pool.places.keys());
        pool
    }

    /// The same with all of its metadata on slower tiers.
    pub fn cold(medium: SimMedium) -> Self {
        let shape = Shape {
            nvm_bytes: 4 << 20,
            blocks_bytes: 3 << 20,
            ..Shape::tiny(medium)
        };
        let pool = Self::made(shape, true, |_, _| ());
        for kind in [
            "inode images on ssd",
            "ExtentLeaf on ssd",
            "DirLeaf on ssd",
            "XattrLeaf on ssd",
        ] {
            assert!(pool.places.contains_key(kind), "{kind}: {:?}", pool.places.keys());
        }
        pool
    }

    /// One whose files share blocks, on all tiers, in so many runs that their tree has nodes of both kinds.
    pub fn shared(medium: SimMedium) -> Self {
        let shape = Shape {
            nvm_bytes: 4 << 20,
            blocks_bytes: 3 << 20,
            ..Shape::tiny(medium)
        };
        let pool = Self::made(shape, false, |_, run| {
            for name in ["shares", "many", "some"] {
                run(&Op::Create(vec![name]));
            }
            run(&write("many", 0, 2 * RUNS as u32 * BLOCK_SIZE as u32, 5));
            let mut clone = |from: &'static str, to: &'static str, at: u64, len: u64| {
                run(&Op::Clone {
                    from: vec![from],
                    offset: at,
                    to: vec![to],
                    to_offset: at,
                    len,
                });
            };
            for name in ["big0", "big1", "big2", "a", "b", "c"] {
                clone(name, "shares", 0, 0);
                clone(name, "d", 0, 0);
            }
            for block in (0..2 * RUNS).step_by(2) {
                clone("many", "some", block * BLOCK_BYTES, BLOCK_BYTES);
            }
            run(&write("big1", 5 * BLOCK_BYTES, 3 * BLOCK_SIZE as u32, 77));
        });
        for kind in ["SharedLeaf", "SharedNode"] {
            assert!(pool.places.contains_key(kind), "{kind}: {:?}", pool.places.keys());
        }
        pool
    }

    /// One without slower tiers, whose NVM is full.
    pub fn full(medium: SimMedium) -> Self {
        let shape = Shape {
            nvm_bytes: 4 << 20,
            blocks_bytes: 0,
            ..Shape::tiny(medium)
        };
        Self::made(shape, false, |rig, run| {
            run(&Op::Create(vec!["filler"]));
            for part in 0.. {
                // Digested before it does not fit, so that the model and the pool agree.
                rig.kernel().digest_all().expect("sound");
                let stats = rig.kernel().store().space();
                let left = stats.tiers[Tier::Nvm as usize];
                if left.free <= left.kept + 8 {
                    break;
                }
                run(&write("filler", part * 2 * BLOCK_BYTES, BLOCK_SIZE as u32, 9));
            }
        })
    }

    fn made(shape: Shape, cold: bool, more: impl FnOnce(&Rig, &mut dyn FnMut(&Op))) -> Self {
        let rig = Rig::new(shape).expect("a pool");
        let fs = rig.mount().expect("a mount");
        let mut model = Model::new();
        let mut run = |op: &Op| assert!(both(&mut model, &fs, op).expect("sound"), "{op}");
        run(&Op::Mkdir(vec!["dir"]));
        for (seed, name) in SMALL.into_iter().enumerate() {
            let seed = seed as u8;
            run(&Op::Create(vec![name]));
            run(&Op::Create(vec!["dir", name]));
            // Several extents each.
            (0..6).for_each(|part| run(&write(name, part * 8192, 4096, seed)));
            run(&Op::SetXattr(
                vec![name],
                if seed == 3 { 3000 } else { 300 },
                seed,
            ));
            run(&Op::SetXattr(vec!["dir", name], 150, seed));
        }
        for (seed, name) in BIG.into_iter().enumerate() {
            run(&Op::Create(vec![name]));
            run(&write(name, 0, BIG_BYTES, 100 + seed as u8));
        }
        more(&rig, &mut run);
        let want = model.tree();
        let names_of = |path: &str| -> Vec<String> {
            path.split('/')
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect()
        };
        let inos = want
            .keys()
            .map(|path| {
                let names = names_of(path);
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                let attr = lookup::find(&fs, &names).expect("it is there");
                (attr.key.ino.0, path.clone())
            })
            .collect();
        drop(fs);
        rig.kernel().digest_all().expect("sound");
        rig.settle();
        rig.kernel().shutdown().expect("an orderly end");
        let world = copy(&rig.world);
        let mut pool = Self {
            shape,
            world,
            want,
            inos,
            places: BTreeMap::new(),
        };
        if shape.blocks_bytes > 0 {
            pool.spread();
        }
        if cold {
            let store = pool.open();
            assert!(store.demote(u64::MAX).expect("there is room") > 10);
            store.checkpoint().expect("sound");
        }
        pool.places = pool.structures();
        pool
    }

    fn open(&self) -> Store {
        let devices = rig::devices(&self.world).expect("they are there");
        Store::open(devices, OpenOptions::default()).expect("sound").0
    }

    /// Two files of three move to the slower tiers.
    fn spread(&self) {
        let store = self.open();
        let files = self.inos.iter().filter(|(_, path)| self.is_file(path));
        for (index, (ino, _)) in files.enumerate() {
            let Some(tier) = [None, Some(Tier::Ssd), Some(Tier::Hdd)][index % 3] else {
                continue;
            };
            let ino = Ino(*ino);
            for extent in store.map(ino, FileBlock(0), 100).expect("sound") {
                let from = (extent.tier, extent.block);
                let to = DataTarget::only(tier).with_reserve();
                let mut tx = store.begin().expect("sound");
                let moved = tx.migrate(ino, extent.file_block, extent.len, from, to);
                assert!(moved.expect("there is room"));
                tx.commit().expect("sound");
            }
        }
        store.checkpoint().expect("sound");
    }

    /// Whether a path is that of a regular file.
    pub fn is_file(&self, path: &str) -> bool {
        self.want
            .get(path)
            .is_some_and(|seen| seen.mode & 0o170_000 == 0o100_000)
    }

    fn structures(&self) -> BTreeMap<String, Vec<Place>> {
        let mut places: BTreeMap<String, Vec<Place>> = BTreeMap::new();
        let mut add = |kind: &str, device, block| {
            places
                .entry(kind.to_owned())
                .or_default()
                .push(Place { device, block });
        };
        SUPERBLOCK_BLOCKS
            .iter()
            .for_each(|block| add("superblock", "nvm", *block));
        HEADER_OFFSETS
            .iter()
            .for_each(|at| add("journal header", "journal", at / BLOCK_BYTES));
        let store = self.open();
        for (device, tier) in [("nvm", Tier::Nvm), ("ssd", Tier::Ssd), ("hdd", Tier::Hdd)] {
            for block in 2..blocks(&self.world, device) {
                let bytes = read(&self.world, Place { device, block });
                let header = BlockHeader::of(&bytes);
                if bytes.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let number = BlockNo::on(tier, block);
                if varve_format::verify_block(&bytes).is_ok()
                    && [number.0, block].contains(&header.block.get())
                {
                    let kind = BlockKind::from_u16(header.kind.get()).expect("one of them");
                    let of = match kind {
                        // Tables lie on NVM; which tier they are of counts.
                        BlockKind::ChecksumTable | BlockKind::UnitTable | BlockKind::Bitmap => {
                            format!(" of {}", self.tier_of_table(block))
                        }
                        BlockKind::UnitFooter => format!(" on {device}"),
                        _ => String::new(),
                    };
                    let of = if tier == Tier::Nvm || !of.is_empty() {
                        of
                    } else {
                        format!(" on {device}")
                    };
                    add(&format!("{kind:?}{of}"), device, block);
                } else if holds_images(&bytes) {
                    match tier {
                        Tier::Nvm => add("inode images", device, block),
                        _ => add(&format!("inode images on {device}"), device, block),
                    }
                } else if store.verify_block(tier, BlockNo(block)).is_ok() {
                    add(&format!("data on {device}"), device, block);
                }
            }
        }
        places
    }

    /// The tier that a table on NVM is of.
    fn tier_of_table(&self, block: u64) -> &'static str {
        let first = read(
            &self.world,
            Place {
                device: "nvm",
                block: 0,
            },
        );
        let superblock = Superblock::parse(&first[..SUPERBLOCK_SIZE]).expect("sound");
        let of = Tier::ALL.into_iter().find(|tier| {
            let tier = superblock.tier(*tier);
            [tier.bitmap, tier.checksums, tier.units]
                .iter()
                .any(|area| (area.start.get()..area.end()).contains(&block))
        });
        of.expect("each table is of a tier").name()
    }

    /// A block of this kind, and up to three others of any kind.
    pub fn some_kinds<'a>(&'a self, kind: &'a str, rng: &mut Rng) -> Vec<&'a str> {
        let kinds: Vec<_> = self.places.keys().collect();
        let others = (0..rng.below(4)).map(|_| kinds[rng.below(kinds.len() as u64) as usize].as_str());
        std::iter::once(kind).chain(others).collect()
    }

    /// A copy of it with a block of each of these kinds damaged.
    pub fn damaged(&self, hit: &[&str], rng: &mut Rng) -> Damaged {
        let world = copy(&self.world);
        let done: Vec<_> = hit.iter().map(|kind| self.damage(&world, kind, rng)).collect();
        Damaged {
            world,
            what: done.join(", "),
            slow_data: hit
                .iter()
                .any(|kind| matches!(*kind, "data on ssd" | "data on hdd")),
        }
    }

    /// A copy of it without the rows of a tier's units and all of their footers.
    pub fn without_footers(&self, tier: &str) -> Damaged {
        let world = copy(&self.world);
        let kinds = [format!("UnitTable of {tier}"), format!("UnitFooter on {tier}")];
        for place in kinds.iter().flat_map(|kind| &self.places[kind]) {
            overwrite(&world, *place, &[0; BLOCK_SIZE]);
        }
        Damaged {
            world,
            what: format!("{}: all zeroed", kinds.join(", ")),
            slow_data: false,
        }
    }

    fn damage(&self, world: &SimWorld, kind: &str, rng: &mut Rng) -> String {
        let places = &self.places[kind];
        let place = *rng.pick(places);
        let mut bytes = read(world, place);
        let how = match rng.below(4) {
            0 => {
                bytes[rng.below(BLOCK_BYTES) as usize] ^= 1 << rng.below(8);
                "a bit of it".to_owned()
            }
            1 => {
                let first = rng.below(BLOCK_BYTES - 64) as usize;
                bytes[first..first + 64].fill_with(|| rng.next_u64() as u8);
                format!("64 bytes from {first} on")
            }
            2 => {
                bytes.fill(0);
                "zeroed".to_owned()
            }
            _ => {
                let other = *rng.pick(places);
                bytes = read(world, other);
                format!("overwritten by {} {}", other.device, other.block)
            }
        };
        overwrite(world, place, &bytes);
        format!("{kind} ({} {}): {how}", place.device, place.block)
    }
}

/// Whether it is a block of the inode file.
fn holds_images(bytes: &Block) -> bool {
    (0..INODES_PER_BLOCK as usize).all(|image| {
        let image = &bytes[image * INODE_SIZE..(image + 1) * INODE_SIZE];
        let ino: [u8; 8] = image[8..16].try_into().expect("eight bytes");
        InodeSlot::decode(image, Ino(u64::from_le_bytes(ino))).is_ok()
    })
}

fn blocks(world: &SimWorld, device: &str) -> u64 {
    let region = world.region(device).map(|region| region.len_bytes());
    let bytes = region.or_else(|| world.block(device).map(|device| device.len_bytes()));
    bytes.unwrap_or(0) / BLOCK_BYTES
}

pub fn read(world: &SimWorld, place: Place) -> Box<Block> {
    let mut bytes = Box::new([0; BLOCK_SIZE]);
    let at = place.block * BLOCK_BYTES;
    match world.region(place.device) {
        Some(region) => region.read(at, &mut bytes[..]),
        None => world
            .block(place.device)
            .expect("it is there")
            .read(at, &mut bytes[..]),
    }
    .expect("in bounds");
    bytes
}

fn overwrite(world: &SimWorld, place: Place, bytes: &Block) {
    let at = place.block * BLOCK_BYTES;
    match world.region(place.device) {
        Some(region) => region.write(at, &bytes[..]),
        None => world
            .block(place.device)
            .expect("it is there")
            .write(at, &bytes[..]),
    }
    .expect("in bounds");
}

fn change<const N: usize>(world: &SimWorld, places: [Place; N], how: impl Fn(&mut Block)) {
    for place in places {
        let mut bytes = read(world, place);
        how(&mut bytes);
        overwrite(world, place, &bytes);
    }
}

const SUPERBLOCKS: [Place; 2] = [
    Place {
        device: "nvm",
        block: SUPERBLOCK_BLOCKS[0],
    },
    Place {
        device: "nvm",
        block: SUPERBLOCK_BLOCKS[1],
    },
];
const JOURNAL_HEADERS: [Place; 2] = [
    Place {
        device: "journal",
        block: HEADER_OFFSETS[0] / BLOCK_BYTES,
    },
    Place {
        device: "journal",
        block: HEADER_OFFSETS[1] / BLOCK_BYTES,
    },
];

/// Makes a pool one that is not to be repaired.
type Spoil = fn(&SimWorld);

/// What a repair refuses, and how a pool comes to it.
pub const NOT_TO_BE_REPAIRED: [(&str, Spoil); 5] = [
    ("both superblocks damaged", |world| {
        change(world, SUPERBLOCKS, |bytes| bytes[40] ^= 1);
    }),
    ("a superblock of a newer version beside a damaged one", |world| {
        change(world, [SUPERBLOCKS[0]], |bytes| bytes[40] ^= 1);
        change(world, [SUPERBLOCKS[1]], |bytes| {
            let mut newer = Superblock::read_from_bytes(&bytes[..SUPERBLOCK_SIZE]).expect("as long");
            newer.version.set(FORMAT_VERSION + 1);
            bytes[..SUPERBLOCK_SIZE].copy_from_slice(newer.sealed().as_bytes());
        });
    }),
    ("the journal of another pool", |world| {
        change(world, JOURNAL_HEADERS, |bytes| {
            let len = size_of::<JournalHeader>();
            let mut other = JournalHeader::read_from_bytes(&bytes[..len]).expect("as long");
            other.pool_uuid[0] ^= 1;
            bytes[..len].copy_from_slice(other.sealed().as_bytes());
        });
    }),
    ("no HDD", |world| assert!(world.remove("hdd"))),
    ("a shorter SSD", |world| {
        assert!(world.remove("ssd"));
        let _ = world.add_block("ssd", 1 << 20);
    }),
];
