//! The three interfaces of the manager: a [`Tracker`] reports which pages were touched, a [`Policy`] decides,
//! an [`Actuator`] carries out.
//!
//! None knows the implementation of the others, so one policy runs over a kernel and over [`crate::sim`].

use crate::types::{HugeIndex, PageClass, PageKey, ProcId, TierId, UtilVector};

/// Observation of one page since the previous query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Unknown to the tracker (page gone, first query, outside its reach). Never treated as "idle".
    Unknown,
    /// Not touched.
    Idle,
    /// Read; or touched, if the tracker cannot distinguish reads from writes.
    Read,
    /// Written.
    Written,
}

/// Capabilities of a tracker, for people and for the choice among trackers.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TrackerInfo {
    /// Short name, as used in the policy file.
    pub name: &'static str,
    /// Bytes that one answer stands for.
    pub resolution_bytes: u64,
    /// Whether reads are seen.
    pub sees_reads: bool,
    /// Whether writes are distinguished from reads.
    pub tells_writes: bool,
    /// One sentence on its source and its blind spots.
    pub note: String,
}

/// Errors of a tracker.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// The kernel refuses or lacks the source; the message says which part failed and how to help.
    #[error("{tracker} tracker: {what}")]
    Unusable {
        /// The tracker's name.
        tracker: &'static str,
        /// The failure.
        what: String,
    },
}

/// Reports which pages were touched.
pub trait Tracker {
    /// Returns the capabilities of this tracker.
    fn info(&self) -> TrackerInfo;

    /// Appends, for each of `pages` in order, its touches since the last query, and re-arms it.
    ///
    /// # Errors
    /// The source as a whole failed. A single page that cannot be judged is [`Touch::Unknown`].
    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError>;
}

/// One thing to do to memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// Move a page to another tier.
    Move {
        /// The page.
        page: PageKey,
        /// The destination.
        to: TierId,
    },
    /// Write a page of the lowest tier back to storage (swap or its file).
    Evict {
        /// The page.
        page: PageKey,
    },
    /// Make one huge page of a region.
    Collapse {
        /// The process.
        proc: ProcId,
        /// The region.
        region: HugeIndex,
    },
    /// Split a region's huge page and give back the base pages that hold nothing.
    Split {
        /// The process.
        proc: ProcId,
        /// The region.
        region: HugeIndex,
        /// Pages known to hold data; the others may be freed.
        used: UtilVector,
    },
    /// Compact physical memory, about this much.
    Compact {
        /// Desired upper bound, in bytes; the kernel's interface may exceed it.
        bytes: u64,
    },
    /// Allow or deny same-page merging in a region.
    Sharing {
        /// The process.
        proc: ProcId,
        /// The region.
        region: HugeIndex,
        /// Whether identical pages may be merged.
        allow: bool,
    },
}

/// Outcome of an [`Action`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Carried out.
    Done,
    /// The page or process no longer exists and is to be forgotten.
    Gone,
    /// Locked, pinned or busy; a retry may succeed.
    Busy,
    /// No room at the destination, or no contiguous memory.
    NoMemory,
    /// The kernel or the privileges do not allow this at all.
    Unsupported,
}

/// Carries out decisions and locates pages.
pub trait Actuator {
    /// Returns a short name for people.
    fn name(&self) -> &'static str;
    /// Appends one outcome for each action, in order. `Done` only if the kernel confirmed it.
    fn apply(&mut self, actions: &[Action], out: &mut Vec<Outcome>);
    /// Appends for each page the tier that holds it, or `None` when it is not in memory.
    fn locate(&mut self, pages: &[PageKey], out: &mut Vec<Option<TierId>>);
    /// Returns which base pages of a region are in use at this moment; `None` when the actuator cannot tell.
    fn used_now(&mut self, _proc: ProcId, _region: HugeIndex) -> Option<UtilVector> {
        None
    }
    /// Returns how many base pages of a region are merged with identical pages; 0 when the actuator cannot
    /// tell.
    fn merged_now(&mut self, _proc: ProcId, _region: HugeIndex) -> u64 {
        0
    }
    /// Returns the number of free pages of a tier.
    fn free_pages(&mut self, tier: TierId) -> u64;
}

/// Finding of a survey about one 2 MiB region.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RegionSurvey {
    /// The process.
    pub proc: ProcId,
    /// The region.
    pub region: HugeIndex,
    /// Base pages that hold data (present and not the shared zero page). For a huge page all bits, unless its
    /// contents were read.
    pub used: UtilVector,
    /// Whether one huge page maps the region.
    pub huge: bool,
    /// Whether the whole region lies in one mapping that may become a huge page.
    pub eligible: bool,
    /// Anonymous or file.
    pub class: PageClass,
    /// Locked in memory: never moved.
    pub unevictable: bool,
}

/// State of the machine that policies use.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SystemView {
    /// Free memory fragmentation index for huge pages, 0 (unfragmented) to 1; `None` if unknown.
    pub fmfi: Option<f64>,
    /// Huge pages that could be allocated now without compaction.
    pub free_huge: u64,
    /// Bytes that can be allocated before reclaim hurts, of the machine or the tightest control group.
    pub available_bytes: u64,
    /// Total of the machine or control group that `available_bytes` refers to.
    pub total_bytes: u64,
}

/// Counts of one policy step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct StepReport {
    /// Pages whose reference state was queried.
    pub scanned: u64,
    /// Pages moved up.
    pub promoted: u64,
    /// Pages moved down.
    pub demoted: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Huge pages made.
    pub collapsed: u64,
    /// Huge pages split.
    pub split: u64,
    /// Actions that the kernel declined.
    pub failed: u64,
    /// Compaction rounds started.
    pub compactions: u64,
    /// Sharing permissions changed.
    pub sharing: u64,
}

impl StepReport {
    /// Adds another report, field by field.
    pub fn add(&mut self, other: &Self) {
        self.scanned += other.scanned;
        self.promoted += other.promoted;
        self.demoted += other.demoted;
        self.evicted += other.evicted;
        self.collapsed += other.collapsed;
        self.split += other.split;
        self.failed += other.failed;
        self.compactions += other.compactions;
        self.sharing += other.sharing;
    }
    /// Whether the step changed memory.
    pub fn changed(&self) -> bool {
        self.promoted + self.demoted + self.evicted + self.collapsed + self.split + self.sharing > 0
    }
}

/// Decides which pages to move, collapse, split or evict.
pub trait Policy {
    /// Returns a short name, as used in the policy file.
    fn name(&self) -> &'static str;
    /// Takes in the finding of a survey; an empty `used` vector means that the region holds no data.
    fn survey(&mut self, survey: &RegionSurvey, actuator: &mut dyn Actuator);
    /// Takes in the state of the machine.
    fn system(&mut self, view: &SystemView);
    /// Forgets a process.
    fn forget(&mut self, proc: ProcId);
    /// Returns the actions that restore a process' memory to its original state.
    fn undo(&self, proc: ProcId) -> Vec<Action>;
    /// Runs one step at time `now_ms`; does nothing when it is not due.
    ///
    /// # Errors
    /// The tracker failed as a whole.
    fn step(
        &mut self,
        now_ms: u64,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
    ) -> Result<StepReport, TrackerError>;
    /// Returns the time of the next step.
    fn next_due_ms(&self) -> u64;
    /// Returns the bytes of bookkeeping and the number of pages in it.
    fn metadata(&self) -> (u64, u64);
    /// Sets the most pages that one step may query; called by the governor of the tracking cost.
    fn set_scan_budget(&mut self, pages: u64);
}
