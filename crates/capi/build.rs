//! Gives `libvarve.so` the name that programs are linked to. Its number goes up when a program that was built
//! before would not run any more.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libvarve.so.0");
    }
}
