//! Hot, warm and cold (RapidSwap, section 4.1.1, figure 4.2): what a slab is, once a second.

use crate::reuse::Reuse;

/// Temperature of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Temperature {
    /// Accessed since the last look: goes to the fastest tier.
    Hot,
    /// Not accessed lately: stays.
    Warm,
    /// Not accessed for twice T: goes one tier down.
    Cold,
}

/// Access history of one slab.
#[derive(Debug, Clone, Copy)]
pub struct History {
    accessed: bool,
    /// Second of the last look that found an access, or of the last move.
    since_s: u64,
    /// Second of the last look that found an access.
    used_s: u64,
    temperature: Temperature,
}

impl History {
    /// A slab that was just allocated: hot.
    #[must_use]
    pub fn new(now_s: u64) -> Self {
        Self {
            accessed: true,
            since_s: now_s,
            used_s: now_s,
            temperature: Temperature::Hot,
        }
    }

    /// Notes an access.
    pub fn touch(&mut self) {
        self.accessed = true;
    }

    /// Tells how long the slab rested before an access, and how long it rests now. To be called before
    /// [`Self::look`].
    pub fn tell(&self, now_s: u64, reuse: &mut Reuse) {
        let rested_s = now_s.saturating_sub(self.used_s);
        if self.accessed {
            if rested_s > 0 {
                reuse.note(rested_s);
            }
            reuse.age(0);
        } else {
            reuse.age(rested_s);
        }
    }

    /// Looks at the access bit and clears it. The slab is cold after `cold_s` seconds without access, twice
    /// the seed's T.
    pub fn look(&mut self, now_s: u64, cold_s: u64) -> Temperature {
        if std::mem::take(&mut self.accessed) {
            self.used_s = now_s;
            self.since_s = now_s;
            self.temperature = Temperature::Hot;
        } else if now_s.saturating_sub(self.since_s) >= cold_s {
            self.temperature = Temperature::Cold;
        } else {
            self.temperature = Temperature::Warm;
        }
        self.temperature
    }

    /// Temperature at the last look.
    #[must_use]
    pub fn temperature(&self) -> Temperature {
        self.temperature
    }

    /// Seconds since the last access that a look found, or since the last move.
    #[must_use]
    pub fn idle_s(&self, now_s: u64) -> u64 {
        if self.accessed {
            0
        } else {
            now_s.saturating_sub(self.since_s)
        }
    }

    /// Starts the time anew after a move, so that a cold slab rests 2 × T on each tier.
    pub fn moved(&mut self, now_s: u64) {
        self.since_s = now_s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slab_is_cold_after_twice_t() {
        let mut slab = History::new(100);
        assert_eq!(slab.look(101, 10), Temperature::Hot);
        for now in 102..111 {
            assert_eq!(slab.look(now, 10), Temperature::Warm, "at {now}");
        }
        assert_eq!(slab.look(111, 10), Temperature::Cold);
        slab.touch();
        assert_eq!(slab.look(112, 10), Temperature::Hot);
        assert_eq!(slab.look(113, 10), Temperature::Warm);
    }
}
