//! Bugs on demand, to prove that the crash tests find them: see [`varve_format::seeded`].

pub use varve_format::seeded::{Bug, arm, armed, current};

/// Whether a test scheduler finds `bug`, which makes one of `works` fail: the works take turns under random schedules and such by
/// priorities, until one fails. The bound is far beyond what any of the bugs needs; it is there so that a bug nobody finds ends too.
#[cfg(all(test, feature = "shuttle"))]
pub fn is_found<W: Fn() + Copy + Send + Sync + std::panic::UnwindSafe + 'static>(
    bug: Bug,
    works: &[W],
) -> bool {
    let search = |work: W| {
        let armed = move || {
            arm(Some(bug));
            work();
        };
        let found = std::panic::catch_unwind(move || {
            shuttle::check_random(armed, 1_000);
            shuttle::check_pct(armed, 2_000, 4);
        });
        arm(None);
        found.is_err()
    };
    (0..1_000).any(|_| works.iter().any(|work| search(*work)))
}
