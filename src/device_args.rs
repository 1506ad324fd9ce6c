//! The command line of `varve add-device`, `varve remove-device` and `varve replace`: options and help. No
//! behaviour.

use crate::pin_args::tier;
use clap::Args;
use std::path::PathBuf;
use varve_format::Tier;

/// Arguments of `add-device`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve add-device ./pool --tier ssd /dev/nvme1n1    a second SSD, in service at once
  varve add-device ./pool --tier hdd 64G             a sparse file in the pool's directory
  varve status ./pool                                lists the devices

New data goes to the devices of a tier in turn, in proportion to what is free on them, 1 MiB each at
the default unit of 64 MiB; what is there stays where it is. A file may lie on several devices, and
there is no redundancy: without one of them the pool is not opened. The device must be empty (its
first 1 MiB zeros), and is known by its label wherever it is attached. Its first unit holds the
label; whole units are used of the rest. It is added to varve.toml. Works while the pool is in
service, and on a pool that was stopped. A crash leaves the pool with the device or without it; the
command can be repeated then. There is one device of NVM. For root and the pool's owner.")]
pub struct AddDeviceArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// The tier that gets it: one that the pool has
    #[arg(long, value_name = "ssd|hdd", value_parser = tier)]
    pub tier: Tier,
    /// The path of a file or block device, a way to a device, or SIZE for a file in the pool
    pub device: String,
    /// Print the device as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `remove-device`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve remove-device ./pool /dev/nvme1n1            moves everything off it, and returns at once
  varve remove-device ./pool /dev/nvme1n1 --wait     returns when it is out of the pool
  varve jobs ./pool                                  how far it is, and what each byte left waits for
  varve jobs limit ./pool 3 20MiB                    at most 20 MiB a second from now on
  varve remove-device ./pool /dev/nvme1n1 --cancel   keeps it after all

The device takes no new data from here on, unless nothing else has room, and its data and metadata
move to the other devices of its tier, then to other tiers. When nothing is on it and no session can
still read what was, it is taken out for good: of varve.toml, whose comments stay, and of `varve
status`; it may be detached then. Files can be read and written all the time. It is a job: `varve
jobs` shows, pauses, resumes, bounds and cancels it, and it goes on after a restart of the daemon or a
power cut, with its limit and its pause. Refused, with figures, if the others do not take all that is
on it or their free space is promised to sessions; --partly begins all the same. A tier keeps one
device: `varve evacuate` empties a whole tier. Needs the daemon. For root and the pool's owner.")]
pub struct RemoveDeviceArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// The device: its path, the end of its path, or its UUID as `varve status` shows them
    pub device: String,
    /// Begin although the others do not take everything: the rest waits for room
    #[arg(long, conflicts_with = "cancel")]
    pub partly: bool,
    /// Wait until it is out of the pool; fails if nothing moves for a while, and says why
    #[arg(long, conflicts_with = "cancel")]
    pub wait: bool,
    /// Keep it: it takes new data again; what has moved stays where it is
    #[arg(long)]
    pub cancel: bool,
    /// Print the device as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `replace`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  varve replace ./pool /dev/sdb /dev/sdc --wait     the same as
  varve add-device ./pool --tier hdd /dev/sdc && varve remove-device ./pool /dev/sdb --wait

If the second part is refused, the new device stays in the pool. Needs the daemon.")]
pub struct ReplaceArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// The device that is to go
    pub old: String,
    /// The device that takes its place, in the same tier
    pub new: String,
    /// Wait until the old one is out of the pool
    #[arg(long)]
    pub wait: bool,
}
