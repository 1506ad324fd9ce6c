//! `fsck` on pools damaged at random: it never panics, finds what matters, mends what can be mended, says
//! what was lost, makes nothing worse, and is clean when it is run again.
//!
//! `VARVE_DAMAGE_IMAGES=1000` runs the long form; `VARVE_DAMAGE_SEED=n` runs one image and says more.
#![allow(clippy::unwrap_used)]

mod damaged_pool;

use damaged_pool::{
    BLOCK, DEVICES, Media, POOL, Pool, Rng, Thing, UNREADABLE, build, config, read_media, read_tree,
    structures, world_of,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use varve_embed::{Embedded, SimPool};
use varve_format::{FileBlock, Ino, Tier};
use varve_ipc::{Cred, SystemClock};
use varve_libfs::Posix;
use varve_store::repair::{RepairOptions, RepairReport};
use varve_store::{Content, Inode, OpenOptions, Store};

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
            ..RepairOptions::default()
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
        let (recording, result) = world.record(|| {
            Store::repair(
                &devices,
                RepairOptions {
                    now_ns: 1,
                    ..RepairOptions::default()
                },
            )
        });
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
            let report = Store::repair(
                &devices,
                RepairOptions {
                    now_ns: 2,
                    ..RepairOptions::default()
                },
            )
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
