//! `varve mount` and `varve umount`.

use crate::cli::{MountArgs, UmountArgs};
use crate::mount_options::MountOptions;
use crate::out;
use crate::pool::Pool;
use crate::signals::Stop;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use varve_fuse_shim::{KernelCaches, MountFlags, MountRequest, Mounted};
use varve_ipc::ClientKind;
use varve_kernelfs::AtimeSetting;
use varve_libfs::mounts::Table;
use varve_libfs::{AtimePolicy, Fs, FsOptions, SocketConnector};

/// `varve mount`: mounts and serves until a signal or an unmount.
pub fn mount(args: &MountArgs) -> anyhow::Result<()> {
    if args.supervised {
        crate::supervise::follow_parent()?;
    }
    let stop = Stop::install()?;
    let pool = Pool::open(&args.pool)?;
    let mut wanted = args.options.unwrap_or(MountOptions::NONE);
    if wanted.flags.contains(MountFlags::STRICTATIME) && !rustix::process::geteuid().is_root() {
        bail!("only root's mounts have `strictatime`: fusermount3 does not know it");
    }
    if wanted.atime().is_none() {
        wanted.set_atime(flag(pool.host().config().atime));
    }
    let allow_other = wanted.allow_other.unwrap_or(args.allow_other);
    varve_fuse_shim::check_host(allow_other)?;
    let atime = AtimePolicy::new(wanted.atime().unwrap_or_default());
    let caches = Arc::new(KernelCaches::new());
    let read_only = args.read_only || wanted.read_only;
    let options = FsOptions {
        kind: ClientKind::Shim,
        read_only: args.read_only || wanted.read_only && !args.remountable,
        check_permissions: false,
        sync_always: args.sync_always || wanted.sync || pool.host().config().sync_always,
        atime: atime.clone(),
        observer: Some(Arc::clone(&caches) as _),
        ..FsOptions::default()
    };
    pool.require_daemon()?;
    let connector = Arc::new(SocketConnector { path: pool.socket() });
    let fs = Fs::mount(connector, options).with_context(|| {
        format!(
            "cannot open a session with the daemon of {}",
            pool.dir().display()
        )
    })?;
    let request = MountRequest {
        mountpoint: args.mountpoint.clone(),
        source: format!("varve:{}", pool.dir().display()),
        allow_other,
        read_only,
        flags: wanted.flags,
        uring: !wanted.no_uring,
    };
    let mounted = varve_fuse_shim::mount(fs.clone(), caches, &request)?;
    if !args.supervised {
        out::line(&format!(
            "mounted at {}; Ctrl-C unmounts",
            args.mountpoint.display()
        ));
    }
    // Kept until the session has ended.
    let _finished = serve(args, mounted, &stop, atime);
    if let Err(error) = fs.unmount() {
        bail!("the last changes could not be handed to the daemon: {error}");
    }
    Ok(())
}

/// Serves until a signal unmounts the mount, or until it is unmounted otherwise; in that case returns the
/// ended mount, which the caller drops after the session.
fn serve(args: &MountArgs, mut mounted: Mounted, stop: &Stop, atime: AtimePolicy) -> Option<Mounted> {
    let mut flags = Flags::of(&args.mountpoint, atime);
    let mut seen = 0;
    loop {
        std::thread::sleep(Duration::from_millis(10));
        if mounted.is_finished() {
            return Some(mounted);
        }
        flags.follow();
        if stop.count() > seen {
            seen = stop.count();
            match mounted.unmount() {
                Ok(()) => return None,
                Err((still, error)) => {
                    mounted = still;
                    if !args.supervised {
                        out::note(&format!(
                            "varve: {} cannot be unmounted yet: {error}",
                            args.mountpoint.display()
                        ));
                    }
                }
            }
        }
    }
}

/// Returns the mount flag for a setting.
const fn flag(atime: AtimeSetting) -> MountFlags {
    match atime {
        AtimeSetting::Relatime => MountFlags::RELATIME,
        AtimeSetting::Noatime => MountFlags::NOATIME,
        AtimeSetting::Strictatime => MountFlags::STRICTATIME,
    }
}

/// The flags of this mount in the kernel. `mount -o remount` changes them without notice to the server.
struct Flags {
    /// `None`: the table cannot be read, and the flags stay as they were at the start.
    table: Option<Table>,
    at: PathBuf,
    atime: AtimePolicy,
}

impl Flags {
    fn of(mountpoint: &Path, atime: AtimePolicy) -> Self {
        let at = crate::mounted::absolute(mountpoint).unwrap_or_else(|_| mountpoint.to_owned());
        let table = Table::open().ok();
        let mut flags = Self { table, at, atime };
        flags.read();
        flags
    }

    /// Reads the flags again if any mount of this machine has changed.
    fn follow(&mut self) {
        if self.table.as_ref().is_some_and(Table::has_changed) {
            self.read();
        }
    }

    fn read(&mut self) {
        let mounts = self.table.as_mut().and_then(|table| table.read().ok());
        let mounts = mounts.unwrap_or_default();
        if let Some(mounted) = mounts.iter().rfind(|mounted| mounted.at == self.at) {
            self.atime.set(mounted.atime);
        }
    }
}

/// `varve umount`.
pub fn umount(args: &UmountArgs) -> anyhow::Result<()> {
    if args.force {
        return crate::up::detach_mount(&args.mountpoint)
            .with_context(|| format!("cannot unmount {}", args.mountpoint.display()));
    }
    match rustix::mount::unmount(&args.mountpoint, rustix::mount::UnmountFlags::empty()) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            let output = std::process::Command::new("fusermount3")
                .args(["-u", "--"])
                .arg(&args.mountpoint)
                .output();
            match output {
                Ok(output) if output.status.success() => Ok(()),
                Ok(output) => bail!("{}", String::from_utf8_lossy(&output.stderr).trim()),
                Err(error) => bail!("only root can unmount without fusermount3 ({error})"),
            }
        }
        Err(rustix::io::Errno::BUSY) => {
            bail!(
                "{} is in use; end what uses it, or detach it with --force",
                args.mountpoint.display()
            )
        }
        Err(rustix::io::Errno::INVAL) => bail!("{} is not a mount", args.mountpoint.display()),
        Err(error) => bail!("cannot unmount {}: {error}", args.mountpoint.display()),
    }
}
