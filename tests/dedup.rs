//! `varve dedup`: what it finds, its JSON, its messages. No pool and no mount.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{noise, run_ok, text_of, varve};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&run_ok(command).stdout).expect("JSON")
}

fn dedup(arguments: &[&str]) -> Command {
    let mut command = varve();
    command.arg("dedup").args(arguments);
    command
}

fn write(dir: &Path, path: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Three families of three raw images.
fn images(dir: &Path) -> Vec<PathBuf> {
    let mut images = Vec::new();
    for n in 0..9u64 {
        let family = n / 3;
        let bytes = [noise(100 + family, 400_000 / 4096 * 4096), noise(200 + n, 40_000)].concat();
        images.push(write(dir, &format!("{family}{n}.img"), &bytes));
    }
    images
}

#[test]
fn estimate_says_what_would_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    let content = noise(1, 1 << 20);
    write(dir.path(), "a", &content);
    write(dir.path(), "b", &content);
    write(dir.path(), "c.tmp", &content);
    let file = std::fs::File::create(dir.path().join("hole")).unwrap();
    file.set_len(1 << 30).unwrap();
    let found = json(&mut dedup(&[
        "estimate",
        text(dir.path()),
        "--exclude",
        "*.tmp",
        "--json",
    ]));
    assert_eq!(found["files"], 3);
    for saving in found["savings"].as_array().unwrap() {
        assert_eq!(saving["sampled"], 1);
        if saving["unit"] == "files" {
            continue;
        }
        assert_eq!(
            (&saving["bytes"], &saving["saved_bytes"]),
            (&(2 << 20).into(), &f64::from(1 << 20).into())
        );
    }
    let said = text_of(&mut dedup(&["estimate", text(dir.path()), "--exclude", "*.tmp"]));
    assert!(
        said.contains("4.0 KiB blocks") && said.contains("50.0 %"),
        "{said}"
    );
}

#[test]
fn scan_lists_copies_and_reads_only_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let content = noise(1, 100 * 4096);
    write(&data, "a", &content);
    write(&data, "b", &[noise(2, 8192), content].concat());
    let state = dir.path().join("state");
    let arguments = [
        "scan",
        text(&data),
        "--state",
        text(&state),
        "--memory",
        "1M",
        "--list",
        "--json",
    ];
    let found = json(&mut dedup(&arguments));
    assert_eq!(
        (&found["files_read"], &found["duplicate_bytes"]),
        (&2.into(), &(100 * 4096).into())
    );
    let run = &found["runs"][0];
    assert_eq!(
        (&run["offset"], &run["same_offset"], &run["bytes"]),
        (&8192.into(), &0.into(), &(100 * 4096).into())
    );
    assert!(run["path"].as_str().unwrap().ends_with("/b"));
    let again = json(&mut dedup(&arguments));
    assert_eq!(
        (&again["bytes_read"], &again["files_unchanged"]),
        (&0.into(), &2.into())
    );
    assert_eq!(again["runs"], found["runs"]);
}

#[test]
fn scan_holds_to_its_rate_and_least_age() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    write(&data, "a", &noise(1, 600_000));
    let state = dir.path().join("state");
    let young = [
        "scan",
        text(&data),
        "--state",
        text(&state),
        "--min-age",
        "1h",
        "--json",
    ];
    assert_eq!(json(&mut dedup(&young))["files_too_young"], 1);
    let slow = [
        "scan",
        text(&data),
        "--state",
        text(&state),
        "--rate",
        "1M",
        "--json",
    ];
    let found = json(&mut dedup(&slow));
    assert!(found["seconds_waited"].as_f64().unwrap() > 0.2, "{found}");
    assert!(found["seconds"].as_f64().unwrap() > 0.5, "{found}");
}

#[test]
fn scan_takes_names_that_are_not_utf8_and_holes_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let content = noise(1, 50 * 4096);
    write(&data, "a", &content);
    let name = OsStr::from_bytes(b"no \xff text");
    std::fs::write(data.join(name), &content).unwrap();
    let sparse = std::fs::File::create(data.join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let state = dir.path().join("state");
    let scan = || {
        let mut scan = dedup(&["scan", "--list", "--json", "--state", text(&state)]);
        json(scan.arg(&data))
    };
    let found = scan();
    assert_eq!(found["duplicate_bytes"], 50 * 4096, "{found}");
    let path = found["runs"][0]["path"].as_str().unwrap();
    assert!(path.ends_with("no \u{fffd} text"), "{path}");
    assert_eq!(scan()["files_unchanged"], 3);
    let kept: u64 = std::fs::read_dir(&state)
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(kept < 4096, "{kept}");
}

#[test]
fn paths_that_are_not_there_are_an_error_and_forget_nothing() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "data/a", &noise(1, 9000));
    let (data, state) = (dir.path().join("data"), dir.path().join("state"));
    let dangling = dir.path().join("dangling");
    std::os::unix::fs::symlink("/nowhere", &dangling).unwrap();
    run_ok(dedup(&["scan", "--state", text(&state)]).arg(&data));
    for command in ["scan", "estimate"] {
        for paths in [vec![&dangling], vec![&data, &dangling]] {
            let mut command = dedup(&[command]);
            if command.get_args().any(|word| word == "scan") {
                command.args(["--state", text(&state)]);
            }
            let output = command.args(&paths).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
            assert!(said.contains("dangling"), "{said}");
        }
    }
    let again = json(dedup(&["scan", "--json", "--state", text(&state)]).arg(&data));
    assert_eq!(
        (&again["files_unchanged"], &again["bytes_read"]),
        (&1.into(), &0.into())
    );
}

#[test]
fn directory_of_the_user_is_no_state() {
    let dir = tempfile::tempdir().unwrap();
    let mine = write(dir.path(), "mine/sums", b"precious");
    let output = dedup(&["scan", "--state", text(mine.parent().unwrap())])
        .arg(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("is not a state") && said.contains("nothing was changed"),
        "{said}"
    );
    assert_eq!(std::fs::read(&mine).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(mine.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn images_that_are_no_files_are_named_and_the_others_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
    let image = write(dir.path(), "image", &noise(1, 9000));
    let manifest = dir.path().join("clusters");
    let mut cluster = dedup(&["cluster", "--json", "--manifest", text(&manifest)]);
    let output = cluster
        .args([&fifo, Path::new("/dev/null"), &image])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("fifo: it is neither") && said.contains("/dev/null: it is neither"),
        "{said}"
    );
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["images"], &found["images_read"]), (&1.into(), &1.into()));
    let output = dedup(&["similar", text(&fifo), "--manifest", text(&manifest)])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn cluster_groups_images_and_reads_each_once() {
    let dir = tempfile::tempdir().unwrap();
    let images = images(dir.path());
    let manifest = dir.path().join("clusters");
    let mut command = dedup(&["cluster", "--manifest", text(&manifest), "--json"]);
    let found = json(command.args(&images));
    assert_eq!((&found["images"], &found["images_read"]), (&9.into(), &9.into()));
    let clusters = found["clusters"].as_array().unwrap();
    assert_eq!(clusters.len(), 3, "{found}");
    for cluster in clusters {
        let families: Vec<_> = cluster["images"].as_array().unwrap().iter().map(family).collect();
        assert!(
            families.len() == 3 && families.iter().all(|family| *family == families[0]),
            "{found}"
        );
    }
    // Nothing has changed but one image, and one is taken out.
    std::fs::write(&images[0], noise(9, 1000)).unwrap();
    let mut command = dedup(&["cluster", "--manifest", text(&manifest), "--json"]);
    let found = json(command.args(&images).arg("--remove").arg(&images[8]));
    assert_eq!(
        (&found["images"], &found["images_read"]),
        (&9.into(), &2.into()),
        "{found}"
    );
    let said = text_of(&mut dedup(&["cluster", "--manifest", text(&manifest)]));
    assert!(said.contains("9 images in 4 clusters"), "{said}");
}

fn family(image: &Value) -> String {
    let name = Path::new(image["name"].as_str().unwrap());
    name.file_name().unwrap().to_string_lossy()[..1].to_owned()
}

#[test]
fn plan_beats_chance_and_says_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let images = images(dir.path());
    let manifest = dir.path().join("clusters");
    run_ok(dedup(&["cluster", "--manifest", text(&manifest)]).args(&images));
    let hosts = [
        "plan",
        "--manifest",
        text(&manifest),
        "--hosts",
        "3",
        "--memory",
        "1400K",
        "--json",
    ];
    let found = json(&mut dedup(&hosts));
    for group in found["groups"].as_array().unwrap() {
        let names = group["images"].as_array().unwrap();
        assert_eq!(names.len(), 3, "{found}");
    }
    let saved = found["saved_bytes"].as_f64().unwrap();
    assert!(saved > 1.3 * found["random"]["mean"].as_f64().unwrap(), "{found}");
    let waves = json(&mut dedup(&[
        "plan",
        "--manifest",
        text(&manifest),
        "--waves",
        "3",
        "--json",
    ]));
    assert_eq!(waves["saved_bytes"], found["saved_bytes"]);
    let small = [
        "plan",
        "--manifest",
        text(&manifest),
        "--hosts",
        "3",
        "--memory",
        "1M",
    ];
    let output = dedup(&small).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("give more or larger ones"), "{said}");
}

#[test]
fn similar_names_the_nearest_and_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let image = |name: &str, version: &str| {
        let root = dir.path().join(name);
        let status = format!(
            "Package: ssl\nStatus: install ok installed\nInstalled-Size: 100\nVersion: {version}\n\n\
             Package: libc\nStatus: install ok installed\nInstalled-Size: 1000\nVersion: 2.41\n"
        );
        write(&root, "var/lib/dpkg/status", status.as_bytes());
        write(&root, "usr/lib/libc.so", &noise(1, 100_000));
        write(&root, "etc/ssl/conf", version.as_bytes());
        root
    };
    let (good, bad) = (image("good", "3.0"), image("bad", "3.1"));
    let manifest = dir.path().join("clusters");
    run_ok(dedup(&["cluster", "--weigh", "packages", "--manifest", text(&manifest)]).arg(&good));
    let found = json(&mut dedup(&[
        "similar",
        text(&bad),
        "--manifest",
        text(&manifest),
        "--json",
    ]));
    assert_eq!(found["nearest"][0]["name"], text(&good));
    assert_eq!(found["difference"]["versions"][0]["there"], "3.0");
    let areas = found["difference"]["areas"].as_array().unwrap();
    let paths: Vec<_> = areas.iter().map(|area| area["path"].as_str().unwrap()).collect();
    assert!(paths.contains(&"etc/ssl") && !paths.contains(&"usr"), "{found}");
}

#[test]
fn images_of_every_form_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    write(&root, "usr/bin/tool", &noise(1, 300_000));
    write(&root, "lib/apk/db/installed", b"C:Q1x=\nP:musl\nV:1.2\nI:1000\n");
    let list = write(dir.path(), "list", b"bash 5.2-3 x86_64 8154789\n");
    let tar = dir.path().join("root.tar");
    run_ok(
        Command::new("tar")
            .arg("-C")
            .arg(&root)
            .arg("-cf")
            .arg(&tar)
            .arg("."),
    );
    // An OCI layout whose one layer is that archive.
    let oci = dir.path().join("oci");
    let digest = |c: &str| format!("sha256:{}", c.repeat(64));
    write(&oci, "oci-layout", b"{\"imageLayoutVersion\":\"1.0.0\"}");
    write(
        &oci,
        "index.json",
        format!("{{\"manifests\":[{{\"digest\":\"{}\"}}]}}", digest("a")).as_bytes(),
    );
    let layers = format!("{{\"layers\":[{{\"digest\":\"{}\"}}]}}", digest("b"));
    write(
        &oci,
        &format!("blobs/sha256/{}", "a".repeat(64)),
        layers.as_bytes(),
    );
    write(
        &oci,
        &format!("blobs/sha256/{}", "b".repeat(64)),
        &std::fs::read(&tar).unwrap(),
    );
    let broken = write(
        dir.path(),
        "broken.qcow2",
        &[b"QFI\xfb".as_slice(), &noise(3, 50_000)].concat(),
    );
    let manifest = dir.path().join("clusters");
    let mut command = dedup(&[
        "cluster",
        "--weigh",
        "files",
        "--json",
        "--manifest",
        text(&manifest),
    ]);
    let found = json(command.args([&root, &list, &tar, &oci, &broken]));
    let clusters = found["clusters"].as_array().unwrap();
    let all: Vec<&Value> = clusters
        .iter()
        .flat_map(|cluster| cluster["images"].as_array().unwrap())
        .collect();
    let form = |path: &Path| all.iter().find(|image| image["name"] == text(path)).unwrap()["form"].clone();
    let forms = [&root, &list, &tar, &oci, &broken].map(|path| form(path));
    assert_eq!(
        forms,
        ["directory", "packages", "tar", "oci", "blocks"],
        "{found}"
    );
    let together = clusters
        .iter()
        .find(|cluster| cluster["images"].as_array().unwrap().len() == 3);
    assert!(
        together.is_some(),
        "the same files in three forms are one cluster: {found}"
    );
}

#[test]
fn mistakes_are_told_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none");
    let said = |arguments: &[&str], code: i32| {
        let output = dedup(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(said(&["cluster", "--manifest", text(&none)], 2).contains("name images"));
    assert!(
        said(&["plan", "--manifest", text(&none), "--waves", "2"], 1).contains("cannot read the manifest")
    );
    assert!(said(&["estimate", text(&none)], 1).contains("nothing could be read"));
    assert!(said(&["estimate", text(dir.path()), "--include", "["], 2).contains("--include"));
    assert!(said(&["plan", "--manifest", text(&none), "--hosts", "2"], 2).contains("--memory"));
    let other = write(dir.path(), "other", b"no manifest");
    assert!(said(&["cluster", "--manifest", text(&other)], 1).contains("not a cluster manifest"));
    let missing = said(
        &["cluster", text(&none), "--manifest", text(&dir.path().join("m"))],
        1,
    );
    assert!(missing.contains("could not be read"), "{missing}");
    let m = text(&none);
    for (arguments, word) in [
        (&["estimate", m, "--rate", "0"][..], "--rate"),
        (&["estimate", m, "--memory", "1"], "--memory"),
        (&["scan", m, "--state", m, "--memory", "1023K"], "--memory"),
        (&["similar", m, "--manifest", m, "--count", "0"], "--count"),
    ] {
        assert!(said(arguments, 2).contains(word), "{arguments:?}");
    }
    let image = write(dir.path(), "image", &noise(1, 1 << 20));
    let small = said(
        &["cluster", text(&image), "--image-memory", "1", "--manifest", m],
        1,
    );
    assert!(
        small.contains("raise --image-memory") && !small.contains("signal"),
        "{small}"
    );
    for command in ["estimate", "scan", "cluster", "plan", "similar"] {
        let help = text_of(&mut dedup(&[command, "--help"]));
        assert!(help.contains("varve dedup") && help.contains("--json"), "{help}");
    }
}
