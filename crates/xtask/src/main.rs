//! `cargo xtask soak`: all suites with fresh seeds, one round after the other, until the time is over or something fails.
#![forbid(unsafe_code)]

mod soak;

use std::process::ExitCode;

const USAGE: &str = "\
Long runs of Varve's tests.

Usage: cargo xtask soak [--hours N] [--seed N] [--only NAME[,NAME...]] [--list]

  --hours N   how long, 2 if not given; fractions are allowed. The round under way when it is over is finished
  --seed N    seed of the first round; each later round has the next one. From the clock if not given
  --only ...  these suites only
  --list      names the suites and ends

Each suite is run by `cargo test --release` (suites that need debug assertions: without), with its output in target/soak/. It stops at the
first failure and says how to repeat it. Exit code: 0 all went well, 1 a suite failed, 2 wrong arguments.
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
