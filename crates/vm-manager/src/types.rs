//! Newtypes shared by trackers, policies and actuators: processes, virtual pages, tiers and nodes.
//!
//! Refuses to know where any of them comes from (a kernel, a trace or a test).

use serde::{Deserialize, Serialize};

/// Bytes in a base page on the machines Varve supports (x86-64).
pub const PAGE_BYTES: u64 = 4096;
/// Base pages in a huge page.
pub const HUGE_PAGES: u64 = 512;
/// Bytes in a huge page.
pub const HUGE_BYTES: u64 = PAGE_BYTES * HUGE_PAGES;

/// A process id of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pid(pub i32);

impl std::fmt::Display for Pid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Dense number of a managed process; reused only after the process was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProcId(pub u16);

/// A virtual page number: address divided by [`PAGE_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VirtPage(pub u64);

impl VirtPage {
    /// Returns the page that holds `address`.
    pub const fn of_address(address: u64) -> Self {
        Self(address / PAGE_BYTES)
    }
    /// Returns the address of the page's first byte.
    pub const fn address(self) -> u64 {
        self.0 * PAGE_BYTES
    }
    /// Returns the 2 MiB region around the page.
    pub const fn region(self) -> HugeIndex {
        HugeIndex(self.0 / HUGE_PAGES)
    }
}

/// Number of an aligned 2 MiB region of virtual addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HugeIndex(pub u64);

impl HugeIndex {
    /// Returns the address of the region's first byte.
    pub const fn address(self) -> u64 {
        self.0 * HUGE_BYTES
    }
    /// Returns the region's page number `offset` (0..512).
    pub const fn page(self, offset: u64) -> VirtPage {
        VirtPage(self.0 * HUGE_PAGES + offset)
    }
}

/// A page of a managed process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageKey {
    /// The process.
    pub proc: ProcId,
    /// The page in its address space.
    pub page: VirtPage,
}

impl PageKey {
    /// Makes the key of page `page` of process `proc`.
    pub const fn new(proc: ProcId, page: VirtPage) -> Self {
        Self { proc, page }
    }
}

/// Position of a memory tier, 0 the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TierId(pub u8);

impl TierId {
    /// Returns the tier above, unless this is the fastest.
    pub const fn upper(self) -> Option<Self> {
        match self.0 {
            0 => None,
            n => Some(Self(n - 1)),
        }
    }
    /// Returns the index into tables of tiers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A NUMA node of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

/// Whether a page belongs to a file or only to the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageClass {
    /// Anonymous memory: heap, stack, private mappings.
    Anon,
    /// Backed by a file.
    File,
}

/// 512 bits, one for each base page of a 2 MiB region (Ingens §3.3.1, "util bitvector").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UtilVector(pub [u64; 8]);

impl UtilVector {
    /// Every page used.
    pub const FULL: Self = Self([u64::MAX; 8]);

    /// Marks page `offset` (0..512) as used or not.
    ///
    /// # Panics
    /// If `offset` is 512 or more.
    pub fn set(&mut self, offset: usize, used: bool) {
        let word = &mut self.0[offset / 64];
        let bit = 1u64 << (offset % 64);
        if used { *word |= bit } else { *word &= !bit }
    }
    /// Marks pages `from..to` as used.
    ///
    /// # Panics
    /// If `to` is more than 512.
    pub fn set_range(&mut self, from: usize, to: usize) {
        for offset in from..to {
            self.set(offset, true);
        }
    }
    /// Whether page `offset` (0..512) is used.
    ///
    /// # Panics
    /// If `offset` is 512 or more.
    pub fn get(&self, offset: usize) -> bool {
        self.0[offset / 64] >> (offset % 64) & 1 == 1
    }
    /// Returns the pages of `self` that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }
    /// Returns the pages of either.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }
    /// Returns the number of used pages, 0..=512.
    pub fn weight(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }
    /// Returns the used share, 0.0..=1.0.
    pub fn share(&self) -> f64 {
        f64::from(self.weight()) / HUGE_PAGES as f64
    }
    /// Returns the lowest used page, if any.
    pub fn first(&self) -> Option<usize> {
        self.0
            .iter()
            .position(|w| *w != 0)
            .map(|i| i * 64 + self.0[i].trailing_zeros() as usize)
    }
    /// Iterates over the used pages in rising order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..HUGE_PAGES as usize).filter(|offset| self.get(*offset))
    }
}
