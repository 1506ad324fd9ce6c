//! What a manager does to a program's speed, by paired windows inside of one run: the program reads its
//! memory at random, the manager works in one window of each pair and not in the other, and which of the two
//! comes first alternates.
//!
//! `vm_paired MIB PAIRS WINDOW_MS SETTLE_MS (none|stop|damon|attach) COMMAND...`; `{}` in the command becomes
//! this process' pid.
//!
//! `stop`: the command is started once and has $RUN_IN seconds (20) to come to rest; then it is stopped
//! (SIGSTOP) and continued. What it would have done while it was stopped it does as soon as it goes on, so it
//! works about twice as hard in its windows as it would by itself. `damon`: the same, with DAMON's kernel
//! thread switched off and on as well, which takes some tenths of a second; otherwise that goes on in both
//! windows of a pair. `attach`: it is started and ended (SIGINT) for every window, so its start and its
//! leaving are measured too. `none`: nothing is switched, the noise of the instrument itself. The first
//! SETTLE_MS of a window do not count.

use std::hint::black_box;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use varve_vm_manager::sim::trace::Rng;
use varve_vm_manager::sys::thread_cpu_time;

const PAGE: usize = 4096;
const DAMON_STATE: &str = "/sys/kernel/mm/damon/admin/kdamonds/0/state";

static OPERATIONS: AtomicU64 = AtomicU64::new(0);
static CPU_NS: AtomicU64 = AtomicU64::new(0);
static END: AtomicBool = AtomicBool::new(false);

type Failure = Box<dyn std::error::Error>;

fn work(memory: &[u8]) {
    let (mut rng, mut sum) = (Rng::new(1), 0u64);
    while !END.load(Ordering::Relaxed) {
        for _ in 0..10_000 {
            sum = sum.wrapping_add(u64::from(memory[rng.below(memory.len() as u64) as usize]));
        }
        CPU_NS.store(thread_cpu_time().as_nanos() as u64, Ordering::Relaxed);
        OPERATIONS.fetch_add(10_000, Ordering::Relaxed);
    }
    black_box(sum);
}

/// The manager as the windows see it.
struct Manager {
    how: String,
    command: Vec<String>,
    child: Option<Child>,
    damon: bool,
    works: bool,
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.is_some().then(|| self.end());
    }
}

/// The kernel refuses (EBUSY) while it still answers a question of the manager: up to a sampling interval of
/// DAMON.
fn switch_damon(on: bool) -> Result<(), Failure> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match std::fs::write(DAMON_STATE, if on { "on" } else { "off" }) {
            Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result.map_err(|e| format!("switching DAMON {on}: {e}").into()),
        }
    }
}

impl Manager {
    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let pid = self.child.as_ref().and_then(|c| Pid::from_raw(c.id() as i32));
        Ok(kill_process(pid.ok_or("no manager")?, signal)?)
    }

    fn start(&mut self) -> Result<(), Failure> {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null());
        self.child = Some(command.spawn()?);
        Ok(())
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.signal(Signal::CONT)?;
        self.signal(Signal::INT)?;
        if let Some(mut child) = self.child.take() {
            child.wait()?;
        }
        Ok(())
    }

    fn switch(&mut self, on: bool) -> Result<(), Failure> {
        if std::mem::replace(&mut self.works, on) == on {
            return Ok(());
        }
        match (self.how.as_str(), on) {
            ("attach", true) => self.start(),
            ("attach", false) => self.end(),
            ("stop" | "damon", _) => {
                if !on {
                    self.signal(Signal::STOP)?;
                }
                if self.damon {
                    switch_damon(on)?;
                }
                if on {
                    self.signal(Signal::CONT)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Operations a second: of time, and of the program's own processor time.
#[derive(Clone, Copy)]
struct Rate {
    wall: f64,
    cpu: f64,
}

fn window(settle: Duration, length: Duration) -> Rate {
    std::thread::sleep(settle);
    let at = || {
        (
            Instant::now(),
            OPERATIONS.load(Ordering::Relaxed),
            CPU_NS.load(Ordering::Relaxed),
        )
    };
    let before = at();
    std::thread::sleep(length.saturating_sub(settle));
    let after = at();
    let operations = (after.1 - before.1) as f64;
    Rate {
        wall: operations / (after.0 - before.0).as_secs_f64(),
        cpu: operations / ((after.2 - before.2) as f64 / 1e9),
    }
}

/// Mean with its 95 % confidence interval, median with its own (from order statistics), quartiles; all of
/// percent.
fn describe(name: &str, mut values: Vec<f64>) {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0)).sqrt();
    let half = 1.96 * deviation / n.sqrt();
    let rank = |r: f64| values[(r.round().max(0.0) as usize).min(values.len() - 1)];
    let spread = 0.98 * n.sqrt();
    println!(
        "  {name}: slow-down mean {mean:+.2} % (95 %: {:+.2} to {:+.2}), median {:+.2} % (95 %: {:+.2} to \
        {:+.2}), quartiles {:+.2} {:+.2}",
        mean - half,
        mean + half,
        rank((n - 1.0) / 2.0),
        rank(n / 2.0 - spread - 1.0),
        rank(n / 2.0 + spread),
        rank(n / 4.0),
        rank(3.0 * n / 4.0),
    );
}

/// Time that the hypervisor took from us so far, in hundredths of a second.
fn stolen() -> u64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    first
        .split_ascii_whitespace()
        .nth(8)
        .and_then(|w| w.parse().ok())
        .unwrap_or(0)
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().collect();
    let usage = "usage: vm_paired MIB PAIRS WINDOW_MS SETTLE_MS none|stop|damon|attach COMMAND...";
    let number = |i: usize| args.get(i).and_then(|a| a.parse::<u64>().ok()).ok_or(usage);
    let (mib, pairs) = (number(1)? as usize, number(2)?);
    let (length, settle) = (
        Duration::from_millis(number(3)?),
        Duration::from_millis(number(4)?),
    );
    let how = args.get(5).cloned().ok_or(usage)?;
    let me = std::process::id().to_string();
    let command: Vec<String> = args.iter().skip(6).map(|a| a.replace("{}", &me)).collect();
    let mut memory = vec![0u8; mib << 20];
    memory.chunks_mut(PAGE).for_each(|page| page[0] = 1);
    let memory: &'static [u8] = memory.leak();
    let worker = std::thread::spawn(move || work(memory));
    let mut manager = Manager {
        how,
        command,
        child: None,
        damon: false,
        works: false,
    };
    let stops = ["stop", "damon"].contains(&manager.how.as_str());
    if stops {
        manager.start()?;
        manager.works = true;
        let run_in = std::env::var("RUN_IN").ok().and_then(|s| s.parse().ok());
        std::thread::sleep(Duration::from_secs(run_in.unwrap_or(20)));
        manager.damon =
            manager.how == "damon" && std::fs::read_to_string(DAMON_STATE).is_ok_and(|s| s.trim() == "on");
        manager.switch(false)?;
    }
    std::thread::sleep(Duration::from_secs(1));
    let (mut wall, mut cpu, mut took) = (Vec::new(), Vec::new(), stolen());
    for pair in 0..pairs {
        let mut rates = [Rate { wall: 0.0, cpu: 0.0 }; 2];
        for on in [pair % 2 == 0, pair % 2 != 0] {
            manager.switch(on)?;
            rates[usize::from(on)] = window(settle, length);
            if on {
                manager.switch(false)?;
            }
        }
        wall.push((rates[0].wall - rates[1].wall) / rates[0].wall * 100.0);
        cpu.push((rates[0].cpu - rates[1].cpu) / rates[0].cpu * 100.0);
    }
    took = stolen() - took;
    if stops {
        manager.switch(true)?;
        manager.end()?;
    }
    END.store(true, Ordering::Relaxed);
    let _ = worker.join();
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let huge = rollup
        .lines()
        .find(|l| l.starts_with("AnonHuge"))
        .and_then(|l| l.split_ascii_whitespace().nth(1));
    println!(
        "  {pairs} pairs of {} ms ({} ms not counted), DAMON switched along: {}; {} MiB huge at the end; \
        {:.1} s stolen by the host",
        length.as_millis(),
        settle.as_millis(),
        manager.damon,
        huge.and_then(|k| k.parse::<u64>().ok()).unwrap_or(0) >> 10,
        took as f64 / 100.0
    );
    describe("by its own processor time", cpu);
    describe("by the clock", wall);
    Ok(())
}
