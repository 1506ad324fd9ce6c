//! Locks as C programs have them: a program in C takes them by `varve.h`, and its children, plain programs,
//! on the pool's mount.
#![allow(clippy::unwrap_used)]

mod common;

use common::{compile, good};
use std::process::Command;
use std::sync::Arc;
use varve_embed::PoolHere;
use varve_fuse_shim::{KernelCaches, MountRequest, check_host, mount};
use varve_ipc::ClientKind;
use varve_kernelfs::pool::PoolSpec;
use varve_libfs::{Fs, FsOptions};

#[test]
fn program_in_c_and_its_children_on_the_mount_have_the_same_locks() {
    if let Err(error) = check_host(false) {
        eprintln!("SKIPPED: no FUSE mount here: {error}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("locks");
    if !compile("crates/capi/tests/locks.c", dir.path(), &program) {
        return;
    }
    let pool = dir.path().join("pool");
    let spec = PoolSpec::parse(Some("16M"), Some("0"), Some("0")).unwrap();
    let here = PoolHere::open_or_create(&pool, &spec).unwrap();
    let without = Command::new(&program)
        .arg(&pool)
        .env("VARVE_DEBUG", "1")
        .output()
        .unwrap();
    good(&without, "locks without a mount");
    let said = String::from_utf8_lossy(&without.stderr).into_owned();
    assert!(
        said.contains("not mounted") && said.contains("varve mount"),
        "{said}"
    );

    let at = pool.join("mnt");
    std::fs::create_dir_all(&at).unwrap();
    let caches = Arc::new(KernelCaches::new());
    let options = FsOptions {
        kind: ClientKind::Shim,
        check_permissions: false,
        observer: Some(Arc::clone(&caches) as _),
        ..FsOptions::default()
    };
    let fs = Fs::mount(here.connector(), options).unwrap();
    let request = MountRequest::new(
        at.clone(),
        format!("varve:{}", pool.canonicalize().unwrap().display()),
    );
    let mounted = mount(fs.clone(), caches, &request).unwrap();
    let output = Command::new(&program).arg(&pool).arg(&at).output();
    let unmounted = mounted.unmount().map_err(|(_, error)| error);
    good(&output.unwrap(), "locks");
    unmounted.unwrap();
    fs.unmount().unwrap();
    here.stop().unwrap();
}
