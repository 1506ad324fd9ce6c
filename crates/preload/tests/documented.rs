//! The list in `docs/guide/run.md` and the calls that the library looks at are the same.

use std::collections::BTreeSet;
use varve_preload::syscalls::{LOOKED_AT, NUMBERS};

/// Names in the first column of the document's table.
fn documented() -> BTreeSet<String> {
    let text = include_str!("../../../docs/guide/run.md");
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| system calls"))
        .skip(2);
    rows.take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.split('|').nth(1))
        .flat_map(str::split_whitespace)
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_list_of_calls_equals_what_the_library_looks_at() {
    let looked_at: BTreeSet<String> = LOOKED_AT
        .iter()
        .map(|(name, _)| name.trim_start_matches("SYS_").to_owned())
        .collect();
    assert_eq!(documented(), looked_at);
    assert_eq!(looked_at.len(), LOOKED_AT.len(), "a call is listed twice");
}

/// System calls that the body of a function names.
fn named_in(text: &str, function: &str) -> BTreeSet<String> {
    let body = text.split(function).nth(1).expect("the function is there");
    let body = body.split("\n}\n").next().unwrap_or_default();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    body.split("::SYS_")
        .skip(1)
        .map(|rest| rest.split(|c| !is_name(c)).next().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn every_call_that_is_looked_at_has_an_answer_and_no_other() {
    let looked_at: BTreeSet<String> = LOOKED_AT
        .iter()
        .map(|(name, _)| name.trim_start_matches("SYS_").to_owned())
        .collect();
    // What is not chosen by itself is only known for the descriptors that it carries.
    let mut answered = named_in(include_str!("../src/calls/mod.rs"), "\nfn choose(");
    let carried = named_in(include_str!("../src/calls/carried.rs"), "fn known(");
    assert!(answered.is_disjoint(&carried), "a call has two answers");
    answered.extend(carried);
    assert_eq!(answered, looked_at);
}

#[test]
fn every_number_fits_the_tables() {
    for (name, number) in LOOKED_AT {
        assert!((0..NUMBERS as i64).contains(number), "{name}");
    }
}

#[test]
fn the_library_exports_nothing_that_a_program_could_call() {
    let profile = std::env::current_exe().expect("this test has a path");
    let library = profile.with_file_name("libvarve_preload.so");
    if !library.exists() {
        eprintln!("SKIPPED: {} was not linked for this test", library.display());
        return;
    }
    let output = std::process::Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(&library)
        .output();
    let Ok(output) = output else {
        eprintln!("SKIPPED: no nm here");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let exported: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains(" rust_eh_personality"))
        .collect();
    assert!(exported.is_empty(), "{exported:?}");
}
