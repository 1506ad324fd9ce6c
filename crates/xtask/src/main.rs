//! `cargo xtask soak`: all suites with fresh seeds, one round after the other, until the time is over or something fails. `cargo xtask install`:
//! the release under a prefix.
#![forbid(unsafe_code)]

mod install;
mod soak;

use std::process::ExitCode;

const USAGE: &str = "\
Long runs of Varve's tests, and installing what was built.

Usage: cargo xtask install [--prefix DIR] [--destdir DIR]
       cargo xtask soak [--hours N] [--seed N] [--only NAME[,NAME...]] [--debug] [--list]

install: builds the release and puts varve, libvarve.so, varve.h and varve.pc under the prefix, /usr/local if not given; --destdir (or DESTDIR)
is put before it and into no file.

soak:
  --hours N   how long, 2 if not given; fractions are allowed. The suite under way when it is over is finished
  --seed N    seed of the first round; each later round has the next one. From the clock if not given
  --only ...  these suites only
  --debug     all suites with debug assertions, as CI builds them
  --list      names the suites and ends

Each suite is run by `cargo test --release` (suites that need debug assertions: without; \"coverage\" by fuzz/run), with its output in
target/soak/. It stops at the first failure, or when a suite is not over after 90 minutes, and says how to repeat it. Exit code: 0 all went
well, 1 a suite failed, 2 wrong arguments.
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("soak") => match soak::Options::parse(args) {
            Ok(options) => soak::run(&options),
            Err(why) => {
                eprintln!("{why}\n\n{USAGE}");
                ExitCode::from(2)
            }
        },
        Some("install") => match install::Options::parse(args) {
            Ok(options) => match install::run(&options) {
                Ok(()) => ExitCode::SUCCESS,
                Err(why) => {
                    eprintln!("{why}");
                    ExitCode::from(1)
                }
            },
            Err(why) => {
                eprintln!("{why}\n\n{USAGE}");
                ExitCode::from(2)
            }
        },
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
