//! A cache over one or several devices. Each device holds a store of its own and a key belongs to one device
//! by its hash, so a lost device costs only its share of the keys.

use crate::device::Device;
use crate::hash::{KeyHash, Secret};
use crate::store::{
    DEVICES_MAX, Damage, Hit, Identity, MemoryLookup, ObjectInfo, Opened, Options, PutOptions, PutOutcome,
    PutStream, ScopeHash, Shard, StatsSnapshot, StoreError, StorePlan, Superblock,
};
use std::sync::Arc;

/// The objects that a purge covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// One object.
    Key(&'a [u8]),
    /// Objects that were put with this tag.
    Tag(&'a [u8]),
    /// Objects that were put with this host.
    Host(&'a [u8]),
    /// Objects whose keys begin with this prefix.
    Prefix(&'a [u8]),
    /// All objects.
    Everything,
}

/// One object of [`Cache::put_related`].
#[derive(Debug, Clone, Copy)]
pub struct Related<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// Its body.
    pub body: &'a [u8],
    /// Its metadata, tags, host and expiry.
    pub options: PutOptions<'a>,
}

impl<'a> Related<'a> {
    /// An object with a body and nothing else.
    #[must_use]
    pub fn new(key: &'a [u8], body: &'a [u8]) -> Self {
        Self {
            key,
            body,
            options: PutOptions::default(),
        }
    }
}

/// A cache. All calls may come from several threads at once.
#[derive(Debug)]
pub struct Cache {
    secret: Secret,
    shares: [u32; DEVICES_MAX],
    /// The devices' stores; `None` for a missing device.
    shards: Vec<Option<Arc<Shard>>>,
}

fn random<const N: usize>() -> Result<[u8; N], StoreError> {
    let mut bytes = [0; N];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match got {
        Ok(len) if len == N => Ok(bytes),
        _ => Err(StoreError::Plan("the kernel gives no random bytes".to_owned())),
    }
}

impl Cache {
    /// Makes a cache on devices; keys are spread in proportion to the devices' lengths. Overwrites existing
    /// stores if `force`; refuses devices that hold one otherwise.
    ///
    /// # Errors
    /// `Devices`, `StoreExists`, `TooSmall`, `Plan`; a device failed.
    pub fn format(
        devices: &[&dyn Device],
        plan: &StorePlan,
        force: bool,
    ) -> Result<Vec<Superblock>, StoreError> {
        Self::format_with(devices, plan, force, random()?)
    }

    /// As [`format`](Self::format), with a given secret, so that equal keys lie in the same places on every
    /// run. For tests and measurements.
    ///
    /// # Errors
    /// As `format`.
    pub fn format_with(
        devices: &[&dyn Device],
        plan: &StorePlan,
        force: bool,
        secret: [u8; 16],
    ) -> Result<Vec<Superblock>, StoreError> {
        if devices.is_empty() || devices.len() > DEVICES_MAX {
            return Err(StoreError::Devices(format!(
                "a cache has 1 to {DEVICES_MAX} devices, not {}",
                devices.len()
            )));
        }
        for device in devices {
            Superblock::lay_out(plan, device.len_bytes(), plan.is_aside_of(*device))?;
            if !force && Superblock::read(*device).is_ok() {
                return Err(StoreError::StoreExists {
                    device: device.name(),
                });
            }
        }
        let all: u64 = devices.iter().map(|device| device.len_bytes()).sum();
        let mut shares = [u32::MAX; DEVICES_MAX];
        let mut before = 0u64;
        for (share, device) in shares.iter_mut().zip(devices) {
            before += device.len_bytes();
            *share = (u128::from(before) * u128::from(u32::MAX) / u128::from(all)) as u32;
        }
        let cache_id = u64::from_le_bytes(random()?);
        let made = devices.iter().enumerate().map(|(n, device)| {
            let identity = Identity {
                cache_id,
                store_id: u64::from_le_bytes(random()?),
                secret,
                aside: u32::from_le_bytes(random()?),
                device: (n as u8, devices.len() as u8),
                shares,
            };
            Shard::format(*device, plan, &identity)
        });
        made.collect()
    }

    /// Opens the cache of these devices, in any order. With `degraded` some may be missing: keys of their
    /// shares are missed and not stored.
    ///
    /// # Errors
    /// `NoStore`; `Devices` if they belong to different caches, one is listed twice, or some are missing
    /// without `degraded`; a device failed.
    pub fn open(
        devices: Vec<Arc<dyn Device>>,
        options: &Options,
        degraded: bool,
    ) -> Result<(Self, Vec<Opened>), StoreError> {
        let mut shards: Vec<Option<Arc<Shard>>> = Vec::new();
        let mut found: Vec<Opened> = Vec::new();
        let mut first: Option<Superblock> = None;
        for device in devices {
            let (layout, _) = match Superblock::read(&*device) {
                Err(_) if degraded => continue,
                read => read?,
            };
            let first = *first.get_or_insert(layout);
            shards.resize(first.device_count as usize, None);
            if layout.cache_id != first.cache_id || layout.device_count != first.device_count {
                return Err(StoreError::Devices(format!(
                    "{} belongs to another cache",
                    device.name()
                )));
            }
            let place = &mut shards[usize::from(layout.device)];
            if place.is_some() {
                return Err(StoreError::Devices(format!("{} is there twice", device.name())));
            }
            let mut options = options.clone();
            options.hot_bytes /= first.device_count as usize;
            let (shard, opened) = Shard::open(device, options)?;
            *place = Some(shard);
            found.push(opened);
        }
        let Some(first) = first else {
            return Err(StoreError::Devices("no device of a cache was given".to_owned()));
        };
        let missing = shards.iter().filter(|shard| shard.is_none()).count();
        if missing > 0 && !degraded {
            return Err(StoreError::Devices(format!(
                "{missing} of the cache's {} devices are missing; give all of them, or open it degraded",
                first.device_count
            )));
        }
        let cache = Self {
            secret: first.secret(),
            shares: first.shares,
            shards,
        };
        Ok((cache, found))
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        KeyHash::of(&self.secret, key)
    }

    fn shard(&self, hash: KeyHash) -> Option<&Arc<Shard>> {
        let last = self.shards.len() - 1;
        let device = self.shares[..last].partition_point(|&share| share <= hash.device());
        self.shards[device].as_ref()
    }

    /// Number of devices of the cache, missing ones included.
    pub fn device_count(&self) -> usize {
        self.shards.len()
    }

    /// The stores of the devices that are present.
    pub fn shards(&self) -> impl Iterator<Item = &Arc<Shard>> {
        self.shards.iter().flatten()
    }

    /// Looks an object up. Damage, expiry, a purge or a failing device is a miss.
    pub fn get(&self, key: &[u8]) -> Option<Hit> {
        let hash = self.hash(key);
        self.shard(hash)?.get(key, hash)
    }

    /// Looks an object up without waiting for a device. [`get`](Self::get) has the answer where this has
    /// none.
    pub fn get_in_memory(&self, key: &[u8]) -> MemoryLookup {
        let hash = self.hash(key);
        self.shard(hash)
            .map_or(MemoryLookup::Miss, |shard| shard.get_in_memory(key, hash))
    }

    /// Looks an object up and reads all of it. Damage anywhere in it is a miss.
    pub fn get_body(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.get(key)?.body().ok()
    }

    /// Puts an object. An older version is no longer served, whatever the outcome. Durable after a
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// `TooLong`.
    pub fn put(&self, key: &[u8], body: &[u8], options: PutOptions<'_>) -> Result<PutOutcome, StoreError> {
        let hash = self.hash(key);
        match self.shard(hash) {
            Some(shard) => shard.put(&crate::store::Item {
                key,
                hash,
                body,
                options,
            }),
            None => Ok(PutOutcome::Unavailable),
        }
    }

    /// Puts objects that will be requested together: the first one first, the others after it was read. With
    /// several devices, the objects of each device form a group.
    ///
    /// # Errors
    /// `TooLong`.
    pub fn put_related(&self, objects: &[Related<'_>]) -> Result<(), StoreError> {
        let mut groups: Vec<Vec<crate::store::Item<'_>>> = self.shards.iter().map(|_| Vec::new()).collect();
        let last = self.shards.len() - 1;
        for Related { key, body, options } in objects {
            let hash = self.hash(key);
            let device = self.shares[..last].partition_point(|&share| share <= hash.device());
            groups[device].push(crate::store::Item {
                key,
                hash,
                body,
                options: *options,
            });
        }
        for (group, shard) in groups.iter().zip(&self.shards) {
            if let (Some(shard), false) = (shard, group.is_empty()) {
                shard.put_related(group)?;
            }
        }
        Ok(())
    }

    /// Begins to put an object of `body_len` bytes, piece by piece. `None` if its device is missing.
    ///
    /// # Errors
    /// `TooLong`.
    pub fn put_stream(
        &self,
        key: &[u8],
        body_len: u64,
        options: PutOptions<'_>,
    ) -> Result<Option<PutStream>, StoreError> {
        let hash = self.hash(key);
        let shard = self.shard(hash);
        shard
            .map(|shard| shard.put_stream(key, hash, body_len, &options))
            .transpose()
    }

    /// Removes an object: it is not found from now on. Durable after a [`flush`](Self::flush).
    ///
    /// # Errors
    /// The device failed.
    pub fn remove(&self, key: &[u8]) -> Result<(), StoreError> {
        let hash = self.hash(key);
        self.shard(hash).map_or(Ok(()), |shard| shard.remove(key, hash))
    }

    /// Removes the objects that were put into a scope earlier. Durable when this returns; the cost does not
    /// depend on the number of objects.
    ///
    /// # Errors
    /// A device failed. `TooLong` for a prefix longer than a key.
    pub fn purge(&self, scope: Scope<'_>) -> Result<(), StoreError> {
        if let Scope::Key(key) = scope {
            self.remove(key)?;
            return self.flush();
        }
        for shard in self.shards() {
            let hash = match scope {
                Scope::Tag(tag) => ScopeHash {
                    hash: shard.tag_hash(b"t:", tag),
                    prefix_len: 0,
                },
                Scope::Host(host) => ScopeHash {
                    hash: shard.tag_hash(b"h:", host),
                    prefix_len: 0,
                },
                Scope::Prefix(prefix) if !prefix.is_empty() => {
                    let most = crate::store::object::KEY_MAX;
                    if prefix.len() > most {
                        return Err(StoreError::TooLong {
                            what: "a prefix",
                            len: prefix.len(),
                            most,
                        });
                    }
                    ScopeHash {
                        hash: shard.prefix_hash(prefix),
                        prefix_len: prefix.len() as u16,
                    }
                }
                _ => {
                    shard.purge_all()?;
                    continue;
                }
            };
            shard.purge(hash)?;
        }
        Ok(())
    }

    /// Calls `visit` for each object, in order of device offset.
    ///
    /// # Errors
    /// A device failed.
    pub fn scan(&self, mut visit: impl FnMut(ObjectInfo)) -> Result<(), StoreError> {
        self.shards().try_for_each(|shard| shard.scan(&mut visit))
    }

    /// Reads every object to its last byte.
    ///
    /// # Errors
    /// A device failed.
    pub fn check(&self) -> Result<Damage, StoreError> {
        let mut all = Damage::default();
        for shard in self.shards() {
            let found = shard.check()?;
            all.objects += found.objects;
            all.bytes += found.bytes;
            all.damaged += found.damaged;
        }
        Ok(all)
    }

    /// Makes all earlier changes durable. Durable when this returns.
    ///
    /// # Errors
    /// A device failed; it is given up, the others continue.
    pub fn flush(&self) -> Result<(), StoreError> {
        let done: Vec<_> = self.shards().map(|shard| shard.flush()).collect();
        done.into_iter().collect()
    }

    /// Flushes devices whose flush interval has passed. Call it about once a second, so that objects become
    /// durable although no further put follows.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn tick(&self) -> Result<(), StoreError> {
        self.shards().try_for_each(|shard| shard.tick())
    }

    /// Keeps this share of the sets of `SetMemLru` in memory; at a half the policy becomes `SetMem`.
    pub fn set_resident_share(&self, share: f64) {
        self.shards().for_each(|shard| shard.set_resident_share(share));
    }

    /// Counters of all devices.
    pub fn stats(&self) -> StatsSnapshot {
        let mut all = StatsSnapshot::default();
        self.shards().for_each(|shard| all.add(&shard.stats()));
        all
    }

    /// Writes all waiting data and the index, so that the next start is quick. Later puts are refused.
    ///
    /// # Errors
    /// A device failed.
    pub fn close(&self) -> Result<(), StoreError> {
        let done: Vec<_> = self.shards().map(|shard| shard.close()).collect();
        done.into_iter().collect()
    }
}
