//! What persistent memory this machine has, and whether a pool can use it. Only looks.

use std::fs;
use std::path::PathBuf;

use super::device::remake;
use super::mount::namespace_of;
use super::{KernelDirs, sysfs};
use crate::finding::{Finding, Verdict};
use crate::pmem::persist::Persist;

const TOPIC: &str = "persistent memory";

/// Checks every device of persistent memory.
#[must_use]
pub fn survey(dirs: &KernelDirs) -> Vec<Finding> {
    let devices = entries(dirs, "bus/dax/devices");
    let disks: Vec<PathBuf> = entries(dirs, "class/block")
        .into_iter()
        .filter(|dir| name(dir).starts_with("pmem") && !dir.join("partition").exists())
        .collect();
    if devices.is_empty() && disks.is_empty() {
        let text = "this machine has none; a pool's NVM is a file or memory";
        return vec![Finding::new(TOPIC, Verdict::Note, text)];
    }
    let text = format!(
        "lines are written back by {} and a fence; large copies go past the cache",
        Persist::write_back_name()
    );
    let mut found = vec![Finding::new(TOPIC, Verdict::Good, text)];
    found.extend(devices.into_iter().map(device));
    found.extend(disks.into_iter().map(disk));
    found
}

/// Entries of a directory of links, resolved, by name.
fn entries(dirs: &KernelDirs, dir: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dirs.sys.join(dir)).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
        .into_iter()
        .filter_map(|path| path.canonicalize().ok())
        .collect()
}

fn name(dir: &std::path::Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn device(dir: PathBuf) -> Finding {
    let (name, size) = (name(&dir), sysfs::number(&dir, "size").unwrap_or(0));
    let topic = format!("/dev/{name}");
    match sysfs::link_name(&dir, "driver").as_deref() {
        Some("kmem") => Finding::new(
            topic,
            Verdict::Note,
            "in use as ordinary memory; as NVM it needs devdax mode",
        )
        .mend(format!("daxctl reconfigure-device --mode=devdax {name}")),
        Some(_) if size > 0 => Finding::new(
            topic.clone(),
            Verdict::Good,
            format!("devdax, {} MiB: `--nvm dax:{topic}`", size >> 20),
        ),
        _ => Finding::new(topic, Verdict::Note, "has no size or no driver")
            .mend(format!("ndctl list -X -d {name}")),
    }
}

fn disk(dir: PathBuf) -> Finding {
    let name = name(&dir);
    let topic = format!("/dev/{name}");
    let bad = sysfs::parse_bad_blocks(&sysfs::text(&dir, "badblocks").unwrap_or_default());
    if !bad.is_empty() {
        let bytes: u64 = bad.iter().map(|(_, len)| len).sum();
        let text = format!(
            "{} bad parts, {bytes} bytes: reads there are errors. `varve scrub` names the files",
            bad.len()
        );
        return Finding::new(topic, Verdict::Missing, text);
    }
    if sysfs::number(&dir.join("queue"), "dax") == Some(1) {
        let text = "a disk with DAX: a pool in a file system on it that is mounted with DAX is `dax:`";
        return Finding::new(topic.clone(), Verdict::Good, text);
    }
    let namespace = namespace_of(&dir);
    let command = remake("fsdax", namespace.as_deref()).replace('`', "");
    Finding::new(
        topic,
        Verdict::Note,
        "a namespace without DAX, which a pool cannot map",
    )
    .mend(format!(
        "{command}    # ERASES it; then mkfs.ext4 -b 4096 and mount -o dax=always"
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::survey;
    use crate::dax::device::tests::machine;
    use crate::finding::Verdict;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn survey_says_what_can_be_used_and_how_to_get_the_rest() {
        let machine = machine();
        let disk = machine.region().join("namespace0.0/block/pmem0");
        fs::create_dir_all(disk.join("queue")).unwrap();
        machine.set(&disk.join("queue"), "dax", "0");
        symlink(&disk, machine.dirs().sys.join("class/block/pmem0")).unwrap();
        let found = survey(&machine.dirs());
        assert!(found[1].verdict == Verdict::Good && found[1].text.contains("--nvm dax:/dev/dax0.0"));
        assert_eq!(found[2].verdict, Verdict::Note);
        assert!(found[2].commands[0].starts_with("ndctl create-namespace -f -e namespace0.0 -m fsdax"));
        machine.set(&disk.join("queue"), "dax", "1");
        assert_eq!(survey(&machine.dirs())[2].verdict, Verdict::Good);
        machine.set(&disk, "badblocks", "8 8");
        let found = survey(&machine.dirs());
        assert!(found[2].verdict == Verdict::Missing && found[2].text.contains("4096 bytes"));
    }

    #[test]
    fn machine_without_any_is_told_so() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = crate::dax::KernelDirs {
            sys: dir.path().into(),
            dev: dir.path().into(),
        };
        assert_eq!(survey(&dirs).len(), 1);
    }
}
