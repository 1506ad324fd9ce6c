//! Programs in C: compiled with the header and linked with the library as a user would.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The repository.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The directory of `libvarve.so`: cargo leaves it beside, or above, the directory of this test.
pub fn library_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let found = [deps, deps.parent().unwrap()]
        .into_iter()
        .find(|dir| dir.join("libvarve.so").is_file());
    found
        .unwrap_or_else(|| panic!("no libvarve.so in {} or above", deps.display()))
        .to_owned()
}

/// Runs the C compiler; `None` where there is none.
pub fn cc(arguments: &[&std::ffi::OsStr]) -> Option<Output> {
    match Command::new("cc").args(arguments).output() {
        Ok(output) => Some(output),
        Err(error) => {
            eprintln!("SKIPPED: no C compiler here ({error}); Debian: apt-get install gcc");
            None
        }
    }
}

pub fn good(output: &Output, what: &str) {
    assert!(
        output.status.success(),
        "{what}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// What programs that are linked with the library ask for when they run.
pub const SONAME: &str = "libvarve.so.0";

/// Compiles a program of the repository to the file `to`; `dir` gets the library as it would be installed.
/// False where there is no compiler.
pub fn compile(source: &str, dir: &Path, to: &Path) -> bool {
    let (include, source) = (
        format!("-I{ROOT}/crates/capi/include"),
        format!("{ROOT}/{source}"),
    );
    let built = library_dir().join("libvarve.so");
    std::os::unix::fs::symlink(built, dir.join(SONAME)).unwrap();
    std::os::unix::fs::symlink(SONAME, dir.join("libvarve.so")).unwrap();
    let (library, at_run) = (
        format!("-L{}", dir.display()),
        format!("-Wl,-rpath,{}", dir.display()),
    );
    let arguments = [
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-D_GNU_SOURCE",
        &include,
        &source,
        &library,
        &at_run,
        "-lvarve",
        "-lpthread",
        "-o",
    ];
    let mut arguments: Vec<_> = arguments.iter().map(std::ffi::OsStr::new).collect();
    arguments.push(to.as_os_str());
    let Some(output) = cc(&arguments) else {
        return false;
    };
    good(&output, "cc");
    true
}
