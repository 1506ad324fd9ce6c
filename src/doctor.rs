//! `varve doctor`: prints the findings of a survey of the machine's devices.

use crate::cli::DoctorArgs;
use crate::exit::FAILED;
use crate::out;
use serde_json::json;
use std::process::ExitCode;
use varve_fuse_shim::UringSupport;
use varve_media::block::nvme::Places;
use varve_media::block::survey;
use varve_media::{Finding, Verdict, dax};

/// Returns whether mounts take the kernel's requests by io_uring.
fn requests_by_uring() -> Finding {
    let (verdict, text, commands) = match varve_fuse_shim::uring_support() {
        UringSupport::On => (
            Verdict::Good,
            "on: a request to a mount is answered by one system call",
            vec![],
        ),
        UringSupport::Off => (
            Verdict::Note,
            "off in the kernel. Switched on, it halves the time of small requests to the mounts made after:",
            vec!["echo Y | sudo tee /sys/module/fuse/parameters/enable_uring".to_owned()],
        ),
        UringSupport::Forbidden => (
            Verdict::Note,
            "on in the kernel, but io_uring is forbidden here (kernel.io_uring_disabled, or a container's filter)",
            vec![],
        ),
        UringSupport::Missing => (Verdict::Note, "needs Linux 6.14; mounts read /dev/fuse", vec![]),
    };
    Finding {
        topic: "FUSE over io_uring".into(),
        verdict,
        text: text.into(),
        commands,
    }
}

const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Good => "ok",
        Verdict::Note => "note",
        Verdict::Missing => "missing",
    }
}

/// Prints the available and the missing features.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let mut findings = dax::survey(&dax::KernelDirs::default());
    findings.extend(survey(&Places::default()));
    findings.push(requests_by_uring());
    let missing = findings.iter().any(|finding| finding.verdict == Verdict::Missing);
    if args.json {
        let all: Vec<_> = findings
            .iter()
            .map(|finding| {
                json!({
                    "topic": finding.topic,
                    "verdict": word(finding.verdict),
                    "text": finding.text,
                    "commands": finding.commands,
                })
            })
            .collect();
        out::line(&format!("{:#}", json!({ "missing": missing, "findings": all })));
    } else {
        findings.iter().for_each(|finding| out::line(&text(finding)));
    }
    ExitCode::from(if missing { FAILED } else { 0 })
}

fn text(finding: &Finding) -> String {
    let mut text = format!("{:<8} {}: {}", word(finding.verdict), finding.topic, finding.text);
    for command in &finding.commands {
        text.push_str("\n             ");
        text.push_str(command);
    }
    text
}
