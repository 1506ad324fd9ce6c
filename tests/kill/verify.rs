//! Judges what a crash left: every writer's directory must be as after some number of its calls, at least
//! those that were acknowledged (or made durable), at most those that had begun; and across writers the cause
//! must be there with the effect.

use crate::calls::{Call, Calls, State, slot_offset, syncs, whole_record};
use crate::ledger::{Entry, SHORT, WRONG};
use std::collections::{BTreeMap, BTreeSet};

/// Where the kernel may cut a write into requests: at pages.
const REQUEST_ALIGN: usize = 4096;

/// What must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Everything that returned, and no call may have failed.
    Undisturbed,
    /// Everything that returned; the last call may have failed or not returned.
    Returned,
    /// What returned before an fsync of the same session began, and a causal prefix of the rest.
    Synced,
}

/// One writer's round.
pub struct Story {
    /// Which writer.
    pub writer: u32,
    /// Through the kernel, which makes one write several requests where it begins within a page that it has
    /// not cached.
    pub mounted: bool,
    /// Its directory before the round.
    pub before: State,
    /// The seed and number of the round.
    pub calls: (u64, u32),
    /// Its ledger.
    pub entries: Vec<Entry>,
    /// Its directory now.
    pub found: BTreeMap<String, Vec<u8>>,
}

/// What a group of writers of one session did: for the summary.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    /// Calls that returned.
    pub returned: u64,
    /// Calls that had to be there.
    pub promised: u64,
    /// Calls that had returned and were lost, which a power cut may do.
    pub lost: u64,
    /// Daemons that were killed before they served.
    pub recovering: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.returned += other.returned;
        self.promised += other.promised;
        self.lost += other.lost;
        self.recovering += other.recovering;
    }
}

/// After which numbers of calls the directory would be as it was found. Where a call is there in part,
/// `first` counts it and `last` does not.
struct Matches {
    first: usize,
    last: usize,
}

/// Judges the writers of one session together.
///
/// # Errors
/// What is wrong, for a person.
pub fn judge(stories: &[Story], promise: Promise) -> Result<Tally, String> {
    let mut tally = Tally::default();
    let mut matches = Vec::new();
    for story in stories {
        let returned = acknowledged(story, promise)?;
        let least = match promise {
            Promise::Undisturbed | Promise::Returned => returned,
            Promise::Synced => synced(story, stories).min(returned),
        };
        let found = search(story, least)?;
        tally.returned += returned as u64;
        tally.promised += least as u64;
        tally.lost += returned.saturating_sub(found.last) as u64;
        matches.push(found);
    }
    for (effect, found) in stories.iter().zip(&matches) {
        if found.first == 0 {
            continue;
        }
        let began = effect.entries[found.first - 1].began;
        for (cause, kept) in stories.iter().zip(&matches) {
            let before = returned_before(cause, began);
            if kept.last < before {
                return Err(format!(
                    "writer {}: call {} of {before} is lost, though it had returned before call {} of \
                    writer {} began, which is \
                     there",
                    cause.writer,
                    kept.last,
                    found.first - 1,
                    effect.writer
                ));
            }
        }
    }
    Ok(tally)
}

/// How many calls were acknowledged. An error if a call that is none of the crash's returned something wrong.
fn acknowledged(story: &Story, promise: Promise) -> Result<usize, String> {
    let mut state = story.before.clone();
    let calls = Calls::new(story.calls.0, story.writer, story.calls.1);
    for (at, (entry, call)) in story.entries.iter().zip(calls).enumerate() {
        let last = at + 1 == story.entries.len();
        let (must, _) = state.apply(&call);
        let outcome = match entry.ended {
            Some((_, errno)) if i32::from(errno) == must => continue,
            Some((_, WRONG)) => "returned something wrong".to_owned(),
            Some((_, errno)) if errno >= SHORT => format!("took {} bytes only", errno - SHORT),
            Some((_, errno)) => format!("failed with errno {errno}, not {must}"),
            None => "did not return".to_owned(),
        };
        let wrong =
            matches!(entry.ended, Some((_, errno)) if errno == WRONG || errno >= SHORT && !story.mounted);
        if wrong || !last || promise == Promise::Undisturbed {
            return Err(format!(
                "writer {}: call {at} {} {outcome}",
                story.writer,
                brief(&call)
            ));
        }
        return Ok(at);
    }
    Ok(story.entries.len())
}

/// How many calls of a writer had returned before a tick.
fn returned_before(story: &Story, tick: u64) -> usize {
    let before = |entry: &Entry| entry.ended.is_some_and(|(end, _)| end < tick);
    story.entries.iter().take_while(|entry| before(entry)).count()
}

/// How many calls of a writer the fsyncs of all writers of the session cover.
fn synced(story: &Story, stories: &[Story]) -> usize {
    let mut most = 0;
    for other in stories {
        let calls = Calls::new(other.calls.0, other.writer, other.calls.1);
        let done = other
            .entries
            .iter()
            .zip(calls)
            .filter(|(entry, call)| syncs(call) && entry.ended.is_some_and(|(_, errno)| errno == 0));
        if let Some((entry, _)) = done.last() {
            most = most.max(returned_before(story, entry.began));
        }
    }
    most
}

/// Looks for the numbers of calls, from `least`, after which the directory would be as found.
fn search(story: &Story, least: usize) -> Result<Matches, String> {
    let mut state = story.before.clone();
    let differs = |state: &State, name: &str| state.files.get(name) != story.found.get(name);
    let names: BTreeSet<&String> = state.files.keys().chain(story.found.keys()).collect();
    let mut wrong: BTreeSet<String> = names
        .into_iter()
        .filter(|name| differs(&state, name))
        .cloned()
        .collect();
    let mut found: Option<Matches> = None;
    let mut closest = (usize::MAX, 0, String::new(), BTreeSet::new());
    let mut calls = Calls::new(story.calls.0, story.writer, story.calls.1);
    for done in 0..=story.entries.len() {
        if done > 0 {
            let call = calls.next().expect("calls without end");
            if story.mounted && done > least && wrong.len() <= 1 && found.is_none() {
                let parts = state.parts(&call, REQUEST_ALIGN);
                let fits = |(name, body): &(String, Vec<u8>)| {
                    wrong.iter().all(|other| other == name) && story.found.get(name) == Some(body)
                };
                if parts.iter().any(fits) {
                    found = Some(Matches {
                        first: done,
                        last: done - 1,
                    });
                }
            }
            let (_, touched) = state.apply(&call);
            for name in touched {
                if differs(&state, &name) {
                    wrong.insert(name);
                } else {
                    wrong.remove(&name);
                }
            }
        }
        if done < least {
            continue;
        }
        if wrong.is_empty() {
            let first = found.map_or(done, |found| found.first);
            found = Some(Matches { first, last: done });
        } else if wrong.len() < closest.0 {
            closest = (wrong.len(), done, describe(&state, story, &wrong), wrong.clone());
        }
    }
    found.ok_or_else(|| {
        format!(
            "writer {}: the directory is not as after {least} to {} calls; after {} calls these would \
            differ:\n{}\nthe calls \
             around them:\n{}\nthe calls on them:\n{}",
            story.writer,
            story.entries.len(),
            closest.1,
            closest.2,
            around(story, closest.1),
            touching(story, &closest.3)
        )
    })
}

fn describe(state: &State, story: &Story, wrong: &BTreeSet<String>) -> String {
    let lines = wrong.iter().map(|name| {
        let shown = |body: Option<&Vec<u8>>| body.map_or_else(|| "nothing".to_owned(), |body| records(body));
        let (must, is) = (state.files.get(name), story.found.get(name));
        let at = match (must, is) {
            (Some(must), Some(is)) => must.iter().zip(is).position(|(a, b)| a != b),
            _ => None,
        };
        let mut line = format!(
            "  {name}: must be {}, is {}, first other byte {at:?}",
            shown(must),
            shown(is)
        );
        if let (Some(must), Some(is), "slots") = (must, is, name.as_str()) {
            line.push_str(&slots(must, is));
        }
        line
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The slots that differ.
fn slots(must: &[u8], is: &[u8]) -> String {
    let each = slot_offset(1) as usize;
    let pairs = must.chunks(each).zip(is.chunks(each)).enumerate();
    let pairs = pairs.filter(|(_, (must, is))| must != is);
    pairs
        .map(|(slot, (must, is))| {
            let other = must.iter().zip(is).filter(|(a, b)| a != b).count();
            format!(
                "\n    slot {slot}: must be {}, is {}, {other} bytes differ",
                records(must),
                records(is)
            )
        })
        .collect()
}

/// The records of a file, from the first to the one that is not whole.
fn records(body: &[u8]) -> String {
    let mut at = 0;
    let mut names = Vec::new();
    while let Some((name, len)) = whole_record(&body[at..]) {
        names.push(name);
        at += len;
    }
    let tail = if at < body.len() {
        format!(", then no whole record from byte {at}")
    } else {
        String::new()
    };
    let list = match names.as_slice() {
        [] => "no record".to_owned(),
        [one] => format!("record {one}"),
        [first, .., last] => format!("{} records {first} to {last}", names.len()),
    };
    format!("{} bytes ({list}{tail})", body.len())
}

fn line(n: usize, entry: &Entry, call: &Call) -> String {
    format!(
        "  {n}: {} began {} ended {:?}",
        brief(call),
        entry.began,
        entry.ended
    )
}

/// The last calls that changed some of these files.
fn touching(story: &Story, names: &BTreeSet<String>) -> String {
    let mut state = story.before.clone();
    let calls = Calls::new(story.calls.0, story.writer, story.calls.1);
    let mut lines = Vec::new();
    for (n, (entry, call)) in story.entries.iter().zip(calls).enumerate() {
        if state.apply(&call).1.iter().any(|name| names.contains(name)) {
            lines.push(line(n, entry, &call));
        }
    }
    let from = lines.len().saturating_sub(40);
    lines[from..].join("\n")
}

fn around(story: &Story, at: usize) -> String {
    let calls = Calls::new(story.calls.0, story.writer, story.calls.1);
    let from = at.saturating_sub(12);
    let lines = story
        .entries
        .iter()
        .zip(calls)
        .enumerate()
        .skip(from)
        .take(24)
        .map(|(n, (entry, call))| line(n, entry, &call));
    lines.collect::<Vec<_>>().join("\n")
}

fn brief(call: &Call) -> String {
    match call {
        Call::Append(body) => format!("append {}", records(body)),
        Call::Fill(body) => format!("fill {}", records(body)),
        Call::Put(slot, body) => format!("put into slot {slot} {}", records(body)),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
fn story(done: usize, kept: usize) -> Story {
    let entries = (0..done as u64).map(|n| Entry {
        began: 2 * n + 1,
        ended: Some((2 * n + 2, 0)),
    });
    let mut state = State::default();
    let mut errnos = Vec::new();
    for (n, call) in Calls::new(5, 1, 1).take(done).enumerate() {
        let mut later = state.clone();
        errnos.push(later.apply(&call).0);
        if n < kept {
            state = later;
        }
    }
    let mut full = State::default();
    let entries = entries
        .zip(Calls::new(5, 1, 1))
        .map(|(entry, call)| Entry {
            ended: entry.ended.map(|(tick, _)| (tick, full.apply(&call).0 as u16)),
            ..entry
        })
        .collect();
    Story {
        writer: 1,
        mounted: false,
        before: State::default(),
        calls: (5, 1),
        entries,
        found: state.files,
    }
}

#[test]
fn lost_call_is_found_unless_the_power_was_cut() {
    assert!(judge(&[story(300, 300)], Promise::Undisturbed).is_ok());
    let changing = (200..300)
        .rev()
        .find(|&kept| judge(&[story(300, kept)], Promise::Returned).is_err());
    let kept = changing.expect("a call whose loss shows");
    let synced = synced(&story(300, kept), &[story(300, kept)]);
    assert!(synced < kept, "an fsync lies before it");
    assert!(judge(&[story(300, kept)], Promise::Synced).is_ok());
    let early = story(300, synced - 40);
    assert!(
        judge(&[early], Promise::Synced).is_err(),
        "what was made durable is lost"
    );
}

#[test]
fn torn_record_is_found() {
    let mut torn = story(300, 300);
    let log = torn.found.get_mut("log").expect("a log");
    let end = log.len() - 1;
    log.truncate(end);
    assert!(judge(&[torn], Promise::Synced).is_err());
}
