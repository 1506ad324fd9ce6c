//! Allocation, wrong input, system calls, forks, failing devices.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bad, heap, heap_over, load, store};
use std::io::{Read as _, Write as _};
use std::ptr::NonNull;
use varve_far_alloc::{Config, Error, FarAlloc};

const MIB: u64 = 1 << 20;

/// Fills memory with bytes that its number says.
fn fill(at: NonNull<u8>, len: usize, number: u64) {
    for index in 0..len {
        store(at, index, (number as usize * 31 + index) as u8);
    }
}

fn check(at: NonNull<u8>, len: usize, number: u64) {
    for index in 0..len {
        let is = load(at, index);
        assert_eq!(
            is,
            (number as usize * 31 + index) as u8,
            "object {number} byte {index} of {len}"
        );
    }
}

fn offset(at: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    at.map_addr(|address| address.checked_add(bytes).unwrap())
}

#[test]
fn objects_of_all_sizes_keep_their_bytes_through_the_device() {
    let Some(heap) = heap(64, 4 * MIB) else { return };
    let sizes = [
        1, 4, 7, 60, 127, 128, 500, 512, 513, 4096, 4097, 9000, 16_384, 20_000,
    ];
    let all: Vec<_> = (0..1500u64)
        .map(|number| {
            let size = sizes[number as usize % sizes.len()];
            let at = heap.oalloc(1, size).unwrap();
            assert_eq!(at.addr().get() % 4096, 0);
            assert!((0..size).all(|index| load(at, index) == 0));
            fill(at, size, number);
            (at, size, number)
        })
        .collect();
    for _ in 0..2 {
        heap.flush().unwrap();
        assert_eq!(heap.stats().unwrap().pages, 0);
        all.iter()
            .for_each(|(at, size, number)| check(*at, *size, *number));
    }
    let stats = heap.objects().unwrap().stats();
    assert!(stats.memory_used_bytes <= 4 * MIB, "{stats:?}");
    assert!(stats.log.device_write_bytes > 0);
    for (at, _, _) in &all {
        heap.free(*at).unwrap();
        assert!(matches!(heap.free(*at), Err(Error::NotAllocated(_))));
    }
    assert_eq!(heap.objects().unwrap().stats().log.promised_bytes, 0);
}

#[test]
fn freed_objects_come_again_as_zeros() {
    let Some(heap) = heap(16, 4 * MIB) else { return };
    for size in [16, 100, 128, 3000] {
        let all: Vec<_> = (0..300).map(|_| heap.oalloc(1, size).unwrap()).collect();
        all.iter().for_each(|at| fill(*at, size, 1));
        heap.flush().unwrap();
        // Of small objects those stay that lie in one stored object with what is freed.
        all.iter().step_by(2).for_each(|at| heap.free(*at).unwrap());
        for _ in 0..150 {
            let at = heap.oalloc(1, size).unwrap();
            assert!((0..size).all(|index| load(at, index) == 0), "size {size}");
        }
    }
}

#[test]
fn array_has_its_objects_a_stride_apart() {
    let Some(heap) = heap(32, 8 * MIB) else { return };
    for size in [24, 128, 5000] {
        let count = 2000;
        let stride = FarAlloc::stride_bytes(size);
        let all = heap.oalloc(count, size).unwrap();
        (0..count).for_each(|index| fill(offset(all, index * stride), size, index as u64));
        heap.flush().unwrap();
        (0..count).for_each(|index| check(offset(all, index * stride), size, index as u64));
        assert!(matches!(
            heap.free(offset(all, stride)),
            Err(Error::NotAllocated(_))
        ));
        heap.free(all).unwrap();
        assert!(matches!(heap.free(all), Err(Error::NotAllocated(_))));
    }
    assert_eq!(heap.objects().unwrap().stats().log.promised_bytes, 0);
}

#[test]
fn malloc_is_a_model_of_itself() {
    let Some(heap) = heap(64, 8 * MIB) else { return };
    let mut random = fastrand::Rng::with_seed(33);
    let mut all: Vec<(NonNull<u8>, usize, u64)> = Vec::new();
    for number in 0..4000u64 {
        let pick = random.usize(..all.len().max(1));
        match random.u32(..10) {
            0..5 => {
                let bits = random.u32(4..15);
                let size = 1 + random.usize(..1 << bits);
                let at = if random.bool() {
                    let at = heap.calloc(1, size).unwrap();
                    assert!((0..size).all(|index| load(at, index) == 0));
                    at
                } else {
                    heap.malloc(size).unwrap()
                };
                assert_eq!(at.addr().get() % 16, 0);
                fill(at, size, number);
                all.push((at, size, number));
            }
            5..8 if !all.is_empty() => {
                let (at, size, number) = all.swap_remove(pick);
                check(at, size, number);
                heap.free(at).unwrap();
                assert!(heap.free(at).is_err());
            }
            _ if !all.is_empty() => {
                let (at, size, number) = &mut all[pick];
                let len = 1 + random.usize(..20_000);
                *at = heap.realloc(*at, len).unwrap();
                check(*at, len.min(*size), *number);
                *size = len;
                fill(*at, len, *number);
            }
            _ => {}
        }
        if number % 500 == 0 {
            heap.flush().unwrap();
        }
    }
    for (at, size, number) in all {
        check(at, size, number);
        heap.free(at).unwrap();
    }
    let stats = heap.objects().unwrap().stats();
    assert_eq!(stats.log.promised_bytes, 0);
    assert!(stats.memory_used_bytes <= 8 * MIB);
}

#[test]
fn wrong_input_is_an_error() {
    let Some(heap) = heap(8, 4 * MIB) else { return };
    assert!(matches!(heap.oalloc(0, 8), Err(Error::ZeroSize)));
    assert!(matches!(heap.oalloc(8, 0), Err(Error::ZeroSize)));
    assert!(matches!(
        heap.oalloc(usize::MAX / 2, 128),
        Err(Error::TooMany { .. })
    ));
    assert!(matches!(heap.oalloc(1, usize::MAX), Err(Error::TooMany { .. })));
    assert!(matches!(heap.oalloc(1 << 40, 1), Err(Error::Addresses { .. })));
    assert!(matches!(heap.malloc(0), Err(Error::ZeroSize)));
    assert!(matches!(heap.calloc(0, 5), Err(Error::ZeroSize)));
    assert!(matches!(heap.calloc(usize::MAX, 2), Err(Error::TooMany { .. })));
    assert!(heap.malloc(usize::MAX).is_err());
    assert!(heap.malloc(1 << 30).is_err(), "more than the store has");
    let mut local = 0u64;
    let foreign = NonNull::from(&mut local).cast();
    assert!(matches!(heap.free(foreign), Err(Error::NotAllocated(_))));
    assert!(matches!(heap.realloc(foreign, 10), Err(Error::NotAllocated(_))));
    assert!(matches!(
        heap.free(NonNull::dangling()),
        Err(Error::NotAllocated(_))
    ));
    assert!(matches!(heap.pin(foreign, 8), Err(Error::NotAllocated(_))));
    assert!(matches!(
        heap.pin(foreign, usize::MAX),
        Err(Error::NotAllocated(_))
    ));
    let object = heap.oalloc(1, 128).unwrap();
    assert!(matches!(heap.realloc(object, 10), Err(Error::FixedSize(_))));
    assert!(matches!(
        heap.free(offset(object, 16)),
        Err(Error::NotAllocated(_))
    ));
    let bytes = heap.malloc(100).unwrap();
    assert!(matches!(
        heap.free(offset(bytes, 16)),
        Err(Error::NotAllocated(_))
    ));
    assert!(matches!(heap.free(offset(bytes, 1)), Err(Error::NotAllocated(_))));
    assert!(matches!(heap.unpin(bytes, 8), Err(Error::NotAllocated(_))));
    heap.free(bytes).unwrap();
    assert!(matches!(heap.realloc(bytes, 10), Err(Error::NotAllocated(_))));
    assert!(FarAlloc::new(varve_far::Dram::new(8), &Config::new(100)).is_err());
}

#[test]
fn store_that_is_full_refuses_and_loses_nothing() {
    let Some(heap) = heap(8, 4 * MIB) else { return };
    let mut all = Vec::new();
    let error = loop {
        match heap.oalloc(1, 4000) {
            Ok(at) => {
                fill(at, 4000, all.len() as u64);
                all.push(at);
            }
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, Error::Objects(varve_far_objects::Error::Full { .. })),
        "{error}"
    );
    assert!(all.len() > 1000);
    heap.flush().unwrap();
    for (number, at) in all.iter().enumerate() {
        check(*at, 4000, number as u64);
        heap.free(*at).unwrap();
    }
    assert!(heap.malloc(2 << 20).is_ok());
}

#[test]
fn system_calls_take_far_addresses() {
    let Some(heap) = heap(16, 4 * MIB) else { return };
    let mut file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..100_000u32).map(|byte| byte as u8).collect();
    file.write_all(&bytes).unwrap();
    let far = heap.malloc(100_000).unwrap();
    for _ in 0..3 {
        heap.flush().unwrap();
        common::read_at(&file, far, 100_000, 0);
        heap.flush().unwrap();
        check(far, 100_000, 0);
        let mut out = tempfile::tempfile().unwrap();
        heap.flush().unwrap();
        common::write_all(&out, far, 100_000);
        let mut back = Vec::new();
        std::io::Seek::rewind(&mut out).unwrap();
        out.read_to_end(&mut back).unwrap();
        assert!(back == bytes);
    }
    // A buffer that is not there at all is an error of the call.
    heap.free(far).unwrap();
    assert_eq!(common::try_read_at(&file, far, 100, 0), Err(libc::EFAULT));
}

#[test]
fn pinned_pages_stay_and_pins_are_bounded() {
    let Some(heap) = heap(16, 4 * MIB) else { return };
    let pages = heap.stats().unwrap().buffer_pages as usize;
    let far = heap.malloc(pages * 4096 * 2).unwrap();
    heap.pin(far, 3 * 4096).unwrap();
    heap.pin(far, 4096).unwrap();
    fill(far, 3 * 4096, 5);
    for page in 0..pages * 2 {
        store(offset(far, page * 4096), 4095, 1);
    }
    heap.flush().unwrap();
    let held = heap.stats().unwrap().pages;
    assert!((3..=4).contains(&held), "{held}");
    let faults = heap.stats().unwrap().faults;
    assert_eq!(load(far, 0), 5u64.wrapping_mul(31) as u8);
    assert_eq!(heap.stats().unwrap().faults, faults);
    assert!(matches!(
        heap.pin(far, pages * 4096),
        Err(Error::PageBuffer { .. })
    ));
    heap.unpin(far, 3 * 4096).unwrap();
    heap.flush().unwrap();
    assert!(heap.stats().unwrap().pages >= 1, "one pin of two is left");
    heap.unpin(far, 4096).unwrap();
    assert!(matches!(heap.unpin(far, 4096), Err(Error::NotAllocated(_))));
    heap.flush().unwrap();
    assert_eq!(heap.stats().unwrap().pages, 0);
    // A page that is freed loses its pins.
    heap.pin(far, 4096).unwrap();
    heap.free(far).unwrap();
    let again = heap.malloc(pages * 4096).unwrap();
    heap.pin(again, pages / 4 * 4096).unwrap();
}

#[test]
fn memory_stays_below_the_limit_with_page_tables() {
    let Some(heap) = heap(64, 6 * MIB) else { return };
    // 100,000 pages of addresses: their page tables would take 0.8 MB.
    let count = 100_000;
    let all = heap.oalloc(count, 128).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..30_000 {
        let index = random.usize(..count);
        store(offset(all, index * 4096), 0, 1);
        let stats = heap.stats().unwrap();
        assert!(stats.pages <= stats.buffer_pages, "{stats:?}");
    }
    let used = heap.objects().unwrap().stats().memory_used_bytes;
    assert!(used <= 6 * MIB + MIB / 8, "{used}");
    let (resident, tables) = common::in_memory(all, count * 4096);
    let buffer = heap.stats().unwrap().buffer_pages as usize * 4096;
    assert!(resident <= buffer, "{resident} of {buffer}");
    eprintln!("in memory: {resident} bytes of pages, page tables of the process {tables} kB");
}

#[test]
fn page_dropped_by_the_program_is_what_was_stored() {
    let Some(heap) = heap(16, 4 * MIB) else { return };
    let far = heap.oalloc(1, 4096).unwrap();
    fill(far, 4096, 3);
    heap.flush().unwrap();
    check(far, 4096, 3);
    common::drop_page(far);
    check(far, 4096, 3);
    store(far, 0, 77);
    common::drop_page(far);
    check(far, 4096, 3);
    store(far, 0, 78);
    heap.flush().unwrap();
    assert_eq!(load(far, 0), 78);
}

#[test]
fn read_that_fails_is_sigbus_and_comes_back_with_the_device() {
    let bad = Bad::new(32);
    let Some(heap) = heap_over(bad.clone(), 4 * MIB) else {
        return;
    };
    let size = 4096;
    let all: Vec<_> = (0..2000).map(|_| heap.oalloc(1, size).unwrap()).collect();
    all.iter()
        .enumerate()
        .for_each(|(number, at)| fill(*at, size, number as u64));
    heap.flush().unwrap();
    bad.fails_reads(true);
    let failing: Vec<_> = (0..all.len())
        .filter(|number| common::touch(all[*number]).is_err())
        .collect();
    assert!(failing.len() > 500, "{} of {}", failing.len(), all.len());
    assert!(heap.last_error().is_some());
    assert!(heap.pin(all[failing[0]], 8).is_err());
    bad.fails_reads(false);
    std::thread::sleep(std::time::Duration::from_millis(1300));
    all.iter()
        .enumerate()
        .for_each(|(number, at)| check(*at, size, number as u64));
}

#[test]
fn write_that_fails_loses_nothing() {
    let bad = Bad::new(32);
    let Some(heap) = heap_over(bad.clone(), 4 * MIB) else {
        return;
    };
    let size = 4096;
    let all: Vec<_> = (0..1500).map(|_| heap.oalloc(1, size).unwrap()).collect();
    let mut written = vec![false; all.len()];
    bad.fails_writes(true);
    // As many as memory takes; from then on touching others is SIGBUS.
    let mut failures = 0;
    for (number, at) in all.iter().enumerate() {
        if common::touch(*at).is_ok() {
            fill(*at, size, number as u64);
            written[number] = true;
        } else {
            failures += 1;
            if failures == 3 {
                break;
            }
        }
    }
    assert_eq!(failures, 3);
    assert!(heap.flush().is_err());
    bad.fails_writes(false);
    std::thread::sleep(std::time::Duration::from_millis(1300));
    for (number, at) in all.iter().enumerate() {
        if written[number] {
            check(*at, size, number as u64);
        } else {
            assert_eq!(load(*at, 0), 0);
        }
    }
    heap.flush().unwrap();
}

#[test]
fn child_of_a_fork_has_no_far_memory() {
    let Some(heap) = heap(16, 4 * MIB) else { return };
    let far = heap.oalloc(1, 128).unwrap();
    fill(far, 128, 1);
    let other = heap.oalloc(1, 128).unwrap();
    fill(other, 128, 2);
    heap.flush().unwrap();
    let calls = common::in_child(|| {
        let is_forked = |error| matches!(error, Some(Error::Forked));
        if is_forked(heap.oalloc(1, 8).err()) && is_forked(heap.free(far).err()) && heap.stats().is_err() {
            7
        } else {
            8
        }
    });
    assert_eq!(calls, Ok(7));
    assert_eq!(common::in_child(|| i32::from(load(far, 0))), Err(libc::SIGSEGV));
    check(far, 128, 1);
    store(far, 0, 9);
    assert_eq!(
        common::in_child(|| i32::from(load(far, 0))),
        Err(libc::SIGSEGV),
        "in memory neither"
    );
    heap.flush().unwrap();
    assert_eq!(load(far, 0), 9);
    check(other, 128, 2);
    // Dropping the heap there does nothing, and ends.
    let dropped = common::in_child_once(heap, |heap| {
        drop(heap);
        9
    });
    assert_eq!(dropped.1, Ok(9));
    check(other, 128, 2);
}

#[test]
fn wrong_address_in_the_heap_is_sigbus() {
    let Some(heap) = heap(16, 4 * MIB) else { return };
    let far = heap.oalloc(1, 128).unwrap();
    assert_eq!(common::touch(far), Ok(()));
    heap.free(far).unwrap();
    assert_eq!(common::touch(far), Err(libc::SIGBUS));
    // The next object there is good at once.
    let again = heap.oalloc(1, 128).unwrap();
    assert_eq!(again, far);
    assert_eq!(common::touch(again), Ok(()));
    // Beyond all that was allocated.
    let beyond = offset(far, 512 << 20);
    assert_eq!(common::touch(beyond), Err(libc::SIGBUS));
}

#[test]
fn heap_that_is_dropped_under_threads_ends_and_so_do_they() {
    for _ in 0..10 {
        let Some(heap) = heap(16, 4 * MIB) else { return };
        let count = 5000;
        let all = heap.oalloc(count, 128).unwrap();
        let address = all.addr().get();
        let threads: Vec<_> = (0..3)
            .map(|seed| {
                std::thread::spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed);
                    let all = common::at(address);
                    loop {
                        let at = offset(all, random.usize(..count) * 4096);
                        if let Err(signal) = common::touch(at) {
                            return signal;
                        }
                    }
                })
            })
            .collect();
        std::thread::sleep(std::time::Duration::from_millis(30));
        drop(heap);
        for thread in threads {
            let signal = thread.join().unwrap();
            assert!([libc::SIGBUS, libc::SIGSEGV].contains(&signal), "{signal}");
        }
    }
}

#[test]
fn kernel_that_refuses_is_a_clear_error() {
    const FLAG: &str = "VARVE_FAR_ALLOC_NOBODY";
    if std::env::var_os(FLAG).is_some() {
        match FarAlloc::new(varve_far::Dram::new(8), &Config::new(4 * MIB)) {
            Err(error @ Error::Userfault { .. }) => println!("refused: {error}"),
            other => println!("wrong: {other:?}"),
        }
        return;
    }
    if heap(8, 4 * MIB).is_none() || !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: needs root, to give rights up");
    }
    let test = std::env::current_exe().unwrap();
    let copy = tempfile::tempdir().unwrap();
    let program = copy.path().join("test");
    std::fs::copy(test, &program).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(copy.path(), open).unwrap();
    let output = std::os::unix::process::CommandExt::uid(&mut std::process::Command::new(&program), 65534)
        .args(["--exact", "kernel_that_refuses_is_a_clear_error", "--nocapture"])
        .env(FLAG, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("refused: far addresses need userfaultfd"), "{text}");
}
