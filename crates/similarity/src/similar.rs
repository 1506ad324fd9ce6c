//! The nearest images to an image, and their differences: for troubleshooting (section 4.2.3).

use crate::image::{Package, Profile};
use crate::manifest::Manifest;
use crate::measure::{Overlap, View};
use crate::tree::ImageId;
use serde::Serialize;

/// An image compared with the requested one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Near {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// wt(A ∩ B) / wt(A ∪ B), equation 4.1.
    pub sim: f64,
    /// wt(A ∩ B) / min(wt(A), wt(B)), equation 4.2.
    pub s: f64,
    /// Estimated bytes that both have.
    pub shared_bytes: f64,
    /// Estimated bytes that only the requested image has.
    pub only_here_bytes: f64,
    /// Estimated bytes that only the other has.
    pub only_there_bytes: f64,
}

/// The images of a manifest by SIM to `view`, nearest first, without `but`.
pub fn nearest(manifest: &Manifest, view: &View, but: Option<ImageId>) -> Vec<Near> {
    let others = manifest.images().filter(|(id, _)| Some(*id) != but);
    let mut near: Vec<_> = others
        .map(|(id, listed)| {
            let overlap = Overlap::of(view, &listed.profile.sketches.view(manifest.weigh));
            Near {
                id: id.0,
                name: listed.profile.name.clone(),
                sim: overlap.sim(),
                s: overlap.s(),
                shared_bytes: overlap.shared,
                only_here_bytes: overlap.first - overlap.shared,
                only_there_bytes: overlap.second - overlap.shared,
            }
        })
        .collect();
    near.sort_by(|a, b| b.sim.total_cmp(&a.sim).then(a.id.cmp(&b.id)));
    near
}

/// A package that two images have in different versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OtherVersion {
    /// Its name.
    pub name: String,
    /// Version in the first.
    pub here: String,
    /// Version in the second.
    pub there: String,
}

/// A directory whose contents differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OtherArea {
    /// Its path.
    pub path: String,
    /// Files and bytes in the first.
    pub here: (u64, u64),
    /// Files and bytes in the second.
    pub there: (u64, u64),
}

/// The differences of two images.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Difference {
    /// Packages that only the first has.
    pub only_here: Vec<String>,
    /// Packages that only the second has.
    pub only_there: Vec<String>,
    /// Packages in different versions.
    pub versions: Vec<OtherVersion>,
    /// Directories of the first two levels whose files differ.
    pub areas: Vec<OtherArea>,
}

impl Difference {
    /// Compares two images.
    pub fn of(here: &Profile, there: &Profile) -> Self {
        let mut difference = Self::default();
        difference.add_packages(&here.packages, &there.packages);
        let paths: std::collections::BTreeSet<_> = here.areas.keys().chain(there.areas.keys()).collect();
        for path in paths {
            let (a, b) = (here.areas.get(path), there.areas.get(path));
            let (a, b) = (a.copied().unwrap_or_default(), b.copied().unwrap_or_default());
            if a != b {
                difference.areas.push(OtherArea {
                    path: path.clone(),
                    here: (a.files, a.bytes),
                    there: (b.files, b.bytes),
                });
            }
        }
        difference
    }

    /// Adds the differing packages. Both lists are sorted by name.
    fn add_packages(&mut self, here: &[Package], there: &[Package]) {
        let (mut i, mut j) = (0, 0);
        loop {
            match (here.get(i), there.get(j)) {
                (None, None) => break,
                (Some(a), Some(b)) if a.name == b.name => {
                    if a.version != b.version {
                        self.versions.push(OtherVersion {
                            name: a.name.clone(),
                            here: a.version.clone(),
                            there: b.version.clone(),
                        });
                    }
                    (i, j) = (i + 1, j + 1);
                }
                (Some(a), b) if b.is_none_or(|b| a.name < b.name) => {
                    self.only_here.push(a.name.clone());
                    i += 1;
                }
                (_, Some(b)) => {
                    self.only_there.push(b.name.clone());
                    j += 1;
                }
                (Some(_), None) => unreachable!("the case before takes it"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Area;

    fn profile(packages: &[(&str, &str)], etc: u64) -> Profile {
        let mut profile = Profile::named("x");
        profile.packages = packages
            .iter()
            .map(|(name, version)| Package {
                name: (*name).into(),
                version: (*version).into(),
                bytes: 1,
            })
            .collect();
        for (path, fingerprint) in [("/etc", etc), ("/usr", 7)] {
            let area = Area {
                files: 1,
                bytes: 10,
                fingerprint,
            };
            profile.areas.insert(path.into(), area);
        }
        profile
    }

    #[test]
    fn difference_names_packages_versions_and_directories() {
        let here = profile(&[("apt", "2"), ("bash", "5"), ("vim", "9")], 1);
        let there = profile(&[("bash", "5"), ("nano", "7"), ("vim", "8"), ("zsh", "1")], 2);
        let difference = Difference::of(&here, &there);
        assert_eq!(difference.only_here, ["apt"]);
        assert_eq!(difference.only_there, ["nano", "zsh"]);
        assert_eq!(difference.versions.len(), 1);
        assert_eq!(difference.versions[0].there, "8");
        let paths: Vec<_> = difference.areas.iter().map(|area| &area.path[..]).collect();
        assert_eq!(paths, ["/etc"]);
        assert_eq!(Difference::of(&here, &here), Difference::default());
    }
}
