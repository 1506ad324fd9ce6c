//! `cargo bench --bench everyday`: the programs of every day, each on `varve run`, on the mount alone and in
//! company, and on file systems of the kernel, in one run.
//!
//! ```console
//! cargo bench --bench everyday                                  # all rows, in memory, three rounds
//! cargo bench --bench everyday -- --disk                        # NVM a file, and the disk's own file system
//! cargo bench --bench everyday -- --rows 'git clone,200 cat' --sides run,mount --rounds 5
//! cargo bench --bench everyday -- --varve OLD --varve NEW       # two builds by turns: run-1, run-2, …
//! ```
//!
//! *run* is the script under `varve run`, *mount* on the pool's mount, *company* there too while another
//! program changes files elsewhere in the pool, *uring* on the mount of a second pool that takes its requests
//! by io_uring, where the kernel has it and this is root; *tmpfs* persists nothing; with `--disk` *disk* is
//! the file system of the directory for temporary files (`TMPDIR`). Milliseconds, the median of the rounds.
//! In each round all sides take their turn, half a second after what was prepared for it; in the row that
//! begins with `ls` another program has looked at the directory just before. A row whose names differ between the sides afterwards is a
//! failure.

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "shared with other benches")]
mod common;
mod rows;
mod sides;
#[path = "../../crates/fuse-shim/tests/switch/mod.rs"]
mod switch;

use rows::{ROWS, Row};
use sides::{Pool, Side};
use std::path::PathBuf;
use switch::UringSwitch;

struct Options {
    rows: Vec<String>,
    sides: Vec<String>,
    rounds: usize,
    on_disk: bool,
    varves: Vec<PathBuf>,
}

fn parse() -> anyhow::Result<Options> {
    let mut options = Options {
        rows: Vec::new(),
        sides: Vec::new(),
        rounds: 3,
        on_disk: false,
        varves: Vec::new(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || {
            words
                .next()
                .ok_or_else(|| anyhow::anyhow!("{word} needs a value"))
        };
        let list = |text: String| text.split(',').map(str::to_owned).collect();
        match word.as_str() {
            "--bench" => {}
            "--disk" => options.on_disk = true,
            "--rows" => options.rows = list(value()?),
            "--sides" => options.sides = list(value()?),
            "--rounds" => options.rounds = value()?.parse()?,
            "--varve" => options.varves.push(std::fs::canonicalize(value()?)?),
            other => anyhow::bail!("{other}: not known. --disk --rows --sides --rounds --varve"),
        }
    }
    if options.varves.is_empty() {
        options.varves.push(env!("CARGO_BIN_EXE_varve").into());
    }
    Ok(options)
}

fn is_wanted(list: &[String], name: &str) -> bool {
    list.is_empty() || list.iter().any(|wanted| wanted == name)
}

/// Whether a program is there.
fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// The row's values for each side; none where it failed, which is said.
fn measure(row: &Row, sides: &[Side], rounds: usize, inputs: &std::path::Path) -> Vec<Vec<f64>> {
    let mut values = vec![Vec::new(); sides.len()];
    for _ in 0..rounds {
        let mut names = Vec::new();
        for (side, values) in sides.iter().zip(&mut values) {
            match side.measure(row, inputs) {
                Ok((ms, found)) => {
                    values.push(ms);
                    names.push(found);
                }
                Err(error) => eprintln!("FAILED: {} on {}: {error:#}", row.name, side.name),
            }
        }
        if names.windows(2).any(|pair| pair[0] != pair[1]) {
            eprintln!(
                "FAILED: {}: the sides have other names than each other: {names:?}",
                row.name
            );
        }
    }
    values
}

fn main() -> anyhow::Result<()> {
    let options = parse()?;
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let disk = tempfile::tempdir()?;
    let inputs = memory.path().join("inputs");
    std::fs::create_dir(&inputs)?;
    rows::prepare(&inputs)?;
    let top = if options.on_disk {
        disk.path()
    } else {
        memory.path()
    };
    // The other mounts read their requests from the device.
    let switch = UringSwitch::set(false).ok();
    let mut pools = Vec::new();
    let mut sides = Vec::new();
    for (number, varve) in options.varves.iter().enumerate() {
        let pool = Pool::up(varve, &top.join(format!("pool-{}", number + 1)), options.on_disk)?;
        let mark = if options.varves.len() > 1 {
            format!("-{}", number + 1)
        } else {
            String::new()
        };
        sides.extend(pool.sides(&mark));
        pools.push(pool);
        let side = format!("uring{mark}");
        if !is_wanted(&options.sides, &side) {
            continue;
        }
        match switch.as_ref().map(|switch| switch.turn(true)) {
            Some(Ok(())) => {
                let dir = top.join(format!("pool-{}-uring", number + 1));
                let pool = Pool::up(varve, &dir, options.on_disk)?;
                sides.push(pool.mount(side));
                pools.push(pool);
            }
            _ => println!("SKIPPED: {side}: FUSE over io_uring cannot be switched on"),
        }
        if let Some(switch) = &switch {
            switch.turn(false)?;
        }
    }
    let plain = top.join("plain");
    std::fs::create_dir(&plain)?;
    sides.push(Side::plain(
        if options.on_disk { "disk" } else { "tmpfs" },
        &plain,
    ));
    sides.retain(|side| is_wanted(&options.sides, &side.name));
    let machine = common::machine(serde_json::json!({}));
    println!("{machine}");
    for (number, varve) in options.varves.iter().enumerate() {
        println!("-{}: {}", number + 1, varve.display());
    }
    let names: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
    println!("| ms | {} | first : others |", names.join(" | "));
    println!("| --- |{} --- |", " ---: |".repeat(names.len()));
    let mut ratios = vec![Vec::new(); sides.len()];
    for row in ROWS.iter().filter(|row| is_wanted(&options.rows, row.name)) {
        if !has(row.needs) {
            println!("| {} | SKIPPED: no {} |", row.name, row.needs);
            continue;
        }
        let medians: Vec<Option<f64>> = measure(row, &sides, options.rounds, &inputs)
            .iter()
            .map(|values| median(values))
            .collect();
        let text = |value: Option<f64>| value.map_or("–".to_owned(), |ms| format!("{ms:.0}"));
        let cells: Vec<String> = medians.iter().copied().map(text).collect();
        let mut compared = Vec::new();
        for (other, ratios) in medians.iter().zip(&mut ratios).skip(1) {
            let ratio = medians[0].zip(*other).map(|(first, other)| first / other);
            ratios.extend(ratio);
            compared.push(ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}")));
        }
        println!(
            "| {} | {} | {} |",
            row.name,
            cells.join(" | "),
            compared.join(" ")
        );
    }
    let of_rows = ratios
        .iter()
        .skip(1)
        .map(|ratios| median(ratios).map_or("–".to_owned(), |ratio| format!("{ratio:.2}")));
    println!("median of the ratios: {}", of_rows.collect::<Vec<_>>().join(" "));
    Ok(())
}
