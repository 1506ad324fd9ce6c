//! Whether a client's process still lives. Reads `/proc`; decides nothing.

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

    /// Whether the process still exists. A process that cannot be looked up counts as gone.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        start_time(self.pid).is_some_and(|start| self.start == 0 || start == self.start)
    }
}

/// Returns field 22 of `/proc/PID/stat`; `None` if there is no such process or it is a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold anything, so count from its last bracket.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
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
    groups_in(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?, uid)
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
    use super::{ProcessId, groups_in, groups_of};

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
