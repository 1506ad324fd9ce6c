//! Files of an ext2, ext3 or ext4 file system, read by `ext4-view`: never mounted.

use super::disk::{ReadAt, Window};
use super::{Budget, Collector, InputError, Limits};
use ext4_view::{Ext4, Ext4Error, Ext4Read, Metadata, PathBuf};
use std::rc::Rc;

struct Reader(Rc<Window>);

impl Ext4Read for Reader {
    fn read(
        &mut self,
        start_byte: u64,
        dst: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.0.read_at(start_byte, dst)?)
    }
}

fn damaged(error: Ext4Error) -> InputError {
    InputError::damaged("ext4", error.to_string())
}

/// Adds all files of a file system.
pub(super) fn read(
    part: Window,
    collector: &mut Collector,
    budget: &mut Budget,
    limits: &Limits,
) -> Result<(), InputError> {
    let size = part.len();
    let fs = Ext4::load(Box::new(Reader(Rc::new(part)))).map_err(damaged)?;
    let mut walk = Walk {
        fs: &fs,
        size,
        collector,
        budget,
        buffer: vec![0; 1 << 17],
    };
    let mut stack = vec![(PathBuf::new("/"), 0)];
    while let Some((dir, depth)) = stack.pop() {
        if depth > limits.depth {
            walk.collector
                .note(format!("directories deeper than {} are left out", limits.depth));
            continue;
        }
        match walk.dir(&dir) {
            Ok(below) => stack.extend(below.into_iter().map(|path| (path, depth + 1))),
            Err(error @ InputError::Limit(_)) => return Err(error),
            // An error at the root fails the whole read; an error in another directory is noted.
            Err(error) if depth == 0 => return Err(error),
            Err(error) => walk.collector.note(format!("{}: {error}", dir.display())),
        }
    }
    Ok(())
}

struct Walk<'a> {
    fs: &'a Ext4,
    size: u64,
    collector: &'a mut Collector,
    budget: &'a mut Budget,
    buffer: Vec<u8>,
}

impl Walk<'_> {
    /// Adds the files of a directory, and returns its subdirectories.
    fn dir(&mut self, dir: &PathBuf) -> Result<Vec<PathBuf>, InputError> {
        let mut below = Vec::new();
        for entry in self.fs.read_dir(dir).map_err(damaged)? {
            self.budget.entry()?;
            let entry = entry.map_err(damaged)?;
            let name = entry.file_name();
            let name: &[u8] = name.as_ref();
            if name == b"." || name == b".." {
                continue;
            }
            let path = entry.path();
            let metadata = entry.metadata().map_err(damaged)?;
            if metadata.is_dir() {
                below.push(path);
            } else if metadata.file_type().is_regular_file() {
                match self.file(&path, &metadata) {
                    Ok(()) => {}
                    Err(error @ InputError::Limit(_)) => return Err(error),
                    Err(error) => self.collector.note(format!("{}: {error}", path.display())),
                }
            }
        }
        Ok(below)
    }

    fn file(&mut self, path: &PathBuf, metadata: &Metadata) -> Result<(), InputError> {
        if metadata.len() > self.size {
            let text = format!("it claims {} bytes on {} bytes", metadata.len(), self.size);
            return Err(InputError::damaged("a file", text));
        }
        let mut from = self.fs.open(path).map_err(damaged)?;
        // Without blocks: the disk's own blocks are compared.
        let mut file = self.collector.file(&path.display().to_string(), false);
        loop {
            let read = from.read_bytes(&mut self.buffer).map_err(damaged)?;
            if read == 0 {
                break;
            }
            self.budget.bytes(read as u64)?;
            self.collector.write(&mut file, &self.buffer[..read]);
        }
        self.collector.end(file);
        Ok(())
    }
}
