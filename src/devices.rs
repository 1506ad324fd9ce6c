//! `varve add-device`, `varve remove-device` and `varve replace`: devices of SSD and HDD.

use crate::device_args::{AddDeviceArgs, RemoveDeviceArgs, ReplaceArgs};
use crate::jobs::{ask, not_mine};
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};
use varve_format::Tier;
use varve_ipc::{Admin, RemovalAct};
use varve_kernelfs::pool::size::show;
use varve_kernelfs::pool::{TOML, explain};
use varve_kernelfs::{DeviceAsked, Status, TierDevice};
use varve_store::{OpenOptions, Store};

/// How long `--wait` waits while nothing moves.
const STUCK_LIMIT: Duration = Duration::from_secs(30);
/// How long the daemon may take to write the pool's settings.
const SETTINGS_LIMIT: Duration = Duration::from_secs(3);

/// `varve add-device`.
pub fn add(args: &AddDeviceArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    let name = add_to(&pool, args.tier, &args.device)?;
    if args.json {
        let added = json!({ "tier": args.tier.name(), "device": name });
        out::line(&format!("{added:#}"));
    } else {
        out::line(&format!(
            "{name} is a device of the {} tier now",
            args.tier.name()
        ));
    }
    Ok(())
}

/// A path as the daemon understands it, whose working directory is another one.
fn whole(device: &str) -> String {
    let path = Path::new(device);
    let is_path = device.contains('/') && !device.contains(':');
    match is_path.then(|| path.canonicalize()) {
        Some(Ok(whole)) => whole.to_string_lossy().into_owned(),
        _ => device.to_owned(),
    }
}

/// Adds a device to a pool, in service or not; returns its name.
fn add_to(pool: &Pool, tier: Tier, device: &str) -> anyhow::Result<String> {
    if tier == Tier::Nvm {
        bail!("a pool has one device of NVM: it holds the journal and the tables of all others");
    }
    let device = whole(device);
    if pool.has_daemon() {
        let asked =
            ask(pool, Admin::AddDevice { tier, device }).map_err(|error| not_mine(error, pool.dir()))?;
        return match asked {
            DeviceAsked::Done(device) => Ok(device.name),
            DeviceAsked::Refused(why) => bail!(why),
            DeviceAsked::NoRoom { .. } => bail!("the daemon's answer is not what was expected"),
        };
    }
    let host = pool.host();
    host.check_owner()?;
    let _lock = host.lock()?;
    let (store, _) =
        Store::open(host.devices()?, OpenOptions::default()).map_err(|error| explain(host, error))?;
    if !store.sessions()?.is_empty() {
        let dir = pool.dir().display();
        bail!(
            "the daemon of {dir} did not end in order, and programs may still read the pool: start \
             it (`varve up {dir}`), and add the device while it runs"
        );
    }
    let name = varve_kernelfs::pool::add_device(host, &store, tier, &device)?;
    store.checkpoint()?;
    Ok(name)
}

/// `varve remove-device`.
pub fn remove(args: &RemoveDeviceArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    if args.cancel {
        let device = act(&pool, &args.device, RemovalAct::Cancel)?;
        return show_device(
            &device,
            args.json,
            &format!("{} stays: it takes new data again", device.name),
        );
    }
    let partly = args.partly;
    let device = act(&pool, &args.device, RemovalAct::Begin { partly })?;
    let dir = pool.dir().display();
    if args.wait {
        wait(&pool, &device)?;
        let mut text = format!("{} is out of the pool and may be detached", device.name);
        if let Some(still) = named_still(&pool, &device) {
            text.push_str(&still);
        }
        return show_device(&device, args.json, &text);
    }
    let job = device.job.map(|job| format!("job {job}: ")).unwrap_or_default();
    let text = format!(
        "{job}moving {} off {}; `varve jobs {dir}` shows it until it is out of the pool",
        show(device.used_bytes),
        device.name
    );
    show_device(&device, args.json, &text)
}

fn show_device(device: &TierDevice, as_json: bool, text: &str) -> anyhow::Result<()> {
    match as_json {
        true => out::line(&format!("{:#}", json!(device))),
        false => out::line(text),
    }
    Ok(())
}

fn act(pool: &Pool, device: &str, act: RemovalAct) -> anyhow::Result<TierDevice> {
    let whole = whole(device);
    let asked = Admin::RemoveDevice { device: whole, act };
    match ask(pool, asked).map_err(|error| not_mine(error, pool.dir()))? {
        DeviceAsked::Done(device) => Ok(device),
        DeviceAsked::Refused(why) => bail!(why),
        DeviceAsked::NoRoom {
            used_bytes,
            room_bytes,
        } => bail!(
            "{device} holds {}, and the other devices take {} more, of what is promised to nobody \
             and below the high mark: delete files, add a device, or begin all the same with --partly; nothing was changed",
            show(used_bytes),
            show(room_bytes)
        ),
    }
}

/// The devices of a pool in service.
fn devices(pool: &Pool) -> anyhow::Result<Vec<TierDevice>> {
    let status: Status = ask(pool, Admin::Status).map_err(|error| not_mine(error, pool.dir()))?;
    Ok(status.devices)
}

/// Waits until a device is out of the pool.
fn wait(pool: &Pool, device: &TierDevice) -> anyhow::Result<()> {
    let _progress = out::Progress::start("moving");
    let (mut before, mut moved) = (None, Instant::now());
    loop {
        let now = devices(pool)?;
        let same = |other: &&TierDevice| other.name == device.name && other.uuid == device.uuid;
        let Some(found) = now.iter().find(same) else {
            return Ok(());
        };
        if found.state == "in use" {
            bail!("it was cancelled meanwhile");
        }
        let figures = (found.used_bytes, found.pending_bytes);
        if before.replace(figures) != Some(figures) {
            moved = Instant::now();
        } else if moved.elapsed() >= STUCK_LIMIT {
            let sessions = "sessions may still read what was on it".to_owned();
            let why = found.why.clone().unwrap_or(sessions);
            bail!(
                "{} are left on {}: {why}; it goes on when it can",
                show(found.used_bytes + found.pending_bytes),
                found.name
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What to change in the pool's settings by hand, if they still name a device that was taken out: the daemon
/// takes it out of them, if it can.
fn named_still(pool: &Pool, device: &TierDevice) -> Option<String> {
    let tier = tier_of(device);
    let from = Instant::now();
    loop {
        let (number, line, name) = pool.host().named_still(tier, &device.name)?;
        if from.elapsed() >= SETTINGS_LIMIT {
            let toml = pool.dir().join(TOML);
            let what = match pool.host().spec().first(tier).to_string() == name {
                true => "write \"0\" in place of",
                false => "delete",
            };
            return Some(match number {
                0 => format!("; {} still names it: {what} {name:?} there", toml.display()),
                _ => format!(
                    "; line {number} of {} still names it: {what} {name:?} in `{line}`",
                    toml.display()
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn tier_of(device: &TierDevice) -> Tier {
    match device.tier.as_str() {
        "hdd" => Tier::Hdd,
        _ => Tier::Ssd,
    }
}

/// `varve replace`.
pub fn replace(args: &ReplaceArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    let old = whole(&args.old);
    let listed = devices(&pool)?;
    let is_it = |device: &&TierDevice| {
        let file = Path::new(&device.name).file_name();
        device.name == old
            || file.is_some_and(|file| file == args.old.as_str())
            || device
                .uuid
                .as_ref()
                .is_some_and(|uuid| uuid.starts_with(&args.old))
    };
    let found = listed.iter().find(is_it).with_context(|| {
        let dir = pool.dir().display();
        format!(
            "the pool has no device {}: `varve status {dir}` lists them",
            args.old
        )
    })?;
    let tier = tier_of(found);
    let new = add_to(&pool, tier, &args.new)?;
    out::line(&format!("{new} is a device of the {} tier now", tier.name()));
    let remove_args = RemoveDeviceArgs {
        pool: args.pool.clone(),
        device: found.name.clone(),
        partly: false,
        wait: args.wait,
        cancel: false,
        json: false,
    };
    remove(&remove_args)
}
