//! Faults memory in before it is needed. The kernel clears allocated memory at the first touch of each page,
//! which costs as much as a second copy of the data; a separate thread triggers that in small steps with
//! pauses. During a step no other thread of the process can map memory, so the thread must not be one that
//! waits for the processor meanwhile.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;
use varve_media::Region;

/// Bytes of a step: a page of the largest usual kind.
const STEP_BYTES: u64 = 2 << 20;

/// A thread that touches all of some regions once, from their beginnings; dropping this ends it.
pub(super) struct Touching {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Touching {
    pub(super) fn start(regions: Vec<Arc<dyn Region>>) -> io::Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new().name("varve-touch".into()).spawn({
            let over = Arc::clone(&over);
            move || {
                for region in regions {
                    touch(&*region, &over);
                }
            }
        })?;
        Ok(Self {
            over,
            thread: Some(thread),
        })
    }
}

impl Drop for Touching {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn touch(region: &dyn Region, over: &AtomicBool) {
    let len = region.len_bytes();
    let mut off = 0;
    while off < len && !over.load(Ordering::Acquire) {
        let start = Instant::now();
        region.populate(off, STEP_BYTES.min(len - off));
        std::thread::sleep(start.elapsed());
        off += STEP_BYTES;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::Touching;
    use std::sync::Arc;
    use varve_media::{Backing, MappedOptions, MappedRegion, Region};

    /// Returns the bytes of the file that this process has mapped pages for.
    fn resident(path: &std::path::Path) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps
            .lines()
            .skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let rss = lines.find(|line| line.starts_with("Rss:")).unwrap();
        rss.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    #[test]
    fn all_of_a_region_is_touched_and_nothing_changed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("nvm");
        let len_bytes = 40 << 20;
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes,
            max_bytes: len_bytes,
            sparse: false,
        };
        let region = Arc::new(MappedRegion::create(&path, options).unwrap());
        region.write(17 << 20, b"here").unwrap();
        assert!(resident(&path) < len_bytes);
        let mut touching = Touching::start(vec![Arc::clone(&region) as _]).unwrap();
        touching.thread.take().unwrap().join().unwrap();
        assert_eq!(resident(&path), len_bytes);
        let mut out = [0; 6];
        region.read((17 << 20) - 1, &mut out).unwrap();
        assert_eq!(&out, b"\0here\0");
    }
}
