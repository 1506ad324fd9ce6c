//! Waits of other sessions for what the kernel above a mount was told: short once the threads that called
//! have ended or call again, and as long as ever while one that does neither may have its answer late.
#![allow(clippy::unwrap_used)]

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Instant;
use varve_embed::PoolHere;
use varve_fuse_shim::{KernelCaches, MountRequest, Mounted, check_host, mount};
use varve_ipc::{ClientKind, Cred, DENTRY_TTL_MAX};
use varve_kernelfs::pool::PoolSpec;
use varve_libfs::{Errno, Fs, FsOptions};

/// Looks, by its only thread, and stops as soon as it has looked.
const LOOKS_AND_STOPS: &str = r#"
[ -e "$1/0/file" ]
kill -STOP $$
for round in 0 1 2 3; do
    [ -e "$1/$round/new" ] && exit 9
    kill -STOP $$
    [ -e "$1/$round/new" ] || exit 8
done
"#;
/// Fewer than make a whole pool contended.
const ROUNDS: usize = 4;

/// A mounted pool, with another session beside the mount's.
struct World {
    dir: tempfile::TempDir,
    mounted: Option<Mounted>,
    above: Fs,
    beside: Fs,
    here: Option<PoolHere>,
}

/// What a failed test leaves.
impl Drop for World {
    fn drop(&mut self) {
        drop(self.mounted.take());
        if let Some(here) = self.here.take() {
            let _ = (self.above.unmount(), self.beside.unmount());
            let _ = here.stop();
        }
    }
}

/// A process that ends with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// `None`, with a word on why, where nothing can be mounted.
fn world() -> Option<World> {
    if let Err(error) = check_host(false) {
        eprintln!("SKIPPED: no FUSE mount here: {error}");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let spec = PoolSpec::parse(Some("32M"), Some("0"), Some("0")).unwrap();
    let here = PoolHere::open_or_create(&dir.path().join("pool"), &spec).unwrap();
    let at = dir.path().join("mnt");
    std::fs::create_dir(&at).unwrap();
    let caches = Arc::new(KernelCaches::new());
    let options = FsOptions {
        kind: ClientKind::Shim,
        check_permissions: false,
        observer: Some(Arc::clone(&caches) as _),
        ..FsOptions::default()
    };
    let above = Fs::mount(here.connector(), options).unwrap();
    let request = MountRequest::new(at.clone(), "varve-test");
    let mounted = Some(mount(above.clone(), caches, &request).unwrap());
    for round in 0..ROUNDS {
        let of_round = at.join(round.to_string());
        std::fs::create_dir(&of_round).unwrap();
        std::fs::write(of_round.join("file"), "x").unwrap();
    }
    let beside = here.mount().unwrap();
    // What this thread was told expires.
    std::thread::sleep(DENTRY_TTL_MAX);
    // Both may read the root from now on.
    let nothing = beside.lookup(beside.root(), b"nothing", &Cred::root());
    assert_eq!(nothing.unwrap_err(), Errno(libc::ENOENT));
    Some(World {
        dir,
        mounted,
        above,
        beside,
        here: Some(here),
    })
}

impl World {
    fn at(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// The other session makes a file in a round's directory. Returns for how long the mount's kernel may
    /// have used what it was told of that.
    fn makes(&self, round: usize) -> u64 {
        let before = self.above.counters().expiring_ms;
        let (root, name) = (Cred::root(), round.to_string());
        let dir = self.beside.lookup(self.beside.root(), name.as_bytes(), &root);
        let made = self.beside.create(dir.unwrap().key, b"new", 0o100_644, 0, &root);
        made.unwrap();
        self.above.counters().expiring_ms - before
    }

    fn end(mut self) {
        let unmounted = self.mounted.take().unwrap().unmount();
        unmounted.map_err(|(_, error)| error).unwrap();
        self.above.unmount().unwrap();
        self.beside.unmount().unwrap();
        self.here.take().unwrap().stop().unwrap();
    }
}

#[test]
fn first_change_after_a_look_by_a_process_that_has_ended_waits_less() {
    let Some(world) = world() else { return };
    let mut shortest = u64::MAX;
    for round in 0..ROUNDS {
        let dir = world.at().join(round.to_string());
        let listed = Command::new("ls").arg("-l").arg(&dir).output().unwrap();
        assert!(listed.status.success());
        let waited_ms = world.makes(round);
        println!("for {waited_ms} ms");
        if waited_ms > 0 {
            shortest = shortest.min(waited_ms);
        }
        assert!(dir.join("new").exists());
    }
    assert!(shortest < 250, "{shortest} ms: as if nothing were known of `ls`");
    world.end();
}

fn wait_until_stopped(child: &Child) {
    let pid = Pid::from_child(child);
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped(), "{status:?}");
}

#[test]
fn stopped_process_gives_no_sign_and_sees_what_was_changed_meanwhile() {
    let Some(world) = world() else { return };
    let child = Command::new("sh")
        .args(["-c", LOOKS_AND_STOPS, "sh"])
        .arg(world.at())
        .spawn();
    let mut child = Killed(child.unwrap());
    wait_until_stopped(&child.0);
    // Until the mount knows it: first looks of a process are cached by nobody beside others.
    std::thread::sleep(DENTRY_TTL_MAX);
    let mut longest = 0;
    for round in 0..ROUNDS {
        let began = Instant::now();
        kill_process(Pid::from_child(&child.0), Signal::CONT).unwrap();
        wait_until_stopped(&child.0);
        let waited_ms = world.makes(round);
        println!("for {waited_ms} ms");
        longest = longest.max(waited_ms);
        // It was told after `began`: nobody changed that for the longest time from then on.
        assert!(
            waited_ms == 0 || began.elapsed() >= DENTRY_TTL_MAX,
            "{round}: {:?}",
            began.elapsed()
        );
    }
    kill_process(Pid::from_child(&child.0), Signal::CONT).unwrap();
    assert!(longest > 0, "nothing was cached");
    let status = child.0.wait().unwrap();
    assert!(status.success(), "8: it saw what was before; {status}");
    world.end();
}
