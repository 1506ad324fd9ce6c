//! The command `top`: looks at a running proxy again and again, and prints what went on in between.

use crate::cli::TopArgs;
use crate::run::print;
use anyhow::Context;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use varve_cache_proxy::admin;
use varve_cache_proxy::metrics::Outcome;

/// One look at the proxy.
struct Look {
    at: Instant,
    status: Value,
}

/// Rates between two samples, a second.
struct Rates<'a> {
    now: &'a Value,
    before: &'a Value,
    seconds: f64,
}

impl Look {
    fn take(args: &TopArgs) -> anyhow::Result<Self> {
        let text = admin::ask(&args.at.socket, "GET", "/status", "")?;
        Ok(Self {
            at: Instant::now(),
            status: serde_json::from_str(&text).context("the proxy's answer is malformed")?,
        })
    }
}

impl Rates<'_> {
    /// The growth of a counter, a second. A proxy that was started anew counts from 0 again.
    fn of(&self, path: &str) -> f64 {
        let count = |status: &Value| status.pointer(path).and_then(Value::as_u64).unwrap_or(0);
        count(self.now).saturating_sub(count(self.before)) as f64 / self.seconds
    }

    /// All outcomes of one kind of counter, together.
    fn all(&self, kind: &str) -> f64 {
        Outcome::ALL
            .into_iter()
            .map(|outcome| self.of(&format!("/{kind}/{}", outcome.label())))
            .sum()
    }

    /// Share of the requests, or of the bytes, that came from the store; `None` without any.
    fn hit_share(&self, kind: &str) -> Option<f64> {
        let from_store = [Outcome::Hit, Outcome::Revalidated, Outcome::Stale];
        let hits: f64 = from_store
            .into_iter()
            .map(|outcome| self.of(&format!("/{kind}/{}", outcome.label())))
            .sum();
        let misses: f64 = [Outcome::Miss, Outcome::Pass]
            .into_iter()
            .map(|outcome| self.of(&format!("/{kind}/{}", outcome.label())))
            .sum();
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    fn json(&self) -> Value {
        let requests: serde_json::Map<_, _> = Outcome::ALL
            .into_iter()
            .map(|outcome| {
                let label = outcome.label();
                (label.to_owned(), json!(self.of(&format!("/requests/{label}"))))
            })
            .collect();
        json!({
            "seconds": self.seconds,
            "requests_per_s": self.all("requests"),
            "requests_per_s_by_outcome": requests,
            "hit_share": self.hit_share("requests"),
            "bytes_per_s": self.all("response_bytes"),
            "byte_hit_share": self.hit_share("response_bytes"),
            "origin_requests_per_s": self.of("/origin_requests"),
            "origin_errors_per_s": self.of("/origin_errors"),
            "store_hits_per_s": self.of("/store/hits"),
            "store_memory_hits_per_s": self.of("/store/memory_hits"),
            "store_misses_per_s": self.of("/store/misses"),
            "store_written_bytes_per_s": self.of("/store/written_bytes"),
            "connections": self.now["connections"],
            "waiting": self.now["waiting"],
            "in_flight_left_bytes": self.now["in_flight_left_bytes"],
        })
    }

    fn text(&self) -> String {
        let percent =
            |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0));
        let mut out = format!(
            "up {} s, process {}; {} connections, {} requests wait\n",
            self.now["uptime_s"], self.now["pid"], self.now["connections"], self.now["waiting"]
        );
        out.push_str(&format!(
            "  requests/s {:>9.1}   hits {:>7}   bytes/s {:>9}   of them hits {:>7}\n",
            self.all("requests"),
            percent(self.hit_share("requests")),
            bytes(self.all("response_bytes")),
            percent(self.hit_share("response_bytes"))
        ));
        for outcome in Outcome::ALL {
            let label = outcome.label();
            let rate = self.of(&format!("/requests/{label}"));
            if rate > 0.0 {
                let sent = bytes(self.of(&format!("/response_bytes/{label}")));
                out.push_str(&format!("    {label:<12} {rate:>9.1}   {sent:>9}\n"));
            }
        }
        out.push_str(&format!(
            "  origins/s  {:>9.1}   failed {:.1}\n  store/s    found {:.1} (in memory {:.1}), not {:.1}, written {}\n",
            self.of("/origin_requests"),
            self.of("/origin_errors"),
            self.of("/store/hits"),
            self.of("/store/memory_hits"),
            self.of("/store/misses"),
            bytes(self.of("/store/written_bytes"))
        ));
        for origin in self.now["origins"].as_array().into_iter().flatten() {
            if origin["healthy"] != true {
                let name = origin["origin"].as_str().unwrap_or("?");
                out.push_str(&format!("  origin {name} fails\n"));
            }
        }
        out
    }
}

fn bytes(count: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut count, mut unit) = (count, 0);
    while count >= 1024.0 && unit + 1 < units.len() {
        count /= 1024.0;
        unit += 1;
    }
    format!("{count:.1} {}", units[unit])
}

/// Runs the command.
pub fn top(args: &TopArgs) -> anyhow::Result<()> {
    let redraw = std::io::stdout().is_terminal() && !args.json;
    let mut before = Look::take(args)?;
    let mut looks = 0;
    while args.count.is_none_or(|count| looks < count) {
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        let now = Look::take(args)?;
        let rates = Rates {
            now: &now.status,
            before: &before.status,
            seconds: (now.at - before.at).as_secs_f64(),
        };
        let text = if args.json {
            format!("{}\n", rates.json())
        } else {
            rates.text()
        };
        // Home and clear: the screen shows the latest look only.
        let clear = if redraw { "\u{1b}[H\u{1b}[2J" } else { "" };
        print(&format!("{clear}{text}"))?;
        before = now;
        looks += 1;
    }
    Ok(())
}
