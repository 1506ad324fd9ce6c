//! One side of a comparison: a policy on devices under a load.

use varve_placement::policy::{
    Balance, Fixed, Hierarchy, Measured, Policy, Smq, Striped, Wardrop, Writeback,
};
use varve_placement::sim::device::Model;
use varve_placement::sim::{Load, Options, Report, World};

/// Makes a policy.
pub type Make = fn() -> Box<dyn Policy>;

/// The policies that move something.
pub const MOVING: [Make; 6] = [
    || Box::new(Hierarchy::default()),
    || Box::new(Measured::default()),
    || Box::new(Wardrop::default()),
    || Box::new(Balance::default()),
    || Box::new(Smq::default()),
    || Box::new(Writeback::default()),
];

/// Runs one side; the second half is measured.
pub fn run(models: &[Model], load: &Load, policy: Box<dyn Policy>) -> Report {
    let options = Options {
        from_s: load.seconds() / 2,
        ..Options::default()
    };
    World::new(models, load.clone(), policy, options).run()
}

/// Striping.
pub fn striped() -> Box<dyn Policy> {
    Box::new(Striped)
}

/// `percent` on the first device, the others share the rest.
pub fn fixed(percent: u32, devices: usize) -> Box<dyn Policy> {
    let others = devices as u32 - 1;
    let mut shares = vec![(100 - percent) / others; devices];
    shares[0] = percent;
    Box::new(Fixed::new(&shares))
}

/// A row of a Markdown table.
pub fn row(cells: &[String]) {
    println!("| {} |", cells.join(" | "));
}

/// Its head: the first column is text.
pub fn head(cells: &[&str]) {
    println!("\n| {} |", cells.join(" | "));
    println!("| --- |{}", " ---: |".repeat(cells.len() - 1));
}
