//! `varve doctor`: prints the findings of a survey of the machine's devices.

use crate::cli::DoctorArgs;
use crate::exit::FAILED;
use crate::out;
use serde_json::json;
use std::process::ExitCode;
use varve_media::block::nvme::Places;
use varve_media::block::survey;
use varve_media::{Finding, Verdict, dax};

const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Good => "ok",
        Verdict::Note => "note",
        Verdict::Missing => "missing",
    }
}

/// Prints the available and the missing features.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let mut findings = dax::survey(&dax::Places::default());
    findings.extend(survey(&Places::default()));
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
