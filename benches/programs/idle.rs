//! Whether the machine is idle. Knows nothing of what is measured.

use std::time::{Duration, Instant};

/// The machine is idle when it was looked at so often and for so long, and at most this share of its
/// processors was used.
const IDLE_LOOKS: u32 = 3;
const LOOK: Duration = Duration::from_millis(100);
const IDLE_SHARE: f64 = 0.1;
/// How long that is waited for at most.
const SETTLE_MAX: Duration = Duration::from_secs(4);

/// Processor time of the machine in ticks: of all, and of what was idle.
fn ticks() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> = text
        .lines()
        .next()?
        .split_whitespace()
        .skip(1)
        .map_while(|word| word.parse().ok())
        .collect();
    Some((fields.iter().take(8).sum(), fields.get(3)? + fields.get(4)?))
}

/// Share of the processors that is used, looked at for so long.
fn used(during: Duration) -> Option<f64> {
    let before = ticks()?;
    std::thread::sleep(during);
    let after = ticks()?;
    let all = after.0.checked_sub(before.0).filter(|all| *all > 0)?;
    Some(1.0 - after.1.saturating_sub(before.1) as f64 / all as f64)
}

/// Share of the processors that others use, looked at for a second while nothing of the bench runs.
pub fn others() -> String {
    used(Duration::from_secs(1)).map_or_else(|| "unknown".into(), |share| format!("{:.0} %", share * 100.0))
}

/// Waits until what ran before has paid its debts (write-back, digests, blocks to free), for a while: the
/// next side is not to pay them.
pub fn settle() {
    rustix::fs::sync();
    let until = Instant::now() + SETTLE_MAX;
    let mut idle = 0;
    while idle < IDLE_LOOKS && Instant::now() < until {
        idle = match used(LOOK) {
            Some(share) if share > IDLE_SHARE => 0,
            _ => idle + 1,
        };
    }
}
