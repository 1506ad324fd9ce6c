//! The three seams of the manager: a [`Tracker`] says which pages were touched, a [`Policy`] decides, an
//! [`Actuator`] carries out.
//!
//! Each refuses to know the others' kind: the same policy code runs over a kernel and over [`crate::sim`].

use crate::types::{HugeIndex, PageClass, PageKey, ProcId, TierId, UtilVector};

/// What a tracker saw of one page since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// The tracker cannot tell (page gone, first look, outside its reach). Never read as "idle".
    Unknown,
    /// Not touched.
    Idle,
    /// Touched; the tracker does not tell reads from writes, or it was a read.
    Read,
    /// Written.
    Written,
}

/// What a tracker can see, for people and for the choice among trackers.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TrackerInfo {
    /// Short name, as used in the policy file.
    pub name: &'static str,
    /// Bytes that one answer stands for.
    pub resolution_bytes: u64,
    /// Whether reads are seen.
    pub sees_reads: bool,
    /// Whether writes are told from reads.
    pub tells_writes: bool,
    /// In one sentence, what it works on and where it is blind.
    pub note: String,
}

/// Why a tracker could not look.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// The kernel refused or lacks it; the message says what and what would help.
    #[error("{tracker} tracker: {what}")]
    Unusable {
        /// The tracker's name.
        tracker: &'static str,
        /// What failed.
        what: String,
    },
}

/// Which pages were touched.
pub trait Tracker {
    /// What this tracker sees.
    fn info(&self) -> TrackerInfo;

    /// Appends, for each of `pages` in order, what happened to it since the last question, and re-arms it.
    ///
    /// # Errors
    /// When the source as a whole failed. A single page that cannot be judged is [`Touch::Unknown`].
    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError>;
}

/// One thing to do to memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// Move a page to another tier.
    Move {
        /// The page.
        page: PageKey,
        /// Where to.
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
        /// Upper bound wished for, in bytes; the kernel's interface may do more and the outcome tells.
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

/// What became of an [`Action`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Carried out.
    Done,
    /// The page or process no longer exists; forget it.
    Gone,
    /// Locked, pinned or busy now; may work later.
    Busy,
    /// No room at the destination, or no contiguous memory.
    NoMemory,
    /// Kernel or privileges do not allow this at all.
    Unsupported,
}

/// Carries out decisions and knows where pages are.
pub trait Actuator {
    /// Short name for people.
    fn name(&self) -> &'static str;
    /// Appends one outcome for each action, in order. Outcomes are facts: `Done` only if the kernel said so.
    fn apply(&mut self, actions: &[Action], out: &mut Vec<Outcome>);
    /// Appends for each page the tier that holds it, or `None` when it is not in memory.
    fn locate(&mut self, pages: &[PageKey], out: &mut Vec<Option<TierId>>);
    /// Looks again at which base pages of a region are in use right now; `None` when the actuator cannot
    /// tell.
    fn used_now(&mut self, _proc: ProcId, _region: HugeIndex) -> Option<UtilVector> {
        None
    }
    /// How many base pages of a region are merged with identical pages right now; 0 when the actuator cannot
    /// tell.
    fn merged_now(&mut self, _proc: ProcId, _region: HugeIndex) -> u64 {
        0
    }
    /// Free pages of a tier right now.
    fn free_pages(&mut self, tier: TierId) -> u64;
}

/// What a survey found in one 2 MiB region.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RegionSurvey {
    /// The process.
    pub proc: ProcId,
    /// The region.
    pub region: HugeIndex,
    /// Base pages that hold data (present and not the shared zero page). For a huge page all bits, unless its
    /// contents were looked at.
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

/// The machine as a whole, as far as policies care.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SystemView {
    /// Free memory fragmentation index for huge pages, 0 (whole) to 1 (splinters); `None` if unknown.
    pub fmfi: Option<f64>,
    /// Huge pages that could be allocated now without compaction.
    pub free_huge: u64,
    /// Bytes that can be allocated before reclaim hurts (machine or control group, whichever is less).
    pub available_bytes: u64,
    /// The total that `available_bytes` is part of.
    pub total_bytes: u64,
}

/// What one policy step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct StepReport {
    /// Pages whose reference state was asked for.
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
    /// Actions the kernel declined.
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
    /// Whether anything but looking happened.
    pub fn changed(&self) -> bool {
        self.promoted + self.demoted + self.evicted + self.collapsed + self.split + self.sharing > 0
    }
}

/// Decides what to do about pages.
pub trait Policy {
    /// Short name, as used in the policy file.
    fn name(&self) -> &'static str;
    /// Takes in what a survey found; an empty `used` vector means the region holds nothing any more.
    fn survey(&mut self, survey: &RegionSurvey, actuator: &mut dyn Actuator);
    /// Takes in the state of the machine.
    fn system(&mut self, view: &SystemView);
    /// Forgets a process.
    fn forget(&mut self, proc: ProcId);
    /// What would put a process' memory back to how it was found.
    fn undo(&self, proc: ProcId) -> Vec<Action>;
    /// Works for one step at time `now_ms`; does nothing when it is not due.
    ///
    /// # Errors
    /// When the tracker failed as a whole.
    fn step(
        &mut self,
        now_ms: u64,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
    ) -> Result<StepReport, TrackerError>;
    /// When the next step is due.
    fn next_due_ms(&self) -> u64;
    /// Bytes of bookkeeping and pages kept in it.
    fn metadata(&self) -> (u64, u64);
    /// Pages that may be asked for in one step; the governor of the scanning cost sets it.
    fn set_scan_budget(&mut self, pages: u64);
}
