//! Random workloads of several sessions for crash exploration. Owns the probabilities; refuses to know the
//! effects.

use super::{Act, Script};
use crate::model::Model;
use crate::ops::Op;
use crate::workload::{self, Rng, likely_op};

/// The acts of a workload besides operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flavour {
    /// Digests and `fsync`s; leases change owner.
    Calm,
    /// Also clients that are sealed, die, leave, or are stopped.
    Rough,
    /// Also data that moves between tiers, and checkpoints of the journal.
    Moving,
    /// All of these, and kills of the daemon.
    All,
}

/// The places of `fsync`s in a sequence of operations, besides its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Syncs {
    /// Nowhere.
    Nowhere,
    /// After each operation but the last one.
    Between,
    /// After the last operation.
    After,
    /// After each operation.
    Each,
}

impl Syncs {
    /// All places.
    pub const ALL: [Self; 4] = [Self::Nowhere, Self::Between, Self::After, Self::Each];
}

/// Returns the operations with `fsync`s among them.
#[must_use]
pub fn sequence(ops: &[Op], syncs: Syncs) -> Vec<Act> {
    let mut acts = Vec::with_capacity(2 * ops.len());
    for (index, op) in ops.iter().enumerate() {
        acts.push(Act::Op(op.clone()));
        let last = index + 1 == ops.len();
        let synced = match syncs {
            Syncs::Nowhere => false,
            Syncs::Between => !last,
            Syncs::After => last,
            Syncs::Each => true,
        };
        if synced {
            acts.push(Act::Op(Op::Fsync(Vec::new())));
        }
    }
    acts
}

/// A random workload of `sessions` sessions with `count` acts.
#[must_use]
pub fn shared(seed: u64, sessions: usize, count: usize, flavour: Flavour) -> Script {
    let mut rng = Rng::new(seed ^ 0x00c0_4a17);
    let mut model = Model::new();
    let mut before: Vec<_> = workload::setup().into_iter().map(Act::Op).collect();
    for op in workload::setup() {
        let _ = model.apply(&op);
    }
    before.push(Act::Digest);
    let mut acts = Vec::with_capacity(count);
    let mut session = 0;
    let mut frozen = None;
    let rough = matches!(flavour, Flavour::Rough | Flavour::All);
    let moving = matches!(flavour, Flavour::Moving | Flavour::All);
    while acts.len() < count {
        if rng.below(2) == 0 {
            session = rng.below(sessions as u64) as usize;
        }
        let other = rng.below(sessions as u64) as usize;
        let awake = frozen.is_none();
        let act = match rng.below(40) {
            0..=2 => Some(Act::Digest),
            3..=5 => Some(Act::By(session, Op::Fsync(Vec::new()))),
            6 if rough && awake => Some(Act::SealOne(other)),
            7 if rough && awake => Some(Act::Die(other)),
            8 if rough && awake => Some(Act::Remount(other)),
            9 if rough && awake && sessions > 1 => {
                frozen = Some(other);
                Some(Act::Freeze(other))
            }
            10..=13 if frozen.is_some() => frozen.take().map(Act::Thaw),
            10..=12 if moving => Some(Act::Place),
            13 if moving => Some(Act::Checkpoint),
            14 if awake => Some(Act::Tick),
            15 if flavour == Flavour::All && awake => Some(Act::Restart),
            _ if frozen == Some(session) => None,
            _ => Some(Act::By(session, likely_op(&mut rng, &mut model))),
        };
        match act {
            Some(Act::By(who, _)) if frozen == Some(who) => {}
            Some(act) => acts.push(act),
            None => session = other,
        }
    }
    acts.extend(frozen.map(Act::Thaw));
    Script { before, acts }
}

#[cfg(test)]
mod tests {
    use super::{Act, Flavour, Syncs, sequence, shared};
    use crate::ops::Op;

    #[test]
    fn sequence_is_synced_where_it_is_asked_for() {
        let ops = [Op::Create(vec!["a"]), Op::Create(vec!["b"])];
        let synced = Syncs::ALL.map(|syncs| {
            let acts = sequence(&ops, syncs);
            let text: Vec<_> = acts.iter().map(Act::to_string).collect();
            text.join(", ")
        });
        let want = [
            "create /a, create /b",
            "create /a, fsync /, create /b",
            "create /a, create /b, fsync /",
            "create /a, fsync /, create /b, fsync /",
        ];
        assert_eq!(synced, want);
    }

    #[test]
    fn shared_runs_are_the_same_for_the_same_seed_and_use_everything() {
        assert_eq!(shared(3, 3, 30, Flavour::All), shared(3, 3, 30, Flavour::All));
        let all: Vec<_> = (0..60)
            .flat_map(|seed| shared(seed, 3, 30, Flavour::All).acts)
            .collect();
        for wanted in [
            "Die",
            "Freeze",
            "Thaw",
            "SealOne",
            "Remount",
            "Restart",
            "Place",
            "Checkpoint",
        ] {
            let there = all.iter().any(|act| format!("{act:?}").starts_with(wanted));
            assert!(there, "{wanted} never happens");
        }
    }

    #[test]
    fn stopped_client_does_nothing_until_it_goes_on() {
        for seed in 0..200 {
            let mut stopped = None;
            for act in shared(seed, 2, 30, Flavour::Rough).acts {
                match act {
                    Act::Freeze(session) => stopped = Some(session),
                    Act::Thaw(_) => stopped = None,
                    Act::By(session, _) => assert_ne!(stopped, Some(session), "seed {seed}"),
                    _ => {}
                }
            }
            assert_eq!(stopped, None);
        }
    }
}
