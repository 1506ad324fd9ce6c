//! The profile of an image: its sketches, packages and directories. Inputs produce it and the manifest stores
//! it.

use crate::hash::{Domain, hash};
use crate::measure::Sketches;
use crate::sketch::Element;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Packages that a profile keeps by name, at most.
pub const MAX_PACKAGES: usize = 100_000;
/// Directories whose sums a profile keeps, at most.
pub const MAX_AREAS: usize = 4096;
/// Bytes of a name, at most; longer names are cut off.
pub const MAX_NAME_BYTES: usize = 255;

/// The form in which an image was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub enum Form {
    /// As bytes only: its blocks were compared, no structure was recognised.
    #[default]
    Blocks,
    /// A disk or partition with ext4 in it.
    Disk,
    /// A directory.
    Directory,
    /// A tar archive.
    Tar,
    /// An OCI image, as its layers.
    Oci,
    /// A list of packages.
    Packages,
}

/// An installed package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Package {
    /// Its name, with the architecture where it is known.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Installed size in bytes.
    pub bytes: u64,
}

impl Package {
    /// Returns its element in a sketch. A package without a stated size still counts.
    pub fn element(&self) -> Element {
        let named = format!("{}\0{}", self.name, self.version);
        Element {
            hash: hash(Domain::Package, named.as_bytes()),
            weight: self.bytes.max(1024),
        }
    }
}

/// Sums over a directory of an image and everything below, to locate differences of two images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Area {
    /// Files.
    pub files: u64,
    /// Bytes of the files.
    pub bytes: u64,
    /// Sum over paths and contents: equal for equal directories.
    pub fingerprint: u64,
}

/// The content found in an image.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    /// Its name, as the user gave it.
    pub name: String,
    /// The form in which it was read.
    pub form: Form,
    /// Its content.
    pub sketches: Sketches,
    /// Bytes that it takes (without holes and zero blocks).
    pub bytes: u64,
    /// Blocks that were all zero.
    pub zero_blocks: u64,
    /// Files in it.
    pub files: u64,
    /// Its packages, sorted by name.
    pub packages: Vec<Package>,
    /// Sums of its directories of the first two levels.
    pub areas: BTreeMap<String, Area>,
    /// Notes for the user on parts that could not be read properly.
    pub notes: Vec<String>,
}

impl Profile {
    /// An empty profile with a name.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }

    /// Whether it keeps the bounds and its sketches are sound. For profiles from another process or a file.
    pub fn is_sound(&self) -> bool {
        let sketches = &self.sketches;
        [&sketches.blocks, &sketches.files, &sketches.packages]
            .iter()
            .all(|sketch| sketch.is_sound())
            && self.packages.len() <= MAX_PACKAGES
            && self.packages.is_sorted_by(|a, b| a.name <= b.name)
            && self.areas.len() <= MAX_AREAS
            && self.notes.len() <= 64
    }

    /// Adds a note, unless it is there already or the bound is reached.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        if self.notes.len() < 32 && !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }
}
