//! A small repository in a temporary directory, sound and with seeded faults.

use super::{Look, StructureOptions, look};
use std::path::Path;
use tempfile::TempDir;

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().expect("below the root")).expect("directory");
    std::fs::write(path, text).expect("file");
}

const STRUCTURE: &str = r#"
[[crate]]
name = "ground"
uses = []
modules = ["ids"]

[[crate]]
name = "upper"
uses = ["ground"]
modules = ["table", "session", "ops"]
"#;

/// Two crates that keep their order.
fn sound() -> TempDir {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = dir.path();
    write(root, "structure.toml", STRUCTURE);
    write(
        root,
        "crates/ground/Cargo.toml",
        "[package]\nname = \"varve-ground\"\n",
    );
    write(root, "crates/ground/src/lib.rs", "mod ids;\npub use ids::Ino;\n");
    write(root, "crates/ground/src/ids.rs", "pub struct Ino(u64);\n");
    let manifest = "[package]\nname = \"varve-upper\"\n[dependencies]\nvarve-ground.workspace = true\n";
    write(root, "crates/upper/Cargo.toml", manifest);
    write(
        root,
        "crates/upper/src/lib.rs",
        "mod ops;\nmod session;\nmod table;\npub use session::Session;\n",
    );
    write(
        root,
        "crates/upper/src/table.rs",
        "pub struct Table;\n#[cfg(test)]\nmod tests { use crate::ops::all; }\n",
    );
    write(
        root,
        "crates/upper/src/session/mod.rs",
        "mod state;\npub use state::Session;\n",
    );
    write(
        root,
        "crates/upper/src/session/state.rs",
        "use crate::table::Table;\npub struct Session(Table);\n",
    );
    write(
        root,
        "crates/upper/src/ops.rs",
        "use crate::Session;\npub fn all(_: Session) {}\n",
    );
    dir
}

fn look_at(dir: &TempDir) -> Look {
    let root = dir.path().to_path_buf();
    look(&StructureOptions {
        root,
        places: true,
        figures_only: false,
    })
    .expect("readable")
}

/// Returns the only breach of the repository.
fn one_breach(dir: &TempDir) -> String {
    let breaches = look_at(dir).breaches;
    assert_eq!(breaches.len(), 1, "{breaches:#?}");
    breaches.into_iter().next().expect("one")
}

#[test]
fn structure_is_kept_by_a_sound_repository() {
    let look = look_at(&sound());
    assert_eq!(look.breaches, Vec::<String>::new());
    assert_eq!((look.crates, look.modules), (2, 4));
}

#[test]
fn structure_fails_when_an_import_runs_up() {
    let dir = sound();
    write(dir.path(), "crates/upper/src/ops.rs", "pub fn all() {}\n");
    write(
        dir.path(),
        "crates/upper/src/table.rs",
        "\npub struct Table;\nfn turn() { crate::ops::all(); }\n",
    );
    let breach = one_breach(&dir);
    assert!(
        breach.starts_with("crates/upper/src/table.rs:3: an import runs up: module \"table\" uses \"ops\""),
        "{breach}"
    );
    assert!(
        breach.contains("Move what both need into a module below both"),
        "{breach}"
    );
}

#[test]
fn structure_fails_when_imports_run_in_a_circle() {
    let dir = sound();
    write(
        dir.path(),
        "crates/upper/src/table.rs",
        "use super::ops::all;\npub struct Table;\n",
    );
    let breach = one_breach(&dir);
    assert!(
        breach.starts_with("crates/upper/src/table.rs:1: imports run in a circle: \"table\" uses \"ops\""),
        "{breach}"
    );
    assert!(
        breach.contains("\"session\" (crates/upper/src/ops.rs:1)"),
        "{breach}"
    );
    assert!(
        breach.contains("\"table\" (crates/upper/src/session/state.rs:1)"),
        "{breach}"
    );
    assert!(look_at(&dir).figures.contains("upper: of 3"));
}

#[test]
fn structure_sees_imports_in_macros_and_re_exports_of_the_root() {
    let dir = sound();
    let table = "pub struct Table;\nfn is(x: u8) -> bool { matches!(x, crate::Session::N) }\n";
    write(dir.path(), "crates/upper/src/table.rs", table);
    let breach = one_breach(&dir);
    assert!(
        breach
            .starts_with("crates/upper/src/table.rs:2: imports run in a circle: \"table\" uses \"session\""),
        "{breach}"
    );
}

#[test]
fn structure_fails_when_a_module_uses_an_item_of_the_root() {
    let dir = sound();
    write(
        dir.path(),
        "crates/ground/src/lib.rs",
        "mod ids;\npub use ids::Ino;\npub const MAX: u64 = 1;\n",
    );
    write(
        dir.path(),
        "crates/ground/src/ids.rs",
        "pub struct Ino([u8; crate::MAX as usize]);\n",
    );
    let breach = one_breach(&dir);
    assert!(
        breach.starts_with("crates/ground/src/ids.rs:1: module \"ids\" uses `MAX` of the crate's root"),
        "{breach}"
    );
}

#[test]
fn structure_allows_an_exception_and_fails_when_it_is_stale() {
    let dir = sound();
    let exception =
        "\n[[exception]]\ncrate = \"upper\"\nfrom = \"table\"\nto = \"ops\"\nreason = \"one day\"\n";
    write(dir.path(), "structure.toml", &format!("{STRUCTURE}{exception}"));
    let breach = one_breach(&dir);
    assert!(breach.contains("table to ops, is stale"), "{breach}");
    write(
        dir.path(),
        "crates/upper/src/table.rs",
        "use super::ops::all;\npub struct Table;\n",
    );
    assert_eq!(look_at(&dir).breaches, Vec::<String>::new());
}

#[test]
fn structure_says_which_lines_to_add_for_an_unlisted_crate() {
    let dir = sound();
    let manifest =
        "[package]\nname = \"varve-cache\"\n[dependencies]\nvarve-ground = { path = \"../ground\" }\n";
    write(dir.path(), "crates/cache/Cargo.toml", manifest);
    write(dir.path(), "crates/cache/src/lib.rs", "mod index;\nmod slab;\n");
    write(
        dir.path(),
        "crates/cache/src/index.rs",
        "use crate::slab::Slab;\n",
    );
    write(dir.path(), "crates/cache/src/slab.rs", "pub struct Slab;\n");
    let breach = one_breach(&dir);
    assert!(breach.contains("after crate \"ground\""), "{breach}");
    let lines = "[[crate]]\nname = \"cache\"\nuses = [\"ground\"]\nmodules = [\"slab\", \"index\"]\n";
    assert!(breach.contains(lines), "{breach}");
}

#[test]
fn structure_says_where_an_unlisted_module_goes() {
    let dir = sound();
    write(
        dir.path(),
        "crates/upper/src/lib.rs",
        "mod ops;\nmod session;\nmod table;\nmod wait;\npub use session::Session;\n",
    );
    write(
        dir.path(),
        "crates/upper/src/wait.rs",
        "use crate::table::Table;\n",
    );
    let breach = one_breach(&dir);
    assert!(
        breach.starts_with("crates/upper/src/lib.rs:4: module \"wait\" is not listed"),
        "{breach}"
    );
    assert!(breach.contains("after \"table\""), "{breach}");
}

#[test]
fn structure_fails_when_a_crate_depends_on_one_that_it_may_not_use() {
    let dir = sound();
    let manifest = "[package]\nname = \"varve-ground\"\n[dependencies]\nvarve-upper.workspace = true\n";
    write(dir.path(), "crates/ground/Cargo.toml", manifest);
    let breach = one_breach(&dir);
    assert!(
        breach.starts_with("crates/ground/Cargo.toml:4: crate \"ground\" depends on \"upper\""),
        "{breach}"
    );
    write(
        dir.path(),
        "structure.toml",
        &STRUCTURE.replacen("uses = []", "uses = [\"upper\"]", 1),
    );
    let breach = one_breach(&dir);
    assert!(
        breach.contains("crate \"ground\" uses \"upper\", which does not stand below it"),
        "{breach}"
    );
}

#[test]
fn structure_counts_long_files_functions_and_names_given_twice() {
    let dir = sound();
    let long = format!(
        "pub struct Table;\npub struct Session;\nfn long() {{\n{}}}\n",
        "    drop(1);\n".repeat(700)
    );
    write(dir.path(), "crates/upper/src/table.rs", &long);
    let figures = look_at(&dir).figures;
    assert!(figures.contains("704 crates/upper/src/table.rs"), "{figures}");
    assert!(
        figures.contains("702 crates/upper/src/table.rs:3 long"),
        "{figures}"
    );
    assert!(figures.contains(", crates/upper/src/table.rs:2)"), "{figures}");
}
