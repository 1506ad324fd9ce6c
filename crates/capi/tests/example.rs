//! The example in C, compiled with the header and linked with the library as a user would, and run on a pool
//! of its own and on a daemon's.
#![allow(clippy::unwrap_used)]

mod common;

// What `cargo xtask install` calls, without its build of the release.
#[path = "../../xtask/src/install.rs"]
#[allow(dead_code, reason = "shared with xtask")]
mod install;

use common::{ROOT, SONAME, cc, compile, good, library_dir};
use std::process::Command;

#[test]
fn example_in_c_runs_on_a_pool_of_its_own_and_on_one_that_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("example");
    if !compile("examples/c/varve_example.c", dir.path(), &program) {
        return;
    }
    let own = dir.path().join("own");
    let output = Command::new(&program).arg("--embed").arg(&own).output().unwrap();
    good(&output, "example --embed");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("all went well\n"));
    // The same pool, served by another process: this one.
    let here = varve_embed::PoolHere::open(&own).unwrap();
    let output = Command::new(&program).arg(&own).output().unwrap();
    good(&output, "example with a daemon");
    here.stop().unwrap();
}

#[test]
fn example_of_the_cache_in_c_runs_on_files_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("example");
    if !compile("examples/c/varve_cache_example.c", dir.path(), &program) {
        return;
    }
    let store = dir.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let output = Command::new(&program).arg(&store).output().unwrap();
    good(&output, "example of the cache");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("all went well\n"));
}

#[test]
fn example_of_far_memory_in_c_runs_on_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("example");
    if !compile("examples/c/varve_alloc_example.c", dir.path(), &program) {
        return;
    }
    let output = Command::new(&program).arg(dir.path()).output().unwrap();
    if output.status.code() == Some(77) {
        return eprintln!("SKIPPED: {}", String::from_utf8_lossy(&output.stderr));
    }
    good(&output, "example of far memory");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("all went well\n"));
}

#[test]
fn far_memory_of_a_c_program_is_there_in_the_next_one() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let program = dir.path().join("checkpoint");
    if !compile("examples/c/varve_alloc_checkpoint.c", dir.path(), &program) {
        return;
    }
    let run = |arguments: &[&str]| Command::new(&program).args(arguments).output().unwrap();
    let file = dir.path().join("heap");
    let file = file.to_str().unwrap();
    // Each ends without closing its heap, after changes that no checkpoint has.
    for before in [None, Some(5000), Some(10_000)] {
        let output = run(&[file]);
        if output.status.code() == Some(77) {
            return eprintln!("SKIPPED: {}", String::from_utf8_lossy(&output.stderr));
        }
        good(&output, "a list that grows");
        let there = before.map_or_else(String::new, |count| format!("{count} nodes were there\n"));
        let now = before.unwrap_or(0) + 5000;
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            format!("{there}{now} nodes are there\n")
        );
    }
    let output = run(&[&format!("{file}.wrong"), "wrong"]);
    good(&output, "what is refused");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("all went well\n"));
}

#[test]
fn tree_in_far_memory_has_its_keys() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("tree");
    if !compile("examples/c/varve_alloc_btree.c", dir.path(), &program) {
        return;
    }
    for mode in ["malloc", "objects", "pages"] {
        let output = Command::new(&program)
            .arg(mode)
            .arg(dir.path())
            .args(["20000", "5000", "3"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        if text.starts_with("the heap: Operation not permitted") {
            return eprintln!("SKIPPED: {text}");
        }
        good(&output, mode);
    }
}

#[test]
fn header_is_good_c_and_cpp_by_itself() {
    for header in ["varve.h", "varve_cache.h", "varve_alloc.h"] {
        check_header(header);
    }
}

fn check_header(header: &str) {
    let dir = tempfile::tempdir().unwrap();
    for (language, standard) in [("c", "-std=c99"), ("c++", "-std=c++17")] {
        let out = dir.path().join("header.o");
        let header = format!("{ROOT}/crates/capi/include/{header}");
        let arguments = [
            "-x",
            language,
            standard,
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            &header,
            "-o",
        ];
        let mut arguments: Vec<_> = arguments.iter().map(std::ffi::OsStr::new).collect();
        arguments.push(out.as_os_str());
        let Some(output) = cc(&arguments) else { return };
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        if language == "c++" && (text.contains("cc1plus") || text.contains("unrecognized")) {
            eprintln!("SKIPPED: no C++ compiler here; Debian: apt-get install g++");
            continue;
        }
        good(&output, language);
    }
}

#[test]
fn pkg_config_file_names_every_place_it_is_asked_for() {
    let text = std::fs::read_to_string(format!("{ROOT}/crates/capi/varve.pc.in")).unwrap();
    for place in ["@PREFIX@", "@LIBDIR@", "@VERSION@"] {
        assert_eq!(text.matches(place).count(), 1, "{place}");
    }
    assert!(text.contains("-lvarve"));
}

/// Installed under a prefix, the library is found by pkg-config alone, by the compiler and when the program
/// runs.
#[test]
fn installed_library_is_found_by_pkg_config() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("prefix");
    let words = ["--prefix".to_owned(), prefix.display().to_string()];
    let options = install::InstallOptions::parse(words.into_iter()).unwrap();
    install::library(&options, &library_dir().join("libvarve.so")).unwrap();
    let asked = Command::new("pkg-config")
        .args(["--cflags", "--libs", "varve"])
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .output();
    let asked = match asked {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("SKIPPED: no pkg-config here ({error}); Debian: apt-get install pkg-config");
            return;
        }
    };
    good(&asked, "pkg-config");
    let flags = String::from_utf8(asked.stdout).unwrap();
    assert!(
        flags.contains(&format!("-L{}", prefix.join("lib").display())),
        "{flags}"
    );
    let (source, program) = (
        format!("{ROOT}/examples/c/varve_example.c"),
        dir.path().join("example"),
    );
    // As the first lines of the example say.
    let mut words = vec![source.as_str()];
    words.extend(flags.split_whitespace());
    words.extend(["-lpthread", "-o"]);
    let mut words: Vec<_> = words.into_iter().map(std::ffi::OsStr::new).collect();
    words.push(program.as_os_str());
    let Some(output) = cc(&words) else { return };
    good(&output, "cc");
    let output = Command::new(&program)
        .arg("--embed")
        .arg(dir.path().join("pool"))
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .output()
        .unwrap();
    good(&output, "the example");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("all went well\n"));
}

/// What `nm` or `readelf` says of the library; `None` where there is no such tool.
fn told(tool: &str, option: &str) -> Option<String> {
    let library = library_dir().join("libvarve.so");
    match Command::new(tool).arg(option).arg(library).output() {
        Ok(output) => {
            good(&output, tool);
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Err(error) => {
            eprintln!("SKIPPED: no {tool} here ({error}); Debian: apt-get install binutils");
            None
        }
    }
}

#[test]
fn library_exports_what_the_header_declares_and_is_asked_for_by_its_number() {
    let Some(symbols) = told("nm", "-D") else { return };
    let header = ["varve.h", "varve_cache.h", "varve_alloc.h"]
        .map(|header| std::fs::read_to_string(format!("{ROOT}/crates/capi/include/{header}")).unwrap())
        .concat();
    let exported: Vec<&str> = symbols
        .lines()
        .filter_map(|line| line.split_once(" T "))
        .map(|(_, name)| name.split('@').next().unwrap())
        .filter(|name| *name != "rust_eh_personality")
        .collect();
    assert!(exported.len() > 40, "{symbols}");
    for name in &exported {
        assert!(
            header.contains(&format!("{name}(")),
            "{name} is exported and not declared"
        );
    }
    let Some(dynamic) = told("readelf", "-d") else {
        return;
    };
    assert!(
        dynamic.contains(&format!("Library soname: [{SONAME}]")),
        "{dynamic}"
    );
}
