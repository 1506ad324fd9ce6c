//! The journal with its two headers, blocks that change in place, blocks that get another life, and a unit
//! whose footer is written again: one metadata block, one free block and one unit, on a medium that may lose
//! or tear any write that is not synced, and lose one copy of the header for good. In every state the pool is
//! replayed in thought, with every choice of what was lost.

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
/// Copies of the header, and places for a unit's footer.
const COPIES: usize = 2;

/// What is half done: the writer's lock is held, so nothing else begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Half {
    /// A change whose record is written and which is not in place (or the other way round), or data that
    /// waits for its record.
    Change(usize, u8),
    /// A footer is written to this place, and waits for its record.
    Footer(usize, u8),
    /// A copy of the header is written: which, and what tail.
    Header(usize, u8),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    committed: [Life; BLOCKS],
    /// Which footer of the unit counts, and what it says; `None`: the unit was never sealed.
    row: Option<(usize, u8)>,
    footers: [u8; COPIES],
    /// What cannot be lost any more.
    durable: [u8; BLOCKS],
    /// Writes that may be lost, each for itself.
    pending: Vec<(usize, u8)>,
    /// Records in the ring: block and content, which is also the transaction's number.
    ring: Vec<(usize, u8)>,
    /// Number of the last record whose space in the ring was used again.
    overwritten: u8,
    /// The tail that each copy of the header tells.
    headers: [u8; COPIES],
    /// The tail that the allocators go by.
    tail: u8,
    /// The last transaction; also what the next one writes.
    newest: u8,
    under_way: Option<Half>,
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
    /// The unit is opened and sealed again: its footer is written.
    Seal,
    /// The record that names the data or the footer.
    Commit,
    /// In place is synced, and the first copy of the header written.
    Checkpoint,
    /// That copy is durable: the next one is written, or the journal is empty.
    Header,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    ReuseBeforeRelease,
    InPlaceBeforeRecord,
    TailBeforeSync,
    CommitBeforePayload,
    FreeBeforeCommit,
    /// The tail moves in one copy of the header; the other keeps the tail before it.
    TailInOneCopy,
    /// There is one copy that is ever written again.
    OneHeader,
    /// A unit has one place for its footer.
    OneFooter,
}

struct Journal(Wrong);

impl Journal {
    /// Whether a copy of the header may be lost for good. Where there is one, that is not what is asked: a
    /// torn one is enough.
    fn copies_go_bad(&self) -> bool {
        self.0 != Wrong::OneHeader
    }
}

impl State {
    /// A record is written, where there is space: over those before the tail.
    fn record(&mut self, block: usize, tx: u8) {
        let (tail, mut overwritten) = (self.tail, self.overwritten);
        self.ring.retain(|(_, tx)| {
            let gone = *tx <= tail;
            overwritten = if gone { overwritten.max(*tx) } else { overwritten };
            !gone
        });
        self.overwritten = overwritten;
        self.ring.push((block, tx));
        self.committed[block] = Life::Meta(tx);
    }

    /// Tails that a start may find, as the newest one that is told: no copy is lost, or one is, which is the
    /// torn one if there is such.
    fn tails(&self, copies_go_bad: bool) -> Vec<u8> {
        let newest = |headers: [u8; COPIES]| headers.into_iter().max().unwrap_or(0);
        let other = |headers: [u8; COPIES], lost: usize| headers[1 - lost];
        let mut found = Vec::new();
        let mut whole = vec![self.headers];
        if let Some(Half::Header(copy, tail)) = self.under_way {
            found.push(other(self.headers, copy));
            let mut written = self.headers;
            written[copy] = tail;
            whole.push(written);
        }
        for headers in whole {
            found.push(newest(headers));
            if copies_go_bad {
                found.extend([0, 1].map(|lost| other(headers, lost)));
            }
        }
        found
    }

    /// Whether the records since every tail that a start may find are there.
    fn all_records_are_there(&self, copies_go_bad: bool) -> bool {
        let mut tails = self.tails(copies_go_bad).into_iter();
        tails.all(|tail| tail >= self.overwritten)
    }

    /// Content after a crash that keeps those pending writes whose bit is set, and a replay from `tail`.
    fn replayed(&self, kept: u32, tail: u8) -> [u8; BLOCKS] {
        let mut blocks = self.durable;
        for (index, (block, content)) in self.pending.iter().enumerate() {
            if kept >> index & 1 == 1 {
                blocks[*block] = *content;
            }
        }
        for (block, content) in self.ring.iter().filter(|(_, tx)| *tx > tail) {
            blocks[*block] = *content;
        }
        blocks
    }

    fn blocks_are_right(&self, copies_go_bad: bool) -> bool {
        let mut replays = self
            .tails(copies_go_bad)
            .into_iter()
            .flat_map(|tail| (0..1 << self.pending.len()).map(move |kept| self.replayed(kept, tail)));
        replays.all(|blocks| {
            self.committed
                .iter()
                .zip(blocks)
                .all(|(life, content)| match life {
                    Life::Meta(wanted) | Life::Data(wanted) => *wanted == content,
                    Life::Free(_) => true,
                })
        })
    }

    /// A footer that is being written may say anything.
    fn footer_is_right(&self) -> bool {
        self.row.is_none_or(|(place, content)| {
            let torn = matches!(self.under_way, Some(Half::Footer(other, _)) if other == place);
            !torn && self.footers[place] == content
        })
    }
}

const RIGHT: &str = "every block has its committed content after a crash and a replay";
const STARTS: &str = "all records since the tail that a start finds are there";
const VERIFIED: &str = "the footer that counts is whole";

impl Model for Journal {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            committed: [Life::Meta(0), Life::Free(0)],
            row: None,
            footers: [0; COPIES],
            durable: [0; BLOCKS],
            pending: Vec::new(),
            ring: Vec::new(),
            overwritten: 0,
            headers: [0; COPIES],
            tail: 0,
            newest: 0,
            under_way: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if let Some(half) = state.under_way {
            actions.push(match half {
                Half::Header(..) => Action::Header,
                Half::Footer(..) => Action::Commit,
                Half::Change(block, _) => {
                    let data =
                        !matches!(state.committed[block], Life::Meta(_)) || self.0 == Wrong::FreeBeforeCommit;
                    let before = self.0 == Wrong::InPlaceBeforeRecord;
                    if data || before {
                        Action::Commit
                    } else {
                        Action::Place
                    }
                }
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
        actions.push(Action::Seal);
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
                    state.record(block, content);
                }
                state.under_way = Some(Half::Change(block, content));
            }
            Action::Place => {
                let Half::Change(block, content) = state.under_way.take()? else {
                    return None;
                };
                state.pending.push((block, content));
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
                    state.under_way = Some(Half::Change(block, content));
                }
            }
            Action::Seal => {
                state.newest += 1;
                let spare = match state.row {
                    Some((place, _)) if self.0 != Wrong::OneFooter => 1 - place,
                    _ => 0,
                };
                state.under_way = Some(Half::Footer(spare, state.newest));
            }
            Action::Commit => match state.under_way.take()? {
                Half::Change(block, content) if content > 100 => {
                    state.committed[block] = Life::Data(content);
                }
                Half::Change(block, content) => state.record(block, content),
                Half::Footer(place, content) => {
                    state.footers[place] = content;
                    state.row = Some((place, content));
                }
                Half::Header(..) => return None,
            },
            Action::Checkpoint => {
                if self.0 != Wrong::TailBeforeSync {
                    for (block, content) in std::mem::take(&mut state.pending) {
                        state.durable[block] = content;
                    }
                }
                let older = usize::from(state.headers[1] < state.headers[0]);
                let copy = if self.0 == Wrong::TailInOneCopy { older } else { 0 };
                state.under_way = Some(Half::Header(copy, state.newest));
            }
            Action::Header => {
                let Half::Header(copy, tail) = state.under_way.take()? else {
                    return None;
                };
                state.headers[copy] = tail;
                if copy == 0 && !matches!(self.0, Wrong::TailInOneCopy | Wrong::OneHeader) {
                    state.under_way = Some(Half::Header(1, tail));
                } else {
                    state.tail = tail;
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(RIGHT, |model, state: &State| {
                state.blocks_are_right(model.copies_go_bad())
            }),
            Property::always(STARTS, |model, state: &State| {
                state.all_records_are_there(model.copies_go_bad())
            }),
            Property::always(VERIFIED, |_, state: &State| state.footer_is_right()),
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

#[test]
fn tail_in_one_copy_of_the_header_replays_over_a_block_with_another_life_when_that_copy_is_lost() {
    let steps = fails(Journal(Wrong::TailInOneCopy), RIGHT);
    let life = [
        "Record(0)",
        "Place",
        "Free(0)",
        "Checkpoint",
        "Header",
        "Write(0)",
        "Commit",
    ];
    assert_eq!(steps, life);
}

#[test]
fn tail_in_one_copy_of_the_header_is_older_than_the_ring_when_that_copy_is_lost() {
    let steps = fails(Journal(Wrong::TailInOneCopy), STARTS);
    assert_eq!(steps, ["Record(0)", "Place", "Checkpoint", "Header", "Record(0)"]);
}

#[test]
fn only_header_that_is_overwritten_leaves_an_old_tail_when_it_is_torn() {
    let steps = fails(Journal(Wrong::OneHeader), STARTS);
    assert_eq!(steps.last().map(String::as_str), Some("Checkpoint"), "{steps:?}");
}

#[test]
fn footer_that_is_overwritten_before_its_commit_leaves_blocks_that_cannot_be_verified() {
    let steps = fails(Journal(Wrong::OneFooter), VERIFIED);
    assert_eq!(steps, ["Seal", "Commit", "Seal"]);
}
