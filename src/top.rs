//! `varve top`: a daemon's activity, refreshed; or once, as text or JSON, for scripts. Formats the looks of
//! `observe`.

use crate::cli::TopArgs;
use crate::observe::{Look, Rates};
use crate::out;
use crate::pool::Pool;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::widgets::{Block, Paragraph};
use serde_json::{Value, json};
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use varve_kernelfs::WaitStatus;
use varve_kernelfs::placement::DirectionFigures;
use varve_kernelfs::pool::size::show;

/// `varve top`.
pub fn top(args: &TopArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    let interval = Duration::from_secs_f64(args.interval);
    if args.once || args.json || !std::io::stdout().is_terminal() {
        let before = Look::at(&pool)?;
        std::thread::sleep(interval);
        let after = Look::at(&pool)?;
        let rates = Rates::between(&before.status, &after.status);
        if args.json {
            out::line(&format!("{:#}", as_json(&after, rates.as_ref())));
        } else {
            out::line(text(&pool, &after, rates.as_ref()).trim_end());
        }
        return Ok(());
    }
    let first = Look::at(&pool)?;
    let mut terminal = ratatui::try_init()?;
    let result = watch(&mut terminal, &pool, first, interval);
    ratatui::restore();
    result
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    pool: &Pool,
    first: Look,
    interval: Duration,
) -> anyhow::Result<()> {
    let mut before = first;
    let mut screen = text(pool, &before, None);
    loop {
        terminal.draw(|frame| draw(frame, &screen))?;
        let until = Instant::now() + interval;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            if !event::poll(left)? {
                break;
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let control_c =
                        key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                    if control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                        return Ok(());
                    }
                }
                Event::Resize(..) => {
                    terminal.draw(|frame| draw(frame, &screen))?;
                }
                _ => {}
            }
        }
        // A stopped daemon may come back: show the error and retry.
        screen = match Look::at(pool) {
            Ok(after) => {
                let rates = Rates::between(&before.status, &after.status);
                before = after;
                text(pool, &before, rates.as_ref())
            }
            Err(error) => format!("{error}\n"),
        };
    }
}

fn draw(frame: &mut ratatui::Frame<'_>, screen: &str) {
    frame.render_widget(
        Paragraph::new(screen).block(Block::bordered().title("varve top (q leaves)")),
        frame.area(),
    );
}

fn as_json(look: &Look, rates: Option<&Rates>) -> Value {
    json!({ "status": look.json, "programs": look.programs, "rates": rates })
}

fn count(value: f64) -> String {
    if value >= 100_000.0 {
        format!("{:.0}k", value / 1e3)
    } else if value >= 10.0 || value == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    }
}

fn pace(value: f64) -> String {
    format!("{}/s", show(value as u64))
}

fn text(pool: &Pool, look: &Look, rates: Option<&Rates>) -> String {
    render(&pool.dir().display().to_string(), look, rates)
}

/// Formats the screen as lines.
fn render(pool: &str, look: &Look, rates: Option<&Rates>) -> String {
    let mut text = String::new();
    put_pool(&mut text, pool, look, rates);
    put_tiers(&mut text, look, rates);
    put_devices(&mut text, look, rates);
    put_sessions(&mut text, look, rates);
    put_waits(&mut text, look);
    text
}

/// Returns the placeholder of a rate that is not known yet.
fn dash() -> String {
    "-".to_owned()
}

/// Prints the pool, its digest and its leases.
fn put_pool(text: &mut String, pool: &str, look: &Look, rates: Option<&Rates>) {
    let status = &look.status;
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    let each = |f: &dyn Fn(&Rates) -> String| rates.map_or_else(dash, f);
    let uptime = status.uptime_ms / 1000;
    put(format!(
        "pool     {pool}  (daemon pid {}, up {}:{:02}:{:02})",
        status.pid,
        uptime / 3600,
        uptime / 60 % 60,
        uptime % 60
    ));
    if let Some(reason) = &status.latched {
        put(format!("READ-ONLY since an error: {reason}"));
    }
    put(format!(
        "digest   {} operations/s, {} logged, {} written; {} refused in all",
        each(&|r| count(r.digest_operations)),
        each(&|r| pace(r.digest_bytes_in)),
        each(&|r| pace(r.digest_bytes_out)),
        status.digest.refused
    ));
    put(format!(
        "leases   {} granted/s, {} of them after a wait, {} operations/s done by the daemon; {} sessions \
        sealed in all",
        each(&|r| count(r.grants)),
        each(&|r| count(r.waits)),
        each(&|r| count(r.mediated)),
        status.leases.seals
    ));
}

/// Prints a line for each tier.
fn put_tiers(text: &mut String, look: &Look, rates: Option<&Rates>) {
    let status = &look.status;
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    put(String::new());
    put("tier     capacity        used   use       read    written   moved in  moved out".into());
    for tier in &status.tiers {
        let traffic = rates.and_then(|r| r.tiers.iter().find(|other| other.tier == tier.tier));
        let pace = |f: &dyn Fn(&crate::observe::TierRates) -> f64| traffic.map_or_else(dash, |t| pace(f(t)));
        put(format!(
            "{:<5} {:>11} {:>11} {:>4}% {:>10} {:>10} {:>10} {:>10}{}",
            tier.tier,
            show(tier.capacity_bytes),
            show(tier.used_bytes),
            tier.used_bytes * 100 / tier.capacity_bytes.max(1),
            pace(&|t| t.read_bytes),
            pace(&|t| t.written_bytes),
            pace(&|t| t.moved_in_bytes),
            pace(&|t| t.moved_out_bytes),
            if tier.state == "ok" {
                String::new()
            } else {
                format!("  {}", tier.state)
            }
        ));
    }
}

/// Formats a time, for people.
fn time(ns: u64) -> String {
    let ns = ns as f64;
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} µs", ns / 1e3),
        ns => format!("{:.1} ms", ns / 1e6),
    }
}

/// Prints what each tier's device is measured to do, and how much its data is used.
fn put_devices(text: &mut String, look: &Look, rates: Option<&Rates>) {
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    put(String::new());
    put("tier    read in   4 KiB in   write in   4 KiB in   queue   busy    requests      accesses".into());
    for tier in &look.status.tiers {
        let figures = &tier.figures;
        let of = |direction: &DirectionFigures| {
            let small = direction.by_size.first();
            let small = small.filter(|size| size.up_to_bytes == Some(4096));
            [direction.response_ns, small.map(|size| size.response_ns)].map(|ns| ns.map_or_else(dash, time))
        };
        let [read, read_small] = of(&figures.read);
        let [write, write_small] = of(&figures.write);
        put(format!(
            "{:<5} {read:>9} {read_small:>10} {write:>10} {write_small:>10} {:>7.1} {:>5}% {:>9}/s {:>11}/s",
            tier.tier,
            figures.depth_thousandths as f64 / 1e3,
            figures.busy_thousandths / 10,
            figures.requests_per_s,
            rates
                .and_then(|r| r.tiers.iter().find(|other| other.tier == tier.tier))
                .map_or_else(dash, |r| count(r.accesses))
        ));
    }
}

/// Prints a line for each session.
fn put_sessions(text: &mut String, look: &Look, rates: Option<&Rates>) {
    let status = &look.status;
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    put(String::new());
    if status.sessions.is_empty() {
        put("sessions none".into());
    } else {
        put(
            "session      pid  program          uid  kind    state         log  full  digested/s   leases  \
            asked  waits"
                .into(),
        );
    }
    for session in &status.sessions {
        let digested = rates.and_then(|r| r.sessions.iter().find(|other| other.id == session.id));
        put(format!(
            "{:<7} {:>8}  {:<15} {:>5}  {:<7} {:<9} {:>8} {:>5} {:>11} {:>8} {:>6} {:>6}",
            session.id,
            session.pid,
            look.programs.get(&session.pid).map_or("?", String::as_str),
            session.uid,
            session.kind,
            session.state,
            show(session.log_bytes),
            session.log_used_bytes.map_or("…".into(), |used| {
                format!("{}%", used * 100 / session.log_bytes.max(1))
            }),
            digested.map_or_else(dash, |d| count(d.digested)),
            session.leases,
            session.asked_back,
            session.waits
        ));
    }
}

/// Prints the waits between sessions, and work in progress.
fn put_waits(text: &mut String, look: &Look) {
    let status = &look.status;
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    if !status.waiting.is_empty() {
        put(String::new());
    }
    for wait in &status.waiting {
        put(format!("waits    {}", describe(look, wait)));
    }
    for moved in &status.moved {
        put(format!(
            "moved    {} to {}, {}: {}",
            moved.from,
            moved.to,
            moved.cause.reason(),
            show(moved.blocks * 4096)
        ));
    }
    for job in &status.jobs {
        put(format!("job      {job}"));
    }
}

/// Describes a wait: the waiting session and the session that it waits for.
pub fn describe(look: &Look, wait: &WaitStatus) -> String {
    let mut text = format!(
        "{} for inode {} ({}) since {} ms",
        look.session_name(wait.session),
        wait.inode,
        wait.mode,
        wait.waited_ms
    );
    for holder in &wait.holders {
        let _ = write!(
            text,
            "; {} has it ({}, {}{})",
            look.session_name(holder.session),
            holder.mode,
            holder.state,
            holder
                .asked_ms
                .map_or(String::new(), |ms| format!(" {ms} ms ago"))
        );
    }
    if wait.before > 0 {
        let _ = write!(text, "; {} before it", wait.before);
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{as_json, draw, render};
    use crate::observe::{Rates, example};
    use ratatui::{Terminal, backend::TestBackend};

    #[test]
    fn screen_shows_sessions_tiers_rates_and_who_waits_for_whom() {
        let before = example();
        let mut after = example();
        after.status.uptime_ms += 1_000;
        after.status.digest.bytes_in += 3 << 20;
        after.status.tiers[0].read_bytes += 5 << 20;
        after.status.tiers[0].accesses.writes += 250;
        after.status.moved.push(varve_kernelfs::placement::MovedStatus {
            from: "hdd".into(),
            to: "nvm".into(),
            cause: varve_kernelfs::placement::Cause::Hot,
            blocks: 768,
        });
        let rates = Rates::between(&before.status, &after.status);
        let screen = render("/pool", &after, rates.as_ref());
        for wanted in [
            "up 0:01:01",
            "3.0 MiB/s logged",
            "5.0 MiB/s",
            "redis",
            "25%",
            "81.5 µs     640 ns          -          -     1.5    12%        31/s         250/s",
            "moved    hdd to nvm, hot data: 3.0 MiB",
            "waits    session 5 for inode 33 (write) since 120 ms; session 4 (redis) has it (write, asked \
            back 118 ms ago)",
            "job      nvm to ssd: cold data",
        ] {
            assert!(screen.contains(wanted), "{wanted} in\n{screen}");
        }
        let mut terminal = Terminal::new(TestBackend::new(140, 30)).unwrap();
        terminal.draw(|frame| draw(frame, &screen)).unwrap();
        let cells = terminal.backend().buffer().content();
        let drawn: String = cells.iter().map(|cell| cell.symbol()).collect();
        assert!(drawn.contains("varve top (q leaves)") && drawn.contains("3.0 MiB/s logged"));
    }

    #[test]
    fn first_screen_has_no_rates_and_json_says_so() {
        let look = example();
        let screen = render("/pool", &look, None);
        assert!(screen.contains("digest   - operations/s"), "{screen}");
        let json = as_json(&look, None);
        assert!(json["rates"].is_null());
        assert_eq!(json["status"]["waiting"][0]["holders"][0]["session"], 4);
        assert_eq!(json["programs"]["1"], "redis");
    }
}
