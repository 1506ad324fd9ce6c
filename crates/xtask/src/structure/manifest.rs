//! `structure.toml`, and the dependencies that the crates' `Cargo.toml` declare.

use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The file at the repository's root.
pub const FILE: &str = "structure.toml";

/// The order of all crates.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Structure {
    /// Crates from the ground up.
    #[serde(default, rename = "crate")]
    pub crates: Vec<CrateOrder>,
    /// Known imports that run up.
    #[serde(default, rename = "exception")]
    pub exceptions: Vec<Exception>,
}

/// The order of one crate: the crates that it may use, and its modules.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrateOrder {
    /// Its directory in `crates/`; `varve`, the command line, is the root package.
    pub name: String,
    /// Crates of this repository that it may depend on. All of them are listed before it.
    pub uses: Vec<String>,
    /// Top-level modules from the ground up: each may import those before it.
    pub modules: Vec<String>,
}

/// An import that runs up, and the reason why it exists.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// The crate.
    #[serde(rename = "crate")]
    pub krate: String,
    /// The lower module, which imports.
    pub from: String,
    /// The upper module; `crate root` for an item of `lib.rs` or `main.rs`.
    pub to: String,
    /// The reason.
    pub reason: String,
}

impl Structure {
    /// Reads `structure.toml` of the repository at `root`.
    ///
    /// # Errors
    /// The file does not exist or does not have this form.
    pub fn load(root: &Path) -> Result<Self, String> {
        let path = root.join(FILE);
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        toml::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
    }
}

/// A dependency on a crate of this repository.
#[derive(Debug)]
pub struct Dependency {
    pub name: String,
    /// Its line in `Cargo.toml`.
    pub line: usize,
}

/// An existing crate.
#[derive(Debug)]
pub struct Member {
    pub name: String,
    pub dir: PathBuf,
    /// The `[dependencies]`, for every target. Those of tests and build scripts do not count.
    pub dependencies: Vec<Dependency>,
}

/// Returns all crates in `crates/`, and the root package if it has sources.
///
/// # Errors
/// A `Cargo.toml` that cannot be read.
pub fn members(root: &Path) -> Result<Vec<Member>, String> {
    let crates = root.join("crates");
    let listed = std::fs::read_dir(&crates).map_err(|e| format!("{}: {e}", crates.display()))?;
    let mut dirs: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
    dirs.retain(|dir| dir.join("Cargo.toml").exists());
    dirs.sort();
    let mut members = Vec::new();
    for dir in dirs {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        members.push(Member {
            dependencies: dependencies(&dir)?,
            name,
            dir,
        });
    }
    if root.join("src/main.rs").exists() {
        let dir = root.to_path_buf();
        members.push(Member {
            name: "varve".into(),
            dependencies: dependencies(&dir)?,
            dir,
        });
    }
    Ok(members)
}

fn dependencies(dir: &Path) -> Result<Vec<Dependency>, String> {
    let path = dir.join("Cargo.toml");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let table: toml::Table = toml::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut found = Vec::new();
    let targets = table.get("target").and_then(toml::Value::as_table);
    let of_targets = targets.into_iter().flat_map(|targets| targets.values());
    for part in std::iter::once(&toml::Value::Table(table.clone())).chain(of_targets) {
        let Some(listed) = part.get("dependencies").and_then(toml::Value::as_table) else {
            continue;
        };
        for (key, value) in listed {
            let package = value.get("package").and_then(toml::Value::as_str).unwrap_or(key);
            if let Some(name) = package.strip_prefix("varve-") {
                let line = text
                    .lines()
                    .position(|line| line.starts_with(key.as_str()))
                    .unwrap_or(0)
                    + 1;
                found.push(Dependency {
                    name: name.into(),
                    line,
                });
            }
        }
    }
    Ok(found)
}
