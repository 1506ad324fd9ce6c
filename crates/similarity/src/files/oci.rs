//! The layers of a container image in an OCI layout: a directory with `oci-layout`, `index.json` and `blobs`
//! (OCI Image Layout Specification 1.1). The layers themselves are parsed by an unprivileged process.

use super::read::open_image;
use serde::Deserialize;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::{Path, PathBuf};

/// Bytes of an index or a manifest, at most.
const MAX_JSON_BYTES: u64 = 4 << 20;
/// The most levels of indexes within indexes, and layers of an image.
const MAX_DEPTH: u32 = 4;
const MAX_LAYERS: usize = 4096;

#[derive(Deserialize)]
struct Descriptor {
    digest: String,
}

/// An index has `manifests`, a manifest has `layers`.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// Whether a directory is an OCI layout.
pub fn is_layout(dir: &Path) -> bool {
    dir.join("oci-layout").is_file() && dir.join("index.json").is_file()
}

/// The files of the layers of all images in a layout, lowest first, each once.
///
/// # Errors
/// If an index or a manifest cannot be read, or names something that is not a blob.
pub fn layers(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    follow(dir, &dir.join("index.json"), MAX_DEPTH, &mut found)?;
    Ok(found)
}

fn follow(dir: &Path, document: &Path, depth: u32, found: &mut Vec<PathBuf>) -> Result<()> {
    let invalid = |text: &str| Error::new(ErrorKind::InvalidData, format!("{}: {text}", document.display()));
    let depth = depth
        .checked_sub(1)
        .ok_or_else(|| invalid("indexes are nested too deeply"))?;
    let mut text = Vec::new();
    open_image(document)?
        .take(MAX_JSON_BYTES)
        .read_to_end(&mut text)?;
    let json: Document = serde_json::from_slice(&text).map_err(|error| invalid(&error.to_string()))?;
    for layer in &json.layers {
        let path = blob(dir, &layer.digest).ok_or_else(|| invalid("a digest is none"))?;
        if !found.contains(&path) {
            found.push(path);
        }
        if found.len() > MAX_LAYERS {
            return Err(invalid("there are too many layers"));
        }
    }
    for manifest in &json.manifests {
        let path = blob(dir, &manifest.digest).ok_or_else(|| invalid("a digest is none"))?;
        follow(dir, &path, depth, found)?;
    }
    Ok(())
}

/// The file of a blob. A digest has only hexadecimal digits, so the path stays in `blobs`.
fn blob(dir: &Path, digest: &str) -> Option<PathBuf> {
    let (algorithm, hex) = digest.split_once(':')?;
    let sound = matches!(algorithm, "sha256" | "sha512")
        && (64..=128).contains(&hex.len())
        && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    sound.then(|| dir.join("blobs").join(algorithm).join(hex))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(index: &str, manifest: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        let blobs = dir.path().join("blobs/sha256");
        std::fs::create_dir_all(&blobs).expect("made");
        std::fs::write(dir.path().join("oci-layout"), "{}").expect("written");
        std::fs::write(dir.path().join("index.json"), index).expect("written");
        std::fs::write(blobs.join("a".repeat(64)), manifest).expect("written");
        dir
    }

    #[test]
    fn layers_are_found_by_index_and_manifest() {
        let index = format!("{{\"manifests\":[{{\"digest\":\"sha256:{}\"}}]}}", "a".repeat(64));
        let layer = |c: &str| format!("{{\"digest\":\"sha256:{}\",\"size\":3}}", c.repeat(64));
        let manifest = format!("{{\"layers\":[{},{},{}]}}", layer("b"), layer("c"), layer("b"));
        let dir = layout(&index, &manifest);
        assert!(is_layout(dir.path()));
        let found = layers(dir.path()).expect("found");
        let names: Vec<_> = found
            .iter()
            .map(|path| path.file_name().expect("a name"))
            .collect();
        assert_eq!(names, [&*"b".repeat(64), &*"c".repeat(64)]);
    }

    #[test]
    fn hostile_layouts_are_refused() {
        let own = format!("{{\"manifests\":[{{\"digest\":\"sha256:{}\"}}]}}", "a".repeat(64));
        assert!(
            layers(layout(&own, &own).path()).is_err(),
            "an index that names itself"
        );
        let outside = "{\"layers\":[{\"digest\":\"sha256:../../../../etc/passwd\"}]}";
        assert!(layers(layout(&own, outside).path()).is_err());
        assert!(layers(layout("[[[[", "").path()).is_err());
        // A blob for which a reader would wait for ever.
        let dir = layout(&own, "");
        let blob = dir.path().join("blobs/sha256").join("a".repeat(64));
        std::fs::remove_file(&blob).expect("removed");
        rustix::fs::mkfifoat(rustix::fs::CWD, &blob, rustix::fs::Mode::RUSR).expect("made");
        assert!(layers(dir.path()).is_err());
    }
}
