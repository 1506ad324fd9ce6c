//! Devices that are to be taken out of their tier: which data of them moves next, and where to. The rows in
//! the store say which devices these are; this keeps how far a pass over the files has come, which a restart
//! may forget. Moves nothing.
//!
//! A pass goes over the shared blocks, all files, and the metadata. The other devices of the tier take the
//! data while they have room, then the other tiers, below their high mark. A pass that could move nothing is
//! followed by a rest.

use super::fill::Fill;
use super::{At, Catalog, Cause, Job, Move};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use varve_format::{BlockNo, FileBlock, Ino, Tier};
use varve_store::{DeviceStatus, DeviceUse, Recalled, SpaceStats};

/// Rest after a pass that could move nothing, in milliseconds.
const REST_MS: u64 = 10_000;
/// Most blocks of one move.
const MOVE_BLOCKS: u64 = 256;
/// A tier with fewer blocks than this takes nothing.
const ROOM_MIN: u64 = 64;
/// Extents and runs asked for at once.
const EXTENTS: usize = 128;
/// Files asked for at once.
const FILES: usize = 64;
/// Most extents that one step looks at.
const LOOKS: usize = 16_384;

/// What a pass is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Shared blocks, from this number on.
    Shared(u64),
    /// Files, from this one and this block of it on.
    Files(Ino, FileBlock),
    /// Metadata, from this block of the inode file on.
    Metadata(u64),
}

#[derive(Debug)]
struct Pass {
    stage: Stage,
    /// It has moved something.
    moved: bool,
    rests_until_ms: u64,
    /// Why something stays, for operators.
    waiting: Option<String>,
}

impl Default for Pass {
    fn default() -> Self {
        Self {
            stage: Stage::Shared(0),
            moved: false,
            rests_until_ms: 0,
            waiting: None,
        }
    }
}

/// A device: its tier and its first number there.
type Key = (Tier, u64);

/// Metadata of a device that is to be moved now.
#[derive(Debug, Clone)]
pub(crate) struct MetadataDue {
    pub(crate) tier: Tier,
    pub(crate) numbers: Range<u64>,
    /// Where to go on in the inode file.
    pub(crate) at: u64,
}

/// The passes over devices that are emptied.
#[derive(Debug)]
pub(crate) struct Emptying {
    /// Fill level, in percent, up to which tiers take the data.
    high: u64,
    passes: Mutex<BTreeMap<Key, Pass>>,
}

const fn key_of(device: &DeviceStatus) -> Key {
    (device.tier, device.numbers.0)
}

fn numbers_of(device: &DeviceStatus) -> Range<u64> {
    device.numbers.0..device.numbers.0 + device.numbers.1
}

/// Cuts a run of blocks into moves of at most `size` blocks.
fn cut(moves: &mut Vec<Move>, first: BlockNo, (len, size): (u64, u64), at: impl Fn(u64) -> At) {
    for done in (0..len).step_by(size as usize) {
        moves.push(Move {
            at: at(done),
            len: (len - done).min(size) as u32,
            block: BlockNo(first.0 + done),
        });
    }
}

impl Emptying {
    /// Tiers take the data until they are `high` percent full.
    pub(crate) fn new(high: u64) -> Self {
        Self {
            high,
            passes: Mutex::default(),
        }
    }

    /// Returns the blocks that other devices take of what is on one, and that are promised to nobody.
    pub(crate) fn room_beside(&self, device: &DeviceStatus, space: &SpaceStats) -> u64 {
        // Free blocks of a device that is emptied, or has failed, do not count any more.
        let counts = device.state == DeviceUse::InUse && device.failed.is_none();
        let counted = if counts { device.free } else { 0 };
        let room = |tier: Tier| {
            let mut stats = space.tiers[tier as usize];
            if tier == device.tier {
                stats.free = stats.free.saturating_sub(counted);
                stats.total = stats.total.saturating_sub(counted);
            }
            let takes = stats.total > 0 && !stats.avoided;
            Fill::of(tier, &stats).below(self.high) * u64::from(takes)
        };
        let unpromised = space.available.saturating_sub(counted);
        Tier::ALL.into_iter().map(room).sum::<u64>().min(unpromised)
    }

    /// Returns the tier that takes data of a device next, and the blocks that it takes, at least
    /// [`ROOM_MIN`]: its own, while other devices there have room.
    fn target(&self, device: &DeviceStatus, space: &SpaceStats) -> Option<(Tier, u64)> {
        let others = Tier::ALL.into_iter().rev().filter(|tier| *tier != device.tier);
        let room = |tier: Tier| {
            let stats = &space.tiers[tier as usize];
            let mark = if tier == device.tier { 100 } else { self.high };
            let takes = stats.total > 0 && !stats.avoided;
            (tier, Fill::of(tier, stats).below(mark) * u64::from(takes))
        };
        let mut tiers = std::iter::once(device.tier).chain(others).map(room);
        tiers.find(|(_, room)| *room >= ROOM_MIN)
    }

    /// Returns the moves that empty devices, at most about `most` blocks.
    pub(crate) fn plan(
        &self,
        devices: &[DeviceStatus],
        space: &SpaceStats,
        catalog: &dyn Catalog,
        now_ms: u64,
        most: u64,
    ) -> Vec<Job> {
        let mut passes = self.passes.lock();
        let emptied = || {
            devices
                .iter()
                .filter(|device| device.state == DeviceUse::Emptying)
        };
        passes.retain(|key, _| emptied().any(|device| key_of(device) == *key));
        let (mut jobs, mut left) = (Vec::new(), most);
        for device in emptied().filter(|device| device.used() > 0) {
            let pass = passes.entry(key_of(device)).or_default();
            if now_ms < pass.rests_until_ms || left == 0 || matches!(pass.stage, Stage::Metadata(_)) {
                continue;
            }
            let Some((to, room)) = self.target(device, space) else {
                pass.waiting = Some("waiting: no other device has room".into());
                pass.rests_until_ms = now_ms + REST_MS;
                continue;
            };
            let mut moves = Vec::new();
            // A move that is larger than the room would fail again and again, while other tiers have some.
            let sizes = (left, MOVE_BLOCKS.min(room));
            search(pass, &numbers_of(device), device.tier, catalog, sizes, &mut moves);
            left = left.saturating_sub(moves.iter().map(|moved| u64::from(moved.len)).sum());
            jobs.push(Job {
                from: device.tier,
                to,
                cause: Cause::Removed,
                moves,
                waiting: None,
            });
        }
        jobs
    }

    /// Returns the devices whose metadata is to be moved now.
    pub(crate) fn metadata_due(&self, devices: &[DeviceStatus]) -> Vec<MetadataDue> {
        let passes = self.passes.lock();
        let due = |device: &DeviceStatus| match passes.get(&key_of(device))?.stage {
            Stage::Metadata(at) => Some(MetadataDue {
                tier: device.tier,
                numbers: numbers_of(device),
                at,
            }),
            Stage::Shared(_) | Stage::Files(..) => None,
        };
        let emptied = devices
            .iter()
            .filter(|device| device.state == DeviceUse::Emptying && device.used() > 0);
        emptied.filter_map(due).collect()
    }

    /// Metadata of a device was moved, up to `due.at`.
    pub(crate) fn metadata_moved(&self, due: &MetadataDue, step: &Recalled, now_ms: u64) {
        let mut passes = self.passes.lock();
        let Some(pass) = passes.get_mut(&(due.tier, due.numbers.start)) else {
            return;
        };
        pass.moved |= step.moved > 0;
        pass.stage = Stage::Metadata(due.at);
        if step.damaged > 0 {
            pass.waiting = Some("metadata cannot be read: see `varve fsck`".into());
        } else if step.full {
            pass.waiting = Some("waiting: nvm has no room for metadata".into());
        }
        if step.over || step.full {
            pass.stage = Stage::Shared(0);
            if std::mem::take(&mut pass.moved) {
                pass.waiting = None;
            } else {
                pass.rests_until_ms = now_ms + REST_MS;
            }
        }
    }

    /// A step for devices of a tier has moved blocks, or met an obstacle.
    pub(crate) fn stepped(&self, job: &Job, blocks: u64) {
        if job.cause != Cause::Removed {
            return;
        }
        let mut passes = self.passes.lock();
        for pass in passes.iter_mut().filter(|((tier, _), _)| *tier == job.from) {
            pass.1.moved |= blocks > 0;
            if job.waiting.is_some() {
                pass.1.waiting.clone_from(&job.waiting);
            }
        }
    }

    /// Returns why data stays on a device that is emptied.
    pub(crate) fn waiting(&self, device: &DeviceStatus) -> Option<String> {
        self.passes.lock().get(&key_of(device))?.waiting.clone()
    }
}

/// Adds moves of what lies on a device, of about `most` blocks in all and at most `size` each, and goes on
/// with the pass.
fn search(
    pass: &mut Pass,
    numbers: &Range<u64>,
    tier: Tier,
    catalog: &dyn Catalog,
    (most, size): (u64, u64),
    moves: &mut Vec<Move>,
) {
    let mut looks = LOOKS;
    let planned = |moves: &Vec<Move>| moves.iter().map(|moved| u64::from(moved.len)).sum::<u64>();
    while planned(moves) < most && looks > 0 {
        match pass.stage {
            Stage::Shared(from) => {
                let runs = catalog.shared(from..u64::MAX, EXTENTS);
                looks = looks.saturating_sub(runs.len().max(1));
                for run in runs
                    .iter()
                    .filter(|run| run.tier == tier && numbers.contains(&run.block.0))
                {
                    cut(moves, run.block, (run.len.into(), size), |done| {
                        At::Shared(run.number + done)
                    });
                }
                pass.stage = match runs.last() {
                    Some(last) if runs.len() == EXTENTS => Stage::Shared(last.number + u64::from(last.len)),
                    _ => Stage::Files(Ino(1), FileBlock(0)),
                };
            }
            Stage::Files(ino, mut from) => {
                let (keys, next) = catalog.files(ino, FILES);
                let mut stage = next.map_or(Stage::Metadata(0), |next| Stage::Files(next, FileBlock(0)));
                'files: for key in keys {
                    if key.ino != ino {
                        from = FileBlock(0);
                    }
                    loop {
                        let parts = catalog.extents(key, from, EXTENTS);
                        looks = looks.saturating_sub(parts.len().max(1));
                        for part in parts.iter().filter(|part| part.number.is_none()) {
                            let extent = &part.extent;
                            if extent.tier == tier && numbers.contains(&extent.block.0) {
                                let at = |done| At::File(key, FileBlock(extent.file_block.0 + done));
                                cut(moves, extent.block, (extent.len.into(), size), at);
                            }
                        }
                        match parts.last() {
                            Some(last) if parts.len() == EXTENTS => from = last.extent.end(),
                            _ => from = FileBlock(u64::MAX),
                        }
                        if planned(moves) >= most || looks == 0 {
                            stage = Stage::Files(key.ino, from);
                            break 'files;
                        }
                        if from == FileBlock(u64::MAX) {
                            break;
                        }
                    }
                }
                pass.stage = stage;
            }
            Stage::Metadata(_) => break,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use varve_format::{Extent, ExtentFlags, Generation, InodeKey};
    use varve_store::{MappedPart, SharedPart, TierStats};

    const KEY: InodeKey = InodeKey {
        ino: Ino(9),
        generation: Generation(1),
    };

    /// One file, with one extent on the device.
    struct OneFile;

    impl Catalog for OneFile {
        fn files(&self, from: Ino, _most: usize) -> (Vec<InodeKey>, Option<Ino>) {
            let keys = if from <= KEY.ino { vec![KEY] } else { Vec::new() };
            (keys, None)
        }

        fn extents(&self, _key: InodeKey, from: FileBlock, _most: usize) -> Vec<MappedPart> {
            let extent = Extent {
                file_block: FileBlock(0),
                len: 256,
                tier: Tier::Ssd,
                block: BlockNo(5000),
                flags: ExtentFlags::empty(),
            };
            let part = MappedPart {
                extent,
                number: None,
                owners: 1,
            };
            if from < extent.end() {
                vec![part]
            } else {
                Vec::new()
            }
        }

        fn shared(&self, _numbers: Range<u64>, _most: usize) -> Vec<SharedPart> {
            Vec::new()
        }
    }

    fn device() -> DeviceStatus {
        DeviceStatus {
            tier: Tier::Ssd,
            uuid: None,
            name: "ssd-2".into(),
            state: DeviceUse::Emptying,
            total: 10_000,
            free: 9744,
            pending: 0,
            numbers: (4096, 16_384),
            failed: None,
        }
    }

    #[test]
    fn moves_are_no_larger_than_the_room_of_their_target() {
        let tier = |free| TierStats {
            total: 20_000,
            free,
            unit_blocks: 1000,
            ..TierStats::default()
        };
        // Left on SSD beside its last unit, the target, and the sizes of the moves.
        let cases = [
            (1000, Tier::Ssd, vec![256]),
            (256, Tier::Ssd, vec![256]),
            (100, Tier::Ssd, vec![100, 100, 56]),
            (64, Tier::Ssd, vec![64; 4]),
            (63, Tier::Hdd, vec![256]),
        ];
        for (left, to, lens) in cases {
            let mut space = SpaceStats::default();
            space.tiers[Tier::Ssd as usize] = tier(1000 + left);
            space.tiers[Tier::Hdd as usize] = tier(15_000);
            let emptying = Emptying::new(90);
            let jobs = emptying.plan(&[device()], &space, &OneFile, 0, 4096);
            let [job] = &jobs[..] else { panic!("{jobs:?}") };
            let sizes: Vec<u32> = job.moves.iter().map(|moved| moved.len).collect();
            assert_eq!((job.to, sizes), (to, lens), "{left} blocks left");
        }
    }
}
