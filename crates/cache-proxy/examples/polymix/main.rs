//! Load after Polymix-4 as the thesis describes it (§2.5.1), against a reverse proxy, with the origin in this
//! process.
//!
//! `polymix [--robots N] [--fill-pages N] [--fill-per-s N] [--warm-s N] [--seconds N] [--seed N]`: prints `origin ADDRESS` and
//! reads the proxy's address from standard input; asks for the first pages once (`--fill-pages`; for so many
//! objects a second at most with `--fill-per-s`, so that what stores more slowly than it serves keeps up), prints
//! `filled`, and reads a line; then each robot loads pages, one object after the other over a connection that
//! it keeps, without pauses. After `--warm-s` it prints `begin`, `--seconds` later `end` and a line of JSON.
//!
//! 60 % of the requests and 40 % of the bytes can be hits: 69 % of the page views are of a page that somebody
//! loaded before (a tenth of them of 1 % of the pages, the others evenly, the smaller of two), 90 % of the
//! objects may be stored, objects above 64 KiB hardly repeat, downloads of 300 KB and more mostly do. One
//! request in ten for something known asks with its validator, one in a hundred as a reload; 5 % of the
//! objects live 30 s and are validated. For five seconds of thirty, a page that nobody knew gets 5 % of all
//! page views.

mod http;
mod origin;
mod robots;
mod world;

use robots::{Pace, Robot, Totals, Views};
use std::io::{self, BufRead, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Robots that fill the cache.
const FILLERS: u64 = 8;

fn option(name: &str, default: u64) -> u64 {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.nth(1)
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

fn say(what: &str) {
    println!("{what}");
    // Whoever started this reads it line by line; if nobody does, the run is over anyway.
    let _ = io::stdout().flush();
}

fn next_line() -> io::Result<String> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

fn main() -> io::Result<()> {
    let (robots, pages, seed) = (
        option("--robots", 32),
        option("--fill-pages", 1000),
        option("--seed", 1),
    );
    let fill_per_s = option("--fill-per-s", 0);
    let (warm, seconds) = (option("--warm-s", 10), option("--seconds", 60));
    say(&format!("origin {}", origin::start(0)?));
    let proxy: SocketAddr = next_line()?.parse().map_err(io::Error::other)?;

    let views = Arc::new(Views::new());
    let next = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let pace = Arc::new(Pace::new(fill_per_s));
    let fillers: Vec<_> = (0..FILLERS)
        .map(|n| {
            let (views, next, pace) = (Arc::clone(&views), Arc::clone(&next), Arc::clone(&pace));
            std::thread::spawn(move || -> io::Result<()> {
                let mut robot = Robot::new(proxy, seed.wrapping_mul(1000) + n, views);
                while let page = next.fetch_add(1, Ordering::Relaxed)
                    && page < pages
                {
                    robot.fill(page, &pace)?;
                }
                Ok(())
            })
        })
        .collect();
    for filler in fillers {
        filler
            .join()
            .map_err(|_| io::Error::other("a filler panicked"))??;
    }
    views.known(pages);
    say("filled");
    next_line()?;

    // 0: not counted, 1: counted, 2: the end.
    let phase = Arc::new(AtomicU8::new(0));
    let totals = Arc::new(Mutex::new(Totals::default()));
    let failed = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..robots)
        .map(|n| {
            let (views, phase) = (Arc::clone(&views), Arc::clone(&phase));
            let (totals, failed) = (Arc::clone(&totals), Arc::clone(&failed));
            std::thread::spawn(move || {
                let mut robot = Robot::new(proxy, seed.wrapping_mul(7919) + n, views);
                while phase.load(Ordering::Relaxed) < 2 {
                    if let Err(error) = robot.act(&phase) {
                        eprintln!("polymix: {error}");
                        failed.store(true, Ordering::Relaxed);
                        break;
                    }
                }
                if let Ok(mut totals) = totals.lock() {
                    totals.add(robot.totals());
                }
            })
        })
        .collect();
    std::thread::sleep(Duration::from_secs(warm));
    let validated = origin::VALIDATED.load(Ordering::Relaxed);
    phase.store(1, Ordering::Relaxed);
    say("begin");
    std::thread::sleep(Duration::from_secs(seconds));
    phase.store(2, Ordering::Relaxed);
    say("end");
    let validated = origin::VALIDATED.load(Ordering::Relaxed) - validated;
    for thread in threads {
        thread.join().map_err(|_| io::Error::other("a robot panicked"))?;
    }
    let totals = totals.lock().map_err(|_| io::Error::other("a robot panicked"))?;
    say(&totals.json(seconds, validated, views.pages()).to_string());
    match failed.load(Ordering::Relaxed) {
        true => Err(io::Error::other("a robot ended early")),
        false => Ok(()),
    }
}
