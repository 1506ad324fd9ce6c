#![allow(clippy::unwrap_used)]

use super::*;
use crate::interfaces::TrackerInfo;
use crate::types::{PageClass, TierId, UtilVector};
use std::collections::{HashMap, HashSet};

#[derive(Default)]
struct Kernel {
    log: Vec<Action>,
    refuse: HashSet<HugeIndex>,
    now: Option<UtilVector>,
    blocks: u64,
    merged: u64,
}

impl Actuator for Kernel {
    fn name(&self) -> &'static str {
        "test"
    }
    fn apply(&mut self, actions: &[Action], out: &mut Vec<Outcome>) {
        for a in actions {
            self.log.push(*a);
            out.push(match a {
                Action::Collapse { region, .. } if self.refuse.contains(region) => Outcome::NoMemory,
                Action::Collapse { .. } if self.blocks == 0 => Outcome::NoMemory,
                Action::Collapse { .. } => {
                    self.blocks -= 1;
                    Outcome::Done
                }
                _ => Outcome::Done,
            });
        }
    }
    fn locate(&mut self, pages: &[PageKey], out: &mut Vec<Option<TierId>>) {
        out.extend(pages.iter().map(|_| Some(TierId(0))));
    }
    fn used_now(&mut self, _proc: ProcId, _region: HugeIndex) -> Option<UtilVector> {
        self.now
    }
    fn merged_now(&mut self, _proc: ProcId, _region: HugeIndex) -> u64 {
        self.merged
    }
    fn free_pages(&mut self, _tier: TierId) -> u64 {
        0
    }
}

#[derive(Default)]
struct Bits {
    touched: HashMap<PageKey, Touch>,
    asked: Vec<PageKey>,
}

impl Tracker for Bits {
    fn info(&self) -> TrackerInfo {
        TrackerInfo {
            name: "bits",
            resolution_bytes: 4096,
            sees_reads: true,
            tells_writes: false,
            note: String::new(),
        }
    }
    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        self.asked.extend_from_slice(pages);
        out.extend(
            pages
                .iter()
                .map(|p| self.touched.get(p).copied().unwrap_or(Touch::Idle)),
        );
        Ok(())
    }
}

fn kernel(blocks: u64) -> Kernel {
    Kernel {
        blocks,
        ..Kernel::default()
    }
}

fn survey(proc: u16, region: u64, pages: usize, huge: bool) -> RegionSurvey {
    let mut used = UtilVector::default();
    used.set_range(0, pages);
    RegionSurvey {
        proc: ProcId(proc),
        region: HugeIndex(region),
        used,
        huge,
        eligible: true,
        class: PageClass::Anon,
        unevictable: false,
    }
}

fn feed(p: &mut Ingens, k: &mut Kernel, s: RegionSurvey) {
    p.survey(&s, k);
}

fn collapses(k: &Kernel) -> Vec<(u16, u64)> {
    let pick = |a: &Action| match a {
        Action::Collapse { proc, region } => Some((proc.0, region.0)),
        _ => None,
    };
    k.log.iter().filter_map(pick).collect()
}

#[test]
fn region_is_promoted_only_when_ninety_percent_is_used() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(99), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 460, false));
    feed(&mut p, &mut k, survey(0, 2, 461, false));
    p.step(0, &mut t, &mut k).unwrap();
    assert_eq!(collapses(&k), [(0, 2)], "460 of 512 is 89.8 %");
}

#[test]
fn survey_alone_never_promotes() {
    let (mut p, mut k) = (Ingens::new(IngensConfig::default()), kernel(99));
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    assert!(k.log.is_empty(), "the fault path's stand-in only queues");
}

#[test]
fn huge_page_is_kept_until_its_use_falls_below_the_threshold() {
    let config = IngensConfig {
        demote_below: 0.5,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(99), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 512, true));
    // A few base pages are freed: the kernel splits at once, Ingens makes it whole again.
    feed(&mut p, &mut k, survey(0, 1, 500, false));
    p.step(0, &mut t, &mut k).unwrap();
    assert_eq!(collapses(&k), [(0, 1)]);
    // Then most of it.
    k.log.clear();
    feed(&mut p, &mut k, survey(0, 1, 100, false));
    p.step(1_000, &mut t, &mut k).unwrap();
    assert!(
        matches!(
            k.log[..],
            [Action::Split {
                region: HugeIndex(1),
                ..
            }]
        ),
        "{:?}",
        k.log
    );
}

#[test]
fn bloat_is_split_when_a_huge_page_is_found_to_be_hollow() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(99), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 30, true));
    let report = p.step(0, &mut t, &mut k).unwrap();
    assert_eq!((report.split, report.collapsed), (1, 0));
}

#[test]
fn equal_processes_get_equal_shares_when_contiguity_is_scarce() {
    let config = IngensConfig {
        huge_budget: 30,
        promote_batch: 7,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(1000), Bits::default());
    // The first arrives early and asks for everything.
    for proc in 0..3 {
        for r in 0..40 {
            feed(
                &mut p,
                &mut k,
                survey(proc, u64::from(proc) * 1000 + r, 512, false),
            );
        }
    }
    for i in 0..20 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    let held: Vec<u64> = (0..3).map(|n| p.claim(ProcId(n)).unwrap().huge_pages).collect();
    assert_eq!(held, [10, 10, 10]);
    assert!(p.fairness_objective() < 1e-9);
}

#[test]
fn double_share_gets_about_double_when_contiguity_is_scarce() {
    let config = IngensConfig {
        huge_budget: 30,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(1000), Bits::default());
    p.set_share(ProcId(1), 20_000.0);
    for proc in 0..2 {
        for r in 0..40 {
            feed(
                &mut p,
                &mut k,
                survey(proc, u64::from(proc) * 1000 + r, 512, false),
            );
        }
    }
    p.step(0, &mut t, &mut k).unwrap();
    let held: Vec<u64> = (0..2).map(|n| p.claim(ProcId(n)).unwrap().huge_pages).collect();
    assert_eq!(held, [10, 20]);
}

#[test]
fn frequent_regions_are_sampled_at_a_fifth_and_others_always() {
    let config = IngensConfig {
        access_period_ms: 500,
        max_backoff: 1,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(0), Bits::default());
    for r in 0..100 {
        feed(&mut p, &mut k, survey(0, r, 512, true));
        if r < 50 {
            t.touched
                .insert(PageKey::new(ProcId(0), HugeIndex(r).page(0)), Touch::Read);
        }
    }
    for i in 0..16 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    assert!(
        p.region(ProcId(0), HugeIndex(0))
            .unwrap()
            .frequently_accessed(6.0)
    );
    assert!(
        !p.region(ProcId(0), HugeIndex(60))
            .unwrap()
            .frequently_accessed(6.0)
    );
    t.asked.clear();
    for i in 16..116 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    let hot = t.asked.iter().filter(|k| k.page.region().0 < 50).count();
    assert_eq!(t.asked.len() - hot, 100 * 50);
    assert!((700..1300).contains(&hot), "a fifth of 5000: {hot}");
}

#[test]
fn frequent_region_is_looked_at_in_every_period_once_it_was_found_idle() {
    let config = IngensConfig {
        access_period_ms: 500,
        max_backoff: 1,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(0), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 512, true));
    let page = PageKey::new(ProcId(0), HugeIndex(1).page(0));
    t.touched.insert(page, Touch::Read);
    let frequent = |p: &Ingens| {
        p.region(ProcId(0), HugeIndex(1))
            .unwrap()
            .frequently_accessed(6.0)
    };
    let mut now = 0;
    while !frequent(&p) {
        p.step(now, &mut t, &mut k).unwrap();
        now += 500;
    }
    t.touched.insert(page, Touch::Idle);
    let looks = |p: &Ingens| p.region(ProcId(0), HugeIndex(1)).unwrap().access & 1;
    while looks(&p) == 1 {
        p.step(now, &mut t, &mut k).unwrap();
        now += 500;
    }
    let mut periods = 0;
    while frequent(&p) {
        p.step(now, &mut t, &mut k).unwrap();
        now += 500;
        periods += 1;
    }
    assert!(
        periods <= 4,
        "still frequent {periods} periods after it was found idle"
    );
}

#[test]
fn unseen_pages_do_not_change_the_access_vector() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(0), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 512, true));
    t.touched
        .insert(PageKey::new(ProcId(0), HugeIndex(1).page(0)), Touch::Unknown);
    p.step(0, &mut t, &mut k).unwrap();
    let r = p.region(ProcId(0), HugeIndex(1)).unwrap();
    assert_eq!((r.access, r.frequency), (0, 0.0));
}

#[test]
fn frequent_huge_page_is_kept_from_sharing_and_released_when_it_cools() {
    let config = IngensConfig {
        access_period_ms: 500,
        max_backoff: 1,
        sampling: 1.0,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(0), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 512, true));
    let page = PageKey::new(ProcId(0), HugeIndex(1).page(0));
    t.touched.insert(page, Touch::Read);
    for i in 0..20 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    t.touched.insert(page, Touch::Idle);
    for i in 20..40 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    let allowed: Vec<bool> = k
        .log
        .iter()
        .filter_map(|a| {
            if let Action::Sharing { allow, .. } = a {
                Some(*allow)
            } else {
                None
            }
        })
        .collect();
    assert_eq!(allowed, [false, true]);
}

#[test]
fn merged_region_is_promoted_only_once_it_is_frequently_used() {
    let config = IngensConfig {
        access_period_ms: 500,
        max_backoff: 1,
        sampling: 1.0,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(9), Bits::default());
    k.merged = 100;
    // A huge page that merging broke up: full, and not huge any more.
    feed(&mut p, &mut k, survey(0, 1, 512, true));
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    for i in 0..60 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    assert!(
        collapses(&k).is_empty(),
        "merging saves memory where nobody looks"
    );
    t.touched
        .insert(PageKey::new(ProcId(0), HugeIndex(1).page(0)), Touch::Read);
    for i in 60..80 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    assert_eq!(
        collapses(&k),
        [(0, 1)],
        "taken back at once when it is used again and again"
    );
    // Without coordination merging is not asked about.
    let off = IngensConfig {
        coordinate_sharing: false,
        ..IngensConfig::default()
    };
    let (mut p, mut k) = (
        Ingens::new(off),
        Kernel {
            merged: 100,
            ..kernel(9)
        },
    );
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    p.step(0, &mut t, &mut k).unwrap();
    assert_eq!(collapses(&k), [(0, 1)]);
}

#[test]
fn adaptive_mode_promotes_sparse_regions_only_while_memory_is_whole() {
    let config = IngensConfig {
        adaptive: true,
        ..IngensConfig::default()
    };
    for (fmfi, expected) in [(0.2, 1), (0.7, 0)] {
        let (mut p, mut k, mut t) = (Ingens::new(config.clone()), kernel(99), Bits::default());
        p.system(&SystemView {
            fmfi: Some(fmfi),
            ..SystemView::default()
        });
        feed(&mut p, &mut k, survey(0, 1, 5, false));
        p.step(0, &mut t, &mut k).unwrap();
        assert_eq!(collapses(&k).len(), expected, "FMFI {fmfi}");
    }
}

#[test]
fn memory_is_compacted_when_fragmentation_passes_the_limit_and_not_more_often_than_allowed() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(0), Bits::default());
    p.system(&SystemView {
        fmfi: Some(0.9),
        ..SystemView::default()
    });
    for i in 0..21 {
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    assert_eq!(
        k.log,
        [Action::Compact { bytes: 100_000_000 }; 3],
        "at 0, 5 and 10 s"
    );
    p.system(&SystemView {
        fmfi: Some(0.7),
        ..SystemView::default()
    });
    p.step(60_000, &mut t, &mut k).unwrap();
    assert_eq!(k.log.len(), 3);
}

#[test]
fn nothing_is_promoted_when_memory_is_short() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(99), Bits::default());
    p.system(&SystemView {
        available_bytes: 1 << 20,
        total_bytes: 1 << 30,
        ..SystemView::default()
    });
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    p.step(0, &mut t, &mut k).unwrap();
    assert!(collapses(&k).is_empty());
    p.system(&SystemView {
        available_bytes: 1 << 29,
        total_bytes: 1 << 30,
        ..SystemView::default()
    });
    p.step(1_000, &mut t, &mut k).unwrap();
    assert_eq!(collapses(&k).len(), 1, "the request waited");
}

#[test]
fn barren_process_is_excluded_for_two_minutes_after_a_pass_without_promotions() {
    let config = IngensConfig {
        scan_bytes: 1 << 30,
        scan_period_ms: 500,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(99), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 10, false));
    p.step(0, &mut t, &mut k).unwrap();
    assert_eq!(p.procs[&ProcId(0)].excluded_until_ms, 120_000);
}

#[test]
fn failed_promotion_waits_longer_each_time() {
    let config = IngensConfig {
        scan_period_ms: 500,
        ..IngensConfig::default()
    };
    let (mut p, mut k, mut t) = (Ingens::new(config), kernel(99), Bits::default());
    k.refuse.insert(HugeIndex(1));
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    for i in 0..240 {
        p.procs.get_mut(&ProcId(0)).unwrap().excluded_until_ms = 0;
        p.step(i * 500, &mut t, &mut k).unwrap();
    }
    assert!(
        (4..12).contains(&collapses(&k).len()),
        "{} tries in 120 s",
        collapses(&k).len()
    );
}

#[test]
fn empty_regions_are_forgotten() {
    let (mut p, mut k) = (Ingens::new(IngensConfig::default()), kernel(0));
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    feed(&mut p, &mut k, survey(0, 1, 0, false));
    assert!(p.region(ProcId(0), HugeIndex(1)).is_none());
    p.forget(ProcId(0));
    assert!(p.high.is_empty());
}

#[test]
fn metadata_is_far_below_24_bytes_a_page() {
    let (mut p, mut k) = (Ingens::new(IngensConfig::default()), kernel(0));
    for r in 0..2_000 {
        feed(&mut p, &mut k, survey(0, r, 512, false));
    }
    let (bytes, pages) = p.metadata();
    assert_eq!(pages, 2_000 * 512);
    assert!(bytes < pages, "{bytes} bytes for {pages} pages");
}

#[test]
fn holes_that_a_collapse_filled_still_count_as_unused() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(99), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 480, false));
    p.step(0, &mut t, &mut k).unwrap();
    assert_eq!(collapses(&k), [(0, 1)]);
    feed(&mut p, &mut k, survey(0, 1, 512, true));
    assert_eq!(p.region(ProcId(0), HugeIndex(1)).unwrap().util.weight(), 480);
    // Another 25 pages are freed: 455 of 512 are in use, though the page table shows 487.
    let mut s = survey(0, 1, 512, false);
    for offset in 0..25 {
        s.used.set(offset, false);
    }
    feed(&mut p, &mut k, s);
    p.step(1_000, &mut t, &mut k).unwrap();
    assert!(matches!(k.log.last(), Some(Action::Split { .. })), "{:?}", k.log);
    assert_eq!(collapses(&k).len(), 1, "not filled up again");
}

#[test]
fn old_request_is_dropped_when_pages_were_freed_meanwhile() {
    let (mut p, mut k, mut t) = (Ingens::new(IngensConfig::default()), kernel(99), Bits::default());
    feed(&mut p, &mut k, survey(0, 1, 512, false));
    k.now = Some(survey(0, 1, 100, false).used);
    p.step(0, &mut t, &mut k).unwrap();
    assert!(collapses(&k).is_empty());
}
