//! `varve dedup estimate`.

use super::args::EstimateArgs;
use super::{Reading, memory, percent, require_roots, show, tell_errors};
use crate::out;
use serde_json::json;
use std::time::Instant;
use varve_kernelfs::pool::size;
use varve_similarity::estimate::{Estimator, Saving, Unit};

/// Reads everything once and prints the possible savings.
pub fn estimate(args: &EstimateArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let filter = args.files.filter()?;
    let mut rate = args.files.rate();
    let mut estimator = Estimator::new(memory(args.memory)?);
    let reading = Reading::start(&args.files);
    let found =
        varve_similarity::files::estimate(&args.paths, &filter, &mut rate, &mut estimator, &mut |bytes| {
            reading.at(bytes);
            true
        });
    drop(reading);
    tell_errors(&found);
    if found.files == 0 && !found.errors.is_empty() {
        anyhow::bail!("nothing could be read");
    }
    let savings = estimator.savings();
    let seconds = started.elapsed().as_secs_f64();
    if args.json {
        let value = json!({
            "files": found.files,
            "files_left_out": found.left_out,
            "files_too_young": found.too_young,
            "errors": found.errors,
            "bytes_read": rate.bytes(),
            "zero_bytes": estimator.zero_bytes(),
            "seconds": seconds,
            "seconds_waited": rate.waited().as_secs_f64(),
            "memory_bytes": args.memory,
            "savings": savings,
        });
        out::line(&format!("{value:#}"));
        return require_roots(&found);
    }
    out::line(&format!(
        "{} files, {} read in {seconds:.1} s, {} of it zeros",
        found.files,
        size::show(rate.bytes()),
        size::show(estimator.zero_bytes()),
    ));
    savings.iter().for_each(|saving| out::line(&line(saving)));
    let left_out = found.left_out + found.too_young;
    if left_out > 0 {
        out::line(&format!("{left_out} files were left out (filters, --min-age)"));
    }
    if let Some(blocks) = savings.first() {
        // A search takes 13 bytes of memory a block, in as many passes as needed.
        let passes = (blocks.bytes / 4096 * 13).div_ceil(args.memory.max(1)).max(1);
        out::line(&format!(
            "finding them in a pool: {} of checksums in {passes} passes within {} of memory",
            size::show(blocks.bytes / 1024),
            size::show(args.memory),
        ));
    }
    require_roots(&found)
}

fn line(saving: &Saving) -> String {
    let unit = match saving.unit {
        Unit::Blocks(bytes) => format!("{:>7} blocks", size::show(bytes as u64)),
        Unit::Files => "    whole files".to_owned(),
    };
    let share = percent(saving.saved_bytes, saving.bytes as f64);
    let mut text = format!("{unit:<15}  {:>9} saved ({share:.1} %)", show(saving.saved_bytes));
    if saving.sampled > 1 {
        let error = percent(saving.error_bytes, saving.bytes as f64);
        text.push_str(&format!(
            ", ± {error:.1} %: one in {} was counted",
            saving.sampled
        ));
    }
    text
}
