//! Fills the index of each policy as for a disk of SIZE GiB (default 1024) of 8 KiB objects, and prints the
//! memory that the process took for it beside Table 2.3's. Each policy in a process of its own: `index_bits
//! [GIB [POLICY]]`.

use std::process::Command;
use varve_cache::index::{Index, Place, Set};
use varve_cache::model::{Disk, object_bits};
use varve_cache::{Policy, Shape};

fn rss_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is there");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("Linux has VmRSS");
    let kib: f64 = line
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a number");
    kib * 1024.0
}

fn fill(policy: Policy, gib: u64) {
    let shape = Shape::new(policy);
    let disk = Disk {
        bytes: gib << 30,
        seeks_per_s: 78.0,
        object_bytes: 8192,
    };
    let objects = disk.objects();
    let sets = objects / shape.ways() as u64;
    let share = if policy == Policy::SetMemLru { 0.3 } else { 1.0 };
    let before = rss_bytes();
    let mut index = Index::new(shape, sets, (sets as f64 * share) as u64);
    let start = std::time::Instant::now();
    if policy.has_index() {
        for number in 0..sets {
            let mut set = Set::empty(shape);
            for slot in 0..shape.ways() as u64 {
                let place = Place {
                    position: (number * 8 + slot) as u32,
                    generation: 1,
                    prefetch: 2,
                };
                set.insert((1 + (number * 31 + slot) % 255) as u8, place, |_| false);
            }
            index.put(number, &set);
        }
    }
    let ns = start.elapsed().as_nanos() as f64 / objects as f64;
    let took = rss_bytes() - before;
    let bits = took * 8.0 / objects as f64;
    let table = object_bits(shape, share);
    let (mib, want) = (took / 1048576.0, disk.index_bytes(shape, share) / 1048576.0);
    let more = if want > 0.0 {
        format!("{:+.2} %", (mib / want - 1.0) * 100.0)
    } else {
        String::new()
    };
    println!("{policy:<18} {table:>7.3} {want:>9.1} {bits:>8.3} {mib:>9.1} {more:>8} {ns:>7.0}");
    drop(index);
}

fn main() {
    let mut args = std::env::args().skip(1);
    let gib = args
        .next()
        .map_or(1024, |gib| gib.parse().expect("GIB is a number"));
    if let Some(policy) = args.next() {
        return fill(policy.parse().expect("a policy"), gib);
    }
    println!("{gib} GiB of 8 KiB objects; memory by VmRSS");
    println!(
        "{:<18} {:>7} {:>9} {:>8} {:>9} {:>8} {:>7}",
        "policy", "bits", "MiB", "by RSS", "MiB", "more", "ns/obj"
    );
    let me = std::env::current_exe().expect("a program knows its file");
    for policy in Policy::ALL {
        let status = Command::new(&me)
            .args([gib.to_string().as_str(), policy.name()])
            .status();
        assert!(status.is_ok_and(|status| status.success()), "{policy} failed");
    }
}
