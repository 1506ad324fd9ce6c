//! The rules of the pool's configuration: a walk over all names, a part at a time, that gives each file the
//! pin of the first rule that matches. What operators have said by command comes before. Moves nothing.

use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::ops::pin::{Pinning, Ruled};
use crate::placement::jobs::Placer;
use crate::placement::walk::{RulesApplied, Walk, wish};
use varve_format::inode::Content;
use varve_format::{PinnedBy, ROOT_INO};
use varve_ipc::IpcError;
use varve_store::{DirItem, Store};

/// Time between two walks, in milliseconds: ages change by themselves.
const REST_MS: u64 = 600_000;
/// Most names of one part of a walk.
const NAMES: usize = 512;
/// Names of a directory asked for at once.
const NAMES_AT_ONCE: usize = 64;

/// Context of applying rules.
pub(crate) struct Ruling<'k> {
    core: Core<'k>,
    store: &'k Store,
    placer: &'k Placer,
    pinning: Pinning<'k>,
}

impl<'k> Ruling<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            store: &kernel.store,
            placer: &kernel.placer,
            pinning: Pinning::of(kernel),
        }
    }

    /// Does the next part of a walk, if one is under way or due.
    pub(crate) fn step(&self) {
        let Some(rules) = &self.placer.rules else {
            return;
        };
        // Files keep pins of rules that are no longer there, until a walk.
        if rules.is_empty() && !self.placer.pins.has_seen_rules() {
            return;
        }
        let Some(mut walk) = self.placer.walk.try_lock() else {
            return;
        };
        let now_ms = self.core.now_ms();
        if walk.levels.is_empty() && now_ms < walk.due_ms {
            return;
        }
        if let Err(error) = self.part(&mut walk) {
            tracing::warn!("the placement rules cannot be applied: {error}");
            *walk = Walk::default();
        }
        if walk.levels.is_empty() {
            walk.due_ms = now_ms + REST_MS;
        }
    }

    /// Walks over all names now.
    ///
    /// # Errors
    /// EINVAL if the rules cannot be read, which was said at the start; EIO, ENOSPC.
    pub(crate) fn apply(&self) -> Result<RulesApplied, IpcError> {
        if self.placer.rules.is_none() {
            return Err(no(libc::EINVAL));
        }
        let mut walk = self.placer.walk.lock();
        *walk = Walk::default();
        loop {
            if self.store.latched().is_some() {
                return Err(no(libc::EIO));
            }
            self.part(&mut walk)?;
            if walk.levels.is_empty() {
                walk.due_ms = self.core.now_ms() + REST_MS;
                return Ok(walk.so_far);
            }
        }
    }

    /// Walks over some names, and sets the pins of their files.
    fn part(&self, walk: &mut Walk) -> Result<(), IpcError> {
        if walk.levels.is_empty() {
            *walk = Walk::default();
            walk.enter(self.store, ROOT_INO);
        }
        let mut wanted = Vec::new();
        let mut left = NAMES;
        while left > 0
            && let Some(level) = walk.levels.last_mut()
        {
            walk.path.truncate(level.path_len);
            let items = self
                .store
                .dir_iter(level.key.ino, level.cookie, NAMES_AT_ONCE.min(left));
            // A directory that was removed has no names left.
            let items = items.unwrap_or_default();
            if items.is_empty() {
                walk.levels.pop();
                continue;
            }
            left -= items.len();
            self.items(walk, &items, &mut wanted);
        }
        walk.so_far.changed += self.pinning.set_ruled(&wanted)?;
        Ok(())
    }

    /// Looks at names of the last directory, up to one that is a directory.
    fn items(&self, walk: &mut Walk, items: &[DirItem], wanted: &mut Vec<Ruled>) {
        let now_ns = self.core.env.clock.now_ns();
        for item in items {
            let Some(level) = walk.levels.last_mut() else {
                return;
            };
            level.cookie = item.cookie;
            let (dir, of_dir) = (level.key, level.pin);
            let Ok(inode) = self.store.get_key(item.key) else {
                continue;
            };
            let path_len = walk.path.len();
            walk.path.push('/');
            walk.path.push_str(&String::from_utf8_lossy(&item.name));
            if inode.attr.is_dir() {
                walk.enter(self.store, item.key.ino);
                return;
            }
            if matches!(inode.content, Content::File(_)) && walk.is_first_name(&inode) {
                walk.so_far.files += 1;
                let rules = self.placer.rules.as_ref();
                let pin = rules.map_or(inode.pin, |rules| wish(rules, &walk.path, &inode, of_dir, now_ns));
                if pin != inode.pin && inode.pin.by != PinnedBy::Command {
                    wanted.push(Ruled {
                        key: inode.attr.key,
                        from: inode.pin,
                        to: pin,
                        dir,
                        of_dir,
                    });
                }
            }
            walk.path.truncate(path_len);
        }
    }
}
