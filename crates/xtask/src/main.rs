//! Commands for developers: `install` (the release under a prefix), `soak` (all suites with fresh seeds until
//! one fails), `structure` (the order of crates and modules), `links` (dead links).
#![forbid(unsafe_code)]

mod install;
mod links;
mod soak;
mod structure;

use std::process::ExitCode;

const USAGE: &str = "\
Long runs of Varve's tests, installing what was built, and the order of the sources.

Usage: cargo xtask install [--prefix DIR] [--destdir DIR] [--mount-helper]
       cargo xtask soak [--hours N] [--seed N] [--only NAME[,NAME...]] [--debug] [--list]
       cargo xtask links [--root DIR]
       cargo xtask structure [--places] [--figures] [--root DIR]

install: builds the release and puts varve, libvarve.so, varve.h, varve_cache.h, varve_alloc.h and varve.pc under the prefix, /usr/local if not
given; --destdir (or DESTDIR) is put before it and into no file. --mount-helper links mount.varve and
mount.fuse.varve in /sbin to varve, for mount(8) and /etc/fstab.

links: fails when a document has a dead link, or when a document or a comment names, in backticks, a path of this
repository that is not there.

structure: fails when a crate or a top-level module uses one that structure.toml puts above it, or one that it does
not list, and says what to do. Prints figures of size and naming, which never fail.
  --places    lists each thing that the figures count
  --figures   figures only, of a tree without structure.toml, too
  --root DIR  the tree, this repository if not given

soak:
  --hours N   how long, 2 if not given; fractions are allowed. The suite under way when it is over is finished
  --seed N    seed of the first round; each later round has the next one. From the clock if not given
  --only ...  these suites only
  --debug     all suites with debug assertions, as CI builds them
  --list      names the suites and ends

Each suite is run by `cargo test --release` (suites that need debug assertions: without; \"coverage\" by fuzz/run), with
its output in target/soak/. It stops at the first failure, or when a suite is not over after 90 minutes, and says how to
repeat it.

Exit code: 0 all went well, 1 a suite or a check failed, 2 wrong arguments.
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("soak") => match soak::SoakOptions::parse(args) {
            Ok(options) => soak::run(&options),
            Err(why) => usage(&why),
        },
        Some("install") => done(install::InstallOptions::parse(args), install::run),
        Some("links") => done(links::LinkOptions::parse(args), links::run),
        Some("structure") => done(structure::StructureOptions::parse(args), structure::run),
        Some("--help" | "-h" | "help") => {
            print!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Runs a command with its parsed arguments.
fn done<T>(options: Result<T, String>, run: impl Fn(&T) -> Result<(), String>) -> ExitCode {
    let options = match options {
        Ok(options) => options,
        Err(why) => return usage(&why),
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(1)
        }
    }
}

fn usage(why: &str) -> ExitCode {
    eprintln!("{why}\n\n{USAGE}");
    ExitCode::from(2)
}
