//! `varve cache put`, `get`, `purge` and `check`.

use super::args::{GetArgs, PurgeArgs, PutArgs};
use crate::exit::Usage;
use crate::out;
use anyhow::{Context, bail};
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use varve_cache::{PutOptions, PutOutcome, Scope};
use varve_kernelfs::pool::size::show;

/// Bytes copied at once.
const PIECE: usize = 1 << 20;

/// Stores a file or standard input.
pub fn put(args: &PutArgs) -> anyhow::Result<()> {
    let cache = super::open(&args.devices)?;
    let tags: Vec<&[u8]> = args.tags.iter().map(String::as_bytes).collect();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let options = PutOptions {
        tags: &tags,
        host: args.host.as_deref().map(str::as_bytes),
        expires_s: args.ttl.map_or(0, |ttl| now.saturating_add(ttl)),
        ..PutOptions::default()
    };
    let outcome = match &args.file {
        Some(path) => {
            let told = || format!("{} cannot be read", path.display());
            let mut file = File::open(path).with_context(told)?;
            let len = file.metadata().with_context(told)?.len();
            let Some(mut stream) = cache.put_stream(args.key.as_bytes(), len, options)? else {
                bail!("the device of this key is missing");
            };
            let mut piece = vec![0; PIECE];
            loop {
                match file.read(&mut piece).with_context(told)? {
                    0 => break stream.finish()?,
                    got => stream.write(&piece[..got])?,
                }
            }
        }
        None => {
            let mut body = Vec::new();
            std::io::stdin()
                .read_to_end(&mut body)
                .context("standard input cannot be read")?;
            cache.put(args.key.as_bytes(), &body, options)?
        }
    };
    cache.close()?;
    match outcome {
        PutOutcome::Stored { .. } => Ok(()),
        PutOutcome::NotAdmitted => bail!("it was not admitted"),
        PutOutcome::TooLarge => bail!("it is larger than half the store's log; make a larger store"),
        PutOutcome::Unavailable => {
            let why = cache.shards().find_map(|shard| shard.fault());
            bail!(
                "the store does not take it: {}",
                why.unwrap_or_else(|| "it is closed".to_owned())
            )
        }
    }
}

/// Writes an object to standard output.
pub fn get(args: &GetArgs) -> anyhow::Result<()> {
    let cache = super::open(&args.devices)?;
    let Some(hit) = cache.get(args.key.as_bytes()) else {
        bail!("{} is not in the store", args.key);
    };
    let mut out = std::io::stdout().lock();
    let mut from = 0;
    while from < hit.body_len() {
        let to = hit.body_len().min(from + PIECE as u64);
        let bytes = hit.read(from..to)?;
        if out.write_all(&bytes).is_err() {
            // The reader of standard output closed it.
            break;
        }
        from = to;
    }
    let _ = out.flush();
    cache.close()?;
    Ok(())
}

/// Purges scopes.
pub fn purge(args: &PurgeArgs) -> anyhow::Result<()> {
    let scopes: Vec<_> = [
        args.keys
            .iter()
            .map(|key| Scope::Key(key.as_bytes()))
            .collect::<Vec<_>>(),
        args.tags.iter().map(|tag| Scope::Tag(tag.as_bytes())).collect(),
        args.hosts
            .iter()
            .map(|host| Scope::Host(host.as_bytes()))
            .collect(),
        args.prefixes
            .iter()
            .map(|prefix| Scope::Prefix(prefix.as_bytes()))
            .collect(),
        if args.all {
            vec![Scope::Everything]
        } else {
            Vec::new()
        },
    ]
    .concat();
    if scopes.is_empty() {
        return Err(Usage("say what to purge: --key, --tag, --host, --prefix or --all".to_owned()).into());
    }
    if scopes.iter().any(|scope| matches!(scope, Scope::Prefix(b""))) {
        return Err(Usage("an empty prefix is everything: say --all".to_owned()).into());
    }
    let cache = super::open(&args.devices)?;
    for scope in &scopes {
        cache.purge(*scope)?;
    }
    cache.close()?;
    if args.json {
        out::line(&format!("{:#}", json!({ "purged": scopes.len() })));
    } else {
        out::line(&format!("purged {} scope(s)", scopes.len()));
    }
    Ok(())
}

/// Reads every object.
pub fn check(paths: &[PathBuf], as_json: bool) -> anyhow::Result<ExitCode> {
    let cache = super::open(paths)?;
    let found = {
        let _progress = out::Progress::start("reading every object");
        cache.check()?
    };
    cache.close()?;
    if as_json {
        let text = json!({ "objects": found.objects, "bytes": found.bytes, "damaged": found.damaged });
        out::line(&format!("{text:#}"));
    } else {
        let (objects, bytes, damaged) = (found.objects, show(found.bytes), found.damaged);
        out::line(&format!(
            "{objects} objects with {bytes} are whole; {damaged} are damaged and are misses"
        ));
    }
    let code = if found.damaged > 0 {
        crate::exit::DAMAGED
    } else {
        0
    };
    Ok(ExitCode::from(code))
}
