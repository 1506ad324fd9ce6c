//! What a store counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of a store, alive.
        #[derive(Debug, Default)]
        pub struct Stats { $(pub(super) $name: AtomicU64,)* }

        /// Counters of a store since it was opened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct StatsSnapshot { $($(#[$doc])* pub $name: u64,)* }

        impl Stats {
            /// The counters now.
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl StatsSnapshot {
            /// Adds another store's.
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
    /// Of these, from memory: hot or prefetched objects.
    memory_hits,
    /// Lookups that did not.
    misses,
    /// Lookups whose tag was that of another key.
    false_matches,
    /// Objects or frames that were damaged.
    damaged,
    /// Objects found expired or purged.
    outdated,
    /// Objects put.
    puts,
    /// Of these, written.
    admitted,
    /// Bytes of keys, metadata and bodies that were written for puts.
    admitted_bytes,
    /// Bytes written to the device, for whatever reason.
    written_bytes,
    /// Objects written again at the log's end because they had been hit.
    second_chances,
    /// Objects read beside the one asked for.
    prefetched,
    /// Objects removed.
    removed,
    /// Checkpoints of the index.
    checkpoints,
    /// Sweeps over the position file.
    sweeps,
    /// Reads that failed.
    read_errors,
}

impl Stats {
    pub(super) fn count(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}
