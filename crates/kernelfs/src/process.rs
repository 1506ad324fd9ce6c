//! Whether a client's process still lives. Reads `/proc`; decides nothing.

use std::fs;
use varve_media::numa::{self, Node};

/// A process, distinct from a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId {
    /// Number.
    pub pid: u32,
    /// Start time in clock ticks since boot; 0 if it was not known.
    pub start: u64,
}

impl ProcessId {
    /// Returns the process that has this number now.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self {
            pid,
            start: start_time(pid).unwrap_or(0),
        }
    }

    /// The NUMA node on which its first thread ran last; `None` where all memory is on one.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        if !numa::are_several() {
            return None;
        }
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        Node::of_processor(processor_of(&stat)?)
    }

    /// Whether the process still exists. A process that cannot be looked up counts as gone.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        start_time(self.pid).is_some_and(|start| self.start == 0 || start == self.start)
    }
}

/// The fields of `/proc/PID/stat` from the third on.
fn fields_from_state(stat: &str) -> Option<std::str::SplitAsciiWhitespace<'_>> {
    // The name in brackets may hold anything, so count from its last bracket.
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace())
}

/// Field 39 of `/proc/PID/stat`: the processor that the process ran on last.
fn processor_of(stat: &str) -> Option<usize> {
    fields_from_state(stat)?.nth(36)?.parse().ok()
}

/// Returns field 22 of `/proc/PID/stat`; `None` if there is no such process or it is a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = fields_from_state(&stat)?;
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Returns group and supplementary groups of a process, if it is one of user `uid`: the number of a process
/// that connected and ended may be another user's by now.
#[must_use]
pub fn groups_of(pid: u32, uid: u32) -> Option<(u32, Vec<u32>)> {
    groups_in(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, uid)
}

fn groups_in(status: &str, uid: u32) -> Option<(u32, Vec<u32>)> {
    let numbers = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(
            line.split_ascii_whitespace()
                .filter_map(|number| number.parse().ok())
                .collect::<Vec<u32>>(),
        )
    };
    // Columns: real, effective, saved, file system.
    if numbers("Uid:")?.get(1) != Some(&uid) {
        return None;
    }
    Some((*numbers("Gid:")?.get(1)?, numbers("Groups:")?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{ProcessId, groups_in, groups_of, processor_of};

    #[test]
    fn processor_is_found_behind_any_name() {
        let before = "7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0 18446744073709551615 ";
        let stat = format!("{before}1 1 0 0 0 0 0 0 0 0 0 0 17 3 0 0 0");
        assert_eq!(processor_of(&stat), Some(3));
        assert_eq!(processor_of("7 (a"), None);
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(processor_of(&own).is_some());
    }

    #[test]
    fn groups_are_those_of_a_process_of_the_same_user_only() {
        let status = "Name:\tx\nUid:\t1\t7\t7\t7\nGid:\t8\t9\t9\t9\nGroups:\t8 20 \n";
        assert_eq!(groups_in(status, 7), Some((9, vec![8, 20])));
        assert_eq!(groups_in(status, 1), None);
        assert!(groups_of(u32::MAX, 0).is_none());
    }

    #[test]
    fn process_is_told_from_a_later_one_with_its_number() {
        let own = ProcessId::of(std::process::id());
        assert!(own.start > 0 && own.is_alive());
        assert!(
            !ProcessId {
                start: own.start + 1,
                ..own
            }
            .is_alive()
        );
    }

    #[test]
    fn process_counts_as_gone_when_it_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = ProcessId::of(child.id());
        child.wait().unwrap();
        assert!(!id.is_alive());
    }
}
