//! Faults of a served pool's media, in words: the fault and the remedy. Text only; the numbers are the
//! daemon's.

use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use varve_kernelfs::{HealthStatus, MediumStatus, Status};

/// Returns the lines of `varve status` about faults; none for a healthy pool.
pub fn lines(pool: &Path, status: &Status) -> Vec<String> {
    let mut lines = Vec::new();
    for medium in &status.media {
        lines.extend(errors(medium));
        lines.extend(slowness(medium));
    }
    let logs = &status.logs;
    if logs.failed + logs.damaged > 0 {
        lines.push(format!(
            "TROUBLE  logs: {} could not be written or read, {} had a damaged end",
            logs.failed, logs.damaged
        ));
    }
    let failed = status.sessions.iter();
    for session in failed.filter(|session| !matches!(&*session.log_state, "ok" | "")) {
        lines.push(format!("         session {}: {}", session.id, session.log_state));
    }
    for (what, pass) in [
        ("fsck", &status.checks.structures),
        ("scrub", &status.checks.data),
    ] {
        if let Some(pass) = pass.filter(|pass| pass.findings > 0) {
            let (count, when) = (pass.findings, ago(pass.ended_ns));
            lines.push(format!("TROUBLE  {what} found {count} damages {when}"));
        }
    }
    lines.extend(advice(pool, status));
    lines
}

fn errors(medium: &MediumStatus) -> Option<String> {
    let last = medium.last.as_ref()?;
    let mut text = format!("TROUBLE  {}:", medium.medium);
    let counts = [
        (medium.read_errors, "failed reads"),
        (medium.write_errors, "failed writes"),
        (medium.checksum_errors, "times damaged bytes"),
        (medium.no_space, "times no space on the host"),
    ];
    let counts: Vec<_> = counts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    let _ = write!(text, " {}; last, {}", counts.join(", "), told(last));
    Some(text)
}

fn slowness(medium: &MediumStatus) -> Option<String> {
    let last = medium.last_slow.as_ref()?;
    Some(format!(
        "SLOW     {}: {} transfers of a second or longer, the longest {:.1} s; last, {}",
        medium.medium,
        medium.slow,
        medium.longest_ms as f64 / 1e3,
        told(last)
    ))
}

fn told(fault: &HealthStatus) -> String {
    let (when, text) = (ago(fault.time_ns), &fault.text);
    if fault.place.is_empty() || text.contains(&fault.place) {
        format!("{when}: {text}")
    } else {
        format!("{when}, {}: {text}", fault.place)
    }
}

/// Formats how long ago `time_ns` is, nanoseconds since 1970.
fn ago(time_ns: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = (now.as_nanos() as i128 - i128::from(time_ns)).max(0) / 1_000_000_000;
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// Returns the remedies, each once.
fn advice(pool: &Path, status: &Status) -> Vec<String> {
    let pool = pool.display();
    let any = |f: &dyn Fn(&MediumStatus) -> bool| status.media.iter().any(f);
    let of_data = |medium: &MediumStatus| matches!(&*medium.medium, "nvm" | "ssd" | "hdd");
    let damaged = any(&|m| of_data(m) && m.read_errors + m.checksum_errors > 0)
        || status.checks.data.is_some_and(|pass| pass.findings > 0);
    let structures = any(&|m| matches!(&*m.medium, "nvm" | "journal") && m.checksum_errors > 0)
        || status.checks.structures.is_some_and(|pass| pass.findings > 0);
    let logs = status.logs.failed > 0 || any(&|m| m.medium == "logs" && m.last.is_some());
    let cases = [
        (
            damaged,
            format!(
                "`varve scrub {pool}` names the files whose data is damaged or cannot be read: restore \
                them, and replace the device"
            ),
        ),
        (
            structures,
            format!(
                "`varve fsck {pool}` names damaged structures; `varve fsck --repair {pool}` mends a \
                stopped pool"
            ),
        ),
        (
            any(&|m| of_data(m) && m.write_errors > 0)
                || any(&|m| m.medium == "journal" && m.write_errors > 0),
            "a device does not take writes: copy out what matters, look at the host's kernel log, stop the \
            pool, mend the device, start"
                .into(),
        ),
        (
            logs,
            "a session cannot write its log: look for space and errors at the live directory and at the \
            disk of `logs/`"
                .into(),
        ),
        (
            any(&|m| m.no_space > 0 && m.medium != "logs"),
            "make room on the host's disk".into(),
        ),
        (
            any(&|m| m.slow > 0),
            "a device is slow: look at the host's kernel log and at the device's own (SMART)".into(),
        ),
    ];
    let due = cases.into_iter().filter(|(due, _)| *due);
    due.map(|(_, text)| format!("TO DO    {text}")).collect()
}

#[cfg(test)]
mod tests {
    use super::lines;
    use crate::observe::example;
    use std::path::Path;
    use varve_kernelfs::HealthStatus;
    use varve_store::Pass;

    #[test]
    fn sound_pool_has_no_lines() {
        assert_eq!(lines(Path::new("/p"), &example().status), Vec::<String>::new());
    }

    #[test]
    fn each_fault_says_what_to_do() {
        let happened = |text: &str| {
            Some(HealthStatus {
                text: text.into(),
                place: "block 7".into(),
                time_ns: 1,
            })
        };
        let mut status = example().status;
        let medium = |name: &str| status.media.iter().position(|m| m.medium == name).unwrap_or(0);
        let (ssd, logs) = (medium("ssd"), medium("logs"));
        status.media[ssd].checksum_errors = 2;
        status.media[ssd].last = happened("ssd block 7: data checksum is wrong");
        let text = lines(Path::new("/p"), &status).join("\n");
        assert!(
            text.contains("TROUBLE  ssd: 2 times damaged bytes; last, "),
            "{text}"
        );
        assert!(text.contains("TO DO    `varve scrub /p`"), "{text}");
        status.media[ssd].slow = 1;
        status.media[ssd].longest_ms = 2500;
        status.media[ssd].last_slow = happened("read took 2500 ms");
        status.media[logs].write_errors = 1;
        status.media[logs].last = happened("process 7 cannot write its log");
        status.logs.failed = 1;
        status.sessions[0].log_state = "process 7 cannot write its log".into();
        status.checks.structures = Some(Pass {
            ended_ns: 1,
            findings: 3,
        });
        let text = lines(Path::new("/p"), &status).join("\n");
        for wanted in [
            "SLOW     ssd: 1 transfers of a second or longer, the longest 2.5 s",
            "block 7: read took 2500 ms",
            "logs: 1 could not be written",
            "session 4: process 7",
            "fsck found 3 damages",
            "`varve fsck --repair /p`",
            "live directory",
            "SMART",
        ] {
            assert!(text.contains(wanted), "{wanted} in\n{text}");
        }
    }
}
