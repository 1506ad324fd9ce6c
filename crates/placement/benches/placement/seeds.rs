//! The seeds' figures again: measured migration (Chapter II) and Wardrop allocation (Chapter III).

use crate::side::{fixed, head, row, run, striped};
use varve_placement::UnitSize;
use varve_placement::policy::{Balance, Hierarchy, Measured, MeasuredConfig, Policy, Wardrop};
use varve_placement::sim::device::Model;
use varve_placement::sim::{Load, Options, Report, World, loads, models};

fn number(value: f64) -> String {
    if value < 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

fn with(models: &[Model], load: &Load, policy: Box<dyn Policy>, change: impl Fn(&mut Options)) -> Report {
    let mut options = Options {
        from_s: load.seconds() / 2,
        ..Options::default()
    };
    change(&mut options);
    World::new(models, load.clone(), policy, options).run()
}

/// Figures 5, 6 and 9, Tables I and II.
pub fn measured(quick: bool) {
    let seconds = if quick { 60 } else { 300 };
    let poor = [models::poor_ssd(), models::sata_disk()];
    println!("\n## Measured migration: poor SSD and 7,200 rpm disk");
    println!("\n### Requests a second by processes (Fig. 5a): sfs 1R:4W");
    head(&[
        "processes",
        "SSD only",
        "disk only",
        "striping",
        "measured",
        "hierarchy",
        "balance",
        "measured / striping",
    ]);
    for processes in [1, 2, 4, 8, 16] {
        let load = loads::sfs(processes, seconds);
        let sides: Vec<f64> = [
            fixed(100, 2),
            fixed(0, 2),
            striped(),
            Box::new(Measured::default()),
            Box::new(Hierarchy::default()),
            Box::new(Balance::default()),
        ]
        .into_iter()
        .map(|policy| run(&poor, &load, policy).rate())
        .collect();
        let mut cells = vec![processes.to_string()];
        cells.extend(sides.iter().map(|rate| number(*rate)));
        cells.push(format!("**{:.2}**", sides[3] / sides[2]));
        row(&cells);
    }
    over_time(&poor, seconds);
    sensitivity(&poor, seconds);
    println!("\n### IoZone mixes against two disks (Fig. 9), and Postmark (Tables I, II): requests a second");
    head(&[
        "load",
        "striping, poor SSD",
        "measured, poor SSD",
        "striping, fair SSD",
        "measured, fair SSD",
        "two disks striped",
    ]);
    let fair = [models::fair_ssd(), models::sata_disk()];
    let disks = [models::sata_disk(), models::sata_disk()];
    let mut all: Vec<Load> = (0..=4).map(|readers| loads::iozone(readers, seconds)).collect();
    all.extend([loads::postmark(false, seconds), loads::postmark(true, seconds)]);
    for load in all {
        let mut cells = vec![load.name.clone()];
        for models in [&poor, &fair] {
            cells.push(number(run(models, &load, striped()).rate()));
            cells.push(number(run(models, &load, Box::new(Measured::default())).rate()));
        }
        cells.push(number(run(&disks, &load, striped()).rate()));
        row(&cells);
    }
}

fn over_time(models: &[Model], seconds: u32) {
    println!("\n### Where writes go over time (Fig. 5b): 8 processes, kB a second");
    head(&[
        "seconds",
        "read, SSD",
        "read, disk",
        "written, SSD",
        "written, disk",
    ]);
    let report = run(models, &loads::sfs(8, seconds), Box::new(Measured::default()));
    let step = report.seconds.len() / 6;
    for part in 0..6 {
        let piece = &report.seconds[part * step..(part + 1) * step];
        let sum = |of: fn(&varve_placement::sim::Second) -> &Vec<u64>, device: usize| {
            let bytes: u64 = piece.iter().filter_map(|second| of(second).get(device)).sum();
            number(bytes as f64 / 1000.0 / step as f64)
        };
        let times = format!("{}–{}", part * step, (part + 1) * step);
        row(&[
            times,
            sum(|s| &s.read, 0),
            sum(|s| &s.read, 1),
            sum(|s| &s.written, 0),
            sum(|s| &s.written, 1),
        ]);
    }
}

fn sensitivity(models: &[Model], seconds: u32) {
    println!("\n### δ and the size of a unit (Fig. 6): sfs, 8 processes");
    head(&["δ", "unit, KiB", "requests a second", "moved, MiB"]);
    let load = loads::sfs(8, seconds);
    let sides = [0.1, 0.5, 1.0, 2.0, 5.0].map(|delta| (delta, 64)).into_iter();
    for (delta, kib) in sides.chain([128, 256, 1024].map(|kib| (1.0, kib))) {
        let config = MeasuredConfig {
            delta,
            ..MeasuredConfig::default()
        };
        let unit = UnitSize::new(kib << 10).unwrap_or(UnitSize::DEFAULT);
        let mut load = load.clone();
        // The same bytes in larger units.
        load.sets.iter_mut().for_each(|units| *units /= (kib / 64) as u32);
        let report = with(models, &load, Box::new(Measured::new(config)), |options| {
            options.unit = unit
        });
        let mib = number(report.moved_bytes as f64 / f64::from(1 << 20));
        row(&[delta.to_string(), kib.to_string(), number(report.rate()), mib]);
    }
}

/// Figures 13 to 17, Table V.
pub fn wardrop(quick: bool) {
    let seconds = if quick { 30 } else { 120 };
    println!("\n## Wardrop allocation: good SSD and 15,000 rpm disks");
    for disks in [1, 2, 4] {
        let mut models = vec![models::good_ssd()];
        models.extend((0..disks).map(|_| models::scsi_disk()));
        println!("\n### 1 SSD and {disks} disks: MB/s, mean ms (Figs. 13–17)");
        head(&[
            "load",
            "SSD only",
            "disks only",
            "striping",
            "80/20",
            "wardrop",
            "balance",
            "wardrop / SSD",
            "/ striping",
            "latency / SSD",
            "on SSD",
        ]);
        for processes in if disks == 1 { &[1, 4, 10][..] } else { &[10][..] } {
            for load in [
                loads::dbench(*processes, seconds),
                loads::netapp(*processes, seconds),
            ] {
                sides(&models, &load);
            }
        }
    }
    println!("\n### One process, then ten (Table V): requests a second");
    head(&["policy", "1 process", "10 processes", "on SSD at the end"]);
    let models = [models::good_ssd(), models::scsi_disk()];
    let load = loads::changing(2 * seconds);
    let policies: [Box<dyn Policy>; 5] = [
        fixed(0, 2),
        fixed(100, 2),
        striped(),
        Box::new(Wardrop::default()),
        Box::new(Balance::default()),
    ];
    for policy in policies {
        let report = run(&models, &load, policy);
        let half = seconds as usize;
        let rates = [
            report.rate_in(half / 2, half),
            report.rate_in(half + half / 2, 2 * half),
        ]
        .map(number);
        let [one, ten] = rates;
        row(&[
            report.policy.clone(),
            one,
            ten,
            format!("{:.0} %", report.share[0] * 100.0),
        ]);
    }
}

fn sides(models: &[Model], load: &Load) {
    let policies: [Box<dyn Policy>; 6] = [
        fixed(100, models.len()),
        fixed(0, models.len()),
        striped(),
        fixed(80, models.len()),
        Box::new(Wardrop::default()),
        Box::new(Balance::default()),
    ];
    // The seed keeps 100 extents in memory, on all sides.
    let reports = policies.map(|policy| with(models, load, policy, |options| options.cached_units = 100));
    let mut cells = vec![load.name.clone()];
    let cell = |report: &Report| {
        format!(
            "{} ({:.2})",
            number(report.megabytes()),
            report.mean_us() / 1000.0
        )
    };
    cells.extend(reports.iter().map(cell));
    let [ssd, _, stripes, _, wardrop, _] = &reports;
    let of = |other: &Report| format!("**{:.2}**", wardrop.megabytes() / other.megabytes());
    cells.extend([
        of(ssd),
        of(stripes),
        format!("{:.2}", wardrop.mean_us() / ssd.mean_us()),
    ]);
    cells.push(format!("{:.0} %", wardrop.share[0] * 100.0));
    row(&cells);
}
