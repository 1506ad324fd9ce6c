//! Real images of each kind, and hostile ones.

use super::*;
use crate::hash::mix;
use crate::measure::{Overlap, Weigh};
use std::path::Path;
use std::process::Command;

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes as u64 / 8 + 1).flat_map(|n| mix(mix(seed) ^ n).to_le_bytes());
    words.take(bytes).collect()
}

/// A small root directory with a dpkg database.
fn root(dir: &Path, seed: u64) {
    let write = |path: &str, bytes: &[u8]| {
        let path = dir.join(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        std::fs::write(path, bytes).expect("written");
    };
    write("usr/bin/shared", &noise(1, 300_000));
    write("usr/lib/x86/libshared.so", &noise(2, 200_123));
    write("etc/own.conf", &noise(seed, 5000));
    write(
        "var/lib/dpkg/status",
        b"Package: base\nStatus: install ok installed\nInstalled-Size: 10\nVersion: 1\n",
    );
}

fn command(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        .output()
        .is_ok_and(|output| output.status.success())
}

/// An ext4 image of a root directory; skips loudly with `None` where none can be made.
fn ext4(seed: u64) -> Option<Vec<u8>> {
    let dir = tempfile::tempdir().expect("a directory");
    root(&dir.path().join("root"), seed);
    let image = dir.path().join("image");
    let made = command(
        "mke2fs",
        &[
            "-q",
            "-t",
            "ext4",
            "-d",
            dir.path().join("root").to_str().expect("text"),
            image.to_str().expect("text"),
            "8M",
        ],
    );
    if !made {
        eprintln!("SKIPPED: needs mke2fs (Debian: apt-get install e2fsprogs)");
        return None;
    }
    Some(std::fs::read(image).expect("read"))
}

fn profile(bytes: Vec<u8>) -> Profile {
    read("test", Rc::new(bytes), &Limits::default()).expect("it is read")
}

fn shared_files(one: &Profile, other: &Profile) -> f64 {
    let overlap = Overlap::of(
        &one.sketches.view(Weigh::Files),
        &other.sketches.view(Weigh::Files),
    );
    overlap.shared
}

#[test]
fn ext4_image_gives_files_packages_and_directories() {
    let (Some(one), Some(other)) = (ext4(10), ext4(11)) else {
        return;
    };
    let (one, other) = (profile(one), profile(other));
    assert_eq!(one.form, Form::Disk, "{:?}", one.notes);
    assert_eq!(one.files, 4);
    assert_eq!(one.packages[0].name, "base");
    assert_eq!(one.areas["usr"], other.areas["usr"]);
    assert_ne!(one.areas["etc"], other.areas["etc"]);
    assert!(shared_files(&one, &other) >= 500_123.0);
    let blocks = Overlap::of(
        &one.sketches.view(Weigh::Blocks),
        &other.sketches.view(Weigh::Blocks),
    );
    assert!(blocks.shared >= 490_000.0 && blocks.sim() < 1.0, "{blocks:?}");
}

/// A disk with an MBR whose entries are (kind, first sector, sectors).
fn with_mbr(entries: &[(u8, u32, u32)], sectors: usize) -> Vec<u8> {
    let mut disk = vec![0; sectors * 512];
    set_mbr(&mut disk, entries);
    disk
}

fn set_mbr(sector: &mut [u8], entries: &[(u8, u32, u32)]) {
    for (n, (kind, first, sectors)) in entries.iter().enumerate() {
        let entry = &mut sector[446 + n * 16..462 + n * 16];
        entry[4] = *kind;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..16].copy_from_slice(&sectors.to_le_bytes());
    }
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
}

#[test]
fn ext4_is_found_in_primary_logical_and_gpt_partitions() {
    let Some(fs) = ext4(10) else { return };
    let sectors = (fs.len() / 512) as u32;
    let whole = profile(fs.clone());
    let put = |disk: &mut Vec<u8>, first: u32| {
        let at = first as usize * 512;
        disk[at..at + fs.len()].copy_from_slice(&fs);
    };
    let size = sectors as usize + 4096;

    let mut primary = with_mbr(&[(0x83, 2048, sectors)], size);
    put(&mut primary, 2048);

    let mut logical = with_mbr(&[(0x05, 1024, sectors + 2048)], size);
    set_mbr(&mut logical[1024 * 512..], &[(0x83, 1024, sectors)]);
    put(&mut logical, 2048);

    let mut gpt = with_mbr(&[(0xee, 1, u32::MAX)], size);
    gpt[512..520].copy_from_slice(b"EFI PART");
    gpt[512 + 72..512 + 80].copy_from_slice(&2u64.to_le_bytes());
    gpt[512 + 80..512 + 84].copy_from_slice(&128u32.to_le_bytes());
    gpt[512 + 84..512 + 88].copy_from_slice(&128u32.to_le_bytes());
    gpt[1024..1040].fill(7);
    gpt[1024 + 32..1024 + 40].copy_from_slice(&2048u64.to_le_bytes());
    gpt[1024 + 40..1024 + 48].copy_from_slice(&(2047 + u64::from(sectors)).to_le_bytes());
    put(&mut gpt, 2048);

    for disk in [primary, logical, gpt] {
        let found = profile(disk);
        assert_eq!((found.form, found.files), (Form::Disk, 4), "{:?}", found.notes);
        assert_eq!(found.sketches.files, whole.sketches.files);
        assert_eq!(found.packages, whole.packages);
    }
}

/// A qcow2 image (version 3, clusters of 64 KiB) of a disk; odd clusters are compressed.
fn qcow2(disk: &[u8]) -> Vec<u8> {
    const CLUSTER: usize = 1 << 16;
    let clusters = disk.len().div_ceil(CLUSTER);
    let mut image = vec![0; 3 * CLUSTER];
    image[..4].copy_from_slice(b"QFI\xfb");
    image[4..8].copy_from_slice(&3u32.to_be_bytes());
    image[20..24].copy_from_slice(&16u32.to_be_bytes());
    image[24..32].copy_from_slice(&(disk.len() as u64).to_be_bytes());
    image[36..40].copy_from_slice(&1u32.to_be_bytes());
    image[40..48].copy_from_slice(&(CLUSTER as u64).to_be_bytes());
    image[100..104].copy_from_slice(&104u32.to_be_bytes());
    image[CLUSTER..CLUSTER + 8].copy_from_slice(&((2 * CLUSTER as u64) | (1 << 63)).to_be_bytes());
    assert!(clusters <= CLUSTER / 8, "one table is enough");
    for (n, cluster) in disk.chunks(CLUSTER).enumerate() {
        if cluster.iter().all(|byte| *byte == 0) {
            continue;
        }
        let at = image.len();
        let entry = if n % 2 == 1 {
            use std::io::Write;
            let mut packer = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
            packer.write_all(cluster).expect("packed");
            let packed = packer.finish().expect("packed");
            image.extend(&packed);
            let sectors = (at % 512 + packed.len()).div_ceil(512) as u64 - 1;
            (1 << 62) | (sectors << (62 - 8)) | at as u64
        } else {
            image.resize(at.next_multiple_of(CLUSTER), 0);
            let at = image.len();
            image.extend(cluster);
            image.resize(at + CLUSTER, 0);
            at as u64 | (1 << 63)
        };
        image[2 * CLUSTER + n * 8..2 * CLUSTER + n * 8 + 8].copy_from_slice(&entry.to_be_bytes());
    }
    image.resize(image.len().next_multiple_of(512), 0);
    image
}

#[test]
fn qcow2_image_is_as_the_disk_in_it() {
    let Some(fs) = ext4(10) else { return };
    let (raw, packed) = (profile(fs.clone()), profile(qcow2(&fs)));
    assert_eq!(packed.form, Form::Disk, "{:?}", packed.notes);
    assert_eq!(raw.sketches, packed.sketches);
    let mut backed = qcow2(&fs);
    backed[15] = 1;
    let notes = profile(backed).notes;
    assert!(
        notes.iter().any(|note| note.contains("backing file")),
        "{notes:?}"
    );
}

#[test]
fn qcow2_that_lies_is_compared_by_blocks() {
    let good = qcow2(&noise(1, 300_000));
    for (at, byte, what) in [
        (7, 9, "version"),
        (23, 40, "clusters"),
        (24, 0xff, "size"),
        (35, 1, "encrypted"),
        (40, 0x7f, "table"),
        (79, 4, "features"),
    ] {
        let mut bad = good.clone();
        bad[at] = byte;
        let found = profile(bad);
        assert_eq!(found.form, Form::Blocks, "{what}");
        assert!(
            found.notes.iter().any(|note| note.contains("compared by blocks")),
            "{what}: {found:?}"
        );
        assert!(found.bytes >= 300_000, "{what}");
    }
}

fn tarred(seed: u64) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a directory");
    root(dir.path(), seed);
    let mut archive = ::tar::Builder::new(Vec::new());
    archive.append_dir_all(".", dir.path()).expect("packed");
    archive.into_inner().expect("packed")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(bytes).expect("packed");
    packer.finish().expect("packed")
}

#[test]
fn tar_is_the_same_plain_and_compressed() {
    let plain = profile(tarred(10));
    assert_eq!((plain.form, plain.files), (Form::Tar, 4), "{:?}", plain.notes);
    assert_eq!(plain.packages.len(), 1);
    assert_eq!(profile(gzip(&tarred(10))), plain);
    let zstd =
        ruzstd::encoding::compress_to_vec(&tarred(10)[..], ruzstd::encoding::CompressionLevel::Fastest);
    assert_eq!(profile(zstd), plain);
    assert!(shared_files(&plain, &profile(tarred(11))) >= 500_000.0);
}

#[test]
fn layers_of_an_oci_archive_are_looked_into() {
    let mut image = ::tar::Builder::new(Vec::new());
    let mut add = |path: &str, bytes: &[u8]| {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        image.append_data(&mut header, path, bytes).expect("packed");
    };
    add("oci-layout", b"{}");
    add("blobs/sha256/aaaa", &gzip(&tarred(10)));
    add("blobs/sha256/bbbb", b"{\"config\": 1}");
    let found = profile(image.into_inner().expect("packed"));
    assert_eq!(found.form, Form::Oci);
    assert_eq!((found.files, found.packages.len()), (6, 1), "{:?}", found.notes);
}

#[test]
fn compressed_bomb_ends_at_its_limit() {
    let mut bomb = ::tar::Builder::new(Vec::new());
    let mut header = ::tar::Header::new_gnu();
    header.set_size(200 << 20);
    let zeros = std::io::repeat(0).take(200 << 20);
    bomb.append_data(&mut header, "zeros", zeros).expect("packed");
    let packed = gzip(&bomb.into_inner().expect("packed"));
    let limits = Limits {
        expansion: 20,
        ..Limits::default()
    };
    let found = read("bomb", Rc::new(packed), &limits).expect("compared by blocks");
    assert_eq!(found.form, Form::Blocks);
    assert!(
        found.notes[0].contains("more bytes than it can hold"),
        "{:?}",
        found.notes
    );
}

#[test]
fn time_and_entries_are_bounded() {
    let no_time = Limits {
        time: Duration::ZERO,
        ..Limits::default()
    };
    let error = read("x", Rc::new(noise(1, 1 << 20)), &no_time).expect_err("no time");
    assert!(matches!(error, InputError::Limit(_)), "{error}");
    let few = Limits {
        entries: 3,
        ..Limits::default()
    };
    let found = read("x", Rc::new(tarred(10)), &few).expect("compared by blocks");
    assert!(found.notes[0].contains("too many files"), "{:?}", found.notes);
}

#[test]
fn packages_that_claim_more_than_there_can_be_are_added_up() {
    let list = |name| format!("{name} 1 18446744073709551615\n");
    let status = |name| {
        format!(
            "Package: {name}\nStatus: install ok installed\nVersion: 1\nInstalled-Size: {}\n\n",
            u64::MAX
        )
    };
    for lists in [["a", "b"].map(list), ["a", "b"].map(status)] {
        let found = profile(lists.concat().into_bytes());
        let told = (found.form, found.packages.len(), found.bytes);
        assert_eq!(told, (Form::Packages, 2, 2 << 40));
    }
}

#[test]
fn chain_of_partitions_without_an_end_ends() {
    let mut disk = with_mbr(&[(0x05, 100, 1000)], 4096);
    // The first logical partition names itself as the next.
    set_mbr(&mut disk[100 * 512..], &[(0x83, 1, 10), (0x05, 0, 10)]);
    let found = profile(disk);
    assert!(
        found.notes.iter().any(|note| note.contains("no end")),
        "{:?}",
        found.notes
    );
    let claims = with_mbr(&[(0xee, 1, 9), (0x83, u32::MAX, u32::MAX)], 64);
    assert_eq!(profile(claims).form, Form::Blocks);
}

/// Changes images at random places, mostly in their structures. Nothing panics, hangs or takes long.
#[test]
fn damaged_images_of_every_kind_are_survived() {
    let mut images = vec![qcow2(&noise(1, 300_000)), tarred(1), gzip(&tarred(1))];
    images.extend(ext4(1));
    let limits = Limits {
        time: Duration::from_secs(60),
        ..Limits::default()
    };
    for (kind, image) in images.iter().enumerate() {
        let rounds = if kind == 3 { 40 } else { 120 };
        for seed in 0..rounds {
            let mut damaged = image.clone();
            for n in 0..1 + seed % 12 {
                let random = mix(mix(seed + 1) ^ n);
                let bound = if n % 2 == 0 {
                    image.len().min(1 << 16)
                } else {
                    image.len()
                };
                damaged[(random % bound as u64) as usize] = (random >> 48) as u8;
            }
            if seed % 7 == 0 {
                damaged.truncate((mix(seed) % image.len() as u64) as usize);
            }
            match read("x", Rc::new(damaged), &limits) {
                Ok(profile) => assert!(profile.is_sound()),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}

#[test]
fn file_that_claims_more_than_the_disk_is_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, image) = (dir.path().join("root"), dir.path().join("image"));
    std::fs::create_dir(&root).expect("made");
    std::fs::write(root.join("small"), noise(1, 9000)).expect("written");
    let sparse = std::fs::File::create(root.join("huge")).expect("made");
    sparse.set_len(1 << 40).expect("sparse");
    let paths = [root.to_str().expect("text"), image.to_str().expect("text")];
    if !command("mke2fs", &["-q", "-t", "ext4", "-d", paths[0], paths[1], "8M"]) {
        eprintln!("SKIPPED: needs mke2fs");
        return;
    }
    let found = profile(std::fs::read(&image).expect("read"));
    assert_eq!(found.files, 1);
    assert!(
        found.notes.iter().any(|note| note.contains("claims")),
        "{:?}",
        found.notes
    );
}
