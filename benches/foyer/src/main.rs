//! Memory an object, and hits a second: the cache store of this repository beside foyer 0.22, both as
//! libraries, on a file of the same file system, past the page cache, with hardly any memory for objects.
//!
//! `varve-bench-foyer [OBJECTS] [FOLDER]`: stores OBJECTS objects (default 2,000,000) of 150 bytes under keys
//! as URLs are, each library in a process of its own; resident bytes are compared with those after the first
//! 2,000. foyer rounds each object up to 4 KiB on disk. Then 16 readers ask for 200,000 of them, evenly
//! spread, in a scattered order; each body is compared.

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
};
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use varve_cache::device::{Device, FileDevice};
use varve_cache::{Cache, Options, Policy, PutOptions, StorePlan};

type Done = Result<(), Box<dyn Error>>;

/// Objects after which a process counts as empty: pools and threads are there.
const FIRST: u64 = 2000;
/// Objects that are put until all writes have to be done: foyer drops what its queue has no room for.
const BATCH: u64 = 2000;
const READERS: u64 = 16;
const READS: u64 = 200_000;
/// Memory for objects.
const HOT_BYTES: usize = 1 << 20;

fn key(n: u64) -> String {
    format!("http://site.test/objects/{n}")
}

fn body(n: u64) -> Vec<u8> {
    let unit = n.to_le_bytes();
    unit.iter().copied().cycle().take(150).collect()
}

/// The object that reader `reader` asks for as its `at`-th: all are asked for about evenly.
fn asked(reader: u64, at: u64, objects: u64) -> u64 {
    (reader * (READS / READERS) + at).wrapping_mul(2_654_435_761) % objects
}

/// Resident bytes of anonymous memory and of what else this process has mapped.
fn rss_bytes() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = line.ok_or("no VmRSS")?.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}

struct Row {
    title: String,
    objects: u64,
    put_s: f64,
    empty: u64,
    full: u64,
    found: u64,
    read_s: f64,
}

impl Row {
    fn print(&self) {
        let grown = self.full as f64 - self.empty as f64;
        let share = self.found as f64 / READS as f64;
        println!(
            "{:<20} {:>8.0} {:>9.1} {:>9.1} {:>9.1} {:>10.1} {:>7.4} {:>8.0}",
            self.title,
            self.objects as f64 / self.put_s,
            self.empty as f64 / f64::from(1 << 20),
            self.full as f64 / f64::from(1 << 20),
            grown / self.objects as f64,
            grown / (self.objects as f64 * share),
            share,
            self.found as f64 / self.read_s
        );
    }
}

/// Our store, under one policy.
fn ours(policy: Policy, objects: u64, folder: &Path) -> Done {
    let path = folder.join("store");
    // Room for the objects, and as much again.
    let device: Arc<dyn Device> = Arc::new(FileDevice::create(&path, objects * 1536)?);
    let mut plan = StorePlan::new(policy);
    plan.object_bytes = 768;
    Cache::format(&[&*device], &plan, true)?;
    let options = Options {
        hot_bytes: HOT_BYTES,
        ..Options::default()
    };
    let cache = Arc::new(Cache::open(vec![device], &options, false)?.0);
    let began = Instant::now();
    let mut empty = 0;
    for n in 0..objects {
        if n == FIRST {
            cache.flush()?;
            empty = rss_bytes()?;
        }
        cache.put(key(n).as_bytes(), &body(n), PutOptions::default())?;
    }
    cache.flush()?;
    let (put_s, full) = (began.elapsed().as_secs_f64(), rss_bytes()?);
    let found = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let readers: Vec<_> = (0..READERS)
        .map(|reader| {
            let (cache, found) = (Arc::clone(&cache), Arc::clone(&found));
            std::thread::spawn(move || {
                for at in 0..READS / READERS {
                    let n = asked(reader, at, objects);
                    if let Some(bytes) = cache.get_body(key(n).as_bytes()) {
                        assert!(bytes == body(n), "wrong bytes for {n}");
                        found.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    for reader in readers {
        reader.join().map_err(|_| "a reader panicked")?;
    }
    let read_s = began.elapsed().as_secs_f64();
    let found = found.load(Ordering::Relaxed);
    let title = format!("varve, {policy}");
    Row {
        title,
        objects,
        put_s,
        empty,
        full,
        found,
        read_s,
    }
    .print();
    Ok(())
}

/// foyer, with its block engine and direct I/O, all else as it is by default.
fn foyers(objects: u64, folder: &Path) -> Done {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        // 4 KiB an object, the indexes of its blobs, and blocks that are kept clean.
        let capacity = (objects as usize * 4096 / 100 * 103).max(1 << 30);
        let device = FsDeviceBuilder::new(folder)
            .with_capacity(capacity)
            .with_direct(true)
            .build()?;
        let cache: HybridCache<String, Vec<u8>> = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(HOT_BYTES)
            .with_weighter(|key: &String, value: &Vec<u8>| key.len() + value.len())
            .storage()
            .with_engine_config(BlockEngineConfig::new(device))
            .build()
            .await?;
        let began = Instant::now();
        let mut empty = 0;
        for n in 0..objects {
            if n == FIRST {
                empty = rss_bytes()?;
            }
            cache.insert(key(n), body(n));
            if n % BATCH == BATCH - 1 {
                cache.storage().wait().await;
            }
        }
        cache.storage().wait().await;
        let (put_s, full) = (began.elapsed().as_secs_f64(), rss_bytes()?);
        let began = Instant::now();
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let cache = cache.clone();
                tokio::spawn(async move {
                    let mut found = 0;
                    for at in 0..READS / READERS {
                        let n = asked(reader, at, objects);
                        if let Ok(Some(entry)) = cache.get(&key(n)).await {
                            assert!(*entry.value() == body(n), "wrong bytes for {n}");
                            found += 1;
                        }
                    }
                    found
                })
            })
            .collect();
        let mut found = 0;
        for reader in readers {
            found += reader.await?;
        }
        let read_s = began.elapsed().as_secs_f64();
        let title = "foyer 0.22".into();
        Row {
            title,
            objects,
            put_s,
            empty,
            full,
            found,
            read_s,
        }
        .print();
        cache.close().await?;
        Ok(())
    })
}

fn main() -> Done {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [side, objects, folder] = &args[..] {
        let (objects, folder) = (objects.parse()?, Path::new(folder));
        return match side.as_str() {
            "foyer" => foyers(objects, folder),
            policy => ours(policy.parse()?, objects, folder),
        };
    }
    let objects: u64 = args.first().map_or(Ok(2_000_000), |text| text.parse())?;
    let base = args.get(1).map_or_else(std::env::temp_dir, Into::into);
    println!(
        "{objects} objects of 150 bytes, {HOT_BYTES} bytes of memory for objects, {READERS} readers; VmRSS in MiB"
    );
    println!(
        "{:<20} {:>8} {:>9} {:>9} {:>9} {:>10} {:>7} {:>8}",
        "", "puts/s", "empty", "full", "B/object", "B/one held", "hits", "hits/s"
    );
    for side in ["foyer", "log", "log-lru", "log-prefetch", "set-mem"] {
        let folder = tempfile::tempdir_in(&base)?;
        let status = Command::new(std::env::current_exe()?)
            .args([side, &objects.to_string()])
            .arg(folder.path())
            .status()?;
        if !status.success() {
            return Err(format!("{side} ended with {status}").into());
        }
    }
    Ok(())
}
