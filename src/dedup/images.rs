//! Profiles of images: a file, a directory, or an OCI layout.

use super::args::{FileArgs, LimitArgs};
use super::memory;
use anyhow::Context;
use std::path::Path;
use std::time::Duration;
use varve_similarity::files::{self, Chosen};
use varve_similarity::image::{Form, Profile};
use varve_similarity::input::{Collector, Limits};
use varve_similarity::manifest::Listed;
use varve_similarity::sandbox::Worker;

/// Settings common to all images of a run.
pub struct Reader<'a> {
    pub files: &'a FileArgs,
    pub limits: Limits,
    worker: Worker,
}

impl<'a> Reader<'a> {
    pub fn new(files: &'a FileArgs, limits: &LimitArgs) -> anyhow::Result<Self> {
        // This path gives the running program even if its file was replaced since the start.
        let program = "/proc/self/exe".into();
        memory(limits.image_memory)?;
        Ok(Self {
            files,
            limits: Limits {
                time: Duration::from_secs(limits.image_time),
                memory_bytes: limits.image_memory,
                ..Limits::default()
            },
            worker: Worker {
                program,
                arguments: vec!["dedup".into(), "parse".into()],
            },
        })
    }

    /// Reads an image.
    pub fn read(&self, path: &Path) -> anyhow::Result<Listed> {
        let name = path.display().to_string();
        let about = || format!("cannot read the image {name}");
        let stamp = stamp(path).with_context(about)?;
        let profile = if path.is_dir() && files::is_layout(path) {
            self.layers(&name, path).with_context(about)?
        } else if path.is_dir() {
            let (filter, mut rate) = (self.files.filter()?, self.files.rate());
            files::profile(&name, path, &filter, &mut rate, &self.limits, &mut |_| true)
                .with_context(about)?
        } else {
            let file = files::open_image(path).with_context(about)?;
            self.worker
                .profile(&name, &file, &self.limits)
                .with_context(about)?
        };
        Ok(Listed { profile, stamp })
    }

    fn layers(&self, name: &str, dir: &Path) -> anyhow::Result<Profile> {
        let mut image = Collector::new(name, &self.limits);
        for layer in files::layers(dir)? {
            let file = files::open_image(&layer).with_context(|| layer.display().to_string())?;
            image.merge(self.worker.profile(name, &file, &self.limits)?);
        }
        let mut profile = image.finish();
        profile.form = Form::Oci;
        Ok(profile)
    }
}

/// Returns size and modification time, to recognize a changed file; a directory always counts as changed.
pub fn stamp(path: &Path) -> std::io::Result<(u64, i128)> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_dir() {
        return Ok((0, -1));
    }
    let chosen = Chosen::new(path, &metadata);
    Ok((chosen.len, chosen.mtime_ns))
}

pub const fn form_text(form: Form) -> &'static str {
    match form {
        Form::Blocks => "blocks",
        Form::Disk => "disk",
        Form::Directory => "directory",
        Form::Tar => "tar",
        Form::Oci => "oci",
        Form::Packages => "packages",
    }
}
