//! DAMON over physical addresses, through sysfs: regions of frames with the number of samples that found them
//! touched.
//!
//! Resolution is a DAMON region, which the kernel adapts. A page in no region, or in one that is too large to
//! stand for its pages, is `Unknown`.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::interfaces::{Touch, Tracker, TrackerError, TrackerInfo};
use crate::processes::SharedProcesses;
use crate::types::{HUGE_BYTES, PAGE_BYTES, PageKey};

/// Directory of DAMON's settings.
pub const ADMIN: &str = "/sys/kernel/mm/damon/admin/kdamonds";

/// File with the pid and start time of the manager that claimed DAMON. A killed manager leaves it behind.
const OWNER: &str = "/run/varve-vm/damon";

/// Settings of the DAMON tracker.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DamonConfig {
    /// Time between two samples, µs (5000..=10000000).
    pub sample_us: u64,
    /// Time over which samples are summed, µs (`sample_us`..=100000000).
    pub aggregate_us: u64,
    /// Most regions (10..=8192): bounds the kernel thread's work and ours.
    pub max_regions: u64,
    /// Regions larger than this do not stand for their pages, bytes (2 MiB..=1 GiB).
    pub max_region_bytes: u64,
}

impl Default for DamonConfig {
    fn default() -> Self {
        Self {
            sample_us: 250_000,
            aggregate_us: 2_000_000,
            max_regions: 500,
            max_region_bytes: 64 << 20,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    end: u64,
    accesses: u64,
}

/// The tracker. Dropping it stops the kernel thread and restores the number of threads.
#[derive(Debug)]
pub struct Damon {
    config: DamonConfig,
    admin: PathBuf,
    processes: SharedProcesses,
    running: bool,
    covered: Vec<(u64, u64)>,
    regions: BTreeMap<u64, Seen>,
    largest: u64,
    /// Time of the last read of the regions; they change only with each aggregation.
    refreshed: Option<Instant>,
    started: Option<Instant>,
    /// Pages already judged by the present aggregation; they are `Unknown` until the next one.
    asked: HashSet<PageKey>,
}

fn put(path: &Path, value: impl std::fmt::Display) -> io::Result<()> {
    fs::write(path, value.to_string())
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

fn get(path: &Path) -> io::Result<u64> {
    fs::read_to_string(path)?
        .trim()
        .parse()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Returns the start time of a process, in clock ticks since boot, which distinguishes it from a later one
/// with its pid.
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_ascii_whitespace().nth(19).map(str::to_owned)
}

/// Whether the text of an owner file names a process that has ended.
fn abandoned(owner: &str) -> bool {
    let mut words = owner.split_ascii_whitespace();
    let (Some(pid), Some(start)) = (words.next().and_then(|w| w.parse().ok()), words.next()) else {
        return false;
    };
    started(pid).is_none_or(|s| s != start)
}

/// Whether DAMON is free: unused, or left behind by a killed manager.
///
/// # Errors
/// `NotFound` when the kernel lacks it, `PermissionDenied` without root.
pub fn available() -> io::Result<bool> {
    let used = get(&Path::new(ADMIN).join("nr_kdamonds"))? != 0;
    Ok(!used || fs::read_to_string(OWNER).is_ok_and(|o| abandoned(&o)))
}

impl Damon {
    /// Claims DAMON; monitoring starts with the first query.
    ///
    /// # Errors
    /// `NotFound` when the kernel lacks it, `PermissionDenied` without root, `ResourceBusy` when another
    /// program uses it; its set-up is not touched.
    pub fn open(config: DamonConfig, processes: SharedProcesses) -> io::Result<Self> {
        let admin = PathBuf::from(ADMIN);
        if get(&admin.join("nr_kdamonds"))? != 0 && available()? {
            let _ = put(&admin.join("0/state"), "off");
            put(&admin.join("nr_kdamonds"), 0)?;
        }
        if get(&admin.join("nr_kdamonds"))? != 0 {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "DAMON is in use by somebody else",
            ));
        }
        let made =
            put(&admin.join("nr_kdamonds"), 1).and_then(|()| put(&admin.join("0/contexts/nr_contexts"), 1));
        let made = made.and_then(|()| put(&admin.join("0/contexts/0/operations"), "paddr"));
        if let Err(e) = made {
            let _ = put(&admin.join("nr_kdamonds"), 0);
            return Err(e);
        }
        // DAMON works without the owner file too; only the claim of a killed manager would then stay until an
        // administrator clears it.
        let me = std::process::id();
        let _ = crate::snapshot::state_dir()
            .and_then(|_| fs::write(OWNER, format!("{me} {}", started(me).unwrap_or_default())));
        let (running, covered, regions, largest) = (false, Vec::new(), BTreeMap::new(), 0);
        let (refreshed, started, asked) = (None, None, HashSet::new());
        Ok(Self {
            config,
            admin,
            processes,
            running,
            covered,
            regions,
            largest,
            refreshed,
            started,
            asked,
        })
    }

    /// Returns the pid of the kernel thread, to account its processor time.
    pub fn kdamond_pid(&self) -> Option<u64> {
        self.running
            .then(|| get(&self.admin.join("0/pid")).ok())
            .flatten()
    }

    /// Iterates over the last read regions, as (first byte, one past the last, samples that found it
    /// touched).
    pub fn regions(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.regions
            .iter()
            .map(|(start, seen)| (*start, seen.end, seen.accesses))
    }

    fn start(&mut self, ranges: &[(u64, u64)]) -> io::Result<()> {
        let context = self.admin.join("0/contexts/0");
        if self.running {
            put(&self.admin.join("0/state"), "off")?;
            self.running = false;
        }
        let intervals = context.join("monitoring_attrs/intervals");
        put(&intervals.join("sample_us"), self.config.sample_us)?;
        put(&intervals.join("aggr_us"), self.config.aggregate_us)?;
        put(&intervals.join("update_us"), 60_000_000)?;
        let most = self.config.max_regions.max(ranges.len() as u64 + 10);
        let regions = context.join("monitoring_attrs/nr_regions");
        put(&regions.join("max"), most)?;
        put(
            &regions.join("min"),
            (ranges.len() as u64).max(10).max(self.config.max_regions / 2),
        )?;
        put(&context.join("targets/nr_targets"), 1)?;
        let target = context.join("targets/0/regions");
        put(&target.join("nr_regions"), ranges.len())?;
        for (i, (start, end)) in ranges.iter().enumerate() {
            put(&target.join(format!("{i}/start")), start)?;
            put(&target.join(format!("{i}/end")), end)?;
        }
        put(&context.join("schemes/nr_schemes"), 1)?;
        let scheme = context.join("schemes/0");
        put(&scheme.join("action"), "stat")?;
        for (what, max) in [
            ("sz", u64::MAX),
            ("nr_accesses", u64::from(u32::MAX)),
            ("age", u64::from(u32::MAX)),
        ] {
            put(&scheme.join(format!("access_pattern/{what}/min")), 0)?;
            put(&scheme.join(format!("access_pattern/{what}/max")), max)?;
        }
        put(&self.admin.join("0/state"), "on")?;
        self.running = true;
        self.covered = ranges.to_vec();
        self.regions.clear();
        self.asked.clear();
        self.started = Some(Instant::now());
        // There is nothing to read before the first aggregation has ended.
        self.refreshed = Some(Instant::now());
        Ok(())
    }

    fn refresh(&mut self) -> io::Result<()> {
        put(&self.admin.join("0/state"), "update_schemes_tried_regions")?;
        let tried = self.admin.join("0/contexts/0/schemes/0/tried_regions");
        self.regions.clear();
        self.largest = 0;
        for entry in fs::read_dir(&tried)?.flatten() {
            let dir = entry.path();
            if !dir.join("start").exists() {
                continue;
            }
            let (start, end) = (get(&dir.join("start"))?, get(&dir.join("end"))?);
            self.largest = self.largest.max(end - start);
            self.regions.insert(
                start,
                Seen {
                    end,
                    accesses: get(&dir.join("nr_accesses"))?,
                },
            );
        }
        Ok(())
    }

    fn look_up(&self, address: u64) -> Touch {
        match self.regions.range(..=address).next_back() {
            Some((start, seen)) if address < seen.end => {
                if seen.end - start > self.config.max_region_bytes {
                    Touch::Unknown
                } else if seen.accesses > 0 {
                    Touch::Read
                } else {
                    Touch::Idle
                }
            }
            _ => Touch::Unknown,
        }
    }
}

/// Converts frames to physical ranges of whole 2 MiB blocks; joins the closest ones until there are at most
/// `most`.
fn physical_ranges(frames: &[Option<u64>], most: usize) -> Vec<(u64, u64)> {
    let mut blocks: Vec<u64> = frames
        .iter()
        .flatten()
        .map(|f| f * PAGE_BYTES / HUGE_BYTES)
        .collect();
    blocks.sort_unstable();
    blocks.dedup();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for block in blocks {
        match ranges.last_mut() {
            Some((_, end)) if *end == block => *end += 1,
            _ => ranges.push((block, block + 1)),
        }
    }
    if ranges.len() > most.max(1) {
        let mut gaps: Vec<u64> = ranges.windows(2).map(|w| w[1].0 - w[0].1).collect();
        gaps.sort_unstable();
        let join = gaps[ranges.len() - most.max(1) - 1];
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some((_, end)) if range.0 - *end <= join => *end = range.1,
                _ => joined.push(range),
            }
        }
        ranges = joined;
    }
    ranges
        .into_iter()
        .map(|(s, e)| (s * HUGE_BYTES, e * HUGE_BYTES))
        .collect()
}

impl Tracker for Damon {
    fn info(&self) -> TrackerInfo {
        TrackerInfo {
            name: "damon",
            resolution_bytes: self.largest.max(HUGE_BYTES),
            sees_reads: true,
            tells_writes: false,
            note: match self.regions.len() {
                0 => "DAMON over physical addresses: sampled, one page a region; starts with the first look"
                    .to_owned(),
                n => format!(
                    "DAMON over physical addresses: sampled, one page a region; {n} regions now, the \
                    largest {} KiB",
                    self.largest / 1024
                ),
            },
        }
    }

    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        if pages.is_empty() {
            return Ok(());
        }
        let fail = |e: io::Error| TrackerError::Unusable {
            tracker: "damon",
            what: e.to_string(),
        };
        let mut frames = Vec::new();
        self.processes.borrow().frames(pages, &mut frames);
        let inside = |f: &u64| {
            let address = f * PAGE_BYTES;
            let at = self.covered.partition_point(|(_, end)| *end <= address);
            self.covered.get(at).is_some_and(|(start, _)| *start <= address)
        };
        let known = frames.iter().flatten().count();
        let outside = frames.iter().flatten().filter(|f| !inside(f)).count();
        let waited = |since: Option<Instant>, least: Duration| since.is_none_or(|t| t.elapsed() >= least);
        let window = Duration::from_micros(self.config.aggregate_us);
        // Change the monitored frames only when a tenth of the queried ones lies outside: a restart loses the
        // collected samples. Frames monitored before stay included: other lists are queried in turn.
        if outside * 10 > known && waited(self.started, window * 4) {
            let blocks = self
                .covered
                .iter()
                .flat_map(|(s, e)| (s / PAGE_BYTES..e / PAGE_BYTES).step_by(512))
                .map(Some);
            let all: Vec<Option<u64>> = frames.iter().copied().chain(blocks).collect();
            let ranges = physical_ranges(&all, self.config.max_regions as usize / 2);
            self.start(&ranges).map_err(fail)?;
        } else if self.running && waited(self.refreshed, window) {
            self.refresh().map_err(fail)?;
            self.asked.clear();
            self.refreshed = Some(Instant::now());
        }
        for (page, frame) in pages.iter().zip(frames) {
            let fresh = !self.regions.is_empty() && self.asked.insert(*page);
            let known = frame.filter(|_| fresh);
            out.push(known.map_or(Touch::Unknown, |f| self.look_up(f * PAGE_BYTES)));
        }
        Ok(())
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        if self.running {
            let _ = put(&self.admin.join("0/state"), "off");
        }
        let _ = put(&self.admin.join("nr_kdamonds"), 0);
        let _ = fs::remove_file(OWNER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_is_abandoned_only_when_its_owner_is_gone() {
        let me = std::process::id();
        let start = started(me).unwrap_or_default();
        assert!(!start.is_empty() && !abandoned(&format!("{me} {start}")));
        assert!(
            abandoned(&format!("{me} 1{start}")),
            "the pid means somebody else now"
        );
        assert!(abandoned("4194304 5"), "no pid is that large");
        assert!(!abandoned("") && !abandoned("nonsense"), "not ours to judge");
    }

    #[test]
    fn physical_ranges_are_whole_blocks_and_join_the_closest_when_there_are_too_many() {
        let frames: Vec<Option<u64>> = [0, 511, 512, 5 * 512, 100 * 512, 101 * 512].map(Some).to_vec();
        let mib2 = |a: u64, b: u64| (a * HUGE_BYTES, b * HUGE_BYTES);
        assert_eq!(
            physical_ranges(&frames, 10),
            [mib2(0, 2), mib2(5, 6), mib2(100, 102)]
        );
        assert_eq!(physical_ranges(&frames, 2), [mib2(0, 6), mib2(100, 102)]);
        assert!(physical_ranges(&[None], 2).is_empty());
    }
}
