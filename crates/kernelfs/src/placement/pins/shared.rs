//! Which shared blocks operators want on which tier: a set of numbers of the shared space, gathered from the
//! files that name them. Reads no file, moves nothing.
//!
//! A number has the fastest tier that any of its files wishes. Numbers are never given out again, so one that
//! is in no run any more harms nothing until the set is gathered anew.

use std::ops::Range;
use varve_format::Tier;
use varve_store::{MappedPart, SharedPart};

/// Most runs of neighbouring numbers in a set: 16 MiB for each tier.
const RUNS_MAX: usize = 1 << 20;
/// Runs that are gathered before they are joined for the first time.
const JOIN_FROM: usize = 4096;

/// Runs of numbers, in order and apart from each other.
type Runs = Vec<Range<u64>>;

/// The numbers that operators want on a tier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Wishes([Runs; 3]);

impl Wishes {
    /// The tier of the first number of a range that has one.
    pub(super) fn tier_in(&self, numbers: &Range<u64>) -> Option<Tier> {
        let first = |tier: Tier| self.from(tier, numbers.start).first().cloned();
        let found = Tier::ALL
            .into_iter()
            .filter_map(|tier| Some((first(tier)?.start, tier)))
            .min()?;
        (found.0 < numbers.end).then_some(found.1)
    }

    /// The runs of a tier from a number on; of the first, all of it.
    pub(super) fn from(&self, tier: Tier, number: u64) -> &[Range<u64>] {
        let runs = &self.0[tier as usize];
        &runs[runs.partition_point(|run| run.end <= number)..]
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(Vec::is_empty)
    }
}

/// A set that is being gathered.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    runs: [Runs; 3],
    /// Runs of each tier when they are joined next.
    join_at: [usize; 3],
    /// There were more than a set takes.
    overflowed: bool,
}

impl Gathering {
    /// A file wishes some numbers on a tier.
    pub(super) fn add(&mut self, numbers: Range<u64>, tier: Tier) {
        if self.overflowed {
            return;
        }
        let (runs, join_at) = (&mut self.runs[tier as usize], &mut self.join_at[tier as usize]);
        if runs.len() >= (*join_at).max(JOIN_FROM) {
            join(runs);
            if runs.len() >= RUNS_MAX {
                self.overflowed = true;
                return;
            }
            *join_at = 2 * runs.len();
        }
        match runs.last_mut() {
            Some(last) if last.end == numbers.start => last.end = numbers.end,
            _ => runs.push(numbers),
        }
    }

    /// The set: each number on the fastest tier that was wished. `Err`: there are too many runs; how many are
    /// known.
    pub(super) fn finish(self) -> Result<Wishes, usize> {
        let mut runs = self.runs;
        let mut faster = Runs::new();
        for of_tier in &mut runs {
            join(of_tier);
            *of_tier = without(of_tier, &faster);
            faster.extend_from_slice(of_tier);
            join(&mut faster);
        }
        match self.overflowed {
            true => Err(runs.iter().map(Vec::len).sum()),
            false => Ok(Wishes(runs)),
        }
    }
}

/// Puts runs in order, and joins those that meet.
fn join(runs: &mut Runs) {
    runs.sort_unstable_by_key(|run| run.start);
    runs.dedup_by(|next, run| {
        let meets = next.start <= run.end;
        if meets {
            run.end = run.end.max(next.end);
        }
        meets
    });
}

/// What `runs` have without `others`; both in order.
fn without(runs: &[Range<u64>], others: &[Range<u64>]) -> Runs {
    let mut left = Runs::new();
    let mut others = others.iter().peekable();
    for run in runs {
        let mut start = run.start;
        while let Some(other) = others.next_if(|other| other.end <= run.end) {
            if start < other.start {
                left.push(start..other.start);
            }
            start = start.max(other.end);
        }
        let end = others.peek().map_or(run.end, |other| other.start.min(run.end));
        if start < end {
            left.push(start..end);
        }
    }
    left
}

/// What policies do not see of the shared blocks.
#[derive(Debug, Clone)]
pub enum Held {
    /// All: which of them operators have placed is not known yet, or they are too many.
    All,
    /// What is in the set.
    Set(SetOfWishes),
}

/// A set that was gathered.
#[derive(Debug, Clone)]
pub struct SetOfWishes(std::sync::Arc<Wishes>);

impl From<Wishes> for SetOfWishes {
    fn from(wishes: Wishes) -> Self {
        Self(std::sync::Arc::new(wishes))
    }
}

impl Held {
    /// Whether no shared block is held.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        match self {
            Self::All => false,
            Self::Set(set) => set.0.is_empty(),
        }
    }

    /// Whether policies may not move a part of a file.
    #[must_use]
    pub fn holds_part(&self, part: &MappedPart) -> bool {
        let numbers = |number| number..number + u64::from(part.extent.len);
        part.number.is_some_and(|number| self.holds(&numbers(number)))
    }

    /// Whether policies may not move a run.
    #[must_use]
    pub fn holds_run(&self, run: &SharedPart) -> bool {
        self.holds(&(run.number..run.number + u64::from(run.len)))
    }

    fn holds(&self, numbers: &Range<u64>) -> bool {
        match self {
            Self::All => true,
            Self::Set(set) => set.0.tier_in(numbers).is_some(),
        }
    }

    /// The tier on which operators want a part of a file, as far as it is known.
    #[must_use]
    pub fn wished(&self, part: &MappedPart) -> Option<Tier> {
        let Self::Set(set) = self else { return None };
        let number = part.number?;
        set.0.tier_in(&(number..number + u64::from(part.extent.len)))
    }

    pub(super) fn set(&self) -> Option<&Wishes> {
        match self {
            Self::All => None,
            Self::Set(set) => Some(&set.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Gathering, JOIN_FROM, RUNS_MAX, Wishes, without};
    use varve_format::Tier;

    fn gathered(wished: &[(std::ops::Range<u64>, Tier)]) -> Wishes {
        let mut gathering = Gathering::default();
        for (numbers, tier) in wished {
            gathering.add(numbers.clone(), *tier);
        }
        gathering.finish().unwrap_or_else(|runs| panic!("{runs} runs"))
    }

    #[test]
    fn each_number_has_the_fastest_tier_that_a_file_wishes() {
        let wishes = gathered(&[
            (10..20, Tier::Ssd),
            (40..50, Tier::Hdd),
            (0..5, Tier::Hdd),
            (15..17, Tier::Nvm),
            (18..30, Tier::Ssd),
            (30..44, Tier::Nvm),
        ]);
        let expected = [vec![15..17, 30..44], vec![10..15, 17..30], vec![0..5, 44..50]];
        assert_eq!(wishes, Wishes(expected));
        for number in 0..60 {
            let expected = match number {
                15..17 | 30..44 => Some(Tier::Nvm),
                10..15 | 17..30 => Some(Tier::Ssd),
                0..5 | 44..50 => Some(Tier::Hdd),
                _ => None,
            };
            assert_eq!(wishes.tier_in(&(number..number + 1)), expected, "{number}");
        }
        assert_eq!(wishes.tier_in(&(5..11)), Some(Tier::Ssd));
        assert_eq!(wishes.tier_in(&(5..10)), None);
        assert_eq!(wishes.from(Tier::Ssd, 16).first(), Some(&(17..30)));
    }

    #[test]
    fn difference_of_runs_has_what_only_the_first_have() {
        let all: Vec<_> = (0..3).map(|at| at * 10..at * 10 + 6).collect();
        for other in [
            vec![2..4, 4..4],
            vec![0..3, 3..6],
            vec![4..12, 25..40],
            vec![5..21, 24..25],
            vec![],
            vec![0..50, 60..100],
        ] {
            let left = without(&all, &other);
            for number in 0..40 {
                let within = |runs: &[std::ops::Range<u64>]| runs.iter().any(|run| run.contains(&number));
                assert_eq!(
                    within(&left),
                    within(&all) && !within(&other),
                    "{number} of {other:?}"
                );
            }
        }
    }

    #[test]
    fn set_is_bounded_and_says_so() {
        let mut gathering = Gathering::default();
        // The same runs again and again take no more room.
        for _ in 0..4 {
            for number in 0..JOIN_FROM as u64 {
                gathering.add(number * 2..number * 2 + 1, Tier::Ssd);
            }
        }
        assert!(gathering.runs[Tier::Ssd as usize].len() <= 2 * JOIN_FROM);
        for number in 0..2 * RUNS_MAX as u64 + 10 {
            gathering.add(number * 2..number * 2 + 1, Tier::Ssd);
        }
        assert!(gathering.finish().is_err_and(|known| known >= RUNS_MAX));
    }
}
