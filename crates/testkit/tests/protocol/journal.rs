//! The journal, blocks that change in place, and blocks that get another life: one metadata block and one free block, on a medium that may
//! lose any write that is not synced. In every state the pool is replayed in thought, with every choice of what was lost.

use super::{fails, holds};
use stateright::{Model, Property};

/// What the committed state says of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Life {
    Meta(u8),
    Data(u8),
    /// Freed by this transaction.
    Free(u8),
}

const BLOCKS: usize = 2;
const LAST: u8 = 5;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    committed: [Life; BLOCKS],
    /// What cannot be lost any more.
    durable: [u8; BLOCKS],
    /// Writes that may be lost, each for itself.
    pending: Vec<(usize, u8)>,
    /// Records since the tail: block and content.
    journal: Vec<(usize, u8)>,
    /// Transactions before the tail.
    tail: u8,
    /// The last transaction; also what the next one writes.
    newest: u8,
    /// A change whose record is written and which is not in place (or the other way round), or data that waits for its record.
    under_way: Option<(usize, u8)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    /// A metadata block changes: the record is written.
    Record(usize),
    /// The change is put in place.
    Place,
    /// The block is freed.
    Free(usize),
    /// Data is written to a free block.
    Write(usize),
    /// The record that names the data.
    Commit,
    /// In place is synced, and the journal emptied.
    Checkpoint,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    ReuseBeforeRelease,
    InPlaceBeforeRecord,
    TailBeforeSync,
    CommitBeforePayload,
    FreeBeforeCommit,
}

struct Journal(Wrong);

impl State {
    /// Content after a crash that keeps those pending writes whose bit is set, and a replay.
    fn replayed(&self, kept: u32) -> [u8; BLOCKS] {
        let mut blocks = self.durable;
        for (index, (block, content)) in self.pending.iter().enumerate() {
            if kept >> index & 1 == 1 {
                blocks[*block] = *content;
            }
        }
        for (block, content) in &self.journal {
            blocks[*block] = *content;
        }
        blocks
    }

    fn is_right(&self) -> bool {
        (0..1 << self.pending.len()).all(|kept| {
            let blocks = self.replayed(kept);
            self.committed
                .iter()
                .zip(blocks)
                .all(|(life, content)| match life {
                    Life::Meta(wanted) | Life::Data(wanted) => *wanted == content,
                    Life::Free(_) => true,
                })
        })
    }
}

const RIGHT: &str = "every block has its committed content after a crash and a replay";

impl Model for Journal {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            committed: [Life::Meta(0), Life::Free(0)],
            durable: [0; BLOCKS],
            pending: Vec::new(),
            journal: Vec::new(),
            tail: 0,
            newest: 0,
            under_way: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if let Some((block, _)) = state.under_way {
            let data = !matches!(state.committed[block], Life::Meta(_)) || self.0 == Wrong::FreeBeforeCommit;
            let before = self.0 == Wrong::InPlaceBeforeRecord;
            actions.push(if data || before {
                Action::Commit
            } else {
                Action::Place
            });
            return;
        }
        actions.push(Action::Checkpoint);
        if state.newest >= LAST {
            return;
        }
        for (block, life) in state.committed.iter().enumerate() {
            match life {
                Life::Meta(_) if self.0 == Wrong::FreeBeforeCommit => actions.push(Action::Write(block)),
                Life::Meta(_) => actions.extend([Action::Record(block), Action::Free(block)]),
                Life::Data(_) => actions.push(Action::Free(block)),
                Life::Free(tx) if *tx <= state.tail || self.0 == Wrong::ReuseBeforeRelease => {
                    actions.push(Action::Write(block));
                }
                Life::Free(_) => {}
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Record(block) => {
                state.newest += 1;
                let content = state.newest;
                if self.0 == Wrong::InPlaceBeforeRecord {
                    state.pending.push((block, content));
                } else {
                    state.journal.push((block, content));
                    state.committed[block] = Life::Meta(content);
                }
                state.under_way = Some((block, content));
            }
            Action::Place => {
                let change = state.under_way.take()?;
                state.pending.push(change);
            }
            Action::Free(block) => {
                state.newest += 1;
                state.committed[block] = Life::Free(state.newest);
            }
            Action::Write(block) => {
                state.newest += 1;
                let content = state.newest + 100;
                if self.0 == Wrong::CommitBeforePayload {
                    state.committed[block] = Life::Data(content);
                    state.pending.push((block, content));
                } else {
                    // Written and synced, with whatever else was pending there.
                    state.pending.retain(|(other, _)| *other != block);
                    state.durable[block] = content;
                    state.under_way = Some((block, content));
                }
            }
            Action::Commit => {
                let (block, content) = state.under_way.take()?;
                if content > 100 {
                    state.committed[block] = Life::Data(content);
                } else {
                    state.journal.push((block, content));
                    state.committed[block] = Life::Meta(content);
                }
            }
            Action::Checkpoint => {
                if self.0 != Wrong::TailBeforeSync {
                    for (block, content) in std::mem::take(&mut state.pending) {
                        state.durable[block] = content;
                    }
                }
                state.journal.clear();
                state.tail = state.newest;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(RIGHT, |_, state: &State| state.is_right()),
            Property::sometimes("a block gets another life", |_, state: &State| {
                matches!(state.committed[0], Life::Data(_))
            }),
        ]
    }
}

#[test]
fn journal_and_blocks_agree_in_all_states() {
    holds(Journal(Wrong::Nothing));
}

#[test]
fn block_reused_before_its_release_is_overwritten_by_the_replay() {
    let steps = fails(Journal(Wrong::ReuseBeforeRelease), RIGHT);
    assert_eq!(steps, ["Record(0)", "Place", "Free(0)", "Write(0)", "Commit"]);
}

#[test]
fn change_in_place_before_its_record_shows_what_was_not_committed() {
    assert_eq!(fails(Journal(Wrong::InPlaceBeforeRecord), RIGHT), ["Record(0)"]);
}

#[test]
fn tail_that_moves_before_the_sync_loses_what_was_committed() {
    let steps = fails(Journal(Wrong::TailBeforeSync), RIGHT);
    assert_eq!(steps, ["Record(0)", "Place", "Checkpoint"]);
}

#[test]
fn commit_before_its_payload_names_what_is_not_there() {
    assert_eq!(fails(Journal(Wrong::CommitBeforePayload), RIGHT), ["Write(1)"]);
}

#[test]
fn block_given_out_before_the_commit_that_frees_it_destroys_what_is_committed() {
    assert_eq!(fails(Journal(Wrong::FreeBeforeCommit), RIGHT), ["Write(0)"]);
}
