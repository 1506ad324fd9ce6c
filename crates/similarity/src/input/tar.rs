//! Tar archives, plain or compressed by gzip or zstd, and archives of container images, whose layers are
//! archives in the archive.

use super::disk::{ReadAt, Stream};
use super::{Bounded, Budget, Collector, InputError, Limits};
use crate::image::{Form, Profile};
use std::cell::RefCell;
use std::io::{BufReader, Cursor, Read};
use std::rc::Rc;

/// Archives in an archive, at most.
const MAX_DEPTH: u32 = 2;
/// The format's unit; also the bytes needed to recognise an archive.
const RECORD: usize = 512;

/// Reads an archive.
pub(super) fn read(name: &str, source: Rc<dyn ReadAt>, limits: &Limits) -> Result<Profile, InputError> {
    // Data may expand, but not beyond the most that its format allows.
    let most = source
        .len()
        .saturating_mul(limits.expansion)
        .saturating_add(1 << 20);
    let budget = Rc::new(RefCell::new(Budget::new(limits, most)));
    let mut walk = Walk {
        collector: Collector::new(name, limits),
        budget,
        form: Form::Tar,
    };
    let mut stream = Stream::new(source);
    walk.archive(&mut stream, MAX_DEPTH.min(limits.depth))?;
    let mut profile = walk.collector.finish();
    profile.form = walk.form;
    Ok(profile)
}

struct Walk {
    collector: Collector,
    /// One budget for all archives, however deep.
    budget: Rc<RefCell<Budget>>,
    form: Form,
}

impl Walk {
    /// An archive, compressed or not.
    fn archive(&mut self, mut stream: &mut dyn Read, depth: u32) -> Result<(), InputError> {
        let mut head = [0; 4];
        let known = fill(&mut stream, &mut head)?;
        let whole = Cursor::new(head[..known].to_vec()).chain(stream);
        let budget = self.budget.clone();
        match head {
            [0x1f, 0x8b, ..] => {
                let inner = flate2::read::MultiGzDecoder::new(BufReader::new(whole));
                self.entries_of(&mut Bounded { inner, budget }, depth)
            }
            [0x28, 0xb5, 0x2f, 0xfd] => {
                let inner = ruzstd::decoding::StreamingDecoder::new(BufReader::new(whole))
                    .map_err(|error| InputError::damaged("zstd", error.to_string()))?;
                self.entries_of(&mut Bounded { inner, budget }, depth)
            }
            _ => self.entries_of(&mut Bounded { inner: whole, budget }, depth),
        }
    }

    fn entries_of(&mut self, stream: &mut dyn Read, depth: u32) -> Result<(), InputError> {
        let damaged = |error: std::io::Error| InputError::damaged("tar", error.to_string());
        let mut archive = ::tar::Archive::new(stream);
        let mut any = false;
        for entry in archive.entries().map_err(damaged)? {
            let mut entry = entry.map_err(damaged)?;
            self.budget.borrow_mut().entry()?;
            any = true;
            if !entry.header().entry_type().is_file() {
                continue;
            }
            let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            if depth > 0 && is_layer(&path) && self.layer(&path, &mut entry, depth)? {
                continue;
            }
            self.file(&path, &mut entry).map_err(damaged)?;
        }
        if any {
            Ok(())
        } else {
            Err(InputError::damaged("tar", "it has no entry"))
        }
    }

    fn file(&mut self, path: &str, entry: &mut dyn Read) -> std::io::Result<()> {
        let mut file = self.collector.file(path, true);
        let mut buffer = vec![0; 1 << 16];
        loop {
            let read = entry.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            self.collector.write(&mut file, &buffer[..read]);
        }
        self.collector.end(file);
        Ok(())
    }

    /// A layer of a container image, if the entry is an archive.
    fn layer(&mut self, path: &str, entry: &mut dyn Read, depth: u32) -> Result<bool, InputError> {
        let mut head = [0; RECORD];
        let known = fill(entry, &mut head)?;
        let archive = matches!(
            super::Kind::of(&head[..known]),
            super::Kind::Tar | super::Kind::Gzip | super::Kind::Zstd
        );
        let mut whole = Cursor::new(head[..known].to_vec()).chain(entry);
        if !archive {
            self.file(path, &mut whole)
                .map_err(|error| InputError::damaged("tar", error.to_string()))?;
            return Ok(true);
        }
        self.form = Form::Oci;
        self.archive(&mut whole, depth - 1)?;
        Ok(true)
    }
}

/// Whether a path is a layer in an archive by `docker save` or `skopeo copy … oci-archive:`.
fn is_layer(path: &str) -> bool {
    let path = path.trim_start_matches("./");
    path.ends_with("/layer.tar") || path.starts_with("blobs/sha256/")
}

fn fill(stream: &mut (impl Read + ?Sized), buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut known = 0;
    while known < buffer.len() {
        match stream.read(&mut buffer[known..])? {
            0 => break,
            read => known += read,
        }
    }
    Ok(known)
}
