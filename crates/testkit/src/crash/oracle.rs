//! The allowed states after a crash. Owns the rule; knows no image.
//!
//! # The rule
//! Operations are carried out one after the other, by one session or several. A *cut* is the number of
//! operations of each session that take effect. The recovered tree must be that of an allowed cut:
//! - after a kill, on every medium, and after a power cut on `Dax` (a returned call is durable): all
//!   operations that had returned, with or without the one that had begun;
//! - after a power cut on `File` or `Shm`: a prefix of each session that includes all operations that had
//!   returned before the session's last `fsync`, digest or end. An operation requires all earlier ones, of
//!   any session, that changed a node which it changes too.

use crate::model::{Model, NodeId, Tree, tree_hash};
use crate::ops::Op;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use varve_media::sim::{Crash, SimMedium};

/// The number of operations that take effect, for each session.
pub(super) type Cut = Vec<usize>;

/// Most cuts tried for one image: more would need sessions that do not sync for a long time.
const CUTS_MAX: usize = 20_000;

struct Step {
    session: usize,
    op: Op,
    begin: usize,
    end: usize,
    /// Earlier steps that this step requires.
    needs: Vec<usize>,
    touched: BTreeSet<NodeId>,
}

/// The state after a cut.
pub(super) struct State {
    pub(super) model: Model,
    pub(super) tree: Tree,
    pub(super) hash: u64,
}

impl State {
    fn new(model: Model) -> Arc<Self> {
        let tree = model.tree();
        let hash = tree_hash(&tree);
        Arc::new(Self { model, tree, hash })
    }
}

/// The operations performed during the recording.
pub(super) struct History {
    base: Model,
    sessions: usize,
    steps: Vec<Step>,
    /// Points of durability: a session (`None`: all of them), and a number of events. All operations of the
    /// session that had returned after these events are durable.
    durable: Vec<(Option<usize>, usize)>,
    states: Mutex<HashMap<Cut, Option<Arc<State>>>>,
}

impl History {
    pub(super) fn new(base: Model, sessions: usize) -> Self {
        let first = State::new(base.clone());
        Self {
            base,
            sessions,
            steps: Vec::new(),
            durable: Vec::new(),
            states: Mutex::new(HashMap::from([(vec![0; sessions], Some(first))])),
        }
    }

    /// Records an operation between two events, and the model after it.
    pub(super) fn operation(
        &mut self,
        session: usize,
        op: &Op,
        (begin, end): (usize, usize),
        touched: BTreeSet<NodeId>,
        after: Model,
    ) {
        let needs = (0..self.steps.len())
            .filter(|at| !self.steps[*at].touched.is_disjoint(&touched))
            .collect();
        self.steps.push(Step {
            session,
            op: op.clone(),
            begin,
            end,
            needs,
            touched,
        });
        let cut = self.count(|_| true);
        self.lock().insert(cut, Some(State::new(after)));
    }

    pub(super) fn durable(&mut self, session: Option<usize>, end: usize) {
        self.durable.push((session, end));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Cut, Option<Arc<State>>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, which: impl Fn(&Step) -> bool) -> Cut {
        let mut cut = vec![0; self.sessions];
        let steps = self.steps.iter().filter(|step| which(step));
        steps.for_each(|step| cut[step.session] += 1);
        cut
    }

    /// Number of operations that had returned after `at` events.
    pub(super) fn returned(&self, at: usize) -> Cut {
        self.count(|step| step.end <= at)
    }

    /// The fewest and the most operations that may take effect after a crash, for each session.
    pub(super) fn bounds(&self, at: usize, crash: Crash, medium: SimMedium) -> (Cut, Cut) {
        // A torn store has happened in part.
        let reached = at + usize::from(matches!(crash, Crash::KillTorn(_)));
        let returned = self.returned(at);
        let mut most = self.count(|step| step.begin < reached);
        most.iter_mut()
            .zip(&returned)
            .for_each(|(most, returned)| *most = (*most).max(*returned));
        let kill = matches!(crash, Crash::Kill | Crash::KillTorn(_));
        if kill || medium.is_dax() {
            return (returned, most);
        }
        let mut least = vec![0; self.sessions];
        for (session, end) in self.durable.iter().filter(|(_, end)| *end <= at) {
            let then = self.returned(*end);
            for (index, least) in least.iter_mut().enumerate() {
                if session.is_none_or(|session| session == index) {
                    *least = (*least).max(then[index]);
                }
            }
        }
        (least, most)
    }

    /// The state after a cut; `None` if an operation in it requires one that is not.
    pub(super) fn state(&self, cut: &Cut) -> Option<Arc<State>> {
        if let Some(known) = self.lock().get(cut) {
            return known.clone();
        }
        let state = self.work_out(cut);
        self.lock().insert(cut.clone(), state.clone());
        state
    }

    fn work_out(&self, cut: &Cut) -> Option<Arc<State>> {
        let mut seen = vec![0; self.sessions];
        let mut counts = vec![false; self.steps.len()];
        let mut model = self.base.clone();
        for (at, step) in self.steps.iter().enumerate() {
            seen[step.session] += 1;
            counts[at] = seen[step.session] <= cut[step.session];
            if !counts[at] {
                continue;
            }
            if step.needs.iter().any(|need| !counts[*need]) {
                return None;
            }
            // A refused operation changes nothing, and would change nothing here.
            if !step.touched.is_empty() && model.apply(&step.op).is_err() {
                return None;
            }
        }
        Some(State::new(model))
    }

    /// Returns the newest state with this tree within the bounds.
    pub(super) fn find(&self, (least, most): &(Cut, Cut), hash: u64) -> Option<(Cut, Arc<State>)> {
        let mut cut = most.clone();
        for _ in 0..CUTS_MAX {
            if let Some(state) = self.state(&cut)
                && state.hash == hash
            {
                return Some((cut, state));
            }
            // Counts down like a number with a digit for each session.
            let lower = (0..self.sessions).find(|index| cut[*index] > least[*index])?;
            cut[..lower].copy_from_slice(&most[..lower]);
            cut[lower] -= 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{History, SimMedium};
    use crate::model::{Model, tree_hash};
    use crate::ops::Op;
    use varve_media::sim::Crash;

    /// Two sessions: 0 makes `a`; 1 makes `d`; 0 writes to `a`; 1 writes to `a`.
    fn history() -> (History, Vec<Model>) {
        let mut model = Model::new();
        let mut history = History::new(model.clone(), 2);
        let mut models = vec![model.clone()];
        let write = |seed| Op::Write {
            path: vec!["a"],
            offset: 0,
            len: 10,
            seed,
        };
        let ops = [
            (0, Op::Create(vec!["a"])),
            (1, Op::Mkdir(vec!["d"])),
            (0, write(1)),
            (1, write(2)),
        ];
        for (at, (session, op)) in ops.iter().enumerate() {
            let before = model.clone();
            model.apply(op).expect("it works");
            let touched = model.changed(&before);
            history.operation(*session, op, (at * 10, at * 10 + 9), touched, model.clone());
            models.push(model.clone());
        }
        (history, models)
    }

    #[test]
    fn kill_leaves_all_that_returned_and_perhaps_what_had_begun() {
        let (history, models) = history();
        let bounds = history.bounds(25, Crash::Kill, SimMedium::File);
        assert_eq!(bounds, (vec![1, 1], vec![2, 1]));
        let hash = |index: usize| tree_hash(&models[index].tree());
        assert!(history.find(&bounds, hash(2)).is_some() && history.find(&bounds, hash(3)).is_some());
        assert!(history.find(&bounds, hash(1)).is_none() && history.find(&bounds, hash(4)).is_none());
    }

    #[test]
    fn power_cut_may_take_sessions_apart_but_not_what_one_took_over_from_the_other() {
        let (mut history, models) = history();
        let bounds = history.bounds(40, Crash::PowerNone, SimMedium::File);
        assert_eq!(bounds, (vec![0, 0], vec![2, 2]));
        // The directory of session 1 requires the root as session 0 left it, and its write that of session 0.
        assert!(history.state(&vec![0, 1]).is_none());
        assert!(history.state(&vec![1, 2]).is_none());
        assert!(history.state(&vec![2, 1]).is_some());
        history.durable(Some(1), 20);
        let bounds = history.bounds(40, Crash::PowerNone, SimMedium::File);
        assert_eq!(bounds.0, vec![0, 1]);
        assert!(history.find(&bounds, tree_hash(&models[0].tree())).is_none());
    }
}
