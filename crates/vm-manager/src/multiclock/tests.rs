#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::sim::SimMemory;
use crate::types::VirtPage;

/// A tracker that answers from a script: pages in `hot` are touched at every look.
#[derive(Default)]
struct Script {
    hot: std::collections::HashMap<PageKey, Touch>,
}

impl Tracker for Script {
    fn info(&self) -> crate::interfaces::TrackerInfo {
        crate::interfaces::TrackerInfo {
            name: "script",
            resolution_bytes: PAGE_BYTES,
            sees_reads: true,
            tells_writes: true,
            note: String::new(),
        }
    }
    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        out.extend(
            pages
                .iter()
                .map(|p| self.hot.get(p).copied().unwrap_or(Touch::Idle)),
        );
        Ok(())
    }
}

fn key(n: u64) -> PageKey {
    PageKey::new(ProcId(0), VirtPage(n))
}

fn exact() -> MultiClockConfig {
    MultiClockConfig {
        max_backoff: 1,
        ..Default::default()
    }
}

fn state(m: &MultiClock, n: u64) -> (u8, ListKind, bool) {
    let s = m.state(key(n)).unwrap();
    (s.tier.0, s.list, s.referenced)
}

/// Fills `pages` pages of `tier` in memory and policy, numbered from `from`.
fn fill(m: &mut MultiClock, mem: &mut SimMemory, from: u64, pages: u64, tier: u8) {
    for n in from..from + pages {
        // Reserving all of the faster tiers forces the allocation into the wanted one.
        let reserve: Vec<u64> = (0..tier).map(|_| u64::MAX / 2).collect();
        assert_eq!(mem.allocate(key(n), &reserve), Some(TierId(tier)));
        m.allocate(key(n), PageClass::Anon, TierId(tier), false);
    }
}

#[test]
fn metadata_is_at_most_24_bytes_a_page_when_memory_is_dense() {
    let mut m = MultiClock::new(exact(), &[1 << 20, 1 << 20]);
    for n in 0..1_100_000 {
        m.allocate(key(n), PageClass::Anon, TierId(1), false);
    }
    let (bytes, pages) = m.metadata();
    assert_eq!(pages, 1_100_000);
    assert!(
        bytes <= 24 * pages,
        "{} bytes a page",
        bytes as f64 / pages as f64
    );
}

#[test]
fn page_climbs_every_step_when_supervised_accesses_repeat() {
    let mut m = MultiClock::new(exact(), &[100, 100]);
    m.allocate(key(1), PageClass::File, TierId(1), false);
    assert_eq!(state(&m, 1), (1, ListKind::Inactive, false));
    let ladder = [
        (ListKind::Inactive, true),
        (ListKind::Active, false),
        (ListKind::Active, true),
        (ListKind::Promote, false),
        (ListKind::Promote, false),
    ];
    for (list, referenced) in ladder {
        m.mark_page_accessed(key(1), false);
        assert_eq!(state(&m, 1), (1, list, referenced));
    }
    assert_eq!(m.edges().get(Edge::PromoteReference), 1);
    m.check().unwrap();
}

#[test]
fn fastest_tier_keeps_pages_active_when_they_are_touched_again() {
    let mut m = MultiClock::new(exact(), &[100, 100]);
    m.allocate(key(1), PageClass::Anon, TierId(0), false);
    for _ in 0..10 {
        m.mark_page_accessed(key(1), true);
    }
    assert_eq!(state(&m, 1), (0, ListKind::Active, true));
    assert_eq!(m.edges().get(Edge::Reactivate), 0);
    m.check().unwrap();
}

#[test]
fn hot_page_is_promoted_when_scans_see_it_and_lands_active_above() {
    let (mut m, mut mem) = (MultiClock::new(exact(), &[100, 100]), SimMemory::new(&[100, 100]));
    fill(&mut m, &mut mem, 0, 10, 1);
    let mut t = Script::default();
    t.hot.insert(key(3), Touch::Read);
    let mut now = 0;
    for _ in 0..4 {
        m.step(now, &mut t, &mut mem).unwrap();
        now += 100;
    }
    assert_eq!(state(&m, 3), (0, ListKind::Active, false));
    assert_eq!(mem.tier(key(3)), Some(TierId(0)));
    assert_eq!(mem.migrations, 1, "cold pages stay");
    m.check().unwrap();
}

#[test]
fn promote_page_returns_to_active_when_it_cannot_move() {
    let (mut m, mut mem) = (MultiClock::new(exact(), &[100, 100]), SimMemory::new(&[100, 100]));
    fill(&mut m, &mut mem, 0, 1, 1);
    mem.pinned.insert(key(0));
    for _ in 0..4 {
        m.mark_page_accessed(key(0), false);
    }
    m.step(0, &mut Script::default(), &mut mem).unwrap();
    assert_eq!(state(&m, 0), (1, ListKind::Active, false));
    assert_eq!(m.edges().get(Edge::PromoteFail), 1);
}

#[test]
fn scan_takes_marks_back_when_a_page_is_idle() {
    let (mut m, mut mem) = (MultiClock::new(exact(), &[100, 100]), SimMemory::new(&[100, 100]));
    fill(&mut m, &mut mem, 0, 2, 1);
    m.mark_page_accessed(key(0), false);
    for _ in 0..3 {
        m.mark_page_accessed(key(1), false);
    }
    m.step(0, &mut Script::default(), &mut mem).unwrap();
    assert_eq!(state(&m, 0), (1, ListKind::Inactive, false));
    assert_eq!(state(&m, 1), (1, ListKind::Active, false));
    assert_eq!(
        (m.edges().get(Edge::InactiveAge), m.edges().get(Edge::ActiveAge)),
        (1, 1)
    );
}

#[test]
fn promotion_demotes_cold_pages_above_when_the_fast_tier_is_full() {
    let (mut m, mut mem) = (
        MultiClock::new(exact(), &[100, 1000]),
        SimMemory::new(&[100, 1000]),
    );
    fill(&mut m, &mut mem, 0, 100, 0);
    fill(&mut m, &mut mem, 100, 100, 1);
    let mut t = Script::default();
    for n in 100..150 {
        t.hot.insert(key(n), Touch::Read);
    }
    for i in 0..8 {
        m.step(i * 100, &mut t, &mut mem).unwrap();
    }
    assert!(
        (100..150).all(|n| mem.tier(key(n)) == Some(TierId(0))),
        "hot pages are up"
    );
    assert!(
        (0..100).filter(|n| mem.tier(key(*n)) == Some(TierId(1))).count() >= 50,
        "cold ones made room"
    );
    assert!(m.edges().get(Edge::Demote) >= 50);
    m.check().unwrap();
}

#[test]
fn pages_sink_through_three_tiers_and_are_evicted_when_all_are_cold() {
    let config = MultiClockConfig {
        evict: true,
        ..exact()
    };
    let (mut m, mut mem) = (
        MultiClock::new(config, &[64, 64, 64]),
        SimMemory::new(&[64, 64, 64]),
    );
    for tier in 0..3u8 {
        fill(&mut m, &mut mem, u64::from(tier) * 100, 64, tier);
    }
    // The middle tier: pages marked active must sink through its inactive list.
    for n in 100..164 {
        m.mark_page_accessed(key(n), false);
        m.mark_page_accessed(key(n), false);
    }
    for i in 0..10 {
        m.step(i * 100, &mut Script::default(), &mut mem).unwrap();
    }
    for tier in 0..3 {
        let marks = m.watermarks(TierId(tier));
        assert!(
            mem.free_pages(TierId(tier)) >= marks.low,
            "tier {tier} is relieved"
        );
    }
    for edge in [Edge::Demote, Edge::Evict, Edge::Deactivate] {
        assert!(m.edges().get(edge) > 0, "{edge:?}");
    }
    m.check().unwrap();
}

#[test]
fn lowest_tier_keeps_pages_when_eviction_is_off() {
    let (mut m, mut mem) = (MultiClock::new(exact(), &[16]), SimMemory::new(&[16]));
    fill(&mut m, &mut mem, 0, 16, 0);
    for i in 0..5 {
        m.step(i * 100, &mut Script::default(), &mut mem).unwrap();
    }
    assert_eq!((mem.used(TierId(0)), m.edges().get(Edge::Evict)), (16, 0));
}

#[test]
fn unevictable_page_never_moves_when_locked_and_rejoins_when_unlocked() {
    let (mut m, mut mem) = (MultiClock::new(exact(), &[16, 16]), SimMemory::new(&[16, 16]));
    fill(&mut m, &mut mem, 0, 1, 1);
    m.set_unevictable(key(0), true);
    let mut t = Script::default();
    t.hot.insert(key(0), Touch::Written);
    for i in 0..10 {
        m.step(i * 100, &mut t, &mut mem).unwrap();
        m.mark_page_accessed(key(0), true);
    }
    assert_eq!(state(&m, 0).1, ListKind::Unevictable);
    assert_eq!(mem.migrations, 0);
    m.set_unevictable(key(0), false);
    assert_eq!(state(&m, 0), (1, ListKind::Inactive, false));
}

#[test]
fn written_page_outlasts_a_read_one_when_writes_are_weighted() {
    for (weight, stays) in [(1.0, false), (3.0, true)] {
        let config = MultiClockConfig {
            write_weight: weight,
            ..exact()
        };
        let (mut m, mut mem) = (MultiClock::new(config, &[16, 64]), SimMemory::new(&[16, 64]));
        fill(&mut m, &mut mem, 0, 16, 0);
        for _ in 0..2 {
            m.mark_page_accessed(key(0), true);
            m.mark_page_accessed(key(8), false);
        }
        let mut report = StepReport::default();
        m.budget_left = 1 << 20;
        // One reclaim of all pages but one: page 0 was written, page 8 read, equally often and equally long
        // ago.
        m.reclaim(TierId(0), 15, &mut Script::default(), &mut mem, &mut report)
            .unwrap();
        let written_up = mem.tier(key(0)) == Some(TierId(0));
        let read_up = mem.tier(key(8)) == Some(TierId(0));
        assert_eq!((written_up, read_up), (stays, !stays), "weight {weight}");
    }
}

#[test]
fn unknown_pages_are_never_demoted_when_the_tracker_is_blind() {
    struct Blind;
    impl Tracker for Blind {
        fn info(&self) -> crate::interfaces::TrackerInfo {
            Script::default().info()
        }
        fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
            out.extend(pages.iter().map(|_| Touch::Unknown));
            Ok(())
        }
    }
    let (mut m, mut mem) = (MultiClock::new(exact(), &[16, 64]), SimMemory::new(&[16, 64]));
    fill(&mut m, &mut mem, 0, 16, 0);
    for i in 0..20 {
        m.step(i * 100, &mut Blind, &mut mem).unwrap();
    }
    assert_eq!(mem.migrations, 0);
}

#[test]
fn period_grows_when_nothing_changes_and_resets_on_a_reference() {
    let (mut m, mut mem) = (
        MultiClock::new(MultiClockConfig::default(), &[16, 64]),
        SimMemory::new(&[16, 64]),
    );
    fill(&mut m, &mut mem, 0, 4, 1);
    let mut t = Script::default();
    let mut now = 0;
    for _ in 0..6 {
        m.step(now, &mut t, &mut mem).unwrap();
        now = m.next_due_ms();
    }
    assert_eq!(m.backoff, 8);
    t.hot.insert(key(1), Touch::Read);
    m.step(now, &mut t, &mut mem).unwrap();
    assert_eq!(m.next_due_ms(), now + 100);
}

#[test]
fn watermarks_are_ordered_and_follow_the_kernels_formula() {
    let w = Watermarks::new(1 << 18, 1 << 18, 1.0);
    // 1 GiB: 4·√(1048576 KiB) = 4096 KiB = 1024 pages.
    assert_eq!((w.min, w.low, w.high), (1024, 1280, 1536));
    let m = MultiClock::new(exact(), &[(40u64 << 30) / PAGE_BYTES]);
    assert_eq!(m.active_ratio(TierId(0)), 20, "√(10·40)");
}

#[derive(Debug, Clone)]
enum Op {
    Allocate(u64, u8, bool),
    Free(u64),
    Touch(u64, bool),
    Lock(u64, bool),
    Pin(u64),
    Step(Vec<(u64, bool)>),
    Forget(u16),
}

fn op() -> impl Strategy<Value = Op> {
    let page = 0..120u64;
    prop_oneof![
        4 => (page.clone(), 0..3u8, any::<bool>()).prop_map(|(p, t, f)| Op::Allocate(p, t, f)),
        1 => page.clone().prop_map(Op::Free),
        4 => (page.clone(), any::<bool>()).prop_map(|(p, w)| Op::Touch(p, w)),
        1 => (page.clone(), any::<bool>()).prop_map(|(p, l)| Op::Lock(p, l)),
        1 => page.clone().prop_map(Op::Pin),
        3 => prop::collection::vec((page, any::<bool>()), 0..60).prop_map(Op::Step),
        1 => (0..2u16).prop_map(Op::Forget),
    ]
}

/// Legal steps of one page between two observations, for edges taken one at a time.
fn legal(before: PageState, after: PageState) -> bool {
    use ListKind::{Active, Inactive, Promote};
    let same = before.tier == after.tier;
    match ((before.list, before.referenced), (after.list, after.referenced)) {
        (a, b) if a == b && same => true,
        ((Inactive, false), (Inactive, true)) | ((Inactive, true), (Active, false)) => same,
        ((Active, false), (Active, true)) => same,
        ((Active, true), (Promote, false)) => same && before.tier.0 > 0,
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn state_machine_keeps_every_page_on_one_list_whatever_happens(
        ops in prop::collection::vec(op(), 1..120)
    ) {
        let caps = [24, 40, 60];
        let config = MultiClockConfig { evict: true, ..exact() };
        let (mut m, mut mem) = (MultiClock::new(config, &caps), SimMemory::new(&caps));
        let mut now = 0;
        let pk = |n: u64| PageKey::new(ProcId((n % 2) as u16), VirtPage(n * 7));
        for op in ops {
            match op {
                Op::Allocate(p, t, file) => {
                    let reserve: Vec<u64> = (0..t).map(|_| 1 << 40).collect();
                    if mem.tier(pk(p)).is_none() && let Some(tier) = mem.allocate(pk(p), &reserve) {
                        m.allocate(pk(p), if file { PageClass::File } else { PageClass::Anon }, tier, false);
                    }
                }
                Op::Free(p) => { mem.free(pk(p)); m.free(pk(p)); }
                Op::Touch(p, w) => {
                    let before = m.state(pk(p));
                    m.mark_page_accessed(pk(p), w);
                    if let Some(before) = before {
                        prop_assert!(legal(before, m.state(pk(p)).unwrap()), "{before:?} -> \
                            {:?}", m.state(pk(p)));
                    }
                }
                Op::Lock(p, l) => m.set_unevictable(pk(p), l),
                Op::Pin(p) => { mem.pinned.insert(pk(p)); }
                Op::Step(hot) => {
                    let kind = |w| if w { Touch::Written } else { Touch::Read };
                    let mut t = Script { hot: hot.into_iter().map(|(p, w)| (pk(p), kind(w))).collect() };
                    m.step(now, &mut t, &mut mem).unwrap();
                    now += 100;
                }
                Op::Forget(proc) => {
                    for n in (0..120).filter(|n| n % 2 == u64::from(proc)) { mem.free(pk(n)); }
                    m.forget(ProcId(proc));
                }
            }
            m.check().map_err(TestCaseError::fail)?;
            // Policy and memory agree on where every page is, so counts are conserved.
            for n in 0..120 {
                prop_assert_eq!(m.state(pk(n)).map(|s| s.tier), mem.tier(pk(n)));
            }
            for tier in 0..3 {
                prop_assert_eq!(m.used(TierId(tier)), mem.used(TierId(tier)));
            }
            let in_lists = m.edges();
            let born = in_lists.get(Edge::Allocate);
            let gone = in_lists.get(Edge::Free) + in_lists.get(Edge::Evict);
            prop_assert_eq!(born - gone, m.metadata().1);
        }
    }
}
