//! Walks address spaces: which base pages of each 2 MiB region hold data, and whether a huge page maps it.
//!
//! A call is bounded by bytes of address space; the next one continues from there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::interfaces::RegionSurvey;
use crate::processes::{Process, SharedProcesses};
use crate::sys::{FrameFlags, Frames, PageCategories};
use crate::types::{
    HUGE_BYTES, HUGE_PAGES, HugeIndex, PAGE_BYTES, PageClass, Pid, ProcId, UtilVector, VirtPage,
};

/// A mapping that may be managed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    class: PageClass,
    locked: bool,
}

/// Returns the mappings of a process to manage: private writable memory, and files mapped shared. The
/// kernel's own mappings (`[vdso]`, `[vvar]`, `[vsyscall]`) and hugetlb are left out.
fn mappings(maps: &str, locked: &BTreeSet<u64>) -> Vec<Mapping> {
    let parse = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (range, perms) = (words.next()?, words.next()?);
        let inode = words.nth(2)?;
        let name = words.next().unwrap_or("");
        let (start, end) = range.split_once('-')?;
        let (start, end) = (
            u64::from_str_radix(start, 16).ok()?,
            u64::from_str_radix(end, 16).ok()?,
        );
        let kernel = name.starts_with("[v") || name.contains("hugepage") || name.starts_with("/dev/");
        let anon = inode == "0" && perms.contains('p') && perms.contains('w');
        let wanted = !kernel && end < 1 << 47 && (anon || (inode != "0" && perms.contains('s')));
        let class = if anon { PageClass::Anon } else { PageClass::File };
        wanted.then(|| Mapping {
            start,
            end,
            class,
            locked: locked.contains(&start),
        })
    };
    maps.lines().filter_map(parse).collect()
}

/// Returns the start addresses of the mappings that are locked in memory. Reads `smaps`, which is slow, only
/// if the process locked any memory.
fn locked_mappings(pid: Pid) -> BTreeSet<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let locked = status
        .lines()
        .find_map(|l| l.strip_prefix("VmLck:"))
        .is_some_and(|v| v.trim() != "0 kB");
    let mut out = BTreeSet::new();
    if !locked {
        return out;
    }
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut start = None;
    for line in smaps.lines() {
        let head = line
            .split_once('-')
            .and_then(|(s, _)| u64::from_str_radix(s, 16).ok());
        if let Some(address) = head.filter(|_| line.as_bytes().first().is_some_and(u8::is_ascii_hexdigit)) {
            start = Some(address);
        } else if line
            .strip_prefix("VmFlags:")
            .is_some_and(|f| f.split_ascii_whitespace().any(|w| w == "lo"))
        {
            out.extend(start);
        }
    }
    out
}

#[derive(Debug, Default)]
struct Cursor {
    mappings: Vec<Mapping>,
    at: usize,
    offset: u64,
    known: BTreeSet<HugeIndex>,
    seen: BTreeSet<HugeIndex>,
    /// The last region of the walk, kept open: the next mapping may continue in it.
    open: Option<RegionSurvey>,
}

/// Merges the next survey of a walk into `open`; returns a completed one. A region that several mappings
/// share must be one survey, or each of them would report the pages of the others as gone. None of them
/// covers it, so it cannot become a huge page; if one of them is locked, the whole region counts as locked.
fn complete(open: &mut Option<RegionSurvey>, next: RegionSurvey) -> Option<RegionSurvey> {
    match open {
        Some(last) if last.region == next.region && last.proc == next.proc => {
            last.used = last.used.with(&next.used);
            last.huge |= next.huge;
            last.eligible = false;
            last.unevictable |= next.unevictable;
            if next.class == PageClass::Anon {
                last.class = PageClass::Anon;
            }
            None
        }
        _ => open.replace(next),
    }
}

/// The walk over all managed processes.
#[derive(Debug)]
pub struct Surveyor {
    processes: SharedProcesses,
    cursors: BTreeMap<ProcId, Cursor>,
    ioctl: bool,
    frames: Frames,
}

impl Surveyor {
    /// Makes a walk that uses `PAGEMAP_SCAN` if `ioctl` says that the kernel has it, else the page map's
    /// entries.
    pub fn new(processes: SharedProcesses, ioctl: bool) -> Self {
        Self {
            processes,
            cursors: BTreeMap::new(),
            ioctl,
            frames: Frames::open(),
        }
    }

    /// Forgets a process.
    pub fn forget(&mut self, proc: ProcId) {
        self.cursors.remove(&proc);
    }

    /// Surveys up to `bytes` of address space of one process from where the last call stopped. Returns the
    /// bytes walked and whether a pass over the process was completed. Regions that vanished since the last
    /// pass are reported empty at its end.
    ///
    /// # Errors
    /// The process' maps cannot be read: it ended, or belongs to another user.
    pub fn walk(
        &mut self,
        proc: ProcId,
        bytes: u64,
        mut each: impl FnMut(&RegionSurvey),
    ) -> io::Result<(u64, bool)> {
        let processes = self.processes.clone();
        let processes = processes.borrow();
        let Some(process) = processes.get(proc) else {
            return Ok((0, true));
        };
        let mut cursor = self.cursors.remove(&proc).unwrap_or_default();
        if cursor.at >= cursor.mappings.len() {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid))?;
            cursor.mappings = mappings(&maps, &locked_mappings(process.pid));
            (cursor.at, cursor.offset) = (0, 0);
        }
        let mut walked = 0;
        while walked < bytes && cursor.at < cursor.mappings.len() {
            let mapping = cursor.mappings[cursor.at].clone();
            let from = mapping.start + cursor.offset;
            let to = mapping
                .end
                .min((from + (bytes - walked)).next_multiple_of(HUGE_BYTES));
            for survey in self.regions(proc, process, &mapping, from, to)? {
                cursor.seen.insert(survey.region);
                if let Some(whole) = complete(&mut cursor.open, survey) {
                    each(&whole);
                }
            }
            walked += to - from;
            cursor.offset += to - from;
            if to == mapping.end {
                cursor.at += 1;
                cursor.offset = 0;
            }
        }
        let done = cursor.at >= cursor.mappings.len();
        if done {
            if let Some(last) = cursor.open.take() {
                each(&last);
            }
            let seen = std::mem::take(&mut cursor.seen);
            for region in std::mem::replace(&mut cursor.known, seen.clone()).difference(&seen) {
                each(&RegionSurvey {
                    proc,
                    region: *region,
                    used: UtilVector::default(),
                    huge: false,
                    eligible: false,
                    class: PageClass::Anon,
                    unevictable: false,
                });
            }
        }
        self.cursors.insert(proc, cursor);
        Ok((walked, done))
    }

    fn regions(
        &self,
        proc: ProcId,
        process: &Process,
        m: &Mapping,
        from: u64,
        to: u64,
    ) -> io::Result<Vec<RegionSurvey>> {
        let mut out: Vec<RegionSurvey> = Vec::new();
        let mut add = |start: u64, end: u64, huge: bool| {
            let mut at = start;
            while at < end {
                let region = HugeIndex(at / HUGE_BYTES);
                let stop = end.min(region.address() + HUGE_BYTES);
                if out.last().is_none_or(|r| r.region != region) {
                    let whole = m.start <= region.address() && region.address() + HUGE_BYTES <= m.end;
                    out.push(RegionSurvey {
                        proc,
                        region,
                        used: UtilVector::default(),
                        huge: false,
                        eligible: whole && m.class == PageClass::Anon,
                        class: m.class,
                        unevictable: m.locked,
                    });
                }
                if let Some(survey) = out.last_mut() {
                    let page = |a: u64| ((a - region.address()) / PAGE_BYTES) as usize;
                    survey.used.set_range(page(at), page(stop));
                    survey.huge |= huge && stop - at == HUGE_BYTES;
                }
                at = stop;
            }
        };
        if self.ioctl {
            let each = |run: crate::sys::PageRun| {
                add(
                    run.start,
                    run.end,
                    run.categories().contains(PageCategories::HUGE),
                )
            };
            process.pagemap.present(from, to, each)?;
            return Ok(out);
        }
        self.entries(process, from, to, &mut add)?;
        Ok(out)
    }

    /// Walks without the ioctl: one entry a page; `/proc/kpageflags` (root only) identifies huge and zero
    /// pages.
    fn entries(
        &self,
        process: &Process,
        from: u64,
        to: u64,
        add: &mut impl FnMut(u64, u64, bool),
    ) -> io::Result<()> {
        let mut at = from;
        while at < to {
            let stop = to.min((at / HUGE_BYTES + 1) * HUGE_BYTES);
            let count = ((stop - at) / PAGE_BYTES) as usize;
            let entries = process.pagemap.entries(VirtPage::of_address(at), count)?;
            let first = entries
                .first()
                .map_or(FrameFlags::empty(), |e| self.frames.flags(*e));
            let frame = |e: &u64| e & ((1 << 55) - 1);
            let aligned = count as u64 == HUGE_PAGES && entries.iter().all(|e| e >> 63 == 1);
            let row = entries.windows(2).all(|w| frame(&w[1]) == frame(&w[0]) + 1);
            if aligned && row && first.contains(FrameFlags::THP) && !first.contains(FrameFlags::ZERO) {
                add(at, stop, true);
            } else {
                for (i, entry) in entries.iter().enumerate().filter(|(_, e)| **e >> 63 == 1) {
                    if !self.frames.flags(*entry).contains(FrameFlags::ZERO) {
                        let page = at + i as u64 * PAGE_BYTES;
                        add(page, page + PAGE_BYTES, false);
                    }
                }
            }
            at = stop;
        }
        Ok(())
    }
}

/// Returns which base pages of a region hold anything but zeros, that is the real utilisation of a huge page.
/// Reads 2 MiB of the process' memory through `/proc/PID/mem`, so it is called only when it may pay.
///
/// # Errors
/// The memory cannot be read.
pub fn contents(pid: Pid, region: HugeIndex) -> io::Result<UtilVector> {
    let file = File::open(format!("/proc/{pid}/mem"))?;
    let mut buffer = vec![0u8; HUGE_BYTES as usize];
    file.read_exact_at(&mut buffer, region.address())?;
    let mut used = UtilVector::default();
    for (i, page) in buffer.chunks_exact(PAGE_BYTES as usize).enumerate() {
        used.set(i, page.chunks_exact(8).any(|w| w != [0; 8]));
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_of_several_mappings_is_one_survey_with_the_pages_of_all() {
        let survey = |region, from: usize, to: usize, class| {
            let mut used = UtilVector::default();
            used.set_range(from, to);
            RegionSurvey {
                proc: ProcId(1),
                region: HugeIndex(region),
                used,
                huge: false,
                eligible: class == PageClass::Anon,
                class,
                unevictable: from == 20,
            }
        };
        let mut open = None;
        let parts = [
            survey(7, 0, 3, PageClass::File),
            survey(7, 20, 24, PageClass::Anon),
            survey(8, 0, 512, PageClass::Anon),
        ];
        let mut whole: Vec<RegionSurvey> = parts.into_iter().filter_map(|p| complete(&mut open, p)).collect();
        whole.extend(open.take());
        let brief: Vec<_> = whole
            .iter()
            .map(|s| (s.region.0, s.used.weight(), s.eligible, s.unevictable, s.class))
            .collect();
        assert_eq!(
            brief,
            [
                (7, 7, false, true, PageClass::Anon),
                (8, 512, true, false, PageClass::Anon)
            ]
        );
    }

    #[test]
    fn mappings_take_private_memory_and_shared_files_only() {
        let maps = "\
00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/x
00e03000-00e24000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000400000 rw-s 00000000 08:02 99 /data/file
7f1000000000-7f1000400000 rw-p 00000000 00:00 0
7fff00000000-7fff00021000 r-xp 00000000 00:00 0 [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
broken line
";
        let locked = BTreeSet::from([0x7f10_0000_0000]);
        let found = mappings(maps, &locked);
        let brief: Vec<_> = found.iter().map(|m| (m.start, m.class, m.locked)).collect();
        assert_eq!(
            brief,
            [
                (0x00e0_3000, PageClass::Anon, false),
                (0x7f00_0000_0000, PageClass::File, false),
                (0x7f10_0000_0000, PageClass::Anon, true)
            ]
        );
    }
}
