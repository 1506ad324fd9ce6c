//! The reference file system: plain maps, POSIX semantics as `docs/reference/semantics.md` states them, with
//! the superuser as its only caller.

use crate::ops::{Op, Path, RDEV, pattern, set_times};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Number of a node in the model.
pub type NodeId = u64;
const ROOT: NodeId = 1;

/// The content of a node, by its kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Body {
    File(Vec<u8>),
    Dir(BTreeMap<String, NodeId>),
    Symlink(Vec<u8>),
    Fifo,
    Device(u32),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Node {
    body: Body,
    mode: u32,
    uid: u32,
    gid: u32,
    links: u32,
    xattr: Option<Vec<u8>>,
    /// As [`Seen::mtime_ns`].
    mtime_ns: Option<i64>,
}

/// The target of every symbolic link that workloads make.
pub const LINK_TARGET: &[u8] = b"some/where";

/// The visible attributes of a path; programs cannot distinguish two file systems with equal maps.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seen {
    /// Full `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of links.
    pub links: u32,
    /// Length (of files and symbolic links).
    pub size: u64,
    /// Content of a file, target of a link.
    pub content: Vec<u8>,
    /// Value of `user.k`.
    pub xattr: Option<Vec<u8>>,
    /// Device number; 0 if it is not a device.
    pub rdev: u32,
    /// Modification time, if it was set explicitly and nothing changed since; `None` if it comes from the
    /// clock, which no model knows.
    pub mtime_ns: Option<i64>,
    /// First path (in order) with the same inode: identifies hard links.
    pub same_as: String,
}

/// All visible attributes, by path.
pub type Tree = BTreeMap<String, Seen>;

/// Hash of a tree: equal trees have equal hashes.
#[must_use]
pub fn tree_hash(tree: &Tree) -> u64 {
    let mut hasher = DefaultHasher::new();
    tree.hash(&mut hasher);
    hasher.finish()
}

/// The reference file system.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Model {
    nodes: BTreeMap<NodeId, Node>,
    next: NodeId,
}

type Outcome<T> = Result<T, i32>;

impl Default for Model {
    fn default() -> Self {
        let root = Node {
            body: Body::Dir(BTreeMap::new()),
            mode: 0o040_755,
            uid: 0,
            gid: 0,
            links: 2,
            xattr: None,
            mtime_ns: None,
        };
        Self {
            nodes: BTreeMap::from([(ROOT, root)]),
            next: ROOT + 1,
        }
    }
}

impl Model {
    /// An empty file system.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Nodes that differ between the two.
    #[must_use]
    pub fn changed(&self, other: &Self) -> BTreeSet<NodeId> {
        let (here, there) = (self.nodes.keys(), other.nodes.keys());
        here.chain(there)
            .filter(|id| self.nodes.get(id) != other.nodes.get(id))
            .copied()
            .collect()
    }

    fn dir(&self, id: NodeId) -> Outcome<&BTreeMap<String, NodeId>> {
        match self.nodes.get(&id).map(|node| &node.body) {
            Some(Body::Dir(names)) => Ok(names),
            Some(Body::Symlink(_)) => Err(libc::ENOENT), // The fixed target names nothing.
            _ => Err(libc::ENOTDIR),
        }
    }

    /// Returns the names of a directory, for a change.
    fn names(&mut self, id: NodeId) -> &mut BTreeMap<String, NodeId> {
        let node = self.node_mut(id);
        node.mtime_ns = None;
        match &mut node.body {
            Body::Dir(names) => names,
            _ => unreachable!("callers looked the directory up"),
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[&id]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes
            .get_mut(&id)
            .unwrap_or_else(|| unreachable!("callers looked the node up"))
    }

    /// Returns the node at `path`; a final symbolic link is not followed.
    fn find(&self, path: &Path) -> Outcome<NodeId> {
        let mut at = ROOT;
        for name in path {
            at = *self.dir(at)?.get(*name).ok_or(libc::ENOENT)?;
        }
        Ok(at)
    }

    fn parent<'p>(&self, path: &'p Path) -> Outcome<(NodeId, &'p str)> {
        let (name, above) = path.split_last().ok_or(libc::EEXIST)?;
        let dir = self.find(&above.to_vec())?;
        self.dir(dir)?;
        Ok((dir, name))
    }

    fn is_dir(&self, id: NodeId) -> bool {
        matches!(self.node(id).body, Body::Dir(_))
    }

    fn file(&self, path: &Path) -> Outcome<NodeId> {
        let id = self.find(path)?;
        match self.node(id).body {
            Body::File(_) => Ok(id),
            Body::Dir(_) => Err(libc::EISDIR),
            Body::Symlink(_) | Body::Fifo | Body::Device(_) => Err(libc::EINVAL),
        }
    }

    /// Returns the bytes of a file, for a change.
    fn content(&mut self, id: NodeId) -> &mut Vec<u8> {
        let node = self.node_mut(id);
        node.mtime_ns = None;
        match &mut node.body {
            Body::File(content) => content,
            _ => unreachable!("callers checked the kind"),
        }
    }

    fn make(&mut self, path: &Path, body: Body, mode: u32) -> Outcome<()> {
        let (dir, name) = self.parent(path)?;
        if self.dir(dir)?.contains_key(name) {
            return Err(libc::EEXIST);
        }
        let id = self.next;
        self.next += 1;
        let is_dir = matches!(body, Body::Dir(_));
        self.nodes.insert(
            id,
            Node {
                body,
                mode,
                uid: 0,
                gid: 0,
                links: if is_dir { 2 } else { 1 },
                xattr: None,
                mtime_ns: None,
            },
        );
        self.names(dir).insert(name.to_owned(), id);
        if is_dir {
            self.node_mut(dir).links += 1;
        }
        Ok(())
    }

    fn drop_link(&mut self, id: NodeId) {
        let is_dir = self.is_dir(id);
        let node = self.node_mut(id);
        node.links = node.links.saturating_sub(1);
        if is_dir || node.links == 0 {
            self.nodes.remove(&id);
        }
    }

    fn write(&mut self, id: NodeId, offset: u64, data: &[u8]) {
        let content = self.content(id);
        let end = offset as usize + data.len();
        if content.len() < end {
            content.resize(end, 0);
        }
        content[offset as usize..end].copy_from_slice(data);
    }

    /// Whether `above` is `below` or one of its ancestors.
    fn contains(&self, above: NodeId, below: NodeId) -> bool {
        above == below
            || match &self.node(above).body {
                Body::Dir(names) => names
                    .values()
                    .any(|&child| self.is_dir(child) && self.contains(child, below)),
                _ => false,
            }
    }

    fn rename(&mut self, from: &Path, to: &Path, noreplace: bool, exchange: bool) -> Outcome<()> {
        let (dir, name) = self.parent(from)?;
        let (new_dir, new_name) = self.parent(to)?;
        let moved = *self.dir(dir)?.get(name).ok_or(libc::ENOENT)?;
        let victim = self.dir(new_dir)?.get(new_name).copied();
        if noreplace && victim.is_some() {
            return Err(libc::EEXIST);
        }
        if exchange && victim.is_none() {
            return Err(libc::ENOENT);
        }
        if self.is_dir(moved) && self.contains(moved, new_dir) {
            return Err(libc::EINVAL);
        }
        if let Some(victim) = victim {
            if self.is_dir(victim) && self.contains(victim, dir) {
                // The old name lies below the node that would be replaced.
                return Err(if exchange { libc::EINVAL } else { libc::ENOTEMPTY });
            }
            if victim == moved {
                return Ok(());
            }
        }
        if exchange {
            let victim = victim.unwrap_or(moved);
            self.names(dir).insert(name.to_owned(), victim);
            self.names(new_dir).insert(new_name.to_owned(), moved);
            let (moved_dir, victim_dir) = (self.is_dir(moved), self.is_dir(victim));
            if dir != new_dir && moved_dir != victim_dir {
                let (gains, loses) = if moved_dir { (new_dir, dir) } else { (dir, new_dir) };
                self.node_mut(gains).links += 1;
                self.node_mut(loses).links -= 1;
            }
            return Ok(());
        }
        if let Some(victim) = victim {
            match (self.is_dir(moved), self.is_dir(victim)) {
                (true, false) => return Err(libc::ENOTDIR),
                (false, true) => return Err(libc::EISDIR),
                (true, true) if !self.dir(victim)?.is_empty() => return Err(libc::ENOTEMPTY),
                (true, true) => self.node_mut(new_dir).links -= 1,
                (false, false) => {}
            }
            self.drop_link(victim);
        }
        self.names(dir).remove(name);
        self.names(new_dir).insert(new_name.to_owned(), moved);
        if self.is_dir(moved) && dir != new_dir {
            self.node_mut(dir).links -= 1;
            self.node_mut(new_dir).links += 1;
        }
        Ok(())
    }

    /// Carries out `FICLONERANGE`.
    fn clone_range(&mut self, from: (&Path, u64), to: (&Path, u64), len: u64) -> Outcome<()> {
        const BLOCK: usize = 4096;
        let ((source, at), (target, to_at)) = (from, to);
        let (source, target) = (self.file(source)?, self.file(target)?);
        let Body::File(bytes) = &self.node(source).body else {
            return Err(libc::EINVAL);
        };
        let (first, to_first) = (at as usize, to_at as usize);
        let end = match len {
            0 => bytes.len(),
            len => first + len as usize,
        };
        if end > bytes.len() || first > end {
            return Err(libc::EINVAL);
        }
        let (whole, data) = (end == bytes.len(), bytes[first..end].to_vec());
        if data.is_empty() {
            return Ok(());
        }
        let Body::File(old) = &self.node(target).body else {
            return Err(libc::EINVAL);
        };
        let to_end = to_first + data.len();
        let ends_well = end.is_multiple_of(BLOCK) || whole && to_end >= old.len();
        let overlaps = source == target && first.abs_diff(to_first) < data.len();
        if !first.is_multiple_of(BLOCK) || !to_first.is_multiple_of(BLOCK) || !ends_well || overlaps {
            return Err(libc::EINVAL);
        }
        self.write(target, to_at, &data);
        Ok(())
    }

    /// Carries out `FIDEDUPERANGE`, which changes no byte; `EILSEQ`: the bytes differ.
    fn dedupe(&mut self, from: (&Path, u64), to: (&Path, u64), len: u64) -> Outcome<()> {
        let ((source, at), (target, to_at)) = (from, to);
        let (source, target) = (self.file(source)?, self.file(target)?);
        let (Body::File(one), Body::File(other)) = (&self.node(source).body, &self.node(target).body) else {
            return Err(libc::EINVAL);
        };
        if len == 0 {
            return Ok(());
        }
        let (end, to_end) = ((at + len) as usize, (to_at + len) as usize);
        let aligned = |at: u64| at.is_multiple_of(4096);
        let ends_well = aligned(at + len) || end == one.len() && to_end == other.len();
        let overlaps = source == target && at.abs_diff(to_at) < len;
        if end > one.len()
            || to_end > other.len()
            || !aligned(at)
            || !aligned(to_at)
            || !ends_well
            || overlaps
        {
            return Err(libc::EINVAL);
        }
        match one[at as usize..end] == other[to_at as usize..to_end] {
            true => Ok(()),
            false => Err(libc::EILSEQ),
        }
    }

    /// Carries out one operation.
    ///
    /// # Errors
    /// The errno of POSIX; nothing has changed then.
    pub fn apply(&mut self, op: &Op) -> Outcome<()> {
        match op {
            Op::Create(path) => self.make(path, Body::File(Vec::new()), 0o100_644),
            Op::Mkdir(path) => self.make(path, Body::Dir(BTreeMap::new()), 0o040_755),
            Op::Symlink(path) => self.make(path, Body::Symlink(LINK_TARGET.to_vec()), 0o120_777),
            Op::Mkfifo(path) => self.make(path, Body::Fifo, 0o010_644),
            Op::Mknod(path) => self.make(path, Body::Device(RDEV), 0o020_644),
            Op::Tmpfile { path, len, seed } => {
                self.make(path, Body::File(pattern(*seed, 0, *len as usize)), 0o100_600)
            }
            Op::Write {
                path,
                offset,
                len,
                seed,
            } => {
                let id = self.file(path)?;
                self.write(id, *offset, &pattern(*seed, *offset, *len as usize));
                Ok(())
            }
            Op::Append { path, len, seed } => {
                let id = self.file(path)?;
                let offset = self.content(id).len() as u64;
                self.write(id, offset, &pattern(*seed, offset, *len as usize));
                Ok(())
            }
            Op::Truncate { path, size } => {
                let id = self.file(path)?;
                self.content(id).resize(*size as usize, 0);
                Ok(())
            }
            // Bytes beyond the end stay beyond it and are not visible.
            Op::Punch { path, offset, len } | Op::ZeroKeep { path, offset, len } => {
                let id = self.file(path)?;
                let content = self.content(id);
                let end = (*offset + *len).min(content.len() as u64) as usize;
                if (*offset as usize) < end {
                    content[*offset as usize..end].fill(0);
                }
                Ok(())
            }
            Op::Clone {
                from,
                offset,
                to,
                to_offset,
                len,
            } => self.clone_range((from, *offset), (to, *to_offset), *len),
            Op::Dedupe {
                from,
                offset,
                to,
                to_offset,
                len,
            } => self.dedupe((from, *offset), (to, *to_offset), *len),
            Op::DedupeBlocks { from, to, .. } => {
                let files = [self.file(from)?, self.file(to)?];
                match files.map(|id| matches!(&self.node(id).body, Body::File(_))) {
                    [true, true] => Ok(()),
                    _ => Err(libc::EINVAL),
                }
            }
            Op::Unshare { path, .. } | Op::Defrag { path, .. } => {
                let id = self.file(path)?;
                match &self.node(id).body {
                    Body::File(_) => Ok(()),
                    _ => Err(libc::EINVAL),
                }
            }
            Op::Zero { path, offset, len } => {
                let id = self.file(path)?;
                self.write(id, *offset, &vec![0; *len as usize]);
                Ok(())
            }
            Op::Allocate { path, offset, len } => {
                let id = self.file(path)?;
                let content = self.content(id);
                let end = (*offset + *len) as usize;
                if content.len() < end {
                    content.resize(end, 0);
                }
                Ok(())
            }
            Op::AllocateKeep { path, .. } => {
                let id = self.file(path)?;
                self.content(id);
                Ok(())
            }
            Op::Link(from, to) => {
                let id = self.find(from)?;
                let (dir, name) = self.parent(to)?;
                if self.dir(dir)?.contains_key(name) {
                    return Err(libc::EEXIST);
                }
                if self.is_dir(id) {
                    return Err(libc::EPERM);
                }
                self.names(dir).insert(name.to_owned(), id);
                self.node_mut(id).links += 1;
                Ok(())
            }
            Op::Unlink(path) => {
                let (dir, name) = self.parent(path).map_err(|error| {
                    if error == libc::EEXIST {
                        libc::EISDIR
                    } else {
                        error
                    }
                })?;
                let id = *self.dir(dir)?.get(name).ok_or(libc::ENOENT)?;
                if self.is_dir(id) {
                    return Err(libc::EISDIR);
                }
                self.names(dir).remove(name);
                self.drop_link(id);
                Ok(())
            }
            Op::Rmdir(path) => {
                let (dir, name) = self
                    .parent(path)
                    .map_err(|error| if error == libc::EEXIST { libc::EBUSY } else { error })?;
                let id = *self.dir(dir)?.get(name).ok_or(libc::ENOENT)?;
                if !self.is_dir(id) {
                    return Err(libc::ENOTDIR);
                }
                if !self.dir(id)?.is_empty() {
                    return Err(libc::ENOTEMPTY);
                }
                self.names(dir).remove(name);
                self.drop_link(id);
                self.node_mut(dir).links -= 1;
                Ok(())
            }
            Op::Rename(from, to) => self.rename(from, to, false, false),
            Op::RenameNoReplace(from, to) => self.rename(from, to, true, false),
            Op::Exchange(from, to) => self.rename(from, to, false, true),
            Op::Chmod(path, mode) => {
                let id = self.find(path)?;
                if matches!(self.node(id).body, Body::Symlink(_)) {
                    return Err(libc::EOPNOTSUPP);
                }
                let node = self.node_mut(id);
                node.mode = (node.mode & !0o7777) | (mode & 0o7777);
                Ok(())
            }
            Op::Chown(path, uid, gid) => {
                let id = self.find(path)?;
                let node = self.node_mut(id);
                node.uid = *uid;
                node.gid = *gid;
                Ok(())
            }
            Op::Utimens { path, secs } => {
                let id = self.find(path)?;
                self.node_mut(id).mtime_ns = Some(set_times(*secs).0);
                Ok(())
            }
            Op::SetXattr(path, len, seed) => {
                let id = self.find(path)?;
                if !matches!(self.node(id).body, Body::File(_) | Body::Dir(_)) {
                    return Err(libc::EPERM);
                }
                self.node_mut(id).xattr = Some(pattern(*seed, 0, usize::from(*len)));
                Ok(())
            }
            Op::RemoveXattr(path) => {
                let id = self.find(path)?;
                if !matches!(self.node(id).body, Body::File(_) | Body::Dir(_)) {
                    return Err(libc::EPERM);
                }
                self.node_mut(id).xattr.take().map(|_| ()).ok_or(libc::ENODATA)
            }
            Op::Fsync(path) => self.find(path).map(|_| ()),
            Op::Together(ops) => {
                let mut after = self.clone();
                ops.iter().try_for_each(|op| after.apply(op))?;
                *self = after;
                Ok(())
            }
        }
    }

    /// All visible attributes.
    #[must_use]
    pub fn tree(&self) -> Tree {
        let mut tree = Tree::new();
        let mut first = BTreeMap::new();
        self.walk(ROOT, String::from("/"), &mut first, &mut tree);
        tree
    }

    fn walk(&self, id: NodeId, path: String, first: &mut BTreeMap<NodeId, String>, tree: &mut Tree) {
        let node = self.node(id);
        let same_as = first.entry(id).or_insert_with(|| path.clone()).clone();
        let content = match &node.body {
            Body::File(content) => content.clone(),
            Body::Symlink(target) => target.clone(),
            Body::Dir(_) | Body::Fifo | Body::Device(_) => Vec::new(),
        };
        let rdev = match node.body {
            Body::Device(rdev) => rdev,
            _ => 0,
        };
        let seen = Seen {
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            links: node.links,
            size: content.len() as u64,
            content,
            xattr: node.xattr.clone(),
            rdev,
            mtime_ns: node.mtime_ns,
            same_as,
        };
        let below = if path == "/" {
            String::from("/")
        } else {
            format!("{path}/")
        };
        tree.insert(path, seen);
        if let Body::Dir(names) = &node.body {
            for (name, &child) in names {
                self.walk(child, format!("{below}{name}"), first, tree);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Model;
    use crate::ops::Op;

    #[test]
    fn rename_over_a_link_of_the_same_file_changes_nothing() {
        let mut model = Model::new();
        model.apply(&Op::Create(vec!["a"])).expect("create");
        model.apply(&Op::Link(vec!["a"], vec!["b"])).expect("link");
        let before = model.tree();
        model.apply(&Op::Rename(vec!["a"], vec!["b"])).expect("rename");
        assert_eq!(model.tree(), before);
    }

    #[test]
    fn directory_cannot_move_below_itself() {
        let mut model = Model::new();
        model.apply(&Op::Mkdir(vec!["d"])).expect("mkdir");
        model.apply(&Op::Mkdir(vec!["d", "e"])).expect("mkdir");
        assert_eq!(
            model.apply(&Op::Rename(vec!["d"], vec!["d", "e", "f"])),
            Err(libc::EINVAL)
        );
        assert_eq!(
            model.apply(&Op::Rename(vec!["d", "e"], vec!["d"])),
            Err(libc::ENOTEMPTY)
        );
        assert_eq!(model.tree()["/d"].links, 3);
    }
}
