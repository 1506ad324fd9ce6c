//! How long a store with many objects takes to start after a stop and after a kill -9, and what is still
//! there.
//! `restart FILE [OBJECTS]`: makes a store of small objects in FILE (about 640 bytes each) and removes it at
//! the end.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_cache::device::{Device, FileDevice};
use varve_cache::{Cache, Options, Policy, PutOptions, StorePlan};

fn options() -> Options {
    Options {
        hot_bytes: 0,
        ..Options::default()
    }
}

fn open(path: &Path) -> (Cache, f64, bool) {
    let start = Instant::now();
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(path).expect("the file opens"));
    let (cache, opened) = Cache::open(vec![device], &options(), false).expect("the store opens");
    (cache, start.elapsed().as_secs_f64(), opened[0].clean)
}

fn put(cache: &Cache, range: std::ops::Range<u64>) {
    for n in range {
        let done = cache.put(&n.to_le_bytes(), &[n as u8; 300], PutOptions::default());
        done.expect("keys are short");
    }
}

fn share(cache: &Cache, range: std::ops::Range<u64>) -> f64 {
    let step = ((range.end - range.start) / 20_000).max(1) as usize;
    let asked = range.clone().step_by(step).count();
    let found = range
        .step_by(step)
        .filter(|n| cache.get(&n.to_le_bytes()).is_some())
        .count();
    found as f64 / asked as f64
}

/// A part of the work in a process of its own, so that a kill is one.
fn part(what: &str, path: &Path, objects: u64) {
    match what {
        "fill" => {
            let cache = open(path).0;
            let start = Instant::now();
            put(&cache, 0..objects);
            let rate = objects as f64 / start.elapsed().as_secs_f64();
            let stop = Instant::now();
            cache.close().expect("the store closes");
            println!(
                "{objects} puts, {rate:.0}/s; clean stop {:.2} s",
                stop.elapsed().as_secs_f64()
            );
        }
        _ => {
            let cache = open(path).0;
            put(&cache, objects..objects + objects / 20);
            // What was written 5 s before the kill.
            std::thread::sleep(Duration::from_secs(5));
            cache.tick().expect("the device works");
            println!("ready to be killed");
            // Until it is.
            for n in 0.. {
                put(&cache, objects * 2 + n * 1000..objects * 2 + (n + 1) * 1000);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("FILE");
    let path = Path::new(&path);
    let objects = args
        .next()
        .map_or(10_000_000, |n| n.parse().expect("OBJECTS is a number"));
    if let Some(what) = args.next() {
        return part(&what, path, objects);
    }
    let mut plan = StorePlan::new(Policy::Log);
    plan.object_bytes = 560;
    let bytes = objects * 640 + (256 << 20);
    let device = FileDevice::create(path, bytes).expect("the file is made");
    Cache::format(&[&device as &dyn Device], &plan, true).expect("the store is made");
    drop(device);
    let me = std::env::current_exe().expect("a program knows its file");
    let run = |what: &str| {
        let count = objects.to_string();
        let status = Command::new(&me).arg(path).args([&count, what]).status();
        status.expect("it starts");
    };
    run("fill");
    let (cache, seconds, clean) = open(path);
    println!(
        "start after a stop: {seconds:.2} s (clean: {clean}); {:.4} of all found",
        share(&cache, 0..objects)
    );
    cache.close().expect("the store closes");
    drop(cache);
    let mut child = Command::new(&me)
        .arg(path)
        .args([&objects.to_string(), "crash"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let said = child.stdout.take().expect("it has a pipe");
    BufReader::new(said)
        .read_line(&mut line)
        .expect("it says something");
    std::thread::sleep(Duration::from_millis(200));
    child.kill().expect("it runs");
    child.wait().expect("it ran");
    let (cache, seconds, clean) = open(path);
    let (old, new) = (
        share(&cache, 0..objects),
        share(&cache, objects..objects + objects / 20),
    );
    println!(
        "start after a kill: {seconds:.2} s (clean: {clean}); {old:.4} of the old, {new:.4} of the new found"
    );
    drop(cache);
    std::fs::remove_file(path).expect("the file is removed");
}
