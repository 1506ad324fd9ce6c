//! Processes of a load: each makes one request, waits for it, and makes the next. Phases follow each other.

use varve_format::{Generation, Ino, InodeKey};

/// The bytes that a stream accesses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// Units by a Zipf law: the exponent, and a number that selects the hot units.
    Zipf {
        /// Exponent; 0 is uniform.
        theta: f64,
        /// Another number selects other hot units.
        hot: u64,
    },
    /// From the first byte to the last, repeatedly.
    Scan,
    /// New files, one after the other: each request makes a new one. The oldest are removed once there are as
    /// many as the stream has units.
    Create,
    /// Single requests, by Zipf over files that [`Pattern::Create`] of the same set has made.
    Made {
        /// Exponent, over the age: the newest are hottest.
        theta: f64,
    },
}

/// Requests of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Stream {
    /// Its share of a process's requests, in percent.
    pub percent: u32,
    /// Whether its requests are reads.
    pub read: bool,
    /// Sizes of its requests in bytes, of which each request draws one.
    pub bytes: Vec<u32>,
    /// The bytes that it accesses.
    pub pattern: Pattern,
    /// Set of data, by [`Load::sets`].
    pub set: usize,
    /// The processes that have this stream (by number modulo 4): bits 0 to 3.
    pub processes: u8,
}

/// A period with constant streams.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Length in seconds.
    pub seconds: u32,
    /// Number of active processes.
    pub processes: u32,
    /// Their streams.
    pub streams: Vec<Stream>,
}

/// A load.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Name in tables.
    pub name: String,
    /// Units of each set at the start (for a created set, the most that exist at a time).
    pub sets: Vec<u32>,
    /// Phases, in order.
    pub phases: Vec<Phase>,
    /// Microseconds between two requests of a process.
    pub think_us: u32,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// File.
    pub key: InodeKey,
    /// Whether it is a read.
    pub read: bool,
    /// First byte.
    pub offset_bytes: u64,
    /// Bytes.
    pub bytes: u32,
    /// A file that this request removes.
    pub gone: Option<InodeKey>,
}

impl Load {
    /// Total seconds of all phases.
    #[must_use]
    pub fn seconds(&self) -> u32 {
        self.phases.iter().map(|phase| phase.seconds).sum()
    }

    /// The phase at a time; the last one after its end.
    #[must_use]
    pub fn phase_at(&self, seconds: f64) -> usize {
        let mut end = 0.0;
        for (at, phase) in self.phases.iter().enumerate() {
            end += f64::from(phase.seconds);
            if seconds < end {
                return at;
            }
        }
        self.phases.len() - 1
    }

    /// Largest number of processes of any phase.
    #[must_use]
    pub fn most_processes(&self) -> u32 {
        self.phases.iter().map(|phase| phase.processes).max().unwrap_or(0)
    }

    /// Whether files of a set are made while the load runs.
    #[must_use]
    pub fn is_created(&self, set: usize) -> bool {
        let mut streams = self.phases.iter().flat_map(|phase| &phase.streams);
        streams.any(|stream| stream.set == set && stream.pattern == Pattern::Create)
    }
}

/// Name of a file of a set.
#[must_use]
pub const fn file(set: usize, number: u64) -> InodeKey {
    InodeKey {
        ino: Ino(((set as u64 + 1) << 32) + number),
        generation: Generation(1),
    }
}

/// Makes requests.
#[derive(Debug)]
pub struct Maker {
    zipf: Vec<Option<Zipf>>,
    scan: Vec<u64>,
    /// First and one past the last file of each created set.
    made: Vec<(u64, u64)>,
    at_phase: usize,
}

impl Maker {
    /// A maker at the start of a load.
    #[must_use]
    pub fn new(load: &Load) -> Self {
        let mut maker = Self {
            zipf: Vec::new(),
            scan: vec![0; load.sets.len()],
            made: load.sets.iter().map(|units| (0, u64::from(*units))).collect(),
            at_phase: 0,
        };
        maker.enter(load, 0);
        maker
    }

    fn enter(&mut self, load: &Load, phase: usize) {
        let zipf = load.phases[phase]
            .streams
            .iter()
            .map(|stream| match stream.pattern {
                Pattern::Zipf { theta, .. } | Pattern::Made { theta } => {
                    Some(Zipf::new(load.sets[stream.set], theta))
                }
                Pattern::Scan | Pattern::Create => None,
            });
        self.zipf = zipf.collect();
        self.at_phase = phase;
    }

    /// Returns the next request of a process at a time; `None` if it is idle in this phase.
    pub fn next(
        &mut self,
        load: &Load,
        process: u32,
        seconds: f64,
        unit_bytes: u64,
        rng: &mut fastrand::Rng,
    ) -> Option<Request> {
        let phase = load.phase_at(seconds);
        if phase != self.at_phase {
            self.enter(load, phase);
        }
        let phase = &load.phases[phase];
        if process >= phase.processes {
            return None;
        }
        let mine = |stream: &&Stream| stream.processes & (1 << (process % 4)) != 0;
        let total: u32 = phase
            .streams
            .iter()
            .filter(mine)
            .map(|stream| stream.percent)
            .sum();
        if total == 0 {
            return None;
        }
        let mut drawn = rng.u32(0..total);
        let mut streams = phase
            .streams
            .iter()
            .enumerate()
            .filter(|(_, stream)| mine(stream));
        let (at, stream) = streams.find(|(_, stream)| {
            let found = drawn < stream.percent;
            drawn = drawn.wrapping_sub(stream.percent);
            found
        })?;
        let bytes = stream.bytes[rng.usize(0..stream.bytes.len())];
        Some(self.request(load, at, stream, bytes, unit_bytes, rng))
    }

    fn request(
        &mut self,
        load: &Load,
        at: usize,
        stream: &Stream,
        bytes: u32,
        unit_bytes: u64,
        rng: &mut fastrand::Rng,
    ) -> Request {
        let (set, units) = (stream.set, u64::from(load.sets[stream.set]));
        let within = |rng: &mut fastrand::Rng| {
            let slots = (unit_bytes.saturating_sub(u64::from(bytes)) / 4096).max(1);
            rng.u64(0..slots) * 4096
        };
        let mut request = Request {
            key: file(set, 0),
            read: stream.read,
            offset_bytes: 0,
            bytes,
            gone: None,
        };
        let rank = |rng: &mut fastrand::Rng| self.zipf[at].as_ref().map_or(0, |zipf| zipf.draw(rng));
        match stream.pattern {
            Pattern::Zipf { hot, .. } => {
                let unit = spread(rank(rng), hot, units);
                request.offset_bytes = unit * unit_bytes + within(rng);
            }
            Pattern::Scan => {
                let end = units * unit_bytes;
                let from = self.scan[set];
                request.offset_bytes = if from + u64::from(bytes) > end { 0 } else { from };
                self.scan[set] = request.offset_bytes + u64::from(bytes);
            }
            Pattern::Create => {
                let (first, next) = self.made[set];
                request.key = file(set, next);
                let full = next - first >= units;
                request.gone = full.then(|| file(set, first));
                self.made[set] = (first + u64::from(full), next + 1);
            }
            Pattern::Made { .. } => {
                let (first, next) = self.made[set];
                let back = rank(rng) % (next - first).max(1);
                request.key = file(set, next - 1 - back);
                request.offset_bytes = within(rng);
            }
        }
        request
    }
}

/// Maps ranks to the units of a set, one to one, so that hot units are not neighbours.
fn spread(rank: u64, hot: u64, units: u64) -> u64 {
    // A step that shares no divisor with the number of units visits each once.
    let mut step = (units as f64 * 0.618) as u64 | 1;
    while gcd(step, units) != 1 {
        step += 2;
    }
    (u128::from(rank) * u128::from(step) + u128::from(hot) * 7919) as u64 % units.max(1)
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Ranks 0.. with probabilities by `1 / (rank + 1)^theta`.
#[derive(Debug)]
struct Zipf {
    sums: Vec<f64>,
}

impl Zipf {
    fn new(units: u32, theta: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=units.max(1)).map(|rank| {
            sum += f64::from(rank).powf(-theta);
            sum
        });
        Self { sums: sums.collect() }
    }

    fn draw(&self, rng: &mut fastrand::Rng) -> u64 {
        let at = rng.f64() * self.sums.last().copied().unwrap_or(1.0);
        self.sums.partition_point(|sum| *sum < at) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_gives_each_unit_one_rank() {
        for units in [1, 2, 7, 64, 1000, 4096] {
            let mut all: Vec<_> = (0..units).map(|rank| spread(rank, 3, units)).collect();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len() as u64, units);
        }
    }

    #[test]
    fn zipf_draws_the_first_ranks_most_often() {
        let zipf = Zipf::new(1000, 1.0);
        let mut rng = fastrand::Rng::with_seed(1);
        let mut counts = [0u32; 1000];
        (0..100_000).for_each(|_| counts[zipf.draw(&mut rng) as usize] += 1);
        // 1/H(1000) of the draws: 0.1336.
        assert!((12_500..14_300).contains(&counts[0]), "{}", counts[0]);
        assert!(counts[1] < counts[0] && counts[10] < counts[1]);
    }
}
