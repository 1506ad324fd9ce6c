//! `fsck --repair` cut off at every point: the next repair takes it up, leaves nothing, and loses nothing that the first would not have lost.
//!
//! `VARVE_SEED=n` damages other blocks, `VARVE_REPAIR_PAIRS=n` more of them.

use std::collections::{BTreeMap, BTreeSet};
use varve_format::BLOCK_SIZE;
use varve_media::sim::{Crash, SimMedium, SimWorld};
use varve_store::Store;
use varve_store::repair::{RepairOptions, RepairReport};
use varve_testkit::lockstep::both;
use varve_testkit::model::{Model, Tree};
use varve_testkit::ops::Op;
use varve_testkit::rig::{self, Rig, Shape};
use varve_testkit::target;
use varve_testkit::workload::Rng;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}"))
    })
}

const NAMES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

/// What a kill leaves at this moment, on media of its own.
fn copy(world: &SimWorld) -> SimWorld {
    let (recording, ()) = world.clone().record(|| ());
    let last = recording.points().last().map_or(0, |point| point.index);
    recording.image(last, Crash::Kill).into_world()
}

/// A stopped pool with names, extents and attributes in blocks of their own.
fn prepared(shape: Shape) -> (SimWorld, Model, BTreeMap<u64, String>) {
    let rig = Rig::new(shape).expect("a pool");
    let fs = rig.mount().expect("a mount");
    let mut model = Model::new();
    let mut run = |op: &Op| assert!(both(&mut model, &fs, op).expect("sound"), "{op}");
    run(&Op::Mkdir(vec!["dir"]));
    for (seed, name) in NAMES.into_iter().enumerate() {
        run(&Op::Create(vec![name]));
        run(&Op::Create(vec!["dir", name]));
        // Several extents each.
        for part in 0..6 {
            run(&Op::Write {
                path: vec![name],
                offset: part * 8192,
                len: 4096,
                seed: seed as u8,
            });
        }
        run(&Op::SetXattr(vec![name], 300, seed as u8));
        run(&Op::SetXattr(vec!["dir", name], 150, seed as u8));
    }
    let inos = model
        .tree()
        .keys()
        .map(|path| {
            let names: Vec<_> = path.split('/').filter(|name| !name.is_empty()).collect();
            (
                target::find(&fs, &names).expect("it is there").key.ino.0,
                path.clone(),
            )
        })
        .collect();
    drop(fs);
    rig.kernel().digest_all().expect("sound");
    rig.settle();
    rig.kernel().shutdown().expect("an orderly end");
    (copy(&rig.world), model, inos)
}

/// Metadata blocks of the NVM, by their header.
fn metadata(world: &SimWorld) -> Vec<u64> {
    let nvm = world.region("nvm").expect("it is there");
    let mut found = Vec::new();
    let mut block = vec![0; BLOCK_SIZE];
    use varve_media::Region;
    for number in 2..nvm.len_bytes() / BLOCK_SIZE as u64 {
        nvm.read(number * BLOCK_SIZE as u64, &mut block)
            .expect("in bounds");
        let bytes: &varve_format::Block = block[..].try_into().expect("a block");
        if varve_format::verify_block(bytes).is_ok()
            && varve_format::BlockHeader::of(bytes).block.get() == number
        {
            found.push(number);
        }
    }
    found
}

/// Damages some blocks; what it did.
fn damage(world: &SimWorld, blocks: &[u64], rng: &mut Rng) -> String {
    use varve_media::Region;
    let nvm = world.region("nvm").expect("it is there");
    let mut done = Vec::new();
    for _ in 0..1 + rng.below(2) {
        let block = *rng.pick(blocks);
        let at = block * BLOCK_SIZE as u64;
        match rng.below(3) {
            0 => {
                let at = at + rng.below(BLOCK_SIZE as u64);
                let mut byte = [0];
                nvm.read(at, &mut byte).expect("in bounds");
                nvm.write(at, &[byte[0] ^ 1 << rng.below(8)]).expect("in bounds");
                done.push(format!("a bit of block {block}"));
            }
            1 => {
                nvm.write(at, &[0; BLOCK_SIZE]).expect("in bounds");
                done.push(format!("block {block} zeroed"));
            }
            _ => {
                let other = *rng.pick(blocks);
                let mut bytes = vec![0; BLOCK_SIZE];
                nvm.read(other * BLOCK_SIZE as u64, &mut bytes)
                    .expect("in bounds");
                nvm.write(at, &bytes).expect("in bounds");
                done.push(format!("block {other} over {block}"));
            }
        }
    }
    nvm.fence().expect("sound");
    nvm.sync(0, nvm.len_bytes()).expect("sound");
    done.join(", ")
}

fn repair(world: &SimWorld) -> Result<RepairReport, String> {
    let devices = rig::devices(world).map_err(|error| error.to_string())?;
    Store::repair(&devices, RepairOptions { now_ns: 1 }).map_err(|error| error.to_string())
}

/// Paths that a repair has named, its directories' contents included.
fn named(report: &RepairReport, inos: &BTreeMap<u64, String>) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for loss in &report.losses {
        paths.extend(
            loss.path
                .as_ref()
                .map(|path| String::from_utf8_lossy(path).into_owned()),
        );
        paths.extend(inos.get(&loss.ino.0).cloned());
    }
    paths
}

/// What is wrong with files that nobody named.
fn unnamed_harm(world: SimWorld, shape: Shape, want: &Tree, named: &BTreeSet<String>) -> Option<String> {
    let rig = match Rig::start(world, shape) {
        Ok(rig) => rig,
        Err(error) => return Some(format!("it does not start: {error}")),
    };
    if let Err(error) = rig.check() {
        return Some(error.to_string());
    }
    let fs = match rig.mount() {
        Ok(fs) => fs,
        Err(error) => return Some(error.to_string()),
    };
    // A lost directory takes its names along.
    let excused = |path: &str| {
        named
            .iter()
            .any(|lost| path == lost || path.starts_with(&format!("{lost}/")) || lost == "/")
    };
    for (path, seen) in want {
        if excused(path) || path == "/" || seen.mode & 0o170_000 != 0o100_000 {
            continue;
        }
        let names: Vec<_> = path.split('/').filter(|name| !name.is_empty()).collect();
        match target::content(&fs, &names) {
            Ok(content) if content == seen.content => {}
            Ok(_) => return Some(format!("{path} has other bytes")),
            Err(errno) => return Some(format!("{path}: {errno:?}")),
        }
    }
    None
}

#[test]
fn repair_that_is_cut_off_anywhere_is_taken_up_and_loses_no_more() {
    let pairs = number("VARVE_REPAIR_PAIRS", 7);
    let seed = number("VARVE_SEED", 1);
    let (mut images, mut points, mut repairs, mut lossy) = (0, 0, 0, 0);
    for medium in [SimMedium::Dax, SimMedium::File] {
        let shape = Shape {
            nvm_bytes: 4 << 20,
            blocks_bytes: 0,
            ..Shape::tiny(medium)
        };
        let (base, model, inos) = prepared(shape);
        let want = model.tree();
        let blocks = metadata(&base);
        assert!(blocks.len() > 10, "{} metadata blocks", blocks.len());
        for pair in 0..pairs {
            let mut rng = Rng::new(seed * 1000 + pair);
            let world = copy(&base);
            let done = damage(&world, &blocks, &mut rng);
            let (recording, report) = world.clone().record(|| repair(&world));
            let Ok(report) = report else { continue };
            assert_eq!(report.left, [], "{done}");
            repairs += 1;
            let mut lost = named(&report, &inos);
            lossy += u64::from(!lost.is_empty());
            if let Some(harm) = unnamed_harm(copy(&world), shape, &want, &lost) {
                panic!("seed {seed}, {medium:?}, {done}: {harm}; {report:?}");
            }
            let mut known = BTreeSet::new();
            for point in recording.durability_points() {
                points += 1;
                for crash in [
                    Crash::Kill,
                    Crash::PowerNone,
                    Crash::PowerSeeded(rng.next_u64()),
                    Crash::PowerSeeded(rng.next_u64()),
                ] {
                    let image = recording.image(point.index, crash);
                    if !known.insert(image.content_hash()) {
                        continue;
                    }
                    images += 1;
                    let told = |why: String| {
                        format!(
                            "seed {seed}, {medium:?}, {done}, {crash:?} before event {}: {why}",
                            point.index
                        )
                    };
                    let world = image.into_world();
                    let again = repair(&world).unwrap_or_else(|why| panic!("{}", told(why)));
                    assert_eq!(again.left, [], "{}", told(String::new()));
                    lost.extend(named(&again, &inos));
                    if let Some(harm) = unnamed_harm(world, shape, &want, &lost) {
                        panic!("{}; {again:?}", told(harm));
                    }
                }
            }
        }
    }
    println!(
        "repairs cut off: {images} images of {repairs} workloads, {points} points, {lossy} repairs with losses"
    );
    assert!(repairs > 4 && images > 100, "{repairs} repairs, {images} images");
}
