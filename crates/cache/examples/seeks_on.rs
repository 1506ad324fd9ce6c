//! Seeks of a hit, a miss and a write of each policy, counted by the disk below: `seeks_on FILE COUNTS
//! [POLICIES…]` makes a store of 256 MiB in FILE for one policy after the other; COUNTS is the file `counts`
//! of `crates/media/examples/slow_disk.rs`. What lies between, a pool's reads of its trees for one, counts as
//! well. The load is that of `tests/seeks.rs`; before each phase the disk below is given time to be done with
//! what was put off.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use varve_cache::device::{Device, FileDevice};
use varve_cache::{Cache, Options, Policy, PutOptions, Related, StorePlan};

type Done<T> = Result<T, Box<dyn std::error::Error>>;

const STORE_BYTES: u64 = 256 << 20;
/// As `tests/seeks.rs`: half of the objects are put in groups of four.
const BODY_BYTES: usize = 7000;
/// Objects that are asked for once each, over all that are held.
const OTHERS: u64 = 6000;
/// How long the disk has to be idle before a phase counts as ended.
const IDLE: Duration = Duration::from_millis(1500);

/// Reads, writes and bytes of the disk so far: seeks of reads, of writes, bytes written.
fn counts(path: &Path) -> Done<[u64; 3]> {
    let text = std::fs::read_to_string(path)?;
    let value = |name: &str| -> Done<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.ok_or("counts has another form")?.parse()?)
    };
    Ok([
        value("read_seeks")?,
        value("write_seeks")?,
        value("written_bytes")?,
    ])
}

/// The counts when the disk has been idle for a while: what was put off is done.
fn settled(path: &Path) -> Done<[u64; 3]> {
    let mut last = counts(path)?;
    loop {
        std::thread::sleep(IDLE);
        let now = counts(path)?;
        if now == last {
            return Ok(now);
        }
        last = now;
    }
}

fn key(n: u64) -> Vec<u8> {
    format!("http://site.test/object/{n}").into_bytes()
}

fn body(n: u64) -> Vec<u8> {
    n.to_le_bytes().into_iter().cycle().take(BODY_BYTES).collect()
}

fn measure(policy: Policy, file: &Path, counted: &Path) -> Done<()> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::create(file, STORE_BYTES)?);
    let mut plan = StorePlan::new(policy);
    plan.table_share = 0.9;
    Cache::format(&[&*device], &plan, true)?;
    let options = Options {
        hot_bytes: if policy.prefetches() { 4 << 20 } else { 0 },
        ..Options::default()
    };
    let cache = Cache::open(vec![device], &options, false)?.0;
    let layout = *cache.shards().next().ok_or("no shard")?.layout();
    let room = layout.sets * layout.shape().ways() as u64;
    let objects = room * 3 / 2 / 4 * 4;
    for group in (0..objects).step_by(4) {
        let keys: Vec<_> = (group..group + 4).map(key).collect();
        let bodies: Vec<_> = (group..group + 4).map(body).collect();
        let related: Vec<_> = keys
            .iter()
            .zip(&bodies)
            .map(|(key, body)| Related::new(key, body))
            .collect();
        cache.put_related(&related)?;
    }
    cache.flush()?;
    let [reads, writes, _] = settled(counted)?;
    let (mut hits, groups) = (0u64, (room / 16).min(2000));
    for group in 0..groups {
        let group = objects / 4 - 1 - group * 7919 % groups;
        for n in group * 4..group * 4 + 4 {
            if let Some(found) = cache.get_body(&key(n)) {
                assert!(found == body(n), "wrong bytes for {n}");
                hits += 1;
            }
        }
    }
    let hit = counts(counted)?;
    // Whatever is there, old and new: what lies in a pool's NVM, or has its position in memory, is a part of
    // it.
    let (mut others, span) = (0u64, room * 4 / 5);
    for n in 0..OTHERS {
        let n = objects - 1 - n * 7919 % span;
        if let Some(found) = cache.get_body(&key(n)) {
            assert!(found == body(n), "wrong bytes for {n}");
            others += 1;
        }
    }
    let other = counts(counted)?;
    let begun = settled(counted)?;
    let puts = room / 2;
    for n in objects..objects + puts {
        cache.put(&key(n), &body(n), PutOptions::default())?;
    }
    cache.flush()?;
    let put = settled(counted)?;
    let misses = 20_000u64;
    for n in 0..misses {
        assert!(cache.get(format!("never put {n}").as_bytes()).is_none());
    }
    let miss = counts(counted)?;
    println!(
        "{policy:<18} {:>7.3} {:>7.3} {:>7.3} {:>7.3} {:>7.3} {:>7.3} {:>10.2}",
        (hit[0] - reads) as f64 / hits as f64,
        (other[0] - hit[0]) as f64 / others as f64,
        (other[1] - writes) as f64 / (hits + others) as f64,
        (miss[0] - put[0]) as f64 / misses as f64,
        (put[0] - begun[0]) as f64 / puts as f64,
        (put[1] - begun[1]) as f64 / puts as f64,
        (put[2] - begun[2]) as f64 / (puts * BODY_BYTES as u64) as f64,
    );
    cache.close()?;
    Ok(())
}

fn main() -> Done<()> {
    let mut args = std::env::args().skip(1);
    let (Some(file), Some(counted)) = (args.next(), args.next()) else {
        return Err("seeks_on FILE COUNTS [POLICIES…]".into());
    };
    let (file, counted) = (PathBuf::from(file), PathBuf::from(counted));
    let named: Vec<Policy> = args.map(|name| name.parse()).collect::<Result<_, _>>()?;
    println!(
        "seeks of reads for a hit among the last that were put, and among all; of writes for a hit; of reads for a miss;"
    );
    println!("of reads and of writes for a put; bytes written for a byte put");
    println!(
        "{:<18} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>10}",
        "policy", "late", "all", "writes", "miss", "put r", "put w", "written"
    );
    for policy in if named.is_empty() {
        Policy::ALL.to_vec()
    } else {
        named
    } {
        measure(policy, &file, &counted)?;
        if file.is_file() {
            std::fs::remove_file(&file)?;
            let index = FileDevice::index_path(&file);
            if index.exists() {
                std::fs::remove_file(index)?;
            }
        }
    }
    Ok(())
}
