//! A pool with every kind of structure, at three stages, as bytes; what is in it; and where its structures
//! lie. Owns the pool; refuses to know what is damaged.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;
use varve_embed::{Embedded, SimPool};
use varve_format::{
    BLOCK_SIZE, Block, BlockHeader, BlockKind, BlockNo, FileBlock, FileKind, Ino, Tier, verify_block,
};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::Posix;
use varve_media::sim::{SimMedium, SimWorld};
use varve_store::{DataTarget, InodeSlot, OpenOptions, Store};

pub const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 16 << 20,
    journal_bytes: 512 << 10,
    ssd_bytes: 4 << 20,
    hdd_bytes: 4 << 20,
};
pub const DEVICES: [&str; 4] = ["nvm", "journal", "ssd", "hdd"];
pub const BLOCK: usize = BLOCK_SIZE;

/// Bytes of the devices.
pub type Media = [Vec<u8>; 4];

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

pub fn config() -> Config {
    Config {
        grace_ms: 0,
        ..Config::default()
    }
}

pub fn read_media(world: &SimWorld) -> Media {
    use varve_media::{BlockDevice, Region};
    DEVICES.map(|name| match world.region(name) {
        Some(region) => {
            let mut bytes = vec![0; region.len_bytes() as usize];
            region.read(0, &mut bytes).unwrap();
            bytes
        }
        None => {
            let device = world.block(name).unwrap();
            let mut bytes = vec![0; device.len_bytes() as usize];
            device.read(0, &mut bytes).unwrap();
            bytes
        }
    })
}

pub fn world_of(media: &Media) -> SimWorld {
    use varve_media::{BlockDevice, Region};
    let world = SimWorld::new();
    let zeros = [0; BLOCK];
    for (name, bytes) in DEVICES.iter().zip(media) {
        let len = bytes.len() as u64;
        if matches!(*name, "nvm" | "journal") {
            let region = world.add_region(name, POOL.medium, len, len);
            for (at, block) in (0..)
                .step_by(BLOCK)
                .zip(bytes.chunks(BLOCK))
                .filter(|(_, block)| *block != zeros)
            {
                region.write(at, block).unwrap();
            }
            region.fence().unwrap();
        } else {
            let device = world.add_block(name, len);
            for (at, block) in (0..)
                .step_by(BLOCK)
                .zip(bytes.chunks(BLOCK))
                .filter(|(_, block)| *block != zeros)
            {
                device.write(at, block).unwrap();
            }
            device.flush().unwrap();
        }
    }
    world
}

/// What is at a path: for a file, its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Thing {
    Dir,
    File(Vec<u8>),
    Link(Vec<u8>),
    Other,
}

pub type Tree = BTreeMap<Vec<u8>, Thing>;

pub fn body(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(seed);
    (0..len.div_ceil(8))
        .flat_map(|_| rng.next().to_le_bytes())
        .take(len)
        .collect()
}

/// Reads everything that can be read. A file that gives an error is left out where it does.
pub fn read_tree(posix: &Posix, path: &[u8], out: &mut BTreeMap<Vec<u8>, (Option<Thing>, Ino)>) {
    let Ok(dir) = posix.open(
        if path.is_empty() { b"/" } else { path },
        libc::O_RDONLY | libc::O_DIRECTORY,
        0,
    ) else {
        return;
    };
    let mut names = Vec::new();
    while let Ok(batch) = posix.readdir(dir, 1000) {
        if batch.is_empty() {
            break;
        }
        names.extend(batch.into_iter().map(|entry| entry.name.to_vec()));
    }
    posix.close(dir).unwrap();
    for name in names.into_iter().filter(|name| name != b"." && name != b"..") {
        let full = [path, b"/", &name].concat();
        let Ok(attr) = posix.lstat(&full) else { continue };
        let thing = match attr.kind() {
            FileKind::Directory => Some(Thing::Dir),
            FileKind::Symlink => posix.readlink(&full).ok().map(Thing::Link),
            FileKind::Regular => read_file(posix, &full, attr.size_bytes),
            _ => Some(Thing::Other),
        };
        out.insert(full.clone(), (thing, attr.key.ino));
        if attr.kind() == FileKind::Directory {
            read_tree(posix, &full, out);
        }
    }
}

/// The bytes; blocks that cannot be read are filled with a mark that no test data has.
pub fn read_file(posix: &Posix, path: &[u8], size: u64) -> Option<Thing> {
    let fd = posix.open(path, libc::O_RDONLY, 0).ok()?;
    let mut bytes = vec![0; (size as usize).min(64 << 20)];
    for (at, part) in (0..).step_by(BLOCK).zip(bytes.chunks_mut(BLOCK)) {
        if posix.pread(fd, part, at).is_err() {
            part.fill(UNREADABLE);
        }
    }
    posix.close(fd).unwrap();
    Some(Thing::File(bytes))
}

pub const UNREADABLE: u8 = 0xEE;

/// Three states of a pool, the last one the present, and what was in it at each.
pub struct Pool {
    pub past: Vec<Media>,
    pub trees: Vec<Tree>,
    pub inos: BTreeMap<Ino, Vec<u8>>,
}

pub fn build() -> Pool {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let mut pool = Pool {
        past: Vec::new(),
        trees: Vec::new(),
        inos: BTreeMap::new(),
    };
    for stage in 0..3 {
        let (parts, _) = POOL.parts(&world, config(), Arc::new(SystemClock)).unwrap();
        let embedded = Embedded::open(parts).unwrap();
        let fs = embedded.mount().unwrap();
        let posix = Posix::new(fs, Cred::root());
        fill(&posix, stage);
        posix.sync().unwrap();
        let mut tree = BTreeMap::new();
        read_tree(&posix, b"", &mut tree);
        pool.inos = tree.iter().map(|(path, (_, ino))| (*ino, path.clone())).collect();
        posix.fs().unmount().unwrap();
        drop(posix);
        embedded.shutdown().unwrap();
        if stage == 1 {
            spread(&world);
        }
        let devices = SimPool::devices(&world).unwrap();
        let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
        assert_eq!(store.check().unwrap(), [], "stage {stage}");
        assert_eq!(store.check_data().unwrap(), []);
        store.checkpoint().unwrap();
        pool.past.push(read_media(&world));
        pool.trees.push(
            tree.into_iter()
                .map(|(path, (thing, _))| (path, thing.unwrap()))
                .collect(),
        );
    }
    pool
}

pub fn put(posix: &Posix, path: &str, at: u64, data: &[u8]) {
    let fd = posix
        .open(path.as_bytes(), libc::O_RDWR | libc::O_CREAT, 0o644)
        .unwrap();
    assert_eq!(posix.pwrite(fd, data, at).unwrap(), data.len());
    posix.close(fd).unwrap();
}

pub fn fill(posix: &Posix, stage: u64) {
    if stage == 0 {
        for dir in ["/a", "/a/b", "/many", "/tiers"] {
            posix.mkdir(dir.as_bytes(), 0o755).unwrap();
        }
        for number in 0..260 {
            put(posix, &format!("/many/name-{number:04}"), 0, &body(number, 30));
        }
        // Islands: an extent each, so that the tree has nodes.
        for number in 0..420 {
            put(
                posix,
                "/a/islands",
                number * 2 * BLOCK as u64,
                &body(1000 + number, 100),
            );
        }
        for number in 0..8 {
            put(
                posix,
                &format!("/tiers/{number}"),
                0,
                &body(2000 + number, 120_000),
            );
            put(
                posix,
                &format!("/a/b/file-{number}"),
                0,
                &body(3000 + number, 9000),
            );
        }
        posix.symlink(&vec![b'x'; 600], b"/a/long-link").unwrap();
        posix.symlink(b"a/b", b"/short-link").unwrap();
        posix.link(b"/a/b/file-1", b"/a/second-name").unwrap();
        for number in 0..30_u64 {
            let name = format!("user.attribute-{number}");
            posix
                .setxattr(b"/a/b/file-2", name.as_bytes(), &body(number, 200), 0)
                .unwrap();
        }
        posix
            .setxattr(b"/a/b/file-3", b"user.long", &body(5, 9000), 0)
            .unwrap();
        return;
    }
    for number in 0..8 {
        put(
            posix,
            &format!("/a/b/file-{number}"),
            4000 * stage,
            &body(100 * stage + number, 6000),
        );
        put(
            posix,
            &format!("/stage-{stage}-{number}"),
            0,
            &body(200 * stage + number, 20_000),
        );
    }
    for number in 0..60 {
        put(
            posix,
            "/a/islands",
            number * 6 * BLOCK as u64,
            &body(4000 * stage + number, 300),
        );
        posix
            .rename(
                format!("/many/name-{:04}", number + 60 * stage).as_bytes(),
                format!("/a/moved-{stage}-{number}").as_bytes(),
            )
            .unwrap();
    }
    put(posix, "/tiers/7", 8192, &body(7000 + stage, 5000));
    posix.unlink(format!("/tiers/{}", 3 + stage).as_bytes()).unwrap();
    posix.truncate(b"/a/b/file-5", 5000 - stage * 100).unwrap();
    posix
        .setxattr(b"/a/b/file-3", b"user.long", &body(50 + stage, 7000), 0)
        .unwrap();
}

/// Moves some files to the slower tiers.
pub fn spread(world: &SimWorld) {
    let (store, _) = Store::open(SimPool::devices(world).unwrap(), OpenOptions::default()).unwrap();
    let dir = store
        .dir_lookup(varve_format::ROOT_INO, b"tiers")
        .unwrap()
        .unwrap();
    for (index, item) in store
        .dir_iter(dir.key.ino, 0, 100)
        .unwrap()
        .into_iter()
        .enumerate()
    {
        let tier = [Tier::Ssd, Tier::Hdd][index % 2];
        for extent in store.map(item.key.ino, FileBlock(0), 100).unwrap() {
            let mut tx = store.begin().unwrap();
            assert!(
                tx.migrate(
                    item.key.ino,
                    extent.file_block,
                    extent.len,
                    (extent.tier, extent.block),
                    DataTarget::only(tier).with_reserve(),
                )
                .unwrap()
            );
            tx.commit().unwrap();
        }
    }
    store.checkpoint().unwrap();
}

/// Blocks by what they hold: (device, block).
pub fn structures(media: &Media) -> BTreeMap<String, Vec<(usize, usize)>> {
    let mut out: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
    let world = world_of(media);
    let (store, _) = Store::open(SimPool::devices(&world).unwrap(), OpenOptions::default()).unwrap();
    let mut add = |kind: &str, device: usize, block: usize| {
        out.entry(kind.to_owned()).or_default().push((device, block));
    };
    add("superblock", 0, 0);
    add("superblock", 0, 1);
    add("journal header", 1, 0);
    add("journal header", 1, 1);
    for block in 2..20 {
        add("journal ring", 1, block);
    }
    for (device, tier) in [(0, Tier::Nvm), (2, Tier::Ssd), (3, Tier::Hdd)] {
        for (number, bytes) in media[device].chunks_exact(BLOCK).enumerate() {
            let bytes: &Block = bytes.try_into().unwrap();
            let header = BlockHeader::of(bytes);
            let kinds = [
                BlockKind::Bitmap,
                BlockKind::SessionTable,
                BlockKind::GrantTable,
                BlockKind::ChecksumTable,
                BlockKind::UnitTable,
                BlockKind::PoolState,
                BlockKind::UnitFooter,
                BlockKind::ExtentLeaf,
                BlockKind::ExtentNode,
                BlockKind::DirLeaf,
                BlockKind::DirNode,
                BlockKind::XattrLeaf,
                BlockKind::XattrNode,
                BlockKind::XattrValue,
                BlockKind::Symlink,
            ];
            if verify_block(bytes).is_ok() && header.block.get() == number as u64 {
                for kind in kinds.iter().filter(|kind| **kind as u16 == header.kind.get()) {
                    add(&format!("{kind:?}"), device, number);
                }
            } else if store.verify_block(tier, BlockNo(number as u64)).is_ok()
                && bytes.iter().any(|byte| *byte != 0)
            {
                add(&format!("data on {}", tier.name()), device, number);
            } else if (0..16).all(|image| {
                let at = image * 256;
                let word: [u8; 8] = bytes[at + 8..at + 16].try_into().unwrap();
                let ino = Ino(u64::from_le_bytes(word));
                InodeSlot::decode(&bytes[at..at + 256], ino).is_ok()
            }) && bytes.iter().any(|byte| *byte != 0)
            {
                add("inode images", device, number);
            }
        }
    }
    out
}
