//! Links the unwinder into the library, where the compiler has it as an archive: to load `libgcc_s.so.1`
//! costs every process under `varve run` a tenth of a millisecond, a third of what the library costs it.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of_target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let is_glibc = of_target("OS") == "linux" && of_target("ENV") == "gnu" && of_target("ARCH") == "x86_64";
    if !is_glibc || std::env::var("HOST") != std::env::var("TARGET") || !has_archive() {
        return;
    }
    // The standard library asks the linker for `gcc_s`: it finds this script first.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let script = out.join("libgcc_s.so");
    std::fs::write(&script, "INPUT ( -lgcc_eh -lgcc )\n").expect("OUT_DIR can be written");
    println!("cargo::rustc-cdylib-link-arg=-L{}", out.display());
}

/// Whether the C compiler, which links, has the archive.
fn has_archive() -> bool {
    let asked = std::process::Command::new("cc")
        .arg("-print-file-name=libgcc_eh.a")
        .output();
    let path = asked.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    path.is_ok_and(|path| path.starts_with('/') && std::path::Path::new(&path).exists())
}
