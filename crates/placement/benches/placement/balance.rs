//! `balance` against all other policies and all static splits (docs/results/placement.md, "Balance").

use crate::side::{MOVING, fixed, head, row, run, striped};
use varve_placement::sim::device::Model;
use varve_placement::sim::{Load, Report, loads, models};

fn pairs() -> Vec<(&'static str, Vec<Model>)> {
    vec![
        (
            "poor SSD and 7,200 rpm disk",
            vec![models::poor_ssd(), models::sata_disk()],
        ),
        (
            "good SSD and 15,000 rpm disk",
            vec![models::good_ssd(), models::scsi_disk()],
        ),
        (
            "good SSD of 256 MiB and 15,000 rpm disk",
            vec![models::good_ssd().sized(256 << 20), models::scsi_disk()],
        ),
        ("NVMe and good SSD", vec![models::nvme(), models::good_ssd()]),
    ]
}

fn all_loads(seconds: u32) -> Vec<Load> {
    let mut all: Vec<Load> = (0..=4).map(|readers| loads::iozone(readers, seconds)).collect();
    all.extend([
        loads::sfs(8, seconds),
        loads::postmark(false, seconds),
        loads::postmark(true, seconds),
        loads::dbench(1, seconds),
        loads::dbench(10, seconds),
        loads::netapp(1, seconds),
        loads::netapp(10, seconds),
        loads::changing(2 * seconds),
        loads::scan(seconds),
        loads::database(seconds),
        loads::fileserver(seconds),
        loads::webserver(seconds),
    ]);
    all
}

fn best(reports: &[Report]) -> &Report {
    let by = |report: &&Report| (report.rate() * 1000.0) as u64;
    reports.iter().max_by_key(by).expect("some side ran")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Seconds after a change until the rate stays within a tenth of what it comes to at the end.
fn settled_s(report: &Report, change: usize) -> usize {
    let last = report.seconds.len();
    let end = report.rate_in(last - last / 8, last);
    let window = 5;
    let good = |from: usize| report.rate_in(from, (from + window).min(last)) >= 0.9 * end;
    (change..last - window)
        .find(|from| (*from..last - window).all(&good))
        .map_or(last - change, |from| from - change)
}

/// The whole table.
pub fn all(quick: bool) {
    let seconds = if quick { 20 } else { 120 };
    let (mut to_best, mut to_hierarchy, mut worst) = (Vec::new(), Vec::new(), Vec::new());
    for (name, models) in pairs() {
        println!("\n### {name}");
        head(&[
            "load",
            "best static",
            "striping",
            "hierarchy",
            "measured",
            "wardrop",
            "balance",
            "smq-like",
            "bcachefs-like",
            "balance / best",
            "/ hierarchy",
            "moved, MiB",
            "best's",
            "settled, s",
        ]);
        // What is a hundred times faster shows as much in a fraction of the time.
        let fast = models.iter().all(|model| model.seek.is_none());
        for load in all_loads(if fast { seconds / 5 } else { seconds }) {
            let splits: Vec<Report> = (0..=10)
                .map(|tenth| run(&models, &load, fixed(tenth * 10, models.len())))
                .collect();
            let mut sides: Vec<Report> = MOVING.iter().map(|make| run(&models, &load, make())).collect();
            let balance = sides.remove(3);
            let stripes = run(&models, &load, striped());
            let split = best(&splits);
            let moving = best(&sides);
            let rival = if split.rate() > moving.rate() {
                split
            } else {
                moving
            };
            let rival = if stripes.rate() > rival.rate() {
                &stripes
            } else {
                rival
            };
            let ratio = balance.rate() / rival.rate();
            let up = balance.rate() / sides[0].rate();
            to_best.push(ratio);
            to_hierarchy.push(up);
            if ratio < 0.95 {
                worst.push(format!("{name}, {}: {ratio:.2} of {}", load.name, rival.policy));
            }
            let mib = |report: &Report| format!("{:.0}", report.moved_bytes as f64 / f64::from(1 << 20));
            let change = if load.phases.len() > 1 {
                load.phases[0].seconds as usize
            } else {
                0
            };
            let mut cells = vec![
                load.name.clone(),
                format!("{:.0} ({})", split.rate(), split.policy),
            ];
            cells.push(format!("{:.0}", stripes.rate()));
            cells.extend(sides[..3].iter().map(|side| format!("{:.0}", side.rate())));
            cells.push(format!("**{:.0}**", balance.rate()));
            cells.extend(sides[3..].iter().map(|side| format!("{:.0}", side.rate())));
            cells.extend([
                format!("**{ratio:.2}**"),
                format!("{up:.2}"),
                mib(&balance),
                mib(rival),
            ]);
            cells.push(settled_s(&balance, change).to_string());
            row(&cells);
        }
    }
    let least = to_best.iter().copied().fold(f64::INFINITY, f64::min);
    let good = to_best.iter().filter(|ratio| **ratio >= 0.95).count();
    println!(
        "\nbalance / best: median {:.2}, least {least:.2}, ≥ 0.95 in {good} of {}; \
         balance / hierarchy: median {:.2}",
        median(to_best.clone()),
        to_best.len(),
        median(to_hierarchy)
    );
    worst.iter().for_each(|line| println!("- {line}"));
}
