//! `varve debug session`: a running daemon's state of one session.

use crate::observe::Look;
use crate::out;
use crate::pool::Pool;
use crate::top::describe;
use anyhow::{Context, bail};
use serde_json::Value;
use std::path::Path;
use varve_ipc::Admin;
use varve_kernelfs::SessionDetail;
use varve_kernelfs::pool::size::show;

/// Prints a session.
pub fn print(at: &Path, id: u64, as_json: bool) -> anyhow::Result<()> {
    let pool = Pool::open(at)?;
    let look = Look::at(&pool)?;
    if !look.status.sessions.iter().any(|session| session.id == id) {
        let there: Vec<_> = look
            .status
            .sessions
            .iter()
            .map(|session| session.id.to_string())
            .collect();
        bail!(
            "there is no session {id} of {}; there are: {}",
            pool.dir().display(),
            if there.is_empty() {
                "none".into()
            } else {
                there.join(", ")
            }
        );
    }
    let json = pool.ask(Admin::Session(id))?;
    let value: Value = serde_json::from_str(&json).context("the daemon's answer is not JSON")?;
    if as_json {
        out::line(&format!("{value:#}"));
        return Ok(());
    }
    let detail: SessionDetail = serde_json::from_value(value).context("the daemon is of another version")?;
    out::line(text(&look, &detail).trim_end());
    Ok(())
}

fn text(look: &Look, detail: &SessionDetail) -> String {
    let session = &detail.session;
    let mut lines = vec![
        format!(
            "{}  pid {}, uid {}, {}, {}{}{}",
            look.session_name(session.id),
            session.pid,
            session.uid,
            session.kind,
            session.state,
            if session.read_only { ", read-only" } else { "" },
            if detail.privileged {
                ", reads NVM by itself"
            } else {
                ""
            }
        ),
        format!(
            "opened   {}.{:03} s after 1970",
            detail.created_ns / 1_000_000_000,
            detail.created_ns / 1_000_000 % 1000
        ),
        format!(
            "log      {}, {} not digested; digested to entry {}",
            show(session.log_bytes),
            session.log_used_bytes.map_or("…".into(), show),
            session.digested
        ),
        format!(
            "holds    {} inodes kept alive, {} blocks reserved, {} messages not taken, {} moves of blocks \
            not answered",
            session.holds, session.credits, detail.upcalls, detail.barriers
        ),
        format!("leases   {} ({} asked back)", session.leases, session.asked_back),
    ];
    for lease in &detail.leases {
        lines.push(format!(
            "         {:<8} inode {:<10} {:<5} {}{}{}",
            lease.lease,
            lease.inode,
            lease.holder.mode,
            lease.holder.state,
            lease
                .holder
                .asked_ms
                .map_or(String::new(), |ms| format!(" {ms} ms ago")),
            if lease.awaited { ", others wait for it" } else { "" }
        ));
    }
    if session.leases > detail.leases.len() as u64 {
        lines.push(format!(
            "         and {} more",
            session.leases - detail.leases.len() as u64
        ));
    }
    lines.extend(
        detail
            .waiting
            .iter()
            .map(|wait| format!("waits    {}", describe(look, wait))),
    );
    lines.extend(
        detail
            .awaited
            .iter()
            .map(|wait| format!("awaited  {}", describe(look, wait))),
    );
    lines.join("\n")
}
