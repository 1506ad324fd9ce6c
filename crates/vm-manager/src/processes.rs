//! The processes under management: handles that survive pid reuse, and their page maps.
//!
//! Owns the set of managed processes. Refuses to know the operations on them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use crate::coop::CoopLink;
use crate::sys::{Pagemap, ProcessHandle};
use crate::types::{PageKey, Pid, ProcId};

/// One managed process.
#[derive(Debug)]
pub struct Process {
    /// Its pid when it was added.
    pub pid: Pid,
    /// A handle that stays bound to this process when its pid is reused.
    pub handle: ProcessHandle,
    /// Its page map.
    pub pagemap: Pagemap,
    /// Its name, for messages.
    pub name: String,
    /// The connection to its cooperating thread, if any.
    pub coop: Option<CoopLink>,
}

/// All managed processes.
#[derive(Debug, Default)]
pub struct Processes {
    map: BTreeMap<ProcId, Process>,
    next: u16,
}

/// Shared by survey, tracker and actuator, which run one after the other on one thread.
pub type SharedProcesses = Rc<RefCell<Processes>>;

impl Processes {
    /// Adds a process; returns its number, which is the old one if the process is already managed.
    ///
    /// # Errors
    /// The kernel's errno: `ESRCH` if it has ended, `EACCES` if it belongs to another user, `EMFILE` without
    /// free descriptors, `EUSERS` past 65,535 processes.
    pub fn add(&mut self, pid: Pid) -> io::Result<ProcId> {
        if let Some(id) = self.find(pid) {
            return Ok(id);
        }
        let handle = ProcessHandle::open(pid)?;
        let pagemap = Pagemap::open(pid)?;
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .unwrap_or_default()
            .trim()
            .to_owned();
        let free = (0..=u16::MAX)
            .map(|n| self.next.wrapping_add(n))
            .find(|n| !self.map.contains_key(&ProcId(*n)));
        let id = ProcId(free.ok_or_else(|| io::Error::from_raw_os_error(libc::EUSERS))?);
        self.next = id.0.wrapping_add(1);
        self.map.insert(
            id,
            Process {
                pid,
                handle,
                pagemap,
                name,
                coop: None,
            },
        );
        Ok(id)
    }

    /// Returns the number of a managed pid, unless the pid was reused by another process.
    pub fn find(&self, pid: Pid) -> Option<ProcId> {
        self.map
            .iter()
            .find(|(_, p)| p.pid == pid && p.handle.alive())
            .map(|(id, _)| *id)
    }

    /// Returns a process by number.
    pub fn get(&self, id: ProcId) -> Option<&Process> {
        self.map.get(&id)
    }

    /// Returns a process by number, to change its cooperation.
    pub fn get_mut(&mut self, id: ProcId) -> Option<&mut Process> {
        self.map.get_mut(&id)
    }

    /// Removes the processes that have ended; returns their numbers.
    pub fn reap(&mut self) -> Vec<ProcId> {
        let gone: Vec<ProcId> = self
            .map
            .iter()
            .filter(|(_, p)| !p.handle.alive())
            .map(|(id, _)| *id)
            .collect();
        for id in &gone {
            self.map.remove(id);
        }
        gone
    }

    /// Removes one process.
    pub fn remove(&mut self, id: ProcId) {
        self.map.remove(&id);
    }

    /// Iterates over all processes.
    pub fn iter(&self) -> impl Iterator<Item = (ProcId, &Process)> {
        self.map.iter().map(|(id, p)| (*id, p))
    }

    /// Whether no process is managed.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Appends the page frame of each page; `None` when it is not in memory or the kernel hides frames from
    /// us.
    pub fn frames(&self, pages: &[PageKey], out: &mut Vec<Option<u64>>) {
        const PRESENT: u64 = 1 << 63;
        const FRAME: u64 = (1 << 55) - 1;
        let mut i = 0;
        while i < pages.len() {
            // Lists mostly hold neighbours in rising order: one read serves them.
            let next_to = |n: &usize| {
                pages[*n].proc == pages[i].proc && pages[*n].page.0 == pages[i].page.0 + (*n - i) as u64
            };
            let count = (i + 1..pages.len().min(i + 4096)).take_while(next_to).count() + 1;
            let map = self.get(pages[i].proc).map(|p| &p.pagemap);
            let entries = map
                .and_then(|m| m.entries(pages[i].page, count).ok())
                .unwrap_or_default();
            let frame = |e: &u64| (*e & PRESENT != 0 && *e & FRAME != 0).then_some(*e & FRAME);
            out.extend((0..count).map(|n| entries.get(n).and_then(frame)));
            i += count;
        }
    }
}

/// Returns the pids in a control group (v1 or v2) and its descendants.
///
/// # Errors
/// The directory has no `cgroup.procs`.
pub fn cgroup_pids(path: &std::path::Path) -> io::Result<Vec<Pid>> {
    let text = std::fs::read_to_string(path.join("cgroup.procs"))?;
    let mut pids: Vec<Pid> = text
        .lines()
        .filter_map(|l| l.trim().parse().ok().map(Pid))
        .collect();
    for entry in std::fs::read_dir(path)?.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            pids.extend(cgroup_pids(&entry.path()).unwrap_or_default());
        }
    }
    Ok(pids)
}

/// Returns the descendants of a process; bounded, so that a fork bomb does not exhaust the manager.
pub fn descendants(pid: Pid) -> Vec<Pid> {
    const MOST: usize = 1024;
    let mut found = Vec::new();
    let mut open = vec![pid];
    while let Some(pid) = open.pop() {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
            continue;
        };
        for task in tasks.flatten() {
            let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in text
                .split_ascii_whitespace()
                .filter_map(|w| w.parse().ok().map(Pid))
            {
                if found.len() >= MOST {
                    return found;
                }
                found.push(child);
                open.push(child);
            }
        }
    }
    found
}
