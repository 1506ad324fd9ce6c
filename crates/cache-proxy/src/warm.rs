//! The command `warm`: asks a running proxy for URLs, several at once, and says what came of each.

use crate::cli::WarmArgs;
use crate::run::print;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Mutex;
use varve_cache_proxy::admin::{self, WarmOrder};

fn read_list(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    };
    let text = text.with_context(|| format!("{} cannot be read", path.display()))?;
    let urls = text.lines().map(str::trim);
    Ok(urls
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect())
}

/// The outcomes of all URLs.
#[derive(Default)]
struct Sum {
    urls: u64,
    failed: u64,
    from_origins: u64,
    bytes: u64,
}

fn fetch(args: &WarmArgs, url: String) -> anyhow::Result<Value> {
    let order = WarmOrder {
        url,
        fields: args.fields.clone(),
    };
    let answer = admin::ask(&args.at.socket, "POST", "/warm", &serde_json::to_string(&order)?)?;
    serde_json::from_str(&answer).context("the proxy's answer is malformed")
}

/// Runs the command. Fails if a URL was not answered with success.
pub fn warm(args: &WarmArgs) -> anyhow::Result<()> {
    let mut urls = args.urls.clone();
    if let Some(path) = &args.list {
        urls.extend(read_list(path)?);
    }
    urls.reverse();
    let (waiting, sum) = (Mutex::new(urls), Mutex::new(Sum::default()));
    let one = |url: String| -> anyhow::Result<()> {
        let done = fetch(args, url.clone());
        let mut sum = sum.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        sum.urls += 1;
        let (text, is_right) = match &done {
            Ok(done) => {
                let right =
                    done["whole"] == true && done["status"].as_u64().is_some_and(|status| status < 400);
                let bytes = done["bytes"].as_u64().unwrap_or(0);
                sum.bytes += bytes;
                sum.from_origins += u64::from(done["cache"] != "hit");
                let (cache, status) = (done["cache"].as_str().unwrap_or("?"), &done["status"]);
                (format!("{cache:<12} {status} {bytes:>12} {url}\n"), right)
            }
            Err(error) => (format!("failed: {url}: {error:#}\n"), false),
        };
        sum.failed += u64::from(!is_right);
        match (args.json, done) {
            (true, Ok(done)) => print(&format!("{done}\n")),
            (true, Err(error)) => print(&format!("{}\n", json!({"url": url, "error": error.to_string()}))),
            (false, _) => print(&text),
        }
    };
    let work = || -> anyhow::Result<()> {
        loop {
            let next = waiting
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .pop();
            match next {
                Some(url) => one(url)?,
                None => return Ok(()),
            }
        }
    };
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..args.jobs).map(|_| scope.spawn(work)).collect();
        jobs.into_iter().try_for_each(|job| {
            job.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    let sum = sum
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if !args.json {
        print(&format!(
            "{} URLs, {} bytes; {} asked of origins, {} failed\n",
            sum.urls, sum.bytes, sum.from_origins, sum.failed
        ))?;
    }
    if sum.failed > 0 {
        bail!("{} of {} URLs failed", sum.failed, sum.urls);
    }
    Ok(())
}
