//! Tells `src/far/library.rs` where cargo puts the agent of far memory: beside the other dependencies of this
//! build.
//!
//! `crates/far-agent` is a dependency with the crate types `cdylib` and `rlib`, so cargo has linked the
//! library before it compiles this crate. `cargo check` links nothing; an empty file stands in for it then.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // OUT_DIR is <target>/<profile>/build/<package>-<hash>/out.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let Some(deps) = out.ancestors().nth(3).map(|profile| profile.join("deps")) else {
        panic!("OUT_DIR {} is not where cargo puts it", out.display());
    };
    let library = deps.join("libvarve_far_agent.so");
    std::fs::create_dir_all(&deps).expect("the directory of dependencies can be made");
    // Never over a library that is there: cargo may be linking it at this moment.
    let _ = std::fs::File::create_new(&library);
    println!("cargo::rustc-env=VARVE_FAR_AGENT_DIR={}", deps.display());
}
