//! `include/varve.h`, `varve_cache.h` and `varve_alloc.h` are what cbindgen makes of the sources, and say everything
//! that the library exports.
//! `VARVE_BLESS=1 cargo test -p varve-capi --test header` writes them anew.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

fn sources() -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ffi");
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    for file in ["src/cache.rs", "src/alloc.rs"] {
        files.push(Path::new(env!("CARGO_MANIFEST_DIR")).join(file));
    }
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect()
}

#[test]
fn headers_are_up_to_date() {
    for (header, config, source) in [
        ("varve.h", "cbindgen.toml", "src/ffi/mod.rs"),
        ("varve_cache.h", "cbindgen-cache.toml", "src/cache.rs"),
        ("varve_alloc.h", "cbindgen-alloc.toml", "src/alloc.rs"),
    ] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        let config = cbindgen::Config::from_file(dir.join(config)).unwrap();
        // It finds the other files from there.
        let builder = cbindgen::Builder::new()
            .with_config(config)
            .with_src(dir.join(source));
        let mut made = Vec::new();
        builder.generate().unwrap().write(&mut made);
        let made = String::from_utf8(made).unwrap();
        let path = dir.join("include").join(header);
        if std::env::var_os("VARVE_BLESS").is_some() {
            std::fs::write(&path, &made).unwrap();
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            there == made,
            "include/{header} is not what the sources say: VARVE_BLESS=1 cargo test -p varve-capi --test header"
        );
    }
}

#[test]
fn every_exported_function_is_declared_once_and_documented() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let header = ["varve.h", "varve_cache.h", "varve_alloc.h"]
        .map(|header| std::fs::read_to_string(include.join(header)).unwrap())
        .concat();
    let mut exported = BTreeSet::new();
    for source in sources() {
        let mut lines = source.lines().peekable();
        let mut documented = false;
        while let Some(line) = lines.next() {
            if line == "#[unsafe(no_mangle)]" {
                let signature = lines.next().unwrap();
                let name = signature.split("fn ").nth(1).unwrap().split('(').next().unwrap();
                assert!(documented, "{name} has no documentation");
                exported.insert(name.to_owned());
            }
            documented = line.starts_with("///");
        }
    }
    assert!(exported.len() > 60, "{exported:?}");
    for name in exported {
        assert_eq!(
            header.matches(&format!("{name}(")).count(),
            1,
            "declarations of {name}"
        );
    }
}
