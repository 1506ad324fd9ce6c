//! What the tests of the store share.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test file uses a part; tests may panic"
)]

use std::sync::Arc;
use std::time::Duration;
use varve_cache::device::{Device, MovingDevice};
use varve_cache::{Cache, Options, Policy, Shape, StorePlan};

/// The same secret in all tests, so that they always do the same.
pub const SECRET: [u8; 16] = *b"tests know this.";

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// A small store of a policy.
pub fn plan(policy: Policy) -> StorePlan {
    let mut plan = StorePlan::new(policy);
    plan.segment_bytes = 128 << 10;
    plan.object_bytes = 2048;
    plan.block_bytes = 4096;
    if policy != Policy::Basic {
        plan.shape = Shape::with(policy, 4, None).unwrap();
    }
    plan
}

/// Options under which nothing happens by time.
pub fn options() -> Options {
    Options {
        hot_bytes: 256 << 10,
        flush_interval: Duration::from_secs(1 << 30),
        clock: Arc::new(|| 1_000_000),
        ..Options::default()
    }
}

pub fn format(device: &dyn Device, plan: &StorePlan) {
    Cache::format_with(&[device], plan, true, SECRET).unwrap();
}

pub fn open(device: Arc<dyn Device>) -> Cache {
    Cache::open(vec![device], &options(), false).unwrap().0
}

/// A body that says whose it is: its key, its version and its length decide every byte.
pub fn body(key: u64, version: u64, len: usize) -> Vec<u8> {
    let mut random = Random(key << 32 ^ version << 8 ^ len as u64);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub fn key(n: u64) -> Vec<u8> {
    format!("http://example.org/objects/{n}").into_bytes()
}

/// A policy on a device, or on one that stands for a file of a pool.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub policy: Policy,
    pub on_pool: bool,
}

impl Case {
    /// All policies on a device, and on a pool those that do something else there.
    pub fn all() -> impl Iterator<Item = Self> {
        let alone = Policy::ALL.into_iter().map(Self::alone);
        let on_pool = Policy::ALL
            .into_iter()
            .filter(|policy| policy.leaves_index() || *policy == Policy::Set);
        alone.chain(on_pool.map(|policy| Self {
            policy,
            on_pool: true,
        }))
    }

    pub const fn alone(policy: Policy) -> Self {
        Self {
            policy,
            on_pool: false,
        }
    }

    /// The device of the store on a medium.
    pub fn device(self, medium: Arc<dyn Device>) -> Arc<dyn Device> {
        match self.on_pool {
            true => Arc::new(MovingDevice::new(medium)),
            false => medium,
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}{}",
            self.policy,
            if self.on_pool { " on a pool" } else { "" }
        )
    }
}
