//! `cargo xtask install`: builds the release and installs program, library, headers and pkg-config file under
//! a prefix.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library's soname; crates/capi/build.rs puts it into the library.
const SONAME: &str = "libvarve.so.0";

/// Where to install.
#[derive(Debug, PartialEq, Eq)]
pub struct InstallOptions {
    prefix: PathBuf,
    /// Prepended to every path when files are copied, and written into none of them (packagers' DESTDIR).
    destdir: PathBuf,
    /// Whether mount(8) gets the program as its helper, in /sbin whatever the prefix: it searches no other
    /// directory.
    mount_helper: bool,
}

/// Names under which mount(8) starts the program.
const HELPERS: [&str; 2] = ["mount.varve", "mount.fuse.varve"];

impl InstallOptions {
    /// Reads the arguments.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            prefix: "/usr/local".into(),
            destdir: std::env::var_os("DESTDIR").unwrap_or_default().into(),
            mount_helper: false,
        };
        while let Some(word) = args.next() {
            let mut value = || args.next().ok_or(format!("{word} needs a directory"));
            match &*word {
                "--prefix" => options.prefix = value()?.into(),
                "--destdir" => options.destdir = value()?.into(),
                "--mount-helper" => options.mount_helper = true,
                other => return Err(format!("`{other}` is no argument of install")),
            }
        }
        if !options.prefix.is_absolute() {
            return Err(format!("--prefix {} is not absolute", options.prefix.display()));
        }
        Ok(options)
    }

    fn to(&self, part: &str) -> PathBuf {
        self.below(self.prefix.join(part))
    }

    fn below(&self, inside: PathBuf) -> PathBuf {
        if self.destdir.as_os_str().is_empty() {
            return inside;
        }
        self.destdir.join(inside.strip_prefix("/").unwrap_or(&inside))
    }
}

/// Returns the pkg-config file of a library under `prefix`.
fn pkg_config(template: &str, prefix: &Path) -> String {
    template
        .replace("@PREFIX@", &prefix.display().to_string())
        .replace("@LIBDIR@", "${prefix}/lib")
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
}

/// Builds and installs; prints each installed path.
pub fn run(options: &InstallOptions) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--release", "-p", "varve", "-p", "varve-capi"])
        .current_dir(&root)
        .status()
        .map_err(|error| format!("cargo does not start: {error}"))?;
    if !built.success() {
        return Err("the build failed".into());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let release = target.join("release");
    put(&release.join("varve"), &options.to("bin/varve"))?;
    helper(options, &root)?;
    library(options, &release.join("libvarve.so"))
}

/// Installs the manual page of the mount helper under the prefix and, on request, the helper where mount(8)
/// finds it.
fn helper(options: &InstallOptions, root: &Path) -> Result<(), String> {
    let page = root.join("docs/reference/mount.varve.8");
    put(&page, &options.to("share/man/man8/mount.varve.8"))?;
    if !options.mount_helper {
        return Ok(());
    }
    let program = options.prefix.join("bin/varve");
    for name in HELPERS {
        let to = options.below(Path::new("/sbin").join(name));
        make_parent(&to)?;
        link(&program.display().to_string(), &to)?;
    }
    Ok(())
}

/// Installs the built library under the prefix, with its links, the headers and the pkg-config file.
pub fn library(options: &InstallOptions, built: &Path) -> Result<(), String> {
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi");
    let template = capi.join("varve.pc.in");
    let template =
        std::fs::read_to_string(&template).map_err(|error| format!("{}: {error}", template.display()))?;
    put(built, &options.to("lib").join(SONAME))?;
    link(SONAME, &options.to("lib/libvarve.so"))?;
    for header in ["varve.h", "varve_cache.h", "varve_alloc.h"] {
        let include = format!("include/{header}");
        put(&capi.join(&include), &options.to(&include))?;
    }
    let file = options.to("lib/pkgconfig/varve.pc");
    make_parent(&file)?;
    std::fs::write(&file, pkg_config(&template, &options.prefix))
        .map_err(|error| format!("{}: {error}", file.display()))?;
    println!("{}", file.display());
    Ok(())
}

fn make_parent(file: &Path) -> Result<(), String> {
    let Some(dir) = file.parent() else { return Ok(()) };
    std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))
}

/// Copies a file over one that may be in use, under another name first.
fn put(from: &Path, to: &Path) -> Result<(), String> {
    make_parent(to)?;
    let new = to.with_extension("varve-new");
    std::fs::copy(from, &new)
        .and_then(|_| std::fs::rename(&new, to))
        .map_err(|error| format!("{} to {}: {error}", from.display(), to.display()))?;
    println!("{}", to.display());
    Ok(())
}

/// Makes `to` a symbolic link, replacing an existing file.
fn link(target: &str, to: &Path) -> Result<(), String> {
    let new = to.with_extension("varve-new");
    let _ = std::fs::remove_file(&new);
    std::os::unix::fs::symlink(target, &new)
        .and_then(|()| std::fs::rename(&new, to))
        .map_err(|error| format!("{} to {target}: {error}", to.display()))?;
    println!("{}", to.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{InstallOptions, SONAME, link, pkg_config};
    use std::path::Path;

    fn parse(words: &[&str]) -> Result<InstallOptions, String> {
        InstallOptions::parse(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn prefix_is_absolute_and_destdir_is_before_it() {
        let options = parse(&["--prefix", "/opt/v", "--destdir", "/tmp/stage"]).unwrap();
        assert_eq!(options.to("lib/x.so"), Path::new("/tmp/stage/opt/v/lib/x.so"));
        let helper = parse(&["--destdir", "/tmp/stage", "--mount-helper"]).unwrap();
        assert!(helper.mount_helper && !options.mount_helper);
        assert_eq!(
            helper.below("/sbin/mount.varve".into()),
            Path::new("/tmp/stage/sbin/mount.varve")
        );
        assert!(parse(&["--prefix", "here"]).is_err());
        assert!(parse(&["--prefix"]).is_err());
        assert!(parse(&["--perfix", "/x"]).is_err());
    }

    #[test]
    fn library_is_installed_under_the_name_that_is_in_it_and_linked_to() {
        let said = include_str!("../../capi/build.rs");
        assert!(said.contains(&format!("-soname,{SONAME}\"")), "{said}");
        let dir = std::env::temp_dir().join(format!("varve-xtask-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let name = dir.join("libvarve.so");
        std::fs::write(&name, "an older library").unwrap();
        link(SONAME, &name).unwrap();
        assert_eq!(std::fs::read_link(&name).unwrap(), Path::new(SONAME));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn pkg_config_file_is_filled_in() {
        let text = pkg_config(include_str!("../../capi/varve.pc.in"), Path::new("/opt/v"));
        assert!(
            text.starts_with("prefix=/opt/v\n") && text.contains("libdir=${prefix}/lib\n"),
            "{text}"
        );
        assert!(!text.contains('@'), "{text}");
    }
}
