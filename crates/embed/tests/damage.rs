//! `fsck` on pools damaged at random: it never panics, finds what matters, mends what can be mended, says what was lost, makes nothing
//! worse, and is clean when it is run again.
//!
//! `VARVE_DAMAGE_IMAGES=1000` runs the long form; `VARVE_DAMAGE_SEED=n` runs one image and says more.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use varve_embed::{Embedded, SimPool};
use varve_format::{
    BLOCK_SIZE, Block, BlockHeader, BlockKind, BlockNo, FileBlock, FileKind, Ino, Tier, verify_block,
};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::Posix;
use varve_media::sim::{SimMedium, SimWorld};
use varve_store::repair::{RepairOptions, RepairReport};
use varve_store::{Content, DataTarget, Inode, InodeSlot, OpenOptions, Store};

const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 16 << 20,
    journal_bytes: 512 << 10,
    ssd_bytes: 4 << 20,
    hdd_bytes: 4 << 20,
};
const DEVICES: [&str; 4] = ["nvm", "journal", "ssd", "hdd"];
const BLOCK: usize = BLOCK_SIZE;

/// Bytes of the devices.
type Media = [Vec<u8>; 4];

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

fn config() -> Config {
    Config {
        grace_ms: 0,
        ..Config::default()
    }
}

fn read_media(world: &SimWorld) -> Media {
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

fn world_of(media: &Media) -> SimWorld {
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
enum Thing {
    Dir,
    File(Vec<u8>),
    Link(Vec<u8>),
    Other,
}

type Tree = BTreeMap<Vec<u8>, Thing>;

fn body(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(seed);
    (0..len.div_ceil(8))
        .flat_map(|_| rng.next().to_le_bytes())
        .take(len)
        .collect()
}

/// Reads everything that can be read. A file that gives an error is left out where it does.
fn read_tree(posix: &Posix, path: &[u8], out: &mut BTreeMap<Vec<u8>, (Option<Thing>, Ino)>) {
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
fn read_file(posix: &Posix, path: &[u8], size: u64) -> Option<Thing> {
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

const UNREADABLE: u8 = 0xEE;

/// Three states of a pool, the last one the present, and what was in it at each.
struct Pool {
    past: Vec<Media>,
    trees: Vec<Tree>,
    inos: BTreeMap<Ino, Vec<u8>>,
}

fn build() -> Pool {
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

fn put(posix: &Posix, path: &str, at: u64, data: &[u8]) {
    let fd = posix
        .open(path.as_bytes(), libc::O_RDWR | libc::O_CREAT, 0o644)
        .unwrap();
    assert_eq!(posix.pwrite(fd, data, at).unwrap(), data.len());
    posix.close(fd).unwrap();
}

fn fill(posix: &Posix, stage: u64) {
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
fn spread(world: &SimWorld) {
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
fn structures(media: &Media) -> BTreeMap<String, Vec<(usize, usize)>> {
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

/// Damages a copy; says what was done.
fn damage(pool: &Pool, kinds: &BTreeMap<String, Vec<(usize, usize)>>, rng: &mut Rng) -> (Media, Vec<String>) {
    let mut media = pool.past[2].clone();
    let mut done = Vec::new();
    for _ in 0..1 + rng.below(3) {
        let (kind, places) = kinds.iter().nth(rng.below(kinds.len())).unwrap();
        let (device, block) = places[rng.below(places.len())];
        let at = block * BLOCK;
        let how = match rng.below(6) {
            0 => {
                let bit = rng.below(BLOCK * 8);
                media[device][at + bit / 8] ^= 1 << (bit % 8);
                format!("bit {bit} flipped")
            }
            1 => {
                let first = rng.below(BLOCK - 64);
                for byte in &mut media[device][at + first..at + first + 64] {
                    *byte = rng.next() as u8;
                }
                format!("64 bytes at {first} made random")
            }
            2 => {
                media[device][at..at + BLOCK].fill(0);
                "zeroed".to_owned()
            }
            3 => {
                let (other, with) = places[rng.below(places.len())];
                let (a, b) = (
                    media[device][at..at + BLOCK].to_vec(),
                    media[other][with * BLOCK..(with + 1) * BLOCK].to_vec(),
                );
                media[device][at..at + BLOCK].copy_from_slice(&b);
                media[other][with * BLOCK..(with + 1) * BLOCK].copy_from_slice(&a);
                format!("swapped with {with}")
            }
            4 => {
                let stage = rng.below(2);
                let old = pool.past[stage][device][at..at + BLOCK].to_vec();
                media[device][at..at + BLOCK].copy_from_slice(&old);
                format!("stale: as it was at stage {stage}")
            }
            _ => {
                let (other, from) = places[rng.below(places.len())];
                let copy = media[other][from * BLOCK..(from + 1) * BLOCK].to_vec();
                media[device][at..at + BLOCK].copy_from_slice(&copy);
                format!("overwritten with block {from}")
            }
        };
        done.push(format!("{kind} ({} block {block}) {how}", DEVICES[device]));
    }
    (media, done)
}

/// Whether the report says that these bytes of a file may be wrong.
fn named(report: &RepairReport, ino: Option<Ino>, path: &[u8], at: u64) -> bool {
    report.losses.iter().any(|loss| {
        (Some(loss.ino) == ino || loss.path.as_deref() == Some(path))
            && loss.bytes.is_none_or(|(from, to)| (from..to).contains(&at))
    })
}

/// Whether something above the path was lost, so that it may be elsewhere.
fn moved(report: &RepairReport, inos: &BTreeMap<Vec<u8>, Ino>, path: &[u8]) -> bool {
    let mut end = path.len();
    loop {
        let prefix = &path[..end];
        if named(report, inos.get(prefix).copied(), prefix, 0)
            || end == 0 && named(report, Some(Ino(1)), b"/", 0)
        {
            return true;
        }
        match prefix.iter().rposition(|byte| *byte == b'/') {
            Some(at) if end > 0 => end = at,
            _ => return false,
        }
    }
}

/// Compares what is left with what was there. Returns what is silently wrong.
fn compare(pool: &Pool, report: &RepairReport, posix: &Posix, stale: bool) -> Vec<String> {
    let inos: BTreeMap<Vec<u8>, Ino> = pool.inos.iter().map(|(ino, path)| (path.clone(), *ino)).collect();
    let mut now = BTreeMap::new();
    read_tree(posix, b"", &mut now);
    let mut wrong = Vec::new();
    for (path, thing) in &pool.trees[2] {
        let shown = String::from_utf8_lossy(path);
        let ino = inos.get(path).copied();
        let old = |thing: &Thing| stale && pool.trees[..2].iter().any(|tree| tree.get(path) == Some(thing));
        match (now.get(path), thing) {
            (None, _) => {
                if !moved(report, &inos, path) {
                    wrong.push(format!("{shown} is gone and not named"));
                }
            }
            (Some((None, _)), _) => {
                if !named(report, ino, path, 0) {
                    wrong.push(format!("{shown} cannot be read and is not named"));
                }
            }
            (Some((Some(Thing::File(is)), _)), Thing::File(was)) => {
                if is == was || old(&Thing::File(is.clone())) {
                    continue;
                }
                if is.len() != was.len()
                    && !named(report, ino, path, 0)
                    && !report.losses.iter().any(|loss| Some(loss.ino) == ino)
                {
                    wrong.push(format!("{shown} has {} bytes, not {}", is.len(), was.len()));
                    continue;
                }
                for (at, (a, b)) in (0..).step_by(BLOCK).zip(is.chunks(BLOCK).zip(was.chunks(BLOCK))) {
                    if a != b && a.iter().any(|byte| *byte != UNREADABLE) && !named(report, ino, path, at) {
                        wrong.push(format!("{shown} is wrong at byte {at} and not named"));
                    }
                }
            }
            (Some((Some(is), _)), was) => {
                if is != was && !named(report, ino, path, 0) && !old(is) {
                    wrong.push(format!("{shown} is {is:?} now, not {was:?}"));
                }
            }
        }
    }
    wrong
}

fn images() -> (u64, Option<u64>) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    (
        number("VARVE_DAMAGE_IMAGES").unwrap_or(60),
        number("VARVE_DAMAGE_SEED"),
    )
}

#[derive(Default, Debug)]
struct Counts {
    images: u64,
    refused: u64,
    harmless: u64,
    mended: u64,
    with_losses: u64,
}

#[test]
fn fsck_mends_or_names_what_was_lost_when_pools_are_damaged_at_random() {
    let pool = build();
    let kinds = structures(&pool.past[2]);
    for kind in [
        "Bitmap",
        "SessionTable",
        "GrantTable",
        "ChecksumTable",
        "UnitTable",
        "PoolState",
        "UnitFooter",
        "ExtentLeaf",
        "DirLeaf",
        "DirNode",
        "XattrLeaf",
        "XattrValue",
        "Symlink",
        "data on nvm",
        "data on ssd",
        "data on hdd",
        "inode images",
    ] {
        assert!(kinds.contains_key(kind), "no {kind} in {:?}", kinds.keys());
    }
    let (count, only) = images();
    let mut counts = Counts::default();
    let mut failures = Vec::new();
    let mut hit: BTreeSet<String> = BTreeSet::new();
    // Those of later numbers once found something.
    let again = [147, 149, 278].into_iter().filter(|seed| *seed >= count);
    let seeds: Vec<u64> = only.map_or_else(|| (0..count).chain(again).collect(), |seed| vec![seed]);
    for seed in seeds {
        let mut rng = Rng(seed);
        let (media, done) = damage(&pool, &kinds, &mut rng);
        hit.extend(
            done.iter()
                .map(|text| text.split(" (").next().unwrap().to_owned()),
        );
        let result = one(&pool, &media, &done, &mut counts, only.is_some());
        if let Err(text) = result {
            failures.push(format!("seed {seed}: {done:?}: {text}"));
        }
    }
    println!("{counts:?}; {} kinds of structures hit", hit.len());
    assert!(failures.is_empty(), "{} images: {failures:#?}", failures.len());
}

fn one(pool: &Pool, media: &Media, done: &[String], counts: &mut Counts, loud: bool) -> Result<(), String> {
    counts.images += 1;
    let world = world_of(media);
    let devices = SimPool::devices(&world).unwrap();
    let before = match Store::open(
        devices.clone(),
        OpenOptions {
            accept_journal_damage: true,
            ..OpenOptions::default()
        },
    ) {
        Ok((store, _)) => store
            .check()
            .and_then(|mut findings| {
                findings.extend(store.check_nvm_data()?);
                Ok(findings)
            })
            .map(|findings| findings.len()),
        Err(error) => Err(error),
    };
    let world = world_of(media);
    let devices = SimPool::devices(&world).unwrap();
    let report = match Store::repair(
        &devices,
        RepairOptions {
            now_ns: 5_000_000_000,
        },
    ) {
        Ok(report) => report,
        Err(error) => {
            // Without any superblock there is no pool.
            let both = (0..2).all(|copy| {
                varve_format::superblock::Superblock::parse(&media[0][copy * BLOCK..copy * BLOCK + 512])
                    .is_err()
            });
            counts.refused += 1;
            return if both {
                Ok(())
            } else {
                Err(format!("repair failed: {error}"))
            };
        }
    };
    if loud {
        println!("{done:#?}\n{report:#?}");
    }
    if !report.left.is_empty() {
        return Err(format!("left: {:?}", report.left));
    }
    let changed = !report.mended.is_empty();
    // Any opening writes a new header in place of the damaged one.
    let by_itself = |what: &String| what.contains("a copy of its header");
    if !report.mended.iter().all(by_itself) && before.as_ref().is_ok_and(|count| *count == 0) {
        return Err(format!(
            "the check saw nothing, the repair did {:?}",
            report.mended
        ));
    }
    let (store, _) =
        Store::open(devices, OpenOptions::default()).map_err(|error| format!("open: {error}"))?;
    let again = store.check().map_err(|error| error.to_string())?;
    let data = store.check_nvm_data().map_err(|error| error.to_string())?;
    if !again.is_empty() || !data.is_empty() {
        return Err(format!("second check: {again:?} {data:?}"));
    }
    drop(store);
    let (parts, _) = POOL
        .parts(&world, config(), Arc::new(SystemClock))
        .map_err(|error| format!("daemon: {error}"))?;
    let embedded = Embedded::open(parts).map_err(|error| format!("daemon: {error}"))?;
    let posix = Posix::new(
        embedded.mount().map_err(|error| format!("mount: {error:?}"))?,
        Cred::root(),
    );
    let wrong = compare(
        pool,
        &report,
        &posix,
        done.iter().any(|text| text.contains("stale")),
    );
    if !wrong.is_empty() {
        return Err(format!("{wrong:?}; report: {:?}", report.losses));
    }
    posix
        .mkdir(b"/after", 0o755)
        .and_then(|()| posix.rmdir(b"/after"))
        .map_err(|error| format!("the pool does not work: {error:?}"))?;
    posix
        .fs()
        .unmount()
        .map_err(|error| format!("unmount: {error:?}"))?;
    drop(posix);
    embedded
        .shutdown()
        .map_err(|error| format!("shutdown: {error}"))?;
    match (changed, report.losses.is_empty()) {
        (false, _) => counts.harmless += 1,
        (true, true) => counts.mended += 1,
        (true, false) => counts.with_losses += 1,
    }
    Ok(())
}

#[test]
fn repair_changes_nothing_when_a_pool_is_sound() {
    let pool = build();
    let world = world_of(&pool.past[2]);
    let devices = SimPool::devices(&world).unwrap();
    let report = Store::repair(&devices, RepairOptions::default()).unwrap();
    assert!(
        report.mended.is_empty() && report.losses.is_empty() && report.left.is_empty(),
        "{report:?}"
    );
    let after = read_media(&world);
    assert!(after[0] == pool.past[2][0] && after[2..] == pool.past[2][2..]);
}

#[test]
fn repair_can_be_taken_up_again_when_it_is_cut_off_anywhere() {
    let pool = build();
    let kinds = structures(&pool.past[2]);
    let mut tried = 0;
    for seed in 1000..1006 {
        let (media, done) = damage(&pool, &kinds, &mut Rng(seed));
        let world = world_of(&media);
        let devices = SimPool::devices(&world).unwrap();
        let (recording, result) = world.record(|| Store::repair(&devices, RepairOptions { now_ns: 1 }));
        if result.is_err() {
            continue;
        }
        let points = recording.points();
        for step in [7, 3, 2] {
            let Some(point) = points.get(points.len() / step) else {
                continue;
            };
            let world = recording
                .image(point.index, varve_media::sim::Crash::PowerSeeded(seed))
                .into_world();
            let devices = SimPool::devices(&world).unwrap();
            let report = Store::repair(&devices, RepairOptions { now_ns: 2 })
                .unwrap_or_else(|error| panic!("{done:?}, cut off at {}: {error}", point.index));
            assert_eq!(report.left, [], "{done:?}, cut off at {}", point.index);
            tried += 1;
        }
    }
    assert!(tried > 5, "only {tried} images");
}

#[test]
fn repair_names_the_file_and_its_bytes_when_data_on_nvm_is_damaged() {
    let pool = build();
    let mut media = pool.past[2].clone();
    let path = b"/stage-2-3".to_vec();
    let ino = *pool.inos.iter().find(|(_, known)| **known == path).unwrap().0;
    let world = world_of(&media);
    let (store, _) = Store::open(SimPool::devices(&world).unwrap(), OpenOptions::default()).unwrap();
    let extent = store.map(ino, FileBlock(2), 1).unwrap()[0];
    let inode: Inode = store.get(ino).unwrap();
    assert!(matches!(inode.content, Content::File(_)) && extent.tier == Tier::Nvm);
    media[0][extent.block.0 as usize * BLOCK + 77] ^= 4;
    let world = world_of(&media);
    let report = Store::repair(&SimPool::devices(&world).unwrap(), RepairOptions::default()).unwrap();
    assert_eq!(report.losses.len(), 1, "{report:?}");
    let loss = &report.losses[0];
    assert_eq!((loss.ino, loss.path.as_deref()), (ino, Some(&path[..])));
    assert_eq!(loss.bytes, Some((8192, 12288)));
    let (parts, _) = POOL.parts(&world, config(), Arc::new(SystemClock)).unwrap();
    let embedded = Embedded::open(parts).unwrap();
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    let fd = posix.open(&path, libc::O_RDONLY, 0).unwrap();
    let mut bytes = vec![0; BLOCK];
    assert_eq!(posix.pread(fd, &mut bytes, 4096), Ok(BLOCK));
    assert!(posix.pread(fd, &mut bytes, 8192).is_err());
}
