//! Pins and rules: where operators want the data of files, what directories pass on, what is there after a
//! crash, and what comes before what.
#![allow(clippy::unwrap_used)]

mod common;

use common::files::{
    FILE, blocks_on, body, content_is_right, make, make_dir, make_empty, make_named, make_on, settle, sound,
};
use common::{ROOT, World, create};
use varve_format::log::CHUNK_BYTES;
use varve_format::{FileBlock, InodeKey, LogOp, Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{Admin, IpcError, Peer, Pinned, Response};
use varve_kernelfs::placement::Cause;
use varve_kernelfs::{Config, KernelFs, PinsSet, PlacedFile, PlacementStatus};
use varve_media::sim::Crash;
use varve_placement::rules::{RuleSpec, Rules};
use varve_store::{DataTarget, ShareRange};

const TIERS: [(&str, u64); 2] = [("ssd", 24 << 20), ("hdd", 96 << 20)];

fn config() -> Config {
    Config {
        log_initial_bytes: CHUNK_BYTES,
        ..Config::default()
    }
}

fn world() -> World {
    World::with_tiers(config(), &TIERS)
}

const fn on(tier: Tier, own: bool) -> Pin {
    Pin {
        to: PinTo::Tier(tier),
        by: if own {
            PinnedBy::Command
        } else {
            PinnedBy::Directory
        },
    }
}

const fn pinned(key: InodeKey) -> Pinned {
    Pinned { key, name: None }
}

fn set_pin(kernel: &KernelFs, keys: &[InodeKey], pin: Pin) -> Result<PinsSet, IpcError> {
    let asked = Admin::Pin {
        inodes: keys.iter().map(|key| pinned(*key)).collect(),
        pin,
        over_own: pin.by == PinnedBy::Command,
    };
    match kernel.admin_request(Peer::this_process(), asked)? {
        Response::Json(json) => Ok(serde_json::from_str(&json).unwrap()),
        other => panic!("{other:?}"),
    }
}

fn pin_of(kernel: &KernelFs, key: InodeKey) -> Pin {
    kernel.store().get_key(key).unwrap().pin
}

#[test]
fn what_is_made_in_a_pinned_directory_is_pinned_and_what_leaves_it_is_not() {
    let world = world();
    let kernel = &world.kernel;
    set_pin(kernel, &[ROOT], on(Tier::Hdd, true)).unwrap();
    let mut client = world.client();
    client.write_lease(ROOT);
    let keys: Vec<InodeKey> = client.alloc(3).into_iter().map(|(key, _)| key).collect();
    let [file, dir, inner] = keys[..] else { panic!() };
    // All in one batch, with data.
    client.log_op(&create(ROOT, b"f", file, 0o100_644));
    client.log_op(&create(ROOT, b"d", dir, 0o040_755));
    client.log_op(&create(dir, b"g", inner, 0o100_644));
    for key in [file, inner] {
        client.log_op(&LogOp::Write {
            key,
            offset: 0,
            data: &[7; 20_000],
        });
    }
    kernel.digest_all().unwrap();
    for key in keys {
        assert_eq!(pin_of(kernel, key), on(Tier::Hdd, false));
    }
    assert_eq!(blocks_on(kernel, file.ino, Tier::Hdd), 5);
    assert_eq!(blocks_on(kernel, inner.ino, Tier::Hdd), 5);

    // A pin of its own stays with a file; another one is that of the directory where it is.
    set_pin(kernel, &[dir], Pin::NONE).unwrap();
    let rename = |name, key, from, to| LogOp::Rename {
        dir: from,
        name,
        key,
        new_dir: to,
        new_name: name,
        victim: None,
        exchange: false,
    };
    client.log_op(&rename(b"f", file, ROOT, dir));
    client.log_op(&rename(b"g", inner, dir, ROOT));
    kernel.digest_all().unwrap();
    assert_eq!(pin_of(kernel, file), Pin::NONE);
    assert_eq!(pin_of(kernel, inner), on(Tier::Hdd, false));
    set_pin(kernel, &[file], on(Tier::Ssd, true)).unwrap();
    client.log_op(&rename(b"f", file, dir, ROOT));
    kernel.digest_all().unwrap();
    assert_eq!(pin_of(kernel, file), on(Tier::Ssd, true));
    let kept = set_pin(kernel, &[file, inner], on(Tier::Nvm, false)).unwrap();
    assert_eq!((kept.set, kept.kept), (1, vec![file]));
    settle(kernel);
    assert_eq!(blocks_on(kernel, file.ino, Tier::Ssd), 5);
    assert_eq!(blocks_on(kernel, inner.ino, Tier::Nvm), 5);
    sound(kernel);
}

#[test]
fn full_tier_takes_pinned_data_when_others_have_made_room() {
    let world = world();
    let kernel = &world.kernel;
    // The policy has filled the SSD to its mark.
    let (mut files, mut cold) = (Vec::new(), Vec::new());
    while cold.len() < 12 {
        files.push(make(kernel, files.len() as u64).unwrap());
        settle(kernel);
        let on_disk = |key: &&InodeKey| blocks_on(kernel, key.ino, Tier::Hdd) == 256;
        cold = files.iter().filter(on_disk).copied().collect();
    }
    set_pin(kernel, &cold, on(Tier::Ssd, true)).unwrap();
    settle(kernel);
    for key in &cold {
        assert_eq!(
            blocks_on(kernel, key.ino, Tier::Ssd),
            256,
            "{:?}",
            kernel.status().placement
        );
    }
    // More than it can hold: the rest waits, and says why.
    set_pin(kernel, &files, on(Tier::Ssd, true)).unwrap();
    settle(kernel);
    let placement = kernel.status().placement;
    let waits = |job: &PlacementStatus| job.cause == Cause::Pinned && job.waiting.is_some();
    assert!(placement.iter().any(waits), "{placement:?}");
    let ssd = kernel.store().space().tiers[Tier::Ssd as usize];
    assert!(ssd.free * 100 / ssd.total >= 4, "{ssd:?}");
    for (seed, key) in (0..).zip(&files) {
        content_is_right(kernel, *key, seed);
    }
    // The policy moves nothing of it away.
    let left = || -> u64 {
        files
            .iter()
            .map(|key| blocks_on(kernel, key.ino, Tier::Ssd))
            .sum()
    };
    let before = left();
    settle(kernel);
    assert_eq!(left(), before);
    sound(kernel);
}

#[test]
fn pins_are_there_after_a_crash_when_they_are_acknowledged() {
    let world = world();
    let keys: Vec<_> = (0..6)
        .map(|number| make(&world.kernel, number).unwrap())
        .collect();
    let pin = on(Tier::Hdd, true);
    let (recording, set) = world.sim.record(|| set_pin(&world.kernel, &keys, pin));
    assert_eq!(set.unwrap().set, 6);
    let points = recording.durability_points();
    let last = points.last().unwrap().index;
    let mut unset = 0;
    for (at, point) in points.iter().enumerate() {
        for crash in [Crash::PowerNone, Crash::PowerSeeded(at as u64), Crash::Kill] {
            let image = recording.image(point.index, crash).into_world();
            let after = World::start_on(image, &world.config);
            let pins: Vec<_> = keys.iter().map(|key| pin_of(&after.kernel, *key)).collect();
            // In one transaction: all or none.
            assert!(pins.iter().all(|one| *one == pins[0]), "{pins:?}");
            assert!([pin, Pin::NONE].contains(&pins[0]));
            if point.index == last {
                assert_eq!(pins[0], pin);
            }
            unset += u64::from(pins[0] == Pin::NONE);
            settle(&after.kernel);
            let on_disk = blocks_on(&after.kernel, keys[0].ino, Tier::Hdd);
            assert_eq!(on_disk, if pins[0] == pin { 256 } else { 0 });
            sound(&after.kernel);
        }
    }
    assert!(unset > 0);
}

#[test]
fn pins_are_refused_where_they_make_no_sense() {
    let world = World::new();
    let kernel = &world.kernel;
    let refused = |errno| Err(IpcError::Errno(errno));
    assert_eq!(
        set_pin(kernel, &[ROOT], on(Tier::Hdd, true)),
        refused(libc::ENXIO)
    );
    let many = vec![ROOT; varve_ipc::PINS_MAX + 1];
    assert_eq!(set_pin(kernel, &many, on(Tier::Nvm, true)), refused(libc::EINVAL));
    let gone = set_pin(kernel, &[InodeKey::new(40, 3)], on(Tier::Nvm, true)).unwrap();
    assert_eq!((gone.set, gone.gone), (0, 1));
    let asked = Admin::Pin {
        inodes: vec![pinned(ROOT)],
        pin: on(Tier::Nvm, true),
        over_own: true,
    };
    assert_eq!(
        kernel.admin_request(common::stranger(), asked),
        Err(IpcError::Errno(libc::EPERM))
    );
}

/// A world whose daemon has rules.
fn ruled(rules: &str) -> World {
    #[derive(serde::Deserialize)]
    struct Written {
        rule: Vec<RuleSpec>,
    }
    let written: Written = toml::from_str(rules).unwrap();
    let rules = Rules::new(written.rule).unwrap();
    World::with_rules(config(), &TIERS, rules)
}

fn by_rule(tier: Tier) -> Pin {
    Pin {
        to: PinTo::Tier(tier),
        by: PinnedBy::Rule,
    }
}

#[test]
fn rules_give_files_pins_that_end_when_they_match_no_longer() {
    let rules = "[[rule]]\nmatch = '*.log'\ntier = 'hdd'\n\
                 [[rule]]\nmatch = '/f*'\nyounger_than = '1h'\ntier = 'ssd'\n";
    let world = ruled(rules);
    let kernel = &world.kernel;
    let dir = make_dir(kernel, b"dir");
    let files: Vec<_> = (0..3).map(|number| make(kernel, number).unwrap()).collect();
    let log = make_named(kernel, b"x.log", &body(7)).unwrap();
    // In a pinned directory, and by command: these come first.
    let own = make_named(kernel, b"own.log", &body(8)).unwrap();
    set_pin(kernel, &[dir], on(Tier::Ssd, true)).unwrap();
    set_pin(kernel, &[own], on(Tier::Nvm, true)).unwrap();
    let mut tx = kernel.store().begin().unwrap();
    tx.dir_insert(dir.ino, b"in.log", files[2], varve_format::FileKind::Regular)
        .unwrap();
    tx.dir_remove(ROOT.ino, b"f2").unwrap();
    tx.commit().unwrap();

    settle(kernel);
    let pins = |keys: &[InodeKey]| -> Vec<Pin> { keys.iter().map(|key| pin_of(kernel, *key)).collect() };
    let expected = [
        by_rule(Tier::Ssd),
        by_rule(Tier::Ssd),
        on(Tier::Ssd, false),
        by_rule(Tier::Hdd),
        on(Tier::Nvm, true),
    ];
    let keys = [files[0], files[1], files[2], log, own];
    assert_eq!(pins(&keys), expected);
    assert_eq!(blocks_on(kernel, files[0].ino, Tier::Ssd), 256);
    assert_eq!(blocks_on(kernel, log.ino, Tier::Hdd), 256);

    // An hour later they are too old for the second rule.
    world.clock.advance_ms(2 * 3600 * 1000);
    let apply = kernel
        .admin_request(Peer::this_process(), Admin::ApplyRules)
        .unwrap();
    let Response::Json(said) = apply else { panic!() };
    let applied: varve_kernelfs::RulesApplied = serde_json::from_str(&said).unwrap();
    assert_eq!((applied.files, applied.changed), (5, 2));
    assert_eq!(pins(&files[..2]), [Pin::NONE; 2]);
    assert_eq!(pins(&keys[2..]), expected[2..]);

    // Without the rules, what they have set ends.
    let world = world.restart();
    for _ in 0..3 {
        world.kernel.place();
    }
    assert_eq!(pin_of(&world.kernel, log), Pin::NONE);
    assert_eq!(pin_of(&world.kernel, own), on(Tier::Nvm, true));
    sound(&world.kernel);
}

#[test]
fn pin_by_command_stands_when_rules_are_applied_meanwhile() {
    let world = ruled("[[rule]]\nmatch = '*.nothing'\ntier = 'hdd'\n");
    let kernel = &world.kernel;
    // More names than one part of a walk has.
    let files: Vec<_> = (0..800)
        .map(|number| make_empty(kernel, format!("f{number}").as_bytes()).unwrap())
        .collect();
    kernel.place();
    for some in files.chunks(varve_ipc::PINS_MAX) {
        set_pin(kernel, &[ROOT], on(Tier::Ssd, true)).unwrap();
        set_pin(kernel, some, on(Tier::Ssd, false)).unwrap();
    }
    for _ in 0..10 {
        kernel.place();
    }
    for key in files {
        assert_eq!(pin_of(kernel, key), on(Tier::Ssd, false));
    }
}

#[test]
fn file_that_has_another_name_by_now_is_left_to_its_directory() {
    let world = world();
    let kernel = &world.kernel;
    let dir = make_dir(kernel, b"dir");
    let key = make(kernel, 1).unwrap();
    let mut tx = kernel.store().begin().unwrap();
    tx.dir_insert(dir.ino, b"f1", key, varve_format::FileKind::Regular)
        .unwrap();
    tx.dir_remove(ROOT.ino, b"f1").unwrap();
    tx.commit().unwrap();
    let pin = |name: Option<(InodeKey, Vec<u8>)>| {
        let asked = Admin::Pin {
            inodes: vec![Pinned { key, name }],
            pin: on(Tier::Ssd, false),
            over_own: false,
        };
        match kernel.admin_request(Peer::this_process(), asked).unwrap() {
            Response::Json(json) => serde_json::from_str::<PinsSet>(&json).unwrap(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(pin(Some((ROOT, b"f1".to_vec()))).gone, 1);
    assert_eq!(pin_of(kernel, key), Pin::NONE);
    assert_eq!(pin(Some((dir, b"f1".to_vec()))).set, 1);
    assert_eq!(pin_of(kernel, key), on(Tier::Ssd, false));
}

#[test]
fn blocks_that_were_shared_once_move_and_shared_ones_stay() {
    let world = world();
    let kernel = &world.kernel;
    let (key, clone) = (make(kernel, 1).unwrap(), make_empty(kernel, b"clone").unwrap());
    kernel.store().share_extents().unwrap();
    let mut tx = kernel.store().begin().unwrap();
    tx.share(
        &ShareRange {
            from: key.ino,
            from_block: FileBlock(0),
            to: clone.ino,
            to_block: FileBlock(0),
            blocks: 256,
            size_bytes: FILE as u64,
        },
        0,
    )
    .unwrap();
    tx.commit().unwrap();
    set_pin(kernel, &[key], on(Tier::Ssd, true)).unwrap();
    settle(kernel);
    assert_eq!(blocks_on(kernel, key.ino, Tier::Nvm), 256);
    let mut tx = kernel.store().begin().unwrap();
    tx.truncate(clone.ino, 0).unwrap();
    tx.commit().unwrap();
    set_pin(kernel, &[key], on(Tier::Ssd, true)).unwrap();
    settle(kernel);
    assert_eq!(blocks_on(kernel, key.ino, Tier::Ssd), 256);
    content_is_right(kernel, key, 1);
    sound(kernel);
}

/// Makes a file and clones that share its blocks.
fn make_shared(kernel: &KernelFs, number: u64, clones: u64) -> Vec<InodeKey> {
    let key = make(kernel, number).unwrap();
    kernel.store().share_extents().unwrap();
    let clone = |at| {
        let clone = make_empty(kernel, format!("f{number}.{at}").as_bytes()).unwrap();
        share(kernel, (key, 0), (clone, 0), 256);
        clone
    };
    let clones: Vec<_> = (0..clones).map(clone).collect();
    [vec![key], clones].concat()
}

fn share(kernel: &KernelFs, from: (InodeKey, u64), to: (InodeKey, u64), blocks: u64) {
    let mut tx = kernel.store().begin().unwrap();
    let range = ShareRange {
        from: from.0.ino,
        from_block: FileBlock(from.1),
        to: to.0.ino,
        to_block: FileBlock(to.1),
        blocks,
        size_bytes: FILE as u64,
    };
    assert_eq!(tx.share(&range, 0).unwrap(), blocks);
    tx.commit().unwrap();
}

/// Has the tier of the shared part of files set.
fn place_shared(kernel: &KernelFs, keys: &[InodeKey], to: Option<Tier>) -> Result<PinsSet, IpcError> {
    let files = keys.iter().map(|key| pinned(*key)).collect();
    match kernel.admin_request(Peer::this_process(), Admin::PlaceShared { files, to })? {
        Response::Json(json) => Ok(serde_json::from_str(&json).unwrap()),
        other => panic!("{other:?}"),
    }
}

fn placed(kernel: &KernelFs, key: InodeKey) -> PlacedFile {
    let inodes = vec![(key, FileBlock(0))];
    match kernel
        .admin_request(Peer::this_process(), Admin::Placed { inodes })
        .unwrap()
    {
        Response::Json(json) => serde_json::from_str::<Vec<Option<PlacedFile>>>(&json)
            .unwrap()
            .remove(0)
            .unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn shared_part_is_placed_once_for_all_its_files_and_stays_through_restarts() {
    let world = world();
    let kernel = &world.kernel;
    let files = make_shared(kernel, 1, 3);
    // One of them has a part of its own.
    let mut tx = kernel.store().begin().unwrap();
    tx.write_bytes(
        files[2].ino,
        &[(100 << 12, &body(1)[100 << 12..110 << 12])],
        DataTarget::prefer(Tier::Nvm),
    )
    .unwrap();
    tx.commit().unwrap();
    assert_eq!(
        place_shared(kernel, &files[2..3], Some(Tier::Ssd)).unwrap().set,
        1
    );
    // The ten blocks that it has replaced are shared by others, which wish nothing.
    assert_eq!(settle(kernel), 246);
    let on_ssd = |kernel: &KernelFs| -> Vec<u64> {
        let blocks = files.iter().map(|key| blocks_on(kernel, key.ino, Tier::Ssd));
        blocks.collect()
    };
    assert_eq!(on_ssd(kernel), [246; 4]);
    let told = placed(kernel, files[0]);
    assert_eq!(told.shared_pin, None);
    let wanted = |file: &PlacedFile| -> u64 {
        let parts = file
            .extents
            .iter()
            .filter(|part| part.placed.as_deref() == Some("ssd"));
        parts.map(|part| part.len_bytes >> 12).sum()
    };
    assert_eq!(wanted(&told), 246);
    assert_eq!(placed(kernel, files[2]).shared_pin, Some(Tier::Ssd));

    // A pin moves what a file has alone, and nothing else.
    set_pin(kernel, &files, on(Tier::Hdd, true)).unwrap();
    assert_eq!(settle(kernel), 10);
    assert_eq!(blocks_on(kernel, files[2].ino, Tier::Hdd), 10);
    assert_eq!(on_ssd(kernel), [246; 4]);
    set_pin(kernel, &files, Pin::NONE).unwrap();

    // The SSD is filled: the policy makes room by other data.
    let world = world.restart();
    let kernel = &world.kernel;
    for number in 10..45 {
        make_on(kernel, number, Tier::Ssd).unwrap();
        settle(kernel);
    }
    assert_eq!(on_ssd(kernel), [246; 4]);
    assert!(kernel.store().space().tiers[Tier::Hdd as usize].free < (96 << 20 >> 12) - 2000);
    // Placed no more, it is moved as others are.
    place_shared(kernel, &files[2..3], None).unwrap();
    for number in 50..75 {
        make_on(kernel, number, Tier::Ssd).unwrap();
        settle(kernel);
    }
    assert!(on_ssd(kernel)[0] < 246, "{:?}", on_ssd(kernel));
    for key in &files {
        content_is_right(kernel, *key, 1);
    }
    sound(kernel);
}

#[test]
fn wishes_for_a_shared_part_add_up_and_end_with_their_files() {
    let world = world();
    let kernel = &world.kernel;
    let files = make_shared(kernel, 1, 3);
    let on = |tier: Tier| blocks_on(kernel, files[0].ino, tier);
    place_shared(kernel, &files[1..2], Some(Tier::Hdd)).unwrap();
    place_shared(kernel, &files[2..3], Some(Tier::Ssd)).unwrap();
    settle(kernel);
    assert_eq!(on(Tier::Ssd), 256, "the fastest");
    // One of them is removed: the other's wish is left.
    let mut tx = kernel.store().begin().unwrap();
    tx.dir_remove(ROOT.ino, b"f1.1").unwrap();
    tx.edit(files[2].ino, |attr| attr.nlink = 0).unwrap();
    tx.commit().unwrap();
    place_shared(kernel, &files[1..2], Some(Tier::Hdd)).unwrap();
    settle(kernel);
    assert_eq!(on(Tier::Hdd), 256);
    // Shares are undone: what a file has alone is no matter of the wish; what it shares later is.
    let mut tx = kernel.store().begin().unwrap();
    tx.unshare(files[1].ino, FileBlock(0)..FileBlock(200)).unwrap();
    tx.commit().unwrap();
    place_shared(kernel, &files[1..2], Some(Tier::Ssd)).unwrap();
    settle(kernel);
    assert_eq!(blocks_on(kernel, files[1].ino, Tier::Ssd), 56);
    assert_eq!(blocks_on(kernel, files[1].ino, Tier::Hdd), 200);
    let clone = make_empty(kernel, b"later").unwrap();
    share(kernel, (files[1], 0), (clone, 0), 50);
    place_shared(kernel, &[clone], None).unwrap();
    settle(kernel);
    assert_eq!(blocks_on(kernel, clone.ino, Tier::Ssd), 50);
    for key in [files[0], files[1], files[3]] {
        content_is_right(kernel, key, 1);
    }
}

#[test]
fn shared_part_that_finds_no_room_waits_and_says_why() {
    let world = world();
    let kernel = &world.kernel;
    let files = make_shared(kernel, 1, 1);
    let mut filler = Vec::new();
    while kernel.store().space().tiers[Tier::Ssd as usize].free > 500 {
        filler.push(make_on(kernel, 100 + filler.len() as u64, Tier::Ssd).unwrap());
    }
    set_pin(kernel, &filler, on(Tier::Ssd, true)).unwrap();
    place_shared(kernel, &files, Some(Tier::Ssd)).unwrap();
    settle(kernel);
    let told = placed(kernel, files[0]);
    let waiting = told.shared_waiting.unwrap_or_default();
    assert!(waiting.starts_with("waiting: ssd 9"), "{waiting}");
    assert!(blocks_on(kernel, files[0].ino, Tier::Nvm) > 0);
    // Writes go on, and it follows when there is room.
    make(kernel, 2).unwrap();
    set_pin(kernel, &filler[..4], on(Tier::Hdd, true)).unwrap();
    settle(kernel);
    assert_eq!(blocks_on(kernel, files[1].ino, Tier::Ssd), 256);
    assert_eq!(placed(kernel, files[0]).shared_waiting, None);
    sound(kernel);
}

#[test]
fn wish_for_a_shared_part_is_refused_where_it_makes_no_sense() {
    let world = world();
    let kernel = &world.kernel;
    let dir = make_dir(kernel, b"dir");
    let left = place_shared(kernel, &[dir, InodeKey::new(40, 3)], Some(Tier::Ssd)).unwrap();
    assert_eq!((left.set, left.gone), (0, 2));
    let many = vec![ROOT; varve_ipc::PINS_MAX + 1];
    let refused = |errno| Err(IpcError::Errno(errno));
    assert_eq!(place_shared(kernel, &many, None), refused(libc::EINVAL));
    let key = make(kernel, 1).unwrap();
    let asked = Admin::PlaceShared {
        files: vec![pinned(key)],
        to: Some(Tier::Ssd),
    };
    assert_eq!(
        kernel.admin_request(common::stranger(), asked),
        Err(IpcError::Errno(libc::EPERM))
    );
    let without = World::new();
    let key = make(&without.kernel, 1).unwrap();
    assert_eq!(
        place_shared(&without.kernel, &[key], Some(Tier::Hdd)),
        refused(libc::ENXIO)
    );
}

#[test]
fn shared_part_is_whole_at_each_crash_and_is_where_the_wishes_say_afterwards() {
    let world = world();
    let sets = [make_shared(&world.kernel, 1, 2), make_shared(&world.kernel, 2, 1)];
    let all = sets.concat();
    let (recording, ()) = world.sim.record(|| {
        place_shared(&world.kernel, &all, Some(Tier::Ssd)).unwrap();
        settle(&world.kernel);
        place_shared(&world.kernel, &sets[1], Some(Tier::Hdd)).unwrap();
        // The others still wish the SSD.
        place_shared(&world.kernel, &sets[0][..1], None).unwrap();
        settle(&world.kernel);
    });
    let points = recording.durability_points();
    let (mut images, mut amid) = (0, 0);
    for (at, point) in points.iter().enumerate() {
        for crash in [Crash::PowerNone, Crash::PowerSeeded(at as u64), Crash::Kill] {
            images += 1;
            let image = recording.image(point.index, crash).into_world();
            let after = World::start_on(image, &world.config);
            let kernel = &after.kernel;
            let wishes_of = |keys: &[InodeKey]| -> Vec<Option<Tier>> {
                let wish = |key: &InodeKey| kernel.store().get_key(*key).unwrap().shared_pin;
                keys.iter().map(wish).collect()
            };
            let (first, second) = (wishes_of(&sets[0]), wishes_of(&sets[1]));
            // The wishes of one command are there together.
            assert_eq!(second[0], second[1]);
            assert_eq!(first[1], first[2]);
            assert_eq!(first[1].is_some(), second[0].is_some());
            let on = |set: usize, tier| blocks_on(kernel, sets[set][0].ino, tier);
            amid += u64::from(on(0, Tier::Ssd) != on(1, Tier::Ssd));
            settle(kernel);
            for (set, wish) in [(0, first[1]), (1, second[0])] {
                assert_eq!(on(set, wish.unwrap_or(Tier::Nvm)), 256, "{first:?} {second:?}");
                let seed = set as u64 + 1;
                sets[set]
                    .iter()
                    .for_each(|key| content_is_right(kernel, *key, seed));
            }
            sound(kernel);
        }
    }
    println!("{images} images, {amid} amid the moves");
    assert!(images > 20 && amid > 0);
}
