//! On which NUMA node memory is allocated: that of the processor whose program will write to it.
//!
//! Stores to memory of another socket take longer, and share the link between the sockets with all others.
//! A machine with one node is asked nothing more, and its policies are left alone.

use crate::sys;
use once_cell::race::OnceBox;
use std::fs;
use std::path::Path;

/// A node, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node(u32);

/// The node of each processor.
#[derive(Debug, Default, PartialEq, Eq)]
struct Nodes {
    /// By processor; empty if all memory is on one node.
    of_processor: Vec<Option<Node>>,
}

impl Nodes {
    /// Reads `/sys/devices/system/node`, or a directory of that form.
    fn read(dir: &Path) -> Self {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let number = name
                .to_str()
                .and_then(|name| name.strip_prefix("node")?.parse().ok());
            if let Some(number) = number {
                let processors = fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
                found.push((Node(number), processors));
            }
        }
        let mut nodes = Self::default();
        if found.len() < 2 {
            return nodes;
        }
        for (node, list) in &found {
            for processor in processors(list) {
                if nodes.of_processor.len() <= processor {
                    nodes.of_processor.resize(processor + 1, None);
                }
                nodes.of_processor[processor] = Some(*node);
            }
        }
        nodes
    }
}

/// Most processors of a machine that are looked at.
const PROCESSORS_MAX: usize = 1 << 16;

/// The processors of a list such as `0-3,8`. What is no list has none.
fn processors(list: &str) -> impl Iterator<Item = usize> + '_ {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse::<usize>().ok()?.min(PROCESSORS_MAX))
    });
    ranges.flatten()
}

/// The nodes of this machine.
fn nodes() -> &'static Nodes {
    static NODES: OnceBox<Nodes> = OnceBox::new();
    NODES.get_or_init(|| Box::new(Nodes::read(Path::new("/sys/devices/system/node"))))
}

/// Whether this machine has several nodes.
#[must_use]
pub fn are_several() -> bool {
    !nodes().of_processor.is_empty()
}

impl Node {
    /// The node of a processor; `None` where all memory is on one, or it is not known.
    #[must_use]
    pub fn of_processor(processor: usize) -> Option<Self> {
        nodes().of_processor.get(processor).copied().flatten()
    }

    /// Runs `allocate`, whose memory (also that of files in memory) comes from this node as long as it has
    /// some free, else from any. An operator's own choice (`numactl`) is left as it is.
    pub fn prefer<T>(self, allocate: impl FnOnce() -> T) -> T {
        let chosen = sys::prefer_node(self.0);
        let done = allocate();
        if chosen {
            sys::prefer_near_node();
        }
        done
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::{Node, Nodes};
    use std::fs;

    fn machine(nodes: &[(&str, &str)]) -> Nodes {
        let dir = tempfile::tempdir().unwrap();
        for (name, processors) in nodes {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("cpulist"), processors).unwrap();
        }
        fs::write(dir.path().join("online"), "0-1\n").unwrap();
        Nodes::read(dir.path())
    }

    #[test]
    fn processors_belong_to_the_nodes_that_list_them() {
        let nodes = machine(&[
            ("node0", "0-1,4\n"),
            ("node1", "2\n"),
            ("node2", "\n"),
            ("node", "7\n"),
        ]);
        let expected = [Some(0), Some(0), Some(1), None, Some(0)].map(|node| node.map(Node));
        assert_eq!(nodes.of_processor, expected);
    }

    #[test]
    fn machine_with_one_node_or_none_is_left_alone() {
        assert_eq!(machine(&[("node0", "0-63\n")]), Nodes::default());
        assert_eq!(machine(&[]), Nodes::default());
    }

    #[test]
    fn list_that_is_none_has_no_processors() {
        for list in ["x\n", "3-1\n", "-\n", "1-x\n"] {
            assert_eq!(
                machine(&[("node0", list), ("node1", list)]),
                Nodes::default(),
                "{list:?}"
            );
        }
    }

    #[test]
    fn preference_ends_with_the_allocation_and_leaves_another_one_alone() {
        // Threads of their own: the policy is the thread's.
        let seen = std::thread::spawn(|| {
            let within = Node(0).prefer(crate::sys::memory_policy);
            (within, crate::sys::memory_policy())
        });
        assert_eq!(
            seen.join().unwrap(),
            (Some(libc::MPOL_PREFERRED), Some(libc::MPOL_DEFAULT))
        );
        let nested = std::thread::spawn(|| {
            Node(0).prefer(|| {
                Node(0).prefer(|| ());
                crate::sys::memory_policy()
            })
        });
        assert_eq!(nested.join().unwrap(), Some(libc::MPOL_PREFERRED));
    }
}
