//! What far memory costs, all sides in one run on the same memory, with ratios.
//!
//! Faults against a handler that does nothing; first touches against the kernel's; random access with half of
//! the memory local against the kernel's swap in the same memory and on zram. As root; swap needs
//! `/dev/zram0` or a loop device and a memory control group (version 1), and is undone at the end. `cargo
//! bench --bench far [-- --quick]`.

mod load;
mod sides;

use std::process::{Command, ExitCode};

use clap::Parser;
use varve_vm_manager::cli::VmCommand;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: VmCommand,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("--vm") => {
            let command = Cli::parse_from(std::env::args_os().skip(1)).command;
            return varve_vm_manager::cli::run(command).unwrap_or_else(|error| {
                eprintln!("varve vm: {error:#}");
                ExitCode::FAILURE
            });
        }
        Some("--load") => {
            load::run(&arguments[1..]);
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("far: SKIPPED: needs root");
        return ExitCode::SUCCESS;
    }
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let rounds = if quick { 1 } else { 3 };
    faults(rounds);
    random(rounds, if quick { "2" } else { "5" });
    ExitCode::SUCCESS
}

/// A load, run by itself or by `varve vm run` with these arguments. Gives the number that it printed.
fn measure(vm: Option<&[&str]>, load: &[&str], group: Option<&sides::Group>) -> Option<f64> {
    let me = std::env::current_exe().ok()?;
    let mut command = Command::new(&me);
    if let Some(vm) = vm {
        command
            .args(["--vm", "run", "--quiet"])
            .args(vm)
            .arg("--")
            .arg(&me);
    }
    command.arg("--load").args(load);
    if let Some(group) = group {
        group.enter(&mut command);
    }
    let output = command.output().ok()?;
    if !output.status.success() {
        eprintln!(
            "far: {load:?} {vm:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        return None;
    }
    // A program that could not join runs without far memory, at the speed of DRAM: that is no time of ours.
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let status = told
        .lines()
        .rev()
        .find_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let evicted = status.and_then(|status| status["evicted"].as_u64());
    if vm.is_some() && evicted.unwrap_or(0) == 0 {
        eprintln!("far: {load:?} {vm:?}: nothing was evicted, so nothing was measured: {told}");
        return None;
    }
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

/// Median of the rounds of each side; the sides take turns.
fn medians(rounds: usize, sides: &mut [(&str, &mut dyn FnMut() -> Option<f64>)]) -> Vec<Option<f64>> {
    let mut all = vec![Vec::new(); sides.len()];
    for _ in 0..rounds {
        for ((_, side), times) in sides.iter_mut().zip(&mut all) {
            times.extend(side());
        }
    }
    all.into_iter()
        .map(|mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times.get(times.len() / 2).copied()
        })
        .collect()
}

fn table(title: &str, names: &[&str], times: &[Option<f64>], against: &[usize]) {
    println!("\n{title}");
    for (name, time) in names.iter().zip(times) {
        let Some(time) = time else {
            println!("  {name:<44} not measured");
            continue;
        };
        let ratios: Vec<String> = against
            .iter()
            .filter_map(|other| {
                Some(format!(
                    "{:.2} x {}",
                    time / (*times.get(*other)?)?,
                    names[*other]
                ))
            })
            .collect();
        println!("  {name:<44} {:>8.2} us   {}", time / 1e3, ratios.join(", "));
    }
}

const SHM: [&str; 4] = ["--far", "/dev/shm=1G", "--policy", ""];

/// Arguments of `run` for slabs in a file in memory alone.
fn in_file<'a>(local: &'a str, policy: &'a str) -> Vec<&'a str> {
    vec!["--local", local, SHM[0], SHM[1], SHM[2], policy]
}

fn faults(rounds: usize) {
    let policy = sides::Policy::uncompressed();
    let file = in_file("48M", policy.path());
    let compressed = ["--local", "48M", "--far", "/dev/shm=1G"];
    for threads in ["1", "2"] {
        let names = [
            "does nothing, thread of the program",
            "does nothing, another process",
            "far, from a file in memory",
            "far, from it, with steady eviction",
            "far, from compressed memory",
        ];
        let times = medians(
            rounds,
            &mut [
                (names[0], &mut || measure(None, &["nothing-in", threads], None)),
                (names[1], &mut || measure(None, &["nothing-out", threads], None)),
                (names[2], &mut || {
                    measure(Some(&file), &["refault", threads], None)
                }),
                (names[3], &mut || {
                    measure(Some(&file), &["refault-steady", threads], None)
                }),
                (names[4], &mut || {
                    measure(Some(&compressed), &["refault", threads], None)
                }),
            ],
        );
        table(
            &format!("one fault, {threads} thread(s)"),
            &names,
            &times,
            &[0, 1],
        );
    }
    let names = ["first touch, kernel", "first touch, far memory in use"];
    let times = medians(
        rounds,
        &mut [
            (names[0], &mut || measure(None, &["first", "1"], None)),
            (names[1], &mut || measure(Some(&file), &["first", "1"], None)),
        ],
    );
    table("first touch of a page", &names, &times, &[0]);
}

/// Random access to 256 MiB, half of it local.
fn random(rounds: usize, seconds: &str) {
    const MIB: &str = "256";
    let policy = sides::Policy::uncompressed();
    let file = in_file("134M", policy.path());
    let compressed = ["--local", "134M", "--far", "/dev/shm=1G"];
    let group = sides::Group::new(134 << 20);
    let load = ["random", MIB, seconds];
    let swapped = |swap: Option<sides::Swap>| {
        let time = swap
            .as_ref()
            .and(group.as_ref())
            .and_then(|group| measure(None, &load, Some(group)));
        drop(swap);
        time
    };
    let names = [
        "all in DRAM",
        "swap on a loop device in memory",
        "swap on zram (lz4)",
        "far, a file in memory",
        "far, compressed memory, then a file",
    ];
    let times = medians(
        rounds,
        &mut [
            (names[0], &mut || measure(None, &load, None)),
            (names[1], &mut || swapped(sides::Swap::memory())),
            (names[2], &mut || swapped(sides::Swap::zram())),
            (names[3], &mut || measure(Some(&file), &load, None)),
            (names[4], &mut || measure(Some(&compressed), &load, None)),
        ],
    );
    table(
        "random access, 256 MiB, 134 MiB local, half of the accesses write",
        &names,
        &times,
        &[0, 1, 2],
    );
}
