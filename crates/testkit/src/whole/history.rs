//! The concurrent calls of clients, and a check that their results are possible: each call took effect at one
//! moment between its begin and its end, exactly as in the model. Owns the set of possible states; refuses to
//! know the callers.
//!
//! A call whose client died took effect once or not at all.

use crate::model::Model;
use crate::ops::{Op, Path};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// One call of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A change.
    Do(Op),
    /// Reads a whole file.
    Look(Path),
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Do(op) => write!(f, "{op}"),
            Self::Look(path) => write!(f, "look /{}", path.join("/")),
        }
    }
}

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Answer {
    /// Done.
    Done,
    /// Refused with this errno.
    Refused(i32),
    /// Hash of the bytes of a file; `None` if there is no file of that name.
    Seen(Option<u64>),
}

/// Hash of a file's bytes in [`Answer::Seen`].
#[must_use]
pub fn digest_of(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

/// Applies `call` to the model.
pub fn carry_out(model: &mut Model, call: &Call) -> Answer {
    match call {
        Call::Do(op) => match model.apply(op) {
            Ok(()) => Answer::Done,
            Err(errno) => Answer::Refused(errno),
        },
        Call::Look(path) => {
            let seen = model.tree().remove(&format!("/{}", path.join("/")));
            let file = seen.filter(|seen| seen.mode & libc::S_IFMT == libc::S_IFREG);
            Answer::Seen(file.map(|file| digest_of(&file.content)))
        }
    }
}

/// A possible state of the file system: the model, and the calls in progress that have already taken effect.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Possible {
    model: Model,
    done: BTreeMap<u64, Answer>,
}

/// The possible states after all calls so far.
pub struct History {
    possible: Vec<Possible>,
    under_way: BTreeMap<u64, Call>,
    next: u64,
    /// Largest number of states that were possible at once.
    pub most: usize,
}

/// Bound on the possible states; a test that exceeds it is too demanding.
const POSSIBLE_MAX: usize = 20_000;

impl History {
    /// A history without calls.
    #[must_use]
    pub fn new(model: Model) -> Self {
        Self {
            possible: vec![Possible {
                model,
                done: BTreeMap::new(),
            }],
            under_way: BTreeMap::new(),
            next: 0,
            most: 1,
        }
    }

    /// Begins a call; returns its number.
    pub fn begin(&mut self, call: Call) -> u64 {
        self.next += 1;
        self.under_way.insert(self.next, call);
        self.next
    }

    /// Ends a call with this answer.
    ///
    /// # Errors
    /// The answer is impossible: the call, and its possible answers.
    pub fn end(&mut self, number: u64, answer: Answer) -> Result<(), String> {
        let mut answers = HashSet::new();
        let mut kept = Vec::new();
        for mut state in self.all_possible() {
            match state.done.remove(&number) {
                Some(other) if other == answer => kept.push(state),
                Some(other) => {
                    answers.insert(other);
                }
                None => {}
            }
        }
        let call = self.under_way.remove(&number);
        if kept.is_empty() {
            let call = call.map_or_else(String::new, |call| call.to_string());
            return Err(format!(
                "{call} came to {answer:?}; it may have come to {answers:?}"
            ));
        }
        self.keep(kept)
    }

    /// Drops the calls in progress, whose callers died and get no answer: keeps the states in which the file
    /// system is as `is_seen` accepts it, so that each call has taken effect or never will.
    ///
    /// # Errors
    /// No possible state is accepted: one of them, as a model.
    pub fn settle(&mut self, is_seen: impl Fn(&Model) -> bool) -> Result<(), Box<Model>> {
        let all = self.all_possible();
        let nearest = all.iter().max_by_key(|state| state.done.len()).cloned();
        let mut kept: Vec<_> = all.into_iter().filter(|state| is_seen(&state.model)).collect();
        if kept.is_empty() {
            return Err(Box::new(nearest.map_or_else(Model::new, |state| state.model)));
        }
        self.under_way.clear();
        kept.iter_mut().for_each(|state| state.done.clear());
        self.keep(kept).map_err(|_| Box::new(Model::new()))
    }

    /// Number of calls in progress.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    fn keep(&mut self, states: Vec<Possible>) -> Result<(), String> {
        let mut known = HashSet::new();
        self.possible = states
            .into_iter()
            .filter(|state| known.insert(state.clone()))
            .collect();
        self.most = self.most.max(self.possible.len());
        if self.possible.len() > POSSIBLE_MAX {
            return Err(format!("{} states are possible", self.possible.len()));
        }
        Ok(())
    }

    /// Every state that calls in progress may have led to by now.
    fn all_possible(&self) -> Vec<Possible> {
        let mut known: HashSet<Possible> = self.possible.iter().cloned().collect();
        let mut left: VecDeque<_> = self.possible.iter().cloned().collect();
        let mut all = Vec::new();
        while let Some(state) = left.pop_front() {
            for (number, call) in &self.under_way {
                if !state.done.contains_key(number) {
                    let mut next = state.clone();
                    let answer = carry_out(&mut next.model, call);
                    next.done.insert(*number, answer);
                    if known.insert(next.clone()) {
                        left.push_back(next);
                    }
                }
            }
            all.push(state);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Answer, Call, History};
    use crate::model::Model;
    use crate::ops::{Op, write};

    fn create(name: &'static str) -> Call {
        Call::Do(Op::Create(vec![name]))
    }

    #[test]
    fn one_of_two_that_make_a_name_at_once_is_refused() {
        let mut history = History::new(Model::new());
        let (a, b) = (history.begin(create("f")), history.begin(create("f")));
        history.end(b, Answer::Done).unwrap();
        history.end(a, Answer::Refused(libc::EEXIST)).unwrap();
        let mut history = History::new(Model::new());
        let (a, b) = (history.begin(create("f")), history.begin(create("f")));
        history.end(b, Answer::Done).unwrap();
        assert!(history.end(a, Answer::Done).is_err(), "both made it");
    }

    #[test]
    fn what_has_returned_is_seen_by_all_who_look_later() {
        let mut history = History::new(Model::new());
        for call in [create("f"), Call::Do(write("f", 0, 10, 1))] {
            let number = history.begin(call);
            history.end(number, Answer::Done).unwrap();
        }
        let mut old = Model::new();
        old.apply(&Op::Create(vec!["f"])).unwrap();
        let stale = super::carry_out(&mut old, &Call::Look(vec!["f"]));
        let look = history.begin(Call::Look(vec!["f"]));
        assert!(history.end(look, stale).is_err());
    }

    #[test]
    fn call_of_a_dead_client_happens_once_or_never() {
        for happened in [false, true] {
            let mut history = History::new(Model::new());
            history.begin(create("f"));
            let mut seen = Model::new();
            if happened {
                seen.apply(&Op::Create(vec!["f"])).unwrap();
            }
            history.settle(|model| model.tree() == seen.tree()).unwrap();
            assert_eq!(history.under_way(), 0);
            let again = history.begin(create("f"));
            let answer = if happened {
                Answer::Refused(libc::EEXIST)
            } else {
                Answer::Done
            };
            history.end(again, answer).unwrap();
        }
    }
}
