//! `varve mount` and `varve umount`.

use crate::cli::{MountArgs, UmountArgs};
use crate::out;
use crate::pool::Pool;
use crate::signals::Stop;
use anyhow::{Context, bail};
use std::sync::Arc;
use std::time::Duration;
use varve_fuse_shim::{KernelCaches, MountRequest};
use varve_ipc::ClientKind;
use varve_libfs::{Fs, FsOptions, SocketConnector};

/// `varve mount`: mounts and serves until a signal or an unmount.
pub fn mount(args: &MountArgs) -> anyhow::Result<()> {
    if args.supervised {
        crate::supervise::follow_parent()?;
    }
    let stop = Stop::install()?;
    let pool = Pool::open(&args.pool)?;
    varve_fuse_shim::check_host(args.allow_other)?;
    let caches = Arc::new(KernelCaches::new());
    let options = FsOptions {
        kind: ClientKind::Shim,
        read_only: args.read_only,
        check_permissions: false,
        sync_always: args.sync_always || pool.host().config().sync_always,
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
        allow_other: args.allow_other,
        read_only: args.read_only,
    };
    let mut mounted = varve_fuse_shim::mount(fs.clone(), caches, &request)?;
    if !args.supervised {
        out::line(&format!(
            "mounted at {}; Ctrl-C unmounts",
            args.mountpoint.display()
        ));
    }
    let mut seen = 0;
    loop {
        std::thread::sleep(Duration::from_millis(10));
        if mounted.is_finished() {
            break;
        }
        if stop.count() > seen {
            seen = stop.count();
            match mounted.unmount() {
                Ok(()) => break,
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
    if let Err(error) = fs.unmount() {
        bail!("the last changes could not be handed to the daemon: {error}");
    }
    Ok(())
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
