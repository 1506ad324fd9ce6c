//! Repairs names: removes dangling names, moves lost inodes to `/lost+found`, and computes link counts and
//! the orphan list again.

use super::{RepairOptions, RepairReport};
use crate::pool::Store;
use crate::{Result, StoreError};
use std::collections::{BTreeMap, HashSet};
use varve_format::inode::{Inode, InodeSlot};
use varve_format::{FileKind, Ino, InodeAttr, InodeKey, ROOT_INO};
use zerocopy::little_endian::U64;

/// Directory for inodes without a name.
const LOST_AND_FOUND: &[u8] = b"lost+found";

struct Node {
    inode: Inode,
    /// Its names, with their directories.
    named: Vec<(Ino, Vec<u8>)>,
    subdirs: u32,
}

impl Store {
    pub(super) fn mend_names(
        &self,
        options: RepairOptions,
        report: &mut RepairReport,
        paths: &mut BTreeMap<Ino, Vec<u8>>,
    ) -> Result<()> {
        let mut nodes = self.nodes()?;
        self.drop_bad_names(&mut nodes, report)?;
        self.adopt(&mut nodes, options, report, paths)?;
        self.recount(&mut nodes, report)?;
        self.relink_orphans(report)
    }

    fn nodes(&self) -> Result<BTreeMap<Ino, Node>> {
        let mut nodes = BTreeMap::new();
        self.for_each_inode(&mut |ino, slot| {
            if let InodeSlot::Used(inode) = slot {
                let node = Node {
                    inode: *inode,
                    named: Vec::new(),
                    subdirs: 0,
                };
                nodes.insert(ino, node);
            }
            true
        })?;
        Ok(nodes)
    }

    /// Removes dangling names and second names of directories; fills in the names of each inode.
    fn drop_bad_names(&self, nodes: &mut BTreeMap<Ino, Node>, report: &mut RepairReport) -> Result<()> {
        let dirs: Vec<Ino> = nodes
            .iter()
            .filter(|(_, node)| node.inode.attr.is_dir())
            .map(|(ino, _)| *ino)
            .collect();
        for dir in dirs {
            for item in self.dir_iter(dir, 0, usize::MAX)? {
                let ino = item.key.ino;
                let is_dir = item.kind == FileKind::Directory;
                let why = match nodes.get(&ino) {
                    Some(node) if node.inode.attr.key != item.key || node.inode.attr.kind() != item.kind => {
                        Some("names an inode of another life")
                    }
                    None => Some("names an inode that is gone"),
                    Some(node) if is_dir && (!node.named.is_empty() || ino == ROOT_INO || ino == dir) => {
                        Some("is a second name of a directory")
                    }
                    Some(_) => None,
                };
                if let Some(why) = why {
                    let mut tx = self.begin()?;
                    tx.dir_remove(dir, &item.name)?;
                    tx.commit()?;
                    let name = String::from_utf8_lossy(&item.name).into_owned();
                    report.mended(format!("`{name}` in directory {dir} removed: it {why}"));
                    report.lost(ino, None, format!("name `{name}` in directory {dir}: it {why}"));
                    continue;
                }
                if let Some(node) = nodes.get_mut(&ino) {
                    node.named.push((dir, item.name));
                }
            }
        }
        Ok(())
    }

    /// Gives a name to every inode that is unreachable from the root and not to be freed.
    fn adopt(
        &self,
        nodes: &mut BTreeMap<Ino, Node>,
        options: RepairOptions,
        report: &mut RepairReport,
        paths: &mut BTreeMap<Ino, Vec<u8>>,
    ) -> Result<()> {
        let all: Vec<Ino> = nodes.keys().copied().collect();
        let mut known = reached(nodes);
        for ino in all {
            if known.contains(&ino) {
                continue;
            }
            let Some(node) = nodes.get(&ino) else { continue };
            let named = !node.named.is_empty();
            if !named && node.inode.attr.nlink == 0 {
                continue;
            }
            // A file is reached through its directory, a directory through its parents; only the top of a
            // lost tree, or of a circle, moves.
            if named && !(node.inode.attr.is_dir() && in_circle(nodes, ino)) {
                continue;
            }
            self.adopt_one(nodes, ino, options, report, paths)?;
            if nodes.get(&ino).is_some_and(|node| node.inode.attr.is_dir()) {
                known = reached(nodes);
            }
        }
        Ok(())
    }

    fn adopt_one(
        &self,
        nodes: &mut BTreeMap<Ino, Node>,
        ino: Ino,
        options: RepairOptions,
        report: &mut RepairReport,
        paths: &mut BTreeMap<Ino, Vec<u8>>,
    ) -> Result<()> {
        let home = self.lost_and_found(nodes, options, report)?;
        let Some(node) = nodes.get_mut(&ino) else {
            return Ok(());
        };
        let (key, kind) = (node.inode.attr.key, node.inode.attr.kind());
        let mut tx = self.begin()?;
        tx.use_reserve();
        for (dir, name) in node.named.drain(..) {
            tx.dir_remove(dir, &name)?;
        }
        let mut name = format!("#{}", ino.0);
        while tx.dir_lookup(home, name.as_bytes())?.is_some() {
            name.push('_');
        }
        tx.dir_insert(home, name.as_bytes(), key, kind)?;
        tx.commit()?;
        let path = [b"/lost+found/".as_slice(), name.as_bytes()].concat();
        report.lost(
            ino,
            None,
            format!("its name; it is /lost+found/{name} now, if it is not an old one that was removed"),
        );
        report.mended(format!("inode {ino} without a name is /lost+found/{name} now"));
        paths.entry(ino).or_insert(path);
        node.named.push((home, name.into_bytes()));
        Ok(())
    }

    fn lost_and_found(
        &self,
        nodes: &mut BTreeMap<Ino, Node>,
        options: RepairOptions,
        report: &mut RepairReport,
    ) -> Result<Ino> {
        let mut name = LOST_AND_FOUND.to_vec();
        loop {
            match self.dir_lookup(ROOT_INO, &name)? {
                Some(item) if item.kind == FileKind::Directory => return Ok(item.key.ino),
                Some(_) => name.push(b'_'),
                None => break,
            }
        }
        let mut tx = self.begin()?;
        tx.use_reserve();
        let key = tx
            .alloc_inodes(ROOT_INO, 1)?
            .first()
            .copied()
            .ok_or(StoreError::NoInode(InodeKey::default()))?;
        tx.create(
            &InodeAttr {
                parent: ROOT_INO,
                ..InodeAttr::new(key, 0o040_700, options.now_ns)
            },
            &[],
        )?;
        tx.dir_insert(ROOT_INO, &name, key, FileKind::Directory)?;
        tx.edit(ROOT_INO, |attr| attr.nlink += 1)?;
        tx.commit()?;
        report.mended(format!("/{} made", String::from_utf8_lossy(&name)));
        let inode = self.get(key.ino)?;
        nodes.insert(
            key.ino,
            Node {
                inode,
                named: vec![(ROOT_INO, name)],
                subdirs: 0,
            },
        );
        Ok(key.ino)
    }

    /// Corrects link counts and parents by the names.
    fn recount(&self, nodes: &mut BTreeMap<Ino, Node>, report: &mut RepairReport) -> Result<()> {
        let parents: Vec<Ino> = nodes
            .values()
            .filter(|node| node.inode.attr.is_dir())
            .flat_map(|node| node.named.iter().map(|(dir, _)| *dir))
            .collect();
        for dir in parents {
            if let Some(node) = nodes.get_mut(&dir) {
                node.subdirs += 1;
            }
        }
        for (ino, node) in nodes.iter() {
            let now = self.get(*ino)?;
            let is_dir = now.attr.is_dir();
            let names = node.named.len() as u32;
            let nlink = match (*ino == ROOT_INO || names > 0, is_dir) {
                (true, true) => 2 + node.subdirs,
                (true, false) => names,
                (false, _) => 0,
            };
            let parent = match node.named.first() {
                _ if *ino == ROOT_INO => ROOT_INO,
                Some((dir, _)) if is_dir => *dir,
                _ => now.attr.parent,
            };
            if now.attr.nlink == nlink && now.attr.parent == parent {
                continue;
            }
            let mut tx = self.begin()?;
            let mut inode = tx.core.reader().get(*ino)?;
            inode.attr.nlink = nlink;
            inode.attr.parent = parent;
            tx.core.put(&inode)?;
            tx.commit()?;
            report.mended(format!(
                "inode {ino}: {} links and parent {} became {nlink} and {parent}",
                now.attr.nlink, now.attr.parent
            ));
        }
        Ok(())
    }

    /// Rebuilds the list of inodes to be freed if it is damaged.
    fn relink_orphans(&self, report: &mut RepairReport) -> Result<()> {
        let nodes = self.nodes()?;
        let mut wanted = Vec::new();
        for (ino, node) in &nodes {
            // Blocks beyond the size are in order (fallocate makes them) unless a truncation was under way.
            let truncated = node.inode.orphan.is_some() && self.begin()?.core.has_tail(&node.inode)?;
            if node.inode.attr.nlink == 0 || truncated {
                wanted.push(*ino);
            }
        }
        if let Ok(listed) = self.orphans() {
            let listed: HashSet<Ino> = listed.iter().map(|key| key.ino).collect();
            let flagged: HashSet<Ino> = nodes
                .iter()
                .filter(|(_, node)| node.inode.orphan.is_some())
                .map(|(ino, _)| *ino)
                .collect();
            let state = self.snapshot().reader().state()?;
            if listed == flagged
                && wanted.len() == listed.len()
                && wanted.iter().all(|ino| listed.contains(ino))
                && state.orphans.get() == listed.len() as u64
                && self.orphan_links_hold()?
            {
                return Ok(());
            }
        }
        let mut tx = self.begin()?;
        let mut state = tx.core.reader().state()?;
        state.orphan_head = U64::new(0);
        state.orphans = U64::new(0);
        tx.core.set_state(&state)?;
        tx.commit()?;
        for (ino, node) in &nodes {
            if node.inode.orphan.is_some() {
                let mut tx = self.begin()?;
                let mut inode = tx.core.reader().get(*ino)?;
                inode.orphan = None;
                tx.core.put(&inode)?;
                tx.commit()?;
            }
        }
        for ino in &wanted {
            let mut tx = self.begin()?;
            let mut inode = tx.core.reader().get(*ino)?;
            tx.core.orphan_add(&mut inode)?;
            tx.core.put(&inode)?;
            tx.commit()?;
        }
        report.mended(format!(
            "list of inodes without a name: made again, {} in it",
            wanted.len()
        ));
        Ok(())
    }

    fn orphan_links_hold(&self) -> Result<bool> {
        let mut prev = Ino(0);
        for key in self.orphans()? {
            if self.get(key.ino)?.orphan.is_none_or(|links| links.prev != prev) {
                return Ok(false);
            }
            prev = key.ino;
        }
        Ok(true)
    }
}

/// Returns all inodes that are reachable from the root.
fn reached(nodes: &BTreeMap<Ino, Node>) -> HashSet<Ino> {
    let mut children: BTreeMap<Ino, Vec<Ino>> = BTreeMap::new();
    for (ino, node) in nodes {
        for (dir, _) in &node.named {
            children.entry(*dir).or_default().push(*ino);
        }
    }
    let mut seen = HashSet::from([ROOT_INO]);
    let mut queue = vec![ROOT_INO];
    while let Some(dir) = queue.pop() {
        for child in children.get(&dir).into_iter().flatten() {
            if seen.insert(*child) {
                queue.push(*child);
            }
        }
    }
    seen
}

/// Returns whether a directory is below itself.
fn in_circle(nodes: &BTreeMap<Ino, Node>, ino: Ino) -> bool {
    let mut seen = HashSet::new();
    let mut at = ino;
    while seen.insert(at) {
        match nodes.get(&at).and_then(|node| node.named.first()) {
            Some((dir, _)) if *dir == ino => return true,
            Some((dir, _)) => at = *dir,
            None => return false,
        }
    }
    false
}
