//! Programs to manage, for trying and measuring: each prints what it saw as one line of JSON a second.
//!
//! `vm_workload random MIB SECONDS`: random reads over all memory; operations each second, of time and of
//! processor time (which others on the machine do not take away).
//! `vm_workload hot MIB SECONDS HOT_PERCENT`: nine of ten accesses in a hot part that jumps half way.
//! `vm_workload sparse MIB SECONDS`: fills memory, then gives back nine of ten base pages of every region.
//! `vm_workload sparse-huge MIB SECONDS`: the same in memory that asks for huge pages always.
//! `vm_workload sleep MIB SECONDS`: fills memory and sleeps.

use std::hint::black_box;
use std::time::{Duration, Instant};

use varve_vm_manager::sim::trace::Rng;
use varve_vm_manager::sys::thread_cpu_time;

const PAGE: usize = 4096;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize, default: u64| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (mib, seconds) = (number(2, 256) as usize, number(3, 10));
    let mut memory = vec![0u8; mib << 20];
    if args.get(1).is_some_and(|a| a == "sparse-huge") {
        let (start, len) = (memory.as_ptr() as usize & !(PAGE - 1), memory.len());
        // SAFETY: advice about pages that the vector lies in; it keeps contents.
        unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_HUGEPAGE) };
    }
    for page in memory.chunks_mut(PAGE) {
        page[0] = 1;
    }
    eprintln!("{{\"ready\":{mib}}}");
    let end = Instant::now() + Duration::from_secs(seconds);
    match args.get(1).map(String::as_str) {
        Some("random") => random(&memory, end, memory.len(), |_| 0),
        Some("hot") => {
            let hot = memory.len() / 100 * number(4, 10) as usize;
            let (half, total) = (Instant::now() + Duration::from_secs(seconds / 2), memory.len());
            random(&memory, end, hot, move |rng| match rng.below(10) {
                0 => rng.below((total - hot) as u64) as usize,
                _ if Instant::now() < half => 0,
                _ => total - hot,
            });
        }
        Some("sparse" | "sparse-huge") => {
            for page in memory.chunks_mut(PAGE) {
                page.fill(7);
            }
            // As an allocator does when most objects are freed.
            let base = memory.as_ptr() as usize;
            for page in (0..memory.len() / PAGE).filter(|p| p % 10 != 0) {
                drop_page(base.next_multiple_of(PAGE) + page * PAGE, base + memory.len());
            }
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
            black_box(&memory);
        }
        _ => std::thread::sleep(end.saturating_duration_since(Instant::now())),
    }
}

fn drop_page(address: usize, end: usize) {
    if address + PAGE <= end {
        // SAFETY: a whole page inside of the vector, which holds plain bytes: they read as zeros afterwards.
        unsafe { libc::madvise(address as *mut libc::c_void, PAGE, libc::MADV_DONTNEED) };
    }
}

fn random(memory: &[u8], end: Instant, span: usize, base: impl Fn(&mut Rng) -> usize) {
    let mut rng = Rng::new(1);
    let (mut operations, mut sum, mut second, mut used) = (0u64, 0u64, Instant::now(), thread_cpu_time());
    while Instant::now() < end {
        for _ in 0..10_000 {
            let at = base(&mut rng) + rng.below(span as u64) as usize;
            sum = sum.wrapping_add(u64::from(memory[at.min(memory.len() - 1)]));
        }
        operations += 10_000;
        if second.elapsed() >= Duration::from_secs(1) {
            println!(
                "{{\"operations_per_s\":{:.0},\"operations_per_cpu_s\":{:.0}}}",
                operations as f64 / second.elapsed().as_secs_f64(),
                operations as f64 / (thread_cpu_time() - used).as_secs_f64()
            );
            (operations, second, used) = (0, Instant::now(), thread_cpu_time());
        }
    }
    black_box(sum);
}
