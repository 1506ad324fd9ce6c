//! Counters of a store.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters of a store.
        #[derive(Debug, Default)]
        pub struct Stats { $(pub(super) $name: AtomicU64,)* }

        /// Counters of a store since it was opened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct StatsSnapshot { $($(#[$doc])* pub $name: u64,)* }

        impl Stats {
            /// Returns the present values.
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl StatsSnapshot {
            /// Adds the counters of another store.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// Names and values.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Lookups that found their object.
    hits,
    /// Hits served from memory: hot or prefetched objects.
    memory_hits,
    /// Lookups that found no object.
    misses,
    /// Lookups whose tag belonged to another key.
    false_matches,
    /// Objects or frames that were damaged.
    damaged,
    /// Objects found expired or purged.
    outdated,
    /// Objects put.
    puts,
    /// Objects put and written.
    admitted,
    /// Bytes of keys, metadata and bodies that were written for puts.
    admitted_bytes,
    /// Bytes written to the device, for any reason.
    written_bytes,
    /// Objects written again at the log's end because they had hits.
    second_chances,
    /// Related objects read together with the requested one.
    prefetched,
    /// Objects removed.
    removed,
    /// Checkpoints of the index.
    checkpoints,
    /// Sweeps over the position file.
    sweeps,
    /// Reads that failed.
    read_errors,
    /// Reads of the device for lookups: a bin, a set, or the beginning of an object in the log.
    lookup_reads,
    /// Reads of what does not lie beside an object's head.
    tail_reads,
    /// Reads of sets for puts and removals.
    set_reads,
    /// Reads of the position file for lookups.
    position_reads,
    /// Reads of segments that are about to be overwritten.
    segment_reads,
    /// Writes of bins of the Disk Table; bins side by side are one write.
    bin_writes,
    /// Writes of the log.
    log_writes,
    /// Writes of the journal, to either copy.
    journal_writes,
    /// Flushes of the device.
    flushes,
}

impl Stats {
    pub(super) fn count(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}
