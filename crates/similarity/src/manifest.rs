//! The cluster manifest: the profiled images, with their sketches, and their clusters.
//!
//! File: magic `VARVECLU`, version (u32), length of the body (u64), CRC-32C of the body (u32), all
//! little-endian, then the body (postcard). The clusters are not stored: they follow from the images and the
//! settings, in order. The file is replaced atomically: a reader sees the old one or the new one.

use crate::image::Profile;
use crate::measure::Weigh;
use crate::tree::{ImageId, Settings, Tree};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAGIC: [u8; 8] = *b"VARVECLU";
/// Version of the manifest's format.
pub const VERSION: u32 = 1;
const HEAD_BYTES: usize = 24;

/// A manifest that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It could not be read.
    #[error("cannot read the manifest {path}: {error}", path = .path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// It could not be written.
    #[error("cannot write the manifest {path}: {error}", path = .path.display())]
    Write {
        /// Its path.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// The file is not a manifest.
    #[error("{path} is not a cluster manifest", path = .0.display())]
    NoManifest(PathBuf),
    /// It is of another version.
    #[error(
        "{path} is a manifest of version {found}, and this program reads version {VERSION}; make it again \
        with \
         `varve dedup cluster`",
        path = .path.display()
    )]
    Version {
        /// Its path.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// It is damaged.
    #[error(
        "the manifest {path} is damaged ({what}); make it again with `varve dedup cluster`",
        path = .path.display()
    )]
    Damaged {
        /// Its path.
        path: PathBuf,
        /// The problem.
        what: &'static str,
    },
}

/// An image in a manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Listed {
    /// Its profile.
    pub profile: Profile,
    /// Detects changes: length in bytes and modification time in ns.
    pub stamp: (u64, i128),
}

/// The images, with the settings that determine their clusters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Settings of the tree.
    pub settings: Settings,
    /// The measure of similarity.
    pub weigh: Weigh,
    /// Images by number; numbers are not reused.
    images: BTreeMap<u32, Listed>,
    next: u32,
}

impl Manifest {
    /// A manifest without images.
    pub const fn new(settings: Settings, weigh: Weigh) -> Self {
        Self {
            settings,
            weigh,
            images: BTreeMap::new(),
            next: 0,
        }
    }

    /// All images, by number.
    pub fn images(&self) -> impl Iterator<Item = (ImageId, &Listed)> {
        self.images.iter().map(|(id, listed)| (ImageId(*id), listed))
    }

    /// Returns an image.
    pub fn get(&self, id: ImageId) -> Option<&Listed> {
        self.images.get(&id.0)
    }

    /// Returns the number of the image with this name.
    pub fn find(&self, name: &str) -> Option<ImageId> {
        let named = self.images.iter().find(|(_, listed)| listed.profile.name == name);
        named.map(|(id, _)| ImageId(*id))
    }

    /// Adds an image, replacing one of the same name.
    pub fn insert(&mut self, listed: Listed) -> ImageId {
        let id = self.find(&listed.profile.name).unwrap_or(ImageId(self.next));
        self.next = self.next.max(id.0 + 1);
        self.images.insert(id.0, listed);
        id
    }

    /// Removes an image.
    pub fn remove(&mut self, id: ImageId) -> Option<Listed> {
        self.images.remove(&id.0)
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Builds the tree of the images.
    pub fn tree(&self) -> Tree {
        let view = |listed: &Listed| Arc::new(listed.profile.sketches.view(self.weigh));
        Tree::build(
            self.settings.clone(),
            self.images().map(|(id, listed)| (id, view(listed))),
        )
    }

    /// Encodes the manifest.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = postcard::to_allocvec(self).expect("a manifest is plain data");
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Decodes a manifest; `path` is for messages.
    ///
    /// # Errors
    /// If it is not a manifest, of another version, or damaged.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, ManifestError> {
        let damaged = |what| ManifestError::Damaged {
            path: path.to_owned(),
            what,
        };
        let (head, body) = bytes
            .split_at_checked(HEAD_BYTES)
            .filter(|(head, _)| head.starts_with(&MAGIC))
            .ok_or_else(|| ManifestError::NoManifest(path.to_owned()))?;
        let number = |from: usize, to: usize| {
            let le = head[from..to].iter().rev();
            le.fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let found = number(8, 12) as u32;
        if found != VERSION {
            return Err(ManifestError::Version {
                path: path.to_owned(),
                found,
            });
        }
        if number(12, 20) != body.len() as u64 {
            return Err(damaged("its length is not the one it states"));
        }
        if number(20, 24) != u64::from(crc32c::crc32c(body)) {
            return Err(damaged("its checksum does not match"));
        }
        let manifest: Self = postcard::from_bytes(body).map_err(|_| damaged("its body cannot be read"))?;
        let sound = manifest.settings.is_sound()
            && manifest.images.keys().all(|id| *id < manifest.next)
            && manifest.images.values().all(|listed| listed.profile.is_sound());
        if sound {
            Ok(manifest)
        } else {
            Err(damaged("its contents contradict each other"))
        }
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// As [`Manifest::from_bytes`], and if the file cannot be read.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let bytes = std::fs::read(path).map_err(|error| ManifestError::Read {
            path: path.to_owned(),
            error,
        })?;
        Self::from_bytes(&bytes, path)
    }

    /// Writes the manifest, durable when this returns; a crash leaves the old one or the new one.
    ///
    /// # Errors
    /// If it cannot be written; the old one remains then.
    pub fn write(&self, path: &Path) -> Result<(), ManifestError> {
        replace(path, &self.to_bytes()).map_err(|error| ManifestError::Write {
            path: path.to_owned(),
            error,
        })
    }
}

/// Replaces a file atomically: durable when this returns, and never partly written.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = PathBuf::from(name);
    let written = std::fs::File::create_new(&new).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    });
    if written.is_err() {
        // The partial file is useless; the error of the write is reported.
        let _ = std::fs::remove_file(&new);
        return written;
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    std::fs::File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::{Element, Sketch};

    fn manifest() -> Manifest {
        let mut manifest = Manifest::new(Settings::default(), Weigh::Blocks);
        for n in 0..20u64 {
            let family = n / 10;
            let elements = (family * 100..family * 100 + 50).chain(1000 + n * 10..1005 + n * 10);
            let sketch = Sketch::of(elements.map(|n| Element {
                hash: crate::hash::mix(n + 1),
                weight: 4096,
            }));
            let mut profile = Profile::named(&format!("image {n}"));
            profile.sketches.blocks = sketch;
            manifest.insert(Listed {
                profile,
                stamp: (n, 7),
            });
        }
        manifest
    }

    #[test]
    fn manifest_read_back_has_the_same_images_and_clusters() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("clusters");
        let manifest = manifest();
        manifest.write(&path).expect("written");
        manifest.write(&path).expect("written over");
        let back = Manifest::read(&path).expect("read");
        assert_eq!(back, manifest);
        assert_eq!(back.tree().clusters(1), manifest.tree().clusters(1));
        assert_eq!(back.tree().clusters(1).len(), 2);
        assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 1);
    }

    #[test]
    fn every_changed_or_missing_byte_of_a_manifest_is_told() {
        let bytes = manifest().to_bytes();
        let path = Path::new("m");
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(Manifest::from_bytes(&changed, path).is_err(), "byte {at} changed");
            assert!(Manifest::from_bytes(&bytes[..at], path).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn image_of_the_same_name_replaces_the_old_one() {
        let mut manifest = manifest();
        let id = manifest.find("image 3").expect("it is there");
        let listed = manifest.get(id).expect("it is there").clone();
        assert_eq!(manifest.insert(listed), id);
        assert_eq!(manifest.len(), 20);
        assert!(manifest.remove(id).is_some());
        let mut again = Profile::named("image 3");
        again.bytes = 1;
        let new = manifest.insert(Listed {
            profile: again,
            stamp: (0, 0),
        });
        assert_eq!(new, ImageId(20), "numbers are not used again");
    }

    #[test]
    fn other_versions_and_other_files_are_named() {
        let mut bytes = manifest().to_bytes();
        bytes[8] = 9;
        let error = Manifest::from_bytes(&bytes, Path::new("m")).expect_err("another version");
        assert!(error.to_string().contains("version 9"), "{error}");
        let error = Manifest::from_bytes(b"something else entirely, text", Path::new("m"));
        assert!(matches!(error, Err(ManifestError::NoManifest(_))));
    }
}
