//! Makes a profile from files, blocks and packages as they are read, in bounded memory. Knows no format.

use super::packages;
use super::{Limits, rpm};
use crate::estimate::is_zero;
use crate::hash::{BLOCK_BYTES, Domain, combine, hash, mix};
use crate::image::{Area, MAX_AREAS, MAX_PACKAGES, Package, Profile};
use crate::sketch::{Element, SketchBuilder};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::Xxh3;

/// Package databases, by their path in an image, and their readers.
const DATABASES: [(&str, Reader); 5] = [
    ("var/lib/dpkg/status", packages::dpkg),
    ("lib/apk/db/installed", packages::apk),
    ("usr/lib/apk/db/installed", packages::apk),
    ("var/lib/rpm/rpmdb.sqlite", rpm::database),
    ("usr/lib/sysimage/rpm/rpmdb.sqlite", rpm::database),
];

type Reader = fn(&[u8]) -> Vec<Package>;

/// A profile under construction.
pub struct Collector {
    profile: Profile,
    blocks: SketchBuilder,
    files: SketchBuilder,
    packages: BTreeMap<String, Package>,
}

/// A file of an image that is being read.
pub struct FileIn {
    path: String,
    whole: Xxh3,
    bytes: u64,
    /// Start of a block that is not yet full.
    rest: Vec<u8>,
    /// The file's bytes, if it is a package database.
    kept: Option<(Reader, Vec<u8>)>,
    with_blocks: bool,
}

impl Collector {
    /// An empty profile.
    pub fn new(name: &str, limits: &Limits) -> Self {
        Self {
            profile: Profile::named(name),
            blocks: SketchBuilder::new(limits.elements),
            files: SketchBuilder::new(limits.elements.saturating_mul(4)),
            packages: BTreeMap::new(),
        }
    }

    /// Adds blocks; a short last one is padded with zeros.
    pub fn blocks(&mut self, bytes: &[u8]) {
        for block in bytes.chunks(BLOCK_BYTES) {
            if is_zero(block) {
                self.profile.zero_blocks += 1;
                continue;
            }
            self.profile.bytes += BLOCK_BYTES as u64;
            let hash = match block.len() {
                BLOCK_BYTES => hash(Domain::Block, block),
                _ => {
                    let mut padded = [0; BLOCK_BYTES];
                    padded[..block.len()].copy_from_slice(block);
                    hash(Domain::Block, &padded)
                }
            };
            self.blocks.add(Element {
                hash,
                weight: BLOCK_BYTES as u64,
            });
        }
    }

    /// Begins a file of this path, without a leading slash. Its blocks are added too if `with_blocks`.
    pub fn file(&self, path: &str, with_blocks: bool) -> FileIn {
        let path = path.trim_start_matches("./").trim_start_matches('/').to_owned();
        let reader = DATABASES.iter().find(|(database, _)| *database == path);
        FileIn {
            whole: Xxh3::with_seed(Domain::File as u64 + 1),
            bytes: 0,
            rest: Vec::new(),
            kept: reader.map(|(_, reader)| (*reader, Vec::new())),
            with_blocks,
            path,
        }
    }

    /// Adds the next bytes of a file.
    pub fn write(&mut self, file: &mut FileIn, mut bytes: &[u8]) {
        file.whole.update(bytes);
        file.bytes += bytes.len() as u64;
        if let Some((_, kept)) = &mut file.kept
            && (kept.len() + bytes.len()) as u64 <= packages::MAX_BYTES
        {
            kept.extend_from_slice(bytes);
        }
        if !file.with_blocks {
            return;
        }
        if !file.rest.is_empty() {
            let missing = (BLOCK_BYTES - file.rest.len()).min(bytes.len());
            file.rest.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if file.rest.len() < BLOCK_BYTES {
                return;
            }
            let full = std::mem::take(&mut file.rest);
            self.blocks(&full);
        }
        let whole = bytes.len() / BLOCK_BYTES * BLOCK_BYTES;
        self.blocks(&bytes[..whole]);
        file.rest.extend_from_slice(&bytes[whole..]);
    }

    /// Adds zeros that need not be read.
    pub fn hole(&mut self, file: &mut FileIn, bytes: u64) {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        // A longer hole is not worth hashing; its length is hashed instead.
        if bytes > 1 << 30 {
            file.whole.update(&bytes.to_le_bytes());
            file.bytes += bytes;
            self.profile.zero_blocks += bytes / BLOCK_BYTES as u64;
            return;
        }
        let mut left = bytes as usize;
        while left > 0 {
            let now = left.min(ZEROS.len());
            self.write(file, &ZEROS[..now]);
            left -= now;
        }
    }

    /// Ends a file.
    pub fn end(&mut self, file: FileIn) {
        self.blocks(&file.rest);
        let content = file.whole.digest();
        self.profile.files += 1;
        if file.bytes > 0 {
            self.files.add(Element {
                hash: content,
                weight: file.bytes,
            });
        }
        self.area(&file.path, content, file.bytes);
        if let Some((reader, bytes)) = file.kept {
            let found = reader(&bytes);
            if found.is_empty() && !bytes.is_empty() {
                let path = &file.path;
                self.profile
                    .note(format!("no package could be read from /{path}"));
            }
            self.packages(found);
        }
    }

    /// Adds a file to the sums of the directories that contain it.
    fn area(&mut self, path: &str, content: u64, bytes: u64) {
        let named = combine(hash(Domain::Path, path.as_bytes()), content);
        let ends = path.match_indices('/').map(|(at, _)| at).take(2);
        for end in ends {
            let Some(dir) = path
                .get(..end)
                .filter(|dir| dir.len() <= crate::image::MAX_NAME_BYTES)
            else {
                continue;
            };
            if self.profile.areas.len() >= MAX_AREAS && !self.profile.areas.contains_key(dir) {
                self.profile
                    .note("directories beyond the first 4096 are not told apart");
                continue;
            }
            let area: &mut Area = self.profile.areas.entry(dir.to_owned()).or_default();
            area.files += 1;
            area.bytes += bytes;
            area.fingerprint = area.fingerprint.wrapping_add(mix(named));
        }
    }

    /// Adds packages. A later package replaces an earlier one of equal name.
    pub fn packages(&mut self, packages: Vec<Package>) {
        for package in packages {
            if self.packages.len() >= MAX_PACKAGES {
                self.profile
                    .note("packages beyond the first 100,000 are left out");
                break;
            }
            self.packages.insert(package.name.clone(), package);
        }
    }

    /// Adds another profile as a layer above.
    pub fn merge(&mut self, layer: Profile) {
        self.blocks.merge(&layer.sketches.blocks);
        self.files.merge(&layer.sketches.files);
        self.profile.bytes += layer.bytes;
        self.profile.zero_blocks += layer.zero_blocks;
        self.profile.files += layer.files;
        for (path, theirs) in layer.areas {
            if self.profile.areas.len() < MAX_AREAS || self.profile.areas.contains_key(&path) {
                let area = self.profile.areas.entry(path).or_default();
                area.files += theirs.files;
                area.bytes += theirs.bytes;
                area.fingerprint = area.fingerprint.wrapping_add(theirs.fingerprint);
            }
        }
        if !layer.packages.is_empty() {
            // A layer that changes the database contains the whole database.
            self.packages.clear();
            self.packages(layer.packages);
        }
        layer.notes.into_iter().for_each(|note| self.profile.note(note));
    }

    /// Adds a note for the user.
    pub fn note(&mut self, text: impl Into<String>) {
        self.profile.note(text);
    }

    /// Returns the profile of everything that was added.
    pub fn finish(mut self) -> Profile {
        let sketches = &mut self.profile.sketches;
        sketches.blocks = self.blocks.finish();
        sketches.files = self.files.finish();
        sketches.packages = {
            let mut packages = SketchBuilder::new(MAX_PACKAGES);
            self.packages
                .values()
                .for_each(|package| packages.add(package.element()));
            packages.finish()
        };
        self.profile.packages = self.packages.into_values().collect();
        self.profile
    }
}
