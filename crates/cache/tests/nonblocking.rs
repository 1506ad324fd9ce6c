//! The cache on tokio: the same bytes, never more calls at once than workers, and a runtime that goes on
//! meanwhile.
#![allow(clippy::unwrap_used)]

mod common;

use common::{body, format, key, open, options, plan};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use varve_cache::device::{Access, Device, HookedDevice, MemoryDevice};
use varve_cache::nonblocking::{AsyncCache, Attributes, PIECE_BYTES};
use varve_cache::{Cache, Options, Policy, PutOutcome, Scope, StoreError};

const LEN: u64 = 16 << 20;

fn workers(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

/// A runtime of one thread: who blocked it would be found at once.
fn on_one_thread<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.unwrap().block_on(work)
}

#[test]
fn objects_come_back_in_pieces_as_they_were_put() {
    let device = Arc::new(MemoryDevice::new(LEN));
    format(&*device, &plan(Policy::LogPrefetch));
    let cache = AsyncCache::new(Arc::new(open(device)), workers(2));
    on_one_thread(async {
        let large = body(1, 1, 1_500_000);
        let mut upload = cache
            .put_stream(key(1), large.len() as u64, Attributes::default())
            .await
            .unwrap()
            .unwrap();
        for piece in large.chunks(70_000) {
            upload.write(piece.to_vec()).await.unwrap();
        }
        assert!(matches!(
            upload.finish().await.unwrap(),
            PutOutcome::Stored { .. }
        ));
        let attributes = Attributes {
            meta: b"meta".to_vec(),
            tags: vec![b"tag".to_vec()],
            ..Attributes::default()
        };
        cache.put(key(2), body(2, 1, 900), attributes).await.unwrap();

        let mut read = cache.get(key(1)).await.unwrap().whole();
        assert_eq!(read.left(), large.len() as u64);
        let mut bytes = Vec::new();
        while let Some(piece) = read.next().await {
            let piece = piece.unwrap();
            assert!(!piece.is_empty() && piece.len() as u64 <= PIECE_BYTES);
            bytes.extend(piece);
        }
        assert!(bytes == large);
        let object = cache.get(key(2)).await.unwrap();
        assert_eq!(object.hit().meta().unwrap(), b"meta");
        assert_eq!(object.read(100..200).await.unwrap(), body(2, 1, 900)[100..200]);
        assert!(matches!(
            object.read(0..901).await,
            Err(StoreError::OutOfRange { .. })
        ));

        cache.delete(key(1)).await.unwrap();
        assert!(cache.get(key(1)).await.is_none());
        cache
            .change(|cache| cache.purge(Scope::Tag(b"tag")))
            .await
            .unwrap();
        assert!(cache.get(key(2)).await.is_none());
    });
}

#[test]
fn upload_that_is_too_short_or_given_up_puts_nothing() {
    let device = Arc::new(MemoryDevice::new(LEN));
    format(&*device, &plan(Policy::Log));
    let cache = AsyncCache::new(Arc::new(open(device)), workers(1));
    on_one_thread(async {
        for len in [1000, 1_000_000] {
            let begin = || cache.put_stream(key(1), len, Attributes::default());
            let mut short = begin().await.unwrap().unwrap();
            short.write(vec![1; 999]).await.unwrap();
            assert!(matches!(short.finish().await, Err(StoreError::Length { .. })));
            let mut dropped = begin().await.unwrap().unwrap();
            dropped.write(vec![1; 1000]).await.unwrap();
            drop(dropped);
            assert!(cache.get(key(1)).await.is_none());
        }
    });
}

/// Counts who is at a slow device.
#[derive(Default)]
struct Crowd {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Crowd {
    /// A read takes a while.
    fn pass(&self, access: Access) {
        if matches!(access, Access::Read(_)) {
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
            self.now.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn calls_beyond_the_workers_wait_without_a_thread() {
    let memory = Arc::new(MemoryDevice::new(LEN));
    format(&*memory, &plan(Policy::Log));
    let crowd = Arc::new(Crowd::default());
    let passes = Arc::clone(&crowd);
    let device = Arc::new(HookedDevice::new(memory, move |access| passes.pass(access)));
    let options = Options {
        hot_bytes: 0,
        order_transfers: false,
        ..options()
    };
    let cache = Cache::open(vec![device], &options, false).unwrap().0;
    let cache = AsyncCache::new(Arc::new(cache), workers(3));
    on_one_thread(async {
        for n in 0..60 {
            cache
                .put(key(n), body(n, 1, 2000), Attributes::default())
                .await
                .unwrap();
        }
        cache.change(|cache| cache.flush()).await.unwrap();
        // The open segment is served from memory: it has to be written and another one begun.
        for n in 100..200 {
            cache
                .put(key(n), body(n, 1, 4000), Attributes::default())
                .await
                .unwrap();
        }
        crowd.most.store(0, Ordering::SeqCst);
        let lookups: Vec<_> = (0..60)
            .map(|n| {
                let cache = cache.clone();
                tokio::spawn(async move {
                    let object = cache.get(key(n)).await?;
                    object
                        .read(0..2000)
                        .await
                        .ok()
                        .filter(|found| *found == body(n, 1, 2000))
                })
            })
            .collect();
        let (mut turns, mut most_running) = (0, 0);
        let mut found = 0;
        for lookup in lookups {
            while !lookup.is_finished() {
                // The one thread of the runtime is free meanwhile.
                turns += 1;
                most_running = most_running.max(cache.running());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            found += usize::from(lookup.await.unwrap().is_some());
        }
        assert_eq!(most_running, 3, "all workers were at it");
        assert!(turns > 20, "{turns}");
        assert!(found > 50, "{found}");
        assert_eq!(cache.running(), 0);
    });
    let most = crowd.most.load(Ordering::SeqCst);
    assert!((2..=3).contains(&most), "{most} at the device at once");
}

/// Where writes wait until they are let through.
#[derive(Debug, Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
}

impl Gate {
    fn pass(&self, access: Access) {
        if matches!(access, Access::Write(_)) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let closed = self.closed.lock().unwrap();
            drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn open(&self) {
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }
}

/// Opens the gate, also when the test fails: threads that wait there would keep it from ending.
struct Opens(Arc<Gate>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

#[test]
fn lookups_do_not_wait_behind_changes_that_wait_for_the_device() {
    for policy in [Policy::Basic, Policy::Set, Policy::SetMem, Policy::SetMemLru] {
        let memory = Arc::new(MemoryDevice::new(LEN));
        format(&*memory, &plan(policy));
        let gate = Arc::new(Gate::default());
        let passes = Arc::clone(&gate);
        let device = Arc::new(HookedDevice::new(memory, move |access| passes.pass(access)));
        let options = Options {
            hot_bytes: 0,
            ..options()
        };
        let opened = Cache::open(vec![device], &options, false).unwrap();
        let cache = AsyncCache::new(Arc::new(opened.0), workers(4));
        on_one_thread(async {
            for n in 0..20 {
                let put = cache.put(key(n), body(n, 1, 900), Attributes::default());
                put.await.unwrap();
            }
            *gate.closed.lock().unwrap() = true;
            let opens = Opens(Arc::clone(&gate));
            let puts: Vec<_> = (100..2100)
                .map(|n| {
                    let cache = cache.clone();
                    tokio::spawn(
                        async move { cache.put(key(n), body(n, 1, 900), Attributes::default()).await },
                    )
                })
                .collect();
            while gate.waiting.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let mut found = 0;
            for n in 0..20 {
                let got = tokio::time::timeout(Duration::from_secs(5), cache.get(key(n))).await;
                let got = got.unwrap_or_else(|_| panic!("{policy}: lookup {n} waits"));
                let Some(object) = got else { continue };
                let read = object.read(0..900);
                let read = tokio::time::timeout(Duration::from_secs(5), read).await.unwrap();
                found += usize::from(read.unwrap() == body(n, 1, 900));
            }
            assert!(found > 5, "{policy}: {found}");
            assert_eq!(cache.running(), 2, "{policy}: half of the workers");
            drop(opens);
            for put in puts {
                put.await.unwrap().unwrap();
            }
        });
    }
}

#[test]
fn calls_from_other_runtimes_run_on_the_threads_of_the_one_where_the_cache_was_made() {
    let own = tokio::runtime::Builder::new_current_thread()
        .thread_name("of the cache")
        .build()
        .unwrap();
    let device = Arc::new(MemoryDevice::new(LEN));
    format(&*device, &plan(Policy::Log));
    let cache = own.block_on(async { AsyncCache::new(Arc::new(open(device)), workers(2)) });
    for _ in 0..2 {
        let name = on_one_thread(cache.run(|_| std::thread::current().name().map(str::to_owned)));
        assert_eq!(name.as_deref(), Some("of the cache"));
    }
}

#[test]
fn call_that_nobody_awaits_any_more_gives_its_worker_back() {
    let device = Arc::new(MemoryDevice::new(LEN));
    format(&*device, &plan(Policy::Log));
    let cache = AsyncCache::new(Arc::new(open(device)), workers(1));
    on_one_thread(async {
        let slow = cache.run(|cache| {
            std::thread::sleep(Duration::from_millis(50));
            cache
                .put(b"k", b"v", varve_cache::PutOptions::default())
                .map(drop)
        });
        assert!(
            tokio::time::timeout(Duration::from_millis(5), slow)
                .await
                .is_err()
        );
        assert_eq!(cache.running(), 1, "it goes on by itself");
        // Waits for the worker, and finds what it put.
        assert!(cache.run(|cache| cache.get(b"k")).await.is_some());
        assert_eq!(cache.running(), 0);
    });
}

#[test]
fn what_memory_answers_waits_for_no_worker() {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(LEN));
    format(&*device, &plan(Policy::Log));
    let options = Options {
        hot_bytes: 8 << 20,
        ..options()
    };
    let (cache, _) = Cache::open(vec![device], &options, false).unwrap();
    let cache = AsyncCache::new(Arc::new(cache), workers(1));
    let objects = [(1, 2000), (2, 1_500_000)];
    on_one_thread(async {
        for (n, len) in objects {
            let mut upload = cache
                .put_stream(key(n), len as u64, Attributes::default())
                .await
                .unwrap()
                .unwrap();
            upload.write(body(n, 1, len)).await.unwrap();
            upload.finish().await.unwrap();
        }
        let whole = async |n| {
            let mut body = cache.get(key(n)).await.unwrap().whole();
            let mut bytes = Vec::new();
            while let Some(piece) = body.next().await {
                bytes.extend(piece.unwrap());
            }
            bytes
        };
        for (n, len) in objects {
            for _ in 0..3 {
                assert!(whole(n).await == body(n, 1, len));
            }
        }
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let busy = tokio::spawn({
            let cache = cache.clone();
            async move { cache.run(move |_| ended.recv()).await }
        });
        while cache.running() == 0 {
            tokio::task::yield_now().await;
        }
        let in_line = async {
            for (n, len) in objects {
                assert!(whole(n).await == body(n, 1, len));
            }
            let object = cache.get(key(2)).await.unwrap();
            let range = 300_000..300_007;
            let part = object.read(range.clone()).await.unwrap();
            assert_eq!(
                part,
                body(2, 1, 1_500_000)[range.start as usize..range.end as usize]
            );
            assert!(cache.get(key(3)).await.is_none(), "the index tells");
        };
        let done = tokio::time::timeout(Duration::from_secs(20), in_line).await;
        drop(end);
        assert!(done.is_ok(), "it waited for the only worker, which was busy");
        assert!(busy.await.unwrap().is_err());
    });
}
